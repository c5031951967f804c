"""The published sizes of Mistral."""

from collections.abc import Callable

import pytest

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.models.mistral import read_config
from megalith.models.usual import canonical
from megalith.recipes.mistral import mistral_7b
from tests.models.test_mistral import V1


@pytest.mark.parametrize(
    ("recipe", "published"),
    [(mistral_7b, read_config(V1))],
)
def test_a_model_is_the_one_that_its_authors_published(recipe: Callable[[], TrainRun], published: ModelConfig) -> None:
    assert canonical(recipe().model) == canonical(published)
