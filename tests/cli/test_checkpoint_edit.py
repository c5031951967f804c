"""`megalith checkpoint list|prune|copy` from the command line."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.load import open_checkpoint, verify_checkpoint
from megalith.checkpoint.lock import lock_run
from megalith.checkpoint.save import save_checkpoint
from megalith.cli.main import main
from megalith.parallel.group import single_rank_group
from megalith.plan.shards import Shard


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with five checkpoints, at steps 2 to 10."""
    for step in range(2, 12, 2):
        save(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run"


def save(folder: Path, step: int, *, skipped: int = 0) -> None:
    shard = Shard.full("norm.weight", (700,))
    entries = [
        CheckpointEntry(shard, role, torch.full((700,), float(step)))
        for role in ("param", "exp_avg")
    ]
    save_checkpoint(
        folder,
        step,
        entries,
        {"train": {"step": step, "skipped_in_a_row": skipped}},
        single_rank_group("world"),
        config_text="name: x\n",
        auxiliary_files={"tokenizer.json": b"{}"},
    )


def call(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


def test_list_prints_every_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step_0000004" / ".keep").touch()
    (run / "checkpoints" / "step_0000006" / "manifest.json").unlink()
    assert call("list", run) == 0
    output = capsys.readouterr().out
    for text in (
        "step_0000002  ",
        " bytes, saved by 1 ranks, pinned\n",
        "step_0000006  incomplete: ",
        "saved by 1 ranks, latest\n",
        f"4 complete checkpoints in {run / 'checkpoints'}, ",
    ):
        assert text in output
    assert call("list", run / "checkpoints", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10]
    assert [row["pinned"] for row in rows] == [False, True, False, False, False]
    assert call("list", run / "checkpoints" / "step_0000002") == 2
    assert "has no checkpoints. Use the folder of a run" in capsys.readouterr().err


def test_prune_keeps_newest_multiples_and_pinned(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step_0000002" / ".keep").touch()
    assert call("prune", run, "--keep", 1, "--every", 4, "--dry-run") == 0
    output = capsys.readouterr().out
    assert output.startswith("would delete step_0000006\nwould delete 1 of 5 checkpoints in ")
    assert steps(run) == [2, 4, 6, 8, 10]
    assert call("prune", run, "--keep", 1, "--every", 4, "--json") == 0
    assert json.loads(capsys.readouterr().out)["deleted"] == ["step_0000006"]
    assert steps(run) == [2, 4, 8, 10]
    assert call("prune", run, "--keep", 2) == 0
    assert capsys.readouterr().out.startswith(
        "deleted step_0000004\ndeleted 1 of 4 checkpoints in "
    )
    assert steps(run) == [2, 8, 10]


def test_prune_keeps_the_newest_checkpoint_before_skipped_steps(run: Path) -> None:
    save(run / "checkpoints", 12, skipped=3)
    assert call("prune", run, "--keep", 1) == 0
    assert steps(run) == [8, 12], "step 9 was the last update"


def test_prune_reports_invalid_input(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("prune", run, "--keep", 0, "--every", 0) == 2
    error = capsys.readouterr().err
    assert "--keep=0 must be at least 1. Use for example --keep 3." in error
    assert "--every=0 must be at least 1. Use for example --every 1000." in error
    with lock_run(run):
        assert call("prune", run, "--keep", 1) == 2
        monkeypatch.chdir(run / "checkpoints")
        assert call("prune", ".", "--keep", 1) == 2
    assert capsys.readouterr().err.count(f"{run} is in use by process") == 2
    assert steps(run) == [2, 4, 6, 8, 10]


def test_copy_is_complete_and_verified(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "copy"
    assert call("copy", run, target) == 0
    assert f"to {target}: " in capsys.readouterr().out
    source = run / "checkpoints" / "step_0000010"
    assert verify_checkpoint(target) == []
    names = sorted(path.name for path in source.iterdir())
    assert sorted(path.name for path in target.iterdir()) == names and ".metadata" in names
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in names)
    assert open_checkpoint(target).manifest == open_checkpoint(source).manifest
    other = tmp_path / "other"
    (other / "checkpoints").mkdir(parents=True)
    (source / ".metadata").unlink()
    assert call("copy", source, other / "checkpoints" / source.name, "--json") == 0
    assert json.loads(capsys.readouterr().out)["source"] == str(source)
    assert steps(other) == [10]


def test_copy_of_a_damaged_checkpoint_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = run / "checkpoints" / "step_0000010"
    file = next(source.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    target = tmp_path / "copy"
    assert call("copy", source, target) == 2
    error = capsys.readouterr().err.replace("\n", " ")
    assert str(file) in error and "are damaged. SHA-256 expected " in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_copy_reports_invalid_targets(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    cases = [
        (run / "checkpoints", "already exists and is not overwritten"),
        (tmp_path / "step_0000099", "is of step 10, and a run would take the copy for one of"),
        (tmp_path / "file" / "copy", "not copied"),
    ]
    for target, text in cases:
        assert call("copy", run, target) == 2
        assert text in capsys.readouterr().err.replace("\n", " "), target
    shutil.rmtree(run / "checkpoints")
    assert call("copy", run, tmp_path / "copy") == 2
