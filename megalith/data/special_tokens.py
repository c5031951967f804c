"""Encoding of text that contains special tokens, as chat templates render it: ids and character
spans."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class TokenSpans(NamedTuple):
    """Ids of a text, and the characters [start, end) of each token; a character may belong to
    several tokens."""

    ids: list[int]
    offsets: list[tuple[int, int]]


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
    text: str, specials: Mapping[str, int], encode: Callable[[str], TokenSpans]
) -> TokenSpans:
    """Return ids and character span of each token; the spans of `encode` are relative to its
    argument.

    >>> def encode(text):
    ...     return TokenSpans([ord(text)], [(0, 1)])
    >>> encode_with_special_tokens("a<end>b", {"<end>": 256}, encode)
    TokenSpans(ids=[97, 256, 98], offsets=[(0, 1), (1, 6), (6, 7)])
    """
    result, offset = TokenSpans([], []), 0
    for part in _parts(text, specials):
        ids, offsets = (
            TokenSpans([specials[part]], [(0, len(part))]) if part in specials else encode(part)
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
