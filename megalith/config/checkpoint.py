"""Checkpoint settings: frequency, retention, and what is loaded from a checkpoint."""

from dataclasses import dataclass
from typing import Annotated, Literal

from megalith.config.fields import Ge, Gt, hint_at, unknown_setting
from megalith.config.model import ModelConfig
from megalith.object_store import StoreOptions, describe_url_problem, hide_credentials
from megalith.storage import StoragePath, parse_path

AsyncSave = bool | Literal["auto"]
"""Whether checkpoints are written while training continues."""

KeyMismatchAction = Literal["error", "warn", "ignore"]
"""Handling of missing or unexpected keys: raise an error, warn, or ignore."""

LoadMode = Literal["weights", "progress", "all"]
"""State loaded by a new run: weights; also the progress in data and schedules; also the
optimizer state."""

ParallelLoad = bool | Literal["auto"]
"""Whether ranks that need the same boxes of a checkpoint read them once and exchange them."""

NewRowInit = Literal["zero", "mean"]
"""Initial value of vocabulary rows that the loaded model does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCheckpointConfig:
    """Local checkpoints: each rank's boxes in the memory or on the disk of its machine, with copies
    on a peer; a restarted run continues from them."""

    every: Annotated[int | None, Ge(1)] = None
    """Steps between local checkpoints. Unset: none."""

    folder: str | None = None
    """Folder of the machine in which each run has its own folder: a memory file system, or a local
    disk to survive a reboot. Unset: /dev/shm, where it exists."""

    replication_factor: Annotated[int, Ge(1)] = 2
    """Number of ranks that store each box: the rank itself, and the peers that have copies. 1: no
    copies."""

    replication_jump: Annotated[int | None, Ge(1)] = None
    """Distance between a rank and the rank that stores its copies. Unset: the number of ranks of a
    machine, so that copies are on another machine; 1 if there is only one machine."""

    keep: Annotated[int, Ge(1)] = 2
    """Number of latest local checkpoints to keep; the memory of one more is needed while it is
    saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of a run, saved in `RUN/checkpoints/` or `folder`."""

    folder: str | None = None
    """Folder of this run's checkpoints and of no other run's: a path, or the URL of an object store
    such as s3://bucket/run, gs://bucket/run or az://container/run. Unset: checkpoints in the run
    folder."""

    storage_retries: Annotated[int, Ge(0)] = 8
    """If `folder` is a URL: number of times that a failed request to the store is repeated, after
    random delays that become longer."""

    storage_timeout_seconds: Annotated[float, Gt(0)] = 600.0
    """If `folder` is a URL: seconds for one request to the store with all its repetitions."""

    every: Annotated[int, Ge(0)] = 100
    """Steps between checkpoints; 0: only after the last step."""

    keep: Annotated[int | None, Ge(1)] = 3
    """Number of latest checkpoints to keep. Unset: all."""

    keep_every: Annotated[int | None, Ge(1)] = None
    """Checkpoints at multiples of this step are never deleted. Unset: none."""

    best_metric: str | None = None
    """Metric of an evaluation, as it is named in metrics.jsonl, such as eval_loss or NAME_acc of
    evaluate.NAME. The checkpoints with its best values are not deleted: the highest values of
    accuracies, the lowest of others. Unset: none."""

    keep_best: Annotated[int, Ge(1)] = 1
    """Number of checkpoints with the best values of `best_metric` to keep."""

    load: str | None = None
    """Checkpoint, run, Hugging Face or Megatron folder from which a new run starts, or the URL of
    one in an object store; not used when the run resumes. Unset: random initial weights."""

    load_mode: LoadMode = "weights"
    """State that a new run loads from `load`. weights: weights only, starting at step 0;
    progress: also the step, with the position in the data and in the schedules, but a new
    optimizer; all: also the optimizer state. A run that resumes always loads its full state."""

    missing_keys: KeyMismatchAction = "error"
    """Handling of tensors that the checkpoint does not have. error: raise an error; warn,
    ignore: keep their initial values. When a run resumes, weights are always required, and
    this applies to optimizer state only."""

    unexpected_keys: KeyMismatchAction = "error"
    """Handling of checkpoint tensors that the run does not have. error: raise an error; warn,
    ignore: skip them. When a run resumes, this applies to optimizer state only."""

    skip: tuple[str, ...] = ()
    """Patterns of parameters that are not loaded from `load` and keep their initial values, such
    as head.*"""

    new_rows: NewRowInit = "zero"
    """Initial value of embedding and head rows that the Hugging Face folder in `load` does not
    have: zero, or the mean of the existing rows. These rows are padding, or new tokens if
    model.vocab_size may change (`allow_model_changes`)."""

    prefer_weights: bool = False
    """If a checkpoint's weights are not its rounded fp32 master weights, load the weights. Off:
    load the master weights."""

    allow_model_changes: tuple[str, ...] = ()
    """Model settings, or sections of them, that may differ from those of the loaded checkpoint,
    such as model.rope."""

    parallel_load: ParallelLoad = "auto"
    """Whether a box of a checkpoint that several ranks need is read by one of them, which sends it
    to the others. auto: if the checkpoint is in an object store or on a network file system."""

    exchange_buffer_mb: Annotated[int, Ge(1)] = 256
    """Size of the buffer for boxes that ranks exchange (`parallel_load`), in MiB per rank; larger
    boxes are exchanged one by one."""

    save_optimizer: bool = True
    """Save master weights and optimizer state. Off: a run can resume only with
    checkpoint.missing_keys=warn, from weights rounded to their stored dtype and with zero
    moments."""

    async_save: AsyncSave = "auto"
    """Whether a process of each rank writes checkpoints while training continues. auto: if saves
    have at least 64 MiB per rank and host memory suffices for a copy; true: always, and an error if
    memory does not suffice; false: never. The last save of a run is synchronous."""

    writer_threads: Annotated[int, Ge(1)] = 1
    """Number of threads of each rank that hash and write an asynchronous save, each one file. Use
    more where one thread is slower than the disk and cores are idle."""

    writer_timeout_seconds: Annotated[float, Gt(0)] = 600.0
    """Seconds without progress of a writer process after which its save fails and a new process is
    started."""

    drain_timeout_seconds: Annotated[float, Ge(0)] = 120.0
    """Seconds for which writer processes may continue with a save after the run has been killed.
    Without a complete save by then, none is kept."""

    max_save_failures: Annotated[int, Ge(1)] = 3
    """Number of consecutive failed saves after which the run ends. Before that, each failed save
    is reported and the run continues."""

    local: LocalCheckpointConfig = LocalCheckpointConfig()

    def parse_folder(self) -> StoragePath | None:
        """Return the path of `folder`; None if it is unset.

        Raises:
            ConfigError: it is a URL that cannot be used.
        """
        if self.folder is None:
            return None
        options = StoreOptions(self.storage_retries, self.storage_timeout_seconds)
        return parse_path(self.folder, options)


def checkpoint_problems(checkpoint: CheckpointConfig) -> list[str]:
    """Return the violated rules as error messages."""
    problems = _url_problems(checkpoint)
    for name in checkpoint.allow_model_changes:
        section, _, setting = name.partition(".")
        if section == "model" and setting and hint_at(ModelConfig, setting) is not None:
            continue
        known = setting if section == "model" and setting else name
        is_setting = hint_at(ModelConfig, known) is not None
        advice = f"Use model.{known}." if is_setting else unknown_setting(ModelConfig, known)
        problems.append(
            f"checkpoint.allow_model_changes={name}: expected names of model settings that start "
            f"with model. {advice}"
        )
    if checkpoint.skip and checkpoint.load is None:
        problems.append(
            f"checkpoint.skip={list(checkpoint.skip)} needs checkpoint.load, which is "
            f"unset. Set checkpoint.load, or remove checkpoint.skip."
        )
    if checkpoint.new_rows != "zero" and checkpoint.load is None:
        problems.append(
            f"checkpoint.new_rows={checkpoint.new_rows} needs checkpoint.load, which is "
            f"unset. Set checkpoint.load to a Hugging Face folder, or remove checkpoint.new_rows."
        )
    return problems + _load_mode_problems(checkpoint) + _local_problems(checkpoint.local)


def _local_problems(local: LocalCheckpointConfig) -> list[str]:
    """Rules of `local`."""
    unset = LocalCheckpointConfig()
    changed = [
        name
        for name in ("folder", "replication_factor", "replication_jump", "keep")
        if getattr(local, name) != getattr(unset, name)
    ]
    if local.every is None and changed:
        name = changed[0]
        return [
            f"checkpoint.local.{name}={getattr(local, name)} needs checkpoint.local.every, which "
            f"is unset. Set checkpoint.local.every, for example to 10, or remove "
            f"checkpoint.local.{name}."
        ]
    if local.replication_factor == 1 and local.replication_jump is not None:
        return [
            f"checkpoint.local.replication_jump={local.replication_jump} with "
            "checkpoint.local.replication_factor=1: there are no copies. Set "
            "checkpoint.local.replication_factor=2, or remove checkpoint.local.replication_jump."
        ]
    return []


def _url_problems(checkpoint: CheckpointConfig) -> list[str]:
    """Rules of URLs. No store is opened."""
    problems = []
    for name in ("folder", "load"):
        text = getattr(checkpoint, name)
        problem = None if text is None else describe_url_problem(text)
        if problem is not None:
            problems.append(f"checkpoint.{name}={hide_credentials(text)}: {problem}")
    return problems


def _load_mode_problems(checkpoint: CheckpointConfig) -> list[str]:
    """Rules of `load_mode`."""
    if checkpoint.load_mode == "weights":
        return []
    problems = []
    if checkpoint.load is None:
        problems.append(
            f"checkpoint.load_mode={checkpoint.load_mode} needs checkpoint.load, which is "
            "unset. Set checkpoint.load to a run or a checkpoint, or remove checkpoint.load_mode: "
            "a run always resumes from its own checkpoints."
        )
    if checkpoint.skip:
        problems.append(
            f"checkpoint.load_mode={checkpoint.load_mode} with "
            f"checkpoint.skip={list(checkpoint.skip)}: "
            "a run that continues at a step must load all weights. Set "
            "checkpoint.load_mode=weights, or remove checkpoint.skip."
        )
    if checkpoint.new_rows != "zero":
        problems.append(
            f"checkpoint.load_mode={checkpoint.load_mode} with "
            f"checkpoint.new_rows={checkpoint.new_rows}: a run that continues at a step has no new "
            "rows. Set checkpoint.load_mode=weights, or remove checkpoint.new_rows."
        )
    return problems
