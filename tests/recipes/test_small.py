"""Recipes of small Llama models."""

from collections.abc import Callable

import pytest

from megalith.config.train import TrainRun
from megalith.plan.costs import num_parameters
from megalith.recipes.small import llama_6m, llama_29m, llama_125m, llama_350m


@pytest.mark.parametrize(
    "recipe, parameters",
    [(llama_6m, 6e6), (llama_29m, 29e6), (llama_125m, 125e6), (llama_350m, 350e6)],
)
def test_a_model_is_as_large_as_its_name_says(
    recipe: Callable[[], TrainRun], parameters: float
) -> None:
    assert num_parameters(recipe().model) == pytest.approx(parameters, rel=0.05)


def test_the_benchmark_shapes_are_256_by_8_and_512_by_4() -> None:
    shapes = [(run.train.seq_len, run.train.global_batch_size) for run in (llama_6m(), llama_29m())]
    assert shapes == [(256, 8), (512, 4)]
