"""The `megalith` command."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import resources
from types import SimpleNamespace
from typing import NoReturn

import pytest

from megalith import __version__
from megalith.cli import main as command
from megalith.cli.main import SUMMARIES, available, main
from megalith.errors import DataError, RankError


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout


def planted(monkeypatch: pytest.MonkeyPatch, action: Callable[[list[str]], int]) -> None:
    """Let every command be `action`."""
    monkeypatch.setattr(
        command.importlib, "import_module", lambda name: SimpleNamespace(main=action)
    )


def test_help_lists_every_command_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in available():
        assert f"  {name} " in text
        assert SUMMARIES[name] in text
    assert main([]) == 0
    assert capsys.readouterr().out == text


def test_every_file_of_a_command_has_a_line_in_the_help() -> None:
    files = {
        item.name.removesuffix(".py")
        for item in resources.files("megalith.cli").iterdir()
        if item.is_file()
    }
    # the last three are of `megalith data`, `bench` and `checkpoint`
    parts = {
        "__init__",
        "main",
        "arguments",
        "output",
        "plan_tables",
        "pack",
        "bench_serving",
        "checkpoint_edit",
    }
    commands = {name.replace("_", "-") for name in files - parts}
    assert commands == set(available())


def test_help_needs_less_than_a_second_and_no_torch() -> None:
    code = (
        "import sys; from megalith.cli.main import main; main(['--help']); print('torch' in "
        "sys.modules)"
    )
    run_python(code)  # compiles the files
    seconds = []
    for _ in range(3):  # the shortest of three: another process may use the core
        start = time.perf_counter()
        assert run_python(code).endswith("False\n")
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 1.0


def test_the_settings_of_a_run_are_explained_without_torch() -> None:
    code = "import sys; from megalith.cli.main import main; main(['train', 'tiny_cpu', '--help']);"
    output = run_python(f"{code} print('torch' in sys.modules)")
    assert "--parallel.tp INT" in output
    assert output.endswith("False\n")


def test_the_module_is_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "megalith", "--version"], check=True, capture_output=True, text=True
    )
    assert result.stdout == f"megalith {__version__}\n"


def test_help_of_a_command_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", "recipes"]) == 0
    assert "usage: megalith recipes" in capsys.readouterr().out


@pytest.mark.parametrize("name", available())
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"usage: megalith {name}" in capsys.readouterr().out


def test_an_unknown_command_gets_did_you_mean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe"]) == 2
    assert capsys.readouterr().err == (
        "megalith recipe: recipe is not a command. Did you mean recipes? Run `megalith --help` for "
        "a list.\n"
    )
    assert main(["qqqq"]) == 2
    assert " Commands: " in capsys.readouterr().err


def test_arguments_and_exit_code_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda argv: 75 if argv == ["a", "--b"] else 3)
    assert main(["recipes", "a", "--b"]) == 75


@pytest.mark.parametrize(
    "error, code, text",
    [
        (
            DataError("data.path=x: no such file."),
            2,
            "megalith recipes: data.path=x: no such file.\n",
        ),
        (RankError("Traceback of rank 1"), 1, "megalith recipes: Traceback of rank 1\n"),
        (KeyboardInterrupt(), 130, "megalith recipes: interrupted.\n"),
        (SystemExit(2), 2, ""),
        (SystemExit(None), 0, ""),
    ],
)
def test_user_errors_are_a_message_and_an_exit_code(
    error: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(argv: list[str]) -> NoReturn:
        raise error

    planted(monkeypatch, fail)
    assert main(["recipes"]) == code
    captured = capsys.readouterr()
    assert captured.err == text
    assert captured.out == ""


@pytest.mark.parametrize(
    "words", [["train", "a" * 300], ["generate", "a" * 5000], ["plan", "explain", "a" * 300]]
)
def test_name_too_long_for_the_file_system_is_a_user_error(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert (
        f"{len(words[-1])} characters is too long for this file system. Use a shorter name" in error
    )
    assert "a" * 81 not in error and "Traceback" not in error


def test_word_that_is_not_utf8_is_a_user_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny_cpu", "--name", "x\udcff"]) == 2
    assert (
        capsys.readouterr().err
        == "megalith train: 'x\\udcff' is not UTF-8 text. Pass it in UTF-8.\n"
    )


def test_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(argv: list[str]) -> NoReturn:
        raise ZeroDivisionError("a bug")

    planted(monkeypatch, fail)
    with pytest.raises(ZeroDivisionError):
        main(["recipes"])


def test_closed_pipe_ends_without_an_error() -> None:
    shell = f"{shlex.quote(sys.executable)} -m megalith recipes show tiny_cpu --yaml | head -1"
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shell}"], capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    assert result.stdout == "name: tiny_cpu\n"
    assert result.returncode == 0


@pytest.mark.parametrize(
    "words", [["recipes"], ["recipes", "show", "tiny_cpu", "--yaml"], ["recipes", "--json"]]
)
def test_closed_pipe_before_the_first_line_is_not_an_error(words: list[str]) -> None:
    reader, generator = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "megalith", *words]
    try:
        result = subprocess.run(
            command, stdout=generator, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(generator)
    assert (result.returncode, result.stderr) == (0, "")


IMPATIENT = """
import atexit, os, signal, sys, time
from types import SimpleNamespace
from megalith.cli import main as command

def wait(argv):
    print("ready", flush=True)
    time.sleep(30)

def tidy():
    print("tidying", flush=True)
    time.sleep(30)

atexit.register(tidy)
command.importlib = SimpleNamespace(import_module=lambda name: SimpleNamespace(main=wait))
sys.argv = ["megalith", "chat"]
sys.exit(command.main())
"""


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_ends_at_once_and_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", IMPATIENT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "tidying\n"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=20)
    # 130 in a shell
    assert (process.returncode, error) == (
        -signal.SIGINT,
        "megalith chat: interrupted.\n",
    )


def test_sigint_handler_of_a_calling_program_is_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGINT)
    planted(monkeypatch, lambda argv: 0)
    assert main(["doctor"]) == 0 and signal.getsignal(signal.SIGINT) is before
