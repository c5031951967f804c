"""Parsing of Megatron's arguments, and reports on them."""

import json
from pathlib import Path

import pytest

from megalith.errors import ConfigError
from megalith.megatron.parse import (
    Arguments,
    Draft,
    expand_file_flags,
    parse_arguments,
    report_unmapped,
    report_unused,
)


def read(words: str) -> Arguments:
    """The arguments in one text."""
    return parse_arguments(words.split())


def test_values_are_typed_and_the_last_occurrence_counts() -> None:
    result = read("--num-layers 4 --lr 3e-4 --swiglu --data-path 1 a 2 b --num-layers=6")
    assert result.problems == ()
    assert result.values == {
        "--num-layers": 6,
        "--lr": 3e-4,
        "--swiglu": True,
        "--data-path": ["1", "a", "2", "b"],
    }


def test_alias_is_the_same_flag() -> None:
    result = read("--encoder-num-layers 4 --persistent-save-interval 7")
    assert (result.value("--num-layers"), result.value("--save-interval")) == (4, 7)


def test_flag_that_is_left_out_has_the_default_of_megatron() -> None:
    result = read("")
    assert (result.value("--adam-beta2"), result.value("--swiglu"), result.value("--lr")) == (
        0.999,
        False,
        None,
    )
    assert result.typed("--adam-beta2") == "--adam-beta2 0.999 (left out)"
    assert not result.given("--adam-beta2")


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
        ("--num-layers", "--num-layers: expected a whole number, got 0 words"),
        ("--num-layers 4 5", "--num-layers 4 5: expected a whole number, got 2 words"),
        ("--swiglu true", "--swiglu true: expected nothing after --swiglu"),
        ("--use-flash-attn true", "--use-flash-attn true: expected nothing after --use-flash-attn"),
        ("--data-path", "--data-path has no value"),
        (
            "--lr-decay-style cosin",
            "--lr-decay-style cosin: Megatron has no such choice. Did you mean cosine?",
        ),
        ("--lr-decay-style", "expected one of constant, linear, cosine"),
        ("--data-args-path a b", "--data-args-path has 2 values, and none was read. Use"),
        ("32 --num-layers 4", "32 precedes the first argument"),
        (
            "--tokenizer-model ${TOKENIZER}",
            "$TOKENIZER is not set. Pass --set TOKENIZER=VALUE.",
        ),
        ("--bf16 $EXTRA", "--bf16 $EXTRA: $EXTRA is not set. Pass --set EXTRA=VALUE."),
        ("--use-flash-attn $EXTRA", "$EXTRA is not set"),
        ("--data-cache-path $(pwd)/x", "the output of that command is not known"),
        ("--data-cache-path `pwd`", "the output of that command is not known"),
    ],
)
def test_invalid_argument_is_reported_with_a_correction(words: str, problem: str) -> None:
    (result,) = read(words).problems
    assert problem in result


def test_all_problems_are_found_at_once() -> None:
    assert len(read("--num-layers x --lr y --nonsense-flag --swiglu z").problems) == 4


def test_path_may_contain_an_unset_variable() -> None:
    assert read("--save $OUT/x --load $OUT/x").problems == ()


def test_data_prefixes_are_read_from_files(tmp_path: Path) -> None:
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
    assert expand_file_flags(words) == expected.split()


def test_invalid_file_of_data_prefixes_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data-args-path .*none.*Pass a file of data prefixes"):
        expand_file_flags(["--data-args-path", str(tmp_path / "none")])
    file = tmp_path / "file"
    for text, message in (
        ("{", "is not JSON"),
        ("[1]", "expected an object"),
        ('{"eval": "a"}', "expected an object"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            expand_file_flags(["--per-split-data-args-path", str(file)])


# --- settings and reports


def draft(words: str) -> Draft:
    """A draft of these arguments."""
    return Draft(parse_arguments(words.split()))


def test_flag_is_reported_if_given_or_if_its_default_differs() -> None:
    translation = draft("--adam-beta1 0.9")
    for flag in ("--adam-beta1", "--adam-beta2", "--adam-eps"):
        translation.copy(flag)
    assert [(entry.flag, entry.setting, entry.value) for entry in translation.entries] == [
        ("--adam-beta1 0.9", "optim.beta1", 0.9),
        ("--adam-beta2 0.999 (left out)", "optim.beta2", 0.999),
    ]
    assert translation.settings == {"optim.beta1": 0.9, "optim.beta2": 0.999, "optim.eps": 1e-8}


def test_a_value_is_converted_by_its_factor() -> None:
    translation = draft("--distributed-timeout-minutes 2")
    translation.copy("--distributed-timeout-minutes")
    assert translation.settings == {"parallel.timeout_seconds": 120.0}


def test_invalid_argument_is_not_also_reported_as_missing() -> None:
    assert not draft("--lr high").need("--lr", "a rate")
    translation = draft("--lr high")
    translation.need("--lr", "a rate")
    assert translation.problems == []
    empty = draft("")
    empty.need("--lr", "the highest rate")
    assert empty.problems == [
        "--lr is missing: Megatron needs it. Pass --lr with the highest rate."
    ]


def test_unmapped_flags_are_reported_if_given() -> None:
    nothing = draft("")
    report_unmapped(nothing)
    assert nothing.entries == []
    given = draft("--main-params-dtype fp32 --is-hybrid-model")
    report_unmapped(given)
    assert [entry.verdict for entry in given.entries] == ["already", "not mapped"]


def test_flag_that_requires_another_has_no_effect_without_it() -> None:
    alone, together = (
        draft("--override-ckpt-iteration 3"),
        draft("--override-ckpt-iteration 3 --load x"),
    )
    for result in (alone, together):
        report_unmapped(result)
    assert [entry.effect for entry in alone.entries] == ["none"]
    assert [entry.effect for entry in together.entries if "ckpt" in entry.flag] == ["numbers"]


def test_given_flags_without_a_report_are_reported_as_unused() -> None:
    translation = draft("--most-recent-k 3 --lr 1")
    translation.copy("--lr")
    report_unused(translation)
    assert [entry.flag for entry in translation.entries] == ["--lr 1", "--most-recent-k 3"]
