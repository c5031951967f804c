"""The published size of OLMoE."""

from dataclasses import replace

from megalith.config.moe import BalanceConfig
from megalith.models.olmoe import read_config
from megalith.plan.costs import active_parameters, num_parameters
from megalith.recipes.olmoe import olmoe_7b
from tests.models.test_olmoe import RAW


def test_the_model_is_the_one_that_its_authors_published() -> None:
    model = olmoe_7b().model
    assert model.moe is not None
    assert replace(model, moe=replace(model.moe, balance=BalanceConfig())) == read_config(RAW)
    assert (num_parameters(model), active_parameters(model)) == (6_919_161_856, 1_282_017_280)
