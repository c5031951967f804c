"""Output of commands for programs."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from megalith.cli.output import finite, print_json, print_warnings


def test_one_document_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, "größe"], 2: (1.5,)})
    text = capsys.readouterr().out
    assert json.loads(text) == {"a": [1, "größe"], "2": [1.5]}
    assert "größe" in text


def test_nan_and_infinity_become_null() -> None:
    assert finite({"a": float("nan"), "b": [float("inf"), 1.0, True]}) == {
        "a": None,
        "b": [None, 1.0, True],
    }


def test_model_warnings_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    source: Any = SimpleNamespace(
        path="there", warnings=lambda: ["its head is tied", "its tokenizer is older"]
    )
    print_warnings(source)
    captured = capsys.readouterr()
    assert (
        captured.out == ""
        and captured.err == "there: its head is tied\nthere: its tokenizer is older\n"
    )
