"""Assigned ranks: which rank computes the update direction of each matrix whose elements several
ranks hold, and the pieces that ranks send to each other for it; no torch.

Update rules per matrix (Muon, SOAP) need whole matrices, while tensor parallelism, ZeRO and expert
parallelism leave pieces of them on the ranks. Every rank computes the same plan from the names,
shapes and boxes of all ranks.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megalith.errors import PlanError
from megalith.plan.matrices import WeightMatrix
from megalith.plan.shards import Box, Shard, intersect, split_range_into_boxes
from megalith.plan.transfer import box_numel, relative_box

MIN_WAVES = 4
"""Waves of an exchange between several ranks: while one is computed, the next is communicated
(heuristic: a quarter of the communication is exposed at most)."""

WAVE_NBYTES = 256 * 2**20
"""Bytes of matrices of one rank in a wave at most (heuristic: bounds the buffers)."""


class HeldPart(NamedTuple):
    """Part of one parameter that a rank holds: a box, or a range of its elements."""

    box: Box
    """Box of the global parameter."""

    flat: tuple[int, int] | None = None
    """Elements [start, stop) of the box in row-major order; None: all."""

    @classmethod
    def from_shard(cls, shard: Shard) -> "HeldPart":
        """Return the part that a shard describes."""
        return cls(shard.box, shard.flat)


class HeldBlock(NamedTuple):
    """Box of a parameter whose elements are contiguous in a rank's slice, in row-major order."""

    start: int
    """First element in the slice."""

    box: Box
    """Box of the global parameter."""


@lru_cache(maxsize=1 << 16)
def list_blocks(part: HeldPart) -> tuple[HeldBlock, ...]:
    """Return the blocks of a slice, in order; together they are the slice.

    >>> [block.start for block in list_blocks(HeldPart(((0, 5), (4, 8)), (3, 17)))]
    [0, 1, 13]
    """
    if part.flat is None:
        return (HeldBlock(0, part.box),) if box_numel(part.box) else ()
    shape = tuple(stop - start for start, stop in part.box)
    blocks: list[HeldBlock] = []
    start = 0
    for box in split_range_into_boxes(shape, *part.flat):
        moved = tuple((a + first, b + first) for (a, b), (first, _) in zip(box, part.box))
        blocks.append(HeldBlock(start, moved))
        start += box_numel(box)
    return tuple(blocks)


class Piece(NamedTuple):
    """Elements of one matrix in one block of a slice."""

    matrix: int
    """Number of the matrix."""

    block: HeldBlock
    """Block of the slice of the rank that holds the piece."""

    box: Box
    """Box of the global parameter: the intersection of block and matrix."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return box_numel(self.box)

    def in_block(self) -> Box:
        """Return the piece's box in coordinates of its block."""
        return relative_box(self.box, self.block.box)


@lru_cache(maxsize=1 << 18)
def _intersections(part: HeldPart, box: Box) -> tuple[tuple[HeldBlock, Box], ...]:
    """Return the blocks of a part that intersect a box, with the intersections, in order."""
    return tuple(
        (block, common)
        for block in list_blocks(part)
        if (common := intersect(block.box, box)) is not None
    )


@lru_cache(maxsize=1 << 18)
def _count_elements(part: HeldPart, box: Box) -> int:
    """Return the number of elements of a box that a part contains."""
    return sum(box_numel(common) for _, common in _intersections(part, box))


class PieceReplicas(NamedTuple):
    """Ranks that hold the same elements of a matrix; each has a copy."""

    ranks: tuple[int, ...]
    """Ranks, ascending."""

    part: HeldPart
    """Their part of the parameter."""

    numel: int
    """Elements of the matrix in this part."""

    is_sent: bool = True
    """Whether one of them sends the elements to the assigned rank; else the parts of others contain
    them."""

    def list_pieces(self, number: int, matrix: WeightMatrix) -> list[Piece]:
        """Return the pieces of matrix number `number`, in the order of the slice."""
        return [Piece(number, block, box) for block, box in _intersections(self.part, matrix.box)]


@dataclass(frozen=True)
class AssignedRanksPlan:
    """Assignment of matrices to ranks, and the waves in which they are exchanged."""

    matrices: tuple[WeightMatrix, ...]
    replicas: tuple[tuple[PieceReplicas, ...], ...]
    """Parts of each matrix with their replicas; those with `is_sent` are disjoint and together are
    the matrix."""

    ranks: tuple[int, ...]
    """Assigned rank of each matrix: one that holds some of it."""

    senders: tuple[tuple[int, ...], ...]
    """Rank that sends the pieces of each part with `is_sent` to the assigned rank; that rank itself
    if it holds them."""

    waves: tuple[int, ...]
    """Wave of each matrix."""

    num_ranks: int
    num_waves: int
    """Number of waves, the same on every rank; a rank may have no matrix in some."""

    @cached_property
    def costs(self) -> tuple[int, ...]:
        """FLOPs of one Newton-Schulz step of each rank's matrices."""
        costs = [0] * self.num_ranks
        for matrix, rank in zip(self.matrices, self.ranks, strict=True):
            costs[rank] += matrix.cost
        return tuple(costs)

    @property
    def imbalance(self) -> float:
        """Largest cost of a rank, relative to the mean."""
        mean = sum(self.costs) / self.num_ranks
        return max(self.costs) / mean if mean else 1.0

    @property
    def best_imbalance(self) -> float:
        """Lower bound of `imbalance`: a rank has the largest matrix, however few there are."""
        mean = sum(self.costs) / self.num_ranks
        largest = max((matrix.cost for matrix in self.matrices), default=0)
        return max(1.0, largest / mean) if mean else 1.0

    def list_senders(self, number: int) -> list[tuple[PieceReplicas, int]]:
        """Return who sends which pieces of a matrix to its assigned rank."""
        sent = [one for one in self.replicas[number] if one.is_sent]
        return list(zip(sent, self.senders[number], strict=True))

    def list_assigned(self, rank: int) -> list[int]:
        """Return the numbers of the matrices assigned to a rank, ascending."""
        return [number for number, assigned in enumerate(self.ranks) if assigned == rank]

    @cached_property
    def sent_numels(self) -> tuple[int, ...]:
        """Elements that each rank sends in a step: pieces to assigned ranks, and pieces of the
        directions to every rank that holds them."""
        sent = [0] * self.num_ranks
        for number, assigned in enumerate(self.ranks):
            for replicas, sender in self.list_senders(number):
                sent[sender] += replicas.numel if sender != assigned else 0
            for replicas in self.replicas[number]:
                others = len(replicas.ranks) - (assigned in replicas.ranks)
                sent[assigned] += others * replicas.numel
        return tuple(sent)


def plan_assigned_ranks(
    matrices: Sequence[WeightMatrix],
    held: Sequence[Mapping[str, HeldPart]],
    *,
    itemsize: int = 4,
    wave_nbytes: int = WAVE_NBYTES,
    min_waves: int = MIN_WAVES,
) -> AssignedRanksPlan:
    """Assign every matrix to one of the ranks that hold elements of it, balanced by cost, and order
    the exchange in waves of equal bytes.

    held: the part of each parameter that each rank holds. Longest processing time first: the most
    expensive matrix, of several the one that fewest ranks hold, goes to the rank with the least
    cost so far; ties go to the rank that holds most of it, then to the one with fewer elements.
    Ranks with copies of the same elements (replicas of HSDP, zero 0, KV heads shared by
    tensor-parallel ranks) divide the work. Source: Graham 1969, doi:10.1137/0117039, section 3.

    >>> from megalith.plan.matrices import split_into_matrices
    >>> up = split_into_matrices("gate_up", (2, 4, 8), 1)
    >>> rows = [HeldPart(((0, 2), (0, 2), (0, 8))), HeldPart(((0, 2), (2, 4), (0, 8)))]
    >>> plan = plan_assigned_ranks(up, [{"gate_up": part} for part in rows])
    >>> plan.ranks, plan.sent_numels
    ((0, 1), (32, 32))

    Raises:
        PlanError: the ranks do not hold each element of a matrix, or hold overlapping parts.
    """
    replicas = list(_find_replicas(matrices, held))
    ranks = _assign(matrices, replicas, len(held))
    waves, num_waves = _plan_waves(
        matrices,
        ranks,
        len(held),
        itemsize=itemsize,
        wave_nbytes=wave_nbytes,
        min_waves=min_waves if len(held) > 1 else 1,
    )
    return AssignedRanksPlan(
        tuple(matrices),
        tuple(replicas),
        tuple(ranks),
        tuple(_choose_senders(replicas, ranks)),
        tuple(waves),
        len(held),
        num_waves,
    )


def _find_replicas(
    matrices: Sequence[WeightMatrix], held: Sequence[Mapping[str, HeldPart]]
) -> Iterator[tuple[PieceReplicas, ...]]:
    """Yield the ranks that hold pieces of each matrix, those with equal pieces together, in the
    order of their first ranks."""
    ranks_of: dict[str, dict[HeldPart, list[int]]] = {}
    for rank, parts in enumerate(held):
        for name, part in parts.items():
            ranks_of.setdefault(name, {}).setdefault(part, []).append(rank)
    covers = {name: _select_cover(list(parts)) for name, parts in ranks_of.items()}
    tables = {
        name: {part: tuple(ranks) for part, ranks in parts.items()}
        for name, parts in ranks_of.items()
    }
    for matrix in matrices:
        name = matrix.parameter
        replicas = [
            PieceReplicas(ranks, part, numel, is_sent=part in covers[name])
            for part, ranks in tables.get(name, {}).items()
            if (numel := _count_elements(part, matrix.box))
        ]
        num_held = sum(one.numel for one in replicas if one.is_sent)
        if num_held != matrix.numel:
            raise PlanError(
                f"{name}, elements {matrix.box}: the ranks of a pipeline stage hold {num_held} of "
                f"{matrix.numel} elements. Each element must be in one part or in copies of it; "
                "run the same version with the same settings on all ranks."
            )
        yield tuple(replicas)


def _select_cover(parts: Sequence[HeldPart]) -> frozenset[HeldPart]:
    """Return parts that contain each element of their boxes once.

    Ranks with copies of a box may have cut it at different elements (buckets of unequal
    tensor-parallel ranks): each rank's cuts continue where any of its parts ends.

    >>> box = ((0, 9),)
    >>> parts = [HeldPart(box, flat) for flat in ((0, 5), (0, 4), (4, 9), (5, 9))]
    >>> [part.flat for part in parts if part in _select_cover(parts)]
    [(0, 5), (5, 9)]
    """
    starting: dict[tuple[Box, int], HeldPart] = {}
    for part in parts:
        start, stop = part.flat or (0, box_numel(part.box))
        if start < stop:
            starting.setdefault((part.box, start), part)
    cover: set[HeldPart] = set()
    for box in {part.box for part in parts}:
        position = 0
        while (chosen := starting.get((box, position))) is not None:
            cover.add(chosen)
            position = chosen.flat[1] if chosen.flat is not None else box_numel(box)
    return frozenset(cover)


def _assign(
    matrices: Sequence[WeightMatrix], replicas: Sequence[Sequence[PieceReplicas]], num_ranks: int
) -> list[int]:
    """Return the assigned rank of each matrix."""
    costs, numels = [0] * num_ranks, [0] * num_ranks
    assigned = [0] * len(matrices)
    num_held = [_count_held(of_matrix) for of_matrix in replicas]
    order = sorted(
        range(len(matrices)),
        key=lambda i: (
            -matrices[i].cost,
            len(num_held[i]),
            -matrices[i].numel,
            matrices[i].parameter,
            i,
        ),
    )
    for number in order:
        own = num_held[number]
        rank = min(own, key=lambda r: (costs[r], -own[r], numels[r], r))
        costs[rank] += matrices[number].cost
        numels[rank] += matrices[number].numel
        assigned[number] = rank
    return assigned


def _count_held(replicas: Sequence[PieceReplicas]) -> Mapping[int, int]:
    """Return the elements of a matrix that each rank holds, by rank."""
    return {rank: one.numel for one in replicas for rank in one.ranks}


def _choose_senders(
    replicas: Sequence[Sequence[PieceReplicas]], ranks: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """Yield who sends the pieces of each part of a matrix: the assigned rank itself if it
    has a copy, else the one that sends the fewest elements so far."""
    sent = Counter[int]()
    for of_matrix, assigned in zip(replicas, ranks, strict=True):
        senders: list[int] = []
        for one in [one for one in of_matrix if one.is_sent]:
            if assigned in one.ranks:
                senders.append(assigned)
                continue
            sender = min(one.ranks, key=lambda rank: (sent[rank], rank))
            sent[sender] += one.numel
            senders.append(sender)
        yield tuple(senders)


def _plan_waves(
    matrices: Sequence[WeightMatrix],
    ranks: Sequence[int],
    num_ranks: int,
    *,
    itemsize: int,
    wave_nbytes: int,
    min_waves: int,
) -> tuple[list[int], int]:
    """Return the wave of each matrix, and the number of waves.

    A rank's matrices are ordered by shape, so that equal shapes form batches, and cut into waves of
    about equal bytes.
    """
    own: list[list[int]] = [[] for _ in range(num_ranks)]
    for number, rank in enumerate(ranks):
        own[rank].append(number)
    totals = [sum(matrices[number].numel for number in numbers) for numbers in own]
    by_bytes = -(-max(totals, default=0) * itemsize // wave_nbytes)
    most = max((len(numbers) for numbers in own), default=0)
    num_waves = min(max(by_bytes, min_waves), most)
    waves = [0] * len(matrices)
    for numbers, total in zip(own, totals, strict=True):
        done = 0
        by_shape = sorted(numbers, key=lambda i: (-matrices[i].rows, -matrices[i].columns, i))
        for number in by_shape:
            waves[number] = (2 * done + matrices[number].numel) * num_waves // (2 * total)
            done += matrices[number].numel
    return waves, num_waves


# --- one rank's part of the exchange


@dataclass(frozen=True, slots=True)
class WaveExchange:
    """Messages of one rank in one wave. Directions go the opposite way of matrices, to every rank
    that holds pieces."""

    assigned: tuple[int, ...]
    """Numbers of the matrices that this rank computes, ascending."""

    sent: Mapping[int, tuple[Piece, ...]]
    """Pieces of other ranks' matrices that this rank sends, by assigned rank."""

    received: Mapping[int, tuple[Piece, ...]]
    """Pieces of its own matrices that this rank receives, by sender; its own pieces are under its
    own rank."""

    held: Mapping[int, tuple[Piece, ...]]
    """Pieces that this rank holds and whose directions it receives, by assigned rank; those that it
    computes itself are under its own rank."""

    copies: Mapping[int, tuple[Piece, ...]]
    """Pieces of its own matrices that other ranks hold, to which it sends directions, by rank."""


def list_wave_exchanges(plan: AssignedRanksPlan, rank: int) -> list[WaveExchange]:
    """Return the messages of a rank in every wave. Both ends of a message list its pieces in the
    same order: by matrix, then as in the slice."""
    tables: list[tuple[dict[int, list[Piece]], ...]] = [
        ({}, {}, {}, {}) for _ in range(plan.num_waves)
    ]
    for number, assigned in enumerate(plan.ranks):
        sent, received, held, copies = tables[plan.waves[number]]
        matrix = plan.matrices[number]
        for one, sender in plan.list_senders(number):
            if assigned == rank:
                received.setdefault(sender, []).extend(one.list_pieces(number, matrix))
            elif sender == rank:
                sent.setdefault(assigned, []).extend(one.list_pieces(number, matrix))
        for one in plan.replicas[number]:
            if rank in one.ranks:
                held.setdefault(assigned, []).extend(one.list_pieces(number, matrix))
            for other in one.ranks if assigned == rank else ():
                if other != rank:
                    copies.setdefault(other, []).extend(one.list_pieces(number, matrix))
    assigned_by_wave: list[list[int]] = [[] for _ in range(plan.num_waves)]
    for number in plan.list_assigned(rank):
        assigned_by_wave[plan.waves[number]].append(number)
    return [
        WaveExchange(tuple(numbers), *({peer: tuple(of) for peer, of in t.items()} for t in table))
        for numbers, table in zip(assigned_by_wave, tables, strict=True)
    ]
