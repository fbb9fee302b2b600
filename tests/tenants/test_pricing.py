"""What requests cost."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants.models import Price, Tenant
from tenants.pricing import PriceBook, TokenPrice, charge

JANUARY = datetime(2026, 1, 1, tzinfo=UTC)
JUNE = datetime(2026, 6, 1, tzinfo=UTC)
JULY = datetime(2026, 7, 1, tzinfo=UTC)


def price(rates: str = "0.20 0.05 0.60", start: datetime = JANUARY, **whose: object) -> Price:
    input_rate, cached, output = (Decimal(rate) for rate in rates.split())
    return Price(
        model="demo",
        input_per_mtok=input_rate,
        cached_input_per_mtok=cached,
        output_per_mtok=output,
        effective_from=start,
        **whose,
    )


def test_the_tenants_own_price_goes_before_its_tiers_and_that_before_everybodys(acme: Tenant, globex: Tenant) -> None:
    everybodys, tiers, own = price("1 1 1"), price("2 2 2", tier=acme.tier), price("3 3 3", tenant=acme)
    vip, free, acme_id, globex_id = acme.tier.name, globex.tier.name, str(acme.pk), str(globex.pk)
    everybodys.save()
    assert PriceBook.load().find("demo", vip, acme_id, JUNE) == everybodys
    tiers.save()
    assert PriceBook.load().find("demo", vip, acme_id, JUNE) == tiers
    own.save()
    assert PriceBook.load().find("demo", vip, acme_id, JUNE) == own
    assert PriceBook.load().find("demo", vip, "0", JUNE) == tiers
    assert PriceBook.load().find("demo", free, globex_id, JUNE) == everybodys


def test_a_price_holds_from_its_instant_until_the_next(db: None) -> None:
    old, new = price(), price("0.30 0.05 0.60", JUNE)
    new.save()
    old.save()
    assert PriceBook.load().find("demo", "vip", "1", JANUARY) == old
    assert PriceBook.load().find("demo", "vip", "1", JUNE) == new
    assert PriceBook.load().find("demo", "vip", "1", datetime(2025, 12, 31, tzinfo=UTC)) is None


def test_a_model_without_a_price_has_none(db: None) -> None:
    price().save()
    assert PriceBook.load().find("other", "vip", "1", JULY) is None


def test_an_example_to_the_digit() -> None:
    # 900 x 0.20 + 100 x 0.05 + 50 x 0.60 = 215 per million
    assert charge(TokenPrice.of(price()), prompt=1000, cached=100, completion=50) == Decimal("0.000215")


def test_the_smallest_half_is_rounded_to_even() -> None:
    assert charge(TokenPrice.of(price("0.00005 0 0")), 1, 0, 0) == Decimal("0E-10")
    assert charge(TokenPrice.of(price("0.00015 0 0")), 1, 0, 0) == Decimal("2E-10")


rates = st.decimals(0, 9_999_999, places=8)
counts = st.integers(0, 10_000_000)


@given(rates, rates, rates, counts, counts, counts)
def test_a_charge_is_the_exact_sum_rounded_once(
    uncached_rate: Decimal, cached_rate: Decimal, output_rate: Decimal, uncached: int, cached: int, completion: int
) -> None:
    book = price(f"{uncached_rate} {cached_rate} {output_rate}")
    exact = Fraction(uncached_rate) * uncached + Fraction(cached_rate) * cached + Fraction(output_rate) * completion
    charged = charge(TokenPrice.of(book), uncached + cached, cached, completion)
    # Within half a unit of the last decimal of the exact amount: never rounded twice.
    assert abs(Fraction(charged) - exact / 1_000_000) <= Fraction(1, 2 * 10**10)


@pytest.mark.parametrize("counts", [(1, 2, 0), (-1, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_counts_that_cannot_be_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="token counts"):
        charge(TokenPrice.of(price()), *counts)
