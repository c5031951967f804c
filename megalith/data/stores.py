"""Operations on token stores: summarize, merge, and record the tokenizer that wrote them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from megalith import storage
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.tree import dump_yaml, load_yaml
from megalith.data.indexed import (
    IndexedDataset,
    IndexedDatasetBuilder,
    index_path,
    store_exists,
    tokens_path,
)
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import DataError

_MAX_SAMPLED_DOCUMENTS = 100_000  # documents whose last token is read: seconds on a slow disk


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """Statistics of one store, printed by `megalith data info`."""

    prefix: str
    token_type: str
    multimodal: bool
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    shortest: int
    mean_length: float
    longest: int
    common_last_token: int | None  # of documents; None when all are empty
    common_last_share: float  # of non-empty documents: 1 if each ends with the end token
    bin_nbytes: int
    idx_nbytes: int


def summarize(store: IndexedDataset) -> StoreSummary:
    """Compute the statistics of one store. Lengths are in tokens per sequence."""
    lengths = store.sequence_lengths
    token, share = _common_last_token(store)
    return StoreSummary(
        prefix=store.path_prefix,
        token_type=store.dtype.name,
        multimodal=store.multimodal,
        documents=store.num_documents,
        empty_documents=int((np.diff(store.document_indices) == 0).sum()),
        sequences=len(store),
        tokens=store.num_tokens,
        shortest=int(lengths.min()) if len(store) else 0,
        mean_length=float(lengths.mean()) if len(store) else 0.0,
        longest=int(lengths.max()) if len(store) else 0,
        common_last_token=token,
        common_last_share=share,
        bin_nbytes=tokens_path(store.path_prefix).stat().st_size,
        idx_nbytes=index_path(store.path_prefix).stat().st_size,
    )


def _common_last_token(store: IndexedDataset) -> tuple[int | None, float]:
    """Return the most frequent last token of documents, and its share among the sampled ones."""
    ends = store.document_indices[1:][np.diff(store.document_indices) > 0]
    step = max(1, len(ends) // _MAX_SAMPLED_DOCUMENTS)
    lasts = [
        int(store.get(int(end) - 1)[-1]) for end in ends[::step] if store.sequence_lengths[end - 1]
    ]
    if not lasts:
        return None, 0.0
    values, counts = np.unique(lasts, return_counts=True)
    best = int(counts.argmax())
    return int(values[best]), int(counts[best]) / len(lasts)


def find_stores(place: str) -> list[str]:
    """Return the prefix itself, or every store of a folder sorted by name.

    Raises:
        DataError: there is none, or a store lacks one of its two files.
    """
    if (
        store_exists(place) or not Path(place).is_dir()
    ):  # training creates a folder PREFIX/cache next to a store
        return [place]
    stems = sorted(
        {
            str(path.with_suffix(""))
            for suffix in ("idx", "bin")
            for path in Path(place).glob(f"*.{suffix}")
        }
    )
    broken = [stem for stem in stems if not store_exists(stem)]
    if broken or not stems:
        what = f"{broken[0]} has only one of its two files" if broken else "no .idx and .bin files"
        raise DataError(f"{place}: {what}. Use a folder of complete stores.")
    return stems


def merge_stores(prefixes: Sequence[str], output: str, *, overwrite: bool = False) -> None:
    """Write one store with the documents of several, in order, as if all texts had been prepared at
    once.

    Raises:
        DataError: there is no store, the stores have different token types, or the output exists.
    """
    if not prefixes:
        raise DataError(
            f"nothing to merge into {output}. Use one or more prefixes or folders of stores."
        )
    # os.path.exists, unlike Path.exists, raises no PermissionError
    if os.path.exists(index_path(output)) and not overwrite:
        raise DataError(
            f"output {output}: the store already exists. Use another name, or pass --overwrite."
        )
    stores = [IndexedDataset(prefix) for prefix in prefixes]
    _check_same_type(stores)
    with IndexedDatasetBuilder(output, stores[0].dtype, multimodal=stores[0].multimodal) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
        builder.finalize()
    records = [_read_record(prefix) for prefix in prefixes]
    if records[0] is None or any(record != records[0] for record in records):
        storage.remove_file(tokenizer_record(output))  # of a store that was replaced
    else:
        write_tokenizer_record(output, records[0].tokenizer, records[0].fingerprint)


def _check_same_type(stores: Sequence[IndexedDataset]) -> None:
    kinds = [f"{store.dtype.name}{' with modes' if store.multimodal else ''}" for store in stores]
    others = [
        f"{store.path_prefix} ({kind})" for store, kind in zip(stores, kinds) if kind != kinds[0]
    ]
    if others:
        raise DataError(
            f"{', '.join(others)}: not the token type of {stores[0].path_prefix} "
            f"({kinds[0]}). Use stores of one tokenizer."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreTokenizer:
    """Tokenizer that wrote a store: the contents of PREFIX.tokenizer.yaml."""

    fingerprint: str
    """Changes when the ids of any text would."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """A path to files is relative to the folder of the store."""


def tokenizer_record(prefix: str) -> Path:
    """Return the path of the tokenizer record of a store."""
    return Path(f"{prefix}.tokenizer.yaml")


def write_tokenizer_record(prefix: str, config: TokenizerConfig, fingerprint: str) -> None:
    """Record which tokenizer wrote a store."""
    file = tokenizer_record(prefix)
    if config.path is not None and Path(config.path).exists():  # else it is a hub name
        config = replace(config, path=os.path.relpath(config.path, file.parent))
    storage.replace_file(
        file, dump_yaml(StoreTokenizer(fingerprint=fingerprint, tokenizer=config)).encode()
    )


def read_store_tokenizer(prefix: str) -> Tokenizer:
    """Build the tokenizer that wrote a store; bytes if none is recorded.

    Raises:
        ConfigError: the record is damaged.
        DataError: the tokenizer is missing or has changed.
    """
    record = _read_record(prefix)
    if record is None:
        return build_tokenizer(TokenizerConfig())
    tokenizer = build_tokenizer(record.tokenizer)
    if tokenizer.fingerprint != record.fingerprint:
        raise DataError(
            f"{tokenizer_record(prefix)}: the store was written by the tokenizer "
            f"{record.fingerprint}, and "
            f"{record.tokenizer.path} is {tokenizer.fingerprint} now. Pass --tokenizer with the "
            "original tokenizer, or --ids."
        )
    return tokenizer


def _read_record(prefix: str) -> StoreTokenizer | None:
    """Return the record of a store with the tokenizer path made relative to the working directory;
    None without one."""
    file = tokenizer_record(prefix)
    if not file.is_file():
        return None
    record = load_yaml(file, StoreTokenizer)
    path = record.tokenizer.path
    if path is None or not (file.parent / path).exists():
        return record
    return replace(
        record, tokenizer=replace(record.tokenizer, path=os.path.normpath(file.parent / path))
    )
