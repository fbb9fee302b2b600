"""Who is asking: from the Authorization header to a principal with the scope that the view needs."""

from __future__ import annotations

from harness_web.openai.errors import ApiError
from harness_web.openai.exchange import Exchange
from harness_web.openai.headers import Header
from harness_web.runtime import WebRuntime
from tenants.auth import AddressRefusedError, AuthError, AuthUnavailableError, Principal, TenantSuspendedError

CHALLENGE: Header = (b"www-authenticate", b'Bearer realm="Harness"')
INVALID_KEY = "Incorrect API key provided, or none. Send it as 'Authorization: Bearer <key>'."


async def authenticate(exchange: Exchange, runtime: WebRuntime, scope: str | None) -> Principal:
    """The principal of the request's key; `scope` None means that any key will do. Raises ApiError: 401, 403 or 503.

    Unknown, wrong, expired and revoked keys, and none at all, are one answer.
    """
    token = bearer_token(exchange.header(b"authorization"))
    try:
        principal = await runtime.authenticator.authenticate(token, exchange.client_ip)
    except AuthError as error:
        raise auth_failure(error) from None
    exchange.tenant, exchange.key = principal.tenant_slug, principal.key_id
    if scope is not None and not principal.has_scope(scope):
        raise ApiError("missing_scope", f"This key does not have the scope '{scope}'.")
    return principal


def bearer_token(authorization: str) -> str:
    """The token of an Authorization header; empty, which is no key, for any other scheme."""
    scheme, _, token = authorization.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def auth_failure(error: AuthError) -> ApiError:
    """What the caller sees of it."""
    match error:
        case AddressRefusedError():
            return ApiError("address_refused", "This key may not be used from your address.", headers=(CHALLENGE,))
        case TenantSuspendedError():
            return ApiError("tenant_suspended", "The account of this key is suspended.")
        case AuthUnavailableError():
            return ApiError("auth_unavailable", "Keys cannot be checked right now; try again shortly.")
        case _:
            return ApiError("invalid_key", INVALID_KEY, headers=(CHALLENGE,))
