"""All-gather of updated weights, bucket by bucket, overlapped with the next forward pass."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from megalith.parallel.group import Group
from megalith.parallel.slices import PendingMessages, start_bucket_all_gather
from megalith.plan.buckets import BucketPlan


class ParamAllGather:
    """All-gather of a flat weight buffer; in each bucket every rank of a group has updated its own
    slice.

    Source: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.1.
    """

    def __init__(self, weights: Tensor, plan: BucketPlan, slices: Sequence[Group]) -> None:
        """`slices`: for each bucket, the group over which it is sharded."""
        self.weights, self.plan, self.slices = weights, plan, slices
        self.pending: dict[int, PendingMessages] = {}
        """Bucket -> its messages, in the order in which they were started."""

    def start(self) -> None:
        """Start the all-gather of every bucket; the previous one must be complete."""
        # reversed: the last bucket holds the first layers
        for index in reversed(range(len(self.plan.buckets))):
            bucket = self.plan.buckets[index]
            # .data: autograd need not count this as an in-place change
            weights = self.weights.data[bucket.start : bucket.stop]
            self.pending[index] = start_bucket_all_gather(
                weights, self.slices[index], tag=2 * index + 1
            )

    def wait_params(self) -> None:
        """Wait until all weights are complete."""
        self._wait_buckets(list(self.pending))

    def wait_in(self, chunk: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Register forward hooks on `chunk`: each layer waits for its own weights before its
        forward, and the chunk waits for the rest after its forward.

        The head is not called as a module: its loss or logits are computed from the output of the
        chunk. `parameters`: all parameters of the buffer, in the order of the plan.
        """
        bucket_of = {
            id(parameter): slot.bucket
            for parameter, slot in zip(parameters, self.plan.slots, strict=True)
        }
        for module in _layers(chunk):
            module.register_forward_pre_hook(self._wait_hook(module, bucket_of))
        chunk.register_forward_hook(self._wait_hook(chunk, bucket_of))

    def _wait_hook(self, module: nn.Module, bucket_of: dict[int, int]) -> Callable[..., None]:
        """Return a hook that waits for the buckets of a module's weights, in the order of their
        messages."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        buckets = sorted({bucket_of[id(parameter)] for parameter in trained}, reverse=True)

        def wait(*_: object) -> None:
            if self.pending:
                self._wait_buckets(buckets)

        return wait

    def _wait_buckets(self, buckets: Iterable[int]) -> None:
        for index in buckets:
            works = self.pending.pop(index, None)
            if works is not None:
                works.wait()


def _layers(chunk: nn.Module) -> list[nn.Module]:
    """Return the modules that forward calls: the children of a chunk, and the items of its module
    lists."""
    return [
        layer
        for child in chunk.children()
        for layer in (child if isinstance(child, nn.ModuleList) else [child])
    ]
