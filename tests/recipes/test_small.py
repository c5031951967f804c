"""Recipes of small Llama models."""

from collections.abc import Callable

import pytest

from megalith.config.train import TrainRun
from megalith.plan.costs import num_parameters
from megalith.recipes import build_recipe, recipes


@pytest.mark.parametrize(
    "recipe, parameters",
    [
        (recipes()["llama_6m"], 6e6),
        (recipes()["llama_29m"], 29e6),
        (recipes()["llama_125m"], 125e6),
        (recipes()["llama_350m"], 350e6),
    ],
)
def test_model_has_the_size_in_its_name(recipe: Callable[[], TrainRun], parameters: float) -> None:
    assert num_parameters(recipe().model) == pytest.approx(parameters, rel=0.05)


def test_the_benchmark_shapes_are_256_by_8_and_512_by_4() -> None:
    shapes = [
        (run.train.seq_len, run.train.global_batch_size)
        for run in (build_recipe("llama_6m"), build_recipe("llama_29m"))
    ]
    assert shapes == [(256, 8), (512, 4)]
