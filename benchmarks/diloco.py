"""Loss of DiLoCo beside that of synchronous training, on the text and the model of the quickstart.

    python benchmarks/diloco.py [--steps 200] [--seeds 3] [--sync-every 20] [--folder FOLDER]

Two replica groups of one process each, with the same samples per step and the same learning rates,
once with gradients summed in every step and once with DiLoCo. Prints the validation loss of each
seed and the ratio of the means; the bar is 1.03.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BAR = 1.03


def prepare_text(folder: Path) -> Path:
    """Prepare the data of the quickstart, without training."""
    data = folder / "data"
    if not (data / "valid.bin").exists():
        from megalith.cli.quickstart import _prepare
        from megalith.data.prepare import find_local_text

        data.mkdir(parents=True, exist_ok=True)
        _prepare(data, find_local_text())
    return data


def train(folder: Path, data: Path, port: int, words: list[str], *, name: str) -> float:
    """Train two groups and return the last validation loss of the first."""
    processes = []
    for group in ("a", "b"):
        settings = [
            *("--run", str(folder / f"{name}-{group}"), "--checkpoint.folder", f"{folder}/{name}"),
            *("--replica_group.coordinator", f"127.0.0.1:{port}", "--replica_group.id", group),
            *("--replica_group.min_groups", "2", "--replica_group.max_groups", "2"),
            *("--data.mock", "false", "--data.train_path", f"{data}/train"),
            *("--data.valid_path", f"{data}/valid", "--tokenizer.kind", "huggingface"),
            *("--tokenizer.path", f"{data}/tokenizer", "--tokenizer.vocab_size", "none"),
            *("--checkpoint.every", "0", "--train.eval_every", "0", "--observe.plots", "false"),
        ]
        command = [sys.executable, "-m", "megalith", "train", "quickstart", *settings, *words]
        log = (folder / f"{name}-{group}.txt").open("w")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
    if codes := [code for process in processes if (code := process.wait())]:
        raise SystemExit(f"{name} failed with {codes}: read {folder}/{name}-*.txt")
    rows = [json.loads(line) for line in (folder / f"{name}-a" / "metrics.jsonl").open()]
    return float([row["eval_loss"] for row in rows if "eval_loss" in row][-1])


def main() -> int:
    """Train all seeds in turn, print the losses, and return 0 if the bar holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sync-every", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="default: temporary")
    parser.add_argument("--outer-lr", default="0.7")
    parser.add_argument("--outer-momentum", default="0.9")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="megalith-diloco-"))
    folder.mkdir(parents=True, exist_ok=True)
    data, losses = prepare_text(folder), {"sync": [0.0] * 0, "diloco": [0.0] * 0}
    diloco = "--replica_group.diloco."
    modes = {
        "sync": ["--replica_group.mode", "sync"],
        "diloco": [
            *("--replica_group.mode", "diloco", f"{diloco}sync_every", str(options.sync_every)),
            *(f"{diloco}outer_lr", options.outer_lr),
            *(f"{diloco}outer_momentum", options.outer_momentum),
        ],
    }
    for seed in range(options.seeds):
        for number, (mode, words) in enumerate(modes.items()):
            port = 29800 + 2 * seed + number
            state = folder / f"coordinator-{mode}-{seed}"
            command = [sys.executable, "-m", "megalith", "coordinate", "--state", str(state)]
            command += ["--port", str(port), "--status-port", "0"]
            coordinator = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            try:
                settings = [*words, "--seed", str(seed), "--train.steps", str(options.steps)]
                losses[mode].append(train(folder, data, port, settings, name=f"{mode}-{seed}"))
            finally:
                coordinator.terminate()
                coordinator.wait()
            print(f"seed {seed}: {mode} {losses[mode][-1]:.4f}", flush=True)
    means = {mode: statistics.mean(values) for mode, values in losses.items()}
    ratio = means["diloco"] / means["sync"]
    print(
        f"{options.steps} steps, H={options.sync_every}: validation loss {means['diloco']:.4f} "
        f"with DiLoCo, {means['sync']:.4f} synchronous, ratio {ratio:.4f} (bar {BAR})"
    )
    return int(ratio > BAR)


if __name__ == "__main__":
    sys.exit(main())
