"""The published size of Granite."""

from dataclasses import replace

from megalith.models.granite import read_config
from megalith.models.usual import canonical
from megalith.plan.costs import num_parameters
from megalith.recipes.granite import granite_2b
from tests.models.test_granite import RAW


def test_the_model_is_the_one_that_its_authors_published() -> None:
    assert canonical(granite_2b().model) == canonical(read_config(RAW))
    assert num_parameters(replace(granite_2b().model, vocab_multiple=1)) == 2_533_531_648, "without padded rows"
