"""One run per folder: a second is refused by name, a dead one's place is taken."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megalith.checkpoint import lock
from megalith.checkpoint.lock import NAME, SILENT_S, LockHolder, lock_run
from megalith.errors import CheckpointError

HOLD = (
    "import sys, time, pathlib\n"
    "from megalith.checkpoint.lock import lock_run\n"
    "with lock_run(pathlib.Path(sys.argv[1])):\n"
    "    print('held', flush=True)\n"
    "    time.sleep(60)\n"
)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A live process that holds the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def holder(folder: Path) -> LockHolder:
    return LockHolder(**json.loads((folder / NAME).read_text()))


def write_holder(folder: Path, found: LockHolder, *, silent_s: float = 0.0) -> None:
    (folder / NAME).write_text(json.dumps(asdict(found)))
    then = time.time() - silent_s
    os.utime(folder / NAME, (then, then))


def test_lock_creates_the_folder_and_is_released(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    with lock_run(folder) as lock:
        assert holder(folder).pid == os.getpid()
        lock.check()
    assert list(folder.iterdir()) == []
    lock_run(folder).release()


def test_second_lock_in_this_process_is_rejected(tmp_path: Path) -> None:
    with (
        lock_run(tmp_path),
        pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} on .*Stop that"),
    ):
        lock_run(tmp_path)
    lock_run(tmp_path).release()


def test_lock_of_live_process_is_rejected_and_of_killed_one_taken_over(
    tmp_path: Path, other: subprocess.Popen[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        CheckpointError, match=f"{tmp_path} is in use by process {other.pid} on .*--run"
    ):
        lock_run(tmp_path)
    other.kill()  # not yet collected by its parent: still a number of the kernel, and dead
    deadline = time.monotonic() + 10
    while lock._started(other.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    with lock_run(tmp_path):
        assert holder(tmp_path).pid == os.getpid()
    assert f"taking over the lock of {tmp_path} from process {other.pid}" in caplog.text


def test_reused_process_id_is_another_process(tmp_path: Path) -> None:
    with lock_run(tmp_path):
        result = holder(tmp_path)
    write_holder(tmp_path, replace(result, started=f"{result.started}0"))
    lock_run(tmp_path).release()


def test_lock_of_another_machine_is_rejected_until_heartbeat_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    far = LockHolder("1", "node7", "another boot", 41, "5")
    write_holder(tmp_path, far, silent_s=SILENT_S - 100)
    with pytest.raises(
        CheckpointError, match=r"process 41 on node7, heard of 20 s ago.*run this again in 100 s"
    ):
        lock_run(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    write_holder(tmp_path, far, silent_s=SILENT_S + 5)
    with lock_run(tmp_path):
        assert "taking over" in caplog.text and "41 on node7" in caplog.text


def test_heartbeat_continues_until_another_process_takes_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 0.01)
    with lock_run(tmp_path) as run_lock:
        write_holder(tmp_path, run_lock.holder, silent_s=1000)
        deadline = time.monotonic() + 10
        while lock.measure_silence(tmp_path / NAME) > 500 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert lock.measure_silence(tmp_path / NAME) < 500
        thief = replace(run_lock.holder, id="2", pid=7, host="node9")
        write_holder(tmp_path, thief, silent_s=1000)
        time.sleep(0.05)
        assert lock.measure_silence(tmp_path / NAME) > 500
        with pytest.raises(
            CheckpointError, match=r"lost its lock; lock.json now names process 7 on node9.*--run"
        ):
            run_lock.check()
    assert holder(tmp_path) == thief, "a lock that is not ours is not released"


def test_suspended_process_detects_that_its_lock_was_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "BEAT_S", 1000.0)  # suspended: no heartbeat
    with lock_run(tmp_path) as first:
        first.check()
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(lock, "_machine", lambda: "another boot")
            os.utime(tmp_path / NAME, (0, 0))
            second = lock_run(tmp_path)
        with pytest.raises(CheckpointError) as raised:
            first.check()
        second.check()
        assert str(raised.value) == (
            f"{tmp_path}: this run (process {os.getpid()} on {first.holder.host}) lost its lock; "
            "lock.json now names "
            f"process {os.getpid()} on {first.holder.host}. Only one run may write there: stop the "
            "other one and run "
            f"this again, or choose another folder with --run."
        )
    second.check()
    second.release()


def test_missing_or_unreadable_lock_counts_as_lost(tmp_path: Path) -> None:
    with lock_run(tmp_path / "run") as run_lock:
        run_lock.path.unlink()
        with pytest.raises(
            CheckpointError,
            match=r"lost its lock; lock.json was deleted or overwritten. Only.*--run",
        ):
            run_lock.check()
        run_lock.path.mkdir()
        with pytest.raises(
            CheckpointError, match=r"lock.json cannot be read \(.*Is a directory.*--run"
        ):
            run_lock.check()
        run_lock.path.rmdir()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": 3}'])
def test_incomplete_lock_file_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    lock_run(tmp_path).release()


def test_one_of_many_concurrent_starts_gets_the_lock(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    other.kill()
    other.wait()
    code = HOLD.replace("time.sleep(60)", "sys.stdin.read()")
    command = [sys.executable, "-c", code, str(tmp_path)]
    starts = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)
    ]
    deadline = time.monotonic() + 30
    while sum(start.poll() is None for start in starts) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    # closes the winner's input: it ends
    errors = [start.communicate(timeout=30)[1].decode() for start in starts]
    assert sorted(start.returncode for start in starts) == [0, 1, 1, 1], errors
    assert sum("is in use by process" in text for text in errors) == 3


def test_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file cannot be written to .*--run"):
        lock_run(tmp_path / "file")
