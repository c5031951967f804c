"""Layout strings: pipeline stages as text. `Et*3|(tt|)*2tL` has the embedding and three layers on
its first stage.

layout    what each character stands for
E t m L   embedding, transformer layer, multi-token prediction layer, loss
|         ends a stage; nothing between two bars is a stage that only hands on
X*n       n of what stands before: one item, a bar, or a group
( )       a group; groups may hold groups
, space   nothing
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from megalith.config.suggest import did_you_mean
from megalith.errors import PlanError

FIELD = "parallel.pipeline.layout"
ITEMS = "EtmL"
MOST_ITEMS = 1 << 16
"""Of one layout, bars counted too: more than any pipeline has, and few enough to write out."""

SHOWN = 72
"""Characters of a long layout around the place that an error points at."""


class Item(NamedTuple):
    """One character of a layout after everything has been written out, and where in the text it
    came from."""

    kind: str
    position: int


def parse_layout(text: str) -> list[list[Item]]:
    """The items of each stage.

    Raises:
        PlanError: what cannot be read, with a caret under the place.
    """
    groups: list[list[Item]] = [[]]
    opened: list[int] = []
    last: list[Item] = []  # what a star would repeat
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
        raise PlanError(f"{mistake(text, opened[-1], 'this ( is never closed')}Use a ) for each (.")
    return _stages(groups[0])


def mistake(text: str, position: int, what: str) -> str:
    """What is wrong, with a caret under one character of the layout; the way out follows on a line
    of its own."""
    first = max(0, position - SHOWN // 2) if len(text) > SHOWN else 0
    shown = "".join(
        " " if character.isspace() else character for character in text[first : first + SHOWN]
    )
    return (
        f"{FIELD}={text}: {what}, at character {position + 1}:\n    {shown}\n    "
        f"{' ' * (position - first)}^\n"
    )


def show_layout(stages: Sequence[str]) -> str:
    """The shortest usual spelling of stages given as items, such as ["Ett", "tt", "tt", "L"]; reads
    back as the same.

    >>> show_layout(["Ettt", "tt", "tt", "m", "L"])
    'Et*3|(tt|)*2m|L'
    """
    parts = []
    for items, run in groupby(stages[:-1]):
        stage = f"{_show_items(items)}|"
        many = sum(1 for _ in run)
        repeated = f"({stage})*{many}" if len(stage) > 1 else f"|*{many}"
        parts.append(repeated if len(repeated) < len(stage) * many else stage * many)
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
    """The number after a star, and where the text goes on."""
    if not repeated:
        what = "there is nothing before this * to repeat"
        raise PlanError(f"{mistake(text, star, what)}Use it as in t*3 or (tt|)*2.")
    first = star + 1
    while text[first : first + 1] == " ":
        first += 1
    stop = first
    while stop < len(text) and text[stop] in "0123456789":
        stop += 1
    digits = text[first:stop]
    if not digits or int(digits[:9]) == 0:
        raise PlanError(
            f"{mistake(text, star, 'this * needs a number of at least 1 after it')}Use it as in "
            "t*3."
        )
    if len(digits) > 9 or len(repeated) * int(digits) > room:
        what = f"{digits} times are more than {MOST_ITEMS} items"
        raise PlanError(f"{mistake(text, star, what)}Use a smaller number.")
    return int(digits), stop


def _unknown(text: str, position: int) -> str:
    character = text[position]
    if character == ")":
        return f"{mistake(text, position, 'this ) closes no (')}Use a ( for each )."
    fix = "Use only E (embedding), t (layer), m (multi-token prediction), L (loss), |, *n and ( )"
    what = mistake(text, position, f"{character!r} is no item")
    return f"{what}{fix}.{did_you_mean(character, ITEMS)}"
