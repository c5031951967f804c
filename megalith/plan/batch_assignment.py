"""Load-balanced batching: the samples that each rank reads in a step, packed and assigned to data-
parallel ranks.

The assignment follows from the lengths of the step's documents, so every rank computes the same one
without communication. Each rank gets the same number of packs, as the pipeline requires, and about
the same cost.
"""

import heapq
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megalith.config.data import DataConfig
from megalith.config.model import AttentionConfig, ModelConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.errors import DataError, PlanError
from megalith.plan.batch_schedule import largest_batch_size, list_batch_sizes
from megalith.plan.costs import step_flops
from megalith.plan.grid import divisors
from megalith.plan.layers.base import num_attended_pairs
from megalith.plan.packing import pack_in_order
from megalith.plan.schedule import effective_pipeline, schedule_name, schedule_problems

FILLER = 64
"""Length of the padding documents that fill up a pack; short, so that attention over padding is
cheap."""


@dataclass(frozen=True, slots=True)
class DocumentCost:
    """Cost of a document of length L: token · L + pair · L² + seen · (twice the pairs inside the
    attention window)."""

    token: int = 1
    pair: int = 0
    window_pair: int = 0
    attention: AttentionConfig | None = None
    """Attention config that defines the window; used only with `window_pair`."""

    def __call__(self, length: int) -> int:
        """Return the cost of one document."""
        windowed = (
            self.window_pair * num_attended_pairs(length, self.attention)
            if self.attention is not None
            else 0
        )
        return self.token * length + self.pair * length**2 + windowed


def document_cost(model: ModelConfig) -> DocumentCost:
    """Return a cost that counts the FLOPs of forward and backward as `step_flops` does.

    >>> from megalith.plan.costs import step_flops
    >>> heads = {"num_heads": 4, "num_kv_heads": 2}
    >>> model = ModelConfig(
    ...     vocab_size=61, hidden_size=24, num_layers=2, ffn_hidden_size=9, **heads
    ... )
    >>> document_cost(model)(7) == step_flops(model, tokens=7, squared_lengths=49)
    True
    """
    token = step_flops(model, tokens=1, squared_lengths=0, windowed=0)
    pair = step_flops(model, tokens=1, squared_lengths=1, windowed=0) - token
    pair_with_window = step_flops(model, tokens=0, squared_lengths=1)
    windowed = model.attention.window is not None
    return DocumentCost(
        token,
        pair if windowed else pair_with_window,
        pair_with_window - pair if windowed else 0,
        model.attention,
    )


@dataclass(frozen=True, slots=True)
class BatchAssignment:
    """The documents of each pack of a step, and the packs of each data-parallel rank."""

    packs: tuple[tuple[int, ...], ...]
    """Document indices of each pack; pack m · dp + r is microbatch m of rank r. Packs may be empty.
    """

    dp: int

    costs: tuple[int, ...]
    """Total cost of each data-parallel rank."""

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of every rank."""
        return len(self.packs) // self.dp

    def rank_packs(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the packs of one data-parallel rank, by microbatch."""
        return self.packs[rank :: self.dp]

    @property
    def imbalance(self) -> float:
        """Relative excess of the costliest rank over the mean; 0 if all costs are equal."""
        return imbalance(self.costs)

    def digest(self) -> int:
        """Return a 24-bit checksum of the assignment."""
        words = [self.dp, *(number for pack in self.packs for number in (-1 - len(pack), *pack))]
        return zlib.crc32(np.array(words, np.int64).tobytes()) >> 8


def imbalance(costs: Sequence[int]) -> float:
    """Return the relative excess of the maximum over the mean.

    >>> imbalance([3, 1, 2])
    0.5
    """
    return max(costs) * len(costs) / total - 1 if (total := sum(costs)) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """Settings of bin packing and batch assignment: pack capacity, padding, cost and pipeline."""

    capacity: int
    """Tokens of a pack, over the ranks that share it."""

    longest: int
    """Maximum number of tokens of a document."""

    multiple: int = 1
    """Every document is padded to a multiple of this."""

    cost: DocumentCost = DocumentCost()
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    pp: int = 1

    def padded(self, length: int) -> int:
        """Return the number of tokens of a document with its padding."""
        return length + -length % self.multiple

    def assign_batches(
        self, lengths: Sequence[int], dp: int, *, forward_only: bool = False
    ) -> BatchAssignment:
        """Pack documents in order and assign the packs to `dp` ranks; a pure function of its
        arguments.

        If there are fewer packs than the ranks and the pipeline need, the costliest packs are
        split, and the remaining ones are empty. `forward_only`: evaluation, whose pipeline schedule
        accepts any number of microbatches.

        Raises:
            PlanError: a document is longer than a pack.
        """
        packed = pack_in_order([self.padded(length) for length in lengths], self.capacity)
        packs = [tuple(packed.row(number).tolist()) for number in range(packed.num_rows)]
        least = -(-len(packs) // dp)
        count = (
            max(least, 1)
            if forward_only
            else smallest_valid_num_microbatches(self.pipeline, self.pp, least)
        )
        costs = [self.cost(length) for length in lengths]
        packs = _split_packs(packs, costs, count * dp)
        return _assign_packs(packs, [sum(costs[number] for number in pack) for pack in packs], dp)

    def filler(self, length: int) -> tuple[int, ...]:
        """Return the lengths of the padding documents that fill up `length` tokens."""
        size = max(min(FILLER, self.longest) // self.multiple, 1) * self.multiple
        whole, rest = divmod(length, size)
        return (size,) * whole + ((rest,) if rest else ())


def _split_packs(
    packs: list[tuple[int, ...]], costs: Sequence[int], count: int
) -> list[tuple[int, ...]]:
    """Split the costliest packs, each where its halves cost most alike, until there are `count`;
    pad with empty packs."""
    heap = [(-sum(costs[number] for number in pack), pack) for pack in packs if len(pack) > 1]
    single: list[tuple[int, ...]] = [pack for pack in packs if len(pack) <= 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(single) < count:
        for part in _split_in_halves(heapq.heappop(heap)[1], costs):
            if len(part) > 1:
                heapq.heappush(heap, (-sum(costs[number] for number in part), part))
            else:
                single.append(part)
    split_packs = [*single, *(pack for _, pack in heap)]
    return split_packs + [()] * (count - len(split_packs))


def _split_in_halves(
    pack: tuple[int, ...], costs: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    before = np.cumsum([costs[number] for number in pack[:-1]], dtype=object)
    total = sum(costs[number] for number in pack)
    cut = 1 + min(
        range(len(before)), key=lambda position: (abs(total - 2 * before[position]), position)
    )
    return pack[:cut], pack[cut:]


def _assign_packs(packs: list[tuple[int, ...]], costs: list[int], dp: int) -> BatchAssignment:
    """Assign packs to ranks per microbatch, costliest first, to the rank with the lowest total so
    far.

    Packs of the same microbatch then cost about the same, and the totals of two ranks differ by at
    most the cost difference within one microbatch.
    """
    order = sorted(range(len(packs)), key=lambda number: (-costs[number], packs[number]))
    totals, pack_numbers = [0] * dp, [0] * len(packs)
    for start in range(0, len(packs), dp):
        ranks = sorted(range(dp), key=lambda rank: (totals[rank], rank))
        for rank, number in zip(ranks, order[start : start + dp], strict=True):
            totals[rank] += costs[number]
            pack_numbers[start + rank] = number
    return BatchAssignment(tuple(packs[number] for number in pack_numbers), dp, tuple(totals))


def assign_balanced_rows(costs: Sequence[int], *, dp: int, rows: int) -> list[list[list[int]]]:
    """Assign full rows to ranks by cost, as packs are; return the rows of each rank by microbatch,
    `rows` per microbatch.

    The last microbatch of a rank may have fewer rows, and the numbers of rows of two ranks differ
    by at most one.

    >>> assign_balanced_rows([9, 1, 8, 2, 5], dp=2, rows=2)
    [[[0, 3], [1]], [[2, 4]]]
    """
    missing = -len(costs) % dp
    packs: list[tuple[int, ...]] = [(number,) for number in range(len(costs))]
    assignment = _assign_packs(packs + [()] * missing, [*costs, *[0] * missing], dp)
    rows_by_rank = [
        [number for pack in assignment.rank_packs(rank) for number in pack] for rank in range(dp)
    ]
    return [
        [local[start : start + rows] for start in range(0, len(local), rows)]
        for local in rows_by_rank
    ]


@lru_cache(maxsize=64)  # most steps ask for the same few counts
def smallest_valid_num_microbatches(pipeline: PipelineConfig, pp: int, least: int) -> int:
    """Return the smallest number of microbatches that the pipeline schedule accepts, from `least`
    on.

    Raises:
        PlanError: no number is accepted; the message lists the broken rules.
    """
    used, least = effective_pipeline(pipeline, pp), max(least, 1)
    if schedule_name(used) != "interleaved":
        return least
    size = used.group or pp
    for count in range(max(least, size), max(least, size) + size + 1):
        if not schedule_problems(used, pp=pp, num_microbatches=count):
            return count
    problems = schedule_problems(used, pp=pp, num_microbatches=size * least)
    raise PlanError(
        f"{least} microbatches do not fit the pipeline. Use other settings: {' '.join(problems)}"
    )


def build_token_budget(
    train: LoopConfig, parallel: ParallelConfig, model: ModelConfig
) -> TokenBudget | None:
    """Return the packing settings of a run; None if it reads rows of train.seq_len tokens."""
    if train.tokens_per_microbatch is None:
        return None
    return TokenBudget(
        capacity=train.tokens_per_microbatch * parallel.cp,
        longest=train.seq_len,
        multiple=document_multiple(parallel),
        cost=document_cost(model),
        pipeline=parallel.pipeline,
        pp=parallel.pp,
    )


def document_multiple(parallel: ParallelConfig) -> int:
    """Return the multiple that every document is padded to; 1 without padding."""
    if parallel.cp == 1 or parallel.context.slicing == "row":
        return 1
    return 2 * parallel.cp * (parallel.tp if parallel.sp else 1)


def count_microbatches_of_longest(train: LoopConfig, parallel: ParallelConfig, dp: int) -> int:
    """Return the microbatches per step and rank, of the largest batch size; with token budgets, for
    documents of the maximum length."""
    size = largest_batch_size(train)
    if train.tokens_per_microbatch is None:
        needed = -(-size // (train.micro_batch_size * dp))
        return smallest_valid_num_microbatches(parallel.pipeline, parallel.pp, needed)
    length = train.seq_len + -train.seq_len % document_multiple(parallel)
    documents_per_pack = max(train.tokens_per_microbatch * parallel.cp // length, 1)
    packs = -(-size // documents_per_pack)
    return smallest_valid_num_microbatches(parallel.pipeline, parallel.pp, -(-packs // dp))


def budget_problems(train: LoopConfig, parallel: ParallelConfig, data: DataConfig) -> list[str]:
    """Return one error text for each setting that conflicts with train.tokens_per_microbatch."""
    size, defaults, name = train.tokens_per_microbatch, DataConfig(), "train.tokens_per_microbatch"
    if size is None:
        return _rows_problems(train, data)
    problems = [f"{name}={size} with {text}" for text in _find_row_settings(data, defaults)]
    if train.micro_batch_size != 1:
        problems.append(
            f"train.micro_batch_size={train.micro_batch_size} with {name}={size}: a microbatch is "
            f"one pack. Set train.micro_batch_size=1."
        )
    if train.balance_rows:
        problems.append(
            f"train.balance_rows=true with {name}={size}, which balances packs already. Remove "
            "train.balance_rows."
        )
    tp = parallel.tp if parallel.sp else 1
    parts = 2 * tp if parallel.cp > 1 else tp
    if size % parts:
        product = " * ".join(
            (["2"] if parallel.cp > 1 else []) + ([f"parallel.tp={tp}"] if tp > 1 else [])
        )
        problems.append(
            f"{name}={size} is not divisible by {product} = {parts}, over which packs are split. "
            f"Set {name} to {size + -size % parts}."
        )
    multiple = document_multiple(parallel)
    padded = train.seq_len + -train.seq_len % multiple
    if size * parallel.cp < padded:
        least = -(-padded // parallel.cp)
        longest = size * parallel.cp // multiple * multiple
        problems.append(
            f"{name}={size} * parallel.cp={parallel.cp} = {size * parallel.cp} tokens do not "
            "hold a "
            "document of "
            f"train.seq_len={train.seq_len}. Set {name} to {least + -least % parts} or more"
            + (f", or train.seq_len to {longest} or less." if longest else ".")
        )
    return problems


def _rows_problems(train: LoopConfig, data: DataConfig) -> list[str]:
    problems = []
    if train.balance_rows and not data.sft.used():
        problems.append(
            "train.balance_rows=true without data.sft: rows of pretraining text have the same "
            "estimated cost. Set train.balance_rows=false."
        )
    if data.overlong != DataConfig().overlong and not data.sft.used():
        # With SFT, another rule reports it.
        problems.append(
            f"data.overlong={data.overlong} without train.tokens_per_microbatch: rows of text are "
            "cut anywhere. Remove it, or set train.tokens_per_microbatch."
        )
    return problems


def _find_row_settings(data: DataConfig, defaults: DataConfig) -> Iterator[str]:
    """Yield an error for each row setting that has no effect on whole documents."""
    for field_name in ("document_masking", "eod_mask_loss", "keep_partial_valid", "sampler"):
        value = getattr(data, field_name)
        if value != getattr(defaults, field_name) and not data.sft.used():
            # With SFT, another rule reports them.
            yield (
                f"data.{field_name}={value}: a sample is a whole document, shuffled in each "
                "epoch. Remove it."
            )
    for field_name in ("packing", "packs"):
        value = getattr(data.sft, field_name)
        if value != getattr(defaults.sft, field_name):
            yield (
                f"data.sft.{field_name}={value}: conversations are packed per step. Remove "
                "one of them."
            )


# Samples that each rank reads in a step: global batch = micro batch · dp · microbatches, unless the
# batch does not divide.
#
# In one microbatch, all data-parallel ranks read a *group* of micro_batch_size · dp samples, in the
# order of ranks. In sequential order a step therefore reads the same samples under any layout.


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchCounts:
    """Numbers of microbatches that the ranks of a layout can run in a step."""

    equal: bool = False
    """All data-parallel ranks run the same number, because they take part in collectives within a
    microbatch; ranks without samples run empty microbatches."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    pp: int = 1

    def count(self, needed: int) -> int:
        """Return the smallest number of microbatches from `needed` on, at least 1, that the
        pipeline schedule accepts."""
        return smallest_valid_num_microbatches(self.pipeline, self.pp, needed)


ANY_COUNTS = MicrobatchCounts()
"""Each rank runs the microbatches that it has samples for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAssignment:
    """Samples of a global batch by rank and microbatch, if the shares of the ranks may differ.

    Microbatch m of rank r has the `micro_batch_size` samples from (m · num_ranks + r) ·
    micro_batch_size on. The last microbatch of the batch may have fewer samples, and later ranks
    may have one microbatch less. Which samples share a microbatch does not depend on `num_ranks`.
    The ranks of several replica groups with dp ranks each are numbered group · dp + dp rank.

    >>> assignment = SampleAssignment(num_samples=7, micro_batch_size=2, num_ranks=3)
    >>> [assignment.list_microbatches(rank) for rank in range(3)]
    [[range(0, 2), range(6, 7)], [range(2, 4)], [range(4, 6)]]
    """

    num_samples: int
    micro_batch_size: int
    num_ranks: int
    counts: MicrobatchCounts = ANY_COUNTS

    @property
    def num_filled(self) -> int:
        """Number of microbatches with samples, over all ranks."""
        return -(-self.num_samples // self.micro_batch_size)

    @property
    def num_rounds(self) -> int:
        """Largest number of microbatches with samples of one rank."""
        return -(-self.num_filled // self.num_ranks)

    @property
    def is_even(self) -> bool:
        """Whether all ranks have equally many full microbatches, and no empty ones."""
        group = self.micro_batch_size * self.num_ranks
        return (
            self.num_samples % group == 0 and self.counts.count(self.num_rounds) == self.num_rounds
        )

    def count_microbatches(self, rank: int) -> int:
        """Return the number of microbatches that a rank runs, with empty ones: at least 1."""
        filled = max(0, -(-(self.num_filled - rank) // self.num_ranks))
        return self.counts.count(self.num_rounds if self.counts.equal else filled)

    def list_microbatches(self, rank: int) -> list[range]:
        """Return the samples of each microbatch that a rank runs, counted from the start of the
        batch; the ranges of empty microbatches are empty."""
        starts = (
            (number * self.num_ranks + rank) * self.micro_batch_size
            for number in range(self.count_microbatches(rank))
        )
        ends = ((start, start + self.micro_batch_size) for start in starts)
        return [
            range(start, min(end, self.num_samples)) if start < self.num_samples else range(0)
            for start, end in ends
        ]

    def describe_idle_ranks(self) -> str:
        """Return what the unequal shares cost; empty if they are equal.

        >>> SampleAssignment(num_samples=16, micro_batch_size=1, num_ranks=3).describe_idle_ranks()
        '2 of 3 ranks idle for 1 of 6 microbatches'
        """
        total = self.counts.count(self.num_rounds)
        idle, empty = -self.num_filled % self.num_ranks, total - self.num_rounds
        partial = self.num_samples % self.micro_batch_size
        texts = [
            f"{idle} of {self.num_ranks} ranks idle for 1 of {total} microbatches" if idle else "",
            f"{empty} of {total} microbatches are empty on all ranks" if empty else "",
            f"the last microbatch has {partial} of {self.micro_batch_size} rows" if partial else "",
        ]
        return ", ".join(text for text in texts if text)


def build_microbatch_counts(parallel: ParallelConfig, model: ModelConfig) -> MicrobatchCounts:
    """Return the numbers of microbatches that a run's ranks can run.

    They are equal on all data-parallel ranks if ranks exchange tokens or expert counts (MoE), or
    gather weights or reduce gradients in each microbatch (ZeRO 2 and 3).
    """
    return MicrobatchCounts(
        equal=model.moe is not None or parallel.zero >= 2,
        pipeline=parallel.pipeline,
        pp=parallel.pp,
    )


def assign_rows(run: TrainRun, num_samples: int, dp: int) -> SampleAssignment:
    """Return how a run assigns the rows of a global batch to `dp` data-parallel ranks."""
    return SampleAssignment(
        num_samples=num_samples,
        micro_batch_size=run.train.micro_batch_size,
        num_ranks=dp,
        counts=build_microbatch_counts(run.parallel, run.model),
    )


def describe_uneven_batches(run: TrainRun, dp: int) -> list[str]:
    """Return one line for each batch size of a run that does not divide over `dp` ranks, with what
    this costs."""
    if run.train.tokens_per_microbatch is not None:
        return []
    idle = {
        f"{setting}={size}": assign_rows(run, size, dp).describe_idle_ranks()
        for setting, size in list_batch_sizes(run.train)
    }
    return [f"{size} with dp={dp}: {text}" for size, text in idle.items() if text]


Permutation = Callable[[int, int], Sequence[int] | NDArray[np.int64]]
"""(length, epoch) -> the numbers 0 to length - 1, shuffled; deterministic."""


def batch_problems(
    *,
    global_batch_size: int,
    micro_batch_size: int,
    dp: int,
    setting: str = "train.global_batch_size",
) -> list[str]:
    """Return an error text if the global batch, of this `setting`, cannot be split over dp ranks in
    whole microbatches."""
    sizes = {
        setting: global_batch_size,
        "train.micro_batch_size": micro_batch_size,
        "parallel.dp": dp,
    }
    problems = [f"{name}={size} must be at least 1." for name, size in sizes.items() if size < 1]
    if problems:
        return problems
    group = micro_batch_size * dp
    if global_batch_size % group == 0:
        return []
    below = global_batch_size // group * group
    valid = f"{below} or {below + group}" if below else f"{group}"
    problem = (
        f"{setting}={global_batch_size} is not a multiple of train.micro_batch_size "
        f"· dp = {micro_batch_size}·{dp} = {group}. Set {setting} to {valid}"
    )
    if global_batch_size % dp:
        return [f"{problem}."]
    share = global_batch_size // dp
    near = sorted(sorted(divisors(share), key=lambda rows: abs(rows - micro_batch_size))[:4])
    return [f"{problem}, or train.micro_batch_size to one of {near}."]


def num_microbatches(*, global_batch_size: int, micro_batch_size: int, dp: int) -> int:
    """Return the number of microbatches of each rank per step.

    Raises:
        PlanError: the global batch is not a multiple of micro_batch_size · dp; the message has
            the nearest multiples.
    """
    problems = batch_problems(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp=dp
    )
    if problems:
        raise PlanError(
            f"The batch cannot be divided over dp={dp}. Use other settings: {' '.join(problems)}"
        )
    return global_batch_size // (micro_batch_size * dp)


def sample_ids(
    *,
    consumed: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp: int,
    dp_rank: int,
    total: int | None = None,
    counts: MicrobatchCounts = ANY_COUNTS,
) -> list[list[int]]:
    """Return the samples that one rank reads in the next step in sequential order, by microbatch;
    if the batch does not divide, the shares of the ranks differ (`SampleAssignment`).

    Microbatch m of rank r holds the `micro_batch_size` samples from consumed + (m · dp + r) ·
    micro_batch_size on, as in Megatron's default sampler. consumed: samples of all earlier steps;
    total: samples of the dataset, if known.

    Raises:
        DataError: fewer samples are left than a step reads.
    """
    _check_rank(dp, dp_rank)
    if total is not None and consumed + global_batch_size > total:
        raise DataError(
            f"The dataset has {total} samples and {consumed} are consumed: too few for a step of "
            f"{global_batch_size}. "
            "Use more data, or set train.steps lower."
        )
    assignment = SampleAssignment(
        num_samples=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_ranks=dp,
        counts=counts,
    )
    return [
        [consumed + number for number in samples]
        for samples in assignment.list_microbatches(dp_rank)
    ]


def cyclic_sample_ids(
    *,
    consumed: int,
    total: int,
    global_batch_size: int,
    micro_batch_size: int,
    dp: int,
    dp_rank: int,
    permutation: Permutation,
    sharded: bool = True,
) -> list[list[int]]:
    """Return the samples that one rank reads in the next step in cyclic shuffled order, by
    microbatch.

    Every epoch has its own shuffle; samples that do not fill a group are dropped in that epoch.
    sharded: each rank shuffles its own contiguous part of the data, so the samples of a step depend
    on dp and micro_batch_size; else the whole set is shuffled and assigned round-robin.

    Raises:
        DataError: there are fewer samples than one group.
        PlanError: `consumed` is inside a group (see `next_group`); and see `num_microbatches`.
    """
    count = num_microbatches(
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, dp=dp
    )
    _check_rank(dp, dp_rank)
    group_start = next_group(
        consumed=consumed, total=total, micro_batch_size=micro_batch_size, dp=dp
    )
    if group_start != consumed:
        raise PlanError(
            f"consumed={consumed} is inside a group of micro_batch_size · dp = "
            f"{micro_batch_size}·{dp} samples. "
            f"Use consumed={group_start}, which skips {group_start - consumed} samples."
        )
    group = micro_batch_size * dp
    num_used = total // group * group
    # (epoch, samples into it)
    epoch_offsets = [divmod(consumed + m * group, num_used) for m in range(count)]
    if sharded:
        samples_per_rank = num_used // dp
        orders = {epoch: permutation(samples_per_rank, epoch) for epoch, _ in epoch_offsets}
        firsts = [(orders[epoch], offset // dp) for epoch, offset in epoch_offsets]
        return [
            [dp_rank * samples_per_rank + int(order[first + i]) for i in range(micro_batch_size)]
            for order, first in firsts
        ]
    # The shuffle covers whole microbatches and is then cut to whole groups, so that every rank gets
    # equally many.
    orders = {
        epoch: permutation(total // micro_batch_size * micro_batch_size, epoch)
        for epoch, _ in epoch_offsets
    }
    firsts = [(orders[epoch], offset + dp_rank) for epoch, offset in epoch_offsets]
    return [
        [int(order[first + i * dp]) for i in range(micro_batch_size)] for order, first in firsts
    ]


def next_group(*, consumed: int, total: int, micro_batch_size: int, dp: int) -> int:
    """Return `consumed` in cyclic order, rounded up to the start of a group if micro_batch_size or
    dp changed.

    Raises:
        DataError: there are fewer samples than one group.
    """
    group = micro_batch_size * dp
    active = total // group * group
    if active == 0:
        raise DataError(
            f"The dataset has {total} samples, fewer than train.micro_batch_size · dp = "
            f"{micro_batch_size}·{dp}. "
            "Use more data, or set train.micro_batch_size or parallel.dp lower."
        )
    return -(-consumed // group) * group


def _check_rank(dp: int, dp_rank: int) -> None:
    if not 0 <= dp_rank < dp:
        raise PlanError(f"dp_rank={dp_rank} must be one of 0 to {dp - 1}.")
