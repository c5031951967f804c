"""Tests of megalith/plan/layers: a new layer kind needs one module and one row of the table."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from megalith.config.data import DataConfig
from megalith.config.lora import LoraConfig
from megalith.config.model import LayersConfig, ModelConfig
from megalith.config.moe import MoEConfig
from megalith.config.optim import OptimConfig, ScheduleConfig
from megalith.config.parallel import ContextConfig, ParallelConfig, RecomputeConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.estimate.explain import explain
from megalith.estimate.memory import chunk_activations, memory_ledger, working_bytes
from megalith.estimate.times import Traffic, step_traffic
from megalith.estimate.workload import Workload, plan_workload
from megalith.plan.costs import layer_flops, num_parameters, step_flops
from megalith.plan.frozen import trained_layer_flops
from megalith.plan.layers import LAYER_KINDS, branches
from megalith.plan.parameters import layer_parameters
from megalith.verify import type_rules
from tests.recurrent_kind import RECURRENT, STATE, WIDTH

# --- a model with it

ATTENTION = ModelConfig(
    vocab_size=64,
    hidden_size=8,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=20,
    pad_vocab_to_multiple_of=1,
)
MODEL = replace(
    ATTENTION,
    layers=LayersConfig(attention=("recurrent", "full")),  # type: ignore[arg-type]  # a kind added below
)
T = 16


@pytest.fixture(autouse=True)
def recurrent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAYER_KINDS, "recurrent", RECURRENT)


def plan(model: ModelConfig, world: int, **parallel: int | bool | ContextConfig) -> Workload:
    run = TrainRun(
        name="layers",
        model=model,
        data=DataConfig(mock=True),
        parallel=ParallelConfig(**parallel),  # type: ignore[arg-type]  # fields of several types
        train=LoopConfig(steps=1, global_batch_size=2, micro_batch_size=1, seq_len=T),
        schedule=ScheduleConfig(lr=1e-3),
    )
    return plan_workload(run, world)


def only(rows: Sequence[Traffic], what: str) -> Traffic:
    (row,) = [row for row in rows if row.what == what]
    return row


def test_new_kind_has_parameters_and_flops() -> None:
    h, matrices = MODEL.hidden_size, 2 * WIDTH * MODEL.hidden_size
    attention = h * (4 + 4) * 2 + 4 * 2 * h
    assert num_parameters(MODEL) - num_parameters(ATTENTION) == 2 * (
        matrices + WIDTH * STATE - attention
    )
    names = [one.name for one in layer_parameters(MODEL, 2, tp=2, tp_rank=1)]
    assert names[:4] == [
        "layers.2.attention_norm.weight",
        "layers.2.attention.inward",
        "layers.2.attention.decay",
        "layers.2.attention.outward",
    ]
    mlp = 3 * h * MODEL.ffn_hidden_size
    assert layer_flops(MODEL, 0, tokens=T, squared_lengths=T * T) == 6 * T * (
        matrices + mlp + WIDTH * STATE
    )
    layers = [layer_flops(MODEL, n, tokens=T, squared_lengths=T * T) for n in range(4)]
    head = 6 * T * h * MODEL.vocab_size
    assert step_flops(MODEL, tokens=T, squared_lengths=T * T) == sum(layers) + head


def test_frozen_parameters_before_a_new_kind_save_its_input_gradient() -> None:
    """With only `outward` trained, no matrix before it and no state has a gradient."""
    counts = {"tokens": T, "squared_lengths": T * T}
    optim = OptimConfig(trained=("layers.0.attention.outward",))
    matrix, core = 2 * T * WIDTH * MODEL.hidden_size, 2 * T * WIDTH * STATE
    mlp = 2 * T * 3 * MODEL.hidden_size * MODEL.ffn_hidden_size
    flops = trained_layer_flops(MODEL, None, 0, optim, **counts)
    assert flops == matrix + core + 2 * matrix + 2 * mlp


@pytest.mark.parametrize("tp", [1, 2])
def test_new_kind_has_memory(tp: int) -> None:
    workload = plan(MODEL, tp, tp=tp)
    stage, h = workload.chunks(0)[0], MODEL.hidden_size
    recurrent = chunk_activations(workload, replace(stage, layers=range(1)), 0, accelerator=False)
    states = STATE * WIDTH // tp * T * 4
    norms, mlp = 2 * (2 * h + 1) * T * 4, 3 * MODEL.ffn_hidden_size // tp * T * 4
    ends = 9 * T + (h + 1) * T * 4
    assert recurrent.layers == states + norms + mlp + ends
    assert working_bytes(workload, stage, 0, "B") == (1000 * WIDTH // tp + 2 * h) * T * 4
    assert memory_ledger(workload)[0].memory.total > 0
    assert len(explain(workload).stages) == 1


def test_new_kind_has_communication_over_tp_and_cp() -> None:
    h, element = MODEL.hidden_size, 4
    tp = step_traffic(plan(MODEL, 2, tp=2), 0, 0)
    sums = only(tp, "sums of activations")
    assert sums.calls == 2 * (2 * 4 + 1), "two microbatches through 4 layers and the embedding"
    assert sums.nbytes == sums.calls * T * h * element
    cp = step_traffic(plan(MODEL, 2, cp=2), 0, 0)
    for kind in "all_gather", "reduce_scatter":
        row = only(cp, f"mixer: {kind}")
        assert (row.axis, row.ranks) == ("cp", 2)
        assert row.calls == 2 * 2, "of two layers and two microbatches"
        assert row.nbytes == row.calls * T * WIDTH * 4 // 2, "half of it is sent"
    rings = only(cp, "keys, values, their gradients")
    assert rings.calls == 2 * 2 * 3, "of the other two layers"


def test_new_kind_can_be_in_any_pipeline_stage() -> None:
    workload = plan(MODEL, 2, pp=2)
    whole = {one.name for rank in range(2) for one in workload.parameters(rank, 0)}
    assert {f"layers.{layer}.attention.decay" for layer in (0, 2)} <= whole
    assert [place.pp_rank for place in memory_ledger(workload)] == [0, 1]


def test_recomputation_repeats_the_messages_of_a_new_kind() -> None:
    workload = plan(MODEL, 2, cp=2)
    run = replace(workload.run, recompute=RecomputeConfig(granularity="full"))
    assert only(step_traffic(plan_workload(run, 2), 0, 0), "mixer: all_gather").calls == 2 * 2 * 2


def test_branches_name_the_kind_of_every_part_of_a_layer() -> None:
    experts = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=6, layers=(False, True))
    mixed = replace(MODEL, moe=experts)
    names = {kind: name for name, kind in LAYER_KINDS.items()}
    kinds = [[(one.name, names[one.kind]) for one in branches(mixed, layer)] for layer in range(2)]
    assert kinds == [
        [("attention", "recurrent"), ("mlp", "mlp")],
        [("attention", "attention"), ("mlp", "moe")],
    ]


def test_every_kind_names_rules_of_the_type_check() -> None:
    names = {name for kind in LAYER_KINDS.values() for name in kind.type_rules}
    assert names == {"ContextRule"} and all(hasattr(type_rules, name) for name in names)


def test_lora_ignores_matrices_of_a_new_kind() -> None:
    run = replace(plan(MODEL, 1).run, lora=LoraConfig(rank=2))
    held = plan_workload(run, 1).parameters(0, 0)
    adapted = {one.name.split(".")[1] for one in held if one.name.endswith("q.lora_a")}
    assert adapted == {"1", "3"}
