"""Tokenizes text files into token stores: workers tokenize blocks of documents, one process writes
them in order; a text corpus that every machine has."""

import hashlib
import os
import signal
import sysconfig
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.config.data import PrepareConfig, TokenizerConfig, prepare_problems
from megalith.data.corpus import (
    Document,
    LineBlock,
    Rejected,
    Source,
    block_documents,
    find_sources,
    read_blocks,
)
from megalith.data.indexed import index_path, token_dtype, tokens_path
from megalith.data.stores import EncodedKey, PrepareJournal, Totals, write_tokenizer_record
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import DataError, raise_all

_BLOCKS_IN_FLIGHT = 4  # per worker, so that workers stay busy while the writer writes


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run; `nbytes` counts on-disk bytes of input files."""

    nbytes: int
    total_nbytes: int
    totals: Totals


@dataclass(frozen=True, slots=True)
class PrepareWork:
    """Settings that a worker needs."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool
    strict: bool


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """Tokens of one block, and its counts."""

    keys: list[EncodedKey]
    totals: Totals


def prepare(config: PrepareConfig, *, report: Callable[[Progress], None] | None = None) -> Totals:
    """Tokenize the input into `config.output`; the files depend only on input, keys and tokenizer.

    `report` is called after every block. An interrupted run leaves no files under the final names,
    and a run with `resume` continues from the last saved position.

    Raises:
        ConfigError: the settings are inconsistent.
        DataError: there is no input or no text in it, the output exists, or with `strict` a line
            is invalid.
    """
    raise_all(prepare_problems(config))
    sources = find_sources(config.input, config.format)
    tokenizer = build_tokenizer(config.tokenizer)
    outputs = output_prefixes(config)
    with PrepareJournal(
        Path(f"{config.output}.preparing"), config.keys, _settings(config, tokenizer), sources
    ) as journal:
        journal.start(resume=config.resume, overwrite=config.overwrite)
        if not journal.finished:
            _reject_existing(outputs, overwrite=config.overwrite)
            _tokenize(journal, sources, config, report)
            journal.finish(token_dtype(tokenizer.vocab_size))
        for prefix in outputs:  # before `publish`, so that a resumed run repeats both
            write_tokenizer_record(prefix, config.tokenizer, tokenizer.fingerprint)
        journal.publish(outputs)
        return journal.totals


def output_prefixes(config: PrepareConfig) -> list[str]:
    """Return the store prefix of each key."""
    return (
        [config.output]
        if len(config.keys) == 1
        else [f"{config.output}_{key}" for key in config.keys]
    )


def _settings(config: PrepareConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return everything besides the files that determines the tokens."""
    return {
        "tokenizer": tokenizer.fingerprint,
        "format": config.format,
        "keys": list(config.keys),
        "append_eod": config.append_eod,
    }


def _reject_existing(outputs: Sequence[str], *, overwrite: bool) -> None:
    existing = [
        prefix for prefix in outputs if index_path(prefix).exists() or tokens_path(prefix).exists()
    ]
    if existing and not overwrite:
        raise DataError(
            f"output {existing[0]}: the store already exists. Use another name, or pass "
            "--overwrite."
        )


def _tokenize(
    journal: PrepareJournal,
    sources: Sequence[Source],
    config: PrepareConfig,
    report: Callable[[Progress], None] | None,
) -> None:
    work = PrepareWork(config.tokenizer, config.keys, config.append_eod, config.strict)
    total = sum(source.nbytes for source in sources)
    for block, encoded in _encode_in_order(
        read_blocks(sources, journal.position), work, config.workers
    ):
        journal.append(block.end, encoded.keys, encoded.totals)
        if report is not None:
            report(Progress(block.nbytes_done, total, journal.totals))
    if not journal.totals.tokens:
        rejected = "; ".join(journal.totals.examples) or "all documents are empty"
        raise DataError(
            f"input {' '.join(config.input)}: no text in {len(sources)} files ({rejected}). "
            f"Use other files, or set --keys to the fields with the text."
        )


def _encode_in_order(
    blocks: Iterator[LineBlock], work: PrepareWork, workers: int
) -> Iterator[tuple[LineBlock, EncodedBlock]]:
    """Yield every block with its tokens, in order; one worker means this process."""
    if workers == 1:
        for block in blocks:
            yield block, encode_block(block, work)
        return
    waiting: deque[tuple[LineBlock, Future[EncodedBlock]]] = deque()
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    try:
        for block in blocks:
            waiting.append((block, pool.submit(encode_block, block, work)))
            if len(waiting) >= workers * _BLOCKS_IN_FLIGHT:
                yield _first_done(waiting)
        while waiting:
            yield _first_done(waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def _first_done(
    waiting: deque[tuple[LineBlock, Future[EncodedBlock]]],
) -> tuple[LineBlock, EncodedBlock]:
    block, future = waiting.popleft()
    try:
        return block, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker process died at {block.paths[0]}:{block.first_line}; possibly out of "
            f"memory. Use fewer --workers."
        ) from error


def _start_worker() -> None:
    """Initialize a worker process: it ignores Ctrl-C, and exits with the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # There is one process per core, so the tokenizer's own threads would compete with workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@cache
def _tokenizer_of(config: TokenizerConfig) -> Tokenizer:
    """Build the tokenizer once per process."""
    return build_tokenizer(config)


def encode_block(block: LineBlock, work: PrepareWork) -> EncodedBlock:
    """Tokenize the documents of a block.

    Raises:
        DataError: an id is outside the vocabulary, or with `strict` a document is invalid.
    """
    totals = Totals()
    documents = []
    for document in block_documents(block, work.keys):
        if isinstance(document, Document):
            documents.append(document)
        else:
            _reject_if_strict(document, work)
            totals.reject(document.reason, str(document))
    tokenizer = _tokenizer_of(work.tokenizer)
    keys = [
        _encode_key(
            [document.texts[place] for document in documents], tokenizer, append_eod=work.append_eod
        )
        for place in range(len(work.keys))
    ]
    _count(documents, keys, totals, work)
    return EncodedBlock(keys, totals)


def _count(
    documents: Sequence[Document], keys: Sequence[EncodedKey], totals: Totals, work: PrepareWork
) -> None:
    empty = np.flatnonzero(np.sum([key.sequences for key in keys], axis=0) == 0)
    if len(empty):
        where = documents[int(empty[0])].where
        _reject_if_strict(Rejected(where, "blank", "the document has no tokens"), work)
    totals.documents = len(documents)
    totals.empty_documents = len(empty)
    totals.sequences = sum(len(key.lengths) for key in keys)
    totals.tokens = sum(len(key.ids) for key in keys)
    totals.text_bytes = sum(
        len(text.encode()) for document in documents for texts in document.texts for text in texts
    )


def _reject_if_strict(rejected: Rejected, work: PrepareWork) -> None:
    if work.strict:
        raise DataError(
            f"{rejected}. Correct it, or run without --strict to skip and count such documents."
        )


def _encode_key(
    texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, *, append_eod: bool
) -> EncodedKey:
    """Encode the texts of one key: empty sequences are dropped, and each document ends with the end
    token."""
    document_of = np.repeat(np.arange(len(texts)), [len(parts) for parts in texts])
    ids, lengths = tokenizer.encode_joined([text for parts in texts for text in parts])
    _check_range(ids, tokenizer)
    kept = lengths > 0
    lengths = lengths[kept]
    sequences = np.bincount(document_of[kept], minlength=len(texts)).astype(np.int32)
    if append_eod:
        lasts = np.cumsum(sequences)[sequences > 0] - 1
        ids = np.insert(ids, np.cumsum(lengths, dtype=np.int64)[lasts], tokenizer.eod)
        lengths[lasts] += 1
    return EncodedKey(ids.astype(token_dtype(tokenizer.vocab_size)), lengths, sequences)


def _check_range(ids: NDArray[np.int64], tokenizer: Tokenizer) -> None:
    if len(ids) and int(ids.max()) >= tokenizer.vocab_size:
        raise DataError(
            f"the tokenizer returned id {int(ids.max())}, but its vocabulary has "
            f"{tokenizer.vocab_size} ids. Use tokenizer files of the same version."
        )


# --- text corpus available on every machine: source and documentation of Python's standard library

EXCLUDED_FOLDERS = (
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "lib2to3",
    "encodings",
)
"""Folders without prose or ordinary code: other packages, test data, character tables."""

ENDINGS = (".py", ".txt", ".rst")
HELD_OUT_ONE_IN = 25  # files, by a hash of their name, for the same choice on all machines


@dataclass(frozen=True, slots=True)
class LocalText:
    """Files of the corpus, sorted by name."""

    training: tuple[Path, ...]
    held_out: tuple[Path, ...]


def find_local_text(folder: Path | None = None) -> LocalText:
    """Return the standard library's text files, with one in 25 held out.

    Raises:
        DataError: the folder has too little text.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_text_files(folder))
    held_out = tuple(
        file for file in files if _hash_path(file.relative_to(folder)) % HELD_OUT_ONE_IN == 0
    )
    training = tuple(file for file in files if file not in set(held_out))
    if len(held_out) < 3:
        raise DataError(
            f"{folder} has only {len(files)} text files. Install Python's standard library, or use "
            f"`megalith prepare` on your own text."
        )
    return LocalText(training, held_out)


def zlib_bits_per_byte(files: Sequence[Path]) -> float:
    """Return the bits per byte of `zlib -9` on these files, a baseline for a model of the same
    text."""
    text = b"".join(file.read_bytes() for file in files)
    return 8 * len(zlib.compress(text, 9)) / len(text)


def words_in(text: str) -> list[str]:
    """Split a text into runs of letters, digits and underscores."""
    return "".join(c if c.isalnum() or c == "_" else " " for c in text).split()


def known_word_fraction(sample: str, files: Sequence[Path]) -> float:
    """Return the fraction of the words of a sample that occur in the files."""
    known: set[str] = set()
    for file in files:
        known.update(words_in(file.read_text(encoding="utf-8", errors="replace")))
    words = words_in(sample)
    return sum(word in known for word in words) / max(1, len(words))


def _text_files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        inside = file.relative_to(folder).parts[:-1]
        if (
            file.suffix in ENDINGS
            and not set(inside) & set(EXCLUDED_FOLDERS)
            and file.is_file()
            and _is_utf8(file)
        ):
            yield file


def _is_utf8(file: Path) -> bool:
    try:
        return bool(file.read_bytes().decode())
    except UnicodeDecodeError:
        return False


def _hash_path(path: Path) -> int:
    return int.from_bytes(
        hashlib.blake2b(path.as_posix().encode(), digest_size=4).digest(), "little"
    )
