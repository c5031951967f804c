"""The compiled loops give what the plain ones give, and are only compiled for long inputs."""

from collections.abc import Callable

import numpy as np
import pytest

from megalith.data.pretrain import (
    compile_if_long,
    compiled,
    compute_exhaustive_order,
    compute_sample_index,
    compute_weighted_order,
)


def test_sample_indices_are_equal_compiled_and_plain() -> None:
    fast = compiled(compute_sample_index)
    for case in range(200):
        draw = np.random.default_rng(case)
        lengths = draw.integers(0, 20, draw.integers(1, 30)).astype(np.int32)
        documents = draw.permutation(np.arange(len(lengths), dtype=np.int32))
        seq_len, extra = int(draw.integers(1, 15)), int(draw.integers(0, 2))
        tokens = int(lengths.sum()) - extra
        count = max(0, -(-tokens // seq_len) if case % 2 else tokens // seq_len)
        if int(lengths.sum()) == 0:
            continue
        plain = np.zeros((count + 1, 2), np.int32)
        built = np.zeros_like(plain)
        compute_sample_index(lengths, documents, seq_len, extra, plain)
        fast(lengths, documents, seq_len, extra, built)
        assert built.tolist() == plain.tolist()


@pytest.mark.parametrize("fill", [compute_weighted_order, compute_exhaustive_order])
def test_blend_orders_are_equal_compiled_and_plain(fill: Callable[..., None]) -> None:
    fast = compiled(fill)
    for case in range(50):
        draw = np.random.default_rng(case)
        sizes = draw.integers(1, 40, draw.integers(1, 9))
        shares = sizes / sizes.sum() if fill is compute_weighted_order else sizes
        results = []
        for run in (fill, fast):
            counts, members = np.zeros(len(sizes), np.int64), np.zeros(sizes.sum(), np.int16)
            samples = np.zeros(sizes.sum(), np.int64)
            run(shares, counts, members, samples)
            results.append((counts.tolist(), members.tolist(), samples.tolist()))
        assert results[0] == results[1]


def test_read_only_views_of_files_can_be_compiled_for() -> None:
    lengths = np.frombuffer(b"\0\0" + np.array([3, 4, 5], np.int32).tobytes(), np.int32, 3, 2)
    index = np.zeros((3, 2), np.int32)
    compiled(compute_sample_index)(lengths, np.arange(3, dtype=np.int32), 5, 1, index)
    assert index.tolist() == [[0, 0], [1, 2], [2, 3]]


def test_short_loops_are_not_compiled() -> None:
    assert compile_if_long(compute_sample_index, rounds=100) is compute_sample_index
    assert compile_if_long(compute_sample_index, rounds=10**7) is compiled(compute_sample_index)
