"""Non-tensor state of a Megatron checkpoint (`common.pt`): arguments of the run, optimizer
settings, state of the schedules.
"""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch

from megalith.config.data import TokenizerConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import ScheduleConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.megatron.data import GPT2
from megalith.observe.machine import DTYPES
from megalith.optim.schedule import (
    ScheduleLengths,
    learning_rate,
    schedule_lengths,
    weight_decay,
)
from megalith.plan.batch_schedule import build_batch_schedule

CHECKPOINT_VERSION = 3.0
"""Version of the order of QKV rows: per KV group its query heads, key and value."""

SHARDING_TYPE = "fully_reshardable"
"""Megatron's layout of optimizer state with one tensor per parameter, which any parallel layout
loads."""

CONTENT_METADATA = {
    "distrib_optim_sharding_type": SHARDING_TYPE,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}

DECAY_STYLES = {"inverse_square_root": "inverse-square-root", "wsd": "WSD"}
"""Megatron's names of schedules that differ from Megalith's."""


def build_common_state(
    args: Mapping[str, Any],
    *,
    run: TrainRun | None,
    state: Mapping[str, Any],
    with_optimizer: bool,
) -> dict[str, Any]:  # Any: values of pickle files and JSON
    """Return the contents of `common.pt`.

    args: Megatron's arguments, plain values by name. run: settings of the run that trained the
    weights; None: only weights are stored. state: `state.json` of its checkpoint.
    """
    common: dict[str, Any] = {
        "args": Namespace(**args),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": args["iteration"],
        "num_floating_point_operations_so_far": 0,
        "content_metadata": CONTENT_METADATA,
    }
    if run is None:
        return common
    lengths = _schedule_lengths(run)
    samples = int(state["train"]["scheduled_samples"])
    common["opt_param_scheduler"] = _build_scheduler_state(run.schedule, samples, lengths)
    if with_optimizer:
        common["optimizer"] = _build_optimizer_state(run, samples, state)
    return common


def build_training_args(run: TrainRun) -> dict[str, Any]:  # Any: values of argparse
    """Return Megatron's arguments for batches, schedules, optimizer, precision and layout."""
    return {
        **_batch_args(run),
        **_schedule_args(run),
        **_optimizer_args(run),
        **build_layout_args(run.parallel),
    }


def build_layout_args(parallel: ParallelConfig) -> dict[str, Any]:
    """Return Megatron's arguments for the layout of ranks; other layouts load the files, too."""
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "sequence_parallel": parallel.sp,
        "ckpt_format": "torch_dist",
    }


def build_vocabulary_args(model: ModelConfig, tp: int) -> dict[str, Any]:
    """Return Megatron's arguments for the rows of the vocabulary, which it pads to a multiple of a
    number times tp."""
    multiple = model.pad_vocab_to_multiple_of
    return {
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.padded_vocab_size(),
        "make_vocab_size_divisible_by": multiple // tp if multiple % tp == 0 else multiple,
    }


def build_dtype_args(dtype: torch.dtype) -> dict[str, Any]:
    """Return Megatron's arguments for the dtype of weights."""
    return {
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
    }


def build_tokenizer_args(tokenizer: TokenizerConfig) -> dict[str, Any]:
    """Return Megatron's arguments for the tokenizer. Megatron has no tokenizer of bytes; its
    NullTokenizer reads data that another program has tokenized."""
    kind, path = tokenizer.kind, tokenizer.path
    if kind in ("null", "byte"):
        return {"tokenizer_type": "NullTokenizer"}
    if kind == "huggingface" and path is not None and path.endswith("vocab.json"):
        merges = path.removesuffix("vocab.json") + "merges.txt"
        return {"tokenizer_type": GPT2, "vocab_file": path, "merge_file": merges}
    args: dict[str, Any] = {"tokenizer_model": path}
    if kind == "tiktoken":
        return args | {
            "tokenizer_type": "TikTokenizer",
            "tiktoken_pattern": tokenizer.pattern,
            "tiktoken_num_special_tokens": tokenizer.num_special_tokens,
            "tiktoken_special_tokens": list(tokenizer.special_tokens) or None,
        }
    if kind == "sentencepiece":
        adds_special = tokenizer.add_special_tokens
        name = "Llama2Tokenizer" if adds_special else "GPTSentencePieceTokenizer"
        return args | {"tokenizer_type": name}
    return args | {
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_hf_include_special_tokens": tokenizer.add_special_tokens,
    }


def build_progress_args(state: Mapping[str, Any]) -> dict[str, int]:  # Any: JSON
    """Return Megatron's counters, which are stored with its arguments."""
    train = state["train"]
    return {
        "iteration": int(train["step"]),
        "consumed_train_samples": int(train["consumed_samples"]),
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
    }


def describe_optimizer_problems(run: TrainRun) -> list[str]:
    """Return why Megatron cannot continue with the optimizer state of a run, a message for each
    setting."""
    advice = "Pass --weights-only to write the weights without optimizer state."
    problems = []
    optim = run.optim
    other_rules = {
        "optim.plugin": optim.plugin,
        "optim.kind": optim.kind,
        "optim.scalar_optimizer": optim.scalar_optimizer,
        **{f"optim.groups[{group.name}].kind": group.kind for group in optim.groups},
    }
    setting = next((name for name, rule in other_rules.items() if rule not in ("adamw", None)), "")
    if setting:
        problems.append(
            f"{setting}={other_rules[setting]}: Megatron's distributed optimizer stores the "
            f"moments of Adam only. {advice}"
        )
    if run.schedule.plugin is not None:
        problems.append(
            f"schedule.plugin={run.schedule.plugin}: Megatron has no such schedule. {advice}"
        )
    if run.train.batch_size_schedule:
        sizes = [entry.size for entry in run.train.batch_size_schedule]
        problems.append(
            f"train.batch_size_schedule with sizes {sizes}: it is not converted to Megatron's "
            f"--rampup-batch-size, without which the schedules differ. {advice}"
        )
    if not run.optim.trains_all():
        problems.append(
            f"optim.trained={list(run.optim.trained)} with optim.frozen={list(run.optim.frozen)}: "
            f"frozen parameters have no moments, and Megatron expects those of all. {advice}"
        )
    return problems


def _schedule_lengths(run: TrainRun) -> ScheduleLengths:
    return schedule_lengths(
        run.schedule, batch_schedule=build_batch_schedule(run.train), total_steps=run.train.steps
    )


def _batch_args(run: TrainRun) -> dict[str, Any]:
    return {
        "seq_length": run.train.seq_len,
        "micro_batch_size": run.train.micro_batch_size,
        "global_batch_size": run.train.global_batch_size,
        "train_iters": run.train.steps,
        "train_samples": None,
        "seed": run.seed,
        "data_parallel_random_init": False,
    }


def _schedule_args(run: TrainRun) -> dict[str, Any]:
    schedule, rows = run.schedule, run.train.global_batch_size
    lengths, is_constant = _schedule_lengths(run), schedule.weight_decay_style == "constant"
    return {
        "lr": schedule.lr,
        "min_lr": schedule.min_lr,
        "lr_decay_style": DECAY_STYLES.get(schedule.style, schedule.style),
        "lr_decay_iters": lengths.decay // rows,
        "lr_decay_samples": None,
        "lr_warmup_iters": lengths.warmup // rows,
        "lr_warmup_samples": 0,
        "lr_warmup_fraction": None,
        "lr_warmup_init": schedule.warmup_init,
        "lr_wsd_decay_iters": schedule.wsd_decay_steps,
        "lr_wsd_decay_samples": None,
        "lr_wsd_decay_style": schedule.wsd_decay_style,
        "weight_decay": schedule.weight_decay,
        "start_weight_decay": None if is_constant else schedule.weight_decay,
        "end_weight_decay": None if is_constant else schedule.end_weight_decay,
        "weight_decay_incr_style": schedule.weight_decay_style,
    }


def _optimizer_args(run: TrainRun) -> dict[str, Any]:
    optim, scale = run.optim, run.precision.loss_scale
    return {
        "optimizer": "adam",
        "adam_beta1": optim.beta1,
        "adam_beta2": optim.beta2,
        "adam_eps": optim.eps,
        "decoupled_weight_decay": optim.decoupled_weight_decay,
        "clip_grad": optim.clip_grad,
        **build_dtype_args(DTYPES[run.precision.params]),
        "loss_scale": scale.constant,
        "initial_loss_scale": scale.initial,
        "min_loss_scale": scale.min,
        "loss_scale_window": scale.window,
        "hysteresis": scale.hysteresis,
        "use_distributed_optimizer": True,
    }


def _build_scheduler_state(
    schedule: ScheduleConfig, samples: int, lengths: ScheduleLengths
) -> dict[str, Any]:
    """Return the state of Megatron's scheduler, whose lengths are in samples."""
    end = schedule.weight_decay if schedule.end_weight_decay is None else schedule.end_weight_decay
    return {
        "max_lr": schedule.lr,
        "min_lr": schedule.min_lr,
        "lr_warmup_steps": lengths.warmup,
        "lr_decay_steps": lengths.decay,
        "lr_decay_style": DECAY_STYLES.get(schedule.style, schedule.style),
        "num_steps": samples,
        "start_wd": schedule.weight_decay,
        "end_wd": end,
        "wd_incr_style": schedule.weight_decay_style,
        "wd_incr_steps": lengths.total,
    }


def _build_optimizer_state(run: TrainRun, samples: int, state: Mapping[str, Any]) -> dict[Any, Any]:
    """Return the non-tensor state of Megatron's optimizer.

    With expert parallelism Megatron has two optimizers, for dense parameters and for experts.
    """
    updates = int(state["optimizer_updates"])
    optimizers = [
        {
            "optimizer": {
                "param_groups": [
                    _build_param_group(run, samples, updates, decayed=decayed, expert=expert)
                    for decayed in (True, False)
                ]
            },
            "param_state_sharding_type": SHARDING_TYPE,
        }
        | ({"grad_scaler": scale} if (scale := _build_loss_scale(run, state)) is not None else {})
        for expert in ([False, True] if run.parallel.ep > 1 else [False])
    ]
    return dict(enumerate(optimizers)) if len(optimizers) > 1 else dict(optimizers[0])


def _build_param_group(
    run: TrainRun, samples: int, updates: int, *, decayed: bool, expert: bool
) -> dict[str, Any]:
    """Return the settings of the parameters with or without weight decay.

    They include those of torch's AdamW and of the fused Adam of Transformer Engine and Apex, which
    both take all settings of a group from the checkpoint.
    """
    lengths = _schedule_lengths(run)
    return {
        "wd_mult": 1.0 if decayed else 0.0,
        "lr_mult": 1.0,
        "is_expert_parallel": expert,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": run.schedule.lr,
        "min_lr": run.schedule.min_lr,
        "lr": learning_rate(run.schedule, samples, lengths),
        "weight_decay": weight_decay(run.schedule, samples, lengths) if decayed else 0.0,
        "betas": (run.optim.beta1, run.optim.beta2),
        "eps": run.optim.eps,
        "step": updates,
        "bias_correction": True,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": run.optim.decoupled_weight_decay,
    }


def _build_loss_scale(run: TrainRun, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the state of the dynamic loss scale; empty if it is constant, None without one."""
    if run.precision.params != "fp16":
        return None
    if run.precision.loss_scale.constant is not None:
        return {}
    saved = state["loss_scale"]
    return {
        "scale": torch.tensor([float(saved["scale"])], dtype=torch.float32),
        "growth_tracker": int(saved["growth_tracker"]),
        "hysteresis_tracker": int(saved["hysteresis_tracker"]),
    }
