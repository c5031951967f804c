"""Which tokens a run reads: the source, its splits, its blend, and where the index of samples is
kept."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Literal

from megalith.config.mock import MockLengths, mock_problems
from megalith.config.sft import Overlong, SFTConfig, sft_problems
from megalith.errors import ConfigError

Sampler = Literal["sequential", "cyclic", "cyclic_per_rank"]
SPLIT_NAMES = ("train", "valid", "test")
DEFAULT_SPLIT = (
    "969,30,1"  # Megatron's default, so that the same corpus gives the same three splits
)
MOCK_SPLIT = "1,1,1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is read: exactly one of `mock`, `path`, the three paths per split, or the conversations
    of `sft`."""

    mock: bool = False
    """Made-up documents that count upwards: no files, no tokenizer."""
    path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx pairs, plain (`a b`) or with weights (`0.3 a 0.7 b`); `split` divides
    each of them."""
    train_path: tuple[str, ...] = ()
    """The training prefixes when every split has files of its own; the same grammar as `path`."""
    valid_path: tuple[str, ...] = ()
    """The validation prefixes, beside `train_path`."""
    test_path: tuple[str, ...] = ()
    """The test prefixes, beside `train_path`."""
    split: str | None = None
    """Shares of train, valid and test. Unset: 969,30,1 for `path`, and 1,1,1 for `mock`."""
    document_masking: bool = False
    """Start a new document after each end-of-document token. Off: a row of seq_len tokens is one
    document."""
    eod_mask_loss: bool = False
    """Leave out the loss where the input token is the end-of-document token."""
    keep_partial_valid: bool = False
    """Keep the last, padded window of the validation split instead of dropping it."""
    num_train_samples: int | None = None
    """Build the training order for this many samples. Unset: as many as the run's steps need.

    The number of epochs, and with it the order, follows from this count. A run keeps the order of
    its first start; made longer than that has samples, it goes on with further epochs, shuffled on
    their own. Set this at the first start to what the longest run will read to have the one order
    of that.
    """
    sampler: Sampler = "sequential"
    """How samples are taken from that order. sequential: one after the other, until they are
    used up. cyclic: shuffled again in every epoch, without end. cyclic_per_rank: each
    data-parallel rank shuffles a part of its own, so that what a step reads depends on
    parallel.dp and train.micro_batch_size. Shuffles depend on the epoch alone, not on seed."""
    mid_level_dataset_surplus: float = 0.005
    """Extra share of samples that every member of a weighted blend is built for, against
    rounding."""
    cache_path: str | None = None
    """Folder for built indices. Unset: PREFIX/cache beside the data, .cache beside
    conversations; blends and mock data are then not kept."""
    mmap: bool = True
    """Map .bin files into memory. Off: positioned reads, for file systems that map badly."""
    mock_num_documents: int = 100_000
    """How many documents the mock corpus has."""
    mock_max_tokens: int = 4096
    """Mock documents are shorter than this."""
    mock_lengths: MockLengths = field(default_factory=MockLengths)
    """How long mock documents are."""
    overlong: Overlong = "error"
    """With train.tokens_per_microbatch, what becomes of a document of text that is longer than
    train.seq_len: refused, cut at its end, or left out; both are counted."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    """Conversations to be fine-tuned on."""


@dataclass(frozen=True, slots=True)
class Blend:
    """Prefixes, with one weight each or with none at all."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(field: str, words: Sequence[str]) -> Blend:
    """Read a list of prefixes, or of weights and prefixes in turn.

    An odd number of words is all prefixes. In an even one the words 0, 2, 4 … are either all
    numbers (weights) or none of them is.

    >>> parse_blend("data.path", ["3", "a", "1", "b"])
    Blend(prefixes=('a', 'b'), weights=(3.0, 1.0))

    Raises:
        ConfigError: some but not all of those words are numbers, or the weights cannot be
        normalized.
    """
    if len(words) % 2 == 1:
        return Blend(tuple(words), None)
    numbers = [_number(word) for word in words[::2]]
    if all(number is None for number in numbers):
        return Blend(tuple(words), None)
    weights = tuple(number for number in numbers if number is not None)
    if len(weights) < len(numbers):
        odd = words[2 * numbers.index(None)]
        raise ConfigError(
            f"{field}={' '.join(words)}: {odd!r} stands where a weight must be, because other "
            "prefixes have weights. "
            f"Use `weight prefix` pairs for all, or prefixes only."
        )
    if any(not math.isfinite(weight) or weight < 0 for weight in weights) or not any(weights):
        raise ConfigError(
            f"{field}={' '.join(words)}: weights {list(weights)} must be finite, not negative, and "
            f"not all zero. Set at least one weight above 0."
        )
    return Blend(tuple(words[1::2]), weights)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(split: str) -> tuple[tuple[float, float] | None, ...]:
    """Turn shares such as `8,1,1` into the (low, high) fractions of train, valid and test; None for
    a share of 0.

    >>> parse_split("8,1,1")[0]
    (0.0, 0.8)

    Raises:
        ConfigError: more than three numbers, a sign, something that is not a number, or all zero.
    """
    words = re.split(r"[,\s]+", split.strip())
    shares = [_number(word) if re.fullmatch(r"[.0-9]+", word) else None for word in words]
    known = [share for share in shares if share is not None]
    if len(known) != len(shares) or len(known) > 3 or not any(known):
        raise ConfigError(
            f"data.split={split}: expected one to three numbers for train, valid and test, "
            f"not negative and not all zero. Use for example data.split={DEFAULT_SPLIT}."
        )
    # Divided first and summed after, in float64: the ends then round to Megatron's.
    ends = [0.0]
    for share in known + [0.0] * (3 - len(known)):
        ends.append(ends[-1] + share / sum(known))
    return tuple((low, high) if high > low else None for low, high in pairwise(ends))


def split_of(data: DataConfig) -> str:
    """The split in force: the one given, or the default of the source."""
    return data.split or (MOCK_SPLIT if data.mock else DEFAULT_SPLIT)


def per_split_paths(data: DataConfig) -> dict[str, tuple[str, ...]]:
    """The prefixes given for single splits, by split name; empty when `path` or `mock` is the
    source."""
    paths = {"train": data.train_path, "valid": data.valid_path, "test": data.test_path}
    return {name: words for name, words in paths.items() if words}


def data_problems(data: DataConfig) -> list[str]:
    """Every rule that this config breaks, as texts. Touches no file: missing files are found when
    they are opened."""
    problems = (
        _source_problems(data)
        + _number_problems(data)
        + sft_problems(data.sft)
        + _text_problems(data)
    )
    fields = {"path": data.path} | {
        f"{name}_path": words for name, words in per_split_paths(data).items()
    }
    for name, words in fields.items():
        if words:
            problems += _refusal(partial(parse_blend, f"data.{name}", words))
    if data.split is not None:
        problems += _refusal(partial(parse_split, data.split))
    return problems


def _refusal(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return [str(error)]
    return []


def _source_problems(data: DataConfig) -> list[str]:
    given = [name for name, on in (("mock", data.mock), ("path", bool(data.path))) if on]
    given += [f"{name}_path" for name in per_split_paths(data)][:1]
    given += ["sft"] if data.sft.used() else []
    problems = []
    if len(given) != 1:
        problems.append(
            f"data has {len(given)} sources ({', '.join(given) or 'none'}): exactly one is needed. "
            "Set one of data.path, data.train_path (with data.valid_path and data.test_path), "
            "data.sft.path, or "
            f"data.mock=true."
        )
    if data.split is not None and per_split_paths(data):
        problems.append(
            f"data.split={data.split} divides one corpus, but data.train_path, valid_path or "
            "test_path name one "
            f"per split. Remove data.split, or use data.path."
        )
    return problems


def _text_problems(data: DataConfig) -> list[str]:
    """Settings of running text, which conversations have no use for."""
    usual = DataConfig()
    names = (
        "split",
        "document_masking",
        "eod_mask_loss",
        "keep_partial_valid",
        "num_train_samples",
        "sampler",
        "overlong",
    )
    given = [
        f"data.{name}={getattr(data, name)}"
        for name in names
        if getattr(data, name) != getattr(usual, name)
    ]
    if not data.sft.used() or not given:
        return []
    return [
        f"{' and '.join(given)} with data.sft: conversations have documents, masks and an order of "
        "their own "
        f"(data.sft.shuffle). Remove {'it' if len(given) == 1 else 'them'}, or use data.path."
    ]


def _number_problems(data: DataConfig) -> list[str]:
    problems = []
    surplus = data.mid_level_dataset_surplus
    if not (math.isfinite(surplus) and surplus >= 0):
        problems.append(
            f"data.mid_level_dataset_surplus={surplus} must be 0 or more. Use the default, 0.005."
        )
    if data.num_train_samples is not None and data.num_train_samples < 1:
        problems.append(
            f"data.num_train_samples={data.num_train_samples} must be 1 or more, or unset."
        )
    if data.mock_num_documents < 1:
        problems.append(f"data.mock_num_documents={data.mock_num_documents} must be 1 or more.")
    if data.mock_max_tokens < 2:
        problems.append(f"data.mock_max_tokens={data.mock_max_tokens} must be 2 or more.")
    return problems + mock_problems(
        data.mock_lengths, most=data.mock_max_tokens - 1, used=data.mock
    )
