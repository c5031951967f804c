"""Asynchronous saves: every file equals that of a synchronous save, even if the tensors change
while the files are written; a lost writer process costs one save only."""

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import storage
from megalith.checkpoint import async_save, commit, lock, staging
from megalith.checkpoint.async_save import AsyncSaver, WriterSettings, check_memory
from megalith.checkpoint.commit import Retention, remove_leftovers
from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.load import open_checkpoint, verify_checkpoint
from megalith.checkpoint.manifest import parse_part
from megalith.checkpoint.save import SaveReport, save_checkpoint
from megalith.checkpoint.writer import PlannedBox, StagedTensor, WritePlan, divide_boxes
from megalith.errors import CheckpointError
from megalith.parallel.group import Group, single_rank_group
from megalith.plan.shards import Shard
from megalith.testing.ranks import run_ranks

ALONE = single_rank_group("world")
CPU = torch.device("cpu")
PATIENCE_SECONDS = 60.0


def build_entries(rank: int = 0, world: int = 1) -> list[CheckpointEntry]:
    """Tensors of several dtypes, one of them empty and one a scalar; each rank writes its rows of
    the first one, and the first rank the rest."""
    rows = Shard.full("rows", (4 * world, 3), dtype="bf16").split_dim(0, [4] * world, rank, ("dp",))
    return [
        CheckpointEntry(rows, "param", torch.zeros(4, 3, dtype=torch.bfloat16)),
        CheckpointEntry(rows, "master", torch.zeros(4, 3)),
        CheckpointEntry(Shard.full("scale", ()), "param", torch.zeros(()), rank == 0),
        CheckpointEntry(Shard.full("none", (0, 3)), "param", torch.zeros(0, 3), rank == 0),
        CheckpointEntry(Shard.full("w", (70, 50)), "exp_avg", torch.zeros(70, 50), rank == 0),
    ]


def change(entries: Sequence[CheckpointEntry], step: int) -> None:
    """Change every element of every entry."""
    generator = torch.Generator().manual_seed(step)
    for entry in entries:
        entry.tensor.copy_(torch.randn(entry.tensor.shape, generator=generator))


def save_sync(folder: Path, step: int, entries: Sequence[CheckpointEntry], world: Group) -> Path:
    return save_checkpoint(folder, step, entries, {"step": step}, world, config_text="a: 1\n").path


def begin(saver: AsyncSaver, folder: Path, step: int, entries: Sequence[CheckpointEntry]) -> None:
    saver.begin(
        folder, step, entries, {"step": step}, config_text="a: 1\n", retention=Retention(None)
    )


def wait_for_result(saver: AsyncSaver) -> SaveReport | CheckpointError:
    """What the loop does in every step, for one rank."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (result := saver.advance(*saver.count_saves())) is None:
        assert time.monotonic() < deadline, "the save makes no progress"
        time.sleep(0.002)
    return result


def save(
    saver: AsyncSaver, folder: Path, step: int, entries: Sequence[CheckpointEntry]
) -> SaveReport | CheckpointError:
    begin(saver, folder, step, entries)
    return wait_for_result(saver)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def wait_for_writer(saver: AsyncSaver) -> int:
    """The id of the writer process, once it runs."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while saver.writer_pid is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return saver.writer_pid


@pytest.fixture
def entries() -> list[CheckpointEntry]:
    return build_entries()


@pytest.fixture
def saver(entries: list[CheckpointEntry]) -> Iterator[AsyncSaver]:
    saver = AsyncSaver(entries, ALONE, CPU)
    yield saver
    saver.close()


def test_twelve_saves_equal_synchronous_ones_while_every_tensor_changes(
    tmp_path: Path, saver: AsyncSaver, entries: list[CheckpointEntry]
) -> None:
    for step in range(1, 13):
        change(entries, step)
        expected = save_sync(tmp_path / "sync", step, entries, ALONE)
        begin(saver, tmp_path / "async", step, entries)
        saver.wait_staged()
        change(entries, 100 + step)  # the update of the next step
        report = wait_for_result(saver)
        assert isinstance(report, SaveReport)
        assert contents(report.path) == contents(expected), step
    assert report.nbytes == sum(
        file.stat().st_size for file in report.path.iterdir() if file.name != "manifest.json"
    )
    assert verify_checkpoint(report.path) == []
    text = str(report)
    assert text.startswith("step_0000012: ") and " staged in 0.0 s, blocked 0." in text
    assert " s, committed after " in text and text.endswith("B/s)")


def test_writing_a_tensor_without_waiting_changes_the_file(
    tmp_path: Path,
    saver: AsyncSaver,
    entries: list[CheckpointEntry],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The injected fault: without the wait, the update of the next step is in the file."""
    copy, started = staging.StagingRegion.copy, threading.Event()

    def copy_late(*arguments: Any) -> None:
        assert started.wait(PATIENCE_SECONDS)
        time.sleep(0.05)
        copy(*arguments)

    monkeypatch.setattr(staging.StagingRegion, "copy", copy_late)
    for waits in (True, False):
        change(entries, 1)
        expected = save_sync(tmp_path / "sync", 1, entries, ALONE)
        begin(saver, tmp_path / "async", 1, entries)
        started.set()
        if waits:
            saver.wait_staged()
        change(entries, 2)
        report = wait_for_result(saver)
        assert isinstance(report, SaveReport)
        same = (report.path / "__0_0.distcp").read_bytes() == (
            expected / "__0_0.distcp"
        ).read_bytes()
        assert same == waits
        started.clear()


def test_writer_process_has_low_priority_and_no_torch(saver: AsyncSaver, tmp_path: Path) -> None:
    code = "import sys, megalith.checkpoint.writer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    save(saver, tmp_path, 1, build_entries())
    pid = wait_for_writer(saver)
    assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + 10, 19)


def test_writer_ends_when_the_saver_is_closed(entries: list[CheckpointEntry]) -> None:
    saver = AsyncSaver(entries, ALONE, CPU)
    pid = wait_for_writer(saver)
    saver.close()
    assert not Path(f"/proc/{pid}").exists()


def test_several_threads_write_several_files(
    tmp_path: Path, entries: list[CheckpointEntry]
) -> None:
    entries = [
        CheckpointEntry(Shard.full(f"w{each}", (50,)), "param", torch.full((50,), float(each)))
        for each in range(8)
    ]
    saver = AsyncSaver(entries, ALONE, CPU, WriterSettings(threads=3))
    report = save(saver, tmp_path, 1, entries)
    saver.close()
    assert isinstance(report, SaveReport)
    names = {file.name for file in report.path.glob("*.distcp")}
    assert names == {"__0_0.distcp", "__0_1.distcp", "__0_2.distcp"}
    assert verify_checkpoint(report.path) == []
    checkpoint = open_checkpoint(report.path)
    assert all(bool((checkpoint.read(f"model.w{each}") == each).all()) for each in range(8))


def test_boxes_are_divided_in_order_into_files_of_similar_size() -> None:
    for sizes, num_files in (((5, 5, 5, 5), 2), ((1, 9, 1), 4), ((3,), 3), ((), 2)):
        boxes = tuple(PlannedBox(((n, n + 1),), 0, size, b"", b"") for n, size in enumerate(sizes))
        plan = WritePlan((StagedTensor("w", (len(sizes),), "float32", boxes),), "")
        files = divide_boxes(plan, num_files)
        assert [box for file in files for _, box in file] == list(boxes)
        assert all(files) and len(files) <= num_files
    assert [len(file) for file in divide_boxes(plan, 2)] == []


def test_changed_entries_are_planned_again(
    tmp_path: Path, saver: AsyncSaver, entries: list[CheckpointEntry]
) -> None:
    save(saver, tmp_path / "async", 1, entries)
    fewer = entries[:1]
    larger = [*entries, CheckpointEntry(Shard.full("new", (9000,)), "param", torch.ones(9000))]
    for step, changed in ((2, fewer), (3, larger)):
        report = save(saver, tmp_path / "async", step, changed)
        assert isinstance(report, SaveReport)
        expected = save_sync(tmp_path / "sync", step, changed, ALONE)
        assert contents(report.path) == contents(expected)


def test_retention_deletes_older_checkpoints(
    tmp_path: Path, saver: AsyncSaver, entries: list[CheckpointEntry]
) -> None:
    for step in (1, 2):
        saver.begin(tmp_path, step, entries, {}, config_text="", retention=Retention(1))
        report = wait_for_result(saver)
        assert isinstance(report, SaveReport)
    assert report.removed == (tmp_path / "step_0000001",)
    assert storage.list_names(tmp_path) == ["latest", "step_0000002"]


def test_killed_writer_fails_the_save_and_is_replaced(
    tmp_path: Path, saver: AsyncSaver, entries: list[CheckpointEntry]
) -> None:
    save(saver, tmp_path, 1, entries)
    pid = wait_for_writer(saver)
    os.kill(pid, signal.SIGKILL)
    error = save(saver, tmp_path, 2, entries)
    assert isinstance(error, CheckpointError)
    assert str(error).startswith(f"step 2 was not saved to {tmp_path}. ")
    assert "Earlier checkpoints are untouched; the newest is step_0000001." in str(error)
    assert storage.list_names(tmp_path) == ["latest", "step_0000001"]
    assert isinstance(save(saver, tmp_path, 3, entries), SaveReport)
    assert wait_for_writer(saver) != pid


def test_unresponsive_writer_fails_the_save_and_is_replaced(
    tmp_path: Path, entries: list[CheckpointEntry]
) -> None:
    saver = AsyncSaver(entries, ALONE, CPU, WriterSettings(timeout_seconds=0.3))
    pid = wait_for_writer(saver)
    os.kill(pid, signal.SIGSTOP)
    error = save(saver, tmp_path, 1, entries)
    assert isinstance(error, CheckpointError)
    assert f"the writer process {pid} made no progress for 0 s. Check the disk" in str(error)
    assert "checkpoint.writer_timeout_seconds (0.3 now)" in str(error)
    assert not Path(f"/proc/{pid}").exists(), "nothing may read the memory that is reused"
    saver._settings = WriterSettings()
    change(entries, 2)
    expected = save_sync(tmp_path / "sync", 2, entries, ALONE)
    report = save(saver, tmp_path, 2, entries)
    saver.close()
    assert isinstance(report, SaveReport)
    assert contents(report.path) == contents(expected)


def test_failure_of_another_rank_ends_the_wait_for_the_own_writer(
    tmp_path: Path,
    saver: AsyncSaver,
    entries: list[CheckpointEntry],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the other ranks wait in a collective for as long as this rank for its writer, and
    end the run after parallel.timeout_seconds."""
    os.kill(wait_for_writer(saver), signal.SIGSTOP)
    begin(saver, tmp_path, 1, entries)
    sent: list[object] = []

    def gather(value: object, group: Group) -> list[object]:
        sent.append(value)
        return [value, "unfinished" if len(sent) < 3 else "failed"]

    monkeypatch.setattr(async_save, "gather_objects", gather)
    monkeypatch.setattr(async_save, "_AGREE_S", 0.01)
    with pytest.raises(AssertionError, match="a rank has failed"):  # the real group has no failure
        saver.drain()
    assert sent == ["unfinished"] * 3


def test_error_does_not_wait_for_an_unresponsive_writer(
    tmp_path: Path, entries: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is larger than the buffer of the socket, so that sending it does not end; a thread
    that does not end would prevent the exit of the process."""
    monkeypatch.setattr(async_save, "_EXIT_S", 0.2)
    saver = AsyncSaver(entries, ALONE, CPU)
    os.kill(wait_for_writer(saver), signal.SIGSTOP)
    state = {"text": "a" * 2**22}
    saver.begin(tmp_path, 1, entries, state, config_text="", retention=Retention(None))
    pending = saver._pending
    assert pending is not None and pending.stage is not None
    pending.copied.wait()
    saver.close(failed=True)
    assert futures.wait([pending.stage], 10).done, "the staging thread has not ended"


def test_writer_imports_the_modules_of_its_rank(
    tmp_path: Path, entries: list[CheckpointEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules in the working folder, or in PYTHONPATH changed since the rank began, are others."""
    for name in ("socket.py", "megalith.py", "logging.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    saver = AsyncSaver(entries, ALONE, CPU)
    try:
        assert isinstance(save(saver, tmp_path / "out", 1, entries), SaveReport)
    finally:
        saver.close()


def test_memory_is_freed_without_close() -> None:
    region = staging.StagingRegion(4096, CPU)
    fd = region.fd
    os.fstat(fd)
    del region
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_full_disk_fails_the_save_and_the_next_one_succeeds(
    tmp_path: Path, saver: AsyncSaver, entries: list[CheckpointEntry]
) -> None:
    assert isinstance(save(saver, tmp_path, 1, entries), SaveReport)
    pid = wait_for_writer(saver)
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, hard))
    error = save(saver, tmp_path, 2, entries)
    assert isinstance(error, CheckpointError)
    assert "File too large. Free some space, or set checkpoint.keep to a lower number" in str(error)
    assert storage.list_names(tmp_path) == ["latest", "step_0000001"]
    assert isinstance(save(saver, tmp_path, 3, entries), SaveReport)


def test_lost_lock_prevents_the_commit(
    tmp_path: Path, saver: AsyncSaver, entries: list[CheckpointEntry]
) -> None:
    def check_lock() -> None:
        raise CheckpointError("this run lost its lock.")

    saver.begin(
        tmp_path,
        1,
        entries,
        {},
        config_text="",
        retention=Retention(None),
        check_lock=check_lock,
    )
    error = wait_for_result(saver)
    assert "this run lost its lock." in str(error)
    assert storage.list_names(tmp_path) == []


def test_drain_waits_for_the_commit(
    tmp_path: Path, saver: AsyncSaver, entries: list[CheckpointEntry]
) -> None:
    assert saver.drain() is None
    begin(saver, tmp_path, 1, entries)
    assert saver.pending_step == 1
    report = saver.drain()
    assert isinstance(report, SaveReport) and verify_checkpoint(report.path) == []
    assert saver.pending_step is None and saver.drain() is None


def test_memory_check_names_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_save, "free_memory", lambda: 10_000)
    memory = check_memory(build_entries(), ALONE)
    assert not memory.suffices and memory.largest_rank == 4 * 3 * 6 + 4 + 4 * 70 * 50
    assert memory.describe() == (
        "asynchronous saves need 15 kB of host memory (1.1 times the tensors that the ranks of a "
        "machine save), and 10 kB are free"
    )
    monkeypatch.setattr(async_save, "free_memory", lambda: 20_000)
    assert check_memory(build_entries(), ALONE).suffices


@pytest.mark.parametrize("data", [b"", b"{}", b'{"plan": "0", "tensors": {}, "files": {}}', b"[1]"])
def test_damaged_table_of_a_rank_is_reported(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="this is not the table of a rank's boxes"):
        parse_part(data, Path("parts/__0.json"))


def test_cleanup_leaves_a_folder_that_a_writer_completes_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    incomplete = tmp_path / "step_0000001.tmp-0123abcd"
    incomplete.mkdir(parents=True)
    rename = storage.rename

    def rename_first(source: Path, target: Path) -> None:
        if source == incomplete:
            rename(source, tmp_path / "step_0000001")
        rename(source, target)

    monkeypatch.setattr(commit.storage, "rename", rename_first)
    remove_leftovers(tmp_path)
    assert storage.list_names(tmp_path) == ["step_0000001"]


BEGIN_AND_DIE = """
import os, signal, sys
from pathlib import Path
from tests.checkpoint.test_async_save import (
    ALONE, CPU, AsyncSaver, Retention, build_entries, change
)

entries = build_entries()
change(entries, 1)
saver = AsyncSaver(entries, ALONE, CPU)
saver.begin(
    Path(sys.argv[1]), 7, entries, {"step": 7}, config_text="a: 1\\n", retention=Retention(1)
)
saver._pending.stage.result()
print(saver.writer_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_writer_completes_a_staged_save_after_its_rank_was_killed(tmp_path: Path) -> None:
    older = save_sync(tmp_path, 3, build_entries(), ALONE)
    words = [sys.executable, "-c", BEGIN_AND_DIE, str(tmp_path)]
    died = subprocess.run(words, check=False, stdout=subprocess.PIPE)
    assert died.returncode == -signal.SIGKILL
    deadline = time.monotonic() + PATIENCE_SECONDS
    while lock._started(int(died.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    entries = build_entries()
    change(entries, 1)
    expected = save_sync(tmp_path / "sync", 7, entries, ALONE)
    assert contents(tmp_path / "step_0000007") == contents(expected)
    assert older.exists(), "the next run may load it, so the writer does not apply retention"


def _save_on_ranks(rank: int, world: int, folder: Path) -> list[str]:
    """Save on several ranks; the writer of the last one is killed before the second save."""
    group = Group(("world",), tuple(range(world)), rank, handle=torch.distributed.group.WORLD)
    entries = build_entries(rank, world)
    saver = AsyncSaver(entries, group, CPU)
    results = []
    for step in (1, 2, 3):
        change(entries, step)
        save_sync(folder / "sync", step, entries, group)
        if step == 2 and rank == world - 1:
            os.kill(wait_for_writer(saver), signal.SIGKILL)
        begin(saver, folder, step, entries)
        saver.wait_staged()
        change(entries, 100)
        result = None
        while result is None:  # the message of a step
            counts = torch.tensor(saver.count_saves())
            torch.distributed.all_reduce(counts)
            result = saver.advance(*counts.tolist())
        results.append(result.path.name if isinstance(result, SaveReport) else str(result))
    saver.close()
    return results


@pytest.mark.slow  # two more processes; tests/train has the same with a run
def test_ranks_commit_and_fail_together(tmp_path: Path) -> None:
    first, second = run_ranks(_save_on_ranks, 2, tmp_path)
    assert first == second
    assert (first[0], first[2]) == ("step_0000001", "step_0000003")
    assert first[1].startswith(f"step 2 was not saved to {tmp_path}. ")
    assert "rank 1: " in first[1]
    for step in (1, 3):
        name = f"step_{step:07d}"
        assert contents(tmp_path / name) == contents(tmp_path / "sync" / name)
    assert sorted(storage.list_names(tmp_path)) == [
        "latest",
        "step_0000001",
        "step_0000003",
        "sync",
    ]
