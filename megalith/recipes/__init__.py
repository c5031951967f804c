"""Recipes: complete run configs, one YAML file per model family with one entry per run."""

import os
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from megalith.config.compose import compose
from megalith.config.data import DataConfig
from megalith.config.plugins import reject_module_names
from megalith.config.train import CONFIG_FILE, TrainRun, load_run
from megalith.config.tree import (
    Override,
    apply_overrides,
    flatten,
    flatten_plain,
    from_dict,
    parse_yaml,
)
from megalith.errors import ConfigError, did_you_mean

_FAMILIES = {
    "tiny_cpu": "small",
    "sft_tiny": "small",
    "lora_tiny": "small",
    "moe_tiny": "small",
    "quickstart": "small",
    "llama_6m": "small",
    "llama_29m": "small",
    "llama_125m": "small",
    "gpt2_124m": "gpt",
    "smollm_135m": "others",
    "pythia_160m": "gpt",
    "gemma3_270m": "gemma",
    "llama_350m": "small",
    "qwen3_0_6b": "qwen",
    "gemma3_1b": "gemma",
    "llama3_1b": "llama",
    "olmo2_1b": "others",
    "gemma_2b": "gemma",
    "granite_2b": "others",
    "gemma2_2b": "gemma",
    "starcoder2_3b": "others",
    "smollm3_3b": "others",
    "phi3_mini": "others",
    "llama2_7b": "llama",
    "olmoe_7b": "others",
    "mistral_7b": "mistral",
    "olmo2_7b": "others",
    "qwen2_7b": "qwen",
    "llama3_8b": "llama",
    "qwen3_8b": "qwen",
    "gemma_7b": "gemma",
    "gemma2_9b": "gemma",
    "olmo2_13b": "others",
    "qwen1_5_moe_a2_7b": "qwen",
    "deepseek_v2_lite": "deepseek",
    "gpt_oss_20b": "gpt",
    "qwen3_30b_a3b": "qwen",
    "mixtral_8x7b": "mistral",
    "llama2_70b": "llama",
    "llama3_70b": "llama",
    "llama4_scout": "llama",
    "deepseek_v2": "deepseek",
    "llama3_405b": "llama",
    "deepseek_v3": "deepseek",
}
"""File of each recipe, without the suffix; smallest first."""


@lru_cache
def _read_family(family: str) -> dict[str, Any]:  # Any: entries of a YAML file of this package
    entries = parse_yaml(Path(__file__).with_name(f"{family}.yaml").read_text(encoding="utf-8"))
    assert isinstance(entries, dict), family
    return entries


def build_recipe(name: str) -> TrainRun:
    """Return the run of a recipe."""
    return from_dict(TrainRun, {"name": name, **_read_family(_FAMILIES[name])[name]["run"]})


def describe_recipe(name: str) -> str:
    """Return the description of a recipe; its first paragraph is a summary."""
    return str(_read_family(_FAMILIES[name])[name]["description"])


def recipes() -> dict[str, Callable[[], TrainRun]]:
    """Return all recipes by name, smallest first."""
    return {name: partial(build_recipe, name) for name in _FAMILIES}


def resolve(target: str) -> TrainRun:
    """Return the run for a command-line target: the name of a recipe, a YAML file, or the folder of
    a run.

    Raises:
        ConfigError: the target is none of these, or the file does not describe a run.
    """
    if target in _FAMILIES:
        return build_recipe(target)
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
    advice = did_you_mean(target, _FAMILIES) or f" Recipes: {', '.join(_FAMILIES)}."
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
    if target not in _FAMILIES:
        reject_module_names(run, target, overrides.keys())
    if (
        target in _FAMILIES
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


class SettingSource(NamedTuple):
    """A setting of a run, its value, and where the value comes from."""

    path: str
    value: Any  # JSON
    source: str
    """`default`, `recipe NAME`, a file (with its environment variables), or `command line`."""


def trace_settings(target: str, overrides: Mapping[str, Override]) -> list[SettingSource]:
    """Return every setting of the run for a command-line target after overrides, sorted, each with
    its source.

    Raises:
        ConfigError: as `resolve_run`.
    """
    run = resolve_run(target, overrides)
    sources = _given_sources(target) | dict.fromkeys(overrides, "command line")
    return sorted(
        SettingSource(path, value, _nearest_source(sources, path))
        for path, value in flatten(run).items()
    )


def _given_sources(target: str) -> dict[str, str]:
    """Return the source of each setting that a target sets, by dotted path."""
    if target in _FAMILIES:
        run = _read_family(_FAMILIES[target])[target]["run"]
        return dict.fromkeys(["name", *flatten_plain(run)], f"recipe {target}")
    path = Path(target)
    if path.is_dir():
        path = path / CONFIG_FILE
    if path.name == CONFIG_FILE:
        return dict.fromkeys(flatten(load_run(path)), str(path))
    return compose(path, TrainRun, os.environ).sources


def _nearest_source(sources: Mapping[str, str], path: str) -> str:
    """Return the source of a setting, or of the innermost section around it that was set as a
    whole."""
    while path not in sources:
        path, dot, _ = path.rpartition(".")
        if not dot:
            return "default"
    return sources[path]


def _data_folders(data: DataConfig) -> list[Path]:
    """Return the folders of the token stores and conversations that exist."""
    phases = (prefix for phase in data.phases for prefix in phase.path)
    stores = (*data.path, *data.train_path, *data.valid_path, *data.test_path, *phases)
    files = [Path(f"{prefix}.idx") for prefix in stores] + [Path(path) for path in data.sft.path]
    return [file.parent for file in files if file.is_file()] + [
        file for file in files if file.is_dir()
    ]
