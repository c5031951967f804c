"""Pipeline layout strings: `Et*3|(tt|)*2tL` has the embedding and three layers on its first stage.

layout    meaning of each character
E t m L   embedding, transformer layer, MTP layer, loss
|         ends a stage; a stage without items passes its input on
X*n       X repeated n times, for an item, a bar or a group
( )       a group; groups can be nested
, space   ignored
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from megalith.config.suggest import did_you_mean
from megalith.errors import PlanError

FIELD = "parallel.pipeline.layout"
ITEMS = "EtmL"
MOST_ITEMS = 1 << 16
"""Limit on the items and bars of one layout: more than any pipeline has."""

SHOWN = 72
"""Characters of a long layout that an error message shows."""


class Item(NamedTuple):
    """One item of an expanded layout and its position in the text."""

    kind: str
    position: int


def parse_layout(text: str) -> list[list[Item]]:
    """Return the items of each stage.

    Raises:
        PlanError: the layout is malformed; the message has a caret under the position.
    """
    groups: list[list[Item]] = [[]]
    opened: list[int] = []
    last: list[Item] = []  # what a following * repeats
    index = 0
    while index < len(text):
        start, character, index = index, text[index], index + 1
        if character in ", ":
            continue
        if character == "(":
            opened.append(start)
            groups.append([])
            last = []
        elif character == "*":
            count, index = _count(text, start, last, room=MOST_ITEMS - sum(map(len, groups)))
            groups[-1] += last * (count - 1)
            last = []
        elif character in ITEMS or character == "|":
            last = [Item(character, start)]
            groups[-1] += last
        elif character == ")" and opened:
            opened.pop()
            last = groups.pop()
            groups[-1] += last
        else:
            raise PlanError(_unknown(text, start))
    if opened:
        raise PlanError(
            f"{format_layout_error(text, opened[-1], 'this ( is never closed')}Use a ) for each (."
        )
    return _stages(groups[0])


def format_layout_error(text: str, position: int, what: str) -> str:
    """Return an error text with a caret under one character of the layout; the fix follows on the
    next line."""
    first = max(0, position - SHOWN // 2) if len(text) > SHOWN else 0
    shown = "".join(
        " " if character.isspace() else character for character in text[first : first + SHOWN]
    )
    return (
        f"{FIELD}={text}: {what}, at character {position + 1}:\n    {shown}\n    "
        f"{' ' * (position - first)}^\n"
    )


def show_layout(stages: Sequence[str]) -> str:
    """Return the shortest layout string of stages given as items, such as ["Ett", "tt", "tt", "L"].

    >>> show_layout(["Ettt", "tt", "tt", "m", "L"])
    'Et*3|tt|tt|m|L'
    """
    parts = []
    for items, run in groupby(stages[:-1]):
        stage = f"{_show_items(items)}|"
        count = sum(1 for _ in run)
        repeated = f"({stage})*{count}" if len(stage) > 1 else f"|*{count}"
        parts.append(repeated if len(repeated) < len(stage) * count else stage * count)
    return "".join(parts) + _show_items(stages[-1])


def _show_items(items: str) -> str:
    runs = [(kind, len(list(run))) for kind, run in groupby(items)]
    return "".join(f"{kind}*{count}" if count > 2 else kind * count for kind, count in runs)


def _stages(items: Sequence[Item]) -> list[list[Item]]:
    stages: list[list[Item]] = [[]]
    for item in items:
        if item.kind == "|":
            stages.append([])
        else:
            stages[-1].append(item)
    return stages


def _count(text: str, star: int, repeated: Sequence[Item], *, room: int) -> tuple[int, int]:
    """Return the number after a star, and the index after it."""
    if not repeated:
        what = "there is nothing before this * to repeat"
        raise PlanError(f"{format_layout_error(text, star, what)}Use it as in t*3 or (tt|)*2.")
    first = star + 1
    while text[first : first + 1] == " ":
        first += 1
    stop = first
    while stop < len(text) and text[stop] in "0123456789":
        stop += 1
    digits = text[first:stop]
    if not digits or int(digits[:9]) == 0:
        raise PlanError(
            f"{format_layout_error(text, star, 'this * needs a number of at least 1 after it')}"
            "Use it as in "
            "t*3."
        )
    if len(digits) > 9 or len(repeated) * int(digits) > room:
        what = f"{digits} times are more than {MOST_ITEMS} items"
        raise PlanError(f"{format_layout_error(text, star, what)}Use a smaller number.")
    return int(digits), stop


def _unknown(text: str, position: int) -> str:
    character = text[position]
    if character == ")":
        return (
            f"{format_layout_error(text, position, 'this ) has no matching (')}Use a ( for each )."
        )
    fix = "Use only E (embedding), t (layer), m (multi-token prediction), L (loss), |, *n and ( )"
    what = format_layout_error(text, position, f"{character!r} is not an item")
    return f"{what}{fix}.{did_you_mean(character, ITEMS)}"
