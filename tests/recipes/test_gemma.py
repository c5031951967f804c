"""The published sizes of Gemma."""

from collections.abc import Callable

import pytest

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.models.gemma2 import read_config as read_gemma2
from megalith.models.gemma3 import read_config as read_gemma3
from megalith.models.usual import canonical
from megalith.recipes.gemma import gemma2_2b, gemma2_9b, gemma3_1b, gemma3_270m
from tests.models.test_gemma2 import MIDDLE, SMALL
from tests.models.test_gemma3 import ONE, TINY


@pytest.mark.parametrize(
    ("recipe", "published"),
    [
        (gemma2_2b, read_gemma2(SMALL)),
        (gemma2_9b, read_gemma2(MIDDLE)),
        (gemma3_270m, read_gemma3(TINY)),
        (gemma3_1b, read_gemma3(ONE)),
    ],
)
def test_a_model_is_the_one_that_its_authors_published(recipe: Callable[[], TrainRun], published: ModelConfig) -> None:
    assert canonical(recipe().model) == canonical(published)
