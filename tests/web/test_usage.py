"""Usage as scripts read it, and what is billed for: over HTTP, with keys, on the real processes."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import time
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx
import pytest

from tests.web.product import Product, eventually, installed

CHAT = "/v1/chat/completions"
USAGE = "/api/v1/usage"
WITHIN = 5.0  # seconds from the end of a request to its place in the figures

DOCUMENT: dict[str, Any] = {
    "version": 1,
    "tenants": [
        {
            "slug": "acme",
            "name": "Acme",
            "tier": "vip",
            "limits": {"tpm": 1_000_000, "budgets": [{"tokens": 10**9, "period": "total"}]},
            "keys": [{"name": "books", "scopes": ["usage"]}],
        },
        {"slug": "globex", "name": "Globex", "tier": "free", "keys": [{"name": "books", "scopes": ["usage"]}]},
    ],
    "prices": [
        {
            "model": model,
            "input_per_mtok": "0.20",
            "output_per_mtok": "0.60",
            "currency": "USD",
            "from": "2026-01-01T00:00:00Z",
        }
        for model in ("demo", "slow")
    ],
    "deployments": [
        {
            "model": "slow",  # 2 s for a prompt of 10 words
            "engine": "simulated",
            "options": {"step": {"base": 0.0, "prefill_token": 0.2}, "max_seqs": 8, "step_tokens": 64},
        }
    ],
}
TEN_WORDS = " ".join(["word"] * 10)


@pytest.fixture(scope="module")
def product() -> Iterator[Product]:
    with installed() as product:
        product.start()
        product.apply(DOCUMENT)
        eventually(lambda: product.get("/v1/models/slow", "acme/prod").status_code == 200)
        yield product


@pytest.fixture
def since() -> int:
    """A second that no earlier test has used anything in."""
    time.sleep(1.0 - time.time() % 1.0)
    return int(time.time())


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 5} | changes


def chat(product: Product, key: str = "acme/prod", **changes: Any) -> httpx.Response:
    return httpx.post(product.url + CHAT, headers=product.auth(key), json=body(**changes), timeout=60)


def usage(product: Product, query: str = "", key: str = "acme/ops") -> dict[str, Any]:
    response = product.get(f"{USAGE}?{query}", key)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


def results(product: Product, query: str, key: str = "acme/ops") -> list[dict[str, Any]]:
    return [result for bucket in usage(product, query, key)["data"] for result in bucket["results"]]


def requests(product: Product, since: int) -> int:
    return sum(one["num_requests"] for one in results(product, f"start_time={since}"))


def row(product: Product, id: str) -> dict[str, Any]:
    """The ledger's row of a request, when it is there."""
    path = f"/api/v1/requests/{id}/trace"

    def ledger() -> dict[str, Any] | None:
        response = product.get(path)
        found: dict[str, Any] | None = response.json()["ledger"] if response.status_code == 200 else None
        return found

    return eventually(ledger)


def budget(product: Product) -> tuple[int, int]:
    """What is used and what is reserved of acme's budget."""
    limits = product.get("/v1/limits", "acme/prod").json()["limits"]
    (one,) = [limit for limit in limits if limit["kind"] == "budget"]
    return one["used"], one["reserved"]


def test_figures_are_there_within_five_seconds_and_add_up(product: Product, since: int) -> None:
    for _ in range(3):
        assert chat(product).status_code == 200
    ended = time.monotonic()
    eventually(lambda: requests(product, since) == 3, WITHIN)
    assert time.monotonic() - ended < WITHIN
    (result,) = results(product, f"start_time={since}&group_by=tenant,key,model,tier")
    assert (result["tenant"], result["key"], result["model"], result["tier"]) == ("acme", "prod", "demo", "vip")
    assert (result["input_tokens"], result["output_tokens"], result["num_requests"]) == (9, 15, 3)
    assert (Decimal(result["cost"]), result["currency"]) == (Decimal("0.0000108"), "USD")
    assert result["engine_seconds"] > 0


def test_callers_tag_their_requests_with_a_project(product: Product, since: int) -> None:
    tags = [b"proj_search", ("Überblick " + "x" * 100).encode("latin-1"), "漢字".encode(), None]
    for tag in tags:
        headers = product.auth("acme/prod") | ({} if tag is None else {"openai-project": tag})
        assert httpx.post(product.url + CHAT, headers=headers, json=body(), timeout=60).status_code == 200
    eventually(lambda: requests(product, since) == 4)
    found = {one["project"]: one["num_requests"] for one in results(product, f"start_time={since}&group_by=project")}
    assert found == {"proj_search": 1, ("Überblick " + "x" * 100)[:64]: 1, "漢字": 1, "": 1}


@pytest.mark.parametrize("width", ["1m", "1h", "1d"])
def test_buckets_are_aligned_and_empty_ones_left_out(product: Product, since: int, width: str) -> None:
    """FR-067: a report says its zone, its start and its end."""
    chat(product)
    eventually(lambda: requests(product, since) == 1)
    day = since - since % 86_400
    seconds = {"1m": 60, "1h": 3600, "1d": 86_400}[width]
    document = usage(product, f"start_time={day}&end_time={day + 86_400}&bucket_width={width}")
    assert (document["start_time"], document["end_time"], document["timezone"]) == (day, day + 86_400, "UTC")
    assert document["data"]
    for bucket in document["data"]:
        assert bucket["start_time"] % seconds == 0 and bucket["end_time"] == bucket["start_time"] + seconds
        assert sum(result["num_requests"] for result in bucket["results"]) > 0


def test_a_tenant_sees_its_own_and_an_operator_all(product: Product, since: int) -> None:
    chat(product)
    chat(product, "globex/prod")
    eventually(lambda: requests(product, since) == 2)
    query = f"start_time={since}&group_by=tenant"
    assert {one["tenant"] for one in results(product, query)} == {"acme", "globex"}
    assert {one["tenant"] for one in results(product, query, "globex/books")} == {"globex"}
    assert {one["tenant"] for one in results(product, f"{query}&tenant=acme")} == {"acme"}
    assert results(product, f"{query}&tenant=acme", "globex/books") == []
    assert product.get(USAGE, "acme/prod").status_code == 403
    assert httpx.get(product.url + USAGE).status_code == 401
    _, *rows = exported(product, since, "globex/books")
    assert {one[3] for one in rows} == {"globex"}


def test_pages_hold_so_many_buckets_and_miss_none(product: Product, since: int) -> None:
    chat(product)
    eventually(lambda: requests(product, since) == 1)
    query = f"start_time={since - 86_400}&end_time={since + 60}&bucket_width=1m"
    whole = usage(product, query)["data"]
    paged, page = [], ""
    for _ in range(len(whole)):
        document = usage(product, f"{query}&limit=1{page}")
        paged += document["data"]
        page = f"&page={document['next_page']}"
    assert paged == whole
    assert (document["has_more"], document["next_page"]) == (False, None)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("bucket_width=2d", "bucket_width"),
        ("group_by=tenant,colour", "group_by"),
        ("timezone=Mars/Olympus", "timezone"),
        ("timezone=../secrets", "timezone"),
        ("start_time=yesterday", "start_time"),
        ("start_time=10&end_time=5", "end_time"),
        ("limit=0", "limit"),
        ("limit=100000", "limit"),
        ("page=next", "page"),
        ("groupby=tenant", "groupby"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(product: Product, query: str, param: str) -> None:
    response = product.get(f"{USAGE}?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def exported(product: Product, since: int, key: str = "acme/ops") -> list[list[str]]:
    response = product.get(f"{USAGE}/records.csv?start_time={since}", key)
    assert response.headers["content-type"] == "text/csv; charset=utf-8"
    return list(csv.reader(io.StringIO(response.text, newline=""), strict=True))


def test_rows_are_exported_as_csv_and_json(product: Product, since: int) -> None:
    """FR-070, FR-071: a file says how many rows it has, and its name says nothing of a tenant."""
    for _ in range(3):
        chat(product)
    eventually(lambda: requests(product, since) == 3)
    header, *rows = exported(product, since)
    assert [row[header.index("rows_left")] for row in rows] == ["2", "1", "0"]
    assert sum(int(row[header.index("output_tokens")]) for row in rows) == 15
    assert {row[header.index("cost")] for row in rows} == {"0.0000036"}
    response = product.get(f"{USAGE}/records.json?start_time={since}")
    assert response.headers["x-row-count"] == "3"
    assert response.headers["content-disposition"].startswith(f'attachment; filename="usage-{since}-')
    assert [one["request_id"] for one in response.json()] == [row[header.index("request_id")] for row in rows]


def test_what_the_client_sees_and_what_is_metered_are_independent(product: Product, since: int) -> None:
    """FR-020: streams without a usage request are billed like their twin without a stream."""
    ids, remaining, spent = [], [], [budget(product)]
    for options in ({"stream": True}, {"stream": True, "stream_options": {"include_usage": False}}, {}):
        answer = chat(product, max_tokens=20, **options)
        ids.append(answer.headers["x-request-id"])
        remaining.append(int(answer.headers["x-ratelimit-remaining-tokens"]))
        spent.append(budget(product))
        if "stream" in options:
            assert "usage" not in answer.text and '"choices":[]' not in answer.text
    rows = [row(product, id) for id in ids]
    assert [(one["prompt_tokens"], one["completion_tokens"]) for one in rows] == [(3, 20)] * 3
    assert [before - after for before, after in itertools.pairwise(remaining)] == pytest.approx([23, 23], abs=1)
    assert [(after - before, held) for (before, _), (after, held) in itertools.pairwise(spent)] == [(23, 0)] * 3
    eventually(lambda: requests(product, since) == 3)
    (result,) = results(product, f"start_time={since}&group_by=key")
    assert Decimal(result["cost"]) == 3 * Decimal("0.0000126")
    assert {one["cost"] for one in product.records("acme/books") if one["request_id"] in ids} == {"0.0000126"}


class TestLeaving:
    """FR-023: billed is what was generated before the abort took effect. The prompt is billed in every case.

    The budget agrees with the ledger, and nothing stays reserved.
    """

    def leave_after_chunks(self, product: Product, chunks: int, **changes: Any) -> dict[str, Any]:
        """Close when so many chunks with text have come; the ledger's row."""
        with self.one_more(product) as found, httpx.stream("POST", **self.asked(product, **changes)) as answer:
            texts = (line for line in answer.iter_lines() if '"content":"w' in line or '"content":" w' in line)
            assert len(list(itertools.islice(texts, chunks))) == chunks
        return found

    def leave_after_seconds(self, product: Product, seconds: float, **changes: Any) -> dict[str, Any]:
        with self.one_more(product) as found, pytest.raises(httpx.ReadTimeout):
            httpx.post(**self.asked(product, **changes) | {"timeout": seconds})
        return found

    def asked(self, product: Product, **changes: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": TEN_WORDS}]
        slow = {"model": "slow", "messages": messages, "max_tokens": 200, "simulate": {"pace": 0.05}}
        headers = product.auth("acme/prod")
        return {"url": product.url + CHAT, "headers": headers, "json": body(**slow | changes), "timeout": 60}

    @contextlib.contextmanager
    def one_more(self, product: Product) -> Iterator[dict[str, Any]]:
        """Exactly one row comes of what is done meanwhile: it is in the value at the end."""
        found: dict[str, Any] = {}
        before = {one["request_id"] for one in product.records("acme/books")}
        used_before, _ = budget(product)
        yield found
        eventually(lambda: product.running() == 0)
        (row,) = eventually(lambda: [one for one in product.records("acme/books") if one["request_id"] not in before])
        found.update(row)
        used, reserved = budget(product)
        assert (used - used_before, reserved) == (row["input_tokens"] + row["output_tokens"], 0)

    def test_in_prefill(self, product: Product) -> None:
        found = self.leave_after_seconds(product, 1.0, stream=True)
        assert (found["status"], found["input_tokens"], found["output_tokens"]) == ("aborted", 10, 0)

    def test_in_the_middle(self, product: Product) -> None:
        found = self.leave_after_chunks(product, 10, stream=True)
        assert (found["status"], found["input_tokens"]) == ("aborted", 10)
        assert 10 <= found["output_tokens"] <= 30

    def test_before_the_last_word(self, product: Product) -> None:
        options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 20}
        found = self.leave_after_chunks(product, 20, **options)
        assert found["status"] in ("finished", "aborted")
        assert (found["input_tokens"], found["output_tokens"]) == (10, 20)

    def test_without_a_stream(self, product: Product) -> None:
        found = self.leave_after_seconds(product, 4.0)
        assert (found["status"], found["input_tokens"]) == ("aborted", 10)
        assert 30 <= found["output_tokens"] <= 62
