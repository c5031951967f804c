"""Mixture-of-experts settings: experts, router, aux losses, expert capacity."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from megalith.config.fields import Example, Ge, Gt, Le, Lt

MAX_EXPERTS = 1 << 14
"""Maximum experts of a layer. Heuristic: ten times the most that are used; plans list experts."""

RouterScore = Literal["softmax", "sigmoid", "sqrt_softplus"]
"""Functions that turn router logits into scores."""

TokenDropPolicy = Literal["least", "last"]
"""Token dropping policy beyond the expert capacity: the tokens with the least router weight, or
the last tokens of the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Router that selects and weights the experts of each token."""

    score: RouterScore = "softmax"
    """Function that turns router logits into scores. softmax: over all experts; sigmoid and
    sqrt_softplus, √log(1 + exp(logit)): per expert."""

    norm_topk_prob: bool = True
    """Normalize the weights of a token's top_k experts to sum to 1. Off: the weights are the
    scores."""

    routed_scaling_factor: Annotated[float, Gt(0)] = 1.0
    """Factor applied to the router weights."""

    num_groups: Annotated[int | None, Ge(1)] = None
    """Group-limited routing: number of groups of consecutive experts; experts are selected only
    from a token's best `topk_groups` groups. Unset: no groups. Source: DeepSeek-AI 2024,
    arXiv:2405.04434, section 2.2.2."""

    topk_groups: Annotated[int | None, Ge(1)] = None
    """Number of groups from which a token's experts are selected. Unset, as `num_groups`: no
    groups."""

    group_score: Literal["top", "max"] = "top"
    """Score of a group. top: sum of its best top_k / topk_groups scores (DeepSeek-V3); max: its
    best score (DeepSeek-V2)."""

    bias: bool = False
    """Add a learned bias per expert to the logits."""

    expert_bias: bool = False
    """Aux-loss-free load balancing, with score sigmoid or sqrt_softplus: add to the scores, for
    the selection only, an expert bias that each step moves by `expert_bias_update_rate`
    towards equal load. Source: Wang et al. 2024, arXiv:2408.15664."""

    expert_bias_update_rate: Annotated[float, Gt(0)] = 1e-3
    """Step size of the expert bias."""

    dtype: Literal["fp32", "fp64", "model"] = "fp32"
    """Dtype of logits and scores. model: the dtype of the model's activations."""

    jitter: Annotated[float, Ge(0), Lt(1), Example(0.01)] = 0.0
    """Input jitter: in training, the router's input is multiplied by random factors from 1 -
    jitter to 1 + jitter. Source: Fedus et al. 2021, arXiv:2101.03961, section 2.4."""

    force_load_balancing: bool = False
    """For benchmarks only: select experts at random, so that their load is balanced. The model
    does not learn."""

    force_biased: Annotated[float, Ge(0), Example(0.01)] = 0.0
    """For benchmarks only: in training, add to the logits a random bias per expert and layer
    with this standard deviation, the same in every step, so that the load is unbalanced."""

    def list_benchmark_settings(self) -> tuple[str, ...]:
        """Return the active benchmark-only routing settings as SETTING=VALUE; empty in a normal
        run."""
        balance = (
            ("model.moe.router.force_load_balancing=true",) if self.force_load_balancing else ()
        )
        return (
            (*balance, f"model.moe.router.force_biased={self.force_biased}")
            if self.force_biased > 0
            else balance
        )

    def uses_random_numbers(self) -> bool:
        """Return whether routing in training uses random numbers."""
        return self.jitter > 0 or self.force_load_balancing or self.force_biased > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxLossConfig:
    """Load-balancing aux losses and other balancing methods. A coefficient of 0 disables a loss.

    Each loss is 1, before its coefficient, for a balanced load. With E experts, K experts per
    token, N tokens, f_i tokens sent to expert i and score s_ti of expert i for token t: E / (K N²)
    Σ_i f_i Σ_t s_ti. Source: Fedus et al. 2021, arXiv:2101.03961, section 2.2; over the global
    batch: Qiu et al. 2025, arXiv:2501.11873.
    """

    sequence_coeff: Annotated[float, Ge(0), Le(1e3), Example(0.01)] = 0.0
    """Coefficient of the aux loss per sequence: per row, or per document with
    data.document_masking."""

    batch_coeff: Annotated[float, Ge(0), Le(1e3), Example(0.01)] = 0.0
    """Coefficient of the aux loss per microbatch of a data-parallel rank."""

    global_batch_coeff: Annotated[float, Ge(0), Le(1e3), Example(0.01)] = 0.0
    """Coefficient of the aux loss whose f_i are summed over all ranks and all microbatches of
    the step so far."""

    z_loss_coeff: Annotated[float, Ge(0), Le(1e3), Example(0.01)] = 0.0
    """Coefficient of the router z-loss, the mean square of log Σ_i exp(logit_i), which keeps
    logits small. Source: Zoph et al. 2022, arXiv:2202.08906."""

    of_choices: bool = False
    """Compute f_i from the experts that the router selects, including groups, biases and noise,
    before tokens are dropped. Off: from the top_k experts by score alone."""

    sinkhorn: bool = False
    """In training, select experts by Sinkhorn routing, which balances the load. Source: Clark et
    al. 2022, arXiv:2202.01169."""

    quantile: bool = False
    """Select experts by logits minus an offset per expert; each step sets the offset to the
    value that would have balanced its load. Source: Megatron-LM."""

    quantile_ema: Annotated[float, Ge(0), Lt(1), Example(0.9)] = 0.0
    """Decay rate of the exponential moving average of the `quantile` offsets, 0 to 1; 0: no
    averaging."""


def has_aux_losses(balance: AuxLossConfig) -> bool:
    """Return whether a load-balancing aux loss is enabled."""
    return max(balance.sequence_coeff, balance.batch_coeff, balance.global_batch_coeff) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """Expert capacity and token dropping. A dropped token skips the expert and continues in the
    residual stream."""

    factor: Annotated[float | None, Gt(0), Example(1.25)] = None
    """Capacity factor: an expert accepts at most ceil(factor K N / E) of the N tokens of a
    microbatch. Unset: dropless, no token is dropped."""

    drop: TokenDropPolicy = "least"
    """Token dropping policy: padding first, then the tokens with the least router weight (least)
    or the last tokens of the sequence (last)."""

    pad: bool = False
    """In training, pad every expert's input to its capacity with zeros, so that no shape depends
    on the routing and no counts are communicated. With n tokens per rank, of N tokens of the
    ranks that share them, each of the E experts gets min(n, ceil(factor K N / E)) rows; with
    ep and etp a rank computes E etp times as many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Mixture of experts that replaces an MLP. Activation, gate, clamp and offset are those of the
    model's MLP.

    Source: Shazeer et al. 2017, arXiv:1701.06538; shared experts: Dai et al. 2024,
    arXiv:2401.06066.
    """

    num_experts: Annotated[int, Ge(1), Le(MAX_EXPERTS)]
    """Number of experts per layer (E)."""

    top_k: Annotated[int, Ge(1)] = 2
    """Number of experts per token (K)."""

    ffn_hidden_size: Annotated[int, Ge(1)]
    """Intermediate size of each expert (f)."""

    layers: tuple[bool, ...] = ()
    """Layers that have experts, as a pattern that repeats over the layers. Empty: all."""

    biases: bool = False
    """Add biases to both linear layers of the experts."""

    apply_router_weight_on_input: bool = False
    """With top_k=1: multiply the expert's input by the router weight, instead of its output."""

    shared_ffn_hidden_size: Annotated[int | None, Ge(1)] = None
    """Total intermediate size of the shared experts, which process all tokens. Unset: no shared
    experts."""

    shared_gate: bool = False
    """Multiply the output of the shared experts by the sigmoid of a learned projection of the
    token."""

    latent_size: Annotated[int | None, Ge(1)] = None
    """Size of the latent space in which experts work, between a down projection before and an up
    projection after them. Unset: experts work on hidden_size features."""

    router: RouterConfig = field(default_factory=RouterConfig)
    """Router: selection and weights of experts."""

    aux_loss: AuxLossConfig = field(default_factory=AuxLossConfig)
    """Aux losses and load balancing."""

    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    """Expert capacity and token dropping."""
