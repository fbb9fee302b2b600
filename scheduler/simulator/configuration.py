"""Tiers and policy out of a `harness apply` document, for a replay: nothing is stored, no database is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scheduler.apply import Document
from scheduler.config import ConfigDocument, ConfigError, check_policy
from scheduler.core.types import PolicyConfig, TierSpec
from tenants.documents import DocumentError, given, read_document
from tenants.models import Tier
from tenants.tiers import TierError, assign, check_tiers, to_document


class ConfigurationError(Exception):
    """The file cannot be read or is not valid; the message names the place."""


def default_policy() -> dict[str, Any]:
    """The scheduling parameters of an untouched installation, without their version."""
    return {name: value for name, value in asdict(PolicyConfig()).items() if name != "version"}


def read_configuration(path: Path) -> tuple[Mapping[str, TierSpec], dict[str, Any]]:
    """The document's tiers (those that are not absent) and the fields of its policy. Raises ConfigurationError."""
    try:
        document = read_document(path.read_text(encoding="utf-8"), Document)
        tiers = [_tier(part.name, given(part, "name", "limits", "state")) for part in _present(document)]
        check_tiers(tiers)
        named = document.policy
        policy = check_policy({"name": named} if isinstance(named, str) else named, default_policy())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    except (DocumentError, TierError, ConfigError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
    shown = ConfigDocument(0, policy, {tier.name: to_document(tier) for tier in tiers})
    return shown.tier_specs(), policy


def _present(document: Document) -> list[Any]:
    return [part for part in document.tiers if part.state == "present"]


def _tier(name: str, values: Mapping[str, Any]) -> Tier:
    tier = Tier(name=name)
    assign(tier, values)
    return tier
