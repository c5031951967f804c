"""The mock corpus is Megatron's."""

import pickle

from megalith.data.mock import MockStore


def test_lengths_are_the_known_ones() -> None:
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
