"""Runs per-matrix update rules on matrices of which the ranks of a pipeline stage hold pieces.

`plan/assigned_ranks` decides which rank computes the direction of each matrix. The momentum stays
in the slices; pieces of what the rule needs are sent to the assigned rank, in waves, and pieces of
the direction back to every rank that holds them.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.config.optim import OptimConfig
from megalith.observe.machine import DTYPES
from megalith.optim.optimizer import MatrixUpdater, RuleSlots
from megalith.optim.rules import MatrixPiece, MatrixRule, SummedRule, UpdateScalars
from megalith.optim.slots import OptimizerSlot
from megalith.parallel.group import Group, all_reduce_, gather_objects
from megalith.parallel.matrix_exchange import PendingExchange, start_uneven_all_to_all
from megalith.parallel.mesh import Mesh
from megalith.plan.assigned_ranks import (
    AssignedRanksPlan,
    HeldPart,
    Piece,
    WaveExchange,
    list_wave_exchanges,
    plan_assigned_ranks,
)
from megalith.plan.matrices import MatrixSplit, WeightMatrix, split_into_matrices
from megalith.plan.parameters import ParameterRates
from megalith.plan.shards import DENSE_AXES, Box, Shard
from megalith.plan.transfer import box_numel, relative_box

# --- matrices of all ranks


class HeldParameterSlot(NamedTuple):
    """Description of a slot that its rank sends to the other ranks of the stage."""

    shape: tuple[int, ...]
    inputs: int
    part: HeldPart
    dtype: str
    wide_dtype: str
    rates: ParameterRates


class StageMatrices(NamedTuple):
    """Matrices of one update rule on all ranks of a pipeline stage."""

    plan: AssignedRanksPlan
    rates: tuple[ParameterRates, ...]
    """Rates of each matrix."""

    dtype: torch.dtype
    """Dtype in which the model computes with the parameters."""

    wide_dtype: torch.dtype
    """Dtype of the master weights."""


def collect_stage_matrices(
    slots: Sequence[OptimizerSlot], group: Group, *, split: MatrixSplit, nope_dim: int | None
) -> StageMatrices:
    """Return the matrices of these slots and of those of the other ranks, and their assigned ranks.
    Collective over `group`, the ranks of the stage."""
    local = {
        slot.shard.name: HeldParameterSlot(
            slot.shard.shape,
            slot.shard.inputs,
            HeldPart.from_shard(slot.shard),
            slot.shard.dtype,
            slot.shard.wide_dtype,
            slot.rates,
        )
        for slot in slots
    }
    held: list[Mapping[str, HeldParameterSlot]] = []
    for parts in gather_objects(local, group):
        assert isinstance(parts, dict)
        held.append(parts)
    parameters = {name: slot for parts in held for name, slot in parts.items()}
    matrices: list[WeightMatrix] = []
    for name, slot in sorted(parameters.items()):
        matrices += split_into_matrices(
            name, slot.shape, slot.inputs, split=split, nope_dim=nope_dim
        )
    dtypes = sorted({(slot.wide_dtype, slot.dtype) for slot in parameters.values()})
    # with parameters of several dtypes, 16-bit ones determine that of the messages
    wide_dtype, dtype = (DTYPES[name] for name in (dtypes or [("fp32", "fp32")])[0])
    plan = plan_assigned_ranks(
        matrices,
        [{name: slot.part for name, slot in parts.items()} for parts in held],
        itemsize=wide_dtype.itemsize,
    )
    rates = tuple(parameters[matrix.parameter].rates for matrix in matrices)
    return StageMatrices(plan, rates, dtype, wide_dtype)


def select_block_piece(values: Tensor, piece: Piece) -> Tensor:
    """Return the view of a piece in a slice that holds it."""
    start, box = piece.block
    shape = [stop - first for first, stop in box]
    block = values.view(-1)[start : start + prod(shape)].view(shape)
    return select_box(block, piece.in_block())


def select_matrix_piece(matrix: Tensor, origin: Box, piece: Piece) -> Tensor:
    """Return the view of a piece in a whole matrix [rows, columns], whose box is `origin`."""
    values = matrix.view([stop - first for first, stop in origin])
    return select_box(values, relative_box(piece.box, origin))


def assemble_matrix_(matrix: Tensor, origin: Box, pieces: Sequence[tuple[Piece, Tensor]]) -> None:
    """Write the pieces of a matrix [rows, columns] into it, in place: each where its box is."""
    for piece, values in pieces:
        target = select_matrix_piece(matrix, origin, piece)
        target.copy_(values.view(target.shape) if values.dim() == 1 else values)


def select_box(values: Tensor, box: Box) -> Tensor:
    """Return the view of a box in coordinates of the tensor."""
    return values[tuple(slice(*span) for span in box)]


# --- rules that compute a direction from the whole matrix


class MatrixBatch(NamedTuple):
    """Matrices of equal shape that this rank computes together."""

    numbers: tuple[int, ...]
    rows: int
    columns: int
    states: Mapping[str, Tensor]
    """States of the matrices [b, ...] by role."""


class ApplyPiece(NamedTuple):
    """A piece of a slice and its direction."""

    master: Tensor
    direction: Tensor


class AssignedMatrices:
    """Computes the directions of a rule's matrices on their assigned ranks.

    The waves of an exchange overlap: while one is computed, the pieces of the next arrive and the
    directions of the one before are sent. Every rank takes part in every exchange, also without
    matrices.
    """

    def __init__(
        self,
        rule: MatrixRule,
        slots: Sequence[OptimizerSlot],
        mesh: Mesh,
        *,
        split: MatrixSplit,
        nope_dim: int | None,
        overlap: bool,
        device: torch.device,
    ) -> None:
        """Collective over the ranks of the pipeline stage."""
        self.rule, self.overlap, self.device = rule, overlap, device
        self.group = mesh.over(*DENSE_AXES)
        self.matrices = collect_stage_matrices(slots, self.group, split=split, nope_dim=nope_dim)
        self.dtype = rule.message_dtype(self.matrices.dtype)
        self.exchanges = list_wave_exchanges(self.matrices.plan, self.group.rank)
        self.batches = [self._build_batches(exchange) for exchange in self.exchanges]
        self.shards = {slot.shard.name: slot.shard for slot in slots}

    def update(self, parts: Sequence[RuleSlots], updates: int) -> None:
        """Update the slots of this rank; collective over the ranks of the stage."""
        slots = {slot.shard.name: slot for part in parts for slot in part.slots}
        prepared: dict[str, Tensor] = {}
        scalars: dict[str, UpdateScalars] = {}
        for part in parts:
            names = [slot.shard.name for slot in part.slots]
            values = self.rule.prepare(part.slots, part.gradients, part.scalars)
            prepared |= dict(zip(names, values, strict=True))
            scalars |= dict.fromkeys(names, part.scalars)
        in_flight: list[tuple[int, list[Tensor], PendingExchange]] = []
        gathered = self._start_gather(0, prepared) if self.exchanges else None
        for wave in range(len(self.exchanges)):
            assert gathered is not None
            received = gathered.wait()
            has_next = wave + 1 < len(self.exchanges)
            if has_next and self.overlap:
                gathered = self._start_gather(wave + 1, prepared)
            directions = self._compute(wave, prepared, received, updates)
            in_flight.append((wave, directions, self._start_scatter(wave, directions)))
            while len(in_flight) > int(self.overlap):
                self._apply(*in_flight.pop(0), slots, scalars)
            if has_next and not self.overlap:
                gathered = self._start_gather(wave + 1, prepared)
        for each in in_flight:
            self._apply(*each, slots, scalars)

    def list_states(self) -> list[tuple[Shard, str, Tensor]]:
        """Return the states of the matrices assigned to this rank, which alone writes them."""
        plan = self.matrices.plan
        return [
            (
                build_state_shard(
                    plan.matrices[number], self.shards, tensor.shape[1:], is_writer=True
                ),
                role,
                tensor[place : place + 1],
            )
            for batches in self.batches
            for batch in batches
            for role, tensor in batch.states.items()
            for place, number in enumerate(batch.numbers)
        ]

    def _build_batches(self, exchange: WaveExchange) -> list[MatrixBatch]:
        """Group the matrices of this rank in one wave by shape, with states of zero."""
        matrices = self.matrices.plan.matrices
        by_shape: dict[tuple[int, int], list[int]] = {}
        for number in exchange.assigned:
            shape = matrices[number].rows, matrices[number].columns
            by_shape.setdefault(shape, []).append(number)
        return [
            MatrixBatch(tuple(numbers), *shape, self._allocate_states(len(numbers), *shape))
            for shape, numbers in by_shape.items()
        ]

    def _allocate_states(self, count: int, rows: int, columns: int) -> dict[str, Tensor]:
        return {
            role: torch.zeros((count, *shape), dtype=self.matrices.wide_dtype, device=self.device)
            for role, shape in self.rule.matrix_state_shapes(rows, columns).items()
        }

    def _start_gather(self, wave: int, prepared: Mapping[str, Tensor]) -> PendingExchange:
        """Start sending the pieces of a wave to their assigned ranks."""
        exchange = self.exchanges[wave]
        return self._start(
            {
                rank: [self._select(prepared, piece) for piece in pieces]
                for rank, pieces in exchange.sent.items()
            },
            exchange.received,
            number=2 * wave,
        )

    def _start_scatter(self, wave: int, directions: Sequence[Tensor]) -> PendingExchange:
        """Start sending the directions of a wave to the ranks that hold pieces of them."""
        exchange, matrix_of = self.exchanges[wave], self._index_matrices(wave, directions)
        return self._start(
            {
                rank: [self._select_in_matrix(matrix_of, piece) for piece in pieces]
                for rank, pieces in exchange.copies.items()
            },
            exchange.held,
            number=2 * wave + 1,
        )

    def _start(
        self,
        sent: Mapping[int, Sequence[Tensor]],
        received: Mapping[int, Sequence[Piece]],
        *,
        number: int,
    ) -> PendingExchange:
        """Start an exchange; pieces from this rank itself take no part in it."""
        ranks = range(self.group.size)
        send = [sum(view.numel() for view in sent.get(rank, ())) for rank in ranks]
        receive = [
            sum(piece.numel for piece in received.get(rank, ())) if rank != self.group.rank else 0
            for rank in ranks
        ]
        message = torch.empty(sum(send), dtype=self.dtype, device=self.device)
        views = [view for rank in ranks for view in sent.get(rank, ())]
        for part, view in zip(message.split([view.numel() for view in views]), views, strict=True):
            part.view(view.shape).copy_(view)
        return start_uneven_all_to_all(message, send, receive, self.group, number=number)

    def _compute(
        self, wave: int, prepared: Mapping[str, Tensor], received: Tensor, updates: int
    ) -> list[Tensor]:
        """Return the directions of this rank's matrices in a wave, by batch."""
        exchange = self.exchanges[wave]
        stacked = [
            torch.empty(
                (len(batch.numbers), batch.rows, batch.columns),
                dtype=self.dtype,
                device=self.device,
            )
            for batch in self.batches[wave]
        ]
        pieces_of: dict[int, list[tuple[Piece, Tensor]]] = {}
        start = 0
        for rank, piece in order_pieces(exchange.received, self.group):
            if rank == self.group.rank:
                values = self._select(prepared, piece)
            else:
                values = received[start : start + piece.numel]
                start += piece.numel
            pieces_of.setdefault(piece.matrix, []).append((piece, values))
        for number, matrix in self._index_matrices(wave, stacked).items():
            assemble_matrix_(matrix, self.matrices.plan.matrices[number].box, pieces_of[number])
        return [
            self.rule.compute_direction(values, batch.states, updates).to(self.dtype)
            for values, batch in zip(stacked, self.batches[wave], strict=True)
        ]

    def _apply(
        self,
        wave: int,
        directions: Sequence[Tensor],
        scattered: PendingExchange,
        slots: Mapping[str, OptimizerSlot],
        scalars: Mapping[str, UpdateScalars],
    ) -> None:
        """Apply the directions of a wave to this rank's slices."""
        received, matrix_of = scattered.wait(), self._index_matrices(wave, directions)
        plan, start = self.matrices.plan, 0
        groups: dict[tuple[int, int, ParameterRates], list[ApplyPiece]] = {}
        scalars_of: dict[ParameterRates, UpdateScalars] = {}
        for rank, piece in order_pieces(self.exchanges[wave].held, self.group):
            matrix = plan.matrices[piece.matrix]
            slot = slots[matrix.parameter]
            master = select_block_piece(slot.master, piece)
            if rank == self.group.rank:
                direction = self._select_in_matrix(matrix_of, piece)
            else:
                direction = received[start : start + piece.numel].view(master.shape)
                start += piece.numel
            scalars_of[slot.rates] = scalars[matrix.parameter]
            key = matrix.rows, matrix.columns, slot.rates
            groups.setdefault(key, []).append(ApplyPiece(master, direction))
        for (rows, columns, rates), pieces in groups.items():
            self.rule.apply(
                [piece.master for piece in pieces],
                [piece.direction for piece in pieces],
                (rows, columns),
                scalars_of[rates],
            )

    def _index_matrices(self, wave: int, stacked: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the matrices of batches by their numbers."""
        return {
            number: values[place]
            for values, batch in zip(stacked, self.batches[wave], strict=True)
            for place, number in enumerate(batch.numbers)
        }

    def _select(self, values: Mapping[str, Tensor], piece: Piece) -> Tensor:
        return select_block_piece(
            values[self.matrices.plan.matrices[piece.matrix].parameter], piece
        )

    def _select_in_matrix(self, matrix_of: Mapping[int, Tensor], piece: Piece) -> Tensor:
        origin = self.matrices.plan.matrices[piece.matrix].box
        return select_matrix_piece(matrix_of[piece.matrix], origin, piece)


def order_pieces(pieces: Mapping[int, Sequence[Piece]], group: Group) -> list[tuple[int, Piece]]:
    """Return pieces with their ranks in the order of the messages: by rank of the group."""
    return [(rank, piece) for rank in range(group.size) for piece in pieces.get(rank, ())]


def build_state_shard(
    matrix: WeightMatrix, shards: Mapping[str, Shard], shape: Sequence[int], *, is_writer: bool
) -> Shard:
    """Return the shard of one state of a matrix among those of all equal matrices of the parameter:
    [count, *shape]. `is_writer`: whether this rank alone writes it, as if all axes split it."""
    parameter = shards[matrix.parameter]
    return Shard(
        name=matrix.state_name,
        shape=(matrix.state_count, *shape),
        box=((matrix.state_index, matrix.state_index + 1), *((0, n) for n in shape)),
        cut=DENSE_AXES if is_writer else (),
        stages=parameter.stages,
        inputs=0,
        dtype=parameter.dtype,
    )


# --- rules that only sum over the pieces of a matrix


class SummedMatrices:
    """Updates the pieces of a rule that needs sums over each matrix, without moving matrices.

    Every rank that holds a piece of a matrix has its states; the first such rank writes them to
    checkpoints.
    """

    def __init__(
        self,
        rule: SummedRule,
        slots: Sequence[OptimizerSlot],
        mesh: Mesh,
        *,
        split: MatrixSplit,
        nope_dim: int | None,
        device: torch.device,
    ) -> None:
        """Collective over the ranks of the pipeline stage."""
        self.rule, self.group, self.device = rule, mesh.over(*DENSE_AXES), device
        self.matrices = collect_stage_matrices(slots, self.group, split=split, nope_dim=nope_dim)
        self.shards = {slot.shard.name: slot.shard for slot in slots}
        plan, rank = self.matrices.plan, self.group.rank
        self.pieces: list[tuple[Piece, bool]] = [
            (piece, replicas.is_sent and replicas.ranks[0] == rank)
            for number, of_matrix in enumerate(plan.replicas)
            for replicas in of_matrix
            if rank in replicas.ranks
            for piece in replicas.list_pieces(number, plan.matrices[number])
        ]
        """This rank's pieces, and whether they are the first copies."""
        self.states = {
            number: {
                role: torch.zeros(shape, dtype=self.matrices.wide_dtype, device=device)
                for role, shape in rule.matrix_state_shapes(*self._shape(number)).items()
            }
            for number in sorted({piece.matrix for piece, _ in self.pieces})
        }

    def update(self, parts: Sequence[RuleSlots], updates: int) -> None:
        """Update the slots of this rank; collective over the ranks of the stage."""
        slots = {slot.shard.name: slot for part in parts for slot in part.slots}
        gradients = {
            slot.shard.name: gradient
            for part in parts
            for slot, gradient in zip(part.slots, part.gradients, strict=True)
        }
        scalars = {slot.rates: part.scalars for part in parts for slot in part.slots}
        for rates in dict.fromkeys(self.matrices.rates):
            numbers = [n for n, own in enumerate(self.matrices.rates) if own == rates]
            index_of = {number: index for index, number in enumerate(numbers)}
            pieces = [
                rectangle
                for piece, counted in self.pieces
                if piece.matrix in index_of
                for rectangle in self._rectangles(
                    piece, slots, gradients, index_of[piece.matrix], counted=counted
                )
            ]
            # a rank without pieces of these rates has no scalars and needs none
            own_scalars = scalars.get(rates, UpdateScalars(0.0, 0.0, updates))
            shapes = [self._shape(number) for number in numbers]
            self.rule.update_pieces(pieces, own_scalars, shapes, self._all_reduce, self.device)

    def list_states(self) -> list[tuple[Shard, str, Tensor]]:
        """Return the states of the matrices of which this rank holds pieces; the first of those
        ranks writes them."""
        plan = self.matrices.plan
        entries: list[tuple[Shard, str, Tensor]] = []
        for number, states in self.states.items():
            is_writer = self.group.rank == min(one.ranks[0] for one in plan.replicas[number])
            for role, tensor in states.items():
                shard = build_state_shard(
                    plan.matrices[number], self.shards, tensor.shape, is_writer=is_writer
                )
                entries.append((shard, role, tensor))
        return entries

    def _shape(self, number: int) -> tuple[int, int]:
        matrix = self.matrices.plan.matrices[number]
        return matrix.rows, matrix.columns

    def _all_reduce(self, values: Tensor) -> None:
        all_reduce_(values, self.group)

    def _rectangles(
        self,
        piece: Piece,
        slots: Mapping[str, OptimizerSlot],
        gradients: Mapping[str, Tensor],
        index: int,
        *,
        counted: bool,
    ) -> Iterator[MatrixPiece]:
        """Yield the rectangles of its matrix that a piece consists of, as views of the slice."""
        matrix = self.matrices.plan.matrices[piece.matrix]
        slot = slots[matrix.parameter]
        master = select_block_piece(slot.master, piece)
        gradient = select_block_piece(gradients[matrix.parameter], piece)
        box = relative_box(piece.box, matrix.box)
        shape = tuple(stop - start for start, stop in matrix.box)
        for part in iter_rectangles(box, shape, master.stride(), slot.shard.inputs):
            inside = relative_box(part, box)
            rows = box_numel(part[: -slot.shard.inputs])
            yield MatrixPiece(
                index,
                flat_offset(part[: -slot.shard.inputs], shape[: -slot.shard.inputs]),
                flat_offset(part[-slot.shard.inputs :], shape[-slot.shard.inputs :]),
                select_box(master, inside).view(rows, -1),
                select_box(gradient, inside).view(rows, -1),
                counted,
                self.states[piece.matrix],
            )


def iter_rectangles(
    box: Box, shape: Sequence[int], strides: Sequence[int], inputs: int
) -> Iterator[Box]:
    """Yield boxes of `box` whose output dims and whose last `inputs` dims are contiguous both in a
    tensor of `shape` and in a view with these strides.

    >>> list(iter_rectangles(((0, 2), (0, 3), (0, 4)), (2, 3, 4), (20, 4, 1), 1))
    [((0, 1), (0, 3), (0, 4)), ((1, 2), (0, 3), (0, 4))]
    """
    outputs = len(shape) - inputs
    for dims in (range(outputs), range(outputs, len(shape))):
        sizes = [stop - start for start, stop in box]
        long = [dim for dim in dims if sizes[dim] > 1]
        inner = range(long[0] + 1, dims.stop) if long else range(0)
        if all(
            sizes[dim] == shape[dim] and strides[dim - 1] == sizes[dim] * strides[dim]
            for dim in inner
        ):
            continue
        start, stop = box[long[0]]
        for place in range(start, stop):
            part = (*box[: long[0]], (place, place + 1), *box[long[0] + 1 :])
            yield from iter_rectangles(part, shape, strides, inputs)
        return
    yield box


def flat_offset(box: Box, shape: Sequence[int]) -> int:
    """Return the index of the first element of a box in a row-major tensor.

    >>> flat_offset(((1, 2), (2, 4)), (3, 4))
    6
    """
    offset = 0
    for (start, _), size in zip(box, shape, strict=True):
        offset = offset * size + start
    return offset


# --- built from the settings of a run


def build_matrix_updater(
    name: str,
    rule: MatrixRule | SummedRule,
    slots: Sequence[OptimizerSlot],
    *,
    mesh: Mesh,
    optim: OptimConfig,
    nope_dim: int | None,
    overlap: bool,
    device: torch.device,
) -> MatrixUpdater:
    """Build the updater of a per-matrix rule over the slots of this rank; collective over the ranks
    of the pipeline stage.

    `nope_dim`: features of each head's key without position embedding in latent attention;
    `overlap`: communicate a wave while another is computed.
    """
    split = optim.muon.split if name == "muon" else "matrices"
    if isinstance(rule, MatrixRule):
        return AssignedMatrices(
            rule, slots, mesh, split=split, nope_dim=nope_dim, overlap=overlap, device=device
        )
    return SummedMatrices(rule, slots, mesh, split=split, nope_dim=nope_dim, device=device)
