"""The published size of Pythia."""

from megalith.models.neox import read_config
from megalith.models.usual import canonical
from megalith.recipes.pythia import pythia_160m
from tests.models.test_neox import RAW


def test_the_model_is_the_one_that_its_authors_published() -> None:
    published = read_config(RAW)
    assert canonical(pythia_160m().model) == canonical(published)
    assert pythia_160m().model.dropout == published.dropout
