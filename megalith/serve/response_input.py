"""Fields of the Responses API as fields of a chat request: input items, tools and text format."""

from collections.abc import Mapping
from typing import Any

from megalith import storage
from megalith.serve.errors import invalid
from megalith.serve.tools import read_tools

ENDPOINT = "/v1/responses"
ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text", "reasoning_text")
TOOL = '{"type": "function", "name": "f", "parameters": {"type": "object"}}'


def convert_tools(value: Any) -> list[dict[str, Any]]:  # JSON
    """Return function tools as tools of a chat request.

    Raises:
        ApiError: a tool is invalid, or another one than a function.
    """
    if not isinstance(value, list):
        return read_tools(value, example=TOOL)
    tools = []
    for index, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if kind != "function":
            raise invalid(
                f"tools[{index}].type={kind!r:.60} is not supported by {ENDPOINT}. Use {TOOL}.",
                "tools",
            )
        function = {name: value for name, value in tool.items() if name != "type"}
        tools.append({"type": "function", "function": function})
    return read_tools(tools, example=TOOL)


def convert_tool_choice(value: Any) -> Any:  # JSON
    """Return a tool choice as that of a chat request.

    Raises:
        ApiError: it is another one than of a function.
    """
    if isinstance(value, dict) and value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    if isinstance(value, dict):
        raise invalid(
            f"tool_choice={value!r:.80} is not supported by {ENDPOINT}. Use "
            '{"type": "function", "name": "f"}.',
            "tool_choice",
        )
    return value


def convert_format(value: Any) -> Any:  # JSON
    """Return `text.format` as the response format of a chat request."""
    if not isinstance(value, dict) or value.get("type") != "json_schema":
        return value
    return {"type": "json_schema", "json_schema": {**value, "type": None}}


def read_input(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the instructions and the input of a request as messages of a chat request.

    Raises:
        ApiError: they are invalid.
    """
    value, instructions = body.get("input"), body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise invalid(f"instructions={instructions!r:.60} must be a string.", "instructions")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        what = " is missing" if value is None else f"={value!r:.60} must be a string or a list"
        raise invalid(f'input{what}. Use "Hello".', "input")
    converter = _ItemConverter()
    for index, item in enumerate(value):
        converter.add(item, f"input[{index}]")
    return messages + converter.messages


class _ItemConverter:
    """Converts input items to messages: the reasoning, the text and the calls of an assistant turn
    are one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}
        """Called functions by call_id."""

    def add(self, item: Any, name: str) -> None:  # JSON
        """Add an item; `name`: in messages.

        Raises:
            ApiError: it is invalid.
        """
        example = '{"role": "user", "content": "Hello"}'
        if not isinstance(item, dict):
            raise invalid(f"{name}={item!r:.60} must be an object. Use {example}.", "input")
        kind = item.get("type", "message")
        if kind == "reasoning":
            text = _read_text(item.get("content") or [], f"{name}.content")
            self._assistant("reasoning_content")["reasoning_content"] = text
        elif kind == "function_call":
            self._add_call(item, name)
        elif kind == "function_call_output":
            self._add_result(item, name)
        elif kind != "message":
            raise invalid(f"{name}.type={kind!r:.60} is not supported. Use {example}.", "input")
        elif item.get("role") not in ROLES:
            raise invalid(
                f"{name}.role={item.get('role')!r:.60} must be one of {', '.join(ROLES)}. Use "
                "user.",
                "input",
            )
        elif item["role"] == "assistant":
            self._assistant("content")["content"] = _read_text(
                item.get("content"), f"{name}.content"
            )
        else:
            text = _read_text(item.get("content"), f"{name}.content")
            self.messages.append({"role": item["role"], "content": text})

    def _assistant(self, part: str) -> dict[str, Any]:
        """Return the message of the current assistant turn, a new one if it has the part, or parts
        that follow it."""
        order = ("reasoning_content", "content", "tool_calls")
        later = order[order.index(part) :] if part != "tool_calls" else ()
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(last.get(name) for name in later):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last

    def _add_call(self, item: Mapping[str, Any], name: str) -> None:
        fields = [item.get(key) for key in ("call_id", "name", "arguments")]
        if not all(isinstance(value, str) for value in fields):
            raise invalid(
                f"{name}={dict(item)!r:.80} must have the strings call_id, name and arguments. Use "
                '{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}.',
                "input",
            )
        if not _is_json_object(item["arguments"]):
            raise invalid(
                f"{name}.arguments={item['arguments']!r:.80} must be a JSON object as a string. "
                'Use "{}".',
                "input",
            )
        self._names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        self._assistant("tool_calls").setdefault("tool_calls", []).append(call)

    def _add_result(self, item: Mapping[str, Any], name: str) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or call_id not in self._names:
            raise invalid(
                f"{name}.call_id={call_id!r:.60} is no call_id of a function_call before it. Use "
                "the items of the response that called the function.",
                "input",
            )
        text = _read_text(item.get("output"), f"{name}.output")
        self.messages.append(
            {
                "role": "tool",
                "tool_call_id": call_id,
                "name": self._names[call_id],
                "content": text,
            }
        )


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(storage.parse_json(text), dict)
    except ValueError:
        return False


def _read_text(value: Any, name: str) -> str:  # JSON
    """Return the text of a string, or of a list of parts."""
    if isinstance(value, list):
        parts = enumerate(value)
        return "".join(_read_part(part, f"{name}[{index}]") for index, part in parts)
    if not isinstance(value, str):
        raise invalid(
            f'{name}={value!r:.60} must be a string or a list of parts. Use "Hello".', "input"
        )
    return value


def _read_part(part: Any, name: str) -> str:  # JSON
    if isinstance(part, dict) and part.get("type") in PARTS and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, dict) else part
    raise invalid(
        f"{name}.type={kind!r:.60} is not supported by this model. Use "
        '{"type": "input_text", "text": "Hello"}.',
        "input",
    )
