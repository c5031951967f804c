"""Limits of requests: the body is read with a limit before it is parsed, and the parsed document is
checked for depth, and for text and numbers that cannot be encoded."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from megalith import storage
from megalith.serve.errors import ApiError, invalid

MAX_NESTING = 64
MAX_TEMPLATE_VARIABLES_BYTES = 4096
MIN_PARSED_IN_THREAD_BYTES = 64 * 1024
"""Larger bodies are parsed on another thread, so that other streams continue (heuristic)."""


def check_content_type(headers: Mapping[str, str]) -> None:
    """Check that a body is declared as JSON, which web pages of other origins cannot do unasked.

    Raises:
        ApiError: 415, it is not.
    """
    content_type = headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"Content-Type={content_type!r:.100} is not supported: send JSON with "
            "Content-Type: application/json.",
        )


async def read_body(
    chunks: AsyncIterator[bytes], headers: Mapping[str, str], *, max_bytes: int, timeout_s: float
) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: 413, it is too large; 408, the client sends it too slowly.
    """
    too_large = ApiError(
        413,
        f"the body has more than {max_bytes} bytes, the limit of this server (--max-body-bytes). "
        "Send several smaller requests.",
    )
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in chunks:
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {timeout_s:g} s. Try again.") from None
    return bytes(body)


async def parse_body(body: bytes) -> dict[str, Any]:  # JSON
    """Return the JSON object of a body.

    Raises:
        ApiError: it is not a JSON object of valid text with few levels.
    """
    if len(body) > MIN_PARSED_IN_THREAD_BYTES:
        return await asyncio.to_thread(_parse, body)
    return _parse(body)


def _parse(body: bytes) -> dict[str, Any]:
    if not body:
        raise invalid("the body is empty: send a JSON object.")
    try:
        document = storage.parse_json(body)
    except ValueError as error:  # also invalid UTF-8
        raise invalid(f"the body is not JSON: {error!s:.200}. Send a JSON object.") from None
    if not isinstance(document, dict):
        raise invalid(
            f"the body is a JSON {type(document).__name__}, but must be an object, such as "
            '{"prompt": "..."}.'
        )
    for name, value in document.items():
        check_document(value, _text(name))
    return document


def check_document(document: object, name: str) -> None:
    """Check the nesting of parsed JSON, that its texts are Unicode, and its numbers finite.

    Raises:
        ApiError: it is nested more than MAX_NESTING levels, or has unpaired surrogates, NaN or an
            infinite number.
    """
    level, depth = [document], 1
    while level:
        if depth > MAX_NESTING:
            raise invalid(
                f"{name}: arrays and objects are nested more than {MAX_NESTING} levels. Use fewer.",
                name,
            )
        for value in level:
            if isinstance(value, str):
                _check_text(value, name)
            elif isinstance(value, float) and not math.isfinite(value):
                raise invalid(
                    f"{name}: the number {value} is not finite, so it is not JSON. Use a finite "
                    "number.",
                    name,
                )
        level = [
            item
            for value in level
            if isinstance(value, list | dict)
            for item in _iter_items(value)
            if not isinstance(item, int)  # skips lists of token ids
        ]
        depth += 1


def _iter_items(value: list[Any] | dict[str, Any]) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value  # keys
        yield from value.values()
    else:
        yield from value


def _check_text(text: str, name: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(
            f"{name}: character {error.start + 1} of a text is an unpaired surrogate "
            f"(\\u{ord(text[error.start]):04x}). Send valid Unicode.",
            name,
        ) from None


def _text(name: str) -> str:
    """Return a key as text for messages."""
    return name[:60].encode(errors="replace").decode()
