"""The rows of the package: a file imports from its own row or the rows below it, and what plans
runs without torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megalith"
ROWS = (
    ("cli",),
    ("verify",),
    ("rl",),
    ("train", "serve"),
    ("infer", "posttrain"),
    ("estimate", "hf"),
    ("models", "rules", "testing"),
    ("checkpoint", "data", "launch", "nn", "optim"),
    ("parallel",),
    ("observe",),
    ("precision",),
    ("kernels",),
    ("megatron",),
    ("plan", "recipes"),
    ("config",),
    ("storage",),
    ("object_store",),
    ("errors",),
)
"""Top row first. `megalith/__init__.py` is below all of them, `megalith/__main__.py` beside cli."""
HEIGHT = {name: len(ROWS) - number for number, row in enumerate(ROWS) for name in row} | {
    "__init__": 0,
    "__main__": len(ROWS) + 1,
}
FREE_OF_TORCH = (
    "estimate",
    "rules",
    "megatron",
    "plan",
    "recipes",
    "config",
    "errors",
    "object_store",
    "storage",
    "__init__",
)


def part_of(module: str) -> str:
    """The row entry a module belongs to: megalith.plan.grid -> plan, megalith -> __init__."""
    words = module.split(".")
    return words[1] if len(words) > 1 else "__init__"


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of a file, inside functions too, as (line, absolute module or name in it)."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names = (
                [f"{module}.{alias.name}" for alias in node.names]
                if module in (".", "megalith")
                else [module]
            )
            yield from ((node.lineno, name) for name in names)


def misplaced(path: Path, package: Path) -> Iterator[str]:
    """The imports of one file that point up, or are relative."""
    relative = path.relative_to(package)
    here = relative.parts[0].removesuffix(".py")
    if here not in HEIGHT:
        yield f"{relative}: {here} is in no row. Add it to ROWS, where it belongs."
        return
    for line, name in imports(path):
        if name.startswith("."):
            yield f"{relative}:{line}: relative import {name}. Use the absolute name."
        elif name.split(".")[0] == "megalith" and name != "megalith.__version__":
            there = part_of(name)
            height = HEIGHT.get(there, len(ROWS) + 2)
            if height > HEIGHT[here] or (height == HEIGHT[here] and there != here):
                where = "above it" if height > HEIGHT[here] else "in the same row"
                yield (
                    f"{relative}:{line}: {here} imports {there}, which is {where}. Move the "
                    "code, or the import."
                )
        elif name.split(".")[0] == "torch" and here in FREE_OF_TORCH:
            yield f"{relative}:{line}: {here} imports {name}. Planning and help never load torch."


def modules() -> list[str]:
    """Every module of the package."""
    names = [file.relative_to(ROOT).with_suffix("").parts for file in sorted(PACKAGE.rglob("*.py"))]
    return [
        ".".join(name[:-1] if name[-1] == "__init__" else name)
        for name in names
        if name[-1] != "__main__"
    ]


def run_python(code: str) -> str:
    """What `code` prints in a fresh Python."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_file_imports_from_its_row_or_below() -> None:
    wrong = [line for path in sorted(PACKAGE.rglob("*.py")) for line in misplaced(path, PACKAGE)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        (
            "plan/a.py",
            "from megalith.parallel.group import Group",
            "plan imports parallel, which is above it",
        ),
        ("errors.py", "import megalith.config.tree", "errors imports config, which is above it"),
        ("nn/a.py", "from megalith import models", "nn imports models, which is above it"),
        ("nn/a.py", "import megalith.data.build", "nn imports data, which is in the same row"),
        ("config/a.py", "def f():\n    import torch.nn", "config imports torch.nn"),
        ("nn/a.py", "from .b import c", "relative import .b"),
        ("gadgets/a.py", "", "gadgets is in no row"),
    ],
)
def test_import_from_a_row_above_is_detected(
    tmp_path: Path, path: str, text: str, message: str
) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    assert message in "\n".join(misplaced(file, tmp_path))


def test_import_from_a_row_below_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "nn").mkdir()
    file = tmp_path / "nn" / "a.py"
    file.write_text(
        "import torch\nfrom megalith import __version__\n"
        "from megalith.parallel import group\nimport megalith.errors"
    )
    assert list(misplaced(file, tmp_path)) == []


def test_planning_configuration_and_the_command_line_load_without_torch() -> None:
    wanted = [
        name
        for name in modules()
        if part_of(name) in FREE_OF_TORCH or name in ("megalith.cli", "megalith.cli.main")
    ]
    code = "import importlib, sys\n"
    code += f"for name in {wanted!r}:\n    importlib.import_module(name)\n"
    code += "    if 'torch' in sys.modules: print(name); break\n"
    assert run_python(code) == "", "this module is the first that loads torch"


def test_the_help_of_every_command_appears_without_torch() -> None:
    code = (
        "import contextlib, io, sys\n"
        "from megalith.cli.main import available, main\n"
        "for words in [[], *([name] for name in available())]:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "        main([*words, '--help'])\n"
        "    if 'torch' in sys.modules: print(words); break\n"
    )
    assert run_python(code) == "", "this help is the first that loads torch"


def test_start_of_training_imports_neither_estimates_nor_the_compiler() -> None:
    """numpy, which the estimates need, and torch._dynamo take as long as all other modules."""
    code = (
        "import sys, megalith.cli.train\n"
        "print('numpy' in sys.modules)\n"
        "import megalith.train.loop\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    assert run_python(code) == "False\nFalse\n"


def test_importing_the_package_opens_no_connection_and_touches_no_device() -> None:
    code = (
        "import importlib, socket, sys\n"
        "def refuse(*_): raise SystemExit('a connection was opened')\n"
        "socket.socket.connect = refuse\n"
        f"for name in {modules()!r}: importlib.import_module(name)\n"
        "import torch\nprint(torch.cuda.is_initialized(), torch.distributed.is_initialized())\n"
    )
    assert run_python(code) == "False False\n"


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {file.parent for file in PACKAGE.rglob("*.py")}
    assert [
        folder.name for folder in sorted(folders) if not (folder / "__init__.py").exists()
    ] == []
