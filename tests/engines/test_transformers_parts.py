"""What the transformers engine is made of, without a model: text that is never split, and how batches are composed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.engines.base import JsonFormat, PromptError, Sampling, Tools
from scheduler.engines.transformers.text import TextStream

pytestmark = pytest.mark.model


def decode(ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes."""
    return bytes(ids).decode(errors="replace")


def tell(text: str, stops: Sequence[str] = ()) -> tuple[list[str], bool]:
    """The pieces that a stream shows for the bytes of a text, its rest included, and whether a stop string ended it."""
    stream = TextStream(decode, stops)
    pieces = []
    for byte in text.encode():
        shown, stopped = stream.push(byte)
        pieces.append(shown)
        if stopped:
            return pieces, True
    return [*pieces, stream.rest()], False


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_the_pieces_of_a_text_are_the_text_and_no_character_is_split(text: str) -> None:
    """Whole characters only, nothing lost, nothing twice."""
    pieces, stopped = tell(text)
    assert "".join(pieces) == text
    assert not stopped
    assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None, max_examples=300)
@given(st.text("ab漢"), st.lists(st.text("ab漢", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_text_is_shown_up_to_its_first_stop_string(text: str, stops: list[str]) -> None:
    """The first stop string to be complete ends the text where it begins; none of it is ever shown."""
    pieces, stopped = tell(text, stops)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    if not ends:
        assert "".join(pieces) == text
        return
    complete = [stop for stop in stops if stop in text[: min(ends)]]
    assert "".join(pieces) == text[: min(text.find(stop) for stop in complete)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 500), max_size=20), st.floats(0.0, 0.9))
def test_no_batch_has_more_padding_than_its_share(lengths: list[int], most: float) -> None:
    """Every request is in one batch; padding over computed prompt tokens stays within the option."""
    # Not at the top: they import torch, and whoever only collects tests need not wait for it.
    from scheduler.engines.transformers.batch import Row, compose
    from scheduler.engines.transformers.sampling import Picker, SamplingDefaults

    picker = Picker(Sampling(), SamplingDefaults())
    rows = [Row(str(n), [0] * length, picker) for n, length in enumerate(lengths)]
    batches = compose(rows, most)
    assert sorted(row.id for batch in batches for row in batch) == sorted(row.id for row in rows)
    for batch in batches:
        computed = len(batch) * max(len(row.prompt) for row in batch)
        padding = computed - sum(len(row.prompt) for row in batch)
        assert padding <= most * computed + 1e-6


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (Sampling(n=2), "n"),
        (Sampling(logprobs=0), "logprobs"),
        (Sampling(format=JsonFormat()), "response_format"),
        (Sampling(tools=Tools("[]")), "tools"),
    ],
)
def test_what_the_engine_does_not_know_is_refused_by_name(sampling: Sampling, param: str) -> None:
    from scheduler.engines.transformers.sampling import check_sampling

    with pytest.raises(PromptError) as refused:
        check_sampling(sampling, 100)
    assert refused.value.param == param
