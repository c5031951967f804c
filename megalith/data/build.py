"""Build the datasets of a run from its settings: open token stores, apply splits, and blend them in
Megatron's order."""

import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megalith.config.data import (
    SPLIT_NAMES,
    Blend,
    DataConfig,
    data_problems,
    get_split,
    parse_blend,
    parse_split,
    per_split_paths,
)
from megalith.config.fields import range_problems
from megalith.config.plugins import load_plugin
from megalith.data.cache import Arrays, load_or_build
from megalith.data.indexed import IndexedDataset, missing_store_message
from megalith.data.phases import PhasedDataset, PhasedDocuments, count_phase_samples
from megalith.data.pretrain import (
    DocumentDataset,
    MockStore,
    PretrainDataset,
    WindowPlan,
    build_extended_dataset,
    check_ids,
    compile_if_long,
    compute_exhaustive_order,
    compute_weighted_order,
)
from megalith.data.sample import Dataset, HasDocumentLengths, Row, SampleSettings, TokenStore
from megalith.data.sft import ConversationDataset, build_conversations
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError, raise_all

# --- blended datasets: several datasets sampled by weight, in Megatron's order

MAX_MEMBERS = 32766  # the member of each sample is an int16


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """Maps each sample of a blend to a member dataset and one of its samples."""

    members: NDArray[np.int16]  # [n]
    samples: NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True)
class MemberSizes:
    """Number of samples that a weighted blend takes from each member, and that the member is built
    with."""

    targets: tuple[int, ...]
    built_for: tuple[int, ...]  # target plus the margin, against rounding

    @property
    def total(self) -> int:
        """Number of samples of the blend: the sum of the targets, which are rounded up."""
        return sum(self.targets)


def normalize_weights(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum, in float64."""
    values = np.array(weights, np.float64)
    shares: list[float] = (values / values.sum()).tolist()
    return shares


def compute_member_sizes(weights: Sequence[float], num_samples: int, margin: float) -> MemberSizes:
    """Return the number of samples per member: its share of `num_samples`, rounded up.

    `margin` is the relative number of samples that each member is built with in addition.

    >>> compute_member_sizes([0.5, 0.5], 101, 0.005)
    MemberSizes(targets=(51, 51), built_for=(52, 52))
    """
    targets = [math.ceil(num_samples * share) for share in normalize_weights(weights)]
    return MemberSizes(
        tuple(targets), tuple(math.ceil(target * (1 + margin)) for target in targets)
    )


def build_weighted_order(weights: Sequence[float], num_samples: int) -> BlendOrder:
    """Return an order in which each sample comes from the member furthest behind its share.

    Ties go to the first member. The order is deterministic, and does not depend on `num_samples`
    except for its length.
    """
    order = _empty_order(num_samples)
    compute_order = compile_if_long(compute_weighted_order, rounds=num_samples * len(weights))
    shares = np.array(normalize_weights(weights), np.float64)
    compute_order(shares, np.zeros(len(weights), np.int64), order.members, order.samples)
    return order


def build_exhaustive_order(sizes: Sequence[int]) -> BlendOrder:
    """Return an order that contains every sample of every member once, in proportion to their
    sizes."""
    order = _empty_order(sum(sizes))
    compute_order = compile_if_long(compute_exhaustive_order, rounds=sum(sizes) * len(sizes))
    compute_order(
        np.array(sizes, np.int64), np.zeros(len(sizes), np.int64), order.members, order.samples
    )
    return order


def _empty_order(num_samples: int) -> BlendOrder:
    return BlendOrder(np.empty(num_samples, np.int16), np.empty(num_samples, np.int64))


def order_arrays(order: BlendOrder) -> Arrays:
    """Return the order as named arrays for the cache."""
    return {"members": order.members, "samples": order.samples}


class BlendedDataset:
    """Dataset that reads its samples from several datasets in the order of a blend."""

    def __init__(
        self, members: Sequence[Dataset], names: Sequence[str], order: BlendOrder, fingerprint: str
    ) -> None:
        """Check that each member has the samples that `order` takes from it.

        `names` identify the members in error messages.

        Raises:
            DataError: there are too many members, or one has too few samples.
        """
        self.num_samples = len(order.members)
        self.fingerprint = fingerprint
        self._members = members
        self._order = order
        if len(members) > MAX_MEMBERS:
            raise DataError(
                f"the blend has {len(members)} datasets, and the maximum is {MAX_MEMBERS}. Merge "
                "small "
                "stores with `megalith data merge`."
            )
        counts = np.bincount(order.members, minlength=len(members)).tolist()
        for name, member, count in zip(names, members, counts):
            if count > member.num_samples:
                raise DataError(
                    f"{name} has {member.num_samples} samples, and the blend takes {count} of "
                    f"them. Set data.mid_level_dataset_surplus higher than its current value."
                )

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Row:
        """Return sample k of the blend.

        Raises:
            DataError: there is no sample k.
        """
        self._check(k)
        return self._members[int(self._order.members[k])].sample(int(self._order.samples[k]))

    def _check(self, k: int) -> None:
        if not 0 <= k < self.num_samples:
            raise DataError(
                f"sample {k} was requested, and the blend has {self.num_samples} samples. "
                "Use more data, or set train.steps or train.eval_steps to a lower value."
            )


class BlendedDocuments(BlendedDataset):
    """Blended dataset whose samples are whole documents."""

    @property
    def reports(self) -> tuple[str, ...]:
        """Per member: how many documents are read, truncated and dropped."""
        return tuple(
            f"{member.name}: {member.report}"
            for member in self._members
            if isinstance(member, DocumentDataset)
        )

    def document_lengths(self, k: int) -> tuple[int, ...]:
        """Return the number of input tokens of document k.

        Raises:
            DataError: there is no document k.
        """
        self._check(k)
        member = self._members[int(self._order.members[k])]
        assert isinstance(member, HasDocumentLengths), (
            "all members of a document blend are DocumentDatasets"
        )
        return member.document_lengths(int(self._order.samples[k]))


_log = logging.getLogger(__name__)
_NUM_PROBES = 64  # sequences checked before a run starts (heuristic); reading checks every sample


@dataclass(frozen=True, slots=True)
class Splits:
    """Training, validation and test dataset of a run; None where no samples are requested."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    notes: tuple[str, ...] = ()
    """Messages about the datasets for the log."""


def build_dataset(
    data: DataConfig,
    samples: SampleSettings,
    tokenizer: Tokenizer,
    *,
    split: str,
    num_samples: int | None,
    tokenizer_path: str | None,
) -> Dataset | None:
    """Build the dataset of one split: train, valid or test. None if it has no data.

    Raises:
        ConfigError, DataError: as `build_datasets`.
    """
    counts: dict[str, int | None] = dict.fromkeys(("train", "valid", "test"), 0)
    counts[split] = num_samples
    splits = build_datasets(
        data,
        samples,
        train_samples=counts["train"],
        valid_samples=counts["valid"],
        test_samples=counts["test"],
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
    )
    dataset: Dataset | None = getattr(splits, split)
    return dataset


def build_datasets(
    data: DataConfig,
    samples: SampleSettings,
    *,
    train_samples: int | None,
    valid_samples: int | None = 0,
    test_samples: int | None = 0,
    train_longer: Sequence[int] = (),
    tokenizer: Tokenizer | None = None,
    tokenizer_path: str | None = None,
) -> Splits:
    """Build the train, validation and test datasets.

    The number of samples per split is a minimum; None reads one epoch, and 0 builds no dataset.
    `train_longer`: higher sample counts that the run was extended to after it began with
    `train_samples`, ascending; the order of the earlier samples does not change. A sampler that
    reads every sample once may provide fewer than the last count. All processes may call this
    concurrently: one builds the indices, the others map them. `tokenizer` and `tokenizer_path` are
    for conversations, which are stored as text.

    Raises:
        ConfigError: the settings are inconsistent.
        DataError: files are missing or damaged, a split is too small, or a token id is outside the
            vocabulary.
    """
    raise_all([*range_problems(data, "data"), *data_problems(data), *_seed_problems(samples.seed)])
    if data.sft.used():
        assert tokenizer is not None, "conversations need a tokenizer"
        rows = train_samples if train_samples is None else max([train_samples, *train_longer])
        counts = {"train": rows, "valid": valid_samples, "test": test_samples}
        build = partial(
            build_conversations,
            data,
            samples,
            tokenizer=tokenizer,
            tokenizer_path=tokenizer_path,
        )
        return _conversation_splits(counts, build)
    if data.plugin is not None:
        build_split = partial(
            load_plugin("dataset", data.plugin),
            data,
            seq_len=samples.seq_len,
            seed=samples.seed,
            vocab_size=samples.vocab_size,
            eod=samples.eod,
        )
        counts = {"train": train_samples, "valid": valid_samples, "test": test_samples}
        splits: dict[str, Dataset] = {
            split: build_split(split=split, num_samples=count)
            for split, count in counts.items()
            if count != 0
        }
        return Splits(splits.get("train"), splits.get("valid"), splits.get("test"))
    missing = _missing_stores(data)
    if missing:
        raise DataError("\n".join(f"data: no token store at {message}" for message in missing))
    builder_class = _DocumentBuilder if samples.whole_documents else _Builder
    builder = builder_class(data, samples)
    pinned = data.num_train_samples if train_samples else None
    train = (
        _build_phases(builder, samples, train_samples, train_longer)
        if data.phases and train_samples
        else builder.split("train", pinned or train_samples, train_longer)
    )
    single_pass = data.sampler == "sequential"
    if (
        single_pass
        and train is not None
        and train_samples is not None
        and train.num_samples < train_samples
    ):
        raise DataError(
            f"the training data has {train.num_samples} samples, and the run needs "
            f"{train_samples}. "
            + (
                f"Increase or remove data.num_train_samples={pinned}."
                if pinned
                else "Set weights in front of the prefixes so that stores repeat, or decrease "
                "train.steps."
            )
        )
    valid, test = builder.split("valid", valid_samples), builder.split("test", test_samples)
    datasets = {"train": train, "valid": valid, "test": test}.items()
    notes = tuple(f"{name}: {text}" for name, one in datasets for text in _report_lines(one))
    return Splits(train, valid, test, notes)


def _build_phases(
    builder: "_Builder", samples: SampleSettings, num_samples: int, longer: Sequence[int]
) -> Dataset:
    """Build the training data of a run with data phases, up to the last phase that it reaches.

    Documents and windows of each phase are shuffled by a seed of its own.

    Raises:
        DataError: a phase has too few samples.
    """
    starts = [0, *(phase.samples for phase in builder.data.phases)]
    phases = []
    for number, counts in enumerate(count_phase_samples(starts, [num_samples, *longer])):
        dataset = builder.for_phase(number).split("train", counts[0], counts[1:])
        assert dataset is not None, "a phase has samples"
        phases.append(dataset)
    phased_class = PhasedDocuments if samples.whole_documents else PhasedDataset
    return phased_class(phases, starts[: len(phases) + 1])


def _report_lines(dataset: Dataset | None) -> tuple[str, ...]:
    """Return the reports of a dataset of whole documents, one per blended store."""
    if isinstance(dataset, DocumentDataset):
        return (dataset.report,)
    return dataset.reports if isinstance(dataset, BlendedDocuments) else ()


def _conversation_splits(
    counts: Mapping[str, int | None], build: Callable[..., ConversationDataset]
) -> Splits:
    """Build the requested splits of conversations, with their reports as notes."""
    datasets = {
        name: build(split=name, num_samples=count) for name, count in counts.items() if count != 0
    }
    notes = tuple(f"{name}: {dataset.report}" for name, dataset in datasets.items())
    return Splits(datasets.get("train"), datasets.get("valid"), datasets.get("test"), notes)


def _seed_problems(seed: int) -> list[str]:
    if 0 <= seed < 2**32:
        return []
    return [
        f"seed={seed}: the sample order needs a seed from 0 to {2**32 - 1}. Set seed in that range."
    ]


def _missing_stores(data: DataConfig) -> list[str]:
    fields = {"path": data.path} | {
        f"{name}_path": words for name, words in per_split_paths(data).items()
    }
    fields |= {f"phases[{number}].path": phase.path for number, phase in enumerate(data.phases)}
    prefixes = [
        prefix
        for name, words in fields.items()
        if words
        for prefix in parse_blend(name, words).prefixes
    ]
    return [
        message for prefix in dict.fromkeys(prefixes) if (message := missing_store_message(prefix))
    ]


class _Builder:
    """Builds the splits of one run, opening each store once."""

    blend_class = BlendedDataset

    def __init__(self, data: DataConfig, samples: SampleSettings) -> None:
        self.data, self._samples = data, samples
        self._stores: dict[str, TokenStore] = {}

    def for_phase(self, number: int) -> Self:
        """Return the builder of the training data of a phase; 0: before all of `data.phases`. The
        stores that are open are shared."""
        if number == 0:
            return self
        path = self.data.phases[number - 1].path
        data = (
            replace(self.data, train_path=path)
            if per_split_paths(self.data)
            else replace(self.data, path=path)
        )
        seed = (self._samples.seed + number) % 2**32
        builder = type(self)(data, replace(self._samples, seed=seed))
        builder._stores = self._stores
        return builder

    def split(
        self, name: str, num_samples: int | None, longer: Sequence[int] = ()
    ) -> Dataset | None:
        """Build one split; None if no samples are requested. `longer`: later, higher sample
        counts."""
        if num_samples == 0:
            return None
        words = per_split_paths(self.data)
        if words:
            if name not in words:
                raise ConfigError(
                    f"data.{name}_path is not set, but the run reads {num_samples or 'all'} {name} "
                    "samples. Set it."
                )
            return self._blend(
                name, parse_blend(f"data.{name}_path", words[name]), (0.0, 1.0), num_samples, longer
            )
        share = parse_split(get_split(self.data))[SPLIT_NAMES.index(name)]
        if share is None:
            raise ConfigError(
                f"data.split={get_split(self.data)} assigns no data to {name}, but the run reads "
                f"{num_samples or 'all'} "
                f"{name} samples. Set a {name} share above 0."
            )
        blend = (
            Blend(("mock",), None) if self.data.mock else parse_blend("data.path", self.data.path)
        )
        return self._blend(name, blend, share, num_samples, longer)

    def _blend(
        self,
        name: str,
        blend: Blend,
        share: tuple[float, float],
        num_samples: int | None,
        longer: Sequence[int],
    ) -> Dataset:
        alone = len(blend.prefixes) == 1 and (blend.weights is None or per_split_paths(self.data))
        if alone:
            return self._member(name, blend.prefixes[0], share, num_samples, longer)
        if blend.weights is None:
            return self._unweighted(
                name, blend.prefixes, share, num_samples and max([num_samples, *longer])
            )
        if num_samples is None:
            raise ConfigError(
                f"data weights {list(blend.weights)} cannot be applied to the whole {name} "
                "split, which reads every "
                f"sample once. Remove the weights, or set a number of {name} samples."
            )
        return self._weighted(name, blend.prefixes, blend.weights, share, (num_samples, *longer))

    def _weighted(
        self,
        name: str,
        prefixes: Sequence[str],
        weights: Sequence[float],
        share: tuple[float, float],
        counts: Sequence[int],
    ) -> Dataset:
        """Blend the stores by weight, for the last of `counts`.

        The earlier counts are those that a run was extended from. The order of a blend of more
        samples begins with the order of a blend of fewer; the order of a member is extended by
        `build_extended_dataset`.
        """
        used_indices = [index for index, weight in enumerate(weights) if weight > 0]
        for index in sorted(set(range(len(weights))) - set(used_indices)):
            _log.info("%s: %s has weight 0 and is not read", name, prefixes[index])
        used_weights = [weights[index] for index in used_indices]
        sizes = [
            compute_member_sizes(used_weights, count, self.data.mid_level_dataset_surplus)
            for count in counts
        ]
        members = [
            self._member(name, prefixes[index], share, first, longer, repeat_short=True)
            for index, (first, *longer) in zip(
                used_indices, zip(*(size.built_for for size in sizes))
            )
        ]
        fingerprint = _blend_fingerprint(members, used_weights)
        arrays = load_or_build(
            self._blend_folder(),
            f"{fingerprint} samples={sizes[-1].total}",
            lambda: order_arrays(build_weighted_order(used_weights, sizes[-1].total)),
        )
        order = BlendOrder(arrays["members"], arrays["samples"])
        return self.blend_class(
            members, [prefixes[index] for index in used_indices], order, fingerprint
        )

    def _unweighted(
        self,
        name: str,
        prefixes: Sequence[str],
        share: tuple[float, float],
        num_samples: int | None,
    ) -> Dataset:
        """Blend the stores in proportion to their sizes, each sample once."""
        members = [self._member(name, prefix, share, None) for prefix in prefixes]
        sizes = [member.num_samples for member in members]
        fingerprint = _blend_fingerprint(members, None if num_samples is None else sizes)
        count = sum(sizes) if num_samples is None else min(num_samples, sum(sizes))
        arrays = load_or_build(
            self._blend_folder(),
            f"{fingerprint} samples={count}",
            lambda: order_arrays(
                build_exhaustive_order(sizes)
                if num_samples is None
                else build_weighted_order(sizes, count)
            ),
        )
        order = BlendOrder(arrays["members"], arrays["samples"])
        return self.blend_class(members, prefixes, order, fingerprint)

    def _member(
        self,
        name: str,
        prefix: str,
        share: tuple[float, float],
        num_samples: int | None,
        longer: Sequence[int] = (),
        *,
        repeat_short: bool = False,
    ) -> Dataset:
        store = self._store(prefix)
        plan = WindowPlan(
            seq_len=self._samples.seq_len,
            num_samples=num_samples,
            seed=self._samples.seed,
            keep_partial=self._samples.keep_partial
            or (name == "valid" and self.data.keep_partial_valid),
        )
        folder = self.data.cache_path or (None if self.data.mock else f"{prefix}/cache")
        build = partial(
            PretrainDataset,
            store,
            share=share,
            split=name,
            vocab_size=self._samples.vocab_size,
            cache=None if folder is None else Path(folder),
            repeat_short=repeat_short,
        )
        return build_extended_dataset(build, plan, longer)

    def _store(self, prefix: str) -> TokenStore:
        if prefix not in self._stores:
            if self.data.mock:
                assert self._samples.eod is not None, "mock data needs an end-of-document token"
                self._stores[prefix] = MockStore(
                    self._samples.vocab_size,
                    self._samples.eod,
                    self.data.mock_num_documents,
                    self.data.mock_max_tokens,
                    self.data.mock_lengths,
                )
            else:
                self._stores[prefix] = IndexedDataset(prefix, mmap=self.data.mmap)
                _probe(self._stores[prefix], self._samples.vocab_size)
        return self._stores[prefix]

    def _blend_folder(self) -> Path | None:
        return None if self.data.cache_path is None else Path(self.data.cache_path)


class _DocumentBuilder(_Builder):
    """Builds splits whose samples are whole documents."""

    blend_class = BlendedDocuments

    def _member(
        self,
        name: str,
        prefix: str,
        share: tuple[float, float],
        num_samples: int | None,
        longer: Sequence[int] = (),
        *,
        repeat_short: bool = False,
    ) -> Dataset:
        return DocumentDataset(
            self._store(prefix),
            share=share,
            split=name,
            seq_len=self._samples.seq_len,
            overlong=self.data.overlong,
            seed=self._samples.seed,
            num_samples=num_samples and max([num_samples, *longer]),
            vocab_size=self._samples.vocab_size,
        )


def _probe(store: TokenStore, vocab_size: int) -> None:
    """Check the token ids of some sequences, to reject data of another tokenizer before the run
    starts."""
    lengths = store.sequence_lengths
    for index in (
        np.unique(np.linspace(0, len(lengths) - 1, _NUM_PROBES, dtype=np.int64))
        if len(lengths)
        else ()
    ):
        check_ids(store.get(int(index), 0, min(int(lengths[index]), 4096)), vocab_size, store.name)


def _blend_fingerprint(members: Sequence[Dataset], weights: Sequence[float] | None) -> str:
    shares = "all" if weights is None else ",".join(str(weight) for weight in weights)
    text = "\n".join(member.fingerprint for member in members)
    return (
        f"blend of {len(members)} weights={shares} "
        f"members={hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
    )
