"""Subcommands of `megalith checkpoint` that list, delete, copy, average and merge checkpoints."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tyro.conf import Positional

from megalith import storage
from megalith.cli.arguments import parse_options
from megalith.cli.convert import show_progress
from megalith.cli.output import print_json, print_warnings
from megalith.config.train import list_checkpoint_folders
from megalith.errors import CheckpointError, ConfigError, raise_all
from megalith.object_store import StorePath
from megalith.storage import StoragePath, parse_path

if TYPE_CHECKING:  # imports torch
    from megalith.hf.pretrained import Pretrained
    from megalith.posttrain.average import WeightsOutput


@dataclass(frozen=True, kw_only=True)
class CheckpointListOptions:
    """List the checkpoints of a run: step, size, world size, and whether they are complete."""

    path: Positional[str]
    """A run, its name under runs/, a checkpoints folder, or its URL in an object store."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPruneOptions:
    """Delete old checkpoints of a run. Pinned ones (a file .keep in them), links and incomplete
    ones are not deleted."""

    path: Positional[str]
    """A run, its name under runs/, a checkpoints folder, or its URL in an object store. The run
    must not be in progress."""
    keep: int
    """Number of newest checkpoints to keep."""
    every: int | None = None
    """Also keep checkpoints at multiples of this step."""
    dry_run: bool = False
    """Only list what would be deleted."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class CheckpointCopyOptions:
    """Copy a checkpoint. Every byte is verified by its hash; the copy appears complete or not at
    all."""

    source: Positional[str]
    """A step_NNNNNNN folder; or a run, its name under runs/, or a checkpoints folder: the latest
    checkpoint in it."""
    target: Positional[str]
    """Folder to write, or URL in an object store; it must not exist."""
    json: bool = False
    """Print one JSON document."""


@dataclass(frozen=True, kw_only=True)
class CheckpointAverageOptions:
    """Average the weights of checkpoints of one model, in any layouts, into a new checkpoint.
    If all sources have fp32 master weights, these are averaged and cast to the weights' dtype."""

    paths: Positional[tuple[str, ...]]
    """Two or more checkpoints, runs (their latest checkpoint) or Hugging Face folders, oldest
    first; and last the folder to write, which must not exist. Settings and tokenizer are those of
    the first."""
    weights: str | None = None
    """Weight of each checkpoint, separated by commas: 1,2,1. Default: equal weights."""
    decay: float | None = None
    """Exponential moving average from the first to the last checkpoint with this decay; the last
    has the weight 1 - decay."""
    moments: bool = False
    """Also average the optimizer's moments, which all checkpoints must have, so that a run can
    continue with checkpoint.load_mode=all at the step of the newest."""
    accumulate: Literal["fp64", "fp32"] = "fp64"
    """Dtype of the sums."""
    json: bool = False
    """Print one JSON document."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The checkpoints to average."""
        return self.paths[:-1]


@dataclass(frozen=True, kw_only=True)
class CheckpointMergeOptions:
    """Merge models that were fine-tuned from one base into a new checkpoint, by their task
    vectors: the differences to the base."""

    paths: Positional[tuple[str, ...]]
    """Checkpoints, runs (their latest checkpoint) or Hugging Face folders of fine-tuned models;
    and last the folder to write, which must not exist. Settings and tokenizer are those of the
    first."""
    base: str
    """The model that they were fine-tuned from."""
    method: Literal["task", "ties"] = "task"
    """task: add the weighted task vectors (arXiv:2212.04089); ties: trim them, elect a sign per
    element, and add the mean of those with this sign (arXiv:2306.01708)."""
    weights: str | None = None
    """Weight of each task vector, separated by commas: 1,0.5. Default: 1."""
    scale: float = 1.0
    """Factor by which the merged task vectors are multiplied."""
    density: float = 0.2
    """For ties: fraction of the elements of each tensor, the largest, that are not trimmed."""
    json: bool = False
    """Print one JSON document."""

    @property
    def sources(self) -> tuple[str, ...]:
        """The models to merge."""
        return self.paths[:-1]


# --- list, prune, copy


def list_all(argv: list[str]) -> int:
    """Print the checkpoints of a folder."""
    from megalith.cli.checkpoint import find_folder

    options = parse_options(CheckpointListOptions, argv, prog="megalith checkpoint list")
    folder = find_checkpoints_folder(find_folder(options.path))
    rows = describe_checkpoints(folder)
    if options.json:
        print_json({"folder": str(folder), "checkpoints": rows})
        return 0
    for row in rows:
        size = "" if row["nbytes"] is None else f"  {row['nbytes']:,} bytes"
        ranks = "" if row["world_size"] is None else f", saved by {row['world_size']} ranks"
        marks = "".join(f", {mark}" for mark in ("latest", "pinned", "link") if row[mark])
        problem = "" if row["problem"] is None else f"  incomplete: {row['problem']}"
        print(f"{row['name']}{size}{ranks}{marks}{problem}")
    complete = [row for row in rows if row["problem"] is None]
    total = sum(row["nbytes"] for row in complete)
    print(f"{len(complete)} complete checkpoints in {folder}, {total:,} bytes")
    return 0


def describe_checkpoints(folder: StoragePath) -> list[dict[str, Any]]:  # JSON
    """Return a row for each checkpoint of a folder, oldest first, including incomplete ones."""
    from megalith.checkpoint.commit import PIN
    from megalith.checkpoint.format import read_pointer, step_folders
    from megalith.checkpoint.load import open_checkpoint

    latest, rows = read_pointer(folder), []
    for step, path in step_folders(folder).items():
        row: dict[str, Any] = {  # Any: JSON
            "name": path.name,
            "step": step,
            "nbytes": None,
            "world_size": None,
            "latest": path.name == latest,
            "pinned": storage.exists(path / PIN),
            "link": storage.is_link(path),
            "problem": None,
        }
        try:
            manifest = open_checkpoint(path).manifest
        except CheckpointError as error:
            row["problem"] = str(error).splitlines()[0]
        else:
            row["nbytes"] = sum(file.nbytes for file in manifest.files.values())
            row["world_size"] = manifest.world_size
        rows.append(row)
    return rows


def find_checkpoints_folder(path: StoragePath) -> StoragePath:
    """Return the folder that holds the checkpoints of a run, or `path` itself if it does.

    Raises:
        CheckpointError: there are no checkpoints in it, or those of Megatron.
    """
    from megalith.checkpoint.format import step_folders

    for folder in (*list_checkpoint_folders(path), path):
        if step_folders(folder):
            return folder
    _reject_megatron(path, advice="`megalith checkpoint info` shows one, `ls` lists them")
    raise CheckpointError(
        f"{path} has no checkpoints. Use the folder of a run that has saved one, or its "
        "checkpoints folder."
    )


def _reject_megatron(path: StoragePath, *, advice: str) -> None:
    """Raise a CheckpointError if a folder has Megatron checkpoints."""
    from megalith.hf.megatron_checkpoint import locate_megatron

    if isinstance(path, Path) and locate_megatron(path) is not None:
        raise CheckpointError(
            f"{path} has Megatron checkpoints, and only Megalith checkpoints are listed, deleted "
            f"and copied: {advice}. Or convert one first: megalith convert {path} OUT."
        )


def prune(argv: list[str]) -> int:
    """Delete old checkpoints of a folder."""
    from megalith.checkpoint.commit import Retention
    from megalith.checkpoint.load import find_latest, open_checkpoint
    from megalith.cli.checkpoint import find_folder

    options = parse_options(CheckpointPruneOptions, argv, prog="megalith checkpoint prune")
    raise_all(
        [
            f"--{name}={value} must be at least 1. Use for example --{name} {example}."
            for name, value, example in (("keep", options.keep, 3), ("every", options.every, 1000))
            if value is not None and value < 1
        ]
    )
    folder = find_checkpoints_folder(find_folder(options.path))
    newest = find_latest(folder)
    retention = Retention(options.keep, options.every)
    if newest is not None:
        retention = Retention(
            options.keep, options.every, find_last_update(open_checkpoint(newest))
        )
    if options.dry_run:
        removed = retention.select_old(folder)
    else:
        with lock_checkpoints(folder):
            removed = retention.delete_old(folder)
    if options.json:
        names = [path.name for path in removed]
        print_json({"folder": str(folder), "dry_run": options.dry_run, "deleted": names})
        return 0
    verb = "would delete" if options.dry_run else "deleted"
    for path in removed:
        print(f"{verb} {path.name}")
    remaining = len(describe_checkpoints(folder)) - (len(removed) if options.dry_run else 0)
    print(f"{verb} {len(removed)} of {len(removed) + remaining} checkpoints in {folder}")
    return 0


def lock_checkpoints(folder: StoragePath) -> contextlib.AbstractContextManager[object]:
    """Return the lock of the run that has a checkpoints folder; in a store, its lease.

    Raises:
        CheckpointError: a run is in progress.
    """
    from megalith.checkpoint.lease import acquire_lease
    from megalith.checkpoint.lock import lock_run

    if isinstance(folder, StorePath):
        return acquire_lease(folder, None)
    path = folder.absolute()  # "." is the checkpoints folder if that is the working folder
    return lock_run(path.parent if path.name == "checkpoints" else path)


def find_last_update(checkpoint: Any) -> int | None:  # Any: Checkpoint, whose import takes a second
    """Return the last step that updated the weights of a checkpoint; None if its state has no
    counters."""
    counters = checkpoint.state.get("train")
    if not isinstance(counters, dict) or "step" not in counters:
        return None
    return int(counters["step"]) - int(counters.get("skipped_in_a_row", 0))


def copy(argv: list[str]) -> int:
    """Copy a checkpoint."""
    from megalith.checkpoint.copy import copy_checkpoint
    from megalith.checkpoint.load import open_checkpoint
    from megalith.checkpoint.readers import mark_reading
    from megalith.cli.checkpoint import find_folder, find_latest_checkpoint

    options = parse_options(CheckpointCopyOptions, argv, prog="megalith checkpoint copy")
    folder = find_latest_checkpoint(find_folder(options.source))
    _reject_megatron(folder, advice="`cp -r` copies one")
    source = open_checkpoint(folder)
    total = sum(file.nbytes for file in source.manifest.files.values())
    with mark_reading(folder), show_progress(total, name="copy") as advance:
        nbytes = copy_checkpoint(source, parse_path(options.target), on_copied=advance)
    report = {"source": str(source.path), "target": options.target, "nbytes": nbytes}
    if options.json:
        print_json(report)
    else:
        print(f"copied {source.path} to {options.target}: {nbytes:,} bytes, hashes verified")
    return 0


# --- average, merge


def parse_weights(text: str | None, num: int) -> list[float] | None:
    """Return the numbers of --weights; None if it is unset.

    Raises:
        ConfigError: a part is not a finite number, or there is another number of them than `num`.
    """
    if text is None:
        return None
    parts, weights = text.split(","), []
    for part in parts:
        try:
            weights.append(float(part))
        except ValueError:
            weights.append(math.nan)
    wrong = [part for part, value in zip(parts, weights, strict=True) if not math.isfinite(value)]
    example = ",".join(["1"] * num)
    if wrong:
        raise ConfigError(
            f"--weights={text}: {', '.join(map(repr, wrong))} is not a finite number. Use one "
            f"number per model, separated by commas: --weights {example}."
        )
    if len(weights) != num:
        raise ConfigError(
            f"--weights={text} has {len(weights)} numbers for {num} models. Use one number per "
            f"model: --weights {example}."
        )
    return weights


def check_argument_order(command: str, paths: Sequence[str], options: str = "") -> None:
    """Check that the folder to write is the last of the paths of `average` or `merge`; before
    2026-11-28 it was the first.

    Raises:
        ConfigError: only the last of them exists, or none was given.
    """
    if not paths:
        raise ConfigError(
            f"no paths were given. Name the sources, and last the folder to write: megalith "
            f"checkpoint {command} A B OUT."
        )
    exists = [any(Path(root, path).exists() for root in (".", "runs")) for path in paths]
    if len(paths) > 1 and not exists[0] and all(exists[1:]):
        right = " ".join(each for each in (*paths[1:], paths[0], options) if each)
        raise ConfigError(
            f"{paths[0]} does not exist, and {paths[-1]} does: the sources come first and the "
            f"folder to write last, as in copy and convert. Use: megalith checkpoint {command} "
            f"{right}."
        )


def average(argv: list[str]) -> int:
    """Write the average of several checkpoints."""
    options = parse_options(CheckpointAverageOptions, argv, prog="megalith checkpoint average")
    check_argument_order("average", options.paths)
    coefficients = choose_coefficients(options)
    import torch

    from megalith.hf.staging import check_target
    from megalith.posttrain.average import average_models, open_models

    check_target(Path(options.paths[-1]))
    models = open_models(options.sources)
    dtype = torch.float64 if options.accumulate == "fp64" else torch.float32
    output = average_models(models, coefficients, moments=options.moments, accumulation_dtype=dtype)
    return _write(options.paths[-1], output, models, json=options.json)


def choose_coefficients(options: CheckpointAverageOptions) -> list[float]:
    """Return the weight of each checkpoint of an average; their sum is 1.

    Raises:
        ConfigError: options are not valid.
    """
    num, decay = len(options.sources), options.decay
    if num < 2:
        raise ConfigError(
            f"an average needs at least two checkpoints, and {num or 'none'} was given. Name the "
            "checkpoints, and last the folder to write: megalith checkpoint average A B OUT."
        )
    if decay is not None and options.weights is not None:
        raise ConfigError(
            f"--weights={options.weights} with --decay={decay}: both determine the weights of the "
            "average. Use one of them."
        )
    if decay is not None and not 0 <= decay < 1:
        raise ConfigError(
            f"--decay={decay} must be at least 0 and less than 1. Use for example --decay 0.9."
        )
    weights = parse_weights(options.weights, num) or [1.0] * num
    if min(weights) < 0 or not 0 < sum(weights) < math.inf:
        raise ConfigError(
            f"--weights={options.weights}: weights of an average must not be negative, and "
            "their sum must be positive and finite. Use for example --weights "
            f"{','.join(['1'] * num)}, or `megalith checkpoint merge` to subtract models."
        )
    from megalith.posttrain.average import compute_decay_coefficients, normalize_coefficients

    return (
        normalize_coefficients(weights) if decay is None else compute_decay_coefficients(num, decay)
    )


def merge(argv: list[str]) -> int:
    """Write the merge of fine-tuned models."""
    options = parse_options(CheckpointMergeOptions, argv, prog="megalith checkpoint merge")
    check_argument_order("merge", options.paths, f"--base {options.base}")
    weights = parse_weights(options.weights, len(options.sources)) or [1.0] * len(options.sources)
    raise_all(merge_problems(options, weights))
    from megalith.hf.staging import check_target
    from megalith.posttrain.average import open_models
    from megalith.posttrain.merge import MergeSettings, merge_models

    check_target(Path(options.paths[-1]))
    base, *models = open_models([options.base, *options.sources])
    settings = MergeSettings(options.method, weights, options.scale, options.density)
    output = merge_models(base, models, settings)
    return _write(options.paths[-1], output, [base, *models], json=options.json)


def merge_problems(options: CheckpointMergeOptions, weights: Sequence[float]) -> list[str]:
    """Return errors of invalid options."""
    problems = []
    if not options.sources:
        problems.append(
            "a merge needs at least one fine-tuned model, and none was given. Name the models, and "
            "last the folder to write: megalith checkpoint merge A B OUT --base BASE."
        )
    if not math.isfinite(options.scale):
        problems.append(f"--scale={options.scale} must be a finite number. Use for example 1.0.")
    if not 0 < options.density <= 1:
        problems.append(
            f"--density={options.density} must be above 0 and at most 1. Use for example 0.2, "
            "which keeps the largest fifth of the elements."
        )
    if options.method == "task" and options.density != 0.2:
        problems.append(
            f"--density={options.density} with --method=task, which trims nothing. Remove it, or "
            "use --method ties."
        )
    if options.method == "ties" and weights and min(weights) <= 0:
        problems.append(
            f"--weights={options.weights} with --method=ties: weights must be positive, as they "
            "elect the sign. Use positive weights, or --method task to subtract a task vector."
        )
    return problems


def _write(out: str, output: "WeightsOutput", models: Sequence["Pretrained"], *, json: bool) -> int:
    """Write the checkpoint, and print what was written."""
    from megalith.hf.pretrained import mark_sources
    from megalith.posttrain.average import write_weights

    for model in models:
        print_warnings(model)
    method = str(output.made_from["method"])
    with mark_sources(models), show_progress(output.nbytes, name=method) as advance:
        nbytes = write_weights(Path(out), output, on_written=advance)
    num_tensors = sum(len(tensor.keys) for tensor in output.tensors)
    if json:
        print_json({"target": out, "tensors": num_tensors, "nbytes": nbytes, **output.made_from})
        return 0
    weights = ", ".join(f"{weight:.4g}" for weight in output.made_from["weights"])
    print(f"wrote {out}: {num_tensors} tensors, {nbytes:,} bytes, {method} with weights {weights}")
    return 0
