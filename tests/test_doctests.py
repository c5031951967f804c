"""The examples in docstrings run and give the results that are shown."""

import doctest
import importlib
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "megalith"


def test_examples_in_docstrings_give_the_results_that_are_shown() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")]
    names = [".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in paths]
    results = {name: doctest.testmod(importlib.import_module(name)) for name in names}
    assert sum(result.attempted for result in results.values()) > 100
    assert [name for name, result in results.items() if result.failed] == []
