"""The smallest JSON that a schema describes: what the simulated engine answers when a format is asked for.

Understood are types, `enum`, `const`, `properties` with `required`, `items` with `minItems`, `minLength`, bounds of
numbers, `anyOf`, `oneOf`, `allOf` and references within the schema; of what else there is (`pattern`, `format` and the
like) the document may not be an example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 64  # of references that lead to themselves
MAX_SIZE = 10_000  # values, and characters of texts
EMPTY: Mapping[str, Any] = {"boolean": False}
LEAST = {"minimum": 0, "exclusiveMinimum": 1}  # what is added to the bound to meet it
MOST = {"maximum": 0, "exclusiveMaximum": -1}


class NoDocument(Exception):
    """No document of a reasonable size is described."""


def smallest(schema: Any) -> Any:
    """A JSON value that the schema describes. Raises NoDocument."""
    return _Writer(schema).value(schema, 0)


class _Writer:
    """Writes one document; hostile schemas (of references to references, of lists of lists) end at MAX_SIZE."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_SIZE

    def value(self, schema: Any, depth: int) -> Any:
        self._spend(1)
        if depth > MAX_DEPTH:
            raise NoDocument("the schema refers to itself without an end")
        if schema is False:
            raise NoDocument("the schema describes nothing")
        if not isinstance(schema, Mapping):
            return {}
        if "const" in schema:
            return schema["const"]
        if schema.get("enum"):
            return schema["enum"][0]
        if "$ref" in schema:
            return self.value(self._resolve(schema["$ref"]), depth + 1)
        for several in ("anyOf", "oneOf"):
            if schema.get(several):
                return self._first(schema[several], depth + 1)
        if schema.get("allOf"):
            return self.value(self._merged(schema["allOf"]), depth + 1)
        return self._of_kind(_kind(schema), schema, depth + 1)

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> Any:
        match kind:
            case "object":
                properties = schema.get("properties", {})
                return {name: self.value(properties.get(name, {}), depth) for name in schema.get("required", ())}
            case "array":
                return [self.value(schema.get("items", {}), depth) for _ in range(schema.get("minItems", 0))]
            case "string":
                self._spend(schema.get("minLength", 0))
                return "x" * schema.get("minLength", 0)
            case "integer" | "number":
                return _number(schema)
            case _:
                return EMPTY.get(kind)

    def _first(self, schemas: list[Any], depth: int) -> Any:
        for schema in schemas:
            try:
                return self.value(schema, depth)
            except NoDocument:
                continue
        raise NoDocument("none of the alternatives describes a document")

    def _merged(self, schemas: list[Any]) -> dict[str, Any]:
        """Schemas that must hold at a time, as one: with the properties of all of them."""
        merged: dict[str, Any] = {}
        for part in schemas:
            schema = self._resolve(part["$ref"]) if isinstance(part, Mapping) and "$ref" in part else part
            for name, value in schema.items() if isinstance(schema, Mapping) else ():
                if name == "properties":
                    merged[name] = {**merged.get(name, {}), **value}
                elif name == "required":
                    merged[name] = [*merged.get(name, []), *value]
                else:
                    merged[name] = value
        return merged

    def _resolve(self, reference: str) -> Any:
        """What a reference within the schema (`#/$defs/Name`) stands for."""
        if not reference.startswith("#"):
            raise NoDocument("only references within the schema are known")
        found = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                raise NoDocument(f"{reference[:100]} does not exist")
            found = found[name]
        return found

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise NoDocument("the smallest document is too large")


def _kind(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "object" if "properties" in schema or "required" in schema else "null")
    return str(kind[0]) if isinstance(kind, list) and kind else str(kind)


def _number(schema: Mapping[str, Any]) -> Any:
    low = [schema[name] + more for name, more in LEAST.items() if name in schema]
    high = [schema[name] + more for name, more in MOST.items() if name in schema]
    return max([min([0, *high]), *low])
