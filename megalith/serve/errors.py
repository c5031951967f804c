"""Errors of the HTTP API, in the format of the OpenAI API."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""Type of an error by status; the others are invalid_request_error."""


@dataclass(slots=True)
class ApiError(Exception):
    """Error response of a request."""

    status: int
    message: str
    param: str | None = None
    """Field of the request."""

    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        return {
            "error": {
                "message": self.message,
                "type": ERROR_TYPES.get(self.status, "invalid_request_error"),
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(message: str, param: str | None = None) -> ApiError:
    """Return the error of an invalid request."""
    return ApiError(400, message, param)


def invalid_field(problem: str, names: Mapping[str, str]) -> ApiError:
    """Return the error of an invalid sampling parameter; `problem`: its message, which begins with
    the name of a field; `names`: names in the request of fields that have another name there."""
    for internal, name in names.items():
        problem = re.sub(rf"\b{internal}\b", name, problem)
    match = re.match(r"\w+", problem)
    return ApiError(400, problem, None if match is None else match.group())


@contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in the errors of a context, for requests where they have another name."""
    try:
        yield
    except ApiError as error:
        for name, other in names.items():
            error.message = re.sub(rf"\b{name}\b", other, error.message)
        error.param = names.get(error.param or "", error.param)
        raise


@contextmanager
def name_structured_output(names: Mapping[str, str]) -> Iterator[None]:
    """Name the field of the request in errors of the engine about its structured output."""
    try:
        yield
    except ApiError as error:
        if error.status == 400 and error.message.startswith("structured_outputs"):
            raise invalid_field(error.message, names) from None
        raise


def http_error(status: int, detail: str, path: str) -> ApiError:
    """Return the error of a request that has no endpoint."""
    if status == 404:
        return ApiError(
            404, f"{path[:200]!r}: there is no such endpoint. See GET /v1/models.", code="not_found"
        )
    if status == 405:
        return ApiError(405, f"{path[:200]!r}: the method is not allowed for this endpoint.")
    return ApiError(status, detail or HTTPStatus(status).phrase)


def internal_error(request_id: str) -> ApiError:
    """Return the error of a bug; the log has its traceback under the request id."""
    return ApiError(500, f"internal error in request {request_id}: see the server log. Try again.")
