"""The make of an API key.

    sk- LLLLLLLLLLLL SSSSSSSSSSS…SSSS CCCCCC
        12: finds    43: 256 random   6: CRC-32 of what stands before it, so that
        the row      bits, base 62    nonsense is refused without a look-up

Stored are the look-up part and a digest of the whole, keyed by a versioned pepper that lives outside the database: a
stolen database gives no key, and nobody can try candidates against it. A fast digest is right here: 256 bits cannot be
guessed, so slowness would only slow us down.
"""

from __future__ import annotations

import hmac
import re
import secrets
import zlib
from dataclasses import dataclass, field

from django.conf import settings

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PREFIX = "sk-"
LOOKUP_LENGTH = 12
SECRET_LENGTH = 43  # 62**43 > 2**256
CHECKSUM_LENGTH = 6  # 62**6 > 2**32
TOKEN_LENGTH = len(PREFIX) + LOOKUP_LENGTH + SECRET_LENGTH + CHECKSUM_LENGTH

_SHAPE = re.compile(rf"sk-[0-9A-Za-z]{{{TOKEN_LENGTH - len(PREFIX)}}}\Z")


class UnknownPepperError(Exception):
    """The pepper that a stored digest was made with is not in the secrets folder."""


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key just made. `token` is shown once and stored nowhere."""

    token: str = field(repr=False)
    lookup: str
    digest: str = field(repr=False)
    pepper_version: int


@dataclass(frozen=True, slots=True)
class Parsed:
    """A token of the right shape; whether it exists is another question."""

    token: str = field(repr=False)
    lookup: str


def mint() -> NewKey:
    """A new key, with the newest pepper."""
    body = PREFIX + _random(LOOKUP_LENGTH) + _random(SECRET_LENGTH)
    token = body + checksum(body)
    version = max(settings.HARNESS_KEY_PEPPERS)
    return NewKey(token, lookup_of(token), digest(token, version), version)


def parse(token: str) -> Parsed | None:
    """The parts of a token, or None when it cannot be one of ours. Costs no look-up and no digest."""
    if len(token) != TOKEN_LENGTH or not _SHAPE.match(token):
        return None
    if checksum(token[:-CHECKSUM_LENGTH]) != token[-CHECKSUM_LENGTH:]:
        return None
    return Parsed(token, lookup_of(token))


def lookup_of(token: str) -> str:
    return token[len(PREFIX) : len(PREFIX) + LOOKUP_LENGTH]


def digest(token: str, pepper_version: int) -> str:
    """64 hex digits. Raises UnknownPepperError."""
    pepper = settings.HARNESS_KEY_PEPPERS.get(pepper_version)
    if pepper is None:
        raise UnknownPepperError(f"Key pepper {pepper_version} is missing from the secrets folder.")
    return hmac.digest(pepper, token.encode(), "sha256").hex()


def _random(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


def checksum(body: str) -> str:
    value = zlib.crc32(body.encode())
    digits = []
    for _ in range(CHECKSUM_LENGTH):
        value, rest = divmod(value, 62)
        digits.append(ALPHABET[rest])
    return "".join(digits)
