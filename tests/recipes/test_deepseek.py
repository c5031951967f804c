"""The published size of DeepSeek-V3."""

from dataclasses import replace

from megalith.config.moe import BalanceConfig
from megalith.models.deepseek import DEEPSEEK_V3
from megalith.plan.costs import active_parameters, num_parameters
from megalith.recipes.deepseek import deepseek_v3
from tests.models.test_deepseek import RAW


def test_the_model_is_the_one_that_its_authors_published() -> None:
    """But for what came after the first training, a longer context; and for what the released settings leave out."""
    model, published = deepseek_v3().model, DEEPSEEK_V3.read_config(RAW)
    assert model.moe is not None and published.moe is not None
    assert published.mla is not None
    mla = replace(published.mla, yarn_mscale=None)
    own = replace(published, mla=mla, max_seq_len=4096, rope=model.rope, init_std=0.006, mtp=model.mtp)
    assert replace(model, moe=replace(model.moe, balance=BalanceConfig())) == own
    assert (model.rope.theta, model.rope.interleaved) == (published.rope.theta, published.rope.interleaved)
    alone = replace(model, mtp=replace(model.mtp, depths=0))
    assert (num_parameters(alone), active_parameters(alone)) == (671_026_404_352, 37_552_282_624)
