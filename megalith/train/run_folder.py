"""The run folder: its files, the settings that a resumed run may change, and its copy of the
tokenizer."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from megalith import storage
from megalith.checkpoint.load import find_latest, open_checkpoint
from megalith.config.data import (
    BUILT_IN_TEMPLATES,
    MERGES,
    VOCABULARY,
    TokenizerConfig,
    find_merges_file,
)
from megalith.config.train import CONFIG_FILE, TrainRun, load_run, run_path
from megalith.config.tree import differences, dump_yaml
from megalith.data.chat_template import TEMPLATE_FILE
from megalith.data.tokenizer import main_file
from megalith.data.tokenizer_formats import MODEL
from megalith.errors import ConfigError, DataError
from megalith.hf.folder import TOKENIZER_FILES, list_auxiliary_files
from megalith.plan.batch_assignment import count_microbatches_of_longest
from megalith.plan.batch_schedule import build_batch_schedule
from megalith.plan.param_groups import parameter_rows
from megalith.storage import StoragePath
from megalith.train.state import TrainState

BATCH_SIZES = "train.global_batch_size", "train.batch_size_schedule"
"""Settings that determine the batch size of each step."""

FIXED = (
    "model.",
    "tokenizer.",
    "data.",
    "train.seq_len",
    *BATCH_SIZES,
    "seed",
    "lora",
    "optim.trained",
    "optim.frozen",
)
"""Settings that determine the weights' meaning or the order of the data: they cannot change during
a run."""

FREE_DATA = (
    "data.cache_path",
    "data.mmap",
    "data.num_train_samples",
    "data.path",
    "data.phases",
    "data.train_path",
    "data.valid_path",
    "data.test_path",
    "data.sft.path",
    "data.sft.valid_path",
    "data.sft.packs",
    "tokenizer.path",
    "lora.load",
)
"""Exceptions: these files may move, and data phases that have not begun may change; a fingerprint
of the contents that were read is checked instead."""


TIKTOKEN_FILE = "tokenizer.tiktoken"
"""Name of the copy of a tiktoken vocabulary, whatever the original is called."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of the files of one run."""

    path: Path

    checkpoint_folder: StoragePath | None = None
    """`checkpoint.folder`, if the checkpoints are elsewhere."""

    @property
    def config(self) -> Path:
        """The resolved settings; used as a recipe, they run it again."""
        return self.path / CONFIG_FILE

    @property
    def tokenizer(self) -> Path:
        """Copy of the run's tokenizer files; config.yaml names them relative to the folder."""
        return self.path / "tokenizer"

    @property
    def log(self) -> Path:
        """Log messages with their times."""
        return self.path / "log.txt"

    @property
    def starts(self) -> Path:
        """Starts and exits of the run: one JSON object each."""
        return self.path / "starts.jsonl"

    @property
    def events(self) -> Path:
        """Events of the run with their times: one JSON object each."""
        return self.path / "events.jsonl"

    def rank_log(self, rank: int) -> Path:
        """Return the path of the log messages of a rank above 0."""
        return self.path / "logs" / f"rank_{rank:05d}.txt"

    @property
    def heartbeats(self) -> Path:
        """Longest times without a heartbeat by section and number of ranks, from which timeouts are
        learned."""
        return self.path / "heartbeats.json"

    @property
    def metrics(self) -> Path:
        """Metrics: one JSON object per logged step."""
        return self.path / "metrics.jsonl"

    @property
    def skipped(self) -> Path:
        """Skipped samples: one JSON object per range, with the step and the reason."""
        return self.path / "skipped.jsonl"

    @property
    def routing(self) -> Path:
        """Folder of the routing trace: rank_00000.jsonl, ..."""
        return self.path / "routing"

    @property
    def parameters(self) -> Path:
        """One JSON object per parameter: whether it is trained, learning rate and weight decay."""
        return self.path / "parameters.jsonl"

    @property
    def checkpoints(self) -> StoragePath:
        """Folder of the checkpoints: step_0000100/, ..."""
        return self.checkpoint_folder or self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """Folder of the TensorBoard event files."""
        return self.path / "tensorboard"


def run_folder(run: TrainRun, name: str | None) -> RunFolder:
    """Return runs/NAME, or the path `name` if it contains a slash before its end or starts with a
    dot."""
    return RunFolder(run_path(run, name))


def list_changed_settings(folder: RunFolder, run: TrainRun) -> list[str]:
    """Return one line for each setting that differs from the folder's own settings and may differ.

    Raises:
        ConfigError: a setting differs that cannot change during a run.
    """
    if not folder.config.exists():
        return []
    before = load_run(folder.config)
    ignored = {"name", *_paths_by_content(before, run)}
    changed = [
        (field, old, new) for field, old, new in differences(before, run) if field not in ignored
    ]
    lines = {field: f"{field}: {old} before, {new} now" for field, old, new in changed}
    allowed = (*FREE_DATA, *(BATCH_SIZES if _keeps_read_batches(folder, before, run) else ()))
    fixed = [
        line
        for field, line in lines.items()
        if field.startswith(FIXED) and not field.startswith(allowed)
    ]
    if fixed:
        is_batch_size = any(line.startswith(BATCH_SIZES) for line in fixed)
        consumed = _count_consumed_samples(folder) if is_batch_size else None
        raise _reject_changes(folder, fixed, consumed)
    return list(lines.values())


def describe_resize(before: TrainRun, run: TrainRun, *, world_before: int, world: int) -> list[str]:
    """Return a table of what differs between two numbers of ranks of a run: rows of name, value
    before and value now; none if the numbers are equal.

    >>> from megalith.recipes import resolve
    >>> for line in describe_resize(*[resolve("tiny_cpu")] * 2, world_before=1, world=2):
    ...     print(line)
    number of ranks: 2 instead of 1; batch size, order of the samples and schedules are the same
                              before    now
      ranks                        1      2
      dp                           1      2
      microbatches per rank        2      1
    """
    if world_before == world:
        return []
    columns = [_list_sizes(each, n) for each, n in ((before, world_before), (run, world))]
    rows = [
        f"  {name:<22}{columns[0][name]:>8}{columns[1][name]:>7}"
        for name in columns[0]
        if columns[0][name] != columns[1][name]
    ]
    return [
        f"number of ranks: {world} instead of {world_before}; batch size, order of the samples and "
        "schedules are the same",
        f"{'':24}{'before':>8}{'now':>7}",
        *rows,
    ]


def _list_sizes(run: TrainRun, world: int) -> dict[str, int]:
    """Return the sizes of a run's layout that may depend on the number of ranks, by name."""
    p = run.parallel
    dp = p.dp or max(world // (p.tp * p.cp * p.pp), 1)
    return {
        "ranks": world,
        **{axis: getattr(p, axis) for axis in ("tp", "cp", "pp")},
        "dp": dp,
        "ep": p.ep,
        "zero": p.zero,
        "microbatches per rank": count_microbatches_of_longest(run.train, p, dp),
    }


def check_batch_sizes(folder: RunFolder, run: TrainRun, consumed: int) -> None:
    """Check that the batch sizes of the first `consumed` samples, which the folder's run has read,
    are those of its own settings; for a local checkpoint, which `list_changed_settings` does not
    read.

    Raises:
        ConfigError: they differ.
    """
    if not folder.config.exists():
        return
    before = load_run(folder.config)
    first = build_batch_schedule(before.train).find_difference(build_batch_schedule(run.train))
    if first is None or consumed <= first:
        return
    changed = differences(before, run)
    lines = [
        f"{field}: {old} before, {new} now"
        for field, old, new in changed
        if field.startswith(BATCH_SIZES)
    ]
    raise _reject_changes(folder, lines, consumed)


def _reject_changes(folder: RunFolder, lines: list[str], consumed: int | None) -> ConfigError:
    """Return the error of changed settings that cannot change; `consumed`: samples that were read,
    if a batch size is among them."""
    listed = "\n".join(f"  {line}" for line in lines)
    advice = (
        ""
        if consumed is None
        else f"The batch size can change after sample {consumed}, up to which the data has been "
        "read: add an entry to train.batch_size_schedule with at least as many samples.\n"
    )
    return ConfigError(
        f"{folder.path} holds a run with other settings, which determine its weights and the "
        "order of its data:\n"
        f"{listed}\n"
        f"{advice}"
        "Use the settings it was started with, or choose another folder with --run NAME."
    )


def _keeps_read_batches(folder: RunFolder, before: TrainRun, run: TrainRun) -> bool:
    """Return whether the batch sizes differ only after the samples that the folder's run has
    read."""
    schedules = [build_batch_schedule(each.train) for each in (before, run)]
    first = schedules[0].find_difference(schedules[1])
    return first is None or 0 < _count_consumed_samples(folder) <= first


def _count_consumed_samples(folder: RunFolder) -> int:
    """Return the samples that were read and not skipped before the newest checkpoint; 0 without
    one."""
    path = find_latest(folder.checkpoints)
    if path is None:
        return 0
    counters = open_checkpoint(path).state.get("train", {})
    return TrainState.from_json(counters).read_samples if counters else 0


@contextlib.contextmanager
def remove_new_folder_on_error(folder: RunFolder) -> Iterator[None]:
    """Remove the folder and log that a start created, if it fails before the run's settings are
    written."""
    created = [path for path in (folder.path, *folder.path.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        if created and not folder.config.exists():
            with contextlib.suppress(OSError):  # files that others have put there stay
                for file in (folder.log, folder.starts):
                    file.unlink(missing_ok=True)
                for path in created:
                    path.rmdir()
        raise


def _paths_by_content(before: TrainRun, run: TrainRun) -> list[str]:
    """Return the settings that name different paths of the same tokenizer or template files."""
    try:
        equal = read_tokenizer_files(before).contents == read_tokenizer_files(run).contents
    except (DataError, OSError):
        return []
    templates_are_files = all(_template_file(each) is not None for each in (before, run))
    return (
        ["tokenizer.path", *(["data.sft.template"] if templates_are_files else [])] if equal else []
    )


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Files of a run's tokenizer. The run and each checkpoint have a copy, so that they can be
    moved."""

    main: str | None
    """Name of the file that tokenizer.path stands for; None if the tokenizer is not read from a
    file."""

    contents: Mapping[str, bytes]
    """Content of every file, by its name in the copy."""

    def config_text(self, run: TrainRun, folder: str) -> str:
        """Return the settings of `run` as YAML, with paths of the copies in `folder` (relative to
        config.yaml)."""
        data, tokenizer = run.data, run.tokenizer
        if self.main is not None:
            tokenizer = replace(tokenizer, path=str(Path(folder) / self.main))
        if TEMPLATE_FILE in self.contents and data.sft.template not in (None, *BUILT_IN_TEMPLATES):
            data = replace(data, sft=replace(data.sft, template=str(Path(folder) / TEMPLATE_FILE)))
        return dump_yaml(replace(run, data=data, tokenizer=tokenizer))


def read_tokenizer_files(run: TrainRun) -> TokenizerFiles:
    """Read the files of the run's tokenizer, under the names that every loader expects.

    A chat template that data.sft.template names replaces the tokenizer's own.

    Raises:
        DataError: the tokenizer files do not exist.
    """
    files: dict[str, Path] = {}
    name, main, template = None, main_file(run.tokenizer), _template_file(run)
    if main is not None:
        name = _copy_name(run.tokenizer, main)
        beside = list_auxiliary_files(main.parent)
        files = {each: file for each, file in beside.items() if each in TOKENIZER_FILES} | {
            name: main
        }
        merges = find_merges_file(str(main)) if run.tokenizer.kind == "huggingface" else None
        files |= {} if merges is None else {MERGES: Path(merges)}
    if run.data.sft.template is not None:
        files.pop(TEMPLATE_FILE, None)
        files |= {} if template is None else {TEMPLATE_FILE: template}
    return TokenizerFiles(name, {each: storage.read_bytes(file) for each, file in files.items()})


def _template_file(run: TrainRun) -> Path | None:
    """Return the file that data.sft.template names; None for a built-in template or no file."""
    named = run.data.sft.template
    is_file = named is not None and named not in BUILT_IN_TEMPLATES and Path(named).is_file()
    return Path(named) if is_file and named is not None else None


def _copy_name(tokenizer: TokenizerConfig, main: Path) -> str:
    if tokenizer.kind == "huggingface":
        return "tokenizer.json" if find_merges_file(str(main)) is None else VOCABULARY
    return MODEL if tokenizer.kind == "sentencepiece" else TIKTOKEN_FILE


def write_config(folder: RunFolder, run: TrainRun, tokenizer: TokenizerFiles) -> None:
    """Save the resolved settings and the tokenizer files atomically.

    A run killed at any point leaves the old or the new settings.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    if tokenizer.contents:
        folder.tokenizer.mkdir(exist_ok=True)
        stale = {*TOKENIZER_FILES, TIKTOKEN_FILE} - tokenizer.contents.keys()
        for name in stale:
            storage.remove_file(folder.tokenizer / name)
        for name, contents in tokenizer.contents.items():
            storage.replace_file(folder.tokenizer / name, contents)
    storage.replace_file(folder.config, tokenizer.config_text(run, folder.tokenizer.name).encode())


def write_parameters(folder: RunFolder, run: TrainRun) -> None:
    """Save the parameter group of each parameter."""
    lines = [json.dumps(row) + "\n" for row in parameter_rows(run)]
    storage.replace_file(folder.parameters, "".join(lines).encode())


SKIP_CAUSE = Literal["rollback", "train.skip_steps"]
"""Why samples are skipped."""


def record_skipped_samples(
    folder: RunFolder, samples: tuple[int, int], *, step: int, cause: SKIP_CAUSE, reason: str
) -> None:
    """Add skipped samples, first and end, to skipped.jsonl, unless it names them already; on rank
    0. `step`: the step that is skipped, or from which the run is rolled back."""
    row = {"first_sample": samples[0], "num_samples": samples[1] - samples[0]}
    line = json.dumps({"step": step, **row, "cause": cause, "reason": reason})
    if line not in _read_lines(folder.skipped):
        storage.append_line(folder.skipped, line.encode())


def read_rolled_back_samples(path: Path) -> list[tuple[int, int]]:
    """Return the samples, first and end, that skipped.jsonl names because of rollbacks; a line that
    is incomplete because the run was killed is ignored."""
    ranges = []
    for line in _read_lines(path):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = json.loads(line)
            first, num_samples = int(row["first_sample"]), int(row["num_samples"])
            if row["cause"] == "rollback" and first >= 0 and num_samples > 0:
                ranges.append((first, first + num_samples))
    return ranges


def _read_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def set_aside_metrics(folder: RunFolder) -> Path | None:
    """Rename the metrics of a run whose checkpoints are gone; return the new path, None if there
    are none. Its list of skipped samples is deleted."""
    folder.skipped.unlink(missing_ok=True)
    if not folder.metrics.exists() or folder.metrics.stat().st_size == 0:
        return None
    number = 1
    while (renamed := folder.metrics.with_name(f"metrics.before-{number}.jsonl")).exists():
        number += 1
    folder.metrics.rename(renamed)
    return renamed
