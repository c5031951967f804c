"""Recipes: complete run configs, one module per model family and one function per run."""

from collections.abc import Callable, Mapping
from pathlib import Path

from megalith.config.data import DataConfig
from megalith.config.plugins import reject_module_names
from megalith.config.train import TrainRun, load_run
from megalith.config.tree import Override, apply_overrides
from megalith.errors import ConfigError, did_you_mean
from megalith.recipes.deepseek import deepseek_v2, deepseek_v2_lite, deepseek_v3
from megalith.recipes.gemma import gemma2_2b, gemma2_9b, gemma3_1b, gemma3_270m, gemma_2b, gemma_7b
from megalith.recipes.gpt import gpt2_124m, gpt_oss_20b, pythia_160m
from megalith.recipes.llama import (
    llama2_7b,
    llama2_70b,
    llama3_1b,
    llama3_8b,
    llama3_70b,
    llama3_405b,
    llama4_scout,
)
from megalith.recipes.mistral import mistral_7b, mixtral_8x7b
from megalith.recipes.others import (
    granite_2b,
    olmo2_1b,
    olmo2_7b,
    olmo2_13b,
    olmoe_7b,
    phi3_mini,
    smollm3_3b,
    smollm_135m,
    starcoder2_3b,
)
from megalith.recipes.qwen import qwen1_5_moe_a2_7b, qwen2_7b, qwen3_0_6b, qwen3_8b, qwen3_30b_a3b
from megalith.recipes.small import (
    llama_6m,
    llama_29m,
    llama_125m,
    llama_350m,
    lora_tiny,
    moe_tiny,
    quickstart,
    sft_tiny,
    tiny_cpu,
)

_RECIPES = (
    tiny_cpu,
    sft_tiny,
    lora_tiny,
    moe_tiny,
    quickstart,
    llama_6m,
    llama_29m,
    llama_125m,
    gpt2_124m,
    smollm_135m,
    pythia_160m,
    gemma3_270m,
    llama_350m,
    qwen3_0_6b,
    gemma3_1b,
    llama3_1b,
    olmo2_1b,
    gemma_2b,
    granite_2b,
    gemma2_2b,
    starcoder2_3b,
    smollm3_3b,
    phi3_mini,
    llama2_7b,
    olmoe_7b,
    mistral_7b,
    olmo2_7b,
    qwen2_7b,
    llama3_8b,
    qwen3_8b,
    gemma_7b,
    gemma2_9b,
    olmo2_13b,
    qwen1_5_moe_a2_7b,
    deepseek_v2_lite,
    gpt_oss_20b,
    qwen3_30b_a3b,
    mixtral_8x7b,
    llama2_70b,
    llama3_70b,
    llama4_scout,
    deepseek_v2,
    llama3_405b,
    deepseek_v3,
)  # smallest first


def recipes() -> dict[str, Callable[[], TrainRun]]:
    """Return all recipes by name, smallest first."""
    return {recipe.__name__: recipe for recipe in _RECIPES}


def resolve(target: str) -> TrainRun:
    """Return the run for a command-line target: the name of a recipe, a YAML file, or the folder of
    a run.

    Raises:
        ConfigError: the target is none of these, or the file does not describe a run.
    """
    if target in recipes():
        return recipes()[target]()
    path = Path(target)
    if path.is_dir():
        if not (path / "config.yaml").is_file() and (path / "config.json").is_file():
            raise ConfigError(
                f"{target} is a Hugging Face folder, which has no settings of a run. Run `megalith "
                f"convert {target} NAME` and train NAME, or use a recipe of the same model with "
                "--checkpoint.load "
                f"{target}."
            )
        if not (path / "config.yaml").is_file():
            raise ConfigError(
                f"{target} has no config.yaml, so it is not the folder of a run. Use the folder "
                "of a "
                f"run, such as runs/NAME, the name of a recipe, or a YAML file."
            )
        return load_run(path / "config.yaml")
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return load_run(path)
    advice = did_you_mean(target, recipes()) or f" Recipes: {', '.join(recipes())}."
    raise ConfigError(
        f"{target} is neither a recipe nor a file.{advice} Use the name of a recipe or the path "
        "of a "
        "YAML file."
    )


def resolve_run(target: str, overrides: Mapping[str, Override]) -> TrainRun:
    """Return the run for a command-line target after overrides, for commands that read the run's
    data.

    The cache is written to, and a YAML file may come from an untrusted source. So in a file,
    data.cache_path must be below the working directory or the folder of its data; on the command
    line it may be any folder.

    Raises:
        ConfigError: as `resolve` and `apply_overrides`, or the file sets another cache folder or
            names a module of a plug-in.
    """
    run = apply_overrides(resolve(target), overrides)
    if target not in recipes():
        reject_module_names(run, target, overrides.keys())
    if (
        target in recipes()
        or run.data.cache_path is None
        or {"data", "data.cache_path"} & overrides.keys()
    ):
        return run
    cache = Path(run.data.cache_path).resolve()
    if any(
        cache.is_relative_to(folder.resolve()) for folder in (Path.cwd(), *_data_folders(run.data))
    ):
        return run
    raise ConfigError(
        f"{target}: data.cache_path={run.data.cache_path} is neither below the working directory "
        f"{Path.cwd()} nor "
        "below a folder of the data. A YAML file may not set another folder to write to. Pass "
        f"--data.cache_path {run.data.cache_path} to use it, or remove it to keep the "
        "cache beside the data."
    )


def _data_folders(data: DataConfig) -> list[Path]:
    """Return the folders of the token stores and conversations that exist."""
    stores = (*data.path, *data.train_path, *data.valid_path, *data.test_path)
    files = [Path(f"{prefix}.idx") for prefix in stores] + [Path(path) for path in data.sft.path]
    return [file.parent for file in files if file.is_file()] + [
        file for file in files if file.is_dir()
    ]
