"""Recipes of published models: each has the settings and the number of parameters that its authors
published."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig
from megalith.config.train import TrainRun
from megalith.hf import (
    gemma,
    gemma2,
    gemma3,
    gpt2,
    granite,
    llama,
    mistral,
    mixtral,
    neox,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
    starcoder2,
)
from megalith.hf.config_fields import canonical
from megalith.hf.gpt_oss import GPT_OSS
from megalith.hf.llama4 import LLAMA4
from megalith.plan.costs import active_parameters, num_parameters
from megalith.recipes import recipes
from megalith.recipes.published import pretraining, warmed_cosine
from tests.cases import loop_over
from tests.hf import (
    test_gemma,
    test_gemma2,
    test_gemma3,
    test_gpt2,
    test_gpt_oss,
    test_granite,
    test_llama,
    test_llama4,
    test_mistral,
    test_mixtral,
    test_neox,
    test_olmo2,
    test_olmoe,
    test_phi3,
    test_qwen2,
    test_qwen2_moe,
    test_qwen3,
    test_qwen3_moe,
    test_smollm3,
    test_starcoder2,
)

RawConfig = dict[str, Any]  # config.json as published
ReadConfig = Callable[[RawConfig], ModelConfig]

DENSE: dict[str, tuple[ReadConfig, RawConfig]] = {
    "gemma_2b": (gemma.read_config, test_gemma.SMALL),
    "gemma_7b": (gemma.read_config, test_gemma.LARGE),
    "gemma2_2b": (gemma2.read_config, test_gemma2.SMALL),
    "gemma2_9b": (gemma2.read_config, test_gemma2.MIDDLE),
    "gemma3_270m": (gemma3.read_config, test_gemma3.TINY),
    "gemma3_1b": (gemma3.read_config, test_gemma3.ONE),
    "gpt2_124m": (gpt2.read_config, test_gpt2.RAW),
    "granite_2b": (granite.read_config, test_granite.RAW),
    "llama2_7b": (llama.read_config, test_llama.PUBLISHED["Llama-2-7b"][0]),
    "mistral_7b": (mistral.read_config, test_mistral.V1),
    "olmo2_1b": (olmo2.read_config, test_olmo2.SMALL),
    "olmo2_7b": (olmo2.read_config, test_olmo2.MIDDLE),
    "olmo2_13b": (olmo2.read_config, test_olmo2.LARGE),
    "phi3_mini": (phi3.read_config, test_phi3.RAW),
    "pythia_160m": (neox.read_config, test_neox.RAW),
    "qwen2_7b": (qwen2.read_config, test_qwen2.LARGE),
    "qwen3_0_6b": (qwen3.read_config, test_qwen3.SMALL),
    "qwen3_8b": (qwen3.read_config, test_qwen3.LARGE),
    "smollm3_3b": (smollm3.read_config, test_smollm3.RAW),
    "starcoder2_3b": (starcoder2.read_config, test_starcoder2.RAW),
}
"""Models without experts, by the name of their recipe."""


class Mixture(NamedTuple):
    """A published mixture of experts."""

    read_config: ReadConfig
    raw: RawConfig
    num_parameters: int
    num_active: int


MIXTURES = {
    "qwen1_5_moe_a2_7b": Mixture(
        qwen2_moe.read_config, test_qwen2_moe.RAW, 14_315_784_192, 2_689_173_504
    ),
    "qwen3_30b_a3b": Mixture(
        qwen3_moe.read_config, test_qwen3_moe.RAW, 30_532_122_624, 3_353_032_704
    ),
    "gpt_oss_20b": Mixture(
        GPT_OSS.read_config, test_gpt_oss.PUBLISHED, 20_914_757_184, 4_187_440_704
    ),
    "llama4_scout": Mixture(
        LLAMA4.read_config, test_llama4.PUBLISHED, 107_769_861_120, 17_172_894_720
    ),
    "mixtral_8x7b": Mixture(mixtral.read_config, test_mixtral.RAW, 46_702_792_704, 12_879_925_248),
    "olmoe_7b": Mixture(olmoe.read_config, test_olmoe.RAW, 6_919_161_856, 1_282_017_280),
}
"""DeepSeek's have a file of their own."""

NUM_PARAMETERS = {
    "gemma_2b": 2_506_172_416,
    "gemma_7b": 8_537_680_896,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "llama2_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen2_7b": 7_615_616_512,
    "smollm_135m": 134_515_008,
}
"""As published."""


def model_of(recipe: str) -> ModelConfig:
    run: TrainRun = recipes()[recipe]()
    return run.model


@loop_over("recipe", DENSE)
def test_recipe_has_the_published_model_config(recipe: str) -> None:
    read_config, raw = DENSE[recipe]
    published = read_config(raw)
    assert canonical(model_of(recipe)) == canonical(published)
    assert model_of(recipe).dropout == published.dropout


@loop_over("recipe", MIXTURES)
def test_recipe_has_the_published_mixture_of_experts(recipe: str) -> None:
    model, published = model_of(recipe), MIXTURES[recipe]
    assert model.moe is not None
    without_losses = replace(model, moe=replace(model.moe, aux_loss=AuxLossConfig()))
    assert without_losses == published.read_config(published.raw)
    assert (num_parameters(model), active_parameters(model)) == (
        published.num_parameters,
        published.num_active,
    )


@loop_over("recipe", NUM_PARAMETERS)
def test_recipe_has_the_published_number_of_parameters(recipe: str) -> None:
    assert num_parameters(model_of(recipe)) == NUM_PARAMETERS[recipe]


def test_granite_2b_has_the_published_number_of_parameters_without_padding_of_the_vocabulary() -> (
    None
):
    assert (
        num_parameters(replace(model_of("granite_2b"), pad_vocab_to_multiple_of=1)) == 2_533_531_648
    )


def test_published_number_of_parameters_of_llama_2_7b_is_the_one_of_its_weights() -> None:
    assert test_llama.PUBLISHED["Llama-2-7b"][1] == NUM_PARAMETERS["llama2_7b"]


def test_qwen_1_5_moe_has_the_published_weight_of_the_balance_loss() -> None:
    moe = model_of("qwen1_5_moe_a2_7b").moe
    assert moe is not None
    assert moe.aux_loss == AuxLossConfig(batch_coeff=test_qwen2_moe.RAW["router_aux_loss_coef"])


def test_a_run_has_the_models_vocabulary_and_trains_in_bf16_on_made_up_tokens() -> None:
    model = ModelConfig(
        vocab_size=9, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, ffn_hidden_size=8
    )
    run = pretraining("x", model, warmed_cosine(1e-3), seq_len=16)
    assert (run.tokenizer.vocab_size, run.precision.params, run.data.mock, run.train.seq_len) == (
        9,
        "bf16",
        True,
        16,
    )
    assert (run.schedule.lr, run.schedule.min_lr, run.schedule.warmup_steps) == (1e-3, 1e-4, 2000)
