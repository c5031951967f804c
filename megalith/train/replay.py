"""Routing replay across layouts: gathers the expert choices of a step, and shards them for another
layout.

Routers record the choices of one rank's own tokens and layers. In the order in which tokens were
read, the choices are the same under every layout of the same global batch, so they can also come
from rollouts or from runs with other layouts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megalith.data.loader import Batch
from megalith.errors import DataError
from megalith.kernels.replay import RoutingRecord
from megalith.kernels.tokens import PackedSeqParams
from megalith.parallel.group import gather_objects
from megalith.parallel.mesh import Mesh
from megalith.train.experts import iter_routers

Numbers = NDArray[np.int64]


class RoutingPart(NamedTuple):
    """Expert choices of one rank in one layer and microbatch."""

    layer: str
    microbatch: int
    numbers: Numbers
    """[n]: indices of the tokens in the step, in reading order."""

    experts: NDArray[np.int32]
    """[n, k]."""


def gather_routing(
    routing: RoutingRecord, batches: Sequence[Batch], mesh: Mesh
) -> dict[str, Tensor]:
    """Return the expert choices of a step by layer: int64 [tokens of the global batch, k], in
    reading order.

    The result is the same on every rank. Collective over the mesh, through host memory: for tests,
    debugging and short rollouts.

    Raises:
        DataError: a microbatch of the step was not recorded, or microbatches have different sizes.
    """
    local_sizes = {_tokens_read(batch.tokens) for batch in batches}
    local_routing = local_sizes, list(parts(routing, batches, mesh))
    gathered = [
        rank_routing
        for rank_routing in gather_objects(local_routing, mesh.world)
        if isinstance(rank_routing, tuple)
    ]
    tokens = _common_size({size for sizes, _ in gathered for size in sizes})
    size = len(batches) * mesh.dp.size * tokens
    all_parts = [part for _, rank_parts in gathered for part in rank_parts]
    step_choices: dict[str, NDArray[np.int64]] = {}
    for layer, _, numbers, experts in all_parts:
        step_choices.setdefault(layer, np.full((size, experts.shape[1]), -1))[numbers] = experts
    for layer, choices in step_choices.items():
        missing = int((choices[:, 0] < 0).sum())
        if missing:
            raise DataError(
                f"{layer}: expert choices of {missing} of the step's {size} tokens were not "
                "recorded. Record every microbatch of the step on all ranks, and pass the same "
                "microbatches to gather_routing."
            )
    return {layer: torch.from_numpy(step_choices[layer]) for layer in sorted(step_choices)}


def shard_routing(
    whole: Mapping[str, Tensor], batches: Sequence[Batch], model: nn.Module, mesh: Mesh, *, sp: bool
) -> RoutingRecord:
    """Return this rank's part of the expert choices of a step, to be replayed, by layer and
    microbatch.

    whole: by layer, [tokens of the global batch, k], as returned by `gather_routing`. Padding
    tokens choose the first experts.

    Raises:
        DataError: a layer is missing, or the number of tokens differs.
    """
    choices = {}
    for layer in (router.layer for router in iter_routers(model)):
        num_tokens = _common_size({_tokens_read(batch.tokens) for batch in batches})
        experts = _checked_choices(whole, layer, len(batches) * mesh.dp.size * num_tokens)
        for number, batch in enumerate(batches):
            count = batch.tokens.num_tokens // (mesh.tp.size if sp else 1)
            numbers = torch.from_numpy(token_numbers(number, batch.tokens, count, mesh)).to(
                experts.device
            )
            padding = torch.arange(experts.shape[1], device=experts.device)
            choices[layer, number] = experts[numbers].where((numbers >= 0).unsqueeze(1), padding)
    return RoutingRecord(choices, followed=True)


def parts(
    routing: RoutingRecord, batches: Sequence[Batch], mesh: Mesh, *, filler: bool = True
) -> Iterator[RoutingPart]:
    """Yield the choices that this rank recorded, by layer and microbatch, without padding.

    With `filler=False`, filler tokens of packed batches are left out too.
    """
    for (layer, number), experts in routing.choices.items():
        tokens, count = batches[number].tokens, len(experts)
        numbers = token_numbers(number, tokens, count, mesh)
        selected = numbers >= 0 if filler else text_token_mask(tokens, count, mesh)
        yield RoutingPart(
            layer, number, numbers[selected], experts.cpu().numpy().astype(np.int32)[selected]
        )


def text_token_mask(tokens: PackedSeqParams, count: int, mesh: Mesh) -> NDArray[np.bool_]:
    """Return which of this rank's `count` tokens of a microbatch are text, not padding or filler:
    [count]."""
    valid: NDArray[np.bool_] = tokens.valid.cpu().numpy()
    first = 0 if count == len(valid) else mesh.tp.rank * count
    return valid[first : first + count]


def token_numbers(number: int, tokens: PackedSeqParams, count: int, mesh: Mesh) -> Numbers:
    """Return the indices in the step of this rank's `count` tokens of a microbatch; -1 for padding.

    A step reads one microbatch of every data-parallel rank after the other.
    """
    context = tokens.context
    read = np.arange(tokens.num_tokens) if context is None else context.slices.as_read(context.rank)
    first = 0 if count == len(read) else mesh.tp.rank * count
    local_indices = read[first : first + count]
    start = (number * mesh.dp.size + mesh.dp.rank) * _tokens_read(tokens)
    numbers: Numbers = np.where(local_indices >= 0, start + local_indices, -1)
    return numbers


def _tokens_read(tokens: PackedSeqParams) -> int:
    """Return the tokens of a microbatch over the ranks that share it, without padding of the
    layout."""
    source = None if tokens.context is None else tokens.context.slices.source
    return tokens.whole.num_tokens if source is None else int(np.count_nonzero(source >= 0))


def _common_size(sizes: set[int]) -> int:
    """Return the number of tokens that every microbatch of a step reads."""
    if len(sizes) > 1:
        raise DataError(
            f"microbatches of {sorted(sizes)} tokens: routing replay needs microbatches of one "
            "size. Use train.seq_len without train.tokens_per_microbatch, or "
            "parallel.context.slicing=row."
        )
    return next(iter(sizes))


def _checked_choices(whole: Mapping[str, Tensor], layer: str, tokens: int) -> Tensor:
    if layer not in whole:
        raise DataError(
            f"{layer}: no expert choices to replay (layers with choices: "
            f"{', '.join(whole) or 'none'}). Pass those of a model with experts in the same layers."
        )
    if len(whole[layer]) != tokens:
        raise DataError(
            f"{layer}: expert choices of {len(whole[layer])} tokens for a step that reads "
            f"{tokens}. Use choices of the same train.global_batch_size and train.seq_len."
        )
    return whole[layer]
