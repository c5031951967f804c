"""Entry point of the `megalith` command: runs the subcommand and converts user errors to a message
and an exit code.

Exit codes: 0 success; 1 internal error, or a negative result of a command that compares; 2 user
error; 75 stopped after saving, run the same command again; 76 the same on other machines, because
one is suspect; 128 + signal number if ended by a signal, so 130 after Ctrl-C.
"""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from megalith import __version__
from megalith.errors import ConfigError, RankError, UserError, did_you_mean

# In the order in which a new user needs them. A command's module is its name with underscores; a
# command without a module is not shown.
SUMMARIES = {
    "quickstart": "train a small GPT on text that is already on this machine, and sample from it",
    "prepare": "tokenize text into the .bin/.idx files that training reads",
    "data": "inspect, verify and merge .bin/.idx files, and pack conversations",
    "train": "train a recipe; the same command resumes",
    "coordinate": "run the coordinator of replica groups, which train together",
    "request": "make a running job save, evaluate, profile or stop",
    "report": "goodput of a run, and the time that it lost by cause",
    "evaluate": "loss and bits per byte of a checkpoint on held-out text",
    "routing": "expert load and cross-layer routing predictability of a run",
    "generate": "generate text with a checkpoint or a Hugging Face model",
    "chat": "chat with a fine-tuned model in the terminal",
    "serve": "serve a model over HTTP with the OpenAI API",
    "run-batch": "process a file of OpenAI requests without a server",
    "recipes": "list, show and compare recipes, with parameters and memory",
    "plan": "memory, communication and compute of a parallel layout, before a run",
    "verify": "verify on this machine that a layout gives the results of one process",
    "convert": "convert Hugging Face models to Megalith checkpoints and back",
    "checkpoint": "inspect, verify, compare, average, merge, copy and prune checkpoints",
    "from-megatron": "translate Megatron arguments or a launch script to a run",
    "bench": "measure text generation, and the communication of a training step",
    "doctor": "hardware, measured speed and available features of this machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (default: that of this process) and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(help_text())
        return 0
    if words[0] in ("-V", "--version"):
        print(f"megalith {__version__}")
        return 0
    alone = argv is None and "RANK" not in os.environ  # the launcher reports errors of its workers
    try:
        return _guarded(words[0], words[1:], alone=alone)
    finally:
        if alone:
            _end_at_next_interrupt()


def run_command(name: str, argv: list[str]) -> int:
    """Import the module of a command and run it.

    Raises:
        ConfigError: there is no such command.
    """
    if name not in available():
        advice = did_you_mean(name, available()) or f" Commands: {', '.join(available())}."
        raise ConfigError(f"{name} is not a command.{advice} Run `megalith --help` for a list.")
    code = importlib.import_module(_module(name)).main(argv)
    assert isinstance(code, int), f"{name} returned {code!r} instead of an exit code"
    return code


def available() -> list[str]:
    """Return the available commands, in the order of the help."""
    return [name for name in SUMMARIES if find_spec(_module(name)) is not None]


def help_text() -> str:
    """Return the output of `megalith --help`."""
    rows = "\n".join(f"  {name:<15}{SUMMARIES[name]}" for name in available())
    return (
        "Train, tune and serve transformers at any scale, from one laptop CPU to ten thousand "
        f"GPUs.\n\nusage: megalith COMMAND [...]\n\n{rows}\n\n"
        "`megalith COMMAND --help` shows the options of one command. `megalith train tiny_cpu` "
        "trains a small model."
    )


def _module(name: str) -> str:
    return f"megalith.cli.{name.replace('-', '_')}"


def _guarded(name: str, argv: list[str], *, alone: bool) -> int:
    """Run a command; print user errors to standard error, and let internal errors raise.
    `alone`: the process ends afterwards."""
    try:
        if "RANK" in os.environ:  # a worker: the launcher reports its failure once
            from megalith.launch.launcher import worker_main

            return worker_main(lambda: run_command(name, argv), os.environ)
        _check_encoding([name, *argv])
        code = run_command(name, argv)
        sys.stdout.flush()  # flush here, where a broken pipe is handled
        return code
    except UserError as error:
        print(f"megalith {name}: {error}", file=sys.stderr)
        return 2
    except RankError as error:  # its text contains the traceback of the process that failed
        print(f"megalith {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if alone:
            _end_at_next_interrupt()
        print(f"megalith {name}: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe (`| head`) has exited
        return _reader_left()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # of any path in the arguments or in an input file
            raise
        path = f"{error.filename!s:.80}..."
        print(
            f"megalith {name}: {path}: a path of {len(str(error.filename))} characters is too long "
            f"for this file system. Use a shorter name or path.",
            file=sys.stderr,
        )
        return 2
    except SystemExit as stop:  # from the option parser: 0 after --help, 2 after an invalid value
        if isinstance(stop.__context__, BrokenPipeError):  # rich converts it to exit code 1
            return _reader_left()
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _check_encoding(words: Sequence[str]) -> None:
    """Reject words that are not UTF-8: no message, configuration or log could contain them.

    Raises:
        ConfigError: a word of the command line is not UTF-8.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{word!r:.80} is not UTF-8 text. Pass it in UTF-8.") from None


def _end_at_next_interrupt() -> None:
    """Restore the default SIGINT handler, so that another Ctrl-C ends the exiting process
    without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _reader_left() -> int:
    """Redirect standard output to /dev/null after a broken pipe, so that Python does not report
    it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
