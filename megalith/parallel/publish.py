"""Updated weights on their way to the ranks that compute with them, bucket by bucket, while the
next forward runs."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from megalith.parallel.group import Group
from megalith.parallel.slices import Works, start_gather
from megalith.plan.buckets import BucketPlan


class ParamAllGather:
    """Makes a flat buffer whole again, of each bucket of which every rank of a group has updated
    its own slice.

    Source: Rajbhandari et al. 2019, arXiv:1910.02054, section 5.1.
    """

    def __init__(self, weights: Tensor, plan: BucketPlan, slices: Sequence[Group]) -> None:
        """`slices`: for each bucket, the ranks that divide it."""
        self.weights, self.plan, self.slices = weights, plan, slices
        self.arriving: dict[int, Works] = {}
        """By bucket, in the order in which they arrive."""

    def start(self) -> None:
        """Send my slices, and receive those of the others; nothing of the last time may still be on
        its way."""
        for index in reversed(
            range(len(self.plan.buckets))
        ):  # the last bucket holds the first layers
            bucket = self.plan.buckets[index]
            weights = self.weights.data[
                bucket.start : bucket.stop
            ]  # autograd need not count this as a change
            self.arriving[index] = start_gather(weights, self.slices[index], tag=2 * index + 1)

    def wait_params(self) -> None:
        """Wait until the weights of all slices have arrived."""
        self._arrive(list(self.arriving))

    def wait_in(self, chunk: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        """Let every layer of a chunk wait for its own weights, and what comes after the chunk's
        forward for the rest.

        A head is not called as a module but asked for a loss or for logits, of what forward has
        given. `parameters`: all that lie in the buffer, in the order of the plan.
        """
        bucket_of = {
            id(one): slot.bucket for one, slot in zip(parameters, self.plan.slots, strict=True)
        }
        for module in _layers(chunk):
            module.register_forward_pre_hook(self._wait_hook(module, bucket_of))
        chunk.register_forward_hook(self._wait_hook(chunk, bucket_of))

    def _wait_hook(self, module: nn.Module, bucket_of: dict[int, int]) -> Callable[..., None]:
        """Waits for the buckets with weights of a module, in the order in which they arrive."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        buckets = sorted({bucket_of[id(parameter)] for parameter in trained}, reverse=True)

        def wait(*_: object) -> None:
            if self.arriving:
                self._arrive(buckets)

        return wait

    def _arrive(self, buckets: Iterable[int]) -> None:
        for index in buckets:
            works = self.arriving.pop(index, None)
            if works is not None:
                works.wait()


def _layers(chunk: nn.Module) -> list[nn.Module]:
    """What forward calls: the modules right below a chunk, and those in its lists."""
    return [
        layer
        for child in chunk.children()
        for layer in (child if isinstance(child, nn.ModuleList) else [child])
    ]
