"""Fine-tuning datasets: conversations in common formats, tokenized with a loss mask and packed into
rows (sequence packing).
"""

import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith import storage
from megalith.config.data import DataConfig, SFTConfig
from megalith.data.cache import Arrays, load_or_build
from megalith.data.chat_template import ChatTemplate, TextPiece, find_template
from megalith.data.corpus import LineBlock, Position, Source, find_sources, read_blocks, read_rows
from megalith.data.packs import PackingInput, read_packs
from megalith.data.pretrain import check_ids
from megalith.data.sample import PackedSample, SampleSettings
from megalith.data.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.plan.keys import key
from megalith.plan.packing import (
    PackedDocuments,
    pack_best_fit_decreasing,
    pack_by_group,
    pack_in_order,
    pack_one_per_row,
)

# --- conversations: read from JSONL or Parquet in common formats and checked, or generated as mock
# data

ROLES = "system", "developer", "user", "assistant", "tool"
SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "function_response": "tool",
}
ANSWERS_TO = "user", "tool"
COLUMNS = (
    "messages",
    "conversations",
    "system",
    "tools",
    "instruction",
    "input",
    "context",
    "output",
    "response",
    "prompt",
    "completion",
)
SCHEMAS = (
    'messages: [{"role", "content"}], conversations: [{"from", "value"}] (ShareGPT), instruction, '
    "input and output "
    "(Alpaca), or prompt and completion"
)
MOCK_SOURCE = "made-up conversations"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Message = dict[str, Any]  # Any: JSON; templates may use more than role and content


@dataclass(frozen=True, slots=True)
class Conversation:
    """One checked conversation."""

    path: str
    row: int
    """Row of the file, from 1; a row may contain several conversations."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None  # JSON schemas

    @property
    def where(self) -> str:
        """File and row, for error messages."""
        return f"{self.path}:{self.row}"


def read_conversations(inputs: Sequence[str]) -> Iterator[Conversation]:
    """Yield all conversations of files, folders and globs, in order.

    Raises:
        DataError: a file is missing or cannot be read, or a row is not a conversation. The message
            states file and row.
    """
    for block in read_blocks(conversation_sources(inputs), Position()):
        for number, row in _rows(block):
            yield from parse_row(row, block.paths[0], number)


def conversation_sources(inputs: Sequence[str]) -> list[Source]:
    """Return the files that `inputs` match.

    Raises:
        DataError: there are none, or one is plain text.
    """
    sources = find_sources(inputs)
    for source in sources:
        if source.kind == "text":
            raise DataError(
                f"data.sft.path={source.path}: plain text has no turns. Use JSONL or Parquet: "
                f"{SCHEMAS}."
            )
    return sources


def _rows(block: LineBlock) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield (row number, row as an object); blank lines are skipped."""
    path = block.paths[0]
    if block.rows is not None:
        for number, row in enumerate(read_rows(path, *block.rows, COLUMNS), block.first_line):
            yield number, _without_none(row)
        return
    assert block.lines is not None
    lines = block.lines.removeprefix(_BYTE_ORDER_MARK) if block.first_line == 1 else block.lines
    for number, text in enumerate(lines.removesuffix(b"\n").split(b"\n"), block.first_line):
        if text.strip():
            yield number, _parse_line(text, f"{path}:{number}")


def _without_none(value: Any) -> Any:
    """Remove the None that Parquet stores for missing fields."""
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def _parse_line(text: bytes, where: str) -> Mapping[str, Any]:
    shown = text[:60].decode(errors="replace")
    try:
        row = json.loads(text.decode())
        json.dumps(row, ensure_ascii=False).encode()  # rejects lone surrogates
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: not JSON in UTF-8 ({type(error).__name__}): {shown!r}. Use one object in "
            "each line."
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: expected an object, not {type(row).__name__}: {shown!r}. Use {SCHEMAS}."
        )
    return row


def parse_row(row: Mapping[str, Any], path: str, number: int) -> list[Conversation]:
    """Return the conversations of one row; each system message after the first message starts a new
    one.

    Raises:
        DataError: the row has no known format, or its turns are invalid.
    """
    where = f"{path}:{number}"
    messages = _messages(row, where)
    if not messages:
        raise DataError(
            f"{where}: 0 messages. Use at least a user's and an assistant's, or remove the row."
        )
    tools = _tools(row, where)
    starts = [
        0,
        *(i for i, message in enumerate(messages) if i and message["role"] == "system"),
        len(messages),
    ]
    parts = [messages[start:end] for start, end in pairwise(starts)]
    for part in parts:
        _check_turns(part, where)
    return [Conversation(path, number, tuple(part), tools) for part in parts]


def _messages(row: Mapping[str, Any], where: str) -> list[Message]:
    if "messages" in row:
        return [
            _message(entry, where, number)
            for number, entry in enumerate(_list(row, "messages", where), 1)
        ]
    if "conversations" in row:
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        entries = [_from_sharegpt(entry) for entry in _list(row, "conversations", where)]
        return [_message(entry, where, number) for number, entry in enumerate(system + entries, 1)]
    if "instruction" in row and ("output" in row or "response" in row):
        return [
            _message(entry, where, number)
            for number, entry in enumerate(_from_alpaca(row, where), 1)
        ]
    if "prompt" in row and "completion" in row:
        turns = [
            *_as_messages(row["prompt"], "user"),
            *_as_messages(row["completion"], "assistant"),
        ]
        return [_message(entry, where, number) for number, entry in enumerate(turns, 1)]
    raise DataError(f"{where}: no `messages` among the keys {list(row)[:10]}. Use {SCHEMAS}.")


def _list(row: Mapping[str, Any], name: str, where: str) -> list[Any]:
    value = row[name]
    if not isinstance(value, list):
        raise DataError(f"{where}: {name!r} is {type(value).__name__}, not a list. Use {SCHEMAS}.")
    return value


def _tools(row: Mapping[str, Any], where: str) -> tuple[Any, ...] | None:
    if row.get("tools") is None:
        return None
    tools = row["tools"]
    if isinstance(tools, str):
        # many data sets store JSON text, since the fields differ between tools
        try:
            tools = storage.parse_json(tools)
        except ValueError as error:
            raise DataError(
                f"{where}: 'tools' is not JSON ({error}): {tools[:60]!r}. Use a list of schemas."
            ) from error
    if not isinstance(tools, list):
        raise DataError(f"{where}: 'tools' is {type(tools).__name__}. Use a list of JSON schemas.")
    return tuple(tools)


def _from_sharegpt(entry: Any) -> Any:
    if not isinstance(entry, dict) or "from" not in entry:
        return entry
    rest = {name: value for name, value in entry.items() if name not in ("from", "value")}
    role = entry["from"]
    named = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
    return {"role": named, "content": entry.get("value"), **rest}


def _from_alpaca(row: Mapping[str, Any], where: str) -> list[Message]:
    more = row.get("input") or row.get("context") or ""
    texts = [row["instruction"], more, row.get("output", row.get("response"))]
    for name, text in zip(("instruction", "input", "output"), texts):
        if not isinstance(text, str):
            raise DataError(
                f"{where}: {name!r} is {type(text).__name__}, not a text. Use {SCHEMAS}."
            )
    question = f"{texts[0]}\n\n{more}" if more else texts[0]
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [
        *system,
        {"role": "user", "content": question},
        {"role": "assistant", "content": texts[2]},
    ]


def _as_messages(value: Any, role: str) -> list[Any]:
    """Return a list of messages unchanged, and a text as a list of one message."""
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _message(entry: Any, where: str, number: int) -> Message:
    """Check one message: it has a known role and a text.

    Raises:
        DataError: it does not.
    """
    place = f"{where}: message {number}"
    if not isinstance(entry, dict):
        raise DataError(
            f'{place} is {type(entry).__name__}, not an object. Use {{"role": ..., "content": '
            "...}."
        )
    role, content = entry.get("role"), entry.get("content")
    if role not in ROLES:
        raise DataError(f"{place} has the unknown role {role!r}. Use one of {', '.join(ROLES)}.")
    if content is None and role == "assistant" and entry.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise DataError(
            f"{place} ({role}) has {type(content).__name__} as its content. Use a text."
        )
    if "weight" in entry and "train" not in entry:
        # OpenAI's field: 0 excludes the turn from the loss
        entry = {**entry, "train": entry["weight"] != 0} if role == "assistant" else entry
    train = entry.get("train", role == "assistant")
    if not isinstance(train, bool) or (train and role != "assistant"):
        raise DataError(
            f'{place} ({role}) has "train": {train!r}. Use false to leave out an assistant\'s '
            "turn, or remove it."
        )
    return {**entry, "content": content}


def _check_turns(messages: Sequence[Message], where: str) -> None:
    before = None
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role == "assistant":
            if not message["content"].strip() and not message.get("tool_calls"):
                raise DataError(
                    f"{where}: message {number} is an empty assistant turn "
                    f"({message['content']!r}). Add text to train on, or remove the row."
                )
            if before not in ANSWERS_TO:
                raise DataError(
                    f"{where}: message {number} is an assistant turn after {before or 'nothing'}: "
                    "it must follow one "
                    f"of {', '.join(ANSWERS_TO)}."
                )
        before = role


def generate_mock_conversations(count: int, seed: int) -> Iterator[Conversation]:
    """Yield mock conversations of one to three questions about sums, which a model learns
    quickly."""
    for number in range(1, count + 1):
        draw = np.random.default_rng(key(seed, "sft", "made up", number))
        messages: list[Message] = []
        for _ in range(int(draw.integers(1, 4))):
            a, b = (int(n) for n in draw.integers(0, 10, 2))
            messages += [
                {"role": "user", "content": f"What is {a} plus {b}?"},
                {"role": "assistant", "content": f"{a} plus {b} is {a + b}."},
            ]
        yield Conversation(MOCK_SOURCE, number, tuple(messages))


_log = logging.getLogger(__name__)
_LOG_SECONDS = 30.0
CACHE = ".cache"
"""Cache folder next to the first file; hidden, because the source may be a folder."""

NUM_MOCK_VALID = 100
"""Number of conversations of the mock validation split."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Concatenated tokens of conversations."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]
    """Loss mask: True for tokens that are trained on."""

    starts: NDArray[np.int64]
    """[conversations + 1]: start of each conversation."""

    files: NDArray[np.int32]
    """[conversations]: index in `paths`."""

    rows: NDArray[np.int64]
    """[conversations]: row of the file."""

    paths: tuple[str, ...]

    digest: str
    """Hash of everything except the paths."""

    def where(self, number: int) -> str:
        """Return file and row of a conversation."""
        return f"{self.paths[self.files[number]]}:{self.rows[number]}"


@dataclass(frozen=True, slots=True)
class Report:
    """Statistics of the conversations of a split."""

    conversations: int
    truncated: int
    dropped: int
    masked: int
    """Conversations without a token to train on, which are dropped."""

    rows: int
    """Rows of the first epoch."""

    tokens: int
    """Tokens of conversations in those rows."""

    supervised: int
    """Tokens that are trained on."""

    seq_len: int
    """Row length; 0 without packing."""

    def __str__(self) -> str:
        share, packing_efficiency = (
            self.supervised / max(1, self.tokens),
            self.tokens / max(1, self.rows * self.seq_len),
        )
        counts = {
            "truncated": self.truncated,
            "dropped as too long": self.dropped,
            "dropped without a token to train on": self.masked,
        }
        excluded = "".join(f", {count} {what}" for what, count in counts.items() if count)
        rows = (
            f"{self.rows} rows per epoch, {packing_efficiency:.1%} filled"
            if self.seq_len
            else f"{self.rows} per epoch"
        )
        return (
            f"{self.conversations} conversations{excluded}; {rows}, {share:.1%} of their tokens "
            "trained on"
        )


def tokenize(
    conversation: Conversation, template: ChatTemplate, tokenizer: Tokenizer, *, everything: bool
) -> Arrays:
    """Return the tokens of one conversation and their loss mask.

    With `everything`, all tokens are trained on, else those that the template selects. A token
    across the boundary is trained on, because it contains text of the assistant.

    Raises:
        DataError: the template rejects the conversation or renders no text; the message states
            file and row.
    """
    try:
        pieces = _pieces(conversation, template, everything)
        ids, spans = tokenizer.encode_spans("".join(piece.text for piece in pieces))
    except DataError as error:
        raise DataError(
            f"{conversation.where}: {error} Use other text there, or remove the row."
        ) from error
    if not ids:
        raise DataError(
            f"{conversation.where}: {template.name} renders its {len(conversation.messages)} "
            "messages "
            f"as {len(ids)} tokens. Use a template that renders them, or remove the row."
        )
    characters = np.repeat(
        [piece.learned for piece in pieces], [len(piece.text) for piece in pieces]
    )
    num_learned_before = np.concatenate([[0], np.cumsum(characters)])
    starts, ends = np.minimum(
        np.array(spans, np.int64).T, [[len(characters) - 1], [len(characters)]]
    )
    return {
        "tokens": np.array(ids, np.int32),
        "learned": num_learned_before[ends] > num_learned_before[starts],
    }


def _pieces(
    conversation: Conversation, template: ChatTemplate, everything: bool
) -> list[TextPiece]:
    if not everything:
        return template.pieces(conversation.messages, tools=conversation.tools)
    if any("train" in message for message in conversation.messages):
        raise DataError(
            f'"train" selects turns to train on, but data.sft.loss_on=all trains on everything. '
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
    """Return the arrays of `Tokenized` and their hash; `paths`: the files in order.

    Raises:
        DataError: there are no conversations, or one cannot be tokenized.
    """
    tokens, learned, sources = [], [], []
    last_log = time.monotonic()
    for conversation in conversations:
        arrays_of_one = tokenize(conversation, template, tokenizer, everything=everything)
        tokens.append(arrays_of_one["tokens"])
        learned.append(arrays_of_one["learned"])
        sources.append((paths.index(conversation.path), conversation.row))
        if time.monotonic() - last_log > _LOG_SECONDS:
            last_log = time.monotonic()
            _log.info("%d conversations tokenized", len(tokens))
    if not tokens:
        named = ", ".join(paths[:5]) + (" ..." if len(paths) > 5 else "")
        raise DataError(
            f"data.sft.path: {len(tokens)} conversations found in {named}. Set it to files with "
            "conversations."
        )
    arrays: Arrays = {
        "tokens": np.concatenate(tokens),
        "learned": np.concatenate(learned),
        "starts": np.cumsum([0, *map(len, tokens)], dtype=np.int64),
        "files": np.array([file for file, _ in sources], np.int32),
        "rows": np.array([row for _, row in sources], np.int64),
    }
    digest = hashlib.blake2b(digest_size=16)
    for name in arrays:
        digest.update(np.ascontiguousarray(arrays[name]).view(np.uint8).data)
    return arrays | {"digest": np.frombuffer(digest.digest(), np.uint8)}


class ConversationDataset:
    """Rows of whole conversations, epoch after epoch; sample k depends on k alone."""

    def __init__(
        self,
        name: str,
        store: Tokenized,
        sft: SFTConfig,
        samples: SampleSettings,
        *,
        num_samples: int | None,
        cache: Path | None = None,
    ) -> None:
        """`num_samples`: minimum number of rows, rounded up to whole epochs; None: one epoch.

        Raises:
            DataError: a conversation is too long and overlong=error, none has a token to train on,
                or a token id is outside the vocabulary.
        """
        seq_len, seed, alone = samples.seq_len, samples.seed, samples.whole_documents
        self._name, self._store, self._sft = name, store, sft
        self._seq_len, self._seed, self._alone = seq_len, seed, alone
        check_ids(store.tokens, samples.vocab_size, f"data.sft ({name})")
        self._lengths, self._kept, counts = _select_conversations(store, sft, seq_len, name)
        self._packs = None if sft.packs is None else read_packs(sft.packs, self.packing_input())
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
        """Return row k.

        Raises:
            DataError: there is no row k.
        """
        if not 0 <= k < self.num_samples:
            raise DataError(
                f"the {self._name} conversations were packed into {self.num_samples} rows, and row "
                f"{k} was requested. Set train.steps to a lower value."
            )
        size = sum(self.document_lengths(k)) if self._alone else self._seq_len
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

    def document_lengths(self, k: int) -> tuple[int, ...]:
        """Return the number of input tokens of each conversation of row k."""
        return tuple(self._lengths[self._rows.row(k)].tolist())

    def packing_input(self) -> PackingInput:
        """Return the input of a packing."""
        return PackingInput(
            self._store.digest, self._seq_len, self._sft.overlong, self._lengths, self._kept
        )

    def _epochs(self, num_samples: int | None) -> Arrays:
        """Pack epochs until there are enough rows."""
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
        """Pack the rows of one epoch."""
        sft, shuffled = self._sft, self._sft.shuffle == "epoch"
        draw = np.random.default_rng(key(self._seed, "sft", "epoch", epoch))
        pack_by_row = sft.packing == "row" and not self._alone
        order = draw.permutation(self._kept) if shuffled and not pack_by_row else self._kept
        lengths = self._lengths[order].tolist()
        if self._packs is not None:
            order, packed = np.arange(len(self._lengths)), self._packs.packed
        elif self._alone:
            packed = pack_one_per_row(lengths)
        elif pack_by_row:
            packed = pack_by_group(lengths, self._lines(), self._seq_len)
        else:
            packed = (pack_best_fit_decreasing if sft.packing == "best_fit" else pack_in_order)(
                lengths, self._seq_len
            )
        # Rows are shuffled too, because rows of many short conversations tend to come first.
        rows = draw.permutation(packed.num_rows) if shuffled else np.arange(packed.num_rows)
        parts = [order[packed.row(number)] for number in rows.tolist()]
        starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        return PackedDocuments(np.concatenate(parts).astype(np.int64), starts)

    def _lines(self) -> list[tuple[int, int]]:
        """Return (file, row) of each conversation that is used."""
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


def _select_conversations(
    store: Tokenized, sft: SFTConfig, seq_len: int, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64], _Counts]:
    """Return the input tokens of each conversation, the usable conversations, and counts of the
    others.

    The last token of a conversation is only a label.
    """
    lengths = np.diff(store.starts) - 1
    long = lengths > seq_len
    if sft.overlong == "error" and long.any():
        first = int(np.flatnonzero(long)[0])
        raise DataError(
            f"{store.where(first)}: a conversation has {int(lengths[first]) + 1} tokens, and a row "
            "of "
            f"train.seq_len={seq_len} has {seq_len + 1} with the last label; {int(long.sum())} "
            f"of {len(long)} are "
            f"too long. Set train.seq_len to {int(lengths.max())}, or data.sft.overlong to "
            "truncate or drop."
        )
    read = np.minimum(lengths, seq_len)
    num_learned_before = np.concatenate([[0], np.cumsum(store.learned, dtype=np.int64)])
    first_labels = store.starts[:-1] + 1  # the first token of a conversation is never a label
    supervised = (
        num_learned_before[np.maximum(first_labels + read, first_labels)]
        - num_learned_before[first_labels]
    )
    dropped = long if sft.overlong == "drop" else np.zeros_like(long)
    masked = (supervised == 0) & ~dropped
    kept = np.flatnonzero(~dropped & ~masked)
    if len(kept) == 0:
        raise DataError(
            f"data.sft ({name}): of {len(long)} conversations {int(dropped.sum())} are too long "
            f"and {int(masked.sum())} have no token to train on, which leaves 0 (the first is "
            f"{store.where(0)}). Use "
            "conversations with assistant turns, or set "
            "data.sft.overlong=truncate."
        )
    counts = _Counts(
        int((long & ~dropped & ~masked).sum()), int(dropped.sum()), int(masked.sum()), supervised
    )
    return read, kept, counts


def build_conversations(
    data: DataConfig,
    samples: SampleSettings,
    *,
    split: str,
    num_samples: int | None,
    tokenizer: Tokenizer,
    tokenizer_path: str | None,
) -> ConversationDataset:
    """Build one split of a fine-tuning run.

    Raises:
        ConfigError: the split has no conversations.
        DataError: files are missing or contain no conversations, or there is no chat template.
    """
    # packs are for the training split
    sft = data.sft if split == "train" else replace(data.sft, packs=None)
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
    cache_key = f"{template.fingerprint} {tokenizer.fingerprint} everything={everything}"
    if paths:
        sources = conversation_sources(paths)
        cache_key += "".join(
            f"\n{source.path} {source.nbytes} {source.mtime_ns}" for source in sources
        )
        names = tuple(source.path for source in sources)
        cache = Path(data.cache_path) if data.cache_path else Path(sources[0].path).parent / CACHE
        conversations: Iterable[Conversation] = read_conversations(paths)
    else:
        assert sft.mock_conversations is not None
        cache, names = None, (MOCK_SOURCE,)
        conversations = (
            generate_mock_conversations(sft.mock_conversations, 0)
            if split == "train"
            else generate_mock_conversations(NUM_MOCK_VALID, 1)
        )
    arrays = load_or_build(
        cache,
        f"conversations {cache_key}",
        lambda: tokenize_all(conversations, names, template, tokenizer, everything=everything),
    )
    return ConversationDataset(
        split,
        _tokenized(arrays, names),
        sft,
        samples,
        num_samples=num_samples,
        cache=cache,
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
