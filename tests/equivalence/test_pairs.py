"""Two microbatches computed together: nothing but the time changes, and tokens travel while the
other one computes.

That layouts with pairs equal one process is in test_layouts.py, that lists of pairs never block in
plan/test_pairs.py.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.nn.moe import Experts
from megalith.parallel.collectives import AsyncAllToAll
from megalith.parallel.mesh import build_mesh
from megalith.parallel.p2p import Tensors
from megalith.parallel.pipeline import DualBatchOverlap, Pipeline
from megalith.plan.grid import model_grid
from megalith.plan.schedule import build_schedule, pair_forward_backward
from megalith.testing.inject import patched, slow_link
from megalith.testing.ranks import run_ranks
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify.matrix import BIASED_CHOICE
from megalith.verify.ranks import LayoutCase, _loader, layout_case

CPU = torch.device("cpu")
EP2 = ParallelConfig(dp=2, ep=2, zero=1, overlap_experts=True)
STAGED = replace(EP2, pp=2, pipeline=PipelineConfig(schedule="dualpipe-v", vpp=2))


def case_of(parallel: ParallelConfig) -> LayoutCase:
    return layout_case(BIASED_CHOICE, parallel, 2 * parallel.pp)


def weights_key(rank: int, world: int, case: LayoutCase, steps: int) -> dict[str, Tensor]:
    """A rank's weights after some steps."""
    torch.set_num_threads(1)
    trainer = build_trainer(
        case.run, build_mesh(model_grid(case.run.parallel, case.run.model, world), rank=rank), CPU
    )
    loader = _loader(case.run, trainer.mesh, consumed=0, steps=steps)
    for _ in range(steps):
        train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1)
    trainer.data.wait_params()
    return {
        name: p.detach().clone() for name, p in trainer.pipeline_model.modules.named_parameters()
    }


@pytest.mark.parametrize("parallel", [EP2, pytest.param(STAGED, marks=pytest.mark.slow)])
def test_dual_batch_overlap_is_bitwise_equal(parallel: ParallelConfig) -> None:
    apart = case_of(replace(parallel, overlap_experts=False))
    world = 2 * parallel.pp
    for actual, expected in zip(
        run_ranks(weights_key, world, case_of(parallel), 2),
        run_ranks(weights_key, world, apart, 2),
        strict=True,
    ):
        assert actual.keys() == expected.keys()
        assert all(torch.equal(actual[name], expected[name]) for name in actual)


# --- what happens when


Event = tuple[Literal["start", "wait", "there", "compute"], str, int]
"""(what, in which lane, of which message)."""


@contextmanager
def noted(events: list[Event], delays: Iterator[float]) -> Iterator[None]:
    """Note what lanes do, and let everything take a while, now longer and now shorter."""
    start, wait, compute, main = (
        AsyncAllToAll.start,
        AsyncAllToAll.wait,
        Experts.forward,
        threading.get_ident(),
    )

    def note(what: Any, async_all_to_all: object = None) -> None:
        time.sleep(next(delays))
        numbers.setdefault(id(async_all_to_all), len(numbers))
        events.append(
            (
                what,
                "forward" if threading.get_ident() == main else "backward",
                numbers[id(async_all_to_all)],
            )
        )
        kept.append(async_all_to_all)

    numbers, kept = dict[int, int](), list[object]()

    def noted_start(self: AsyncAllToAll, x: Tensor, *, back: bool) -> Tensor:
        note("start", self)
        return start(self, x, back=back)

    def noted_wait(self: AsyncAllToAll, x: Tensor) -> Tensor:
        overlap_fn = self.overlap_fn

        def and_then() -> None:
            overlap_fn()
            note("wait", self)

        self.overlap_fn = and_then
        y = wait(self, x)
        self.overlap_fn = overlap_fn
        note("there", self)
        return y

    def noted_compute(self: Experts, *given: Any) -> Tensor:
        note("compute")
        return compute(self, *given)

    with (
        patched(AsyncAllToAll, "start", noted_start),
        patched(AsyncAllToAll, "wait", noted_wait),
        patched(Experts, "forward", noted_compute),
    ):
        yield


def log_of_step(rank: int, world: int, case: LayoutCase, hands_over: bool) -> list[Event]:
    """What a rank does in a step, on ranks of changing speed."""
    torch.set_num_threads(1)
    trainer = build_trainer(
        case.run, build_mesh(model_grid(case.run.parallel, case.run.model, world), rank=rank), CPU
    )
    batches, events = _loader(case.run, trainer.mesh, consumed=0, steps=1).next(), list[Event]()
    delays = (0.002 * ((number * (7 + 4 * rank)) % 5 == 0) for number in range(1 << 20))
    stays = (
        nullcontext() if hands_over else patched(DualBatchOverlap, "__call__", lambda self: None)
    )
    with noted(events, delays), stays:
        train_step(trainer, batches, lr=1e-2, weight_decay=0.1)
    return events


def computed_meanwhile(events: list[Event]) -> tuple[int, int]:
    """(messages, those between whose start and wait the other lane started or waited for or
    computed something)."""
    met, messages = 0, 0
    for place, (what, lane, number) in enumerate(events):
        if what == "start":
            messages += 1
            end = next(
                i
                for i in range(place, len(events))
                if events[i][0] == "wait" and events[i][2] == number
            )
            met += any(other != lane for _, other, _ in events[place:end])
    return messages, met


def test_all_to_all_overlaps_with_computation_in_one_order_on_all_ranks() -> None:
    case = case_of(EP2)
    one, other = run_ranks(log_of_step, 2, case, True)
    assert one == other, "collectives of both lanes have one order, whichever rank is slower"
    messages, met = computed_meanwhile(one)
    layers, microbatches = 4, 6
    # rows, weights and answers; forward and backward
    assert messages == layers * microbatches * (3 + 3)
    # Of each layer, forward or backward, two of three are waited for by turns: weights right after
    # their rows. The first forward and the last backward have nobody beside them; in a pair the
    # last to hand over has none left.
    assert met > 0.7 * messages
    assert any(what == "compute" and lane == "forward" for what, lane, _ in one)


def test_without_switches_nothing_overlaps() -> None:
    messages, met = computed_meanwhile(run_ranks(log_of_step, 2, case_of(EP2), False)[0])
    assert messages > 0 and met == 0


def over_a_poisoned_link(rank: int, world: int, case: LayoutCase) -> tuple[dict[str, Tensor], int]:
    with slow_link(latency_seconds=0.001, poison=True) as link:
        result = weights_key(rank, world, case, 1)
    return result, max(transfer.waits for transfer in link.select("all_to_all"))


def test_rows_are_read_only_after_wait() -> None:
    case = case_of(EP2)
    expected = run_ranks(weights_key, 2, case, 1)
    for (result, waits), actual in zip(
        run_ranks(over_a_poisoned_link, 2, case), expected, strict=True
    ):
        assert waits == 1
        assert all(torch.equal(result[name], actual[name]) for name in actual)


# --- errors


class Failing(torch.autograd.Function):
    """Hands over, and fails in the forward or the backward of one microbatch."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dual_batch: DualBatchOverlap, here: Callable[[str], None]
    ) -> Tensor:
        ctx.given = dual_batch, here
        dual_batch()
        here("F")
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        dual_batch, here = ctx.given
        dual_batch()
        here("B")
        return dy * 2, None, None


@pytest.mark.parametrize("which", ["F2", "B1", "F0", "B3"])
def test_error_in_one_pass_ends_the_step_with_its_traceback(which: str) -> None:
    dual_batch, done = DualBatchOverlap(), list[str]()
    weight = torch.ones(3, requires_grad=True)

    def chunk(microbatch: int, received: Tensors) -> Tensors:
        def here(kind: str) -> None:
            done.append(f"{kind}{microbatch}")
            if done[-1] == which:
                raise ValueError(f"no weights for {which}")

        y: Tensor = Failing.apply(weight, dual_batch, here)
        return (y.sum(),)

    schedule = pair_forward_backward(build_schedule("1f1b", num_ranks=1, num_microbatches=4))
    with pytest.raises(ValueError, match=f"no weights for {which}") as caught:
        Pipeline(0, None, CPU, dual_batch=dual_batch).run(schedule, [chunk])
    assert "in here" in "".join(traceback.format_tb(caught.value.__traceback__))
    assert done[-1] == which, "nobody went on"
    dual_batch.both(lambda: done.append("again"), lambda: done.append("too"))
    assert done[-2:] == ["again", "too"]
