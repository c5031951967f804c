"""The one place where the loss is scaled, and where the ranks' losses are said to be parts of one sum."""

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
