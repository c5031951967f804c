"""Steps that Muon needs to reach AdamW's final loss, on the text of the quickstart: 6M parameters,
the learning rates of AdamW.

    python benchmarks/learning.py [--steps 600] [--seeds 3] [--folder FOLDER]

Both rules train the same model on the same samples with the same schedule. The first evaluation of
Muon whose validation loss is at most AdamW's last one, interpolated between evaluations, counts;
the bar is 0.9 of the steps, as the mean over the seeds. Muon's schedule still decays to its end, so
a run of that length would reach the loss earlier.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from diloco import prepare_text

BAR = 0.9
RULES = ("adamw", "muon")


def train(
    folder: Path, data: Path, name: str, rule: str, settings: Sequence[str]
) -> list[tuple[int, float]]:
    """Train with an update rule; return (step, validation loss) of every evaluation."""
    words = [
        *("--run", str(folder / name), "--checkpoint.folder", str(folder / name)),
        *("--optim.kind", rule, "--data.mock", "false", "--data.train_path", f"{data}/train"),
        *("--data.valid_path", f"{data}/valid", "--tokenizer.kind", "huggingface"),
        *("--tokenizer.path", f"{data}/tokenizer", "--tokenizer.vocab_size", "none"),
        *("--checkpoint.every", "0", "--observe.plots", "false", *settings),
    ]
    with (folder / f"{name}.txt").open("w") as log:
        command = [sys.executable, "-m", "megalith", "train", "llama_6m", *words]
        code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    if code:
        raise SystemExit(f"{name} failed with exit code {code}: read {folder}/{name}.txt")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]
    return [(int(row["step"]), float(row["eval_loss"])) for row in rows if "eval_loss" in row]


def find_step(losses: Sequence[tuple[int, float]], target: float) -> float | None:
    """Return the step at which a validation loss first reaches a target, interpolated between
    evaluations; None if it does not.

    >>> find_step([(10, 5.0), (20, 4.0), (30, 3.0)], 3.5)
    25.0
    """
    for (before, higher), (step, loss) in zip([losses[0], *losses], losses, strict=False):
        if loss <= target:
            if step == before:
                return float(step)
            return before + (step - before) * (higher - target) / (higher - loss)
    return None


def main() -> int:
    """Train all seeds with both rules, print losses and steps, and return 0 if the bar holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--eval-every", type=int, help="default: a fortieth of the steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="default: temporary")
    parser.add_argument("settings", nargs="*", help="settings of both runs, after --")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="megalith-learning-"))
    folder.mkdir(parents=True, exist_ok=True)
    data = prepare_text(folder)
    every = options.eval_every or max(1, options.steps // 40)
    fractions = []
    for seed in range(options.seeds):
        settings = [
            *("--seed", str(seed), "--train.steps", str(options.steps)),
            *("--train.eval_every", str(every), "--train.eval_steps", "8", *options.settings),
        ]
        losses = {rule: train(folder, data, f"{rule}-{seed}", rule, settings) for rule in RULES}
        target = losses["adamw"][-1][1]
        step = find_step(losses["muon"], target)
        fractions.append(step / options.steps if step is not None else float("inf"))
        print(
            f"seed {seed}: AdamW {target:.4f} after {options.steps} steps, Muon "
            f"{losses['muon'][-1][1]:.4f}; Muon reaches {target:.4f} after "
            f"{fractions[-1]:.3f} of the steps",
            flush=True,
        )
    mean = statistics.mean(fractions)
    print(f"mean over {options.seeds} seeds: {mean:.3f} of AdamW's steps (bar {BAR})")
    return int(mean > BAR)


if __name__ == "__main__":
    sys.exit(main())
