"""Conversations: read from JSONL or Parquet in common formats and checked, or generated as mock
data."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from megalith import storage
from megalith.data.corpus import LineBlock, Position, Source, find_sources, read_blocks, read_rows
from megalith.errors import DataError
from megalith.plan.keys import key

ROLES = "system", "developer", "user", "assistant", "tool"
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "function_response": "tool",
}
ANSWERS_TO = "user", "tool"
COLUMNS = (
    "messages",
    "conversations",
    "system",
    "tools",
    "instruction",
    "input",
    "context",
    "output",
    "response",
    "prompt",
    "completion",
)
SCHEMAS = (
    'messages: [{"role", "content"}], conversations: [{"from", "value"}] (ShareGPT), instruction, '
    "input and output "
    "(Alpaca), or prompt and completion"
)
MOCK_SOURCE = "made-up conversations"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Message = dict[str, Any]  # Any: JSON; templates may use more than role and content


@dataclass(frozen=True, slots=True)
class Conversation:
    """One checked conversation."""

    path: str
    row: int
    """Row of the file, from 1; a row may contain several conversations."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None  # JSON schemas

    @property
    def where(self) -> str:
        """File and row, for error messages."""
        return f"{self.path}:{self.row}"


def read_conversations(inputs: Sequence[str]) -> Iterator[Conversation]:
    """Yield all conversations of files, folders and globs, in order.

    Raises:
        DataError: a file is missing or cannot be read, or a row is not a conversation. The message
            states file and row.
    """
    for block in read_blocks(conversation_sources(inputs), Position()):
        for number, row in _rows(block):
            yield from parse_row(row, block.paths[0], number)


def conversation_sources(inputs: Sequence[str]) -> list[Source]:
    """Return the files that `inputs` match.

    Raises:
        DataError: there are none, or one is plain text.
    """
    sources = find_sources(inputs)
    for source in sources:
        if source.kind == "text":
            raise DataError(
                f"data.sft.path={source.path}: plain text has no turns. Use JSONL or Parquet: "
                f"{SCHEMAS}."
            )
    return sources


def _rows(block: LineBlock) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (row number, row as an object); blank lines are skipped."""
    path = block.paths[0]
    if block.rows is not None:
        for number, row in enumerate(read_rows(path, *block.rows, COLUMNS), block.first_line):
            yield number, _without_none(row)
        return
    assert block.lines is not None
    lines = block.lines.removeprefix(_BYTE_ORDER_MARK) if block.first_line == 1 else block.lines
    for number, text in enumerate(lines.removesuffix(b"\n").split(b"\n"), block.first_line):
        if text.strip():
            yield number, _parse_line(text, f"{path}:{number}")


def _without_none(value: Any) -> Any:
    """Remove the None that Parquet stores for missing fields."""
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _parse_line(text: bytes, where: str) -> Mapping[str, Any]:
    shown = text[:60].decode(errors="replace")
    try:
        row = json.loads(text.decode())
        json.dumps(row, ensure_ascii=False).encode()  # rejects lone surrogates
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: not JSON in UTF-8 ({type(error).__name__}): {shown!r}. Use one object in "
            "each line."
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: expected an object, not {type(row).__name__}: {shown!r}. Use {SCHEMAS}."
        )
    return row


def parse_row(row: Mapping[str, Any], path: str, number: int) -> list[Conversation]:
    """Return the conversations of one row; each system message after the first message starts a new
    one.

    Raises:
        DataError: the row has no known format, or its turns are invalid.
    """
    where = f"{path}:{number}"
    messages = _messages(row, where)
    if not messages:
        raise DataError(
            f"{where}: 0 messages. Use at least a user's and an assistant's, or remove the row."
        )
    tools = _tools(row, where)
    starts = [
        0,
        *(i for i, message in enumerate(messages) if i and message["role"] == "system"),
        len(messages),
    ]
    parts = [messages[start:end] for start, end in pairwise(starts)]
    for part in parts:
        _check_turns(part, where)
    return [Conversation(path, number, tuple(part), tools) for part in parts]


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    if "messages" in row:
        return [
            _message(entry, where, number)
            for number, entry in enumerate(_list(row, "messages", where), 1)
        ]
    if "conversations" in row:
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        entries = [_from_sharegpt(entry) for entry in _list(row, "conversations", where)]
        return [_message(entry, where, number) for number, entry in enumerate(system + entries, 1)]
    if "instruction" in row and ("output" in row or "response" in row):
        return [
            _message(entry, where, number)
            for number, entry in enumerate(_from_alpaca(row, where), 1)
        ]
    if "prompt" in row and "completion" in row:
        turns = [
            *_as_messages(row["prompt"], "user"),
            *_as_messages(row["completion"], "assistant"),
        ]
        return [_message(entry, where, number) for number, entry in enumerate(turns, 1)]
    raise DataError(f"{where}: no `messages` among the keys {list(row)[:10]}. Use {SCHEMAS}.")


def _list(row: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = row[name]
    if not isinstance(value, list):
        raise DataError(f"{where}: {name!r} is {type(value).__name__}, not a list. Use {SCHEMAS}.")
    return value


def _tools(row: Mapping[str, Any], where: str) -> tuple[Any, ...] | None:
    if row.get("tools") is None:
        return None
    tools = row["tools"]
    if isinstance(tools, str):
        # many data sets store JSON text, since the fields differ between tools
        try:
            tools = storage.parse_json(tools)
        except ValueError as error:
            raise DataError(
                f"{where}: 'tools' is not JSON ({error}): {tools[:60]!r}. Use a list of schemas."
            ) from error
    if not isinstance(tools, list):
        raise DataError(f"{where}: 'tools' is {type(tools).__name__}. Use a list of JSON schemas.")
    return tuple(tools)


def _from_sharegpt(entry: Any) -> Any:
    if not isinstance(entry, dict) or "from" not in entry:
        return entry
    rest = {name: value for name, value in entry.items() if name not in ("from", "value")}
    role = entry["from"]
    named = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": named, "content": entry.get("value"), **rest}


def _from_alpaca(row: Mapping[str, Any], where: str) -> list[Message]:
    more = row.get("input") or row.get("context") or ""
    texts = [row["instruction"], more, row.get("output", row.get("response"))]
    for name, text in zip(("instruction", "input", "output"), texts):
        if not isinstance(text, str):
            raise DataError(
                f"{where}: {name!r} is {type(text).__name__}, not a text. Use {SCHEMAS}."
            )
    question = f"{texts[0]}\n\n{more}" if more else texts[0]
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [
        *system,
        {"role": "user", "content": question},
        {"role": "assistant", "content": texts[2]},
    ]


def _as_messages(value: Any, role: str) -> list[Any]:
    """Return a list of messages unchanged, and a text as a list of one message."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _message(entry: Any, where: str, number: int) -> Message:
    """Check one message: it has a known role and a text.

    Raises:
        DataError: it does not.
    """
    place = f"{where}: message {number}"
    if not isinstance(entry, dict):
        raise DataError(
            f'{place} is {type(entry).__name__}, not an object. Use {{"role": ..., "content": '
            "...}."
        )
    role, content = entry.get("role"), entry.get("content")
    if role not in ROLES:
        raise DataError(f"{place} has the unknown role {role!r}. Use one of {', '.join(ROLES)}.")
    if content is None and role == "assistant" and entry.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(
            f"{place} ({role}) has {type(content).__name__} as its content. Use a text."
        )
    if "weight" in entry and "train" not in entry:
        # OpenAI's field: 0 excludes the turn from the loss
        entry = {**entry, "train": entry["weight"] != 0} if role == "assistant" else entry
    train = entry.get("train", role == "assistant")
    if not isinstance(train, bool) or (train and role != "assistant"):
        raise DataError(
            f'{place} ({role}) has "train": {train!r}. Use false to leave out an assistant\'s '
            "turn, or remove it."
        )
    return {**entry, "content": content}


def _check_turns(messages: Sequence[Message], where: str) -> None:
    before = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role == "assistant":
            if not message["content"].strip() and not message.get("tool_calls"):
                raise DataError(
                    f"{where}: message {number} is an empty assistant turn "
                    f"({message['content']!r}). Add text to train on, or remove the row."
                )
            if before not in ANSWERS_TO:
                raise DataError(
                    f"{where}: message {number} is an assistant turn after {before or 'nothing'}: "
                    "it must follow one "
                    f"of {', '.join(ANSWERS_TO)}."
                )
        before = role


def generate_mock_conversations(count: int, seed: int) -> Iterator[Conversation]:
    """Yield mock conversations of one to three questions about sums, which a model learns
    quickly."""
    for number in range(1, count + 1):
        draw = np.random.default_rng(key(seed, "sft", "made up", number))
        messages: list[Message] = []
        for _ in range(int(draw.integers(1, 4))):
            a, b = (int(n) for n in draw.integers(0, 10, 2))
            messages += [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
            ]
        yield Conversation(MOCK_SOURCE, number, tuple(messages))
