"""The loader: the microbatches one rank computes in a step, and how many labels the global batch
has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megalith.config.data import DataConfig, Sampler
from megalith.config.model import ModelConfig
from megalith.data.packs import joined, numbers_of
from megalith.data.row_masks import masks_of_rows, with_row_masks
from megalith.data.sample import Dataset, Indexed, PackedSample, Row, Sample
from megalith.errors import DataError
from megalith.kernels.tokens import (
    DropoutKey,
    PackedSeqParams,
    tokens_of_lengths,
    tokens_of_slices,
    with_places,
)
from megalith.parallel.group import Group, gather_objects, start_all_reduce_
from megalith.plan.batches import cyclic_sample_ids, sample_ids
from megalith.plan.context import WHOLE, Slicing, plan_slices
from megalith.plan.deal import BatchAssignment, Budget, DocumentCost, assign_rows, imbalance
from megalith.plan.packing import (
    documents_from_eod,
    labels_inside_documents,
    shift_tokens_within_documents,
)

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch: t = rows * seq_len tokens, row after row; or my share of them, where ranks
    share rows."""

    ids: Tensor
    """int64 [t]."""

    labels: Tensor
    """int64 [t]: the next token; -1 where there is no loss."""

    tokens: PackedSeqParams
    """Which document each token belongs to."""

    num_labels: int
    """Labels that count, in this microbatch, over all ranks that share it."""

    lengths: tuple[int, ...]
    """Of its documents as they were read, over the same ranks: padding and filler are no work."""

    num_tokens: int = 0
    """Tokens as they were read, without filler, over the same ranks."""

    mtp_inputs: tuple[tuple[Tensor, Tensor], ...] = ()
    """(ids, labels), each [t], of every MTP depth: those one, two, ...
    tokens further on in the same document; where it ends first, token 0 and no label."""

    num_mtp_labels: tuple[int, ...] = ()
    """Labels of each depth that count, as `num_labels`."""

    part: float = 1.0
    """How many of the step's tokens it has, as a multiple of an even part; rows all have the
    same."""

    @property
    def squared_lengths(self) -> int:
        """Sum of the squares of its documents' lengths."""
        return sum(length**2 for length in self.lengths)


@dataclass(frozen=True, slots=True)
class StepBatches:
    """What one rank computes in one step."""

    microbatches: list[Batch]
    num_labels: int
    """Labels that count in the global batch, over all ranks: what the summed loss is divided by."""

    num_mtp_labels: tuple[int, ...] = ()
    """The same for every MTP depth."""

    num_tokens: int = 0
    """Tokens of the global batch as they were read, without filler."""

    num_padded_tokens: int = 0
    """The same with filler."""

    lengths: tuple[int, ...] | None = None
    """Of all documents of the global batch, where they are known before they are read."""

    imbalance: float | None = None
    """How much longer the busiest data-parallel rank works than all do on average, as a share,
    where that is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Which labels count, and where documents begin."""

    eod: int | None = None
    """The token that ends a document; None when the data has none."""

    documents: bool = False
    """Start a new document after each end-of-document token, and drop the label that crosses the
    border."""

    eod_mask_loss: bool = False
    """Drop the label of each end-of-document token."""

    padding: bool = False
    """Let no token see the padding at the end of a row: for models that look at later tokens.
    Others see none."""


def masks_of(data: DataConfig, model: ModelConfig, eod: int | None) -> Masks:
    """What the settings of a run say of it."""
    return Masks(
        eod=eod,
        documents=data.document_masking,
        eod_mask_loss=data.eod_mask_loss,
        padding=not model.attention.causal,
    )


class Loader:
    """Reads the samples of each step, a step ahead, so that counting the labels of all ranks keeps
    no one waiting.

    Its whole state is how many samples have been consumed: order is a function of that number.
    """

    def __init__(
        self,
        dataset: Dataset,
        masks: Masks,
        dp: Group,
        *,
        global_batch_size: int,
        micro_batch_size: int,
        consumed: int,
        steps: int,
        device: torch.device,
        slicing: Slicing = WHOLE,
        sampler: Sampler = "sequential",
        dropout_seed: int | None = None,
        num_mtp_layers: int = 0,
        budget: Budget | None = None,
        everyone: Group | None = None,
        cost: DocumentCost | None = None,
        balanced: bool = False,
    ) -> None:
        """`dropout_seed`: the seed of a run that trains with dropout; unset: nothing is dropped.
        `further`: MTP depths. `budget`: the dataset's samples are
        documents, to be packed by it; `everyone`: all ranks, which then make sure that they deal
        alike. `cost`: what the ranks' work is compared by; `balanced`: rows are dealt by it."""
        self.dataset, self.masks, self.dp, self.device, self.slicing = (
            dataset,
            masks,
            dp,
            device,
            slicing,
        )
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.sampler, self.dropout_seed, self.num_mtp_layers = sampler, dropout_seed, num_mtp_layers
        self.budget, self.everyone, self.balanced = budget, everyone or dp, balanced
        self.cost = DocumentCost() if cost is None else cost
        self._position = consumed
        self._left = steps
        self._ahead = self._read()

    def next(self) -> StepBatches:
        """The next step's microbatches; the step after it is read on the way.

        Raises:
            DataError: ranks have packed the documents of the step in different ways.
        """
        assert self._ahead is not None, "more steps asked for than the loader was made for"
        step, count, assignment, works = self._ahead
        self._ahead = self._read()
        for work in works:
            work.wait()
        if assignment is not None:
            check_batches_consistent_across_ranks(
                assignment.num_microbatches, count[-2:].tolist(), self.everyone
            )
        read, own, *mtp_inputs = count[: 2 + self.num_mtp_layers].tolist()
        return replace(step, num_labels=own, num_mtp_labels=tuple(mtp_inputs), num_tokens=read)

    def _read(self) -> "_Ahead | None":
        """Read a step, and start counting its labels over the data-parallel ranks."""
        if self._left == 0:
            return None
        self._left -= 1
        if self.budget is None:
            step, assignment = self._read_rows(), None
        else:
            step, assignment = self._read_packs(self.budget)
        self._position += self.global_batch_size
        counts = [
            (batch.num_tokens, batch.num_labels, *batch.num_mtp_labels)
            for batch in step.microbatches
        ]
        sums = [sum(depth) for depth in zip(*counts, strict=True)]
        seen = [] if assignment is None else [assignment.digest(), assignment.digest() ** 2]
        count = torch.tensor([*sums, *seen], device=self.device)
        works = [start_all_reduce_(count[: len(sums)], self.dp)]
        works += [start_all_reduce_(count[len(sums) :], self.everyone)] if seen else []
        return _Ahead(step, count, assignment, [work for work in works if work is not None])

    def _read_rows(self) -> StepBatches:
        """My rows of the next step."""
        rows, places, told = self._rows(), self._places(), StepBatches([], 0)
        if isinstance(self.dataset, Indexed):
            rows, told = self._known_rows(self.dataset)
            places = rows
        samples = [[self.dataset.sample(k) for k in ids] for ids in rows]
        batches = [
            build_batch(
                each,
                self.masks,
                device=self.device,
                slicing=self.slicing,
                num_mtp_layers=self.num_mtp_layers,
            )
            for each in samples
        ]
        if self.dropout_seed is not None:
            batches = [
                with_dropout(batch, at, seed=self.dropout_seed)
                for batch, at in zip(batches, places)
            ]
        size = len(samples[0][0].ids) - isinstance(samples[0][0], Sample)
        return replace(told, microbatches=batches, num_padded_tokens=self.global_batch_size * size)

    def _known_rows(self, dataset: Indexed) -> tuple[list[list[int]], StepBatches]:
        """My rows of the next step, by microbatch, and what is known of all ranks' before they are
        read."""
        dp, count = self.dp, self.global_batch_size
        lengths = [dataset.lengths_of(self._position + number) for number in range(count)]
        costs = [sum(map(self.cost, row)) for row in lengths]
        assignment = assign_rows(
            costs, dp=dp.size, rows=self.micro_batch_size, balanced=self.balanced
        )
        ranks = [
            sum(costs[row] for rows in assignment[rank :: dp.size] for row in rows)
            for rank in range(dp.size)
        ]
        mine = [[self._position + row for row in rows] for rows in assignment[dp.rank :: dp.size]]
        return mine, StepBatches([], 0, lengths=tuple(chain(*lengths)), imbalance=imbalance(ranks))

    def _read_packs(self, budget: Budget) -> tuple[StepBatches, BatchAssignment]:
        """My packs of the next step's documents."""
        first, dataset = self._position, self.dataset
        assert isinstance(dataset, Indexed), "only documents can be packed"
        lengths = [
            sum(dataset.lengths_of(first + number)) for number in range(self.global_batch_size)
        ]
        assignment = budget.assign_batches(lengths, self.dp.size)
        even = sum(lengths) / len(assignment.packs)
        batches = [
            build_pack(
                dataset,
                [first + number for number in pack],
                budget,
                device=self.device,
                slicing=self.slicing,
                num_mtp_layers=self.num_mtp_layers,
                dropout_seed=self.dropout_seed,
                even=even,
            )
            for pack in assignment.of(self.dp.rank)
        ]
        places = len(assignment.packs) * budget.capacity
        return StepBatches(
            batches, 0, (), 0, places, tuple(lengths), assignment.imbalance
        ), assignment

    def _rows(self) -> list[list[int]]:
        """The samples of the next step that this rank reads, microbatch by microbatch."""
        if self.sampler == "sequential":
            return self._places(total=self.dataset.num_samples)
        return cyclic_sample_ids(
            consumed=self._position,
            global_batch_size=self.global_batch_size,
            dp=self.dp.size,
            micro_batch_size=self.micro_batch_size,
            dp_rank=self.dp.rank,
            total=self.dataset.num_samples,
            permutation=shuffle_of_epoch,
            sharded=self.sampler == "cyclic_per_rank",
        )

    def _places(self, *, total: int | None = None) -> list[list[int]]:
        """Which rows of the whole run those are: the samples themselves in the sequential order."""
        return sample_ids(
            consumed=self._position,
            global_batch_size=self.global_batch_size,
            dp=self.dp.size,
            micro_batch_size=self.micro_batch_size,
            dp_rank=self.dp.rank,
            total=total,
        )


class _Ahead(NamedTuple):
    """A step that has been read, whose labels are being counted."""

    step: StepBatches
    sums: Tensor
    """int64: tokens read, labels, those of every MTP depth; with a deal, its digest and the
    square of that."""

    assignment: BatchAssignment | None
    works: list[dist.Work]


def check_batches_consistent_across_ranks(
    microbatches: int, sums: Sequence[int], everyone: Group
) -> None:
    """Make sure that all ranks have dealt alike, before any waits for a microbatch that another
    does not have.

    sums: of the digests of all ranks, and of their squares: only equal numbers have (Σ d)² = ranks
    · Σ d². Collective over `everyone` where they differ.

    Raises:
        DataError: on every rank, with the counts of those that differ.
    """
    total, squares = sums
    if total**2 == everyone.size * squares:
        return
    found = dict(zip(everyone.ranks, gather_objects(microbatches, everyone), strict=True))
    counts = ", ".join(f"{count} on rank {rank}" for rank, count in list(found.items())[:8])
    raise DataError(
        f"ranks have dealt out the documents of a step in different ways (microbatches: {counts}). "
        "Make sure that all "
        f"of them run the same version and read the same files, and run the same command again."
    )


@lru_cache(maxsize=2)  # a step may end one epoch and begin the next
def shuffle_of_epoch(length: int, epoch: int) -> NDArray[np.int64]:
    """The numbers 0 to length - 1 in the order in which Megatron's cyclic sampler shuffles them in
    an epoch."""
    order: NDArray[np.int64] = torch.randperm(
        length, generator=torch.Generator().manual_seed(epoch)
    ).numpy()
    return order


def build_batch(
    samples: Sequence[Row],
    masks: Masks,
    *,
    device: torch.device,
    slicing: Slicing = WHOLE,
    num_mtp_layers: int = 0,
) -> Batch:
    """Rows of one microbatch as packed tokens, of which one rank gets its slice: here and nowhere
    else.

    Rows that were filled document by document know their own labels; `masks` is for the others.
    """
    packed = [sample for sample in samples if isinstance(sample, PackedSample)]
    plain = [sample for sample in samples if isinstance(sample, Sample)]
    assert not (packed and plain), "rows of two kinds in one microbatch"
    inputs, labels, lengths = _packed_rows(packed) if packed else _plain_rows(plain, masks)
    read = (
        tuple(length for row in packed for length in row.read_lengths) if packed else tuple(lengths)
    )
    counted = labels >= 0
    pairs = [
        (inputs, labels),
        *(
            _shift_within_documents(inputs, labels, lengths, depth)
            for depth in range(1, num_mtp_layers + 1)
        ),
    ]
    shared, tokens = _share(pairs, lengths, slicing, device)
    if (places := _places(samples, lengths)) is not None:
        tokens = with_places(tokens, places)
    hidden = masks_of_rows(samples, padding=masks.padding)
    tokens = _without_filler(with_row_masks(tokens, hidden, lengths), packed)
    (own_ids, own_labels), *others = [
        (_flat(ids, device), _flat(labels, device)) for ids, labels in shared
    ]
    return Batch(
        own_ids,
        own_labels,
        tokens,
        int(counted.sum()),
        read,
        num_tokens=sum(read),
        mtp_inputs=tuple(others),
        num_mtp_labels=tuple(int((labels >= 0).sum()) for _, labels in pairs[1:]),
    )


def build_pack(
    dataset: Dataset,
    documents: Sequence[int],
    budget: Budget,
    *,
    device: torch.device,
    slicing: Slicing = WHOLE,
    num_mtp_layers: int = 0,
    dropout_seed: int | None = None,
    even: float = 0.0,
) -> Batch:
    """One microbatch of these documents, or of none; filler is padding, to which experts pay no
    heed.

    `even`: tokens that a microbatch of the step has on average.
    """
    samples = [dataset.sample(k) for k in documents]
    row = joined([sample for sample in samples if isinstance(sample, PackedSample)], budget)
    batch = build_batch(
        [row], Masks(), device=device, slicing=slicing, num_mtp_layers=num_mtp_layers
    )
    tokens = _with_numbers(
        batch.tokens, numbers_of(documents, row, budget.longest), seed=dropout_seed
    )
    return replace(batch, tokens=tokens, part=row.num_valid / even if even else 1.0)


def _without_filler(tokens: PackedSeqParams, rows: Sequence[PackedSample]) -> PackedSeqParams:
    """The tokens of rows whose filler is padding, to which experts pay no heed."""
    if all(row.num_valid == len(row.ids) for row in rows):
        return tokens
    text = [np.arange(len(row.ids)) < row.num_valid for row in rows]
    return _with_numbers(tokens, np.where(np.concatenate(text), 0, -1), seed=None)


def _with_numbers(tokens: PackedSeqParams, numbers: Ids, *, seed: int | None) -> PackedSeqParams:
    """The tokens with padding where `numbers` [t], of all that was read, are below 0; with dropout
    if it has a seed."""
    context = tokens.context
    source = None if context is None else context.slices.source
    every = numbers if source is None else np.where(source >= 0, numbers[source], -1)
    mine = every if context is None else every[context.slices.numbers[context.rank]]
    if context is not None:
        context = replace(context, whole=_marked(context.whole, every, seed))
    return replace(_marked(tokens, mine, seed), context=context)


def _marked(tokens: PackedSeqParams, numbers: Ids, seed: int | None) -> PackedSeqParams:
    device = tokens.position_ids.device
    dropout = None if seed is None else DropoutKey(seed, _flat(numbers, device))
    return replace(tokens, valid=tokens.valid & _flat(numbers >= 0, device), dropout=dropout)


def _plain_rows(samples: Sequence[Sample], masks: Masks) -> tuple[Ids, Ids, list[int]]:
    """Inputs and labels [rows, s] of running text, and the lengths of its documents."""
    ids = np.stack([sample.ids for sample in samples])
    valid = np.stack([sample.valid for sample in samples])
    inputs, labels, counted = ids[:, :-1], ids[:, 1:].copy(), valid[:, 1:]
    if masks.eod is not None and masks.eod_mask_loss:
        counted = counted & (inputs != masks.eod)
    if masks.eod is not None and masks.documents:
        counted = counted & labels_inside_documents(inputs, masks.eod)
        lengths = documents_from_eod(inputs, masks.eod).lengths.tolist()
    else:
        lengths = [inputs.shape[1]] * len(inputs)
    labels[~counted] = -1
    return inputs, labels, lengths


def _packed_rows(samples: Sequence[PackedSample]) -> tuple[Ids, Ids, list[int]]:
    """The same of rows that were filled document by document, filler included."""
    inputs, labels = (
        np.stack([sample.ids for sample in samples]),
        np.stack([sample.labels for sample in samples]),
    )
    return inputs, labels, [length for sample in samples for length in sample.lengths]


def _shift_within_documents(
    ids: Ids, labels: Ids, lengths: list[int], depth: int
) -> tuple[Ids, Ids]:
    """What a depth reads and predicts: ids and labels that many tokens further on in the same
    document."""
    source = shift_tokens_within_documents(lengths, depth)
    return np.where(source >= 0, ids.reshape(-1)[source], 0), np.where(
        source >= 0, labels.reshape(-1)[source], -1
    )


def _places(samples: Sequence[Row], lengths: list[int]) -> Ids | None:
    """[3, t]: where every token is in time, height and width; in rows of text three times its place
    in the document.

    None where all rows are text.
    """
    if all(sample.places is None for sample in samples):
        return None
    rows = np.split(np.concatenate([np.arange(length) for length in lengths]), len(samples))
    given = [
        np.stack([row] * 3) if one.places is None else one.places
        for one, row in zip(samples, rows, strict=True)
    ]
    return np.concatenate(given, axis=1)


def with_dropout(batch: Batch, rows: Sequence[int], *, seed: int) -> Batch:
    """The batch as training with dropout needs it; `rows`: which rows of the whole run it has."""
    context, device = batch.tokens.context, batch.ids.device
    source = None if context is None else context.slices.source
    read = batch.tokens.whole.num_tokens if source is None else np.count_nonzero(source >= 0)
    numbers = np.asarray(rows, dtype=np.int64)[:, None] * (read // len(rows)) + np.arange(
        read // len(rows)
    )
    numbers = numbers.reshape(-1)
    if context is None:
        return replace(
            batch, tokens=replace(batch.tokens, dropout=DropoutKey(seed, _flat(numbers, device)))
        )
    mine = context.slices.as_read(context.rank)
    every = numbers if source is None else np.where(source >= 0, numbers[source], -1)
    numbers = np.where(mine >= 0, numbers[mine], -1)
    own, whole = (DropoutKey(seed, _flat(one, device)) for one in (numbers, every))
    context = replace(context, whole=replace(context.whole, dropout=whole))
    return replace(batch, tokens=replace(batch.tokens, dropout=own, context=context))


def _share(
    pairs: list[tuple[Ids, Ids]], lengths: list[int], slicing: Slicing, device: torch.device
) -> tuple[list[tuple[Ids, Ids]], PackedSeqParams]:
    """One rank's (ids, labels) and tokens of rows with documents of these lengths; padding is token
    0, without a label.

    Labels are the next tokens of the text already, so that no token needs its neighbor.
    """
    if slicing.ranks == 1:
        return pairs, tokens_of_lengths(lengths, device=device)
    slices = plan_slices(lengths, row=pairs[0][0].shape[1], slicing=slicing)
    mine = slices.as_read(slicing.rank)
    shared = [
        (
            np.where(mine >= 0, ids.reshape(-1)[mine], 0),
            np.where(mine >= 0, labels.reshape(-1)[mine], -1),
        )
        for ids, labels in pairs
    ]
    return shared, tokens_of_slices(slices, slicing, device=device)


def _flat(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1)).to(device)
