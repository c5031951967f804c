"""The root of a training run: everything that decides what `megalith train` does."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig
from megalith.config.kernels import KernelSetting
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import OptimConfig, PrecisionConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.config.schedule import ScheduleConfig
from megalith.config.tokenizer import TokenizerConfig, locate_tokenizer
from megalith.config.tree import load_yaml

CONFIG_FILE = "config.yaml"
"""The settings of a run, in its folder and in each of its checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """The training loop: batch sizes, length, and when it looks at itself."""

    steps: int
    """Optimizer updates in the whole run."""

    global_batch_size: int
    """Rows per step over all ranks."""

    micro_batch_size: int = 1
    """Rows that one rank computes at once; the rest of its share is accumulated."""

    seq_len: int = 1024
    """Tokens per row; with `tokens_per_microbatch`, of the longest document."""

    tokens_per_microbatch: int | None = None
    """Read whole documents, or conversations, in packs of at most so many tokens instead of
    rows: those that one rank computes at once (ranks along cp share packs of cp times as many).
    A step then has `global_batch_size` documents in as many microbatches as they need, and ranks
    along dp work alike. Unset: rows of `seq_len`."""

    balance_rows: bool = False
    """BatchAssignment rows of conversations to ranks along dp so that they cost them alike; the
    rows of a step stay the same."""

    label_smoothing: float = 0.0
    """Share of each label that all other tokens of the vocabulary divide evenly, in the losses
    that are minimized and logged while training; evaluation measures -log p(label) all the same.
    Source: arXiv:1512.00567, section 7."""

    z_loss: float = 0.0
    """What the square of each labeled token's log of the sum of exp(score) adds to the loss of
    every head; logged as `z_loss`, beside `max_logit`, and no part of `loss`. 1e-4 is usual:
    arXiv:2204.02311, section 5."""

    loss_chunk: int | None = None
    """Tokens whose logits there are at a time; unset: as many as fill a few MiB."""

    loss_backward: Literal["kept", "recomputed"] = "kept"
    """Gradients of hidden states and of the head: formed beside the loss and kept until
    backward, or there, from logits that are computed again."""

    log_every: int = 1
    """Steps between rows of metrics.jsonl; a row has the loss of its own step, and times since the
    last one."""

    eval_every: int | None = None
    """Steps between evaluations on the validation split; 0 or unset: only after the last step."""

    eval_steps: int = 0
    """Global batches per evaluation; 0 turns evaluation off."""

    compile: bool = False
    """Compile each layer with torch.compile (needs tp = 1 and a C++ compiler on CPUs)."""

    threads: int | None = None
    """CPU threads per rank; unset: cores / ranks on this machine."""

    max_minutes: float | None = None
    """Stop after this many minutes with a save and exit code 75; the same command goes on. Unset:
    no limit."""


Captured = Literal["hidden", "logits", "weights", "routers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """What is written down besides metrics.jsonl."""

    tensorboard: bool | None = None
    """Write TensorBoard events; unset: when the package is installed."""

    plots: bool = True
    """Draw plots/loss.png when the run ends or is stopped."""

    max_logit: bool = False
    """Write the largest score of a labeled token in each step; with train.z_loss it is always
    written."""

    per_layer: bool = False
    """Write what experts did for each layer, too: losses of balance, entropy, idle experts,
    refused choices, the range of balancing biases, and the tokens of every expert."""

    routing_trace: int = 0
    """Write which experts every token chose in so many first steps to routing/, a file for each
    rank; 0: in none."""

    routing_captures: tuple[Captured, ...] = ()
    """What else to write of these steps, for each rank and step a safetensors file: `hidden`,
    what routers read; `logits`; `weights` of the chosen; all in bf16. And `routers`, their own
    weights, as they are."""

    parameters: bool = False
    """Write to parameters.jsonl, when the run starts, for every parameter whether it is trained
    and which group decides its learning rate and its weight decay."""

    peak_tflops: float | None = None
    """Peak rate of one device, for the MFU; unset: measured on CPUs, from a table on known GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRun:
    """One training run."""

    name: str
    """Its folder is runs/NAME unless --run says otherwise."""

    model: ModelConfig
    """The network."""

    data: DataConfig
    """Where tokens come from."""

    train: LoopConfig
    """Batches and steps."""

    schedule: ScheduleConfig
    """Learning rate and weight decay over the run."""

    lora: LoraConfig | None = None
    """Train adapters beside the weights of checkpoint.load; unset: train the weights themselves."""

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """How text becomes tokens; used by evaluation in bits per byte and by generate."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the ranks divide the work."""

    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimizer."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""

    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    """What backward computes again instead of keeping it."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """What waits in host memory between forward and backward."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When to save."""

    observe: ObserveConfig = field(default_factory=ObserveConfig)
    """Plots, TensorBoard, MFU."""

    kernels: KernelSetting = "auto"
    """How operations between matmuls are computed: auto, the fastest way on this machine; torch,
    torch operations with our own backward; reference, their plain definitions. Or for each
    operation, as kernels.norm."""

    seed: int = 1234
    """Decides initial weights, data order and sampling."""


def load_run(file: Path) -> TrainRun:
    """Read a run from a YAML file; that of a run or checkpoint, config.yaml, may name copies beside
    it.

    Raises:
        ConfigError: the file does not describe a run.
    """
    run = load_yaml(file, TrainRun, stored=file.name == CONFIG_FILE)
    if file.name != CONFIG_FILE:
        return run
    data, template = run.data, run.data.sft.template
    if template is not None and (file.parent / template).is_file():
        data = replace(data, sft=replace(data.sft, template=str(file.parent / template)))
    return replace(run, data=data, tokenizer=locate_tokenizer(run.tokenizer, file.parent))


def dropout_seed(run: TrainRun) -> int | None:
    """What masks of dropout and a router's noise are drawn from; None: there are none."""
    drops = run.model.dropout.drops() or (run.lora is not None and run.lora.dropout > 0)
    noisy = run.model.moe is not None and run.model.moe.router.draws()
    return run.seed if drops or noisy else None
