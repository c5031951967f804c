"""The published sizes of Gemma."""

from collections.abc import Callable

import pytest

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.models.gemma import read_config as read_gemma
from megalith.models.gemma2 import read_config as read_gemma2
from megalith.models.gemma3 import read_config as read_gemma3
from megalith.models.usual import canonical
from megalith.plan.costs import num_parameters
from megalith.recipes.gemma import gemma2_2b, gemma2_9b, gemma3_1b, gemma3_270m, gemma_2b, gemma_7b
from tests.models import test_gemma
from tests.models.test_gemma2 import MIDDLE, SMALL
from tests.models.test_gemma3 import ONE, TINY


@pytest.mark.parametrize(
    ("recipe", "published"),
    [
        (gemma_2b, read_gemma(test_gemma.SMALL)),
        (gemma_7b, read_gemma(test_gemma.LARGE)),
        (gemma2_2b, read_gemma2(SMALL)),
        (gemma2_9b, read_gemma2(MIDDLE)),
        (gemma3_270m, read_gemma3(TINY)),
        (gemma3_1b, read_gemma3(ONE)),
    ],
)
def test_a_model_is_the_one_that_its_authors_published(recipe: Callable[[], TrainRun], published: ModelConfig) -> None:
    assert canonical(recipe().model) == canonical(published)


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        (gemma_2b, 2_506_172_416),
        (gemma_7b, 8_537_680_896),
        (gemma2_2b, 2_614_341_888),
        (gemma2_9b, 9_241_705_984),
        (gemma3_270m, 268_098_176),
        (gemma3_1b, 999_885_952),
    ],
)
def test_a_model_has_its_published_number_of_parameters(recipe: Callable[[], TrainRun], parameters: int) -> None:
    assert num_parameters(recipe().model) == parameters
