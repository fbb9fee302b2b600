"""How long an engine step takes: a linear model, learned while serving.

    T = b0 + b1 P + b2 P c + b3 D + b4 K      seconds

P prefill tokens of the step, c their mean context, D decoding sequences, K context tokens of those. Least squares with
exponential forgetting (Ljung, System Identification, ch. 11), kept as normal equations and solved now and then: the
recursive form saves little and lost its positive definiteness within thousands of steps. A little of the prior is added
to the equations, so that what the load does not excite stays where it was. Residuals over three standard deviations are
clipped (Huber), so that one stalled step does not bend the model, and coefficients are non-negative, because more work
never takes less time.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

FORGETTING = 0.995
CLIP_SIGMAS = 3.0
UNCLIPPED_STEPS = 64  # at first nothing is known of the spread
LEAST_SIGMA = 0.02  # of the step: smaller spreads are not told apart from rounding
SOLVE_EVERY = 8  # steps
RATIO_WINDOW = 512  # steps
QUANTILE_EVERY = 32  # steps between two sorts of the ratios
BAD_ERROR = 0.30
BAD_STEPS = 100
SCALE = (1.0, 1e-3, 1e-6, 1e-2, 1e-5)  # brings the features to about one
PRIOR_WEIGHT = 1e-3  # in steps

Coefficients = tuple[float, float, float, float, float]
Vector = list[float]


class StepLoad(NamedTuple):
    """What a step has to do. `prefill_context`: mean context of the prefilled tokens."""

    prefill_tokens: int = 0
    decode_seqs: int = 0
    decode_context: int = 0
    prefill_context: float = 0.0


class StepModel:
    """Predicts step times and learns from reports. `prior`: coefficients b0..b4 to start from."""

    def __init__(self, prior: Coefficients) -> None:
        self._prior = [b / s for b, s in zip(prior, SCALE, strict=True)]
        self._weights = list(self._prior)
        self._good: Vector | None = None  # the last weights that were right
        self._matrix = [[0.0] * 5 for _ in range(5)]
        self._right = [0.0] * 5
        self._steps = 0
        self._variance = 0.0
        self._ratios: deque[float] = deque(maxlen=RATIO_WINDOW)
        self._quantiles = (1.0, 1.0, 1.0)  # q10, q50, q90 of actual / predicted
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
        self._steps += 1
        self._note_ratio(elapsed / max(self.predict(load), 1e-9))
        features = _features(load)
        expected = _dot(self._weights, features)
        self._judge(abs(elapsed - expected) / max(elapsed, 1e-9))
        self._add(features, expected + self._clip(elapsed - expected, expected))
        if self._steps % SOLVE_EVERY == 0:
            self._weights = self._solve()
            self._refresh()

    # --- details ----------------------------------------------------------------------------------------------------

    def _clip(self, error: float, expected: float) -> float:
        if self._steps > UNCLIPPED_STEPS and self._bad_steps < BAD_STEPS:
            sigma = max(self._variance**0.5, LEAST_SIGMA * expected)
            error = max(-CLIP_SIGMAS * sigma, min(CLIP_SIGMAS * sigma, error))
        # The spread follows the clipped error: a real change of the engine widens it step by step and is then believed.
        share = max(1 - FORGETTING, 1 / self._steps)
        self._variance += share * (error * error - self._variance)
        return error

    def _add(self, features: Vector, value: float) -> None:
        for i, x in enumerate(features):
            row = self._matrix[i]
            for j, y in enumerate(features):
                row[j] = FORGETTING * row[j] + x * y
            self._right[i] = FORGETTING * self._right[i] + x * value

    def _solve(self) -> Vector:
        """Non-negative least squares: what comes out negative is held at zero and the rest solved again."""
        free = list(range(5))
        while True:
            solution = self._solve_for(free)
            negative = [i for i, w in zip(free, solution, strict=True) if w < 0.0]
            if not negative:
                weights = [0.0] * 5
                for i, w in zip(free, solution, strict=True):
                    weights[i] = w
                return weights
            free = [i for i in free if i not in negative]

    def _solve_for(self, free: list[int]) -> Vector:
        rows = [
            [self._matrix[i][j] + (PRIOR_WEIGHT if i == j else 0.0) for j in free]
            + [self._right[i] + PRIOR_WEIGHT * self._prior[i]]
            for i in free
        ]
        return _eliminate(rows)

    def _judge(self, error: float) -> None:
        if error > BAD_ERROR:
            self._bad_steps += 1
        else:
            self._bad_steps = 0
            self._good = list(self._weights)

    def _note_ratio(self, ratio: float) -> None:
        self._ratios.append(ratio)
        if self._steps % QUANTILE_EVERY == 0:
            ordered = sorted(self._ratios)
            at = [ordered[int(q * (len(ordered) - 1))] for q in (0.1, 0.5, 0.9)]
            self._quantiles = (at[0], at[1], at[2])

    def _refresh(self) -> None:
        weights = self._weights if self._good is None or self.trusted else self._good
        b = [w * s for w, s in zip(weights, SCALE, strict=True)]
        self._used: Coefficients = (b[0], b[1], b[2], b[3], b[4])


def _features(load: StepLoad) -> Vector:
    tokens = load.prefill_tokens
    raw = (1.0, tokens, tokens * load.prefill_context, load.decode_seqs, load.decode_context)
    return [value * scale for value, scale in zip(raw, SCALE, strict=True)]


def _dot(one: Vector, other: Vector) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def _eliminate(rows: list[Vector]) -> Vector:
    """Solve a symmetric positive definite system given as rows of (coefficients, right side)."""
    size = len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[r][j] -= factor * rows[i][j]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
