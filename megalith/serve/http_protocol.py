"""HTTP/1.1 connections of the server: h11, without its checks for each chunk of a stream."""

import asyncio
from typing import Any, cast

import h11  # lint: allow optional-import: imported by functions after check_packages
from uvicorn.protocols.http.h11_impl import (  # lint: allow optional-import: as h11 above
    H11Protocol,
)

from megalith.serve.access import AsgiMessage, Receive, Send

WRITER = "megalith.chunk_writer"
"""Name of the extension of an ASGI scope that is a `ConnectionWriter`."""

CHUNKED = b"\r\ntransfer-encoding: chunked\r\n"


class StreamConnection(h11.Connection):
    """HTTP/1.1 connection that frames the chunks of a response itself, and sends its head with the
    first chunk: each call of the system costs as much as all else for a token.

    h11 checks the states of both sides for each chunk, which do not change within a body. The bytes
    are the same.
    """

    _is_chunked = False
    """Whether the response in progress has the transfer encoding chunked."""

    _held = b""
    """Bytes to send with the next event that has some."""

    def send(  # type: ignore[override]  # the overloads of h11 say which events have no bytes
        self, event: h11.Event
    ) -> bytes | None:
        """Return the bytes to send for an event.

        Raises:
            LocalProtocolError: the event is not allowed in the state of the connection.
        """
        if type(event) is h11.Data and self._is_chunked and self.our_state is h11.SEND_BODY:
            return self.encode_chunk(event.data)
        output = super().send(event)
        if type(event) is h11.Response:
            self._held = output or b""
            self._is_chunked = CHUNKED in self._held.lower()
            return b""
        if output or type(event) is h11.EndOfMessage:
            output = self._add_held(output or b"")
        return output

    def encode_chunk(self, data: bytes) -> bytes:
        """Return the bytes to send for a part of a body that is in progress."""
        if not self._is_chunked:
            return self.send(h11.Data(data=data)) or b""
        return self._add_held(b"%x\r\n%b\r\n" % (len(data), data)) if data else b""

    def hold(self, data: bytes) -> None:
        """Send a part of a body with the next event: the last one with the end of the body."""
        self._held = self.encode_chunk(data)

    def _add_held(self, output: bytes) -> bytes:
        if self._held:
            output, self._held = self._held + output, b""
        return output


class StreamProtocol(H11Protocol):
    """Protocol of uvicorn with a `StreamConnection`."""

    def __init__(
        self,
        config: Any,  # uvicorn.Config
        server_state: Any,  # uvicorn.server.ServerState
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        size = config.h11_max_incomplete_event_size
        self.stream_connection = (
            StreamConnection(h11.SERVER) if size is None else StreamConnection(h11.SERVER, size)
        )
        self.conn = self.stream_connection
        self._wrapped_app = self.app
        self.app = self._run_app

    async def _run_app(self, scope: AsgiMessage, receive: Receive, send: Send) -> None:
        """Run the application with a writer in its scope."""
        writer = ConnectionWriter(self)
        scope["extensions"] = {**scope.get("extensions", {}), WRITER: writer}
        await self._wrapped_app(scope, receive, send)


class ConnectionWriter:
    """Sends chunks of the body of the response in progress at once, past the layers of the
    application, which only forward them."""

    def __init__(self, protocol: StreamProtocol) -> None:
        self._cycle, self._flow = protocol.cycle, protocol.flow
        self._connection, self._transport = protocol.stream_connection, protocol.transport

    @property
    def is_ready(self) -> bool:
        """Whether a chunk can be sent now: the response has begun, and the client is not slow."""
        cycle = self._cycle
        is_open = cycle.response_started and not cycle.response_complete and not cycle.disconnected
        return is_open and not self._flow.write_paused

    def write(self, data: bytes) -> None:
        """Send a chunk, if `is_ready`."""
        self._transport.write(self._connection.encode_chunk(data))

    def hold(self, data: bytes) -> None:
        """Send a chunk with the end of the response, which follows at once."""
        self._connection.hold(data)


def find_chunk_writer(scope: AsgiMessage) -> ConnectionWriter | None:
    """Return the writer of a request; None: the server is not a `StreamProtocol`."""
    return cast("ConnectionWriter | None", scope.get("extensions", {}).get(WRITER))
