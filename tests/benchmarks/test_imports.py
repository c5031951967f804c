"""Every module in benchmarks/ can be imported, so that none uses a function that was moved."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"

PROGRAM = """
import importlib, sys

sys.path.insert(0, sys.argv[1])
own = {"megalith", "contenders", *(name.partition(".")[0] for name in sys.argv[2:])}
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in own:
            print(name, error)
        # else: a package that is not installed
    except ImportError as error:
        print(name, error)
"""


def import_all(folder: Path) -> list[str]:
    """Import all modules in a folder in a process of their own; return the errors."""
    paths = sorted(folder.rglob("*.py"))
    names = [".".join(path.relative_to(folder).with_suffix("").parts) for path in paths]
    command = [sys.executable, "-c", PROGRAM, str(folder), *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout.splitlines()


def test_every_benchmark_can_be_imported() -> None:
    assert import_all(FOLDER) == []


def test_an_import_of_a_moved_function_is_detected(tmp_path: Path) -> None:
    (tmp_path / "moved.py").write_text("from megalith.errors import moved_function\n")
    (tmp_path / "renamed.py").write_text("import megalith.renamed_module\n")
    (tmp_path / "other.py").write_text("import package_that_is_not_installed\n")
    first, second = import_all(tmp_path)
    assert first.startswith("moved cannot import name 'moved_function' from 'megalith.errors'")
    assert second == "renamed No module named 'megalith.renamed_module'"
