"""From Submit to the ledger, through the whole process."""

from __future__ import annotations

import pytest

from scheduler.gateway import Accepted, Done
from tenants.models import UsageRecord

from .conftest import Product

pytestmark = pytest.mark.usefixtures("demo")


async def ready(product: Product) -> None:
    await product.until(lambda: product.gateway.models().get("demo") == "ready")


async def test_a_request_is_accepted_streamed_ended_and_billed(start):
    async with start() as product:
        await ready(product)
        answer = product.submit(words=3, max_tokens=4)
        await product.until(answer.done)
        assert isinstance(answer.events[0], Accepted) and isinstance(answer.last, Done)
        assert answer.text() == "w0 w1 w2 w3"
        assert (answer.last.prompt_tokens, answer.last.completion_tokens) == (3, 4)
        await product.settled()
        row = await UsageRecord.objects.aget()
    assert (row.request_id, row.status, row.prompt_tokens, row.completion_tokens) == ("req-1", "finished", 3, 4)
