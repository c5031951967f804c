"""How layers divide into pipeline stages, and in which order a stage computes."""

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Stages and schedule of pipeline parallelism; nothing here matters with parallel.pp=1 and
    vpp=1."""

    schedule: ScheduleName = "auto"
    """Order of forward and backward passes. auto: 1f1b, or interleaved when vpp > 1. zb-h1, zb-v
    and dualpipe-v split backward into its input and its weight part; zb-v and dualpipe-v place
    two chunks per rank in a V."""

    vpp: int = 1
    """Virtual pipeline: model chunks per rank. More make the bubble smaller and messages more."""

    group: int | None = None
    """interleaved: microbatches that pass through one chunk before the next takes over; unset:
    pp."""

    layout: str | None = None
    """Stages as a string: E embedding, t layer, m MTP layer, L loss, `|`
    ends a stage, `t*3` and `(tt|)*2` repeat. Unset: even, and every m with the loss."""

    first_layers: int | None = None
    """Layers of the first pipeline rank, over all its chunks; unset: its even share."""

    last_layers: int | None = None
    """Layers of the last pipeline rank, over all its chunks; unset: its even share."""

    count_embedding: bool = False
    """Let the embedding count as one layer, so that the first stage has one less."""

    count_loss: bool = False
    """Let the loss count as one layer, so that the last stage has one less."""
