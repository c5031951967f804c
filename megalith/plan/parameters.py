"""Names, sizes and initial values of the parameters that one rank holds, in the order in which the
model registers them; no torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig
from megalith.plan.shards import split_evenly, split_heads

Summed = Literal["sp", "heads", "always"]
"""Which replicas' gradients are summed over tp. "sp": of all tensor-parallel ranks, only with sp,
because without it they do the same work; "heads": of ranks with the same KV heads; "always": of
all."""


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One parameter as one rank holds it."""

    name: str
    """Canonical name, as in its `Shard`."""

    rows: int
    """Rows (outputs) of this rank's matrix; all elements of a vector."""

    columns: int = 1
    """Columns (inputs) of the matrix; 1 for a vector."""

    cut: bool = False
    """Whether tensor-parallel ranks hold different parts; else it is replicated on some or all of
    them. Experts have their own grid and count as split."""

    stacked: bool = False
    """Whether it is stored directly after the previous parameter, because one matmul uses both."""

    summed: Summed = "sp"
    """How the gradients of replicas are summed."""

    frozen: bool = False
    """Whether it has no gradient and no optimizer state."""

    grid: Literal["dense", "expert"] = "dense"
    """Grid of its replicas."""

    counts: bool = True
    """Whether it is a parameter of the model; an expert bias is not, although it is saved: it has
    no gradient, and the dtype of statistics."""

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix."""
        return self.columns > 1

    @property
    def numel(self) -> int:
        """Elements on this rank."""
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Share of one tensor-parallel rank of everything that is split."""

    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    kv_copies: int
    """Number of ranks that hold the same KV heads."""


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Expert shard of one rank, in every layer."""

    ep: int = 1
    """Expert parallel size."""

    etp: int = 1
    """Expert tensor parallel size."""

    etp_rank: int = 0

    def features(self, ffn_hidden_size: int) -> int:
        """Return the inner features of each expert on this rank."""
        return split_evenly(ffn_hidden_size, self.etp)[self.etp_rank]


def tensor_part(model: ModelConfig, *, tp: int, rank: int) -> TensorPart:
    """Return the share of tensor-parallel rank `rank`; in latent attention every head has its own
    keys and values."""
    ffn, vocab = (
        split_evenly(model.ffn_hidden_size, tp)[rank],
        split_evenly(model.padded_vocab_size(), tp)[rank],
    )
    if model.mla is not None:
        own = split_evenly(model.num_heads, tp)[rank]
        return TensorPart(heads=own, kv_heads=own, ffn=ffn, vocab=vocab, kv_copies=1)
    heads = split_heads(model.num_heads, model.num_kv_heads, tp)
    copies = tp // len(heads.keys)
    return TensorPart(
        heads=heads.queries[rank],
        kv_heads=heads.keys[rank // copies],
        ffn=ffn,
        vocab=vocab,
        kv_copies=copies,
    )


def distinct_ranks(
    model: ModelConfig, *, tp: int, experts: Sequence[ExpertPart] | None = None
) -> list[int]:
    """Return the first tensor-parallel rank of every group of ranks with equal shares of every
    layer.

    experts: expert shard of each rank; unset: experts are split over tp.
    """
    kinds, moe = dict.fromkeys(model.at(layer) for layer in range(model.num_layers)), model.moe
    sizes = () if moe is None else (split_evenly(moe.shared_ffn_hidden_size or 0, tp),)
    parts = (
        [ExpertPart(etp=tp, etp_rank=rank) for rank in range(tp)] if experts is None else experts
    )
    firsts: dict[tuple[TensorPart | int, ...], int] = {}
    for rank in range(tp):
        own = [size[rank] for size in sizes]
        own += [] if moe is None else [parts[rank].features(moe.ffn_hidden_size)]
        firsts.setdefault((*(tensor_part(kind, tp=tp, rank=rank) for kind in kinds), *own), rank)
    return list(firsts.values())


def layer_parameters(
    model: ModelConfig,
    index: int,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    experts: ExpertPart | None = None,
) -> list[HeldParameter]:
    """Return the parameters of a layer by its global number; `experts`: see `held_parameters`."""
    return _under(f"layers.{index}", _layer(model, index, _LayerRank(tp, tp_rank, experts)))


@dataclass(frozen=True, slots=True)
class _LayerRank:
    """A rank among those that split a layer."""

    tp: int
    rank: int
    experts: ExpertPart | None

    @property
    def of_experts(self) -> ExpertPart:
        """Expert shard; if unset, tensor-parallel ranks split each expert."""
        return self.experts or ExpertPart(etp=self.tp, etp_rank=self.rank)


def _under(prefix: str, parameters: Iterator[HeldParameter]) -> list[HeldParameter]:
    return [replace(one, name=f"{prefix}.{one.name}") for one in parameters]


def _layer(model: ModelConfig, index: int, place: _LayerRank) -> Iterator[HeldParameter]:
    """Yield the norms, attention and MLP of a layer in the order of computation."""
    model = model.at(index)
    part = tensor_part(model, tp=place.tp, rank=place.rank)
    before, after = model.norm_placement != "after", model.norm_placement != "before"
    attention_kind, mlp_kind = model.attention_part(index), model.mlp_part(index)
    if attention_kind != "none":
        if before:
            yield from _norm("attention_norm", model)
        if attention_kind == "linear":
            yield from _linear_replacement("attention", model, bias=model.output_bias)
        else:
            yield from (
                _latent_attention(model, part) if model.mla is not None else _attention(model, part)
            )
        if after:
            yield from _norm("attention_post_norm", model)
    if model.uses_cross_layer_source(index):
        yield from _cross_layer_attention(model, part, before=before, after=after)
    if mlp_kind != "none":
        if before and model.block != "parallel_one_norm":
            yield from _norm("mlp_norm", model)
        if model.has_experts(index):
            yield from _mixture(model, part, place)
        else:
            yield from (
                _linear_replacement("mlp", model, bias=model.mlp_bias)
                if mlp_kind == "linear"
                else _mlp(model, part)
            )
        if after:
            yield from _norm("mlp_post_norm", model)


def _linear_replacement(where: str, model: ModelConfig, *, bias: bool) -> Iterator[HeldParameter]:
    """Yield an h·h matrix and its bias."""
    yield HeldParameter(f"{where}.linear", model.hidden_size, model.hidden_size)
    if bias:
        yield HeldParameter(f"{where}.linear_bias", model.hidden_size)


def _norm(
    name: str, model: ModelConfig, *, size: int | None = None, summed: Summed = "sp"
) -> Iterator[HeldParameter]:
    """Yield a weight and, for LayerNorm, a bias, of `size` features; unset: h."""
    yield HeldParameter(f"{name}.weight", size or model.hidden_size, summed=summed)
    if model.norm == "layer":
        yield HeldParameter(f"{name}.bias", size or model.hidden_size, summed=summed)


def _attention(model: ModelConfig, part: TensorPart) -> Iterator[HeldParameter]:
    """Yield h·(n + 2 g)·d + n·d·h elements, and n·d·h more with a gate."""
    h, d, kv_cut, kind = model.hidden_size, model.head_size(), part.kv_copies == 1, model.attention
    query, keys = part.heads * d, 2 * part.kv_heads * d
    yield HeldParameter("attention.q", query, h, cut=True)
    yield HeldParameter("attention.kv", keys, h, cut=kv_cut, stacked=True, summed="heads")
    if kind.gated:
        yield HeldParameter("attention.gate", query, h, cut=True, stacked=True)
    if model.qkv_bias:
        yield HeldParameter("attention.q_bias", query, cut=True)
        yield HeldParameter("attention.kv_bias", keys, cut=kv_cut, summed="heads")
        if kind.gated:
            yield HeldParameter("attention.gate_bias", query, cut=True)
    if kind.qk_norm == "head":
        yield from _norm("attention.q_norm", model, size=d, summed="always")
        yield from _norm("attention.k_norm", model, size=d, summed="always")
    elif kind.qk_norm == "whole":
        yield HeldParameter("attention.q_norm.weight", query, cut=True)
        yield HeldParameter(
            "attention.k_norm.weight", part.kv_heads * d, cut=kv_cut, summed="heads"
        )
    if kind.sinks:
        yield HeldParameter("attention.sinks", part.heads, cut=True)
    yield from _output(model, query)


def _latent_attention(model: ModelConfig, part: TensorPart) -> Iterator[HeldParameter]:
    """Yield q: h·n·(d_nope + d_rope), or r_q·(h + n·(d_nope + d_rope)) + r_q; k and v: h·(r_kv +
    d_rope) + r_kv + r_kv·n·(d_nope + d_v); and n·d_v·h. Single r are those of norms."""
    sizes, h = model.mla, model.hidden_size
    assert sizes is not None
    query = part.heads * (sizes.nope_dim + sizes.rope_dim)
    if sizes.q_rank is None:
        yield HeldParameter("attention.q", query, h, cut=True)
    else:
        yield HeldParameter("attention.q_down", sizes.q_rank, h)
        yield from _norm("attention.q_down_norm", model, size=sizes.q_rank) if sizes.norms else ()
        yield HeldParameter("attention.q_up", query, sizes.q_rank, cut=True)
    yield HeldParameter("attention.kv_down", sizes.kv_rank + sizes.rope_dim, h)
    yield from _norm("attention.kv_down_norm", model, size=sizes.kv_rank) if sizes.norms else ()
    yield HeldParameter(
        "attention.kv_up", part.heads * (sizes.nope_dim + sizes.value_dim), sizes.kv_rank, cut=True
    )
    yield from _output(model, part.heads * sizes.value_dim)


def _cross_layer_attention(
    model: ModelConfig, part: TensorPart, *, before: bool, after: bool
) -> Iterator[HeldParameter]:
    """Yield cross-layer attention: h·(n + 2 g)·d + n·d·h, and its norms."""
    h, d, kv_cut = model.hidden_size, model.head_size(), part.kv_copies == 1
    query, keys = part.heads * d, 2 * part.kv_heads * d
    if before:
        yield from _norm("cross_norm", model)
    yield HeldParameter("cross.q", query, h, cut=True)
    if model.qkv_bias:
        yield HeldParameter("cross.q_bias", query, cut=True)
    yield HeldParameter("cross.kv", keys, h, cut=kv_cut, summed="heads")
    if model.qkv_bias:
        yield HeldParameter("cross.kv_bias", keys, cut=kv_cut, summed="heads")
    yield from _output(model, query, where="cross")
    if after:
        yield from _norm("cross_post_norm", model)


def _output(
    model: ModelConfig, features: int, *, where: str = "attention"
) -> Iterator[HeldParameter]:
    """Yield the output projection of attention."""
    yield HeldParameter(f"{where}.o", model.hidden_size, features, cut=True)
    if model.output_bias:
        yield HeldParameter(f"{where}.o_bias", model.hidden_size)


def _mlp(model: ModelConfig, part: TensorPart) -> Iterator[HeldParameter]:
    """Yield 3·h·f elements with a gate, else 2·h·f."""
    h, up, f = model.hidden_size, "mlp.gate_up" if model.gated else "mlp.up", part.ffn
    inner = 2 * f if model.gated else f
    yield HeldParameter(up, inner, h, cut=True)
    if model.mlp_bias:
        yield HeldParameter(f"{up}_bias", inner, cut=True)
    yield HeldParameter("mlp.down", h, f, cut=True)
    if model.mlp_bias:
        yield HeldParameter("mlp.down_bias", h)


def _mixture(model: ModelConfig, part: TensorPart, place: _LayerRank) -> Iterator[HeldParameter]:
    """Yield the router E·h; experts E·3·d·f with a gate, else E·2·d·f, d = latent_size or h; shared
    experts as an MLP."""
    moe, h = model.moe, model.hidden_size
    assert moe is not None
    if moe.router.bias:
        yield HeldParameter("moe.router_bias", moe.num_experts)
    if moe.router.expert_bias:
        yield HeldParameter("moe.balancing_bias", moe.num_experts, frozen=True, counts=False)
    if moe.aux_loss.quantile:
        yield HeldParameter("moe.balancing_offset", moe.num_experts, frozen=True, counts=False)
    yield HeldParameter("moe.router", moe.num_experts, h)
    for one in _experts(model, moe, place.of_experts):
        yield replace(one, name=f"moe.experts.{one.name}", cut=True, grid="expert")
    if moe.latent_size is not None:
        yield HeldParameter("moe.latent_in", moe.latent_size, h)
        yield HeldParameter("moe.latent_out", h, moe.latent_size)
    if moe.shared_ffn_hidden_size is not None:
        sized = replace(model, ffn_hidden_size=moe.shared_ffn_hidden_size)
        own = split_evenly(moe.shared_ffn_hidden_size, place.tp)[place.rank]
        for one in _mlp(sized, replace(part, ffn=own)):
            yield replace(one, name=one.name.replace("mlp.", "moe.shared.", 1))
        if moe.shared_gate:
            yield HeldParameter("moe.shared_gate", 1, h)


def _experts(model: ModelConfig, moe: MoEConfig, part: ExpertPart) -> Iterator[HeldParameter]:
    """Yield this rank's part of all experts' matrices, stacked along rows."""
    num_local_experts, inner, d = (
        moe.num_experts // part.ep,
        part.features(moe.ffn_hidden_size),
        moe.latent_size or model.hidden_size,
    )
    up, wide = ("gate_up", 2 * inner) if model.gated else ("up", inner)
    yield HeldParameter(up, num_local_experts * wide, d)
    if moe.biases:
        yield HeldParameter(f"{up}_bias", num_local_experts * wide)
    yield HeldParameter("down", num_local_experts * d, inner)
    if moe.biases:
        yield HeldParameter("down_bias", num_local_experts * d)


def held_parameters(
    model: ModelConfig,
    *,
    tp: int,
    tp_rank: int,
    layers: Sequence[int],
    embedding: bool,
    loss: bool,
    norm: bool | None = None,
    num_mtp_layers: int | None = None,
    experts: ExpertPart | None = None,
) -> list[HeldParameter]:
    """Return the parameters of some layers, and of the embedding, last norm, head and MTP layers if
    the stage has them.

    A tied head and the tables of MTP layers are the embedding's parameters; a stage without the
    embedding holds copies of them. Every stage with layers has a copy of the table of relative
    positions, and the stage of the cross-layer source has its norm. norm, num_mtp_layers: whether
    the stage has the last norm, and how many MTP layers; unset: those that belong to the loss.
    experts: this rank's expert shard; unset: all, each split over tp.
    """
    norm = loss if norm is None else norm
    num_mtp_layers = model.mtp.num_layers * loss if num_mtp_layers is None else num_mtp_layers
    part, h = tensor_part(model, tp=tp, rank=tp_rank), model.hidden_size
    table = HeldParameter("embed.weight", part.vocab, h, cut=True)
    places = HeldParameter("positions.weight", model.max_seq_len, h, cut=False)
    held = [table] if embedding else []
    if embedding and model.positions == "learned":
        held.append(places)
    if model.needs_relative_biases(layers=len(layers) + num_mtp_layers):
        held.append(bias_table(model, tp=tp, tp_rank=tp_rank))
    for index in layers:
        held += layer_parameters(model, index, tp=tp, tp_rank=tp_rank, experts=experts)
    if model.cross is not None and model.cross.memory in layers:
        held += memory_norm(model)
    if norm:
        held += _norm("norm", model)
    if loss and not model.tied_embeddings:
        held.append(HeldParameter("head.weight", part.vocab, h, cut=True))
    if not embedding and (num_mtp_layers or (loss and model.tied_embeddings)):
        held.append(table)
    if not embedding and num_mtp_layers and model.positions == "learned":
        held.append(places)
    for depth in range(num_mtp_layers):
        held += _under(f"mtp.{depth}", _mtp(model, _LayerRank(tp, tp_rank, experts)))
    return held


def memory_norm(model: ModelConfig) -> list[HeldParameter]:
    """Return the norm of the source hidden states of cross-layer attention, on its stage."""
    normed = model.cross is not None and model.norm_placement != "after"
    return list(_norm("memory_norm", model)) if normed else []


def bias_table(model: ModelConfig, *, tp: int, tp_rank: int) -> HeldParameter:
    """Return the table of relative position biases: buckets·n."""
    heads = tensor_part(model, tp=tp, rank=tp_rank).heads
    return HeldParameter("relative.weight", model.relative.buckets, heads, cut=True)


def _mtp(model: ModelConfig, place: _LayerRank) -> Iterator[HeldParameter]:
    """Yield the parameters of one MTP layer: a layer, 2·h·h, and three norms."""
    for word in ("embed_norm", "hidden_norm", "norm"):
        yield from _norm(word, model)
    yield HeldParameter("project", model.hidden_size, 2 * model.hidden_size)
    for one in _layer(model, model.num_layers - 1, place):
        yield replace(one, name=f"layer.{one.name}")


# Initial values and per-parameter learning-rate factors (muP), by parameter name; no torch.

EMBEDDINGS = ("embed.weight", "positions.weight")
"""Lookup tables that produce the input of the first layer."""

TABLES = (*EMBEDDINGS, "relative.weight")
"""Parameters that are looked up, not multiplied with."""

STACKED = ("kv", "kv_bias", "gate_up", "gate_up_bias")
"""Parameters that stack two matrices of the same shape."""


class InitialValues(NamedTuple):
    """Distribution of a parameter's initial values."""

    std: float
    uniform: bool = False
    """Uniform from -sqrt(3) std to sqrt(3) std; otherwise normal."""


class ParameterRates(NamedTuple):
    """Factors of one parameter for the optimizer's learning rate, eps and weight decay."""

    lr: float = 1.0
    eps: float = 1.0
    decay: float = 1.0
    """0: no weight decay."""

    lr_of: str = ""
    """Parameter group whose learning rate applies; empty: the schedule's."""

    decay_of: str = ""
    """Parameter group whose weight decay applies; empty: the schedule's."""

    vector_decays: bool = False
    """Whether weight decay applies although the parameter is a vector."""


PLAIN = ParameterRates()


def initial_values(
    model: ModelConfig, name: str, shape: tuple[int, ...], inputs: int, std: float
) -> InitialValues:
    """Return the initial distribution of a parameter of this global shape, whose layer sets `std`
    and whose last `inputs` dims are inputs.

    The first pattern of `init_overrides` that matches the name takes precedence over everything
    else. Source of xavier_uniform: Glorot and Bengio 2010, "Understanding the difficulty of
    training deep feedforward neural networks", equation 16.
    """
    override = next(
        (own for pattern, own in model.init_overrides if fnmatchcase(name, pattern)), None
    )
    if override is not None:
        return InitialValues(override)
    if std == 0 or inputs == 0 or name in TABLES[len(EMBEDDINGS) :]:
        return InitialValues(std)
    table = model.init_std if model.embedding_init_std is None else model.embedding_init_std
    if name in EMBEDDINGS or (name == "head.weight" and model.mup is not None):
        return InitialValues(table)
    if model.init == "xavier_uniform":
        return InitialValues(math.sqrt(2 / sum(_fans(name, shape, inputs))), uniform=True)
    return InitialValues(std if name == "head.weight" else std / math.sqrt(model.width_factor()))


def _fans(name: str, shape: tuple[int, ...], inputs: int) -> tuple[int, int]:
    """Return inputs and outputs of one matrix; experts and stacked parameters are several
    matrices."""
    outputs = shape[:-inputs]
    outputs = outputs[1:] if ".experts." in name else outputs
    outputs = outputs[1:] if name.rsplit(".", 1)[1] in STACKED else outputs
    return math.prod(shape[-inputs:]), math.prod(outputs)


def mup_factors(model: ModelConfig, optimizer: str, name: str, inputs: int) -> ParameterRates:
    """Return muP's factors for learning rate and eps of a parameter with this many input dims; 1
    for adapters.

    Embeddings with an `embedding_init_std` of their own have no weight decay. Source: Yang et al.
    2022, arXiv:2203.03466, table 8; eps: Wortsman et al. 2023, arXiv:2309.14322, section 3.4.
    """
    m, has_own_std = (
        model.width_factor(),
        name in EMBEDDINGS and model.embedding_init_std is not None,
    )
    plain = ParameterRates(decay=0.0) if has_own_std else PLAIN
    if m == 1 or name.rsplit(".", 1)[1] in ("lora_a", "lora_b"):
        return plain
    hidden = inputs > 0 and name not in (*TABLES, "head.weight")
    if optimizer == "sgd":
        return plain if hidden else plain._replace(lr=m)
    return ParameterRates(lr=1 / m, eps=1 / m) if hidden else plain
