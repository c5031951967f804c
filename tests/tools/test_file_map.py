"""The map of the code is made from the files, and a README that differs is refused."""

from pathlib import Path

import pytest

from tools.file_map import build_map, first_sentence, insert_map, problems


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for path, text in {
        "megalith/__init__.py": '"""The package."""',
        "megalith/errors.py": '"""Errors for people: text, not traces. More."""',
        "megalith/plan/__init__.py": "",
        "megalith/plan/grid.py": '"""The rank grid\nover two lines.\n\nDetails."""',
        "megalith/cli/__init__.py": '"""Commands."""',
        "megalith/cli/train.py": '"""Train."""',
    }.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_the_map_has_a_line_per_file_in_the_order_of_the_rows(root: Path) -> None:
    assert build_map(root / "megalith").splitlines() == [
        "**[megalith/](megalith)** The package.",
        "",
        "- [`errors.py`](megalith/errors.py): Errors for people: text, not traces.",
        "",
        "**[megalith/cli/](megalith/cli)** Commands.",
        "",
        "- [`cli/train.py`](megalith/cli/train.py): Train.",
        "",
        "**[megalith/plan/](megalith/plan)**",
        "",
        "- [`plan/grid.py`](megalith/plan/grid.py): The rank grid over two lines.",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('"""Ends here. Not here."""', "Ends here."),
        (
            '"""Keeps e.g. this, i.e. that and .bin/.idx. More."""',
            "Keeps e.g. this, i.e. that and .bin/.idx.",
        ),
        ('"""Asks: why? Because."""', "Asks: why?"),
        ('"""No stop"""', "No stop"),
        ("x = 1", ""),
    ],
)
def test_the_first_sentence_ends_where_a_reader_would_stop(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


def test_a_readme_that_differs_a_missing_one_and_a_silent_file_are_named(root: Path) -> None:
    assert any("no such file" in line for line in problems(root))
    (root / "README.md").write_text("no markers")
    assert any("<!-- map -->" in line for line in problems(root))
    (root / "README.md").write_text("<!-- map -->\nold\n<!-- /map -->\n")
    assert any("not current. Run: make fmt" in line for line in problems(root))
    assert any(
        "megalith/plan/__init__.py: opens without a docstring" in line for line in problems(root)
    )


def test_a_readme_with_the_map_inserted_is_current(root: Path) -> None:
    (root / "megalith/plan/__init__.py").write_text('"""Plans."""')
    text = insert_map(
        "# Title\n<!-- map -->\nold\n<!-- /map -->\nend\n", build_map(root / "megalith")
    )
    (root / "README.md").write_text(text)
    assert text.startswith("# Title\n")
    assert text.endswith("<!-- /map -->\nend\n")
    assert "old" not in text
    assert problems(root) == []
