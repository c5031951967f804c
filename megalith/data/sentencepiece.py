"""SentencePiece tokenizers, such as those of Llama 2 and Gemma. The only module that imports the
library."""

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalith.data.special_tokens import TokenSpans, encode_parts, encode_with_special_tokens
from megalith.errors import DataError

MODEL = "tokenizer.model"


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
        return _reopen, (self.path, self._eod_text, self._add_special_tokens)

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

    def encode_spans(self, text: str) -> TokenSpans:
        """Return the same ids, with the characters of each token."""
        return encode_with_special_tokens(text, self.specials, self._spans)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts."""
        first = [self.bos] if self._add_special_tokens and self.bos is not None else []
        return [first + ids for ids in self._model.encode(list(texts), out_type=int)]

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the concatenated ids of all texts and the number of ids per text."""
        batch = self.encode_batch(texts)
        lengths = np.array([len(ids) for ids in batch], np.int32)
        return np.fromiter(
            chain.from_iterable(batch), np.int64, int(lengths.sum(dtype=np.int64))
        ), lengths

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without control pieces."""
        text: str = self._model.decode(
            [int(token) for token in ids if not self._model.is_control(int(token))]
        )
        return text

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Return the UTF-8 bytes of the text of the ids."""
        return len(self.decode(ids).encode())

    def _spans(self, text: str) -> TokenSpans:
        """Return ids and spans, empty spans extended by one character.

        Only the last byte piece of a character has a span, and the space added before the text has
        none.
        """
        encoding = self._model.encode(text, return_type="offset_mapping")
        return TokenSpans(
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


def _reopen(path: str, eod: str | None, add_special_tokens: bool) -> SentencePieceTokenizer:
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
