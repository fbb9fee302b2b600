"""The talk with the database about budgets, beside the requests: leases taken, shared with other processes, given back.

    request short of a lease ──► cover() waits ──┐
    another process asks for a part ─────────────┼──► one turn: one `exchange` for all accounts concerned
    a budget is new or has changed ──────────────┤        │
    nothing has been spent for long, or it ended ┘        └──► leases grow or shrink, those that wait look again

Only one turn is under way at a time. A turn that the database did not answer is said again with the same number, so
that it gives and takes nothing twice. When two processes are short at once, the one whose name comes first collects,
so that the last pieces of a budget come together somewhere instead of nowhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import structlog

from scheduler.clock import Clock
from scheduler.core.budgets import Account, Budget, Budgets, Spending
from scheduler.worker.races import first
from tenants import budgets as accounts
from tenants.budgets import AccountKey, Alert, Move, Position, Terms, Wish
from tenants.database import DatabaseAway, DatabaseThread

log = structlog.get_logger(__name__)

LOOK_EVERY = 0.25  # seconds between two looks at whether another process asks for a part
TURN_EVERY = 0.05  # seconds between two turns while a request waits for an answer of another process
PATIENCE = 2.0  # seconds that a request waits for a lease
IDLE_SECONDS = 600.0  # after which a lease that nobody spends from goes back
LEAVE_EVERY = 5.0  # seconds between two tries to leave an account whose usage is on its way to the ledger
MOVES = 100  # in one transaction

Said = tuple[Account, Move]


class LeaseError(Exception):
    """The database, which knows what is left of a budget, cannot be asked now."""


@dataclass(slots=True)
class _Line:
    """How far the talk about one account has come."""

    turn: int = 0  # of the last move that was answered
    giving: int = 0  # taken out of our lease, and the database has not been told for certain
    ask: int = 0  # number of our ask that others have not answered
    unanswered: Move | None = None  # a move that may or may not have arrived
    leave_at: float = 0.0  # when to try again to leave an account


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits. `asked`: the accounts whose other holders have been asked on its behalf."""

    spending: Spending
    asked: set[AccountKey]
    turned: asyncio.Future[bool]  # whether the database could be asked


class Leases:
    """Of one scheduler process and epoch. `on_alert` hears of levels that a change of a budget has passed."""

    def __init__(
        self,
        process: str,
        epoch: int,
        budgets: Budgets,
        clock: Clock,
        wall: Callable[[], float],
        on_alert: Callable[[Alert], None],
    ) -> None:
        self._process = process
        self._epoch = epoch
        self._budgets = budgets
        self._clock = clock
        self._wall = wall
        self._on_alert = on_alert
        self._thread = DatabaseThread("budgets")
        self._lines: dict[AccountKey, _Line] = {}
        self._waiters: list[_Waiter] = []
        self._looks: set[AccountKey] = set()
        self._bell = asyncio.Event()
        self._silent_since: float | None = None  # when the database stopped answering

    # --- what requests ask for --------------------------------------------------------------------------------------

    async def cover(self, spending: Spending) -> None:
        """Wait until the leases cover the request, or it is known that they cannot; at most PATIENCE.

        Nothing is reserved. Raises LeaseError if the database cannot be asked.
        """
        deadline = self._clock.now() + PATIENCE
        asked: set[AccountKey] = set()
        while (now := self._clock.now()) < deadline:
            short = [account.budget.key for account, _ in self._budgets.short(spending, now)]
            if all(key in asked and not self._line(key).ask for key in short):
                return  # nothing is short, or everybody has given what they could
            await self._next_turn(_Waiter(spending, asked, asyncio.get_running_loop().create_future()), deadline)

    async def look(self, budgets: Iterable[Budget]) -> None:
        """Bring the accounts of these budgets up to date with the database. Raises LeaseError."""
        now = self._clock.now()
        self._looks |= {self._budgets.note(budget, now).budget.key for budget in budgets}
        waiter = _Waiter(Spending(), set(), asyncio.get_running_loop().create_future())
        await self._next_turn(waiter, now + PATIENCE)

    async def _next_turn(self, waiter: _Waiter, deadline: float) -> None:
        self._waiters.append(waiter)
        self._bell.set()
        try:
            await first(_done(waiter.turned), self._clock.sleep(deadline - self._clock.now()))
        finally:
            if waiter in self._waiters:  # it has waited long enough, or its caller has gone
                self._waiters.remove(waiter)
        if waiter.turned.done() and not waiter.turned.result():
            raise LeaseError("What is left of a budget cannot be checked at the moment.")

    # --- behind the requests ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await first(self._bell.wait(), self._clock.sleep(LOOK_EVERY))
            self._bell.clear()
            await self.turn()
            if any(line.ask for line in self._lines.values()):
                await self._clock.sleep(TURN_EVERY)

    async def turn(self) -> None:
        """Say to the database what there is to say, once; it may be away."""
        waiters, self._waiters = self._waiters, []
        try:
            asked = await self._talk(waiters)
        except DatabaseAway as error:
            self._note_silence(error)
            answered = False
        else:
            if asked:
                self._note_answer()
            answered = True
        for waiter in waiters:
            if not waiter.turned.done():
                waiter.turned.set_result(answered)

    async def release(self) -> None:
        """Give everything back: only when nothing runs, and all that ran is in the ledger."""
        try:
            await self._thread.run(accounts.release, self._process, self._epoch)
        except DatabaseAway as error:
            log.warning("leases of budgets stay until the next start", error=type(error).__name__)

    async def aclose(self) -> None:
        await self._thread.aclose()

    # --- one turn ---------------------------------------------------------------------------------------------------

    async def _talk(self, waiters: Sequence[_Waiter]) -> bool:
        """One turn with the database; False if there was nothing to ask it."""
        asked = bool(self._lines)
        wishes = await self._thread.run(accounts.wishes, self._process, self._epoch) if asked else {}
        moves = self._moves(waiters, wishes)
        for start in range(0, len(moves), MOVES):
            await self._exchange(moves[start : start + MOVES], waiters)
        return asked or bool(moves)

    def _note_silence(self, error: Exception) -> None:
        """Told once an outage: a turn comes several times a second."""
        if self._silent_since is None:
            self._silent_since = self._clock.now()
            log.warning("leases of budgets wait for the database", error=type(error).__name__)

    def _note_answer(self) -> None:
        if self._silent_since is not None:
            seconds = round(self._clock.now() - self._silent_since, 1)
            self._silent_since = None
            log.info("leases of budgets have the database back", seconds=seconds)

    def _moves(self, waiters: Sequence[_Waiter], wishes: Mapping[AccountKey, Wish]) -> list[Said]:
        now, wall = self._clock.now(), self._wall()
        looks, self._looks = self._looks, set()
        needs: dict[AccountKey, int] = {}
        for waiter in waiters:
            for account, amount in self._budgets.short(waiter.spending, now):
                needs[account.budget.key] = needs.get(account.budget.key, 0) + amount
        moves: list[Said] = []
        for key, account in list(self._budgets.accounts.items()):
            line = self._line(key)
            if line.unanswered is not None:
                moves.append((account, line.unanswered))
                continue
            need = max(needs.get(key, 0) - max(account.free, 0), 0)
            short = key in needs
            wish = wishes.get(key)
            # Of two that are short the one whose name comes first keeps what it has, until it has enough.
            answer = wish is not None and (not short or wish.first < self._process)
            if wish is not None and answer:
                line.giving += account.give(max(wish.amount, account.free // 2))
            leave = not short and now >= line.leave_at and self._is_over(account, now, wall)
            if leave:
                line.leave_at = now + LEAVE_EVERY
                line.giving += account.give(account.free)
            news = key in looks or not account.is_current or (line.ask and not need)
            if short or answer or leave or line.giving or news:
                moves.append((account, self._move(account, line, need, answer, leave)))
        return moves

    def _is_over(self, account: Account, now: float, wall: float) -> bool:
        """Nobody will spend from it soon."""
        ended = account.budget.ends is not None and wall >= account.budget.ends
        return not account.reserved and (ended or now - account.touched >= IDLE_SECONDS)

    def _move(self, account: Account, line: _Line, need: int, answer: bool, leave: bool) -> Move:
        budget = account.budget
        return Move(
            key=budget.key,
            tenant_id=budget.tenant,
            ends=budget.ends,
            terms=Terms(budget.limit, budget.hard, budget.alerts, budget.version),
            turn=line.turn + 1,
            give=line.giving,
            need=need if budget.hard else 0,
            answer=answer,
            ask=line.ask,
            leave=leave,
        )

    async def _exchange(self, said: Sequence[Said], waiters: Sequence[_Waiter]) -> None:
        moves = [move for _, move in said]
        for move in moves:
            self._line(move.key).unanswered = move
        positions, alerts = await self._thread.run(accounts.exchange, self._process, self._epoch, moves)
        for (account, move), position in zip(said, positions, strict=True):
            self._apply(account, move, position)
        open_asks = {position.key for position in positions if position.ask}
        for waiter in waiters:
            waiter.asked |= {budget.key for budget in waiter.spending.budgets if budget.key in open_asks}
        for alert in alerts:
            self._on_alert(alert)

    def _apply(self, account: Account, move: Move, position: Position) -> None:
        line, terms = self._line(move.key), position.terms
        line.unanswered = None
        line.turn = move.turn
        line.giving -= move.give
        line.ask = position.ask
        told = replace(account.budget, limit=terms.limit, hard=terms.hard, alerts=terms.alerts, version=terms.version)
        account.receive(
            position.granted,
            told=told,
            held=position.held,
            spent=position.spent,
            elsewhere=position.elsewhere,
            shared=bool(position.elsewhere or move.give),
        )
        # A limit that was lowered leaves leases that are too large, and a soft budget needs none.
        surplus = position.spent + position.held + position.elsewhere - terms.limit
        line.giving += account.give(surplus if terms.hard else account.free)
        if move.leave and not (account.reserved or account.lease or line.giving or position.held):
            del self._lines[move.key], self._budgets.accounts[account.budget.key]

    def _line(self, key: AccountKey) -> _Line:
        return self._lines.setdefault(key, _Line())


async def _done(future: asyncio.Future[bool]) -> None:
    await asyncio.wait([future])
