"""Data settings: source, splits, blend, sample order, index cache, mock data, supervised fine-
tuning, tokenizer, and `megalith prepare`.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal, get_args

from megalith.config.fields import Example, Ge, Le, range_problems
from megalith.errors import ConfigError

# --- tokenizer settings, and the rules they must satisfy

SplitPattern = Literal["v1", "v2", "cl100k"]
"""Regular expressions that split text before byte-pair encoding."""

FileKind = Literal["huggingface", "sentencepiece", "tiktoken"]
"""Tokenizer kinds that are read from files."""

FILES: tuple[FileKind, ...] = get_args(FileKind)

VOCABULARY, MERGES = "vocab.json", "merges.txt"
"""File name suffixes of the vocabulary and the merges of a GPT-2 tokenizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer of a run: bytes, a tokenizer read from files, or none (`null`) for mock data."""

    kind: Literal["byte", "huggingface", "sentencepiece", "tiktoken", "null"] = "byte"
    """Tokenizer type. byte: UTF-8 bytes, needs no file; huggingface, sentencepiece and tiktoken:
    read from `path`; null: writes ids as digits, for mock data."""
    path: str | None = None
    """Tokenizer files. huggingface: a folder with tokenizer.json, that file, a hub name in the
    local cache, or the vocab.json of a GPT-2 tokenizer beside its merges.txt; sentencepiece:
    tokenizer.model or its folder; tiktoken: a .tiktoken file or a JSON vocabulary. Unset with
    the other kinds."""
    vocab_size: int | None = None
    """Vocabulary size of the `null` tokenizer, whose last id ends documents, or of a tiktoken
    vocabulary in JSON. Unset: the tokenizer's own size."""
    eod: str | None = None
    """Text of the end-of-document token. Unset: the tokenizer's end-of-text token."""
    add_special_tokens: bool = True
    """Add the tokenizer's BOS and EOS tokens around a text if its files define them."""
    pattern: SplitPattern = "v2"
    """tiktoken: pattern that splits text before byte-pair encoding; cl100k is that of GPT-4 and
    Llama 3."""
    special_tokens: tuple[str, ...] = ()
    """tiktoken: texts of the special tokens, in order of their ids; in a .tiktoken file they
    follow the vocabulary."""
    num_special_tokens: Annotated[int, Ge(1)] = 1000
    """tiktoken: number of ids reserved for special tokens at the start of a JSON vocabulary."""


def find_merges_file(vocabulary: str) -> str | None:
    """Return the path of the merges file of a GPT-2 vocabulary; None if the file name is not that
    of a vocabulary.

    >>> find_merges_file("gpt2/gpt2-vocab.json"), find_merges_file("tokenizer.json")
    ('gpt2/gpt2-merges.txt', None)
    """
    return (
        f"{vocabulary.removesuffix(VOCABULARY)}{MERGES}"
        if vocabulary.endswith(VOCABULARY)
        else None
    )


def locate_tokenizer(tokenizer: TokenizerConfig, folder: Path) -> TokenizerConfig:
    """Return the tokenizer of the config.yaml in `folder`; `path` becomes absolute if it names a
    file in that folder.

    Runs and checkpoints have a copy of their tokenizer and name it relative to their folder, so
    that it moves with them. Any other relative path is relative to the working directory.
    """
    if tokenizer.path is None or not (folder / tokenizer.path).is_file():
        return tokenizer
    return replace(tokenizer, path=str(folder / tokenizer.path))


def tokenizer_problems(tokenizer: TokenizerConfig) -> list[str]:
    """Return the violated rules as error messages. Accesses no file."""
    problems = []
    kind = tokenizer.kind
    if kind in FILES and not tokenizer.path:
        problems.append(
            f"tokenizer.kind={kind} needs tokenizer.path. Set it to {_describe_path(kind)}."
        )
    if kind not in FILES:
        given = [
            f"tokenizer.{name}={value}"
            for name, value in _file_fields(tokenizer)
            if value is not None
        ]
        problems += [
            f"{field} applies to tokenizers that are read from files, but tokenizer.kind={kind}. "
            f"Set tokenizer.kind to one of {', '.join(FILES)}, or remove it."
            for field in given
        ]
    defaults = TokenizerConfig()
    if kind != "tiktoken":
        problems += [
            f"tokenizer.{name}={getattr(tokenizer, name)} applies to tiktoken vocabularies, but "
            f"tokenizer.kind={kind}. "
            f"Set tokenizer.kind=tiktoken, or remove it."
            for name in ("pattern", "special_tokens", "num_special_tokens")
            if getattr(tokenizer, name) != getattr(defaults, name)
        ]
    elif len(tokenizer.special_tokens) > tokenizer.num_special_tokens:
        problems.append(
            f"tokenizer.num_special_tokens={tokenizer.num_special_tokens} must be at "
            "least the number of tokenizer.special_tokens. "
            f"Set it to {len(tokenizer.special_tokens)} or more."
        )
    if kind == "null" and (tokenizer.vocab_size or 0) < 2:
        problems.append(
            f"tokenizer.vocab_size={tokenizer.vocab_size}: the null tokenizer needs a vocabulary "
            f"size. Set tokenizer.vocab_size to 2 or more."
        )
    if kind not in ("null", "tiktoken") and tokenizer.vocab_size is not None:
        problems.append(
            f"tokenizer.vocab_size={tokenizer.vocab_size}: a {kind} tokenizer defines its own "
            f"size. Remove it, or set tokenizer.kind=null."
        )
    return problems


def _describe_path(kind: str) -> str:
    return {
        "huggingface": "a folder with tokenizer.json or to a hub name",
        "sentencepiece": "a tokenizer.model or its folder",
        "tiktoken": "a .tiktoken file or a JSON vocabulary",
    }[kind]


def _file_fields(tokenizer: TokenizerConfig) -> list[tuple[str, str | None]]:
    return [("path", tokenizer.path), ("eod", tokenizer.eod)]


# --- settings of the document lengths of mock data


@dataclass(frozen=True, slots=True, kw_only=True)
class MockLengths:
    """Distribution of document lengths in mock data, in tokens including the end-of-document
    token."""

    kind: Literal["uniform", "lognormal", "file"] = "uniform"
    """Distribution. uniform: from 1 token to data.mock_max_tokens, as in Megatron; lognormal:
    many short and few long documents, as in real text; file: the lengths listed in `path`,
    repeated."""
    mean: Annotated[float | None, Ge(1), Le(1e9)] = None
    """lognormal: mean length in tokens, before lengths are clamped to the valid range. Unset
    with the other kinds."""
    sigma: Annotated[float, Ge(0), Example(1.0)] = 1.0
    """lognormal: standard deviation of the logarithm of the lengths."""
    shortest: Annotated[int, Ge(1)] = 1
    """lognormal: minimum length in tokens; the maximum is data.mock_max_tokens - 1."""
    path: str | None = None
    """file: a text file of whole numbers separated by spaces, commas or newlines. Unset with the
    other kinds."""


def mock_problems(lengths: MockLengths, *, most: int, used: bool) -> list[str]:
    """Return the violated rules as error messages; `most` is the longest document in tokens.
    Accesses no file."""
    defaults, name = MockLengths(), "data.mock_lengths"
    if not used:
        return (
            []
            if lengths == defaults
            else [f"{name}.kind={lengths.kind} needs data.mock=true. Set it, or remove {name}."]
        )
    read = {"lognormal": ("mean", "sigma", "shortest"), "file": ("path",)}.get(lengths.kind, ())
    problems = [
        f"{name}.{field}={getattr(lengths, field)} is not used by {name}.kind={lengths.kind}. "
        f"Remove it, or set {name}.kind={'file' if field == 'path' else 'lognormal'}."
        for field in ("mean", "sigma", "shortest", "path")
        if field not in read and getattr(lengths, field) != getattr(defaults, field)
    ]
    if lengths.kind == "file" and lengths.path is None:
        problems.append(
            f"{name}.kind={lengths.kind} needs {name}.path. Set it to a file of lengths."
        )
    if lengths.kind != "lognormal":
        return problems
    if lengths.mean is None or lengths.mean > most:
        problems.append(
            f"{name}.mean={lengths.mean} must be from 1 to {most}, below "
            f"data.mock_max_tokens={most + 1}."
        )
    if lengths.shortest > most:
        problems.append(
            f"{name}.shortest={lengths.shortest} must be from 1 to {most}, below "
            f"data.mock_max_tokens={most + 1}."
        )
    return problems


# --- supervised fine-tuning data: conversations, chat template, loss mask and packing

Packing = Literal["best_fit", "greedy", "row"]
Overlong = Literal["error", "truncate", "drop"]
BUILT_IN_TEMPLATES = ("chatml", "llama3", "identity", "nemotron-h-aligned", "nemotron-nano-v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig:
    """Conversations for supervised fine-tuning; used if `path` or `mock_conversations` is set."""

    path: tuple[str, ...] = ()
    """Conversation files, folders or globs: JSONL (also .gz and .zst) or Parquet, with the
    columns `messages`, `conversations` (ShareGPT), `instruction` and `output` (Alpaca), or
    `prompt` and `completion` (TRL)."""
    valid_path: tuple[str, ...] = ()
    """Conversation files of the validation split, as `path`. Mock conversations have their own
    validation split."""
    mock_conversations: Annotated[int | None, Ge(1)] = None
    """Number of generated conversations about sums, used instead of files. Unset: none."""
    template: str | None = None
    """Chat template: chatml, llama3, identity (contents only), nemotron-h-aligned,
    nemotron-nano-v2, or a Jinja file. Unset: the tokenizer's template."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Loss mask. assistant: train on the assistant's messages and their end-of-turn tokens; all:
    train on all tokens."""
    packing: Packing = "best_fit"
    """Sequence packing of conversations into rows. best_fit: put each where it leaves the least
    space; greedy: fill a row until the next conversation does not fit; row: the conversations
    of each input line form a row."""
    packs: str | None = None
    """File of `megalith data pack` that assigns conversations to rows. Unset: rows are packed by
    `packing`."""
    overlong: Overlong = "error"
    """Treatment of conversations longer than a row. error: raise an error; truncate: cut at the
    end; drop: skip. Truncated and dropped conversations are counted."""
    shuffle: Literal["epoch", "none"] = "epoch"
    """Order of conversations. epoch: reshuffle in every epoch; none: the order of the files, as
    in Megatron."""
    date: str = "2024-07-26"
    """Date passed to chat templates that use the current date, so that tokens do not depend on
    the day (the default is that of Llama 3.1's template)."""

    def used(self) -> bool:
        """Return whether the run reads conversations."""
        return bool(self.path) or self.mock_conversations is not None


def sft_problems(sft: SFTConfig) -> list[str]:
    """Return the violated rules as error messages. Accesses no file."""
    problems = []
    if sft.path and sft.mock_conversations is not None:
        problems.append(
            f"data.sft.mock_conversations={sft.mock_conversations} with "
            f"data.sft.path={' '.join(sft.path)}: "
            f"set only one of them."
        )
    if sft.valid_path and not sft.path:
        problems.append(
            f"data.sft.valid_path={' '.join(sft.valid_path)} needs data.sft.path, the training "
            "split. Set data.sft.path, or remove data.sft.valid_path."
        )
    if sft.packs is not None and sft.packing != SFTConfig().packing:
        problems.append(
            f"data.sft.packing={sft.packing} with data.sft.packs={sft.packs}: the file already "
            "assigns conversations to rows. Remove one of them."
        )
    if not _is_date(sft.date):
        problems.append(f"data.sft.date={sft.date!r} must be an ISO date such as 2024-07-26.")
    return problems


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


Sampler = Literal["sequential", "cyclic", "cyclic_per_rank"]
SPLIT_NAMES = ("train", "valid", "test")
DEFAULT_SPLIT = (
    "969,30,1"  # Megatron's default, so that the same corpus gives the same three splits
)
MOCK_SPLIT = "1,1,1"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPhaseConfig:
    """Data phase: another blend of training data from a number of samples on."""

    samples: Annotated[int, Ge(1)]
    """Number of samples of the run after which the phase begins."""
    path: tuple[str, ...]
    """Prefixes of .bin/.idx files, as `data.path` or `data.train_path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Training data. Exactly one source is required: `mock`, `path`, the paths per split, the
    conversations of `sft`, or a `plugin`."""

    mock: bool = False
    """Use mock documents, which need no files and no tokenizer."""
    plugin: str | None = None
    """Dataset of another package, built as Class(data, split=, num_samples=, seq_len=, seed=,
    vocab_size=, eod=): an installed entry point, or on the command line package.module:name.
    Unset: another source."""
    path: tuple[str, ...] = ()
    """Prefixes of .bin/.idx files, either plain (`a b`) or with weights (`0.3 a 0.7 b`); `split`
    divides each of them."""
    train_path: tuple[str, ...] = ()
    """Prefixes of the training split, if each split has its own files; same syntax as `path`."""
    valid_path: tuple[str, ...] = ()
    """Prefixes of the validation split, used with `train_path`."""
    test_path: tuple[str, ...] = ()
    """Prefixes of the test split, used with `train_path`."""
    phases: tuple[DataPhaseConfig, ...] = ()
    """Data phases: blends that replace `path` or `train_path` from a number of samples on, each
    read from its start in an order of its own. A checkpoint is saved before each change if
    `checkpoint.every` is set. Unset: one blend for the whole run."""
    split: str | None = None
    """Relative sizes of the train, valid and test splits. Unset: 969,30,1 for `path`, and 1,1,1
    for `mock`."""
    document_masking: bool = False
    """Mask attention across document boundaries and restart position ids after each
    end-of-document token. Off: a row of seq_len tokens is treated as one document."""
    eod_mask_loss: bool = False
    """Mask the loss where the input token is the end-of-document token."""
    keep_partial_valid: bool = False
    """Keep the last, padded sample of the validation split instead of dropping it."""
    num_train_samples: Annotated[int | None, Ge(1)] = None
    """Number of samples for which the training order is built. Unset: the number of samples of the
    run's steps.

    The number of epochs, and with it the order, follows from this count. A run keeps the order of
    its first start; if it is extended beyond that order, it continues with more epochs, which are
    shuffled separately. To get one order for the longest run, set this at the first start to the
    number of samples of that run.
    """
    sampler: Sampler = "sequential"
    """Order of samples. sequential: in order, until they are used up. cyclic: reshuffled in
    every epoch, without end. cyclic_per_rank: each data-parallel rank shuffles its own part,
    so that the samples of a step depend on parallel.dp and train.micro_batch_size. Shuffles
    depend on the epoch only, not on seed."""
    mid_level_dataset_surplus: Annotated[float, Ge(0), Example(0.005)] = 0.005
    """Extra fraction of samples built for every dataset of a weighted blend, as a margin for
    rounding."""
    cache_path: str | None = None
    """Folder for built indices. Unset: PREFIX/cache beside the data, .cache beside
    conversations; indices of blends and mock data are then not saved."""
    mmap: bool = True
    """Memory-map .bin files. Off: positioned reads, for file systems on which memory maps are
    slow."""
    mock_num_documents: Annotated[int, Ge(1)] = 100_000
    """Number of mock documents."""
    mock_max_tokens: Annotated[int, Ge(2)] = 4096
    """Mock documents are shorter than this number of tokens."""
    mock_lengths: MockLengths = field(default_factory=MockLengths)
    """Length distribution of mock documents."""
    overlong: Overlong = "error"
    """With train.tokens_per_microbatch: treatment of text documents longer than train.seq_len.
    error: raise an error; truncate: cut at the end; drop: skip. Truncated and dropped
    documents are counted."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    """Conversations for supervised fine-tuning."""


@dataclass(frozen=True, slots=True)
class Blend:
    """Prefixes of a blend, each with a weight, or all without."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def parse_blend(field: str, words: Sequence[str]) -> Blend:
    """Parse a list of prefixes, or of alternating weights and prefixes.

    A list of odd length contains prefixes only. In one of even length, items 0, 2, 4 … are either
    all numbers (weights) or none is.

    >>> parse_blend("data.path", ["3", "a", "1", "b"])
    Blend(prefixes=('a', 'b'), weights=(3.0, 1.0))

    Raises:
        ConfigError: some but not all of these items are numbers, or the weights cannot be
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
            f"{field}={' '.join(words)}: {odd!r} is not a weight, but other prefixes "
            "have weights. "
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
    """Convert relative sizes such as `8,1,1` to the (low, high) fractions of train, valid and test;
    None for a size of 0.

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
    # Divide first, then sum, in float64: the boundaries then round as in Megatron.
    ends = [0.0]
    for share in known + [0.0] * (3 - len(known)):
        ends.append(ends[-1] + share / sum(known))
    return tuple((low, high) if high > low else None for low, high in pairwise(ends))


def get_split(data: DataConfig) -> str:
    """Return the effective split: the setting, or the default of the source."""
    return data.split or (MOCK_SPLIT if data.mock else DEFAULT_SPLIT)


def per_split_paths(data: DataConfig) -> dict[str, tuple[str, ...]]:
    """Return the prefixes per split name; empty if the source is `path` or `mock`."""
    paths = {"train": data.train_path, "valid": data.valid_path, "test": data.test_path}
    return {name: words for name, words in paths.items() if words}


def data_problems(data: DataConfig) -> list[str]:
    """Return the violated rules as error messages. Accesses no file; missing files are reported
    when they are opened."""
    problems = (
        _source_problems(data)
        + mock_problems(data.mock_lengths, most=data.mock_max_tokens - 1, used=data.mock)
        + sft_problems(data.sft)
        + _text_problems(data)
        + _phase_problems(data)
    )
    fields = {"path": data.path} | {
        f"{name}_path": words for name, words in per_split_paths(data).items()
    }
    for name, words in fields.items():
        if words:
            problems += _error_messages(partial(parse_blend, f"data.{name}", words))
    for number, phase in enumerate(data.phases):
        problems += _error_messages(partial(parse_blend, f"data.phases[{number}].path", phase.path))
    if data.split is not None:
        problems += _error_messages(partial(parse_split, data.split))
    return problems


def _error_messages(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return [str(error)]
    return []


def _source_problems(data: DataConfig) -> list[str]:
    given = [name for name, on in (("mock", data.mock), ("path", bool(data.path))) if on]
    given += [f"{name}_path" for name in per_split_paths(data)][:1]
    given += ["sft"] if data.sft.used() else []
    given += ["plugin"] if data.plugin is not None else []
    problems = []
    if len(given) != 1:
        problems.append(
            f"data has {len(given)} sources ({', '.join(given) or 'none'}): exactly one is needed. "
            "Set one of data.path, data.train_path (with data.valid_path and data.test_path), "
            "data.sft.path, data.plugin, or data.mock=true."
        )
    if data.split is not None and per_split_paths(data):
        problems.append(
            f"data.split={data.split} divides one corpus, but data.train_path, valid_path or "
            f"test_path set one per split. Remove data.split, or use data.path."
        )
    return problems


def _phase_problems(data: DataConfig) -> list[str]:
    """Return the violated rules of data phases: increasing starts, stores, one order per phase."""
    if not data.phases:
        return []
    problems, before = [], 0
    for number, phase in enumerate(data.phases):
        at = f"data.phases[{number}]"
        if phase.samples <= before:
            problems.append(
                f"{at}.samples={phase.samples} must be after the start of the phase before it, "
                f"sample {before}. Set {at}.samples to {before + 1} or more."
            )
        if not phase.path:
            problems.append(
                f"{at}.path is empty. Set it to the prefixes of the stores that the phase reads."
            )
        before = max(before, phase.samples)
    if not data.path and not data.train_path:
        problems.append(
            "data.phases needs token stores for the first phase. Set data.path or data.train_path."
        )
    if data.sampler != "sequential":
        problems.append(
            f"data.phases with data.sampler={data.sampler}, which has no position in the data that "
            "phases could start at. Set data.sampler=sequential."
        )
    if data.num_train_samples is not None:
        problems.append(
            f"data.phases with data.num_train_samples={data.num_train_samples}: the order of each "
            "phase is built for its own samples. Remove data.num_train_samples."
        )
    return problems


def _text_problems(data: DataConfig) -> list[str]:
    """Settings of running text that conversations do not use."""
    defaults = DataConfig()
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
        if getattr(data, name) != getattr(defaults, name)
    ]
    if not data.sft.used() or not given:
        return []
    return [
        f"{' and '.join(given)} with data.sft: these settings apply to text, not to "
        "conversations (data.sft.shuffle sets their order). "
        f"Remove {'it' if len(given) == 1 else 'them'}, or use data.path."
    ]


# --- settings of `megalith prepare`: input, tokenization, output


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareConfig:
    """Tokenization of text files into one token store (.bin/.idx) per key."""

    input: tuple[str, ...]
    """Files, folders (all files below them, by name) and globs. Files ending in .gz and .zst are
    decompressed."""
    output: str
    """Output prefix: OUTPUT.bin and OUTPUT.idx, or OUTPUT_KEY.bin and .idx with several keys. A
    .tokenizer.yaml file beside them names the tokenizer."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Tokenizer."""
    format: Literal["auto", "jsonl", "text"] = "auto"
    """Input format. jsonl: each line is a JSON object and a document; text: each file is a
    document; auto: by the file extension."""
    keys: tuple[str, ...] = ("text",)
    """JSON keys whose text is tokenized, each into its own store."""
    append_eod: bool = True
    """Append the end-of-document token to every document that is not empty."""
    workers: Annotated[int, Ge(1)] = 1
    """Number of tokenizer processes. The output does not depend on it."""
    strict: bool = False
    """Raise an error at the first line or file that cannot be used. Off: skip and count it."""
    resume: bool = False
    """Continue an interrupted `prepare` of the same files and settings."""
    overwrite: bool = False
    """Overwrite an existing store, or an unfinished one of another `prepare`, of the same name."""


def prepare_problems(config: PrepareConfig) -> list[str]:
    """Return the violated rules as error messages. Accesses no file."""
    problems = range_problems(config) + tokenizer_problems(config.tokenizer)
    if not config.input:
        problems.append(f"input={config.input} is empty. Use one or more files, folders or globs.")
    if not config.keys or len(set(config.keys)) < len(config.keys):
        problems.append(f"keys={config.keys}: use one or more different keys.")
    if config.resume and config.overwrite:
        problems.append(
            "resume=True and overwrite=True exclude each other. Use resume to continue, or "
            "overwrite to start again."
        )
    return problems
