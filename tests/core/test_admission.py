from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.admission import Admission
from scheduler.core.types import Limit, Reason
from tests.laws import laws


def limit(kind: str, value: int, *, scope: str = "tenant", owner: str = "t1", model: str = "") -> Limit:
    return Limit(scope, owner, model, kind, value)


def test_a_rate_refuses_what_exceeds_it_and_says_when_to_come_back() -> None:
    admission = Admission()
    limits = [limit("rpm", 2)]
    assert admission.reserve("a", limits, "m", 10, 0.0) is None
    assert admission.reserve("b", limits, "m", 10, 30.0) is None
    refusal = admission.reserve("c", limits, "m", 10, 31.0)
    assert refusal is not None
    assert refusal.reason is Reason.LIMIT_RPM
    assert refusal.retry_after is not None
    assert admission.reserve("c", limits, "m", 10, 31.0 + refusal.retry_after - 0.01) is not None
    assert admission.reserve("c", limits, "m", 10, 31.0 + refusal.retry_after + 0.001) is None


def test_fr_013_no_border_of_a_minute_lets_twice_the_limit_through() -> None:
    """FR-013 a: ten at 12:00:59.5 are all there is until a minute after them."""
    admission = Admission()
    limits = [limit("rpm", 10)]
    assert all(admission.reserve(f"a{n}", limits, "m", 1, 59.5) is None for n in range(10))
    refused = [admission.reserve(f"b{n}", limits, "m", 1, 60.5) for n in range(10)]
    assert all(one is not None and one.retry_after is not None and 58 <= one.retry_after <= 61 for one in refused)
    assert admission.reserve("c", limits, "m", 1, 59.5 + 62) is None


def test_fr_013_requests_and_tokens_are_two_counters() -> None:
    """FR-013 b, c: a steady 100 requests and 120,000 tokens a minute stay below 500 and 200,000; a burst is over in a
    minute."""
    admission = Admission()
    limits = [limit("rpm", 500), limit("tpm", 200_000)]

    def load(start: float, minutes: int) -> list[bool]:
        """Whether each request of a minute's load was admitted, and settled at once."""
        admitted = []
        for number in range(100 * minutes):
            now = start + number * 0.6
            admitted.append(admission.reserve(f"{start}-{number}", limits, "m", 1200, now) is None)
            admission.settle(f"{start}-{number}", 1200, now)
        return admitted

    assert all(load(0.0, 10))
    burst = [admission.reserve(f"burst{n}", limits, "m", 1200, 600.0) is None for n in range(100)]
    assert burst.count(True) < 100
    assert all(load(600.0 + 62, 3))


def test_a_refused_request_holds_nothing() -> None:
    admission = Admission()
    limits = [limit("rpm", 10), limit("tpm", 100), limit("concurrency", 1)]
    assert admission.reserve("a", limits, "m", 50, 0.0) is None
    assert admission.reserve("b", limits, "m", 20, 0.0) is not None
    admission.settle("a", 50, 1.0)
    assert admission.reserve("c", limits, "m", 50, 1.0) is None
    assert admission.headers(limits, "m", 1.0)["remaining-requests"] == 8


def test_tokens_are_settled_to_what_was_used() -> None:
    admission = Admission()
    limits = [limit("tpm", 100)]
    admission.reserve("a", limits, "m", 90, 0.0)
    assert admission.headers(limits, "m", 0.0)["remaining-tokens"] == 10
    admission.settle("a", 30, 5.0)
    assert admission.headers(limits, "m", 5.0)["remaining-tokens"] == 70


def test_settling_or_releasing_twice_changes_nothing() -> None:
    admission = Admission()
    limits = [limit("tpm", 100), limit("concurrency", 2)]
    admission.reserve("a", limits, "m", 50, 0.0)
    admission.reserve("b", limits, "m", 50, 0.0)
    for _ in range(2):
        admission.settle("a", 10, 1.0)
        admission.release("a", 1.0)
    assert admission.headers(limits, "m", 1.0)["remaining-tokens"] == 40
    assert admission.reserve("c", limits, "m", 40, 1.0) is None
    refusal = admission.reserve("d", limits, "m", 0, 1.0)
    assert refusal is not None
    assert refusal.reason is Reason.LIMIT_CONCURRENCY


def test_a_request_that_never_ran_gives_everything_back() -> None:
    admission = Admission()
    limits = [limit("rpm", 1), limit("tpm", 10), limit("concurrency", 1)]
    admission.reserve("a", limits, "m", 10, 0.0)
    admission.release("a", 2.0)
    assert admission.reserve("b", limits, "m", 10, 2.0) is None
    assert admission.reserved() == 1


def test_a_request_larger_than_the_whole_limit_is_never_told_to_retry() -> None:
    refusal = Admission().reserve("a", [limit("tpm", 100)], "m", 101, 0.0)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after) == (Reason.LIMIT_TOO_LARGE, None)


@pytest.mark.parametrize("turn", [1, -1])
def test_of_several_limits_the_one_that_refuses_longest_says_when_to_come_back(turn: int) -> None:
    admission = Admission()
    limits = [limit("rpm", 2), limit("tpm", 100), limit("concurrency", 2)][::turn]
    admission.reserve("a", limits, "m", 10, 0.0)
    admission.reserve("b", limits, "m", 80, 30.0)
    refusal = admission.reserve("c", limits, "m", 50, 31.0)
    assert refusal is not None and refusal.reason is Reason.LIMIT_TPM and refusal.retry_after is not None
    for request in ("a", "b"):
        admission.settle(request, 10 if request == "a" else 80, 31.0)
    assert admission.reserve("c", limits, "m", 50, 31.0 + refusal.retry_after - 0.01) is not None
    assert admission.reserve("c", limits, "m", 50, 31.0 + refusal.retry_after + 0.001) is None
    never = admission.reserve("d", limits, "m", 101, 31.0)
    assert never is not None and never.reason is Reason.LIMIT_TOO_LARGE


def test_limits_of_another_model_do_not_apply() -> None:
    admission = Admission()
    limits = [limit("rpm", 1, model="other")]
    for n in range(5):
        assert admission.reserve(f"r{n}", limits, "m", 1, 0.0) is None


def test_tenant_and_key_limits_both_hold() -> None:
    admission = Admission()
    tenant = limit("rpm", 3)
    first, second = limit("rpm", 2, scope="key", owner="k1"), limit("rpm", 2, scope="key", owner="k2")
    assert [admission.reserve(f"a{n}", [tenant, first], "m", 1, 0.0) is None for n in range(3)] == [True, True, False]
    assert [admission.reserve(f"b{n}", [tenant, second], "m", 1, 0.0) is None for n in range(2)] == [True, False]


def test_headers_show_the_limit_that_has_least_left() -> None:
    admission = Admission()
    limits = [limit("rpm", 100), limit("rpm", 5, scope="key", owner="k1")]
    admission.reserve("a", limits, "m", 1, 0.0)
    headers = admission.headers(limits, "m", 0.0)
    assert (headers["limit-requests"], headers["remaining-requests"]) == (5, 4)
    assert 60.0 <= headers["reset-requests"] <= 62.0


def test_a_restart_remembers_the_last_minute() -> None:
    admission = Admission()
    limits = [limit("rpm", 2)]
    admission.restore(limits, "m", 10, at=-20.0, now=5.0)
    admission.restore(limits, "m", 10, at=-90.0, now=5.0)
    assert admission.headers(limits, "m", 5.0)["remaining-requests"] == 1


def test_counters_of_quiet_tenants_are_forgotten() -> None:
    admission = Admission()
    for n in range(10_000):
        admission.reserve(f"r{n}", [limit("rpm", 5, owner=f"t{n}")], "m", 1, float(n))
        admission.settle(f"r{n}", 1, float(n))
    assert len(admission._windows) < 5_000


@laws(200)
@given(
    st.lists(st.tuples(st.floats(0.0, 9.0), st.integers(1, 40)), max_size=120),
    st.integers(1, 8),
    st.integers(40, 120),
)
def test_no_sixty_seconds_ever_see_more_than_the_limit(
    gaps: list[tuple[float, int]], requests: int, tokens: int
) -> None:
    """Every interval of 60 s that starts at an admitted request holds at most `requests` and `tokens`."""
    admission = Admission()
    limits = [limit("rpm", requests), limit("tpm", tokens)]
    now, admitted = 1000.0, []
    for n, (gap, amount) in enumerate(gaps):
        now += gap
        if admission.reserve(f"r{n}", limits, "m", amount, now) is None:
            admitted.append((now, amount))
            admission.settle(f"r{n}", amount, now)
    for start, _ in admitted:
        inside = [amount for at, amount in admitted if start <= at < start + 60.0]
        assert len(inside) <= requests
        assert sum(inside) <= tokens


@given(st.lists(st.tuples(st.sampled_from(["reserve", "settle", "release"]), st.integers(0, 9)), max_size=80))
def test_whatever_happens_the_counters_return_to_zero(steps: list[tuple[str, int]]) -> None:
    """When no request is alive and a minute has passed, nothing is held."""
    admission = Admission()
    limits = [limit("rpm", 50), limit("tpm", 500), limit("concurrency", 3)]
    alive: set[str] = set()
    for n, (step, number) in enumerate(steps):
        id = f"r{number}"
        if step == "reserve" and id not in alive:
            if admission.reserve(id, limits, "m", 10, n * 0.1) is None:
                alive.add(id)
        elif step != "reserve":
            getattr(admission, step)(*([id, 7, n * 0.1] if step == "settle" else [id, n * 0.1]))
            alive.discard(id)
    for id in alive:
        admission.settle(id, 3, 10.0)
    assert admission.reserved() == 0
    assert admission._running == {}
    assert admission.headers(limits, "m", 200.0)["remaining-tokens"] == 500


def test_an_unknown_kind_of_end_is_ignored() -> None:
    admission = Admission()
    admission.settle("nobody", 5, 0.0)
    admission.release("nobody", 0.0)
    with pytest.raises(ValueError, match="holds a reservation"):
        for _ in range(2):
            admission.reserve("a", [], "m", 1, 0.0)
