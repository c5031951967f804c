"""Pipeline parallelism: stages and schedule."""

from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """Pipeline stages and schedule; ignored with parallel.pp=1 and vpp=1."""

    schedule: ScheduleName = "auto"
    """Pipeline schedule. auto: 1f1b, or interleaved if vpp > 1. zb-h1, zb-v and dualpipe-v (zero
    bubble) split the backward into input and weight gradients; zb-v and dualpipe-v place two
    model chunks per rank in a V shape."""

    vpp: int = 1
    """Virtual pipeline size: model chunks per rank. A larger value gives a smaller bubble and
    more communication."""

    group: int | None = None
    """interleaved: number of consecutive microbatches that a rank runs through one chunk before
    it switches to the next. Unset: pp."""

    layout: str | None = None
    """Stage layout as a string: E embedding, t transformer layer, m MTP layer, L loss; `|` ends
    a stage; `t*3` and `(tt|)*2` repeat. Unset: an even split, with all MTP layers in the
    stage of the loss."""

    first_layers: int | None = None
    """Number of layers of the first pipeline rank, over all its chunks. Unset: an even share."""

    last_layers: int | None = None
    """Number of layers of the last pipeline rank, over all its chunks. Unset: an even share."""

    count_embedding: bool = False
    """Count the embedding as one layer in the even split, so that the first stage has one layer
    less."""

    count_loss: bool = False
    """Count the loss as one layer in the even split, so that the last stage has one layer less."""
