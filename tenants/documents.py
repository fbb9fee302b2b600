"""The format of `harness apply`, tenancy's part, and how its mistakes are named.

A field that is left out stays as it is on what exists, and takes its default on what is made. `null` removes a limit.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import UNSET, Meta, UnsetType

Presence = Literal["present", "absent"]
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Instant = Annotated[datetime, Meta(tz=True)]
# As many digits as the columns keep exactly on every database.
Amount = Annotated[str, Meta(pattern=r"^[0-9]{1,11}(\.[0-9]{1,4})?\Z")]
Rate = Annotated[str, Meta(pattern=r"^[0-9]{1,7}(\.[0-9]{1,8})?\Z")]


class DocumentError(Exception):
    """The document cannot be applied. `path` names the place, like `tenants[0].limits.rpmm`."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.message = message


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all parts of a document."""


class RateLimits(Part, frozen=True):
    rpm: Count | UnsetType | None = UNSET
    tpm: Count | UnsetType | None = UNSET
    concurrency: Count | UnsetType | None = UNSET


class Budget(Part, frozen=True):
    """In tokens, or an amount of money. One owner has at most one per model, period and unit. 0 admits nothing."""

    period: Literal["minute", "hour", "day", "week", "month", "total"]
    tokens: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    amount: Amount | None = None
    currency: str = "USD"
    hard: bool = True
    alerts: list[float] = []
    state: Presence = "present"


class ModelLimits(RateLimits, frozen=True):
    budgets: list[Budget] = []


class Limits(ModelLimits, frozen=True):
    models: dict[str, ModelLimits] = {}


class Slo(Part, frozen=True):
    ttft: float | UnsetType = UNSET
    e2e: float | UnsetType = UNSET
    tpot: float | UnsetType = UNSET
    objective: float | UnsetType = UNSET


class Queue(Part, frozen=True):
    max_length: int | UnsetType = UNSET
    max_wait: float | UnsetType = UNSET


class TierPart(Part, frozen=True):
    """Fields as in `tenants.tiers.FIELDS`, which also checks their ranges."""

    name: str
    rank: int | UnsetType = UNSET
    weight: float | UnsetType = UNSET
    floor: float | UnsetType = UNSET
    slo: Slo | UnsetType = UNSET
    availability: float | UnsetType = UNSET
    contract: str | UnsetType = UNSET
    on_infeasible: str | UnsetType = UNSET
    headroom: float | UnsetType = UNSET
    reserved_slots: float | UnsetType = UNSET
    preemptible: bool | UnsetType = UNSET
    queue: Queue | UnsetType = UNSET
    min_slo_threshold: float | UnsetType | None = UNSET
    max_tokens: int | UnsetType = UNSET
    limits: Limits = Limits()
    state: Presence = "present"


class KeyRights(Part, frozen=True):
    """What a key may do."""

    scopes: list[str] | UnsetType = UNSET
    models: list[str] | UnsetType = UNSET
    allowed_ips: list[str] | UnsetType = UNSET
    expires_at: Instant | UnsetType | None = UNSET
    limits: Limits = Limits()


class KeyPart(KeyRights, frozen=True, kw_only=True):
    """An absent key is revoked. Present again, it is a new key with a new secret."""

    name: str
    state: Presence = "present"


class TenantTerms(Part, frozen=True):
    """Who a tenant is and what it may use."""

    name: str | UnsetType = UNSET
    tier: str | UnsetType = UNSET
    timezone: str | UnsetType = UNSET
    limits: Limits = Limits()


class TenantPart(TenantTerms, frozen=True, kw_only=True):
    slug: str
    keys: list[KeyPart] = []
    state: Literal["active", "suspended", "absent"] | UnsetType = UNSET


class PricePart(Part, frozen=True):
    """What is left out of the rates is free, but cached input, which then costs what input costs."""

    model: str
    tier: str | None = None
    tenant: str | None = None
    input_per_mtok: Rate = "0"
    cached_input_per_mtok: Rate | None = None
    output_per_mtok: Rate = "0"
    reasoning_per_mtok: Rate | None = None
    batch_factor: Annotated[str, Meta(pattern=r"^[0-9]{1,2}(\.[0-9]{1,4})?\Z")] = "1"
    currency: str = "USD"
    effective_from: Instant = msgspec.field(name="from", default=datetime(1970, 1, 1, tzinfo=UTC))
    state: Presence = "present"

    def columns(self) -> dict[str, Decimal | str | None]:
        """What a `Price` row holds beside whom it is for."""
        cached = self.input_per_mtok if self.cached_input_per_mtok is None else self.cached_input_per_mtok
        return {
            "input_per_mtok": Decimal(self.input_per_mtok),
            "cached_input_per_mtok": Decimal(cached),
            "output_per_mtok": Decimal(self.output_per_mtok),
            "reasoning_per_mtok": None if self.reasoning_per_mtok is None else Decimal(self.reasoning_per_mtok),
            "batch_factor": Decimal(self.batch_factor),
            "currency": self.currency,
        }


class TenancyDocument(Part, frozen=True):
    """The sections that `tenants/apply.py` knows. Others extend it."""

    version: Literal[1] = 1
    tiers: list[TierPart] = []
    tenants: list[TenantPart] = []
    prices: list[PricePart] = []


PartT = TypeVar("PartT", bound=Part)
DocumentT = TypeVar("DocumentT", bound=TenancyDocument)


def given(part: Part, *without: str) -> dict[str, Any]:
    """The fields that the document gave, as plain values."""
    values: dict[str, Any] = msgspec.to_builtins(part, builtin_types=(datetime,))
    return {name: value for name, value in values.items() if name not in without}


def read_document(text: str, kind: type[DocumentT]) -> DocumentT:
    """Parse YAML (and so JSON). Raises DocumentError naming the line or the path of the first mistake."""
    try:
        raw = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise DocumentError("", f"This is not YAML: {error}") from error
    except RecursionError as error:
        raise DocumentError("", "The document is nested too deep.") from error
    if not isinstance(raw, dict):
        raise DocumentError("", "The document must be a mapping with sections like 'tiers' and 'tenants'.")
    return read_part(raw, kind)


def read_part(raw: Mapping[str, Any], kind: type[PartT], *, strict: bool = True) -> PartT:
    """`raw` as a part of a document; not `strict`, text may stand for numbers. Raises DocumentError."""
    try:
        part = msgspec.convert(raw, kind, strict=strict)
        _check(msgspec.to_builtins(part, builtin_types=(datetime,)), "")
    except msgspec.ValidationError as error:
        raise _explain(str(error), raw) from error
    return part


def _check(value: Any, path: str) -> None:
    """Refuse values that have the right type and that a database does not keep, or not every one."""
    match value:
        case str():
            if not is_storable(value):
                raise DocumentError(path, "Text cannot hold the character NUL or half a surrogate pair.")
        case datetime():
            if not _is_representable(value):
                raise DocumentError(path, "The instant lies before the year 1 or after the year 9999 in UTC.")
        case dict():
            for name, one in value.items():
                _check(name, path)
                _check(one, f"{path}.{name}".lstrip("."))
        case list():
            for index, one in enumerate(value):
                _check(one, f"{path}[{index}]")


def is_storable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def _is_representable(instant: datetime) -> bool:
    try:
        instant.astimezone(UTC)
    except OverflowError:
        return False
    return True


class _Loader(yaml.SafeLoader):
    """YAML whose instants stay text (their offset is checked by us) and whose keys are unique."""

    yaml_implicit_resolvers = {
        first: [rule for rule in rules if rule[0] != "tag:yaml.org,2002:timestamp"]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for position, name in enumerate(names):
            if name in names[:position]:
                raise yaml.constructor.ConstructorError(None, None, f"{name!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_PLACE = re.compile(r"(?s)(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>.*)`)?\Z")
_FIELD = re.compile(r"Object (?P<problem>contains unknown|missing required) field `(?P<name>.*)`\Z")


def _explain(text: str, raw: Mapping[str, Any]) -> DocumentError:
    """msgspec's message in the words of the document."""
    place = _PLACE.match(text)
    assert place is not None  # both parts may be empty
    what, path = place["what"], _spell_out((place["path"] or "").lstrip("."), raw)
    if field := _FIELD.match(what):
        path = f"{path}.{field['name']}".lstrip(".")
        what = "There is no such field" if field["problem"] == "contains unknown" else "This field is required"
    elif "matching regex" in what:
        what = 'Expected a decimal string like "0.20", with no more digits than are kept exactly'
    return DocumentError(path, f"{what.rstrip('.')}.")


def _spell_out(path: str, raw: Mapping[str, Any]) -> str:
    """Put the model's name for the `[...]` that msgspec leaves in `limits.models[...]`."""
    before, found, after = path.partition("[...]")
    if not found:
        return path
    value: Any = raw
    for step in re.findall(r"[^.\[\]]+", before):
        value = value[int(step)] if isinstance(value, list) else value[step]
    for name, limits in value.items():
        try:
            msgspec.convert({name: limits}, dict[str, ModelLimits])
        except msgspec.ValidationError:
            return f"{before}.{name}{after}"
    return path
