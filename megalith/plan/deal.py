"""Dealing out a step: documents of any length go into packs of one capacity, and packs to
data-parallel ranks.

All of it follows from the lengths of the step's documents, so every rank computes the same, and no
one is asked. Each rank gets equally many packs, as many as the pipeline wants, and work that is as
equal as packs allow.
"""

import heapq
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from megalith.config.attention import AttentionConfig
from megalith.config.data import DataConfig
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.pipeline import PipelineConfig
from megalith.config.train import LoopConfig
from megalith.errors import PlanError
from megalith.plan.costs import pairs_seen, step_flops
from megalith.plan.fill import fill_in_order
from megalith.plan.schedule import pipeline_in_use, schedule_name, schedule_problems

FILLER = 64
"""PackedSeqParams of a document of filler: attention to what nobody reads then costs next to
nothing."""


@dataclass(frozen=True, slots=True)
class DocumentCost:
    """What documents of some length cost: token · L + pair · L² + seen · (twice the pairs inside
    the window)."""

    token: int = 1
    pair: int = 0
    seen: int = 0
    attention: AttentionConfig | None = None
    """Whose window it is; of no use without `seen`."""

    def __call__(self, length: int) -> int:
        """Of one document."""
        windowed = (
            self.seen * pairs_seen(length, self.attention) if self.attention is not None else 0
        )
        return self.token * length + self.pair * length**2 + windowed


def document_cost(model: ModelConfig) -> DocumentCost:
    """The floating-point operations of forward and backward, as `step_flops` counts them.

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
    every = step_flops(model, tokens=0, squared_lengths=1)
    windowed = model.attention.window is not None
    return DocumentCost(
        token, pair if windowed else every, every - pair if windowed else 0, model.attention
    )


@dataclass(frozen=True, slots=True)
class BatchAssignment:
    """Which documents of a step share a pack, and which rank has it."""

    packs: tuple[tuple[int, ...], ...]
    """Documents of each pack, by their place in the step; pack m · dp + r is microbatch m of rank
    r. Some are empty."""

    dp: int

    costs: tuple[int, ...]
    """Of each data-parallel rank."""

    @property
    def num_microbatches(self) -> int:
        """Of every rank."""
        return len(self.packs) // self.dp

    def of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The packs of one data-parallel rank, microbatch by microbatch."""
        return self.packs[rank :: self.dp]

    @property
    def imbalance(self) -> float:
        """How much longer the busiest rank works than all do on average, as a share: 0 where all
        work alike."""
        return imbalance(self.costs)

    def digest(self) -> int:
        """24 bits that differ between deals."""
        words = [self.dp, *(number for pack in self.packs for number in (-1 - len(pack), *pack))]
        return zlib.crc32(np.array(words, np.int64).tobytes()) >> 8


def imbalance(costs: Sequence[int]) -> float:
    """How much more the largest is than the mean, as a share of it.

    >>> imbalance([3, 1, 2])
    0.5
    """
    return max(costs) * len(costs) / total - 1 if (total := sum(costs)) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What decides how the documents of a step are packed and dealt, besides their lengths."""

    capacity: int
    """PackedSeqParams of a pack, over the ranks that share it."""

    longest: int
    """PackedSeqParams of a document at most."""

    multiple: int = 1
    """What every document is padded to a multiple of."""

    cost: DocumentCost = DocumentCost()
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    pp: int = 1

    def padded(self, length: int) -> int:
        """PackedSeqParams that a document takes of a pack."""
        return length + -length % self.multiple

    def assign_batches(
        self, lengths: Sequence[int], dp: int, *, forward_only: bool = False
    ) -> BatchAssignment:
        """Pack documents in order and deal the packs to `dp` ranks; a pure function of its
        arguments.

        Where there are too few packs for ranks and pipeline, the costliest are divided, and in the
        end some stay empty. `forward_only`: evaluation, whose pipelines take any number of
        microbatches.

        Raises:
            PlanError: a document is longer than a pack.
        """
        filled = fill_in_order([self.padded(length) for length in lengths], self.capacity)
        packs = [tuple(filled.row(number).tolist()) for number in range(filled.num_rows)]
        least = -(-len(packs) // dp)
        count = (
            max(least, 1) if forward_only else microbatches_that_fit(self.pipeline, self.pp, least)
        )
        costs = [self.cost(length) for length in lengths]
        packs = _divided(packs, costs, count * dp)
        return _assign_packs(packs, [sum(costs[number] for number in pack) for pack in packs], dp)

    def filler(self, length: int) -> tuple[int, ...]:
        """The lengths of the documents that fill `length` tokens up."""
        size = max(min(FILLER, self.longest) // self.multiple, 1) * self.multiple
        whole, rest = divmod(length, size)
        return (size,) * whole + ((rest,) if rest else ())


def _divided(
    packs: list[tuple[int, ...]], costs: Sequence[int], count: int
) -> list[tuple[int, ...]]:
    """So many packs: the costliest is cut where its halves cost most alike, as long as one has
    several documents."""
    heap = [(-sum(costs[number] for number in pack), pack) for pack in packs if len(pack) > 1]
    single: list[tuple[int, ...]] = [pack for pack in packs if len(pack) <= 1]
    heapq.heapify(heap)
    while heap and len(heap) + len(single) < count:
        for part in _halves(heapq.heappop(heap)[1], costs):
            if len(part) > 1:
                heapq.heappush(heap, (-sum(costs[number] for number in part), part))
            else:
                single.append(part)
    found = [*single, *(pack for _, pack in heap)]
    return found + [()] * (count - len(found))


def _halves(pack: tuple[int, ...], costs: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    before = np.cumsum([costs[number] for number in pack[:-1]], dtype=object)
    whole = sum(costs[number] for number in pack)
    cut = 1 + min(range(len(before)), key=lambda place: (abs(whole - 2 * before[place]), place))
    return pack[:cut], pack[cut:]


def _assign_packs(packs: list[tuple[int, ...]], costs: list[int], dp: int) -> BatchAssignment:
    """Microbatch after microbatch, costliest first, to the ranks in the order of how little they
    have so far.

    Packs that are computed at the same time then cost about the same, and no two ranks differ by
    more than the costliest pack of a microbatch and its cheapest do: a rank that has more never
    gets more.
    """
    order = sorted(range(len(packs)), key=lambda number: (-costs[number], packs[number]))
    totals, places = [0] * dp, [0] * len(packs)
    for start in range(0, len(packs), dp):
        ranks = sorted(range(dp), key=lambda rank: (totals[rank], rank))
        for rank, number in zip(ranks, order[start : start + dp], strict=True):
            totals[rank] += costs[number]
            places[start + rank] = number
    return BatchAssignment(tuple(packs[number] for number in places), dp, tuple(totals))


def assign_rows(costs: Sequence[int], *, dp: int, rows: int, balanced: bool) -> list[list[int]]:
    """Rows that are full already, `rows` to a microbatch: those of microbatch m and rank r at m ·
    dp + r.

    In order, or `balanced` as packs are.

    >>> assign_rows([9, 1, 8, 2], dp=2, rows=1, balanced=True)
    [[0], [2], [1], [3]]

    Raises:
        PlanError: the rows do not divide over the ranks.
    """
    if len(costs) % (dp * rows):
        raise PlanError(
            f"{len(costs)} rows do not divide over dp={dp} ranks and {rows} to a microbatch. Use a "
            f"multiple of {dp * rows}."
        )
    if not balanced:
        return [list(range(start, start + rows)) for start in range(0, len(costs), rows)]
    single = _assign_packs([(number,) for number in range(len(costs))], list(costs), dp)
    each = [[pack[0] for pack in single.of(rank)] for rank in range(dp)]
    return [
        each[rank][start : start + rows]
        for start in range(0, len(costs) // dp, rows)
        for rank in range(dp)
    ]


@lru_cache(maxsize=64)  # steps need the same few counts over and over
def microbatches_that_fit(pipeline: PipelineConfig, pp: int, least: int) -> int:
    """The fewest microbatches that a pipeline can be run with, from `least` on.

    Raises:
        PlanError: no number of them fits; the message is what the rules say of the pipeline.
    """
    used, least = pipeline_in_use(pipeline, pp), max(least, 1)
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


def budget_of(train: LoopConfig, parallel: ParallelConfig, model: ModelConfig) -> Budget | None:
    """How a run packs its documents; None where it reads rows of train.seq_len."""
    if train.tokens_per_microbatch is None:
        return None
    return Budget(
        capacity=train.tokens_per_microbatch * parallel.cp,
        longest=train.seq_len,
        multiple=document_multiple(parallel),
        cost=document_cost(model),
        pipeline=parallel.pipeline,
        pp=parallel.pp,
    )


def document_multiple(parallel: ParallelConfig) -> int:
    """What every document is padded to a multiple of; 1 where nothing is padded."""
    if parallel.cp == 1 or parallel.context.slicing == "row":
        return 1
    return 2 * parallel.cp * (parallel.tp if parallel.sp else 1)


def microbatches_of_longest(train: LoopConfig, parallel: ParallelConfig, dp: int) -> int:
    """Microbatches of a step on each rank: with a budget, of documents that are all as long as they
    may be."""
    if train.tokens_per_microbatch is None:
        return train.global_batch_size // (train.micro_batch_size * dp)
    length = train.seq_len + -train.seq_len % document_multiple(parallel)
    together = max(train.tokens_per_microbatch * parallel.cp // length, 1)
    packs = -(-train.global_batch_size // together)
    return microbatches_that_fit(parallel.pipeline, parallel.pp, -(-packs // dp))


def budget_problems(train: LoopConfig, parallel: ParallelConfig, data: DataConfig) -> list[str]:
    """Everything that keeps documents from being packed and dealt as the settings say: one text
    each."""
    size, usual, name = train.tokens_per_microbatch, DataConfig(), "train.tokens_per_microbatch"
    if size is None:
        return _rows_problems(train, data)
    problems = [f"{name}={size} with {text}" for text in _other_kinds(data, usual)]
    if train.micro_batch_size != 1:
        problems.append(
            f"train.micro_batch_size={train.micro_batch_size} with {name}={size}: a microbatch is "
            f"one pack. Set train.micro_batch_size=1."
        )
    if train.balance_rows:
        problems.append(
            f"train.balance_rows=true with {name}={size}, which deals packs alike anyway. Remove "
            "it."
        )
    tp = parallel.tp if parallel.sp else 1
    parts = 2 * tp if parallel.cp > 1 else tp
    if size % parts:
        product = " * ".join(
            (["2"] if parallel.cp > 1 else []) + ([f"parallel.tp={tp}"] if tp > 1 else [])
        )
        problems.append(
            f"{name}={size} does not divide by {product} = {parts}, and ranks share a pack. "
            f"Set {name} to {size + -size % parts}."
        )
    multiple = document_multiple(parallel)
    padded = train.seq_len + -train.seq_len % multiple
    if size * parallel.cp < padded:
        least = -(-padded // parallel.cp)
        room = size * parallel.cp // multiple * multiple
        problems.append(
            f"{name}={size} * parallel.cp={parallel.cp} = {size * parallel.cp} tokens hold no "
            "document of "
            f"train.seq_len={train.seq_len}. Set {name} to {least + -least % parts} or more"
            + (f", or train.seq_len to {room} or less." if room else ".")
        )
    return problems


def _rows_problems(train: LoopConfig, data: DataConfig) -> list[str]:
    problems = []
    if train.balance_rows and not data.sft.used():
        problems.append(
            "train.balance_rows=true without data.sft: rows of text cost every rank the same, as "
            "far as anyone knows "
            "before they are read. Set train.balance_rows=false."
        )
    if data.overlong != DataConfig().overlong and not data.sft.used():  # of which there is a rule
        problems.append(
            f"data.overlong={data.overlong} without train.tokens_per_microbatch: rows of text are "
            "cut anywhere. Remove "
            f"it, or set train.tokens_per_microbatch."
        )
    return problems


def _other_kinds(data: DataConfig, usual: DataConfig) -> Iterator[str]:
    """Settings of rows, which whole documents have no use for."""
    for field_name in ("document_masking", "eod_mask_loss", "keep_partial_valid", "sampler"):
        value = getattr(data, field_name)
        if value != getattr(usual, field_name) and not data.sft.used():  # of which there is a rule
            yield (
                f"data.{field_name}={value}: a sample is a whole document, shuffled in each "
                "epoch. Remove it."
            )
    for field_name in ("packing", "packs"):
        value = getattr(data.sft, field_name)
        if value != getattr(usual.sft, field_name):
            yield (
                f"data.sft.{field_name}={value}: conversations are packed step by step. Remove "
                "one of them."
            )
