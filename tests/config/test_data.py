"""Data settings: rules, blends and splits."""

import pytest

from megalith.config.data import (
    Blend,
    DataConfig,
    data_problems,
    get_split,
    parse_blend,
    parse_split,
    per_split_paths,
)
from megalith.config.fields import range_problems
from megalith.errors import ConfigError


def test_exactly_one_source_is_accepted() -> None:
    assert data_problems(DataConfig(mock=True)) == []
    assert data_problems(DataConfig(path=("a",))) == []
    assert data_problems(DataConfig(train_path=("a",), valid_path=("b",), test_path=("c",))) == []


@pytest.mark.parametrize(
    "data, text",
    [
        (DataConfig(), "data has 0 sources (none): exactly one is needed. Set one of data.path,"),
        (
            DataConfig(mock=True, path=("a",), test_path=("b",)),
            "data has 3 sources (mock, path, test_path)",
        ),
        (DataConfig(train_path=("a",), split="1,1,1"), "data.split=1,1,1 divides one corpus"),
        (DataConfig(mock=True, split="1,-1"), "data.split=1,-1: expected one to three numbers"),
        (
            DataConfig(mock=True, mid_level_dataset_surplus=-0.1),
            "data.mid_level_dataset_surplus=-0.1 must be a finite number of at least 0. Use 0.005.",
        ),
        (DataConfig(mock=True, num_train_samples=0), "data.num_train_samples=0 must be at least 1"),
        (
            DataConfig(mock=True, mock_num_documents=0),
            "data.mock_num_documents=0 must be at least 1",
        ),
        (DataConfig(mock=True, mock_max_tokens=1), "data.mock_max_tokens=1 must be at least 2"),
        (
            DataConfig(path=("1", "a", "b", "c")),
            "data.path=1 a b c: 'b' is not a weight",
        ),
    ],
)
def test_each_violated_rule_is_reported_with_its_value(data: DataConfig, text: str) -> None:
    problems = range_problems(data, "data") + data_problems(data)
    assert any(text in problem for problem in problems), problems


def test_all_problems_are_reported_together() -> None:
    data = DataConfig(path=("0", "a"), split="0", num_train_samples=-1)
    assert len(range_problems(data, "data") + data_problems(data)) == 3


@pytest.mark.parametrize(
    "words, blend",
    [
        ("a", Blend(("a",), None)),
        ("a b", Blend(("a", "b"), None)),
        ("1 2 3", Blend(("1", "2", "3"), None)),
        ("0.3 a 7e-1 b", Blend(("a", "b"), (0.3, 0.7))),
        ("0 a 2 b", Blend(("a", "b"), (0.0, 2.0))),
    ],
)
def test_blend_is_prefixes_or_weight_prefix_pairs(words: str, blend: Blend) -> None:
    assert parse_blend("data.path", words.split()) == blend


@pytest.mark.parametrize("words", ["nan a 1 b", "inf a 1 b", "-1 a 2 b", "0 a 0 b"])
def test_weights_that_cannot_be_normalized_are_rejected(words: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"data\.path=.*must be finite, not negative, and not all zero\. Set at least",
    ):
        parse_blend("data.path", words.split())


def test_split_becomes_fractions_and_none_for_empty_splits() -> None:
    assert parse_split("8,1,1") == ((0.0, 0.8), (0.8, 0.9), (0.9, 1.0))
    assert parse_split(" 98, 2 ") == ((0.0, 0.98), (0.98, 1.0), None)
    assert parse_split("0,1,0") == (None, (0.0, 1.0), None)


@pytest.mark.parametrize("split", ["1,1,1,1", "a", "1,b", "0,0,0", "-1,2", "", "1..2"])
def test_invalid_split_is_rejected(split: str) -> None:
    with pytest.raises(
        ConfigError, match=r"expected one to three numbers .* Use for example data.split=969,30,1"
    ):
        parse_split(split)


def test_default_split_depends_on_the_source() -> None:
    assert get_split(DataConfig(path=("a",))) == "969,30,1"
    assert get_split(DataConfig(mock=True)) == "1,1,1"
    assert get_split(DataConfig(mock=True, split="9,1")) == "9,1"
    assert per_split_paths(DataConfig(valid_path=("v",))) == {"valid": ("v",)}
