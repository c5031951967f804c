"""YAML files of Megatron-LM's training script (`--yaml-cfg`) as words of a command line.

The sections `language_model` and `model_parallel` have the names of Megatron Core's configs; all
other names are those of arguments.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from megalith import storage
from megalith.config.fields import Plain
from megalith.config.tree import parse_yaml
from megalith.errors import ConfigError, raise_all
from megalith.megatron.parse import read_flag_table
from megalith.megatron.stored_arguments import ArgumentWords, find_unknown_fields

YAML_FLAG = "--yaml-cfg"

SECTIONS = ("language_model", "model_parallel")
"""Sections whose names are those of a config of Megatron Core."""

_ACTIVATIONS: Mapping[str, Mapping[str, Plain]] = {
    "swiglu": {"swiglu": True},
    "squaredrelu": {"squared_relu": True},
    "gelu": {},
}
"""`activation_func` as arguments."""

_RENAMED = {
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
}
"""Names of a config that differ from those of the arguments."""

_WITHOUT_ARGUMENT = frozenset(
    {
        "activation_func",
        "gated_linear_unit",
        "bias_activation_fusion",
        "apply_rope_fusion",
        "bias_dropout_fusion",
        "masked_softmax_fusion",
        "persist_layer_norm",
        "gradient_accumulation_fusion",
        "async_tensor_model_parallel_allreduce",
        "deallocate_pipeline_outputs",
        "batch_p2p_comm",
        "batch_p2p_sync",
        "overlap_p2p_comm",
        "attention_softmax_in_fp32",
        "memory_efficient_layer_norm",
        "perform_initialization",
        "use_cpu_initialization",
        "enable_autocast",
        "autocast_dtype",
        "cpu_offloading",
        "cpu_offloading_num_layers",
        "cpu_offloading_activations",
        "cpu_offloading_weights",
        "init_method",
        "output_layer_init_method",
        "apply_query_key_layer_scaling",
        "variable_seq_lengths",
        "num_microbatches_with_partial_activation_checkpoints",
    }
)
"""Fields of a config that change only speed or memory, follow from other fields, or are translated
together with them."""


def expand_yaml_flag(words: Sequence[str]) -> list[str]:
    """Return the arguments with `--yaml-cfg FILE` replaced by those in the file. Other arguments
    override them, whereas Megatron ignores these.

    Raises:
        ConfigError: the file cannot be read, or contains values that cannot be arguments.
    """
    words = list(words)
    if YAML_FLAG not in words and not any(word.startswith(f"{YAML_FLAG}=") for word in words):
        return words
    index = next(i for i, word in enumerate(words) if word.partition("=")[0] == YAML_FLAG)
    name, equals, path = words[index].partition("=")
    rest = words[index + 1 :]
    if not equals:
        if not rest or rest[0].startswith("--"):
            raise ConfigError(f"{name} has no value. Use {name} FILE.")
        path, *rest = rest
    if any(word.partition("=")[0] == YAML_FLAG for word in rest):
        raise ConfigError(f"{name} is given twice. Use one file.")
    return [*read_yaml_words(Path(path)), *words[:index], *rest]


def read_yaml_words(path: Path) -> list[str]:
    """Return the arguments in a YAML file of Megatron as words of a command line.

    Raises:
        ConfigError: the file cannot be read, or contains values that cannot be arguments; all of
            them are named.
    """
    try:
        data = parse_yaml(storage.read_text(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{YAML_FLAG} {path} cannot be read: {error}. Pass a YAML file of Megatron."
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{YAML_FLAG} {path} is not YAML: {error}. Pass a YAML file of Megatron."
        ) from None
    if not isinstance(data, dict):
        raise ConfigError(
            f"{YAML_FLAG} {path} contains {type(data).__name__}: expected a mapping of arguments, "
            f"with the sections {' and '.join(SECTIONS)}."
        )
    problems: list[str] = []
    word_list = ArgumentWords(_to_arguments(data, problems), [], problems)
    for flag in read_flag_table():
        if flag.program != "train" or flag.type == "file" or flag.flag == YAML_FLAG:
            continue
        if flag.verdict == "mapped" or flag.type == "switch" or flag.effect != "none":
            word_list.add(flag)
    unknown = [name for name in find_unknown_fields(word_list.fields) if name not in SECTIONS]
    problems += [
        f"{name}: Megatron has no such argument. Remove it, or correct its name."
        for name in unknown
    ]
    raise_all([f"{YAML_FLAG} {path}: {problem}" for problem in problems])
    return word_list.words


def _to_arguments(data: Mapping[str, Plain], problems: list[str]) -> dict[str, Plain]:
    """Return the values of a YAML file by names of arguments."""
    arguments: dict[str, Plain] = {}
    for name, value in data.items():
        if name not in SECTIONS:
            arguments[str(name)] = value
        elif not isinstance(value, dict):
            problems.append(
                f"{name}={value!r:.60}: expected a mapping. Indent its fields below it."
            )
        else:
            arguments |= _section_arguments(value, problems)
    return arguments


def _section_arguments(section: Mapping[str, Plain], problems: list[str]) -> dict[str, Plain]:
    """Return the fields of a config as arguments."""
    arguments = {
        _RENAMED.get(str(name), str(name)): value
        for name, value in section.items()
        if name not in _WITHOUT_ARGUMENT
    }
    if "activation_func" in section:
        activation, gated = section["activation_func"], section.get("gated_linear_unit")
        if not isinstance(activation, str) or activation not in _ACTIVATIONS:
            problems.append(
                f"language_model.activation_func={activation!r:.60}: expected one of "
                f"{', '.join(_ACTIVATIONS)}."
            )
        elif gated and activation != "swiglu":
            problems.append(
                f"language_model.gated_linear_unit={gated} with activation_func={activation}: only "
                "swiglu is gated. Use activation_func: swiglu."
            )
        else:
            arguments |= _ACTIVATIONS[activation]
        if section.get("bias_activation_fusion") is False:
            arguments["no_bias_gelu_fusion"] = True
    groups = section.get("num_query_groups")
    if groups is not None and groups != section.get("num_attention_heads"):
        arguments["group_query_attention"] = True
    return arguments
