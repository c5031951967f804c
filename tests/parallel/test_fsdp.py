"""Fully sharded weights: the same sums as one process, only one layer gathered at a time, my rows
and nothing else."""

import re
import threading
from dataclasses import replace
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, PrefixStore

from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.config.model import ModelConfig
from megalith.config.moe import MoEConfig, RouterConfig
from megalith.config.optim import OptimConfig, PrecisionConfig
from megalith.config.parallel import ParallelConfig, RecomputeConfig
from megalith.errors import CollectiveError, PlanError
from megalith.kernels.grouped_linear import Groups
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import recompute_recipe, register_recompute
from megalith.kernels.packed import seq_params_from_rows
from megalith.launch.launcher import Failure
from megalith.launch.watchdog import Fingerprints, HangWatch, watching
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context, init_param_
from megalith.nn.layer import SequentialBlock
from megalith.observe.flight import FlightRecorder
from megalith.optim.optimizer import RuleOptimizer
from megalith.parallel import grad_sync as engines
from megalith.parallel.expert import DispatchedTokens
from megalith.parallel.fsdp import (
    FullyShardedDataParallel,
    ShardedUnit,
    Unit,
    _keep_recompute_recipes,
    _reject_shared_chunks,
)
from megalith.parallel.group import gather_objects
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.parallel.tensor import Init, ParameterSpec, register_param
from megalith.plan.grid import model_grid
from megalith.plan.shards import Shard
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import OddSizedModel
from megalith.testing.tolerance import FP64, assert_close, compare
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import all_gather_loaded_params, build_trainer, checkpoint_entries
from megalith.verify import ranks as proof

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=30,
    pad_vocab_to_multiple_of=4,
    hidden_size=12,
    num_layers=4,
    num_heads=2,
    num_kv_heads=1,
    ffn_hidden_size=10,
    qkv_bias=True,
)
MICROBATCHES = 2


def build(
    mesh: Mesh,
    *,
    dtype: torch.dtype = torch.float64,
    watch: bool = False,
    keep_gathered: bool = False,
    recompute: RecomputeConfig | None = None,
    config: ModelConfig = CONFIG,
    overlap: bool = True,
) -> tuple[Decoder, FullyShardedDataParallel]:
    """A small model, its weights cut into rows."""
    model = Decoder(
        build_context(config, mesh, dtype=dtype, recompute=recompute or RecomputeConfig())
    )
    parameters = [
        (declared.shard, module, name) for declared, module, name in iter_parameter_specs(model)
    ]
    data = FullyShardedDataParallel(
        [model],
        parameters,
        mesh,
        device=CPU,
        watch=watch,
        keep_gathered=keep_gathered,
        overlap=overlap,
    )
    init_of = {declared.shard.name: declared.init for declared, _, _ in iter_parameter_specs(model)}
    for param in data.local_params:
        init_param_(param.weight, param.shard, init_of[param.shard.name], seed=5)
    return model, data


def alone(*, dtype: torch.dtype = torch.float64, config: ModelConfig = CONFIG) -> Decoder:
    """The same model in one piece."""
    model = Decoder(build_context(config, build_single_rank_mesh(), dtype=dtype))
    allocate(model, CPU)
    initialize(model, seed=5)
    return model


def dp_mesh(rank: int, world: int, *, flight: FlightRecorder | None = None) -> Mesh:
    return build_mesh(model_grid(ParallelConfig(zero=3), CONFIG, world), rank=rank, flight=flight)


def loss_of(model: Decoder, microbatch: int) -> Tensor:
    """One microbatch of two rows."""
    ids = torch.randint(0, 30, (14,), generator=torch.Generator().manual_seed(microbatch))
    return model.loss(ids, ids.roll(-1), LayerInputs(seq_params_from_rows(2, 7)))


def mine(rank: int) -> list[int]:
    return [MICROBATCHES * rank + number for number in range(MICROBATCHES)]


def step(
    model: Decoder, data: FullyShardedDataParallel, microbatches: list[int]
) -> dict[str, Tensor]:
    """My rows of every gradient."""
    data.begin_step(len(microbatches))
    for microbatch in microbatches:
        loss_of(model, microbatch).backward()
    return {param.shard.name: param.gradient.clone() for param in data.finish()}


def rows(data: FullyShardedDataParallel, whole_tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rows of whole tensors."""
    result = {}
    for param in data.local_params:
        assert param.shard.flat is not None
        start, stop = param.shard.flat
        result[param.shard.name] = (
            whole_tensors[param.shard.name].flatten()[start:stop].view_as(param.gradient)
        )
    return result


def sums_alone(
    world: int, *, dtype: torch.dtype = torch.float64, config: ModelConfig = CONFIG
) -> dict[str, Tensor]:
    """Every microbatch's gradient, as its dtype has it, added up in fp32 or float64."""
    model = alone(dtype=dtype, config=config)
    total: dict[str, Tensor] = {}
    for microbatch in range(MICROBATCHES * world):
        model.zero_grad()
        loss_of(model, microbatch).backward()
        for declared, module, name in iter_parameter_specs(model):
            gradient = getattr(module, name).grad.to(torch.promote_types(dtype, torch.float32))
            key = declared.shard.name
            total[key] = total[key] + gradient if key in total else gradient
    return total


# --- the numbers


def _sums(rank: int, world: int) -> None:
    mesh = dp_mesh(rank, world)
    for config in (CONFIG, replace(CONFIG, tied_embeddings=True)):
        for keep in (False, True):
            model, data = build(mesh, config=config, keep_gathered=keep)
            for _ in range(2):  # the second step must not see the first one's sums
                result = step(model, data, mine(rank))
            assert_close(result, rows(data, sums_alone(world, config=config)), FP64)


def test_gradients_of_all_microbatches_and_ranks_are_summed_in_every_mode() -> None:
    run_ranks(_sums, 2)


def _without_the_last_layer(rank: int, world: int) -> list[str]:
    model, data = build(dp_mesh(rank, world))
    last = model.layers[-1]
    warnings_by_rank: list[str] = []
    with patched(
        engines,
        "_log",
        SimpleNamespace(warning=lambda text, *parts: warnings_by_rank.append(text % parts)),
    ):
        step(*build(dp_mesh(rank, world)), [0])
        assert not warnings_by_rank
        del model.layers[-1]
        result = [step(model, data, [0]) for _ in range(2)][-1]
    assert not any(
        result[name].any() for name in result if name.startswith(f"layers.{len(model.layers)}.")
    )
    assert len(list(last.parameters())) < 10
    return warnings_by_rank


def test_layer_that_does_not_affect_the_loss_gets_zeros_and_one_warning() -> None:
    for warnings_by_rank in run_ranks(_without_the_last_layer, 2):
        (text,) = warnings_by_rank
        assert text.startswith("layers.3.") and "embed.weight" not in text
        assert " had no gradient in this step, so it is zero" in text


def _first_replica_leaves_layers_out(rank: int, world: int, overlap: bool) -> None:
    """Two replicas of two ranks each; one computes with the first and the last layer alone."""
    grid = model_grid(ParallelConfig(zero=3, dp_replicate=2), CONFIG, world)
    mesh = build_mesh(grid, rank=rank)
    model, data = build(mesh, overlap=overlap)
    replica = mesh.coordinates["dp_replica"]
    whole = alone()
    total: dict[str, Tensor] = {}
    for number in range(world):
        kept = (0, 3) if grid.coordinates(number)["dp_replica"] == 0 else range(4)
        whole.zero_grad()
        with patched(whole, "layers", torch.nn.ModuleList(whole.layers[layer] for layer in kept)):
            loss_of(whole, number).backward()
        for name, parameter in names(whole).items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            total[name] = total.get(name, torch.zeros_like(parameter)) + gradient
    if replica == 0:
        del model.layers[1:3]
    assert_close(step(model, data, [rank]), rows(data, total), FP64)


def names(model: Decoder) -> dict[str, torch.nn.Parameter]:
    return {
        declared.shard.name: getattr(module, name)
        for declared, module, name in iter_parameter_specs(model)
    }


@pytest.mark.parametrize("overlap", [True, False])
def test_replicas_that_skip_different_layers_reduce_in_the_same_order(overlap: bool) -> None:
    run_ranks(_first_replica_leaves_layers_out, 4, overlap, timeout=240)


def _gathers(rank: int, world: int) -> list[list[str]]:
    """With and without overlap: gradients, and what was asked for in which order."""
    result, orders = [], []
    for overlap in (True, False):
        flight = FlightRecorder()
        model, data = build(dp_mesh(rank, world, flight=flight), overlap=overlap)
        step(model, data, [rank])  # FSDP2 learns the order from the first
        before = len(flight.entries)
        result.append(step(model, data, [rank]))
        orders.append([entry.op for entry in list(flight.entries)[before:]])
    assert all(torch.equal(result[0][name], result[1][name]) for name in result[0])
    return orders


def test_without_overlap_backward_does_not_prefetch_and_is_bitwise_equal() -> None:
    for prefetched, plain in run_ranks(_gathers, 2):
        assert sorted(prefetched) == sorted(plain)
        assert "all_gather all_gather reduce_scatter" in " ".join(prefetched[-12:])
        assert "all_gather reduce_scatter all_gather reduce_scatter" in " ".join(plain[-12:]), plain


def _recomputed(rank: int, world: int) -> None:
    mesh = dp_mesh(rank, world)
    model, data = build(mesh)
    plain = step(model, data, mine(rank))
    for recompute in (
        RecomputeConfig(granularity="full"),
        RecomputeConfig(granularity="full", num_layers=2),
        RecomputeConfig(granularity="full", method="block", num_layers=3),
        RecomputeConfig(granularity="selective", modules=("core_attention", "norm", "mlp")),
        RecomputeConfig(granularity="selective", modules=("norm", "mlp_act")),
    ):
        model, data = build(mesh, recompute=recompute)
        result = step(model, data, mine(rank))
        assert all(torch.equal(result[name], plain[name]) for name in plain), recompute


def test_recomputing_layers_whose_weights_were_freed_changes_no_bit() -> None:
    run_ranks(_recomputed, 2)


def _bf16(rank: int, world: int) -> None:
    model, data = build(dp_mesh(rank, world), dtype=torch.bfloat16)
    result, exact = (
        step(model, data, mine(rank)),
        rows(data, sums_alone(world, dtype=torch.bfloat16)),
    )
    for name, gradient in result.items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, exact[name], rtol=1e-6, atol=1e-7)
    assert any(
        not torch.equal(gradient, gradient.bfloat16().float()) for gradient in result.values()
    )


def test_gradients_of_bf16_weights_are_added_in_fp32() -> None:
    run_ranks(_bf16, 2)


def _compiled(rank: int, world: int) -> None:
    mesh, config = dp_mesh(rank, world), replace(CONFIG, num_layers=2)
    model, data = build(mesh, config=config)
    for layer in model.layers:
        layer.compile()
    for factor in (1.0, 1.5):
        plain, its_data = build(mesh, config=config)
        for engine in (data, its_data):
            for param in engine.local_params:
                init_param_(param.weight, param.shard, Init(0.1 * factor), seed=7)
            engine.all_gather_params()
        assert_close(step(model, data, mine(rank)), step(plain, its_data, mine(rank)), FP64)


@pytest.mark.slow  # the compiler takes half a minute
@pytest.mark.skipif(
    which("g++") is None and which("clang++") is None, reason="needs a C++ compiler: torch.compile"
)
@pytest.mark.skipif(
    " " in torch.__file__, reason="torch.compile does not quote its own folder for the linker"
)
def test_compiled_layers_read_the_weights_that_are_gathered_for_them() -> None:
    run_ranks(_compiled, 2, timeout=300)


def _odd_steps(rank: int, world: int) -> list[tuple[str, Any, list[float], list[float]]]:
    mesh = dp_mesh(rank, world)
    model = OddSizedModel("meta")
    parameters = [(shard, model, shard.name) for shard in model.SHARDS]
    data = FullyShardedDataParallel([model], parameters, mesh, device=CPU)
    for _ in range(2):
        data.begin_step(3)
        for microbatch in range(3):
            model(float(rank + microbatch)).backward()
        for param in data.finish():
            param.weight.sub_(param.gradient)
        data.all_gather_params()
    return [
        (o.shard.name, o.shard.flat, o.gradient.tolist(), o.weight.tolist())
        for o in data.local_params
    ]


def test_every_row_is_owned_once_even_when_there_are_fewer_than_ranks() -> None:
    world = 3
    factor = float(sum(rank + microbatch for rank in range(world) for microbatch in range(3)))
    expected = OddSizedModel.gradients(factor)
    seen = {shard.name: [0] * shard.numel for shard in OddSizedModel.SHARDS}
    results = run_ranks(_odd_steps, world)
    # the last rank has none of `one` and `matrix`
    assert [len(param) for param in results] == [
        4,
        3,
        2,
    ]
    for name, (start, stop), gradient, weight in (each for param in results for each in param):
        assert (
            torch.tensor(gradient).eq(expected[name]).all()
            and torch.tensor(weight).eq(-2 * expected[name]).all()
        )
        for place in range(start, stop):
            seen[name][place] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


class Weighted(nn.Module):
    """A layer with one vector per dtype."""

    def __init__(self, number: int, *dtypes: torch.dtype) -> None:
        super().__init__()
        for place, dtype in enumerate(dtypes):
            shard = Shard.full(f"layers.{number}.w{place}", (5,), inputs=0)
            register_param(self, f"w{place}", ParameterSpec(shard, Init(1.0)), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([w.double().sum() for w in self.parameters()]).sum()


class WeightedLayers(nn.Module):
    """Layers whose parameters have several dtypes."""

    def __init__(self, *dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Weighted(number, *each) for number, each in enumerate(dtypes))

    def forward(self, factor: float) -> Tensor:
        x = torch.zeros((), dtype=torch.float64)
        for layer in self.layers:
            x = layer(x)
        return x * factor


def shard_layers(rank: int, world: int, *dtypes: tuple[torch.dtype, ...]) -> tuple[Any, Any]:
    model = WeightedLayers(*dtypes)
    parameters = [(spec.shard, module, name) for spec, module, name in iter_parameter_specs(model)]
    mesh = dp_mesh(rank, world)
    return model, FullyShardedDataParallel([model], parameters, mesh, device=CPU)


def _two_dtypes(rank: int, world: int) -> None:
    model, data = shard_layers(rank, world, (torch.bfloat16,), (torch.float32,), (torch.float64,))
    optimizer = RuleOptimizer(
        [(param.shard, param.weight) for param in data.local_params],
        OptimConfig(kind="sgd", momentum=0.0),
    )
    for _ in range(2):
        data.begin_step(1)
        model(1 + 2.0**-12 * rank).backward()
        gradients = [param.gradient for param in data.finish()]
        optimizer.step(gradients, lr=2.0**-3, weight_decay=0.0)
        data.all_gather_params()
    wide = [torch.float32, torch.float32, torch.float64]
    assert [param.gradient.dtype for param in data.local_params] == wide
    assert [slot.master.dtype for slot in optimizer.slots] == wide
    for slot, dtype in zip(optimizer.slots, (torch.bfloat16, torch.float32, torch.float64)):
        rounded = 1 + 2.0**-12 * torch.arange(world, dtype=torch.float64)
        total = (rounded.to(dtype) if dtype == torch.bfloat16 else rounded).double().sum()
        assert slot.weight.dtype == dtype and slot.weight.numel() > 0
        assert (slot.master == -2 * 2.0**-3 * total).all(), slot
        assert torch.equal(slot.weight, slot.master.to(dtype))


def test_layers_of_several_dtypes_train_with_gradients_and_master_weights_in_fp32() -> None:
    run_ranks(_two_dtypes, 2)


def _mixed_layer(rank: int, world: int) -> None:
    with pytest.raises(PlanError) as caught:
        shard_layers(rank, world, (torch.bfloat16, torch.float32))
    assert str(caught.value) == (
        "parallel.zero=3 with the trained parameters layers.0.w0 in bf16 and layers.0.w1 in fp32 in"
        " one layer: FSDP reduces the gradients of a layer in one message, which needs one dtype. "
        "Set parallel.zero=2, or register them in one dtype."
    )


def test_layer_with_parameters_of_two_dtypes_is_rejected() -> None:
    run_ranks(_mixed_layer, 2)


# --- what is where, and when


def gathered_bytes(unit: Unit) -> int:
    """Memory of a unit's whole weights."""
    assert isinstance(unit, ShardedUnit)
    groups = unit.fsdp._get_fsdp_state()._fsdp_param_groups
    outputs = [
        whole for group in groups for one in group.fsdp_params for whole in one.all_gather_outputs
    ]
    return sum(whole.untyped_storage().nbytes() for whole in outputs)


def _residency(rank: int, world: int) -> tuple[list[int], list[int], list[int]]:
    """Of a step of one microbatch: layers gathered within each forward, within each backward, and
    at the end."""
    model, data = build(dp_mesh(rank, world))
    units = [unit for unit in data.units if unit.module in set(model.layers)]
    forward: list[int] = []
    backward: list[int] = []

    def count() -> int:
        each = sum(parameter.numel() for parameter in alone().layers[0].parameters()) * 8
        total = sum(gathered_bytes(unit) for unit in units)
        assert total % each == 0
        return total // each

    for layer in model.layers:
        mlp = cast(SequentialBlock, layer).mlp
        mlp.register_forward_hook(lambda *_: forward.append(count()))
        mlp.register_full_backward_hook(lambda *_: backward.append(count()))
    step(model, data, [rank])
    tables = [unit for unit in data.units if unit.module in (model.embed, model.head)]
    assert len(tables) == 2 and not any(gathered_bytes(unit) for unit in data.units)
    assert sum(param.weight.numel() for param in data.local_params) * world == sum(
        p.numel() for p in alone().parameters()
    )
    return forward, backward, [count()]


def test_only_the_running_layer_is_gathered() -> None:
    for forward, backward, end in run_ranks(_residency, 2):
        assert forward == [1, 1, 1, 1]
        assert backward == [1, 1, 1, 1]  # and the next one's message, on its way
        assert end == [0]


class _Looked(torch.nn.Module):
    """Keeps what it is given."""

    def forward(self, sent: DispatchedTokens) -> DispatchedTokens:
        return sent


def test_hooks_on_experts_receive_and_may_replace_recomputed_rows() -> None:
    experts, seen = _Looked(), list[Tensor]()

    def look(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append(args[0].rows)
        return args[0]._replace(rows=args[0].rows * 1), *args[1:]

    experts.register_forward_pre_hook(look, prepend=True)  # as FSDP2 does
    _keep_recompute_recipes(experts)
    rows = torch.ones(2, 3, requires_grad=True)
    register_recompute(rows, torch.clone, (rows.detach(),))
    sent = experts(DispatchedTokens(rows, torch.ones(2), Groups((2,))))
    assert seen == [rows] and sent.rows.grad_fn is not None
    assert recompute_recipe(sent.rows) == recompute_recipe(rows) is not None
    plain = torch.ones(2, 3)
    assert torch.equal(experts(DispatchedTokens(plain, torch.ones(2), Groups((2,)))).rows, plain)


def _fresh(rank: int, world: int) -> None:
    model, data = build(dp_mesh(rank, world))
    plain = alone()
    with torch.no_grad():
        before = loss_of(model, 0)
        assert_close({"loss": before}, {"loss": loss_of(plain, 0)}, FP64)
        for param in data.local_params:
            param.weight.mul_(1.5)
        for parameter in plain.parameters():
            parameter.mul_(1.5)
        data.all_gather_params()
        data.wait_params()
        after = loss_of(model, 0)
        assert_close({"loss": after}, {"loss": loss_of(plain, 0)}, FP64)
    assert not torch.equal(before, after)
    step(model, data, mine(rank))  # and training goes on after an evaluation


def test_forward_reads_the_updated_weights() -> None:
    run_ranks(_fresh, 2)


def _noted(rank: int, world: int) -> tuple[list[str], list[str], int]:
    flight = FlightRecorder()
    mesh = dp_mesh(rank, world, flight=flight)
    model, data = build(mesh, watch=True)
    flight.entries.clear()
    data.begin_step(1)
    if rank == 1:
        # one gradient is not a number; in forward the weight is the whole one, which has a gradient
        norm = cast(SequentialBlock, model.layers[1]).attention_norm
        norm.register_forward_pre_hook(
            lambda *_: norm.weight.register_hook(lambda dy: dy * float("nan")) and None
        )
    loss_of(model, rank).backward()
    data.finish()
    assert all(entry.axes == mesh.shard.axes and entry.done for entry in flight.entries)
    subjects = {entry.subject for entry in flight.entries}
    assert {"weights of layers.3", "gradients of layers.3", "weights of head.weight"} <= subjects, (
        subjects
    )
    return data.nonfinite(), [entry.op for entry in flight.entries], data.checksums()[0][0]


def test_collectives_are_recorded_and_a_nonfinite_gradient_is_attributed_to_its_rank() -> None:
    (names, ops, checksum), (others, other_ops, other_checksum) = run_ranks(_noted, 2)
    assert names == [] and others == ["layers.1.attention_norm.weight"]
    # four layers, two tables, and the last norm
    assert ops == other_ops and ops.count("reduce_scatter") == 7
    # layers twice; tables are not read in backward, the norm is still there
    assert ops.count("all_gather") == 7 + 4
    assert checksum != other_checksum


def _in_other_order(rank: int, world: int, folder: Path) -> str:
    """Return the error if this rank runs two equal layers in another order than the others."""
    flight = FlightRecorder()
    store = FileStore(str(folder / "store"), world)
    model, _ = build(dp_mesh(rank, world, flight=flight))
    flight.compare = Fingerprints(store, rank).compare
    if rank == 1:
        first, second = model.layers[1], model.layers[2]
        model.layers[1], model.layers[2] = second, first
    with pytest.raises(CollectiveError) as caught:
        loss_of(model, rank)
    return str(caught.value)


def test_units_in_another_order_are_a_mismatch_that_names_them(tmp_path: Path) -> None:
    for text in run_ranks(_in_other_order, 2, tmp_path):
        assert re.search(r"rank 0: all_gather .*, weights of layers\.1, at ", text), text
        assert re.search(r"rank 1: all_gather .*, weights of layers\.2, at ", text), text


def _stuck_in_a_layer(rank: int, world: int, folder: Path) -> str:
    """Return the report of a hang of rank 1 before the weights of its third layer are gathered."""
    flight, ended, failures = FlightRecorder(), threading.Event(), list[Failure]()

    def end(failure: Failure, after_seconds: float) -> None:
        failures.append(failure)
        ended.set()

    store = PrefixStore("watch", FileStore(str(folder / "store"), world))
    model, _ = build(dp_mesh(rank, world, flight=flight))
    watch = HangWatch(flight, store, rank, world, 0.5, end, folder=folder)
    if rank == 1:
        layer = model.layers[2]
        layer.register_forward_pre_hook(lambda *_: ended.wait(60) and None, prepend=True)
    with watching(watch):
        loss_of(model, rank)
        assert ended.wait(60)
    return failures[0].text


def test_hang_report_names_the_unit_that_a_rank_does_not_gather(tmp_path: Path) -> None:
    text, _ = run_ranks(_stuck_in_a_layer, 2, tmp_path)
    assert re.match(
        r"rank 1 did not arrive at all_gather \d+ over .*, weights of layers\.2, ", text
    )


# --- checkpoints


def _trainer(
    parallel: ParallelConfig,
    rank: int,
    world: int,
    *,
    fill: bool = True,
    config: ModelConfig = CONFIG,
) -> Trainer:
    run = proof.layout_case(config, parallel, world).run
    return build_trainer(
        run, build_mesh(model_grid(parallel, config, world), rank=rank), CPU, fill=fill
    )


def _train(trainer: Trainer, *, first: int, steps: int) -> dict[str, Tensor]:
    rows = trainer.run.train.global_batch_size
    loader = proof._loader(trainer.run, trainer.mesh, consumed=first * rows, steps=steps)
    for _ in range(steps):
        train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1)
    return {
        f"{entry.key} {entry.shard.flat}": entry.tensor.clone()
        for entry in checkpoint_entries(trainer)
    }


def _weights(trainer: Trainer) -> dict[str, Tensor]:
    """Whole, in float64."""
    slices = gather_objects(proof._weights(trainer), trainer.mesh.world)
    return proof._assemble(proof._join_slices(slices))


def _goes_on(rank: int, world: int, folder: str) -> None:
    sharded = ParallelConfig(zero=3)
    trainer = _trainer(sharded, rank, world)
    _train(trainer, first=0, steps=1)
    save_checkpoint(
        Path(folder), 1, checkpoint_entries(trainer), {}, trainer.mesh.world, config_text=""
    )
    expected = _train(trainer, first=1, steps=2)
    saved = open_checkpoint(Path(folder) / "step_0000001")
    for parallel in (sharded, ParallelConfig(zero=1), ParallelConfig(tp=2)):
        again = _trainer(parallel, rank, world, fill=False)
        saved.load_into(checkpoint_entries(again), again.mesh.world)
        again.optimizer.set_updates(1)
        all_gather_loaded_params(again)
        other = Path(folder) / f"{parallel.zero}{parallel.tp}"
        save_checkpoint(other, 1, checkpoint_entries(again), {}, again.mesh.world, config_text="")
        copy = open_checkpoint(other / "step_0000001")
        names = list(saved.keys())
        assert all(
            torch.equal(copy.read(name), saved.read(name)) for name in names
        ) and names == list(copy.keys())
        result = _train(again, first=1, steps=2)
        if parallel == sharded:
            assert expected.keys() == result.keys()
            assert all(torch.equal(result[name], expected[name]) for name in result)
        assert compare(_weights(again), _weights(trainer)).error < 1e-12


def test_resume_is_bitwise_equal_and_checkpoints_convert_between_layouts(
    tmp_path: Path,
) -> None:
    run_ranks(_goes_on, 2, str(tmp_path))


def test_chunks_that_share_a_table_are_rejected_with_working_values() -> None:
    model = Decoder(build_context(replace(CONFIG, tied_embeddings=True), build_single_rank_mesh()))
    _reject_shared_chunks([model])  # shared inside one chunk
    with pytest.raises(PlanError) as caught:
        _reject_shared_chunks([model.embed, model.head])
    text = str(caught.value)
    assert text.startswith(
        "parallel.zero=3 with 2 chunks on one rank that share the vocabulary's table: each chunk "
    )
    assert "Set model.tied_embeddings=false" in text
    assert text.endswith(", parallel.pipeline.vpp=1, or parallel.zero=2.")


# --- experts


MIXTURE = replace(
    CONFIG,
    num_layers=2,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=6,
        shared_ffn_hidden_size=5,
        router=RouterConfig(score="sigmoid", expert_bias=True, expert_bias_update_rate=0.01),
    ),
)


def _recomputed_experts(rank: int, world: int, ep: int) -> None:
    mesh = build_mesh(model_grid(ParallelConfig(zero=3, ep=ep), MIXTURE, world), rank=rank)
    model, data = build(mesh, config=MIXTURE)
    plain = step(model, data, mine(rank))
    names = {
        name.rsplit(".", 1)[1]: gradient for name, gradient in plain.items() if ".experts." in name
    }
    assert {"gate_up", "down"} == {*names} and all(
        bool(gradient.any()) for gradient in names.values()
    )
    for modules in ((), ("mlp",), ("norm", "mlp_act")):
        kind = RecomputeConfig(granularity="selective", modules=modules) if modules else None
        for keep in (False, True):
            recompute = kind or RecomputeConfig(granularity="full")
            model, data = build(mesh, config=MIXTURE, recompute=recompute, keep_gathered=keep)
            result = step(model, data, mine(rank))
            assert all(torch.equal(result[name], plain[name]) for name in plain), (recompute, keep)
    count = sum(param.shard.numel for param in data.local_params if param.shard.grid == "expert")
    assert count == sum(
        param.weight.numel() for param in data.local_params if param.shard.grid == "expert"
    ) * (world // ep)


@pytest.mark.parametrize("ep", [1, 2])
def test_recomputing_experts_whose_weights_were_freed_changes_no_bit(ep: int) -> None:
    run_ranks(_recomputed_experts, 2, ep)


def _moving_biases(rank: int, world: int) -> list[list[float]]:
    """In bf16, beside biases in fp32, which no rank divides."""
    case = proof.layout_case(MIXTURE, ParallelConfig(zero=3), world)
    run = replace(case.run, precision=PrecisionConfig(params="bf16"))
    trainer = build_trainer(
        run, build_mesh(model_grid(run.parallel, MIXTURE, world), rank=rank), CPU
    )
    loader = proof._loader(run, trainer.mesh, consumed=0, steps=1)
    train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1)
    biases = [
        tensor for shard, tensor in trainer.data.frozen if shard.name.endswith("balancing_bias")
    ]
    assert [bias.dtype for bias in biases] == [torch.float32] * 2, biases
    assert all(bool(bias.any()) for bias in biases), biases
    sums = [number for number, _ in trainer.data.checksums()]
    assert len(sums) == 2  # what lies on either grid
    return [bias.tolist() for bias in biases]


def test_expert_biases_are_not_sharded_and_equal_on_ranks() -> None:
    first, second = run_ranks(_moving_biases, 2)
    assert first == second and [len(bias) for bias in first] == [4, 4]


def _experts_go_on(rank: int, world: int, folder: str) -> None:
    """From rows of all experts to all rows of some, and to a rank that has both whole."""
    sharded = ParallelConfig(zero=3)
    trainer = _trainer(sharded, rank, world, config=MIXTURE)
    _train(trainer, first=0, steps=1)
    save_checkpoint(
        Path(folder), 1, checkpoint_entries(trainer), {}, trainer.mesh.world, config_text=""
    )
    expected = _train(trainer, first=1, steps=2)
    for parallel in (
        sharded,
        ParallelConfig(zero=3, ep=2),
        ParallelConfig(zero=1),
        ParallelConfig(tp=2, sp=True),
    ):
        again = _trainer(parallel, rank, world, fill=False, config=MIXTURE)
        saved = open_checkpoint(Path(folder) / "step_0000001")
        saved.load_into(checkpoint_entries(again), again.mesh.world)
        again.optimizer.set_updates(1)
        all_gather_loaded_params(again)
        result = _train(again, first=1, steps=2)
        if parallel == sharded:
            assert all(torch.equal(result[name], expected[name]) for name in expected)
        assert compare(_weights(again), _weights(trainer)).error < 1e-12


def test_expert_rows_load_under_other_layouts(tmp_path: Path) -> None:
    run_ranks(_experts_go_on, 2, str(tmp_path))
