"""Arguments of Megatron-LM's training script: values stored in checkpoints and YAML files, and the
same arguments as words of a command line."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalith.config.model import MAX_LAYERS
from megalith.config.moe import MAX_EXPERTS
from megalith.errors import CheckpointError
from megalith.megatron.parse import MegatronFlag, read_flag_table

INVERTED: Mapping[str, str] = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-bias-gelu-fusion": "bias_gelu_fusion",
    "--no-yarn-correction-range-round-to-int": "yarn_correction_range_round_to_int",
    "--no-decoupled-weight-decay": "decoupled_weight_decay",
    "--no-check-for-nan-in-loss-and-grad": "check_for_nan_in_loss_and_grad",
    "--no-data-sharding": "data_sharding",
    "--no-mmap-bin-files": "mmap_bin_files",
    "--tokenizer-hf-no-include-special-tokens": "tokenizer_hf_include_special_tokens",
    "--no-pad-vocab-size": "pad_vocab_size",
}
"""Switches that set another argument to false."""

MAX_SIZE = 1 << 31
"""Limit of sizes. Heuristic: no dim of a tensor is larger."""

MAX_TEXT = 1 << 20
"""Limit of the characters of a text, such as block configs. Heuristic: a thousand layers."""

POSITIVE = frozenset(
    {
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "ffn_hidden_size",
        "kv_channels",
        "max_position_embeddings",
        "seq_length",
        "vocab_size",
        "padded_vocab_size",
        "make_vocab_size_divisible_by",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_model_parallel_size",
        "num_experts",
        "moe_ffn_hidden_size",
        "moe_router_topk",
        "moe_shared_expert_intermediate_size",
        "moe_latent_size",
        "mtp_num_layers",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "global_batch_size",
        "micro_batch_size",
    }
)
"""Arguments that are sizes. `num_experts` and `mtp_num_layers` may also be 0: none."""

LIMITS: Mapping[str, int] = {
    "num_layers": MAX_LAYERS,
    "mtp_num_layers": MAX_LAYERS,
    "num_experts": MAX_EXPERTS,
}
"""Smaller limits of sizes, of which plans make lists."""

LAYER_PATTERNS = frozenset({"moe_layer_freq", "no_rope_freq", "window_attn_skip_freq"})
"""Arguments that mark every Nth layer, or list the layers."""

_MAY_BE_ZERO = frozenset({"num_experts", "mtp_num_layers"})

_RENAMED: Mapping[str, tuple[str, ...]] = {
    "--norm-epsilon": ("norm_epsilon", "layernorm_epsilon"),
    "--num-layers": ("num_layers", "encoder_num_layers"),
    "--seq-length": ("seq_length", "encoder_seq_length"),
    "--min-loss-scale": ("min_loss_scale", "min_scale"),
    "--lr-decay-iters": ("lr_decay_iters", "total_iters"),
}
"""Flags whose argument has had several names."""


def read_fields(args: object) -> Mapping[str, Any]:  # of a parsed pickle
    """Return the fields of stored arguments: a record of argparse.Namespace, or a mapping.

    Raises:
        CheckpointError: it is neither.
    """
    fields = args if isinstance(args, Mapping) else getattr(args, "state", None)
    if isinstance(fields, Mapping) and all(isinstance(name, str) for name in fields):
        return fields
    raise CheckpointError(
        f"args is {type(args).__name__}, expected the arguments of Megatron-LM's training script "
        "(argparse.Namespace). Pass a checkpoint that its train loop saved."
    )


def drop_computed_fields(fields: Mapping[str, Any]) -> dict[str, Any]:  # of a parsed pickle
    """Return the fields without those that Megatron's training script computes from others, and
    which contradict these on a command line: the number of steps and the decay of a run measured in
    samples, and both ends of a constant weight decay."""
    fields = dict(fields)
    if fields.get("weight_decay_incr_style") in (None, "constant"):
        for name in ("start_weight_decay", "end_weight_decay"):
            if fields.get(name) == fields.get("weight_decay"):
                fields.pop(name, None)
    if fields.get("train_samples"):
        for name in ("train_iters", "lr_decay_iters", "lr_warmup_iters"):
            fields.pop(name, None)
    elif fields.get("train_iters"):
        for name in ("lr_decay_samples", "lr_warmup_samples"):
            fields.pop(name, None)
    if fields.get("lr_warmup_fraction") is not None:
        for name in ("lr_warmup_iters", "lr_warmup_samples"):
            fields.pop(name, None)
    return fields


@dataclass(slots=True)
class ArgumentWords:
    """Words of a command line while arguments are read, and what is wrong with them."""

    fields: Mapping[str, Any]  # of a parsed pickle
    words: list[str]
    problems: list[str]

    def find(self, flag: str) -> tuple[str, Any]:
        """Return the name and value of the argument of a flag; None if it is not stored."""
        default = flag.removeprefix("--").replace("-", "_")
        names = _RENAMED.get(flag, (default,))
        name = next((one for one in names if self.fields.get(one) is not None), names[0])
        return name, self.fields.get(name)

    def add(self, flag: MegatronFlag) -> None:
        """Add the words of a flag, unless its argument is missing or has the default value."""
        name, value = self.find(flag.flag)
        if flag.type == "switch":
            self._add_switch(flag.flag, name, value)
        elif value is not None and value != flag.default:
            text = self._format(flag, name, value)
            if text is not None:
                self.words += text

    def _add_switch(self, flag: str, name: str, value: object) -> None:
        candidates = [(name, value, True)]
        if (other := INVERTED.get(flag)) is not None:
            candidates.append((other, self.fields.get(other), False))
        for key, given, enabling in candidates:
            if given is None:
                continue
            if not isinstance(given, bool):
                self.problems.append(
                    f"args.{key}={given!r:.80}: expected true or false ({flag}). Correct the args."
                )
            elif given is enabling:
                self.words.append(flag)
                return

    def _format(self, flag: MegatronFlag, name: str, value: object) -> list[str] | None:
        """Return the words of a value; None, and a problem, if it has the wrong type."""
        items = list(value) if isinstance(value, list | tuple) else [value]
        expected = {"int": "a whole number", "float": "a number"}.get(flag.type, "text")
        is_plain = all(isinstance(one, str | int | float) for one in items)
        if flag.type == "int":
            is_plain = all(is_integer(one) for one in items) and not isinstance(value, list | tuple)
        elif flag.type == "float":
            is_plain = _is_finite(value)
        texts = [str(one) for one in items] if is_plain else []
        if not is_plain or any(text.startswith("--") or len(text) > MAX_TEXT for text in texts):
            self.problems.append(
                f"args.{name}={value!r:.80}: expected {expected} for {flag.flag}. Correct the args."
            )
            return None
        if name in POSITIVE and not self._check_size(name, items[0]):
            return None
        if name in LAYER_PATTERNS and not self._check_pattern(name, texts):
            return None
        if flag.type == "list":
            return [flag.flag, *texts]
        if isinstance(value, list | tuple):
            joined = ",".join(texts)
            texts = [f"[{joined}]" if flag.flag != "--window-size" else joined]
        return [f"{flag.flag}={texts[0]}"]

    def _check_pattern(self, name: str, texts: list[str]) -> bool:
        """Return whether the numbers of a layer pattern are in range; if not, that is a problem."""
        numbers = [text for text in texts if text.isdecimal()]
        if all(len(text) < 10 and int(text) <= MAX_LAYERS for text in numbers):
            return True
        self.problems.append(
            f"args.{name}={' '.join(texts)!r:.80}: expected numbers up to {MAX_LAYERS}. Correct "
            "the args."
        )
        return False

    def _check_size(self, name: str, value: object) -> bool:
        """Return whether a size is in range; if not, that is a problem."""
        smallest, largest = int(name not in _MAY_BE_ZERO), LIMITS.get(name, MAX_SIZE)
        if isinstance(value, int | float) and smallest <= value <= largest:
            return True
        self.problems.append(
            f"args.{name}={value!r:.80}: expected a size from {smallest} to {largest}. "
            "Correct the args."
        )
        return False


def _is_finite(value: object) -> bool:
    """Return whether a value is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def is_integer(value: object) -> bool:
    """Return whether a value is an integer and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


DERIVED = frozenset(
    {
        "rank",
        "world_size",
        "local_rank",
        "data_parallel_size",
        "transformer_pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "consumed_train_samples",
        "consumed_valid_samples",
        "skipped_train_samples",
        "iteration",
        "curr_iteration",
        "num_floating_point_operations_so_far",
        "params_dtype",
        "model_type",
        "do_train",
        "do_valid",
        "do_test",
        "start_time",
        "variable_seq_lengths",
    }
)
"""Arguments that the training script computes from others, or counts."""


def find_unknown_fields(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of arguments that no flag has, unless they are false or empty."""
    known = {*INVERTED.values(), *DERIVED}
    for flag in read_flag_table():
        for name in (flag.flag, *flag.aliases):
            dest = name.removeprefix("--").replace("-", "_")
            known |= {dest, dest.removeprefix("no_"), dest.removeprefix("disable_")}
    return tuple(
        name
        for name, value in fields.items()
        if name not in known and not (value is None or value is False or value in ("", 0))
    )
