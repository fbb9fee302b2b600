"""Every way in which a request can fail, and the one table that says what the caller sees.

    ApiError            carries a `reason`: a row of TABLE
    └── InvalidRequest  the body or a parameter is wrong; `param` names the field
    ClientGone          nobody is left to answer
    └── SlowClient      the client has not taken a byte for too long

Reasons that the scheduler gives (`scheduler.core.types.Reason`) are rows under their own value. Bodies are always
`{"error": {"message", "type", "param", "code"}}`; `param` and `code` are strings or null. What an engine or a
framework says never reaches the caller by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from harness_web.openai.headers import Header, retry_advice

INVALID = "invalid_request_error"
RATE = "rate_limit_error"
QUOTA = "insufficient_quota"
UNAVAILABLE = "service_unavailable_error"
SERVER = "server_error"
SHOWN = 100  # characters of a caller's own text that a message repeats


@dataclass(frozen=True, slots=True)
class Shape:
    """What a reason looks like on the wire. `wait`: seconds of Retry-After where the refusal names none."""

    status: int
    type: str
    code: str
    retry: bool = False  # may the same request succeed by itself, later
    wait: float = 1.0


def _overloaded(wait: float) -> Shape:
    return Shape(503, UNAVAILABLE, "server_is_overloaded", retry=True, wait=wait)


TABLE: dict[str, Shape] = {
    # the request itself
    "invalid_json": Shape(400, INVALID, "invalid_json"),
    "invalid_type": Shape(400, INVALID, "invalid_type"),
    "invalid_value": Shape(400, INVALID, "invalid_value"),
    "missing_parameter": Shape(400, INVALID, "missing_required_parameter"),
    "unsupported_parameter": Shape(400, INVALID, "unsupported_parameter"),
    "invalid_prompt": Shape(400, INVALID, "invalid_prompt"),
    "context_length_exceeded": Shape(400, INVALID, "context_length_exceeded"),
    "never_fits": Shape(400, INVALID, "request_too_large"),
    "limit_too_large": Shape(400, INVALID, "request_too_large"),
    "tier_not_allowed": Shape(400, INVALID, "service_tier_not_allowed"),
    "invalid_config": Shape(400, INVALID, "invalid_config"),
    "config_conflict": Shape(409, INVALID, "config_conflict"),
    "conflict": Shape(409, INVALID, "conflict"),
    "unknown_url": Shape(404, INVALID, "unknown_url"),
    "not_found": Shape(404, INVALID, "not_found"),
    "model_not_served": Shape(404, INVALID, "model_not_found"),
    "method_not_allowed": Shape(405, INVALID, "method_not_allowed"),
    "not_acceptable": Shape(406, INVALID, "not_acceptable"),
    "request_timeout": Shape(408, INVALID, "request_timeout", retry=True),
    "body_too_large": Shape(413, INVALID, "request_body_too_large"),
    "unsupported_media_type": Shape(415, INVALID, "unsupported_media_type"),
    # who is asking
    "invalid_key": Shape(401, INVALID, "invalid_api_key"),
    "address_refused": Shape(401, INVALID, "ip_not_authorized"),
    "tenant_suspended": Shape(403, INVALID, "account_suspended"),
    "missing_scope": Shape(403, INVALID, "insufficient_permissions"),
    "auth_unavailable": Shape(503, UNAVAILABLE, "authentication_unavailable", retry=True),
    # the caller's own limits
    "limit_rpm": Shape(429, RATE, "rate_limit_exceeded", retry=True),
    "limit_tpm": Shape(429, RATE, "rate_limit_exceeded", retry=True),
    "limit_concurrency": Shape(429, RATE, "rate_limit_exceeded", retry=True),
    # OpenAI's words: its projects are our keys, its organizations our tenants
    "limit_key_spend": Shape(429, QUOTA, "project_spend_limit_exceeded"),
    "limit_key_tokens": Shape(429, QUOTA, "project_usage_limit_exceeded"),
    "limit_tenant_spend": Shape(429, QUOTA, "organization_spend_limit_exceeded"),
    "limit_tenant_tokens": Shape(429, QUOTA, "organization_usage_limit_exceeded"),
    "no_price": Shape(503, UNAVAILABLE, "model_not_priced"),
    # our own capacity and health
    "queue_full": _overloaded(2.0),
    "engine_not_ready": _overloaded(2.0),
    "draining": _overloaded(1.0),
    "spool_unavailable": _overloaded(5.0),
    "budget_unavailable": _overloaded(5.0),
    "queue_timeout": _overloaded(2.0),
    "deadline_infeasible": _overloaded(2.0),
    "deadline_unreachable": Shape(503, UNAVAILABLE, "deadline_unreachable"),
    "degraded": _overloaded(5.0),
    "shutdown": _overloaded(1.0),
    "scheduler_lost": _overloaded(1.0),
    "engine_failed": Shape(502, SERVER, "engine_failed", retry=True),
    "request_failed": Shape(502, SERVER, "generation_failed", retry=True),
    "internal": Shape(500, SERVER, "internal_error", retry=True),
}


class ApiError(Exception):
    """A request that ends as an error. `retry_after`: seconds, only where retrying can help."""

    def __init__(
        self,
        reason: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        headers: tuple[Header, ...] = (),
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.shape = TABLE.get(reason, TABLE["internal"])
        self.message = message
        self.param = param
        self.retry_after = retry_after
        self.headers = headers


class InvalidRequest(ApiError):
    """A field of the body that cannot be meant, or that is not offered."""

    def __init__(self, message: str, param: str | None, *, reason: str = "invalid_value") -> None:
        super().__init__(reason, message, param=param)


class ClientGone(Exception):
    """The client has closed its connection."""


class SlowClient(ClientGone):
    """The client has stopped reading."""


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _Envelope(msgspec.Struct):
    error: _Error


def envelope(error: ApiError) -> bytes:
    """The JSON body of an error; the same bytes serve as the last event of a stream."""
    shape = error.shape
    return msgspec.json.encode(_Envelope(_Error(error.message, shape.type, error.param, shape.code)))


def error_headers(error: ApiError) -> list[Header]:
    """Retry advice, and what the error brings along."""
    wait = error.shape.wait if error.retry_after is None else error.retry_after
    return [*retry_advice(error.shape.retry, wait), *error.headers]


def unknown_model(name: str) -> ApiError:
    """One answer for a model that nobody serves and for one that the key may not use."""
    shown = name if len(name) <= SHOWN else f"{name[:SHOWN]}…"
    return ApiError(
        "model_not_served", f"The model '{shown}' does not exist or you do not have access to it.", param="model"
    )
