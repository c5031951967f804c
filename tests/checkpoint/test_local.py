"""Local checkpoints on real ranks, each with a folder of its own, as on machines of their own."""

import errno
import json
import logging
import os
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import storage
from megalith.checkpoint import local
from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.local import LocalCheckpoint, LocalTier
from megalith.checkpoint.local_table import parse_table
from megalith.config.checkpoint import LocalCheckpointConfig, checkpoint_problems
from megalith.errors import CheckpointError
from megalith.parallel.group import Group, single_rank_group
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tiny import tiny_run
from tests.checkpoint.split_entries import build_split_entries

CPU = torch.device("cpu")
ALONE = single_rank_group("world")
SHAPES = {"w": (24, 3), "v": (24,), "scale": ()}


def build_entries(rank: int, world: int, *, dim: int = 0, step: int = 0) -> list[CheckpointEntry]:
    return build_split_entries(SHAPES, rank, world, dim=dim, step=step)


def open_tier(path: Path, group: Group, **settings: Any) -> LocalTier:
    """A tier whose ranks are machines of their own."""
    config = LocalCheckpointConfig(every=1, folder=str(path / f"machine{group.rank}"), **settings)
    return LocalTier(
        config, "tiny", path / "checkpoints", group, CPU, machine=f"machine{group.rank}"
    )


def rank_folder(path: Path, rank: int) -> Path:
    """The folder of a rank on its machine."""
    (root,) = (path / f"machine{rank}").glob("megalith-tiny-*")
    return root / f"rank_{rank:05d}"


def save(tier: LocalTier, group: Group, step: int) -> None:
    tier.save(step, build_entries(group.rank, group.size, step=step), {"step": step})


def load(tier: LocalTier, group: Group, **arguments: Any) -> tuple[int, bool]:
    """Load the newest local checkpoint, split along columns; return its step, or -1, and whether
    every bit is that of the step."""
    saved = tier.find(**{"at_least": 0, "alternative": "step_0000001"} | arguments)
    if saved is None:
        return -1, False
    entries = build_entries(group.rank, group.size, dim=1)
    saved.load_into(entries, group)
    expected = build_entries(group.rank, group.size, dim=1, step=saved.step)
    return saved.step, saved.state == {"step": saved.step} and all(
        torch.equal(one.tensor, other.tensor) for one, other in zip(entries, expected, strict=True)
    )


def flip_bit(path: Path) -> None:
    """Flip one bit in the middle of the values of a file's first box."""
    data = bytearray(path.read_bytes())
    table = json.loads((path.parent / local.TABLE).read_text())
    boxes = [
        box
        for part in table["parts"].values()
        for tensor in part["tensors"].values()
        for box in tensor["boxes"]
        if box["file"] == path.name
    ]
    data[boxes[0]["offset"] + boxes[0]["nbytes"] // 2] ^= 1
    path.write_bytes(data)


class Warnings(logging.Handler):
    """Collects the warnings of local checkpoints."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def __enter__(self) -> list[str]:
        local._log.addHandler(self)
        local._log.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *_: object) -> None:
        local._log.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _lose_each(
    rank: int, world: int, path: Path, losses: Sequence[tuple[int, ...]]
) -> list[tuple[int, bool]]:
    group, results = world_group(rank, world, "world"), []
    for number, lost in enumerate(losses):
        tier = open_tier(path / str(number), group)
        save(tier, group, 1)
        save(tier, group, 2)
        if rank in lost:
            shutil.rmtree(tier.root)
        results.append(load(tier, group))
    return results


def test_two_ranks_load_after_either_has_lost_its_folder(tmp_path: Path) -> None:
    losses: list[tuple[int, ...]] = [(), (0,), (1,), (0, 1)]
    for results in run_ranks(_lose_each, 2, tmp_path, losses):
        assert results == [(2, True), (2, True), (2, True), (-1, False)]


@pytest.mark.slow
def test_four_ranks_load_after_one_or_two_not_adjacent_have_lost_their_folders(
    tmp_path: Path,
) -> None:
    pairs = list(combinations(range(4), 2))
    losses: list[tuple[int, ...]] = [(0,), (1,), (2,), (3,), *pairs]
    expected = [(2, True)] * 4 + [
        (-1, False) if (b - a) % 4 in (1, 3) else (2, True) for a, b in pairs
    ]
    for results in run_ranks(_lose_each, 4, tmp_path, losses):
        assert results == expected


def _load_damaged(rank: int, world: int, path: Path) -> tuple[list[Any], list[str]]:
    group, results = world_group(rank, world, "world"), []
    tier = open_tier(path, group)
    save(tier, group, 1)
    save(tier, group, 2)
    newest = rank_folder(path, rank) / "step_0000002"
    with Warnings() as lines:
        if rank == 1:
            flip_bit(newest / "__1_0.distcp")
        results.append(load(tier, group))
        if rank == 0:
            flip_bit(newest / "__1_0.distcp")  # the copy on the peer
        try:
            results.append(load(tier, group))
        except CheckpointError as error:
            results.append(str(error))
        saved = tier.find(at_least=0, alternative="no checkpoint")
        assert saved is not None
        results.append(load(tier, group, excluded=[saved.save]))
        if rank == 1:
            (newest.parent / "step_0000001" / local.TABLE).write_bytes(b"{}")
            (newest / "__0_0.distcp").write_bytes(b"short")
        results.append(load(tier, group, excluded=[saved.save]))
    return results, lines


def test_flipped_bit_in_a_copy_is_never_loaded(tmp_path: Path) -> None:
    (results, lines), (other_results, _) = run_ranks(_load_damaged, 2, tmp_path)
    assert results == other_results
    first, second, third, fourth = results
    assert first == (2, True)
    assert lines[0] == "step 2: box model.w [12:24, 0:3] from rank 1 is damaged; read from rank 0"
    assert second == (
        "step 2: box model.w [12:24, 0:3]: no copy is intact (damaged: model.w [12:24, 0:3] from "
        "rank 0, model.w [12:24, 0:3] from rank 1)."
    )
    assert third == (1, True)
    assert fourth == (1, True)
    (table,) = [line for line in lines if "local.json" in line]
    assert "rank_00001/step_0000001 is not used: " in table
    assert "this is not the table of a local checkpoint (KeyError: 'sha256')" in table
    assert any("step_0000002/__0_0.distcp is 5 bytes, expected " in line for line in lines)


def _load_unreadable(rank: int, world: int, path: Path) -> tuple[list[Any], list[str]]:
    """Rank 1 cannot read its own file; then it cannot parse a box that it has read."""
    group, results = world_group(rank, world, "world"), []
    tier = open_tier(path, group)
    save(tier, group, 1)

    def fail_to_read(file: Path, start: int, nbytes: int) -> memoryview:
        if file.name == "__1_0.distcp":
            raise OSError(errno.EIO, "Input/output error", str(file))
        return map_file(file, start, nbytes)

    def fail_to_parse(*_: object) -> None:
        raise CheckpointError("the bytes are not a plain tensor.")

    map_file = storage.mapped
    with Warnings() as lines, pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(storage, "mapped", fail_to_read)
        results.append(load(tier, group))
        patch.undo()
        if rank == 1:
            patch.setattr(LocalCheckpoint, "_fill_pieces", fail_to_parse)
        try:
            results.append(load(tier, group))
        except CheckpointError as error:
            results.append(str(error))
        patch.undo()
        if rank == 1:
            patch.setattr(storage, "read_range", fail_to_read)
        try:
            save(tier, group, 2)
        except CheckpointError as error:
            results.append(str(error))
        results.append(load(tier, group))
    return results, lines


def test_box_that_cannot_be_read_does_not_make_other_ranks_wait(tmp_path: Path) -> None:
    (results, lines), (other_results, _) = run_ranks(_load_unreadable, 2, tmp_path)
    assert results == other_results
    assert results[0] == (1, True)
    assert lines[0] == "step 1: box model.v [12:24] from rank 1 is damaged; read from rank 0"
    assert results[1] == "the bytes are not a plain tensor."
    assert results[2].startswith("the local checkpoint of step 2 was not saved. ")
    assert "__1_0.distcp cannot be read (Input/output error)." in results[2]
    assert results[3] == (1, True)


def _save_on_ranks(rank: int, world: int, path: Path) -> int:
    group = world_group(rank, world, "world")
    tier = open_tier(path, group, keep=1)
    for step in (1, 2, 3):
        save(tier, group, step)
    return len(storage.list_names(tier.folder))


def test_other_world_size_loads_and_replaces_the_folders(tmp_path: Path) -> None:
    assert run_ranks(_save_on_ranks, 2, tmp_path) == [1, 1]
    tier = open_tier(tmp_path, ALONE)
    assert load(tier, ALONE) == (3, True)  # rank 0's folder has copies of rank 1's boxes
    shutil.move(rank_folder(tmp_path, 1), tier.root)
    assert load(tier, ALONE) == (3, True)
    for step in (4, 5):
        save(tier, ALONE, step)
    assert storage.list_names(tier.root) == ["rank_00000"]
    assert storage.list_names(tier.folder) == ["step_0000004", "step_0000005"]
    assert load(tier, ALONE) == (5, True)
    tier.discard_after(4)
    assert load(tier, ALONE) == (4, True)
    assert load(tier, ALONE, at_least=5) == (-1, False)
    assert load(tier, ALONE, lineage=[3]) == (-1, False)
    tier.remove()
    assert not tier.root.exists()


def test_incomplete_step_is_explained(tmp_path: Path) -> None:
    config = LocalCheckpointConfig(every=1, folder=str(tmp_path))
    tier = LocalTier(config, "tiny", tmp_path / "checkpoints", ALONE, CPU)
    save(tier, ALONE, 2)
    (tier.folder / "step_0000002" / "__0_0.distcp").unlink()
    with Warnings() as lines:
        assert load(tier, ALONE) == (-1, False)
        save(tier, ALONE, 3)
        assert load(tier, ALONE, at_least=4) == (-1, False)
    assert lines[0].endswith("step_0000002/__0_0.distcp: missing")
    assert lines[1] == (
        "the local checkpoint of step 2 is not complete: 0 of 1 ranks have no folder of it (-), "
        "and 6 boxes of 6 tensors have no copy (first: model.w [0:24, 0:3]); using step_0000001"
    )
    assert lines[-1] == (
        "the newest local checkpoint is of step 3, before step 4; using step_0000001"
    )


def test_folder_of_another_run_is_not_read(tmp_path: Path) -> None:
    def start(checkpoints: str) -> LocalTier:
        config = LocalCheckpointConfig(every=1, folder=str(tmp_path))
        return LocalTier(config, "tiny", tmp_path / checkpoints, ALONE, CPU)

    first = start("first")
    save(first, ALONE, 2)
    with Warnings() as lines:
        second = start("second")
        assert load(second, ALONE) == (-1, False)
        shutil.copytree(first.root, second.root)
        assert load(second, ALONE) == (-1, False)
    assert lines[0] == (
        f"{tmp_path} also holds local checkpoints of other runs with the name tiny, which this run "
        f"does not read: {first.root.name}. Delete those of runs that have ended."
    )
    assert f"is on the same file system as {tmp_path / 'second'}" in lines[1]
    assert lines[-1].endswith(
        f"step_0000002 is a local checkpoint of run {first.run}, and this is run {second.run}; it "
        "is not used"
    )
    assert load(start("first"), ALONE) == (2, True)


def test_full_folder_keeps_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = LocalCheckpointConfig(every=1, folder=str(tmp_path))
    tier = LocalTier(config, "tiny", tmp_path / "checkpoints", ALONE, CPU)
    save(tier, ALONE, 1)

    def full(path: Path) -> Any:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(storage, "open_new", full)
        with pytest.raises(CheckpointError) as error:
            save(tier, ALONE, 2)
    assert str(error.value) == (
        f"the local checkpoint of step 2 was not saved. {tier.root} is full (No space left on "
        "device). Free some space, set checkpoint.local.keep or "
        "checkpoint.local.replication_factor to a lower number, or set checkpoint.local.folder to "
        "a local disk."
    )
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 100))
        with pytest.raises(CheckpointError, match=r"needs 815 B on .* and has 100 B\. Free some"):
            save(tier, ALONE, 2)
    assert storage.list_names(tier.folder) == ["step_0000001"]
    assert load(tier, ALONE) == (1, True)


def test_folder_that_cannot_be_used_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")

    def start(folder: str | None) -> None:
        config = LocalCheckpointConfig(every=7, folder=folder)
        LocalTier(config, "tiny", tmp_path / "checkpoints", ALONE, CPU)

    with pytest.raises(
        CheckpointError, match=r"^checkpoint\.local\.folder=.*/file: .* cannot be w"
    ):
        start(str(tmp_path / "file"))
    monkeypatch.setattr(local, "SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(CheckpointError) as error:
        start(None)
    assert str(error.value) == (
        "checkpoint.local.every=7 needs checkpoint.local.folder, because this system has no "
        f"{tmp_path / 'none'}. Set it to a folder of a memory file system or of a local disk, such "
        "as /tmp."
    )


def test_changed_table_is_rejected(tmp_path: Path) -> None:
    config = LocalCheckpointConfig(every=1, folder=str(tmp_path))
    tier = LocalTier(config, "tiny", tmp_path / "checkpoints", ALONE, CPU)
    save(tier, ALONE, 1)
    path = tier.folder / "step_0000001" / local.TABLE
    assert parse_table(path.read_bytes(), path).step == 1
    raw = json.loads(path.read_text())
    for change, problem in (
        ({"step": 2}, "its SHA-256 differs: the file was changed after it was saved"),
        ({"format": 2}, "format 2, expected at most 1"),
    ):
        with pytest.raises(CheckpointError, match=problem):
            parse_table(json.dumps(raw | change).encode(), path)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"checkpoint.local.keep": "1"},
            "checkpoint.local.keep=1 needs checkpoint.local.every, which is unset. Set "
            "checkpoint.local.every, for example to 10, or remove checkpoint.local.keep.",
        ),
        (
            {
                "checkpoint.local.every": "5",
                "checkpoint.local.replication_factor": "1",
                "checkpoint.local.replication_jump": "8",
            },
            "checkpoint.local.replication_jump=8 with checkpoint.local.replication_factor=1: there "
            "are no copies. Set checkpoint.local.replication_factor=2, or remove "
            "checkpoint.local.replication_jump.",
        ),
    ],
)
def test_settings_without_effect_are_rejected(settings: dict[str, str], problem: str) -> None:
    assert checkpoint_problems(tiny_run(settings).checkpoint) == [problem]


def test_copy_file_returns_the_error_of_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception would end the exchanges with other peers, which would wait."""

    def fail(file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage, "sync_file", fail)
    copy = local._CopyFile(tmp_path / "__1_0.distcp")
    copy.write(memoryview(b"abc"))
    assert f"{tmp_path} cannot be written (No space left on device). Free" in copy.close()


def test_folder_of_another_user_in_a_shared_one_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "megalith-run-1"
    root.mkdir()
    local._check_owner(root)
    monkeypatch.setattr(os, "geteuid", lambda: os.lstat(root).st_uid + 1)
    local._check_owner(root)
    tmp_path.chmod(0o1777)
    with pytest.raises(OSError, match="it belongs to user"):
        local._check_owner(root)
    root.rmdir()
    root.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="it belongs to user"):
        local._check_owner(root)
