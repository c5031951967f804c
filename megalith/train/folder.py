"""The folder of a run: what it was started with, and what a later start may change."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megalith import storage
from megalith.config.train import TrainRun
from megalith.config.tree import differences, dump_yaml, load_yaml
from megalith.errors import ConfigError
from megalith.plan.groups import parameter_rows

FIXED = (
    "model.", "tokenizer.", "data.", "train.seq_len", "train.global_batch_size", "seed", "lora", "optim.trained",
    "optim.frozen",
)  # fmt: skip
"""Settings that decide the weights' meaning or the order of the data: a run keeps them for life."""

FREE_DATA = (
    "data.cache_path", "data.mmap", "data.num_train_samples", "data.path", "data.train_path", "data.valid_path",
    "data.test_path", "tokenizer.path", "lora.load",
)  # fmt: skip
"""Exceptions: files may move; that they are the same ones is checked by what is in them."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Where everything about one run is."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved settings; as a recipe they run it again."""
        return self.path / "config.yaml"

    @property
    def log(self) -> Path:
        """What was said, with times."""
        return self.path / "log.txt"

    @property
    def metrics(self) -> Path:
        """One JSON object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def routing(self) -> Path:
        """Which experts tokens chose: rank_00000.jsonl, ..."""
        return self.path / "routing"

    @property
    def parameters(self) -> Path:
        """Of every parameter: whether it is trained, and at which rates; a JSON object for each."""
        return self.path / "parameters.jsonl"

    @property
    def checkpoints(self) -> Path:
        """step_0000100/, ..."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard events."""
        return self.path / "tensorboard"


def run_folder(run: TrainRun, name: str | None) -> RunFolder:
    """Return runs/NAME, or the path that `name` is: one with a slash before its end, or with a leading dot."""
    plain = (name or run.name).rstrip("/")  # shell completion appends a slash
    if name and (not plain or "/" in plain or plain.startswith(".")):
        return RunFolder(Path(name))
    return RunFolder(Path("runs") / plain)


def changed_settings(folder: RunFolder, run: TrainRun) -> list[str]:
    """What differs from the folder's own settings, one line each, if it may differ.

    Raises:
        ConfigError: something differs that a run keeps for life.
    """
    if not folder.config.exists():
        return []
    before = load_yaml(folder.config, TrainRun)
    changed = [(field, old, new) for field, old, new in differences(before, run) if field != "name"]
    lines = {field: f"{field}: {old} before, {new} now" for field, old, new in changed}
    fixed = [line for field, line in lines.items() if field.startswith(FIXED) and field not in FREE_DATA]
    if fixed:
        listed = "\n".join(f"  {line}" for line in fixed)
        raise ConfigError(
            f"{folder.path} holds a run with other settings, which decide its weights and the order of its data:\n"
            f"{listed}\nUse the settings it was started with, or choose another folder with --run NAME."
        )
    return list(lines.values())


@contextlib.contextmanager
def left_as_found(folder: RunFolder) -> Iterator[None]:
    """Take back what a start made that is refused before the run has settings: no later command meets half a run."""
    made = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        if made and not folder.config.exists():
            with contextlib.suppress(OSError):  # what others put there in the meantime stays
                folder.log.unlink(missing_ok=True)
                for path in made:
                    path.rmdir()
        raise


def write_config(folder: RunFolder, run: TrainRun) -> None:
    """Save the resolved settings; a run killed at any point leaves the old ones or the new ones, whole."""
    folder.path.mkdir(parents=True, exist_ok=True)
    storage.replace_file(folder.config, dump_yaml(run).encode())


def write_parameters(folder: RunFolder, run: TrainRun) -> None:
    """Save which group decides the rates of each parameter, for readers."""
    lines = [json.dumps(row) + "\n" for row in parameter_rows(run)]
    storage.replace_file(folder.parameters, "".join(lines).encode())


def set_aside_metrics(folder: RunFolder) -> Path | None:
    """Keep the metrics of a run whose checkpoints are gone, under another name; None when there are none."""
    if not folder.metrics.exists() or folder.metrics.stat().st_size == 0:
        return None
    number = 1
    while (kept := folder.metrics.with_name(f"metrics.before-{number}.jsonl")).exists():
        number += 1
    folder.metrics.rename(kept)
    return kept
