"""Root config of a training run, with all settings of `megalith train`."""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.compose import load_composed
from megalith.config.data import DataConfig, TokenizerConfig, locate_tokenizer, parse_blend
from megalith.config.fault_detection import FaultDetectorConfig
from megalith.config.fault_injection import FaultInjectorConfig
from megalith.config.fields import Example, Ge, Le, Lt
from megalith.config.kernels import KernelSetting
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.observe import ObserveConfig, ProfileConfig
from megalith.config.optim import OptimConfig, PrecisionConfig, ScheduleConfig
from megalith.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig
from megalith.config.replica_group import ReplicaGroupConfig
from megalith.config.restart import RestartConfig
from megalith.config.tree import load_yaml, parse_stored_settings
from megalith.errors import ConfigError
from megalith.storage import StoragePath, parse_path, read_bytes

CONFIG_FILE = "config.yaml"
"""Name of the settings file in the folder of a run and of each checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EMAConfig:
    """Exponential moving average (EMA) of the weights, a role of the checkpoint beside them.

    Source: Polyak and Juditsky 1992, "Acceleration of stochastic approximation by averaging".
    """

    decay: Annotated[float, Ge(0), Lt(1), Example(0.999)]
    """Factor of the average in each of its updates: average = decay * average + (1 - decay) *
    master weights."""

    every: Annotated[int, Ge(1)] = 1
    """Optimizer updates between updates of the average."""

    start_step: Annotated[int, Ge(0)] = 0
    """Number of optimizer updates until which the average equals the weights. Skipped steps are no
    updates."""

    device: Literal["cpu"] | None = None
    """Memory of the average. cpu: host memory, at the cost of a copy of the weights per update.
    Unset: the device of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizeConfig:
    """Entry of the batch-size schedule: the global batch size from a position in the data on."""

    size: Annotated[int, Ge(1)]
    """Rows per step over all ranks."""

    samples: Annotated[int | None, Ge(0)] = None
    """Samples after which the steps have this size; a step has one size. Unset: `tokens`; 0 in the
    first entry."""

    tokens: Annotated[int | None, Ge(0)] = None
    """The same in tokens, divided by `train.seq_len` and rounded down. Unset: `samples`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Training loop: number of steps, batch sizes, losses, logging and evaluation."""

    steps: Annotated[int, Ge(1)]
    """Number of optimizer steps of the whole run."""

    global_batch_size: Annotated[int, Ge(1)]
    """Rows per step over all ranks; with `batch_size_schedule`, its last size."""

    batch_size_schedule: tuple[BatchSizeConfig, ...] = ()
    """Batch-size schedule: the rows per step from a number of samples or tokens on, such as a
    linear ramp-up, with increasing starts. A checkpoint is saved at each change if
    `checkpoint.every` is set. Unset: every step has `global_batch_size` rows."""

    skip_steps: tuple[int, ...] = ()
    """Steps, counted from 1, whose samples are read without training on them. They change neither
    the weights nor the schedules, and stay skipped after a rollback."""

    micro_batch_size: Annotated[int, Ge(1)] = 1
    """Rows per microbatch of one rank; a rank with more rows per step uses gradient
    accumulation."""

    uneven_batch: Literal["reject", "allow"] | None = None
    """Global batch sizes that are not a multiple of `micro_batch_size` times the data-parallel
    ranks. allow: some ranks have fewer rows, and may idle; losses and gradients are the same.
    Unset: allow when a run resumes, such as on another number of ranks, else reject."""

    seq_len: Annotated[int, Ge(1)] = 1024
    """Sequence length: tokens per row, or maximum tokens per document with
    `tokens_per_microbatch`."""

    tokens_per_microbatch: Annotated[int | None, Ge(1)] = None
    """Variable-length packing: instead of rows, pack whole documents or conversations into
    microbatches of at most this number of tokens per rank (cp ranks share a pack of cp times
    as many). A step has `global_batch_size` documents in as many microbatches as they need,
    with balanced load over dp ranks. Unset: rows of `seq_len`."""

    balance_rows: bool = False
    """Load-balanced batching: assign rows of conversations to dp ranks so that their compute
    cost is equal; the rows of a step are the same."""

    label_smoothing: Annotated[float, Ge(0), Lt(1), Example(0.1)] = 0.0
    """Label smoothing: probability that is spread evenly over all other tokens, in the training
    loss (optimized and logged); evaluation uses -log p(label). Source: arXiv:1512.00567,
    section 7."""

    z_loss: Annotated[float, Ge(0), Le(1e3), Example(1e-4)] = 0.0
    """Coefficient of the z-loss, the mean square of logsumexp(logits) per label, of every head;
    logged as `z_loss`, with `max_logit`, and not part of the logged `loss`. 1e-4 is common:
    arXiv:2204.02311, section 5."""

    loss_chunk: Annotated[int | None, Ge(1), Example(1024)] = None
    """Number of tokens per chunk of the loss, whose logits exist at a time. Unset: as many as
    fit a few MiB."""

    loss_backward: Literal["kept", "recomputed"] = "kept"
    """Gradients of the loss. kept: computed with the loss and stored until backward; recomputed:
    computed in backward from recomputed logits."""

    loss_plugin: str | None = None
    """Training losses of another package, a class like megalith.train.objective.LMObjective: an
    installed entry point, or on the command line package.module:name. Unset: cross-entropy of the
    next token and of the MTP depths."""

    ema: EMAConfig | None = None
    """Exponential moving average of the weights, saved with them; `megalith evaluate` and
    `megalith convert` read it with --role ema. Unset: none."""

    log_every: Annotated[int, Ge(1)] = 1
    """Steps between rows of metrics.jsonl. A row has the loss of its step, and times since the
    previous row."""

    eval_every: Annotated[int | None, Ge(0)] = None
    """Steps between evaluations on the validation split. Unset or 0: only after the last step."""

    eval_steps: Annotated[int, Ge(0)] = 0
    """Number of global batches per evaluation; 0: no evaluation."""

    compile: bool = False
    """Compile each layer with torch.compile (needs tp = 1, and a C++ compiler on CPUs)."""

    threads: Annotated[int | None, Ge(1)] = None
    """CPU threads per rank. Unset: number of cores / ranks on this machine."""

    max_minutes: Annotated[float | None, Ge(0), Le(1e9)] = None
    """Time limit in minutes, after which the run saves a checkpoint and exits with code 75; the
    same command resumes it. Unset: no limit."""

    exit_margin_minutes: Annotated[float | None, Ge(0), Le(1e9)] = None
    """Minutes before the end time of a Slurm job (SLURM_JOB_END_TIME) at which the run saves a
    checkpoint and exits with code 75. Unset: twice the longest save and the longest step so far,
    at least 1 minute."""

    termination_grace_seconds: Annotated[float | None, Ge(0), Le(1e9), Example(30.0)] = None
    """Seconds from SIGTERM until the batch system or launcher kills the processes, such as
    --shutdown-timeout of torchrun or terminationGracePeriodSeconds of Kubernetes. If a persistent
    save takes longer, a local checkpoint is written instead. Unset: 30 under torchrun, otherwise
    unknown."""

    sigusr1_action: Literal["stop", "save", "ignore"] = "stop"
    """Action on SIGUSR1. stop: save a checkpoint and exit with code 75; save: save and continue;
    ignore: nothing."""

    gc_interval: Annotated[int | None, Ge(0)] = None
    """Steps between garbage collections of Python, on all ranks in the same step and around
    evaluations; 0: whenever Python collects. Unset: 100 on several ranks, where a collection on
    one rank delays all, else 0."""

    callbacks: tuple[str, ...] = ()
    """Callbacks of installed packages, named by their entry points in the group
    `megalith.callbacks`. A class that is not installed is named on the command line: --callback
    package.module:Class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteConfig:
    """Evaluation suite: a text dataset or multiple-choice questions, evaluated in one full pass."""

    kind: Literal["text", "choice"] = "text"
    """text: loss and bits per byte of a corpus or of a split; choice: accuracy on multiple-choice
    questions."""

    path: tuple[str, ...] = ()
    """text: prefixes of .bin/.idx files, as data.path; choice: one JSONL file with `context`,
    `choices`, `answer` (its index), and optionally `shots` (few-shot examples) and `group`."""

    split: Literal["train", "valid", "test"] | None = None
    """text: a split of the run's own data, in place of `path`."""

    every: Annotated[int | None, Ge(0)] = None
    """Steps between evaluations. Unset or 0: only after the last step."""

    start: Annotated[int, Ge(0)] = 0
    """First step after which the suite is evaluated."""

    num_samples: Annotated[int | None, Ge(1)] = None
    """Number of samples, or of questions, that are read. Unset: all, once."""

    micro_batch_size: Annotated[int | None, Ge(1)] = None
    """Samples, or choices, per microbatch. Unset: train.micro_batch_size."""


def ema_problems(run: "TrainRun") -> list[str]:
    """Return the violated rules of the moving average of the weights as error messages."""
    ema, problems = run.train.ema, []
    if ema is None:
        return []
    if run.lora is not None:
        problems.append(
            f"train.ema.decay={ema.decay} with lora.rank={run.lora.rank}: a moving average of "
            "adapters cannot be evaluated or exported. Set train.ema=none, or lora=none."
        )
    if ema.start_step >= run.train.steps:
        problems.append(
            f"train.ema.start_step={ema.start_step}: the run ends after "
            f"train.steps={run.train.steps} before the average starts. Set train.ema.start_step "
            f"to at most {run.train.steps - 1}."
        )
    if ema.every > run.train.steps:
        problems.append(
            f"train.ema.every={ema.every}: the run ends after train.steps={run.train.steps} "
            f"before the first update of the average. Set train.ema.every to at most "
            f"{run.train.steps}."
        )
    return problems


CALLBACK_GROUP = "megalith.callbacks"
"""Group of the entry points that `LoopConfig.callbacks` names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRun:
    """Settings of a training run."""

    name: str
    """Name of the run; its folder is runs/NAME unless --run is given."""

    model: ModelConfig
    """Model."""

    data: DataConfig
    """Training data."""

    train: LoopConfig
    """Training loop."""

    schedule: ScheduleConfig
    """Learning rate and weight decay schedules."""

    lora: LoraConfig | None = None
    """LoRA adapters, trained beside the frozen weights of checkpoint.load. Unset: train the
    weights."""

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Tokenizer; used by generation and by evaluation in bits per byte."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Parallelism."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Numeric precision."""

    replica_group: ReplicaGroupConfig | None = None
    """Replica group that this job is; several train together. Unset: the job trains alone."""

    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    """Activation checkpointing."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Activation offload to host memory."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and loading of checkpoints."""

    restart: RestartConfig = field(default_factory=RestartConfig)
    """Restart in place."""

    observe: ObserveConfig = field(default_factory=ObserveConfig)
    """Metrics, plots, TensorBoard, experiment trackers, log messages and captures."""

    profile: ProfileConfig = field(default_factory=ProfileConfig)
    """Profile of a window of steps."""

    fault_detector: FaultDetectorConfig = field(default_factory=FaultDetectorConfig)
    """Detection of numeric faults, and the actions after them."""

    fault_injector: FaultInjectorConfig | None = None
    """Fault injection, for tests of fault tolerance. Unset: no fault."""

    evaluate: dict[str, SuiteConfig] = field(default_factory=dict, hash=False)
    """Evaluation suites by name, such as evaluate.code.path; their metrics are NAME_loss,
    NAME_acc and so on. The validation split has train.eval_every and train.eval_steps."""

    # Any: plain data; a dict has no hash, and runs are keys of caches
    callbacks: dict[str, dict[str, Any] | None] = field(default_factory=dict, hash=False)
    """Settings of callbacks by name, such as callbacks.EarlyStop.patience. The class of a callback
    defines and checks them; none removes those of a callback."""

    kernels: KernelSetting = "auto"
    """Kernel backends. auto: the fastest on this machine; torch: torch operations with our own
    backward; reference: plain definitions; or a backend per operation, such as kernels.norm."""

    seed: Annotated[int, Ge(0)] = 1234
    """Random seed of initial weights, data order and sampling."""


def run_path(run: TrainRun, name: str | None) -> Path:
    """Return runs/NAME, or the path `name` if it contains a slash before its end or starts with a
    dot."""
    plain = (name or run.name).rstrip("/")  # shell completion appends a slash
    if name and (not plain or "/" in plain or plain.startswith(".")):
        return Path(name)
    return Path("runs") / plain


def is_started(folder: Path) -> bool:
    """Return whether the folder is that of a run that was started before."""
    return (folder / CONFIG_FILE).is_file()


def load_run(file: Path, variables: Mapping[str, str] = os.environ) -> TrainRun:
    """Read a run from a YAML file. In the config.yaml of a run or checkpoint, paths may be relative
    to its folder; other files may include files and `variables` (`config/compose.py`).

    Raises:
        ConfigError: the file does not describe a run.
    """
    if file.name != CONFIG_FILE:
        return load_composed(file, TrainRun, variables)
    run = load_yaml(file, TrainRun, stored=True)
    data, template = run.data, run.data.sft.template
    if template is not None and (file.parent / template).is_file():
        data = replace(data, sft=replace(data.sft, template=str(file.parent / template)))
    return replace(run, data=data, tokenizer=locate_tokenizer(run.tokenizer, file.parent))


def list_checkpoint_folders(run_folder: StoragePath) -> list[StoragePath]:
    """Return the folders that may hold the checkpoints of a run: `checkpoints` in its folder, and
    checkpoint.folder in its settings."""
    folders: list[StoragePath] = [run_folder / "checkpoints"]
    if isinstance(run_folder, Path) and (run_folder / CONFIG_FILE).is_file():
        with contextlib.suppress(yaml.YAMLError, OSError, UnicodeDecodeError):
            settings = parse_stored_settings(read_bytes(run_folder / CONFIG_FILE))
            checkpoint = settings.get("checkpoint") if isinstance(settings, dict) else None
            folder = checkpoint.get("folder") if isinstance(checkpoint, dict) else None
            if isinstance(folder, str):
                folders.append(parse_path(folder))
    return folders


def dropout_seed(run: TrainRun) -> int | None:
    """Return the seed of dropout masks and router noise; None if the run has neither."""
    drops = run.model.dropout.is_enabled() or (run.lora is not None and run.lora.dropout > 0)
    noisy = run.model.moe is not None and run.model.moe.router.uses_random_numbers()
    return run.seed if drops or noisy else None


_METRIC_OF_RUN = re.compile(r"z|moe_.*|(.*_)?mtp_\d+")
"""Names whose NAME_loss is a metric of a step, or of the MTP layers in another suite."""


def is_suite_name(name: str) -> bool:
    """Return whether a suite can have this name: metrics can be named NAME_loss, NAME_acc and so
    on, and no others are.

    >>> [name for name in ("code", "a b", "eval", "z", "mtp_1") if is_suite_name(name)]
    ['code']
    """
    is_word = name.replace("-", "_").isidentifier()
    return is_word and name != "eval" and not _METRIC_OF_RUN.fullmatch(name)


def suite_problems(run: TrainRun) -> list[str]:
    """Return the messages of evaluation suites that are not valid."""
    problems = []
    for name, suite in run.evaluate.items():
        at = f"evaluate.{name}"
        if not is_suite_name(name):
            problems.append(
                f"{at}: the name is a prefix of metrics, and eval is that of the validation split, "
                "z, mtp_1 and moe_... those of other losses. Use letters, digits and underscores, "
                "for example evaluate.code."
            )
        if suite.kind == "choice" and (len(suite.path) != 1 or suite.split is not None):
            problems.append(
                f"{at}.kind=choice reads the questions of one JSONL file. Set {at}.path to it"
                f"{f', and {at}.split to none' if suite.split else ''}."
            )
        elif suite.kind == "text" and bool(suite.path) == (suite.split is not None):
            problems.append(
                f"{at} needs exactly one source. Set {at}.path to prefixes of .bin/.idx files, or "
                f"{at}.split to valid."
            )
        elif suite.kind == "text" and suite.path:
            problems += _blend_problems(at, suite)
        if suite.kind == "choice" and not run.model.attention.causal:
            problems.append(
                f"{at}.kind=choice scores each token from the tokens before it, and "
                "model.attention.causal=false. Set kind to text, or remove the suite."
            )
        if (
            suite.kind == "text"
            and suite.micro_batch_size is not None
            and run.train.tokens_per_microbatch is not None
        ):
            problems.append(
                f"{at}.micro_batch_size={suite.micro_batch_size} is the number of samples of a "
                "microbatch, and train.tokens_per_microbatch="
                f"{run.train.tokens_per_microbatch} packs documents. Set {at}.micro_batch_size to "
                "none."
            )
    return problems


def _blend_problems(at: str, suite: SuiteConfig) -> list[str]:
    """Return the messages of a path whose weights cannot be applied."""
    try:
        blend = parse_blend(f"{at}.path", suite.path)
    except ConfigError as error:
        return [str(error)]
    if blend.weights is None or len(blend.prefixes) == 1 or suite.num_samples is not None:
        return []
    return [
        f"{at}.path={' '.join(suite.path)} has weights, and a pass over all rows reads each once. "
        f"Remove the weights, or set {at}.num_samples."
    ]
