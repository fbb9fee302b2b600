"""What a request costs.

The rounding rule, once and for all: a request's charge is computed exactly and rounded a single time, half to even, to
ten decimals. Everything above it (statements, exports, budgets) adds charges up and never rounds them again before it
shows them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal

import msgspec

from .models import Price
from .models.fields import DECIMALS

# Rates have eight decimals per million tokens, so that 1e-14 of the currency divides every price of a token.
RATE_UNITS = 10**8
UNITS_OF_CHARGE = 10**4  # of 1e-14, in one of 1e-10

EVERYBODY = ("", "")


class TokenPrice(msgspec.Struct, frozen=True, array_like=True):
    """A price as whole numbers: what a token costs, in 1e-14 of the currency. `id` is the price's row."""

    id: int
    currency: str
    input: int
    cached_input: int
    output: int

    @classmethod
    def of(cls, price: Price) -> TokenPrice:
        rates = (price.input_per_mtok, price.cached_input_per_mtok, price.output_per_mtok)
        return cls(price.pk, price.currency, *(int(rate * RATE_UNITS) for rate in rates))

    def charge(self, prompt: int, cached: int, completion: int) -> int:
        """What token counts cost, `cached` of the `prompt` tokens at the cached price: in 1e-10 of the currency.

        Raises ValueError for counts that cannot be.
        """
        if not 0 <= cached <= prompt or completion < 0:
            raise ValueError(f"token counts cannot be: prompt {prompt}, cached {cached}, completion {completion}")
        exact = (prompt - cached) * self.input + cached * self.cached_input + completion * self.output
        charge, rest = divmod(exact, UNITS_OF_CHARGE)
        half = UNITS_OF_CHARGE // 2
        return charge + (rest > half or (rest == half and charge % 2))

    def most(self, prompt: int, completion: int) -> int:
        """The most that a request may come to cost, whatever of its prompt is cached: in 1e-10 of the currency."""
        return max(self.charge(prompt, 0, completion), self.charge(prompt, prompt, completion))


class PriceBook:
    """Every price, in memory, as of the moment it was loaded."""

    def __init__(self, prices: Iterable[Price]) -> None:
        self._prices: dict[tuple[str, str, str], list[Price]] = {}  # by model and whom it is for, in order of time
        for price in sorted(prices, key=lambda price: price.effective_from):
            self._prices.setdefault((price.model, *_whose(price)), []).append(price)

    @classmethod
    def load(cls) -> PriceBook:
        return cls(Price.objects.select_related("tier"))

    def find(self, model: str, tier: str, tenant_id: str, at: datetime) -> Price | None:
        """The price in force at `at`: the tenant's own before its tier's (by name) before everybody's.

        Within each, the one that took effect last. None: the model has no price then.
        """
        for whose in (("tenant", tenant_id), ("tier", tier), EVERYBODY):
            prices = self._prices.get((model, *whose), ())
            if began := bisect_right(prices, at, key=lambda price: price.effective_from):
                return prices[began - 1]
        return None


def _whose(price: Price) -> tuple[str, str]:
    if price.tenant_id is not None:
        return "tenant", str(price.tenant_id)
    return EVERYBODY if price.tier is None else ("tier", price.tier.name)


def charge(price: TokenPrice, prompt: int, cached: int, completion: int) -> Decimal:
    """`TokenPrice.charge` as an amount of the currency."""
    return Decimal(price.charge(prompt, cached, completion)).scaleb(-DECIMALS)
