"""Dead letters in the database: requests that died of us, and what has become of them since. Blocking."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import msgspec
from django.db.models import Max

from scheduler.engines.base import JsonFormat, Sampling, Tools
from scheduler.models import DeadLetter
from scheduler.wire.messages import BudgetSpec, Caller, LimitSpec, Submit

KEPT = 10_000  # the newest letters
PAYLOAD_BYTES = 64 * 1024  # a larger request is not kept, and its letter cannot be retried

Cause = DeadLetter.Cause


class RetryError(Exception):
    """The letter cannot be retried; the text says why."""


@dataclass(frozen=True, slots=True)
class Letter:
    """One death. `payload`: the request as `pack` made it, empty if it was too large to keep."""

    request_id: str
    tenant_id: str
    tenant_slug: str
    key_id: str
    tier: str
    model: str
    cause: str
    message: str
    submitted_at: datetime
    died_at: datetime
    payload: str


def pack(submit: Submit) -> str:
    """A submission as text that later versions can read, messages included: a retry needs them. Empty if too large."""
    document = msgspec.structs.asdict(submit)
    document["sampling"] = msgspec.structs.asdict(submit.sampling)
    document["caller"] = msgspec.structs.asdict(submit.caller) | {
        "limits": [msgspec.structs.asdict(limit) for limit in submit.caller.limits],
        "budgets": [msgspec.structs.asdict(budget) for budget in submit.caller.budgets],
    }
    text = msgspec.json.encode(document)
    return text.decode() if len(text) <= PAYLOAD_BYTES else ""


def unpack(payload: str, request_id: str) -> Submit:
    """The submission again, as a new request."""
    document: dict[str, Any] = msgspec.json.decode(payload)
    caller, sampling = document["caller"], document["sampling"]
    limits = tuple(LimitSpec(**limit) for limit in caller["limits"])
    budgets = tuple(BudgetSpec(**budget | {"alerts": tuple(budget["alerts"])}) for budget in caller.get("budgets", ()))
    document["caller"] = Caller(**caller | {"limits": limits, "budgets": budgets})
    bias = {int(token): value for token, value in sampling["logit_bias"].items()}
    document["sampling"] = Sampling(
        **sampling
        | {
            "logit_bias": bias,
            "stop": tuple(sampling["stop"]),
            "format": msgspec.convert(sampling.get("format"), JsonFormat | None),
            "tools": msgspec.convert(sampling.get("tools"), Tools | None),
        }
    )
    document["messages"] = tuple(document["messages"])
    return Submit(**document | {"id": request_id, "attempt": 1, "age": 0.0})


def write(letters: Sequence[Letter]) -> None:
    """Add letters and forget the oldest beyond KEPT. One that is there already is left: a write may be repeated."""
    ids = [letter.request_id for letter in letters]
    known = set(DeadLetter.objects.filter(request_id__in=ids).values_list("request_id", flat=True))
    fresh = [letter for letter in letters if letter.request_id not in known]
    DeadLetter.objects.bulk_create([DeadLetter(**asdict(letter)) for letter in fresh])
    newest = DeadLetter.objects.aggregate(newest=Max("pk"))["newest"] or 0
    DeadLetter.objects.filter(pk__lte=newest - KEPT).delete()


def claim(letter_id: int, request_id: str) -> Submit:
    """Take a letter for a retry under a new id. Raises RetryError: it is gone, not open, or was not kept."""
    letter = DeadLetter.objects.filter(pk=letter_id).first()
    if letter is None:
        raise RetryError("There is no such dead letter.")
    if letter.state == DeadLetter.State.OPEN and not letter.payload:
        raise RetryError("The request was too large to be kept.")
    open_letter = DeadLetter.objects.filter(pk=letter_id, state=DeadLetter.State.OPEN)
    if not open_letter.update(state=DeadLetter.State.RETRIED, retried_as=request_id):
        raise RetryError(f"The letter is {letter.state}; only an open one can be retried.")
    return unpack(letter.payload, request_id)


def answered(letter_id: int, answer: str) -> None:
    """The retry has finished: keep its answer (JSON) and forget what was asked."""
    DeadLetter.objects.filter(pk=letter_id).update(answer=answer, payload="")


def reopen(letter_id: int, message: str) -> None:
    """The retry has not finished."""
    DeadLetter.objects.filter(pk=letter_id, state=DeadLetter.State.RETRIED).update(
        state=DeadLetter.State.OPEN, message=message
    )


def reopen_interrupted(models: Collection[str]) -> int:
    """Open what was being retried when the process died that serves these models. Answers how many."""
    retried = DeadLetter.objects.filter(state=DeadLetter.State.RETRIED, answer="", model__in=models)
    message = "The scheduler stopped during the retry; the usage record of its request tells how far it came."
    return retried.exclude(payload="").update(state=DeadLetter.State.OPEN, message=message)


def discard(letter_id: int) -> bool:
    """Nobody will retry it: forget what was asked. False if it is not open."""
    return bool(
        DeadLetter.objects.filter(pk=letter_id, state=DeadLetter.State.OPEN).update(
            state=DeadLetter.State.DISCARDED, payload=""
        )
    )
