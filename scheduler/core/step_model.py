"""How long an engine step takes: a linear model, learned while serving.

    T = b0 + b1 P + b2 P c + b3 D + b4 K      seconds

P prefill tokens of the step, c their mean context, D decoding sequences, K context tokens of those. Recursive least
squares with forgetting (Ljung, System Identification, ch. 11): old steps fade, so that the model follows an engine that
changes. Residuals over three standard deviations are clipped (Huber), so that one stalled step does not bend it, and
coefficients stay non-negative, because more work never takes less time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

FORGETTING = 0.995
CLIP_SIGMAS = 3.0
RATIO_WINDOW = 512  # steps
BAD_ERROR = 0.30
BAD_STEPS = 100
SCALE = (1.0, 1e-3, 1e-6, 1e-2, 1e-5)  # brings the features to about one, which keeps the covariance sane
PRIOR_VARIANCE = 1e3  # in units of the noise: the first steps are believed more than the prior
QUANTILE_EVERY = 32  # steps between two sorts of the ratios

Coefficients = tuple[float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step has to do. `prefill_context`: mean context of the prefilled tokens."""

    prefill_tokens: int = 0
    decode_seqs: int = 0
    decode_context: int = 0
    prefill_context: float = 0.0


class StepModel:
    """Predicts step times and learns from reports. `prior`: coefficients b0..b4 to start from."""

    def __init__(self, prior: Coefficients) -> None:
        self._weights = [b / s for b, s in zip(prior, SCALE, strict=True)]
        self._good: list[float] | None = None  # the last weights that were right
        self._covariance = [[PRIOR_VARIANCE if i == j else 0.0 for j in range(5)] for i in range(5)]
        self._variance = 0.0
        self._ratios: deque[float] = deque(maxlen=RATIO_WINDOW)
        self._quantiles = (1.0, 1.0, 1.0)  # q10, q50, q90 of actual / predicted
        self._since_sort = 0
        self._bad_steps = 0
        self._refresh()

    @property
    def coefficients(self) -> Coefficients:
        """b0..b4 in use."""
        return self._used

    @property
    def trusted(self) -> bool:
        """False while the last good model stands in, because the learned one has been wrong for long."""
        return self._good is None or self._bad_steps < BAD_STEPS

    def quantile(self, q: float) -> float:
        """Actual over predicted at q = 0.1, 0.5 or 0.9."""
        low, middle, high = self._quantiles
        return low if q < 0.3 else high if q > 0.7 else middle

    def predict(self, load: StepLoad) -> float:
        """Seconds of a step with that load."""
        b0, b1, b2, b3, b4 = self._used
        tokens = load.prefill_tokens
        return b0 + tokens * (b1 + b2 * load.prefill_context) + b3 * load.decode_seqs + b4 * load.decode_context

    def learn(self, load: StepLoad, elapsed: float) -> None:
        """One step with that load took `elapsed` seconds."""
        self._note_ratio(elapsed / max(self.predict(load), 1e-9))
        features = (
            1.0 * SCALE[0],
            load.prefill_tokens * SCALE[1],
            load.prefill_tokens * load.prefill_context * SCALE[2],
            load.decode_seqs * SCALE[3],
            load.decode_context * SCALE[4],
        )
        error = elapsed - sum(w * x for w, x in zip(self._weights, features, strict=True))
        self._judge(abs(error) / max(elapsed, 1e-9))
        self._update(features, self._clip(error))
        self._refresh()

    def _clip(self, error: float) -> float:
        if self._variance > 0.0:
            bound = CLIP_SIGMAS * self._variance**0.5
            error = max(-bound, min(bound, error))
        # The spread follows the clipped error too: a real change of the engine widens it and is then believed.
        self._variance = max(FORGETTING * self._variance + (1 - FORGETTING) * error * error, 1e-12)
        if len(self._ratios) < 8:
            self._variance = max(self._variance, error * error)
        return error

    def _update(self, x: tuple[float, ...], error: float) -> None:
        covariance = self._covariance
        gain = [sum(row[j] * x[j] for j in range(5)) for row in covariance]
        denominator = FORGETTING + sum(x[i] * gain[i] for i in range(5))
        for i in range(5):
            self._weights[i] = max(self._weights[i] + gain[i] / denominator * error, 0.0)
            for j in range(5):
                covariance[i][j] = (covariance[i][j] - gain[i] * gain[j] / denominator) / FORGETTING
            covariance[i][i] = min(covariance[i][i], PRIOR_VARIANCE)  # forgetting must not blow up what is not excited

    def _judge(self, error: float) -> None:
        if error > BAD_ERROR:
            self._bad_steps += 1
        else:
            self._bad_steps = 0
            self._good = list(self._weights)

    def _note_ratio(self, ratio: float) -> None:
        self._ratios.append(ratio)
        self._since_sort += 1
        if self._since_sort >= QUANTILE_EVERY:
            self._since_sort = 0
            ordered = sorted(self._ratios)
            at = [ordered[int(q * (len(ordered) - 1))] for q in (0.1, 0.5, 0.9)]
            self._quantiles = (at[0], at[1], at[2])

    def _refresh(self) -> None:
        weights = self._weights if self._good is None or self.trusted else self._good
        b = [w * s for w, s in zip(weights, SCALE, strict=True)]
        self._used: Coefficients = (b[0], b[1], b[2], b[3], b[4])
