"""The example runs as it is, stays short, and needs neither a command line nor global state."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLE = Path(__file__).parent.parent / "examples" / "train.py"


def loaded() -> ModuleType:
    """The example as a module; importing it trains nothing."""
    spec = importlib.util.spec_from_file_location("example_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_is_at_most_sixty_lines_without_a_command_line() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 60
    assert not any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(text)))
    assert not any(word in text for word in ("argparse", "sys.argv", "tyro", "os.environ"))


def test_two_models_train_independently_in_one_process() -> None:
    example = loaded()
    first, deep, again = (
        example.train(example.SMALL),
        example.train(example.DEEP),
        example.train(example.SMALL),
    )
    assert first == again
    assert first != deep
    assert first[-1] < first[0] - 1
    assert deep[-1] < deep[0] - 1


def test_the_example_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        capture_output=True,
        text=True,
        check=True,
        cwd=EXAMPLE.parents[1],
    )
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == ["small", "deep"]
