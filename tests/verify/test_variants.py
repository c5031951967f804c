"""The tiny models of the matrix: together they have every choice, and each differs from a plain
model where it says."""

from dataclasses import fields

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.config.tree import differences
from megalith.rules.run import model_problems
from megalith.verify.matrix import MIXTURES, PLAIN, VARIANTS
from megalith.verify.ranks import layout_case

SIZES = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "ffn_hidden_size",
    "max_seq_len",
    "pad_vocab_to_multiple_of",
    "init_std",
    "norm_eps",
)


def test_every_layer_setting_is_in_a_tiny_model() -> None:
    models = [*VARIANTS.values(), *MIXTURES.values()]
    changed = {path.split(".")[0] for model in models for path, _, _ in differences(PLAIN, model)}
    choices = {field.name for field in fields(ModelConfig)} - {*SIZES, "plugins"}
    assert choices - changed <= {"mla", "mtp", "block"} | changed
    assert choices - changed == set(), choices - changed


def test_every_tiny_model_is_valid() -> None:
    for name, model in (VARIANTS | MIXTURES).items():
        run: TrainRun = layout_case(model, ParallelConfig(), 1).run
        assert model_problems(run) == [], name


def test_every_moe_setting_is_in_a_tiny_model() -> None:
    """But those for measuring alone, and those that a family decides."""
    mixtures = [model.moe for model in MIXTURES.values() if model.moe is not None]
    plain = MoEConfig(num_experts=4, ffn_hidden_size=10)
    changed = {path for moe in mixtures for path, _, _ in differences(plain, moe)}
    parts = {"router": RouterConfig, "aux_loss": AuxLossConfig, "capacity": CapacityConfig}
    choices = {f"{part}.{field.name}" for part, kind in parts.items() for field in fields(kind)}
    choices |= {field.name for field in fields(MoEConfig)} - set(parts)
    assert choices - changed == {
        "router.dtype",
        "router.force_load_balancing",
        "router.force_biased",
    }
