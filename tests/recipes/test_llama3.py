"""The published sizes of Llama 3."""

from collections.abc import Callable

import pytest

from megalith.config.train import TrainRun
from megalith.plan.advice import verdict
from megalith.plan.costs import num_parameters
from megalith.plan.devices import DEVICES
from megalith.plan.memory import memory_ledger, worst
from megalith.plan.workload import plan_workload
from megalith.recipes.llama3 import llama3_1b, llama3_8b, llama3_70b, llama3_405b


@pytest.mark.parametrize(
    "recipe, parameters",
    [
        (llama3_1b, 1_235_814_400),
        (llama3_8b, 8_030_261_248),
        (llama3_70b, 70_553_706_496),
        (llama3_405b, 405_853_388_800),
    ],
)
def test_a_model_has_its_published_number_of_parameters(recipe: Callable[[], TrainRun], parameters: int) -> None:
    assert num_parameters(recipe().model) == parameters


def test_positions_are_stretched_as_published() -> None:
    rope = llama3_8b().model.rope
    assert (rope.theta, rope.scaling, rope.factor) == (500_000.0, "llama3", 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (1.0, 4.0, 8192)
    assert llama3_1b().model.rope.factor == 32.0


def test_the_70b_batch_divides_over_4096_ranks() -> None:
    run = llama3_70b()
    replicas = 4096 // run.parallel.tp
    assert run.train.global_batch_size % (replicas * run.train.micro_batch_size) == 0


def test_the_405b_batch_divides_over_16384_ranks() -> None:
    run = llama3_405b()
    replicas = 16_384 // (run.parallel.tp * run.parallel.pp)
    rows = run.train.global_batch_size
    assert rows * run.train.seq_len == 16_777_216, "tokens of a step, as published"
    assert rows // replicas % run.parallel.pp == 0, "whole groups of microbatches for the interleaved schedule"


def test_the_405b_model_fits_the_gpus_it_was_trained_on() -> None:
    held = worst(memory_ledger(plan_workload(llama3_405b(), 16_384), DEVICES["h100"])).memory.total
    assert verdict(held, DEVICES["h100"]) == "fits"
