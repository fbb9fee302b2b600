"""The books of one pool: what waits, what runs, what it costs and who received what. Policies read them.

Only the planner writes here. Everything is our own knowledge: an engine that reports late or never does not make the
books wrong, only its step times old.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.core.batcher import Batcher
from scheduler.core.controller import CapChange
from scheduler.core.degradation import LevelChange
from scheduler.core.length_model import LengthModel
from scheduler.core.queue import WaitingQueue
from scheduler.core.service import Service
from scheduler.core.step_model import StepLoad, StepModel
from scheduler.core.types import PolicyConfig, PoolCapacity, Request, TierSpec

MEDIAN = 0.5
CHANGES_KEPT = 64


@dataclass(slots=True)
class Books:
    """See the module text. `step_end`: predicted end of the running step."""

    capacity: PoolCapacity
    tiers: dict[str, TierSpec]
    config: PolicyConfig
    batcher: Batcher
    steps: StepModel
    queue: WaitingQueue = field(default_factory=WaitingQueue)
    lengths: LengthModel = field(default_factory=LengthModel)
    service: Service = field(init=False)
    step_end: float = 0.0
    level: int = 0  # of degradation
    evicting: str | None = None  # the running request that is being taken out of the engine
    changes: deque[LevelChange | CapChange] = field(default_factory=lambda: deque(maxlen=CHANGES_KEPT))

    def __post_init__(self) -> None:
        self.service = Service({name: (tier.floor, tier.weight) for name, tier in self.tiers.items()})

    def tier(self, request: Request) -> TierSpec:
        return self.tiers[request.tier]

    # --- predictions ------------------------------------------------------------------------------------------------

    def expected_tokens(self, request: Request, quantile: float = MEDIAN, produced: int = 0) -> int:
        """Output of one answer of a request at that quantile, never more than `max_tokens`."""
        return self.lengths.quantile(request.tenant, request.tier, request.max_tokens, quantile, produced)

    def load(self, prefill_tokens: int = 0) -> StepLoad:
        """The next step as the books see it, with that much prefill."""
        return StepLoad(prefill_tokens, self.batcher.decoding, self.batcher.context)

    def step_time(self, prefill_tokens: int = 0) -> float:
        """Predicted seconds of the next step."""
        return self.steps.predict(self.load(prefill_tokens))

    def residual(self, now: float) -> float:
        """Predicted seconds until the running step ends."""
        return max(self.step_end - now, 0.0) if len(self.batcher) else 0.0

    def prefill_seconds(self, prompt_tokens: int, ahead: int = 0) -> float:
        """From the start of a step to the first token of a prompt with `ahead` prompt tokens in front of it."""
        room = max(self.capacity.step_tokens - self.batcher.decoding, 1)
        total = prompt_tokens + ahead
        steps = -(-total // room)
        b1 = self.steps.coefficients[1]
        return steps * self.step_time() + b1 * total

    def alone_seconds(self, prompt_tokens: int) -> float:
        """The same on an empty engine: no request can be faster."""
        steps = -(-prompt_tokens // self.capacity.step_tokens)
        b0, b1, *_ = self.steps.coefficients
        return steps * b0 + b1 * prompt_tokens

    def cost(self, request: Request) -> float:
        """Engine-seconds that the request will be charged, at the present batch size."""
        b0, b1, _, b3, b4 = self.steps.coefficients
        tokens = self.expected_tokens(request)
        heads = max(self.batcher.decoding, min(self.batcher.cap, 8))
        prefill_steps = -(-request.prompt_tokens // self.capacity.step_tokens)
        produced = request.sequences * tokens
        return (
            b1 * request.prompt_tokens
            + produced * (b3 + b4 * (request.prompt_tokens + tokens / 2))
            + (produced + prefill_steps) * b0 / heads
        )


def tier_table(tiers: Mapping[str, TierSpec]) -> dict[str, tuple[float, float]]:
    """Floors and weights, as `Service.configure` takes them."""
    return {name: (tier.floor, tier.weight) for name, tier in tiers.items()}
