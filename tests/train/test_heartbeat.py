"""A training run of which one rank hangs outside of collectives ends by itself: the rank is found
within the learned timeout of its section."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalith.launch.heartbeat import (
    HeartbeatReader,
    RankHeartbeat,
    Section,
    map_heartbeat,
    read_times,
)
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tiny import tiny_run, tiny_yaml
from megalith.train.callbacks.base import Callback, Outcome, RunView
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

RANK = """
import os, re, signal, sys, time
from contextlib import ExitStack
from megalith.checkpoint import save
from megalith.cli import main
from megalith.data.loader import Loader
from megalith.launch import heartbeat
from megalith.testing import inject

heartbeat.MIN_TIMEOUT_SECONDS = 3.0

def stop(*arguments):
    os.kill(os.getpid(), signal.SIGSTOP)
    inject.hang()

def loop_with_lock(*arguments):
    re.match("(a+)+$", 64 * "a" + "b")

read = Loader.next

def read_slowly(loader):
    time.sleep(2.0)
    return read(loader)

FAULTS = {
    "stop": (Loader, "next", 12, stop),
    "loop_with_lock": (Loader, "next", 12, loop_with_lock),
    "data": (Loader, "next", 12, inject.hang),
    "save": (save, "write_boxes", 25, inject.hang),
    "slow": (Loader, "next", 12, read_slowly),
}

with ExitStack() as planted:
    if os.environ["RANK"] == "1":
        planted.enter_context(inject.on_call(*FAULTS[sys.argv[1]]))
    sys.exit(main.main(sys.argv[2:]))
"""

PARENT = """
import sys
from megalith.errors import RankError
from megalith.launch.launcher import run_workers
try:
    sys.exit(run_workers(sys.argv[2:], 2, command=[sys.executable, sys.argv[1]]))
except RankError as error:
    print(error)
    sys.exit(1)
"""


def train(tmp_path: Path, how: str) -> tuple[int, str]:
    """Train on two ranks with that fault in rank 1; return the exit code and the output."""
    (tmp_path / "rank.py").write_text(RANK)
    settings = {
        "parallel.dp": "2",
        "parallel.timeout_seconds": "120",
        "train.steps": "30",
        "checkpoint.every": "1",
    }
    file = tiny_yaml(tmp_path / "tiny.yaml", settings)
    words = [str(tmp_path / "rank.py"), how, "train", str(file), "--run", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", PARENT, *words],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow  # each starts two ranks
@pytest.mark.parametrize(
    ("how", "section", "function"),
    [
        ("stop", "step", "stop"),
        ("loop_with_lock", "step", "loop_with_lock"),
        ("data", "step", "hang"),
        ("save", "save", "hang"),
    ],
)
def test_rank_that_hangs_outside_of_collectives_is_the_root_cause(
    tmp_path: Path, how: str, section: str, function: str
) -> None:
    code, output = train(tmp_path, how)
    assert code == 1, output
    expected = rf"rank 1 has made no progress for ([\d.]+) s in section {section}, outside of "
    seconds = re.search(expected, output)
    assert seconds is not None, output
    timeout = re.search(r"\(timeout: ([\d.]+) s\)", output)
    assert timeout is not None and 3.0 <= float(timeout[1]) < 60.0, "it is learned"
    assert float(seconds[1]) < float(timeout[1]) + 5.0
    assert output.index("rank 1 failed first") < output.index(f" in {function}\n")
    assert re.search(r"  rank 0: \w+, heartbeat \d+, last progress", output)
    assert read_times(tmp_path / "run" / "heartbeats.json", 2)["step"].passes > 16


@pytest.mark.slow
def test_slow_rank_is_not_killed(tmp_path: Path) -> None:
    code, output = train(tmp_path, "slow")
    assert code == 0, output


def test_sections_of_a_run_follow_each_other(tmp_path: Path) -> None:
    sections: list[Section | None] = []

    class Recorder(RankHeartbeat):
        def record(self, section: Section | None = None) -> None:
            super().record(section)
            if sections[-1:] != [self.section]:
                sections.append(self.section)

    heartbeat = Recorder(map_heartbeat(HeartbeatReader().fd))
    run = tiny_run({"train.steps": "3", "checkpoint.every": "2", "train.eval_every": "2"})
    folder = RunFolder(tmp_path / "run")
    mesh = build_single_rank_mesh()
    run_training(run, folder, mesh, torch.device("cpu"), show=False, heartbeat=heartbeat)
    text = re.sub(r"(save step )+", "save step ", " ".join(filter(None, sections)))
    twice = "evaluate step save step evaluate step save step"
    assert text == f"start load start step {twice} exit"
    times = read_times(folder.heartbeats, 1)
    assert times["step"].passes > 2 * 6, "one per microbatch, and three more"
    assert set(times) == {"start", "load", "step", "save", "evaluate"}


class Uploads(Callback):
    """Records the section of the heartbeat while results are uploaded."""

    section: Section | None = None

    def on_start(self, run: RunView) -> None:
        self._heartbeat = run.prepared.heartbeat

    def on_end(self, outcome: Outcome) -> None:
        self.section = self._heartbeat.section


def test_end_of_a_run_does_not_belong_to_a_step(tmp_path: Path) -> None:
    """Uploads after the last step may take longer than any step."""
    uploads = Uploads()
    run = tiny_run({"train.steps": "1", "train.eval_steps": "0"})
    mesh, device = build_single_rank_mesh(), torch.device("cpu")
    run_training(run, RunFolder(tmp_path), mesh, device, show=False, callbacks=[uploads])
    assert uploads.section == "exit"
