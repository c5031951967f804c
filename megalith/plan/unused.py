"""Settings of a run that have no effect; reported at its start."""

from collections.abc import Callable
from typing import NamedTuple

from megalith.config.data import parse_blend, per_split_paths
from megalith.config.fields import describe
from megalith.config.tokenizer import FILES
from megalith.config.train import TrainRun
from megalith.config.tree import flatten
from megalith.errors import ConfigError


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
        lambda run, world: run.optim.kind == "sgd",
        "they belong to optim.kind=adamw, and it is sgd",
    ),
    Unused(
        ("optim.momentum",),
        lambda run, world: run.optim.kind != "sgd",
        "it belongs to optim.kind=sgd, and it is adamw",
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
        ("offload.min_numel",),
        lambda run, world: run.offload.layers == 0,
        "with offload.layers=0 nothing is offloaded",
    ),
    Unused(
        ("checkpoint.keep_every",),
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
        ("tokenizer.add_special_tokens",),
        lambda run, world: run.tokenizer.kind not in FILES,
        "only tokenizers read from files have special tokens",
    ),
)


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
