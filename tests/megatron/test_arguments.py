"""Tests of megalith/megatron/arguments.py."""

import json
from pathlib import Path

import pytest

from megalith.errors import ConfigError
from megalith.megatron.arguments import (
    Arguments,
    known_flags,
    read_arguments,
    same_value,
    with_files,
)


def read(words: str) -> Arguments:
    """The arguments in one text."""
    return read_arguments(words.split())


def test_values_are_typed_and_the_last_of_two_counts() -> None:
    found = read("--num-layers 4 --lr 3e-4 --swiglu --data-path 1 a 2 b --num-layers=6")
    assert found.problems == ()
    assert found.values == {
        "--num-layers": 6,
        "--lr": 3e-4,
        "--swiglu": True,
        "--data-path": ["1", "a", "2", "b"],
    }


def test_another_spelling_is_the_same_argument() -> None:
    found = read("--encoder-num-layers 4 --persistent-save-interval 7")
    assert (found.value("--num-layers"), found.value("--save-interval")) == (4, 7)


def test_what_was_left_out_has_megatrons_value() -> None:
    found = read("")
    assert (found.value("--adam-beta2"), found.value("--swiglu"), found.value("--lr")) == (
        0.999,
        False,
        None,
    )
    assert found.typed("--adam-beta2") == "--adam-beta2 0.999 (left out)"
    assert not found.given("--adam-beta2")


def test_negative_numbers_are_values() -> None:
    assert read("--most-recent-k -1").value("--most-recent-k") == -1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            "--num-layer 4",
            "--num-layer 4: Megatron has no such argument. Did you mean --num-layers",
        ),
        ("--qqqqqqqq", "--qqqqqqqq: Megatron has no such argument. Remove it"),
        ("--num-layers four", "--num-layers four: expected a whole number"),
        ("--num-layers 4.5", "--num-layers 4.5: expected a whole number"),
        ("--lr high", "--lr high: expected a number"),
        ("--lr-warmup-fraction nan", "--lr-warmup-fraction nan: expected a number"),
        ("--clip-grad inf", "--clip-grad inf: expected a number"),
        ("--num-layers", "--num-layers: expected a whole number, found 0 words"),
        ("--num-layers 4 5", "--num-layers 4 5: expected a whole number, found 2 words"),
        ("--swiglu true", "--swiglu true: expected nothing after --swiglu"),
        ("--use-flash-attn true", "--use-flash-attn true: expected nothing after --use-flash-attn"),
        ("--data-path", "--data-path has no value"),
        (
            "--lr-decay-style cosin",
            "--lr-decay-style cosin: Megatron has no such choice. Did you mean cosine?",
        ),
        ("--lr-decay-style", "expected one of constant, linear, cosine"),
        ("--data-args-path a b", "--data-args-path has 2 values, and none was read. Use"),
        ("32 --num-layers 4", "32 stands before the first argument"),
        (
            "--tokenizer-model ${TOKENIZER}",
            "nothing says what $TOKENIZER is. Pass --set TOKENIZER=VALUE.",
        ),
        ("--bf16 $EXTRA", "--bf16 $EXTRA: nothing says what $EXTRA is. Pass --set EXTRA=VALUE."),
        ("--use-flash-attn $EXTRA", "nothing says what $EXTRA is"),
        ("--data-cache-path $(pwd)/x", "what that command prints is not known here"),
        ("--data-cache-path `pwd`", "what that command prints is not known here"),
    ],
)
def test_what_cannot_be_read_is_a_problem_with_a_way_out(words: str, problem: str) -> None:
    (found,) = read(words).problems
    assert problem in found


def test_all_problems_are_found_at_once() -> None:
    assert len(read("--num-layers x --lr y --nonsense-flag --swiglu z").problems) == 4


def test_a_folder_of_which_nothing_is_read_may_be_unknown() -> None:
    assert read("--save $OUT/x --load $OUT/x").problems == ()


def test_numbers_are_the_same_value_however_they_are_written() -> None:
    assert same_value("1", "1.0") and same_value("1e-2", ".01") and same_value("vanilla", "vanilla")
    assert not same_value("1", "2") and not same_value("1", "one")


def test_prefixes_may_stand_in_files(tmp_path: Path) -> None:
    blend, splits = tmp_path / "blend", tmp_path / "splits.json"
    blend.write_text("0.3 a\n0.7 b\n")
    splits.write_text(json.dumps({"train": ["c", "d"], "valid": "e", "test": []}))
    words = [
        "--lr",
        "1",
        "--data-args-path",
        str(blend),
        f"--per-split-data-args-path={splits}",
        "--bf16",
    ]
    expected = "--lr 1 --data-path 0.3 a 0.7 b --train-data-path c d --valid-data-path e --bf16"
    assert with_files(words) == expected.split()


def test_a_file_of_prefixes_that_is_not_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-args-path .*none.*Pass a file of data prefixes"):
        with_files(["--data-args-path", str(tmp_path / "none")])
    file = tmp_path / "file"
    for text, message in (
        ("{", "is not JSON"),
        ("[1]", "expected an object"),
        ('{"eval": "a"}', "expected an object"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            with_files(["--per-split-data-args-path", str(file)])


def test_the_flags_of_both_tables_and_of_files_are_known() -> None:
    known = known_flags()
    assert {"--num-layers", "--num-experts", "--data-args-path"} <= set(known)
    assert known == sorted(set(known)) and len(known) > 1000
