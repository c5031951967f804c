"""The data-parallel engine: flat storage, sinks, buckets that start when they are full, and its
oracle, torch's DDP."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megalith.config.model import ModelConfig
from megalith.config.optim import OptimConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import RankError
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import Decoder, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.observe.machine import DTYPES
from megalith.optim.optimizer import RuleOptimizer
from megalith.parallel import data as flat
from megalith.parallel.data import BucketedDataParallel
from megalith.parallel.grad_sync import start_bucket_reduce_scatter
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import Shard
from megalith.testing.inject import patched, slow_link
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import OddSizedModel
from megalith.testing.tolerance import FP64, assert_close

CONFIG = ModelConfig(
    vocab_size=30,
    pad_vocab_to_multiple_of=4,
    hidden_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    ffn_hidden_size=10,
    qkv_bias=True,
)


def build(
    mesh: Mesh, *, overlap: bool = True, sinks: bool = True, bucket_numel: int = 300, zero: int = 0
) -> tuple[Decoder, BucketedDataParallel]:
    """A small float64 model on the engine."""
    model = Decoder(build_context(CONFIG, mesh, dtype=torch.float64))
    parameters = [
        (declared.shard, module, name) for declared, module, name in iter_parameter_specs(model)
    ]
    data = BucketedDataParallel(
        model,
        parameters,
        mesh,
        ParallelConfig(bucket_numel=bucket_numel, overlap=overlap, zero=zero),
        device=torch.device("cpu"),
        compiled=not sinks,
    )
    initialize(model, seed=5)
    return model, data


def loss_of(model: Decoder, microbatch: int) -> torch.Tensor:
    """One microbatch of two rows."""
    ids = torch.randint(0, 30, (14,), generator=torch.Generator().manual_seed(microbatch))
    return model.loss(ids, ids.roll(-1), LayerInputs(seq_params_from_rows(2, 7)))


def gradients(data: BucketedDataParallel) -> dict[str, torch.Tensor]:
    return {param.shard.name: param.gradient.clone() for param in data.finish()}


def test_gradient_accumulators_match_autograd_over_several_microbatches() -> None:
    results = []
    for sinks in (True, False):
        model, data = build(build_single_rank_mesh(), sinks=sinks)
        for _ in range(2):  # the second step must not see the first one's sums
            data.begin_step(3)
            for microbatch in range(3):
                loss_of(model, microbatch).backward()
            result = gradients(data)
        results.append(result)
    assert_close(results[0], results[1], FP64)


def test_weights_of_one_matmul_are_contiguous_in_the_buffer() -> None:
    model, _ = build(build_single_rank_mesh())
    q, kv = model.layers[0].attention.qkv.accumulated_parameters()
    assert q.data_ptr() + q.numel() * q.element_size() == kv.data_ptr()


def test_a_tied_head_stays_tied() -> None:
    tied = ModelConfig(
        **{**{f: getattr(CONFIG, f) for f in CONFIG.__slots__}, "tied_embeddings": True}
    )
    model = Decoder(build_context(tied, build_single_rank_mesh()))
    parameters = [
        (declared.shard, module, name) for declared, module, name in iter_parameter_specs(model)
    ]
    BucketedDataParallel(
        model,
        parameters,
        build_single_rank_mesh(),
        ParallelConfig(bucket_numel=100, overlap=True),
        device=torch.device("cpu"),
    )

    assert model.head.weight is model.embed.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_unused_parameter_gets_zero_gradient_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, data = build(build_single_rank_mesh())
    data.begin_step(2)
    loss_of(model, 0).backward()
    model.embed(torch.arange(5)).sum().backward()  # a part in one microbatch is a part
    gradients(data)
    assert not caplog.records
    for _ in range(2):
        data.begin_step(1)
        model.embed(torch.arange(5)).sum().backward()
        result = gradients(data)
    assert not result["layers.0.mlp.down"].any()
    assert result["embed.weight"].any()
    (record,) = caplog.records
    names = record.getMessage().partition(" had no gradient in this step, so it is zero")[0]
    expected = [shard.name for shard in data.shards if shard.name != "embed.weight"]
    assert names == f"{', '.join(expected[:10])} and {len(expected) - 10} more"


def _starts_before_the_end(rank: int, world: int) -> list[int]:
    """How many buckets had started when backward ended, and how many there are."""
    mesh = build_mesh(model_grid(ParallelConfig(), CONFIG, world), rank=rank)
    model, data = build(mesh)
    data.begin_step(2)
    loss_of(model, rank).backward()
    first = data._next
    loss_of(model, rank + 7).backward()
    last = data._next
    data.finish()
    return [first, last, len(data.plan.buckets)]


def test_buckets_start_in_the_last_microbatch_while_backward_runs() -> None:
    for first, last, buckets in run_ranks(_starts_before_the_end, 2):
        assert first == 0  # nothing may be summed before the last microbatch has added to it
        assert last == buckets > 3


class _Loss(nn.Module):
    """A module whose forward is the loss, as DistributedDataParallel wants it."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, microbatch: int) -> torch.Tensor:
        return loss_of(self.model, microbatch)


def _equals_ddp(rank: int, world: int) -> bool:
    mesh = build_mesh(model_grid(ParallelConfig(), CONFIG, world), rank=rank)
    model, data = build(mesh)
    data.begin_step(1)
    loss_of(model, rank).backward()
    actual = gradients(data)
    plain = Decoder(build_context(CONFIG, build_single_rank_mesh(), dtype=torch.float64))
    plain.to_empty(device="cpu")
    initialize(plain, seed=5)
    wrapped = nn.parallel.DistributedDataParallel(_Loss(plain))
    wrapped(rank).backward()
    names = {
        id(getattr(module, name)): d.shard.name for d, module, name in iter_parameter_specs(plain)
    }
    # DDP takes the mean
    reference = {names[id(p)]: p.grad * world for p in plain.parameters() if p.grad is not None}
    assert_close(actual, reference, FP64)
    return True


def test_summed_gradients_match_torch_ddp() -> None:
    assert run_ranks(_equals_ddp, 2) == [True, True]


def _bitwise(rank: int, world: int) -> bool:
    mesh = build_mesh(model_grid(ParallelConfig(), CONFIG, world), rank=rank)
    results = []
    for overlap, bucket_numel in ((True, 300), (False, 300), (True, 10**9)):
        model, data = build(mesh, overlap=overlap, bucket_numel=bucket_numel)
        data.begin_step(1)
        loss_of(model, rank).backward()
        results.append(gradients(data))
    return all(
        torch.equal(results[0][name], other[name]) for other in results[1:] for name in results[0]
    )


def test_overlap_and_bucket_size_change_no_bit_at_dp_2() -> None:
    assert run_ranks(_bitwise, 2) == [True, True]


def test_comparison_detects_a_missing_overwrite_of_old_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, data = build(build_single_rank_mesh())
    monkeypatch.setattr(flat.BucketedDataParallel, "is_fresh", lambda self, numbers: False)
    for _ in range(2):
        data.begin_step(1)
        loss_of(model, 0).backward()
        values = data.local_params[2].gradient.clone()
    fresh_model, fresh = build(build_single_rank_mesh())
    monkeypatch.undo()
    fresh.begin_step(1)
    loss_of(fresh_model, 0).backward()
    assert not torch.allclose(values, fresh.local_params[2].gradient)


# --- divided over ranks


def _odd_step(
    rank: int, world: int, zero: int, overlap: bool, replicas: int
) -> list[tuple[str, Any, list[float]]]:
    """What a rank owns after two steps of three microbatches, and the weights that every rank
    computes with then."""
    parallel = ParallelConfig(zero=zero, dp_replicate=replicas)
    mesh = build_mesh(model_grid(parallel, CONFIG, world), rank=rank)
    model = OddSizedModel()
    data = BucketedDataParallel(
        model,
        [(shard, model, shard.name) for shard in model.SHARDS],
        mesh,
        ParallelConfig(bucket_numel=100, overlap=overlap, zero=zero),
        device=torch.device("cpu"),
    )

    for _ in range(2):
        data.begin_step(3)
        for microbatch in range(3):
            model(float(rank + microbatch)).backward()
        param = list(data.finish())
        for each in param:
            each.weight.sub_(each.gradient)
        data.all_gather_params()
    results = [(o.shard.name, o.shard.flat, o.gradient.tolist()) for o in param]
    data.wait_params()
    return [
        *results,
        ("weights", None, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()),
    ]


@pytest.mark.parametrize(
    ("zero", "overlap", "replicas"), [(1, True, 1), (2, True, 1), (2, False, 1), (1, True, 2)]
)
def test_every_element_is_owned_once_with_fewer_elements_than_ranks(
    zero: int, overlap: bool, replicas: int
) -> None:
    world = 4
    results = run_ranks(_odd_step, world, zero, overlap, replicas)
    factor = float(sum(rank + microbatch for rank in range(world) for microbatch in range(3)))
    expected = OddSizedModel.gradients(factor)
    numel = {shard.name: shard.numel for shard in OddSizedModel.SHARDS}
    weights = [1 - 2 * expected[name] for name in numel for _ in range(numel[name])]
    seen = {name: [0] * count for name, count in numel.items()}
    for rank, entries in enumerate(results):
        *param, (_, _, actual) = entries
        assert actual == weights
        for name, (start, stop), gradient in param:
            assert stop > start
            assert gradient == [expected[name]] * (stop - start)
            if rank % (world // replicas) == rank:  # the first replica
                for place in range(start, stop):
                    seen[name][place] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)
    assert any(len(entries) == 1 for entries in results) or replicas > 1  # somebody owns nothing


def _two_chunks_of_one_table(rank: int, world: int, zero: int, extra_backward: bool) -> list[float]:
    """The summed gradient of a table that two chunks of a rank use: all microbatches of the last go
    back first."""
    mesh = build_mesh(model_grid(ParallelConfig(zero=zero), CONFIG, world), rank=rank)
    chunks = nn.ModuleList([nn.Module(), nn.Module()])
    chunks[0].table = chunks[1].table = nn.Parameter(torch.ones(3, 4, dtype=torch.float64))
    data = BucketedDataParallel(
        chunks,
        [(Shard.full("table", (3, 4), dtype="fp64"), chunks[0], "table")],
        mesh,
        ParallelConfig(bucket_numel=100, overlap=True, zero=zero),
        device=torch.device("cpu"),
        compiled=True,
    )
    data.begin_step(2)
    for chunk, factor in [(1, 1), (1, 10), (0, 100), (0, 1000), *[(0, 1)] * extra_backward]:
        (factor * (rank + 1) * chunks[chunk].get_parameter("table").sum()).backward()
    return [value for param in data.finish() for value in param.gradient.flatten().tolist()]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_shared_table_is_ready_after_backward_of_both_chunks(zero: int) -> None:
    results = run_ranks(_two_chunks_of_one_table, 2, zero, False)
    assert [value for local in results for value in local] == [3333.0] * 12 * (
        2 if zero == 0 else 1
    )


@pytest.mark.parametrize("zero", [0, 2])
def test_unexpected_gradient_fails_with_its_parameter_name(zero: int) -> None:
    with pytest.raises(
        RankError, match=r"more gradient contributions than backward passes: \['table'\]"
    ):
        run_ranks(_two_chunks_of_one_table, 2, zero, True)


def _on_their_way(rank: int, world: int) -> list[tuple[int, int, int]]:
    """Before finish and inside: how many sums of buckets have started, and the most at once on
    their way; how many."""
    results = []
    for overlap in (False, True):
        mesh = build_mesh(model_grid(ParallelConfig(zero=1), CONFIG, world), rank=rank)
        model, data = build(mesh, overlap=overlap, zero=1)
        most: list[int] = []

        def counted(
            *given: Any, data: BucketedDataParallel = data, most: list[int] = most, **options: Any
        ) -> Any:
            most.append(len(data._sums) + 1)
            return start_bucket_reduce_scatter(*given, **options)

        with patched(flat, "start_bucket_reduce_scatter", counted):
            data.begin_step(1)
            loss_of(model, rank).backward()
            started = data._next
            data.finish()
        results.append((started, max(most), len(data.plan.buckets)))
    return results


def test_without_overlap_reductions_start_in_finish_with_few_in_flight() -> None:
    for (apart, most_apart, count), (started, most, _) in run_ranks(_on_their_way, 2):
        assert count > 4
        assert (apart, started) == (0, count)
        # the oldest is waited for once the next has started
        assert most_apart == most == flat.IN_FLIGHT + 1


def test_single_rank_does_not_shard() -> None:
    for zero in (1, 2):
        model = OddSizedModel()
        data = BucketedDataParallel(
            model,
            [(shard, model, shard.name) for shard in model.SHARDS],
            build_single_rank_mesh(),
            ParallelConfig(bucket_numel=100, overlap=True, zero=zero),
            device=torch.device("cpu"),
        )

        data.begin_step(1)
        model(2.0).backward()
        assert {o.shard.name: o.shard.flat for o in data.finish()} == {
            shard.name: None for shard in model.SHARDS
        }


def _reads(rank: int, world: int) -> list[bool]:
    """Whether weights are those that were published: read by forward, by forward of a part, and
    after `wait_params`."""
    run_config = ParallelConfig(zero=1)
    mesh = build_mesh(model_grid(run_config, CONFIG, world), rank=rank)
    model = Decoder(build_context(CONFIG, mesh, dtype=torch.float64))
    parameters = [
        (declared.shard, module, name) for declared, module, name in iter_parameter_specs(model)
    ]
    data = BucketedDataParallel(
        model,
        parameters,
        mesh,
        ParallelConfig(bucket_numel=200, overlap=True, zero=1),
        device=torch.device("cpu"),
    )

    initialize(model, seed=5)
    results = []
    with slow_link(latency_seconds=0.01, poison=True) as link, torch.no_grad():
        data.all_gather_params()
        # through embedding, layers, norm and head
        results.append(bool(loss_of(model, 0).isfinite()))
        results.append(not data.param_all_gather.pending)
        data.all_gather_params()
        # the link holds them back
        results.append(not bool(torch.cat(data.weights).isfinite().all()))
        results.append(
            bool(
                model.layers[0](torch.ones(14, 12, dtype=torch.float64), rotary(model))
                .isfinite()
                .all()
            )
        )
        results.append(bool(data.param_all_gather.pending))  # of other layers
        data.wait_params()
        results.append(bool(torch.cat(data.weights).isfinite().all()))
        results.append({transfer.waits for transfer in link.transfers} == {1})
    return results


def rotary(model: Decoder) -> LayerInputs:
    tokens = LayerInputs(seq_params_from_rows(2, 7))
    return model.rotations.add_to(tokens)


def test_forward_waits_for_weights_in_flight() -> None:
    assert run_ranks(_reads, 2) == [[True] * 7] * 2


def _other_sizes(rank: int, world: int) -> None:
    mesh = build_mesh(model_grid(ParallelConfig(zero=1), CONFIG, world), rank=rank)
    module = nn.Module()
    shard = Shard.full("w", (3 + rank,), inputs=0)
    module.register_parameter("w", nn.Parameter(torch.zeros(shard.matrix_shape)))
    BucketedDataParallel(
        module,
        [(shard, module, "w")],
        mesh,
        ParallelConfig(bucket_numel=100, overlap=True, zero=1),
        device=torch.device("cpu"),
    )


def test_different_parameters_on_ranks_are_rejected_before_the_first_step() -> None:
    message = (
        "the first difference is w at elements 0 to 3 of bucket 0 on rank 0 and w at elements 0 to "
        "4 of bucket 0 on rank 1"
    )
    with pytest.raises(RankError, match=message):
        run_ranks(_other_sizes, 2)


def _tied_over_stages(rank: int, world: int, zero: int) -> list[float]:
    """The gradient of a table that the first and the last of three stages hold, dp 2 on each."""
    mesh = build_mesh(model_grid(ParallelConfig(zero=zero, pp=3), CONFIG, world), rank=rank)
    stage = mesh.coordinates["pp"]
    module = nn.Module()
    # Other parameters lie before and after it, of other sizes on each stage.
    shards = [
        replace(Shard.full(f"before.{stage}", (70 + 100 * stage,), inputs=0), stages=(stage,))
    ]
    shards += [] if stage == 1 else [replace(Shard.full("table", (130,), inputs=0), stages=(0, 2))]
    shards += [replace(Shard.full(f"after.{stage}", (10 + 30 * stage,), inputs=0), stages=(stage,))]
    for shard in shards:
        module.register_parameter(
            shard.name.replace(".", "_"), nn.Parameter(torch.zeros(shard.matrix_shape))
        )
    data = BucketedDataParallel(
        module,
        [(shard, module, shard.name.replace(".", "_")) for shard in shards],
        mesh,
        ParallelConfig(bucket_numel=90, overlap=True, zero=zero),
        device=torch.device("cpu"),
    )

    data.begin_step(1)
    sum(
        (parameter * torch.arange(parameter.numel()) * 10**stage).sum()
        for parameter in module.parameters()
    ).backward()
    return [x for o in data.finish() if o.shard.name == "table" for x in o.gradient.tolist()]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_table_of_two_stages_is_summed_slice_by_slice(zero: int) -> None:
    results = run_ranks(_tied_over_stages, 6, zero)
    expected = [2.0 * (1 + 100) * i for i in range(130)]  # dp 2, and 10**stage of both
    for first, second in ((0, 1), (4, 5)):
        assert (results[first] if zero == 0 else results[first] + results[second]) == expected
    assert results[2] == results[3] == []


class MixedDtypes(nn.Module):
    """Parameters of two dtypes in turn, some smaller than a bucket and some larger."""

    SHARDS = tuple(
        Shard.full(f"w{number}", (size,), inputs=0, dtype=dtype)
        for number, (size, dtype) in enumerate(
            [(5, "fp64"), (70, "fp32"), (130, "fp64"), (3, "fp32"), (260, "fp32")]
        )
    )

    def __init__(self) -> None:
        super().__init__()
        for shard in self.SHARDS:
            start = torch.linspace(0.0, 1.0, shard.numel, dtype=DTYPES[shard.dtype])
            self.register_parameter(shard.name, nn.Parameter(start))

    def forward(self, factor: float) -> torch.Tensor:
        """Return a loss whose gradients are exact in fp32."""
        terms = [
            ((number + 1) * factor * parameter).double().sum()
            for number, parameter in enumerate(self.parameters())
        ]
        return torch.stack(terms).sum()


def _mixed_steps(rank: int, world: int, zero: int) -> dict[str, list[float]]:
    """Return the weights after two steps of AdamW with six microbatches over all ranks."""
    mesh = build_mesh(model_grid(ParallelConfig(zero=zero), CONFIG, world), rank=rank)
    model = MixedDtypes()
    data = BucketedDataParallel(
        model,
        [(shard, model, shard.name) for shard in model.SHARDS],
        mesh,
        ParallelConfig(bucket_numel=100, overlap=True, zero=zero),
        device=torch.device("cpu"),
    )

    assert {weights.dtype for weights in data.weights} == {torch.float32, torch.float64}
    buffers = {weights.untyped_storage().data_ptr() for weights in data.weights}
    assert len(buffers) == 2  # one of each dtype
    for param in data.local_params:
        assert param.weight.dtype == param.gradient.dtype == DTYPES[param.shard.dtype]
    optimizer = RuleOptimizer(
        [(param.shard, param.weight) for param in data.local_params], OptimConfig()
    )
    for _ in range(2):
        microbatches = range(6 * rank // world, 6 * (rank + 1) // world)
        data.begin_step(len(microbatches))
        for microbatch in microbatches:
            model(2.0**-microbatch).backward()
        gradients = [param.gradient for param in data.finish()]
        optimizer.step(gradients, lr=0.5, weight_decay=0.1)
        data.all_gather_params()
    data.wait_params()
    return {name: parameter.tolist() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_parameters_of_two_dtypes_train_as_in_one_process(zero: int) -> None:
    expected = _mixed_steps(0, 1, 0)
    for weights in run_ranks(_mixed_steps, 3, zero):
        assert weights == expected
