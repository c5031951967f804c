"""A mixture of experts in place of an MLP: how many, who chooses them, and what keeps them equally
busy."""

from dataclasses import dataclass, field
from typing import Literal

Score = Literal["softmax", "sigmoid", "sqrt_softplus"]
"""What makes a router's logits scores of experts."""

Drop = Literal["least", "last"]
"""Which choices an expert refuses beyond its capacity: those of least weight, or the last of the
sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """How a token chooses its experts, and how much each counts."""

    score: Score = "softmax"
    """Scores of a token's experts: shares of one (softmax), or each by itself (sigmoid, or √log(1 +
    exp(logit)))."""

    norm_topk_prob: bool = True
    """The weights of a token's chosen experts are divided by their sum; otherwise they are their
    scores."""

    routed_scaling_factor: float = 1.0
    """What the weights are multiplied by."""

    num_groups: int | None = None
    """Experts, in order, form so many groups, and only those of the best `topk_groups` are chosen
    from; unset: all. Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.2.2."""

    topk_groups: int | None = None
    """Groups that a token chooses from; unset: all, as `groups`."""

    group_score: Literal["top", "max"] = "top"
    """A group is as good as the sum of its best top_k / topk_groups scores (DeepSeek-V3), or as its
    best (V2)."""

    bias: bool = False
    """Add a learned number per expert to the logits."""

    expert_bias: bool = False
    """With sigmoid or sqrt_softplus: add to scores, for the choice alone, a number per expert
    that each step moves by `expert_bias_update_rate` towards equal use. Source: Wang et al. 2024,
    arXiv:2408.15664."""

    expert_bias_update_rate: float = 1e-3
    """What a step moves the balancing bias by."""

    dtype: Literal["fp32", "fp64", "model"] = "fp32"
    """What logits and scores are computed in; model: logits as the model's activations are."""

    jitter: float = 0.0
    """While training, the router's input is multiplied by numbers from 1 - jitter to 1 + jitter.
    Source: Fedus et al. 2021, arXiv:2101.03961, section 2.4."""

    force_load_balancing: bool = False
    """For measuring alone: experts are chosen at random, so that all are equally busy. The model
    learns nothing."""

    force_biased: float = 0.0
    """For measuring alone: while training, logits are moved by random numbers of this standard
    deviation, one for each expert of a layer and the same in every step, so that some are far
    busier than others."""

    def forced_settings(self) -> tuple[str, ...]:
        """The settings under which chance chooses, as a person writes them; none in a run that
        learns."""
        balance = (
            ("model.moe.router.force_load_balancing=true",) if self.force_load_balancing else ()
        )
        return (
            (*balance, f"model.moe.router.force_biased={self.force_biased}")
            if self.force_biased > 0
            else balance
        )

    def draws(self) -> bool:
        """Whether a choice depends on random numbers while training."""
        return self.jitter > 0 or self.force_load_balancing or self.force_biased > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxLossConfig:
    """What is added to the loss so that experts are equally busy. A weight of 0 leaves a loss out.

    Each is 1, before its weight, when all experts are equally busy. With E experts, K of them
    chosen by a token, N tokens, f_i of them sent to expert i and s_ti its score for token t: E / (K
    N²) Σ_i f_i Σ_t s_ti. Source: Fedus et al. 2021, arXiv:2101.03961, section 2.2; over the global
    batch: Qiu et al. 2025, arXiv:2501.11873.
    """

    sequence_coeff: float = 0.0
    """Weight of the loss over each row, or with data.document_masking each document, by itself."""

    batch_coeff: float = 0.0
    """Weight of the loss over each microbatch of a data-parallel rank."""

    global_batch_coeff: float = 0.0
    """Weight of the loss whose f_i are of all microbatches of the step so far, over all ranks."""

    z_loss_coeff: float = 0.0
    """Weight of the mean square of log Σ_i exp(logit_i), which keeps logits small.
    Source: Zoph et al. 2022, arXiv:2202.08906."""

    of_choices: bool = False
    """The f_i of these losses are of the experts that tokens ask for, with groups, biases and
    noise, before any refuses; otherwise of the best by score alone."""

    sinkhorn: bool = False
    """While training, experts are chosen by a plan that sends all equally many tokens.
    Source: Clark et al. 2022, arXiv:2202.01169."""

    quantile: bool = False
    """Experts are chosen by logits less an offset per expert, which each step sets to what would
    have sent all experts equally many tokens. Source: as Megatron-LM has it."""

    quantile_ema: float = 0.0
    """What of the offsets before a step remains in those after it."""


def has_aux_losses(balance: AuxLossConfig) -> bool:
    """Whether a loss keeps experts equally busy."""
    return max(balance.sequence_coeff, balance.batch_coeff, balance.global_batch_coeff) > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """How many tokens an expert takes. What it refuses goes on without it, in the residual
    stream."""

    factor: float | None = None
    """An expert takes ceil(factor K N / E) of a microbatch's N tokens; unset: all that choose
    it."""

    drop: Drop = "least"
    """Which it refuses: padding first, and then those that weigh least, or that come last."""

    pad: bool = False
    """While training, every expert computes equally many rows, zeros where fewer chose it, so
    that no shape depends on the choices and no counts travel. Of a rank's n tokens, of N that
    ranks share, each of the E experts gets min(n, ceil(factor K N / E)) rows: with ep and etp a
    rank computes E etp times as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in place of an MLP. Activation, gate, clamp and offset are those of the
    model's MLP.

    Source: Shazeer et al. 2017, arXiv:1701.06538; shared experts: Dai et al. 2024,
    arXiv:2401.06066.
    """

    num_experts: int
    """Experts of a layer (E)."""

    top_k: int = 2
    """Experts that a token goes to (K)."""

    ffn_hidden_size: int
    """Features inside an expert (f)."""

    layers: tuple[bool, ...] = ()
    """Which layers have experts, as a pattern that repeats over the layers; unset: all."""

    biases: bool = False
    """Experts add biases after both of their matmuls."""

    apply_router_weight_on_input: bool = False
    """With top_k=1: a token is multiplied by its weight before the expert, and not what comes out
    of it."""

    shared_ffn_hidden_size: int | None = None
    """Inner features of an MLP for all tokens, beside the experts; of several, their sum. Unset:
    none."""

    shared_gate: bool = False
    """Multiply what it gives by the sigmoid of a learned product with the token."""

    latent_size: int | None = None
    """Experts work on so many features, which a matmul takes out of the token's and another brings
    back; unset: all."""

    router: RouterConfig = field(default_factory=RouterConfig)
    """How a token chooses."""

    aux_loss: AuxLossConfig = field(default_factory=AuxLossConfig)
    """What keeps experts equally busy."""

    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    """How many tokens an expert takes."""
