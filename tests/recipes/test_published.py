"""Recipes of published models: each has the settings and the number of parameters that its authors
published."""

from dataclasses import replace

from megalith.config.model import ModelConfig
from megalith.config.moe import AuxLossConfig
from megalith.config.train import TrainRun
from megalith.hf.families import LLAMA4
from megalith.hf.family import canonical
from megalith.plan.costs import active_parameters, num_parameters
from megalith.recipes import recipes
from tests.cases import loop_over
from tests.hf import test_llama4
from tests.hf.published import PUBLISHED, Published

DENSE = (
    "gemma_2b",
    "gemma_7b",
    "gemma2_2b",
    "gemma2_9b",
    "gemma3_270m",
    "gemma3_1b",
    "gpt2_124m",
    "granite_2b",
    "llama2_7b",
    "mistral_7b",
    "olmo2_1b",
    "olmo2_7b",
    "olmo2_13b",
    "phi3_mini",
    "pythia_160m",
    "qwen2_7b",
    "qwen3_0_6b",
    "qwen3_8b",
    "smollm3_3b",
    "starcoder2_3b",
)
"""Recipes of models without experts."""

LLAMA4_SCOUT = Published(LLAMA4, test_llama4.PUBLISHED, 107_769_861_120)

NUM_ACTIVE = {
    "qwen1_5_moe_a2_7b": 2_689_173_504,
    "qwen3_30b_a3b": 3_353_032_704,
    "gpt_oss_20b": 4_187_440_704,
    "llama4_scout": 17_172_894_720,
    "mixtral_8x7b": 12_879_925_248,
    "olmoe_7b": 1_282_017_280,
}
"""Active parameters of models with experts, by recipe; `test_deepseek` has those of DeepSeek."""

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
    published = PUBLISHED[recipe].family.read_config(PUBLISHED[recipe].raw)
    assert canonical(model_of(recipe)) == canonical(published)
    assert model_of(recipe).dropout == published.dropout


@loop_over("recipe", NUM_ACTIVE)
def test_recipe_has_the_published_mixture_of_experts(recipe: str) -> None:
    model = model_of(recipe)
    published = LLAMA4_SCOUT if recipe == "llama4_scout" else PUBLISHED[recipe]
    assert model.moe is not None
    without_losses = replace(model, moe=replace(model.moe, aux_loss=AuxLossConfig()))
    assert without_losses == published.family.read_config(published.raw)
    assert (num_parameters(model), active_parameters(model)) == (
        published.num_parameters,
        NUM_ACTIVE[recipe],
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
    assert PUBLISHED["llama2_7b"].num_parameters == NUM_PARAMETERS["llama2_7b"]


def test_qwen_1_5_moe_has_the_published_weight_of_the_balance_loss() -> None:
    moe = model_of("qwen1_5_moe_a2_7b").moe
    assert moe is not None
    assert moe.aux_loss == AuxLossConfig(
        batch_coeff=PUBLISHED["qwen1_5_moe_a2_7b"].raw["router_aux_loss_coef"]
    )


def test_published_recipes_train_in_bf16_on_mock_data_of_the_vocabulary() -> None:
    for name in (*DENSE, *NUM_ACTIVE):
        run = recipes()[name]()
        assert run.name == name and run.data.mock
        assert run.tokenizer.vocab_size == run.model.vocab_size, name
        assert run.precision.params == "bf16", name
