"""The published size of StarCoder2."""

from megalith.models.starcoder2 import read_config
from megalith.models.usual import canonical
from megalith.recipes.starcoder2 import starcoder2_3b
from tests.models.test_starcoder2 import RAW


def test_the_model_is_the_one_that_its_authors_published() -> None:
    published = read_config(RAW)
    assert canonical(starcoder2_3b().model) == canonical(published)
    assert starcoder2_3b().model.dropout == published.dropout
