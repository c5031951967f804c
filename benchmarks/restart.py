"""Time from a killed rank to the next finished step: restart in place against a job restart.

    python benchmarks/restart.py                  4 ranks, each killed in turn, with 4 warm spares
    python benchmarks/restart.py --spares 0       new processes replace dead ranks
    python benchmarks/restart.py --rounds 3 --json

Each round trains the same run once per way, in an order drawn anew, and kills every rank in turn
with SIGKILL, rank 0 included, after the same steps. The time is measured from the kill to the end
of the first step that finishes after it. Losses of all runs are compared bitwise with those of a
run without faults. A job restart is `megalith train --restarts`, without its delays. The kills
follow each other within seconds, faster than used spares are replaced, so there is one for each.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megalith.observe.metrics import read_metrics
from megalith.testing.tiny import tiny_yaml

BAR = 0.5
"""Largest median time of a restart in place, relative to that of a job restart in the same run."""

LAUNCH = """
import sys
from megalith.cli.main import main
from megalith.launch import launcher
launcher.RESTART_DELAYS = (0.0,)
sys.exit(main(sys.argv[1:]))
"""

PROBE = """
import json, os, signal, time
from pathlib import Path
from megalith.train.callbacks.base import Callback

HERE = Path(__file__).parent
FAULTS = json.loads((HERE / "faults.json").read_text())  # step -> rank

def write(name, step):
    with (HERE / "times.txt").open("a") as file:
        file.write(json.dumps([name, step, time.monotonic()]) + "\\n")

class Probe(Callback):
    def before_step(self, step, batches):
        if FAULTS.get(str(step)) == int(os.environ["RANK"]):
            try:
                (HERE / f"killed-{step}").touch(exist_ok=False)
            except FileExistsError:
                return
            write("kill", step)
            os.kill(os.getpid(), signal.SIGKILL)

    def after_step(self, finished, metrics):
        if os.environ["RANK"] == "0":
            write("step", finished.step)
"""


def train(folder: Path, settings: dict[str, str], options: list[str], nproc: int) -> None:
    """Train a run; the probe writes the times of kills and steps to `folder`."""
    file = tiny_yaml(folder / "tiny.yaml", settings)
    words = ["train", str(file), "--run", str(folder / "run"), "--nproc", str(nproc)]
    path = os.pathsep.join([os.getcwd(), str(folder)])
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, *words, "--callback", "probe:Probe", *options],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def read_times(folder: Path) -> list[float]:
    """Return the seconds from each kill to the next finished step."""
    lines = [json.loads(line) for line in (folder / "times.txt").read_text().splitlines()]
    events = sorted(lines, key=lambda line: line[2])
    return [
        next(each[2] for each in events[index:] if each[0] == "step") - event[2]
        for index, event in enumerate(events)
        if event[0] == "kill"
    ]


def read_losses(folder: Path) -> list[tuple[Any, ...]]:
    """Return step, loss and gradient norm of each step."""
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def measure(parent: Path, name: str, options: argparse.Namespace) -> list[float]:
    """Train once in a way; return the seconds after each kill, and check the losses."""
    folder = parent / name
    folder.mkdir()
    faults = {} if name == "undisturbed" else {3 + 2 * rank: rank for rank in range(options.ranks)}
    (folder / "probe.py").write_text(PROBE)
    (folder / "faults.json").write_text(json.dumps(faults))
    settings = {
        "train.steps": str(4 + 2 * options.ranks),
        "train.micro_batch_size": "1",
        "train.eval_every": "1000",
        "checkpoint.every": "0",
        "checkpoint.local.every": "1",
    }
    words = ["--restarts", str(options.ranks)]
    if name == "in_place":
        settings["restart.max_in_place"] = str(options.ranks)
        words = ["--spares", str(options.spares)]
    train(folder, settings, words, options.ranks)
    times = read_times(folder)
    assert len(times) == len(faults), (name, times)
    return times


def main() -> None:
    """Measure and print the ratio; exit with 1 if it exceeds the bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spares", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    draw = random.Random(0)
    times: dict[str, list[float]] = {"in_place": [], "job": []}
    parent = Path(tempfile.mkdtemp(prefix="megalith-restart-"))
    try:
        measure(parent, "undisturbed", options)
        reference = read_losses(parent / "undisturbed")
        for number in range(options.rounds):
            for name in draw.sample(sorted(times), len(times)):
                seconds = measure(parent, name, options)
                assert read_losses(parent / name) == reference, f"{name} changed the losses"
                times[name] += seconds
                print(f"round {number + 1}, {name}: {show(seconds)}", file=sys.stderr, flush=True)
                shutil.rmtree(parent / name)
    finally:
        shutil.rmtree(parent, ignore_errors=True)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["in_place"] / medians["job"]
    result = {"seconds": times, "medians": medians, "ratio": ratio, "spares": options.spares}
    if options.json:
        print(json.dumps(result | {"time": time.strftime("%Y-%m-%d %H:%M")}))
    else:
        print(f"restart in place {medians['in_place']:.2f} s, job restart {medians['job']:.2f} s")
        print(f"ratio {ratio:.2f} (bar {BAR}); losses bitwise equal to the undisturbed run")
    sys.exit(int(ratio > BAR))


def show(seconds: list[float]) -> str:
    """Return the times of ranks 0, 1, ... in a line."""
    return ", ".join(f"rank {rank} {value:.2f} s" for rank, value in enumerate(seconds))


if __name__ == "__main__":
    main()
