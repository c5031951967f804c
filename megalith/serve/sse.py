"""Server-sent events: the encoding of streamed chunks."""

import json
import math
import uuid
from collections.abc import Callable
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


_MARK = uuid.uuid4().hex
"""Text that occurs in no event."""


class TextEvent:
    """Server-sent event of which only one text changes; all else is encoded once. The bytes are
    those of `event`.

    >>> TextEvent(lambda text: {"a": [text], "b": None}).encode("é")
    b'data: {"a":["\\xc3\\xa9"],"b":null}\\n\\n'
    """

    __slots__ = ("_after", "_before")

    def __init__(self, build: Callable[[str], dict[str, Any]]) -> None:
        """`build`: returns the data of the event, given its text."""
        self._before, self._after = event(build(_MARK)).split(f'"{_MARK}"'.encode())

    def encode(self, text: str) -> bytes:
        """Return the event with a text."""
        return self._before + _encode(text).encode() + self._after


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """Return a server-sent event with a name and JSON data."""
    return f"event: {name}\n".encode() + event(data)


def json_bytes(data: dict[str, Any]) -> bytes:
    """Return the body of a JSON response."""
    return _encode(data).encode()


def finite_logprob(value: float) -> float:
    """Return a log-prob that JSON can hold: -9999 for tokens with probability 0, as in vLLM."""
    return value if math.isfinite(value) else -9999.0
