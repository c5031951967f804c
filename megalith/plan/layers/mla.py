"""Multi-head latent attention (MLA): queries, keys and values are projected from compressed
vectors.

One layer saves its compressed vectors before and after their norms, and the tensors of core
attention; with `mla_up_proj` only the compressed vectors and the shared key.
"""

from collections.abc import Iterator, Sequence

from megalith.config.model import MLAConfig
from megalith.plan.layers.attention import (
    all_rope_tables,
    attention_position,
    attention_tensors,
    attention_weight_numel,
    key_value_exchange,
    layer_rope_tables,
    output_parameters,
    received_numel,
    self_attention_flops,
)
from megalith.plan.layers.base import (
    HeldParameter,
    LayerBranch,
    LayerKind,
    LayerRank,
    LayerSetting,
    SavedActivation,
    TPMessages,
    norm_parameters,
    norm_tensors,
)


def _sizes(branch: LayerBranch) -> MLAConfig:
    sizes = branch.model.mla
    assert sizes is not None, "only models with `mla` have layers of this kind"
    return sizes


def _parameters(branch: LayerBranch, rank: LayerRank) -> Iterator[HeldParameter]:
    """Yield q: h·n·(d_nope + d_rope), or r_q·(h + n·(d_nope + d_rope)) + r_q; k and v: h·(r_kv +
    d_rope) + r_kv + r_kv·n·(d_nope + d_v); and n·d_v·h. Single r are those of norms."""
    model, part, sizes, h = (
        branch.model,
        branch.tensor_part(rank),
        _sizes(branch),
        branch.model.hidden_size,
    )
    query = part.heads * (sizes.nope_dim + sizes.rope_dim)
    if sizes.q_rank is None:
        yield HeldParameter("attention.q", query, h, cut=True)
    else:
        yield HeldParameter("attention.q_down", sizes.q_rank, h)
        yield from (
            norm_parameters("attention.q_down_norm", model, size=sizes.q_rank)
            if sizes.norms
            else ()
        )
        yield HeldParameter("attention.q_up", query, sizes.q_rank, cut=True)
    yield HeldParameter("attention.kv_down", sizes.kv_rank + sizes.rope_dim, h)
    yield from (
        norm_parameters("attention.kv_down_norm", model, size=sizes.kv_rank) if sizes.norms else ()
    )
    yield HeldParameter(
        "attention.kv_up", part.heads * (sizes.nope_dim + sizes.value_dim), sizes.kv_rank, cut=True
    )
    yield from output_parameters(model, part.heads * sizes.value_dim)


def _saved_tensors(
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str], saves_input: bool
) -> list[SavedActivation]:
    first = "attention.kv_down" if _sizes(branch).q_rank is None else "attention.queries.0"
    rows = [setting.hidden(first)] if saves_input else []
    if "mla_up_proj" not in recomputed:
        return (
            rows + _latent_tensors(branch, setting) + attention_tensors(branch, setting, recomputed)
        )
    inner = setting.part.heads * setting.model.value_size() * setting.tokens
    output = SavedActivation("attention.out", "input", inner, inner * setting.element)
    return [*rows, *_latent_tensors(branch, setting, recomputed=True), output]


def _latent_tensors(
    branch: LayerBranch, setting: LayerSetting, *, recomputed: bool = False
) -> list[SavedActivation]:
    """Return the saved tensors of latent attention: its compressed vectors before and after their
    norms; if recomputed, also the shared key."""
    sizes, e, own = _sizes(branch), setting.element, setting.own_tokens
    rows: list[SavedActivation] = []

    for rank, norm, up in (
        (sizes.q_rank, "attention.queries.1", "attention.queries.2"),
        (sizes.kv_rank, "attention.kv_norm", "attention.kv_up"),
    ):
        if rank is not None:
            rows += norm_tensors(setting, norm, features=rank) if sizes.norms else []
            rows.append(
                SavedActivation(
                    "attention" if recomputed else up, "input", own * rank, own * rank * e
                )
            )
    shared = own * sizes.rope_dim
    return (
        [*rows, SavedActivation("attention", "shared key", shared, shared * e)]
        if recomputed
        else rows
    )


def _shared_tensors(
    branch: LayerBranch, setting: LayerSetting, recomputed: Sequence[str]
) -> list[SavedActivation]:
    if "mla_up_proj" in recomputed:
        return all_rope_tables(setting)
    return layer_rope_tables(branch, setting, recomputed)


def _tp_messages(branch: LayerBranch, recomputed: Sequence[str]) -> TPMessages:
    """Return the compressed vectors, and the key shared by all heads, which no matrix reads."""
    sizes = _sizes(branch)
    vectors = (sizes.q_rank or branch.model.hidden_size, sizes.kv_rank)
    inputs = (*vectors, sizes.rope_dim)
    return TPMessages(
        inputs=inputs,
        weight_inputs=vectors,
        recomputed_inputs=inputs if "mla_up_proj" in recomputed else (),
        sums=1,
    )


MLA = LayerKind(
    parameters=_parameters,
    saved_tensors=_saved_tensors,
    core_flops=self_attention_flops,
    shared_tensors=_shared_tensors,
    weight_gradient_numel=attention_weight_numel,
    received_numel=received_numel,
    tp_messages=_tp_messages,
    exchange=key_value_exchange,
    position=attention_position,
    type_rules=("ContextRule",),
)
