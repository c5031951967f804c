"""Tests of megalith/megatron/shell.py."""

import pytest

from megalith.errors import ConfigError
from megalith.megatron.shell import ArrayLiteral, Operator, Word, WordPart, parts_of, tokens


def read(text: str) -> list[object]:
    """Tokens in short: words as texts (variables as <NAME>), operators as themselves,
    arrays as lists."""
    return [_short(token) for token in tokens(text)]


def _short(token: object) -> object:
    if isinstance(token, Operator):
        return token.text
    if isinstance(token, ArrayLiteral):
        return [token.name, token.append, *(_short(word) for word in token.words)]
    assert isinstance(token, Word)
    return "".join(part.text if part.kind == "text" else f"<{part.text}>" for part in token.parts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a  b\tc", ["a", "b", "c"]),
        ("a \\\n  b", ["a", "b"]),
        ("a\\\nb", ["ab"]),
        ("a # comment\nb#c", ["a", "\n", "b#c"]),
        ("'a b' \"c 'd'\" e\\ f", ["a b", "c 'd'", "e f"]),
        ("a'b'\"c\"", ["abc"]),
        ('"x\\"y\\$z"', ['x"y$z']),
        ("'$A'", ["$A"]),
        ("$A ${B} ${C:-d e} x$D.y", ["<A>", "<B>", "<C:-d e>", "x<D>.y"]),
        ("$10", ["<1>0"]),
        ("${A:-${B:-c}}", ["<A:-${B:-c}>"]),
        ("$((A * 2)) $(ls -l) `pwd`", ["<A * 2>", "<$(ls -l)>", "<`pwd`>"]),
        ("a && b || c; d | e", ["a", "&&", "b", "||", "c", ";", "d", "|", "e"]),
        ("A=(x # why\n 'y z'\n)", [["A", False, "x", "y z"]]),
        ("A+=( $B )", [["A", True, "<B>"]]),
        ("a 2>&1", ["a", "2", ">&", "1"]),
        ("cat <<EOF\n$((broken\nEOF\nb", ["cat", "<<", "\n", "\n", "b"]),
        ("a\r\nb", ["a", "\n", "b"]),
        ("echo $", ["echo", "$"]),
    ],
)
def test_a_script_is_cut_into_words(text: str, expected: list[object]) -> None:
    assert read(text) == expected


def test_pieces_know_whether_they_are_quoted_and_words_their_line() -> None:
    words = [token for token in tokens('\na\n\n$A"$B"') if isinstance(token, Word)]
    assert [word.line for word in words] == [2, 4]
    assert words[1].parts == (
        WordPart("variable", "A", False),
        WordPart("text", "", True),
        WordPart("variable", "B", True),
    )


def test_a_default_is_read_as_between_quotes() -> None:
    assert [part.text for part in parts_of("a b$C")] == ["a", " ", "b", "C"]
    assert all(part.quoted for part in parts_of("a b$C"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('\na "b', 'line 2: the quote " is not closed'),
        ("a 'b", "line 1: expected ' later"),
        ("A=(b", r"line 1: the array that \( opens is not closed"),
        ("${A", r"\${ is not closed"),
        ("$((1", r"expected \)\) later"),
        ("`a", "expected ` later"),
    ],
)
def test_what_is_not_closed_is_named_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)
