"""The OpenAPI document: every route and method of the management API, with what goes in, what comes out, who may."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest
from django.test import Client
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.validation import validate_schema

from tests.web.test_isolation import API, Route

DOCUMENTED = ("get", "post", "put", "patch", "delete")


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    GENERATOR_STATS.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made: dict[str, Any] = SchemaGenerator().get_schema(request=None, public=True)
    assert not GENERATOR_STATS, "the generator had to guess"
    return json.loads(json.dumps(made, default=str))  # type: ignore[no-any-return]


def path_of(route: Route) -> str:
    return "/" + re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route.pattern)


def operations(schema: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, operation) for path, each in schema["paths"].items() for method, operation in each.items()]


def test_the_document_is_valid(schema: dict[str, Any]) -> None:
    validate_schema(schema)
    assert schema["openapi"].startswith("3.1")


def test_every_route_and_method_is_documented_and_nothing_else(schema: dict[str, Any]) -> None:
    served = {
        (path_of(route), method) for route in API for method in DOCUMENTED if hasattr(route.view.view_class, method)
    }
    assert {(path, method) for path, method, _ in operations(schema)} == served


def test_every_operation_says_what_it_does_takes_and_answers(schema: dict[str, Any]) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(schema)]
    assert len(ids) == len(set(ids))
    for path, method, operation in operations(schema):
        where = f"{method} {path}"
        assert operation.get("description"), where
        assert operation["security"] == [{"key": []}, {"session": []}], where
        answers = operation["responses"]
        assert answers["default"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
        (status,) = answers.keys() - {"default"}
        assert status == "204" or all(media["schema"] for media in answers[status]["content"].values()), where
        named = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path)), where


def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(schema)))
    assert named <= set(schema["components"]["schemas"])


def test_unknown_fields_are_excluded_and_no_pattern_is_pythons(schema: dict[str, Any]) -> None:
    components = schema["components"]["schemas"]
    bodies = (
        "NewKey",
        "PatchedKeyChange",
        "NewTenant",
        "PatchedTenantChange",
        "PatchedTierChange",
        "Rotation",
        "Budget",
    )
    assert all(components[name]["additionalProperties"] is False for name in bodies)
    assert "\\\\Z" not in json.dumps(schema)
    assert {"secret"} == set(components["IssuedKeyDocument"]["properties"]) - set(
        components["KeyDocument"]["properties"]
    )


@pytest.mark.django_db
def test_it_is_served_with_its_documentation(client: Client) -> None:
    assert b"/api/v1/keys" in client.get("/api/schema/").content
    assert client.get("/api/docs/").status_code == 200
