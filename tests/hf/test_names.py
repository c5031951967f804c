import itertools

import pytest
import torch

from megalith.checkpoint.format import lengths
from megalith.hf.tensor_rules import (
    TensorRow,
    TensorRule,
    dtype_to_write,
    group_by_tensor,
    locate_box,
    to_parameter_layout,
    to_tensor_layout,
    unpadded_shape,
)

SIZES = {"n": 3, "g": 3, "d": 2, "h": 4}
HEADS = TensorRow("q", "q", "(n d) h").build(SIZES)
COLUMNS = TensorRow("o", "o", "h (n d)").build(SIZES)
SECOND = TensorRow("v", "kv", "(g d) h", "[1] g d h").build(SIZES)
VECTOR = TensorRow("b", "kv_bias", "(g d)", "[1] g d").build(SIZES)
ONES = TensorRow("x", "x", "1 (1 1)").build({})
ROWS_OF_THREE = TensorRow("qkv", "kv", "(n+g+9[n+6:n+g+6] d) h", "[0] n+g+9 d h").build(SIZES)
PER_HEAD = TensorRow("query_key_value", "q", "(n 3[1] d) h", "n d h").build(SIZES)
TRANSPOSED = TensorRow("c_attn", "kv", "h (3[2] n d)", "[1] n d h").build(SIZES)
RULES = [HEADS, COLUMNS, SECOND, VECTOR, ONES, ROWS_OF_THREE, PER_HEAD, TRANSPOSED]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_box_is_located_in_its_tensor(rule: TensorRule) -> None:
    reference = torch.arange(torch.Size(rule.shape).numel()).view(rule.shape)
    ours = to_parameter_layout(
        rule, reference.view(rule.view)[tuple(slice(a, b) for a, b in rule.at)]
    )
    assert ours.shape == lengths(rule.box)
    back = to_tensor_layout(rule, ours)
    assert torch.equal(back, reference.view(rule.view)[tuple(slice(a, b) for a, b in rule.at)])
    spans = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in ours.shape]
    for part in itertools.product(*spans):
        moved = tuple((a + o, b + o) for (a, b), (o, _) in zip(part, rule.box, strict=True))
        region = locate_box(rule, moved)
        result = reference[region.slices].view(region.view)[region.at]
        assert torch.equal(
            to_parameter_layout(rule, result), ours[tuple(slice(a, b) for a, b in part)]
        )


def test_boxes_have_the_expected_slices() -> None:
    reference = torch.arange(18 * 4).view(18, 4)  # head 0: q q k k v v, head 1 ...
    values = to_parameter_layout(PER_HEAD, reference.view(PER_HEAD.view)[:, 1:2])
    assert torch.equal(values[1], reference[8:10])
    reference = torch.arange(4 * 18).view(4, 18)
    values = to_parameter_layout(TRANSPOSED, reference.view(TRANSPOSED.view)[:, 2:3])
    assert torch.equal(values[0, 1, 1], reference[:, 12 + 3])


def test_a_box_is_read_with_the_shortest_slices() -> None:
    assert locate_box(HEADS, ((1, 2), (0, 2), (1, 3))).slices == (slice(2, 4), slice(1, 3))
    assert locate_box(ROWS_OF_THREE, ((0, 1), (1, 2), (0, 2), (0, 4))).slices == (
        slice(20, 22),
        slice(0, 4),
    )
    assert locate_box(TRANSPOSED, ((1, 2), (0, 1), (0, 2), (0, 4))).slices == (
        slice(0, 4),
        slice(12, 14),
    )
    assert locate_box(PER_HEAD, ((1, 3), (0, 2), (0, 4))).slices == (slice(6, 18), slice(0, 4))


def test_row_of_the_table_gives_the_rule_of_a_fused_tensor() -> None:
    assert (
        TensorRule(
            "c_attn",
            shape=(4, 18),
            parameter="kv",
            box=((1, 2), (0, 3), (0, 2), (0, 4)),
            view=(4, 3, 3, 2),
            at=((0, 4), (2, 3), (0, 3), (0, 2)),
            dims=(None, 2, 3, 0),
        )
        == TRANSPOSED
    )
    assert ROWS_OF_THREE.shape == (15 * 2, 4)
    assert ROWS_OF_THREE.at == ((9, 12), (0, 2), (0, 4))


def test_rules_of_one_tensor_are_found_together() -> None:
    assert group_by_tensor([HEADS, ROWS_OF_THREE, ROWS_OF_THREE]) == {
        "q": [HEADS],
        "qkv": [ROWS_OF_THREE, ROWS_OF_THREE],
    }
    assert HEADS.covers_tensor and SECOND.covers_tensor and not PER_HEAD.covers_tensor


def test_unpadded_shape_covers_all_tensors() -> None:
    first = TensorRow("k", "kv", "(g d) h", "[0] g d h").build(SIZES)
    assert unpadded_shape([first, SECOND]) == (2, 3, 2, 4)


def test_only_expert_biases_keep_a_wide_dtype() -> None:
    narrow, wide, bias = torch.bfloat16, torch.float32, "layers.3.moe.balancing_bias"
    assert dtype_to_write("layers.3.moe.router", wide, narrow) == narrow
    assert (
        dtype_to_write(bias, wide, narrow) == wide
        and dtype_to_write(bias, wide, torch.float64) == torch.float64
    )
    assert dtype_to_write(bias, narrow, None) == narrow == dtype_to_write(bias, narrow, narrow)
    assert dtype_to_write("layers.3.moe.balancing_offset", wide, narrow) == wide
