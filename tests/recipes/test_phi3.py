"""The published size of Phi-3."""

from megalith.models.phi3 import read_config
from megalith.models.usual import canonical
from megalith.recipes.phi3 import phi3_mini
from tests.models.test_phi3 import RAW


def test_the_model_is_the_one_that_its_authors_published() -> None:
    published = read_config(RAW)
    assert canonical(phi3_mini().model) == canonical(published)
    assert phi3_mini().model.dropout == published.dropout
