"""The make of keys; no database."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants import keys


def test_a_new_key_parses_and_carries_256_bits() -> None:
    new = keys.mint()
    parsed = keys.parse(new.token)
    assert parsed is not None and parsed.lookup == new.lookup
    assert len(new.token) == keys.TOKEN_LENGTH
    assert 62**keys.SECRET_LENGTH > 2**256


def test_two_keys_share_nothing() -> None:
    one, two = keys.mint(), keys.mint()
    assert one.lookup != two.lookup and one.digest != two.digest


def test_the_digest_proves_the_token_and_nothing_else_does() -> None:
    new = keys.mint()
    assert keys.digest(new.token, new.pepper_version) == new.digest
    assert keys.digest(keys.mint().token, new.pepper_version) != new.digest


@given(position=st.integers(min_value=3, max_value=keys.TOKEN_LENGTH - 1), char=st.sampled_from(keys.ALPHABET))
def test_a_mistyped_character_is_noticed_without_a_look_up(position: int, char: str) -> None:
    # A CRC notices every change within 32 bits, so every single wrong character.
    token = keys.mint().token
    mistyped = token[:position] + char + token[position + 1 :]
    assert mistyped == token or keys.parse(mistyped) is None


@pytest.mark.parametrize(
    "nonsense",
    ["", "s", "sk-", "sk-wrong-ABCDEF0123456789", "x" * 64, "sk-" + "é" * 61, "sk-" + "0" * 62, "y" * 10_000],
)
def test_nonsense_is_no_key(nonsense: str) -> None:
    assert keys.parse(nonsense) is None


def test_a_key_with_a_line_end_is_no_key() -> None:
    assert keys.parse(keys.mint().token + "\n") is None


def test_no_representation_shows_a_secret() -> None:
    new = keys.mint()
    parsed = keys.parse(new.token)
    assert new.token not in repr(new) and new.digest not in repr(new)
    assert new.token not in repr(parsed)


def test_a_digest_of_a_lost_pepper_is_an_error_of_its_own() -> None:
    with pytest.raises(keys.UnknownPepperError, match="pepper 99"):
        keys.digest(keys.mint().token, 99)
