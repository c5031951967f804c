"""Any layout loads what any other saved, and nothing damaged, foreign or malicious gets through."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith.checkpoint.load import open_checkpoint, verify_checkpoint
from megalith.parallel.group import alone

ALONE = alone("world")


@pytest.mark.parametrize("saved", [(1, 1), (2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("loaded", [(1, 1), (3, 1), (1, 2), (2, 3)])
def test_any_layout_loads_any_layout_bitwise(
    tmp_path: Path, tiny: SimpleNamespace, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    model = tiny.model()
    checkpoint = open_checkpoint(tiny.save(tmp_path, 100, tiny.cut(model, *saved)))
    wanted, got = tiny.cut(model, *loaded), tiny.cut(model, *loaded, blank=True)
    for entries in got:
        checkpoint.load_into(entries, ALONE)
    for a, b in zip(wanted, got, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x.tensor, y.tensor), x.key
    assert verify_checkpoint(checkpoint.path) == []
