import itertools

import pytest
import torch

from megalith.models.names import TensorRule, extent, rule, slices

HEADS = TensorRule("q", (6, 4), "q", ((0, 3), (0, 2), (0, 4)))
COLUMNS = TensorRule("o", (4, 6), "o", ((0, 4), (0, 3), (0, 2)))
SECOND = TensorRule("v", (6, 4), "kv", ((1, 2), (0, 3), (0, 2), (0, 4)))
VECTOR = TensorRule("b", (6,), "kv_bias", ((1, 2), (0, 3), (0, 2)))
ONES = TensorRule("x", (1, 1), "x", ((0, 1), (0, 1), (0, 1)))


@pytest.mark.parametrize("rule", [HEADS, COLUMNS, SECOND, VECTOR, ONES], ids=lambda rule: rule.name)
def test_every_part_without_gaps_is_found_in_their_tensor(rule: TensorRule) -> None:
    theirs = torch.arange(torch.Size(rule.shape).numel()).view(rule.shape)
    lengths = [stop - start for start, stop in rule.box]
    ours = theirs.view(lengths)
    spans = [[(a, b) for a in range(n) for b in range(a + 1, n + 1)] for n in lengths]
    tried = 0
    for part in itertools.product(*spans):
        expected = ours[tuple(slice(a, b) for a, b in part)]
        moved = tuple((a + o, b + o) for (a, b), (o, _) in zip(part, rule.box, strict=True))
        try:
            found = theirs[slices(rule, moved)]
        except AssertionError:  # a part with gaps inside one of their dims
            continue
        assert torch.equal(found.reshape(expected.shape), expected)
        tried += 1
    assert tried >= min(9, len(list(itertools.product(*spans))))


def test_a_part_with_gaps_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        slices(HEADS, ((0, 3), (0, 1), (0, 4)))


def test_a_rule_for_a_slice_lies_along_a_new_first_dim() -> None:
    assert rule("k", "kv", (3, 2), shape=(6,), part=1) == TensorRule("k", (6,), "kv", ((1, 2), (0, 3), (0, 2)))


def test_the_extent_is_what_their_tensors_fill() -> None:
    first = TensorRule("k", (6, 4), "kv", ((0, 1), (0, 3), (0, 2), (0, 4)))
    assert extent([first, SECOND]) == (2, 3, 2, 4)
