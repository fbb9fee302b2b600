"""The accounts of budgets: who has spent how much in the running period, and who may spend the rest.

    limit = spent + leases + room            in any order of events spent + leases never exceeds the limit, unless the
                                             limit is lowered, or usage comes in that began before there was a budget

A scheduler process spends from its lease. `exchange` is its whole conversation with the accounts: it gives back, takes,
asks the others for a part, and hears who asks it. Alone it gets the whole room; beside others what it needs, or half.
`charge` belongs to the transaction in which the ledger takes new rows, so that an account always equals the ledger.

All of this happens under a lock on the tenants concerned: one order, so that no two processes wait for each other.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from django.db import connection, transaction
from django.db.models import Exists, F, OuterRef, Q, Sum
from django.utils import timezone

from .audit import record
from .models import BudgetAccount, BudgetAlert, BudgetLease, ProcessHeartbeat, Tenant, UsageRecord
from .models.fields import DECIMALS
from .models.limit import TOKENS

log = logging.getLogger(__name__)

KEEP_SHORT = timedelta(days=2)  # accounts of minutes and hours are forgotten when their period ended so long ago
SHORT_PERIODS = ("minute", "hour")
WHOLE = 1.0  # the level of alert that every budget has: all of it

AccountKey = tuple[str, str, str, str, str, int]
"""scope, owner, model, unit, period, start of the period in Unix seconds"""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a budget allows, as of change `version`. `alerts`: shares of the limit that are told of when spent."""

    limit: int
    hard: bool
    alerts: tuple[float, ...]
    version: int

    def same(self, other: Terms) -> bool:
        """Whatever change they come from."""
        return (self.limit, self.hard, self.alerts) == (other.limit, other.hard, other.alerts)


@dataclass(frozen=True, slots=True)
class Move:
    """What a process says about one account; one move for each account at a time.

    `turn` rises by one with each move that was answered; a move that is sent again with the same `turn` gives and takes
    nothing twice. `ask`: the number of its ask that the others have not answered yet, 0 if there is none.
    `leave`: it wants nothing more of the account.
    """

    key: AccountKey
    tenant_id: str
    ends: int | None  # Unix seconds
    terms: Terms
    turn: int
    give: int = 0
    need: int = 0
    answer: bool = False
    ask: int = 0
    leave: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """The answer to a move: what was granted with that turn, and how the account stands.

    `held` is the process's whole lease, `elsewhere` those of others. `ask`: the number of the ask that the others have
    yet to answer; 0 when there is none, or all have.
    """

    key: AccountKey
    terms: Terms
    granted: int
    held: int
    spent: int
    elsewhere: int
    ask: int


@dataclass(frozen=True, slots=True)
class Alert:
    """A share `level` of the budget called `account` has been spent. Amounts are in its unit."""

    account: str
    scope: str
    unit: str
    level: float
    spent: int
    limit: int


@dataclass(frozen=True, slots=True)
class Charged:
    """What new rows of the ledger did to accounts."""

    spent: dict[AccountKey, int] = field(default_factory=dict)
    alerts: list[Alert] = field(default_factory=list)

    def add(self, later: Charged) -> None:
        self.spent.update(later.spent)
        self.alerts.extend(later.alerts)


# --- a scheduler process and its leases -----------------------------------------------------------------------------


def exchange(process: str, epoch: int, moves: Sequence[Move]) -> tuple[list[Position], list[Alert]]:
    """Make these moves, all or none; the positions are in their order."""
    with transaction.atomic():
        lock_tenants({move.tenant_id for move in moves})
        accounts = _accounts(moves)
        alerts: list[Alert] = []
        for move in moves:
            account = accounts.get(move.key)
            if account is None:
                account = accounts[move.key] = _open(move)
                alerts += _raise_alerts(account, 0)
            if move.terms.version >= account.version:
                alerts += _set_terms(account, move.terms)
        # Only now that all accounts are locked: what others have leased does not change any more.
        leases: dict[int, list[BudgetLease]] = defaultdict(list)
        held = BudgetLease.objects.filter(account__in=[account.pk for account in accounts.values()])
        for lease in held.select_for_update().order_by("pk"):
            leases[lease.account_id].append(lease)
        positions = [_move(move, accounts[move.key], leases, process, epoch) for move in moves]
    return positions, alerts


def _move(
    move: Move, account: BudgetAccount, leases: Mapping[int, list[BudgetLease]], process: str, epoch: int
) -> Position:
    held = leases.get(account.pk, [])
    mine = next((lease for lease in held if (lease.process, lease.epoch) == (process, epoch)), None)
    if mine is None:
        mine = BudgetLease(account=account, process=process, epoch=epoch)
    others = [lease for lease in held if lease.pk != mine.pk]
    elsewhere = sum(lease.amount for lease in others)
    if mine.turn < move.turn:
        mine.amount -= min(move.give, mine.amount)
        room = max(account.limit - account.spent - elsewhere - mine.amount, 0)
        mine.granted = _grant(room, move.need, any(lease.amount or lease.wanted for lease in others))
        mine.amount += mine.granted
        mine.turn = move.turn
    ask = _ask(move, account, mine, others)
    if move.answer:
        mine.answered = account.asks
    if mine.amount or mine.wanted or (mine.pk is not None and not move.leave):
        mine.save()
    elif mine.pk is not None:
        mine.delete()
    terms = Terms(account.limit, account.hard, tuple(account.alerts), account.version)
    granted = mine.granted if mine.turn == move.turn else 0
    return Position(move.key, terms, granted, mine.amount, account.spent, elsewhere, ask)


def _grant(room: int, need: int, shared: bool) -> int:
    """How much of the room a process gets that needs some: everything, unless somebody else is there."""
    if not need:
        return 0
    return min(room, max(need, room // 2)) if shared else room


def _ask(move: Move, account: BudgetAccount, mine: BudgetLease, others: Collection[BudgetLease]) -> int:
    """Ask the others for what is short, once, and see whether all of them have answered."""
    short = max(move.need - mine.granted, 0)
    holders = [lease for lease in others if lease.amount]
    ask = move.ask
    if short and holders and not ask:
        ask = account.asks = account.asks + 1
        account.save(update_fields=["asks"])
    waits = bool(short) and any(lease.answered < ask for lease in holders)
    mine.wanted = short if waits else 0
    return ask if waits else 0


@dataclass(frozen=True, slots=True)
class Wish:
    """What other processes want of an account. `first`: the name of one of them, in the order of names."""

    amount: int
    first: str


def wishes(process: str, epoch: int) -> dict[AccountKey, Wish]:
    """What others want of the accounts of this process, where it has not answered yet. Reads only."""
    unanswered = BudgetLease.objects.filter(process=process, epoch=epoch, answered__lt=F("account__asks"))
    wanting = BudgetLease.objects.filter(wanted__gt=0, account__in=unanswered.values("account"))
    found: dict[AccountKey, Wish] = {}
    for lease in wanting.exclude(process=process, epoch=epoch).select_related("account"):
        key = key_of(lease.account)
        before = found.get(key, Wish(0, lease.process))
        found[key] = Wish(before.amount + lease.wanted, min(before.first, lease.process))
    return found


def release(process: str, epoch: int) -> int:
    """Everything that this process leased comes back; how many leases that were.

    To be called when all that it ran is in the ledger, or never will be.
    """
    deleted, _ = BudgetLease.objects.filter(process=process, epoch=epoch).delete()
    return deleted


class ReleaseError(Exception):
    """The leases are not given back; the text says why."""


def release_by_hand(process: str, epoch: int, *, actor: str, reason: str) -> int:
    """What an operator does about a process whose books are lost. Audited. Raises ReleaseError if it lives."""
    with transaction.atomic():
        if _lives(process, epoch):
            raise ReleaseError(f"{process} of epoch {epoch} is running and spends from its leases.")
        leases = BudgetLease.objects.filter(process=process, epoch=epoch).select_related("account")
        before = {str(lease.account): lease.amount for lease in leases}
        if not before:
            raise ReleaseError(f"{process} of epoch {epoch} holds no lease.")
        record(actor, "budgetlease.release", f"scheduler {process} epoch {epoch}", before=before, reason=reason)
        return release(process, epoch)


def _lives(process: str, epoch: int) -> bool:
    since = timezone.now() - timedelta(seconds=10)
    beats = ProcessHeartbeat.objects.filter(name=process, beat_at__gte=since)
    return any(beat.info.get("epoch") == epoch for beat in beats)


# --- the ledger -----------------------------------------------------------------------------------------------------


def charge(
    rows: Sequence[UsageRecord], process: str, leased: Mapping[tuple[str, int], Collection[AccountKey]]
) -> Charged:
    """Charge rows that the ledger has just taken to every account they belong to.

    To be called in the transaction of the rows, with their tenants locked.

    `leased`: by request and attempt, the accounts for which `process` had reserved it: there its lease pays.
    """
    tenants, keys = {row.tenant_id for row in rows}, {row.key_id for row in rows}
    concerned = BudgetAccount.objects.filter(
        Q(scope="tenant", owner__in=tenants) | Q(scope="key", owner__in=keys),
        Q(ends_at__isnull=True) | Q(ends_at__gt=min(row.arrived_at for row in rows)),
    )
    accounts: dict[tuple[str, str], list[tuple[BudgetAccount, AccountKey]]] = defaultdict(list)
    for account in concerned:
        accounts[(account.scope, account.owner)].append((account, key_of(account)))
    spent: dict[int, int] = defaultdict(int)
    paid: dict[tuple[int, int], int] = defaultdict(int)  # by account and epoch
    for row in rows:
        reserved = leased.get((row.request_id, row.attempt), ())
        for account, key in (*accounts[("tenant", row.tenant_id)], *accounts[("key", row.key_id)]):
            if amount := _amount(row, account):
                spent[account.pk] += amount
                if key in reserved:
                    paid[(account.pk, row.epoch)] += amount
    _pay(spent, paid, process)
    charged = Charged()
    for account in concerned:
        if added := spent.get(account.pk):
            before, account.spent = account.spent, account.spent + added
            charged.spent[key_of(account)] = account.spent
            charged.alerts.extend(_raise_alerts(account, before))
    return charged


def _pay(spent: Mapping[int, int], paid: Mapping[tuple[int, int], int], process: str) -> None:
    """Raw statements: a batch of usage may touch hundreds of accounts, and each is one addition."""
    accounts, leases = BudgetAccount._meta.db_table, BudgetLease._meta.db_table
    with connection.cursor() as cursor:
        cursor.executemany(
            f"UPDATE {accounts} SET spent = spent + %s WHERE id = %s",  # noqa: S608 - the table's name is ours
            [(amount, account) for account, amount in spent.items()],
        )
        cursor.executemany(
            f"UPDATE {leases} SET amount = CASE WHEN amount > %s THEN amount - %s ELSE 0 END "  # noqa: S608
            "WHERE account_id = %s AND process = %s AND epoch = %s",
            [(amount, amount, account, process, epoch) for (account, epoch), amount in paid.items()],
        )


def _amount(row: UsageRecord, account: BudgetAccount) -> int:
    """What the row costs the account, in its unit; 0 if it is none of the account's."""
    if account.model not in ("", row.model):
        return 0
    if row.arrived_at < account.starts_at or (account.ends_at is not None and row.arrived_at >= account.ends_at):
        return 0
    if account.unit == TOKENS:
        return row.prompt_tokens + row.completion_tokens
    return 0 if row.charge is None or row.currency != account.unit else int(row.charge.scaleb(DECIMALS))


# --- accounts -------------------------------------------------------------------------------------------------------


def key_of(account: BudgetAccount) -> AccountKey:
    starts = int(account.starts_at.timestamp())
    return (account.scope, account.owner, account.model, account.unit, account.period, starts)


def _accounts(moves: Sequence[Move]) -> dict[AccountKey, BudgetAccount]:
    """The accounts of the moves, where there are any yet, locked: a tenant that is gone locks nobody out."""
    found = BudgetAccount.objects.select_for_update().filter(
        owner__in={move.key[1] for move in moves}, starts_at__in={_instant(move.key[5]) for move in moves}
    )
    return {key_of(account): account for account in found.order_by("pk")}


def _open(move: Move) -> BudgetAccount:
    """A new account begins with what the ledger has of its period; somebody may have opened it at this moment."""
    names = ("scope", "owner", "model", "unit", "period")
    identity = {**dict(zip(names, move.key, strict=False)), "starts_at": _instant(move.key[5])}
    account = BudgetAccount(
        **identity,
        tenant_id=move.tenant_id,
        ends_at=None if move.ends is None else _instant(move.ends),
        limit=move.terms.limit,
        hard=move.terms.hard,
        alerts=list(move.terms.alerts),
        version=move.terms.version,
    )
    account.spent = in_ledger(account)
    BudgetAccount.objects.bulk_create([account], ignore_conflicts=True)
    account = BudgetAccount.objects.select_for_update().get(**identity)
    if account.period in SHORT_PERIODS:
        _forget_old(account)
    return account


def in_ledger(account: BudgetAccount) -> int:
    """What the ledger has of the account's period, in its unit."""
    rows = UsageRecord.objects.filter(tenant_id=account.tenant_id, arrived_at__gte=account.starts_at)
    if account.ends_at is not None:
        rows = rows.filter(arrived_at__lt=account.ends_at)
    if account.scope == "key":
        rows = rows.filter(key_id=account.owner)
    if account.model:
        rows = rows.filter(model=account.model)
    if account.unit == TOKENS:
        total = rows.aggregate(total=Sum(F("prompt_tokens") + F("completion_tokens")))["total"]
        return int(total or 0)
    charges: Decimal | None = rows.filter(currency=account.unit).aggregate(total=Sum("charge"))["total"]
    return 0 if charges is None else int(charges.scaleb(DECIMALS))


def _forget_old(account: BudgetAccount) -> None:
    old = BudgetAccount.objects.filter(
        scope=account.scope,
        owner=account.owner,
        period__in=SHORT_PERIODS,
        ends_at__lt=timezone.now() - KEEP_SHORT,
    )
    held = Exists(BudgetLease.objects.filter(account=OuterRef("pk"), amount__gt=0))
    old.exclude(held).exclude(pk=account.pk).delete()


def _set_terms(account: BudgetAccount, terms: Terms) -> list[Alert]:
    known = Terms(account.limit, account.hard, tuple(account.alerts), account.version)
    if known == terms:
        return []
    account.limit, account.hard, account.alerts = terms.limit, terms.hard, list(terms.alerts)
    account.version = terms.version
    account.save(update_fields=["limit", "hard", "alerts", "version"])
    return [] if known.same(terms) else _raise_alerts(account, 0)


def _raise_alerts(account: BudgetAccount, before: int) -> list[Alert]:
    """Levels that were passed since `before` was spent, each told once in the period."""
    if not account.limit:
        return []
    levels = [Decimal(str(level)) for level in {*account.alerts, WHOLE}]
    passed = sorted(level for level in levels if before < level * account.limit <= account.spent)
    told = set(BudgetAlert.objects.filter(account=account).values_list("level", flat=True)) if passed else set()
    new = [float(level) for level in passed if float(level) not in told]
    BudgetAlert.objects.bulk_create(
        [BudgetAlert(account=account, level=level, limit=account.limit, spent=account.spent) for level in new]
    )
    return [Alert(str(account), account.scope, account.unit, level, account.spent, account.limit) for level in new]


def lock_tenants(tenants: Iterable[str]) -> None:
    """Make others who work on accounts of these tenants wait. SQLite has one writer anyway."""
    if connection.features.has_select_for_update:
        rows = Tenant.objects.filter(pk__in=[int(tenant) for tenant in tenants]).order_by("pk")
        list(rows.select_for_update(no_key=True).values_list("pk"))


def _instant(unix: int) -> datetime:
    return datetime.fromtimestamp(unix, UTC)
