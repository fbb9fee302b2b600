"""What stands between the planner and its policy: a policy that fails is replaced, and nothing that waits is lost.

A policy fails if it raises, if what it answers cannot be (a candidate that does not wait, an order that is no
number), or if it is too slow. Slowness is measured in CPU seconds of this thread. A pass over its candidates chooses
one request and should take 200 us; one of more than 5 ms is broken off and begun anew in the same decision, until it
is the third in a row. So a policy that is too slow is replaced within the decision that it slows down, while what
befalls a single pass (a page fault, a collection of garbage, a neighbour on the core) does not cost the pool its
policy. What it is told, and asked but once (`key`, `admit`, `ended` and so on), counts by call: three slow ones in a
row. 50 ms at once nobody else causes. Time between the candidates is not the policy's.

The replacement is `batching_aware`, or `priority` if it was that one that failed, and it answers the very call that
failed. The next change of the configuration gives the configured policy another try. The last policy of the chain is
not replaced: what it raises is a bug that must show.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from scheduler.core.batcher import InFlight
from scheduler.core.books import Books
from scheduler.core.policies import Offer, Policy, policy_class
from scheduler.core.types import Outcome, Refusal, Request, StepReport

FALLBACKS = ("batching_aware", "priority")
SLOW_SECONDS = 0.005
SLOW_IN_A_ROW = 3
STUCK_SECONDS = 0.050
EVENTS_KEPT = 16

CpuClock = Callable[[], float]
T = TypeVar("T")


class PolicyFault(Exception):
    """What a policy answered, or the time that it took, is not acceptable."""


class SlowPass(PolicyFault):
    """A pass over the candidates takes too long: what it has offered is not used."""


@dataclass(frozen=True, slots=True)
class PolicyReplaced:
    """For the operator: policy `name` has failed, and which one works in its place."""

    name: str
    replacement: str
    cause: str


class PolicyGuard:
    """The policy in use, behind the calls of `Policy`.

    `cpu_clock`: CPU seconds of this thread (None: no limit). `on_change` is called when another policy has come into
    use: what waits is to be ordered and made due anew.
    """

    def __init__(self, books: Books, cpu_clock: CpuClock | None, on_change: Callable[[], None]) -> None:
        self.name = ""
        self.events: deque[PolicyReplaced] = deque(maxlen=EVENTS_KEPT)
        self._books = books
        self._cpu_clock = cpu_clock
        self._on_change = on_change
        self._policy: Policy
        self._failed: set[str] = set()
        self._adopting = False
        self._replaced = False  # while adopting
        self._slow: Counter[str] = Counter()  # by call: how often in a row it was slow

    def use(self, name: str) -> None:
        """Work with the policy of that name from now on, under the configuration that the books have now.

        One that is in use already goes on with what it has learned. Raises ValueError for an unknown one.
        """
        kind = policy_class(name)
        kept = name == self.name and not self._failed
        self._failed.clear()
        if not kept:
            self._install(name, kind)
            return
        self._ask("reconfigured", lambda policy: policy.reconfigured())
        self._adopt()

    # --- the calls of a policy --------------------------------------------------------------------------------------

    def key(self, request: Request) -> float:
        return self._ask("key", lambda policy: _number(policy.key(request)))

    def admit(self, request: Request, now: float) -> Request | Refusal:
        return self._ask("admit", lambda policy: _same(policy.admit(request, now), request))

    def due(self, request: Request) -> float:
        return self._ask("due", lambda policy: _number(policy.due(request)))

    def overdue(self, request: Request, now: float) -> Request | Refusal | None:
        return self._ask("overdue", lambda policy: policy.overdue(request, now))

    def window_end(self) -> float | None:
        return self._ask("window_end", lambda policy: policy.window_end())

    def deciding(self, now: float) -> None:
        self._ask("deciding", lambda policy: policy.deciding(now))

    def dispatched(self, request: Request, now: float) -> None:
        self._ask("dispatched", lambda policy: policy.dispatched(request, now))

    def ended(self, flight: InFlight, outcome: Outcome, now: float) -> None:
        self._ask("ended", lambda policy: policy.ended(flight, outcome, now))

    def stepped(self, report: StepReport) -> None:
        self._ask("stepped", lambda policy: policy.stepped(report))

    def engine_failed(self, now: float, cause: str) -> None:
        self._ask("engine_failed", lambda policy: policy.engine_failed(now, cause))

    def engine_recovered(self, now: float) -> None:
        self._ask("engine_recovered", lambda policy: policy.engine_recovered(now))

    def next_wakeup(self, now: float) -> float | None:
        return self._ask("next_wakeup", lambda policy: policy.next_wakeup(now))

    def candidates(self, now: float) -> Iterator[Offer]:
        """Those of the policy; if it fails on the way, all of its replacement's."""
        slow_passes = 0  # in a row
        while True:
            try:
                yield from self._metered(self._policy.candidates(now))
            except SlowPass as slow:
                slow_passes += 1
                if slow_passes >= SLOW_IN_A_ROW:
                    self._replace(slow)
                    slow_passes = 0
            except Exception as error:  # noqa: BLE001 - the boundary of a policy: whatever it raises, the pool goes on
                self._replace(error)
                slow_passes = 0
            else:
                return

    # --- details ----------------------------------------------------------------------------------------------------

    def _ask(self, name: str, call: Callable[[Policy], T]) -> T:
        while True:
            try:
                started = self._cpu_seconds()
                answer = call(self._policy)
                self._judge(name, self._cpu_seconds() - started)
            except Exception as error:  # noqa: BLE001 - the boundary of a policy: whatever it raises, the pool goes on
                self._replace(error)
            else:
                return answer

    def _metered(self, offers: Iterator[Offer]) -> Iterator[Offer]:
        """The offers of one pass. Raises SlowPass, PolicyFault."""
        spent = 0.0
        while True:
            started = self._cpu_seconds()
            offer = next(offers, None)
            spent += self._cpu_seconds() - started
            if spent > SLOW_SECONDS and self._next_policy():
                fault = PolicyFault if spent > STUCK_SECONDS else SlowPass
                raise fault(_too_slow("candidates", spent))
            if offer is None:
                return
            if offer.request.id not in self._books.queue:
                raise PolicyFault(f"it offered request {offer.request.id}, which does not wait")
            yield offer

    def _judge(self, name: str, seconds: float) -> None:
        """Raises PolicyFault if the call was too slow for once, or once too often."""
        self._slow[name] = self._slow[name] + 1 if seconds > SLOW_SECONDS else 0
        if self._next_policy() and (seconds > STUCK_SECONDS or self._slow[name] >= SLOW_IN_A_ROW):
            raise PolicyFault(_too_slow(name, seconds))

    def _cpu_seconds(self) -> float:
        return self._cpu_clock() if self._cpu_clock else 0.0

    def _replace(self, error: Exception) -> None:
        """Put the next policy of the chain in the place of the one that failed; without one, `error` goes on."""
        self._failed.add(self.name)
        replacement = self._next_policy()
        if replacement is None:
            raise error
        cause = str(error) if isinstance(error, PolicyFault) else repr(error)
        self.events.append(PolicyReplaced(self.name, replacement, cause))
        self._install(replacement, policy_class(replacement))

    def _install(self, name: str, kind: type[Policy]) -> None:
        self.name = name
        self._slow.clear()
        self._books.level = 0  # what one policy gives up the next one need not; it would never take it back
        try:
            self._policy = kind(self._books)
        except Exception as error:  # noqa: BLE001 - the boundary of a policy: whatever it raises, the pool goes on
            self._replace(error)
        else:
            self._adopt()

    def _next_policy(self) -> str | None:
        return next((name for name in FALLBACKS if name not in self._failed and name != self.name), None)

    def _adopt(self) -> None:
        """Have what waits ordered anew, again if the new policy fails while that is done."""
        self._replaced = True
        if self._adopting:
            return
        self._adopting = True
        try:
            while self._replaced:
                self._replaced = False
                self._on_change()
        finally:
            self._adopting = False


def _too_slow(name: str, seconds: float) -> str:
    return f"{name} took {seconds * 1000:.1f} ms of CPU"


def _number(value: float) -> float:
    number = float(value)
    if number != number:
        raise PolicyFault("an order or an instant that it gave is no number")
    return number


def _same(answer: Request | Refusal, request: Request) -> Request | Refusal:
    if isinstance(answer, Refusal) or answer.id == request.id:
        return answer
    raise PolicyFault(f"it admitted {answer.id} for {request.id}")
