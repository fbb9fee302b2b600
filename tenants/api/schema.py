"""How msgspec's structs stand in the OpenAPI schema: bodies and answers as components, queries as parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import msgspec
from drf_spectacular.extensions import OpenApiSerializerExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import ResolvedComponent
from drf_spectacular.utils import OpenApiParameter, extend_schema

TEMPLATE = "#/components/schemas/{name}"


class StructExtension(OpenApiSerializerExtension):  # type: ignore[misc]  # the package has no types
    """Takes a struct where the package expects a serializer."""

    target_class = "msgspec.Struct"
    match_subclasses = True

    def get_name(self, auto_schema: AutoSchema, direction: str) -> str:
        return str(self.target.__name__)

    def map_serializer(self, auto_schema: AutoSchema, direction: str) -> dict[str, Any]:
        kinds = {kind.__name__: kind for kind in structs_in(self.target)}
        schemas = schemas_of(self.target)
        for name, kind in kinds.items():
            if kind is not self.target:
                component = ResolvedComponent(
                    name=name, type=ResolvedComponent.SCHEMA, object=kind, schema=schemas[name]
                )
                auto_schema.registry.register_on_missing(component)
        schema: dict[str, Any] = schemas[self.target.__name__]
        return schema


def structs_in(kind: Any) -> Iterator[type[msgspec.Struct]]:
    """`kind` and the structs that it is made of, each once for every place."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
        for hint in get_type_hints(kind).values():
            yield from structs_in(hint)
    for part in get_args(kind):
        yield from structs_in(part)


def schemas_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The schemas of `kind` and of the structs that it refers to, by name."""
    _, schemas = msgspec.json.schema_components([kind], ref_template=TEMPLATE)
    return {name: _ecma(schema) for name, schema in schemas.items()}


def query_parameters(kind: type[msgspec.Struct]) -> list[OpenApiParameter]:
    schema = schemas_of(kind)[kind.__name__]
    return [
        OpenApiParameter(name, type=each, required=name in schema.get("required", ()))
        for name, each in schema["properties"].items()
    ]


def documented(
    operation_id: str,
    *,
    query: type[msgspec.Struct] | None = None,
    request: Any = None,
    responses: Any,
) -> Callable[[Any], Any]:
    """The method's entry in the schema; its sentence is the method's docstring."""
    decorator: Callable[[Any], Any] = extend_schema(
        operation_id=operation_id,
        parameters=query_parameters(query) if query else None,
        request=request,
        responses=responses,
    )
    return decorator


def _ecma(schema: Any) -> Any:
    """Patterns as the rest of the world spells them: the end of the text is `$`."""
    if isinstance(schema, dict):
        return {key: value.replace("\\Z", "$") if key == "pattern" else _ecma(value) for key, value in schema.items()}
    return [_ecma(each) for each in schema] if isinstance(schema, list) else schema
