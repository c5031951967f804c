"""When checkpoints are written and how many are kept."""

from dataclasses import dataclass


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
    """Start from this checkpoint or Hugging Face folder when the run folder has none; unset: fresh weights."""

    max_save_failures: int = 3
    """A failed save is announced and the run goes on with the previous checkpoint; this many in a row end the run."""
