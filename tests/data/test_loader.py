"""The loader: every layout sees the same global batch, labels that do not count are dropped, counts
are global."""

from dataclasses import replace
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch

from megalith.config.data import Sampler
from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.data import loader as loader_file
from megalith.data.loader import (
    Batch,
    BatchSettings,
    Loader,
    MaskSettings,
    StepBatches,
    build_batch,
    build_pack,
    check_batches_consistent_across_ranks,
    with_dropout,
)
from megalith.data.sample import PackedSample, Sample
from megalith.errors import DataError
from megalith.parallel.group import Group, single_rank_group
from megalith.parallel.mesh import build_mesh
from megalith.plan.batch_assignment import DocumentCost, MicrobatchCounts, TokenBudget
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.context import Slicing
from megalith.plan.grid import model_grid
from megalith.plan.replica_groups import GroupShare
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.verify.ranks import RaggedDocuments

CPU = torch.device("cpu")
PLAIN = MaskSettings()


class Counting:
    """Sample k is k, k + 1, k + 2 ...; sample 3 is half padding."""

    num_samples = 24
    fingerprint = "counting"

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Sample:
        return Sample(np.arange(10 * k, 10 * k + 5, dtype=np.int64), 3 if k == 3 else 5)


def loader(group: Group, *, micro: int = 2, consumed: int = 0, steps: int = 2) -> Loader:
    return Loader(
        Counting(),
        BatchSettings(batch_schedule=constant_batch_size(8), micro_batch_size=micro),
        group,
        consumed=consumed,
        steps=steps,
        device=CPU,
    )


def test_groups_read_their_shares_and_the_missing_samples_of_a_lost_group() -> None:
    def read(index: int, samples: tuple[int, ...] | None) -> Loader:
        return Loader(
            Counting(),
            BatchSettings(batch_schedule=constant_batch_size(8), micro_batch_size=2),
            single_rank_group("dp"),
            consumed=0,
            steps=3,
            device=CPU,
            share=GroupShare(index, 3),
            first_samples=samples,
        )

    def rows(step: StepBatches) -> list[int]:
        ids = [batch.ids.view(2, 4) for batch in step.microbatches]
        labels = [batch.labels.view(2, 4) for batch in step.microbatches]
        return [
            int(row[0]) // 10
            for part, masked in zip(ids, labels, strict=True)
            for row, label in zip(part, masked, strict=True)
            if bool((label >= 0).any())
        ]

    assert [rows(read(group, None).next()) for group in range(3)] == [[0, 1, 6, 7], [2, 3], [4, 5]]
    missing = [read(group, (2, 4, 5)) for group in range(3)]
    assert [rows(loader.next()) for loader in missing] == [[2, 4], [5], []]
    counts = [loader.peek_counts() for loader in missing]
    assert sum(labels for _, labels, *_ in counts) == 8 * 4, "the next step is complete"
    totals = [sum(values) for values in zip(*counts, strict=True)]
    step = missing[2].with_counts(missing[2].next(), totals)
    assert (rows(step), step.num_labels, step.num_tokens) == ([12, 13], 32, 32)


def test_a_step_is_rows_of_tokens_and_their_next_tokens() -> None:
    step = loader(single_rank_group("dp")).next()
    assert len(step.microbatches) == 4
    first = step.microbatches[0]
    assert first.ids.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert first.labels.tolist() == [1, 2, 3, 4, 11, 12, 13, 14]
    assert first.seq_params.uniform == 4
    assert step.microbatches[1].labels.tolist()[4:] == [31, 32, -1, -1]
    assert step.num_labels == 8 * 4 - 2


def _cyclic(rank: int, world: int, sampler: Sampler) -> list[int]:
    """First token, over 10, of every row that one rank reads in five steps of 8 of 22 samples."""
    dataset, dp = (
        Counting(),
        build_mesh(model_grid(ParallelConfig(), tiny_run().model, world), rank=rank).dp,
    )
    dataset.num_samples = 22
    endless = Loader(
        dataset,
        BatchSettings(
            batch_schedule=constant_batch_size(8), micro_batch_size=2, sampler=sampler, masks=PLAIN
        ),
        dp,
        consumed=0,
        steps=5,
        device=CPU,
    )
    steps = [endless.next() for _ in range(5)]
    return [
        int(batch.ids[4 * row]) // 10
        for step in steps
        for batch in step.microbatches
        for row in range(2)
    ]


def test_cyclic_samplers_follow_the_order_of_megatron() -> None:
    first, second = run_ranks(_cyclic, 2, "cyclic_per_rank")
    assert first[:10] == [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]
    assert second[:10] == [14, 11, 17, 15, 13, 19, 10, 18, 16, 12]
    assert first[10:] == [5, 6, 1, 2, 0, 8, 9, 3, 7, 4], "the second epoch has another order"
    first, second = run_ranks(_cyclic, 2, "cyclic")
    assert first[:10] == [10, 15, 11, 9, 19, 2, 18, 7, 6, 17]
    assert second[:10] == [4, 3, 5, 20, 13, 0, 16, 8, 14, 1]


def _rows_read(rank: int, world: int) -> tuple[list[int], int]:
    """First token of every row that one rank reads, and its global label count."""
    step = loader(
        build_mesh(model_grid(ParallelConfig(), tiny_run().model, world), rank=rank).dp
    ).next()
    return [int(i) for batch in step.microbatches for i in batch.ids[::4]], step.num_labels


def test_two_ranks_read_the_same_global_batch_as_one_and_know_its_label_count() -> None:
    (first, count), (second, other) = run_ranks(_rows_read, 2)
    assert sorted(first + second) == [10 * k for k in range(8)]
    assert count == other == 8 * 4 - 2  # the short row is on one rank only


def test_resumed_loader_continues_at_its_position() -> None:
    running = loader(single_rank_group("dp"))
    running.next()
    later = running.next()
    resumed = loader(single_rank_group("dp"), consumed=8, steps=1).next()
    assert [b.ids.tolist() for b in later.microbatches] == [
        b.ids.tolist() for b in resumed.microbatches
    ]


def test_documents_start_after_each_end_and_drop_the_label_that_crosses() -> None:
    sample = Sample(np.array([5, 6, 9, 7, 8, 9, 4], dtype=np.int64), 7)
    batch = build_batch([sample], MaskSettings(eod=9, documents=True), device=CPU)
    assert batch.seq_params.lengths == ((3, 3), (3, 3))
    assert batch.seq_params.position_ids.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.labels.tolist() == [6, 9, -1, 8, 9, -1]
    assert batch.num_labels == 4


def test_mtp_inputs_are_shifted_within_the_document() -> None:
    sample = Sample(np.array([5, 6, 9, 7, 8, 9, 4], dtype=np.int64), 7)
    (first, second), whole = (
        build_batch(
            [sample], MaskSettings(eod=9, documents=documents), device=CPU, num_mtp_layers=2
        ).mtp_inputs
        for documents in (True, False)
    )
    assert [x.tolist() for x in first] == [[6, 9, 0, 8, 9, 0], [9, -1, -1, 9, -1, -1]]
    assert [x.tolist() for x in second] == [[9, 0, 0, 9, 0, 0], [-1] * 6]
    assert [x.tolist() for x in whole[1]] == [[9, 7, 8, 9, 0, 0], [7, 8, 9, 4, -1, -1]]


@pytest.mark.parametrize("by", ["row", "document"])
def test_context_parallel_ranks_shard_mtp_inputs(
    by: Literal["row", "document"],
) -> None:
    draw = np.random.default_rng(0)
    samples = [Sample(draw.integers(1, 9, 13), 11) for _ in range(2)]
    masks = MaskSettings(eod=4, documents=True)
    whole = build_batch(samples, masks, device=CPU, num_mtp_layers=2)
    for depth, (ids, labels) in enumerate(whole.mtp_inputs):
        results = {}
        for rank in range(2):
            local = build_batch(
                samples,
                masks,
                device=CPU,
                slicing=Slicing(ranks=2, rank=rank, by=by),
                num_mtp_layers=2,
            )
            assert (
                local.num_mtp_labels == whole.num_mtp_labels
                and local.num_labels == whole.num_labels
            )
            context = local.seq_params.context
            assert context is not None
            places = context.slices.as_read(rank).tolist()
            pairs = zip(
                local.mtp_inputs[depth][0].tolist(),
                local.mtp_inputs[depth][1].tolist(),
                strict=True,
            )
            results |= {
                place: pair for place, pair in zip(places, pairs, strict=True) if place >= 0
            }
        assert results == dict(enumerate(zip(ids.tolist(), labels.tolist(), strict=True)))
        assert whole.num_mtp_labels[depth] == int((labels >= 0).sum()) < whole.num_labels


@pytest.mark.parametrize("by", ["row", "document"])
def test_context_parallel_ranks_slice_multimodal_position_ids(
    by: Literal["row", "document"],
) -> None:
    draw = np.random.default_rng(0)
    rows = [Sample(draw.integers(1, 9, 13), 11) for _ in range(3)]
    rows[1] = replace(rows[1], places=draw.integers(0, 99, (3, 12)))
    masks = MaskSettings(eod=4, documents=True)
    text, whole = (build_batch(some, masks, device=CPU).seq_params for some in ([rows[0]], rows))
    assert whole.position_ids.shape == (3, 36) and whole.num_tokens == 36
    assert torch.equal(whole.position_ids[:, :12], text.position_ids.expand(3, -1))
    assert whole.position_ids[:, 12:24].tolist() == rows[1].places.tolist()  # type: ignore[union-attr]  # just given
    result = torch.zeros_like(whole.position_ids)
    for rank in range(2):
        local = build_batch(
            rows, masks, device=CPU, slicing=Slicing(ranks=2, rank=rank, by=by)
        ).seq_params
        assert local.context is not None and local.whole.position_ids.shape == (
            3,
            2 * local.num_tokens,
        )
        places = torch.from_numpy(local.context.slices.as_read(rank))
        result[:, places[places >= 0]] = local.position_ids[:, places >= 0]
        assert (local.position_ids[:, places < 0] == 0).all()
        assert torch.equal(
            local.whole.position_ids[:, torch.from_numpy(local.context.slices.numbers[rank])],
            local.position_ids,
        )
    assert torch.equal(result, whole.position_ids)


def test_labels_of_every_depth_are_counted_over_the_step() -> None:
    step = Loader(
        Counting(),
        BatchSettings(batch_schedule=constant_batch_size(8), micro_batch_size=2, num_mtp_layers=2),
        single_rank_group("dp"),
        consumed=0,
        steps=1,
        device=CPU,
    ).next()
    assert (step.num_labels, step.num_mtp_labels) == (30, (8 * 3 - 2, 8 * 2 - 2))


def test_end_of_document_labels_can_be_masked_without_documents() -> None:
    sample = Sample(np.array([5, 9, 7, 8], dtype=np.int64), 4)
    batch = build_batch([sample], MaskSettings(eod=9, eod_mask_loss=True), device=CPU)
    assert batch.labels.tolist() == [9, -1, 8]
    assert batch.seq_params.uniform == 3


def shares(
    by: Literal["row", "document"], masks: MaskSettings = PLAIN, *, ranks: int = 2
) -> list[Batch]:
    """What each rank gets of two rows of 12 tokens."""
    draw = np.random.default_rng(0)
    samples = [Sample(draw.integers(1, 9, 13), 11) for _ in range(2)]
    samples[0].ids[[4, 5]] = 0
    return [
        build_batch(samples, masks, device=CPU, slicing=Slicing(ranks=ranks, rank=rank, by=by))
        for rank in range(ranks)
    ]


def test_context_parallel_ranks_get_ids_labels_and_positions_of_the_same_tokens() -> None:
    draw = np.random.default_rng(0)
    text = [draw.integers(1, 9, 13) for _ in range(2)]
    text[0][[4, 5]] = 0
    for rank, batch in enumerate(shares("row")):
        places = [0, 1, 2, 9, 10, 11] if rank == 0 else [3, 4, 5, 6, 7, 8]
        assert batch.seq_params.position_ids.tolist() == places * 2
        assert batch.ids.tolist() == [int(row[i]) for row in text for i in places]
        labels = [int(row[i + 1]) if i + 1 < 11 else -1 for row in text for i in places]
        # the next token of the text, also where a slice ends
        assert batch.labels.tolist() == labels
        assert batch.num_labels == 20  # of both ranks


def test_context_parallel_ranks_have_every_label_once() -> None:
    masks = MaskSettings(eod=0, documents=True)
    whole = shares("row", masks, ranks=1)[0]
    for by in ("row", "document"):
        parts = shares(by, masks)
        assert sorted(x for part in parts for x in part.labels.tolist() if x >= 0) == sorted(
            x for x in whole.labels.tolist() if x >= 0
        )
        assert {part.num_labels for part in parts} == {whole.num_labels}
        assert len({len(part.ids) for part in parts}) == 1


@pytest.mark.parametrize("by", ["row", "document"])
def test_padding_at_the_end_of_rows_is_invalid_on_context_parallel_ranks(
    by: Literal["row", "document"],
) -> None:
    ids = np.arange(1, 13)
    rows = [
        PackedSample(np.where(ids <= 7, ids, 0), np.full(12, 1), (3, 4, 5), 7),
        PackedSample(ids, ids, (12,), 12),
    ]
    for size in (1, 2):
        slicings = [Slicing(ranks=size, rank=rank, by=by) for rank in range(size)]
        results = [build_batch(rows, PLAIN, device=CPU, slicing=slicing) for slicing in slicings]
        assert sum(int(batch.seq_params.valid.sum()) for batch in results) == 7 + 12
        assert all((batch.ids[batch.seq_params.valid] > 0).all() for batch in results)


def test_padding_of_documents_has_no_label_and_is_marked() -> None:
    parts = shares("document", MaskSettings(eod=0, documents=True))
    padded = [int((~part.seq_params.valid).sum()) for part in parts]
    # Documents of 5, 1, 6 and 12 tokens become 8, 4, 8 and 12.
    assert sum(len(part.ids) for part in parts) == 32 and sum(padded) == 8
    assert all((part.labels[~part.seq_params.valid] == -1).all() for part in parts)
    assert all((part.ids[~part.seq_params.valid] == 0).all() for part in parts)


def test_squares_of_lengths_are_those_of_the_documents_as_they_were_read() -> None:
    samples = [
        Sample(np.array([5, 0, 7, 8, 0, 9, 4]), 7),
        Sample(np.array([3, 3, 3, 3, 3, 0, 1]), 7),
    ]
    documents = MaskSettings(eod=0, documents=True)
    for slicing in (
        Slicing(),
        Slicing(ranks=2, rank=1, by="document"),
        Slicing(ranks=2, by="document", multiple=3),
    ):
        assert (
            build_batch(samples, documents, device=CPU, slicing=slicing).squared_lengths
            == 4 + 9 + 1 + 36
        )
        assert (
            build_batch(samples, MaskSettings(), device=CPU, slicing=slicing).squared_lengths
            == 36 + 36
        )


def _numbers(rank: int, world: int, micro: int) -> list[tuple[list[int], list[int]]]:
    """(ids, numbers for dropout) of every microbatch of two steps, after 8 samples."""
    dp = build_mesh(model_grid(ParallelConfig(), tiny_run().model, world), rank=rank).dp
    dropping = Loader(
        Counting(),
        BatchSettings(
            batch_schedule=constant_batch_size(8),
            micro_batch_size=micro,
            dropout_seed=3,
            masks=PLAIN,
        ),
        dp,
        consumed=8,
        steps=2,
        device=CPU,
    )
    results = []
    for batch in (batch for _ in range(2) for batch in dropping.next().microbatches):
        assert batch.dropout_key is not None and batch.dropout_key.seed == 3
        results.append((batch.ids.tolist(), batch.dropout_key.numbers.tolist()))
    return results


@pytest.mark.parametrize(("dp", "micro"), [(1, 8), (1, 2), (2, 2)])
def test_dropout_numbers_each_token_of_the_run_the_same_under_every_layout(
    dp: int, micro: int
) -> None:
    results = [batch for rank in run_ranks(_numbers, dp, micro) for batch in rank]
    for ids, numbers in results:
        # token i of sample k is 10 k + i, of 4 tokens
        assert numbers == [id // 10 * 4 + id % 10 for id in ids]
    assert sorted(number for _, numbers in results for number in numbers) == list(
        range(8 * 4, 24 * 4)
    )


@pytest.mark.parametrize("by", ["row", "document"])
def test_context_parallel_ranks_have_the_dropout_numbers_of_their_tokens(
    by: Literal["row", "document"],
) -> None:
    # id = its place in two rows of 12
    rows = [
        np.arange(13, dtype=np.int64),
        np.arange(12, 25, dtype=np.int64),
    ]
    samples, masks = [Sample(row, 13) for row in rows], MaskSettings(eod=4, documents=True)
    for rank in range(2):
        batch = build_batch(samples, masks, device=CPU, slicing=Slicing(ranks=2, rank=rank, by=by))
        key = with_dropout(batch, [7, 9], seed=0).dropout_key
        assert key is not None
        expected = torch.where(batch.ids < 12, batch.ids + 7 * 12, batch.ids - 12 + 9 * 12)
        assert torch.equal(key.numbers, torch.where(batch.seq_params.valid, expected, -1))


def test_batch_without_dropout_has_no_dropout_key() -> None:
    assert loader(single_rank_group("dp")).next().microbatches[0].dropout_key is None


# --- packs


def ragged(
    group: Group, *, budget: TokenBudget | None, consumed: int = 0, steps: int = 1, **others: Any
) -> Loader:
    dataset = RaggedDocuments(30, 61, 40)
    return Loader(
        dataset,
        BatchSettings(
            batch_schedule=constant_batch_size(10), micro_batch_size=1, budget=budget, **others
        ),
        group,
        consumed=consumed,
        steps=steps,
        device=CPU,
    )


BUDGET = TokenBudget(capacity=64, longest=30)


def test_packs_have_every_document_of_the_step_once_under_every_layout() -> None:
    dataset = RaggedDocuments(30, 61, 40)
    step = ragged(single_rank_group("dp"), budget=BUDGET, consumed=10).next()
    results = sorted(length for batch in step.microbatches for length in batch.lengths)
    assert results == sorted(dataset.document_lengths(k)[0] for k in range(10, 20))
    assert step.squared_lengths == sum(length**2 for length in results)
    assert step.num_tokens == sum(results) and step.num_padded_tokens == 64 * len(step.microbatches)
    assert {len(batch.ids) for batch in step.microbatches} == {64}
    for batch in step.microbatches:
        assert int(batch.seq_params.valid.sum()) == sum(batch.lengths) == batch.num_tokens
        assert (
            int((batch.labels >= 0).sum()) == batch.num_labels
            and not (batch.labels[~batch.seq_params.valid] >= 0).any()
        )
    assert sum(batch.part for batch in step.microbatches) == pytest.approx(len(step.microbatches))


def test_dropout_depends_on_the_document_and_not_on_its_pack() -> None:
    numbers = []
    for capacity in (40, 64, 128):
        budget = TokenBudget(capacity=capacity, longest=30)
        step = ragged(single_rank_group("dp"), budget=budget, consumed=10, dropout_seed=3).next()
        keys = [batch.dropout_key for batch in step.microbatches]
        numbers.append(
            sorted(int(n) for key in keys if key is not None for n in key.numbers if n >= 0)
        )
    assert numbers[0] == numbers[1] == numbers[2] and len(set(numbers[0])) == len(numbers[0])
    assert numbers[0][0] == 10 * 30, "the first token of document 10"


def test_empty_pack_is_padding() -> None:
    batch = build_pack(RaggedDocuments(30, 61, 40), [], BUDGET, device=CPU)
    assert (
        batch.num_tokens == batch.num_labels == 0
        and batch.lengths == ()
        and not batch.seq_params.valid.any()
    )
    assert batch.part == 1.0 and len(batch.ids) == 64


def test_digest_sums_show_whether_ranks_have_equal_batch_assignments() -> None:
    check_batches_consistent_across_ranks(3, [5, 25], single_rank_group("dp"))
    with pytest.raises(
        DataError, match=r"differently \(microbatches: 3 on rank 0\). Use the same version"
    ):
        check_batches_consistent_across_ranks(3, [5, 24], single_rank_group("dp"))


class Talks:
    """Rows of conversations, of which every other one is long."""

    num_samples, fingerprint = 40, "talks"

    def __len__(self) -> int:
        return self.num_samples

    def document_lengths(self, k: int) -> tuple[int, ...]:
        return (12,) if k % 2 else (3, 3, 3, 3)

    def sample(self, k: int) -> PackedSample:
        return PackedSample(np.full(12, k), np.full(12, k), self.document_lengths(k), 12)


@pytest.mark.parametrize("balanced", [False, True])
def test_rows_of_conversations_are_assigned_by_cost(balanced: bool) -> None:
    results = []
    for rank in range(2):
        group = replace(single_rank_group("dp"), rank=rank, ranks=(0, 1))
        with patched(loader_file, "start_all_reduce_", lambda count, group: None):
            step = Loader(
                Talks(),
                BatchSettings(
                    batch_schedule=constant_batch_size(8),
                    micro_batch_size=1,
                    cost=DocumentCost(0, 1),
                    balanced=balanced,
                ),
                group,
                consumed=8,
                steps=1,
                device=CPU,
            ).next()
        results.append([int(batch.ids[0]) for batch in step.microbatches])
        assert (step.imbalance or 0.0) == pytest.approx(0.0 if balanced else 2 * 144 / 180 - 1)
    assert sorted(results[0] + results[1]) == list(range(8, 16))
    assert sum(k % 2 for k in results[0]) == (2 if balanced else 0)


def test_balanced_rows_have_weights_and_numbers_of_microbatches_of_their_own() -> None:
    """Six rows are three full microbatches of one process, and two of unequal length on each of two
    ranks, whose schedule accepts only even numbers."""
    counts = MicrobatchCounts(pipeline=PipelineConfig(vpp=2), pp=2)
    steps = []
    for rank, size in product(range(2), (6, 10)):
        group = replace(single_rank_group("dp"), rank=rank, ranks=(0, 1))
        with patched(loader_file, "start_all_reduce_", lambda count, group: None):
            settings = BatchSettings(
                batch_schedule=constant_batch_size(size),
                micro_batch_size=2,
                cost=DocumentCost(0, 1),
                balanced=True,
                counts=counts,
            )
            loader = Loader(Talks(), settings, group, consumed=0, steps=1, device=CPU)
        steps.append(loader.next())
    for step, (num_filled, parts) in zip(
        steps, 2 * [(4, [4 / 3, 2 / 3]), (6, [1.2, 1.2, 0.6, 0])], strict=True
    ):
        assert step.num_microbatches == num_filled
        assert [batch.part for batch in step.microbatches] == pytest.approx(parts)
