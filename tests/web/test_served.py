"""The data plane as its users meet it: uvicorn, the scheduler process, the official client, raw sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from tenants.keys import mint
from tests.web.product import Product, eventually, installed

HELLO: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello there friend"}]


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    with installed() as product:
        product.start()
        yield product


@pytest.fixture
def client(product: Product) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=product.url + "/v1", api_key=product.keys["acme/prod"]) as client:
        yield client


def counting(client: openai.OpenAI) -> list[httpx.Request]:
    """The HTTP requests that the client makes from now on."""
    sent: list[httpx.Request] = []
    client._client.event_hooks["request"].append(sent.append)
    return sent


# --- the official client --------------------------------------------------------------------------------------------


def test_an_answer_in_one_piece(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=5)
    assert answer.choices[0].message.content == "w0 w1 w2 w3 w4"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)
    assert answer._request_id is not None
    assert answer._request_id.startswith("req_")
    batch_info: Any = answer.model_extra["batch_info"] if answer.model_extra else {}
    assert set(batch_info) == {"batch_id", "batch_size", "wait_time", "compute_time"}


def test_a_stream(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=5, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "w0 w1 w2 w3 w4"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 8
    assert len({chunk.id for chunk in chunks}) == 1


def test_tokens_arrive_as_they_are_made(client: openai.OpenAI) -> None:
    """FR-033, without a proxy."""
    extra = {"simulate": {"tokens": 20, "pace": 0.05}}
    stream = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=50, stream=True, extra_body=extra)
    arrived = [time.monotonic() for chunk in stream if chunk.choices[0].delta.content]
    assert len(arrived) == 20
    assert max(after - before for before, after in itertools.pairwise(arrived)) < 0.5


def test_text_is_exact_to_the_character(client: openai.OpenAI) -> None:
    texts = ["ab", "漢", "字🎉", '"\\\n', " "]
    extra = {"simulate": {"text": texts}}
    stream = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=50, stream=True, extra_body=extra)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "".join(texts)


def test_models_are_listed_and_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("no-such")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_errors_that_cannot_be_retried_are_sent_once(client: openai.OpenAI) -> None:
    """FR-040 d, e."""
    sent = counting(client)
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="no-such", messages=HELLO)
    assert (unknown.value.code, unknown.value.type) == ("model_not_found", "invalid_request_error")
    assert (unknown.value.request_id or "").startswith("req_")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "word " * 9000}])
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError) as odd:
        client.chat.completions.create(model="demo", messages=HELLO, temperature=3)
    assert odd.value.param == "temperature"
    assert len(sent) == 3


def test_a_wrong_key_is_an_authentication_error(product: Product) -> None:
    right = product.keys["acme/prod"]
    almost = right[:-1] + ("1" if right.endswith("0") else "0")
    for key in ("sk-wrong", "x", "k" * 200, almost):
        with (
            openai.OpenAI(base_url=product.url + "/v1", api_key=key, max_retries=0) as client,
            pytest.raises(openai.AuthenticationError) as caught,
        ):
            client.chat.completions.create(model="demo", messages=HELLO)
        assert caught.value.code == "invalid_api_key"
    elsewhere = httpx.get(product.url + "/v1/models", headers=product.auth("acme/elsewhere"))
    assert (elsewhere.status_code, elsewhere.json()["error"]["code"]) == (401, "ip_not_authorized")


def test_a_rate_limit_says_when_to_come_back(product: Product) -> None:
    """FR-040 a, up to the waiting."""
    with openai.OpenAI(base_url=product.url + "/v1", api_key=product.keys["globex/prod"], max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(model="demo", messages=HELLO, max_tokens=1)
        assert raw.headers["x-ratelimit-limit-requests"] == "3"
        assert raw.headers["x-ratelimit-remaining-requests"] == "2"
        assert re.fullmatch(r"(\d+(\.\d+)?(ms|s)|\d+m\d+s)", raw.headers["x-ratelimit-reset-requests"])
        for _ in range(2):
            client.chat.completions.create(model="demo", messages=HELLO, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="demo", messages=HELLO, max_tokens=1)
    headers = caught.value.response.headers
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(headers["retry-after"]) <= 61
    assert (headers["x-should-retry"], headers["x-ratelimit-remaining-requests"]) == ("true", "0")


def test_a_failure_in_the_middle_of_a_stream_is_raised(client: openai.OpenAI) -> None:
    """FR-029."""
    extra = {"simulate": {"fail_at": 7}}
    texts: list[str] = []
    stream = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=50, stream=True, extra_body=extra)
    with pytest.raises(openai.APIError) as caught:
        texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)
    assert not isinstance(caught.value, openai.APIConnectionError)
    assert caught.value.code in ("generation_failed", "engine_failed")


async def test_the_asynchronous_client_streams_many_at_once(product: Product) -> None:
    async with openai.AsyncOpenAI(base_url=product.url + "/v1", api_key=product.keys["acme/prod"]) as client:

        async def one() -> str:
            stream = await client.chat.completions.create(model="demo", messages=HELLO, max_tokens=10, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*(one() for _ in range(16)))
    assert set(answers) == {" ".join(f"w{number}" for number in range(10))}


# --- the connection -------------------------------------------------------------------------------------------------


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


def raw_chat(product: Product, **fields: Any) -> socket.socket:
    body = json.dumps({"model": "demo", "messages": HELLO, "max_tokens": 1000, **fields}).encode()
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: 127.0.0.1",
        f"authorization: Bearer {product.keys['acme/prod']}",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    connection = socket.create_connection(("127.0.0.1", product.port), timeout=10)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return connection


def ended(product: Product, request_id: str) -> dict[str, Any] | None:
    record = product.record(request_id)
    return record if record and record.get("ended") else None


@pytest.mark.parametrize("leave", [socket.socket.close, reset, half_close])
def test_a_client_that_leaves_frees_its_slot_within_one_step(
    product: Product, leave: Callable[[socket.socket], None]
) -> None:
    """FR-034 iii, asserted from the engine's own record."""
    connection = raw_chat(product, stream=True)
    head = b""
    while b"w10" not in head:
        head += connection.recv(65536)
    match = re.search(rb"x-request-id: (\S+)", head)
    assert match
    leave(connection)
    record = eventually(
        lambda: (product.record(match[1].decode()) or {}).get("ended") and product.record(match[1].decode())
    )
    assert record["outcome"] == "aborted"
    assert record["ended_step"] - record["aborted_step"] <= 1
    assert record["tokens"] < 900
    eventually(lambda: product.running() == 0)
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_any_answer_leaves_nothing_behind(product: Product, stream: bool) -> None:
    """FR-034 i, iv: two run unstreamed, the others wait, and all leave."""
    connections = [raw_chat(product, stream=stream, simulate={"pace": 0.05}) for _ in range(5)]
    eventually(lambda: product.running() == 5)
    for connection in connections:
        connection.close()
    eventually(lambda: product.running() == 0)


def test_headers_of_60_kib_work_and_more_than_64_do_not(product: Product) -> None:
    headers = {**product.auth("acme/prod"), **{f"x-filler-{number}": "x" * 6000 for number in range(10)}}
    assert httpx.get(product.url + "/v1/models", headers=headers).status_code == 200
    headers |= {f"x-more-{number}": "x" * 6000 for number in range(2)}
    assert httpx.get(product.url + "/v1/models", headers=headers).status_code == 400


def test_a_body_over_the_limit_gets_its_answer(product: Product) -> None:
    headers = {**product.auth("acme/prod"), "content-type": "application/json"}
    response = httpx.post(product.url + "/v1/chat/completions", content=b" " * (17 * 1024 * 1024), headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_body_too_large")


def test_forwarded_addresses_are_not_believed(product: Product) -> None:
    headers = {**product.auth("acme/elsewhere"), "x-forwarded-for": "192.0.2.7"}
    assert httpx.get(product.url + "/v1/models", headers=headers).status_code == 401


# --- changes take effect --------------------------------------------------------------------------------------------


def test_a_revoked_key_is_soon_refused_and_a_running_stream_ends_by_itself(product: Product) -> None:
    """FR-001: it is metered once."""
    key = product.auth("acme/spare")
    body = {"model": "demo", "messages": HELLO, "stream": True, "simulate": {"tokens": 100, "pace": 0.05}}
    with httpx.stream("POST", product.url + "/v1/chat/completions", json=body, headers=key, timeout=30) as running:
        lines = running.iter_lines()
        next(lines)
        tenant: dict[str, Any] = {"slug": "acme", "keys": [{"name": "spare", "state": "absent"}]}
        product.apply({"version": 1, "tenants": [tenant]})
        eventually(lambda: httpx.get(product.url + "/v1/models", headers=key).status_code == 401)
        assert list(lines)[-2] == "data: [DONE]"
        id = running.headers["x-request-id"]
    rows = eventually(lambda: [row for row in product.records() if row["request_id"] == id])
    assert [(row["status"], row["output_tokens"]) for row in rows] == [("finished", 100)]


def test_a_change_of_config_is_in_force_without_a_restart(product: Product) -> None:
    before = product.get("/v1/config").json()
    change = {"policy": {"name": "priority"}, "if_version": before["version"], "reason": "test"}
    changed = httpx.post(product.url + "/v1/config", json=change, headers=product.auth("acme/ops"))
    assert (changed.status_code, changed.json()["version"]) == (200, before["version"] + 1)
    eventually(lambda: product.get("/v1/queue/status").json()["policy"] == "priority")
    stale = httpx.post(product.url + "/v1/config", json=change, headers=product.auth("acme/ops"))
    assert (stale.status_code, stale.json()["error"]["code"]) == (409, "config_conflict")
    bad = httpx.post(product.url + "/v1/config", json={"policy": {"nmae": "x"}}, headers=product.auth("acme/ops"))
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "policy.nmae")


# --- the management API ---------------------------------------------------------------------------------------------


def test_the_management_api_asks_for_the_scope_in_the_same_envelope(product: Product) -> None:
    path = "/api/v1/simulated/requests/req_none"
    nobody = httpx.get(product.url + path)
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (401, "invalid_api_key")
    assert nobody.headers["www-authenticate"].startswith("Bearer")
    assert product.get(path, "acme/prod").status_code == 403
    missing = product.get(path)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    for method in ("GET", "POST"):
        unknown = httpx.request(method, product.url + "/api/v1/nonsense", headers=product.auth("acme/ops"))
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
    assert httpx.delete(product.url + path, headers=product.auth("acme/ops")).status_code == 405


def test_its_documentation_is_served_from_here_alone(product: Product) -> None:
    schema = product.get("/api/schema/").text
    assert "/api/v1/simulated/requests/{request_id}" in schema
    page = product.get("/api/docs/")
    assert page.status_code == 200
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert loaded
    assert all(address.startswith("/") for address in loaded)
    assert "<script>" not in page.text
    assert all(product.get(address).status_code == 200 for address in loaded)


# --- the logs -------------------------------------------------------------------------------------------------------


def test_no_key_and_no_prompt_is_in_any_log(product: Product) -> None:
    """FR-004, after everything above."""
    log = product.log()
    assert '"event": "request"' in log
    assert "hello there friend" not in log
    assert not [name for name, key in product.keys.items() if key in log or key[3:] in log]


def test_a_web_process_alone_answers_and_says_what_is_missing() -> None:
    """FR-038, the database away; and no scheduler."""
    with installed() as product:
        product.start_web()
        assert product.health("/readyz") == 503
        headers = {"authorization": f"Bearer {mint().token}"}
        response = httpx.get(product.url + "/v1/models", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "authentication_unavailable")
        assert int(response.headers["retry-after"]) >= 1
        headers["authorization"] += "x"
        assert httpx.get(product.url + "/v1/models", headers=headers).status_code == 401


# --- budgets --------------------------------------------------------------------------------------------------------

BUDGETED = {
    "version": 1,
    "tenants": [
        {
            "slug": "hooli",
            "name": "Hooli",
            "tier": "vip",
            "limits": {"budgets": [{"tokens": 56, "period": "month"}]},
            "keys": [{"name": "prod"}],
        },
        {
            "slug": "piper",
            "name": "Piper",
            "tier": "vip",
            "keys": [
                {"name": "none", "limits": {"budgets": [{"tokens": 0, "period": "total"}]}},
                {"name": "priced", "limits": {"budgets": [{"amount": "1", "period": "total"}]}},
            ],
        },
    ],
}


@pytest.fixture(scope="module")
def budgeted(product: Product) -> Product:
    product.apply(BUDGETED)
    return product


USAGE_LIMIT = "organization_usage_limit_exceeded"  # a tenant's budget of tokens


def ask(product: Product, key: str, *, stream: bool = False) -> httpx.Response:
    body = {"model": "demo", "messages": HELLO, "max_tokens": 4, "stream": stream}
    return httpx.post(product.url + "/v1/chat/completions", headers=product.auth(key), json=body, timeout=30)


def test_fr_007_a_budget_is_spent_to_the_last_token_and_says_when_it_begins_anew(budgeted: Product) -> None:
    """FR-007, FR-016."""
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: ask(budgeted, "hooli/prod"), range(20)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert len(answers) - len(refused) == 8  # of 3 + 4 tokens
    for answer in refused:
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["code"]) == (429, "insufficient_quota", USAGE_LIMIT)
        assert (answer.headers["x-should-retry"], answer.headers.get("retry-after")) == ("false", None)
        assert "The budget of this tenant" in error["message"] and "It begins anew at" in error["message"]
    # FR-016: whoever asks is shown the instant that the refusal names.
    (budget,) = [one for one in budgeted.get("/v1/limits", "hooli/prod").json()["limits"] if one["kind"] == "budget"]
    assert (budget["scope"], budget["limit"], budget["used"], budget["remaining"]) == ("tenant", 56, 56, 0)
    assert f"It begins anew at {budget['reset_at']}." in refused[0].json()["error"]["message"]


def test_fr_018_fr_030_a_budget_of_nothing_is_429_with_and_without_a_stream(budgeted: Product) -> None:
    """FR-018, FR-030."""
    whole, stream = ask(budgeted, "piper/none"), ask(budgeted, "piper/none", stream=True)
    assert (whole.status_code, stream.status_code) == (429, 429)
    assert whole.json() == stream.json()
    assert stream.headers["content-type"].startswith("application/json")
    assert "The budget of this key does not cover the request: limit 0 tokens in total" in whole.text


def test_fr_019_a_missing_price_is_the_operators_matter(budgeted: Product) -> None:
    """FR-019."""
    answer = ask(budgeted, "piper/priced")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_priced")


def test_fr_040_the_official_client_asks_once_where_a_budget_is_spent(budgeted: Product) -> None:
    """FR-040."""
    with openai.OpenAI(base_url=budgeted.url + "/v1", api_key=budgeted.keys["piper/none"]) as client:
        sent = counting(client)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model="demo", messages=HELLO, max_tokens=5)
        assert (caught.value.type, caught.value.code) == ("insufficient_quota", "project_usage_limit_exceeded")
        assert len(sent) == 1
