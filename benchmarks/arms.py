"""What replays compare: policies, the default policy without one of its parts, and what others would build instead.

Strict bands with a gate are what gateways in front of inference engines ship: ranks strictly, turns inside a rank, and
nothing sent while the engine has a queue or little memory. Oracle lengths show what better predictions could give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from scheduler.core.books import Books
from scheduler.core.length_model import LengthModel
from scheduler.core.policies import POLICIES, Candidate, Offer, Policy
from scheduler.core.policies.batching_aware import DUE, OPTIMISTIC, BatchingAware
from scheduler.core.policies.edf import Edf
from scheduler.core.types import OnInfeasible, PolicyConfig, Reason, Refusal, Request, TierSpec
from scheduler.simulator.profiles import Profile
from scheduler.simulator.replay import Replay, replay
from scheduler.simulator.workload import Workload

MIDDLE_HEADROOM = 0.20
GATE_QUEUE, GATE_KV = 5, 0.8


class PresentMemory(BatchingAware):
    """Headroom is kept of what is held now, not of what it will grow to."""

    def _room(self, request: Request, tier: TierSpec, reason: Reason) -> Reason | None:
        books = self.books
        if tier.rank != self._best and len(books.batcher) >= self._cap():
            return Reason.SLOTS_FULL
        blocked = books.batcher.blocked(request) or books.batcher.reserved_against(request, self._better[tier.name])
        held = books.batcher.blocks + books.capacity.blocks(request.prompt_tokens + 1)
        free = self._headroom(tier, reason in DUE)
        if blocked is None and held > (1 - free) * books.capacity.total_blocks and len(books.batcher):
            return Reason.KV_FULL
        return blocked


class WithoutForecast(PresentMemory):
    """Whoever fits now goes."""

    def _headroom(self, tier: TierSpec, due: bool) -> float:
        return 0.0


class WithoutBackfill(BatchingAware):
    """Nobody but better ranks passes the request that has the reservation."""

    def _passes(self, waiting: Request, request: Request, tier: TierSpec, now: float) -> bool:
        return tier.rank < self.books.tier(waiting).rank


class PlainDeadlines(BatchingAware):
    """Alpha 1: the length of a prompt counts no more than it delays."""

    def key(self, request: Request) -> float:
        return request.deadline + self.books.alone_seconds(request.prompt_tokens)


class WithoutController(BatchingAware):
    """The batch is as large as the engine allows."""

    def _cap(self) -> int:
        return self.books.batcher.cap


class OracleLengths(BatchingAware):
    """Every output is known: a length model without history takes what is asked for, and that is what is made."""

    def __init__(self, books: Books) -> None:
        super().__init__(books)
        books.lengths = _Oracle()


class _Oracle(LengthModel):
    def observe(self, tenant: str, tier: str, max_tokens: int, produced: int) -> None:
        """Nothing is learned."""


class RefusingEdf(Edf):
    """Earliest deadline first that refuses, in every rank, what even an empty engine would be too late for."""

    def admit(self, request: Request, now: float) -> Request | Refusal:
        return self.overdue(request, now) or request

    def due(self, request: Request) -> float:
        seconds = self.books.alone_seconds(request.prompt_tokens) * self.books.steps.quantile(OPTIMISTIC)
        return min(request.queue_deadline, request.deadline - seconds)

    def overdue(self, request: Request, now: float) -> Refusal | None:
        if self.due(request) > now or request.evictions:
            return None
        return Refusal(Reason.DEADLINE_INFEASIBLE, "too late")


class StrictBands(Policy):
    """Ranks strictly, tenants of a rank by turns; nothing goes while five prompts wait in the engine or memory is 80 %
    full."""

    def candidates(self, now: float) -> Iterator[Offer]:
        books = self.books
        waiting = [tier for tier in books.tiers.values() if books.queue.length(tier.name)]
        unstarted = len(books.batcher) - books.batcher.decoding
        held = books.batcher.blocks / books.capacity.total_blocks
        if not waiting or unstarted >= GATE_QUEUE or held >= GATE_KV:
            return
        band = min(waiting, key=lambda tier: tier.rank).name
        tenant = books.service.tiers[band].next_tenant()
        heads = [head for head in books.queue.heads() if head.tier == band]
        turn = [books.queue.tenant_head(band, head.lane, tenant) for head in heads] if tenant else heads
        for head in [*turn, *heads]:
            if head is not None:
                yield Candidate(head, Reason.RANK_ORDER)
                return


Retier = Callable[[TierSpec], TierSpec]


@dataclass(frozen=True)
class Arm:
    """A policy under a name of its own, and what is different about the tiers."""

    name: str
    policy: type[Policy]
    retier: Retier = lambda tier: tier

    def replay(self, workload: Workload, profile: Profile) -> Replay:
        """The workload under this arm. Raises ReplayError."""
        tiers = {name: self.retier(tier) for name, tier in workload.tiers.items()}
        with _known(self.name, self.policy):
            return replay(replace(workload, tiers=tiers), profile, PolicyConfig(name=self.name))


@contextmanager
def _known(name: str, policy: type[Policy]) -> Iterator[None]:
    """The planner finds policies by name; the arms of a benchmark are none of the product's."""
    before = POLICIES.get(name)
    POLICIES[name] = policy
    try:
        yield
    finally:
        if before is None:
            del POLICIES[name]
        else:
            POLICIES[name] = before


ARMS = {name: Arm(name, policy) for name, policy in POLICIES.items()}
OURS = "batching_aware"
MEMORY = [
    Arm("headroom of present use", PresentMemory),
    Arm("no forecast, no headroom", WithoutForecast),
]
ABLATIONS = [
    Arm("no refusal", BatchingAware, lambda tier: replace(tier, on_infeasible=OnInfeasible.LATE)),
    Arm("no reserved slots", BatchingAware, lambda tier: replace(tier, reserved_slots=0.0)),
    Arm("no floors", BatchingAware, lambda tier: replace(tier, floor=0.0)),
    *MEMORY,
    Arm("one headroom for all", BatchingAware, lambda tier: replace(tier, headroom=MIDDLE_HEADROOM)),
    Arm("no backfill", WithoutBackfill),
    Arm("alpha 1", PlainDeadlines),
    Arm("no controller", WithoutController),
]
BASELINES = [
    Arm("oracle lengths", OracleLengths),
    Arm("edf with refusal", RefusingEdf),
    Arm("strict bands, gated", StrictBands),
    ARMS["article"],
]
