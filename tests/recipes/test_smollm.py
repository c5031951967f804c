"""SmolLM."""

from megalith.plan.costs import num_parameters
from megalith.recipes.smollm import smollm_135m


def test_smollm_has_its_published_number_of_parameters() -> None:
    assert num_parameters(smollm_135m().model) == 134_515_008
