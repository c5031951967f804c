"""The published size of Llama 4 Scout."""

from dataclasses import replace

from megalith.config.moe import BalanceConfig
from megalith.models.llama4 import LLAMA4
from megalith.plan.costs import active_parameters, num_parameters
from megalith.recipes.llama4 import llama4_scout
from tests.models.test_llama4 import PUBLISHED


def test_the_model_is_the_one_that_its_authors_published() -> None:
    model = llama4_scout().model
    assert model.moe is not None
    assert replace(model, moe=replace(model.moe, balance=BalanceConfig())) == LLAMA4.read_config(PUBLISHED)
    assert (num_parameters(model), active_parameters(model)) == (107_769_861_120, 17_172_894_720)
