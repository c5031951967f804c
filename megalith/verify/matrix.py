"""Matrix of layouts that must equal one process: every axis, its variants, and combinations of
axes.

The rows are data (`matrix.yaml`). The layout tests and `megalith verify --all` use the same rows.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.fields import Plain
from megalith.config.lora import LoraConfig
from megalith.config.model import (
    AttentionConfig,
    CrossConfig,
    DropoutConfig,
    LayersConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    MuPConfig,
    RelativeConfig,
    RopeConfig,
)
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.config.optim import TRAIN_ALL, OptimConfig
from megalith.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig
from megalith.config.train import EMAConfig
from megalith.config.tree import from_dict, parse_yaml, to_dict
from megalith.errors import ConfigError, did_you_mean
from megalith.verify.ranks import LayoutCase, MaskKind, choose_micro_batch_size, layout_case

# --- tiny models with every layer variant, for the matrix of layouts


def tiny(
    *,
    num_heads: int = 4,
    num_kv_heads: int = 4,
    num_layers: int = 2,
    tied: bool = False,
    bias: bool = False,
) -> ModelConfig:
    """Return a model with sizes that are no powers of two, a padded vocabulary, and dimensions that
    tp 3 does not divide."""
    return ModelConfig(
        vocab_size=61,
        pad_vocab_to_multiple_of=4,
        hidden_size=24,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=6,
        ffn_hidden_size=20,
        tied_embeddings=tied,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


TIED = tiny(tied=True)
SHARED = tiny(num_heads=8, num_kv_heads=2)  # tp 4 has two ranks per KV head
UNEVEN = tiny(num_heads=6, num_kv_heads=2)  # and with 6 heads these have two query heads and one
FOUR = tiny(num_kv_heads=2, num_layers=4)
FOUR_TIED = replace(FOUR, tied_embeddings=True)

PLAIN = ModelConfig(
    vocab_size=61,
    pad_vocab_to_multiple_of=4,
    hidden_size=24,
    num_layers=4,
    num_heads=6,
    num_kv_heads=2,
    head_dim=6,
    ffn_hidden_size=20,
    max_seq_len=48,
)
"""Base model of the variants."""

NORMED_AROUND = replace(
    PLAIN,
    zero_centered_gamma=True,
    norm_placement="around",
    activation="gelu_tanh",
    tied_embeddings=True,
    embedding_scale=24**0.5,
    logit_softcap=3.0,
    rope=RopeConfig(local_theta=100.0, scaling="linear", factor=2.0),
    attention=AttentionConfig(
        qk_norm="head", softcap=2.0, window=5, window_layers=(True, False), scale=0.3
    ),
)
"""Like Gemma 2 and 3: norms before and after, softcap, sliding window in every other layer, two
RoPE bases."""

NORMED_AFTER = replace(
    PLAIN, fp32_residual=True, norm_placement="after", attention=AttentionConfig(qk_norm="whole")
)
"""Like OLMo 2: norms only after the layers, QK norm over all heads."""

PARALLEL = replace(
    PLAIN,
    block="parallel",
    norm="layer",
    gated=False,
    activation="gelu",
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    rope=RopeConfig(fraction=0.34),
)
"""Like GPT-NeoX: parallel attention and MLP, LayerNorm, RoPE on a third of the features, biases."""

ONE_NORM = replace(
    PARALLEL,
    block="parallel_one_norm",
    activation="squared_relu",
    residual_scale=0.5,
    logit_scale=0.7,
    mup=MuPConfig(base_hidden_size=8, base_head_dim=3),
    embedding_init_std=0.1,
    init_overrides=(("*.mlp.down", 0.3),),
)
"""Like Falcon: one norm for attention and MLP; with muP at three times the base width."""

LEARNED = replace(
    PARALLEL,
    block="sequential",
    positions="learned",
    activation="gelu_tanh",
    tied_embeddings=True,
    rope=RopeConfig(),
    dropout=DropoutConfig(embedding=0.1, residual=0.2),
)
"""Like GPT-2: learned positions, and dropout."""

SINKS = replace(
    PLAIN,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    activation="quick_gelu",
    activation_clamp=1.0,
    up_offset=1.0,
    rope=RopeConfig(
        scaling="yarn", factor=4.0, original_max_position=16, whole_pairs=False, interleaved=True
    ),
    attention=AttentionConfig(sinks=True, window=4, window_layers=(True, False)),
)
"""Like gpt-oss: attention sinks, sliding window in every other layer, YaRN, clamped gate,
interleaved RoPE."""

GATED = replace(
    PLAIN,
    attention=AttentionConfig(gated=True, qk_norm="l2"),
    rope=RopeConfig(skip=(False, True), sections=(1, 1, 1)),
)
"""Gated attention, L2 norms, every other layer without RoPE, the others with multimodal RoPE."""

BIDIRECTIONAL = replace(
    PLAIN,
    attention=AttentionConfig(
        causal=False,
        off_by_one=True,
        window=4,
        window_right=2,
        window_layers=(True, False),
    ),
    dropout=DropoutConfig(attention=0.2),
)
"""Encoder: bidirectional attention, off-by-one softmax, attention dropout."""

RELATIVE = replace(
    PLAIN,
    num_kv_heads=6,
    positions="relative",
    relative=RelativeConfig(buckets=8, max_distance=7),
    gated=False,
    activation="relu",
    attention=AttentionConfig(scale=1.0),
    tied_embeddings=True,
)
"""Like a T5 decoder: relative position biases from one table for all layers, unscaled attention."""

CHUNKED = replace(
    PLAIN,
    rope=RopeConfig(interleaved=True, skip=(False, False, True), skip_growth=0.4, skip_step=3),
    attention=AttentionConfig(
        qk_norm="l2",
        qk_norm_layers=(True, True, False),
        window=5,
        window_layers=(True, True, False),
        chunked=True,
    ),
)
"""Like Llama 4: chunked attention and L2 norms in layers with RoPE; others without positions, with
attention temperature."""

LATENT = replace(
    PLAIN,
    num_heads=10,
    num_kv_heads=10,
    head_dim=None,
    mla=MLAConfig(
        kv_rank=7,
        q_rank=9,
        nope_dim=5,
        rope_dim=4,
        value_dim=3,
        yarn_mscale=0.7,
    ),
    rope=RopeConfig(interleaved=True, scaling="yarn", factor=4.0, original_max_position=16),
)
"""Like DeepSeek-V2: multi-head latent attention."""

MTP_MODEL = replace(PLAIN, mtp=MTPConfig(num_layers=2, loss_weight=0.5))
"""Like DeepSeek-V3: two MTP layers, and embeddings that both ends of a pipeline need."""

HETEROGENEOUS = replace(
    PLAIN,
    num_heads=8,
    num_kv_heads=8,
    ffn_hidden_size=22,
    init="xavier_uniform",
    output_bias=True,
    mlp_bias=True,
    layers=LayersConfig(
        attention=("full", "linear", "full", "none"),
        mlp=("full", "full", "linear", "full"),
        num_kv_heads=(4, 8),
        ffn_hidden_size=(14, 22, 20, 9),
    ),
)
"""Like Nemotron models found by architecture search: parts of layers removed, replaced by a linear
layer, or of other sizes."""

CROSS_LAYER = replace(
    PLAIN,
    cross=CrossConfig(memory=1, layers=(False, True, True)),
    qkv_bias=True,
    output_bias=True,
    attention=AttentionConfig(window=4, window_layers=(True, False), scale=1.0, softcap=3.0),
)
"""Like YOCO: layers that attend to the hidden states of an earlier layer."""

VARIANTS = {
    "normed around": NORMED_AROUND,
    "normed after": NORMED_AFTER,
    "parallel": PARALLEL,
    "one norm": ONE_NORM,
    "learned positions": LEARNED,
    "sinks": SINKS,
    "gated": GATED,
    "latent": LATENT,
    "mtp": MTP_MODEL,
    "bidirectional": BIDIRECTIONAL,
    "heterogeneous": HETEROGENEOUS,
    "chunked": CHUNKED,
    "relative": RELATIVE,
    "cross-layer": CROSS_LAYER,
}

# --- mixtures of experts

NARROW = replace(
    PLAIN,
    num_kv_heads=6,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=10,
        latent_size=14,
        layers=(True, False),
        capacity=CapacityConfig(factor=1.0),
        aux_loss=AuxLossConfig(batch_coeff=0.2, z_loss_coeff=0.05),
    ),
)
"""Small experts in every other layer, with expert capacity."""

PADDED = replace(
    NARROW,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=10,
        latent_size=14,
        layers=(True, False),
        aux_loss=AuxLossConfig(batch_coeff=0.2, z_loss_coeff=0.05),
        capacity=CapacityConfig(factor=0.9, pad=True),
    ),
)
"""The same with lower capacity, and experts padded to it."""

BIASED_CHOICE = replace(
    PLAIN,
    num_kv_heads=6,
    moe=MoEConfig(
        num_experts=6,
        ffn_hidden_size=10,
        shared_ffn_hidden_size=9,
        shared_gate=True,
        router=RouterConfig(
            score="sigmoid",
            expert_bias=True,
            expert_bias_update_rate=0.01,
            bias=True,
            num_groups=3,
            topk_groups=2,
            group_score="max",
            routed_scaling_factor=1.5,
        ),
        aux_loss=AuxLossConfig(sequence_coeff=0.1, batch_coeff=0.2, z_loss_coeff=0.05),
    ),
)
"""Like DeepSeek-V3: sigmoid scores, groups, expert bias, and a gated shared expert."""

NOISY = replace(
    PLAIN,
    num_kv_heads=6,
    moe=MoEConfig(
        num_experts=6,
        ffn_hidden_size=10,
        layers=(False, True),
        capacity=CapacityConfig(factor=1.1, drop="last", pad=True),
        router=RouterConfig(jitter=0.1),
        aux_loss=AuxLossConfig(global_batch_coeff=0.3, sequence_coeff=0.1, of_choices=True),
    ),
)
"""Like Switch Transformer: router input noise, token dropping by position, padding to capacity, and
an aux loss over the global batch.

That loss needs the microbatches of all data-parallel ranks as one, and the capacity single ones;
one process cannot do both, so there is no dp.
"""

OVER_THE_STEP = replace(
    PLAIN,
    num_kv_heads=6,
    moe=MoEConfig(
        num_experts=6,
        ffn_hidden_size=10,
        layers=(False, True),
        router=RouterConfig(jitter=0.1),
        aux_loss=AuxLossConfig(global_batch_coeff=0.7, sequence_coeff=0.1, z_loss_coeff=0.05),
    ),
)
"""Aux loss over the global batch, with nothing that depends on single microbatches."""

PLANNED = replace(
    PLAIN,
    num_kv_heads=6,
    num_layers=2,
    moe=MoEConfig(
        num_experts=3,
        top_k=1,
        ffn_hidden_size=10,
        apply_router_weight_on_input=True,
        router=RouterConfig(norm_topk_prob=False),
        aux_loss=AuxLossConfig(sinkhorn=True),
    ),
)
"""Like Llama 4, top-1 experts with the router weight applied to the input; routed by Sinkhorn over
all ranks."""

OFFSET = replace(
    PLAIN,
    num_kv_heads=6,
    moe=MoEConfig(
        num_experts=6,
        ffn_hidden_size=10,
        layers=(False, True),
        router=RouterConfig(score="sqrt_softplus", bias=True),
        aux_loss=AuxLossConfig(quantile=True, quantile_ema=0.3, z_loss_coeff=0.05),
    ),
)
"""Experts whose logits get offsets after each step that would have balanced it; square-root
scores."""

CLAMPED = replace(
    PLAIN,
    num_kv_heads=6,
    activation="quick_gelu",
    activation_clamp=1.0,
    up_offset=1.0,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=9,
        biases=True,
        router=RouterConfig(bias=True),
        aux_loss=AuxLossConfig(batch_coeff=0.1),
    ),
)
"""Like gpt-oss: experts and routers with biases."""

MTP_EXPERTS = replace(
    BIASED_CHOICE, tied_embeddings=True, mtp=MTPConfig(num_layers=2, loss_weight=0.5)
)
"""Layers with experts, and MTP."""

WHOLE_LATENT = replace(
    LATENT,
    moe=MoEConfig(
        num_experts=8,
        top_k=4,
        ffn_hidden_size=9,
        shared_ffn_hidden_size=11,
        layers=(False, True, True, True),
        router=RouterConfig(
            score="sigmoid",
            expert_bias=True,
            expert_bias_update_rate=0.01,
            num_groups=4,
            topk_groups=2,
            routed_scaling_factor=1.5,
        ),
        aux_loss=AuxLossConfig(sequence_coeff=0.1),
    ),
    mtp=MTPConfig(num_layers=1, loss_weight=0.5),
)
"""Complete DeepSeek-V3: latent attention, shared expert, group-limited routing in all layers but
the first, and one MTP layer with experts."""

PLANNED_PAIRS = replace(
    PLAIN,
    num_kv_heads=6,
    moe=MoEConfig(
        num_experts=4,
        top_k=2,
        ffn_hidden_size=10,
        shared_ffn_hidden_size=9,
        aux_loss=AuxLossConfig(sinkhorn=True),
    ),
)
"""Sinkhorn-routed top-2 experts, and a shared expert."""

MIXTURES = {
    "narrow": NARROW,
    "biased choice": BIASED_CHOICE,
    "noisy": NOISY,
    "planned": PLANNED,
    "offset": OFFSET,
    "clamped": CLAMPED,
    "mtp experts": MTP_EXPERTS,
    "padded": PADDED,
    "whole latent": WHOLE_LATENT,
    "planned pairs": PLANNED_PAIRS,
    "over the step": OVER_THE_STEP,
}

EXPERTS = replace(
    PLAIN,
    num_kv_heads=6,
    moe=MoEConfig(num_experts=4, ffn_hidden_size=10, shared_ffn_hidden_size=9),
)
"""Experts in all layers, without aux losses."""

MODELS: dict[str, ModelConfig] = {
    "tiny": tiny(),
    "biased": tiny(bias=True),
    "shared": SHARED,
    "uneven": UNEVEN,
    "four": FOUR,
    "six_layers": replace(FOUR, num_layers=6),
    "experts": EXPERTS,
    "balanced": replace(
        EXPERTS,
        moe=replace(EXPERTS.moe, aux_loss=AuxLossConfig(batch_coeff=0.2)),  # type: ignore[type-var]
    ),
    "tiny_experts": replace(
        tiny(),
        # The z-loss is a mean over tokens, not packs.
        moe=MoEConfig(num_experts=4, ffn_hidden_size=10, aux_loss=AuxLossConfig(z_loss_coeff=0.3)),
    ),
    **{name.replace(" ", "_"): model for name, model in (VARIANTS | MIXTURES).items()},
}
"""Every model of the matrix by its name in `matrix.yaml`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One row of the matrix: a tiny model and its parallel layout."""

    area: str
    name: str
    model: ModelConfig
    parallel: ParallelConfig
    rows: int | None = None
    """Rows per microbatch, of 12 per step, which they need not divide; None:
    `choose_micro_batch_size`."""

    seq_len: int = 12
    budget: int | None = None
    """Tokens per cp rank of a pack of whole documents; None: rows."""

    documents: bool = False
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)

    smoothing: float = 0.0
    """Label smoothing."""

    z_loss: float = 0.0
    recomputed_loss: bool = False
    """Recompute logits in backward."""

    lora: LoraConfig | None = None
    optim: OptimConfig = TRAIN_ALL
    """Frozen parameters and parameter groups."""

    ema: EMAConfig | None = None
    """Moving average of the weights."""

    masks: MaskKind | None = None
    """Attention masks of the tokens."""

    sample: bool = False
    """Part of the small sample that covers every feature on at most four processes, for `make test`
    and `megalith verify --all --sample`."""

    @property
    def world(self) -> int:
        """Number of processes."""
        p = self.parallel
        return p.tp * p.cp * p.pp * (p.dp or 1)

    def case(self) -> LayoutCase:
        """Return the float64 case of this row."""
        case = layout_case(
            self.model,
            self.parallel,
            self.world,
            seq_len=self.seq_len,
            documents=self.documents,
            micro_batch_size=self.rows or choose_micro_batch_size(self.parallel),
        )
        # A rule requires the base checkpoint of adapters; here it is initialized randomly.
        base = CheckpointConfig(load=None if self.lora is None else "base")
        run = replace(
            case.run,
            recompute=self.recompute,
            offload=self.offload,
            lora=self.lora,
            checkpoint=base,
            optim=replace(self.optim, eps=case.run.optim.eps),
            train=replace(
                case.run.train,
                label_smoothing=self.smoothing,
                z_loss=self.z_loss,
                loss_backward="recomputed" if self.recomputed_loss else "kept",
                loss_chunk=7 if self.recomputed_loss else None,
                tokens_per_microbatch=self.budget,
                uneven_batch="allow" if self.rows and 12 % self.rows else None,
                ema=self.ema,
            ),
        )
        return replace(case, run=run, masks=self.masks)


def row_length(parallel: ParallelConfig) -> int:
    """Return the tokens per row that the ranks can shard."""
    parts = 2 * parallel.cp * (parallel.tp if parallel.sp else 1)
    return -(-12 // parts) * parts if parallel.cp > 1 else 12


@functools.cache
def load_matrix() -> tuple[Layout, ...]:
    """Return every row of the matrix."""
    areas = _read_tables()["rows"]
    return tuple(
        parse_row(area, name, text) for area, rows in areas.items() for name, text in rows.items()
    )


def matrix_rows(*, sample: bool) -> list[Layout]:
    """Return the rows, those with few processes first, so that workers are started when needed."""
    rows = (row for row in load_matrix() if row.sample or not sample)
    return sorted(rows, key=lambda row: row.world)


def parse_row(area: str, name: str, text: str) -> Layout:
    """Return the row of a line of `matrix.yaml`.

    Raises:
        ConfigError: the model or a word is unknown.
    """
    model, *words = text.split()
    if model not in MODELS:
        advice = did_you_mean(model, list(MODELS)) or ""
        raise ConfigError(f"{area}, {name}: {model} is not a model of the matrix.{advice}")
    settings = _parse_words(words)
    fields: dict[str, Any] = {  # Any: fields of `Layout`
        key: from_dict(SECTIONS[key], value) if key in SECTIONS else value
        for key, value in settings.items()
    }
    overrides = fields.pop("model", None)
    if overrides:
        fields["model"] = from_dict(ModelConfig, _merge(to_dict(MODELS[model]), overrides))
    fields.setdefault("model", MODELS[model])
    fields.setdefault("seq_len", row_length(fields["parallel"]))
    return Layout(area=area, name=name, **fields)


def parse_parallel(text: str) -> ParallelConfig:
    """Return the layout of words such as `tp2 pp2 sp zb-v vpp2`; dp is 1 unless given."""
    return from_dict(ParallelConfig, _parse_words(text.split())["parallel"])


SECTIONS: Mapping[str, type] = {
    "parallel": ParallelConfig,
    "recompute": RecomputeConfig,
    "offload": OffloadConfig,
    "lora": LoraConfig,
    "optim": OptimConfig,
    "ema": EMAConfig,
}
"""Fields of a row that are configs."""

DEGREES = {"vpp": "parallel.pipeline.vpp"} | {
    name: f"parallel.{name}" for name in ("tp", "cp", "pp", "dp", "ep", "etp", "zero")
}
"""Word without its number -> setting."""


@functools.cache
def _read_tables() -> dict[str, dict[str, Any]]:  # Any: YAML
    tables = parse_yaml((Path(__file__).parent / "matrix.yaml").read_text(encoding="utf-8"))
    assert isinstance(tables, dict)
    return tables


def _parse_words(words: Sequence[str]) -> dict[str, Any]:  # Any: nested settings
    """Return the settings of a row as nested dicts; later words take precedence."""
    tables = _read_tables()
    settings: dict[str, Any] = {"parallel": {"dp": 1}}
    for word in words:
        path, has_value, value = word.partition("=")
        degree = re.fullmatch(r"([a-z]+)(\d+)", word)
        if has_value:
            values = _nest(tables["short"].get(path, path), _parse_value(value))
        elif degree and degree[1] in DEGREES:
            values = _nest(DEGREES[degree[1]], int(degree[2]))
        elif word in tables["words"]:
            values = tables["words"][word]
        else:
            advice = did_you_mean(word, list(tables["words"])) or ""
            raise ConfigError(f"{' '.join(words)}: {word} is not a word of matrix.yaml.{advice}")
        settings = _merge(settings, values)
    return settings


def _nest(path: str, value: Plain) -> dict[str, Plain]:
    """Return nested dicts with one leaf at a dotted path."""
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def _parse_value(text: str) -> Plain:
    """Parse a number, a word, or a list of them in brackets; patterns of names are words."""
    if text.startswith("[") and text.endswith("]"):
        return [_parse_value(item) for item in text[1:-1].split(",") if item]
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _merge(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return `before` with the leaves of `after`."""
    merged = dict(before)
    for key, value in after.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if nested else value
    return merged
