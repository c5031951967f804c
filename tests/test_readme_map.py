"""README's map of the code has one true line per file."""

from tools.file_map import ROOT, files_of, problems


def test_the_map_in_the_readme_is_current_and_every_file_says_what_it_is() -> None:
    assert problems(ROOT) == []


def test_the_map_names_every_file_once() -> None:
    readme = (ROOT / "README.md").read_text()
    paths = [path.relative_to(ROOT) for path in files_of(ROOT / "megalith")]
    counts = {
        path.as_posix(): readme.count(f"]({path.as_posix()}):")
        for path in paths
        if path.name != "__init__.py"
    }
    assert {path: count for path, count in counts.items() if count != 1} == {}
