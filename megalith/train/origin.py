"""A run that begins at a step of another: which checkpoint it goes on from, and what it must be
able to give."""

from megalith.checkpoint.agree import raise_on_all_ranks
from megalith.checkpoint.format import MANIFEST
from megalith.checkpoint.load import Checkpoint, open_checkpoint
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.train import TrainRun
from megalith.errors import CheckpointError, ConfigError
from megalith.models.adapters import RECORD
from megalith.models.pretrained import locate
from megalith.optim.schedule import learning_rate, schedule_lengths
from megalith.parallel.group import Group
from megalith.train.state import TrainState

PROGRESS = ("train", "optimizer_updates", "data", "order_samples", "tokenizer")
"""What the state of a checkpoint must have for a run to go on at its step."""


def open_checkpoint_source(rules: CheckpointConfig, world: Group) -> Checkpoint | None:
    """The checkpoint at whose step a run begins; None: at step 0. Collective over `world`.

    Raises:
        CheckpointError: on every rank: there is none, or it is that of no run.
    """
    source = rules.load
    if rules.load_mode == "weights" or source is None:
        return None
    path = raise_on_all_ranks(lambda: locate(source) if world.rank == 0 else None, world)[0]
    assert path is not None
    said = f"checkpoint.load_mode={rules.load_mode} with checkpoint.load={source}"
    if not (path / MANIFEST).exists():
        raise CheckpointError(
            f"{said}: {path} holds weights and no step to go on at. Set "
            "checkpoint.load_mode=weights."
        )
    opened = open_checkpoint(path)
    if RECORD in opened.state:
        raise CheckpointError(
            f"{said}: {path} holds adapters, and this run trains a model. Set "
            "checkpoint.load_mode=weights to begin with "
            f"the model that they make, or go on in the run's own folder."
        )
    if missing := [name for name in PROGRESS if name not in opened.state]:
        raise CheckpointError(
            f"{said}: {path} holds weights and no step to go on at (its state lacks "
            f"{', '.join(missing)}). Set "
            f"checkpoint.load_mode=weights."
        )
    return opened


def check_steps_left(run: TrainRun, checkpoint_source: Checkpoint, state: TrainState) -> None:
    """Refuse to begin where nothing is left to do.

    Raises:
        ConfigError: the run would be over.
    """
    if state.step >= run.train.steps:
        raise ConfigError(
            f"train.steps={run.train.steps}: {checkpoint_source.path} is of step {state.step}, "
            "where a run "
            "with checkpoint.load_mode="
            f"{run.checkpoint.load_mode} goes on. Set train.steps to more than {state.step}, or "
            "checkpoint.load_mode=weights."
        )


def describe_checkpoint_source(
    run: TrainRun, checkpoint_source: Checkpoint, state: TrainState, *, fresh: bool
) -> str:
    """Where a run begins, what of its optimizer is there (`fresh`: nothing), and which learning
    rate follows from that.

    With rows of the global batch that are more or fewer than there, also where the schedule will
    end.
    """
    lengths = schedule_lengths(
        run.schedule, global_batch_size=run.train.global_batch_size, total_steps=run.train.steps
    )
    rate = learning_rate(run.schedule, state.scheduled_samples, lengths)
    kept = "with an optimizer that has seen nothing" if fresh else "with its optimizer"
    rows = run.train.global_batch_size
    last = state.scheduled_samples + (run.train.steps - state.step) * rows
    other = (
        ""
        if state.consumed_samples == state.step * rows
        else (
            f"; with train.global_batch_size={rows}, which it was not before, "
            f"train.steps={run.train.steps} end at sample "
            f"{last} of the schedule's {run.train.steps * rows}"
        )
    )
    return (
        f"going on from {checkpoint_source.path} at step {state.step} {kept}: "
        f"{state.consumed_samples} "
        "samples were read, and the "
        f"schedule stands at sample {state.scheduled_samples}, a learning rate of {rate:.3g}{other}"
    )
