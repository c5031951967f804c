"""Settings to datasets: which samples each split has, blends, caches, and what is refused."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalith.config.data import DataConfig
from megalith.data import pretrain
from megalith.data.build import Splits, build_datasets
from megalith.data.indexed import IndexedDatasetBuilder
from megalith.data.sample import SampleSettings
from megalith.errors import ConfigError, DataError


def build(data: DataConfig, **changes: Any) -> Splits:
    settings: dict[str, Any] = {"seq_len": 8, "seed": 1234, "vocab_size": 5000, "eod": 4999}
    settings |= {name: changes.pop(name) for name in settings if name in changes}
    counts: dict[str, Any] = {"train_samples": 40, "valid_samples": 4}
    return build_datasets(data, SampleSettings(**settings), **(counts | changes))


def write(folder: Path, name: str, first_id: int = 0, documents: int = 20) -> str:
    """A store of 13-token documents; token t of document d is first_id + 13 d + t."""
    with IndexedDatasetBuilder(str(folder / name), np.uint16) as builder:
        for document in range(documents):
            builder.add_document(np.arange(13) + first_id + 13 * document, [13])
        builder.finalize()
    return str(folder / name)


def tokens(dataset: Any) -> set[int]:
    return {int(token) for k in range(len(dataset)) for token in dataset.sample(k).ids}


def write_uneven(folder: Path, name: str, documents: int, step: int, first: int) -> str:
    """Documents of 0 to 40 tokens, made by a formula that Megatron's golden samples were made with,
    too."""
    with IndexedDatasetBuilder(str(folder / name), np.uint16) as builder:
        for document in range(documents):
            if length := document * step % 41:
                builder.add_item((np.arange(length) * 31 + document * 977 + first) % 50021)
            builder.end_document()
        builder.finalize()
    return str(folder / name)


# SHA-256 (16 digits) of the first 400, 37 and 5 samples that megatron-core 0.16.1 gives of the
# three splits, and their numbers, recorded with its BlendedMegatronDatasetBuilder on stores of the
# same bytes.
MEGATRON = [
    ("A", 16, ("53aefbc82b81916c", "966ee88e682d63e4", "c478bae41ce9c510"), (444, 52, 19)),
    ("A", 31, ("1228f9564e011937", "0d8325c9c35cd43a", "8d618b66bd30df1d"), (459, 44, 10)),
    ("0.3 A 0.7 B", 16, ("3a09d6252f6d8bfa", "445049d8c05bea7b", "34c35df6796b8041"), (400, 38, 6)),
    ("0.3 A 0.7 B", 31, ("9357a2489079f9b3", "03c6478a57b062e0", "61add8093a94201d"), (400, 38, 6)),
    ("2 A 1 B", 16, ("e825729ba2746e2b", "2267c7ec038cd75b", "a026e2f5af73a47e"), (401, 38, 6)),
    ("2 A 1 B", 31, ("4e095eac3f8c9de6", "84678496d41c96db", "23e111c0e937bd5c"), (401, 38, 6)),
]


@pytest.mark.parametrize("words, seq_len, digests, sizes", MEGATRON)
def test_samples_equal_those_of_megatron(
    tmp_path: Path, words: str, seq_len: int, digests: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    stores = {
        "A": write_uneven(tmp_path, "A", 150, 7919, 0),
        "B": write_uneven(tmp_path, "B", 220, 104729, 9),
    }
    data = DataConfig(path=tuple(stores.get(word, word) for word in words.split()), split="8,1,1")
    counts = {"train_samples": 400, "valid_samples": 37, "test_samples": 5}
    splits = build(data, seq_len=seq_len, vocab_size=50021, **counts)
    results = []
    for dataset, count in zip((splits.train, splits.valid, splits.test), counts.values()):
        assert dataset is not None
        digest = hashlib.sha256(b"".join(dataset.sample(k).ids.tobytes() for k in range(count)))
        results.append((digest.hexdigest()[:16], len(dataset)))
    assert results == list(zip(digests, sizes))


def test_mock_data_gives_all_three_splits_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    splits = build(DataConfig(mock=True, mock_num_documents=30, mock_max_tokens=50), test_samples=3)
    assert splits.train is not None and splits.valid is not None and splits.test is not None
    assert len(splits.train) >= 40 and splits.test.sample(0).ids.shape == (9,)
    assert list(tmp_path.iterdir()) == []


def test_splits_of_one_store_share_no_document(tmp_path: Path) -> None:
    splits = build(
        DataConfig(path=(write(tmp_path, "a"),), split="6,2,2"),
        valid_samples=None,
        test_samples=None,
    )
    parts = [
        {token // 13 for token in tokens(part)}
        for part in (splits.train, splits.valid, splits.test)
    ]
    assert (
        parts[0] <= set(range(12))
        and parts[1] <= set(range(12, 16))
        and parts[2] <= set(range(16, 20))
    )


def test_splits_with_files_of_their_own_read_all_of_them(tmp_path: Path) -> None:
    data = DataConfig(
        train_path=(write(tmp_path, "a"),), valid_path=(write(tmp_path, "b", 1000, 5),)
    )
    splits = build(data, valid_samples=None)
    assert splits.valid is not None and tokens(splits.valid) >= set(range(1000, 1060))
    assert splits.test is None
    with pytest.raises(
        ConfigError, match=r"data\.test_path is not set, but the run reads 3 test samples\. Set it"
    ):
        build(data, test_samples=3)


def test_a_weighted_blend_mixes_by_weight(tmp_path: Path) -> None:
    paths = (
        "3",
        write(tmp_path, "a"),
        "0",
        write(tmp_path, "b", 1000),
        "1",
        write(tmp_path, "c", 2000),
    )
    train = build(DataConfig(path=paths, split="1,0,0"), train_samples=100, valid_samples=0).train
    assert train is not None and len(train) == 100
    samples = [train.sample(k) for k in range(100)]
    thousands = [int(sample.ids[0]) // 1000 for sample in samples]  # those of the member's tokens
    assert [thousands.count(member) for member in range(3)] == [75, 0, 25]


def test_a_blend_without_weights_reads_each_once(tmp_path: Path) -> None:
    data = DataConfig(path=(write(tmp_path, "a"), write(tmp_path, "b", 1000, 10)), split="1,0,0")
    train = build(data, train_samples=None, valid_samples=0).train
    assert train is not None and len(train) == 32 + 16
    inputs = [int(token) for k in range(48) for token in train.sample(k).ids[:-1]]
    assert len(inputs) == len(set(inputs))
    text = (
        r"training data has 48 samples, and the run needs 49\. Set weights in front of the prefixes"
    )
    with pytest.raises(DataError, match=text):
        build(data, train_samples=49, valid_samples=0)


def test_a_whole_split_cannot_be_weighted(tmp_path: Path) -> None:
    data = DataConfig(path=("1", write(tmp_path, "a"), "2", write(tmp_path, "b")), split="1,1,0")
    with pytest.raises(
        ConfigError,
        match=r"data weights \[1\.0, 2\.0\] cannot be applied to the whole valid split",
    ):
        build(data, valid_samples=None)


def test_index_is_cached_beside_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataConfig(path=(write(tmp_path, "a"),), split="1,1,0")
    first = build(data)

    def never(*arguments: object) -> None:
        raise AssertionError("the index was built twice")

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "build_sample_index", never)
        second = build(data)
        assert first.train is not None and second.train is not None
        assert [first.train.sample(k).ids.tolist() for k in range(40)] == [
            second.train.sample(k).ids.tolist() for k in range(40)
        ]
        write(tmp_path, "a", documents=21)
        with pytest.raises(AssertionError, match="built twice"):
            build(data)
    assert (tmp_path / "a" / "cache").is_dir()


def test_blend_is_cached_in_the_cache_folder(tmp_path: Path) -> None:
    paths = ("1", write(tmp_path, "a"), "2", write(tmp_path, "b", 1000))
    build(DataConfig(path=paths, split="1,1,0", cache_path=str(tmp_path / "cache")))
    assert (
        len([path for path in (tmp_path / "cache").iterdir() if path.name.endswith("-members.npy")])
        == 2
    )
    assert not (tmp_path / "a").exists()


def test_the_fingerprint_of_a_blend_follows_weights_and_members(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a"), write(tmp_path, "b", 1000, 25)
    prints = []
    for words in (("1", a, "2", b), ("1", a, "3", b), ("1", b, "2", a)):
        train = build(DataConfig(path=words, split="1,0,0"), valid_samples=0).train
        assert train is not None
        prints.append(train.fingerprint)
    assert len(set(prints)) == 3
    longer = build(
        DataConfig(path=("1", a, "2", b), split="1,0,0"), valid_samples=0, train_samples=41
    ).train
    assert longer is not None and longer.fingerprint == prints[0]


def test_extended_run_can_keep_its_sample_order(tmp_path: Path) -> None:
    a = write(tmp_path, "a")
    short = build(DataConfig(path=(a,), split="1,0,0"), train_samples=40, valid_samples=0).train
    longer = build(DataConfig(path=(a,), split="1,0,0"), train_samples=60, valid_samples=0).train
    pinned = DataConfig(path=(a,), split="1,0,0", num_train_samples=40)
    kept = build(pinned, train_samples=60, valid_samples=0).train
    assert short is not None and longer is not None and kept is not None
    assert kept.fingerprint == short.fingerprint != longer.fingerprint
    assert kept.sample(39).ids.tolist() == short.sample(39).ids.tolist()
    with pytest.raises(
        DataError,
        match=r"has 64 samples, and the run needs 70\. Increase or remove data\.num_train_samples",
    ):
        build(pinned, train_samples=70, valid_samples=0)


@pytest.mark.parametrize(
    "sources", [("a",), ("1", "a", "2.5", "b"), ("0", "a", "3", "b", "1", "c")]
)
def test_extended_run_keeps_its_consumed_samples_for_every_source(
    sources: tuple[str, ...], tmp_path: Path
) -> None:
    stores = {name: write_uneven(tmp_path, name, 30 + n, 7 + n, n) for n, name in enumerate("abc")}
    data = DataConfig(path=tuple(stores.get(word, word) for word in sources), split="1,0,0")
    seen: list[list[int]] = []
    longer: tuple[int, ...] = ()
    for count in (40, 300, 310, 1000):
        longer = (*longer, count)
        train = build(
            data,
            train_samples=longer[0],
            train_longer=longer[1:],
            valid_samples=0,
            vocab_size=50021,
        ).train
        assert train is not None and train.num_samples >= count
        now = [train.sample(k).ids.tolist() for k in range(count)]
        assert now[: len(seen)] == seen
        seen = now
    straight = build(data, train_samples=1000, valid_samples=0, vocab_size=50021).train
    assert (
        straight is not None and [straight.sample(k).ids.tolist() for k in range(40)] != seen[:40]
    )


def test_single_epoch_samples_end_in_an_extended_run(tmp_path: Path) -> None:
    data = DataConfig(path=(write(tmp_path, "a"), write(tmp_path, "b", 1000)), split="1,0,0")
    short, longer = (build(data, train_longer=more, valid_samples=0).train for more in ((), (60,)))
    assert short is not None and longer is not None and short.fingerprint == longer.fingerprint
    assert [short.sample(k).ids.tolist() for k in range(40)] == [
        longer.sample(k).ids.tolist() for k in range(40)
    ]
    most = build(data, train_longer=(1000,), valid_samples=0).train
    assert most is not None and most.num_samples == 64  # the caller refuses


def test_pinned_order_is_continued(tmp_path: Path) -> None:
    data = DataConfig(path=(write(tmp_path, "a"),), split="1,0,0", num_train_samples=40)
    short = build(data, train_samples=60, valid_samples=0).train
    longer = build(data, train_samples=60, train_longer=(70,), valid_samples=0).train
    assert short is not None and longer is not None and longer.num_samples >= 70 > short.num_samples
    assert longer.sample(59).ids.tolist() == short.sample(59).ids.tolist()


def test_every_missing_store_is_named_at_once(tmp_path: Path) -> None:
    data = DataConfig(path=(str(tmp_path / "one"), write(tmp_path, "a"), str(tmp_path / "two")))
    with pytest.raises(
        DataError,
        match=r"one\.idx and .*one\.bin not found(.|\n)*two\.idx and .*two\.bin not found",
    ):
        build(data)


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"seed": -1}, r"seed=-1: the sample order needs a seed from 0 to 4294967295\. Set seed"),
        (
            {"test_samples": 5},
            r"data\.split=1,1,0 assigns no data to test, but the run reads 5 test samples\. Set",
        ),
        (
            {"seq_len": 500},
            r"the train split of .* has 130 tokens in 10 sequences, and one sample needs 501\. Use "
            r"more",
        ),
        (
            {"vocab_size": 200},
            r"a: token id 2\d\d is outside the vocabulary of 200 ids\. Use the tokenizer",
        ),
    ],
)
def test_invalid_data_settings_are_rejected_before_the_run(
    tmp_path: Path, changes: dict[str, int], text: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=text):
        build(DataConfig(path=(write(tmp_path, "a"),), split="1,1,0"), **changes)


def test_violated_rule_of_the_settings_is_rejected() -> None:
    with pytest.raises(ConfigError, match="data has 0 sources"):
        build(DataConfig())


def test_a_member_without_weight_is_left_out_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        build(
            DataConfig(path=("1", write(tmp_path, "a"), "0", write(tmp_path, "b")), split="1,1,0")
        )
    assert "b has weight 0 and is not read" in caplog.text
