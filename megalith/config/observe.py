"""Settings of what a run measures and writes: metrics, experiment trackers, log messages."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from megalith.config.fields import Example, Ge, Gt, Le
from megalith.errors import did_you_mean

Captured = Literal["hidden", "logits", "weights", "routers"]

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases: the metrics and settings of the run, sent by rank 0."""

    project: str
    """Project of the run."""

    entity: str | None = None
    """User or team of the project. Unset: that of the login."""

    name: str | None = None
    """Name of the run in W&B. Unset: `name`."""

    group: str | None = None
    """Group of the run in W&B. Unset: none."""

    tags: tuple[str, ...] = ()
    """Tags of the run in W&B."""

    mode: Literal["online", "offline"] = "online"
    """online: send metrics while the run goes on, which needs a login; offline: write them to
    RUN/wandb/, for `wandb sync`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowConfig:
    """MLflow: the metrics and settings of the run, sent by rank 0."""

    tracking_uri: str
    """Address of the tracking server, such as http://localhost:5000, or of a folder, such as
    file:///data/mlruns. Credentials are read from MLFLOW_TRACKING_USERNAME and
    MLFLOW_TRACKING_PASSWORD, or from MLFLOW_TRACKING_TOKEN."""

    experiment: str = "megalith"
    """Experiment of the run; created if it does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpConfig:
    """Dumps of weights and gradients: dumps/step_0000100/rank_00000.safetensors, each rank its
    shards."""

    every: Annotated[int | None, Ge(1)] = None
    """Steps between dumps. Unset: no dumps."""

    weights: bool = False
    """Dump the weights after the update."""

    gradients: bool = False
    """Dump the summed gradients, before clipping and without the loss scale."""

    only: tuple[str, ...] = ()
    """Patterns of the parameters to dump, such as layers.0.*. Empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Profile of a window of steps, one file per rank in profile/."""

    start: Annotated[int | None, Ge(1)] = None
    """First profiled step. Unset: no profile."""

    steps: Annotated[int, Ge(1)] = 2
    """Number of profiled steps."""

    warmup: Annotated[int, Ge(0)] = 1
    """Steps before `start` in which the profiler already runs, and which are not recorded."""

    ranks: tuple[int, ...] = (0,)
    """Ranks that are profiled. Empty: all."""

    tool: Literal["torch", "nsys"] = "torch"
    """torch: torch.profiler, which writes a Chrome trace; nsys: start and stop the capture of
    `nsys profile --capture-range=cudaProfilerApi`, with NVTX ranges of sections and layers."""

    shapes: bool = False
    """Record the shapes of inputs (torch)."""

    stacks: bool = False
    """Record Python stacks (torch)."""

    memory: bool = False
    """Record allocations (torch)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """Measurements and outputs of a run besides metrics.jsonl."""

    tensorboard: bool | None = None
    """Write TensorBoard events. Unset: if the package is installed."""

    plots: bool = True
    """Write plots/loss.png when the run ends or is stopped."""

    max_logit: bool = False
    """Log the largest logit of each step; always logged with train.z_loss."""

    max_attention_logit: bool = False
    """Log the largest attention score of each step, scaled, before softmax and soft cap, with its
    layer and head; always logged in the steps that optim.qk_clip measures."""

    grad_norm_by_group: bool = False
    """Log the gradient norm before clipping of embedding tables and head, attention, MLPs, MoE
    layers and norms, as grad_norm_embedding, grad_norm_attention, grad_norm_mlp,
    grad_norm_experts and grad_norm_norms."""

    per_layer: bool = False
    """Log metrics of experts per layer: aux losses, entropy, idle experts, dropped tokens, the
    range of expert biases, and tokens per expert."""

    routing_trace: Annotated[int, Ge(0)] = 0
    """Number of first steps whose selected experts are written to routing/, one file per rank;
    0: none."""

    routing_captures: tuple[Captured, ...] = ()
    """Additional data to write for the steps of `routing_trace`, one safetensors file per rank
    and step: hidden (inputs of the routers), logits, weights (of the selected experts), all
    in bf16, and routers (their parameters, unconverted)."""

    timer_level: Annotated[int, Ge(0), Le(2)] = 0
    """Sections of a step whose time is logged, as `time_NAME_ms` per step: the mean over ranks, and
    with several ranks also minimum, maximum and the slowest rank. 0: none; 1: data, forward and
    backward together, exposed gradient reduction, optimizer, evaluation, saving, callbacks; 2: also
    forward, backward and messages of each microbatch, except with `parallel.overlap_experts`, which
    runs two microbatches alternately."""

    callback_times: bool = False
    """Log the host time spent in each callback as `time_NAME_ms` per step, as with `timer_level`
    1."""

    parameters: bool = False
    """Write parameters.jsonl at the start of the run: for each parameter, whether it is trained
    and which group sets its learning rate and weight decay."""

    peak_tflops: Annotated[float | None, Gt(0), Le(1e9), Example(100.0)] = None
    """Peak TFLOP/s of one device, for the MFU. Unset: measured on CPUs, from a table on known
    GPUs."""

    memory_every: Annotated[int | None, Ge(1)] = None
    """Log measured and estimated memory of every pipeline and tensor-parallel rank after steps 1
    and 2, and at multiples of this step. Unset: after steps 1 and 2 only."""

    memory_history: bool = False
    """Record allocations on the GPU, and write memory/rank_0.pickle (for
    https://docs.pytorch.org/memory_viz) when a rank runs out of memory."""

    param_norm: bool = False
    """Log the L2 norm of all trained parameters, from master weights, as `param_norm`."""

    straggler_check_every: Annotated[int | None, Ge(1)] = 100
    """Steps between two comparisons of the busy times of all ranks, in which a rank that is slower
    than others with the same work, or than in its own first steps, is reported. Unset: they are not
    measured."""

    energy: bool = False
    """Log joules per step and per token and mean power, of GPUs (NVML) or of CPUs (RAPL). Omitted
    where a device has no readable counter."""

    dump: DumpConfig = field(default_factory=DumpConfig)
    """Dumps of weights and gradients."""

    log_level: LogLevel = "INFO"
    """Lowest level of the log messages in log.txt."""

    log_levels: tuple[str, ...] = ()
    """Levels of single loggers, each NAME=LEVEL, such as megalith.checkpoint=DEBUG."""

    log_format: Literal["text", "json"] = "text"
    """Lines of log.txt: text, or one JSON object per message."""

    log_ranks: bool = False
    """Also write the log messages of every rank above 0, to logs/rank_00001.txt and so on."""

    wandb: WandbConfig | None = None
    """Weights & Biases. Unset: not used."""

    mlflow: MlflowConfig | None = None
    """MLflow. Unset: not used."""

    flush_seconds: Annotated[float, Ge(0), Le(3600)] = 30.0
    """Longest wait at the end of the run for metrics that `wandb` and `mlflow` have not received
    yet."""


def observe_problems(config: ObserveConfig) -> list[str]:
    """Return the messages of values that are not valid."""
    problems = []
    for text in config.log_levels:
        name, _, level = text.partition("=")
        if name.split(".")[0] != "megalith" or level not in get_args(LogLevel):
            near = did_you_mean(level.upper(), get_args(LogLevel))
            problems.append(
                f"observe.log_levels={text}: expected NAME=LEVEL, with a logger whose name starts "
                f"with megalith and a level of {', '.join(get_args(LogLevel))}.{near} Use for "
                "example megalith.checkpoint=DEBUG."
            )
    dump = config.dump
    if dump.every is not None and not (dump.weights or dump.gradients):
        problems.append(
            f"observe.dump.every={dump.every}: nothing is dumped. Set observe.dump.weights=true or "
            "observe.dump.gradients=true."
        )
    return problems + _tracker_problems(config)


_MLFLOW_SCHEMES = ("http", "https", "file", "sqlite", "databricks")


def _tracker_problems(config: ObserveConfig) -> list[str]:
    problems = []
    if config.wandb is not None and not config.wandb.project.strip():
        problems.append(
            f"observe.wandb.project={config.wandb.project!r}: W&B stores each run in a project. "
            "Use a name such as megalith, or set observe.wandb=none."
        )
    if config.mlflow is not None and not config.mlflow.experiment.strip():
        problems.append(
            f"observe.mlflow.experiment={config.mlflow.experiment!r}: MLflow stores each run in an "
            "experiment. Use a name such as megalith."
        )
    if config.mlflow is not None and (problem := _uri_problem(config.mlflow.tracking_uri)):
        problems.append(problem)
    return problems


def _uri_problem(uri: str) -> str | None:
    """Return what is wrong with a tracking URI; the text never contains its credentials."""
    is_http = uri.startswith(("http://", "https://"))
    network_location = uri.removeprefix("http://").removeprefix("https://").split("/")[0]
    _, at, host = network_location.rpartition("@")
    if at and not uri.startswith(("file:", "sqlite:")):
        return (
            f"observe.mlflow.tracking_uri=***@{host}: credentials in the address would be written "
            "to config.yaml and sent to the trackers. Remove everything before the host, and set "
            "the environment variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."
        )
    if is_http and "?" in uri:
        return (
            f"observe.mlflow.tracking_uri={uri.partition('?')[0]}?***: credentials in a query "
            "would be written to config.yaml and sent to the trackers. Remove the query, and set "
            "the environment variable MLFLOW_TRACKING_TOKEN."
        )
    if _is_mlflow_uri(uri):
        return None
    return (
        f"observe.mlflow.tracking_uri={uri}: expected an address with a scheme of "
        f"{', '.join(_MLFLOW_SCHEMES)}. Use for example http://localhost:5000, or a folder such as "
        "file:///data/mlruns."
    )


def _is_mlflow_uri(uri: str) -> bool:
    try:
        parts = urlsplit(uri)
        has_host = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or an incomplete IPv6 address
        return False
    if parts.scheme in ("http", "https"):
        return has_host
    return uri == "databricks" or parts.scheme in _MLFLOW_SCHEMES


def profile_problems(config: ProfileConfig, *, steps: int, world: int) -> list[str]:
    """Return the messages of a window that a run of `steps` steps on `world` ranks does not
    have."""
    if config.start is None:
        return []
    problems = [
        f"profile.ranks={rank}: the run has {world} ranks. Use a rank from 0 to {world - 1}."
        for rank in config.ranks
        if not 0 <= rank < world
    ]
    last = config.start + config.steps - 1
    if last > steps:
        fixes = []
        if config.steps <= steps:
            fixes.append(f"profile.start to at most {steps - config.steps + 1}")
        if config.start <= steps:
            fixes.append(f"profile.steps to at most {steps - config.start + 1}")
        fix = ", or ".join(fixes) or f"profile.start to 1 and profile.steps to at most {steps}"
        problems.append(
            f"profile.start={config.start} with profile.steps={config.steps} ends at step {last}, "
            f"and the run at train.steps={steps}. Set {fix}."
        )
    return problems
