"""Text in which special tokens are written out, as chat templates make it: its ids, and where in it
each token lies."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np


class TokenSpans(NamedTuple):
    """The ids of a text, and the characters [start, end) that each stands for: at least one, and
    one may have several tokens."""

    ids: list[int]
    places: list[tuple[int, int]]


def encode_parts(
    text: str, specials: Mapping[str, int], encode: Callable[[str], Sequence[int]]
) -> list[int]:
    """Ids of a text: those of the special tokens where they stand in it, and `encode` of what lies
    between.

    >>> encode_parts("a<end>b", {"<end>": 256}, lambda text: list(text.encode()))
    [97, 256, 98]
    """
    ids: list[int] = []
    for part in _parts(text, specials):
        ids += [specials[part]] if part in specials else encode(part)
    return ids


def spans_of_parts(
    text: str, specials: Mapping[str, int], encode: Callable[[str], TokenSpans]
) -> TokenSpans:
    """The same with the place of each token; `encode` counts from the beginning of what it is
    given.

    >>> spans_of_parts("a<end>b", {"<end>": 256}, lambda text: Spans([ord(text)], [(0, 1)]))
    Spans(ids=[97, 256, 98], places=[(0, 1), (1, 6), (6, 7)])
    """
    found, first = TokenSpans([], []), 0
    for part in _parts(text, specials):
        ids, places = (
            TokenSpans([specials[part]], [(0, len(part))]) if part in specials else encode(part)
        )
        found.ids.extend(ids)
        found.places.extend((first + start, first + end) for start, end in places)
        first += len(part)
    return found


def places_of_bytes(text: str, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Where tokens lie whose UTF-8 bytes are the text's, one after the other; `lengths`: bytes of
    each.

    >>> places_of_bytes("aé", [1, 1, 1])
    [(0, 1), (1, 2), (1, 2)]
    """
    characters = np.repeat(
        np.arange(len(text)), [len(character.encode()) for character in text]
    ).tolist()
    borders = np.cumsum([0, *lengths]).tolist()
    return [(characters[start], characters[end - 1] + 1) for start, end in pairwise(borders)]


def _parts(text: str, specials: Mapping[str, int]) -> Iterator[str]:
    """Special tokens and what lies between; of two that begin alike the longer one."""
    longest_first = sorted(specials, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if specials else [text]
    return (part for part in parts if part)
