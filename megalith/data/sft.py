"""Fine-tuning samples: conversations as tokens and what of them is learned, and rows filled with
them."""

import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalith.config.data import DataConfig
from megalith.config.sft import SFTConfig
from megalith.data.cache import Arrays, load_or_build
from megalith.data.chat_template import ChatTemplate, TextPiece, find_template
from megalith.data.conversations import (
    MADE_UP,
    Conversation,
    conversation_sources,
    made_up,
    read_conversations,
)
from megalith.data.packs import PackingInput, read_packs
from megalith.data.pretrain import check_ids
from megalith.data.sample import PackedSample
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.plan.fill import PackedDocuments, fill_apart, fill_best, fill_by_group, fill_in_order
from megalith.plan.keys import key

_log = logging.getLogger(__name__)
_SAY_SECONDS = 30.0
CACHE = ".cache"
"""Beside the first file; hidden, because a folder may be named as the source."""

MADE_UP_VALID = 100
"""Conversations of the made-up validation split."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Conversations as tokens, one after the other."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    """Of each token: whether it is to be predicted."""

    starts: NDArray[np.int64]
    """[conversations + 1]: where each begins."""

    files: NDArray[np.int32]
    """[conversations]: which of `paths` each came from."""

    rows: NDArray[np.int64]
    """[conversations]: and which row of it."""

    paths: tuple[str, ...]

    digest: str
    """Of all but the paths."""

    def where(self, number: int) -> str:
        """File and row of a conversation."""
        return f"{self.paths[self.files[number]]}:{self.rows[number]}"


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the conversations of a split."""

    conversations: int
    truncated: int
    dropped: int
    masked: int
    """Without a token to learn; left out."""

    rows: int
    """In the first epoch."""

    tokens: int
    """Of conversations in those rows."""

    supervised: int
    """Of these, predicted."""

    seq_len: int
    """Of rows; 0 where each conversation is by itself."""

    def __str__(self) -> str:
        share, fill = (
            self.supervised / max(1, self.tokens),
            self.tokens / max(1, self.rows * self.seq_len),
        )
        lost = {
            "cut": self.truncated,
            "left out as too long": self.dropped,
            "left out without a token to learn": self.masked,
        }
        told = "".join(f", {count} {what}" for what, count in lost.items() if count)
        rows = (
            f"{self.rows} rows an epoch, {fill:.1%} filled"
            if self.seq_len
            else f"{self.rows} an epoch"
        )
        return (
            f"{self.conversations} conversations{told}; {rows}, {share:.1%} of their tokens learned"
        )


def tokenize(
    conversation: Conversation, template: ChatTemplate, tokenizer: Tokenizer, *, everything: bool
) -> Arrays:
    """Tokens of one conversation, and which of them are learned: `everything`, or what the template
    says.

    A token across the border of what is learned is learned: it holds the first or the last of what
    the assistant wrote, which nothing else would teach.

    Raises:
        DataError: the template refuses it, or makes no text of it; the message has file and row.
    """
    try:
        pieces = _pieces(conversation, template, everything)
        ids, places = tokenizer.encode_spans("".join(piece.text for piece in pieces))
    except DataError as error:
        raise DataError(
            f"{conversation.where}: {error} Use other text there, or remove the row."
        ) from error
    if not ids:
        raise DataError(
            f"{conversation.where}: {template.name} makes {len(ids)} tokens of its "
            f"{len(conversation.messages)} "
            f"messages. Use a template that writes them down, or remove the row."
        )
    characters = np.repeat(
        [piece.learned for piece in pieces], [len(piece.text) for piece in pieces]
    )
    before = np.concatenate([[0], np.cumsum(characters)])
    starts, ends = np.minimum(
        np.array(places, np.int64).T, [[len(characters) - 1], [len(characters)]]
    )
    return {"tokens": np.array(ids, np.int32), "learned": before[ends] > before[starts]}


def _pieces(
    conversation: Conversation, template: ChatTemplate, everything: bool
) -> list[TextPiece]:
    if not everything:
        return template.pieces(conversation.messages, tools=conversation.tools)
    if any("train" in message for message in conversation.messages):
        raise DataError(
            f'"train" says what is learned, and data.sft.loss_on=all learns everything. '
            f"Set data.sft.loss_on=assistant, or remove it from {conversation.where}."
        )
    return [TextPiece(template.render(conversation.messages, tools=conversation.tools), True)]


def tokenize_all(
    conversations: Iterable[Conversation],
    paths: Sequence[str],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    *,
    everything: bool,
) -> Arrays:
    """The arrays of `Tokenized`, and their hash; paths: of the files, in order.

    Raises:
        DataError: there are none, or one cannot be tokenized.
    """
    tokens, learned, places = [], [], []
    said = time.monotonic()
    for conversation in conversations:
        found = tokenize(conversation, template, tokenizer, everything=everything)
        tokens.append(found["tokens"])
        learned.append(found["learned"])
        places.append((paths.index(conversation.path), conversation.row))
        if time.monotonic() - said > _SAY_SECONDS:
            said = time.monotonic()
            _log.info("%d conversations are tokens", len(tokens))
    if not tokens:
        named = ", ".join(paths[:5]) + (" ..." if len(paths) > 5 else "")
        raise DataError(
            f"data.sft.path: {len(tokens)} conversations were found in {named}. Set it to files "
            "that have some."
        )
    arrays: Arrays = {
        "tokens": np.concatenate(tokens),
        "learned": np.concatenate(learned),
        "starts": np.cumsum([0, *map(len, tokens)], dtype=np.int64),
        "files": np.array([file for file, _ in places], np.int32),
        "rows": np.array([row for _, row in places], np.int64),
    }
    digest = hashlib.blake2b(digest_size=16)
    for name in arrays:
        digest.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return arrays | {"digest": np.frombuffer(digest.digest(), np.uint8)}


class ConversationDataset:
    """Rows filled with whole conversations, epoch after epoch; sample k is a function of k
    alone."""

    def __init__(
        self,
        name: str,
        store: Tokenized,
        sft: SFTConfig,
        *,
        seq_len: int,
        seed: int,
        num_samples: int | None,
        vocab_size: int,
        cache: Path | None = None,
        alone: bool = False,
    ) -> None:
        """`num_samples`: at least so many rows, in whole epochs; None: one epoch. `alone`: each
        conversation in a row of its own length.

        Raises:
            DataError: a conversation is too long and must not be, none has anything to learn, or
                token ids do not fit the vocabulary.
        """
        self._name, self._store, self._sft, self._seq_len, self._seed = (
            name,
            store,
            sft,
            seq_len,
            seed,
        )
        check_ids(store.tokens, vocab_size, f"data.sft ({name})")
        self._lengths, self._kept, counts = _usable(store, sft, seq_len, name)
        self._alone = alone
        self._packs = None if sft.packs is None else read_packs(sft.packs, self.room())
        packing = (
            "none"
            if alone
            else sft.packing
            if self._packs is None
            else f"packs {self._packs.digest}"
        )
        self.fingerprint = (
            f"conversations {store.digest} seq_len={seq_len} packing={packing} "
            f"overlong={sft.overlong} "
            f"shuffle={f'{sft.shuffle} seed={seed}' if sft.shuffle == 'epoch' else sft.shuffle}"
        )
        arrays = load_or_build(
            cache, f"{self.fingerprint} rows={num_samples}", lambda: self._epochs(num_samples)
        )
        self._rows = PackedDocuments(arrays["documents"], arrays["starts"])
        self.num_samples = self._rows.num_rows
        self.report = self._report(counts, int(arrays["per_epoch"][0]))

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> PackedSample:
        """Row k.

        Raises:
            DataError: there is no row k.
        """
        if not 0 <= k < self.num_samples:
            raise DataError(
                f"the {self._name} conversations were packed into {self.num_samples} rows, and row "
                f"{k} was asked for. "
                f"Set train.steps to a value that needs fewer."
            )
        size = sum(self.lengths_of(k)) if self._alone else self._seq_len
        ids, labels = np.zeros(size, np.int64), np.full(size, -1, np.int64)
        lengths, end = [], 0
        for number in self._rows.row(k).tolist():
            length, first = int(self._lengths[number]), int(self._store.starts[number])
            tokens = self._store.tokens[first : first + length + 1]
            ids[end : end + length] = tokens[:-1]
            labels[end : end + length] = np.where(
                self._store.learned[first + 1 : first + length + 1], tokens[1:], -1
            )
            lengths.append(length)
            end += length
        filler = [size - end] if end < size else []
        return PackedSample(ids, labels, (*lengths, *filler), end)

    def lengths_of(self, k: int) -> tuple[int, ...]:
        """Tokens that are read of each conversation of row k."""
        return tuple(self._lengths[self._rows.row(k)].tolist())

    def room(self) -> PackingInput:
        """What a packing is made for."""
        return PackingInput(
            self._store.digest, self._seq_len, self._sft.overlong, self._lengths, self._kept
        )

    def _epochs(self, num_samples: int | None) -> Arrays:
        """Epochs until there are as many rows."""
        epochs = [self._epoch(0)]
        while num_samples is not None and sum(epoch.num_rows for epoch in epochs) < num_samples:
            epochs.append(self._epoch(len(epochs)))
        sizes = np.concatenate([np.diff(epoch.starts) for epoch in epochs])
        return {
            "documents": np.concatenate([epoch.documents for epoch in epochs]),
            "starts": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
            "per_epoch": np.array([epoch.num_rows for epoch in epochs], np.int64),
        }

    def _epoch(self, epoch: int) -> PackedDocuments:
        """The rows of one epoch."""
        sft, shuffled = self._sft, self._sft.shuffle == "epoch"
        draw = np.random.default_rng(key(self._seed, "sft", "epoch", epoch))
        raise_on_all_ranks = sft.packing == "row" and not self._alone
        order = draw.permutation(self._kept) if shuffled and not raise_on_all_ranks else self._kept
        lengths = self._lengths[order].tolist()
        if self._packs is not None:
            order, filled = np.arange(len(self._lengths)), self._packs.filled
        elif self._alone:
            filled = fill_apart(lengths)
        elif raise_on_all_ranks:
            filled = fill_by_group(lengths, self._lines(), self._seq_len)
        else:
            filled = (fill_best if sft.packing == "best_fit" else fill_in_order)(
                lengths, self._seq_len
            )
        # Rows of many short conversations have small first numbers: without this they would come
        # early.
        rows = draw.permutation(filled.num_rows) if shuffled else np.arange(filled.num_rows)
        parts = [order[filled.row(number)] for number in rows.tolist()]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return PackedDocuments(np.concatenate(parts).astype(np.int64), starts)

    def _lines(self) -> list[tuple[int, int]]:
        """(file, row) of each conversation that is read."""
        store, kept = self._store, self._kept
        return list(zip(store.files[kept].tolist(), store.rows[kept].tolist()))

    def _report(self, counts: "_Counts", rows: int) -> Report:
        kept = self._kept
        return Report(
            conversations=len(self._store.rows),
            truncated=counts.truncated,
            dropped=counts.dropped,
            masked=counts.masked,
            rows=rows,
            tokens=int(self._lengths[kept].sum()),
            supervised=int(counts.supervised[kept].sum()),
            seq_len=0 if self._alone else self._seq_len,
        )


@dataclass(frozen=True, slots=True)
class _Counts:
    truncated: int
    dropped: int
    masked: int
    supervised: NDArray[np.int64]


def _usable(
    store: Tokenized, sft: SFTConfig, seq_len: int, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], _Counts]:
    """Tokens that are read of each conversation, which conversations are, and what became of the
    others.

    The last token of a conversation is predicted and not read.
    """
    lengths = np.diff(store.starts) - 1
    long = lengths > seq_len
    if sft.overlong == "error" and long.any():
        first = int(np.flatnonzero(long)[0])
        raise DataError(
            f"{store.where(first)}: a conversation of {int(lengths[first]) + 1} tokens, and a row "
            "of "
            f"train.seq_len={seq_len} holds {seq_len + 1} with the last label; {int(long.sum())} "
            f"of {len(long)} are "
            f"too long. Set train.seq_len to {int(lengths.max())}, or data.sft.overlong to "
            "truncate or drop."
        )
    read = np.minimum(lengths, seq_len)
    before = np.concatenate([[0], np.cumsum(store.learned, dtype=np.int64)])
    firsts = (
        store.starts[:-1] + 1
    )  # the first token of a conversation follows nothing, so it cannot be learned
    supervised = before[np.maximum(firsts + read, firsts)] - before[firsts]
    dropped = long if sft.overlong == "drop" else np.zeros_like(long)
    masked = (supervised == 0) & ~dropped
    kept = np.flatnonzero(~dropped & ~masked)
    if len(kept) == 0:
        raise DataError(
            f"data.sft ({name}): of {len(long)} conversations {int(dropped.sum())} are too long "
            f"and {int(masked.sum())} have nothing to learn, which leaves 0 (the first is "
            f"{store.where(0)}). Use "
            "conversations with assistant turns that are trained, or set "
            "data.sft.overlong=truncate."
        )
    counts = _Counts(
        int((long & ~dropped & ~masked).sum()), int(dropped.sum()), int(masked.sum()), supervised
    )
    return read, kept, counts


def build_conversations(
    data: DataConfig,
    *,
    split: str,
    seq_len: int,
    seed: int,
    num_samples: int | None,
    vocab_size: int,
    tokenizer: Tokenizer,
    tokenizer_path: str | None,
    alone: bool = False,
) -> ConversationDataset:
    """One split of a fine-tuning run.

    Raises:
        ConfigError: the split has no conversations.
        DataError: files are missing, or hold no conversations; there is no chat template.
    """
    sft = data.sft if split == "train" else replace(data.sft, packs=None)  # packs are of the others
    paths = {"train": sft.path, "valid": sft.valid_path}.get(split, ())
    if not paths and (sft.mock_conversations is None or split == "test"):
        raise ConfigError(
            f"data.sft has no {split} conversations (data.sft.{split}_path is unset), but the run "
            f"reads {num_samples or 'all'} {split} samples. Set data.sft.valid_path, or "
            "train.eval_steps=0."
        )
    today = datetime.fromisoformat(sft.date)
    template = find_template(
        sft.template, tokenizer, tokenizer_path, setting="data.sft.template", today=today
    )
    everything = sft.loss_on == "all"
    told = f"{template.fingerprint} {tokenizer.fingerprint} everything={everything}"
    if paths:
        sources = conversation_sources(paths)
        told += "".join(f"\n{source.path} {source.nbytes} {source.mtime_ns}" for source in sources)
        names = tuple(source.path for source in sources)
        cache = Path(data.cache_path) if data.cache_path else Path(sources[0].path).parent / CACHE
        found: Iterable[Conversation] = read_conversations(paths)
    else:
        assert sft.mock_conversations is not None
        cache, names = None, (MADE_UP,)
        found = (
            made_up(sft.mock_conversations, 0) if split == "train" else made_up(MADE_UP_VALID, 1)
        )
    arrays = load_or_build(
        cache,
        f"conversations {told}",
        lambda: tokenize_all(found, names, template, tokenizer, everything=everything),
    )
    return ConversationDataset(
        split,
        _tokenized(arrays, names),
        sft,
        seq_len=seq_len,
        seed=seed,
        num_samples=num_samples,
        vocab_size=vocab_size,
        cache=cache,
        alone=alone,
    )


def _tokenized(arrays: Arrays, paths: tuple[str, ...]) -> Tokenized:
    return Tokenized(
        arrays["tokens"],
        arrays["learned"],
        arrays["starts"],
        arrays["files"],
        arrays["rows"],
        paths,
        bytes(arrays["digest"]).hex(),
    )
