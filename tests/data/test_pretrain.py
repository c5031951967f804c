"""The order of pretraining samples: golden vectors, properties over random corpora, and what is
refused."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from megalith.data.indexed import IndexedDataset, IndexedDatasetBuilder
from megalith.data.pretrain import (
    ExtendedDataset,
    MockStore,
    PretrainDataset,
    WindowPlan,
    build_extended_dataset,
    build_sample_index,
    plan_epochs,
    split_range,
)
from megalith.errors import DataError
from tests.cases import loop_over

LENGTHS = [5, 9, 3, 12, 7]


def store_of(folder: Path, lengths: list[int]) -> IndexedDataset:
    """A store whose token t of document d is 100 d + t."""
    folder.mkdir(exist_ok=True)
    prefix = str(folder / "corpus")
    with IndexedDatasetBuilder(prefix, np.int32) as builder:
        for document, length in enumerate(lengths):
            builder.add_item(np.arange(length) + 100 * document)
            builder.end_document()
        builder.finalize()
    return IndexedDataset(prefix)


def plan(
    num_samples: int | None, *, seq_len: int = 8, keep_partial: bool = False, extra: int = 1
) -> WindowPlan:
    return WindowPlan(
        seq_len=seq_len, extra=extra, num_samples=num_samples, seed=1234, keep_partial=keep_partial
    )


def starts(text: str) -> list[list[int]]:
    return [[int(n) for n in pair.split(",")] for pair in text.strip("()").split(")(")]


# Recorded from Megatron for these five lengths, seq_len 8, one label token, seed 1234.
GOLDEN = [
    (4, 1, False, [4, 0, 1, 2, 3], "(0,0)(1,1)(2,4)(4,0)(4,8)", [2, 1, 3, 0]),
    (None, 1, False, [4, 0, 1, 2, 3], "(0,0)(1,1)(2,4)(4,0)(4,8)", [2, 1, 3, 0]),
    (
        6,
        2,
        True,
        [4, 0, 1, 2, 3, 3, 2, 1, 0, 4],
        "(0,0)(1,1)(2,4)(4,0)(4,8)(5,4)(6,0)(7,5)(8,4)",
        [2, 0, 3, 1, 5, 4, 7, 6],
    ),
    (
        13,
        3,
        False,
        [3, 1, 0, 2, 4, 2, 0, 2, 1, 4, 3, 4, 0, 1, 3],
        "(0,0)(0,8)(1,4)(2,3)(4,3)(6,1)(8,1)(9,0)(10,1)(10,9)(11,5)(13,1)(14,0)(14,8)",
        [7, 11, 2, 3, 1, 9, 5, 4, 0, 8, 12, 6, 10],
    ),
]


@pytest.mark.parametrize("num_samples, epochs, separate, documents, samples, shuffle", GOLDEN)
def test_the_three_arrays_equal_the_recorded_ones(
    num_samples: int | None,
    epochs: int,
    separate: bool,
    documents: list[int],
    samples: str,
    shuffle: list[int],
) -> None:
    lengths = np.array(LENGTHS, np.int32)
    epoch = plan_epochs(36, plan(num_samples))
    index = build_sample_index(lengths, np.arange(5, dtype=np.int32), plan(num_samples))
    assert (epoch.epochs, epoch.separate) == (epochs, separate)
    assert index.documents.tolist() == documents
    assert index.samples.tolist() == starts(samples)
    assert index.shuffle.tolist() == shuffle
    assert [a.dtype.name for a in (index.documents, index.samples, index.shuffle)] == [
        "int32",
        "int32",
        "uint32",
    ]


def test_a_partial_last_window_can_be_kept() -> None:
    index = build_sample_index(
        np.array(LENGTHS, np.int32), np.arange(5, dtype=np.int32), plan(None, keep_partial=True)
    )
    assert index.samples.tolist() == starts("(0,0)(1,1)(2,4)(4,0)(4,8)(4,11)")


def test_the_generator_is_the_one_megatron_uses() -> None:
    values = np.arange(10)
    np.random.RandomState(1234).shuffle(values)
    assert values.tolist() == [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]


def test_samples_hold_the_tokens_that_the_index_names(tmp_path: Path) -> None:
    dataset = PretrainDataset(store_of(tmp_path, LENGTHS), plan(None), vocab_size=1000)
    windows = {
        int(dataset.sample(k).ids[0]): dataset.sample(k).ids.tolist() for k in range(len(dataset))
    }
    first_document = [400, 401, 402, 403, 404, 405, 406, 0, 1]
    assert windows[400] == first_document
    assert windows[1] == [1, 2, 3, 4, 100, 101, 102, 103, 104]
    assert windows[104] == [104, 105, 106, 107, 108, 200, 201, 202, 300]
    assert windows[300] == [300, 301, 302, 303, 304, 305, 306, 307, 308]
    assert dataset.sample(3).ids.tolist() == first_document  # shuffle[3] is window 0
    assert all(dataset.sample(k).valid.all() for k in range(4))


def joined(lengths: NDArray[np.int32], documents: NDArray[np.int32]) -> NDArray[np.int64]:
    return np.concatenate([np.arange(lengths[document]) + 100 * document for document in documents])


@loop_over("case", range(60))
def test_windows_equal_slices_of_the_joined_stream(tmp_path: Path, case: int) -> None:
    draw = np.random.default_rng(case)
    lengths = draw.integers(0, 12, draw.integers(2, 20)).astype(np.int32)
    lengths[0] += 10  # some documents are empty, but one sample always fits
    seq_len, keep = int(draw.integers(1, 10)), bool(case % 3 == 0)
    wanted = None if case % 2 else int(draw.integers(1, 40))
    store = store_of(tmp_path / str(case), lengths.tolist())
    dataset = PretrainDataset(
        store, plan(wanted, seq_len=seq_len, keep_partial=keep), vocab_size=5000
    )
    index = build_sample_index(
        lengths, np.arange(len(lengths), dtype=np.int32), plan(wanted, seq_len=seq_len)
    )
    stream = joined(lengths, index.documents)
    assert dataset.num_samples >= (wanted or 0)
    read = sorted(
        tuple(sample.ids[: sample.num_valid].tolist())
        for sample in map(dataset.sample, range(len(dataset)))
    )
    count = len(dataset)
    assert read == sorted(
        tuple(stream[i * seq_len : (i + 1) * seq_len + 1].tolist()) for i in range(count)
    )


def test_every_token_is_read_once_per_epoch(tmp_path: Path) -> None:
    dataset = PretrainDataset(
        store_of(tmp_path, [7, 31, 2, 18, 44]), plan(None, seq_len=5), vocab_size=1000
    )
    inputs = np.concatenate([dataset.sample(k).ids[:-1] for k in range(len(dataset))])
    assert len(set(inputs.tolist())) == len(inputs)
    assert 0 <= 102 - len(inputs) <= 5


def test_partial_window_marks_its_padding(tmp_path: Path) -> None:
    dataset = PretrainDataset(
        store_of(tmp_path, LENGTHS), plan(None, keep_partial=True), vocab_size=1000
    )
    short = [sample for sample in map(dataset.sample, range(5)) if not sample.valid.all()]
    # 36 tokens: four windows share their ends, 32 to 35 are left
    assert [sample.num_valid for sample in short] == [4]
    assert short[0].ids[4:].tolist() == [0] * 5


def test_a_split_reads_only_its_own_documents(tmp_path: Path) -> None:
    store = store_of(tmp_path, [20] * 10)
    dataset = PretrainDataset(store, plan(30), share=(0.8, 1.0), split="valid", vocab_size=1000)
    assert {int(token) // 100 for k in range(30) for token in dataset.sample(k).ids} == {8, 9}


def test_split_bounds_round_half_to_even() -> None:
    assert [split_range(share, 7) for share in ((0.0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 1.0))] == [
        (0, 2),
        (2, 5),
        (5, 7),
    ]
    assert split_range((0.25, 0.75), 10) == (2, 8)


def test_an_empty_or_tiny_split_is_rejected_with_its_numbers(tmp_path: Path) -> None:
    store = store_of(tmp_path, LENGTHS)
    with pytest.raises(
        DataError, match=r"the test split of .*corpus has 0 of its 5 sequences\. Set data\.split"
    ):
        PretrainDataset(store, plan(4), share=(1.0, 1.0), split="test", vocab_size=1000)
    with pytest.raises(
        DataError, match=r"has 36 tokens in 5 sequences, and one sample needs 37\. .*seq_len to 35"
    ):
        PretrainDataset(store, plan(4, seq_len=36), vocab_size=1000)
    assert PretrainDataset(store, plan(4, seq_len=35), vocab_size=1000).num_samples == 4


def test_a_short_member_of_a_blend_repeats_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_of(tmp_path, [3, 2])
    dataset = PretrainDataset(store, plan(4), vocab_size=1000, repeat_short=True)
    assert dataset.num_samples >= 4 and set(dataset.sample(3).ids.tolist()) == {0, 1, 2, 100, 101}
    assert (
        "the train split of" in caplog.text
        and "has only 5 tokens, which repeat inside each sample" in caplog.text
    )
    with pytest.raises(DataError, match="has 5 tokens in 2 sequences, and one sample needs 9"):
        PretrainDataset(store, plan(None), vocab_size=1000, repeat_short=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has 0 tokens in 2 sequences"):
        PretrainDataset(
            store_of(tmp_path / "empty", [0, 0]), plan(4), vocab_size=1000, repeat_short=True
        )


def test_ids_outside_the_vocabulary_are_rejected(tmp_path: Path) -> None:
    dataset = PretrainDataset(store_of(tmp_path, LENGTHS), plan(None), vocab_size=300)
    with pytest.raises(
        DataError, match=r"corpus: token id 30\d is outside the vocabulary of 300 ids\. Use the tok"
    ):
        for k in range(4):
            dataset.sample(k)


def test_a_sample_past_the_end_is_rejected(tmp_path: Path) -> None:
    dataset = PretrainDataset(store_of(tmp_path, LENGTHS), plan(None), vocab_size=500)
    with pytest.raises(
        DataError,
        match=r"train split of .*corpus has 4 samples, and sample 4 was requested\. Use more",
    ):
        dataset.sample(4)


def test_the_fingerprint_follows_tokens_and_order_only(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    store, other = store_of(tmp_path, LENGTHS), store_of(tmp_path / "other", [9, 5, 3, 12, 7])

    def fingerprint(store: IndexedDataset, plan: WindowPlan) -> str:
        return PretrainDataset(store, plan, vocab_size=1000).fingerprint

    assert (
        fingerprint(store, plan(5)) == fingerprint(store, plan(6)) != fingerprint(store, plan(13))
    )
    assert fingerprint(store, plan(5)) != fingerprint(store, plan(5, seq_len=7))
    assert fingerprint(store, plan(5)) != fingerprint(other, plan(5))


def test_a_cached_dataset_survives_pickling(tmp_path: Path) -> None:
    dataset = PretrainDataset(
        store_of(tmp_path, LENGTHS), plan(6), vocab_size=1000, cache=tmp_path / "cache"
    )
    copy = pickle.loads(pickle.dumps(dataset))
    assert [copy.sample(k).ids.tolist() for k in range(6)] == [
        dataset.sample(k).ids.tolist() for k in range(6)
    ]


def test_mock_samples_need_no_file() -> None:
    dataset = PretrainDataset(
        MockStore(50, 49, num_documents=20, max_tokens=30), plan(40), vocab_size=50
    )
    ids = dataset.sample(17).ids
    follows = (ids[1:] == (ids[:-1] + 1) % 50) | (ids[1:] == 49) | (ids[:-1] == 49)
    assert follows.all()


def read(dataset: PretrainDataset | ExtendedDataset, count: int | None = None) -> list[list[int]]:
    return [
        dataset.sample(k).ids.tolist()
        for k in range(dataset.num_samples if count is None else count)
    ]


def test_the_order_for_more_epochs_does_not_begin_with_the_order_for_fewer() -> None:
    """Why a longer run cannot take the order that it would have had from its start."""
    lengths = np.full(12, 13, np.int32)
    one, two = (
        build_sample_index(lengths, np.arange(12, dtype=np.int32), plan(count))
        for count in (15, 30)
    )
    assert one.shuffle[:15].tolist() != two.shuffle[:15].tolist()


@loop_over("case", range(20))
def test_consumed_samples_are_unchanged_when_a_split_is_extended(case: int, tmp_path: Path) -> None:
    draw = np.random.default_rng(case)
    lengths = draw.integers(1, 20, 12)
    store, size = store_of(tmp_path / str(case), lengths.tolist()), int(lengths.sum()) // 8
    counts = np.cumsum(draw.integers(1, 3 * size, 4)).tolist()

    def build(part: WindowPlan) -> PretrainDataset:
        return PretrainDataset(store, part, vocab_size=2000)

    before: PretrainDataset | ExtendedDataset = build(plan(counts[0]))
    for number in range(1, 5):
        longer = build_extended_dataset(build, plan(counts[0]), counts[1:number])
        assert longer.num_samples == len(longer) >= counts[number - 1]
        assert read(longer, before.num_samples) == read(before)
        assert longer.fingerprint.startswith(before.fingerprint)
        assert (longer.fingerprint == before.fingerprint) == (
            longer.num_samples == before.num_samples
        )
        before = longer
    with pytest.raises(
        DataError,
        match=f"and sample {before.num_samples} was requested. Use more data, or set train.",
    ):
        before.sample(before.num_samples)
    with pytest.raises(DataError, match="sample -1 was requested"):
        before.sample(-1)


def test_later_epochs_read_every_document_in_another_order(tmp_path: Path) -> None:
    store = store_of(tmp_path, [9] * 20)
    longer = build_extended_dataset(
        lambda part: PretrainDataset(store, part, vocab_size=2000), plan(22, extra=0), [44, 66]
    )
    samples, size = read(longer), longer.num_samples // 3
    parts = [samples[:size], samples[size : 2 * size], samples[2 * size :]]
    assert len({str(part) for part in parts}) == 3
    for part in parts:
        assert len({token for ids in part for token in ids}) > 0.95 * 180
