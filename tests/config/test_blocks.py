"""Conversion of block_configs to layer settings, and its error messages."""

from copy import deepcopy
from typing import Any

import pytest

from megalith.config.block_configs import (
    BlockModelSizes,
    compute_ffn_size,
    find_ffn_multiplier,
    read_blocks,
)
from megalith.config.model import EQUAL_LAYERS, LayersConfig

SIZES = BlockModelSizes(num_layers=4, num_heads=32, hidden_size=4096)
WHOLE: dict[str, Any] = {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 5.25}}


def with_blocks(*changed: dict[str, Any]) -> list[dict[str, Any]]:
    """Whole blocks, and after them these."""
    return [*[deepcopy(WHOLE)] * (4 - len(changed)), *({**WHOLE, **change} for change in changed)]


def test_equal_blocks_give_model_sizes_without_patterns() -> None:
    blocks = read_blocks(with_blocks(), SIZES)
    assert (blocks.layers, blocks.num_kv_heads, blocks.ffn_hidden_size, blocks.problems) == (
        EQUAL_LAYERS,
        8,
        14336,
        (),
    )


def test_missing_replaced_or_smaller_blocks_become_patterns() -> None:
    entries = [
        {"attention": {"no_op": True}, "mlp": {"ffn_hidden_size": 100}},
        {
            "attention": {"num_query_groups": 16},
            "ffn": {"replace_with_linear": True, "ffn_mult": None},
        },
        {
            "attention": {"replace_with_linear": True, "n_heads_in_group": None},
            "ffn": {"intermediate_size": 300},
        },
        {
            "attention": {"n_heads_in_group": 32, "sparsify": None, "unshifted_sink": False},
            "ffn": {"no_op": True},
        },
    ]
    before = deepcopy(entries)
    blocks = read_blocks(entries, SIZES)
    assert entries == before, "what was parsed is never changed"
    assert blocks.problems == () and (blocks.num_kv_heads, blocks.ffn_hidden_size) == (16, 300)
    assert blocks.layers == LayersConfig(
        attention=("none", "full", "linear", "full"),
        mlp=("full", "linear", "full", "none"),
        num_kv_heads=(16, 16, 16, 1),
        ffn_hidden_size=(100, 300, 300, 300),
    )


def test_repeating_patterns_are_shortened() -> None:
    few = {"attention": {"n_heads_in_group": 16}}
    blocks = read_blocks([WHOLE, {**WHOLE, **few}] * 2, SIZES)
    assert blocks.layers == LayersConfig(num_kv_heads=(8, 2)) and blocks.problems == ()


def test_sizes_missing_in_a_block_come_from_the_model() -> None:
    bare: list[object] = [{"attention": {}, "ffn": {}}] * 4
    blocks = read_blocks(
        bare,
        BlockModelSizes(
            num_layers=4, num_heads=6, hidden_size=8, num_kv_heads=3, ffn_hidden_size=20
        ),
    )
    assert (blocks.layers, blocks.num_kv_heads, blocks.ffn_hidden_size, blocks.problems) == (
        EQUAL_LAYERS,
        3,
        20,
        (),
    )
    texts = read_blocks(bare, SIZES).problems
    assert len(texts) == 8
    assert texts[0] == (
        "block_configs[0].attention has none of n_heads_in_group, num_query_groups, "
        "num_key_value_heads, expected one, "
        "or no_op: true."
    )


@pytest.mark.parametrize(
    ("multiplier", "hidden", "width"),
    [(5.25, 4096, 14336), (2.625, 8192, 14336), (1.0, 100, 256), (0.5, 8192, 2816)],
)
def test_widths_are_rounded_up_to_256(multiplier: float, hidden: int, width: int) -> None:
    assert compute_ffn_size(multiplier, hidden) == width
    again = find_ffn_multiplier(width, hidden)
    assert again is not None and compute_ffn_size(again, hidden) == width
    assert find_ffn_multiplier(width + 1, hidden) is None


def test_every_multiple_of_256_has_a_multiplier_for_every_hidden_size() -> None:
    for hidden in (24, 1000, 4096, 5120, 8192):
        assert all(find_ffn_multiplier(256 * n, hidden) is not None for n in range(1, 120)), hidden


@pytest.mark.parametrize(
    ("block", "output"),
    [
        (
            {"attention": {"n_heads_in_group": 5}},
            "block_configs[3].attention.n_heads_in_group=5 must be a whole number that divides the "
            "32 query heads.",
        ),
        ({"attention": {"n_heads_in_group": True}}, "n_heads_in_group=True must be a whole number"),
        (
            {"attention": {"num_query_groups": 12}},
            "num_query_groups=12 must be a whole number that divides",
        ),
        (
            {"attention": {"n_heads_in_group": 4, "num_query_groups": 8}},
            "block_configs[3].attention: n_heads_in_group and num_query_groups: only one of them "
            "may "
            "be set.",
        ),
        (
            {"attention": {"no_op": True, "replace_with_linear": True}},
            "no_op and replace_with_linear exclude each other",
        ),
        (
            {"attention": {"n_heads_in_group": 4, "window_length": 8192}},
            "block_configs[3].attention.window_length=8192 is an unknown field, expected null or "
            "false.",
        ),
        ({"attention": None}, "block_configs[3]: None: expected an object for attention."),
        (
            {"ffn": {"ffn_mult": -1}},
            "block_configs[3].ffn.ffn_mult=-1 must be a number above 0 and at most 1000000.",
        ),
        (
            {"ffn": {"ffn_hidden_size": 20.5}},
            "ffn.ffn_hidden_size=20.5 must be a whole number above 0.",
        ),
        (
            {"ffn": {"ffn_mult": 1.0, "gated": False}},
            "block_configs[3].ffn.gated=False must be True.",
        ),
        (
            {"ffn": {"ffn_mult": 1.0, "hidden_act": "relu2"}},
            "ffn.hidden_act='relu2' must be 'silu'.",
        ),
        (
            {"ffn": {"ffn_mult": 1.0, "moe": {"num_experts": 8}}},
            "ffn.moe={'num_experts': 8} is an unknown field",
        ),
        (
            {"mlp": {"ffn_mult": 1.0}},
            "block_configs[3]: mlp and ffn: expected an object for mlp or ffn.",
        ),
        ({"parallel_blocks": [WHOLE]}, "block_configs[3].parallel_blocks="),
    ],
)
def test_invalid_block_is_reported(block: dict[str, Any], output: str) -> None:
    (text,) = read_blocks(with_blocks(block), SIZES).problems
    assert output in text


@pytest.mark.parametrize("name", ["no_op", "replace_with_linear"])
@pytest.mark.parametrize("half", ["attention", "ffn"])
@pytest.mark.parametrize(
    ("value", "works"), [("false", "false"), ("True", "true"), (0, "false"), (1, "true")]
)
def test_flags_must_be_booleans(half: str, name: str, value: object, works: str) -> None:
    (text,) = read_blocks(with_blocks({half: {**WHOLE[half], name: value}}), SIZES).problems
    assert text == (
        f"block_configs[3].{half}.{name}={value!r} must be true, false or null, without quotes. "
        f"Set it to {works}."
    )
    for plain in (None, False):
        assert (
            read_blocks(with_blocks({half: {**WHOLE[half], name: plain}}), SIZES).layers
            == EQUAL_LAYERS
        )


@pytest.mark.parametrize(
    "multiplier", [1e308, 10**400, 1_000_001, float("inf"), float("nan"), True]
)
def test_multiplier_out_of_range_is_reported(multiplier: float) -> None:
    (text,) = read_blocks(with_blocks({"ffn": {"ffn_mult": multiplier}}), SIZES).problems
    assert text.startswith(f"block_configs[3].ffn.ffn_mult={multiplier!r:.60}"), text
    assert text.endswith(" must be a number above 0 and at most 1000000.")


@pytest.mark.parametrize("hidden", [6, 24, 1000, 4096, 5120])
def test_mlp_of_size_zero_is_reported_with_a_valid_multiplier(hidden: int) -> None:
    sizes = BlockModelSizes(num_layers=4, num_heads=32, hidden_size=hidden)
    (text,) = read_blocks(with_blocks({"ffn": {"ffn_mult": 1e-9}}), sizes).problems
    start, _, least = text.removesuffix(" or more.").rpartition(" ")
    assert start == "block_configs[3].ffn.ffn_mult=1e-09 gives an MLP of size 0, expected"
    assert compute_ffn_size(float(least), hidden) == 256
    assert find_ffn_multiplier(10**12, hidden) is None


def test_model_without_attention_or_mlp_keeps_its_sizes() -> None:
    nothing = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
    blocks = read_blocks(
        [nothing] * 4,
        BlockModelSizes(
            num_layers=4, num_heads=6, hidden_size=8, num_kv_heads=3, ffn_hidden_size=20
        ),
    )
    assert (blocks.num_kv_heads, blocks.ffn_hidden_size, blocks.problems) == (3, 20, ())
    assert blocks.layers == LayersConfig(attention=("none",), mlp=("none",))


@pytest.mark.parametrize(
    ("entries", "shown"),
    [(None, "None"), ({"0": WHOLE}, "{'0'"), ([WHOLE] * 3, "3 entries"), ([WHOLE] * 5, "5 ent")],
)
def test_number_of_blocks_must_match_number_of_layers(entries: object, shown: str) -> None:
    (text,) = read_blocks(entries, SIZES).problems
    assert (
        text.startswith(f"block_configs has {shown}")
        and "expected a list with one for each of 4 layers" in text
    )


def test_all_problems_are_reported_together() -> None:
    wrong = {"attention": {"n_heads_in_group": 3, "window_length": 5}, "ffn": {"ffn_mult": "wide"}}
    blocks = read_blocks([wrong, WHOLE, 7, wrong], SIZES)
    assert [text.split("]")[0] for text in blocks.problems].count("block_configs[2") == 2
    assert len(blocks.problems) == 3 + 2 + 3
