"""The published sizes of Qwen3."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megalith.config.model import ModelConfig
from megalith.config.moe import BalanceConfig
from megalith.config.train import TrainRun
from megalith.models import qwen3_moe
from megalith.models.qwen3 import read_config
from megalith.models.usual import canonical
from megalith.plan.costs import active_parameters, num_parameters
from megalith.recipes.qwen3 import qwen3_0_6b, qwen3_8b, qwen3_30b_a3b
from tests.models.test_qwen3 import LARGE, SMALL
from tests.models.test_qwen3_moe import RAW


@pytest.mark.parametrize(
    ("recipe", "published"),
    [(qwen3_0_6b, read_config(SMALL)), (qwen3_8b, read_config(LARGE))],
)
def test_a_model_is_the_one_that_its_authors_published(recipe: Callable[[], TrainRun], published: ModelConfig) -> None:
    assert canonical(recipe().model) == canonical(published)


def test_the_mixture_is_the_one_that_its_authors_published() -> None:
    model = qwen3_30b_a3b().model
    assert model.moe is not None
    assert replace(model, moe=replace(model.moe, balance=BalanceConfig())) == qwen3_moe.read_config(RAW)
    assert (num_parameters(model), active_parameters(model)) == (30_532_122_624, 3_353_032_704)
