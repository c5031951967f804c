"""Code map of the README: one line per module with the first sentence of its docstring.

usage: file_map.py [--write | --check]

Without an option it prints the map. `--write` writes it to README.md between `<!-- map -->` and
`<!-- /map -->`; `--check` exits with 1 if README.md is not current, or a docstring has no sentence.
"""

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START, STOP = "<!-- map -->", "<!-- /map -->"
ROWS = (
    *("cli", "verify", "rl", "train", "serve", "infer", "posttrain", "estimate", "hf"),
    *("models", "rules", "testing", "checkpoint", "data", "launch", "nn", "optim"),
    *("parallel", "observe", "precision", "kernels", "megatron", "plan", "recipes", "config"),
)
"""Folders in the order of the import rows, top first; anything else follows."""


def first_sentence(text: str) -> str:
    """The first sentence of a file's docstring, on one line; "" when there is none.

    >>> first_sentence('\"\"\"Ring attention (e.g. over cp). More.\"\"\"')
    'Ring attention (e.g. over cp).'
    """
    paragraph = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    line = " ".join(paragraph.split())
    found = re.match(r"(.*?[.!?])(?=\s+[A-Z`\"(]|$)", line)
    return found.group(1) if found else line


def files_of(package: Path) -> list[Path]:
    """Return every file of the package: top-level files first, then folder by folder in import
    order."""
    return sorted(package.rglob("*.py"), key=lambda file: _order(file.relative_to(package)))


def _order(path: Path) -> tuple[int, str, bool, str]:
    top = len(path.parts) == 1
    row = -1 if top else ROWS.index(path.parts[0]) if path.parts[0] in ROWS else len(ROWS)
    return row, path.parent.as_posix(), path.name != "__init__.py", path.name


def build_map(package: Path) -> str:
    """Return Markdown with a heading per folder and a line per file."""
    lines = []
    for file in files_of(package):
        path = file.relative_to(package.parent).as_posix()
        sentence = first_sentence(file.read_text())
        if file.name == "__init__.py":
            folder = file.parent.relative_to(package.parent).as_posix()
            lines += ["", f"**[{folder}/]({folder})** {sentence}".rstrip(), ""]
        else:
            name = file.relative_to(package).as_posix()
            lines.append(f"- [`{name}`]({path}): {sentence}")
    return "\n".join(lines).strip()


def silent_files(package: Path) -> list[str]:
    """Files that hold code but open without a sentence."""
    texts = {file: file.read_text() for file in files_of(package)}
    return [
        file.relative_to(package.parent).as_posix()
        for file, text in texts.items()
        if not first_sentence(text)
    ]


def insert_map(readme: str, text: str) -> str:
    """README with the part between the markers replaced.

    Raises:
        ValueError: a marker is missing.
    """
    if START not in readme or STOP not in readme.split(START, 1)[-1]:
        raise ValueError(
            f"README.md has no lines {START} and {STOP}. Add both where the map should stand."
        )
    before, rest = readme.split(START, 1)
    return f"{before}{START}\n{text}\n{STOP}{rest.split(STOP, 1)[1]}"


def problems(root: Path) -> list[str]:
    """What keeps the map from being true: silent files, and a README that does not hold it."""
    package, readme = root / "megalith", root / "README.md"
    found = [
        f"{path}: opens without a docstring. Write one sentence on what it is."
        for path in silent_files(package)
    ]
    if not readme.exists():
        return [*found, "README.md: no such file. Add one with the two markers of the map."]
    try:
        if insert_map(readme.read_text(), build_map(package)) != readme.read_text():
            found.append("README.md: the map of the code is not current. Run: make fmt")
    except ValueError as error:
        found.append(str(error))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write or check the map."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help="put the map into README.md")
    choice.add_argument(
        "--check", action="store_true", help="end with 1 when README.md is not current"
    )
    options = parser.parse_args(arguments)
    readme = ROOT / "README.md"
    if options.check:
        found = problems(ROOT)
        print(
            "\n".join(
                [
                    *found,
                    f"file_map: {len(files_of(ROOT / 'megalith'))} files, {len(found)} problems",
                ]
            )
        )
        return int(bool(found))
    if options.write:
        readme.write_text(insert_map(readme.read_text(), build_map(ROOT / "megalith")))
    else:
        print(build_map(ROOT / "megalith"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
