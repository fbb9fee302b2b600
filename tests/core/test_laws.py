"""The properties of the suite are tried alike every time; `make test-laws` looks further."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.laws import laws


def tried(profile: str) -> list[int]:
    """The examples that a property sees under `profile`."""
    seen: list[int] = []

    @settings(settings.get_profile(profile), max_examples=30, database=None)
    @example(-77)
    @given(st.integers())
    def law(number: int) -> None:
        seen.append(number)

    law()
    return seen


def test_the_suite_tries_the_same_examples_every_time_and_those_that_are_given_first() -> None:
    first = tried("harness")
    assert first[0] == -77
    assert len(first) > 20
    assert tried("harness") == first


def test_the_long_form_tries_others_each_time_and_those_that_are_given_as_well() -> None:
    first, second = tried("laws"), tried("laws")
    assert first[0] == second[0] == -77
    assert first != second


def test_the_long_form_tries_ten_times_as_many() -> None:
    current = settings.get_current_profile_name()
    try:
        settings.load_profile("harness")
        assert laws(40).max_examples == 40
        settings.load_profile("laws")
        assert laws(40).max_examples == 400
        assert settings().max_examples == 1000
    finally:
        settings.load_profile(current)
