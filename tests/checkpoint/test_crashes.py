"""A crash after any effect on the disk leaves the older or the newer checkpoint, bit for bit."""

import mmap
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from megalith import storage
from megalith.checkpoint import save
from megalith.checkpoint.commit import FolderTexts, Retention, remove_leftovers, set_aside_damaged
from megalith.checkpoint.format import CheckpointEntry, folder_name, merge_tensors
from megalith.checkpoint.load import find_latest, open_checkpoint, verify_checkpoint
from megalith.checkpoint.manifest import PARTS
from megalith.checkpoint.staging import StagingRegion, plan_staging
from megalith.checkpoint.writer import (
    CheckpointWriter,
    Commit,
    CommitJob,
    JobFailure,
    SaveJob,
    plan_files,
)
from megalith.parallel.group import single_rank_group
from megalith.testing.disk import SimulatedDisk, iter_crash_states, record_effects, write_contents

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def states(tmp_path: Path) -> Callable[[Path, Callable[[], object]], Iterator[tuple[str, Path]]]:
    """Return a function that runs some work on a folder and yields (crash, folder after it)."""

    def run(folder: Path, work: Callable[[], object]) -> Iterator[tuple[str, Path]]:
        disk = SimulatedDisk(folder)
        with record_effects(folder) as effects:
            work()
        assert effects
        disks = tmp_path / "disks"
        before = len(list(disks.iterdir())) if disks.exists() else 0
        for number, (label, contents) in enumerate(iter_crash_states(disk, effects), before):
            copy = disks / str(number)
            write_contents(contents, copy)
            yield label, copy

    return run


def load(path: Path, tiny: SimpleNamespace) -> dict[str, torch.Tensor]:
    """Load all tensors of a checkpoint on one rank."""
    entries: list[CheckpointEntry] = tiny.cut(tiny.model(), 1, 1, blank=True)[0]
    open_checkpoint(path).load_into(entries, single_rank_group("world"))
    return {entry.key: entry.tensor for entry in entries}


def is_model(tensors: dict[str, torch.Tensor], seed: int, tiny: SimpleNamespace) -> bool:
    """Return whether the tensors are those of the model of a seed, bit for bit."""
    entries: list[CheckpointEntry] = tiny.cut(tiny.model(seed), 1, 1)[0]
    return all(torch.equal(tensors[entry.key], entry.tensor) for entry in entries)


def check_state(
    label: str, folder: Path, allowed: dict[int, list[int]], tiny: SimpleNamespace
) -> tuple[int, int]:
    """Recover a folder after a crash and return its newest (step, seed); `allowed`: seeds of each
    step that it may have."""
    remove_leftovers(folder)
    newest = find_latest(folder)
    assert newest is not None, label
    step = int(newest.name.removeprefix("step_"))
    tensors = load(newest, tiny)
    seeds = [seed for seed in allowed.get(step, []) if is_model(tensors, seed, tiny)]
    assert len(seeds) == 1, (label, step)
    names = set(storage.list_names(folder))
    extra = names - {folder_name(step) for step in allowed} - {"latest"}
    assert not extra, (label, extra)
    return step, seeds[0]


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (1, 2)])
def test_crash_in_a_save_leaves_the_older_or_the_newer_checkpoint(
    tmp_path: Path,
    tiny: SimpleNamespace,
    states: Callable[..., Iterator[tuple[str, Path]]],
    layout: tuple[int, int],
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    tiny.save(folder, 1, tiny.cut(tiny.model(1), *layout))
    steps = set()
    for label, copy in states(
        folder, lambda: tiny.save(folder, 2, tiny.cut(tiny.model(2), *layout))
    ):
        steps.add(check_state(label, copy, {1: [1], 2: [2]}, tiny))
    assert steps == {(1, 1), (2, 2)}


def save_asynchronously(
    folder: Path, step: int, ranks: list[list[CheckpointEntry]], *, keep: int | None = None
) -> None:
    """Run the writers of all ranks one after the other, in this process: those of other ranks
    first, and the commit last."""
    staging = folder / f"{folder_name(step)}.tmp-00000000"
    storage.make_folder(staging / PARTS)
    plans = [plan_staging(entries) for entries in ranks]
    parts = [plan_files(plan.write_plan, rank, 1, {}) for rank, plan in enumerate(plans)]
    metadata = save.dump_metadata(merge_tensors(part.tensors for part in parts))
    texts = FolderTexts(metadata, save.dump_state({"step": step}), b"", {}, save.versions())
    commit = CommitJob(texts, Retention(keep), len(ranks))
    for rank in reversed(range(len(ranks))):
        region = StagingRegion(plans[rank].nbytes, torch.device("cpu"))
        region.copy(plans[rank], ranks[rank])
        memory = mmap.mmap(region.fd, region.nbytes)
        job = SaveJob(staging, step, rank, None if rank else commit)
        rank_side, writer_side = multiprocessing.Pipe()
        for command in (plans[rank].write_plan, job, *([] if rank else [Commit()])):
            rank_side.send(command)
        writer = CheckpointWriter(writer_side, memoryview(memory), os.getppid(), 1, 0.0)
        reports = []
        with patch.object(writer, "_report", reports.append):
            rank_side.close()
            writer.run()
        region.close()
        assert not [report for report in reports if isinstance(report, JobFailure)], reports


@pytest.mark.parametrize("layout", [pytest.param((1, 1), marks=pytest.mark.slow), (1, 2)], ids=str)
def test_crash_in_an_asynchronous_save_leaves_the_older_or_the_newer_checkpoint(
    tmp_path: Path,
    tiny: SimpleNamespace,
    states: Callable[..., Iterator[tuple[str, Path]]],
    layout: tuple[int, int],
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    tiny.save(folder, 1, tiny.cut(tiny.model(1), *layout))
    steps = set()
    for label, copy in states(
        folder, lambda: save_asynchronously(folder, 2, tiny.cut(tiny.model(2), *layout), keep=1)
    ):
        steps.add(check_state(label, copy, {1: [1], 2: [2]}, tiny))
    assert steps == {(1, 1), (2, 2)}


def test_crash_in_an_overwrite_or_in_retention_leaves_a_complete_checkpoint(
    tmp_path: Path, tiny: SimpleNamespace, states: Callable[..., Iterator[tuple[str, Path]]]
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in (1, 2):
        tiny.save_alone(folder, step, seed=step)
    outcomes = set()
    for label, copy in states(folder, lambda: tiny.save_alone(folder, 2, seed=5, keep=1)):
        outcomes.add(check_state(label, copy, {1: [1], 2: [2, 5]}, tiny))
    assert outcomes == {(2, 2), (2, 5)}


def test_crash_in_a_recovery_does_not_prevent_the_next_one(
    tmp_path: Path, tiny: SimpleNamespace, states: Callable[..., Iterator[tuple[str, Path]]]
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    tiny.save_alone(folder, 1, seed=1)
    tiny.save_alone(folder, 2, seed=2)
    os.rename(folder / folder_name(2), folder / f"{folder_name(2)}.old-00000000")
    staging = folder / f"{folder_name(3)}.tmp-00000000"
    storage.make_folder(staging)
    save.write_boxes(staging, 0, tiny.cut(tiny.model(3), 1, 1)[0])
    for label, copy in states(folder, lambda: remove_leftovers(folder)):
        assert check_state(label, copy, {1: [1], 2: [2]}, tiny) == (2, 2), label


def test_crash_while_a_damaged_checkpoint_is_set_aside_keeps_the_older_one(
    tmp_path: Path, tiny: SimpleNamespace, states: Callable[..., Iterator[tuple[str, Path]]]
) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    tiny.save_alone(folder, 1, seed=1)
    newest = tiny.save_alone(folder, 2, seed=2).path
    data = bytearray((newest / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "__0_0.distcp").write_bytes(data)
    for label, copy in states(folder, lambda: set_aside_damaged(newest)):
        remove_leftovers(copy)
        intact = [path for path in copy.glob("step_*") if not verify_checkpoint(path)]
        assert [path.name for path in intact] == [folder_name(1)], label


def test_simulated_disk_finds_a_missing_sync(
    tmp_path: Path,
    tiny: SimpleNamespace,
    states: Callable[..., Iterator[tuple[str, Path]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The injected fault: files of boxes are not synced before the manifest is written."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    tiny.save_alone(folder, 1, seed=1)
    monkeypatch.setattr(storage, "sync_file", lambda file: file.flush())
    with pytest.raises(Exception, match="cannot be used|step_0000002|damaged|not a complete"):
        for label, copy in states(folder, lambda: tiny.save_alone(folder, 2, seed=2, keep=1)):
            check_state(label, copy, {1: [1], 2: [2]}, tiny)
