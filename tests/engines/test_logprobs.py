"""Log-probabilities go out with the text of their tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.engines.base import LikelyToken, Sampling, TokenLogprob
from scheduler.engines.logprobs import LogprobTail
from scheduler.engines.simulated.script import Simulate, Teller, compose
from scheduler.engines.vllm_answers import byte_table


def token(text: str) -> TokenLogprob:
    return TokenLogprob(LikelyToken(text, -1.0))


def test_without_stop_strings_nothing_is_held() -> None:
    tail = LogprobTail(holds=False)
    assert tail.told([token("a"), token("b")], "") == (token("a"), token("b"))
    assert tail.rest("", cut=False) == ()


@given(
    st.lists(st.text(alphabet="ab漢", min_size=1, max_size=4), min_size=1, max_size=12),
    st.lists(st.text(alphabet="ab漢", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_no_token_is_told_whose_text_is_not(texts: list[str], stops: list[str]) -> None:
    """At no time do the tokens reach beyond the text that is shown, and in the end all of it has its tokens."""
    answer = compose(Sampling(max_tokens=len(texts), stop=tuple(stops)), Simulate(text=tuple(texts)))
    teller, tail = Teller(answer), LogprobTail(holds=True)
    shown, tokens = "", ""
    for index in range(answer.tokens):
        delta = teller.next()
        shown += delta
        tokens += "".join(one.chosen.token for one in tail.told([token(texts[index])], delta))
        assert shown.startswith(tokens)
    rest = teller.rest()
    last = tail.rest(rest, cut=answer.cut is not None)
    shown, before = shown + rest, tokens + "".join(one.chosen.token for one in last[:-1])
    assert (tokens + "".join(one.chosen.token for one in last)).startswith(shown)
    assert len(before) < len(shown) or not last


def test_an_answer_that_no_stop_string_cuts_keeps_all_its_tokens() -> None:
    """Also where parts of characters have other lengths than the text that they make."""
    tail = LogprobTail(holds=True)
    parts = [token("\ufffd"), token("\ufffd"), token("漢")]
    told = [*tail.told(parts[:2], ""), *tail.told(parts[2:], "漢")]
    assert [*told, *tail.rest("", cut=False)] == parts


def test_byte_level_vocabularies_write_every_byte_in_one_letter() -> None:
    table = byte_table()
    assert sorted(table.values()) == list(range(256))
    assert (table["A"], table["Ġ"], table["Ċ"], table["Ã"], table["©"]) == (0x41, 0x20, 0x0A, 0xC3, 0xA9)
