"""Who may send requests: API keys, concurrent requests of a key, and web pages of other origins."""

import hashlib
import hmac
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

from megalith.serve.errors import ApiError
from megalith.serve.state import RETRY_AFTER_SECONDS

AsgiMessage: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[AsgiMessage]]
Send: TypeAlias = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp: TypeAlias = Callable[[AsgiMessage, Receive, Send], Awaitable[None]]


def find_api_key(headers: Mapping[str, str], keys: tuple[str, ...]) -> str | None:
    """Return the key of a request; None if there is none or it is wrong. The time does not depend
    on how many characters match."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    digest = hashlib.sha256(given.strip().encode()).digest()
    matching = [
        key for key in keys if hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest())
    ]
    return matching[0] if scheme.lower() == "bearer" and matching else None


def check_api_key(headers: Mapping[str, str], keys: tuple[str, ...]) -> None:
    """Check the key of a request, if the server has keys.

    Raises:
        ApiError: 401, there is none or it is wrong.
    """
    if keys and find_api_key(headers, keys) is None:
        raise ApiError(
            401,
            "the API key is missing or wrong. Send the header Authorization: Bearer KEY with a key "
            "of this server (--api-key).",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def check_origin(headers: Mapping[str, str], origins: tuple[str, ...]) -> None:
    """Check that a request is not of a web page of another site, which could otherwise use a server
    on the machine of its reader; browsers mark such requests. `origins`: those that are allowed.

    Raises:
        ApiError: 403, it is.
    """
    origin = headers.get("origin", "")
    if headers.get("sec-fetch-site") == "cross-site" and not {"*", origin} & {*origins}:
        raise ApiError(
            403,
            f"Origin={origin!r:.100}: web pages of other sites may not use this server. Allow the "
            "origin with --cors-origins.",
        )


class KeyLimiter:
    """ASGI middleware that limits the concurrent requests of each API key; a streamed response
    counts until it ends."""

    def __init__(
        self,
        app: AsgiApp,
        *,
        keys: tuple[str, ...],
        max_requests: int,
        paths: frozenset[str],
        reject: Callable[[ApiError, Mapping[str, str]], AsgiApp],
    ) -> None:
        """`paths`: those that are limited; `reject`: returns the response of an error, given the
        headers of the request."""
        self._app, self._keys, self._max_requests = app, keys, max_requests
        self._paths, self._reject = paths, reject
        self._in_flight: defaultdict[str, set[object]] = defaultdict(set)
        """Requests of each key."""

    async def __call__(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Process a request."""
        key, headers = None, dict[str, str]()
        if scope["type"] == "http" and scope["path"] in self._paths:
            pairs = [(name.decode("latin-1"), value) for name, value in scope["headers"]]
            headers = {name: value.decode("latin-1") for name, value in pairs}
            key = find_api_key(headers, self._keys)
        if key is None:  # not limited, or the endpoint rejects it
            await self._app(scope, receive, send)
        elif len(self._in_flight[key]) >= self._max_requests:
            error = ApiError(
                429,
                f"this API key has {self._max_requests} requests in flight, its limit "
                "(--max-requests-per-key). Try again when one of them is finished.",
                code="key_limit",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
            await self._reject(error, headers)(scope, receive, send)
        else:
            await self._count(self._in_flight[key], scope, receive, send)

    async def _count(
        self, in_flight: set[object], scope: AsgiMessage, receive: Receive, send: Send
    ) -> None:
        """Process a request that is in flight until the last part of its response is sent: when a
        client has it, its next request must not be rejected."""
        request = object()
        in_flight.add(request)

        async def send_part(message: AsgiMessage) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                in_flight.discard(request)
            await send(message)

        try:
            await self._app(scope, receive, send_part)
        finally:
            in_flight.discard(request)
