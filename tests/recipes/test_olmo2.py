"""The published sizes of OLMo 2."""

from collections.abc import Callable

import pytest

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.models.olmo2 import read_config
from megalith.models.usual import canonical
from megalith.recipes.olmo2 import olmo2_1b, olmo2_7b, olmo2_13b
from tests.models.test_olmo2 import LARGE, MIDDLE, SMALL


@pytest.mark.parametrize(
    ("recipe", "published"),
    [(olmo2_1b, read_config(SMALL)), (olmo2_7b, read_config(MIDDLE)), (olmo2_13b, read_config(LARGE))],
)
def test_a_model_is_the_one_that_its_authors_published(recipe: Callable[[], TrainRun], published: ModelConfig) -> None:
    assert canonical(recipe().model) == canonical(published)
