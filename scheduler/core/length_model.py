"""How much a request will still produce, from what like requests produced.

Histograms over powers of two, by (tenant, bucket of max_tokens), by (tier, bucket) and over everything; a small group
borrows from the larger one (shrinkage: the parent counts like `PSEUDO` observations). Always conditional on what has
been produced already: a request that has passed the median is not average any more. `max_tokens` is the cap.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import OrderedDict

BUCKETS = 22  # up to 2 M tokens
PSEUDO = 20.0
MAX_GROUPS = 20_000  # tenants are forgotten from the least recently seen
AGE_AT = 4096.0  # observations of a group are halved here, so that it follows its tenant
REFRESH_SHARE = 50  # a curve may be 2 % of the observations old
REFRESH_MOST = 256

Histogram = list[float]


def bucket(tokens: int) -> int:
    """0 for 1, 1 for 2, 2 for 3..4, 3 for 5..8 …"""
    return min(max(tokens - 1, 0).bit_length(), BUCKETS - 1)


def _bounds(index: int) -> tuple[float, float]:
    return (0.0, 1.0) if index == 0 else (2.0 ** (index - 1), 2.0**index)


class LengthModel:
    """Learns from ends (`observe`), answers quantiles of the total output length."""

    def __init__(self) -> None:
        self._all: Histogram = [0.0] * BUCKETS
        self._groups: OrderedDict[tuple[str, str, int], Histogram] = OrderedDict()
        self._observed = 0
        self._curves: dict[tuple[str, str, int], list[float]] = {}  # cumulative distributions, until the next refresh
        self._at_start: dict[tuple[str, str, int, float], int] = {}  # quantiles of what has not begun, as long
        self._refresh_at = 0

    def observe(self, tenant: str, tier: str, max_tokens: int, produced: int) -> None:
        """A request ended by itself after `produced` tokens."""
        if produced < 1:
            return
        index = bucket(produced)
        cap = bucket(max_tokens)
        self._all[index] += 1
        for key in (("tier", tier, cap), ("tenant", tenant, cap)):
            histogram = self._groups.setdefault(key, [0.0] * BUCKETS)
            self._groups.move_to_end(key)
            histogram[index] += 1
            if sum(histogram) > AGE_AT:
                histogram[:] = [count / 2 for count in histogram]
        while len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
        self._observed += 1
        if self._observed >= self._refresh_at:
            self._curves.clear()
            self._at_start.clear()
            self._refresh_at = self._observed + max(1, min(self._observed // REFRESH_SHARE, REFRESH_MOST))

    def quantile(self, tenant: str, tier: str, max_tokens: int, q: float, produced: int = 0) -> int:
        """Total tokens that a request with `produced` so far will not exceed with probability `q`."""
        if not self._observed:
            return max_tokens
        if produced:
            return self._quantile(tenant, tier, max_tokens, q, produced)
        key = (tenant, tier, max_tokens, q)  # what waits is asked about again and again
        found = self._at_start.get(key)
        if found is None:
            if len(self._at_start) >= MAX_GROUPS:
                self._at_start.clear()
            found = self._at_start[key] = self._quantile(tenant, tier, max_tokens, q, 0)
        return found

    def _quantile(self, tenant: str, tier: str, max_tokens: int, q: float, produced: int) -> int:
        key = (tenant, tier, bucket(max_tokens))
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = self._curve(*key)
        passed = _at(curve, produced)
        if passed >= 1.0 - 1e-9:
            return max_tokens
        length = _inverse(curve, passed + q * (1.0 - passed))
        return max(min(length, max_tokens), min(produced + 1, max_tokens))

    def _curve(self, tenant: str, tier: str, cap: int) -> list[float]:
        """Share of requests that produce at most 2**i tokens, for each i."""
        total = sum(self._all)
        weights = [count / total for count in self._all]
        for key in (("tier", tier, cap), ("tenant", tenant, cap)):
            histogram = self._groups.get(key)
            if histogram is not None:
                own = sum(histogram) + PSEUDO
                weights = [(h + PSEUDO * w) / own for h, w in zip(histogram, weights, strict=True)]
        return list(itertools.accumulate(weights))


class PromptHistory:
    """Recent prompt lengths in eighths of powers of two; old ones fade."""

    def __init__(self) -> None:
        self._counts = [0.0] * (BUCKETS * 8)
        self._total = 0.0

    def observe(self, tokens: int) -> None:
        self._counts[_eighth(tokens)] += 1.0
        self._total += 1.0
        if self._total > AGE_AT:
            self._counts = [count / 2 for count in self._counts]
            self._total = sum(self._counts)

    def quantile(self, q: float) -> int:
        """The length that a share `q` of the prompts does not exceed, rounded up to its eighth."""
        target, seen = q * self._total, 0.0
        for index, count in enumerate(self._counts):
            seen += count
            if seen >= target and count:
                return int(2.0 ** ((index + 1) / 8))
        return 0


def _eighth(tokens: int) -> int:
    return min(int(8 * math.log2(max(tokens, 1))), BUCKETS * 8 - 1)


def _at(curve: list[float], tokens: int) -> float:
    """The share that ends by `tokens`, spread evenly inside a bucket."""
    if tokens <= 0:
        return 0.0
    index = bucket(tokens)
    low, high = _bounds(index)
    before = curve[index - 1] if index else 0.0
    return before + (curve[index] - before) * min((tokens - low) / (high - low), 1.0)


def _inverse(curve: list[float], share: float) -> int:
    """The length that `share` of the requests do not exceed."""
    index = min(bisect.bisect_left(curve, share - 1e-12), BUCKETS - 1)
    low, high = _bounds(index)
    before = curve[index - 1] if index else 0.0
    mass = curve[index] - before
    part = (share - before) / mass if mass > 0 else 1.0
    return math.ceil(low + (high - low) * min(max(part, 0.0), 1.0))
