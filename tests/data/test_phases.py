"""Data phases: samples of the run by phase, independent of the length of the run; errors."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.config.data import DataConfig, DataPhaseConfig, data_problems
from megalith.data.build import build_datasets
from megalith.data.phases import count_phase_samples
from megalith.data.sample import Dataset, HasDocumentLengths, SampleSettings
from megalith.errors import DataError
from tests.cases import loop_over
from tests.data.test_build import write


def phased(folder: Path) -> DataConfig:
    """Sample 10 is the first one of another store, and 15 the first one of a blend of both."""
    a, b = write(folder, "a", documents=20), write(folder, "b", 1000, documents=90)
    phases = (
        DataPhaseConfig(samples=10, path=(b,)),
        DataPhaseConfig(samples=15, path=("1", a, "3", b)),
    )
    return DataConfig(path=(a,), split="1,0,0", phases=phases)


def build(data: DataConfig, num_samples: int, *longer: int, **changes: Any) -> Dataset:
    fields = {"seq_len": 8, "seed": 1234, "vocab_size": 5000, "eod": 4999} | changes
    settings = SampleSettings(**fields)
    train = build_datasets(
        data, settings, train_samples=num_samples, train_longer=list(longer)
    ).train
    assert train is not None
    return train


def read(dataset: Dataset, count: int) -> list[list[int]]:
    return [dataset.sample(k).ids.tolist() for k in range(count)]


@loop_over("seed", range(20))
def test_counts_of_phases_add_up_to_the_samples_of_the_run(seed: int) -> None:
    rng = random.Random(seed)
    starts = sorted(rng.sample(range(1, 50), rng.randint(0, 4)))
    counts = sorted(rng.sample(range(1, 90), rng.randint(1, 3)))
    result = count_phase_samples([0, *starts], counts)
    assert len(result) == 1 + sum(start < counts[-1] for start in starts)
    ends = [*starts, 10**9][: len(result)]
    for start, end, phase in zip([0, *starts], ends, result, strict=False):
        assert phase[-1] == (end if end < 10**9 else counts[-1]) - start


def test_each_phase_reads_its_stores_from_their_start(tmp_path: Path) -> None:
    data = phased(tmp_path)
    samples = read(build(data, 30), 30)
    assert all(max(ids) < 1000 for ids in samples[:10])
    assert all(min(ids) >= 1000 for ids in samples[10:15])
    from_b = [min(ids) >= 1000 for ids in samples[15:]]
    assert abs(sum(from_b) - 0.75 * len(from_b)) <= 1
    first = DataConfig(path=data.path, split=data.split)
    assert samples[:10] == read(build(first, 10), 10)
    own_seed = build_datasets(
        DataConfig(path=data.phases[0].path, split=data.split),
        SampleSettings(seq_len=8, seed=1235, vocab_size=5000, eod=4999),
        train_samples=5,
    ).train
    assert own_seed is not None and samples[10:15] == read(own_seed, 5)


@pytest.mark.parametrize("counts", [(1,), (10,), (11,), (14, 16), (16, 20, 30), (3, 30)])
def test_order_does_not_depend_on_the_length_of_the_run(
    tmp_path: Path, counts: tuple[int, ...]
) -> None:
    data = phased(tmp_path)
    dataset = build(data, *counts)
    assert dataset.num_samples >= counts[-1]
    assert read(dataset, min(counts[-1], 15)) == read(build(data, 30), min(counts[-1], 15))
    shorter = build(data, *counts[:1])
    assert read(dataset, counts[0]) == read(shorter, counts[0])
    if counts[0] <= 15:
        assert dataset.fingerprint.startswith(shorter.fingerprint)


def test_phases_of_whole_documents_have_lengths(tmp_path: Path) -> None:
    documents = build(phased(tmp_path), 30, seq_len=12, whole_documents=True)
    assert isinstance(documents, HasDocumentLengths)
    for k in (0, 9, 10, 15, 29):
        assert documents.document_lengths(k) == (len(documents.sample(k).ids),)
    ids = [int(np.min(documents.sample(k).ids)) for k in range(15)]
    assert max(ids[:10]) < 1000 <= min(ids[10:])


def test_samples_outside_and_too_small_phases_are_rejected(tmp_path: Path) -> None:
    data = phased(tmp_path)
    with pytest.raises(DataError, match="sample 10 was requested, and the data has 10 samples"):
        build(data, 10).sample(10)
    a, b = data.path[0], data.phases[0].path[0]
    late = DataPhaseConfig(samples=1000, path=(a,))
    with pytest.raises(
        DataError,
        match=r"has \d+ samples from sample 0 on, and data.phases\[0\] begins at sample 1000. Set",
    ):
        build(DataConfig(path=(a, b), split="1,0,0", phases=(late,)), 1001)
    missing = DataPhaseConfig(samples=2, path=(str(tmp_path / "c"),))
    with pytest.raises(DataError, match="no token store at"):
        build(DataConfig(path=(a,), phases=(missing,)), 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"phases": [(5, "b"), (5, "c")]},
            r"data.phases\[1\].samples=5 must be after .* 6 or more",
        ),
        ({"phases": [(5, "")]}, r"data.phases\[0\].path is empty"),
        ({"phases": [(5, "1 b x c")]}, r"data.phases\[0\].path=1 b x c: 'x' is not a weight"),
        ({"path": (), "mock": True}, "data.phases needs token stores for the first phase"),
        ({"sampler": "cyclic"}, "data.phases with data.sampler=cyclic"),
        ({"num_train_samples": 9}, "data.phases with data.num_train_samples=9"),
    ],
)
def test_wrong_phases_are_reported(settings: dict[str, Any], message: str) -> None:
    phases = tuple(
        DataPhaseConfig(samples=start, path=tuple(text.split()))
        for start, text in settings.pop("phases", [(5, "b")])
    )
    problems = data_problems(DataConfig(**({"path": ("a",)} | settings), phases=phases))
    assert any(re.search(message, text) for text in problems), problems
