"""What web and scheduler say to each other: msgpack arrays, one struct per message, tagged by a small integer.

A frame is a 4-byte big-endian length, one byte `PROTOCOL`, and one message (`codec.py`); a peer of another version is
told so by a Goodbye and closed. Web speaks first. On one connection:

    web                                   scheduler
    Hello            ->
                     <-                   Welcome          (epoch, models), then Models whenever a state changes
    Submit, Cancel   ->
                     <-                   Accepted | Refused, then Events (one frame per step and connection)
    Ask              ->
                     <-                   Answer
    Ping             ->                   and the other way round, when the peer has been silent for a second
                     <-                   Pong
                     <-                   Snapshot         (role "telemetry" only, one a second, one-way)
                     <-                   Goodbye          (draining: submit elsewhere, keep reading)
"""

from __future__ import annotations

from typing import Any

import msgspec

from scheduler.engines.base import Sampling, TokenLogprob, ToolCallDelta

PROTOCOL = 2
MAX_FRAME = 32 * 1024 * 1024  # bytes: a 16 MiB body, re-encoded, fits with room


class Message(msgspec.Struct, array_like=True, gc=False):
    """Base of all messages."""


class Hello(Message, tag=1):
    peer: str  # name of the web process, for logs
    role: str  # "requests" | "telemetry"


class Welcome(Message, tag=2):
    scheduler: str  # name of the scheduler process
    epoch: int
    models: dict[str, str]  # model -> state (starting | ready | failed | draining)


class Models(Message, tag=17):
    """The models of the scheduler process have changed: replaces what Welcome said, as a whole."""

    models: dict[str, str]


class LimitSpec(Message, tag=30):
    """One limit that applies to a request. `scope` and `owner` identify the counter it is charged to."""

    scope: str  # tenant | key
    owner: str  # tenant or key id
    model: str  # "" = all models
    kind: str  # rpm | tpm | concurrency
    value: int


class BudgetSpec(Message, tag=34):
    """One budget that applies to a request. `value` is in tokens, or in 1e-10 of the currency that `unit` names."""

    scope: str  # tenant | key
    owner: str
    model: str  # "" = all models
    unit: str  # "tokens" or a currency
    period: str  # minute | hour | day | week | month | total
    zone: str  # whose calendar the period follows
    value: int
    hard: bool
    alerts: tuple[float, ...] = ()  # shares of the value


class Caller(Message, tag=31):
    """Who is asking, as authentication established it. Never taken from the body."""

    tenant: str  # tenant id
    tenant_slug: str
    key: str  # key id
    tier: str  # tier of the key's tenant: billing stays here
    limits: tuple[LimitSpec, ...] = ()
    version: int = 0  # change version this was read at
    key_name: str = ""  # as it stands in the usage record
    budgets: tuple[BudgetSpec, ...] = ()


class Submit(Message, tag=3):
    id: str
    attempt: int
    age: float  # seconds between arrival (request read) and this message
    caller: Caller
    model: str
    messages: tuple[dict[str, Any], ...]
    sampling: Sampling
    stream: bool
    priority: str | None = None  # high | normal | low; may lower, never raise
    slo_threshold: float | None = None  # seconds
    queue_timeout: float | None = None  # seconds
    simulate: dict[str, Any] | None = None
    project: str = ""  # the caller's own tag, for reports
    service_tier: str = ""  # as OpenAI names them; "" = whatever the key is entitled to


class Cancel(Message, tag=4):
    id: str


class Accepted(Message, tag=5):
    """The request is in the queue.

    `limits`: counters after its reservation, for the x-ratelimit headers. `degradation`: level of its pool, 0 to 4.
    """

    id: str
    tier: str  # the tier it runs as
    prompt_tokens: int
    limits: dict[str, float] = {}  # e.g. {"limit-requests": 600, "remaining-requests": 599, "reset-requests": 1.0}
    degradation: int = 0
    service_tier: str = ""  # what it runs as, in OpenAI's words


class Refused(Message, tag=6):
    """Answer to a Submit that will not run, or end of a queued request. `reason` is a core `Reason` value."""

    id: str
    reason: str
    message: str
    param: str | None = None
    retry_after: float | None = None
    limits: dict[str, float] = {}
    degradation: int = 0


class Delta(Message, tag=7):
    """What has come of one answer of a request. A `finish_reason` is its end; the last answer's is in Done instead."""

    id: str
    text: str
    tokens: int  # produced so far, by all answers
    index: int = 0  # of the answer
    finish_reason: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()


class BatchInfo(Message, tag=33):
    batch_id: str
    batch_size: float  # mean sequences per step while it ran
    wait_time: float  # arrival to dispatch, seconds
    compute_time: float  # dispatch to last token, seconds


class Done(Message, tag=8):
    """End by itself. The usage row is in the spool before this is sent.

    `finish_reason`, `text` and `logprobs` are those of the answer `index`, which was the last one to end.
    """

    id: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    batch: BatchInfo
    text: str = ""
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()


class Failed(Message, tag=9):
    """End by a fault. `reason` is a core `Reason` value, or the gateway's own `scheduler_lost`."""

    id: str
    reason: str
    message: str
    completion_tokens: int = 0


class Events(Message, tag=10):
    """Everything of one engine step for one connection, in order."""

    events: tuple[Delta | Done | Failed | Refused | Accepted, ...]


class Ask(Message, tag=11):
    """A question to the scheduler process; `worker/runtime.py` has the list of what can be asked."""

    id: str
    what: str
    args: dict[str, Any] = {}


class Answer(Message, tag=12):
    id: str
    value: Any = None
    error: str | None = None


class LimitState(Message, tag=35):
    """How one limit or budget of a caller stands; the fields are those of `scheduler.core.budgets.Standing`."""

    scope: str
    owner: str
    model: str
    kind: str
    unit: str
    period: str
    limit: int
    used: int
    reserved: int
    remaining: int
    reset: float | None


class QueueState(Message, tag=36):
    """The queue of the caller's tier at one model. `expected_wait`: seconds until it has gone; None: not known."""

    model: str
    waiting: int
    running: int
    expected_wait: float | None


class Limits(Message, tag=37):
    """Value of the Answer to the question `limits`: the caller's limits, then its budgets, in the caller's order."""

    at: float  # Unix time
    limits: tuple[LimitState, ...] = ()
    queues: tuple[QueueState, ...] = ()
    unavailable: str = ""  # why nothing of this is known


class Ping(Message, tag=13):
    seq: int


class Pong(Message, tag=14):
    seq: int


class Snapshot(Message, tag=15):
    """Telemetry of one scheduler process at one instant; the shape of `value` is `worker/telemetry.py`'s."""

    seq: int
    value: dict[str, Any]


class Goodbye(Message, tag=16):
    reason: str


AnyMessage = (
    Hello
    | Welcome
    | Models
    | Submit
    | Cancel
    | Accepted
    | Refused
    | Events
    | Ask
    | Answer
    | Ping
    | Pong
    | Snapshot
    | Goodbye
)
