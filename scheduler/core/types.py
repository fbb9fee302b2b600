"""The values that the scheduling core is made of.

Pure: standard library only. Time is a float of seconds on one monotonic clock and comes in as an argument. Nothing
here knows a tier by its name; the order of importance is `TierSpec.rank` (1 is the best).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Lane(StrEnum):
    """Where a request of a tier waits: long prompts must not stand before short ones."""

    SHORT = "short"
    LONG = "long"
    LATE = "late"  # can no longer meet its deadline and is served all the same


class OnInfeasible(StrEnum):
    """What happens to a request that can no longer meet its deadline."""

    LATE = "late"
    REJECT = "reject"


class Contract(StrEnum):
    """What a tier promises: first token and pace, or the last token whatever the length."""

    TTFT_TPOT = "ttft_tpot"
    E2E_TOTAL = "e2e_total"


class Reason(StrEnum):
    """Why the scheduler did, or did not do, something with a request.

    The value is a stable code: it appears in decision traces, metrics and, for refusals, in the table that maps it to
    a wire error (`harness_web/openai/errors.py`).
    """

    # refused at arrival: the request itself
    CONTEXT_LENGTH = "context_length_exceeded"
    NEVER_FITS = "never_fits"
    INVALID_PROMPT = "invalid_prompt"
    MODEL_NOT_SERVED = "model_not_served"
    # refused at arrival: the caller's own limits
    LIMIT_RPM = "limit_rpm"
    LIMIT_TPM = "limit_tpm"
    LIMIT_CONCURRENCY = "limit_concurrency"
    LIMIT_KEY_SPEND = "limit_key_spend"  # hard budgets: whose it is, and whether of money or of tokens
    LIMIT_KEY_TOKENS = "limit_key_tokens"
    LIMIT_TENANT_SPEND = "limit_tenant_spend"
    LIMIT_TENANT_TOKENS = "limit_tenant_tokens"
    LIMIT_TOO_LARGE = "limit_too_large"
    TIER_NOT_ALLOWED = "tier_not_allowed"
    NO_PRICE = "no_price"
    # refused for our reasons
    QUEUE_FULL = "queue_full"
    ENGINE_NOT_READY = "engine_not_ready"
    DRAINING = "draining"
    SPOOL_UNAVAILABLE = "spool_unavailable"
    BUDGET_UNAVAILABLE = "budget_unavailable"
    DEADLINE_INFEASIBLE = "deadline_infeasible"
    DEADLINE_UNREACHABLE = "deadline_unreachable"  # also on an idle engine
    DEGRADED = "degraded"
    # left the queue without running
    QUEUE_TIMEOUT = "queue_timeout"
    CLIENT_GONE = "client_gone"
    # why a head was not dispatched in a round
    SLOTS_FULL = "slots_full"
    SLOTS_RESERVED = "slots_reserved"
    KV_FULL = "kv_full"
    WAIT_WINDOW = "wait_window"
    BATCH_RUNNING = "batch_running"  # the next batch begins when this one has ended
    BATCH_CLOSED = "batch_closed"  # the batch of this decision takes no more
    PREFILL_BUDGET = "prefill_budget"
    STREAM_PACE = "stream_pace"
    LONG_LANE = "long_lane"
    RESERVATION = "reservation"
    RANKED_BEHIND = "ranked_behind"
    # why a request was dispatched
    ARRIVAL_ORDER = "arrival_order"
    RANK_ORDER = "rank_order"
    DEADLINE_ORDER = "deadline_order"
    FLOOR_GUARD = "floor_guard"
    URGENT = "urgent"
    FAIR_TURN = "fair_turn"
    LATE_TURN = "late_turn"
    # why a running request left the engine other than by itself
    PREEMPTED = "preempted"  # for a better rank; it goes on later
    ENGINE_FAILED = "engine_failed"
    REQUEST_FAILED = "request_failed"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier's contract, as operators set it (`docs/operations.md`, Tiers). Seconds and shares."""

    name: str
    rank: int
    weight: float = 1.0
    floor: float = 0.0
    ttft: float = 5.0
    e2e: float = 5.0
    tpot: float = 0.25
    objective: float = 0.99
    availability: float = 0.99
    contract: Contract = Contract.TTFT_TPOT
    on_infeasible: OnInfeasible = OnInfeasible.LATE
    headroom: float = 0.20
    reserved_slots: float = 0.0
    preemptible: bool = False
    queue_max_length: int = 10_000
    queue_max_wait: float = 60.0
    min_slo_threshold: float | None = None  # None: the own deadline
    max_tokens: int = 4096

    def slo_threshold(self, stream: bool, asked: float) -> float:
        """What counts of the total deadline that a request asks for: a looser one always, a tighter one to a limit."""
        own = self.ttft if stream and self.contract is Contract.TTFT_TPOT else self.e2e
        return max(asked, own if self.min_slo_threshold is None else min(self.min_slo_threshold, own))

    def deadline(self, arrival: float, stream: bool, max_tokens: int, slo_threshold: float | None) -> float:
        """The instant of the contract point: first token for streams, last token otherwise."""
        if self.contract is Contract.E2E_TOTAL:
            return arrival + (slo_threshold or self.e2e)
        if stream:
            return arrival + (slo_threshold or self.ttft)
        return arrival + (slo_threshold or self.e2e + max(max_tokens - 1, 0) * self.tpot)


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """What one engine can hold: sequences and KV tokens at a time, tokens per step, tokens per request."""

    max_seqs: int
    step_tokens: int
    kv_tokens: int
    block_size: int
    max_model_len: int

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    @property
    def total_blocks(self) -> int:
        return self.kv_tokens // self.block_size


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Scheduling parameters of one policy version; the names are those of `POST /v1/config` under `policy`."""

    version: int = 0
    name: str = "batching_aware"
    max_batch: int | None = None  # in-flight cap; None = the engine's max_seqs
    max_wait_ms: float = 0.0  # how long an idle engine may wait for company; 0 = the policy's own time
    step_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the core sees it: rendered, so that its prompt length is exact."""

    id: str
    tenant: str
    tier: str
    arrival: float
    prompt_tokens: int
    max_tokens: int
    stream: bool
    deadline: float  # instant of the contract point
    queue_deadline: float  # instant at which waiting ends with QUEUE_TIMEOUT
    lane: Lane = Lane.SHORT
    attempt: int = 1
    resumable: bool = False  # it may be taken out of the engine and continued later
    evictions: int = 0  # how often that has happened; a request that was is not refused any more
    prompt_bytes: int = 0  # of memory that its prompt takes while it waits
    sequences: int = 1  # answers to its prompt, each with a slot and memory of its own, and with up to `max_tokens`

    @property
    def worst_case_tokens(self) -> int:
        """What it is charged for if it produces everything it may: the prompt counts once."""
        return self.prompt_tokens + self.sequences * self.max_tokens

    @property
    def longest_context(self) -> int:
        """Tokens of context of an answer that is as long as it may be."""
        return self.prompt_tokens + self.max_tokens

    def per_sequence(self, tokens: int) -> int:
        """The part of one answer in what all of them have produced, rounded up."""
        return -(-tokens // self.sequences)


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of a tenant or key, as it applies to a request. Mirrors `scheduler.wire.messages.LimitSpec`."""

    scope: str  # tenant | key
    owner: str
    model: str  # "" = all models
    kind: str  # rpm | tpm | concurrency
    value: int


# --- decisions: what the planner returns; the worker acts on them --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Hand the request to the engine now, as part of batch `batch_id` (one batch = one decision)."""

    request: Request
    batch_id: str
    reason: Reason
    engine_priority: int  # smaller first: the deadline in microseconds


@dataclass(frozen=True, slots=True)
class Expire:
    """Waiting is over: answer the caller with `reason` and forget the request."""

    request: Request
    reason: Reason
    retry_after: float | None = None  # seconds; None = no advice
    message: str | None = None  # for the caller; None = it waited too long


@dataclass(frozen=True, slots=True)
class Hold:
    """A head that could run was not chosen in this round, and why (for the decision trace)."""

    request: Request
    reason: Reason


@dataclass(frozen=True, slots=True)
class Preempt:
    """Take a running request out of the engine for `beneficiary`; once it has left, call `Planner.evicted`."""

    request: Request
    beneficiary: Request


Decision = Dispatch | Expire | Hold | Preempt


RETRY_AFTER_BOUNDS = (1.0, 60.0)  # seconds


def retry_advice(seconds: float) -> float:
    """When to come back for what should be possible in `seconds`: no stampede, and no promise for a far future."""
    low, high = RETRY_AFTER_BOUNDS
    return min(max(seconds, low), high)


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to an arrival that is not accepted."""

    reason: Reason
    message: str
    retry_after: float | None = None  # seconds; None = retrying cannot help


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one engine step did. Counts are of this step; `kv_usage` is a share 0..1 after it."""

    at: float
    elapsed: float
    prefill_tokens: int
    decode_seqs: int
    running: int
    waiting: int
    kv_usage: float
    preemptions: int = 0
    decode_context: int = 0  # KV tokens of the decoding sequences
    steps: int = 1  # a replay reports a run of like steps as one
    padded_tokens: int = 0  # computed for nothing: padding, and rows of a static batch that have ended
    shaper_failure: str | None = None  # why the engine does without its step shaper from now on


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended, as the core needs it (tokens delivered to this process)."""

    completion_tokens: int
    reason: Reason | None = None  # None: it ended by itself


@dataclass(slots=True)
class TierSnapshot:
    """A tier of one pool at one instant: requests that wait, sequences that run."""

    waiting: int = 0
    running: int = 0
    oldest_wait: float = 0.0


@dataclass(slots=True)
class PoolSnapshot:
    """What `GET /v1/queue/status` and the console show of one planner. `in_flight` and `cap` are sequences."""

    tiers: dict[str, TierSnapshot] = field(default_factory=dict)
    in_flight: int = 0
    cap: int = 0
    level: int = 0  # of degradation
    kv_reserved: float = 0.0
