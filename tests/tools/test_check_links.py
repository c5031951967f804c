"""Broken links are found, working ones are left alone."""

from pathlib import Path

import pytest

from tools.check_links import anchors, broken, pages_of, slug_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "megalith").mkdir()
    (tmp_path / "megalith" / "grid.py").write_text("")
    (tmp_path / "docs" / "tour.md").write_text(
        "# The tour\n\n## Step 1: `build`\n\n## Twice\n\n## Twice\n"
    )
    return tmp_path


def judged(root: Path, text: str) -> list[str]:
    page = root / "docs" / "page.md"
    page.write_text(text)
    return broken(page, root)


@pytest.mark.parametrize(
    "text",
    [
        "[tour](tour.md) and [code](../megalith/grid.py), [folder](../megalith)",
        "[from the root](/docs/tour.md)",
        "[step](tour.md#step-1-build) [second](tour.md#twice-1) [here](#top)\n\n# Top",
        "[site](https://example.org/nowhere) [mail](mailto:a@example.org)",
        '[titled](tour.md "The tour") [![image](../megalith/grid.py)](tour.md)',
        "```\n[in a block](nowhere.md)\n```\n`[in a quote](nowhere.md)`",
        "[by name][tour]\n\n[tour]: tour.md",
        "`megalith/grid.py`, `docs/tour.md`, `runs/x/config.yaml`",
        "[line](../megalith/grid.py#L12)",
    ],
)
def test_valid_link_is_accepted(root: Path, text: str) -> None:
    assert judged(root, text) == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("see\n[x](nowhere.md)", "docs/page.md:2: (nowhere.md) leads nowhere"),
        ("![x](plot.png)", "(plot.png) leads nowhere"),
        ("[x]: nowhere.md", "(nowhere.md) leads nowhere"),
        ('<img src="nowhere.png">', "(nowhere.png) leads nowhere"),
        ("[x](tour.md#missing)", "names a heading that tour.md does not have"),
        ("[x](#missing)", "names a heading that page.md does not have"),
        ("[x](../../etc/passwd)", "leads out of the repository"),
        ("moved: `megalith/mesh.py`", "`megalith/mesh.py` is no file of this repository"),
        ("```\ncode\n```\n[x](nowhere.md)", "docs/page.md:4:"),
    ],
)
def test_broken_link_is_reported_with_its_line(root: Path, text: str, what: str) -> None:
    result = judged(root, text)
    assert len(result) == 1
    assert what in result[0]


def test_headings_have_the_anchors_of_the_rendered_page() -> None:
    assert anchors("# A b\n\n## A b\n\n```\n# no\n```\n\n<a id='own'></a>") == {
        "a-b",
        "a-b-1",
        "own",
    }
    assert slug_of("[Linked](x.md) & more") == "linked--more"


def test_pages_of_an_environment_or_a_run_are_not_ours(root: Path) -> None:
    for folder in (".venv", "runs", ".venv-ci"):
        (root / folder).mkdir()
        (root / folder / "page.md").write_text("")
    assert [page.name for page in pages_of(root)] == ["tour.md"]
