"""Rollback of a run: restores a checkpoint from before bad steps, and skips their samples for the
rest of the run."""

from collections.abc import Mapping
from typing import Any

from megalith.checkpoint.commit import discard_later
from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.manifest import list_complete_checkpoints
from megalith.errors import CallbackError, CheckpointError, RollbackLimitError
from megalith.parallel.group import raise_on_all_ranks
from megalith.plan.batch_schedule import build_batch_schedule
from megalith.plan.rollback import (
    RollbackPlan,
    RollbackTarget,
    choose_checkpoint,
    plan_skipped_range,
)
from megalith.storage import StoragePath
from megalith.train.resume import CALLBACKS, HEALTHY, PreparedRun
from megalith.train.run_folder import record_skipped_samples

ROLLBACK_WINDOW = 1000
"""Number of steps in which rollbacks are counted (fault_detector.max_rollbacks)."""


def roll_back(run: PreparedRun, plan: RollbackPlan | None) -> None:
    """Discard the current step and restore an earlier checkpoint of the run; the samples that
    `plan` covers count as consumed. Collective.

    `plan`: None: the newest checkpoint is restored, and the samples of the steps since then, and of
    the current one, are skipped. Later checkpoints are deleted.

    Raises:
        CallbackError: on every rank: there is no checkpoint, or too many rollbacks.
        DataError: there are too few samples for the remaining steps.
    """
    settings, before = run.run.fault_detector, run.state.as_json()
    step = run.state.step + 1
    _check_rollbacks(run, step)
    bad = plan or RollbackPlan(step, step)
    is_distant = plan is not None and plan.skips_samples
    target, consumed = _choose_target(run, bad, settings.rollback_steps if is_distant else 0)
    if is_distant and target.is_recent:
        run.print_line(
            f"step {step}: no healthy checkpoint is fault_detector.rollback_steps="
            f"{settings.rollback_steps} steps before step {bad.first_bad_step}; the oldest one, of "
            f"step {target.step}, is used"
        )
    samples: tuple[int, int] | None = None
    if bad.skips_samples:
        samples = plan_skipped_range(
            build_batch_schedule(run.run.train),
            run.state.skipped_samples,
            num_steps=_count_read_steps(run, target.step, bad.last_bad_step),
            consumed=consumed,
            skip_samples_past_spike=settings.skip_samples_past_spike if plan else 0,
        )

    def discard_later_checkpoints() -> None:
        # Recorded first: if the run is killed before the next save, it still skips the samples.
        if samples is not None:
            reason = bad.reason or "requested by a callback"
            record_skipped_samples(run.folder, samples, step=step, cause="rollback", reason=reason)
        discard_later(run.folder.checkpoints, target.step)

    raise_on_all_ranks(
        lambda: discard_later_checkpoints() if run.is_writer else None, run.mesh.world
    )
    saved = run.restore_newest()
    if run.local_tier is not None:
        # Those of this step have the old position in the data.
        run.local_tier.discard_after(run.state.step - 1)
    _skip_samples(run, before, samples)
    run.rollbacks = (*run.rollbacks, step)
    run.callback_states = saved.state.get(CALLBACKS, {})
    run.extend_data()
    run.print_line(
        f"step {step}: rolled back to the checkpoint of step {run.state.step}; continuing with "
        f"sample {run.state.consumed_samples}"
    )


def _count_read_steps(run: PreparedRun, first: int, last: int) -> int:
    """Return the number of steps after `first`, up to `last`, that train.skip_steps did not
    skip."""
    return last - first - sum(first < step <= last for step in run.state.skipped_steps)


def _check_rollbacks(run: PreparedRun, step: int) -> None:
    """Check that there were few rollbacks in the last steps.

    Raises:
        RollbackLimitError: there were too many.
    """
    most = run.run.fault_detector.max_rollbacks
    recent = [each for each in run.rollbacks if step - each < ROLLBACK_WINDOW]
    if len(recent) < most:
        return
    steps = f" (from steps {', '.join(map(str, recent))})" if recent else ""
    raise RollbackLimitError(
        f"step {step}: a callback requested a rollback after {len(recent)} rollbacks in "
        f"{ROLLBACK_WINDOW} steps{steps}, and fault_detector.max_rollbacks={most}. Reduce "
        "schedule.lr, check the data, or set fault_detector.max_rollbacks to "
        f"{len(recent) + 1} or more."
    )


def _choose_target(
    run: PreparedRun, plan: RollbackPlan, rollback_steps: int
) -> tuple[RollbackTarget, int]:
    """Return the checkpoint to restore, and the samples that it has consumed. Collective.

    Raises:
        CallbackError: on every rank: there is none.
    """
    folder, step = run.folder.checkpoints, run.state.step + 1

    def choose() -> tuple[RollbackTarget, int] | None:
        states = _read_states(folder, before=plan.first_bad_step)
        healthy = {each: bool(state.get(HEALTHY, True)) for each, state in states.items()}
        target = choose_checkpoint(healthy, plan, rollback_steps=rollback_steps)
        if target is None:
            return None
        return target, int(states[target.step]["train"]["consumed_samples"])

    chosen = raise_on_all_ranks(lambda: choose() if run.is_writer else None, run.mesh.world)[0]
    if chosen is not None:
        return chosen
    first, more = plan.first_bad_step, ", or run without the callback"
    missing = f"has no healthy checkpoint from before step {first}"
    if first == step:
        missing = "has no checkpoint yet"
    if first > 1:
        advice = f"Set checkpoint.every to a number from 1 to {first - 1}"
    elif first == step:
        advice = "Request a rollback only after the first save"
    else:
        advice, more = "Run the same command again to continue from the newest checkpoint", ""
    raise CallbackError(
        f"step {step}: a callback requested a rollback, and {folder} {missing}. {advice}{more}."
    )


def _read_states(folder: StoragePath, *, before: int) -> dict[int, dict[str, Any]]:  # Any: JSON
    """Return the states of the complete checkpoints of a run from before a step, by step; without
    those that cannot be read."""
    states = {}
    for step, path in list_complete_checkpoints(folder).items():
        if step < before:
            try:
                states[step] = open_checkpoint(path).require_state("train")
            except CheckpointError:
                continue  # damaged: no run resumes from it either
    return states


def _skip_samples(
    run: PreparedRun,
    before: Mapping[str, Any],  # Any: JSON
    samples: tuple[int, int] | None,
) -> None:
    """Skip samples, first and end, and those that were skipped before the rollback.

    `before`: counters of the run before the rollback.
    """
    state, skipped = run.state, before.get("skipped_samples")
    ranges = [] if samples is None else [samples]
    if skipped is not None:
        ranges += [(first, end) for first, end in skipped["rollback"]]
        if samples is not None:  # otherwise the skipped steps are repeated, too
            steps = {int(each): tuple(value) for each, value in skipped["steps"].items()}
            state.skipped_steps = {**state.skipped_steps, **steps}
    state.skip_samples(ranges)
