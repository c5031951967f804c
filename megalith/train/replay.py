"""Choices of experts of a whole step, whatever layout they were made under, and a rank's part of
them under another.

What routers write down is of one rank's own tokens and layers. Put in the order in which tokens
were read, it is the same under every layout of the same global batch, and rollouts or runs with
other layouts can give it, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megalith.data.loader import Batch
from megalith.errors import DataError
from megalith.kernels.replay import Routing
from megalith.kernels.tokens import PackedSeqParams
from megalith.parallel.group import gather_objects
from megalith.parallel.mesh import Mesh
from megalith.train.experts import routers_of

Numbers = NDArray[np.int64]


class RoutingPart(NamedTuple):
    """What one rank knows of one layer and microbatch."""

    layer: str
    microbatch: int
    numbers: Numbers
    """[n]: which tokens of the step, as it was read."""

    experts: NDArray[np.int32]
    """[n, k]."""


def whole_routing(routing: Routing, batches: Sequence[Batch], mesh: Mesh) -> dict[str, Tensor]:
    """What was chosen in a step, by layer: int64 [tokens of the global batch, k], in the order in
    which they were read.

    The same on every rank. Collective over the mesh, through the hosts: for tests, debugging and
    short rollouts.

    Raises:
        DataError: some microbatch of the step has not been recorded, or they are of several sizes.
    """
    mine = {_tokens_read(batch.tokens) for batch in batches}, list(parts(routing, batches, mesh))
    told = [some for some in gather_objects(mine, mesh.world) if isinstance(some, tuple)]
    size = len(batches) * mesh.dp.size * _one_size({one for sizes, _ in told for one in sizes})
    every = [part for _, some in told for part in some]
    found: dict[str, NDArray[np.int64]] = {}
    for layer, _, numbers, experts in every:
        found.setdefault(layer, np.full((size, experts.shape[1]), -1))[numbers] = experts
    for layer, choices in found.items():
        missing = int((choices[:, 0] < 0).sum())
        if missing:
            raise DataError(
                f"{layer}: choices of {missing} of the step's {size} tokens were not recorded. "
                "Record every microbatch "
                f"of the step on all ranks, and pass the same microbatches here."
            )
    return {layer: torch.from_numpy(found[layer]) for layer in sorted(found)}


def routing_of(
    whole: Mapping[str, Tensor], batches: Sequence[Batch], model: nn.Module, mesh: Mesh, *, sp: bool
) -> Routing:
    """This rank's part of the choices of a step, to be followed: of its layers and tokens, by
    microbatch.

    whole: by layer, [tokens of the global batch, k], as `whole_routing` gives them. Padding goes to
    the first experts.

    Raises:
        DataError: a layer is missing, or the choices are those of another number of tokens.
    """
    choices = {}
    for layer in (router.layer for router in routers_of(model)):
        each = _one_size({_tokens_read(batch.tokens) for batch in batches})
        experts = _checked(whole, layer, len(batches) * mesh.dp.size * each)
        for number, batch in enumerate(batches):
            count = batch.tokens.num_tokens // (mesh.tp.size if sp else 1)
            numbers = torch.from_numpy(numbers_of(number, batch.tokens, count, mesh)).to(
                experts.device
            )
            padding = torch.arange(experts.shape[1], device=experts.device)
            choices[layer, number] = experts[numbers].where((numbers >= 0).unsqueeze(1), padding)
    return Routing(choices, followed=True)


def parts(
    routing: Routing, batches: Sequence[Batch], mesh: Mesh, *, filler: bool = True
) -> Iterator[RoutingPart]:
    """What this rank wrote down, by layer and microbatch, without padding; and without `filler`,
    if it is to be left out, which is read as tokens are."""
    for (layer, number), experts in routing.choices.items():
        tokens, count = batches[number].tokens, len(experts)
        numbers = numbers_of(number, tokens, count, mesh)
        told = numbers >= 0 if filler else text_of(tokens, count, mesh)
        yield RoutingPart(
            layer, number, numbers[told], experts.cpu().numpy().astype(np.int32)[told]
        )


def text_of(tokens: PackedSeqParams, count: int, mesh: Mesh) -> NDArray[np.bool_]:
    """[count]: which of my `count` tokens of a microbatch are text, and neither padding nor
    filler."""
    valid: NDArray[np.bool_] = tokens.valid.cpu().numpy()
    first = 0 if count == len(valid) else mesh.tp.rank * count
    return valid[first : first + count]


def numbers_of(number: int, tokens: PackedSeqParams, count: int, mesh: Mesh) -> Numbers:
    """Which tokens of the step my `count` of a microbatch are, -1 for padding: a step reads one
    microbatch of every data-parallel rank after the other."""
    context = tokens.context
    read = np.arange(tokens.num_tokens) if context is None else context.slices.as_read(context.rank)
    first = 0 if count == len(read) else mesh.tp.rank * count
    mine = read[first : first + count]
    start = (number * mesh.dp.size + mesh.dp.rank) * _tokens_read(tokens)
    numbers: Numbers = np.where(mine >= 0, start + mine, -1)
    return numbers


def _tokens_read(tokens: PackedSeqParams) -> int:
    """Of a microbatch, over the ranks that share it, before any padding that the layout needs."""
    source = None if tokens.context is None else tokens.context.slices.source
    return tokens.whole.num_tokens if source is None else int(np.count_nonzero(source >= 0))


def _one_size(sizes: set[int]) -> int:
    """PackedSeqParams that every microbatch of a step reads."""
    if len(sizes) > 1:
        raise DataError(
            f"microbatches of {sorted(sizes)} tokens: choices are put in the order of tokens that "
            "were read in rows of "
            "one length. Use train.seq_len without train.tokens_per_microbatch, or "
            "parallel.context.slicing=row."
        )
    return next(iter(sizes))


def _checked(whole: Mapping[str, Tensor], layer: str, tokens: int) -> Tensor:
    if layer not in whole:
        raise DataError(
            f"{layer}: no choices to follow (there are: {', '.join(whole) or 'none'}). Pass those "
            f"of a model with experts in the same layers."
        )
    if len(whole[layer]) != tokens:
        raise DataError(
            f"{layer}: choices of {len(whole[layer])} tokens for a step that reads {tokens}. Use "
            "those of the same "
            f"train.global_batch_size and train.seq_len."
        )
    return whole[layer]
