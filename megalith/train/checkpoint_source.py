"""`checkpoint.load` with `load_mode` progress or all: a run that continues at the step of another
run's checkpoint."""

from megalith.checkpoint.consistency import raise_on_all_ranks
from megalith.checkpoint.format import MANIFEST
from megalith.checkpoint.load import Checkpoint, open_checkpoint
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.train import TrainRun
from megalith.errors import CheckpointError, ConfigError
from megalith.models.adapters import RECORD
from megalith.models.pretrained import locate_source
from megalith.optim.schedule import learning_rate, schedule_lengths
from megalith.parallel.group import Group
from megalith.train.state import TrainState

PROGRESS = ("train", "optimizer_updates", "data", "order_samples", "tokenizer")
"""Keys that the state of a checkpoint must have for a run to continue at its step."""


def open_checkpoint_source(rules: CheckpointConfig, world: Group) -> Checkpoint | None:
    """Return the checkpoint at whose step a run starts; None: step 0. Collective over `world`.

    Raises:
        CheckpointError: on every rank: there is no such checkpoint, or it is not one of a run.
    """
    source = rules.load
    if rules.load_mode == "weights" or source is None:
        return None
    path = raise_on_all_ranks(lambda: locate_source(source) if world.rank == 0 else None, world)[0]
    assert path is not None
    settings = f"checkpoint.load_mode={rules.load_mode} with checkpoint.load={source}"
    if not (path / MANIFEST).exists():
        raise CheckpointError(
            f"{settings}: {path} holds weights only, so there is no step to continue from. Set "
            "checkpoint.load_mode=weights."
        )
    checkpoint = open_checkpoint(path)
    if RECORD in checkpoint.state:
        raise CheckpointError(
            f"{settings}: {path} holds LoRA adapters, and this run trains a full model. Set "
            "checkpoint.load_mode=weights to start from the merged model, or continue in the run's "
            "own folder."
        )
    if missing_keys := [name for name in PROGRESS if name not in checkpoint.state]:
        raise CheckpointError(
            f"{settings}: {path} holds weights only, so there is no step to continue from (its "
            f"state lacks {', '.join(missing_keys)}). Set checkpoint.load_mode=weights."
        )
    return checkpoint


def check_steps_left(run: TrainRun, checkpoint_source: Checkpoint, state: TrainState) -> None:
    """Check that the run has steps left after the checkpoint's step.

    Raises:
        ConfigError: train.steps is not larger than the checkpoint's step.
    """
    if state.step >= run.train.steps:
        raise ConfigError(
            f"train.steps={run.train.steps}: {checkpoint_source.path} is of step {state.step}, "
            f"where a run with checkpoint.load_mode={run.checkpoint.load_mode} continues. Set "
            f"train.steps to more than {state.step}, or checkpoint.load_mode=weights."
        )


def describe_checkpoint_source(
    run: TrainRun, checkpoint_source: Checkpoint, state: TrainState, *, fresh: bool
) -> str:
    """Describe where a run starts: checkpoint, step, optimizer state (`fresh`: none) and learning
    rate.

    If the global batch size has changed, also describe where the schedule will end.
    """
    lengths = schedule_lengths(
        run.schedule, global_batch_size=run.train.global_batch_size, total_steps=run.train.steps
    )
    rate = learning_rate(run.schedule, state.scheduled_samples, lengths)
    optimizer = "with a new optimizer state" if fresh else "with its optimizer state"
    rows = run.train.global_batch_size
    last = state.scheduled_samples + (run.train.steps - state.step) * rows
    schedule_end = (
        ""
        if state.consumed_samples == state.step * rows
        else (
            f"; with the changed train.global_batch_size={rows}, train.steps={run.train.steps} "
            f"ends at sample {last} of the schedule's {run.train.steps * rows}"
        )
    )
    return (
        f"continuing from {checkpoint_source.path} at step {state.step} {optimizer}: "
        f"{state.consumed_samples} samples consumed, schedule at sample {state.scheduled_samples}, "
        f"learning rate {rate:.3g}{schedule_end}"
    )
