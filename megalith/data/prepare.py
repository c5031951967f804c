"""Text files to token stores: workers tokenize blocks of documents, one process writes them in
order."""

import os
import signal
import threading
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

from megalith.config.prepare import PrepareConfig, prepare_problems
from megalith.config.tokenizer import TokenizerConfig
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
from megalith.data.journal import EncodedKey, PrepareJournal, Totals
from megalith.data.stores import write_tokenizer_record
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import DataError, raise_all

_BLOCKS_IN_FLIGHT = 4  # per worker: enough that none waits while the writer is busy


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is; `nbytes` counts input files as they lie on disk."""

    nbytes: int
    total_nbytes: int
    totals: Totals


@dataclass(frozen=True, slots=True)
class PrepareWork:
    """What a worker must know besides the block."""

    tokenizer: TokenizerConfig
    keys: tuple[str, ...]
    append_eod: bool
    strict: bool


@dataclass(frozen=True, slots=True)
class EncodedBlock:
    """One block as tokens, and what was counted on the way."""

    keys: list[EncodedKey]
    totals: Totals


def prepare(config: PrepareConfig, *, report: Callable[[Progress], None] | None = None) -> Totals:
    """Tokenize the input into `config.output`. The files depend on input, keys and tokenizer alone.

    `report` is called after every block. Stopping leaves nothing under the final names, and a run
    with `resume` goes on from the last saved place.

    Raises:
        ConfigError: the settings break a rule.
        DataError: no input, no text in it, an output in the way, or with `strict` a bad line.
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
            _refuse_existing(outputs, overwrite=config.overwrite)
            _tokenize(journal, sources, config, report)
            journal.finish(token_dtype(tokenizer.vocab_size))
        for prefix in outputs:  # before the stores have their names: a resumed run repeats both
            write_tokenizer_record(prefix, config.tokenizer, tokenizer.fingerprint)
        journal.publish(outputs)
        return journal.totals


def output_prefixes(config: PrepareConfig) -> list[str]:
    """The store of each key."""
    return (
        [config.output]
        if len(config.keys) == 1
        else [f"{config.output}_{key}" for key in config.keys]
    )


def _settings(config: PrepareConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that decides the tokens besides the files."""
    return {
        "tokenizer": tokenizer.fingerprint,
        "format": config.format,
        "keys": list(config.keys),
        "append_eod": config.append_eod,
    }


def _refuse_existing(outputs: Sequence[str], *, overwrite: bool) -> None:
    there = [
        prefix for prefix in outputs if index_path(prefix).exists() or tokens_path(prefix).exists()
    ]
    if there and not overwrite:
        raise DataError(
            f"output {there[0]}: a store of that name exists. Use another name, or pass "
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
            f"Use other files, or set --keys to the names that hold the text."
        )


def _encode_in_order(
    blocks: Iterator[LineBlock], work: PrepareWork, workers: int
) -> Iterator[tuple[LineBlock, EncodedBlock]]:
    """Every block with its tokens, in the order of the blocks; a single worker is this process."""
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
            f"a worker died at {block.paths[0]}:{block.first_line}; often the machine ran out of "
            f"memory. Use fewer --workers."
        ) from error


def _start_worker() -> None:
    """Set up a worker process: Ctrl-C is the writer's to handle, and without the writer there is
    nothing to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One process per core already: the tokenizer's own threads would compete with the other
    # workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@cache
def _tokenizer_of(config: TokenizerConfig) -> Tokenizer:
    """The tokenizer, read once per process."""
    return build_tokenizer(config)


def encode_block(block: LineBlock, work: PrepareWork) -> EncodedBlock:
    """Tokenize the documents of a block.

    Raises:
        DataError: with `strict`, a document that cannot be used; else only an id outside the
        tokenizer's vocabulary.
    """
    totals = Totals()
    documents = []
    for document in block_documents(block, work.keys):
        if isinstance(document, Document):
            documents.append(document)
        else:
            _refuse_if_strict(document, work)
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
        _refuse_if_strict(Rejected(where, "blank", "the document has no tokens"), work)
    totals.documents = len(documents)
    totals.empty_documents = len(empty)
    totals.sequences = sum(len(key.lengths) for key in keys)
    totals.tokens = sum(len(key.ids) for key in keys)
    totals.text_bytes = sum(
        len(text.encode()) for document in documents for texts in document.texts for text in texts
    )


def _refuse_if_strict(rejected: Rejected, work: PrepareWork) -> None:
    if work.strict:
        raise DataError(
            f"{rejected}. Correct it, or run without --strict to count such documents and leave "
            "them out."
        )


def _encode_key(
    texts: Sequence[tuple[str, ...]], tokenizer: Tokenizer, *, append_eod: bool
) -> EncodedKey:
    """One key's texts as sequences: those without tokens are dropped, and the last of a document
    gets the end token."""
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
            f"the tokenizer gave id {int(ids.max())}, but its vocabulary has "
            f"{tokenizer.vocab_size} ids. "
            f"Use a tokenizer whose files belong together."
        )
