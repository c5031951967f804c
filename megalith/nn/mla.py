"""Multi-head latent attention (MLA): keys and values of all heads are projected from one latent
vector per token.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1; absorbed projections: the same, section
2.1.2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from megalith.config.model import MLAConfig, ModelConfig
from megalith.kernels.attention.scores import Scores, record_scores
from megalith.kernels.layer_inputs import AttendOptions, LayerCache, LayerInputs
from megalith.kernels.linear import einsum
from megalith.kernels.packed import PackedSeqParams
from megalith.nn.attention import build_layer_scores, output_linear
from megalith.nn.batched_lora import BatchedLora
from megalith.nn.build import BuildContext, ColumnLinear
from megalith.nn.dropout import build_core_attention
from megalith.nn.lora import HeadsFn, pass_inputs_to_adapter_dropout
from megalith.nn.norm import build_norm
from megalith.nn.rope import build_apply_rope
from megalith.parallel.recompute import Recomputed
from megalith.parallel.tensor import ColumnParallelLinear, Init
from megalith.plan.recompute import recomputed_modules
from megalith.plan.shards import Shard, split_evenly


class LatentInputs(NamedTuple):
    """Inputs of latent attention: t query tokens, t_kv key tokens."""

    q: Tensor
    """[t, n, nope_dim + rope_dim]: queries; the last features are rotated."""

    latent: Tensor
    """[t_kv, r]: the latent vectors; without a KV cache in the layout of `tp_comm`."""

    k_rotated: Tensor
    """[t_kv, 1, rope_dim]: the rotated key that all heads share."""


LatentForm = Literal["expanded", "absorbed"]
"""expanded: keys and values of each head are projected from the latent vectors; absorbed: latent
vectors are the keys and values of all heads, and queries and outputs are projected instead. Both
give the same result."""


def expanded(
    layer: "LatentAttention",
    parts: LatentInputs,
    seq_params: PackedSeqParams,
    options: AttendOptions,
    *,
    is_cached: bool = False,
) -> Tensor:
    """Compute attention with keys and values of each head, projected from the latent vectors;
    `is_cached`: they are those of all tokens, from a KV cache."""
    project: Callable[[Tensor], Tensor] = layer.kv_up
    # with adapters, all ranks have all tokens
    if is_cached and isinstance(layer.kv_up, ColumnParallelLinear):
        project = layer.kv_up.project_all_tokens
    kv = project(parts.latent).unflatten(-1, (layer.num_heads, -1))
    k_plain, v = kv.split([layer.sizes.nope_dim, layer.sizes.value_dim], dim=-1)
    k = torch.cat([k_plain, parts.k_rotated.expand(-1, layer.num_heads, -1)], dim=-1)
    return layer.core(parts.q, k, v, seq_params, **options)


def absorb_keys(layer: "LatentAttention", q: Tensor) -> Tensor:
    """Apply the key projection to the queries instead of the latent vectors: q [t, n, nope_dim +
    rope_dim] -> [t, n, r + rope_dim]."""
    up_keys, _ = _up_projections(layer)
    q_plain, q_rotated = q.split([layer.sizes.nope_dim, layer.sizes.rope_dim], dim=-1)
    return torch.cat([einsum("tnd,ndr->tnr", q_plain, up_keys), q_rotated], dim=-1)


def project_values(layer: "LatentAttention", attended_latent: Tensor) -> Tensor:
    """Apply the value projection to the attention of latent vectors: [t, n, r] -> [t, n,
    value_dim]."""
    _, up_values = _up_projections(layer)
    return einsum("tnr,nvr->tnv", attended_latent, up_values)


def _up_projections(layer: "LatentAttention") -> tuple[Tensor, Tensor]:
    """Return the local rows of the up projection: of keys [n, nope_dim, r], of values [n,
    value_dim, r]."""
    (weight,) = layer.kv_up.accumulated_parameters()
    up = weight.unflatten(0, (layer.num_heads, -1))
    up_keys, up_values = up.split([layer.sizes.nope_dim, layer.sizes.value_dim], dim=1)
    return up_keys, up_values


def choose_form(sizes: MLAConfig, lengths: Sequence[tuple[int, int]]) -> LatentForm:
    """Return the form with fewer multiplications for documents with (queries, keys).

    Expanding costs r·(d_nope + d_v) for each key, absorbing the same for each query; a pair of the
    two then costs d_nope + d_rope + d_v or 2·r + d_rope. Prefill uses expanded, decoding with many
    cached tokens absorbed.
    """
    queries, keys = (sum(count) for count in zip(*lengths, strict=True))
    pairs = sum(q * k - q * (q - 1) // 2 for q, k in lengths)
    up = sizes.nope_dim + sizes.value_dim
    return (
        "absorbed"
        if (keys - queries) * sizes.kv_rank * up > pairs * (2 * sizes.kv_rank - up)
        else "expanded"
    )


ChooseForm = Callable[[MLAConfig, Sequence[tuple[int, int]]], LatentForm]
"""Chooses the form for documents with (queries, keys)."""


def expand_for_adapters(
    kv_up: BatchedLora, choose: ChooseForm, sizes: MLAConfig, lengths: Sequence[tuple[int, int]]
) -> LatentForm:
    """Return the expanded form if a token has an adapter of the up projection, because the absorbed
    form has one projection for all tokens; else what `choose` returns."""
    return "expanded" if kv_up.is_adapted else choose(sizes, lengths)


def no_recompute(find: HeadsFn) -> HeadsFn:
    """Return the function itself: its intermediates are saved for backward."""
    return find


class LatentAttention(nn.Module):
    """Multi-head latent attention to the earlier tokens of a document: x [t, h] -> [t, h].

    A token's latent vector c [r] gives keys and values of every head; one more key of a few
    features, which all heads share, has the position embedding. The latent vectors are computed
    outside the tensor-parallel region; heads are sharded over tp.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        context: BuildContext,
        *,
        reading: ChooseForm = choose_form,
    ) -> None:
        """`reading`: chooses the form with a KV cache."""
        super().__init__()
        assert config.mla is not None
        mesh, tp_comm, recompute = context.mesh, context.tp_comm, context.recompute
        recomputes_heads = "mla_up_proj" in recomputed_modules(recompute)
        self.core = build_core_attention(config, context, recomputed=not recomputes_heads)
        self.tp_comm, self.sizes, self.reading = tp_comm, config.mla, reading
        self.apply_rope = build_apply_rope(config, context)
        self.scores = latent_scores(config, context.layer)
        h, n, sizes = config.hidden_size, config.num_heads, config.mla
        heads = split_evenly(n, mesh.tp.size)
        self.name, self.first_head = name, sum(heads[: mesh.tp.rank])
        self.num_heads = heads[mesh.tp.rank]
        start = Init(config.init_std)

        def of_heads(word: str, features: int, columns: int) -> ColumnLinear:
            shard = Shard.full(f"{name}.{word}", (n, features, columns)).split_dim(
                0,
                heads,
                mesh.tp.rank,
                mesh.tp.axes,
            )
            return context.column_linear([(shard, start)])

        def short(word: str, rank: int, extra: int = 0) -> tuple[nn.Module, nn.Module]:
            shard = Shard.full(f"{name}.{word}", (rank + extra, h), invariant=tp_comm.invariant)
            down = context.replicated_linear(shard, start)
            if not sizes.norms:
                return down, nn.Identity()
            norm_name = f"{name}.{word}_norm"
            return down, build_norm(norm_name, rank, config, context, eps=sizes.norm_eps)

        if sizes.q_rank is None:
            self.queries = nn.Sequential(of_heads("q", sizes.nope_dim + sizes.rope_dim, h))
        else:
            down, norm = short("q_down", sizes.q_rank)
            self.queries = nn.Sequential(
                down, norm, of_heads("q_up", sizes.nope_dim + sizes.rope_dim, sizes.q_rank)
            )
        self.kv_down, self.kv_norm = short("kv_down", sizes.kv_rank, sizes.rope_dim)
        self.kv_up = of_heads("kv_up", sizes.nope_dim + sizes.value_dim, sizes.kv_rank)
        if isinstance(self.kv_up, BatchedLora):
            self.reading = partial(expand_for_adapters, self.kv_up, reading)
        self.out = output_linear(name, config, context, heads)
        around = (
            partial(Recomputed, check=recompute.check, saves_rope_tables=True)
            if recomputes_heads
            else no_recompute
        )
        self.around = pass_inputs_to_adapter_dropout(around, self)
        """Wraps the computation from latent vectors to heads' outputs, for recomputation."""

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [t, h] -> [t, h]."""
        short = x
        for step in list(self.queries)[:-1]:  # the down projection, if queries have one
            short = step(short)
        latent, k_rotated = self.kv_down(x).split([self.sizes.kv_rank, self.sizes.rope_dim], dim=-1)
        latent = self.kv_norm(latent.contiguous())
        find = self.find if inputs.cache is not None else self.around(self.find)
        heads = inputs.call_in_each_step(find, short, latent, k_rotated)
        return self.out(heads.flatten(1))

    def find(
        self,
        short: Tensor,
        latent: Tensor,
        k_rotated: Tensor,
        inputs: LayerInputs,
    ) -> Tensor:
        """Compute the heads' outputs: latent vectors of queries, or x, [t, rq], those of keys and
        values [t, r] and the shared key [t, rope_dim], all in the layout of `tp_comm` -> [t, n,
        value_dim] of all tokens."""
        q = self.queries[-1](short).unflatten(-1, (self.num_heads, -1))
        q_plain, q_rotated = q.split([self.sizes.nope_dim, self.sizes.rope_dim], dim=-1)
        k_rotated = self.apply_rope(
            self.tp_comm.prepare_input(k_rotated.contiguous()).unsqueeze(1), inputs
        )
        q = torch.cat([q_plain, self.apply_rope(q_rotated, inputs)], dim=-1)
        options = AttendOptions(
            scores=self.scores,
            attention_bias=inputs.attention_bias,
            dropout_key=inputs.dropout_key,
            max_scores=record_scores(inputs.score_record, self.name, self.first_head, q),
        )
        latent_inputs = LatentInputs(q, latent, k_rotated)
        if inputs.cache is None:
            return expanded(self, latent_inputs, inputs.seq_params, options)
        return self._attend_cached(inputs.cache, latent_inputs, inputs.seq_params, options)

    def _attend_cached(
        self,
        cache: LayerCache,
        latent_inputs: LatentInputs,
        seq_params: PackedSeqParams,
        options: AttendOptions,
    ) -> Tensor:
        """Attention to cached tokens: [t, n, value_dim]. The cache stores the latent vector and the
        rotated key of each token."""
        q, latent, k_rotated = latent_inputs
        latent = self.tp_comm.prepare_input(latent)
        rows = torch.cat([latent.unsqueeze(1), k_rotated], dim=-1)
        rank = self.sizes.kv_rank
        if self.reading(self.sizes, seq_params.lengths) == "absorbed":
            attended_latent = cache.attend_latent(
                self.core, absorb_keys(self, q), rows, seq_params, value_size=rank, **options
            )
            return project_values(self, attended_latent)
        rows = cache.read(rows, value_size=rank)
        latent, k_rotated = rows[:, 0, :rank], rows[..., rank:]
        latent_inputs = LatentInputs(q, latent, k_rotated)
        return expanded(self, latent_inputs, seq_params, options, is_cached=True)


def latent_scores(config: ModelConfig, index: int) -> Scores:
    """Return the score settings of MLA: by default scaled by 1 / sqrt(nope_dim + rope_dim) and
    yarn's attention temperature."""
    scores, sizes = build_layer_scores(config, index), config.mla
    assert sizes is not None
    if config.attention.scale is not None:
        return scores
    scale = 1 / math.sqrt(config.key_size()) if scores.scale is None else scores.scale
    yarn_temperature = 1.0
    if sizes.yarn_mscale is not None and config.rope.scaling == "yarn" and config.rope.factor > 1:
        yarn_temperature = 0.1 * sizes.yarn_mscale * math.log(config.rope.factor) + 1.0
    return replace(scores, scale=yarn_temperature**2 * scale)
