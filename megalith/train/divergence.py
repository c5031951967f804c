"""Divergence: detects NaN or infinite losses, gradients and parameters, and names the checkpoint to
continue from."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from megalith.checkpoint.boxes import CheckpointEntry
from megalith.checkpoint.load import list_complete_checkpoints
from megalith.optim.gradients import LossScale
from megalith.train.step import StepResult


def is_divergent(result: StepResult, loss_scale: LossScale | None) -> bool:
    """Return whether a step has NaN or infinite values that a lower loss scale would not avoid.

    That is a non-finite loss, or non-finite gradients without dynamic loss scaling or at its lowest
    scale. An fp16 step that overflows at a higher scale is normal.
    """
    if result.empty:
        return False
    if not all(map(math.isfinite, (result.loss, *result.mtp_losses))):
        return True
    return not result.updated and (
        loss_scale is None or not loss_scale.dynamic or loss_scale.stuck > 0
    )


def find_nonfinite_parameters(entries: Sequence[CheckpointEntry]) -> list[str]:
    """Return the names of the parameters whose weights or master weights are NaN or infinite
    somewhere.

    Checks the shards that this rank saves. The host waits for the device once.
    """
    weights = [
        e for e in entries if e.role in ("param", "master") and e.is_writer and e.tensor.numel()
    ]
    if not weights:
        return []
    # Minimum and maximum are NaN if any element is; they take a twentieth of the time of isfinite
    # (measured on a CPU).
    extremes = [torch.stack(torch.aminmax(entry.tensor.detach())).double() for entry in weights]
    finite = torch.isfinite(torch.stack(extremes)).all(dim=1).tolist()
    return sorted(
        {entry.shard.name for entry, good in zip(weights, finite, strict=True) if not good}
    )


def describe_last_good_checkpoint(folder: Path, last_update: int, lr: float) -> str:
    """Describe how to continue from the newest checkpoint in `folder` before a series of skipped
    steps.

    `last_update`: the last step before the series; `lr`: schedule.lr of the run.
    """
    complete = list_complete_checkpoints(folder)
    good = next((path for step, path in reversed(complete.items()) if step <= last_update), None)
    change = f"with another setting, for example --schedule.lr {lr / 2:g} ({lr:g} now)"
    if good is None:
        where = " and in another folder (--run NAME)" if complete else ""
        return f"No checkpoint is from before that: start from the beginning {change}{where}."
    if good == list(complete.values())[-1]:
        return (
            f"The last checkpoint from before that is {good}: run the same command again {change}, "
            "and it continues from there."
        )
    return (
        f"The last checkpoint from before that is {good}: to continue from it, run the same "
        f"command again {change}, and with --run NAME --checkpoint.load {good} "
        "--checkpoint.load_mode all."
    )
