"""docs/code_map.md has one line per module; README stays short."""

from tools.file_map import PAGE, ROOT, files_of, problems

MAX_README_BYTES = 10 * 1024


def test_code_map_is_current_and_every_module_has_a_docstring() -> None:
    assert problems(ROOT) == []


def test_code_map_names_every_module_once() -> None:
    text = (ROOT / PAGE).read_text()
    paths = [path.relative_to(ROOT).as_posix() for path in files_of(ROOT / "megalith")]
    counts = {
        path: text.count(f"](../{path}):") for path in paths if not path.endswith("__init__.py")
    }
    assert {path: count for path, count in counts.items() if count != 1} == {}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= MAX_README_BYTES
