"""Runs with data phases: saved before each change, resumed bitwise, and extended by new phases."""

from pathlib import Path

import pytest

from megalith.config.tree import Override
from megalith.errors import CheckpointError
from tests.train.test_loop import CONSTANT, checkpoints, hashes, rows, train, write_store


def phased(folder: Path, *phases: tuple[int, str]) -> dict[str, Override]:
    """Settings of a run of 12 samples per step that reads store x, then the given phases."""
    stores = {name: str(folder / name) for name in "xyz"}
    for start, (name, store) in enumerate(stores.items()):
        if not Path(f"{store}.idx").exists():
            write_store(folder / name, 1 + 40 * start)
    text = ", ".join(f"{{samples: {start}, path: ['1', {stores[name]}]}}" for start, name in phases)
    return CONSTANT | {
        "data.mock": "false",
        "data.path": ["1", stores["x"]],
        "data.split": "1,0,0",
        "data.phases": f"[{text}]",
        "train.eval_steps": "0",
        "train.eval_every": "none",
        "train.steps": "6",
        "checkpoint.every": "100",
        "checkpoint.keep": "9",
    }


def test_run_is_saved_before_each_phase_and_resumes_bitwise(tmp_path: Path) -> None:
    settings = phased(tmp_path, (24, "y"), (50, "z"))
    train(tmp_path / "once", settings)
    # Step 3 begins with sample 24, and step 5 reads samples 48 to 59.
    assert checkpoints(tmp_path / "once") == [2, 4, 6]
    train(tmp_path / "resumed", settings | {"train.steps": "3"})
    train(tmp_path / "resumed", settings)
    assert hashes(tmp_path / "resumed", 6) == hashes(tmp_path / "once", 6)
    train(tmp_path / "plain", phased(tmp_path) | {"train.steps": "2"})
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("once", "plain")]
    assert losses[0][:2] == losses[1]


def test_only_phases_that_have_not_begun_can_change(tmp_path: Path) -> None:
    train(tmp_path / "run", phased(tmp_path, (24, "y"), (60, "z")) | {"train.steps": "4"})
    with pytest.raises(CheckpointError, match="trained on other data or in another order"):
        train(tmp_path / "run", phased(tmp_path, (30, "y"), (60, "z")))
    changed = phased(tmp_path, (24, "y"), (60, "x"), (66, "z"))
    train(tmp_path / "run", changed)
    train(tmp_path / "once", changed)
    assert hashes(tmp_path / "run", 6) == hashes(tmp_path / "once", 6)
