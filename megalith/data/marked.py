"""Text in which special tokens are written out, as chat templates make it: cut into special tokens and the rest."""

import re
from collections.abc import Callable, Mapping, Sequence


def encode_parts(text: str, specials: Mapping[str, int], encode: Callable[[str], Sequence[int]]) -> list[int]:
    """Ids of a text: those of the special tokens where they stand in it, and `encode` of what lies between.

    >>> encode_parts("a<end>b", {"<end>": 256}, lambda text: list(text.encode()))
    [97, 256, 98]
    """
    if not specials:
        return list(encode(text))
    longest_first = sorted(specials, key=len, reverse=True)
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text):
        if part:
            ids += [specials[part]] if part in specials else encode(part)
    return ids
