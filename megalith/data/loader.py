"""Data loader: reads the microbatches of one rank per step, and counts the labels of the global
batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megalith.config.data import DataConfig, Sampler
from megalith.config.model import AttentionConfig, ModelConfig
from megalith.config.train import TrainRun, dropout_seed
from megalith.data.packs import pack_documents, row_masks, token_numbers, with_row_masks
from megalith.data.sample import (
    Dataset,
    ExtraTensor,
    HasDocumentLengths,
    PackedSample,
    Row,
    Sample,
    concatenate_extra,
    declared_extra,
)
from megalith.errors import DataError
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import AuxLossScale, LayerInputs, MicrobatchRouting, RouterInputs
from megalith.kernels.packed import (
    PackedSeqParams,
    seq_params_from_lengths,
    seq_params_from_slices,
    with_multimodal_positions,
)
from megalith.parallel.group import Group, gather_objects, start_all_reduce_
from megalith.plan.batch_assignment import (
    ANY_COUNTS,
    BatchAssignment,
    DocumentCost,
    MicrobatchCounts,
    SampleAssignment,
    TokenBudget,
    assign_balanced_rows,
    build_microbatch_counts,
    build_token_budget,
    cyclic_sample_ids,
    document_cost,
    imbalance,
    sample_ids,
)
from megalith.plan.batch_schedule import BatchSizeSchedule, build_batch_schedule
from megalith.plan.context import WHOLE, Slicing, plan_slices
from megalith.plan.layers.base import num_attended_pairs
from megalith.plan.packing import (
    documents_from_eod,
    labels_inside_documents,
    shift_tokens_within_documents,
)
from megalith.plan.replica_groups import SINGLE_GROUP, GroupAssignment, GroupShare
from megalith.plan.rollback import NO_SAMPLES, SkippedSamples, count_read

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One microbatch: t = rows * seq_len tokens, row after row; under context parallelism, the
    local shard of them."""

    ids: Tensor
    """int64 [t]."""

    labels: Tensor
    """int64 [t]: the next token; -1 where the loss mask excludes it."""

    seq_params: PackedSeqParams
    """Document boundaries, position ids and masks of the tokens."""

    num_labels: int
    """Labels that are not masked, over all ranks that share the microbatch."""

    lengths: tuple[int, ...]
    """Document lengths without padding, over the same ranks, for FLOP counts."""

    num_tokens: int = 0
    """Input tokens without padding, over the same ranks."""

    mtp_inputs: tuple[tuple[Tensor, Tensor], ...] = ()
    """(ids, labels), each [t], per MTP depth: shifted by 1, 2, ... tokens within the document; past
    its end, token 0 and label -1."""

    num_mtp_labels: tuple[int, ...] = ()
    """Labels per MTP depth that are not masked, as `num_labels`."""

    part: float = 1.0
    """Its tokens, or rows, divided by their mean per microbatch of the step; 1 for a full
    microbatch of rows if all of the step are full."""

    dropout_key: DropoutKey | None = None
    """Key of the dropout masks; None: no dropout."""

    routing: MicrobatchRouting | None = None
    """Routing record or replay of the microbatch; None: neither."""

    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """Extra tensors of the dataset by name. Per token: [t, ...], aligned with `labels`. Per
    document: [documents, ...], of which token i has row `seq_params.document_ids[i]`. Per sample:
    [samples, ...], of which it has row `sample_ids[i]`. Padding is 0."""

    extra_sums: Mapping[str, float] = field(default_factory=dict)
    """Sums of the extra tensors over all ranks that share the microbatch; per-token ones only over
    labels that are not masked."""

    sample_ids: Tensor | None = None
    """int64 [t]: index of each token's sample in the microbatch; None without extra tensors."""

    @property
    def squared_lengths(self) -> int:
        """Sum of the squared document lengths."""
        return sum(length**2 for length in self.lengths)

    def layer_inputs(self, aux_loss_scale: AuxLossScale | None = None) -> LayerInputs:
        """Return the inputs of the layers; `aux_loss_scale`: only in training."""
        return LayerInputs(
            self.seq_params,
            dropout_key=self.dropout_key,
            router_inputs=RouterInputs(aux_loss_scale, routing=self.routing),
        )


@dataclass(frozen=True, slots=True)
class StepBatches:
    """Microbatches of one rank in one step."""

    microbatches: list[Batch]
    num_labels: int
    """Labels of the global batch that are not masked, over all ranks: the divisor of the summed
    loss."""

    num_mtp_labels: tuple[int, ...] = ()
    """The same per MTP depth."""

    num_tokens: int = 0
    """Input tokens of the global batch without padding."""

    num_padded_tokens: int = 0
    """Input tokens of the global batch with padding."""

    num_microbatches: int | None = None
    """Microbatches of all data-parallel ranks, without empty ones of rows; None: all ranks have as
    many as this one."""

    squared_lengths: int = 0
    """Sum of the squared document lengths of the global batch."""

    num_window_pairs: int | None = None
    """Query-key pairs inside the attention windows of the global batch; None without windows."""

    imbalance: float | None = None
    """Relative excess of the most loaded data-parallel rank's cost over the mean; None if
    unknown."""

    extra_sums: Mapping[str, float] = field(default_factory=dict)
    """Sums of the extra tensors over the global batch, by name."""

    def totals(self) -> dict[str, float]:
        """Return the counts of the global batch that losses are divided by, by name."""
        mtp_labels = enumerate(self.num_mtp_labels, start=1)
        return {
            "labels": self.num_labels,
            "tokens": self.num_tokens,
            **{f"mtp_{depth}_labels": count for depth, count in mtp_labels},
            **{f"extra.{name}": total for name, total in self.extra_sums.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskSettings:
    """Settings of the loss mask and of document boundaries."""

    eod: int | None = None
    """End-of-document token; None if the data has none."""

    documents: bool = False
    """Start a new document after each end-of-document token, and mask the label across the
    boundary."""

    eod_mask_loss: bool = False
    """Mask the label of each end-of-document token."""

    padding: bool = False
    """Mask padding at the end of a row in attention, for bidirectional models; causal ones never
    attend to it."""


def build_mask_settings(data: DataConfig, model: ModelConfig, eod: int | None) -> MaskSettings:
    """Return the mask settings of a run."""
    return MaskSettings(
        eod=eod,
        documents=data.document_masking,
        eod_mask_loss=data.eod_mask_loss,
        padding=not model.attention.causal,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """Settings of a run that determine how samples become batches."""

    batch_schedule: BatchSizeSchedule
    micro_batch_size: int
    masks: MaskSettings = field(default_factory=MaskSettings)
    sampler: Sampler = "sequential"
    dropout_seed: int | None = None
    """Set if training uses dropout."""

    num_mtp_layers: int = 0
    budget: TokenBudget | None = None
    """Sequence packing of samples that are documents; unset: microbatches of a fixed number of
    rows."""

    cost: DocumentCost = field(default_factory=DocumentCost)
    """Measure of the ranks' work."""

    balanced: bool = False
    """Assign rows to data-parallel ranks by their cost."""

    counts: MicrobatchCounts = ANY_COUNTS
    """Numbers of microbatches of rows that ranks can run."""

    @classmethod
    def of_run(cls, run: TrainRun, masks: MaskSettings) -> Self:
        """Return those of a run."""
        return cls(
            batch_schedule=build_batch_schedule(run.train),
            micro_batch_size=run.train.micro_batch_size,
            masks=masks,
            sampler=run.data.sampler,
            dropout_seed=dropout_seed(run),
            num_mtp_layers=run.model.mtp.num_layers,
            budget=build_token_budget(run.train, run.parallel, run.model),
            cost=document_cost(run.model),
            balanced=run.train.balance_rows,
            counts=build_microbatch_counts(run.parallel, run.model),
        )


class Loader:
    """Reads the samples of each step one step ahead, so that the all-reduce of label counts
    overlaps.

    Its whole state is the number of consumed samples, which determines the order, and the ranges
    of skipped ones.
    """

    def __init__(
        self,
        dataset: Dataset,
        settings: BatchSettings,
        dp: Group,
        *,
        consumed: int,
        steps: int,
        device: torch.device,
        slicing: Slicing = WHOLE,
        world_group: Group | None = None,
        share: GroupShare = SINGLE_GROUP,
        first_samples: Sequence[int] | None = None,
        skipped: SkippedSamples = NO_SAMPLES,
    ) -> None:
        """Create a loader that reads `steps` steps from sample `consumed` on.

        Args:
            world_group: all ranks, which check that they packed documents alike.
            share: part of this replica group in each global batch.
            first_samples: samples of the first step that are read, counted from the start of its
                batch; None: all of them.
            skipped: samples of the order that are never read.
        """
        self.share, self._samples = share, first_samples
        self._num_ranks = share.num_groups * dp.size
        self._rank = share.index * dp.size + dp.rank
        self.dataset, self.settings, self.dp, self.skipped = dataset, settings, dp, skipped
        self.device, self.slicing, self.world_group = device, slicing, world_group or dp
        self.extra = declared_extra(dataset)
        self.counted_extra = [name for name, tensor in self.extra.items() if not tensor.shape]
        self._position = count_read(skipped, consumed)
        """Number of samples read and not skipped: the position in the batch-size schedule, and of
        dropout masks."""
        self._left = steps
        self.group_samples: Sequence[int] = ()
        """Samples of the last step that this group has read, counted from the start of its
        batch."""
        self._prefetched = self._read()

    def next(self) -> StepBatches:
        """Return the next step's microbatches, and prefetch the step after it.

        Raises:
            DataError: ranks have packed the documents of the step differently.
        """
        assert self._prefetched is not None, "more steps requested than the loader was created for"
        step, count, extra_sums, assignment, works, self.group_samples = self._prefetched
        self._prefetched = self._read()
        for work in works:
            work.wait()
        if assignment is not None:
            check_batches_consistent_across_ranks(
                assignment.num_microbatches, count[-2:].tolist(), self.world_group
            )
        return self.with_counts(step, self._list_counts(count, extra_sums))

    def peek_counts(self) -> list[float]:
        """Return the label counts of the next step over this group's ranks, which `with_counts`
        takes; zeros if there is no next step."""
        if self._prefetched is None:
            return [0.0] * self.num_counts
        for work in self._prefetched.works:
            work.wait()
        self._prefetched = self._prefetched._replace(works=[])
        return self._list_counts(self._prefetched.sums, self._prefetched.extra_sums)

    @property
    def num_counts(self) -> int:
        """Number of values that `peek_counts` returns."""
        return count_label_counts(self.settings.num_mtp_layers, self.extra)

    def with_counts(self, step: StepBatches, counts: Sequence[float]) -> StepBatches:
        """Return a step's batches with these counts of its global batch."""
        first_extra = 4 + self.settings.num_mtp_layers
        read, own, squares, pairs, *mtp_labels = map(int, counts[:first_extra])
        return replace(
            step,
            num_labels=own,
            num_mtp_labels=tuple(mtp_labels),
            num_tokens=read,
            squared_lengths=squares,
            num_window_pairs=pairs if self._attention_window is not None else None,
            extra_sums=dict(zip(self.counted_extra, counts[first_extra:], strict=True)),
        )

    def _list_counts(self, count: Tensor, extra_sums: Tensor) -> list[float]:
        return [*count[: 4 + self.settings.num_mtp_layers].tolist(), *extra_sums.tolist()]

    def _read(self) -> "_PrefetchedStep | None":
        """Read a step, and start the all-reduce of its label counts over the data-parallel
        ranks."""
        if self._left == 0:
            return None
        self._left -= 1
        if self.settings.budget is None:
            step, assignment = self._read_rows(), None
        else:
            step, assignment = self._read_packs(self.settings.budget)
        group_samples = self._list_group_samples(assignment)
        self._position += self._batch_size
        self._samples = None  # only those of the first step may be a part
        counts = [
            (
                batch.num_tokens,
                batch.num_labels,
                batch.squared_lengths,
                self._count_window_pairs(batch),
                *batch.num_mtp_labels,
            )
            for batch in step.microbatches
        ]
        sums = [sum(depth) for depth in zip(*counts, strict=True)]
        digests = [] if assignment is None else [assignment.digest(), assignment.digest() ** 2]
        count = torch.tensor([*sums, *digests], device=self.device)
        works = [start_all_reduce_(count[: len(sums)], self.dp)]
        works += [start_all_reduce_(count[len(sums) :], self.world_group)] if digests else []
        extra_sums = torch.tensor(
            [
                sum(batch.extra_sums[name] for batch in step.microbatches)
                for name in self.counted_extra
            ],
            dtype=torch.float64,
            device=self.device,
        )
        works += [start_all_reduce_(extra_sums, self.dp)] if self.counted_extra else []
        return _PrefetchedStep(
            step,
            count,
            extra_sums,
            assignment,
            [work for work in works if work is not None],
            group_samples,
        )

    @property
    def _step_samples(self) -> Sequence[int]:
        """Samples of the step that all groups read, counted from the start of its batch."""
        return range(self._batch_size) if self._samples is None else self._samples

    def _list_group_samples(self, assignment: BatchAssignment | None) -> Sequence[int]:
        """Return the samples of the step that the ranks of this group read; `assignment`: of
        packs."""
        samples, dp = self._step_samples, self.dp.size
        if self.share.num_groups == 1:
            return samples
        if assignment is not None:
            ranks = range(self.share.index * dp, (self.share.index + 1) * dp)
            packs = [pack for rank in ranks for pack in assignment.rank_packs(rank)]
            return [samples[number] for pack in packs for number in pack]
        return GroupAssignment(
            samples=tuple(samples),
            share=self.share,
            micro_batch_size=self.settings.micro_batch_size,
            dp=dp,
            counts=self.settings.counts,
        ).list_own_samples()

    @property
    def _attention_window(self) -> AttentionConfig | None:
        """Attention config of a model with attention windows; None without windows."""
        attention = self.settings.cost.attention
        return None if attention is None or attention.window is None else attention

    def _count_window_pairs(self, batch: Batch) -> int:
        """Return the query-key pairs inside the attention windows of a microbatch, 0 without
        windows."""
        attention = self._attention_window
        if attention is None:
            return 0
        return sum(num_attended_pairs(length, attention) for length in batch.lengths)

    @property
    def _batch_size(self) -> int:
        """Number of samples of the step that begins at the current position."""
        return self.settings.batch_schedule.get_batch_size(self._position)

    def _read_rows(self) -> StepBatches:
        """Read this rank's rows of the next step. Microbatches that have fewer rows, or none, are
        filled up with padding."""
        rows, positions, stats = self._rows(), self._places(), StepBatches([], 0)
        if isinstance(self.dataset, HasDocumentLengths) and self._reads_whole_batch:
            rows, stats = self._assign_rows(self.dataset)
            positions = rows
        per_microbatch = self.settings.micro_batch_size
        num_filled = stats.num_microbatches or -(-self._batch_size // per_microbatch)
        samples = [[self.dataset.sample(k) for k in self._locate(ids)] for ids in rows]
        blank = (
            samples[0][0] if samples[0] else self.dataset.sample(self._locate([self._position])[0])
        ).blank()
        batches = [
            build_batch(
                [*each, *[blank] * (per_microbatch - len(each))],
                self.settings.masks,
                device=self.device,
                slicing=self.slicing,
                num_mtp_layers=self.settings.num_mtp_layers,
                extra=self.extra,
                num_empty=per_microbatch - len(each),
            )
            for each in samples
        ]
        if self.settings.dropout_seed is not None:
            batches = [
                with_dropout(
                    batch,
                    [*at, *[-1] * (per_microbatch - len(at))],
                    seed=self.settings.dropout_seed,
                )
                for batch, at in zip(batches, positions, strict=True)
            ]
        batches = [
            replace(batch, part=len(ids) * num_filled / self._batch_size)
            for batch, ids in zip(batches, rows, strict=True)
        ]
        size = len(blank.ids) - isinstance(blank, Sample)
        return replace(
            stats,
            microbatches=batches,
            num_padded_tokens=self._batch_size * size,
            num_microbatches=num_filled,
        )

    @property
    def _reads_whole_batch(self) -> bool:
        """Whether the ranks of this group read all samples of the step."""
        return self.share.num_groups == 1 and self._samples is None

    def _assign_rows(self, dataset: HasDocumentLengths) -> tuple[list[list[int]], StepBatches]:
        """Return this rank's rows of the next step per microbatch, and statistics of all ranks'
        rows."""
        dp, count, settings = self.dp, self._batch_size, self.settings
        step = self._locate(range(self._position, self._position + count))
        lengths = [dataset.document_lengths(k) for k in step]
        costs = [sum(map(settings.cost, row)) for row in lengths]
        assignment = SampleAssignment(
            num_samples=count,
            micro_batch_size=settings.micro_batch_size,
            num_ranks=dp.size,
            counts=settings.counts,
        )
        local_rows: list[list[list[int]]] = (
            assign_balanced_rows(costs, dp=dp.size, rows=settings.micro_batch_size)
            if settings.balanced
            else [
                [list(rows) for rows in assignment.list_microbatches(rank)]
                for rank in range(dp.size)
            ]
        )
        cost_by_rank = [sum(costs[row] for rows in rank for row in rows) for rank in local_rows]
        num_filled = sum(bool(rows) for rank in local_rows for rows in rank)
        longest = max(map(len, local_rows)) if settings.counts.equal else len(local_rows[dp.rank])
        missing = settings.counts.count(longest) - len(local_rows[dp.rank])
        rows_by_microbatch = [
            *([self._position + row for row in rows] for rows in local_rows[dp.rank]),
            *[[] for _ in range(missing)],
        ]
        stats = StepBatches([], 0, num_microbatches=num_filled, imbalance=imbalance(cost_by_rank))
        return rows_by_microbatch, stats

    def _read_packs(self, budget: TokenBudget) -> tuple[StepBatches, BatchAssignment]:
        """Read this rank's packs of the next step's documents."""
        first, dataset, samples = self._position, self.dataset, self._step_samples
        assert isinstance(dataset, HasDocumentLengths), "only documents can be packed"
        batch = self._locate(range(first, first + self._batch_size))
        batch_lengths = [sum(dataset.document_lengths(k)) for k in batch]
        step = [batch[number] for number in samples]
        lengths = [batch_lengths[number] for number in samples]
        assignment = budget.assign_batches(lengths, self._num_ranks)
        # Of the whole batch, so that a microbatch has the same weight in a part of it.
        mean_tokens = sum(batch_lengths) / len(assignment.packs)
        batches = [
            build_pack(
                dataset,
                [step[number] for number in pack],
                budget,
                positions=[first + samples[number] for number in pack],
                device=self.device,
                slicing=self.slicing,
                num_mtp_layers=self.settings.num_mtp_layers,
                dropout_seed=self.settings.dropout_seed,
                even=mean_tokens,
            )
            for pack in assignment.rank_packs(self._rank)
        ]
        num_padded_tokens = len(assignment.packs) * budget.capacity
        step_batches = StepBatches(
            batches,
            0,
            num_padded_tokens=num_padded_tokens,
            num_microbatches=None if self.share.num_groups == 1 else len(assignment.packs),
            imbalance=assignment.imbalance,
        )
        return step_batches, assignment

    def _rows(self) -> list[list[int]]:
        """Return the samples that this rank reads in the next step, per microbatch."""
        num_samples = self.dataset.num_samples
        if self.settings.sampler == "sequential":
            return self._places(total=num_samples - self.skipped.count_before(num_samples))
        consumed = self.skipped.locate(self._position)
        last = self.skipped.locate(self._position + self._batch_size - 1)
        if last - consumed >= self._batch_size:
            raise DataError(
                f"data.sampler={self.settings.sampler}: samples in the middle of the step from "
                f"sample {consumed} on are to be skipped, and this sampler reads whole steps. Use "
                "the batch sizes that the run had when they were skipped."
            )
        return cyclic_sample_ids(
            consumed=consumed,
            global_batch_size=self._batch_size,
            dp=self.dp.size,
            micro_batch_size=self.settings.micro_batch_size,
            dp_rank=self.dp.rank,
            total=self.dataset.num_samples,
            permutation=epoch_permutation,
            sharded=self.settings.sampler == "cyclic_per_rank",
        )

    def _places(self, *, total: int | None = None) -> list[list[int]]:
        """Return the positions of those rows in the whole run: the samples themselves in sequential
        order."""
        if self._samples is not None:
            assignment = SampleAssignment(
                num_samples=len(self._samples),
                micro_batch_size=self.settings.micro_batch_size,
                num_ranks=self._num_ranks,
                counts=self.settings.counts,
            )
            return [
                [self._position + self._samples[number] for number in microbatch]
                for microbatch in assignment.list_microbatches(self._rank)
            ]
        return sample_ids(
            consumed=self._position,
            global_batch_size=self._batch_size,
            dp=self._num_ranks,
            micro_batch_size=self.settings.micro_batch_size,
            dp_rank=self._rank,
            total=total,
            counts=self.settings.counts,
        )

    def _locate(self, numbers: Sequence[int]) -> Sequence[int]:
        """Return the samples of a sequential order, given by their index among those that are not
        skipped; those of other orders are returned unchanged."""
        if not self.skipped or self.settings.sampler != "sequential":
            return numbers
        return [self.skipped.locate(number) for number in numbers]


def count_label_counts(num_mtp_layers: int, extra: Mapping[str, ExtraTensor]) -> int:
    """Return the number of label counts of a global batch of a dataset with these extra tensors."""
    return 4 + num_mtp_layers + sum(not tensor.shape for tensor in extra.values())


class _PrefetchedStep(NamedTuple):
    """A step that was read, with the pending all-reduce of its counts."""

    step: StepBatches
    sums: Tensor
    """int64: input tokens, labels, squared document lengths, query-key pairs inside attention
    windows, labels per MTP depth; with packing, the digest and its square."""

    extra_sums: Tensor
    """float64: sum of each extra tensor of numbers."""

    assignment: BatchAssignment | None
    works: list[dist.Work]
    group_samples: Sequence[int]


def check_batches_consistent_across_ranks(
    microbatches: int, sums: Sequence[int], world_group: Group
) -> None:
    """Check that all ranks assigned the documents alike, before a rank waits for a missing
    microbatch.

    `sums`: sums over all ranks of the digests and of their squares: only equal numbers satisfy (Σ
    d)² = ranks · Σ d². Collective over `world_group` where they differ.

    Raises:
        DataError: on every rank, with the differing counts.
    """
    total, squares = sums
    if total**2 == world_group.size * squares:
        return
    counts_by_rank = dict(
        zip(world_group.ranks, gather_objects(microbatches, world_group), strict=True)
    )
    counts = ", ".join(
        f"{count} on rank {rank}" for rank, count in list(counts_by_rank.items())[:8]
    )
    raise DataError(
        f"ranks assigned the documents of a step differently (microbatches: {counts}). "
        "Use the same version and the same files on all ranks, and run the same command again."
    )


@lru_cache(maxsize=2)  # a step may end one epoch and begin the next
def epoch_permutation(length: int, epoch: int) -> NDArray[np.int64]:
    """Return 0 to length - 1 in the order of Megatron's cyclic sampler in an epoch."""
    order: NDArray[np.int64] = torch.randperm(
        length, generator=torch.Generator().manual_seed(epoch)
    ).numpy()
    return order


def build_batch(
    samples: Sequence[Row],
    masks: MaskSettings,
    *,
    device: torch.device,
    slicing: Slicing = WHOLE,
    num_mtp_layers: int = 0,
    extra: Mapping[str, ExtraTensor] | None = None,
    num_empty: int = 0,
) -> Batch:
    """Build one microbatch of packed tokens from rows, and take this rank's context-parallel shard.
    The last `num_empty` rows are padding: they count as no tokens and are not routed to experts.

    Rows packed by document have their own labels; `masks` applies to the others. `extra`: the extra
    tensors of the samples; None: they are not used.

    Raises:
        DataError: a sample does not have the extra tensors, or an attention mask has a wrong shape.
    """
    packed = [sample for sample in samples if isinstance(sample, PackedSample)]
    plain = [sample for sample in samples if isinstance(sample, Sample)]
    assert not (packed and plain), "packed and unpacked rows in one microbatch"
    inputs, labels, lengths = _packed_rows(packed) if packed else _plain_rows(plain, masks)
    read = (
        tuple(length for row in packed for length in row.lengths_without_padding)
        if packed
        else _lengths_of_filled_rows(plain[: len(plain) - num_empty], lengths)
    )
    counted = labels >= 0
    pairs = [
        (inputs, labels),
        *(
            _shift_within_documents(inputs, labels, lengths, depth)
            for depth in range(1, num_mtp_layers + 1)
        ),
    ]
    shared, seq_params = _share(pairs, lengths, slicing, device)
    if (places := _places(samples, lengths)) is not None:
        seq_params = with_multimodal_positions(seq_params, places)
    hidden = row_masks(samples, padding=masks.padding)
    seq_params = _mask_padding(
        with_row_masks(seq_params, hidden, lengths), samples, num_empty=num_empty
    )
    (own_ids, own_labels), *others = [
        (_flat(ids, device), _flat(labels, device)) for ids, labels in shared
    ]
    batch = Batch(
        own_ids,
        own_labels,
        seq_params,
        int(counted.sum()),
        read,
        num_tokens=sum(read),
        mtp_inputs=tuple(others),
        num_mtp_labels=tuple(int((labels >= 0).sum()) for _, labels in pairs[1:]),
    )
    if extra is None or not (extra or any(sample.extra for sample in samples)):
        return batch
    return _with_extra(batch, samples, extra, lengths, counted.reshape(-1))


def _with_extra(
    batch: Batch,
    samples: Sequence[Row],
    declared: Mapping[str, ExtraTensor],
    lengths: Sequence[int],
    counted: NDArray[np.bool_],
) -> Batch:
    """Add the extra tensors of the samples to their batch. Per-token tensors are sharded over
    context-parallel ranks as the labels are; the others are replicated.

    lengths: of the documents with padding. counted: bool [t] of all ranks' input, True for labels
    that are not masked.
    """
    row = len(counted) // len(samples)
    if isinstance(samples[0], PackedSample):
        num_documents = [
            (len(each.lengths_without_padding), len(each.lengths))
            for each in samples
            if isinstance(each, PackedSample)
        ]
    else:
        in_row = np.bincount((np.cumsum(lengths) - 1) // row, minlength=len(samples)).tolist()
        num_documents = list(zip(in_row, in_row))
    values, device = concatenate_extra(samples, declared, num_documents), batch.ids.device
    tensors, sums = {}, {}
    for name, tensor in declared.items():
        per_token = tensor.per == "token"
        local = _local_tokens(batch.seq_params, values[name]) if per_token else values[name]
        tensors[name] = torch.from_numpy(np.ascontiguousarray(local)).to(device)
        if not tensor.shape:
            summed = values[name][counted] if per_token else values[name]
            sums[name] = float(summed.sum(dtype=np.float64))
    ids = _local_tokens(batch.seq_params, np.repeat(np.arange(len(samples)), row))
    return replace(batch, extra=tensors, extra_sums=sums, sample_ids=_flat(ids, device))


def _local_tokens(seq_params: PackedSeqParams, values: NDArray[Any]) -> NDArray[Any]:
    """Return the values of this rank's tokens, 0 for padding of context parallelism; values: [t,
    ...] of all ranks' input."""
    context = seq_params.context
    if context is None:
        return values
    indices = context.slices.as_read(context.rank)
    local = values[indices]
    local[indices < 0] = 0
    return local


def build_pack(
    dataset: Dataset,
    documents: Sequence[int],
    budget: TokenBudget,
    *,
    device: torch.device,
    slicing: Slicing = WHOLE,
    num_mtp_layers: int = 0,
    dropout_seed: int | None = None,
    even: float = 0.0,
    positions: Sequence[int] | None = None,
) -> Batch:
    """Build one microbatch of these documents, possibly none; padding is not routed to experts.

    `even`: mean number of tokens per microbatch of the step; positions: of the documents among
    those that are not skipped, for dropout; None: none are skipped.
    """
    samples, extra = [dataset.sample(k) for k in documents], declared_extra(dataset)
    packed = [sample for sample in samples if isinstance(sample, PackedSample)]
    row = pack_documents(packed, budget, extra)
    batch = build_batch(
        [row],
        MaskSettings(),
        device=device,
        slicing=slicing,
        num_mtp_layers=num_mtp_layers,
        # each document of the row is one sample
        extra={
            name: replace(tensor, per="document") if tensor.per == "sample" else tensor
            for name, tensor in extra.items()
        },
    )
    numbers = token_numbers(documents if positions is None else positions, row, budget.longest)
    return replace(
        batch,
        sample_ids=batch.seq_params.document_ids.long() if extra else None,
        seq_params=_with_padding_of(batch.seq_params, numbers),
        part=row.num_valid / even if even else 1.0,
        dropout_key=None
        if dropout_seed is None
        else _dropout_key(batch.seq_params, numbers, dropout_seed),
    )


def _lengths_of_filled_rows(rows: Sequence[Sample], lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the document lengths of the first rows of a microbatch, which are not empty."""
    num_tokens = sum(len(row.ids) - 1 for row in rows)
    return tuple(length for length, end in zip(lengths, accumulate(lengths)) if end <= num_tokens)


def _mask_padding(
    seq_params: PackedSeqParams, rows: Sequence[Row], *, num_empty: int
) -> PackedSeqParams:
    """Mark the padding of packed rows, and the last `num_empty` rows, which are not routed to
    experts."""
    text = []
    for number, row in enumerate(rows):
        size = len(row.ids) - isinstance(row, Sample)
        num_text = row.num_valid if isinstance(row, PackedSample) else size
        text.append(np.arange(size) < (num_text if number < len(rows) - num_empty else 0))
    if all(row.all() for row in text):
        return seq_params
    return _with_padding_of(seq_params, np.where(np.concatenate(text), 0, -1))


def _with_padding_of(seq_params: PackedSeqParams, numbers: Ids) -> PackedSeqParams:
    """Mark tokens whose `numbers` [t] (of all ranks' input) are negative as padding."""
    own, whole = _shard_numbers(seq_params, numbers)
    device, context = seq_params.position_ids.device, seq_params.context
    if context is not None:
        valid = context.whole.valid & _flat(whole >= 0, device)
        context = replace(context, whole=replace(context.whole, valid=valid))
    return replace(seq_params, valid=seq_params.valid & _flat(own >= 0, device), context=context)


def _dropout_key(seq_params: PackedSeqParams, numbers: Ids, seed: int) -> DropoutKey:
    """Return the dropout key of tokens with these `numbers` [t] (of all ranks' input)."""
    own, whole = _shard_numbers(seq_params, numbers)
    device = seq_params.position_ids.device
    keys = None if seq_params.context is None else _flat(whole, device)
    return DropoutKey(seed, _flat(own, device), keys)


def _shard_numbers(seq_params: PackedSeqParams, numbers: Ids) -> tuple[Ids, Ids]:
    """Return the numbers of this rank's tokens and of all tokens of the microbatch, both with the
    padding of context parallelism, which has -1; numbers: of all ranks' input."""
    context = seq_params.context
    if context is None:
        return numbers, numbers
    source = context.slices.source
    whole = numbers if source is None else np.where(source >= 0, numbers[source], -1)
    return whole[context.slices.numbers[context.rank]], whole


def _plain_rows(samples: Sequence[Sample], masks: MaskSettings) -> tuple[Ids, Ids, list[int]]:
    """Return inputs and labels [rows, s] of unpacked rows, and the lengths of their documents."""
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
    """Return inputs and labels [rows, s] of packed rows, and the lengths of their documents with
    padding."""
    inputs, labels = (
        np.stack([sample.ids for sample in samples]),
        np.stack([sample.labels for sample in samples]),
    )
    return inputs, labels, [length for sample in samples for length in sample.lengths]


def _shift_within_documents(
    ids: Ids, labels: Ids, lengths: list[int], depth: int
) -> tuple[Ids, Ids]:
    """Return the ids and labels of one MTP depth, shifted by `depth` tokens within each
    document."""
    source = shift_tokens_within_documents(lengths, depth)
    return np.where(source >= 0, ids.reshape(-1)[source], 0), np.where(
        source >= 0, labels.reshape(-1)[source], -1
    )


def _places(samples: Sequence[Row], lengths: list[int]) -> Ids | None:
    """Return [3, t]: position ids by time, height and width; in text, all three are the position in
    the document.

    Returns None if all rows are text.
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
    """Set the dropout key of a batch; `rows`: positions of its rows in the whole run, -1 for rows
    that are all padding."""
    context = batch.seq_params.context
    source = None if context is None else context.slices.source
    count = batch.seq_params.whole.num_tokens if source is None else np.count_nonzero(source >= 0)
    length = int(count) // len(rows)
    at = np.asarray(rows, dtype=np.int64)[:, None]
    numbers = np.where(at < 0, -1, at * length + np.arange(length))
    key = _dropout_key(batch.seq_params, numbers.reshape(-1), seed)
    return replace(batch, dropout_key=key)


def _share(
    pairs: list[tuple[Ids, Ids]], lengths: list[int], slicing: Slicing, device: torch.device
) -> tuple[list[tuple[Ids, Ids]], PackedSeqParams]:
    """Return the local (ids, labels) of this context-parallel rank, and the packing parameters.

    Padding is token 0 without a label. Labels are shifted before sharding, so that no token needs
    its neighbor.
    """
    if slicing.ranks == 1:
        return pairs, seq_params_from_lengths(lengths, device=device)
    slices = plan_slices(lengths, row=pairs[0][0].shape[1], slicing=slicing)
    local_indices = slices.as_read(slicing.rank)
    shared = [
        (
            np.where(local_indices >= 0, ids.reshape(-1)[local_indices], 0),
            np.where(local_indices >= 0, labels.reshape(-1)[local_indices], -1),
        )
        for ids, labels in pairs
    ]
    return shared, seq_params_from_slices(slices, slicing, device=device)


def _flat(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).reshape(-1)).to(device)
