"""The one place where the loss is scaled, and where the ranks' losses are said to be parts of one sum."""

from collections.abc import Sequence

from torch import Tensor

from megalith.parallel.autograd import partial
from megalith.parallel.mesh import Mesh


def share_of_mean(loss: Tensor, *, num_labels: int, mesh: Mesh, scale: float = 1.0) -> Tensor:
    """My part of the mean loss over the global batch: what backward starts from.

    loss: the sum over the labels of my microbatch; num_labels: those that count in the global batch, over all ranks.
    The parts of all microbatches and of all dp and cp ranks add up to the mean, so gradients are summed over those
    ranks and never averaged. scale: of fp16, which the gradients are divided by before they are used.
    """
    share = loss / max(1, num_labels)
    return partial(share if scale == 1.0 else share * scale, mesh.dp_cp)


def share_of_means(
    losses: Sequence[Tensor], *, num_labels: Sequence[int], weight: float, mesh: Mesh, scale: float = 1.0
) -> Tensor:
    """The same where losses of further depths follow: the mean of their means counts `weight` times.

    losses, num_labels: of the next token, then of each depth, which has labels of its own to be divided by.
    """
    own, *further = losses
    mean = own / max(1, num_labels[0])
    for loss, count in zip(further, num_labels[1:], strict=True):
        mean = mean + loss * (weight / len(further) / max(1, count))
    return share_of_mean(mean, num_labels=1, mesh=mesh, scale=scale)
