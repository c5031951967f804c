"""Optimizer, parameter groups, learning-rate schedule, gradient clipping, precision and loss
scaling."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, get_args

from megalith.config.fields import Example, Ge, Gt, Le, Lt

MAX_LOSS_SCALE = 2.0**64
"""Maximum loss scale. Heuristic: the product with a gradient of 1 still fits fp32 and bf16."""


UpdateRuleName = Literal["adamw", "sgd", "lion", "muon", "soap", "adafactor"]
"""Names of the built-in update rules."""

ElementwiseRuleName = Literal["adamw", "sgd", "lion"]
"""Names of the built-in update rules that work on any slice of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """Parameter group: parameters, selected by name, with their own learning rate or weight decay.

    A parameter may be in several groups if no two of them decide the same about it.
    """

    name: str
    """Name of the group: lowercase letters, digits and underscores. Its learning rate is lr_NAME
    in metrics.jsonl."""

    match: tuple[str, ...]
    """Parameter names or patterns, such as embed.weight, layers.[0-3].* and *.moe.router."""

    lr: Annotated[float | None, Ge(0), Le(1e3)] = None
    """Peak learning rate of the group, with the same schedule shape as schedule.lr. Unset:
    schedule.lr."""

    min_lr: Annotated[float | None, Ge(0), Le(1e3)] = None
    """Minimum learning rate of the group; needs `lr`. Unset: schedule.min_lr."""

    lr_scale: Annotated[float | None, Ge(0), Le(1e3)] = None
    """Factor applied to the learning rate, instead of `lr`. Unset: 1."""

    weight_decay: Annotated[float | None, Ge(0), Le(1e3)] = None
    """Weight decay of the group. Unset: schedule.weight_decay."""

    end_weight_decay: Annotated[float | None, Ge(0), Le(1e3)] = None
    """Weight decay of the group at the last step; needs `weight_decay`. Unset: the group's
    weight decay is constant."""

    weight_decay_scale: Annotated[float | None, Ge(0), Le(1e3)] = None
    """Factor applied to the weight decay, instead of `weight_decay`. Unset: 1."""

    kind: UpdateRuleName | None = None
    """Update rule of the group. Unset: optim.kind for matrices, optim.scalar_optimizer for other
    parameters."""

    @property
    def sets_rate(self) -> bool:
        """Whether the group sets or scales the learning rate."""
        return (self.lr, self.lr_scale) != (None, None)


CoefficientSet = Literal["quintic", "simple", "polar_express", "cans", "deepseek_v4", "aol"]
"""Names of the sets of Newton-Schulz coefficients (megalith.optim.newton_schulz)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LionConfig:
    """Lion: update by the sign of an interpolation of momentum and gradient.

    Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.
    """

    beta1: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Weight of the momentum in the sign of the update."""

    beta2: Annotated[float, Ge(0), Lt(1)] = 0.98
    """Decay rate of the momentum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig:
    """Muon: momentum, orthogonalized by Newton-Schulz steps for each matrix.

    Source: Jordan et al. 2024, kellerjordan.github.io/posts/muon; scale: Liu et al. 2025,
    arXiv:2502.16982.
    """

    momentum: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay rate of the momentum, an average of the gradients."""

    nesterov: bool = True
    """Orthogonalize an interpolation of momentum and gradient (Nesterov) instead of the
    momentum."""

    coefficients: CoefficientSet | tuple[tuple[float, float, float], ...] = "quintic"
    """Newton-Schulz coefficients: a named set, or a list of triples, one per step. polar_express,
    cans and deepseek_v4 repeat the last triple, the others start again."""

    ns_steps: Annotated[int, Ge(1), Le(100), Example(5)] = 5
    """Number of Newton-Schulz steps."""

    newton_schulz: Literal["plain", "gram"] = "plain"
    """Form of the steps on matrices [m, n], m <= n. gram: on matrices [m, m], in fp32 for bf16
    matrices; less work from n = 2 m on, where fp32 is not much slower than bf16."""

    scale: Literal["spectral", "unit_rms", "shape"] = "spectral"
    """Scale of the update of a matrix (out, in). spectral: sqrt(max(out, in)); unit_rms:
    sqrt(out / in); shape: sqrt(max(1, out / in))."""

    factor: Annotated[float, Gt(0), Le(1e3), Example(0.2)] = 0.2
    """Factor of the scale. 0.2 with spectral matches the update RMS of AdamW, so that its learning
    rate and weight decay can be reused."""

    split: Literal["matrices", "heads", "fused"] = "matrices"
    """What is orthogonalized. matrices: q, k, v, o, gate, up, down and each expert separately;
    heads: attention's projections per head; fused: k with v, and gate with up."""

    second_moment: Literal["normuon", "adamuon"] | None = None
    """Second moment of the orthogonalized update: one per neuron (normuon, arXiv:2510.05491) or
    per element (adamuon, arXiv:2507.11005). Unset: none."""

    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay rate of the second moment."""

    eps: Annotated[float, Gt(0), Le(1.0)] = 1e-8
    """Epsilon of the second moment."""

    dtype: Literal["fp32", "bf16"] | None = None
    """Dtype of the Newton-Schulz steps and of the pieces sent. Unset: bf16 with precision.params
    bf16 or fp16, else the dtype of the parameters."""

    clip_grad: bool = True
    """Count the gradients of Muon's matrices in the global norm, and clip them. Off: they are
    neither counted nor clipped, because their update has unit size whatever the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoapConfig:
    """SOAP: Adam in the eigenbasis of Shampoo's factors. Source: Vyas et al. 2024,
    arXiv:2409.11321, algorithm 3."""

    beta1: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay rate of the first moment."""

    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay rate of the second moment."""

    shampoo_beta: Annotated[float, Ge(0), Lt(1)] = 0.95
    """Decay rate of the factors G G^T and G^T G."""

    eps: Annotated[float, Gt(0), Le(1.0)] = 1e-8
    """Epsilon added to the square root of the second moment."""

    precondition_frequency: Annotated[int, Ge(1), Example(10)] = 10
    """Number of updates between two refreshes of the eigenbases."""

    max_precondition_dim: Annotated[int, Ge(1), Example(8192)] = 8192
    """Dimensions above this are not rotated."""

    kl: bool = False
    """Weight each factor by the inverse eigenvalues of the other (KL-Shampoo,
    arXiv:2509.03378)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdafactorConfig:
    """Adafactor, with factored second moments. Source: Shazeer and Stern 2018, arXiv:1804.04235,
    algorithm 4."""

    beta2_decay: Annotated[float, Ge(-1), Lt(0), Example(-0.8)] = -0.8
    """Exponent of the decay rate of the second moment at update t: 1 - t ** beta2_decay."""

    eps1: Annotated[float | None, Gt(0), Le(1.0)] = None
    """Added to the mean of squared gradients. Unset: the epsilon of the dtype of the master
    weights."""

    eps2: Annotated[float, Gt(0), Le(1e3)] = 1e-3
    """Smallest RMS of the weights by which the learning rate is multiplied."""

    d: Annotated[float, Ge(1), Le(1e3)] = 1.0
    """Largest RMS of an update before the learning rate; larger updates are scaled down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QkClipConfig:
    """QK-clip: after an update, scales down the query and key projections of every head whose
    largest attention score of the step is above a threshold.

    Source: Kimi Team 2025, arXiv:2507.20534, section 2.1.
    """

    threshold: Annotated[float, Gt(0), Le(1e30), Example(100.0)] = 100.0
    """Largest attention score that a head may have, before softmax and soft cap. A head with the
    largest score S > threshold is scaled by threshold / S."""

    balance: Annotated[float, Ge(0), Le(1), Example(0.5)] = 0.5
    """Exponent of the factor for queries; that for keys is 1 - balance. 0.5: both alike."""

    every: Annotated[int, Ge(1), Example(1)] = 1
    """Updates between two clips. The largest scores are only computed in steps that clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """Optimizer (with fp32 master weights for lower-precision weights) and gradient clipping."""

    kind: UpdateRuleName = "adamw"
    """Update rule. adamw: Loshchilov and Hutter 2017, arXiv:1711.05101; sgd: SGD with momentum and
    L2 weight decay; lion, muon, soap, adafactor: see their sections. The last three are for
    matrices; other parameters then use `scalar_optimizer`."""

    scalar_optimizer: ElementwiseRuleName | None = None
    """Update rule of embedding tables, heads, routers, adapters and vectors. Unset: `kind` if it is
    adamw, sgd or lion, otherwise adamw."""

    plugin: str | None = None
    """Update rule of another package instead of `kind`, a class that is built as Class(optim) like
    megalith.optim.sgd.SGD: an installed entry point, or on the command line package.module:name.
    Unset: `kind`."""

    # Any: plain data; a dict has no hash, and runs are keys of caches
    plugin_options: dict[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the plug-in, whose class defines and checks them in its attribute Config."""

    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """adamw: decay rate of the first moment."""

    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """adamw: decay rate of the second moment; 0.999 averages over about 1000 steps."""

    eps: Annotated[float, Gt(0), Le(1.0)] = 1e-8
    """adamw: epsilon added to the square root of the second moment."""

    decoupled_weight_decay: bool = True
    """adamw: apply weight decay directly to the weights. Off: add it to the gradient (Adam with
    L2 regularization)."""

    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """sgd: momentum factor; 0 is plain gradient descent."""

    nesterov: bool = False
    """sgd: use Nesterov momentum. Source: Sutskever et al. 2013, section 2."""

    lion: LionConfig = field(default_factory=LionConfig)
    """Settings of lion."""

    muon: MuonConfig = field(default_factory=MuonConfig)
    """Settings of muon."""

    soap: SoapConfig = field(default_factory=SoapConfig)
    """Settings of soap."""

    adafactor: AdafactorConfig = field(default_factory=AdafactorConfig)
    """Settings of adafactor."""

    clip_grad: Annotated[float, Ge(0), Le(1e30)] = 1.0
    """Gradient clipping: maximum global L2 norm of the gradient. 0 turns clipping off."""

    qk_clip: QkClipConfig | None = None
    """QK-clip, which bounds attention scores. Unset: none."""

    grad_norm_skip_threshold: Annotated[float | None, Gt(0), Le(1e30), Example(100.0)] = None
    """Gradient norm above which a step is skipped: weights and optimizer state do not change, and
    the step is counted as skipped. The norm is that of clipping: with muon.clip_grad=false,
    gradients of Muon's matrices do not count. Unset: none."""

    nonfinite_grad: Literal["skip", "raise"] = "skip"
    """Handling of a NaN or infinite gradient norm. skip: skip the update and count the step;
    raise: end the run with an error that names the rank and the parameter (checks each bucket
    before it is reduced)."""

    count_zeros: bool = False
    """Log the number of zero elements of the gradient."""

    trained: tuple[str, ...] = ("*",)
    """Names or patterns of the parameters to train, such as head.weight and layers.3.*. All
    others are frozen: no gradients, no optimizer state, no communication."""

    frozen: tuple[str, ...] = ()
    """Names or patterns of parameters to freeze among those selected by `trained`."""

    groups: tuple[GroupConfig, ...] = ()
    """Parameter groups with their own learning rate or weight decay."""

    decayed_vectors: tuple[str, ...] = ()
    """Names or patterns of vectors (norm weights, biases) that have weight decay. All other
    vectors have none."""

    def uses(self, rule: UpdateRuleName) -> bool:
        """Return whether some setting names this update rule; optim.plugin replaces `kind`."""
        named = {group.kind for group in self.groups} | {self.scalar_optimizer}
        if self.plugin is None:
            named |= {self.kind}
        needs_default = self.kind not in get_args(ElementwiseRuleName)
        if self.plugin is None and self.scalar_optimizer is None and needs_default:
            named |= {"adamw"}
        return rule in named

    def trains(self, parameter: str) -> bool:
        """Return whether a parameter, given by its canonical name, is trained."""
        return matches_any_pattern(parameter, self.trained) and not matches_any_pattern(
            parameter, self.frozen
        )

    def trains_all(self) -> bool:
        """Return whether no parameter is frozen by name."""
        return self.trained == ("*",) and not self.frozen


TRAIN_ALL = OptimConfig()
"""Default optimizer settings, with every parameter trained."""


def matches_any_pattern(parameter: str, patterns: Sequence[str]) -> bool:
    """Return whether a parameter name matches one of the patterns.

    >>> [matches_any_pattern(f"layers.{n}.attention.q", ["layers.[0-3].*"]) for n in (3, 13)]
    [True, False]
    """
    return any(fnmatchcase(parameter, pattern) for pattern in patterns)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleConfig:
    """Loss scaling with precision.params=fp16, which keeps small gradients from underflowing.

    Ignored in other precisions. Source: Micikevicius et al. 2017, arXiv:1710.03740, section 3.2.
    """

    constant: Annotated[float | None, Gt(0), Le(MAX_LOSS_SCALE), Example(1024.0)] = None
    """Constant loss scale. Unset: dynamic loss scaling, which halves the scale after overflows
    and doubles it after `window` steps without one."""

    initial: Annotated[float, Gt(0), Le(MAX_LOSS_SCALE)] = 2.0**32
    """Initial dynamic loss scale."""

    min: Annotated[float, Gt(0), Le(MAX_LOSS_SCALE)] = 1.0
    """Minimum dynamic loss scale."""

    window: Annotated[int, Ge(1)] = 1000
    """Number of steps without overflow since the last change after which the scale is doubled."""

    hysteresis: Annotated[int, Ge(1)] = 2
    """Number of overflows before the scale is halved; the count restarts when the scale is
    doubled."""

    max_overflows: Annotated[int, Ge(1)] = 100
    """Number of consecutive overflows at the minimum scale after which the run ends with an
    error."""


MomentDtype = Literal["fp32", "bf16", "fp16", "fp8", "int8"]
"""Number formats in which the optimizer stores moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStatesConfig:
    """Number formats of master weights and moments between updates, which compute in fp32.

    Checkpoints hold fp32 values, so that a run may resume with other formats.
    """

    master_weights: Literal["fp32", "remainder", "none"] = "fp32"
    """Master weights of bf16 weights. remainder: the low 16 bits, which with the bf16 weights give
    the exact fp32 values (2 bytes instead of 4); none: no master weights, updates are rounded
    stochastically to bf16."""

    first_moment: MomentDtype = "fp32"
    """Number format of first moments and momentum. fp16, fp8 and int8 have one fp32 scale per block
    of 256 elements; vectors (norms, biases) then have fp32."""

    second_moment: MomentDtype = "fp32"
    """Number format of adamw's second moments, as for `first_moment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionConfig:
    """Numeric precision and loss scaling."""

    params: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Dtype of weights and activations. bf16 and fp16 keep fp32 master weights and accumulate
    gradients in fp32; fp16 also uses loss scaling; fp64 is for verification."""

    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """fp16: loss scaling."""

    optimizer_states: OptimizerStatesConfig = field(default_factory=OptimizerStatesConfig)
    """Number formats of the optimizer's states."""


def optim_problems(optim: OptimConfig, precision: PrecisionConfig) -> list[str]:
    """Return the violated rules of optimizer and precision as error messages."""
    problems = _momentum_problems(optim) + _loss_scale_problems(optim, precision)
    if optim.muon.dtype is not None and precision.params == "fp64":
        problems.append(
            f"optim.muon.dtype={optim.muon.dtype} with precision.params=fp64, which is for "
            "verification. Remove optim.muon.dtype."
        )
    return problems


def _momentum_problems(optim: OptimConfig) -> list[str]:
    problems = []
    if optim.nesterov and not optim.uses("sgd"):
        problems.append(
            f"optim.nesterov={str(optim.nesterov).lower()} needs optim.kind=sgd, but "
            f"optim.kind={optim.kind}. "
            f"Set optim.kind=sgd, or remove optim.nesterov."
        )
    elif optim.nesterov and optim.momentum == 0:
        problems.append(
            "optim.nesterov=true needs momentum, but "
            f"optim.momentum={optim.momentum}. "
            f"Set optim.momentum to 0.9, or remove optim.nesterov."
        )
    return problems


def _loss_scale_problems(optim: OptimConfig, precision: PrecisionConfig) -> list[str]:
    scale, problems = precision.loss_scale, []
    section = "precision.loss_scale"
    if scale.min > scale.initial:
        problems.append(
            f"{section}.min={scale.min:g} is above {section}.initial={scale.initial:g}, the "
            f"initial scale. Set {section}.min to {scale.initial:g} or less."
        )
    if scale.constant is not None and precision.params != "fp16":
        problems.append(
            f"{section}.constant={scale.constant:g} with "
            f"precision.params={precision.params}, which uses no loss scale. Set "
            f"precision.params=fp16, or remove {section}.constant."
        )
    if precision.params == "fp16" and optim.nonfinite_grad == "raise":
        problems.append(
            f"optim.nonfinite_grad={optim.nonfinite_grad} with precision.params=fp16: "
            "overflows are part of dynamic loss scaling and must not end the "
            f"run. Set optim.nonfinite_grad=skip."
        )
    return problems


# --- learning rate and weight decay schedules

DecayStyle = Literal["constant", "linear", "cosine", "inverse_square_root", "wsd"]
WsdDecayStyle = Literal["linear", "cosine", "exponential", "minus_sqrt"]
WeightDecayStyle = Literal["constant", "linear", "cosine"]
BatchSizeScaling = Literal["none", "sqrt", "linear"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Learning rate and weight decay schedules: warmup, then a constant rate or a decay.

    Lengths are in steps; the schedule counts samples, so a skipped step does not advance it.
    """

    lr: Annotated[float, Ge(0), Le(1e3), Example(3e-4)]
    """Peak learning rate, reached at the end of the warmup."""

    min_lr: Annotated[float, Ge(0), Le(1e3)] = 0.0
    """Minimum learning rate, reached at the end of the decay and used for all later steps. Not
    used by constant."""

    style: DecayStyle = "cosine"
    """Shape of the schedule after the warmup. wsd (warmup-stable-decay) keeps `lr` constant and
    decays it over the last `wsd_decay_steps`."""

    plugin: str | None = None
    """Schedule of another package, a function of (schedule, samples, lengths) like
    megalith.optim.schedule.learning_rate that returns the learning rate: an installed entry point,
    or on the command line package.module:name. Unset: `style`."""

    warmup_steps: Annotated[int | float, Ge(0)] = 0
    """Number of warmup steps, over which the learning rate rises linearly from `warmup_init` to
    `lr`. A number below 1 is a fraction of `decay_steps`, or of train.steps if that is unset:
    0.1 of 40 steps is 4."""

    warmup_init: Annotated[float, Ge(0), Le(1e3)] = 0.0
    """Learning rate at the start of the warmup."""

    decay_steps: Annotated[int | None, Ge(1)] = None
    """Step at which `min_lr` is reached, counted from the start of the run. Unset: train.steps."""

    wsd_decay_steps: Annotated[int | None, Ge(0)] = None
    """wsd: number of steps of the final decay, which ends at `decay_steps`. Unset with all other
    styles."""

    wsd_decay_style: WsdDecayStyle = "minus_sqrt"
    """wsd: shape of the final decay. minus_sqrt, 1 - sqrt(x), was best in Hägele et al. 2024,
    arXiv:2405.18392, section 3."""

    scale_lr_with_batch_size: BatchSizeScaling = "none"
    """With train.batch_size_schedule: factor of the learning rate in steps whose batch size differs
    from train.global_batch_size, for which `lr` is set. sqrt: square root of their ratio, for Adam
    (arXiv:2205.10287); linear: their ratio, for SGD (arXiv:1706.02677); none: 1."""

    weight_decay: Annotated[float, Ge(0), Le(1e3), Example(0.1)] = 0.1
    """Weight decay of matrices; norms and biases have none. The initial value if
    `weight_decay_style` is not constant."""

    end_weight_decay: Annotated[float | None, Ge(0), Le(1e3)] = None
    """Weight decay at the last step with `weight_decay_style` linear or cosine. Unset with
    constant."""

    weight_decay_style: WeightDecayStyle = "constant"
    """Shape of the change from `weight_decay` to `end_weight_decay` over the run."""
