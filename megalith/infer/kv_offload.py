"""KV offloading: copies of KV cache blocks between the device and host memory.

On a GPU the host memory is pinned, and blocks are copied on a stream of their own. An offloaded
block is gathered into a staging buffer first, so the step may overwrite it at once; the copy of the
buffer overlaps with the step. Loaded blocks arrive in a staging buffer too, and the step waits for
them on the device. On a CPU all copies are complete when `transfer` returns.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from megalith.config.serve import CacheConfig
from megalith.errors import ConfigError
from megalith.infer.cache import CachePlan, PagedKVCache
from megalith.plan.serving.block_allocator import BlockCopy

logger = logging.getLogger(__name__)

STAGING_NBYTES = 64 * 2**20
"""Largest size of a staging buffer that holds more than one block (heuristic: several ms of PCIe
bandwidth)."""

GIB = 2**30

CHUNK_NBYTES = GIB
"""Bytes of an allocation: torch rounds pinned memory up to a power of two, so one allocation could
take twice the memory."""


def count_host_block_bytes(plan: CachePlan, block_size: int) -> int:
    """Return the bytes of a block in host memory on one rank, a multiple of 8."""
    return -(-plan.round_block_size(block_size) * plan.bytes_per_token // 8) * 8


def plan_host_blocks(
    cache: CacheConfig, plan: CachePlan, *, num_ranks: int, free_bytes: int
) -> int:
    """Return how many blocks of `num_ranks` ranks fit into `cache.host_gb`; `free_bytes`: host
    memory that is left.

    Raises:
        ConfigError: not one fits, the memory does not suffice, or the prefix cache is not used.
    """
    if not cache.host_gb:
        return 0
    setting = f"cache.host_gb={cache.host_gb}"
    if not cache.prefix_caching or plan.has_states or not plan.layout.groups:
        reason = "cache.prefix_caching=false" if not cache.prefix_caching else "this model"
        raise ConfigError(
            f"{setting} with {reason}: only blocks of the prefix cache are offloaded, and it is "
            "not used. Set cache.host_gb to 0."
        )
    block_nbytes = count_host_block_bytes(plan, cache.block_size) * num_ranks
    num_blocks = int(cache.host_gb * GIB) // block_nbytes
    if num_blocks < 1:
        raise ConfigError(
            f"{setting} is less than a block of {cache.block_size} tokens, which has "
            f"{block_nbytes / 2**20:.3g} MiB. Set cache.host_gb to {_format_gib(block_nbytes)} or "
            "more, or to 0."
        )
    if num_blocks * block_nbytes > free_bytes:
        raise ConfigError(
            f"{setting}: only {free_bytes / GIB:.3g} GiB of host memory are free, without those of "
            f"the model and its KV cache. Set cache.host_gb to {int(free_bytes / GIB * 100) / 100} "
            "or less."
        )
    return num_blocks


def _format_gib(nbytes: int) -> str:
    """Return a number of GiB, at least `nbytes`, with two digits."""
    text = f"{nbytes / GIB:.2g}"
    return text if float(text) * GIB >= nbytes else f"{nbytes / GIB * 1.05:.2g}"


class HostBlockPool:
    """Blocks of the KV cache of this rank in host memory.

    A block has the bytes of all layers, so that it is copied in one piece.
    """

    def __init__(self, cache: PagedKVCache, num_blocks: int, device: torch.device) -> None:
        """Allocate `num_blocks` blocks for those of `cache` on `device`.

        Raises:
            ConfigError: the system cannot allocate the memory.
        """
        self._cache, self._device, self.num_blocks = cache, device, num_blocks
        block_nbytes = count_host_block_bytes(cache.plan, cache.block_size)
        is_cuda = device.type == "cuda"  # lint: allow cuda-literal: pinned memory is CUDA's
        self._chunk_size = max(1, CHUNK_NBYTES // block_nbytes)
        starts = range(0, num_blocks, self._chunk_size)
        try:
            self._chunks = [
                torch.empty(
                    min(self._chunk_size, num_blocks - start),
                    block_nbytes,
                    dtype=torch.uint8,
                    pin_memory=is_cuda,
                )
                for start in starts
            ]
        except RuntimeError as error:
            nbytes = num_blocks * block_nbytes
            raise ConfigError(
                f"cache.host_gb: {nbytes / GIB:.3g} GiB of host memory cannot be allocated "
                f"({error}). Set cache.host_gb lower."
            ) from error
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._invalid: set[int] = set()
        """Blocks whose copy to host memory failed."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(chunk.nbytes for chunk in self._chunks)

    @torch.inference_mode()
    def transfer(
        self, offloads: Sequence[BlockCopy], loads: Sequence[BlockCopy]
    ) -> list[BlockCopy]:
        """Execute the planned copies, first to host memory, then from it. Returns the loads that
        failed, also because their block could not be offloaded before."""
        pools = self._cache.block_words() if offloads or loads else []
        if not pools:  # of a pipeline stage without attention
            return []
        failed: list[BlockCopy] = []
        for copies in self._split(offloads):
            numbers = {copy.destination for copy in copies}
            try:
                self._offload(pools, copies)
                self._invalid -= numbers
            except RuntimeError:
                logger.warning("%d KV cache blocks were not offloaded", len(copies), exc_info=True)
                self._invalid |= numbers
        valid = [copy for copy in loads if copy.source not in self._invalid]
        for copies in self._split(valid):
            try:
                self._load(pools, copies)
            except RuntimeError:
                logger.warning("%d KV cache blocks were not loaded", len(copies), exc_info=True)
                failed += copies
        return failed + [copy for copy in loads if copy.source in self._invalid]

    def _split(self, copies: Sequence[BlockCopy]) -> Iterator[Sequence[BlockCopy]]:
        """Yield the copies of one staging buffer after the other."""
        size = max(1, STAGING_NBYTES // self._chunks[0].shape[1])
        for start in range(0, len(copies), size):
            yield copies[start : start + size]

    def _offload(self, pools: Sequence[Tensor], copies: Sequence[BlockCopy]) -> None:
        staging, parts = _make_staging(pools, len(copies))
        sources = torch.tensor([copy.source for copy in copies], device=self._device)
        for pool, part in zip(pools, parts, strict=True):
            torch.index_select(pool, 0, sources, out=part)
        with self._after_step():
            for copy, block in zip(copies, staging, strict=True):
                self._host_block(copy.destination, block).copy_(block, non_blocking=True)
        if self._stream is not None:
            staging.record_stream(self._stream)  # not reused before the copies are complete

    def _load(self, pools: Sequence[Tensor], copies: Sequence[BlockCopy]) -> None:
        staging, parts = _make_staging(pools, len(copies))
        with self._after_step():
            for copy, block in zip(copies, staging, strict=True):
                block.copy_(self._host_block(copy.source, block), non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        destinations = torch.tensor([copy.destination for copy in copies], device=self._device)
        for pool, part in zip(pools, parts, strict=True):
            pool.index_copy_(0, destinations, part)

    def _host_block(self, number: int, like: Tensor) -> Tensor:
        """Return the words of a block in host memory that correspond to those of a buffer."""
        chunk = self._chunks[number // self._chunk_size]
        return chunk[number % self._chunk_size, : like.nbytes].view(like.dtype)

    def _after_step(self) -> AbstractContextManager[object]:
        """Return a context whose copies follow all previous work of the device, on the stream of
        the copies."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


def _make_staging(pools: Sequence[Tensor], num_blocks: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a buffer [num_blocks, words] on the device, and its part for each pool [blocks, words
    of the pool] of the cache."""
    sizes = [pool.shape[1] for pool in pools]
    staging = pools[0].new_empty(num_blocks, sum(sizes))
    return staging, staging.split(sizes, dim=1)
