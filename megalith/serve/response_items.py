"""Output items of a response of the Responses API, and the events of its stream."""

import uuid
from itertools import count
from typing import Any

from megalith.infer.parsers.parsed_text import ParsedText, ToolCall
from megalith.serve.chat import tool_call_json
from megalith.serve.sse import named_event

TEXT_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
"""Types of the text in items by type of the item."""

PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
"""Beginnings of the ids of items by type."""


class ResponseItems:
    """Builds the items of one response: reasoning, a message with the answer, and tool calls."""

    def __init__(self) -> None:
        self.finished: list[dict[str, Any]] = []  # JSON
        self._open: dict[str, Any] | None = None
        """The item with a text that grows."""

        self._logprobs: list[dict[str, Any]] = []
        """Of tokens whose text is not sent yet."""

        self._sequence_numbers = count()
        self._events: list[bytes] = []

    def add(self, parsed: ParsedText, logprobs: list[dict[str, Any]]) -> None:
        """Add parsed output with the log-probs of its tokens; those of reasoning and calls are
        dropped."""
        if not (parsed.reasoning or parsed.tool_calls) or parsed.content:
            self._logprobs += logprobs
        if parsed.reasoning:
            self._add_text("reasoning", parsed.reasoning)
        if parsed.content:
            self._add_text("message", parsed.content)
        for call in parsed.tool_calls:
            self._add_call(call)

    def close(self, status: str) -> None:
        """End the last item; without a message or a call the message is empty."""
        kinds = [item["type"] for item in (*self.finished, self._open or {"type": "reasoning"})]
        if set(kinds) == {"reasoning"}:
            self._begin("message")
        if self._logprobs and self._open is not None and self._open["type"] == "message":
            self._add_text("message", "")
        self._end(status)

    def add_event(self, kind: str, **fields: Any) -> None:
        """Add an event to the stream."""
        number = next(self._sequence_numbers)
        data = {"type": kind, "sequence_number": number} | fields
        self._events.append(named_event(kind, data))

    def take_events(self) -> bytes:
        """Return the events since the last call."""
        data, self._events = b"".join(self._events), []
        return data

    def _add_text(self, kind: str, text: str) -> None:
        if self._open is None or self._open["type"] != kind:
            self._begin(kind)
        assert self._open is not None, "set above"
        (part,) = self._open["content"]
        part["text"] += text
        fields: dict[str, Any] = {"delta": text}
        if kind == "message":
            fields["logprobs"], self._logprobs = self._logprobs, []
            part["logprobs"] += fields["logprobs"]
        self._add_part_event(f"response.{TEXT_PARTS[kind]}.delta", **fields)

    def _begin(self, kind: str) -> None:
        """Begin an item with a text, after the end of the previous one."""
        self._end("completed")
        item = _new_item(kind, "in_progress")
        extra: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
        item |= extra
        self.add_event(
            "response.output_item.added",
            output_index=len(self.finished),
            item={**item, "content": []},
        )
        part: dict[str, Any] = {"type": TEXT_PARTS[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        self._open = item | {"content": [part]}
        self._add_part_event("response.content_part.added", part=part)

    def _end(self, status: str) -> None:
        if self._open is None:
            return
        self._open["status"] = status
        (part,) = self._open["content"]
        kind = f"response.{part['type']}.done"
        logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        self._add_part_event(kind, text=part["text"], **logprobs)
        self._add_part_event("response.content_part.done", part=part)
        self._finish(self._open)
        self._open = None

    def _finish(self, item: dict[str, Any]) -> None:
        index = len(self.finished)
        self.add_event("response.output_item.done", output_index=index, item=item)
        self.finished.append(item)

    def _add_part_event(self, kind: str, **fields: Any) -> None:
        """Add an event about the text of the open item."""
        assert self._open is not None, "an item was begun"
        places = {"item_id": self._open["id"], "output_index": len(self.finished)}
        self.add_event(kind, **places, content_index=0, **fields)

    def _add_call(self, call: ToolCall) -> None:
        self._end("completed")
        item = _new_item("function_call", "in_progress")
        item |= {"call_id": tool_call_json(call)["id"], "name": call.name, "arguments": ""}
        index = {"output_index": len(self.finished)}
        self.add_event("response.output_item.added", **index, item=item)
        position = index | {"item_id": item["id"]}
        kind = "response.function_call_arguments"
        self.add_event(f"{kind}.delta", **position, delta=call.arguments)
        self.add_event(f"{kind}.done", **position, arguments=call.arguments)
        self._finish(item | {"arguments": call.arguments, "status": "completed"})


def _new_item(kind: str, status: str) -> dict[str, Any]:
    return {"id": f"{PREFIXES[kind]}_{uuid.uuid4().hex}", "type": kind, "status": status}
