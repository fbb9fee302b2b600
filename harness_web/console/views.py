"""Pages of the console. The first byte already carries the numbers; the socket keeps them fresh."""

from __future__ import annotations

from typing import Any

import msgspec
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import translation
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from harness_web.console.access import operator_required
from harness_web.console.consumers import localised
from harness_web.console.live import BOARD


@require_safe
@never_cache
@operator_required
def overview(request: HttpRequest) -> HttpResponse:
    """The live overview."""
    frame = localised(BOARD.snapshot(), translation.get_language())
    context = {"frame": frame, "view": frame["view"], "sentence": frame["sentence"], "texts": texts()}
    return render(request, "console/overview.html", context)


@require_safe
@never_cache
@operator_required
def overview_frame(request: HttpRequest) -> HttpResponse:
    """The same frame as JSON: what a page that cannot keep a socket asks for every ten seconds."""
    stream, seq = request.GET.get("stream"), request.GET.get("seq", "")
    frame = BOARD.snapshot(stream, int(seq) if seq.isascii() and seq.isdigit() else None)
    return HttpResponse(
        msgspec.json.encode(localised(frame, translation.get_language())), content_type="application/json"
    )


def texts() -> dict[str, Any]:
    """Words that the scripts of the page show, in the reader's language."""
    return {
        "live": _("Live"),
        "no-scheduler": _("No scheduler"),
        "paused": _("Paused"),
        "connecting": _("Connecting"),
        "reconnecting": _("Reconnecting"),
        "stale": _("Stale"),
        "offline": _("Offline"),
        "signed-out": _("Signed out"),
        "forbidden": _("No longer an operator"),
        "dataAge": _("last data {age} ago"),
        "pause": _("Pause"),
        "resume": _("Resume"),
        "running": _("running"),
        "tokensPerSecond": _("tokens/s"),
        "kv": _("KV cache"),
        "busy": _("engine busy"),
        "gpu": _("GPU utilisation"),
        "memory": _("memory"),
        "time": _("Time"),
        "noEvents": _("no requests"),
        "states": {
            "ready": _("ready"),
            "starting": _("starting"),
            "failed": _("failed"),
            "draining": _("draining"),
            "stopped": _("stopped"),
            "unknown": _("unknown"),
        },
    }
