"""A save is all or nothing, on every rank, whatever fails and whenever the process is killed."""

import errno
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from megalith import storage
from megalith.checkpoint import save
from megalith.checkpoint.commit import Retention, remove_leftovers
from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.load import find_latest, open_checkpoint, verify_checkpoint
from megalith.checkpoint.save import (
    commit_snapshot,
    save_checkpoint,
    take_snapshot,
    write_snapshot,
)
from megalith.errors import CheckpointError
from megalith.observe.machine import FORMATS
from megalith.parallel.group import Group, single_rank_group
from megalith.plan.shards import Shard
from megalith.testing.ranks import run_ranks

ALONE = single_rank_group("world")
WEIGHTS = ("param",)
"""Enough where a test saves often."""


class Killed(BaseException):
    """Stands for kill -9: no handler for errors sees it."""


class Disk:
    """Every call that changes the disk, counted; from call number `at` on it raises instead."""

    def __init__(self, error: Callable[[], BaseException], *, at: int, lasting: bool) -> None:
        self.error, self.at, self.lasting, self.calls = error, at, lasting, 0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.at or (self.lasting and self.calls > self.at):
                raise self.error()
            return call(*args, **options)

        return counted


@pytest.fixture
def break_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A context in which the disk fails at its n-th change."""

    def context(disk: Disk) -> pytest.MonkeyPatch:
        patch = pytest.MonkeyPatch()
        for name in ("rename", "replace", "fsync", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, disk.wrap(getattr(os, name)))
        patch.setattr(storage, "open_new", disk.wrap(storage.open_new))
        patch.setattr(save, "_write_values", disk.wrap(save._write_values))  # once per box
        return patch

    return context


def saves(tmp_path: Path) -> list[str]:
    return [name for name in storage.list_names(tmp_path) if name.startswith("step_")]


def weights(path: Path) -> torch.Tensor:
    return open_checkpoint(path).read("model.embed.weight")


def test_save_reports_path_size_and_rate(tmp_path: Path, tiny: SimpleNamespace) -> None:
    report = tiny.save_alone(tmp_path / "new" / "checkpoints", 100)
    assert report.path == tmp_path / "new" / "checkpoints" / "step_0000100"
    assert report.nbytes == sum(
        f.stat().st_size for f in report.path.iterdir() if f.name != "manifest.json"
    )
    assert str(report).startswith("step_0000100: ") and str(report).endswith("B/s)")
    assert (report.path.parent / "latest").read_text() == "step_0000100\n"
    assert saves(report.path.parent) == ["step_0000100"]
    assert (report.path / "config.yaml").read_text() == "name: tiny\n"


def test_plain_dcp_reads_the_folder(tmp_path: Path, tiny: SimpleNamespace) -> None:
    model = tiny.model()
    path = tiny.save(tmp_path, 1, tiny.cut(model, 3, 2))
    wanted = {
        ("model." if r == "param" else f"optimizer.{r}.") + n: t for (r, n), t in model.items()
    }
    got = {key: torch.zeros_like(tensor) for key, tensor in wanted.items()}
    dcp.load(got, checkpoint_id=path, no_dist=True)
    assert all(torch.equal(got[key], wanted[key]) for key in wanted)
    dcp_to_torch_save(path, tmp_path / "all.pt")
    everything = torch.load(tmp_path / "all.pt", weights_only=True)
    assert everything.keys() == wanted.keys()
    assert all(torch.equal(everything[key], wanted[key]) for key in wanted)


def test_equal_tensors_give_equal_bytes(tmp_path: Path, tiny: SimpleNamespace) -> None:
    first, second = (tiny.save_alone(tmp_path, step).path for step in (1, 2))
    assert (first / "__0_0.distcp").read_bytes() == (second / "__0_0.distcp").read_bytes()
    other = tiny.save_alone(tmp_path, 3, seed=1).path
    assert (first / "__0_0.distcp").read_bytes() != (other / "__0_0.distcp").read_bytes()


def test_large_boxes_are_divided(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "BOX_NBYTES", 48)
    model = tiny.model()
    checkpoint = open_checkpoint(tiny.save(tmp_path, 1, tiny.cut(model, 1, 1)))
    # 7 rows of 24 bytes, by twos
    assert len(checkpoint.manifest.tensors["optimizer.master.embed.weight"].boxes) == 4
    # 7 rows of 12 bytes, by fours
    assert len(checkpoint.manifest.tensors["model.embed.weight"].boxes) == 2
    assert torch.equal(
        checkpoint.read("optimizer.master.embed.weight"), model["master", "embed.weight"]
    )


def test_only_the_slice_is_written_and_not_the_storage_behind_it(tmp_path: Path) -> None:
    behind = torch.zeros(1_000_000)
    entry = CheckpointEntry(Shard.full("w", (10,)), "param", behind[5:15])
    report = save_checkpoint(tmp_path, 1, [entry], {}, ALONE, config_text="")
    assert report.nbytes < 10_000


def test_scalars_empty_tensors_and_unusual_names_round_trip(tmp_path: Path) -> None:
    tensors = {
        "scale": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "größe/..\n0": torch.ones(2),
        "n" * 300: torch.ones(1),
    }
    entries = [
        CheckpointEntry(Shard.full(name, tuple(x.shape)), "param", x) for name, x in tensors.items()
    ]
    save_checkpoint(tmp_path, 10**7, entries, {"a": [1, 2.5, None, "ü"]}, ALONE, config_text="ü")
    latest = find_latest(tmp_path)
    assert latest is not None and latest.name == "step_10000000"
    checkpoint = open_checkpoint(latest)
    assert (checkpoint.step, checkpoint.state, checkpoint.config_text) == (
        10**7,
        {"a": [1, 2.5, None, "ü"]},
        "ü",
    )
    assert all(torch.equal(checkpoint.read(f"model.{name}"), x) for name, x in tensors.items())
    assert verify_checkpoint(latest) == []


def test_saving_a_step_again_replaces_it(tmp_path: Path, tiny: SimpleNamespace) -> None:
    for seed in (0, 1):
        path = tiny.save_alone(tmp_path, 100, seed=seed).path
    assert saves(tmp_path) == ["step_0000100"]
    assert torch.equal(weights(path), tiny.model(1)["param", "embed.weight"])


def test_older_checkpoints_are_deleted_and_reported(tmp_path: Path, tiny: SimpleNamespace) -> None:
    for step in (1, 2):
        tiny.save_alone(tmp_path, step)
    report = tiny.save_alone(tmp_path, 3, keep=1, keep_every=2)
    assert report.removed == (tmp_path / "step_0000001",)
    assert saves(tmp_path) == ["step_0000002", "step_0000003"]


def moments(
    tmp_path: Path, tiny: SimpleNamespace, context: Callable[..., Any], **how: Any
) -> Iterator[tuple[int, Path, bool]]:
    """Save step 200 beside step 100, again and again, the disk failing one change later each
    time."""
    start = tmp_path / "start"
    tiny.save_alone(start, 100, seed=0, roles=WEIGHTS)
    if how["again"]:
        tiny.save_alone(start, 200, seed=1, roles=WEIGHTS)
    for at in range(1, 1000):
        folder = tmp_path / str(at)
        shutil.copytree(start, folder)
        disk = Disk(how["error"], at=at, lasting=how["lasting"])
        patch = context(disk)
        try:
            tiny.save_alone(folder, 200, seed=2, roles=WEIGHTS, keep=1)
            saved = True
        except (Killed, CheckpointError):
            saved = False
        finally:
            patch.undo()
        yield at, folder, saved
        if disk.calls < at:
            return
    raise AssertionError("never got through")


@pytest.mark.parametrize("again", [False, True])
def test_killed_at_any_change_of_the_disk_the_newest_complete_checkpoint_loads(
    tmp_path: Path, tiny: SimpleNamespace, break_disk: Callable[..., Any], again: bool
) -> None:
    seen = set()
    for at, folder, saved in moments(
        tmp_path, tiny, break_disk, error=Killed, lasting=True, again=again
    ):
        for swept in (False, True):
            if swept:
                remove_leftovers(folder)
            latest = find_latest(folder)
            assert latest is not None and verify_checkpoint(latest) == [], at
            seed = next(
                s
                for s in range(3)
                if torch.equal(weights(latest), tiny.model(s)["param", "embed.weight"])
            )
            assert seed == 2 if saved else seed >= int(again), (at, saved, seed)
            seen.add(seed)
        assert all("." not in name for name in storage.list_names(folder)), at
        report = tiny.save_alone(folder, 300, roles=WEIGHTS, keep=1)
        assert saves(folder) == [report.path.name]
    assert at > 25, "the disk was watched"
    assert seen == ({1, 2} if again else {0, 2})


@pytest.mark.parametrize("again,lasting", [(False, False), (True, False), (True, True)])
def test_write_error_at_any_point_leaves_no_files(
    tmp_path: Path,
    tiny: SimpleNamespace,
    break_disk: Callable[..., Any],
    again: bool,
    lasting: bool,
) -> None:
    def error() -> OSError:
        return OSError(5, "Input/output error")

    for at, folder, saved in moments(
        tmp_path, tiny, break_disk, error=error, lasting=lasting, again=again
    ):
        latest = find_latest(folder)
        assert latest is not None and verify_checkpoint(latest) == [], at
        seed = next(
            s
            for s in range(3)
            if torch.equal(weights(latest), tiny.model(s)["param", "embed.weight"])
        )
        assert seed == 2 if saved else seed >= int(again), (at, saved, seed)
        if not lasting and not saved:
            assert (folder / "step_0000200").exists() or not again, at
            left = [name for name in saves(folder) if "." in name]
            # An overwrite whose renames may not be on the disk keeps the old one until the next
            # start.
            assert left == [] or (
                again and [name[:17] for name in left] == ["step_0000200.old-"]
            ), at


def test_each_file_is_synced_before_the_next_one_depends_on_it(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save_alone(tmp_path, 1)
    calls: list[tuple[str, str]] = []

    def recorded(name: str, call: Callable[..., Any], first: Any, *rest: Any) -> Any:
        calls.append(
            (name, Path(getattr(first, "name", first) if name == "sync_file" else first).name)
        )
        return call(first, *rest)

    for name in ("open_new", "sync_file", "sync_folder", "rename", "remove_tree", "replace_file"):
        monkeypatch.setattr(storage, name, partial(recorded, name, getattr(storage, name)))
    tiny.save_alone(tmp_path, 1)
    staging = next(name for call, name in calls if call == "rename" and ".tmp-" in name)
    old = next(name for call, name in calls if call == "remove_tree")
    files = [name for call, name in calls if call == "open_new" and "latest" not in name]
    assert files[0] == "__0_0.distcp" and files[-1] == "manifest.json" and ".old-" in old
    assert [
        call for call in calls if call[1].startswith(("__0", "manifest", "step", tmp_path.name))
    ] == [
        ("open_new", "__0_0.distcp"),
        ("sync_file", "__0_0.distcp"),
        ("open_new", "manifest.json"),
        ("sync_file", "manifest.json"),
        ("sync_folder", staging),
        ("rename", "step_0000001"),
        ("rename", staging),
        ("sync_folder", tmp_path.name),
        ("remove_tree", old),
        ("sync_folder", tmp_path.name),
    ]


def test_full_disk_ends_the_save_with_a_message_and_keeps_the_previous_one(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.save_alone(tmp_path, 100)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # files cannot grow beyond: a real refusal by the system
    resource.setrlimit(resource.RLIMIT_FSIZE, (9_000, hard))
    try:
        with pytest.raises(CheckpointError) as raised:
            tiny.save_alone(tmp_path, 200)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    text = str(raised.value)
    assert text.startswith(f"step 200 was not saved to {tmp_path}. OSError: [Errno 27]")
    assert "Free some space, or set checkpoint.keep to a lower number." in text
    assert text.endswith("Earlier checkpoints are untouched; the newest is step_0000100.")
    assert storage.list_names(tmp_path) == ["latest", "step_0000100"]
    assert verify_checkpoint(tmp_path / "step_0000100") == []


class FullFile(io.BytesIO):
    """A file on a disk that has room for `room` bytes more."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: Any) -> int:  # Any: every kind of buffer
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("room", [0, 100, 700, 30_000, 40_300])
def test_disk_full_inside_a_box_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(storage, "open_new", lambda path: FullFile(room))
    entry = CheckpointEntry(Shard.full("w", (10_000,)), "param", torch.zeros(10_000))
    with pytest.raises(OSError, match="No space left on device") as raised:
        save.write_boxes(tmp_path, 0, [entry])
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(
        CheckpointError, match=r"Errno 28\] No space left.*Free some space, or set checkpoint.keep"
    ):
        save_checkpoint(tmp_path, 1, [entry], {}, ALONE, config_text="")


def test_file_size_limit_inside_a_tensor_is_reported(tmp_path: Path) -> None:
    entry = CheckpointEntry(Shard.full("w", (100_000,)), "param", torch.zeros(100_000))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (102_400, hard))  # ulimit -f 100
    try:
        with pytest.raises(
            CheckpointError, match=r"File too large.*Free some space, or set checkpoint.keep"
        ):
            save_checkpoint(tmp_path, 1, [entry], {}, ALONE, config_text="")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert storage.list_names(tmp_path) == []


def test_too_little_space_is_noticed_before_anything_is_written(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "free_nbytes", lambda _: 12_345)
    monkeypatch.setattr(save, "write_boxes", None)  # never reached
    with pytest.raises(
        CheckpointError,
        match=r"Not enough space: the checkpoint needs \d+ kB, and .* has 12 kB free. Free",
    ):
        tiny.save_alone(tmp_path, 100)
    assert storage.list_names(tmp_path) == []


def test_all_ranks_save_together_and_any_rank_can_read_it_all(
    tmp_path: Path, tiny: SimpleNamespace, run_threads: Callable[..., list[Any]]
) -> None:
    model = tiny.model()
    ranks = tiny.cut(model, 2, 2)

    def work(world: Group) -> Any:
        return save_checkpoint(
            tmp_path,
            7,
            ranks[world.rank],
            {"a": 1},
            world,
            config_text="",
            retention=Retention(keep=2),
        )

    reports = run_threads(4, work)
    assert {report.path for report in reports} == {tmp_path / "step_0000007"}
    checkpoint = open_checkpoint(tmp_path / "step_0000007")
    assert checkpoint.manifest.world_size == 4
    assert all(
        torch.equal(
            checkpoint.read(f"model.{name}" if role == "param" else f"optimizer.{role}.{name}"),
            tensor,
        )
        for (role, name), tensor in model.items()
    )


def test_failure_of_one_rank_is_raised_on_all_and_keeps_the_previous_one(
    tmp_path: Path,
    tiny: SimpleNamespace,
    run_threads: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tiny.save_alone(tmp_path, 1)
    ranks = tiny.cut(tiny.model(), 2, 1)
    write = save.write_boxes

    def fail_on_1(staging: Path, rank: int, entries: Any, *others: Any) -> Any:
        if rank == 1:
            raise OSError(28, "No space left on device")
        return write(staging, rank, entries, *others)

    monkeypatch.setattr(save, "write_boxes", fail_on_1)
    errors = run_threads(
        2,
        lambda world: save_checkpoint(tmp_path, 2, ranks[world.rank], {}, world, config_text=""),
    )
    assert {type(error) for error in errors} == {CheckpointError}
    assert len({str(error) for error in errors}) == 1
    assert "rank 1: OSError: [Errno 28] No space left on device. Free some space" in str(errors[0])
    assert storage.list_names(tmp_path) == ["latest", "step_0000001"]


def test_state_that_differs_between_ranks_is_rejected(
    tmp_path: Path, tiny: SimpleNamespace, run_threads: Callable[..., list[Any]]
) -> None:
    ranks = tiny.cut(tiny.model(), 2, 1)
    errors = run_threads(
        2,
        lambda world: save_checkpoint(
            tmp_path, 2, ranks[world.rank], {"step": 2, "loader": world.rank}, world, config_text=""
        ),
    )
    assert all("state loader differs between ranks 0 and 1" in str(error) for error in errors)
    assert storage.list_names(tmp_path) == []


@pytest.mark.parametrize(
    "fault,text",
    [
        ("hole", r"model.w: \[2:4, 0:3\] of \[4, 3\] is not written"),
        ("twice", r"model.w: \[0:2, 0:3\] of \[4, 3\] is written twice"),
        ("dtype", r"model.w: \[4, 3\] float32 on one rank, \[4, 3\] bfloat16 on another"),
    ],
)
def test_tensor_not_written_exactly_once_is_rejected(tmp_path: Path, fault: str, text: str) -> None:
    shards = [
        Shard.full("w", (4, 3)).split_dim(0, [2, 2], rank, ("tp",))
        for rank in (0, 0 if fault == "twice" else 1)
    ]
    dtypes = torch.float32, torch.bfloat16 if fault == "dtype" else torch.float32
    entries = [
        CheckpointEntry(
            replace(shard, dtype=FORMATS[dtype]), "param", torch.ones(2, 3, dtype=dtype)
        )
        for shard, dtype in zip(shards, dtypes)
    ]
    if fault == "hole":
        entries[1] = CheckpointEntry(shards[1], "param", entries[1].tensor, is_writer=False)
    storage.make_folder(tmp_path / "staging")
    parts = [
        save.write_boxes(tmp_path / "staging", rank, [entry]) for rank, entry in enumerate(entries)
    ]
    with pytest.raises(
        CheckpointError, match=f"1 tensors are not written exactly once.*\n  {text}"
    ):
        save.commit(tmp_path / "staging", 1, parts, {}, "")
    assert find_latest(tmp_path) is None


LOOP = """
import sys, pathlib, torch
from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.commit import Retention
from megalith.checkpoint.save import save_checkpoint
from megalith.parallel.group import single_rank_group
from megalith.plan.shards import Shard
for step in range(1, 100_000):
    entries = [CheckpointEntry(Shard.full(f"w{n}", (64, 1024)), "param", torch.full((64, 1024), float(step))) for n in range(8)]
    save_checkpoint(pathlib.Path(sys.argv[1]), step, entries, {}, single_rank_group("world"), config_text="", retention=Retention(keep=2))
    print(step, flush=True)
"""


def test_killed_process_leaves_a_complete_checkpoint(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOOP, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for _ in range(3):
            done = int(process.stdout.readline())
        time.sleep(0.007)
        process.send_signal(signal.SIGKILL)
        done = max([done, *(int(line) for line in process.stdout)])
    latest = find_latest(tmp_path)
    assert latest is not None and verify_checkpoint(latest) == []
    checkpoint = open_checkpoint(latest)
    assert checkpoint.step in (done, done + 1)
    assert all(
        torch.equal(checkpoint.read(key), torch.full((64, 1024), float(checkpoint.step)))
        for key in checkpoint.manifest.tensors
    )
    remove_leftovers(tmp_path)
    assert all("." not in name for name in storage.list_names(tmp_path))


FORK_AND_KILL = """
import itertools, os, pathlib, random, signal, sys, time
import torch
from megalith import storage
from megalith.checkpoint.commit import Retention, remove_leftovers
from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.load import find_latest, open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.parallel.group import single_rank_group
from megalith.plan.shards import Shard

torch.set_num_threads(1)
folder = pathlib.Path(sys.argv[1])
progress = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)  # value of the last complete save
group, draw = single_rank_group("world"), random.Random(15)

def save(step, value):
    entries = [
        CheckpointEntry(Shard.full(f"w{n}", (32, 64)), "param", torch.full((32, 64), value))
        for n in range(4)
    ]
    save_checkpoint(folder, step, entries, {}, group, config_text="", retention=Retention(keep=2))
    os.pwrite(progress, f"{value:16}".encode(), 0)

def save_for_ever(first):
    for step in itertools.count(first):
        save(step, float(step))
        save(step, step + 0.5)  # replaces it

last, last_value, in_a_save = 0, 0.5, 0
began = time.monotonic()
for _ in range(5):
    save(0, 0.5)
seconds = (time.monotonic() - began) / 5
for number in range(int(sys.argv[3])):
    pid = os.fork()
    if pid == 0:
        save_for_ever(last + 1)
    time.sleep(draw.uniform(0.0, 2 * seconds))
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    done = float(os.pread(progress, 16, 0))
    in_a_save += any("." in name for name in storage.list_names(folder))
    remove_leftovers(folder)
    assert all("." not in name for name in storage.list_names(folder))
    checkpoint = open_checkpoint(find_latest(folder))
    values = {float(each) for key in checkpoint.manifest.tensors for each in
              checkpoint.read(key).unique()}
    assert len(values) == 1, values
    (value,) = values
    following = done + 0.5 if done > last_value else last + 1  # the save that the child may be in
    assert value in (done, following), (value, done, last_value)
    assert value in (checkpoint.step, checkpoint.step + 0.5)
    last, last_value = checkpoint.step, value
    os.pwrite(progress, f"{value:16}".encode(), 0)
print(last, in_a_save)
"""


@pytest.mark.slow  # 200 processes
def test_200_killed_processes_leave_a_complete_checkpoint() -> None:
    """The older or the newer checkpoint loads bit for bit, also while a step is replaced. In
    memory, because the time of a save on a disk is that of its syncs."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        words = [f"{folder}/saves", f"{folder}/progress", "200"]
        command = [sys.executable, "-c", FORK_AND_KILL, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    last, in_a_save = map(int, done.stdout.split())
    assert last > 20 and in_a_save > 50, done.stdout


def _save_and_load_on_live_ranks(rank: int, world: int, folder: str) -> tuple[str, bool, str]:
    import torch.distributed as dist

    group = Group(("world",), tuple(range(world)), rank, dist.group.WORLD)
    values = torch.arange(21.0).view(7, 3)
    shard = Shard.full("w", (7, 3)).split_dim(0, [4, 3], rank, ("tp",))
    entry = CheckpointEntry(shard, "param", values[slice(*shard.box[0])].clone())
    report = save_checkpoint(
        Path(folder), 5, [entry], {"a": 1}, group, config_text="", retention=Retention(keep=1)
    )
    turned = Shard.full("w", (7, 3)).split_dim(1, [1, 2], rank, ("tp",))
    got = CheckpointEntry(turned, "param", torch.zeros(7, 1 + rank))
    open_checkpoint(report.path).load_into([got], group)
    try:
        bad = [entry] if rank == 0 else [CheckpointEntry(Shard.full("w", (7, 3)), "param", values)]
        save_checkpoint(
            Path(folder), 6, bad, {}, group, config_text="", retention=Retention(keep=1)
        )
        error = ""
    except CheckpointError as caught:
        error = str(caught)
    return report.path.name, torch.equal(got.tensor, values[:, slice(*turned.box[1])]), error


def test_live_ranks_save_load_and_fail_together(tmp_path: Path) -> None:
    results = run_ranks(_save_and_load_on_live_ranks, 2, str(tmp_path))
    assert [result[:2] for result in results] == [("step_0000005", True)] * 2
    assert (
        results[0][2] == results[1][2]
        and "model.w: [0:4, 0:3] of [7, 3] is written twice" in results[0][2]
    )
    assert saves(tmp_path) == ["step_0000005"]


def _save_from_a_thread(rank: int, world: int, folder: Path, fails: bool) -> str:
    """Save on two ranks while the tensors change: a thread writes host copies of them."""
    group = Group(("world",), tuple(range(world)), rank, handle=torch.distributed.group.WORLD)
    weight = torch.arange(6.0) + rank
    entries = [
        CheckpointEntry(Shard.full(f"w{each}", (6,)), "param", weight, each == rank)
        for each in range(world)
    ]
    snapshot = take_snapshot(folder, 3, entries, {"step": 3}, group, copy=True)
    weight.zero_()  # the next steps, before anything is written

    def write() -> save.WrittenFiles:
        if fails and rank == 1:
            raise OSError(errno.ENOSPC, "planted")
        return write_snapshot(snapshot)

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        try:
            report = commit_snapshot(snapshot, written.result, group, config_text="")
        except CheckpointError as error:
            return str(error)
    return report.path.name


def test_snapshot_is_written_by_a_thread_while_the_tensors_change(tmp_path: Path) -> None:
    saved = run_ranks(_save_from_a_thread, 2, tmp_path, False)
    assert saved == ["step_0000003", "step_0000003"]
    checkpoint = open_checkpoint(tmp_path / "step_0000003")
    for rank in range(2):
        assert checkpoint.read(f"model.w{rank}").tolist() == [value + rank for value in range(6)]


def test_failed_write_of_a_thread_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_save_from_a_thread, 2, tmp_path, True)
    assert first == second
    assert first.startswith(f"step 3 was not saved to {tmp_path}. rank 1: OSError")
    assert not list(tmp_path.glob("step_*"))
