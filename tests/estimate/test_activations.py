"""The ledger of activation memory equals what a meter finds on the running model, to the byte."""

import re
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megalith.config.model import (
    AttentionConfig,
    CrossConfig,
    DropoutConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
    RopeConfig,
)
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.config.parallel import (
    ContextConfig,
    ContextKind,
    OffloadConfig,
    ParallelConfig,
    PipelineConfig,
    RecomputeConfig,
    RecomputedModule,
)
from megalith.estimate.advise import savings
from megalith.estimate.workload import layer_rows, peak_copied_back, stage_activations
from megalith.kernels import routing
from megalith.kernels.attention import cpu_tiled
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs, RouterInputs
from megalith.kernels.packed import seq_params_from_lengths, seq_params_from_slices
from megalith.kernels.routing import permute, permute_choices
from megalith.models.decoder import Decoder, allocate, initialize
from megalith.nn.build import build_context
from megalith.observe.machine import DTYPES
from megalith.parallel.context import local_slicing
from megalith.parallel.expert import local_expert_groups
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.parallel.recompute import OffloadedStorage
from megalith.plan.context import plan_slices
from megalith.plan.grid import model_grid
from megalith.plan.layers import attention
from megalith.plan.layers.attention import attention_backend
from megalith.plan.layers.base import ExpertPart, LayerSetting, SavedActivation, total
from megalith.plan.stages import plan_stages
from megalith.testing.meter import measure_saved_activations
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.objective import sum_lm_losses
from megalith.train.trainer import build_trainer
from megalith.verify.matrix import CROSS_LAYER, VARIANTS
from tests.plan.closed_forms import GptLayer, gpt_layer_bytes

MODEL = ModelConfig(
    vocab_size=61,
    pad_vocab_to_multiple_of=4,
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    ffn_hidden_size=20,
    max_seq_len=1024,
)
MODULES: tuple[RecomputedModule, ...] = "core_attention", "norm", "mlp", "mlp_act"
SELECTIVE = [
    RecomputeConfig(granularity="selective", modules=chosen)
    for count in range(1, 5)
    for chosen in combinations(MODULES, count)
]
SELECTIVE += [RecomputeConfig(granularity="selective", modules=("norm", "mlp"), mlp_chunks=5)]
FULL = [RecomputeConfig(granularity="full", num_layers=count) for count in (1, 2, 3, 9)]
BLOCK = [
    RecomputeConfig(granularity="full", method="block", num_layers=count) for count in (1, 2, 4)
]
SHARED = RecomputeConfig(granularity="selective", modules=("shared_experts",))
UP = RecomputeConfig(granularity="selective", modules=("mla_up_proj",))
UP_AND_NORMS = replace(UP, modules=("norm", "core_attention", "mla_up_proj"))
CHEAP = RecomputeConfig(granularity="selective", modules=("norm", "mlp_act"))
DOCUMENTS = {
    "rows": (12, 12),
    "tiled rows": (70, 70),
    "packed": (33, 20, 17),
    "short, packed": (5, 3, 2),
    "one": (130,),
    "too long to keep probabilities": (520,),
}


def measure(setting: LayerSetting, rank: int = 0, world: int = 1) -> tuple[int, Counter[str]]:
    """Bytes kept after one forward pass, and by region; all of it must go with backward."""
    context = ContextConfig(
        kind=setting.context, a2a=setting.a2a if setting.context == "a2a+ring" else None
    )
    part = setting.experts or ExpertPart(etp=setting.tp)
    parallel = ParallelConfig(
        tp=setting.tp,
        sp=setting.sp,
        cp=setting.cp,
        context=context,
        ep=part.ep,
        etp=part.etp,
        dispatcher=setting.dispatcher,
    )
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(parallel, setting.model, world), rank=rank)
    )
    model = Decoder(
        build_context(
            setting.model,
            mesh,
            ParallelConfig(sp=setting.sp, dispatcher=setting.dispatcher, context=context),
            dtype=DTYPES[setting.dtype],
            recompute=setting.recompute,
            offload=setting.offload,
        )
    )
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    ids, tokens = (
        torch.arange(sum(setting.lengths)) % 61,
        LayerInputs(seq_params_from_lengths(list(setting.lengths))),
    )
    if setting.cp > 1:
        slicing = local_slicing(parallel, mesh)
        slices = plan_slices(list(setting.lengths), row=setting.lengths[0], slicing=slicing)
        ids, tokens = (
            ids[torch.from_numpy(slices.as_read(slicing.rank))],
            LayerInputs(seq_params_from_slices(slices, slicing)),
        )
    if setting.model.dropout.is_enabled():
        tokens = replace(tokens, dropout_key=DropoutKey(7, torch.arange(len(ids))))
    if setting.model.moe is not None:
        tokens = replace(tokens, router_inputs=RouterInputs(AuxLossScale(0, 1, 1.0)))
        if setting.model.moe.router.uses_random_numbers():
            tokens = replace(tokens, dropout_key=DropoutKey(7, torch.arange(len(ids))))
    with measure_saved_activations(model) as meter, equally_busy(part.ep > 1):
        loss = sum(
            sum_lm_losses(
                model.outputs(ids, tokens, mtp_inputs=((ids, ids),) * setting.model.mtp.num_layers),
                ids,
                ((ids, ids),) * setting.model.mtp.num_layers,
            ),
            torch.zeros(()),
        )
    live = meter.live
    loss.backward()
    del loss
    assert meter.live == 0
    kept = Counter[str]()
    for name, nbytes in meter.kept.items():
        kept["" if name.startswith("mtp") else name] += nbytes
    return live, kept


@contextmanager
def equally_busy(forced: bool) -> Iterator[None]:
    """While this lasts, tokens choose experts in turn."""

    def in_turn(scores: torch.Tensor, count: int) -> torch.Tensor:
        t, experts = scores.shape
        return torch.arange(t * count).view(t, count) % experts

    with pytest.MonkeyPatch.context() as patch:
        if forced:
            patch.setattr(routing, "top_k_indices", in_turn)
        yield


def expected(setting: LayerSetting) -> Counter[str]:
    """The ledger by region, as the meter names them; multi-token predictions by the whole of
    them."""
    kept = stage_activations(setting, num_layers=setting.model.num_layers)
    found: Counter[str] = Counter()
    for index, rows in enumerate(kept.layers):
        for row in rows:
            input_of_span = row.what == "input of recomputed layers"
            found["" if input_of_span else f"layers.{index}.{row.region}".rstrip(".")] += row.nbytes
    for row in kept.ends:
        if row.region != "shared":  # whichever layer comes first
            found["" if row.region.startswith("mtp") else row.region] += row.nbytes
    return found


def untold(row: SavedActivation) -> bool:
    """Whether autograd does not know of it: an operation keeps it by itself."""
    return row.region.endswith("mlp.order")


def agrees(setting: LayerSetting, rank: int = 0, world: int = 1) -> None:
    live, kept = measure(setting, rank, world)
    ledger = stage_activations(setting, num_layers=setting.model.num_layers)
    rows = [row for some in (*ledger.layers, ledger.ends) for row in some]
    assert live == ledger.nbytes - sum(row.nbytes for row in rows if untold(row)), (
        setting,
        kept,
        expected(setting),
    )
    if setting.model.moe is not None or setting.model.cross is not None:
        # the meter also tells of scores that have gone by now; a memory's norm reads what another
        # norm reads
        return
    shared = sum(row.nbytes for row in ledger.ends if row.region == "shared")
    differ = {name: kept[name] - expected(setting)[name] for name in {*kept, *expected(setting)}}
    assert all(nbytes >= 0 for nbytes in differ.values()) and sum(differ.values()) == shared, differ
    assert {name.split(".")[-1] for name, nbytes in differ.items() if nbytes} <= {
        "",
        "attention",
        "input_embedding",
        "attention_out",
        "mlp_out",
    }


@pytest.mark.parametrize(
    "dtype", ["bf16", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp32", "fp64"))]
)
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS)
def test_saved_activations_of_a_layer_match_the_ledger(
    dtype: Literal["fp32", "bf16", "fp64"], lengths: tuple[int, ...]
) -> None:
    agrees(LayerSetting(model=MODEL, dtype=dtype, lengths=lengths))
    agrees(
        LayerSetting(
            model=replace(MODEL, num_kv_heads=4, qkv_bias=True, mlp_bias=True),
            dtype=dtype,
            lengths=lengths,
        )
    )


KINDS = {
    **VARIANTS,
    "around, LayerNorm": replace(
        MODEL, norm="layer", norm_placement="around", attention=AttentionConfig(qk_norm="head")
    ),
    "whole norms, no_rope": replace(VARIANTS["normed after"], positions="none"),
    "no_rope": replace(MODEL, positions="none", attention=AttentionConfig(gated=True)),
    "gate, turned": replace(MODEL, attention=AttentionConfig(gated=True)),
    "l2": replace(MODEL, attention=AttentionConfig(qk_norm="l2")),
    "one norm, after": replace(MODEL, block="parallel", norm_placement="after"),
    "mla, values as keys": replace(
        MODEL, num_kv_heads=4, mla=MLAConfig(kv_rank=10, nope_dim=4, rope_dim=4, value_dim=8)
    ),
    "mla, no norms": replace(
        MODEL,
        num_kv_heads=4,
        mla=MLAConfig(kv_rank=10, q_rank=9, nope_dim=4, rope_dim=4, value_dim=8, norms=False),
    ),
    "mla, LayerNorm": replace(
        MODEL,
        num_kv_heads=4,
        norm="layer",
        mla=MLAConfig(kv_rank=10, q_rank=9, nope_dim=4, rope_dim=4, value_dim=8),
    ),
    "mtp": replace(MODEL, mtp=MTPConfig(num_layers=2)),
    "mtp, learned positions": replace(MODEL, positions="learned", mtp=MTPConfig(num_layers=2)),
    "wide stream": replace(MODEL, fp32_residual=True, mtp=MTPConfig(num_layers=1)),
    "wide stream, around": replace(
        MODEL, fp32_residual=True, norm="layer", norm_placement="around", block="parallel"
    ),
    "bidirectional": replace(MODEL, attention=AttentionConfig(causal=False)),
    "dropped weights": replace(MODEL, dropout=DropoutConfig(attention=0.2)),
    "dropped residuals": replace(MODEL, dropout=DropoutConfig(residual=0.1)),
    "cross-layer attention, around, LayerNorm": replace(
        CROSS_LAYER,
        norm="layer",
        norm_placement="around",
        dropout=DropoutConfig(residual=0.1, attention=0.2),
    ),
    "cross-layer attention, after": replace(
        MODEL, norm_placement="after", cross=CrossConfig(memory=0)
    ),
    "cross-layer attention, wide stream": replace(
        MODEL,
        fp32_residual=True,
        norm_placement="after",
        cross=CrossConfig(memory=1),
        num_kv_heads=4,
    ),
    "every other layer turned": replace(MODEL, rope=RopeConfig(skip=(True, False), fraction=0.7)),
}
"""Models of every kind of layer whose rows are exact."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16", pytest.param("fp64", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_saved_activations_of_every_layer_type_match_the_ledger(
    name: str, dtype: Literal["fp32", "bf16", "fp64"]
) -> None:
    for lengths in ((12, 12), (70,), (33, 20, 17)):
        setting = LayerSetting(
            model=replace(KINDS[name], max_seq_len=96), dtype=dtype, lengths=lengths
        )
        if attention_backend(setting, 0) != "plain" or dtype != "bf16":
            # of which the ledger has an estimate
            agrees(setting)


ESTIMATED: list[dict[str, Any]] = [  # Any: values of settings
    {
        "num_kv_heads": 4,
        "mla": MLAConfig(kv_rank=10, q_rank=14, nope_dim=4, rope_dim=4, value_dim=6),
    },
]


@pytest.mark.parametrize("change", ESTIMATED, ids=["short documents of latent attention"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_estimated_activations_are_close_to_measured_ones(
    change: dict[str, Any], dtype: Literal["fp32", "bf16"]
) -> None:
    setting = LayerSetting(model=replace(MODEL, **change), dtype=dtype, lengths=(48, 48))
    assert attention_backend(setting, 0) == ("cpu_tiled" if dtype == "bf16" else "plain")
    ledger = stage_activations(setting, num_layers=3).nbytes
    assert 0.6 * ledger < measure(setting)[0] < 1.4 * ledger


@pytest.mark.parametrize(
    "recompute",
    [FULL[1], pytest.param(SELECTIVE[1], marks=pytest.mark.slow), SELECTIVE[-1]],
    ids=str,
)
@pytest.mark.parametrize("name", KINDS)
def test_recomputed_activations_of_every_layer_type_match_the_ledger(
    name: str, recompute: RecomputeConfig
) -> None:
    agrees(LayerSetting(model=KINDS[name], dtype="fp32", lengths=(12, 12), recompute=recompute))


MOE = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=10)
ALL_LOSSES = AuxLossConfig(
    sequence_coeff=0.1, batch_coeff=0.1, global_batch_coeff=0.1, z_loss_coeff=0.1
)
ROUTERS = {
    "softmax": RouterConfig(),
    "shares": RouterConfig(norm_topk_prob=False),
    "sigmoid": RouterConfig(
        score="sigmoid", bias=True, expert_bias=True, routed_scaling_factor=2.5
    ),
    "scores": RouterConfig(score="sigmoid", norm_topk_prob=False, num_groups=2, topk_groups=1),
    "roots": RouterConfig(score="sqrt_softplus", routed_scaling_factor=2.5),
    "as the model": RouterConfig(dtype="model"),
    "wide": RouterConfig(dtype="fp64"),
    "jitter": RouterConfig(jitter=0.1),
}
MIXTURES = {
    **{name: replace(MODEL, moe=replace(MOE, router=router)) for name, router in ROUTERS.items()},
    "ungated, biases": replace(
        MODEL, gated=False, moe=replace(MOE, biases=True, layers=(False, True))
    ),
    "shared, latent": replace(
        MODEL,
        moe=replace(
            MOE, latent_size=8, shared_ffn_hidden_size=6, shared_gate=True, router=ROUTERS["jitter"]
        ),
    ),
    "shared": replace(
        MODEL, moe=replace(MOE, shared_ffn_hidden_size=6), mtp=MTPConfig(num_layers=1)
    ),
    "weighed input": replace(
        MODEL,
        moe=replace(MOE, top_k=1, apply_router_weight_on_input=True, router=ROUTERS["shares"]),
    ),
    **{
        f"{name}, balanced": replace(
            MODEL, moe=replace(MOE, router=ROUTERS[name], aux_loss=ALL_LOSSES)
        )
        for name in ("softmax", "shares", "sigmoid", "roots", "as the model")
    },
    "moved logits": replace(
        MODEL, moe=replace(MOE, aux_loss=AuxLossConfig(quantile=True, z_loss_coeff=0.1))
    ),
    "size of logits": replace(
        MODEL, moe=replace(MOE, router=ROUTERS["sigmoid"], aux_loss=AuxLossConfig(z_loss_coeff=0.1))
    ),
    "roomy": replace(MODEL, moe=replace(MOE, capacity=CapacityConfig(factor=4.0))),
    "padded": replace(MODEL, moe=replace(MOE, capacity=CapacityConfig(factor=1.3, pad=True))),
}


@pytest.mark.parametrize(
    "recompute",
    [
        RecomputeConfig(),
        CHEAP,
        *(pytest.param(r, marks=pytest.mark.slow) for r in (SELECTIVE[2], BLOCK[0], SHARED)),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MIXTURES)
def test_saved_activations_of_moe_layers_match_the_ledger(
    name: str, recompute: RecomputeConfig
) -> None:
    dtypes: tuple[Literal["fp32", "bf16", "fp64"], ...] = (
        ("bf16", "fp64") if recompute != CHEAP else ("fp32",)
    )
    for dtype in dtypes:
        agrees(
            LayerSetting(model=MIXTURES[name], dtype=dtype, lengths=(12, 12), recompute=recompute)
        )


OVER_RANKS: list[tuple[int, dict[str, Any]]] = [  # Any: fields of a setting
    (2, {"experts": ExpertPart(ep=2)}),
    (2, {"experts": ExpertPart(etp=2)}),
    (2, {"experts": ExpertPart(ep=2), "dispatcher": "allgather"}),
    (2, {"experts": ExpertPart(ep=2), "tp": 2, "sp": True}),
    (4, {"experts": ExpertPart(ep=2, etp=2), "tp": 2, "sp": True}),
    (4, {"experts": ExpertPart(ep=2, etp=2), "dispatcher": "allgather", "tp": 2, "sp": True}),
    (2, {"experts": ExpertPart(ep=2), "cp": 2, "lengths": (24, 24)}),
]


@pytest.mark.parametrize(("world", "change"), OVER_RANKS, ids=str)
def test_saved_activations_under_expert_parallelism_match_the_ledger(
    world: int, change: dict[str, Any]
) -> None:
    for name in ("softmax, balanced", "sigmoid, balanced", "shared, latent"):
        plain = LayerSetting(model=MIXTURES[name], dtype="fp32", lengths=(12, 12))
        run_ranks(on_a_rank_with_experts, world, replace(plain, **change))


def test_saved_activations_with_equal_rows_per_rank_match_the_ledger() -> None:
    padded = LayerSetting(
        model=MIXTURES["padded"],
        dtype="fp32",
        lengths=(12, 12),
        experts=ExpertPart(ep=2),
        tp=2,
        sp=True,
    )
    run_ranks(on_a_rank_with_experts, 2, padded)


def on_a_rank_with_experts(rank: int, world: int, setting: LayerSetting) -> None:
    assert setting.experts is not None
    part = replace(setting.experts, etp_rank=rank % setting.experts.etp)
    agrees(replace(setting, tp_rank=rank % setting.tp, experts=part), rank, world)


def test_tensors_saved_by_operations_are_counted() -> None:
    """Of which row is whose, one tensor is known to autograd; the others are as large as the ledger
    says."""
    x, choice = torch.empty(12, 24), torch.arange(24).view(12, 2) % 4
    order = permute_choices(choice, 4, num_rows=24)
    others = sum(part.nbytes for part in (order.tokens, order.rows, order.starts, order.counts))
    ends = local_expert_groups(order).ends
    assert ends is not None and len(permute(x, order)) == 24
    rows = layer_rows(LayerSetting(model=MIXTURES["softmax"], dtype="fp32", lengths=(12,)), ())
    assert sum(row.nbytes for row in rows if untold(row)) == others + ends.nbytes
    assert (
        next(row.nbytes for row in rows if row.what == "choice of each row") == order.choices.nbytes
    )


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recompute", FULL + BLOCK + SELECTIVE, ids=str)
def test_saved_activations_with_recomputation_match_the_ledger(
    dtype: Literal["fp32", "bf16"], recompute: RecomputeConfig
) -> None:
    for lengths in ((12, 12), (70,)):
        agrees(LayerSetting(model=MODEL, dtype=dtype, lengths=lengths, recompute=recompute))


@pytest.mark.parametrize("away", [1, 2, 3])
@pytest.mark.parametrize("recompute", [RecomputeConfig(), FULL[1], BLOCK[0]], ids=str)
def test_cross_layer_source_is_not_offloaded(recompute: RecomputeConfig, away: int) -> None:
    offload = OffloadConfig(layers=away, min_numel=1)
    agrees(
        LayerSetting(
            model=CROSS_LAYER, dtype="fp32", lengths=(12, 12), recompute=recompute, offload=offload
        )
    )


def on_a_rank(rank: int, world: int, setting: LayerSetting) -> None:
    agrees(replace(setting, tp_rank=rank), rank, world)


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sp"])
@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_saved_activations_under_tensor_parallelism_match_the_ledger(tp: int, sp: bool) -> None:
    plain = LayerSetting(model=MODEL, dtype="fp32", lengths=(12, 12), tp=tp, sp=sp)
    for recompute in (RecomputeConfig(), FULL[1], SELECTIVE[1], SELECTIVE[-1]):
        run_ranks(on_a_rank, tp, replace(plain, recompute=recompute))


@pytest.mark.parametrize(
    ("kind", "cp", "length"),
    [
        ("ring", 2, 24),
        ("gather", 2, 24),
        ("a2a", 2, 24),
        ("a2a", 2, 80),
        pytest.param("ring", 4, 24, marks=pytest.mark.slow),
        pytest.param("a2a+ring", 4, 24, marks=pytest.mark.slow),
    ],
)
def test_saved_activations_under_context_parallelism_match_the_ledger(
    kind: ContextKind, cp: int, length: int
) -> None:
    plain = LayerSetting(
        model=MODEL, dtype="fp32", lengths=(length,) * 2, cp=cp, context=kind, a2a=2
    )
    for recompute in (RecomputeConfig(), FULL[1], SELECTIVE[-1]):
        run_ranks(on_a_cp_rank, cp, replace(plain, recompute=recompute))


@pytest.mark.parametrize("recompute", [UP, UP_AND_NORMS], ids=str)
@pytest.mark.parametrize(
    "name", ["latent", "mla, values as keys", "mla, no norms", "mla, LayerNorm"]
)
def test_recomputed_mla_saves_its_latent_vectors(name: str, recompute: RecomputeConfig) -> None:
    setting = LayerSetting(
        model=replace(KINDS[name], max_seq_len=96),
        dtype="bf16",
        lengths=(33, 20),
        recompute=recompute,
    )
    agrees(setting)
    agrees(replace(setting, dtype="fp32", lengths=(12, 12)))
    assert total(layer_rows(setting, recompute.modules)) < total(
        layer_rows(setting, ("core_attention",))
    )


@pytest.mark.parametrize(
    "sp", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["whole", "sp"]
)
def test_ranks_save_their_shards_of_latent_vectors(sp: bool) -> None:
    plain = LayerSetting(model=KINDS["latent"], dtype="fp32", lengths=(12, 12), recompute=UP)
    run_ranks(on_a_rank, 2, replace(plain, tp=2, sp=sp))
    run_ranks(on_a_cp_rank, 2, replace(plain, cp=2, context="a2a" if sp else "ring"))


def test_recomputed_layers_with_two_rope_tables_save_both() -> None:
    windows = AttentionConfig(window=5, window_layers=(True, False))
    model = replace(
        KINDS["mla, values as keys"], attention=windows, rope=RopeConfig(local_theta=100.0)
    )
    for changed in (model, replace(model, attention=replace(windows, window_layers=(True,)))):
        agrees(LayerSetting(model=changed, dtype="fp32", lengths=(12, 12), recompute=UP))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "gather", "a2a"])
@pytest.mark.parametrize(
    "name", ["sinks", "normed around", "mla, values as keys", "relative", "cross-layer"]
)
def test_saved_activations_of_every_layer_type_match_under_context_parallelism(
    name: str, kind: ContextKind
) -> None:
    for lengths in ((24, 24), (24,)):
        run_ranks(
            on_a_cp_rank,
            2,
            LayerSetting(model=KINDS[name], dtype="fp32", lengths=lengths, cp=2, context=kind),
        )


@pytest.mark.slow
@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sp"])
@pytest.mark.parametrize(
    "name",
    ["learned positions", "parallel", "normed after", "latent", "gated", "cross-layer"],
)
def test_saved_activations_of_every_layer_type_match_under_tensor_parallelism(
    name: str, sp: bool
) -> None:
    run_ranks(
        on_a_rank,
        2,
        LayerSetting(model=KINDS[name], dtype="fp32", lengths=(12, 12), tp=2, sp=sp),
    )


def test_alltoall_of_indivisible_heads_saves_copies_of_keys_and_values() -> None:
    model = replace(MODEL, num_heads=6, num_kv_heads=3)  # three copies on each of two ranks
    plain = LayerSetting(model=model, dtype="fp32", lengths=(24, 24), cp=2, context="a2a")
    run_ranks(on_a_cp_rank, 2, plain)


def on_a_cp_rank(rank: int, world: int, setting: LayerSetting) -> None:
    agrees(setting, rank, world)


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("length", [64, 1024, 8192])
def test_ring_attention_saves_its_tokens_and_at_most_two_chunks_of_keys_and_values(
    cp: int, length: int
) -> None:
    alone = LayerSetting(model=MODEL, dtype="bf16", lengths=(length,))
    shared = replace(alone, cp=cp)
    chunk = 2 * MODEL.num_kv_heads * MODEL.head_size() * shared.tokens * 2
    assert total(layer_rows(shared, ())) <= total(layer_rows(alone, ())) // cp + 2 * chunk


def test_sharded_inputs_of_recomputed_layers_are_a_tp_th_each_padded() -> None:
    recompute = RecomputeConfig(granularity="full", num_layers=2, shard_inputs=True)
    odd = replace(MODEL, hidden_size=25)
    setting = LayerSetting(model=odd, dtype="fp32", lengths=(5, 4, 4), tp=2, recompute=recompute)
    assert 25 * 13 % 2 == 1
    run_ranks(on_a_rank, 2, setting)
    whole = stage_activations(
        replace(setting, recompute=replace(recompute, shard_inputs=False)), num_layers=3
    )
    assert whole.nbytes - stage_activations(setting, num_layers=3).nbytes == 2 * (25 * 13 - 163) * 4


def test_sequence_parallel_ranks_save_their_share_of_activations() -> None:
    one = LayerSetting(model=MODEL, dtype="bf16", lengths=(64, 64))
    both = replace(one, tp=2, sp=True)
    assert 2 * total(layer_rows(both, ())) == total(layer_rows(one, ()))


def test_middle_stages_save_only_layers_and_rope_tables() -> None:
    setting = LayerSetting(model=MODEL, dtype="fp32", lengths=(12, 12))
    middle = stage_activations(setting, num_layers=1, embedding=False, loss=False)
    assert middle.nbytes == total(layer_rows(setting, ())) + 24 * 6 * 4
    assert stage_activations(setting, num_layers=0, embedding=False, loss=False).nbytes == 0


@pytest.mark.parametrize("layout", ["Ett|t|mm|L", "Et|ttmm||L", "E|tt|t|mmL"])
@pytest.mark.parametrize("kind", ["mtp", "mtp, learned positions", "recomputed"])
def test_saved_activations_of_mtp_stages_match_the_ledger(layout: str, kind: str) -> None:
    model = KINDS["mtp" if kind == "recomputed" else kind]
    recompute = FULL[0] if kind == "recomputed" else RecomputeConfig()
    setting = LayerSetting(model=model, dtype="fp32", lengths=(12, 12), recompute=recompute)
    ids, tokens = torch.arange(24) % 61, LayerInputs(seq_params_from_lengths([12, 12]))
    received: dict[str, torch.Tensor] = {}
    for stage in plan_stages(PipelineConfig(layout=layout), pp=4, num_layers=3, depths=2):
        chunk = Decoder(
            build_context(model, build_single_rank_mesh(), recompute=recompute), stage=stage
        )
        allocate(chunk, torch.device("cpu"))
        initialize(chunk, seed=1)
        mtp_inputs, given = (
            ((ids, ids),) * 2,
            {name: x.detach().requires_grad_() for name, x in received.items()},
        )
        with measure_saved_activations(chunk) as meter:
            found = (
                sum_lm_losses(
                    chunk.outputs(ids, tokens, mtp_inputs=mtp_inputs, received=given),
                    ids,
                    mtp_inputs,
                )
                if stage.loss
                else chunk(ids, tokens, mtp_inputs=mtp_inputs, received=given)
            )
        kept = stage_activations(
            replace(setting, first_layer=stage.layers.start),
            num_layers=len(stage.layers),
            embedding=stage.embedding,
            loss=stage.loss,
            norm=stage.norm,
            num_mtp_layers=stage.num_mtp_layers,
        )
        assert meter.live == kept.nbytes, stage
        if isinstance(found, dict):
            received = found
    assert len(found) == 3


def test_recomputed_activations_are_transient() -> None:
    setting = LayerSetting(model=MODEL, dtype="fp32", lengths=(12, 12))
    layer = total(layer_rows(setting, ()))
    chunk = stage_activations(replace(setting, recompute=FULL[1]), num_layers=3)
    assert chunk.transient == 2 * layer - 24 * 24 * 4
    act = stage_activations(
        replace(setting, recompute=RecomputeConfig(granularity="selective", modules=("mlp_act",))),
        num_layers=3,
    )
    assert act.transient == 24 * 20 * 4 and stage_activations(setting, num_layers=3).transient == 0
    for chunks, tokens in ((1, 24), (5, 5), (24, 1)):
        mlp = RecomputeConfig(granularity="selective", modules=("mlp",), mlp_chunks=chunks)
        assert (
            stage_activations(replace(setting, recompute=mlp), num_layers=3).transient
            == tokens * 3 * 20 * 4
        )


def test_tile_constants_match_the_kernels() -> None:
    for name in ("TILED_LENGTHS", "KEPT_LENGTH", "TILE_ROWS", "TILE_SCORES"):
        assert getattr(attention, name) == getattr(cpu_tiled, name)


def test_selective_attention_saves_the_papers_share_of_a_gpt_layer() -> None:
    """Of the paper's 5·n·s² bytes those of softmax's result, 2, up to the diagonal, in tiles;
    nothing else changes.

    The layer has the paper's shape, n · d = h and f = 4 h, without its dropout, whose masks are 2
    of the 34·s·h bytes and 3 of the 5·n·s², and with a gate, 8·s·h more.
    """
    wide = replace(MODEL, num_kv_heads=4, ffn_hidden_size=96)
    assert (
        wide.num_heads * wide.head_size() == wide.hidden_size
        and wide.ffn_hidden_size == 4 * wide.hidden_size
    )
    paper = GptLayer(length=512, sequences=1, hidden_size=24, num_heads=4)
    whole, left = (
        gpt_layer_bytes(paper, again="nothing"),
        gpt_layer_bytes(paper, again="core_attention"),
    )
    setting, tiles = LayerSetting(model=wide, dtype="bf16", lengths=(512,)), 8
    ours, ours_left = (
        total(layer_rows(setting, ())),
        total(layer_rows(setting, ("core_attention",))),
    )
    assert ours - ours_left == (whole - left) * Fraction(2, 5) * Fraction(tiles + 1, 2 * tiles)
    scales = 2 * 512 * 4
    assert ours_left == left * Fraction(34 - 2 + 8, 34) + scales
    assert (whole - left) / whole == Fraction(5 * 4 * 512, 34 * 24 + 5 * 4 * 512)


def test_offloaded_rows_are_those_of_the_first_layers_that_are_large_enough() -> None:
    setting = LayerSetting(
        model=MODEL, dtype="fp32", lengths=(12, 12), offload=OffloadConfig(layers=2, min_numel=100)
    )
    kept = stage_activations(setting, num_layers=3)
    assert [len(rows) > 0 for rows in kept.host] == [True, True, False]
    assert {row.what for row in kept.host[0]}.isdisjoint({"scale", "scale of mlp_norm", "log-sum"})
    here = stage_activations(replace(setting, offload=OffloadConfig()), num_layers=3)
    assert kept.nbytes + kept.host_bytes == here.nbytes


def test_fetched_activations_are_those_of_two_spans_at_a_time() -> None:
    assert (
        peak_copied_back([])
        == peak_copied_back([(5, 0)])
        == peak_copied_back([(5, 0), (7, 0)])
        == 0
    )
    assert peak_copied_back([(9, 9), (10, 0)]) == 9
    assert peak_copied_back([(9, 8), (9, 8), (9, 8), (10, 0)]) == 8, (
        "the last but one is back before the last is done"
    )
    assert peak_copied_back([(9, 9), (9, 9), (9, 9), (1, 0)]) == 17
    assert peak_copied_back([(9, 8), *[(9, 0)] * 5]) == 0, (
        "the first comes back when most of the others are gone"
    )


@pytest.mark.parametrize("recompute", [RecomputeConfig(), FULL[0], FULL[1]], ids=str)
@pytest.mark.parametrize(("num_layers", "away"), [(3, 2), (5, 4), (5, 1), (5, 2)])
def test_activations_fetched_in_backward_match_the_ledger(
    recompute: RecomputeConfig, num_layers: int, away: int
) -> None:
    """Live bytes: what autograd holds on the device, and the copies that are back there."""
    model, offload = replace(MODEL, num_layers=num_layers), OffloadConfig(layers=away, min_numel=1)
    setting = LayerSetting(
        model=model, dtype="fp32", lengths=(12, 12), recompute=recompute, offload=offload
    )
    decoder = Decoder(
        build_context(
            model,
            build_single_rank_mesh(),
            ParallelConfig(sp=False),
            dtype=torch.float32,
            recompute=recompute,
            offload=offload,
        )
    )
    allocate(decoder, torch.device("cpu"))
    initialize(decoder, seed=1)
    ids, found, copies = torch.arange(24), [0], list[weakref.ref[OffloadedStorage]]()
    begin = OffloadedStorage.start_copy_back

    def noted(self: OffloadedStorage) -> None:
        copies.append(weakref.ref(self))
        begin(self)
        back = {
            id(one): one.back.nbytes
            for ref in copies
            if (one := ref()) is not None and one.back is not None
        }
        found.append(meter.live + sum(back.values()))

    with measure_saved_activations(decoder) as meter, pytest.MonkeyPatch.context() as patch:
        loss = decoder.loss(ids, ids, LayerInputs(seq_params_from_lengths([12, 12])))
        patch.setattr(OffloadedStorage, "start_copy_back", noted)
        loss.backward()
    kept = stage_activations(setting, num_layers=num_layers)
    # before the first layer's backward
    gone = total([row for row in kept.ends if row.region in ("", "norm")])
    again = stage_activations(
        replace(setting, offload=OffloadConfig()), num_layers=num_layers
    ).transient
    back = kept.transient - again
    if back:
        assert max(found) == kept.nbytes - gone + back
    else:
        assert max(found) <= kept.nbytes - gone


def test_two_layers_of_a_large_model_are_fetched_at_a_time() -> None:
    away = replace(LLAMA_8B, tp=2, sp=True, offload=OffloadConfig(layers=31))
    layer = total(layer_rows(away, ()))
    assert 0.53 * 2**30 <= stage_activations(away, num_layers=32).transient <= layer < 0.54 * 2**30


@pytest.mark.parametrize("recompute", [RecomputeConfig(), FULL[0], SELECTIVE[-1]], ids=str)
def test_temporarily_gathered_weights_are_neither_saved_nor_offloaded(
    recompute: RecomputeConfig,
) -> None:
    run_ranks(sharded_weights, 2, recompute, OffloadConfig(layers=2, min_numel=1))


def sharded_weights(
    rank: int, world: int, recompute: RecomputeConfig, offload: OffloadConfig
) -> None:
    run = tiny_run({"model.num_layers": "3", "parallel.dp": "2", "parallel.zero": "3"})
    run = replace(run, recompute=recompute, offload=offload)
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    trainer = build_trainer(run, mesh, torch.device("cpu"))
    trainer.data.begin_step(1)
    ids = torch.arange(24)
    with measure_saved_activations(trainer.model) as meter:
        loss = trainer.model.loss(ids, ids, LayerInputs(seq_params_from_lengths([12, 12])))
    setting = LayerSetting(
        model=run.model, dtype="fp32", lengths=(12, 12), recompute=recompute, offload=offload
    )
    ledger = stage_activations(setting, num_layers=3)
    assert meter.live == ledger.nbytes
    loss.backward()
    trainer.data.finish()
    assert trainer.model.run_layers.memory.taken == sum(len(rows) for rows in ledger.host) > 0


PAGE = Path(__file__).parents[2] / "docs/concepts/recompute.md"
LLAMA_8B = LayerSetting(
    model=ModelConfig(
        vocab_size=128256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn_hidden_size=14336,
        max_seq_len=8192,
    ),
    dtype="bf16",
    lengths=(8192,),
    accelerator=True,
)


def test_docs_page_matches_the_ledger() -> None:
    text, plain = PAGE.read_text(), total(layer_rows(LLAMA_8B, ()))
    assert f"saves {plain / 8192 / 1024:.1f} KiB" in text
    for module in MODULES:
        one = replace(
            LLAMA_8B, recompute=RecomputeConfig(granularity="selective", modules=(module,))
        )
        saving = savings(one, num_layers=1)[0]
        assert (
            f"| {saving.nbytes / 8192 / 1024:.1f} KiB | {100 * saving.extra:.1f} % |"
            in text.split(f"`{module}`")[1]
        )


def test_docs_example_prints_its_output(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, output = re.findall(r"```(?:python)?\n(.*?)```", PAGE.read_text(), re.DOTALL)[-2:]
    exec(compile(code, "recompute.md", "exec"), {})  # lint: allow eval-exec: our own page
    assert capsys.readouterr().out == output
