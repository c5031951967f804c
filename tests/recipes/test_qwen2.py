"""The published sizes of Qwen2 and of Qwen1.5 with experts."""

from dataclasses import replace

from megalith.config.moe import BalanceConfig
from megalith.models import qwen2_moe
from megalith.models.qwen2 import read_config
from megalith.models.usual import canonical
from megalith.plan.costs import active_parameters, num_parameters
from megalith.recipes.qwen2 import qwen1_5_moe_a2_7b, qwen2_7b
from tests.models.test_qwen2 import LARGE
from tests.models.test_qwen2_moe import RAW


def test_the_model_is_the_one_that_its_authors_published() -> None:
    assert canonical(qwen2_7b().model) == canonical(read_config(LARGE))
    assert num_parameters(qwen2_7b().model) == 7_615_616_512


def test_the_mixture_is_the_one_that_its_authors_published() -> None:
    model = qwen1_5_moe_a2_7b().model
    assert model.moe is not None
    assert replace(model, moe=replace(model.moe, balance=BalanceConfig())) == qwen2_moe.read_config(RAW)
    assert (num_parameters(model), active_parameters(model)) == (14_315_784_192, 2_689_173_504)
    weight = RAW["router_aux_loss_coef"]
    assert model.moe.balance == BalanceConfig(batch=weight)
