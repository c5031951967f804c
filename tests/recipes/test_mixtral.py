"""The published size of Mixtral."""

from dataclasses import replace

from megalith.config.moe import BalanceConfig
from megalith.models.mixtral import read_config
from megalith.plan.costs import active_parameters, num_parameters
from megalith.recipes.mixtral import mixtral_8x7b
from tests.models.test_mixtral import RAW


def test_the_model_is_the_one_that_its_authors_published() -> None:
    model = mixtral_8x7b().model
    assert model.moe is not None
    assert replace(model, moe=replace(model.moe, balance=BalanceConfig())) == read_config(RAW)
    assert (num_parameters(model), active_parameters(model)) == (46_702_792_704, 12_879_925_248)
