"""Tokenizers in the formats of tiktoken (.tiktoken files such as Llama 3's, or a vocabulary in
JSON) and SentencePiece (such as those of Llama 2 and Gemma); encoding of text that contains special
tokens. The only module that imports these two libraries.
"""

import base64
import binascii
import hashlib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith import storage
from megalith.config.data import SplitPattern
from megalith.errors import DataError

# --- encoding of text that contains special tokens: ids and character spans


class Encoding(NamedTuple):
    """Ids of a text, and the characters [start, end) of each token; a character may belong to
    several tokens."""

    ids: list[int]
    offsets: list[tuple[int, int]]


def join_ids(batch: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return the concatenated ids of all texts and the number of ids per text."""
    lengths = np.array([len(ids) for ids in batch], np.int32)
    total = int(lengths.sum(dtype=np.int64))
    return np.fromiter(chain.from_iterable(batch), np.int64, total), lengths


def encode_parts(
    text: str, specials: Mapping[str, int], encode: Callable[[str], Sequence[int]]
) -> list[int]:
    """Return the ids of a text: special tokens by lookup, the text between them by `encode`.

    >>> encode_parts("a<end>b", {"<end>": 256}, lambda text: list(text.encode()))
    [97, 256, 98]
    """
    ids: list[int] = []
    for part in _parts(text, specials):
        ids += [specials[part]] if part in specials else encode(part)
    return ids


def encode_with_special_tokens(
    text: str, specials: Mapping[str, int], encode: Callable[[str], Encoding]
) -> Encoding:
    """Return ids and character span of each token; the spans of `encode` are relative to its
    argument.

    >>> def encode(text):
    ...     return Encoding([ord(text)], [(0, 1)])
    >>> encode_with_special_tokens("a<end>b", {"<end>": 256}, encode)
    Encoding(ids=[97, 256, 98], offsets=[(0, 1), (1, 6), (6, 7)])
    """
    result, offset = Encoding([], []), 0
    for part in _parts(text, specials):
        ids, offsets = (
            Encoding([specials[part]], [(0, len(part))]) if part in specials else encode(part)
        )
        result.ids.extend(ids)
        result.offsets.extend((offset + start, offset + end) for start, end in offsets)
        offset += len(part)
    return result


def byte_to_char_spans(text: str, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the character spans of tokens whose concatenated UTF-8 bytes are the text.

    `lengths`: bytes per token.

    >>> byte_to_char_spans("aé", [1, 1, 1])
    [(0, 1), (1, 2), (1, 2)]
    """
    characters = np.repeat(
        np.arange(len(text)), [len(character.encode()) for character in text]
    ).tolist()
    borders = np.cumsum([0, *lengths]).tolist()
    return [(characters[start], characters[end - 1] + 1) for start, end in pairwise(borders)]


def _parts(text: str, specials: Mapping[str, int]) -> Iterator[str]:
    """Yield special tokens and the text between them; the longest special token wins."""
    longest_first = sorted(specials, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if specials else [text]
    return (part for part in parts if part)


PATTERNS: dict[SplitPattern, str] = {
    "v1": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""Pre-tokenization patterns: v1 and v2 of Mistral's and NVIDIA's models, cl100k of GPT-4 and Llama
3."""

DEFAULT_SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
"""First special tokens of a vocabulary in JSON if none are set."""

EOD_NAMES = ("</s>", "<|end_of_text|>", "<|endoftext|>")
BOS_NAMES = ("<s>", "<|begin_of_text|>")


class TiktokenTokenizer:
    """BPE vocabulary with special tokens: before it in a JSON vocabulary, after it in a .tiktoken
    file."""

    def __init__(
        self,
        path: str,
        *,
        pattern: SplitPattern = "v2",
        special_tokens: Sequence[str] = (),
        num_special: int = 1000,
        vocab_size: int | None = None,
        eod: str | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        """`num_special`: ids reserved for special tokens in a JSON vocabulary; unnamed ones get a
        name. `vocab_size`: total number of ids of a JSON vocabulary; unset: all of them.

        Raises:
            DataError: the file is not a vocabulary, or there is no special token `eod`.
        """
        self.path = path
        self._options = {
            "pattern": pattern,
            "special_tokens": tuple(special_tokens),
            "num_special": num_special,
            "vocab_size": vocab_size,
            "eod": eod,
            "add_special_tokens": add_special_tokens,
        }
        file = Path(path)
        contents = _contents(file)
        if contents.lstrip()[:1] == b"[":
            specials = _name_special_tokens(special_tokens or DEFAULT_SPECIAL_TOKENS, num_special)
            ranks = _parse_json(file, contents)
            num_kept = (
                len(ranks)
                if vocab_size is None
                else _check_num_kept(file, vocab_size - num_special, len(ranks), num_special)
            )
            self._shift = num_special
            ranks = {token: rank for token, rank in ranks.items() if rank < num_kept}
            self._specials = {text: number for number, text in enumerate(specials)}
        else:
            ranks, self._shift = _parse_lines(file, contents), 0
            if vocab_size is not None:
                raise DataError(
                    f"tokenizer.vocab_size={vocab_size}: {file} has {len(ranks)} tokens, followed "
                    "by "
                    "tokenizer.special_tokens. Remove tokenizer.vocab_size, which is for "
                    "vocabularies in JSON."
                )
            self._specials = {
                text: len(ranks) + number for number, text in enumerate(special_tokens)
            }
        self._ids_of_specials = frozenset(self._specials.values())
        self.vocab_size = len(ranks) + (num_special if self._shift else len(special_tokens))
        self._encoding = _library(file).Encoding(
            file.name, pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens={}
        )
        self.bos = self._first(BOS_NAMES)
        self._eod = self._first(EOD_NAMES) if eod is None else self._special(eod)
        hashed = contents + repr(sorted(self._options.items())).encode()
        self.fingerprint = f"tiktoken-{hashlib.blake2b(hashed, digest_size=16).hexdigest()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_tiktoken, (self.path, self._options)

    @property
    def eod(self) -> int:
        """Id of the end-of-document token.

        Raises:
            DataError: no special token is known to end documents.
        """
        if self._eod is None:
            raise DataError(
                f"tokenizer.path={self.path}: none of its special tokens is known to end a "
                "document. "
                "Set tokenizer.special_tokens to their texts in order, and tokenizer.eod to one "
                "of them."
            )
        return self._eod

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text; special tokens in it are encoded as ordinary text."""
        ids: list[int] = self._encoding.encode_ordinary(text)
        first = [self.bos] if self._options["add_special_tokens"] and self.bos is not None else []
        return first + ([token + self._shift for token in ids] if self._shift else ids)

    @property
    def specials(self) -> Mapping[str, int]:
        """Ids of the special tokens by text."""
        return self._specials

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text that contains special tokens; none are added."""
        return encode_parts(text, self._specials, self._ordinary)

    def encode_spans(self, text: str) -> Encoding:
        """Return the same ids, with the characters of each token."""
        return encode_with_special_tokens(text, self._specials, self._spans)

    def _spans(self, text: str) -> Encoding:
        ids = self._ordinary(text)
        lengths = [
            len(self._encoding.decode_single_token_bytes(token - self._shift)) for token in ids
        ]
        return Encoding(ids, byte_to_char_spans(text, lengths))

    def _ordinary(self, text: str) -> list[int]:
        return [token + self._shift for token in self._encoding.encode_ordinary(text)]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts."""
        return [self.encode(text) for text in texts]

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the concatenated ids of all texts and the number of ids per text."""
        return join_ids(self.encode_batch(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens."""
        return self._bytes(ids).decode(errors="replace")

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Return the UTF-8 bytes of the text of the ids."""
        return len(self._bytes(ids))

    def token_bytes(self) -> Sequence[bytes | None]:
        """Return the bytes of every id; None for special tokens."""
        return [
            None if token in self._ids_of_specials else self._bytes([token])
            for token in range(self.vocab_size)
        ]

    def _bytes(self, ids: Sequence[int]) -> bytes:
        ordinary = [
            int(token) - self._shift for token in ids if int(token) not in self._ids_of_specials
        ]
        joined: bytes = self._encoding.decode_bytes(ordinary)
        return joined

    def _first(self, names: Sequence[str]) -> int | None:
        return next((self._specials[name] for name in names if name in self._specials), None)

    def _special(self, text: str) -> int:
        if text not in self._specials:
            raise DataError(
                f"tokenizer.eod={text!r} is not a special token of {self.path}. Set it to one of "
                f"{list(self._specials)[:8]}, or name it in tokenizer.special_tokens."
            )
        return self._specials[text]


def _reopen_tiktoken(path: str, options: Mapping[str, Any]) -> TiktokenTokenizer:
    return TiktokenTokenizer(path, **options)


def _check_num_kept(file: Path, num_kept: int, num_tokens: int, num_special: int) -> int:
    """Return `num_kept` if it includes all bytes and is at most the size of the vocabulary."""
    if not 256 <= num_kept <= num_tokens:
        raise DataError(
            f"tokenizer.vocab_size={num_kept + num_special}: {file} has {num_tokens} tokens, of "
            "which 256 "
            "are required in addition to "
            f"tokenizer.num_special_tokens={num_special}. Set it to a number from "
            f"{256 + num_special} to "
            f"{num_tokens + num_special}."
        )
    return num_kept


def _name_special_tokens(names: Sequence[str], count: int) -> list[str]:
    """Return `count` special tokens, the first with the given names."""
    return [
        names[number] if number < len(names) else f"<SPECIAL_{number}>" for number in range(count)
    ]


def _contents(file: Path) -> bytes:
    try:
        return storage.read_bytes(file)
    except OSError as error:
        raise DataError(
            f"tokenizer.path={file}: cannot be read ({error.strerror}). Set it to a .tiktoken file "
            "or JSON vocabulary."
        ) from error


def _parse_lines(file: Path, contents: bytes) -> dict[bytes, int]:
    """Parse one token per line: base64, a space, its rank."""
    try:
        pairs = [line.split() for line in contents.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise _vocabulary_error(file, error) from error
    return _check_ranks(file, ranks)


def _parse_json(file: Path, contents: bytes) -> dict[bytes, int]:
    """Parse a list of {rank, token_bytes: base64, token_str}."""
    try:
        entries = storage.parse_json(contents)
        ranks = {
            base64.b64decode(entry["token_bytes"], validate=True): int(entry["rank"])
            for entry in entries
        }
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise _vocabulary_error(file, error) from error
    return _check_ranks(file, ranks)


def _check_ranks(file: Path, ranks: dict[bytes, int]) -> dict[bytes, int]:
    """Check that ranks are 0, 1, 2 …, and that every byte is a token, so that any text can be
    encoded."""
    missing_bytes = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing_bytes or sorted(ranks.values()) != list(range(len(ranks))):
        problem = f"no token for byte {missing_bytes[0]}" if missing_bytes else "ranks with gaps"
        raise _vocabulary_error(file, ValueError(problem))
    return ranks


def _vocabulary_error(file: Path, error: Exception) -> DataError:
    return DataError(
        f"tokenizer.path={file}: not a BPE vocabulary ({error}). Use lines of base64 and "
        "rank (.tiktoken), or a JSON list of rank and token_bytes."
    )


def _library(file: Path) -> Any:  # the tiktoken module
    try:
        return importlib.import_module("tiktoken")
    except ImportError as error:
        raise DataError(
            f"tokenizer.kind=tiktoken needs the tiktoken package to read {file}. "
            f'Install it with pip install "megalith[tiktoken]".'
        ) from error


# --- SentencePiece

MODEL = "tokenizer.model"
SPACE = "\u2581"
"""Character that stands for a space in pieces."""


def piece_bytes(piece: str, *, is_byte: bool) -> bytes:
    """Return the bytes of a piece inside a text; `is_byte`: its text is the number of a byte.

    >>> piece_bytes("\u2581a", is_byte=False), piece_bytes("<0x0A>", is_byte=True)
    (b' a', b'\\n')
    """
    return bytes([int(piece[3:-1], 16)]) if is_byte else piece.replace(SPACE, " ").encode()


class SentencePieceTokenizer:
    """SentencePiece tokenizer. `eod` is the given piece, else the model's end-of-sentence piece."""

    def __init__(
        self, path: str, *, eod: str | None = None, add_special_tokens: bool = True
    ) -> None:
        """`path`: the model, or a folder with tokenizer.model. `add_special_tokens`: add bos before
        texts.

        Raises:
            DataError: the model is missing or cannot be read, or has no piece `eod`.
        """
        file = find_model_file(path)
        self.path = path
        self._eod_text, self._add_special_tokens = eod, add_special_tokens
        self._model = _read(file)
        self.vocab_size: int = self._model.get_piece_size()
        self.bos = _id_or_none(self._model.bos_id())
        self._eod = _id_or_none(self._model.eos_id()) if eod is None else self._piece(eod)
        contents = file.read_bytes() + f"eod={self._eod} special={add_special_tokens}".encode()
        self.fingerprint = f"sentencepiece-{hashlib.blake2b(contents, digest_size=16).hexdigest()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen_sentencepiece, (self.path, self._eod_text, self._add_special_tokens)

    @property
    def eod(self) -> int:
        """Id of the end-of-document token.

        Raises:
            DataError: the model has none.
        """
        if self._eod is None:
            raise DataError(
                f"tokenizer.path={self.path}: the model has no end-of-sentence piece. "
                "Set tokenizer.eod to one of its pieces, such as "
                f"{self._model.id_to_piece(self.vocab_size - 1)!r}."
            )
        return self._eod

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""
        return self.encode_batch([text])[0]

    @cached_property
    def specials(self) -> Mapping[str, int]:
        """Ids of the control pieces, which ordinary text is never encoded to."""
        controls = [number for number in range(self.vocab_size) if self._model.is_control(number)]
        return {self._model.id_to_piece(number): number for number in controls}

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text that contains control pieces; none are added."""
        return encode_parts(text, self.specials, self._model.encode)

    def encode_spans(self, text: str) -> Encoding:
        """Return the same ids, with the characters of each token."""
        return encode_with_special_tokens(text, self.specials, self._spans)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts."""
        first = [self.bos] if self._add_special_tokens and self.bos is not None else []
        return [first + ids for ids in self._model.encode(list(texts), out_type=int)]

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the concatenated ids of all texts and the number of ids per text."""
        return join_ids(self.encode_batch(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without control pieces."""
        text: str = self._model.decode(
            [int(token) for token in ids if not self._model.is_control(int(token))]
        )
        return text

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Return the UTF-8 bytes of the text of the ids."""
        return len(self.decode(ids).encode())

    def token_bytes(self) -> Sequence[bytes | None]:
        """Return the bytes of every piece; None for control, unknown and unused pieces."""
        return [self._piece_bytes(token) for token in range(self.vocab_size)]

    def _piece_bytes(self, token: int) -> bytes | None:
        model = self._model
        if model.is_control(token) or model.is_unknown(token) or model.is_unused(token):
            return None
        return piece_bytes(model.id_to_piece(token), is_byte=model.is_byte(token))

    def _spans(self, text: str) -> Encoding:
        """Return ids and spans, empty spans extended by one character.

        Only the last byte piece of a character has a span, and the space added before the text has
        none.
        """
        encoding = self._model.encode(text, return_type="offset_mapping")
        return Encoding(
            list(encoding["ids"]),
            [(start, max(end, start + 1)) for start, end in encoding["offsets"]],
        )

    def _piece(self, text: str) -> int:
        number: int = self._model.piece_to_id(text)
        if self._model.id_to_piece(number) != text:
            named = [self._model.id_to_piece(token) for token in range(min(8, self.vocab_size))]
            raise DataError(
                f"tokenizer.eod={text!r} is not a piece of {self.path}. Set it to one of its "
                f"pieces, such as {named}."
            )
        return number


def _reopen_sentencepiece(
    path: str, eod: str | None, add_special_tokens: bool
) -> SentencePieceTokenizer:
    return SentencePieceTokenizer(path, eod=eod, add_special_tokens=add_special_tokens)


def _id_or_none(number: int) -> int | None:
    """Convert the library's -1 for a missing piece to None."""
    return number if number >= 0 else None


def find_model_file(path: str) -> Path:
    """Return the model file, or tokenizer.model of a folder.

    Raises:
        DataError: it does not exist.
    """
    file = Path(path) / MODEL if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise DataError(
            f"tokenizer.path={path}: no {MODEL} found. Set it to a SentencePiece model, or to a "
            "folder that has one."
        )
    return file


def is_sentencepiece(place: Path) -> bool:
    """Return whether a file, or tokenizer.model of a folder, is a SentencePiece model.

    Llama 3 has a tokenizer.model of text lines.
    """
    try:
        with (place / MODEL if place.is_dir() else place).open("rb") as file:
            # a protocol buffer whose first field is the list of pieces
            return file.read(1) == b"\n"
    except OSError:
        return False


def _read(file: Path) -> Any:  # a SentencePieceProcessor, which has no type annotations
    try:
        library = importlib.import_module("sentencepiece")
    except ImportError as error:
        raise DataError(
            f"tokenizer.kind=sentencepiece needs the sentencepiece package to read {file}. "
            f'Install it with pip install "megalith[sentencepiece]".'
        ) from error
    try:
        return library.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"tokenizer.path={file}: not a SentencePiece model ({str(error)[:80]}). Use the "
            "model's own file."
        ) from error
