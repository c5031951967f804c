"""Suspending an engine: its KV cache and its weights leave device memory, so that other work, such
as the training steps of reinforcement learning, can use it.

Storages are released and allocated again in place, so that all tensors and views of them remain
valid. Their addresses change.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.errors import CheckpointError, ConfigError, UserError
from megalith.infer.cache import PagedKVCache
from megalith.infer.quantize import iter_quantized_weights
from megalith.infer.refit import UpdateMode
from megalith.kernels.cpu_threads import return_freed_memory
from megalith.models.decoder import Decoder
from megalith.parallel.group import Group, raise_on_all_ranks
from megalith.plan.serving.block_allocator import BlockAllocator
from megalith.plan.serving.engine_state import EngineState, Suspension

Span = tuple[int, int]
"""Bytes of a storage: first, and end."""


class EngineMemoryError(UserError):
    """The memory does not suffice to suspend an engine, or to wake it up, or cannot be released."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Tensors of an engine in device memory."""

    weights: Sequence[Tensor] = ()
    """Parameters, scales of quantized ones, and adapters."""

    caches: Sequence[tuple[PagedKVCache, BlockAllocator]] = ()
    """KV caches, and which of their blocks are in use."""

    states: Sequence[Tensor] = ()
    """Tensors of sequences that are in no block."""


class ReleasedStorage:
    """A storage whose device memory can be released: some of its bytes are copied to host memory,
    and back."""

    def __init__(self, storage: torch.UntypedStorage, spans: Sequence[Span]) -> None:
        """Copy the bytes of `spans` to host memory; `wait_for_copies` before the release.

        Raises:
            EngineMemoryError: the memory of the storage cannot be released.
        """
        if not storage.resizable():
            raise EngineMemoryError(
                f"suspend: a storage of {storage.nbytes()} bytes on {storage.device} cannot be "
                "released, because it is a mapped file or belongs to another library. Clone its "
                "tensors, or use offload_weights=false if it has weights."
            )
        self.storage, self._spans, self._num_bytes = storage, spans, storage.nbytes()
        self._host = torch.empty(
            sum(end - start for start, end in spans),
            dtype=torch.uint8,
            pin_memory=storage.device.type == "cuda",  # lint: allow cuda-literal: so is pinning
        )
        for device, host in self._pair_spans():
            host.copy_(device, non_blocking=True)

    def release(self) -> None:
        """Release the device memory."""
        self.storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the device memory again, uninitialized."""
        self.storage.resize_(self._num_bytes)

    def copy_back(self) -> None:
        """Start to copy the bytes to the device."""
        for device, host in self._pair_spans():
            device.copy_(host, non_blocking=True)

    def _pair_spans(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the bytes of each span on the device and in host memory."""
        data = torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)
        first = 0
        for start, end in self._spans:
            yield data[start:end], self._host[first : first + end - start]
            first += end - start


class EngineMemory:
    """Releases the device memory of an engine and restores it. All ranks that share the engine make
    the same calls."""

    def __init__(self, sources: Sequence[Callable[[], DeviceMemory]], ranks: Group) -> None:
        """`sources`: return the tensors of the model, and of the drafts; `ranks`: those that share
        the engine."""
        self._sources, self._ranks = sources, ranks
        self._state = EngineState()
        self._released_blocks: list[ReleasedStorage] = []
        self._released_weights: list[ReleasedStorage] = []

    @property
    def suspension(self) -> Suspension | None:
        """Return what is released; None: the engine is not suspended."""
        return self._state.suspension

    def check_suspend(self, suspension: Suspension) -> None:
        """Check that the engine can be suspended.

        Raises:
            ConfigError: there is no such mode.
            InvalidStateError: the engine is suspended with other options.
        """
        self._state.suspend(suspension)

    def check_update(self, mode: UpdateMode, *, has_started: bool) -> None:
        """Check the mode of a weight update while the engine is suspended; `has_started`: whether a
        request has.

        Raises:
            ConfigError: requests in flight would not continue as the mode says.
        """
        if self.suspension is None or not has_started or mode == "recompute":
            return
        if mode == "drain":
            raise ConfigError(
                "mode=drain: the engine is suspended, so the requests in flight do not finish. Use "
                "mode=recompute, or call wake_up first."
            )
        if self.suspension.kv_cache == "recompute":
            raise ConfigError(
                "mode=keep: the engine is suspended with kv_cache=recompute, so there is no KV "
                "cache of the requests in flight to keep. Use mode=recompute, or suspend with "
                "kv_cache=offload."
            )

    @torch.inference_mode()
    def release(self, suspension: Suspension, *, on_copied: Callable[[], None]) -> None:
        """Copy to host memory what is needed later, and release the device memory. Collective.

        `on_copied`: called before the release, when it cannot fail any more.

        Raises:
            EngineMemoryError: on every rank: the host memory does not suffice, or memory cannot be
                released. Nothing is released.
        """
        is_first = self.suspension is None
        blocks: list[ReleasedStorage] = []
        weights: list[ReleasedStorage] = []

        def copy() -> None:
            memory = [source() for source in self._sources]
            if is_first and suspension.kv_cache != "persist":
                saves = suspension.kv_cache == "offload"
                for each in memory:
                    blocks.extend(_copy_blocks(each, saves=saves))
            if suspension.offload_weights:
                weights.extend(_copy_tensors(each for part in memory for each in part.weights))

        self._run_on_all_ranks("suspend", "host", copy)
        wait_for_copies([*blocks, *weights])
        on_copied()
        _release([*blocks, *weights])
        self._released_blocks += blocks
        self._released_weights += weights
        self._state = self._state.suspend(suspension)

    def restore(self, *, capture_graphs: Callable[[], None]) -> None:
        """Restore everything that is released. Collective. Without effect if the engine is not
        suspended.

        `capture_graphs`: called when everything is restored; it may allocate memory.

        Raises:
            EngineMemoryError: on every rank: the device memory does not suffice. Nothing is
                restored.
        """
        if self.suspension is None:
            return
        self._restore([*self._released_weights, *self._released_blocks], capture_graphs)
        self._released_weights, self._released_blocks = [], []
        self._state = self._state.wake_up()

    def restore_weights(self) -> None:
        """Restore the weights only, before they are updated. Collective. Without effect if they are
        not released. A later suspension releases them again.

        Raises:
            EngineMemoryError: as of `restore`.
        """
        if self.suspension is not None and self.suspension.offload_weights:
            self._restore(self._released_weights)
            self._released_weights = []
            suspension = replace(self.suspension, offload_weights=False)
            self._state = replace(self._state, suspension=suspension)

    @torch.inference_mode()
    def _restore(
        self,
        released: Sequence[ReleasedStorage],
        capture_graphs: Callable[[], None] | None = None,
    ) -> None:
        def allocate() -> None:
            for each in released:
                each.allocate()

        try:
            self._run_on_all_ranks("wake_up", "device", allocate)
            for each in released:
                each.copy_back()
            wait_for_copies(released)
            if capture_graphs is not None:
                self._run_on_all_ranks("wake_up", "device", capture_graphs)
        except BaseException:
            _release(released)
            raise

    def _run_on_all_ranks(self, command: str, memory: str, work: Callable[[], None]) -> None:
        """Run work that allocates memory on all ranks.

        Raises:
            EngineMemoryError: on every rank: a rank has too little memory.
        """

        def allocate() -> None:
            try:
                work()
            except RuntimeError as error:
                if not is_allocation_error(error):
                    raise
                raise EngineMemoryError(
                    f"{command}: the {memory} memory does not suffice ({error!s:.300}). Free "
                    f"memory, such as that of the trainer, and call {command} again."
                ) from error

        try:
            raise_on_all_ranks(allocate, self._ranks)
        except CheckpointError as error:
            raise EngineMemoryError(str(error)) from error


def is_allocation_error(error: RuntimeError) -> bool:
    """Return whether memory could not be allocated, which has no error class of its own on CPUs and
    for pinned memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        text in str(error) for text in ("allocate memory", "out of memory")
    )


def list_weights(model: Decoder) -> list[Tensor]:
    """Return the parameters and buffers of a model, and the scales of int8 weights."""
    scales = [quantized.matmul_ops.scales for quantized in iter_quantized_weights(model)]
    return [*model.parameters(), *model.buffers(), *scales]


def wait_for_copies(storages: Iterable[ReleasedStorage]) -> None:
    """Wait until the copies of some storages are complete."""
    for device in {each.storage.device for each in storages}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)


def _release(storages: Iterable[ReleasedStorage]) -> None:
    for each in storages:
        each.release()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()  # for other processes
    return_freed_memory()


def _copy_tensors(tensors: Iterable[Tensor]) -> Iterator[ReleasedStorage]:
    """Copy the storages of tensors to host memory, each once."""
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    for storage in storages.values():
        if storage.nbytes():
            yield ReleasedStorage(storage, [(0, storage.nbytes())])


def _copy_blocks(memory: DeviceMemory, *, saves: bool) -> Iterator[ReleasedStorage]:
    """Copy the blocks in use and the states of sequences to host memory; `saves`: False if they are
    not needed any more."""
    for cache, allocator in memory.caches:
        spans = find_spans(allocator.list_stored()) if saves else []
        for blocks in cache.list_tensors():
            block_bytes = blocks[0].nbytes
            yield ReleasedStorage(
                blocks.untyped_storage(),
                [(start * block_bytes, end * block_bytes) for start, end in spans],
            )
    if saves:
        yield from _copy_tensors(memory.states)


def find_spans(blocks: Sequence[int]) -> list[Span]:
    """Return the spans of consecutive numbers in an ascending list.

    >>> find_spans([2, 3, 4, 9])
    [(2, 5), (9, 10)]
    """
    spans: list[Span] = []
    for block in blocks:
        if spans and spans[-1][1] == block:
            spans[-1] = (spans[-1][0], block + 1)
        else:
            spans.append((block, block + 1))
    return spans
