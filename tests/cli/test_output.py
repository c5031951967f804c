"""What commands print for programs."""

import json

import pytest

from megalith.cli.output import finite, print_json


def test_one_document_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, "größe"], 2: (1.5,)})
    text = capsys.readouterr().out
    assert json.loads(text) == {"a": [1, "größe"], "2": [1.5]}
    assert "größe" in text


def test_numbers_that_json_lacks_become_null() -> None:
    assert finite({"a": float("nan"), "b": [float("inf"), 1.0, True]}) == {"a": None, "b": [None, 1.0, True]}
