"""Megatron's words for some of the layers: a number that counts to every so-manieth, or a list of
ones and zeros."""

import ast

from megalith.megatron.draft import Draft

LONGEST = 10_000
"""Layers of a list that are written out; nobody has more."""


def pattern_of(draft: Draft, flag: str) -> list[bool] | None:
    """The layers that an argument marks, as a pattern that repeats; None where it is left out or
    cannot be read."""
    value = draft.arguments.value(flag)
    if value is None:
        return None
    text, layers = str(value), draft.number("--num-layers")
    if text.isdecimal() and int(text) > 0:
        every = int(text)
        return [False] * (every - 1) + [True] if every <= layers else [False]
    marks = _marks(text)
    if marks is None or len(marks) != layers:
        draft.problems.append(
            f"{flag} {text} must be a number above 0, or a list of {layers} ones and zeros, one "
            f"for each layer. Use {flag} 4 for every fourth layer."
        )
        return None
    return _shortest(marks)


def _marks(text: str) -> list[bool] | None:
    """A list such as ([0]*3+[1])*4, of which sums and products are computed and nothing else."""
    try:
        values = _value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):
        return None
    return (
        [one == 1 for one in values] if isinstance(values, list) and set(values) <= {0, 1} else None
    )


def _value(node: ast.expr) -> int | list[int]:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            numbers = [_value(element) for element in elements]
            if all(isinstance(number, int) for number in numbers):
                return [number for number in numbers if isinstance(number, int)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _value(left), _value(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            first, second = _value(left), _value(right)
            if (
                isinstance(first, list)
                and isinstance(second, int)
                and len(first) * second <= LONGEST
            ):
                return first * second
    raise ValueError(f"{ast.unparse(node)} must be ones and zeros in a list")


def _shortest(marks: list[bool]) -> list[bool]:
    """The shortest pattern that repeats to this one.

    >>> _shortest([False, True, False, True]), _shortest([True, False, True])
    ([False, True], [True, False])
    """
    lengths = range(1, len(marks) + 1)
    return next(
        marks[:n]
        for n in lengths
        if all(one == marks[place % n] for place, one in enumerate(marks))
    )
