"""What the simulated engine says: where answers end and what stop strings hide."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from scheduler.engines.base import Sampling
from scheduler.engines.simulated.machine import End
from scheduler.engines.simulated.script import Answer, Simulate, Teller, compose


def told(answer: Answer) -> tuple[list[str], str]:
    """The deltas of a whole answer, and what its end releases."""
    teller = Teller(answer)
    deltas = [teller.next() for _ in range(answer.tokens)]
    return deltas, teller.rest()


def test_an_answer_goes_on_to_max_tokens_by_itself() -> None:
    answer = compose(Sampling(max_tokens=3), Simulate())
    assert (answer.tokens, answer.end) == (3, End.LENGTH)
    assert told(answer) == (["w0", " w1", " w2"], "")


def test_tokens_end_an_answer_unless_max_tokens_is_less() -> None:
    assert compose(Sampling(max_tokens=5), Simulate(tokens=5)) == Answer(5, End.STOP)
    assert compose(Sampling(max_tokens=4), Simulate(tokens=5)) == Answer(4, End.LENGTH)


def test_text_ends_with_its_last_delta_or_with_tokens() -> None:
    simulate = Simulate(text=("a", "b", "c"))
    assert compose(Sampling(max_tokens=9), simulate).tokens == 3
    assert compose(Sampling(max_tokens=9), Simulate(text=("a", "b", "c"), tokens=2)).tokens == 2
    assert compose(Sampling(max_tokens=9), Simulate(text=("a",), tokens=2)).tokens == 1


def test_the_earliest_fault_comes_and_one_after_the_end_does_not() -> None:
    sampling = Sampling(max_tokens=9)
    assert compose(sampling, Simulate(fail_at=5, hang_at=3)).end is End.HANG
    assert compose(sampling, Simulate(fail_at=3, hang_at=3, oom_at=3, crash_at=3)).end is End.CRASH
    assert compose(sampling, Simulate(tokens=2, fail_at=3)).end is End.STOP
    assert compose(sampling, Simulate(tokens=2, fail_at=2)) == Answer(2, End.FAIL)


def test_a_stop_string_across_tokens_is_held_back_and_never_shown() -> None:
    answer = compose(Sampling(max_tokens=20, stop=("2 w3 w",)), Simulate())
    deltas, rest = told(answer)
    assert "".join(deltas) + rest == "w0 w1 w"
    assert (answer.tokens, answer.end) == (5, End.STOP)


def test_text_that_only_began_like_a_stop_string_is_shown_at_the_end() -> None:
    deltas, rest = told(compose(Sampling(max_tokens=2, stop=(" w1 w2",)), Simulate()))
    assert "".join(deltas) + rest == "w0 w1"
    assert rest == "w0 w1"[-5:]


def test_the_earliest_of_several_stop_strings_ends_the_text() -> None:
    answer = compose(Sampling(max_tokens=9, stop=("three", "two", "")), Simulate(text=("one ", "two three", " four")))
    assert "".join(told(answer)[0]) + told(answer)[1] == "one "


@given(
    st.lists(st.text(alphabet="ab漢", max_size=4), min_size=1, max_size=12),
    st.lists(st.text(alphabet="ab漢", min_size=1, max_size=4), max_size=3),
)
def test_what_is_told_is_the_text_before_the_first_stop_string(texts: list[str], stops: list[str]) -> None:
    """Shown text = the text up to the first token that completes a stop string, cut where the earliest one begins;
    at no time has more been shown than that."""
    answer = compose(Sampling(max_tokens=len(texts), stop=tuple(stops)), Simulate(text=tuple(texts)))
    whole = ""
    expected = "".join(texts)
    for text in texts:
        whole += text
        found = [whole.index(stop) for stop in stops if stop in whole]
        if found:
            expected = whole[: min(found)]
            break
    deltas, rest = told(answer)
    assert "".join(deltas) + rest == expected
    assert expected.startswith("".join(deltas))
