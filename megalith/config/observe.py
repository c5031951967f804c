"""Settings of what a run measures and writes: metrics, experiment trackers, log messages."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

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
    """Group of the run in W&B."""

    tags: tuple[str, ...] = ()
    """Tags of the run in W&B."""

    mode: Literal["online", "offline"] = "online"
    """online: send metrics while the run goes on, which needs a login; offline: write them to
    RUN/wandb/, for `wandb sync`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowConfig:
    """MLflow: the metrics and settings of the run, sent by rank 0."""

    tracking_uri: str
    """Address of the tracking server, such as http://localhost:5000."""

    experiment: str = "megalith"
    """Experiment of the run; created if it does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """Measurements and outputs of a run besides metrics.jsonl."""

    tensorboard: bool | None = None
    """Write TensorBoard events. Unset: if the package is installed."""

    plots: bool = True
    """Write plots/loss.png when the run ends or is stopped."""

    max_logit: bool = False
    """Log the largest logit of each step; always logged with train.z_loss."""

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

    callback_times: bool = False
    """Log the host time spent in each callback since the last logged step, on rank 0, as
    `time_NAME_ms`."""

    parameters: bool = False
    """Write parameters.jsonl at the start of the run: for each parameter, whether it is trained
    and which group sets its learning rate and weight decay."""

    peak_tflops: Annotated[float | None, Gt(0), Le(1e9), Example(100.0)] = None
    """Peak TFLOP/s of one device, for the MFU. Unset: measured on CPUs, from a table on known
    GPUs."""

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
    return problems
