"""SmolLM."""

from megalith.models.smollm3 import read_config
from megalith.models.usual import canonical
from megalith.plan.costs import num_parameters
from megalith.recipes.smollm import smollm3_3b, smollm_135m
from tests.models.test_smollm3 import RAW


def test_smollm_has_its_published_number_of_parameters() -> None:
    assert num_parameters(smollm_135m().model) == 134_515_008


def test_smollm3_is_the_one_that_was_published() -> None:
    assert canonical(smollm3_3b().model) == canonical(read_config(RAW))
