"""The published size of GPT-2."""

from megalith.models.gpt2 import read_config
from megalith.models.usual import canonical
from megalith.recipes.gpt2 import gpt2_124m
from tests.models.test_gpt2 import RAW


def test_the_model_is_the_one_that_its_authors_published() -> None:
    published = read_config(RAW)
    assert canonical(gpt2_124m().model) == canonical(published)
    assert gpt2_124m().model.dropout == published.dropout
