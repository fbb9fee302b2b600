"""Dead letters and decision traces as operators and tenants meet them: over HTTP, with keys."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from tests.web.product import DOCUMENT, Product, eventually, installed

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    with installed() as product:
        product.start()
        document = copy.deepcopy(DOCUMENT)
        document["tenants"] = [
            {"slug": "acme", "name": "Acme", "tier": "vip", "keys": [{"name": "books", "scopes": ["usage"]}]},
            {"slug": "globex", "name": "Globex", "tier": "free", "keys": [{"name": "books", "scopes": ["usage"]}]},
        ]
        product.apply(document)
        yield product


def chat(product: Product, **changes: Any) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": "hello there friend"}], "max_tokens": 4}
    return httpx.post(product.url + CHAT, headers=product.auth("acme/prod"), json=body | changes, timeout=30)


def post(product: Product, path: str, key: str = "acme/ops") -> httpx.Response:
    return httpx.post(product.url + path, headers=product.auth(key))


def letters(product: Product, query: str = "") -> dict[str, Any]:
    document: dict[str, Any] = product.get(f"/api/v1/dead-letters{query}").json()
    return document


def waited(product: Product) -> dict[str, Any]:
    """A request that has waited too long, as its letter."""
    open_lines = []  # an iterator that is dropped closes its connection
    with ExitStack() as running:
        for _ in range(2):
            body = {"model": "demo", "messages": [{"role": "user", "content": "long"}], "max_tokens": 4000}
            headers = product.auth("acme/spare")
            stream = httpx.stream("POST", product.url + CHAT, headers=headers, json=body | {"stream": True})
            open_lines.append(running.enter_context(stream).iter_lines())
            next(open_lines[-1])
        answer = chat(product, queue_timeout=0.2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_is_overloaded")
    id = answer.headers["x-request-id"]
    found: list[dict[str, Any]] = eventually(
        lambda: [letter for letter in letters(product)["data"] if letter["request_id"] == id]
    )
    return found[0]


def test_a_dead_letter_tells_whose_and_why_and_not_what(product: Product) -> None:
    dead = waited(product)
    assert (dead["cause"], dead["state"], dead["retryable"]) == ("waited_too_long", "open", True)
    assert (dead["tenant"], dead["tier"], dead["model"]) == ("acme", "vip", "demo")
    assert "hello there friend" not in product.get("/api/v1/dead-letters").text


def test_letters_are_filtered_and_paged(product: Product) -> None:
    waited(product)
    first = letters(product, "?limit=1&cause=waited_too_long&tenant=acme&state=open")
    assert (len(first["data"]), first["has_more"]) == (1, True)
    second = letters(product, f"?limit=1&page={first['next_page']}")
    assert second["data"][0]["id"] < first["data"][0]["id"]
    assert letters(product, "?tenant=globex") == {"data": [], "has_more": False, "next_page": None}
    bad = product.get("/api/v1/dead-letters?cause=boredom")
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "cause")


def test_a_letter_is_put_away_once(product: Product) -> None:
    id = waited(product)["id"]
    assert post(product, f"/api/v1/dead-letters/{id}/discard").status_code == 204
    assert post(product, f"/api/v1/dead-letters/{id}/discard").json()["error"]["code"] == "conflict"
    (event,) = product.get("/api/v1/audit?action=deadletter.discard").json()["data"]
    assert (event["actor"], event["source_ip"]) == ("key acme/ops", "127.0.0.1")
    again = post(product, f"/api/v1/dead-letters/{id}/retry")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
    assert post(product, "/api/v1/dead-letters/999999/retry").status_code == 404
    assert post(product, f"/api/v1/dead-letters/{10**40}/discard").status_code == 404


def test_a_retry_goes_on_in_the_background_and_leaves_its_answer(product: Product) -> None:
    id = waited(product)["id"]
    answer = post(product, f"/api/v1/dead-letters/{id}/retry")
    assert answer.status_code == 202
    trace = f"/api/v1/requests/{answer.json()['retried_as']}/trace"
    eventually(lambda: product.get(trace).json().get("state") == "ended")
    (letter,) = eventually(lambda: [one for one in letters(product)["data"] if one["id"] == id and one["answer"]])
    assert (letter["state"], letter["retryable"]) == ("retried", False)
    (event,) = product.get("/api/v1/audit?action=deadletter.retry").json()["data"]
    assert event["after"] == answer.json()
    assert letter["answer"]["text"] == "w0 w1 w2 w3"


def test_letters_are_for_operators(product: Product) -> None:
    assert product.get("/api/v1/dead-letters", "acme/prod").status_code == 403
    assert product.get("/api/v1/dead-letters", "acme/books").status_code == 403
    assert post(product, "/api/v1/dead-letters/1/retry", "acme/books").status_code == 403


def test_a_request_is_explained_to_operators_whole_and_to_its_tenant_without_others(product: Product) -> None:
    answer = chat(product)
    path = f"/api/v1/requests/{answer.headers['x-request-id']}/trace"
    whole = eventually(lambda: (one := product.get(path).json())["ledger"] and one)
    assert whole["sampled"] is True
    assert [event["event"] for event in whole["events"]][-1] == "ended"
    dispatched = next(event for event in whole["events"] if event["event"] == "dispatched")
    assert dispatched["batch_id"] == answer.json()["batch_info"]["batch_id"]
    assert whole["ledger"]["completion_tokens"] == 4
    assert whole["ledger"]["engine_seconds"] > 0
    assert "tenant" not in whole
    own = product.get(path, "acme/books")
    assert own.status_code == 200
    assert "batch_mates" not in own.text
    assert product.get(path, "globex/books").status_code == 404
    assert product.get(path, "acme/prod").status_code == 403
    assert product.get("/api/v1/requests/req_nobody/trace").status_code == 404


def test_both_are_in_the_schema(product: Product) -> None:
    schema = product.get("/api/schema/").text
    for path in ("dead-letters:", "dead-letters/{letter_id}/retry:", "requests/{request_id}/trace:"):
        assert f"/api/v1/{path}" in schema


def test_what_a_scheduler_has_forgotten_is_answered_by_the_ledger(product: Product) -> None:
    """Last: the scheduler process is stopped."""
    answer = chat(product)
    path = f"/api/v1/requests/{answer.headers['x-request-id']}/trace"
    eventually(lambda: product.get(path).json()["ledger"])
    product.stop_scheduler()
    eventually(lambda: product.health("/readyz") == 503, 30.0)
    document = product.get(path).json()
    assert document["sampled"] is False
    assert document["ledger"]["status"] == "finished"
    assert product.get(path, "globex/books").status_code == 404
    retry = post(product, f"/api/v1/dead-letters/{letters(product)['data'][0]['id']}/retry")
    assert (retry.status_code, retry.json()["error"]["code"]) == (503, "server_is_overloaded")
