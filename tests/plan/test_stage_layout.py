"""Layout strings: what they mean, that printing and reading are inverse, and a caret under every
mistake."""

import random

import pytest

from megalith.errors import PlanError
from megalith.plan.stages import MOST_ITEMS, parse_layout, show_layout
from tests.cases import loop_over


def kinds(text: str) -> list[str]:
    return ["".join(item.kind for item in stage) for stage in parse_layout(text)]


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("EttL", ["EttL"]),
        ("E|tt|ttt||L", ["E", "tt", "ttt", "", "L"]),
        ("Et*3|(tt|)*2,m|L", ["Ettt", "tt", "tt", "m", "L"]),
        ("E, t * 2 | L", ["Ett", "L"]),
        ("E|((t|)*2tt|)*2L", ["E", "t", "t", "tt", "t", "t", "tt", "L"]),
        ("E|*3L", ["E", "", "", "L"]),
        ("(Et)*1|()L", ["Et", "L"]),
        ("", [""]),
    ],
)
def test_layout_text_describes_the_stages(text: str, stages: list[str]) -> None:
    assert kinds(text) == stages


def test_61_layers_and_a_prediction_layer_on_16_ranks_with_two_chunks() -> None:
    stages = kinds("Et*3|(tt|)*29,m|L")
    assert len(stages) == 32
    assert "".join(stages).count("t") == 61
    assert stages[0] == "Ettt" and stages[1:30] == ["tt"] * 29 and stages[30:] == ["m", "L"]


def test_every_item_has_its_position_in_the_text() -> None:
    assert [[item.position for item in stage] for stage in parse_layout("Et*2|(t |)*2L")] == [
        [0, 1, 1],
        [6],
        [6],
        [12],
    ]


@loop_over("seed", range(50))
def test_printed_layout_is_parsed_to_the_same_layout(seed: int) -> None:
    draw = random.Random(seed)
    stages = [draw.choice(["", "t", "tt", "E", "t" * 9, "mL"]) for _ in range(draw.randint(1, 4))]
    stages = [stage for stage in stages for _ in range(draw.randint(1, 5))]
    text = show_layout(stages)
    assert kinds(text) == stages
    assert show_layout(kinds(text)) == text
    assert len(text) <= len("|".join(stages))


@pytest.mark.parametrize(
    ("text", "column", "what", "fix"),
    [
        ("Ett|tx|L", 5, "'x' is not an item", "Use only E (embedding)"),
        ("ETt|L", 1, "'T' is not an item", "Did you mean t?"),
        ("Et|(tt|L", 3, "this ( is never closed", "Use a ) for each ("),
        ("Et|tt|)L", 6, "this ) has no matching (", "Use a ( for each )"),
        ("*3tL", 0, "there is nothing before this * to repeat", "Use it as in t*3"),
        ("Et*3*2L", 4, "there is nothing before this * to repeat", "Use it as in t*3"),
        ("E()*3L", 3, "there is nothing before this * to repeat", "Use it as in t*3"),
        ("Et*|L", 2, "this * needs a number of at least 1 after it", "Use it as in t*3"),
        ("Et*0L", 2, "this * needs a number of at least 1 after it", "Use it as in t*3"),
        ("Et*-1L", 2, "this * needs a number of at least 1 after it", "Use it as in t*3"),
        (
            "E((t*9999)*9999)*9L",
            10,
            f"9999 times are more than {MOST_ITEMS} items",
            "Use a smaller number",
        ),
        ("Et*99999999999L", 2, "99999999999 times are more", "Use a smaller number"),
    ],
)
def test_caret_marks_the_syntax_error(text: str, column: int, what: str, fix: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_layout(text)
    first, shown, caret, advice = str(caught.value).split("\n")
    assert first == f"parallel.pipeline.layout={text}: {first.split(': ', 1)[1]}"
    assert what in first and f"at character {column + 1}:" in first
    assert shown == f"    {text}"
    assert caret == " " * (4 + column) + "^"
    assert fix in advice


def test_a_long_layout_is_shown_around_the_mistake() -> None:
    with pytest.raises(PlanError) as caught:
        parse_layout("E" + "t|" * 100 + "x" + "t|" * 100 + "L")
    _, shown, caret, _ = str(caught.value).split("\n")
    assert len(shown) < 80 and shown[caret.index("^")] == "x"


@loop_over("seed", range(200))
def test_any_text_is_parsed_or_rejected_with_a_message(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("EtmL||()*0123, \nx") for _ in range(draw.randint(0, 30)))
    try:
        stages = parse_layout(text)
    except PlanError as error:
        stages, message = [[]], str(error)
    else:
        message = "Use "
    assert stages and "Use " in message
