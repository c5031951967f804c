"""Tokenizers of the Hugging Face `tokenizers` library: read from tokenizer.json or GPT-2's two
files, or trained."""

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megalith import storage
from megalith.config.data import MERGES, VOCABULARY, find_merges_file
from megalith.data.tokenizer_formats import Encoding, join_ids, piece_bytes
from megalith.errors import DataError

END_OF_TEXT = "<|endoftext|>"
# Names of common tokenizers, for folders whose tokenizer_config.json has no eos_token.
_EOD_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_NON_GPT2_OPTIONS = ("add_prefix_space", "add_bos_token", "add_eos_token")
# Classes fully defined by vocab.json and merges.txt; others split texts differently.
_GPT2_CLASSES = (None, "GPT2Tokenizer", "GPT2TokenizerFast")


class HuggingFaceTokenizer:
    """Tokenizer of a tokenizer.json, or of a GPT-2 vocabulary and its merges.

    `eod` is the given token, else the end-of-sequence token of tokenizer_config.json.
    """

    def __init__(
        self, path: str, *, eod: str | None = None, add_special_tokens: bool = True
    ) -> None:
        """`path` is a folder, a tokenizer.json, a hub name in the local cache, or a vocab.json next
        to its merges.txt.

        Raises:
            DataError: there is no tokenizer, it cannot be read, or it has no token `eod`.
        """
        file = find_tokenizer_file(path)
        self.path = path
        self._add_special_tokens = add_special_tokens
        self._tokenizer = _read(file)
        self.vocab_size = (
            max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        )
        settings = _read_settings(file.with_name("tokenizer_config.json"))
        self.bos = self._id(_token_text(settings.get("bos_token")))
        self._eod = self._find_eod(eod, _token_text(settings.get("eos_token")))
        merges = find_merges_file(str(file))
        self.is_gpt2_format = merges is not None
        contents = file.read_bytes() + (b"" if merges is None else Path(merges).read_bytes())
        contents += f"eod={self._eod} special={add_special_tokens}".encode()
        self.fingerprint = f"huggingface-{hashlib.blake2b(contents, digest_size=16).hexdigest()}"

    def __reduce__(self) -> tuple[Any, ...]:
        eod = None if self._eod is None else self._tokenizer.id_to_token(self._eod)
        return _reopen, (self.path, eod, self._add_special_tokens)

    @property
    def eod(self) -> int:
        """Id of the end-of-document token.

        Raises:
            DataError: the files do not name one.
        """
        if self._eod is None:
            raise DataError(
                f"tokenizer.path={self.path}: the files name no end-of-document token. "
                "Set tokenizer.eod to the text of one of its tokens."
            )
        return self._eod

    def to_files(self) -> dict[str, bytes]:
        """Return the tokenizer as files {name: contents} that all libraries can read."""
        eod = None if self._eod is None else self._tokenizer.id_to_token(self._eod)
        return {
            "tokenizer.json": self._tokenizer.to_str(pretty=True).encode(),
            "tokenizer_config.json": _build_tokenizer_config(eod).encode(),
        }

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text."""
        ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=self._add_special_tokens
        ).ids
        return ids

    @cached_property
    def specials(self) -> Mapping[str, int]:
        """Ids of the special tokens by text."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text that contains special tokens; none are added."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_spans(self, text: str) -> Encoding:
        """Return the same ids, with the characters of each token.

        Where a tokenizer reports an empty span for a token of spaces, the span is the character
        before.
        """
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        spans = [
            (start, end) if start < end else (max(0, start - 1), max(1, end))
            for start, end in encoding.offsets
        ]
        return Encoding(encoding.ids, spans)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts; uses several threads unless
        TOKENIZERS_PARALLELISM=false."""
        batch = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=self._add_special_tokens
        )
        return [encoding.ids for encoding in batch]

    def encode_joined(self, texts: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the concatenated ids of all texts and the number of ids per text."""
        return join_ids(self.encode_batch(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids without special tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def num_bytes(self, ids: Sequence[int]) -> int:
        """Return the UTF-8 bytes of the text of the ids: exact for byte-level tokens, else of the
        decoded text."""
        if self._byte_lengths is None:
            return len(self.decode(ids).encode())
        return int(self._byte_lengths[np.asarray(ids, np.int64)].sum())

    def token_bytes(self) -> Sequence[bytes | None]:
        """Return the bytes of every id; None for special tokens, unused ids, and tokens of a
        byte-level tokenizer with other characters than those of bytes.

        Raises:
            DataError: the tokenizer is neither byte-level nor of pieces as in SentencePiece.
        """
        description = json.loads(self._tokenizer.to_str())
        decoders = _list_types(description["decoder"])
        added = {entry["id"]: entry for entry in description["added_tokens"]}
        if not decoders & {"ByteLevel", "ByteFallback", "Metaspace"}:
            raise DataError(
                f"tokenizer.path={self.path}: the bytes of its tokens are not known, because it "
                f"decodes with {', '.join(sorted(decoders)) or 'nothing'}. Use a model with a "
                "byte-level or SentencePiece tokenizer."
            )
        result: list[bytes | None] = [None] * self.vocab_size
        for text, token in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if token in added:
                result[token] = None if added[token]["special"] else text.encode()
            elif "ByteLevel" in decoders:
                values = [_BYTES_OF_CHARACTERS.get(character) for character in text]
                result[token] = bytes(byte for byte in values if byte is not None)
                if None in values:
                    result[token] = None
            else:
                is_byte = "ByteFallback" in decoders and _BYTE_PIECE.fullmatch(text) is not None
                result[token] = piece_bytes(text, is_byte=is_byte)
        return result

    @cached_property
    def _byte_lengths(self) -> NDArray[np.int64] | None:
        """Bytes per id of a byte-level tokenizer, whose tokens have one character per byte; else
        None."""
        description = json.loads(self._tokenizer.to_str())
        if (description["decoder"] or {}).get("type") != "ByteLevel":
            return None
        special = {entry["id"] for entry in description["added_tokens"] if entry["special"]}
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            lengths[number] = 0 if number in special else len(token)
        return lengths

    def _id(self, token: str | None) -> int | None:
        number: int | None = None if token is None else self._tokenizer.token_to_id(token)
        return number

    def _find_eod(self, wanted: str | None, named: str | None) -> int | None:
        if wanted is not None and self._id(wanted) is None:
            raise DataError(
                f"tokenizer.eod={wanted!r} is not a token of {self.path}. Set it to one of its "
                "tokens, such as "
                f"{[token for token in (named, *_EOD_NAMES) if self._id(token) is not None]}."
            )
        candidate_ids = (self._id(token) for token in (wanted, named, *_EOD_NAMES))
        return next((number for number in candidate_ids if number is not None), None)


def _map_characters() -> dict[str, int]:
    """Return the byte of each character of byte-level tokens: printable Latin-1 characters are
    their own bytes, the other bytes are characters from U+0100. Source: Radford et al. 2019, in the
    code of GPT-2 (bytes_to_unicode)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + number): byte for number, byte in enumerate(others)
    }


_BYTES_OF_CHARACTERS = _map_characters()
_BYTE_PIECE = re.compile("<0x[0-9A-F]{2}>")


def _list_types(decoder: Any) -> set[str]:  # JSON: null, a decoder, or a sequence of decoders
    """Return the types of the decoders in a tokenizer's description."""
    if not decoder:
        return set()
    if decoder["type"] == "Sequence":
        return {name for inner in decoder["decoders"] for name in _list_types(inner)}
    return {decoder["type"]}


def _reopen(path: str, eod: str | None, add_special_tokens: bool) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(path, eod=eod, add_special_tokens=add_special_tokens)


def find_tokenizer_file(path: str) -> Path:
    """Return the tokenizer.json of a folder, file name or hub name in the local cache; or a GPT-2
    vocab.json.

    Raises:
        DataError: there is none.
    """
    folder = Path(path)
    for file in (
        folder,
        folder / "tokenizer.json",
        *([folder / VOCABULARY] if (folder / MERGES).is_file() else []),
    ):
        if file.is_file():
            return file
    if folder.is_dir():
        names = sorted(entry.name for entry in folder.iterdir())[:8]
        raise DataError(
            f"tokenizer.path={path}: the folder has no tokenizer.json, only {names}. Use a folder "
            f"written by `megalith prepare --train-tokenizer` or by transformers' save_pretrained."
        )
    cached = _cached_file(path)
    if cached is None:
        raise DataError(
            f"tokenizer.path={path}: neither a folder nor a model in the local Hugging Face cache. "
            "Set it to a folder "
            f"with tokenizer.json, or run `hf download {path} tokenizer.json "
            "tokenizer_config.json` first."
        )
    return cached


def _cached_file(name: str) -> Path | None:
    """Return the path of a model's tokenizer in the hub's cache; nothing is downloaded."""
    from huggingface_hub import try_to_load_from_cache  # only for hub names: a slow import
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "tokenizer.json")
    except HFValidationError:
        return None  # not of the form owner/name
    return Path(file) if isinstance(file, str) else None


def _read(file: Path) -> Any:  # tokenizers.Tokenizer, which has no type annotations
    merges = find_merges_file(str(file))
    if merges is not None:
        return _read_gpt2(file, Path(merges))
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(
            f"tokenizer.path={file}: not a tokenizer that the installed tokenizers "
            f"{tokenizers.__version__} can read "
            f"({error}). Use another file, or install a newer version of tokenizers."
        ) from error


def _read_gpt2(vocabulary: Path, merges: Path) -> Any:  # tokenizers.Tokenizer
    """Return GPT-2's byte-level BPE of a vocabulary and its merges. Source: Radford et al. 2019,
    section 2.2."""
    kind = _read_settings(vocabulary.with_name("tokenizer_config.json")).get("tokenizer_class")
    if kind not in _GPT2_CLASSES:
        raise DataError(
            f"{vocabulary}: its tokenizer_class is {kind}, which is not defined by vocabulary and "
            "merges "
            "alone. Use the tokenizer.json that transformers' save_pretrained writes."
        )
    if differences := _find_non_gpt2_settings(vocabulary.parent):
        raise DataError(
            f"{vocabulary}: the folder also sets {', '.join(differences)}, which vocabulary and "
            "merges "
            "do not contain. Use the tokenizer.json that transformers' save_pretrained writes."
        )
    if not merges.is_file():
        raise DataError(
            f"tokenizer.path={vocabulary}: {merges.name} is missing in the same folder. Copy it "
            "there."
        )
    try:
        model = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # the library raises bare Exceptions
        raise DataError(
            f"tokenizer.path={vocabulary}: not a BPE vocabulary with {merges.name} "
            f"({error}). Use two files of the same tokenizer."
        ) from error
    tokenizer = _byte_level(model)
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _find_non_gpt2_settings(folder: Path) -> list[str]:
    """Return descriptions of the settings in a folder that would change the ids of GPT-2's
    tokenizer."""
    settings, added = (
        _read_settings(folder / "tokenizer_config.json"),
        _read_settings(folder / "added_tokens.json"),
    )
    options = [f"{name}=true" for name in _NON_GPT2_OPTIONS if settings.get(name)]
    named = _read_settings(folder / "special_tokens_map.json") | settings
    decoder = settings.get("added_tokens_decoder")
    entries = [value for name, value in named.items() if name.endswith("_token")]
    entries += named.get("additional_special_tokens") or []
    entries += [*added, *(decoder.values() if isinstance(decoder, dict) else [])]
    texts = dict.fromkeys(
        text for entry in entries if (text := _token_text(entry)) not in (None, END_OF_TEXT)
    )
    return options + [f"a token {text!r}" for text in texts]


def is_gpt2(folder: Path) -> bool:
    """Return whether a folder has the two files of a GPT-2 tokenizer, and no other tokenizer
    class."""
    has_files = all((folder / name).is_file() for name in (VOCABULARY, MERGES))
    return (
        has_files
        and _read_settings(folder / "tokenizer_config.json").get("tokenizer_class") in _GPT2_CLASSES
    )


def _byte_level(model: Any) -> Any:  # a model and a Tokenizer of the library
    """Return a byte-level tokenizer of a model, which encodes and decodes any text without loss."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _build_tokenizer_config(eod: str | None) -> str:
    """Return the contents of a tokenizer_config.json."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eod,
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps(
        {name: value for name, value in settings.items() if value is not None}, indent=2
    )


def _read_settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = storage.parse_json(storage.read_bytes(file, max_nbytes=storage.MAX_TEXT_NBYTES))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: not JSON ({error}). Use the file that came with the tokenizer."
        ) from error
    return settings if isinstance(settings, dict) else {}


def _token_text(entry: object) -> str | None:
    """Return the text of a token entry: a text, or an object with `content`."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def train_bpe(texts: Iterable[str], *, vocab_size: int, path: str) -> HuggingFaceTokenizer:
    """Train byte-level BPE on texts and write it to the folder `path`.

    `vocab_size` includes the 256 bytes and the end-of-document token. Small corpora may yield fewer
    ids.

    Raises:
        DataError: vocab_size is too small, or the folder is not writable.
    """
    if vocab_size < 258:
        raise DataError(
            f"vocab_size={vocab_size}: bytes and end-of-document token take 257 ids. Use 258 or "
            "more."
        )
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # fail before the training
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DataError(
            f"tokenizer {path}: cannot be written ({error}). Use a writable folder."
        ) from error
    tokenizer = _byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    _write_atomically(folder / "tokenizer_config.json", _build_tokenizer_config(END_OF_TEXT))
    _write_atomically(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    return HuggingFaceTokenizer(path)


def _write_atomically(file: Path, text: str) -> None:
    temporary = file.with_name(f"{file.name}.writing")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
