"""Conversations are read in common formats; errors state file and row."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megalith.data.sft import (
    Conversation,
    _message,
    generate_mock_conversations,
    parse_row,
    read_conversations,
)
from megalith.errors import DataError

HI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def of(row: dict[str, Any]) -> list[Conversation]:
    return parse_row(row, "f.jsonl", 7)


def test_published_formats_give_the_same_conversation() -> None:
    system = {"role": "system", "content": "be brief"}
    expected = (system, *HI)
    sharegpt = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]
    for row in (
        {"messages": [system, *HI]},
        {"conversations": [{"from": "system", "value": "be brief"}, *sharegpt]},
        {"conversations": sharegpt, "system": "be brief"},
        {"instruction": "hi", "input": "", "output": "yo", "system": "be brief"},
        {"prompt": [system, HI[0]], "completion": "yo"},
    ):
        (result,) = of(row)
        assert result.messages == expected
        assert result.where == "f.jsonl:7"
    (plain,) = of({"prompt": "hi", "completion": "yo"})
    assert plain.messages == tuple(HI)
    (alpaca,) = of({"instruction": "add", "context": "1 1", "response": "2"})
    assert alpaca.messages[0]["content"] == "add\n\n1 1"


def test_a_system_message_begins_another_conversation() -> None:
    system = {"role": "system", "content": "s"}
    first, second = of({"messages": [*HI, system, *HI]})
    assert (len(first.messages), len(second.messages), second.messages[0]["role"]) == (
        2,
        3,
        "system",
    )


def test_compressed_files_and_parquet_give_the_same_conversations(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    lines = "".join(
        json.dumps({"messages": [*HI, {"role": "user", "content": str(n)}]}) + "\n\n"
        for n in range(3)
    )
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    rows = [json.loads(line) for line in lines.split("\n") if line]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    plain = list(read_conversations([str(tmp_path / "a.jsonl")]))
    assert [c.row for c in plain] == [1, 3, 5]
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        results = list(read_conversations([str(tmp_path / name)]))
        assert [c.messages for c in results] == [c.messages for c in plain]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, r"f.jsonl:7: no `messages` among the keys \['text'\]. Use messages: "),
        ({"messages": []}, "f.jsonl:7: 0 messages. Use at least"),
        ({"messages": "x"}, "f.jsonl:7: 'messages' is str, not a list. Use "),
        ({"messages": ["x"]}, "f.jsonl:7: message 1 is str, not an object. Use "),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "message 1 has the unknown role 'robot'. Use one of system",
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            r"message 1 \(user\) has int as its content. Use a text",
        ),
        (
            {"messages": [HI[0], {"role": "assistant", "content": " "}]},
            "f.jsonl:7: message 2 is an empty assistant turn",
        ),
        (
            {"messages": HI[1:]},
            "f.jsonl:7: message 1 is an assistant turn after nothing: it must follow one of user",
        ),
        (
            {"messages": [*HI, HI[1]]},
            "message 3 is an assistant turn after assistant: it must follow",
        ),
        (
            {"messages": [{**HI[0], "train": True}]},
            r'message 1 \(user\) has "train": True. Use false',
        ),
        (
            {"messages": [HI[0], {**HI[1], "train": 0}]},
            r'message 2 \(assistant\) has "train": 0. Use false',
        ),
        ({"instruction": "a", "output": 3}, "f.jsonl:7: 'output' is int, not a text"),
        ({"messages": HI, "tools": "{"}, "f.jsonl:7: 'tools' is not JSON"),
        ({"messages": HI, "tools": "{}"}, "f.jsonl:7: 'tools' is dict. Use a list"),
    ],
)
def test_invalid_conversations_are_reported_with_file_and_row(
    row: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        of(row)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b"{x",
            r"a.jsonl:2: not JSON in UTF-8 \(JSONDecodeError\): '{x'. Use one object in each line",
        ),
        (b'{"a": "\xff"}', "a.jsonl:2: not JSON in UTF-8"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "a.jsonl:2: not JSON in UTF-8"),
        (b"[1]", "a.jsonl:2: expected an object, not list: '.1.'. Use messages"),
    ],
)
def test_damaged_lines_are_reported_with_file_and_row(
    line: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"messages": HI}).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=message):
        list(read_conversations([str(tmp_path / "a.jsonl")]))


def test_plain_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hi")
    with pytest.raises(DataError, match=r"a.txt: plain text has no turns. Use JSONL or Parquet"):
        list(read_conversations([str(tmp_path)]))


def test_synthetic_conversations_are_correct_sums_and_deterministic() -> None:
    results = list(generate_mock_conversations(20, 1))
    assert (
        results
        == list(generate_mock_conversations(20, 1))
        != list(generate_mock_conversations(20, 2))
    )
    for conversation in results:
        for question, answer in zip(conversation.messages[::2], conversation.messages[1::2]):
            a, b = (int(word) for word in question["content"].rstrip("?").split() if word.isdigit())
            assert answer["content"] == f"{a} plus {b} is {a + b}."


def test_weight_zero_excludes_a_turn_like_train_false(tmp_path: Path) -> None:
    result = _message({"role": "assistant", "content": "x", "weight": 0}, "here", 1)
    assert result["train"] is False
    assert _message({"role": "assistant", "content": "x", "weight": 1}, "here", 1)["train"] is True
    assert "train" not in _message({"role": "user", "content": "x", "weight": 0}, "here", 1)
