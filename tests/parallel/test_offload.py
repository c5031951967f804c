"""Activations in host memory: what goes, when it comes back, that buffers are used again, and that
no bit changes."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megalith.config.parallel import OffloadConfig, RecomputeConfig
from megalith.data.loader import BatchSettings, Loader
from megalith.estimate.workload import plan_workload, stage_activations
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.parallel import recompute as recompute_module
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.parallel.recompute import HostMemory, OffloadedPass, OffloadedStorage
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.plan.layers.base import LayerSetting
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import build_trainer
from megalith.verify.ranks import RaggedRows

RUN = tiny_run({"model.num_layers": "4"})
KEEP, SELECTIVE = (
    RecomputeConfig(),
    RecomputeConfig(granularity="selective", modules=("core_attention", "norm")),
)


def trainer(
    offload: OffloadConfig, recompute: RecomputeConfig = KEEP, device: str = "cpu"
) -> Trainer:
    return build_trainer(
        replace(RUN, offload=offload, recompute=recompute),
        build_single_rank_mesh(),
        torch.device(device),
    )


def step(one: Trainer) -> tuple[Tensor, Tensor]:
    """Loss and all gradients of one microbatch of 24 tokens."""
    device = one.device
    ids = torch.arange(24, device=device) * 5 % 257
    one.data.begin_step(1)
    loss = one.model.loss(ids, ids.flip(0), LayerInputs(seq_params_from_rows(2, 12, device=device)))
    loss.backward()
    return loss.detach().clone(), torch.cat(
        [param.gradient.flatten() for param in one.data.finish()]
    )


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[OffloadedPass]:
    """Every pass that a runner begins."""
    begun: list[OffloadedPass] = []

    def begin(*args: Any, **others: Any) -> OffloadedPass:
        begun.append(OffloadedPass(*args, **others))
        return begun[-1]

    monkeypatch.setattr(recompute_module, "OffloadedPass", begin)
    return begun


@pytest.mark.parametrize(
    "recompute", [KEEP, SELECTIVE, RecomputeConfig(granularity="full", num_layers=2)], ids=str
)
@pytest.mark.parametrize("min_numel", [1, 300])
@pytest.mark.parametrize("layers", [1, 3])
def test_loss_and_gradients_are_bitwise_equal(
    recompute: RecomputeConfig, layers: int, min_numel: int
) -> None:
    loss, gradients = step(trainer(OffloadConfig()))
    away_loss, away_gradients = step(
        trainer(OffloadConfig(layers=layers, min_numel=min_numel), recompute)
    )
    assert torch.equal(away_loss, loss) and torch.equal(away_gradients, gradients)


@pytest.mark.parametrize(
    "recompute", [KEEP, SELECTIVE, RecomputeConfig(granularity="full", num_layers=2)], ids=str
)
@pytest.mark.parametrize("min_numel", [1, 300])
def test_offloaded_bytes_match_the_plan(
    passes: list[OffloadedPass], recompute: RecomputeConfig, min_numel: int
) -> None:
    offload = OffloadConfig(layers=2, min_numel=min_numel)
    step(trainer(offload, recompute))
    setting = LayerSetting(
        model=RUN.model, dtype="fp32", lengths=(12, 12), recompute=recompute, offload=offload
    )
    ledger = stage_activations(setting, num_layers=4)
    expected = [sorted((row.numel, row.nbytes) for row in rows) for rows in ledger.host if rows]
    assert [sorted(sent) for _, sent in sorted(passes[0].sent.items())] == expected
    assert sum(len(rows) for rows in expected) > 0


def test_last_layer_is_never_offloaded(passes: list[OffloadedPass]) -> None:
    step(trainer(OffloadConfig(layers=9, min_numel=1)))
    assert sorted(passes[0].sent) == [0, 1, 2]


def test_layers_are_prefetched_during_backward_of_the_next_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    fetch, start = OffloadedPass.fetch, OffloadedStorage.start_copy_back

    def noted_fetch(self: OffloadedPass, number: int) -> None:
        events.append(f"fetch {number}")
        fetch(self, number)

    def noted_start(self: OffloadedStorage) -> None:
        if self.back is None:
            events.append("copy")
        start(self)

    monkeypatch.setattr(OffloadedPass, "fetch", noted_fetch)
    monkeypatch.setattr(OffloadedStorage, "start_copy_back", noted_start)
    step(trainer(OffloadConfig(layers=3, min_numel=1)))
    fetches = [event for event in events if event != "copy"]
    assert fetches == ["fetch 2", "fetch 1", "fetch 0"]
    assert events[0] == "fetch 2", "nothing comes back before backward asks for it"
    assert events[-1] == "copy" and events.count("copy") == 3 * (events.index("fetch 1") - 1)


def _reloads(
    rank: int, world: int, settings: dict[str, str]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(pass through a chunk, layer) in the order in which copies start back in a step; and as
    backward goes."""
    run = tiny_run(
        {"model.num_layers": "8", "train.micro_batch_size": "3", "offload.min_numel": "1"}
        | settings
    )
    trainer = build_trainer(
        run, build_mesh(model_grid(run.parallel, run.model, world), rank=rank), torch.device("cpu")
    )
    loader = Loader(
        RaggedRows(12, run.model.vocab_size, 24, masked=(0, 1)),
        BatchSettings(batch_schedule=constant_batch_size(12), micro_batch_size=3),
        trainer.mesh.dp,
        consumed=0,
        steps=1,
        device=torch.device("cpu"),
    )
    begun, back = list[OffloadedPass](), list[tuple[int, int]]()
    start = OffloadedStorage.start_copy_back

    def begin(*args: Any, **others: Any) -> OffloadedPass:
        begun.append(OffloadedPass(*args, **others))
        return begun[-1]

    def noted(self: OffloadedStorage) -> None:
        if self.back is None:
            back.extend(
                (number, span)
                for number, one in enumerate(begun)
                for span, sent in one.spans.items()
                if any(reference() is self for reference in sent)
            )
        start(self)

    with (
        patched(recompute_module, "OffloadedPass", begin),
        patched(OffloadedStorage, "start_copy_back", noted),
    ):
        train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.0)
    actions = plan_workload(run, world).schedule.ranks[rank]
    forwards = [(op.chunk, op.microbatch) for op in actions if op.kind == "F"]
    passes = [forwards.index((op.chunk, op.microbatch)) for op in actions if op.kind in ("B", "I")]
    assert len(begun) == len(forwards)
    layers = range(run.offload.layers)
    return list(dict.fromkeys(back)), [
        (number, layer) for number in passes for layer in reversed(layers)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"offload.layers": "3"},
        {"offload.layers": "1", "parallel.pipeline.vpp": "2"},
        {"offload.layers": "3", "parallel.pipeline.schedule": "zb-h1"},
    ],
    ids=["one chunk", "two chunks", "weights last"],
)
def test_copies_are_fetched_in_backward_order_in_a_pipeline(settings: dict[str, str]) -> None:
    for found, expected in run_ranks(_reloads, 2, {"parallel.pp": "2"} | settings):
        assert len(expected) >= 4 and found == expected


def test_buffers_are_used_again_from_the_second_step_on() -> None:
    one = trainer(OffloadConfig(layers=3, min_numel=1))
    memory: HostMemory = one.model.run_layers.memory
    for number in range(3):
        step(one)
        if number == 0:
            made = memory.made
    assert memory.made == made and memory.taken == 3 * made
    assert sum(len(free) for free in memory.buffers.values()) == made


def test_shared_storage_is_offloaded_once_and_shared_after_fetch() -> None:
    memory, weight = HostMemory(), torch.randn(6, requires_grad=True)
    x = torch.randn(4, 6)
    run = OffloadedPass(memory, min_numel=1, stays=[weight])
    with run.span(0):
        y = (
            (x[:, :3] * weight[:3]).sum()
            + (x[:, 3:] * weight[3:]).sum()
            + (x.T[2] * weight[0]).sum()
        )
    assert run.sent == {0: [(12, 96)]} and memory.taken == 1
    expected = x.sum(0)
    expected[0] += x[:, 2].sum()
    del x
    y.backward()
    torch.testing.assert_close(weight.grad, expected)


def written_between(away: OffloadedPass | None, *, first: bool) -> Tensor:
    """The gradient of a weight whose factors are two halves of a buffer, the second written after
    the first is saved.

    `first`: both count.
    """
    weight, buffer = torch.ones(4, requires_grad=True), torch.zeros(8)
    with nullcontext() if away is None else away.span(0):
        buffer[:4] = 1
        one = (buffer[:4] * weight).sum()
        buffer[4:] = 2
        other = (buffer[4:] * weight).sum()
    (one + other if first else other).backward()
    assert weight.grad is not None
    return weight.grad


def test_storage_modified_after_a_copy_is_copied_again() -> None:
    away = OffloadedPass(HostMemory(), min_numel=1)
    assert torch.equal(written_between(away, first=False), written_between(None, first=False))
    assert away.sent == {0: [(4, 32), (4, 32)]}


def test_in_place_change_after_save_is_rejected() -> None:
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written_between(None, first=True)
    refused = (
        r"of torch.float32 \[4\] .* modified by an inplace operation .* is at version 2, "
        r"expected 1. Use an op"
    )
    with pytest.raises(RuntimeError, match=refused):
        written_between(OffloadedPass(HostMemory(), min_numel=1), first=True)


def test_device_memory_is_freed_while_offloaded() -> None:
    run, weight = OffloadedPass(HostMemory(), min_numel=1), torch.ones(4, requires_grad=True)
    x = torch.randn(4)
    memory = StorageWeakRef(x.untyped_storage())
    with run.span(0, []):
        y = (x * 2 * weight + x * weight).sum()
    del x
    assert memory.expired()
    y.backward()


def test_batches_of_varying_lengths_share_host_buffers() -> None:
    memory = HostMemory()
    for number in range(500, 1, -1):
        run, weight = OffloadedPass(memory, min_numel=2), torch.ones(1, requires_grad=True)
        x = torch.randn(number)
        with run.span(0):
            y = (x * weight).sum()
        y.backward()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad[0], x.sum())
    assert memory.taken == 499 and memory.made == 9
    assert sorted(memory.buffers) == [1 << power for power in range(3, 12)]


def test_reused_storage_address_is_a_new_storage() -> None:
    memory, scale = HostMemory(), torch.ones(1, requires_grad=True)
    run = OffloadedPass(memory, min_numel=2, stays=[])
    total = torch.zeros(())
    with run.span(0):
        for number in range(50):  # each of these may lie where the one before it lay
            total = total + (torch.full((8,), float(number)) * scale).sum()
    total.backward()
    assert scale.grad is not None and scale.grad.item() == 8 * sum(range(50))


def test_wrong_copy_changes_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: copies come back before they are complete."""
    _, right = step(trainer(OffloadConfig()))
    monkeypatch.setattr(
        OffloadedStorage,
        "start_copy_back",
        lambda self: setattr(self, "back", torch.zeros_like(self.host)),
    )
    _, wrong = step(trainer(OffloadConfig(layers=2, min_numel=1)))
    assert not torch.equal(right, wrong)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU, whose copies run on a stream of their own"
)
def test_offload_on_a_gpu_is_bitwise_equal_and_saves_memory() -> None:
    loss, gradients = step(trainer(OffloadConfig(), device="cuda"))
    one = trainer(OffloadConfig(layers=3, min_numel=1), device="cuda")
    for _ in range(3):
        away_loss, away_gradients = step(one)
        assert torch.equal(away_loss, loss) and torch.equal(away_gradients, gradients)
    assert all(
        buffer.is_pinned()
        for free in one.model.run_layers.memory.buffers.values()
        for buffer in free
    )


class Gathered(torch.nn.Module):
    """A layer whose parameter is another one while it runs, as with zero=3."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        part, self.weight = self.weight, torch.nn.Parameter(self.weight.detach().repeat(2))
        y = x * self.weight
        self.weight = part
        return y


def test_temporarily_gathered_parameters_are_not_offloaded() -> None:
    layer, run = Gathered(), OffloadedPass(HostMemory(), min_numel=1)
    with run.span(0, [layer]):
        layer(torch.randn(4, 6))
    assert run.sent == {0: [(24, 96)]}
