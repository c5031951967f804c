"""Tests of megalith/data/pretrain.py, and of blends of whole documents."""

from pathlib import Path

import numpy as np
import pytest

from megalith.config.data import DataConfig, MockLengths, Overlong
from megalith.data.build import build_datasets
from megalith.data.indexed import IndexedDatasetBuilder
from megalith.data.pretrain import DocumentDataset, MockStore
from megalith.data.sample import HasDocumentLengths, SampleSettings
from megalith.errors import DataError


def store(tmp_path: Path, lengths: str = "5 1 9 3 12") -> MockStore:
    path = tmp_path / "lengths.txt"
    path.write_text(lengths)
    return MockStore(60, 59, len(lengths.split()), lengths=MockLengths(kind="file", path=str(path)))


def documents(
    source: MockStore,
    *,
    overlong: Overlong = "error",
    seq_len: int = 11,
    num_samples: int | None = None,
    share: tuple[float, float] = (0.0, 1.0),
    vocab_size: int = 60,
) -> DocumentDataset:
    return DocumentDataset(
        source,
        share=share,
        seq_len=seq_len,
        overlong=overlong,
        seed=3,
        num_samples=num_samples,
        vocab_size=vocab_size,
    )


def test_every_document_with_a_token_to_predict_is_read_whole_once_an_epoch(tmp_path: Path) -> None:
    dataset = documents(store(tmp_path), num_samples=9)
    assert len(dataset) == 12, "three whole epochs of four"
    for epoch in range(3):
        samples = [dataset.sample(4 * epoch + place) for place in range(4)]
        assert sorted(len(sample.ids) for sample in samples) == [2, 4, 8, 11]
        for sample in samples:
            size = len(sample.ids)
            assert sample.ids.tolist() == list(range(1, size + 1)) and sample.lengths == (size,)
            assert sample.labels.tolist() == [*range(2, size + 1), 59]
    orders = {
        tuple(dataset.document_lengths(4 * epoch + place)[0] for place in range(4))
        for epoch in range(3)
    }
    assert len(orders) > 1, "epochs are shuffled anew"
    assert (
        "4 documents of 6.2 tokens on average, 1 dropped with nothing to predict" in dataset.report
    )


def test_document_depends_only_on_its_index_and_not_on_epochs(
    tmp_path: Path,
) -> None:
    few, many = (
        documents(store(tmp_path), num_samples=4),
        documents(store(tmp_path), num_samples=40),
    )
    backwards = [many.sample(k) for k in reversed(range(40))][::-1]
    assert all((few.sample(k).ids == backwards[k].ids).all() for k in range(4))
    assert all(many.document_lengths(k) == backwards[k].lengths for k in range(40))
    assert few.fingerprint == many.fingerprint


def test_too_long_documents_are_rejected_truncated_or_dropped(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"document 2 has 9 tokens, .* 2 of 5 are too long. Set train.seq_len to 11, or "
        r"data.overlong",
    ):
        documents(store(tmp_path), seq_len=6)
    cut, less = (
        documents(store(tmp_path), seq_len=6, overlong=how) for how in ("truncate", "drop")
    )
    assert (
        sorted(cut.document_lengths(k)[0] for k in range(4)) == [2, 4, 6, 6]
        and ", 2 truncated" in cut.report
    )
    assert (
        sorted(less.document_lengths(k)[0] for k in range(2)) == [2, 4]
        and ", 2 dropped as too long" in less.report
    )
    whole = next(cut.sample(k) for k in range(4) if len(cut.sample(k).ids) == 6)
    assert whole.labels.tolist() == [2, 3, 4, 5, 6, 7]
    assert (
        len({documents(store(tmp_path), seq_len=s, overlong="drop").fingerprint for s in (6, 7)})
        == 2
    )


def test_invalid_documents_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"has 0 usable documents of 2: 0 are too long .* 2 have no token to predict",
    ):
        documents(store(tmp_path, "1 1"))
    with pytest.raises(
        DataError, match=r"has 4 documents, and document 4 was requested. Use more data"
    ):
        documents(store(tmp_path)).sample(4)
    with pytest.raises(DataError, match="token id 59 is outside the vocabulary of 59 ids"):
        documents(store(tmp_path), vocab_size=59).sample(0)
    assert len(documents(store(tmp_path), share=(0.0, 0.6))) == 2


def test_splits_and_mock_settings_make_documents_of_text(tmp_path: Path) -> None:
    lengths = MockLengths(kind="lognormal", mean=20.0)
    data = DataConfig(mock=True, mock_num_documents=60, mock_max_tokens=40, mock_lengths=lengths)
    splits = build_datasets(
        data,
        SampleSettings(seq_len=40, seed=1, vocab_size=60, eod=59, whole_documents=True),
        train_samples=50,
        valid_samples=3,
    )
    assert splits.train is not None and splits.valid is not None and splits.test is None
    assert splits.train.num_samples >= 50 and isinstance(splits.train, HasDocumentLengths)
    assert all(
        splits.train.document_lengths(k) == (len(splits.train.sample(k).ids),) for k in range(50)
    )
    assert [note.split(":")[0] for note in splits.notes] == ["train", "valid"]
    assert np.all(splits.train.sample(0).ids >= 0)


def test_blend_reports_documents_of_each_store(
    tmp_path: Path,
) -> None:
    for name, lengths in {"a": (3, 9, 4), "b": (12, 5)}.items():
        with IndexedDatasetBuilder(str(tmp_path / name), np.uint16) as builder:
            for length in lengths:
                builder.add_document(np.arange(length), [length])
            builder.finalize()
    data = DataConfig(
        path=(str(tmp_path / "a"), str(tmp_path / "b")), split="100,0,0", overlong="drop"
    )
    splits = build_datasets(
        data,
        SampleSettings(seq_len=5, seed=1, vocab_size=60, eod=59, whole_documents=True),
        train_samples=3,
    )
    assert [note.split(": ")[0] for note in splits.notes] == ["train", "train"]
    assert all(note.endswith(", 1 dropped as too long") for note in splits.notes)
    assert isinstance(splits.train, HasDocumentLengths) and len(splits.train) == 3
    assert sorted(splits.train.document_lengths(k) for k in range(3)) == [(2,), (3,), (4,)]
    with pytest.raises(
        DataError, match=r"sample 3 was requested, and the blend has 3 samples. Use more data"
    ):
        splits.train.document_lengths(3)
