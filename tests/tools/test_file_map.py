"""The code map is built from the modules, and a page that differs is reported."""

from pathlib import Path

import pytest

from tools.file_map import PAGE, build_map, build_page, first_sentence, problems


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


def test_map_has_a_line_per_module_in_import_order(root: Path) -> None:
    assert build_map(root / "megalith").splitlines() == [
        "**[megalith/](../megalith)** The package.",
        "",
        "- [`errors.py`](../megalith/errors.py): Errors for people: text, not traces.",
        "",
        "**[megalith/cli/](../megalith/cli)** Commands.",
        "",
        "- [`cli/train.py`](../megalith/cli/train.py): Train.",
        "",
        "**[megalith/plan/](../megalith/plan)**",
        "",
        "- [`plan/grid.py`](../megalith/plan/grid.py): The rank grid over two lines.",
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
def test_first_sentence_ends_at_the_first_full_stop(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


def test_outdated_page_missing_page_and_missing_docstring_are_reported(root: Path) -> None:
    assert f"{PAGE}: not current. Run: make fmt" in problems(root)
    (root / "docs").mkdir()
    (root / PAGE).write_text("old")
    assert f"{PAGE}: not current. Run: make fmt" in problems(root)
    assert any(
        "megalith/plan/__init__.py: begins without a docstring" in line for line in problems(root)
    )


def test_written_page_is_current(root: Path) -> None:
    (root / "megalith/plan/__init__.py").write_text('"""Plans."""')
    (root / "docs").mkdir()
    (root / PAGE).write_text(build_page(root))
    assert problems(root) == []
