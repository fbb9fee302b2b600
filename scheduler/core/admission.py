"""The caller's own limits: reserved at arrival, settled at the end, given back exactly once.

One `Admission` per scheduler process, above its pools, so that a tenant's limits hold over all models it calls. Rates
and concurrency are counted here, budgets in `budgets.py`; a request reserves of all of them or of none.

A rate is a rolling window of 60 slots. The window must never be shorter than a minute, whatever the phase of the
current slot, so a slot is 60/59 s wide: 59 whole slots and the running one always cover at least 60 s, and no 60
seconds ever see more than the limit.

    ┌────┬────┬── … ──┬────┬──┐
    │ -59│ -58│       │ -1 │ 0 ╎       counted: slots -59 … 0;  an amount leaves 60 slots after its own
    └────┴────┴── … ──┴────┴──┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler.core.budgets import AccountKey, Budget, Budgets, Share, Spending, Standing
from scheduler.core.types import Limit, Reason, Refusal

WINDOW_SLOTS = 60
SLOT_SECONDS = 60.0 / (WINDOW_SLOTS - 1)
SWEEP_EVERY = 4096  # reservations between two sweeps of counters that hold nothing

RPM, TPM, CONCURRENCY = "rpm", "tpm", "concurrency"
REASONS = {RPM: Reason.LIMIT_RPM, TPM: Reason.LIMIT_TPM, CONCURRENCY: Reason.LIMIT_CONCURRENCY}
HEADER_NAMES = {RPM: "requests", TPM: "tokens"}
CONCURRENCY_RETRY = 1.0  # seconds: when a running request ends is not known

CounterKey = tuple[str, str, str, str]  # scope, owner, model, kind


def _slot(now: float) -> int:
    return int(now // SLOT_SECONDS)


@dataclass(slots=True)
class Window:
    """Amounts by slot over the last minute, oldest first."""

    slots: deque[list[int]] = field(default_factory=deque)  # [slot, amount]
    total: int = 0

    def roll(self, now: float) -> None:
        """Forget what is older than the window."""
        oldest = _slot(now) - WINDOW_SLOTS + 1
        while self.slots and self.slots[0][0] < oldest:
            self.total -= self.slots.popleft()[1]

    def add(self, slot: int, amount: int) -> None:
        """Count `amount` in `slot`; a negative one corrects what was counted there, if it has not left."""
        for entry in reversed(self.slots):
            if entry[0] == slot:
                entry[1] += amount
                self.total += amount
                return
            if entry[0] < slot:
                break
        if amount > 0:
            position = sum(1 for entry in self.slots if entry[0] < slot)
            self.slots.insert(position, [slot, amount])
            self.total += amount

    def wait_for(self, excess: int, now: float) -> float:
        """Seconds until at least `excess` has left the window."""
        left = 0
        for slot, amount in self.slots:
            left += amount
            if left >= excess:
                return max((slot + WINDOW_SLOTS) * SLOT_SECONDS - now, 0.0)
        return 0.0

    def reset_in(self, now: float) -> float:
        """Seconds until the window is empty again."""
        newest = next((slot for slot, amount in reversed(self.slots) if amount), None)
        return 0.0 if newest is None else max((newest + WINDOW_SLOTS) * SLOT_SECONDS - now, 0.0)


@dataclass(slots=True)
class Reservation:
    """What a live request holds: its slot in the rate windows, of which limits, and its shares of budgets."""

    slot: int
    tokens: int
    limits: Sequence[Limit]
    shares: Sequence[Share] = ()


NOTHING = Spending()


class Admission:
    """Counters of all active tenants and keys. Amounts: requests, tokens, running requests, money in budgets."""

    def __init__(self) -> None:
        self.budgets = Budgets()
        self._windows: dict[CounterKey, Window] = {}
        self._running: dict[CounterKey, int] = {}
        self._reservations: dict[str, Reservation] = {}
        self._since_sweep = 0

    def reserve(
        self,
        request_id: str,
        limits: Sequence[Limit],
        model: str,
        tokens: int,
        now: float,
        spending: Spending = NOTHING,
    ) -> Refusal | None:
        """Reserve one request, `tokens` (prompt and the most it may produce), one running place and `spending`, or
        nothing at all. Of several limits and budgets in the way, the one that is longest in it is the answer.

        Raises ValueError if the request holds a reservation already.
        """
        if request_id in self._reservations:
            raise ValueError(f"request {request_id} holds a reservation already")
        applying = limits
        if not all(limit.model in ("", model) for limit in limits):  # as a rule all do, and are kept without a copy
            applying = [limit for limit in limits if limit.model in ("", model)]
        refused: Refusal | None = None
        for limit in applying:
            refusal = self._check(limit, tokens, now)
            if refusal is not None:
                refused = _longer(refused, refusal)
        refusal = self.budgets.check(spending, now)
        if refusal is not None or refused is not None:
            return _longer(refused, refusal)
        reservation = Reservation(_slot(now), tokens, applying, self.budgets.take(spending, now))
        for limit in applying:
            self._take(limit, reservation)
        self._reservations[request_id] = reservation
        self._sweep(now)
        return None

    def settle(self, request_id: str, tokens: int, now: float, money: int = 0) -> None:
        """The request has ended; `tokens` were actually used, which cost `money` in the currency of its budgets.

        Calling again, or for an unknown id, does nothing.
        """
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            return
        self._free_places(reservation)
        self.budgets.settle(reservation.shares, tokens, money)
        for limit in reservation.limits:
            if limit.kind == TPM:
                self._correct(_key(limit), reservation.slot, tokens - reservation.tokens, now)

    def release(self, request_id: str, now: float) -> None:
        """The request never ran: everything goes back. Idempotent like `settle`."""
        reservation = self._reservations.pop(request_id, None)
        if reservation is None:
            return
        self._free_places(reservation)
        self.budgets.release(reservation.shares)
        for limit in reservation.limits:
            if limit.kind != CONCURRENCY:
                amount = reservation.tokens if limit.kind == TPM else 1
                self._correct(_key(limit), reservation.slot, -amount, now)

    def restore(self, limits: Sequence[Limit], model: str, tokens: int, at: float, now: float) -> None:
        """Count a request of before a restart: `at` is its arrival on this clock (may be negative)."""
        for limit in limits:
            if limit.model in ("", model) and limit.kind in HEADER_NAMES and _slot(at) > _slot(now) - WINDOW_SLOTS:
                self._window(limit, now).add(_slot(at), tokens if limit.kind == TPM else 1)

    def headers(self, limits: Sequence[Limit], model: str, now: float) -> dict[str, float]:
        """`limit-`, `remaining-` and `reset-` for requests and tokens: of the limit that has least left."""
        headers: dict[str, float] = {}
        for kind, name in HEADER_NAMES.items():
            applying = [limit for limit in limits if limit.kind == kind and limit.model in ("", model)]
            if not applying:
                continue
            tightest = min(applying, key=lambda limit: limit.value - self._window(limit, now).total)
            window = self._window(tightest, now)
            headers[f"limit-{name}"] = tightest.value
            headers[f"remaining-{name}"] = max(tightest.value - window.total, 0)
            headers[f"reset-{name}"] = window.reset_in(now)
        return headers

    def standing(self, limits: Sequence[Limit], budgets: Sequence[Budget], now: float, wall: float) -> list[Standing]:
        """How all of these stand, in their order: limits, then budgets. `wall`: the Unix time of `now`."""
        held = self._held()
        return [
            *(self._standing(limit, held.get(_key(limit), 0), now, wall) for limit in limits),
            *(self.budgets.note(budget, now).standing() for budget in budgets),
        ]

    def leased(self, request_id: str) -> tuple[AccountKey, ...]:
        """The accounts that pay for a request from a lease."""
        shares = self._reservations[request_id].shares
        return tuple(share.account.budget.key for share in shares if share.leased)

    def reserved(self) -> int:
        """How many requests hold a reservation (for conservation checks)."""
        return len(self._reservations)

    def _held(self) -> dict[CounterKey, int]:
        """Tokens that live requests have reserved, by the counter of the rate."""
        held: dict[CounterKey, int] = {}
        for reservation in self._reservations.values():
            for limit in reservation.limits:
                if limit.kind == TPM:
                    key = _key(limit)
                    held[key] = held.get(key, 0) + reservation.tokens
        return held

    def _standing(self, limit: Limit, held: int, now: float, wall: float) -> Standing:
        who = (limit.scope, limit.owner, limit.model, limit.kind)
        if limit.kind == CONCURRENCY:
            running = self._running.get(_key(limit), 0)
            return Standing(*who, "requests", "", limit.value, running, 0, max(limit.value - running, 0), None)
        window = self._window(limit, now)
        held = min(held, window.total)  # what was reserved more than a minute ago has left the window
        left = max(limit.value - window.total, 0)
        reset = wall + window.reset_in(now)
        return Standing(*who, HEADER_NAMES[limit.kind], "minute", limit.value, window.total - held, held, left, reset)

    def _check(self, limit: Limit, tokens: int, now: float) -> Refusal | None:
        where = f" on model {limit.model}" if limit.model else ""
        if limit.kind == CONCURRENCY:
            running = self._running.get(_key(limit), 0)
            if running < limit.value:
                return None
            message = f"{running} of {limit.value} parallel requests of this {limit.scope}{where} are in progress."
            return Refusal(Reason.LIMIT_CONCURRENCY, message, CONCURRENCY_RETRY)
        amount = tokens if limit.kind == TPM else 1
        unit = HEADER_NAMES[limit.kind]
        if amount > limit.value:
            return Refusal(
                Reason.LIMIT_TOO_LARGE,
                f"The request may use {amount} {unit}; this {limit.scope} may use {limit.value} a minute{where}.",
            )
        window = self._window(limit, now)
        excess = window.total + amount - limit.value
        if excess <= 0:
            return None
        wait = window.wait_for(excess, now)
        message = (
            f"Rate limit reached for {unit} a minute of this {limit.scope}{where}: limit {limit.value}, "
            f"used {window.total}, requested {amount}. Try again in {wait:.1f} s."
        )
        return Refusal(REASONS[limit.kind], message, wait)

    def _take(self, limit: Limit, reservation: Reservation) -> None:
        key = _key(limit)
        if limit.kind == CONCURRENCY:
            self._running[key] = self._running.get(key, 0) + 1
        else:
            self._windows[key].add(reservation.slot, reservation.tokens if limit.kind == TPM else 1)

    def _window(self, limit: Limit, now: float) -> Window:
        window = self._windows.setdefault(_key(limit), Window())
        window.roll(now)
        return window

    def _correct(self, key: CounterKey, slot: int, amount: int, now: float) -> None:
        window = self._windows.get(key)
        if window is not None:
            window.roll(now)
            if slot > _slot(now) - WINDOW_SLOTS:
                window.add(slot, amount)

    def _free_places(self, reservation: Reservation) -> None:
        for limit in reservation.limits:
            if limit.kind == CONCURRENCY:
                key = _key(limit)
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]

    def _sweep(self, now: float) -> None:
        """Counters of tenants that have been quiet for a minute are forgotten."""
        self._since_sweep += 1
        if self._since_sweep < SWEEP_EVERY:
            return
        self._since_sweep = 0
        for key, window in list(self._windows.items()):
            window.roll(now)
            if not window.slots:
                del self._windows[key]


def _longer(one: Refusal | None, other: Refusal | None) -> Refusal | None:
    """The refusal that still holds when the other does not any more."""
    if one is None or other is None:
        return one or other
    if one.retry_after is None or other.retry_after is None:
        return one if one.retry_after is None else other
    return one if one.retry_after >= other.retry_after else other


def _key(limit: Limit) -> CounterKey:
    return (limit.scope, limit.owner, limit.model, limit.kind)
