"""Money in the database."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.db import models

DECIMALS = 10

if TYPE_CHECKING:
    _MoneyBase = models.BigIntegerField[Decimal | None, Decimal | None]
else:
    _MoneyBase = models.BigIntegerField


class MoneyField(_MoneyBase):
    """A Decimal with ten decimals, kept as an integer of 1e-10 units, so that SUM() is exact.

    SQLite keeps DECIMAL columns as 8-byte floats: single values of 15 digits survive that, sums do not.
    The largest amount is 922,337,203.6854775807.
    """

    def to_python(self, value: Any) -> Decimal | None:
        return None if value is None else Decimal(value)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Decimal | None:
        return None if value is None else Decimal(value).scaleb(-DECIMALS)

    def get_prep_value(self, value: Any) -> int | None:
        """Raises ValidationError for more than ten decimals: whoever made the amount rounds it, by one rule."""
        if value is None or isinstance(value, models.expressions.BaseExpression):
            return value  # type: ignore[return-value]
        units = Decimal(value).scaleb(DECIMALS)
        if units != units.to_integral_value():
            raise ValidationError(f"An amount has at most {DECIMALS} decimals.")
        return int(units)
