"""What a request costs.

The rounding rule, once and for all: a request's charge is computed exactly and rounded a single time, half to even, to
ten decimals. Everything above it (statements, exports, budgets) adds charges up and never rounds them again before it
shows them.
"""

from __future__ import annotations

from datetime import datetime
from decimal import ROUND_HALF_EVEN, Context, Decimal

from django.db.models import F, Q

from .models import Price
from .models.fields import UNIT

PER_MTOK = Decimal(1_000_000)
# More digits than a product of our columns can have: nothing is rounded before the one rounding.
EXACT = Context(prec=60, rounding=ROUND_HALF_EVEN)


def price_for(model: str, tier: str, tenant: str, at: datetime) -> Price | None:
    """The price in force at `at`: the tenant's own (by slug) before its tier's (by name) before everybody's.

    Within each, the one that took effect last. None: the model has no price then.
    """
    candidates = Price.objects.filter(
        Q(tenant__slug=tenant) | Q(tier__name=tier) | Q(tenant__isnull=True, tier__isnull=True),
        model=model,
        effective_from__lte=at,
    )
    order = (F("tenant").asc(nulls_last=True), F("tier").asc(nulls_last=True), "-effective_from")
    return candidates.order_by(*order).first()


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
