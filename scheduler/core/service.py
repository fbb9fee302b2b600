"""Who has received how much engine time, and whose turn that makes it.

The unit is the engine-second. A step's time is shared by its requests by marginal cost, the constant part by head
count; the sum of all shares is the busy time, exactly. Decoding requests are charged through three running integrals,
so that a step costs O(1) however many requests decode:

    share of one decoding request in step k = s_k (b0 / N_k + b3) + s_k b4 (x + k),    context = x + k
    => over steps:  A + x B + C    with  A = sum s (b0 / N + b3),  B = sum s b4,  C = sum s b4 k

s_k scales the model's prediction to the time that the step really took.

Virtual time of a tier is V = S / w (start-time fair queueing, Goyal, Vin and Cheng, 1996); a tier that returns after a
pause starts at the running maximum of the least V among the backlogged, so that idleness earns no credit. The floor
credit F of a tier grows by its floor times the busy time while it waits, and falls by what it receives.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field

from scheduler.core.types import Request

FLOOR_CLAMP = 2.0  # engine-seconds
# A tier with that much credit goes before everybody as soon as a slot is free. What it is owed until then counts too:
# forgotten each time, it would add up.
FLOOR_MOST = 3.0
IDLE_TENANTS_KEPT = 10_000


@dataclass(slots=True)
class Integrals:
    """A, B, C and the step index; see the module text."""

    a: float = 0.0
    b: float = 0.0
    c: float = 0.0
    index: int = 0


class Meter:
    """Engine-seconds of a group of decoding requests (of one request, of a tenant, of a tier)."""

    __slots__ = ("_a", "_b", "_c", "_count", "_frame", "_index", "_integrals", "_settled")

    def __init__(self, integrals: Integrals) -> None:
        self._integrals = integrals
        self._settled = 0.0
        self._count = 0
        self._frame = 0  # sum of (context - step index) at joining
        self._a, self._b, self._c, self._index = integrals.a, integrals.b, integrals.c, integrals.index

    def read(self) -> float:
        """Engine-seconds so far."""
        now = self._integrals
        if self._index == now.index:  # a decision reads each a dozen times between two steps
            return self._settled
        if self._count:
            self._settled += (
                self._count * (now.a - self._a) + self._frame * (now.b - self._b) + self._count * (now.c - self._c)
            )
        self._a, self._b, self._c, self._index = now.a, now.b, now.c, now.index
        return self._settled

    def charge(self, seconds: float) -> None:
        """Add a share that does not come from decoding."""
        self._settled += seconds

    def join(self, frame: int, count: int = 1) -> None:
        """`count` more sequences decode; `frame` is the context of each minus the step index."""
        self.read()
        self._count += count
        self._frame += count * frame

    def leave(self, frame: int, count: int = 1) -> None:
        self.read()
        self._count -= count
        self._frame -= count * frame


@dataclass(slots=True)
class Account:
    """Service of a tier, or of a tenant inside a tier."""

    weight: float
    meter: Meter
    offset: float = 0.0  # virtual time that was skipped while away
    outstanding: float = 0.0  # predicted cost of what runs
    settled: float = 0.0  # service of requests that have ended
    waiting: int = 0
    running: int = 0
    turn: int = -1  # of a tenant: its entry in `TierAccount.turns`; others are left over

    def virtual(self) -> float:
        """V. A background tier has none: it comes after everybody."""
        return self.offset + self.meter.read() / self.weight if self.weight > 0 else math.inf

    def order(self) -> float:
        """V plus what is on its way: dispatched, predicted, not yet measured."""
        if self.weight <= 0:
            return math.inf
        received = self.meter.read()
        pending = max(self.outstanding - (received - self.settled), 0.0)
        return self.offset + received / self.weight + pending / self.weight


@dataclass(slots=True)
class TierAccount:
    """A tier's account, its tenants' and its floor credit."""

    own: Account
    floor: float
    tenants: dict[str, Account] = field(default_factory=dict)
    credit: float = 0.0  # F
    seen: float = 0.0  # service at the last update of F
    least: float = 0.0  # running maximum of the least V among its backlogged tenants
    waiting_tenants: int = 0
    turns: list[tuple[float, int, str]] = field(default_factory=list)  # heap of (order when pushed, entry, tenant)

    def next_tenant(self) -> str | None:
        """The waiting tenant that has received least. An entry is old when its tenant has received since."""
        turns = self.turns
        while turns:
            pushed, entry, tenant = turns[0]
            member = self.tenants.get(tenant)
            if member is None or not member.waiting or member.turn != entry:
                heapq.heappop(turns)
                continue
            order = member.order()
            if order <= pushed + 1e-9:
                self.least = max(self.least, member.virtual())
                return tenant
            heapq.heapreplace(turns, (order, entry, tenant))
        return None


@dataclass(slots=True)
class Charge:
    """What one running request is charged through."""

    meter: Meter
    tier: TierAccount
    tenant: Account
    name: str  # of the tenant
    cost: float
    sequences: int = 1
    frame: int | None = None  # of each of its sequences; not None while they decode

    def meters(self) -> tuple[Meter, Meter, Meter]:
        return (self.meter, self.tier.own.meter, self.tenant.meter)


class Service:
    """The accounts of one pool. Tiers of weight 0 are background: they never set the pace of others."""

    def __init__(self, floors_and_weights: dict[str, tuple[float, float]]) -> None:
        self.busy = 0.0
        self.unattributed = 0.0  # engine time of steps for which nobody was in the books yet; goes to the next step
        self.integrals = Integrals()
        self.tiers: dict[str, TierAccount] = {}
        self._charges: dict[str, Charge] = {}
        self._prefilling: dict[str, int] = {}  # id -> prompt tokens not yet computed, in order of admission
        self._decoding = 0
        self._frames = 0
        self._least = 0.0  # v
        self._entries = itertools.count()
        self.configure(floors_and_weights)

    def configure(self, floors_and_weights: dict[str, tuple[float, float]]) -> None:
        """New floors and weights; what was received stays received."""
        total = sum(weight for _, weight in floors_and_weights.values()) or 1.0
        for name, (floor, weight) in floors_and_weights.items():
            share = weight / total
            account = self.tiers.get(name)
            if account is None:
                self.tiers[name] = TierAccount(Account(share, Meter(self.integrals), offset=self._least), floor)
            else:
                _reweigh(account.own, share)
                account.floor = floor

    # --- what happens -----------------------------------------------------------------------------------------------

    def arrived(self, tier: str, tenant: str) -> None:
        """A request waits. A tier or tenant that had none waiting starts at the pace of those that had."""
        account = self.tiers[tier]
        if not account.own.waiting and account.own.weight > 0:
            account.own.offset += max(self._least - account.own.virtual(), 0.0)
        account.own.waiting += 1
        member = account.tenants.get(tenant)
        if member is None:
            member = account.tenants[tenant] = Account(1.0, Meter(self.integrals))
            self._forget_idle(account)
        if not member.waiting:
            member.offset += max(account.least - member.virtual(), 0.0)
            self._take_turn(account, tenant, member)
            account.waiting_tenants += 1
        member.waiting += 1

    def left_queue(self, tier: str, tenant: str) -> None:
        account = self.tiers[tier]
        member = account.tenants[tenant]
        account.own.waiting -= 1
        member.waiting -= 1
        account.waiting_tenants -= not member.waiting

    def dispatched(self, request: Request, cost: float) -> None:
        """A request runs; `cost` is its predicted engine time."""
        account = self.tiers[request.tier]
        member = account.tenants[request.tenant]
        meter = Meter(self.integrals)
        self._charges[request.id] = Charge(meter, account, member, request.tenant, cost, request.sequences)
        self._prefilling[request.id] = request.prompt_tokens
        for one in (account.own, member):
            one.outstanding += cost
            one.running += 1

    def started(self, request_id: str, context: int) -> None:
        """Its first token is here: from the next step on it decodes, each of its sequences with `context` tokens."""
        self._prefilling.pop(request_id, None)
        charge = self._charges[request_id]
        charge.frame = context - self.integrals.index
        self._decoding += charge.sequences
        self._frames += charge.sequences * charge.frame
        for meter in charge.meters():
            meter.join(charge.frame, charge.sequences)

    def meter(self, request_id: str) -> Meter:
        """What counts the engine-seconds of a running request; it goes on telling them when it has ended."""
        return self._charges[request_id].meter

    def charged(self, request_id: str) -> float:
        """Engine-seconds that a running request has been charged so far."""
        return self._charges[request_id].meter.read()

    def ended(self, request_id: str) -> float:
        """It has left the engine. Answers the engine-seconds that it was charged."""
        charge = self._charges.pop(request_id)
        self._prefilling.pop(request_id, None)
        if charge.frame is not None:
            self._decoding -= charge.sequences
            self._frames -= charge.sequences * charge.frame
            for meter in charge.meters():
                meter.leave(charge.frame, charge.sequences)
        seconds = charge.meter.read()
        for one in (charge.tier.own, charge.tenant):
            one.outstanding -= charge.cost
            one.settled += seconds
            one.running -= 1
        if charge.tenant.waiting:  # it may have cost less than predicted: its turn comes earlier than noted
            self._take_turn(charge.tier, charge.name, charge.tenant)
        return seconds

    def step(self, elapsed: float, prefill_tokens: int, coefficients: tuple[float, ...], steps: int = 1) -> None:
        """Share one step's time among those who were in it."""
        self.busy += elapsed
        b0, b1, _, b3, b4 = coefficients
        chunks = self._take_chunks(prefill_tokens)
        heads = self._decoding + len(chunks)
        integrals = self.integrals
        if not heads:
            self.unattributed += elapsed
            integrals.index += steps
            self._update_credits(elapsed)
            return
        context = self._frames + self._decoding * integrals.index
        computed = sum(tokens for _, tokens in chunks)
        predicted = steps * (b0 + b3 * self._decoding + b4 * context) + b1 * computed
        scale = (elapsed + self.unattributed) / max(predicted, 1e-12)
        if predicted <= 1e-12:  # an engine that costs nothing by the model: share by head count
            scale, b0 = 1.0, (elapsed + self.unattributed) / steps
        self.unattributed = 0.0
        head = scale * steps * b0 / heads
        integrals.a += head + scale * steps * b3
        integrals.b += scale * steps * b4
        integrals.c += scale * steps * b4 * integrals.index
        integrals.index += steps
        for charge, tokens in chunks:
            for meter in charge.meters():
                meter.charge(head + scale * b1 * tokens)
        self._update_credits(elapsed)

    def pace(self) -> float:
        """Advance v: the running maximum of the least V among tiers that wait. Call before ordering."""
        waiting = [t.own.virtual() for t in self.tiers.values() if t.own.waiting and t.own.weight > 0]
        if waiting:
            self._least = max(self._least, min(waiting))
        return self._least

    def remaining_prefill(self) -> int:
        """Prompt tokens of running requests that are not computed yet."""
        return sum(self._prefilling.values())

    def prefill_left(self, request_id: str) -> int:
        return self._prefilling.get(request_id, 0)

    # --- details ----------------------------------------------------------------------------------------------------

    def _take_turn(self, account: TierAccount, tenant: str, member: Account) -> None:
        member.turn = next(self._entries)
        heapq.heappush(account.turns, (member.order(), member.turn, tenant))

    def _take_chunks(self, tokens: int) -> list[tuple[Charge, int]]:
        """Engines hide whose prompt a step has computed: in order of admission, corrected at the first token."""
        chunks = []
        for request_id, left in self._prefilling.items():
            if tokens <= 0:
                break
            chunk = min(left, tokens)
            if chunk > 0:
                self._prefilling[request_id] = left - chunk
                chunks.append((self._charges[request_id], chunk))
                tokens -= chunk
        return chunks

    def _update_credits(self, busy: float) -> None:
        for account in self.tiers.values():
            service = account.own.meter.read()
            gained = account.floor * busy if account.own.waiting else 0.0
            credit = account.credit + gained - (service - account.seen)
            account.credit = max(-FLOOR_CLAMP, min(FLOOR_MOST, credit))
            account.seen = service

    def _forget_idle(self, account: TierAccount) -> None:
        if len(account.tenants) > IDLE_TENANTS_KEPT:
            for name, member in list(account.tenants.items()):
                if not member.waiting and not member.running and member.virtual() <= account.least:
                    del account.tenants[name]


def _reweigh(account: Account, weight: float) -> None:
    """Change the weight without moving V."""
    virtual = account.virtual() if account.weight > 0 else account.offset
    account.weight = weight
    account.offset = virtual - (account.meter.read() / weight if weight > 0 else 0.0)
