"""Server-sent events: the encoding of streamed chunks."""

import json
import math
from typing import Any

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
PING_SECONDS = 15.0
"""Time without an event after which a comment keeps the connection open."""

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


def event(data: dict[str, Any]) -> bytes:
    """Return a server-sent event with JSON data.

    >>> event({"a": "é"})
    b'data: {"a":"\\xc3\\xa9"}\\n\\n'
    """
    return f"data: {_encode(data)}\n\n".encode()


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """Return a server-sent event with a name and JSON data."""
    return f"event: {name}\n".encode() + event(data)


def json_bytes(data: dict[str, Any]) -> bytes:
    """Return the body of a JSON response."""
    return _encode(data).encode()


def finite_logprob(value: float) -> float:
    """Return a log-prob that JSON can hold: -9999 for tokens with probability 0, as in vLLM."""
    return value if math.isfinite(value) else -9999.0
