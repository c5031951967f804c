"""The wheel holds what it should, and runs from an environment that holds nothing else of ours.

The packages it needs are borrowed from the environment of the tests, so that nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints; its complaints when it fails."""
    full = {**os.environ, **environment}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=full, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that the working tree stays as it is."""
    folder = tmp_path_factory.mktemp("a source tree")
    shutil.copytree(
        ROOT / "megalith", folder / "megalith", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    build = (
        "pip",
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        "dist",
        ".",
    )
    run(sys.executable, "-m", *build, cwd=folder)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """An environment of its own in which only the wheel is installed."""
    folder = tmp_path_factory.mktemp("an empty environment")
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "env/bin/python")
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    return folder


def borrowed() -> dict[str, str]:
    """The environment variable that lends the packages of the tests (a .pth file in them is not
    followed)."""
    return {"PYTHONPATH": sysconfig.get_path("purelib")}


def test_the_wheel_is_pure_python_and_holds_every_file_of_the_package_and_no_test(
    wheel: Path,
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    names = {name for name in sizes if ".dist-info/" not in name}
    files = [
        file.relative_to(ROOT)
        for file in (ROOT / "megalith").rglob("*")
        if file.suffix in (".py", ".yaml", ".html")
    ]
    assert wheel.name.endswith("-py3-none-any.whl")
    assert names == {file.as_posix() for file in files} | {"megalith/py.typed"}
    assert any(name.endswith("/licenses/LICENSE") for name in sizes)
    assert max(sizes.values()) < 1_000_000


def test_every_module_imports_from_the_wheel_without_the_optional_packages(empty: Path) -> None:
    code = (
        "import importlib, pkgutil, sys\n"
        "for name in ('transformers', 'tensorboard', 'torch.utils.tensorboard'): sys.modules[name] "
        "= None\nimport megalith\n"
        "assert 'an empty environment' in megalith.__file__, megalith.__file__\n"
        "names = [m.name for m in pkgutil.walk_packages(megalith.__path__, 'megalith.') if "
        "'__main__' not in m.name]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names))\n"
    )
    assert int(run(empty / "env/bin/python", "-c", code, cwd=empty, **borrowed())) > 10


def test_the_command_is_installed_and_helps(empty: Path) -> None:
    assert "train" in run(empty / "env/bin/megalith", "--help", cwd=empty, **borrowed())


def test_installed_package_satisfies_its_requirements() -> None:
    run(sys.executable, "-m", "pip", "check", cwd=ROOT)
