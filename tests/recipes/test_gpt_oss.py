"""The published size of gpt-oss."""

from dataclasses import replace

from megalith.config.moe import BalanceConfig
from megalith.models.gpt_oss import GPT_OSS
from megalith.plan.costs import active_parameters, num_parameters
from megalith.recipes.gpt_oss import gpt_oss_20b
from tests.models.test_gpt_oss import PUBLISHED


def test_the_model_is_the_one_that_its_authors_published() -> None:
    model = gpt_oss_20b().model
    assert model.moe is not None
    assert replace(model, moe=replace(model.moe, balance=BalanceConfig())) == GPT_OSS.read_config(PUBLISHED)
    assert (num_parameters(model), active_parameters(model)) == (20_914_757_184, 4_187_440_704)
