"""The mock corpus is Megatron's."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from megalith.config.data import MockLengths
from megalith.data.pretrain import MockStore, read_lengths
from megalith.errors import DataError


def test_lengths_equal_the_recorded_ones() -> None:
    lengths = MockStore(1000, 999).sequence_lengths
    assert lengths[:8].tolist() == [3484, 2609, 2094, 1105, 1261, 168, 309, 68]
    assert int(lengths.sum()) == 204_637_097


def test_documents_count_up_modulo_the_vocabulary_and_end() -> None:
    store = MockStore(10, 9)
    whole = store.get(7)
    assert whole.tolist() == [n % 10 for n in range(1, 68)] + [9]
    assert store.get(7, 60).tolist() == whole[60:].tolist()
    assert store.get(7, 3, 4).tolist() == [4, 5, 6, 7]
    assert store.get(7, 68, 0).tolist() == []


def test_a_tiny_variant_has_its_own_fingerprint() -> None:
    tiny = MockStore(10, 9, num_documents=5, max_tokens=8)
    assert len(tiny.sequence_lengths) == 5 and int(tiny.sequence_lengths.max()) < 8
    assert tiny.fingerprint != MockStore(10, 9).fingerprint
    assert pickle.loads(pickle.dumps(tiny)).fingerprint == tiny.fingerprint


def test_lognormal_lengths_have_their_mean_and_bounds() -> None:
    lengths = MockLengths(kind="lognormal", mean=100.0, sigma=0.7, shortest=5)
    drawn = MockStore(
        1000, 999, num_documents=20_000, max_tokens=4096, lengths=lengths
    ).sequence_lengths
    assert 97 < drawn.mean() < 103 and 0.66 < np.log(drawn).std() < 0.72 and np.median(drawn) < 85
    narrow = MockStore(
        1000, 999, num_documents=20_000, max_tokens=200, lengths=lengths
    ).sequence_lengths
    assert (narrow.min(), narrow.max()) == (5, 199)
    assert (
        MockStore(1000, 999, 50, 200, lengths).fingerprint
        != MockStore(1000, 999, 50, 201, lengths).fingerprint
    )


def test_lengths_of_a_file_are_used_in_order(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("7, 3\n12\n")
    store = MockStore(1000, 999, num_documents=5, lengths=MockLengths(kind="file", path=str(path)))
    assert store.sequence_lengths.tolist() == [7, 3, 12, 7, 3] and store.get(1).tolist() == [
        1,
        2,
        999,
    ]


@pytest.mark.parametrize("text", ["", "3 x", "0", "-2", "2.5"])
def test_a_file_of_anything_else_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=r"expected positive integers. Example: 17"):
        read_lengths(str(path))
    with pytest.raises(
        DataError, match=r"none cannot be read .* Set it to a text file of integers"
    ):
        read_lengths(str(tmp_path / "none"))
