"""First weights and muP of Megatron, as settings of ours."""

from megalith.config.model import ModelConfig, MuPConfig
from tests.megatron.conftest import Translate


def model(tiny: Translate, added: str) -> ModelConfig:
    run = tiny(added).run
    assert run is not None
    return run.model


def test_spreads_of_first_values_are_copied(tiny: Translate) -> None:
    found = model(tiny, "--embedding-init-method-std 0.5 --init-method-xavier-uniform")
    assert (found.embedding_init_std, found.init, found.init_std) == (0.5, "xavier_uniform", 0.02)


def test_mup_has_a_base_and_its_factors(tiny: Translate) -> None:
    assert model(tiny, "--mup-base-hidden-size 24").mup is None
    assert model(tiny, "--use-mup").mup == MuPConfig(base_hidden_size=96)
    assert model(tiny, "--use-mup --mup-width-mult 4").mup == MuPConfig(base_hidden_size=24)
    added = "--use-mup --mup-base-hidden-size 24 --mup-base-head-dim 8 --mup-attn-scale-power 0.5 "
    found = model(tiny, added + "--mup-embedding-mult 3 --mup-output-mult 0.5")
    assert found.mup == MuPConfig(base_hidden_size=24, base_head_dim=8, attention_scale_power=0.5)
    assert found.embedding_scale == 3.0
    assert found.logit_scale / found.width_factor() == 0.5, "what Megatron multiplies by"
