"""What a request costs.

The rounding rule, once and for all: a request's charge is computed exactly and rounded a single time, half to even, to
ten decimals. Everything above it (statements, exports, budgets) adds charges up and never rounds them again before it
shows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import ROUND_HALF_EVEN, Context, Decimal

from .models import Price
from .models.fields import UNIT

PER_MTOK = Decimal(1_000_000)
# More digits than a product of our columns can have: nothing is rounded before the one rounding.
EXACT = Context(prec=60, rounding=ROUND_HALF_EVEN)


class PriceBook:
    """Every price, in memory, as of the moment it was loaded."""

    def __init__(self, prices: Iterable[Price]) -> None:
        self._by_model: dict[str, list[Price]] = {}
        for price in prices:
            self._by_model.setdefault(price.model, []).append(price)

    @classmethod
    def load(cls) -> PriceBook:
        return cls(Price.objects.select_related("tier"))

    def find(self, model: str, tier: str, tenant_id: str, at: datetime) -> Price | None:
        """The price in force at `at`: the tenant's own before its tier's (by name) before everybody's.

        Within each, the one that took effect last. None: the model has no price then.
        """
        in_force = [price for price in self._by_model.get(model, ()) if price.effective_from <= at]
        applying = [(rank, price) for price in in_force if (rank := _closeness(price, tier, tenant_id))]
        if not applying:
            return None
        return max(applying, key=lambda found: (found[0], found[1].effective_from))[1]


def _closeness(price: Price, tier: str, tenant_id: str) -> int:
    """3: the tenant's own price, 2: its tier's, 1: everybody's, 0: somebody else's."""
    if price.tenant_id is not None:
        return 3 if str(price.tenant_id) == tenant_id else 0
    if price.tier is not None:
        return 2 if price.tier.name == tier else 0
    return 1


def charge(price: Price, prompt: int, cached: int, completion: int) -> Decimal:
    """The charge for token counts: `cached` of the `prompt` tokens at the cached price. Raises ValueError if more."""
    if not 0 <= cached <= prompt or completion < 0:
        raise ValueError(f"token counts cannot be: prompt {prompt}, cached {cached}, completion {completion}")
    parts = (
        (prompt - cached, price.input_per_mtok),
        (cached, price.cached_input_per_mtok),
        (completion, price.output_per_mtok),
    )
    total = Decimal(0)
    for tokens, per_mtok in parts:
        total = EXACT.add(total, EXACT.multiply(Decimal(tokens), per_mtok))
    return EXACT.divide(total, PER_MTOK).quantize(UNIT, context=EXACT)
