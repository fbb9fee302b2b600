"""What it costs a web worker to know a caller: CPU time of one look at a key, with the keys of a large site in memory.

The keys come from a database as they do in service; after that it is not asked. Each round authenticates every key
once, in a shuffled order, so that no processor cache holds just the one that is asked for.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import django

from benchmarks.report import Spread, keep, show

if TYPE_CHECKING:
    from tenants.auth import Authenticator

TARGET_US = 20.0
KEYS = 1_000
ROUNDS = 20
SEED = 1
NETWORKS = [f"10.{part}.0.0/16" for part in range(10)]
INSIDE = "10.9.1.2"  # in the last of them


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="harness-bench-") as folder:
        os.environ |= {"DJANGO_SETTINGS_MODULE": "harness_web.settings", "HARNESS_DATA_DIR": folder}
        django.setup()
        plain, guarded = _furnish()
        measured = asyncio.run(_measure(plain, guarded))
    rows = [[name, f"{us:.2f}", f"{us.middle / TARGET_US:.2f}"] for name, us in measured.items()]
    show(f"One key of {KEYS}, from the cache (CPU of the web worker)", ["caller", "us", f"of {TARGET_US:g} us"], rows)
    keep("auth", {name: us.middle for name, us in measured.items()})
    return 0 if all(us.middle <= TARGET_US for us in measured.values()) else 1


def _furnish() -> tuple[list[str], list[str]]:
    """Secrets of keys that may be used from anywhere, and of keys with an end and an allow-list."""
    from django.core.management import call_command
    from django.utils import timezone

    from tenants import keys
    from tenants.models import ApiKey, KeySecret, Limit, Tenant, Tier

    call_command("migrate", verbosity=0)
    tenant = Tenant.objects.create(slug="bench", tier=Tier.objects.create(name="bench"))
    Limit.objects.bulk_create([Limit(tenant=tenant, kind=kind, value=10**9) for kind in ("rpm", "tpm", "concurrency")])
    made = [keys.mint() for _ in range(KEYS)]
    rows = [ApiKey(tenant=tenant, name=f"k{number}") for number in range(KEYS)]
    for row in rows[KEYS // 2 :]:
        row.allowed_ips = NETWORKS
        row.expires_at = timezone.now() + timedelta(days=1)
    ApiKey.objects.bulk_create(rows)
    KeySecret.objects.bulk_create(
        KeySecret(key=row, lookup=new.lookup, digest=new.digest, pepper_version=new.pepper_version)
        for row, new in zip(ApiKey.objects.order_by("id"), made, strict=True)
    )
    tokens = [new.token for new in made]
    return tokens[: KEYS // 2], tokens[KEYS // 2 :]


async def _measure(plain: Sequence[str], guarded: Sequence[str]) -> dict[str, Spread]:
    from tenants import keys
    from tenants.auth import Authenticator

    authenticator = Authenticator(time.monotonic)
    for token in (*plain, *guarded):
        await authenticator.authenticate(token, INSIDE)
    mistyped = [_altered(token) for token in plain]
    bodies = [_altered(token[: -keys.CHECKSUM_LENGTH]) for token in plain]
    wrong = [body + keys.checksum(body) for body in bodies]
    cases = {
        "a key": (plain, _admitted),
        f"a key with an end and {len(NETWORKS)} networks": (guarded, _admitted),
        "a key with a typing error": (mistyped, _refused),
        "another secret of a known key": (wrong, _refused),
    }
    shuffle = random.Random(SEED).shuffle
    measured = {}
    for name, (tokens, call) in cases.items():
        order = list(tokens)
        rounds = []
        for _ in range(ROUNDS):
            shuffle(order)
            began = time.thread_time()
            await call(authenticator, order)
            rounds.append((time.thread_time() - began) / len(order) * 1e6)
        measured[name] = Spread.of(rounds)
    await authenticator.aclose()
    return measured


Call = Callable[["Authenticator", Sequence[str]], Awaitable[None]]


async def _admitted(authenticator: Authenticator, tokens: Sequence[str]) -> None:
    for token in tokens:
        await authenticator.authenticate(token, INSIDE)


async def _refused(authenticator: Authenticator, tokens: Sequence[str]) -> None:
    from tenants.auth import InvalidKeyError

    for token in tokens:
        try:
            await authenticator.authenticate(token, INSIDE)
        except InvalidKeyError:
            continue
        raise AssertionError("a stranger was let in")


def _altered(text: str) -> str:
    """The text with another last character."""
    return text[:-1] + ("a" if text[-1] != "a" else "b")


if __name__ == "__main__":
    sys.exit(main())
