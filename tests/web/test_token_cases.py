"""How tokens are bounded, counted and shown: the field's cases, over HTTP, on the real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.web.product import Product, eventually, installed

CHAT = "/v1/chat/completions"
CONTEXT = 4096
PROMPT = 3  # tokens of the prompt of `chat`

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "tenants": [
        {
            "slug": "acme",
            "name": "Acme",
            "tier": "vip",
            "limits": {"rpm": 1000, "tpm": 10**6, "budgets": [{"tokens": 10**9, "period": "total"}]},
        },
        {"slug": "initech", "name": "Initech", "tier": "vip", "keys": [{"name": "prod"}]},
    ],
    "deployments": [
        {
            "model": "m",
            "engine": "simulated",
            "options": {"step": {"base": 0.001}, "max_seqs": 4, "kv_tokens": 20_000, "max_model_len": CONTEXT},
        }
    ],
}


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    with installed() as product:
        product.start()
        product.apply(DOCUMENT)
        eventually(lambda: product.get("/v1/models/m", "initech/prod").status_code == 200)
        yield product


def asked(product: Product, key: str = "acme/prod", words: int = PROMPT, **changes: Any) -> dict[str, Any]:
    """The arguments of a POST. A change to None leaves the field out; ... is null."""
    body = {"model": "m", "messages": [{"role": "user", "content": " ".join(["word"] * words)}], **changes}
    sent = {name: None if value is ... else value for name, value in body.items() if value is not None}
    return {"url": product.url + CHAT, "headers": product.auth(key), "json": sent, "timeout": 60}


def chunks(answer: httpx.Response) -> list[Any]:
    """The events of a stream, which ends as it should."""
    *events, end, nothing, over = [*answer.text.split("\n\n"), ""]
    assert (end, nothing, over) == ("data: [DONE]", "", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def held(product: Product) -> dict[str, tuple[int, int]]:
    """What is used and what is reserved of acme's limits."""
    limits = product.get("/v1/limits", "acme/prod").json()["limits"]
    return {one["kind"]: (one["used"], one["reserved"]) for one in limits}


# --- the usage chunk ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {}])
def test_fr_021_a_stream_says_nothing_of_usage_unless_asked(product: Product, options: Any) -> None:
    """FR-021 a, b."""
    answer = httpx.post(**asked(product, stream=True, max_tokens=5, stream_options=options))
    found = chunks(answer)
    assert all("usage" not in chunk and chunk["choices"] for chunk in found)
    assert found[-1]["choices"][0]["finish_reason"] == "length"


def test_fr_021_usage_is_one_more_chunk_at_the_end(product: Product) -> None:
    """FR-021 c."""
    answer = httpx.post(**asked(product, stream=True, max_tokens=5, stream_options={"include_usage": True}))
    *others, finish, last = chunks(answer)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in (*others, finish))
    assert finish["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    usage = last["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (PROMPT, 5, PROMPT + 5)
    shared = ("id", "created", "model", "object")
    assert len({tuple(chunk[name] for name in shared) for chunk in (*others, finish, last)}) == 1


def test_fr_021_stream_options_need_a_stream(product: Product) -> None:
    """FR-021 d."""
    answer = httpx.post(**asked(product, stream=False, max_tokens=5, stream_options={"include_usage": True}))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")


# --- the bound of an answer -----------------------------------------------------------------------------------------

BOUNDS = {
    "a": ({"max_completion_tokens": 5}, 5),
    "b": ({"max_tokens": 5}, 5),
    "c": ({"max_tokens": 50, "max_completion_tokens": 5}, 5),
    "d": ({"max_completion_tokens": ..., "max_tokens": 7}, 7),
}


@pytest.mark.parametrize("case", BOUNDS)
def test_fr_026_the_bound_that_is_asked_for_is_reserved_and_kept(product: Product, case: str) -> None:
    """FR-026 a to d: the reservation and the engine go by the same number."""
    fields, bound = BOUNDS[case]
    _, before = held(product)["budget"]
    with httpx.stream("POST", **asked(product, stream=True, simulate={"hang_at": 1}, **fields)) as running:
        lines = running.iter_lines()  # the answer is given up with it
        next(lines)
        _, reserved = held(product)["budget"]
    assert (before, reserved) == (0, PROMPT + bound)
    eventually(lambda: held(product)["budget"][1] == 0)
    answer = httpx.post(**asked(product, **fields)).json()
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (bound, "length")


def test_fr_026_thinking_counts_as_answering(product: Product) -> None:
    """FR-026 e: 15 tokens of thought leave 5 for the answer, and all 20 are counted."""
    thought, said = [f"t{number} " for number in range(15)], [f"a{number} " for number in range(15)]
    texts = ["<think>" + thought[0], *thought[1:-1], thought[-1] + "</think>", *said]
    answer = httpx.post(**asked(product, max_completion_tokens=20, simulate={"text": texts})).json()
    assert answer["usage"]["completion_tokens"] == 20
    assert answer["choices"][0]["finish_reason"] == "length"
    message = answer["choices"][0]["message"]
    everything = (message.get("reasoning_content") or "") + (message["content"] or "")
    assert [everything.count(word) for word in ("t14", "a4", "a5")] == [1, 1, 0]


# --- the end of the context -----------------------------------------------------------------------------------------

FITS = {"one": (CONTEXT - 1, 1), "no bound": (CONTEXT - 1, None)}
TOO_LONG = {
    "one too many": (CONTEXT - 1, 2),
    "prompt alone": (CONTEXT, None),
    "prompt and bound": (CONTEXT, 5),
    "far too long": (50_000, None),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", FITS)
def test_fr_027_the_last_token_of_the_context_is_used(product: Product, case: str, stream: bool) -> None:
    """FR-027."""
    words, bound = FITS[case]
    options = {"include_usage": True} if stream else None
    answer = httpx.post(**asked(product, words=words, max_tokens=bound, stream=stream, stream_options=options))
    assert answer.status_code == 200
    last = chunks(answer) if stream else [answer.json()]
    assert last[-1]["usage"]["completion_tokens"] == 1
    finish = [choice["finish_reason"] for chunk in last for choice in chunk["choices"] if choice["finish_reason"]]
    assert finish == ["length"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", TOO_LONG)
def test_fr_027_what_can_never_fit_is_refused_and_costs_nothing(product: Product, case: str, stream: bool) -> None:
    """FR-027: the engine does not hear of it, and nobody else waits for it."""
    words, bound = TOO_LONG[case]
    before = held(product)
    answer = httpx.post(**asked(product, words=words, max_tokens=bound, stream=stream))
    assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert error["param"] == "messages"
    assert all(str(number) in error["message"] for number in (CONTEXT, words, bound) if number is not None)
    assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
    assert product.record(answer.headers["x-request-id"]) is None
    assert held(product) == before
    assert httpx.post(**asked(product, "initech/prod", max_tokens=1)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", TOO_LONG)
def test_fr_027_the_official_client_asks_once(product: Product, case: str, stream: bool) -> None:
    """FR-027."""
    words, bound = TOO_LONG[case]
    sent: list[httpx.Request] = []
    with (
        httpx.Client(event_hooks={"request": [sent.append]}) as connections,
        openai.OpenAI(
            base_url=product.url + "/v1", api_key=product.keys["acme/prod"], http_client=connections
        ) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": " ".join(["word"] * words)}],
            max_tokens=bound,
            stream=stream,
        )
    assert (caught.value.code, len(sent)) == ("context_length_exceeded", 1)
