"""`megalith request`: texts of wrong input, results, and a real job of two ranks."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalith import storage
from megalith.checkpoint.lock import RunLock, lock_run
from megalith.cli import request
from megalith.cli.main import main
from megalith.observe.metrics import read_metrics
from megalith.testing.tiny import tiny_yaml
from megalith.train.request_files import (
    RequestResult,
    RunRequest,
    read_request,
    read_result,
    write_result,
)

PATIENCE_SECONDS = 120.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("")
    return folder


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["request", *words]) == 2
    return capsys.readouterr().err


def test_run_without_a_living_process_is_rejected(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{run} is not running: it has no lock.json. Start it with `megalith train {run}`." in (
        error_of(capsys, str(run), "save")
    )
    with lock_run(run) as lock:
        text = lock.path.read_text()
    fields = json.loads(text)
    (run / "lock.json").write_text(json.dumps(fields | {"started": "1"}))
    assert (
        f"{run} is not running: process {os.getpid()} on {fields['host']}, which holds its lock, "
        "has ended." in error_of(capsys, str(run), "save")
    )
    (run / "lock.json").write_text(json.dumps(fields | {"machine": "other", "host": "node7"}))
    os.utime(run / "lock.json", (1e9, 1e9))
    error = error_of(capsys, str(run), "save")
    assert f"process {os.getpid()} on node7 was last heard of " in error
    assert "or check that machine." in error
    assert not (run / "requests").exists()


def test_wrong_arguments_are_rejected(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid choice 'sav'" in error_of(capsys, str(run), "sav")
    assert "is not the folder of a run" in error_of(capsys, str(run / "none"), "save")
    error = error_of(capsys, str(run), "save", "--wait", "-1")
    assert "--wait=-1.0 must be at least 0. Use a number of seconds." in error


def test_second_request_is_rejected_until_the_first_is_executed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lock_run(run):
        assert main(["request", str(run), "save"]) == 0
        assert f"{run}: requested to save; process {os.getpid()} on " in capsys.readouterr().out
        assert (
            f"{run}: a request to save is already pending (of process {os.getpid()} on "
            in error_of(capsys, str(run), "save")
        )
        assert main(["request", str(run), "stop", "--json", "--wait", "0"]) == 1
        output = capsys.readouterr()
        assert json.loads(output.out)["status"] == "pending"
        assert "no result after --wait=0 seconds; the request stays pending in" in output.err
    with lock_run(run):  # another job: the request of the earlier one is replaced
        assert main(["request", str(run), "save"]) == 0
        capsys.readouterr()


def test_result_of_the_job_is_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(seconds: float) -> None:
        pending = read_request(run, "evaluate")
        assert pending is not None
        metrics = {"eval_loss": 2.5}
        write_result(
            run, RequestResult(pending.id, "evaluate", "done", 7, "eval_loss 2.5", metrics)
        )

    monkeypatch.setattr(request.time, "sleep", reply)
    with lock_run(run):
        assert main(["request", str(run), "evaluate", "--wait", "9"]) == 0
        assert capsys.readouterr().out == f"{run}: step 7: eval_loss 2.5\n"
        assert main(["request", str(run), "evaluate", "--wait", "9", "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert (document["status"], document["step"]) == ("done", 7)
        assert document["metrics"] == {"eval_loss": 2.5}


def test_end_of_the_job_ends_the_wait(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock: RunLock = lock_run(run)
    monkeypatch.setattr(request.time, "sleep", lambda seconds: lock.release())
    assert main(["request", str(run), "save", "--wait", "9"]) == 1
    assert "the job ended without executing the request" in capsys.readouterr().out
    assert not (run / "requests" / "save.json").exists()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow  # starts a job of two ranks: 10 s on two idle cores
def test_job_of_two_ranks_saves_on_sigusr1_and_stops_on_request(tmp_path: Path) -> None:
    settings = {"train.steps": "3000", "checkpoint.every": "0", "schedule.style": "constant"}
    file = tiny_yaml(tmp_path / "tiny.yaml", settings)
    folder = tmp_path / "run"
    words = [str(file), "--run", str(folder), "--nproc", "2", "--train.sigusr1_action", "save"]
    process = subprocess.Popen([sys.executable, "-m", "megalith", "train", *words])
    try:
        metrics = folder / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and len(read_metrics(metrics)) >= 2)
        process.send_signal(signal.SIGUSR1)
        wait_until(lambda: any((folder / "checkpoints").glob("step_*/manifest.json")))
        assert process.poll() is None
        assert main(["request", str(folder), "stop", "--wait", str(PATIENCE_SECONDS)]) == 0
        assert process.wait(PATIENCE_SECONDS) == 75
    finally:
        process.kill()
    assert 2 <= len(list((folder / "checkpoints").glob("step_*"))) <= 3


def test_result_that_cannot_be_read_is_read_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Network disks report ESTALE while another machine replaces a file."""
    request = RunRequest("1", "save", "lock", 1, "host", 0.0)
    (tmp_path / "requests").mkdir()
    write_result(tmp_path, RequestResult("1", "save", "done", 7, ""))

    def fail(*_: object, **__: object) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "read_bytes", fail)
        assert read_result(tmp_path, request) is None
    result = read_result(tmp_path, request)
    assert result is not None and result.step == 7
