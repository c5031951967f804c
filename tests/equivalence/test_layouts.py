"""Any layout equals one process: first weights, loss, every gradient, weights after three steps, save and reload."""

from dataclasses import dataclass, replace

import pytest

from megalith.config.context import ContextConfig, ContextKind
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.pipeline import PipelineConfig
from megalith.config.recompute import OffloadConfig, RecomputeConfig
from megalith.verify.ranks import RaggedRows, layout_case, prove_layout


def tiny(
    *, num_heads: int = 4, num_kv_heads: int = 4, tied: bool = False, bias: bool = False, vocab_size: int = 61
) -> ModelConfig:
    """Sizes that are no powers of two, a padded vocabulary, and parts that tp 3 divides unevenly."""
    return ModelConfig(
        vocab_size=vocab_size, vocab_multiple=4, hidden_size=24, num_layers=2, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=6, ffn_hidden_size=20, tied_embeddings=tied, qkv_bias=bias,
        output_bias=bias, mlp_bias=bias,
    )  # fmt: skip


SHARED = tiny(num_heads=8, num_kv_heads=2)  # tp 4 has two ranks per key/value head
LAYOUTS = {
    "dp2": (tiny(), ParallelConfig(dp=2), 2),
    "dp2 without overlap": (tiny(), ParallelConfig(dp=2, overlap=False), 2),
    "dp3 tied": (tiny(tied=True), ParallelConfig(dp=3), 3),
    "dp4": (tiny(), ParallelConfig(dp=4), 4),
    "tp2": (tiny(bias=True), ParallelConfig(tp=2), 2),
    "tp2 tied": (tiny(tied=True), ParallelConfig(tp=2), 2),
    "tp3": (tiny(), ParallelConfig(tp=3), 3),
    "tp4": (tiny(), ParallelConfig(tp=4), 4),
    "tp2 sp": (tiny(bias=True), ParallelConfig(tp=2, sp=True), 2),
    "tp3 sp tied": (tiny(tied=True), ParallelConfig(tp=3, sp=True), 3),
    "tp4, 2 key/value heads": (SHARED, ParallelConfig(tp=4), 4),
    "tp4 sp, 2 key/value heads, biases": (
        tiny(num_heads=8, num_kv_heads=2, bias=True),
        ParallelConfig(tp=4, sp=True),
        4,
    ),
    "tp2 dp2 sp": (tiny(), ParallelConfig(tp=2, dp=2, sp=True), 4),
    "tp2 dp2 sp tied, dp inside": (tiny(tied=True), ParallelConfig(tp=2, dp=2, sp=True, order="dp-tp-cp-ep-pp"), 4),
    "tp3 dp2": (tiny(bias=True), ParallelConfig(tp=3, dp=2), 6),
    "tp4 dp2 sp, 2 key/value heads": (SHARED, ParallelConfig(tp=4, dp=2, sp=True), 8),
}
LARGE = {"tp3 dp2", "tp4 dp2 sp, 2 key/value heads"}  # six and eight processes: in `make test-all`


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in LAYOUTS]
)
def test_layout_equals_one_process(name: str) -> None:
    model, parallel, world = LAYOUTS[name]
    differences = prove_layout(layout_case(model, parallel, world))
    assert {found.what for found in differences if not found.holds} == set(), differences


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_layout_equals_one_process_at_every_microbatch_size(rows: int) -> None:
    differences = prove_layout(layout_case(tiny(), ParallelConfig(tp=2, dp=2, sp=True), 4, micro_batch_size=rows))
    assert {found.what for found in differences if not found.holds} == set(), differences


# --- optimizer state (zero 1) and gradients (zero 2) divided over the ranks of dp

UNEVEN = tiny(num_heads=6, num_kv_heads=2)  # tp 4: the two ranks of a key/value head have two query heads and one
ZERO = {
    "zero 1 dp2": (tiny(), ParallelConfig(dp=2, zero=1), 2),
    "zero 2 dp2 tied, without overlap": (tiny(tied=True), ParallelConfig(dp=2, zero=2, overlap=False), 2),
    "zero 1 dp3 tied": (tiny(tied=True), ParallelConfig(dp=3, zero=1), 3),
    "zero 2 dp4": (tiny(bias=True), ParallelConfig(dp=4, zero=2), 4),
    "zero 1 dp4 in two replicas": (tiny(), ParallelConfig(dp=4, zero=1, replicas=2), 4),
    "zero 2 dp4 in two replicas": (tiny(tied=True), ParallelConfig(dp=4, zero=2, replicas=2), 4),
    "zero 1 tp2 dp2 sp": (tiny(bias=True), ParallelConfig(tp=2, dp=2, sp=True, zero=1), 4),
    "zero 2 tp2 dp2": (tiny(tied=True), ParallelConfig(tp=2, dp=2, zero=2), 4),
    "zero 1 tp3 dp2 sp": (tiny(bias=True), ParallelConfig(tp=3, dp=2, sp=True, zero=1), 6),
    "zero 1 tp4 dp2 sp, 2 key/value heads": (SHARED, ParallelConfig(tp=4, dp=2, sp=True, zero=1), 8),
    "zero 2 tp4 dp2, 2 key/value heads, 6 heads": (UNEVEN, ParallelConfig(tp=4, dp=2, zero=2), 8),
    "zero 1 cp2 dp2": (tiny(), ParallelConfig(cp=2, dp=2, zero=1), 4),
    "zero 2 cp2 tp2 sp": (tiny(), ParallelConfig(cp=2, tp=2, sp=True, zero=2), 4),
    "zero 1 pp2 dp2 tied": (tiny(tied=True), ParallelConfig(pp=2, dp=2, zero=1), 4),
    "zero 2 pp2 dp2": (tiny(), ParallelConfig(pp=2, dp=2, zero=2), 4),
    "zero 1 pp2 tp2 dp2 sp tied": (tiny(tied=True), ParallelConfig(pp=2, tp=2, dp=2, sp=True, zero=1), 8),
}
SMALL_ZERO = {
    "zero 1 dp2", "zero 2 dp2 tied, without overlap", "zero 1 dp3 tied", "zero 2 dp4 in two replicas",
    "zero 1 tp2 dp2 sp", "zero 1 pp2 dp2 tied",
}  # fmt: skip
"""In `make test`; the others in `make test-all`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SMALL_ZERO else [pytest.mark.slow]) for name in ZERO]
)
def test_divided_state_equals_one_process(name: str) -> None:
    differences = prove_layout(layout_case(*ZERO[name]))
    assert {found.what for found in differences if not found.holds} == set(), differences


# --- weights too (zero 3), by FSDP2

FULLY = {
    "zero 3 dp2": (tiny(), ParallelConfig(dp=2, zero=3), 2),
    "zero 3 dp2 tied": (tiny(tied=True), ParallelConfig(dp=2, zero=3), 2),
    "zero 3 dp3": (tiny(bias=True), ParallelConfig(dp=3, zero=3), 3),
    "zero 3 dp4": (tiny(tied=True), ParallelConfig(dp=4, zero=3), 4),
    "zero 3 dp4 in two replicas": (tiny(bias=True), ParallelConfig(dp=4, zero=3, replicas=2), 4),
    "zero 3 tp2 dp2 sp": (tiny(bias=True), ParallelConfig(tp=2, dp=2, sp=True, zero=3), 4),
    "zero 3 tp2 dp2, dp inside": (tiny(), ParallelConfig(tp=2, dp=2, zero=3, order="dp-tp-cp-ep-pp"), 4),
    "zero 3 tp3 dp2 sp": (tiny(tied=True), ParallelConfig(tp=3, dp=2, sp=True, zero=3), 6),
    "zero 3 tp4 dp2 sp, 2 key/value heads": (SHARED, ParallelConfig(tp=4, dp=2, sp=True, zero=3), 8),
    "zero 3 tp2 dp4 sp in two replicas": (tiny(), ParallelConfig(tp=2, dp=4, sp=True, zero=3, replicas=2), 8),
    "zero 3 cp2": (tiny(), ParallelConfig(cp=2, zero=3), 2),
    "zero 3 cp2 dp2": (tiny(bias=True), ParallelConfig(cp=2, dp=2, zero=3), 4),
    "zero 3 cp2 tp2 sp": (tiny(), ParallelConfig(cp=2, tp=2, sp=True, zero=3), 4),
    "zero 3 pp2 dp2": (tiny(), ParallelConfig(pp=2, dp=2, zero=3), 4),
    "zero 3 pp2 dp2 tied, without overlap": (tiny(tied=True), ParallelConfig(pp=2, dp=2, zero=3, overlap=False), 4),
    "zero 3 pp2 dp2, two chunks each": (
        replace(tiny(), num_layers=4),
        ParallelConfig(pp=2, dp=2, zero=3, pipeline=PipelineConfig(vpp=2)),
        4,
    ),
    "zero 3 pp2 tp2 dp2 sp tied": (tiny(tied=True), ParallelConfig(pp=2, tp=2, dp=2, sp=True, zero=3), 8),
}
SMALL_FULLY = {"zero 3 dp2", "zero 3 dp4 in two replicas", "zero 3 tp2 dp2 sp"}
"""In `make test`; the others in `make test-all`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SMALL_FULLY else [pytest.mark.slow]) for name in FULLY]
)
def test_divided_weights_equal_one_process(name: str) -> None:
    differences = prove_layout(layout_case(*FULLY[name]))
    assert {found.what for found in differences if not found.holds} == set(), differences


# --- tokens of each row shared over the ranks of cp


@dataclass(frozen=True)
class Case:
    """What the ranks share."""

    seq_len: int = 12
    documents: bool = False
    rows: int = 1


KINDS: dict[ContextKind, tuple[int, ...]] = {
    "ring": (2, 3, 4),
    "gather": (2, 3, 4),
    "a2a": (2, 3, 4),
    "a2a+ring": (4, 6),
}
SIX = tiny(num_heads=6, num_kv_heads=2)
SHARED_ROWS: dict[str, tuple[ModelConfig, ParallelConfig, Case]] = {
    "cp2, ring": (SHARED, ParallelConfig(cp=2), Case(rows=2)),
    "cp3, gather, documents": (SIX, ParallelConfig(cp=3, context=ContextConfig(kind="gather")), Case(documents=True)),
    "cp2, a2a, each document sliced": (
        tiny(bias=True), ParallelConfig(cp=2, context=ContextConfig(kind="a2a", slicing="document")),
        Case(documents=True, rows=2),
    ),
    "cp4, a2a+ring of two each": (
        SHARED, ParallelConfig(cp=4, context=ContextConfig(kind="a2a+ring", a2a=2)), Case(seq_len=16),
    ),
    "cp4, a2a, 2 key/value heads": (SHARED, ParallelConfig(cp=4, context=ContextConfig(kind="a2a")), Case(seq_len=24)),
    "cp2, a kind for each layer, documents": (
        tiny(tied=True), ParallelConfig(cp=2, context=ContextConfig(layers=("ring", "a2a"))), Case(documents=True),
    ),
    "cp2 tp2 sp, ring": (tiny(bias=True), ParallelConfig(cp=2, tp=2, sp=True), Case(seq_len=16)),
    "cp2 dp2, ring, documents": (tiny(), ParallelConfig(cp=2, dp=2), Case(documents=True)),
}  # fmt: skip
SLOW_ROWS: dict[str, tuple[ModelConfig, ParallelConfig, Case]] = {
    f"cp{cp}, {kind}, {'documents' if documents else 'rows'} cut by {slicing}": (
        tiny(num_heads=12, num_kv_heads=2),
        ParallelConfig(
            cp=cp, context=ContextConfig(kind=kind, slicing=slicing, a2a=cp // 2 if kind == "a2a+ring" else None)
        ),
        Case(seq_len=24, documents=documents, rows=2),
    )
    for kind, sizes in KINDS.items()
    for cp in sizes
    for documents in (False, True)
    for slicing in (("row", "document") if documents else ("row",))
} | {
    "cp2 tp2 dp2 sp, ring": (tiny(), ParallelConfig(cp=2, tp=2, dp=2, sp=True), Case(seq_len=16)),
    "cp2 tp2 dp2, a2a, 2 key/value heads": (
        SHARED, ParallelConfig(cp=2, tp=2, dp=2, context=ContextConfig(kind="a2a")), Case(documents=True),
    ),
    "cp2 tp2 sp, gather, each document sliced": (
        tiny(tied=True), ParallelConfig(cp=2, tp=2, sp=True, context=ContextConfig(kind="gather", slicing="document")),
        Case(documents=True, rows=2),
    ),
    "cp2 tp4 sp, ring, 2 key/value heads": (SHARED, ParallelConfig(cp=2, tp=4, sp=True), Case(seq_len=16)),
    "cp2 pp2, ring": (SHARED, ParallelConfig(cp=2, pp=2), Case()),
    "cp2 pp2, a2a, each document sliced": (
        tiny(tied=True), ParallelConfig(cp=2, pp=2, context=ContextConfig(kind="a2a", slicing="document")),
        Case(documents=True),
    ),
    "cp2 tp2 pp2 sp, a kind for each layer": (
        tiny(), ParallelConfig(cp=2, tp=2, pp=2, sp=True, context=ContextConfig(layers=("ring", "gather"))),
        Case(seq_len=16, documents=True),
    ),
    "cp2 dp2, zero 1": (tiny(bias=True), ParallelConfig(cp=2, dp=2, zero=1), Case()),
    "cp3 dp2, zero 2, a2a": (
        SIX, ParallelConfig(cp=3, dp=2, zero=2, context=ContextConfig(kind="a2a")), Case(),
    ),
    "cp4, three kinds and a2a+ring, rows that need padding": (
        replace(SHARED, num_layers=4),
        ParallelConfig(cp=4, context=ContextConfig(
            kind="a2a+ring", a2a=2, layers=("a2a+ring", "ring", "gather", "a2a"), slicing="document"
        )),
        Case(seq_len=11),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*SHARED_ROWS, *(pytest.param(name, marks=[pytest.mark.slow]) for name in SLOW_ROWS)])
def test_shared_rows_equal_one_process(name: str) -> None:
    model, parallel, case = (SHARED_ROWS | SLOW_ROWS)[name]
    world = parallel.cp * parallel.tp * parallel.pp * (parallel.dp or 1)
    differences = prove_layout(
        layout_case(model, parallel, world, micro_batch_size=case.rows, seq_len=case.seq_len, documents=case.documents)
    )
    assert {found.what for found in differences if not found.holds} == set(), differences


def test_the_proof_of_shared_rows_has_a_microbatch_and_a_rank_without_any_label() -> None:
    """Of the first step of cp 2: rank 1 has the two chunks in the middle of each row."""
    rows = RaggedRows(12, 61, 48, masked=(0, 1, 2, 17))
    kept = [int(rows.sample(k).valid[1:].sum()) for k in range(12)]
    assert 0 in kept and any(0 < labels <= 3 for labels in kept)


# --- layers, or parts of them, computed again in backward, and activations that wait in host memory

FULL, BLOCK = RecomputeConfig(granularity="full"), RecomputeConfig(granularity="full", method="block")
PARTS = RecomputeConfig(granularity="selective", modules=("core_attention", "norm", "mlp_act"))
AWAY = OffloadConfig(layers=1, min_numel=1)
MEMORY = {
    "full, tp2 sp": (ParallelConfig(tp=2, sp=True), 2, FULL, OffloadConfig()),
    "selective, tp2 sp, offloaded": (ParallelConfig(tp=2, sp=True), 2, PARTS, AWAY),
    "full, inputs in slices, tp2 dp2 zero 1": (
        ParallelConfig(tp=2, dp=2, zero=1), 4, replace(FULL, num_layers=2, shard_inputs=True), OffloadConfig(),
    ),
    "block, offloaded, cp2 tp2": (ParallelConfig(cp=2, tp=2), 4, BLOCK, AWAY),
    "full, two layers at once, pp2 vpp2": (
        ParallelConfig(pp=2, pipeline=PipelineConfig(vpp=2)), 2, replace(FULL, num_layers=2), OffloadConfig(),
    ),
    "selective, offloaded, pp2, weights last": (
        ParallelConfig(pp=2, pipeline=PipelineConfig(schedule="zb-h1")), 2, PARTS, AWAY,
    ),
    "selective, cp2 dp2": (ParallelConfig(cp=2, dp=2), 4, replace(PARTS, modules=("core_attention", "mlp")), AWAY),
}  # fmt: skip
LARGE_MEMORY = {name for name, (parallel, world, _, _) in MEMORY.items() if world > 2 or parallel.pp > 1}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE_MEMORY else []) for name in MEMORY]
)
def test_recomputing_ranks_equal_one_process_that_keeps_everything(name: str) -> None:
    parallel, world, recompute, offload = MEMORY[name]
    model = replace(tiny(bias=True), num_layers=4 if parallel.pp > 1 else 2)
    case = layout_case(model, parallel, world)
    differences = prove_layout(replace(case, run=replace(case.run, recompute=recompute, offload=offload)))
    assert {found.what for found in differences if not found.holds} == set(), differences
