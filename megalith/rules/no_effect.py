"""Settings that have no effect: the condition under which each model setting applies, and the
notes at the start of a run."""

from collections.abc import Callable
from typing import NamedTuple

from megalith.config.data import FILES, parse_blend, per_split_paths
from megalith.config.fields import Plain, describe
from megalith.config.model import ModelConfig
from megalith.config.moe import has_aux_losses
from megalith.config.train import TrainRun
from megalith.config.tree import flatten
from megalith.errors import ConfigError

ANY_SCALING = ("linear", "dynamic", "llama3", "yarn", "longrope")
FROM_A_LENGTH = ("dynamic", "llama3", "yarn", "longrope")


class Belongs(NamedTuple):
    """Settings that apply to some models only."""

    settings: tuple[str, ...]
    """Dotted names below `model`; a section stands for all its settings."""

    decider: str
    """The setting that decides whether they apply, as a dotted name."""

    reads: Callable[[ModelConfig], bool]
    """Returns whether they apply to a model."""

    why: str
    """What they are for."""

    fix: str
    """What to set so that they apply."""


def _scaled(*kinds: str) -> Callable[[ModelConfig], bool]:
    return lambda model: model.rope.scaling in kinds


def reads_mlp_bias(model: ModelConfig) -> bool:
    """Return whether some layer has an MLP, a linear replacement or shared experts, which use
    mlp_bias."""
    shares = model.moe is not None and model.moe.shared_ffn_hidden_size is not None
    layers = range(model.num_layers)
    return any(model.mlp_part(n) != "none" and (shares or not model.has_experts(n)) for n in layers)


BELONGS: tuple[Belongs, ...] = (
    Belongs(
        ("attention", "qkv_bias", "rope", "relative", "dropout.attention"),
        "layers.attention",
        lambda model: any(
            model.attention_part(layer) == "full" for layer in range(model.num_layers)
        ),
        "for attention, and no layer has it",
        "model.layers.attention to full for some layer",
    ),
    Belongs(
        ("activation", "gated", "activation_clamp", "up_offset"),
        "layers.mlp",
        lambda model: any(model.mlp_part(layer) == "full" for layer in range(model.num_layers)),
        "for MLPs, and no layer has one",
        "model.layers.mlp to full for some layer",
    ),
    Belongs(
        ("mlp_bias",),
        "layers.mlp",
        lambda model: any(model.mlp_part(layer) != "none" for layer in range(model.num_layers)),
        "for MLPs, and no layer has one",
        "model.layers.mlp to full for some layer",
    ),
    Belongs(
        ("mlp_bias",),
        "moe.shared_ffn_hidden_size",
        reads_mlp_bias,
        "for MLPs and shared experts, and there are none",
        "model.moe.biases=true for biases of experts",
    ),
    Belongs(
        ("rope",),
        "positions",
        lambda model: model.positions == "rope",
        "for rotary positions",
        "model.positions=rope",
    ),
    Belongs(
        ("relative",),
        "positions",
        lambda model: model.positions == "relative",
        "for relative positions",
        "model.positions=relative",
    ),
    Belongs(
        ("rope.factor",),
        "rope.scaling",
        _scaled(*ANY_SCALING),
        "the scaling factor",
        f"model.rope.scaling to one of {', '.join(ANY_SCALING)}",
    ),
    Belongs(
        ("rope.original_max_position",),
        "rope.scaling",
        _scaled(*FROM_A_LENGTH),
        "the length above which scaling applies",
        f"model.rope.scaling to one of {', '.join(FROM_A_LENGTH)}",
    ),
    Belongs(
        ("rope.low_freq_factor", "rope.high_freq_factor"),
        "rope.scaling",
        _scaled("llama3"),
        "for llama3",
        "model.rope.scaling=llama3",
    ),
    Belongs(
        ("rope.beta_fast", "rope.beta_slow", "rope.whole_pairs", "mla.yarn_mscale"),
        "rope.scaling",
        _scaled("yarn"),
        "for yarn",
        "model.rope.scaling=yarn",
    ),
    Belongs(
        ("rope.attention_factor",),
        "rope.scaling",
        _scaled("yarn", "longrope"),
        "the attention temperature of a scaling",
        "model.rope.scaling=yarn",
    ),
    Belongs(
        ("rope.short_factors", "rope.long_factors"),
        "rope.scaling",
        _scaled("longrope"),
        "for longrope",
        "model.rope.scaling=longrope",
    ),
    Belongs(
        ("rope.skip_growth", "rope.skip_step"),
        "rope.skip",
        lambda model: any(model.rope.skip),
        "for layers without positions",
        "model.rope.skip to [false, false, false, true] or so",
    ),
    Belongs(
        ("rope.skip_step",),
        "rope.skip_growth",
        lambda model: model.rope.skip_growth > 0,
        "the step of the attention temperature",
        "model.rope.skip_growth=0.1",
    ),
    Belongs(
        ("mla.yarn_mscale",),
        "attention.scale",
        lambda model: model.attention.scale is None,
        "part of the default attention scale",
        "model.attention.scale=null",
    ),
    Belongs(
        ("mup.base_head_dim", "mup.attention_scale_power"),
        "attention.scale",
        lambda model: model.attention.scale is None,
        "for the default attention scale",
        "model.attention.scale=null",
    ),
    Belongs(
        (
            "attention.window_layers",
            "attention.window_right",
            "attention.chunked",
            "rope.local_theta",
        ),
        "attention.window",
        lambda model: model.attention.window is not None,
        "for layers with a window, and no layer has one",
        "model.attention.window to 4096 or so",
    ),
    Belongs(
        ("attention.window_right",),
        "attention.causal",
        lambda model: not model.attention.causal,
        "for attention that is not causal",
        "model.attention.causal=false",
    ),
    Belongs(
        ("attention.qk_norm_eps", "attention.qk_norm_layers"),
        "attention.qk_norm",
        lambda model: model.attention.qk_norm != "none",
        "for norms of queries and keys",
        "model.attention.qk_norm=head",
    ),
    Belongs(
        ("mla.norm_eps",),
        "mla.norms",
        lambda model: model.mla is None or model.mla.norms,
        "for norms of the compressed vectors",
        "model.mla.norms=true",
    ),
    Belongs(
        ("activation_clamp", "up_offset"),
        "gated",
        lambda model: model.gated,
        "for a gate",
        "model.gated=true",
    ),
    Belongs(
        ("moe.router.expert_bias_update_rate",),
        "moe.router.expert_bias",
        lambda model: model.moe is not None and model.moe.router.expert_bias,
        "the update rate of the expert bias",
        "model.moe.router.expert_bias=true",
    ),
    Belongs(
        ("moe.aux_loss.quantile_ema",),
        "moe.aux_loss.quantile",
        lambda model: model.moe is not None and model.moe.aux_loss.quantile,
        "the decay of quantile offsets",
        "model.moe.aux_loss.quantile=true",
    ),
    Belongs(
        ("moe.aux_loss.of_choices",),
        "moe.aux_loss.batch_coeff",
        lambda model: model.moe is not None and has_aux_losses(model.moe.aux_loss),
        "the token counts of aux losses",
        "model.moe.aux_loss.batch_coeff=0.01",
    ),
    Belongs(
        ("moe.router.group_score",),
        "moe.router.num_groups",
        lambda model: model.moe is not None and model.moe.router.num_groups is not None,
        "the score of expert groups",
        "model.moe.router.num_groups to 8 or so",
    ),
    Belongs(
        ("moe.capacity.drop", "moe.capacity.pad"),
        "moe.capacity.factor",
        lambda model: model.moe is not None and model.moe.capacity.factor is not None,
        "for experts with a capacity",
        "model.moe.capacity.factor=1.25",
    ),
    Belongs(
        ("moe.shared_gate",),
        "moe.shared_ffn_hidden_size",
        lambda model: model.moe is not None and model.moe.shared_ffn_hidden_size is not None,
        "a gate of shared experts",
        "model.moe.shared_ffn_hidden_size",
    ),
    Belongs(
        ("mtp.loss_weight",),
        "mtp.num_layers",
        lambda model: model.mtp.num_layers > 0,
        "the loss weight of multi-token prediction",
        "model.mtp.num_layers to 1 or more",
    ),
)


def unread_problems(model: ModelConfig) -> list[str]:
    """Return an error text for each condition under which changed settings have no effect; each
    setting occurs once."""
    defaults = {setting.path: setting.default for setting in describe(ModelConfig)}
    values = flatten(model)
    changed = [
        path for path, value in values.items() if path in defaults and value != defaults[path]
    ]
    problems = []
    for row in BELONGS:
        idle = [path for path in changed if _within(path, row.settings)]
        if not idle or row.reads(model):
            continue
        changed = [path for path in changed if path not in idle]
        given = ", ".join(f"model.{path}={shown(values[path])}" for path in idle)
        problems.append(
            f"{given} with model.{row.decider}={shown(values[row.decider])}: no effect, because "
            f"{'these settings are' if len(idle) > 1 else 'the setting is'} {row.why}. Set "
            f"{row.fix}, or "
            f"remove {'them' if len(idle) > 1 else 'it'}."
        )
    return problems


def shown(value: Plain) -> str:
    """Format a value as a user types it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _within(path: str, settings: tuple[str, ...]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in settings)


# --- settings of a run that have no effect; reported at its start


class Unused(NamedTuple):
    """Settings that have no effect in some runs. Contradictory settings are errors of a rule
    instead."""

    settings: tuple[str, ...]
    """Dotted names; a section stands for all its settings."""

    applies: Callable[[TrainRun, int], bool]
    """Returns whether they have no effect in a run on so many ranks."""

    why: str
    """The reason, as text."""


def _one_stage(run: TrainRun, world: int) -> bool:
    return run.parallel.pp * run.parallel.pipeline.vpp == 1


def _has_weights(run: TrainRun) -> bool:
    """Return whether any data source is a blend with weights; True if it cannot be parsed, which
    another rule reports."""
    fields = {"path": run.data.path} | per_split_paths(run.data)
    fields |= {f"phases[{n}].path": phase.path for n, phase in enumerate(run.data.phases)}
    try:
        return any(
            parse_blend(name, words).weights is not None for name, words in fields.items() if words
        )
    except ConfigError:
        return True


def _all_rope_is_local(run: TrainRun, world: int) -> bool:
    """Return whether every layer with RoPE uses the angles of windowed layers."""
    model = run.model
    rope_layers = [layer for layer in range(model.num_layers) if model.uses_rope(layer)]
    return model.rope.local_theta is not None and all(
        model.has_window(layer) for layer in rope_layers
    )


UNUSED: tuple[Unused, ...] = (
    Unused(
        (
            "model.rope.theta",
            "model.rope.scaling",
            "model.rope.factor",
            "model.rope.original_max_position",
        ),
        _all_rope_is_local,
        "all layers with RoPE have a window, and use model.rope.local_theta",
    ),
    Unused(
        ("parallel.pipeline",),
        _one_stage,
        "with parallel.pp=1 and parallel.pipeline.vpp=1 there is one stage",
    ),
    Unused(
        ("parallel.collective_matmul",),
        lambda run, world: not run.parallel.tp_comm_overlap,
        "with parallel.tp_comm_overlap=false there are no collective matmuls",
    ),
    Unused(
        ("parallel.dispatcher",),
        lambda run, world: run.parallel.ep * (run.parallel.etp or run.parallel.tp) == 1,
        "with parallel.ep=1 every rank has all experts",
    ),
    Unused(
        ("parallel.context",),
        lambda run, world: run.parallel.cp == 1,
        "with parallel.cp=1 sequences are not split",
    ),
    Unused(
        ("parallel.bucket_numel",),
        lambda run, world: run.parallel.zero == 3 and world > 1,
        "with parallel.zero=3 gradients are summed layer by layer",
    ),
    Unused(
        (
            "parallel.bucket_numel",
            "parallel.overlap",
            "parallel.check_collectives",
            "parallel.order",
        ),
        lambda run, world: world == 1,
        "one rank has no communication",
    ),
    Unused(
        ("optim.beta1", "optim.beta2", "optim.eps", "optim.decoupled_weight_decay"),
        lambda run, world: not run.optim.uses("adamw"),
        "they belong to optim.kind=adamw, which no parameter uses",
    ),
    Unused(
        ("optim.momentum",),
        lambda run, world: not run.optim.uses("sgd"),
        "it belongs to optim.kind=sgd, which no parameter uses",
    ),
    Unused(
        ("precision.loss_scale",),
        lambda run, world: run.precision.params != "fp16",
        "only precision.params=fp16 scales the loss",
    ),
    Unused(
        tuple(
            f"precision.loss_scale.{name}"
            for name in ("initial", "min", "window", "hysteresis", "max_overflows")
        ),
        lambda run, world: (
            run.precision.params == "fp16" and run.precision.loss_scale.constant is not None
        ),
        "with precision.loss_scale.constant the scale does not change",
    ),
    Unused(
        ("model.fp32_residual",),
        lambda run, world: run.precision.params in ("fp32", "fp64"),
        "the residual stream is at least fp32 anyway",
    ),
    Unused(
        ("schedule.wsd_decay_style",),
        lambda run, world: run.schedule.style != "wsd",
        "it belongs to schedule.style=wsd",
    ),
    Unused(
        ("replica_group.diloco",),
        lambda run, world: run.replica_group is None or run.replica_group.mode != "diloco",
        "it belongs to replica_group.mode=diloco",
    ),
    Unused(
        ("offload.min_numel",),
        lambda run, world: run.offload.layers == 0,
        "with offload.layers=0 nothing is offloaded",
    ),
    Unused(
        ("checkpoint.keep_best",),
        lambda run, world: run.checkpoint.best_metric is None,
        "it belongs to checkpoint.best_metric, which is unset",
    ),
    Unused(
        ("checkpoint.keep_every", "checkpoint.best_metric"),
        lambda run, world: run.checkpoint.keep is None,
        "with checkpoint.keep unset every checkpoint is kept",
    ),
    Unused(
        ("data.mock_num_documents", "data.mock_max_tokens"),
        lambda run, world: not run.data.mock,
        "only data.mock=true generates documents",
    ),
    Unused(
        ("data.mmap",), lambda run, world: run.data.mock, "with data.mock=true there are no files"
    ),
    Unused(
        ("data.mid_level_dataset_surplus",),
        lambda run, world: run.data.mock or not _has_weights(run),
        "only blends with weights use it",
    ),
    Unused(
        ("observe.dump",),
        lambda run, world: run.observe.dump.every is None,
        "with observe.dump.every unset nothing is dumped",
    ),
    Unused(
        ("profile.shapes", "profile.stacks", "profile.memory", "profile.warmup"),
        lambda run, world: run.profile.tool == "nsys",
        "they belong to profile.tool=torch",
    ),
    Unused(
        ("profile.warmup",),
        lambda run, world: (
            run.profile.start is not None
            and run.profile.tool == "torch"
            and run.profile.warmup >= run.profile.start
        ),
        "fewer steps precede profile.start, and all of them are warmup",
    ),
    Unused(
        ("fault_detector.model_fault", "fault_detector.report_stats"),
        lambda run, world: not run.fault_detector.uses_reruns,
        "no step is repeated: fault_detector.nonfinite and spike are not rerun, rerun_every is 0",
    ),
    Unused(
        ("fault_detector.repair_replicas",),
        lambda run, world: run.fault_detector.replica_check_every == 0,
        "with fault_detector.replica_check_every=0 replicas are compared only at the start",
    ),
    Unused(
        ("fault_detector.suspect_steps", "train.termination_grace_seconds"),
        lambda run, world: run.checkpoint.local.every is None,
        "with checkpoint.local.every unset there are no local checkpoints",
    ),
    Unused(
        ("fault_detector.rollback_steps", "fault_detector.skip_samples_past_spike"),
        lambda run, world: not run.train.callbacks and not _rolls_back(run),
        "no action of fault_detector is rollback",
    ),
    Unused(
        ("tokenizer.add_special_tokens",),
        lambda run, world: run.tokenizer.kind not in FILES,
        "only tokenizers read from files have special tokens",
    ),
)


def _rolls_back(run: TrainRun) -> bool:
    """Return whether some fault leads to a rollback that skips samples."""
    config = run.fault_detector
    return "rollback" in (config.nonfinite, config.spike, config.model_fault)


def unused_notes(run: TrainRun, world: int) -> list[str]:
    """Return one note for each reason why changed settings have no effect in a run on `world`
    ranks."""
    defaults = {setting.path: setting.default for setting in describe(TrainRun)}
    changed = {
        path: value
        for path, value in flatten(run).items()
        if path in defaults and value != defaults[path]
    }
    notes = []
    for row in UNUSED:
        settings = [
            f"{path}={str(value).lower() if isinstance(value, bool) else value}"
            for path, value in changed.items()
            if any(path == name or path.startswith(f"{name}.") for name in row.settings)
        ]
        if settings and row.applies(run, world):
            notes.append(f"{', '.join(settings)}: no effect here, because {row.why}")
    return notes
