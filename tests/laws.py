"""How hard properties are tried: a few examples, always the same, in the suite; ten times as many and new ones in
`make test-laws`. The profiles are in `tests/conftest.py`.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

USUAL = 100  # examples of a property in the suite that does not say how many


def laws(examples: int) -> settings:
    """For a property: so many examples in the suite, and more where the profile in use has more than usual."""
    return settings(
        max_examples=examples * settings().max_examples // USUAL, suppress_health_check=[HealthCheck.too_slow]
    )
