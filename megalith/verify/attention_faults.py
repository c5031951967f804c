"""What faults in attention across ranks put in place of the right functions; see `verify/faults.py`."""

from torch import Tensor

from megalith.kernels.span_attention import Result, nothing_found
from megalith.parallel.group import Group


def heads_of_the_first_rank(weight: Tensor | None, group: Group) -> Tensor | None:
    """After an exchange of heads, every rank takes what was learnt for those of the first."""
    return None if weight is None else weight.unflatten(-1, (group.size, -1))[..., 0, :]


def nothing_found_without_the_extra_score(
    q: Tensor, width: int, sinks: Tensor | None = None, *, off_by_one: bool = False
) -> Result:
    """A ring begins as if only keys took part in softmax."""
    return nothing_found(q, width, sinks)
