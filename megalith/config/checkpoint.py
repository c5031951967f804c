"""When checkpoints are written, how many are kept, and what reading one may leave out."""

from dataclasses import dataclass
from typing import Literal

from megalith.config.fields import hint_at, unknown_setting
from megalith.config.model import ModelConfig

Answer = Literal["error", "warn", "ignore"]
"""To a tensor that only one side has: end the run, go on and name it, or go on."""

Taken = Literal["weights", "progress", "everything"]
"""What a run that begins takes from another's checkpoint: its weights; its place in data and
schedules, too; and its optimizer's state as well."""

NewRows = Literal["zero", "mean"]
"""What rows of a vocabulary begin as that those who trained it had not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of one run, under `RUN/checkpoints/`."""

    every: int = 100
    """Steps between checkpoints; 0 writes only the last one."""

    keep: int | None = 3
    """Newest checkpoints that stay; unset keeps all."""

    keep_every: int | None = None
    """Checkpoints whose step is a multiple of this stay for good; unset: none do."""

    load: str | None = None
    """Start from this checkpoint or Hugging Face folder when the run folder has none; unset: fresh
    weights."""

    load_mode: Taken = "weights"
    """What `load` gives a run that begins. weights: it begins at step 0; progress: it goes on at
    the checkpoint's step, with its place in the data and in the schedule of the learning rate,
    and an optimizer that has seen nothing; everything: with its optimizer, too. A run that
    resumes takes all that its own checkpoint has."""

    missing_keys: Answer = "error"
    """Tensors that the run has and the checkpoint lacks keep their initial values, unless this
    is error. A run that resumes always needs all of its weights: there it speaks of the
    optimizer's tensors only."""

    unexpected_keys: Answer = "error"
    """Tensors that the checkpoint has and the run lacks; a run that resumes may leave out the
    optimizer's only."""

    skip: tuple[str, ...] = ()
    """Patterns of parameters that are not taken from `load` and keep their initial values, such as
    head.*"""

    new_rows: NewRows = "zero"
    """Rows of embedding and head that a Hugging Face folder in `load` lacks: zero, or the mean
    of those that it has. They are padding, or tokens where model.vocab_size may grow
    (`allow_model_changes`)."""

    prefer_weights: bool = False
    """Where a checkpoint's weights are not its fp32 master weights, rounded, believe the weights;
    otherwise the master weights."""

    allow_model_changes: tuple[str, ...] = ()
    """Settings of the model, or sections of them, that may differ from those the weights were
    trained with, such as model.rope."""

    save_optimizer: bool = True
    """False writes checkpoints without master weights and moments: a run resumes from them with
    checkpoint.missing_keys=warn only, its weights rounded to what they are stored in and its
    moments at zero."""

    max_save_failures: int = 3
    """A failed save is announced and the run goes on with the previous checkpoint; this many in a
    row end the run."""


def checkpoint_problems(checkpoint: CheckpointConfig) -> list[str]:
    """Every broken rule, as texts."""
    problems = []
    for name in checkpoint.allow_model_changes:
        section, _, setting = name.partition(".")
        if section == "model" and setting and hint_at(ModelConfig, setting) is not None:
            continue
        known = setting if section == "model" and setting else name
        is_setting = hint_at(ModelConfig, known) is not None
        advice = f"Use model.{known}." if is_setting else unknown_setting(ModelConfig, known)
        problems.append(
            f"checkpoint.allow_model_changes={name}: expected settings of the model, each with "
            f"model. before it. {advice}"
        )
    if checkpoint.skip and checkpoint.load is None:
        problems.append(
            f"checkpoint.skip={list(checkpoint.skip)} names what is not taken from "
            "checkpoint.load, which is unset. "
            f"Set checkpoint.load, or remove checkpoint.skip."
        )
    if checkpoint.new_rows != "zero" and checkpoint.load is None:
        problems.append(
            f"checkpoint.new_rows={checkpoint.new_rows} says what is added to the tables of "
            "checkpoint.load, which is "
            f"unset. Set checkpoint.load to a Hugging Face folder, or remove checkpoint.new_rows."
        )
    return problems + _taking_problems(checkpoint)


def _taking_problems(checkpoint: CheckpointConfig) -> list[str]:
    """What a run that begins is to take, and from where."""
    if checkpoint.load_mode == "weights":
        return []
    problems = []
    if checkpoint.load is None:
        problems.append(
            f"checkpoint.load_mode={checkpoint.load_mode} says what is taken from checkpoint.load, "
            "which is "
            "unset. Set "
            "checkpoint.load to a run or a checkpoint, or remove checkpoint.load_mode: a run "
            "resumes "
            "from its own anyway."
        )
    if checkpoint.skip:
        problems.append(
            f"checkpoint.load_mode={checkpoint.load_mode} with "
            f"checkpoint.skip={list(checkpoint.skip)}: "
            "weights that are new "
            "have no place in a run to go on at. Set checkpoint.load_mode=weights, or remove "
            "checkpoint.skip."
        )
    if checkpoint.new_rows != "zero":
        problems.append(
            f"checkpoint.load_mode={checkpoint.load_mode} with "
            f"checkpoint.new_rows={checkpoint.new_rows}: a "
            "run that goes on at "
            "a step has all of its rows. Set checkpoint.load_mode=weights, or remove "
            "checkpoint.new_rows."
        )
    return problems
