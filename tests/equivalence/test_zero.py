"""Divided optimizer state and gradients change no bit, hide nothing that is not there, and hold
what they promise."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.config.train import TrainRun
from megalith.config.tree import Override
from megalith.data.loader import BatchSettings, Loader
from megalith.parallel import data as flat
from megalith.parallel.data import BucketedDataParallel
from megalith.parallel.mesh import Mesh, build_mesh, build_meta_mesh, build_single_rank_mesh
from megalith.parallel.tensor import VocabParallelEmbedding
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched, slow_link
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import EXACT, FP64, assert_close, relative_error
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import all_gather_loaded_params, build_trainer, checkpoint_entries
from megalith.verify.ranks import RaggedRows

CPU = torch.device("cpu")
ONE_MICROBATCH = {"train.micro_batch_size": "6"}  # of the 12 rows of a step, at dp 2
SMALL = {"parallel.bucket_numel": "600"}
Settings = Mapping[str, Override]


@dataclass(frozen=True, slots=True)
class Trained:
    """What one rank saw of a run."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    """As forward reads them."""


def mesh_of(run: TrainRun, rank: int, world: int) -> Mesh:
    return (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    )


def steps(trainer: Trainer, first: int, count: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of steps `first` and following, on rows with uneven labels."""
    train = trainer.run.train
    rows = RaggedRows(train.seq_len, trainer.run.model.vocab_size, 12 * 50, masked=(0, 1, 2, 17))
    loader = Loader(
        rows,
        BatchSettings(
            batch_schedule=constant_batch_size(12), micro_batch_size=train.micro_batch_size
        ),
        trainer.mesh.dp,
        consumed=12 * first,
        steps=count,
        device=CPU,
    )
    results = [train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1) for _ in range(count)]
    return [result.loss for result in results], [result.grad_norm for result in results]


def _train(rank: int, world: int, settings: Settings, count: int) -> Trained:
    run = tiny_run({**SMALL, **settings})
    trainer = build_trainer(run, mesh_of(run, rank, world), CPU)
    losses, norms = steps(trainer, 0, count)
    trainer.data.wait_params()
    return Trained(
        losses, norms, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    )


def same(found: list[Trained], reference: list[Trained]) -> None:
    """Every rank's losses and weights, to the bit."""
    for actual, other in zip(found, reference, strict=True):
        assert actual.losses == other.losses
        assert_close(actual.weights, other.weights, EXACT)


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_zero_1_and_2_are_bitwise_equal_to_zero_0_at_dp_2(params: str) -> None:
    plain = {**ONE_MICROBATCH, "precision.params": params}
    expected = run_ranks(_train, 2, plain, 20)
    assert len(set(expected[0].losses)) == 20
    for zero in ("1", "2"):
        same(run_ranks(_train, 2, {**plain, "parallel.zero": zero}, 20), expected)


@pytest.mark.parametrize("zero", ["0", "1", "2"])
def test_at_dp_2_overlap_and_the_size_of_buckets_change_no_bit(zero: str) -> None:
    plain = {"parallel.zero": zero}
    expected = run_ranks(_train, 2, plain, 4)
    for change in (
        {"parallel.overlap": "false"},
        {"parallel.bucket_numel": "1"},
        {"parallel.bucket_numel": "10000000"},
    ):
        same(run_ranks(_train, 2, {**plain, **change}, 4), expected)


def test_slices_at_dp_4_are_added_in_rank_order_for_every_bucket_size() -> None:
    """And sums over all ranks at once agree to 1e-12 in float64. Clipping is off: its norm is a sum
    over all slices."""
    results = {
        (zero, numel): run_ranks(
            _train,
            4,
            {
                "parallel.zero": zero,
                "parallel.bucket_numel": numel,
                "precision.params": "fp64",
                "train.micro_batch_size": "3",
                "optim.clip_grad": "0",
            },
            3,
        )[0]
        for zero in ("0", "1", "2")
        for numel in ("1", "600", "10000000")
    }
    reference = results["1", "600"]
    for (zero, _), other in results.items():
        for name, weights in other.weights.items():
            assert relative_error(weights, reference.weights[name]) <= (
                0.0 if zero != "0" else 1e-12
            )


def test_gradients_reduced_after_every_microbatch_have_the_same_sum() -> None:
    settings = {"precision.params": "fp64", "train.micro_batch_size": "2"}  # three microbatches
    once, thrice = (
        run_ranks(_train, 2, {**settings, "parallel.zero": zero}, 3)[0] for zero in ("1", "2")
    )
    assert_close(thrice.weights, once.weights, FP64)
    assert not all(torch.equal(thrice.weights[name], once.weights[name]) for name in once.weights)


def test_bf16_gradient_reduction_is_close_and_equal_on_ranks() -> None:
    plain = {**ONE_MICROBATCH, "parallel.zero": "1"}
    exact = run_ranks(_train, 2, plain, 5)[0]
    rounded = run_ranks(_train, 2, {**plain, "parallel.reduce_dtype": "bf16"}, 5)
    same(rounded[:1], rounded[1:])
    assert rounded[0].losses != exact.losses
    assert rounded[0].losses == pytest.approx(exact.losses, rel=1e-3)
    assert rounded[0].norms == pytest.approx(exact.norms, rel=1e-2)


def _over_a_poisoned_link(
    rank: int, world: int, settings: Settings
) -> tuple[Trained, dict[str, int], set[int]]:
    """Train where nothing may be read before it was waited for; how much was sent, and how often it
    was waited for."""
    with slow_link(latency_seconds=0.001, poison=True) as link:
        trained = _train(rank, world, settings, 3)
        sent = {kind: len(link.select(kind)) for kind in ("isend", "irecv")}
        return trained, sent, {transfer.waits for transfer in link.select("isend", "irecv")}


@pytest.mark.parametrize("zero", ["1", "2"])
def test_buckets_are_waited_for_once_before_they_are_read(zero: str) -> None:
    settings = {**ONE_MICROBATCH, "parallel.zero": zero}
    results = run_ranks(_over_a_poisoned_link, 2, settings)
    same([trained for trained, _, _ in results], run_ranks(_train, 2, settings, 3))
    for _, sent, waits in results:
        assert waits == {1}
        # steps, directions, more than a few buckets
        assert sent["isend"] == sent["irecv"] > 3 * 2 * 4


def _events(rank: int, world: int, zero: int) -> list[str]:
    """In which order backward reaches layers and buckets start, in the only microbatch of a
    step."""
    settings = {
        **ONE_MICROBATCH,
        "parallel.zero": str(zero),
        "model.num_layers": "6",
        "parallel.bucket_numel": "2000",
    }
    run = tiny_run(settings)
    trainer = build_trainer(run, mesh_of(run, rank, world), CPU)
    assert isinstance(trainer.data, BucketedDataParallel)
    plan, names = trainer.data.plan, [shard.name for shard in trainer.data.shards]
    events: list[str] = []

    def start_and_tell(*args: Any, **others: Any) -> Any:
        (index,) = {others["tag"] // 2 % len(plan.buckets)}
        events.extend(f"sent {names[number]}" for number in plan.buckets[index].members)
        return right(*args, **others)

    for number, layer in enumerate(trainer.model.layers):
        layer.register_full_backward_pre_hook(
            lambda *_, number=number: events.append(f"backward {number}")
        )
    right = flat.start_bucket_reduce_scatter
    with patched(flat, "start_bucket_reduce_scatter", start_and_tell):
        steps(trainer, 0, 1)
    return events


@pytest.mark.parametrize("zero", [1, 2])
def test_gradient_reduction_starts_within_two_layers_of_backward(
    zero: int,
) -> None:
    for events in run_ranks(_events, 2, zero):
        for layer in range(2, 6):
            sent = max(
                place
                for place, event in enumerate(events)
                if event.startswith(f"sent layers.{layer}.")
            )
            assert sent < events.index(f"backward {layer - 2}"), events
        assert len({event for event in events if event.startswith("sent")}) == 6 * 7 + 3


def _live_buckets(rank: int, world: int) -> tuple[int, int]:
    """The most elements of gradients not summed yet that were alive at once under ZeRO-2, and of
    the largest bucket."""
    run = tiny_run({**SMALL, "parallel.zero": "2", "model.num_layers": "8"})
    trainer = build_trainer(run, mesh_of(run, rank, world), CPU)
    data, most = trainer.data, 0
    assert isinstance(data, BucketedDataParallel)
    right = flat.start_bucket_reduce_scatter

    def count(*args: Any, **others: Any) -> Any:
        nonlocal most
        on_their_way = sum(started.slices.numel() for _, started in data._sums)
        most = max(
            most,
            on_their_way + sum(buffer.numel() for buffer in data._buffers if buffer is not None),
        )
        return right(*args, **others)

    with patched(flat, "start_bucket_reduce_scatter", count):
        steps(trainer, 0, 2)
    return most, max(bucket.stop - bucket.start for bucket in data.plan.buckets)


def test_zero_2_holds_few_buckets_at_a_time() -> None:
    for most, largest in run_ranks(_live_buckets, 2):
        # two on their way, one about to be, one being filled
        assert 0 < most <= (flat.IN_FLIGHT + 2) * largest


# --- a step that is skipped


def _skipped(
    rank: int, world: int, settings: Settings, where: int
) -> tuple[bool, list[str], int, dict[str, float]]:
    """A good step, then one in which gradients overflow on rank `where` alone: whether that one
    updated, which of all saved tensors it changed here, the number of updates, and the loss
    scale."""
    run = tiny_run({**SMALL, **settings})
    trainer = build_trainer(run, mesh_of(run, rank, world), CPU)
    steps(trainer, 0, 1)
    trainer.data.wait_params()
    before = {
        (entry.role, entry.key): entry.tensor.clone() for entry in checkpoint_entries(trainer)
    }
    if rank == where:
        (embed,) = [
            module
            for module in trainer.model.modules()
            if isinstance(module, VocabParallelEmbedding)
        ]
        embed.register_forward_hook(
            lambda _module, _ids, x: x.register_hook(lambda dx: dx * float("inf")) and None
        )
    rows = RaggedRows(run.train.seq_len, run.model.vocab_size, 12, masked=(0, 1))
    loader = Loader(
        rows,
        BatchSettings(
            batch_schedule=constant_batch_size(12), micro_batch_size=run.train.micro_batch_size
        ),
        trainer.mesh.dp,
        consumed=0,
        steps=1,
        device=CPU,
    )
    result = train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1)
    trainer.data.wait_params()
    after = {(entry.role, entry.key): entry.tensor for entry in checkpoint_entries(trainer)}
    assert after.keys() == before.keys() and len(before) > 10
    changed = [key for (role, key), x in after.items() if not torch.equal(x, before[role, key])]
    scale = {} if trainer.loss_scale is None else trainer.loss_scale.as_json()
    return result.updated, changed, trainer.optimizer.updates, scale


@pytest.mark.parametrize(
    ("zero", "where"),
    [
        ("1", 1),
        ("3", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("0", 1), ("2", 1), ("1", 0))),
    ],
)
def test_a_step_that_overflows_on_one_rank_changes_no_bit_on_any(zero: str, where: int) -> None:
    settings = {**ONE_MICROBATCH, "parallel.zero": zero, "optim.nonfinite_grad": "skip"}
    assert run_ranks(_skipped, 2, settings, where) == [(False, [], 1, {})] * 2
    assert all(
        updated and changed for updated, changed, _, _ in run_ranks(_skipped, 2, settings, -1)
    )


def test_an_overflow_of_fp16_in_one_stage_changes_no_bit_in_any_and_lowers_the_scale_on_all() -> (
    None
):
    settings = {
        "parallel.pp": "2",
        "precision.params": "fp16",
        "precision.loss_scale.initial": "1024",
        "precision.loss_scale.hysteresis": "1",
    }
    # backward ends in the first stage: the last sees no overflow
    first, last = run_ranks(_skipped, 2, settings, 0)
    assert first == last
    assert first[:3] == (False, [], 1) and first[3]["scale"] == 512.0
    assert all(
        updated and changed for updated, changed, _, _ in run_ranks(_skipped, 2, settings, -1)
    )


# --- a slow link is hidden


def _exposed(rank: int, world: int, zero: int) -> tuple[float, float, float]:
    """Seconds of a step in which nothing is sent, that the link adds to one, and that a rank then
    stands still for it.

    Layers sleep for what a device would compute meanwhile, so that little depends on the cores of
    this machine; the shortest of some steps counts.
    """
    settings = {
        **ONE_MICROBATCH,
        "parallel.zero": str(zero),
        "model.num_layers": "12",
        "parallel.bucket_numel": "3000",
    }
    run = tiny_run(settings)
    trainer = build_trainer(run, mesh_of(run, rank, world), CPU)
    for layer in trainer.model.layers:
        layer.register_forward_hook(lambda *_: time.sleep(0.010))
        layer.register_full_backward_hook(lambda *_: time.sleep(0.010))
    whole, exposed, count = [], [], 5
    with slow_link(latency_seconds=0.007) as link:
        for number in range(count):
            dist.barrier()
            before, start = link.exposed_seconds("isend", "irecv"), time.perf_counter()
            steps(trainer, number, 1)
            exposed.append(link.exposed_seconds("isend", "irecv") - before)
            whole.append(time.perf_counter() - start - exposed[-1])
        trainer.data.wait_params()
    added = link.added_seconds("irecv") / count  # sending goes on at the same time
    return min(whole), added, min(exposed[1:])  # no weights were on their way before the first step


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 2])
def test_zero_hides_four_fifths_of_its_communication(zero: int) -> None:
    """Both ways: gradients behind backward, weights behind the next forward."""
    for whole, added, exposed in run_ranks(_exposed, 2, zero):
        assert added > 0.4 * whole  # 0.5 on an idle machine
        assert exposed < 0.2 * added, (whole, added, exposed)


# --- memory


def state_bytes(trainer: Trainer) -> int:
    """Of master weights, where they are apart from the weights, and moments."""
    return sum(
        tensor.nbytes
        for slot in trainer.optimizer.slots
        for tensor in (
            *slot.state.values(),
            *([slot.master] if slot.master is not slot.weight else []),
        )
    )


@pytest.mark.parametrize(
    ("params", "weights", "state"),
    [("fp32", 4, 8), ("bf16", 2, 12), ("fp16", 2, 12), ("fp64", 8, 16)],
)
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_bytes_per_parameter_are_those_of_the_table(
    params: str, weights: int, state: int, zero: int
) -> None:
    """Weights whole; gradients (fp32) whole, or 1/d with zero 2; master weights and moments 1/d
    with zero 1 and 2."""
    d = 4
    run = tiny_run(
        {**SMALL, "precision.params": params, "parallel.zero": str(zero), "parallel.dp": str(d)}
    )
    grid = model_grid(run.parallel, run.model, d)
    states = []
    for rank in range(d):
        trainer = build_trainer(run, build_meta_mesh(grid, rank=rank), CPU, fill=False)
        data = trainer.data
        assert isinstance(data, BucketedDataParallel)
        states.append(state_bytes(trainer))
        assert data.weights[0].untyped_storage().nbytes() == weights * data.plan.numel
        wide = 8 if params == "fp64" else 4
        assert data.gradients[0].untyped_storage().nbytes() == wide * data.plan.numel // (
            d if zero == 2 else 1
        )
        assert not any(buffer is not None for buffer in data._buffers) or zero < 2
    numel = sum(shard.numel for shard in data.shards)
    if zero == 0:
        assert states == [state * numel] * d
    else:
        assert sum(states) == state * numel
        # padding is nobody's state
        assert max(states) - min(states) <= state * 64 * d * len(data.plan.buckets)


def test_at_dp_4_a_rank_holds_a_quarter_of_the_optimizer_within_2_percent() -> None:
    run = tiny_run(
        {
            "model.hidden_size": "256",
            "model.ffn_hidden_size": "1024",
            "model.num_layers": "8",
            "model.head_dim": "64",
            "model.vocab_size": "5000",
            "parallel.zero": "1",
            "parallel.dp": "4",
            "parallel.bucket_numel": "1000000",
        }
    )
    grid = model_grid(run.parallel, run.model, 4)
    for rank in range(4):
        trainer = build_trainer(run, build_meta_mesh(grid, rank=rank), CPU, fill=False)
        assert isinstance(trainer.data, BucketedDataParallel)
        numel = sum(shard.numel for shard in trainer.data.shards)
        assert numel >= 10_000_000
        assert state_bytes(trainer) == pytest.approx(8 * numel / 4, rel=0.02)


# --- checkpoints


def _save(rank: int, world: int, settings: Settings, folder: str) -> Trained:
    """Two steps, a checkpoint, and one more step, after which the whole state is in a second
    checkpoint."""
    run = tiny_run({**SMALL, **settings})
    trainer = build_trainer(run, mesh_of(run, rank, world), CPU)
    steps(trainer, 0, 2)
    save(trainer, folder, 2)
    losses, norms = steps(trainer, 2, 1)
    save(trainer, folder, 3)
    return Trained(losses, norms, {})


def _go_on(rank: int, world: int, settings: Settings, folder: str) -> Trained:
    """The third step, from the checkpoint of the second, under another layout."""
    run = tiny_run({**SMALL, **settings})
    trainer = build_trainer(run, mesh_of(run, rank, world), CPU, fill=False)
    open_checkpoint(Path(folder) / "step_0000002").load_into(
        checkpoint_entries(trainer), trainer.mesh.world
    )
    trainer.optimizer.set_updates(2)
    all_gather_loaded_params(trainer)
    losses, norms = steps(trainer, 2, 1)
    save(trainer, f"{folder}/again", 3)
    return Trained(losses, norms, {})


def save(trainer: Trainer, folder: str, step: int) -> None:
    trainer.data.wait_params()
    save_checkpoint(
        Path(folder), step, checkpoint_entries(trainer), {}, trainer.mesh.world, config_text=""
    )


def stored(folder: str) -> dict[str, Tensor]:
    """Every tensor of the checkpoint of step 3, whole."""
    checkpoint = open_checkpoint(Path(folder) / "step_0000003")
    return {key: checkpoint.read(key) for key in checkpoint.keys()}  # noqa: SIM118  # not a mapping


SOURCES = {
    "zero 1 dp2": (2, {"parallel.zero": "1"}),
    "zero 2 dp2 tp2": (4, {"parallel.zero": "2", "parallel.tp": "2"}),
}
TARGETS = {
    "one process": (1, {}),
    "dp2": (2, {}),
    "zero 2 dp2": (2, {"parallel.zero": "2"}),
    "zero 1 dp3": (3, {"parallel.zero": "1"}),
    "tp2": (2, {"parallel.tp": "2"}),
    "zero 1 dp4 in two replicas": (
        4,
        {"parallel.zero": "1", "parallel.dp_replicate": "2", "train.micro_batch_size": "3"},
    ),
    "zero 1 tp2 dp2 sp": (4, {"parallel.zero": "1", "parallel.tp": "2", "parallel.sp": "true"}),
}


@pytest.mark.parametrize(
    "source",
    [pytest.param(name, marks=[pytest.mark.slow] * place) for place, name in enumerate(SOURCES)],
)
def test_checkpoint_of_sharded_state_resumes_under_every_layout(
    source: str, tmp_path: Path
) -> None:
    double = {"precision.params": "fp64", "optim.eps": "1e-3"}
    world, settings = SOURCES[source]
    expected = run_ranks(_save, world, {**settings, **double}, str(tmp_path))[0]
    reference = stored(str(tmp_path))
    for world, settings in TARGETS.values():
        case = {**settings, **double}, str(tmp_path)
        result = _go_on(0, 1, *case) if world == 1 else run_ranks(_go_on, world, *case)[0]
        assert result.losses == pytest.approx(expected.losses, rel=FP64.relative)
        assert result.norms == pytest.approx(expected.norms, rel=FP64.relative)
        assert_close(stored(f"{tmp_path}/again"), reference, FP64)


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel.zero": "1"},
        {"parallel.zero": "2", "precision.params": "bf16"},
        {"parallel.zero": "1", "optim.kind": "sgd"},
    ],
)
def test_resume_with_the_same_layout_is_bitwise_equal(settings: Settings, tmp_path: Path) -> None:
    expected = run_ranks(_save, 2, settings, str(tmp_path))
    results = run_ranks(_go_on, 2, settings, str(tmp_path))
    assert [each.losses for each in results] == [each.losses for each in expected]
    assert_close(stored(f"{tmp_path}/again"), stored(str(tmp_path)), EXACT)
