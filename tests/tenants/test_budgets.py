"""Accounts of budgets: equal to the ledger, never promised twice, told about once."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from tenants.budgets import Alert, Move, Position, ReleaseError, Terms, Wish, exchange, release, release_by_hand, wishes
from tenants.changes import beat
from tenants.ledger import record_usage
from tenants.models import AuditEvent, BudgetAccount, BudgetAlert, BudgetLease, Tenant

from .conftest import issue, make_tenant
from .test_ledger import ROW

NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)
MIDNIGHT = int(datetime(2026, 7, 1, tzinfo=UTC).timestamp())
DAY = 86_400
A, B = "scheduler-a", "scheduler-b"

pytestmark = pytest.mark.django_db


def move(turn: int = 1, *, limit: int = 1000, version: int = 1, tenant: str = "1", **changes: Any) -> Move:
    """Of the tenant's budget of tokens for the first of July."""
    hard, alerts = changes.pop("hard", True), changes.pop("alerts", ())
    scope, model = changes.pop("scope", "tenant"), changes.pop("model", "")
    unit, period = changes.pop("unit", "tokens"), changes.pop("period", "day")
    key = (scope, tenant, model, unit, period, changes.pop("starts", MIDNIGHT))
    ends = changes.pop("ends", MIDNIGHT + DAY)
    return Move(key, changes.pop("tenant_id", "1"), ends, Terms(limit, hard, alerts, version), turn, **changes)


def say(process: str, *moves: Move, epoch: int = 1) -> Position:
    """The position after the last one."""
    positions, _ = exchange(process, epoch, moves)
    return positions[-1]


def spend(tokens: int, request: str = "r1", *, process: str = A, leased: bool = True, **changes: Any) -> list[Alert]:
    row = replace(ROW, request_id=request, prompt_tokens=tokens, completion_tokens=0, epoch=1, **changes)
    paying = {(request, row.attempt): {move().key}} if leased else {}
    return record_usage([row], process=process, leased=paying).charged.alerts


def account() -> BudgetAccount:
    return BudgetAccount.objects.get()


def test_a_process_alone_gets_all_that_is_left_and_a_second_one_nothing() -> None:
    assert say(A, move(need=10)).granted == 1000
    second = say(B, move(need=10))
    assert (second.granted, second.elsewhere, bool(second.ask)) == (0, 1000, True)


def test_what_needs_nothing_takes_nothing() -> None:
    assert say(A, move()).granted == 0
    assert not BudgetLease.objects.exists()


def test_two_processes_share_what_is_left() -> None:
    say(A, move(need=10))
    say(A, move(2, give=600))
    assert say(B, move(need=10)).granted == 300  # half of what came back
    assert say(A, move(3, need=200)).granted == 200
    assert say(B, move(2, need=200)).granted == 100  # and no more than there is
    assert sum(BudgetLease.objects.values_list("amount", flat=True)) == 1000


def test_a_move_that_is_said_twice_counts_once() -> None:
    first = move(need=10)
    assert say(A, first) == say(A, first)
    again = move(2, give=400)
    assert say(A, again).held == say(A, again).held == 600
    taking = move(3, need=400)
    assert [say(A, taking).granted, say(A, taking).granted, say(A, taking).held] == [400, 400, 1000]


def test_an_ask_is_heard_until_every_holder_has_answered() -> None:
    say(A, move(need=10))
    say(A, move(2, give=500))
    say("scheduler-c", move(need=500))
    asking = say(B, move(need=30))
    assert asking.ask
    assert wishes(A, 1) == wishes("scheduler-c", 1) == {move().key: Wish(30, B)}
    say(A, move(3, give=20, answer=True))
    assert wishes(A, 1) == {}
    waiting = say(B, move(2, need=30, ask=asking.ask))
    assert (waiting.granted, waiting.ask) == (20, asking.ask)
    say("scheduler-c", move(2, answer=True))
    last = say(B, move(3, need=10, ask=asking.ask))
    assert (last.granted, last.ask) == (0, 0)
    assert not BudgetLease.objects.filter(wanted__gt=0).exists()


def test_nobody_is_asked_who_holds_nothing() -> None:
    say(A, move(need=10))
    spend(1000)
    assert say(B, move(need=10)).ask == 0


def test_usage_moves_from_the_lease_to_what_is_spent() -> None:
    say(A, move(need=10))
    spend(300)
    lease = BudgetLease.objects.get()
    assert (account().spent, lease.amount) == (300, 700)


def test_a_row_that_comes_twice_is_charged_once() -> None:
    say(A, move(need=10))
    spend(300)
    spend(300)
    assert (account().spent, BudgetLease.objects.get().amount) == (300, 700)


def test_usage_that_no_lease_covers_is_spent_all_the_same() -> None:
    say(A, move(need=10))
    spend(300, leased=False)
    assert (account().spent, BudgetLease.objects.get().amount) == (300, 1000)
    assert say(B, move(need=10)).granted == 0


def test_a_budget_that_begins_in_mid_period_counts_what_the_ledger_has() -> None:
    key = "1"
    for request, changes in {
        "mine": {},
        "before": {"arrived_at": NOON - timedelta(days=1)},
        "after": {"arrived_at": NOON + timedelta(days=1)},
        "other tenant": {"tenant_id": "2"},
        "other key": {"key_id": "9"},
        "other model": {"model": "large"},
    }.items():
        spend(100, request, charge=Decimal("0.5"), currency="USD", **changes)
    assert say(A, move()).spent == 300  # mine, and those of the other key and model
    assert say(A, move(model="demo")).spent == 200
    assert say(A, move(scope="key", tenant=key)).spent == 200
    assert say(A, move(period="total", starts=0, ends=None)).spent == 500
    assert say(A, move(unit="USD")).spent == 3 * 5 * 10**9
    assert say(A, move(unit="EUR")).spent == 0


def test_every_account_that_a_row_belongs_to_is_charged() -> None:
    moves = [
        move(),
        move(model="demo"),
        move(model="large"),
        move(scope="key"),
        move(unit="USD"),
        move(unit="EUR"),
        move(period="total", starts=0, ends=None),
        move(tenant="2", tenant_id="2"),
        move(starts=MIDNIGHT + DAY, ends=MIDNIGHT + 2 * DAY),
    ]
    exchange(A, 1, moves)
    spend(300, charge=Decimal("0.0000000007"), currency="USD")
    charged = {one.model or one.unit + one.period + one.scope for one in BudgetAccount.objects.filter(spent__gt=0)}
    assert charged == {"tokensdaytenant", "demo", "tokensdaykey", "USDdaytenant", "tokenstotaltenant"}
    assert BudgetAccount.objects.get(unit="USD").spent == 7


def test_a_row_without_a_price_costs_no_money() -> None:
    say(A, move(unit="USD"))
    spend(300, charge=None, currency="")
    assert account().spent == 0


def test_the_newest_change_counts_whoever_tells_of_it_last() -> None:
    say(A, move(limit=1000, version=5))
    say(B, move(limit=400, version=7))
    old = say(A, move(limit=1000, version=5))
    assert (old.terms.limit, old.terms.version) == (400, 7)


def test_nothing_is_granted_of_a_lowered_budget_until_it_has_room() -> None:
    say(A, move(need=10))
    lowered = say(A, move(2, limit=300, version=2, need=10))
    assert (lowered.granted, lowered.held) == (0, 1000)
    say(A, move(3, limit=300, version=2, give=800))
    assert say(B, move(limit=300, version=2, need=10)).granted == 50


def test_a_level_is_told_once_in_a_period() -> None:
    say(A, move(alerts=(0.8, 0.95), need=10))
    assert spend(799, "r1") == []
    (first,) = spend(1, "r2")
    assert (first.level, first.spent, first.limit, first.scope) == (0.8, 800, 1000, "tenant")
    assert spend(1, "r3") == []
    assert [one.level for one in spend(199, "r4")] == [0.95, 1.0]
    assert BudgetAlert.objects.count() == 3


def test_a_level_that_was_told_is_not_told_again_when_the_budget_changes() -> None:
    say(A, move(alerts=(0.5,), need=10))
    assert len(spend(600)) == 1
    _, raised = exchange(A, 1, [move(2, limit=2000, version=2, alerts=(0.5,))])
    assert raised == []
    assert spend(500, "r2") == []
    _, lowered = exchange(A, 1, [move(3, limit=1100, version=3, alerts=(0.5,))])
    assert [one.level for one in lowered] == [1.0]


def test_a_budget_that_is_made_when_its_level_is_passed_already_tells_at_once() -> None:
    spend(900)
    _, alerts = exchange(A, 1, [move(alerts=(0.8,))])
    assert [one.level for one in alerts] == [0.8]


def test_a_soft_budget_takes_no_lease_and_counts_on() -> None:
    say(A, move(hard=False, alerts=(0.5,)))
    assert [one.level for one in spend(1500, leased=False)] == [0.5, 1.0]
    assert account().spent == 1500


def test_who_leaves_leaves_nothing_behind_but_what_is_on_its_way_to_the_ledger() -> None:
    say(A, move(need=10))
    assert say(A, move(2, give=700, leave=True)).held == 300
    spend(300)
    assert say(A, move(3, leave=True)).held == 0
    assert not BudgetLease.objects.exists()


def test_the_lease_of_a_dead_process_is_spent_until_its_books_are_in_the_ledger() -> None:
    say(A, move(need=10))
    assert say(A, move(need=10), epoch=2).granted == 0
    spend(300)
    release(A, 1)
    assert say(A, move(2, need=10), epoch=2).granted == 700


def test_old_accounts_of_short_periods_are_forgotten_unless_somebody_holds_some(acme: Tenant) -> None:
    now = int(timezone.now().timestamp()) // 60 * 60
    old, older = now - 3 * DAY, now - 4 * DAY
    say(A, move(period="minute", starts=old, ends=old + 60))
    say(A, move(period="minute", starts=older, ends=older + 60, need=1))
    say(A, move(period="minute", starts=now, ends=now + 60))
    assert sorted(int(one.starts_at.timestamp()) for one in BudgetAccount.objects.all()) == [older, now]


# --- by hand --------------------------------------------------------------------------------------------------------


def leases(*arguments: str) -> str:
    out = StringIO()
    call_command("leases", *arguments, stdout=out)
    return out.getvalue()


def test_an_operator_gives_back_what_a_lost_process_held_and_that_is_on_record() -> None:
    say(A, move(need=10))
    assert f"{A} epoch 1: 1000 of tenant 1" in leases()
    assert "1 leases" in leases("--release", A, "--epoch", "1", "--reason", "disk lost")
    assert say(B, move(need=10)).granted == 1000
    event = AuditEvent.objects.get()
    assert (event.action, event.reason, list((event.before or {}).values())) == (
        "budgetlease.release",
        "disk lost",
        [1000],
    )


def test_the_leases_of_a_process_that_lives_are_not_given_back() -> None:
    say(A, move(need=10))
    beat(A, "scheduler", 1, {"epoch": 1})
    with pytest.raises(ReleaseError, match="is running"):
        release_by_hand(A, 1, actor="ada", reason="why not")
    assert BudgetLease.objects.get().amount == 1000


@pytest.mark.parametrize("arguments", [(), ("--epoch", "1"), ("--epoch", "1", "--reason", "r")])
def test_nothing_is_given_back_without_a_lease_an_epoch_and_a_reason(arguments: tuple[str, ...]) -> None:
    with pytest.raises(CommandError):
        leases("--release", A, *arguments)


def test_a_key_and_its_tenant_have_accounts_of_their_own() -> None:
    tenant = make_tenant()
    key = issue(tenant).key
    tenant_id, key_id = str(tenant.pk), str(key.pk)
    exchange(
        A,
        1,
        [
            move(tenant=tenant_id, tenant_id=tenant_id),
            move(scope="key", tenant=key_id, tenant_id=tenant_id),
        ],
    )
    spend(5, tenant_id=tenant_id, key_id=key_id)
    spend(7, "r2", tenant_id=tenant_id, key_id="999")
    spent = {one.scope: one.spent for one in BudgetAccount.objects.all()}
    assert spent == {"tenant": 12, "key": 5}
