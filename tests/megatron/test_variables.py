"""Tests of megalith/megatron/variables.py."""

import pytest

from megalith.megatron.shell import ArrayLiteral, Word, tokens
from megalith.megatron.variables import Variables, names_in


def word(text: str) -> Word | ArrayLiteral:
    """One word or array, as it stands in a script."""
    (token,) = tokens(text)
    assert isinstance(token, Word | ArrayLiteral)
    return token


def variables(**values: str) -> Variables:
    """Variables that a script set, in order; a value like (a b) is an array."""
    found = Variables({"1": "first", "FIXED": "outside"})
    for name, value in values.items():
        literal = word(f"{name}={value}" if value.startswith("(") else value)
        found.assign(name, literal, append=False, active=True, line=1)
    return found


HELD = {"A": "x", "TWO": "'y z'", "EMPTY": "''", "N": "6", "LIST": "(a 'b c' d)", "NONE": "()"}


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("$A", ["x"]),
        ("$TWO", ["y", "z"]),
        ('"$TWO"', ["y z"]),
        ("-$TWO-", ["-y", "z-"]),
        ("$EMPTY", []),
        ('"$EMPTY"', [""]),
        ("a${EMPTY}b", ["ab"]),
        ("$LIST", ["a"]),
        ("${LIST[1]}", ["b", "c"]),
        ('"${LIST[@]}"', ["a", "b c", "d"]),
        ("${LIST[@]}", ["a", "b", "c", "d"]),
        ('"${NONE[@]}"', []),
        ("${UNSET}", ["${UNSET}"]),
        ("$UNSET/x", ["${UNSET}/x"]),
        ("${UNSET:-d}", ["d"]),
        ('${UNSET:-"d e"}', ["d", "e"]),
        ("${EMPTY:-d}", ["d"]),
        ("${EMPTY-d}", []),
        ("${A:-d}", ["x"]),
        ("${UNSET:-$A}", ["x"]),
        ("${A:+d}", ["d"]),
        ("${UNSET:+d}", []),
        ("$1", ["first"]),
        ("$2", ["${2}"]),
        ("$@", ["first"]),
        ("$#", ["1"]),
        ("$((N * 2 + 1))", ["13"]),
        ("$(($N/4))", ["1"]),
        ("$((N % 4 - 3))", ["-1"]),
        ("$((UNSET * 2))", ["$((UNSET * 2))"]),
        ("$((N / 0))", ["$((N / 0))"]),
        ("$(date)", ["$(date)"]),
        ("${A%x}", ["${A%x}"]),
        ("${#A}", ["${#A}"]),
        ("$FIXED", ["outside"]),
    ],
)
def test_a_word_is_filled_in_as_a_shell_would(text: str, filled: list[str]) -> None:
    literal = word(text)
    assert isinstance(literal, Word)
    assert variables(**HELD).fill(literal) == filled


def test_variables_from_outside_stay() -> None:
    held = variables()
    held.assign("FIXED", word("script"), append=False, active=True, line=1)
    assert held.lookup("FIXED", None) == ["outside"]


def test_texts_and_arrays_grow() -> None:
    held = variables(**HELD)
    held.assign("A", word('"$A y"'), append=False, active=True, line=1)
    held.assign("A", word("z"), append=True, active=True, line=1)
    held.assign("LIST", word("LIST+=($A)"), append=True, active=True, line=1)
    assert held.values["A"] == ["x yz"]
    assert held.values["LIST"] == ["a", "b c", "d", "x", "yz"]


def test_what_a_condition_may_have_changed_is_not_relied_on_nor_what_is_made_of_it() -> None:
    held = variables(**HELD)
    held.assign("A", word("other"), append=False, active=None, line=7)
    held.assign("B", word("$A"), append=False, active=True, line=9)
    held.assign("N", word("6"), append=False, active=None, line=11)  # the value that it has anyway
    assert held.unsure == {"A": 7, "B": 7}
    held.assign("A", word("sure"), append=False, active=True, line=12)
    assert held.unsure == {"B": 7}


@pytest.mark.parametrize(
    ("test", "answer"),
    [
        ("[ $A = x ]", True),
        ('[[ "$A" == "y" ]]', False),
        ("[[ $A != y ]]", True),
        ("[[ $A == x* ]]", True),
        ('[ -z "$EMPTY" ]', True),
        ('[ -n "$EMPTY" ]', False),
        ("[[ ! -n $A ]]", False),
        ("[[ -n $UNSET ]]", None),
        ("[ $N -gt 5 ]", True),
        ("[ $N -eq 5 ]", False),
        ("test $N -le 6", True),
        ("[ $A -eq 5 ]", None),
        ("[ -f file ]", None),
        ("[[ $A =~ x.* ]]", None),
        ("[ $UNSET = x ]", None),
        ("[[ $1 == first ]]", True),
    ],
)
def test_a_question_is_answered_when_its_words_are_known(test: str, answer: bool | None) -> None:
    words = [token for token in tokens(test) if isinstance(token, Word)]
    assert variables(**HELD).test(words) is answer


def test_the_variables_of_a_word_are_found() -> None:
    literal = word('a$B"${C:-d}${E[@]}"')
    assert isinstance(literal, Word)
    assert names_in(literal) == ["B", "C", "E"]
