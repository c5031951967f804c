"""Local ranks start and stop together, and a failure is reported once, its cause first."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megalith.errors import RankError, UserError
from megalith.launch import launcher as launch_module
from megalith.launch.launcher import in_worker, run_workers, threads_per_rank

ROOT = Path(__file__).resolve().parent.parent.parent

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
from megalith.errors import ConfigError
from megalith.launch.launcher import worker_main

rank, here = int(os.environ["RANK"]), Path(sys.argv[2])

def report_environment():
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
    values = [os.environ[name] for name in [*names, "MASTER_PORT"]]
    (here / f"environment{rank}.json").write_text(json.dumps(values))
    print(f"out {rank}"); print(f"err {rank}", file=sys.stderr)
    return 0

def wait():
    (here / f"pid{rank}").write_text(str(os.getpid()))
    time.sleep(60)
    return 0

def stubborn():
    if rank == 1:
        raise ValueError("first")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return wait()

def fail():
    print(f"a word from rank {rank}")
    if rank == 1:
        raise ValueError("the real reason")
    time.sleep(0.3)
    raise RuntimeError("[gloo] Connection closed by peer") if rank == 0 else KeyError("later")

def die():
    if rank == 1:
        print("last words"); sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    return wait()

def refuse():
    raise ConfigError("parallel.tp=3 is odd. Set it to 2.")

def refuse_one():
    if rank == 1:
        raise ConfigError("data.path=x: no such file here. Use another.")
    return wait()

def crash():
    if rank == 1:
        import ctypes
        ctypes.string_at(0)
    return wait()

def stop():
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    signal.signal(signal.SIGINT, lambda *_: stopped.append(1))
    signal.signal(signal.SIGHUP, lambda *_: stopped.append(1))
    (here / f"pid{rank}").write_text(str(os.getpid()))
    while not stopped or "never" in sys.argv:
        time.sleep(0.02)
    time.sleep(0.2)
    (here / f"saved{rank}").write_text(str(len(stopped)))
    return 75

def hang():
    import threading
    from megalith.launch.launcher import Failure
    from megalith.launch.launcher import end_rank
    if rank == 0:
        failure = Failure(0, "rank 1 did not arrive", "rank 1 did not arrive\\nlook there", 5, is_report=True)
    else:
        failure = Failure(1, "stopped in a hang that rank 0 reports", "the same", 4)
    threading.Thread(target=end_rank, args=(failure, 0.2), kwargs={"environment": os.environ}).start()
    return wait()

def translate():
    try:
        return wait()
    except KeyboardInterrupt:
        raise ImportError("a library failed to load") from None

def lose_peer():
    if rank == 0:
        return wait()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (here / "pid1").write_text(str(os.getpid()))
    while not list(here.glob("megalith-launch-*/rank0.json")):
        time.sleep(0.02)
    raise RuntimeError("[gloo] Connection closed by peer")

def break_on_signal():
    def fail_to_save(*_):
        raise OSError("No space left on device")
    signal.signal(signal.SIGINT, fail_to_save)
    return wait()

def mixed():
    return 75 if rank else 0

def suspect():
    return 76

if sys.argv[1] == "start_slowly":
    (here / f"pid{rank}").write_text(str(os.getpid()))
    time.sleep(0.5)
    start_slowly = wait

sys.exit(worker_main(globals()[sys.argv[1]], os.environ))
"""

PARENT = """
import sys
from megalith.errors import RankError
from megalith.launch.launcher import run_workers
try:
    sys.exit(run_workers(sys.argv[3:], int(sys.argv[2]), command=[sys.executable, sys.argv[1]]))
except RankError as error:
    print(error)
    sys.exit(1)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that behaves, as one rank, as its first argument says."""
    file = tmp_path_factory.mktemp("script") / "worker.py"
    file.write_text(WORKER)
    return file


def launch(script: Path, how: str, here: Path, nproc: int = 3, **environment: str) -> int:
    """`run_workers` with that program."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {"PYTHONPATH": str(ROOT), **environment}
    return run_workers(
        [how, str(here)], nproc, command=[sys.executable, str(script)], environment=variables
    )


def until(condition: Iterator[bool]) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + 30
    while not next(condition):
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def started(here: Path, nproc: int) -> list[int]:
    """The process numbers of ranks that wait, once all do."""
    files = [here / f"pid{rank}" for rank in range(nproc)]
    until(all(file.exists() and file.read_text() for file in files) for _ in iter(int, 1))
    return [int(file.read_text()) for file in files]


def gone(pid: int) -> bool:
    """Whether a process has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_every_process_gets_its_rank_and_its_share_of_the_cores(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.launch.launcher.available_cores", lambda: 7)
    assert launch(script, "report_environment", tmp_path) == 0
    environment = [
        json.loads((tmp_path / f"environment{rank}.json").read_text()) for rank in range(3)
    ]
    assert [line[:6] for line in environment] == [
        [str(rank), "3", str(rank), "3", "127.0.0.1", "2"] for rank in range(3)
    ]
    assert len({line[6] for line in environment}) == 1


def test_a_number_of_threads_that_the_user_chose_is_kept(script: Path, tmp_path: Path) -> None:
    assert launch(script, "report_environment", tmp_path, 1, OMP_NUM_THREADS="5") == 0
    assert json.loads((tmp_path / "environment0.json").read_text())[5] == "5"


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (2, 4, 1), (1, 1, 1)]
)
def test_every_rank_gets_at_least_one_core(cores: int, ranks: int, threads: int) -> None:
    assert threads_per_rank(cores, ranks) == threads


def test_only_rank_zero_prints(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    launch(script, "report_environment", tmp_path)
    assert capfd.readouterr() == ("out 0\n", "err 0\n")


def test_rank_variables_mark_a_worker() -> None:
    assert not in_worker({"PATH": "x"})
    assert in_worker({"RANK": "0"})
    assert in_worker({"MASTER_ADDR": "here"})


def test_the_first_traceback_comes_first_and_the_others_in_a_line_each(
    script: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankError) as caught:
        launch(script, "fail", tmp_path)
    text = str(caught.value)
    assert text.startswith("rank 1 failed first:\nTraceback (most recent call last):\n")
    head, tail = text.split("\nthen:\n")
    assert "worker_main" not in head
    assert head.endswith("ValueError: the real reason")
    later = (
        "  rank 2: KeyError: 'later'\n  rank 0: RuntimeError: [gloo] Connection closed by peer\n"
    )
    assert tail == f"{later}output of rank 1:\na word from rank 1"
    assert "Traceback" not in capfd.readouterr().err


def test_a_killed_rank_ends_the_others_within_seconds(script: Path, tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        launch(script, "die", tmp_path)
    assert time.monotonic() - start < 10
    assert str(caught.value) == (
        "rank 1 was killed by signal 9 (SIGKILL)\nthen:\n  rank 0: was ended because of it\n"
        "  rank 2: was ended because of it\noutput of rank 1:\nlast words"
    )
    assert all(gone(int(file.read_text())) for file in tmp_path.glob("pid*"))


def test_rank_that_ignores_sigterm_is_killed_after_the_grace_period(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.launch.launcher.NOTICE_SECONDS", 0.1)
    monkeypatch.setattr("megalith.launch.launcher.GRACE_SECONDS", 0.5)
    with pytest.raises(
        RankError, match=r"ValueError: first\nthen:\n  rank 0: was ended because of it"
    ):
        launch(script, "stubborn", tmp_path, 2)
    assert all(gone(int(file.read_text())) for file in tmp_path.glob("pid*"))


def test_crash_outside_python_is_reported_with_its_location(script: Path, tmp_path: Path) -> None:
    with pytest.raises(
        RankError,
        match=r"^rank 1 was killed by signal 11 \(SIGSEGV\)[\s\S]*File .*worker.py.* in crash",
    ):
        launch(script, "crash", tmp_path, 2)


def test_user_error_is_printed_once_for_all_ranks(script: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        launch(script, "refuse", tmp_path)
    assert str(caught.value) == "parallel.tp=3 is odd. Set it to 2."


def test_user_error_of_one_rank_names_the_rank(script: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        launch(script, "refuse_one", tmp_path)
    assert str(caught.value) == "rank 1: data.path=x: no such file here. Use another."


def test_job_has_stopped_if_some_ranks_stopped_after_a_save(script: Path, tmp_path: Path) -> None:
    assert launch(script, "mixed", tmp_path, 2) == 75


def test_job_of_a_suspect_machine_has_not_failed(script: Path, tmp_path: Path) -> None:
    assert launch(script, "suspect", tmp_path, 2) == 76


def parent(
    script: Path,
    how: str,
    here: Path,
    *more: str,
    hangup: signal.Handlers = signal.SIG_DFL,
    temporary: Path | None = None,
) -> "subprocess.Popen[str]":
    """Another process that runs two ranks, for us to send signals to; `hangup`: how it treats
    SIGHUP, also when the tests themselves run under `nohup`; `temporary`: its TMPDIR."""
    previous = signal.signal(signal.SIGHUP, hangup)  # inherited by the process
    try:
        return subprocess.Popen(
            [sys.executable, "-c", PARENT, str(script), "2", how, str(here), *more],
            # a killed launcher leaves its folder
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary or here)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_once_and_the_ranks_save_and_stop(
    script: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with parent(script, "stop", tmp_path) as process:
        started(tmp_path, 2)
        process.send_signal(number)
        assert process.wait(timeout=30) == 75
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_ctrl_c_which_a_terminal_sends_to_a_whole_process_group_reaches_each_rank_once(
    script: Path, tmp_path: Path
) -> None:
    with parent(script, "stop", tmp_path) as process:
        started(tmp_path, 2)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 75
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_a_second_signal_ends_ranks_that_do_not_stop(script: Path, tmp_path: Path) -> None:
    with parent(script, "stop", tmp_path, "never") as process:
        pids = started(tmp_path, 2)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        assert process.stdout is not None
        assert process.stdout.read() == ""
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_there_is_anything_to_save_is_an_interruption(
    script: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with parent(script, "wait", tmp_path) as process:
        started(tmp_path, 2)
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
        assert process.stdout is not None
        assert process.stdout.read() == ""


@pytest.mark.parametrize("how", ["start_slowly", "translate", "lose_peer"])
def test_interrupt_while_ranks_start_ends_with_130_and_one_line(
    script: Path, tmp_path: Path, how: str
) -> None:
    with parent(script, how, tmp_path) as process:
        pids = started(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=30)
        assert (process.returncode, printed) == (130, ("", "megalith: interrupted by SIGINT\n"))
    assert all(gone(pid) for pid in pids)


def test_failed_save_after_a_signal_is_reported_as_an_error(script: Path, tmp_path: Path) -> None:
    with parent(script, "break_on_signal", tmp_path) as process:
        started(tmp_path, 2)
        process.send_signal(signal.SIGINT)
        printed = process.communicate(timeout=30)[0]
        assert process.returncode == 1 and "OSError: No space left on device" in printed


def test_hangup_ignored_by_nohup_stays_ignored(script: Path, tmp_path: Path) -> None:
    with parent(script, "stop", tmp_path, hangup=signal.SIG_IGN) as process:
        started(tmp_path, 2)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 75
    assert [(tmp_path / f"saved{rank}").read_text() for rank in (0, 1)] == ["1", "1"]


def test_ranks_do_not_outlive_a_launcher_that_is_killed(script: Path, tmp_path: Path) -> None:
    with parent(script, "wait", tmp_path) as process:
        pids = started(tmp_path, 2)
        process.kill()
        until(all(gone(pid) for pid in pids) for _ in iter(int, 1))


def test_next_launch_removes_the_folder_of_a_killed_launcher(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with parent(script, "wait", tmp_path) as killed:
        started(tmp_path, 2)
        killed.kill()
    (abandoned,) = tmp_path.glob("megalith-launch-*")
    alive_place = tmp_path / "alive"
    alive_place.mkdir()
    with parent(script, "stop", alive_place, temporary=tmp_path) as alive:
        started(alive_place, 2)
        (of_the_living,) = tmp_path.glob("megalith-launch-*")
        assert of_the_living != abandoned
        assert launch(script, "mixed", tmp_path, 2) == 75
        assert of_the_living.is_dir() and not abandoned.exists()
        alive.send_signal(signal.SIGTERM)
        assert alive.wait(timeout=30) == 75
    assert not list(tmp_path.glob("megalith-launch-*"))


def test_launch_keeps_links_files_and_folders_of_other_users(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "target").mkdir()
    (tmp_path / "megalith-launch-link").symlink_to(tmp_path / "target")
    (tmp_path / "megalith-launch-file").touch()
    assert launch(script, "mixed", tmp_path, 1) == 0
    assert (tmp_path / "megalith-launch-link" / "..").exists() and (
        tmp_path / "megalith-launch-file"
    ).exists()
    (tmp_path / "megalith-launch-theirs").mkdir()
    monkeypatch.setattr("os.getuid", lambda: os.stat(tmp_path).st_uid + 1)
    assert launch(script, "mixed", tmp_path, 1) == 0
    assert (tmp_path / "megalith-launch-theirs").exists()


def test_concurrent_launches_never_remove_a_folder_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def use_folders(thread: int) -> None:
        for _ in range(100):
            with launch_module._launch_folder() as folder:
                (folder / "rank0.txt").write_text(str(thread))
                time.sleep(0.0005)
                assert (folder / "rank0.txt").read_text() == str(thread)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use_folders, range(4)))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("how", "code", "summary", "shown"),
    [
        ("fail", 1, "ValueError: the real reason", "Traceback (most recent call last):"),
        (
            "refuse_one",
            1,
            "megalith.errors.ConfigError: data.path=x: no such file here. Use another.",
            "data.path=x: no",
        ),
    ],
)
def test_failure_under_torchrun_is_written_to_its_error_file(
    script: Path, tmp_path: Path, how: str, code: int, summary: str, shown: str
) -> None:
    file = tmp_path / "error.json"
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RANK": "1",
        "TORCHELASTIC_ERROR_FILE": str(file),
    }
    command = [sys.executable, str(script), how, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert done.stderr.rstrip().endswith(summary), "the rank speaks for itself, too"
    record = json.loads(file.read_text())["message"]
    assert record["message"] == summary
    assert record["extraInfo"]["py_callstack"].startswith(shown)


def as_torchrun_starts_it(script: Path, how: str, here: Path, rank: int) -> "subprocess.Popen[str]":
    """One rank, with the error file of torchrun's layout: a folder per rank in one per start."""
    file = here / "attempt_0" / str(rank) / "error.json"
    file.parent.mkdir(parents=True)
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "RANK": str(rank),
        "TORCHELASTIC_ERROR_FILE": str(file),
    }
    command = [sys.executable, str(script), how, str(here)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_torchrun_prints_a_common_user_error_once(script: Path, tmp_path: Path) -> None:
    ranks = [as_torchrun_starts_it(script, "refuse", tmp_path, rank) for rank in range(3)]
    outputs = [process.communicate(timeout=60)[1] for process in ranks]
    assert sum("parallel.tp=3 is odd. Set it to 2." in text for text in outputs) == 1
    assert sorted(len(text) > 0 for text in outputs) == [False, False, True]
    # 1: this script shows the error as Python does
    assert {process.returncode for process in ranks} <= {
        1,
        2,
    }


def test_lost_peer_under_torchrun_is_one_line(script: Path, tmp_path: Path) -> None:
    ranks = [as_torchrun_starts_it(script, "fail", tmp_path, rank) for rank in range(2)]
    lost, first = (process.communicate(timeout=60)[1] for process in ranks)
    assert "ValueError: the real reason" in first
    assert (
        lost.rstrip()
        .splitlines()[-1]
        .endswith(
            "RankError: rank 0 lost another rank, which failed first: RuntimeError: [gloo] "
            "Connection closed by peer"
        )
    )
    assert "in fail" not in lost, "its own traceback would only hide the other's"
    record = json.loads((tmp_path / "attempt_0" / "0" / "error.json").read_text())["message"]
    assert record["message"] == "RuntimeError: [gloo] Connection closed by peer", (
        "for torchrun's own summary"
    )


TORCHRUN = [
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
    "--no-python",
    "--",
]


@pytest.mark.slow  # torchrun imports torch
def test_user_error_under_torchrun_is_printed_once(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, *TORCHRUN, sys.executable, str(script), "refuse", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    before, _, summary = done.stderr.partition("=====")
    assert before.count("ConfigError: parallel.tp=3 is odd. Set it to 2.") == 1
    assert "parallel.tp=3 is odd. Set it to 2." in summary, "torchrun's own account names it, too"


@pytest.mark.slow  # torchrun imports torch
def test_ranks_do_not_outlive_a_torchrun_that_is_killed(script: Path, tmp_path: Path) -> None:
    command = [sys.executable, *TORCHRUN, sys.executable, str(script), "wait", str(tmp_path)]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    )
    try:
        pids = started(tmp_path, 2)
    finally:
        process.kill()
        process.wait()
    until(all(gone(pid) for pid in pids) for _ in iter(int, 1))


def test_rank_may_end_from_any_thread_with_a_report_for_all(script: Path, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        launch(script, "hang", tmp_path, 2)
    assert str(caught.value) == "rank 1 did not arrive\nlook there"
