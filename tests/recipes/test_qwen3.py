"""The published sizes of Qwen3."""

from collections.abc import Callable

import pytest

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.models.qwen3 import read_config
from megalith.models.usual import canonical
from megalith.recipes.qwen3 import qwen3_0_6b, qwen3_8b
from tests.models.test_qwen3 import LARGE, SMALL


@pytest.mark.parametrize(
    ("recipe", "published"),
    [(qwen3_0_6b, read_config(SMALL)), (qwen3_8b, read_config(LARGE))],
)
def test_a_model_is_the_one_that_its_authors_published(recipe: Callable[[], TrainRun], published: ModelConfig) -> None:
    assert canonical(recipe().model) == canonical(published)
