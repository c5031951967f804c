"""Values are compared across layouts and dtypes, and what cannot be compared is named."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.inspect import compare_checkpoints
from megalith.checkpoint.load import open_checkpoint
from megalith.errors import CheckpointError
from megalith.observe.machine import FORMATS
from megalith.plan.shards import Shard


def test_the_same_model_in_two_layouts_is_the_same(tmp_path: Path, tiny: SimpleNamespace) -> None:
    a = open_checkpoint(tiny.save(tmp_path / "a", 1, tiny.cut(tiny.model(), 1, 3)))
    b = open_checkpoint(tiny.save(tmp_path / "b", 9, tiny.cut(tiny.model(), 3, 2)))
    results = list(compare_checkpoints(a, b))
    assert [each.name for each in results] == a.keys() and {each.kind for each in results} == {
        "same"
    }
    changed = tiny.model()
    changed["exp_avg", "embed.weight"][6, 5] += 0.5
    c = open_checkpoint(tiny.save(tmp_path / "c", 1, tiny.cut(changed, 2, 2)))
    (odd,) = [each for each in compare_checkpoints(a, c) if each.kind != "same"]
    assert (odd.name, odd.differing, odd.numel) == ("optimizer.exp_avg.embed.weight", 1, 42)
    assert odd.largest == pytest.approx(0.5)
    assert all(each.kind == "same" for each in compare_checkpoints(a, c, atol=0.51))


def test_shapes_absences_dtypes_and_nan(tmp_path: Path, tiny: SimpleNamespace) -> None:
    nan, inf = math.nan, math.inf
    sides = (
        {
            "cast": torch.ones(2, dtype=torch.bfloat16),
            "shape": torch.ones(3),
            "gone": torch.ones(1),
            "odd": torch.tensor([nan, inf, 1.0]),
            "even": torch.tensor([nan, inf]),
        },
        {
            "cast": torch.ones(2),
            "shape": torch.ones(4),
            "new": torch.ones(1),
            "odd": torch.tensor([1.0, -inf, 1.0]),
            "even": torch.tensor([nan, inf]),
        },
    )
    a, b = (
        open_checkpoint(
            tiny.save(
                tmp_path / str(i),
                1,
                [
                    [
                        CheckpointEntry(
                            Shard.full(n, tuple(x.shape), dtype=FORMATS[x.dtype]), "param", x
                        )
                        for n, x in side.items()
                    ]
                ],
            )
        )
        for i, side in enumerate(sides)
    )
    results = {each.name.removeprefix("model."): each for each in compare_checkpoints(a, b)}
    kinds = {name: each.kind for name, each in results.items()}
    assert kinds == {
        "cast": "same",
        "even": "same",
        "gone": "only in a",
        "new": "only in b",
        "odd": "values",
        "shape": "shape",
    }
    assert (results["odd"].differing, results["odd"].largest) == (2, inf)
    assert (results["shape"].a, results["shape"].b) == ("[3] float32", "[4] float32")
    with pytest.raises(
        CheckpointError, match="--only=x matches none of the tensors .* Use a pattern"
    ):
        list(compare_checkpoints(a, b, only="x"))
