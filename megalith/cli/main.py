"""The `megalith` command: finds the subcommand, runs it, and turns errors for people into text and
an exit code.

Exit codes: 0 done; 2 for what the user can fix; 1 for a fault, or for the answer "no" of a command
that compares; 75 stopped after a save, run the same command again; 128 + number ended by that
signal, thus 130 after Ctrl-C.
"""

import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from megalith import __version__
from megalith.config.suggest import did_you_mean
from megalith.errors import ConfigError, RankError, UserError

# In the order of a newcomer's day. The file of a command is its name with underscores; one without
# a file is not shown.
SUMMARIES = {
    "quickstart": "train a small GPT on text that is already on this machine, and sample from it",
    "prepare": "turn text into the .bin/.idx pair that training reads",
    "data": "look into .bin/.idx pairs, check, join and blend them",
    "train": "train a recipe; the same command resumes",
    "evaluate": "loss and bits per byte of a checkpoint on held-out text",
    "routing": "how a run's tokens choose among experts, and how far one layer tells the next",
    "generate": "write text with a checkpoint or a Hugging Face folder",
    "chat": "talk with a tuned model in the terminal",
    "recipes": "list, show and compare ready-made runs, with parameters and memory",
    "plan": "what a layout costs, before anything starts",
    "verify": "prove on this machine that a layout computes what one process computes",
    "convert": "Hugging Face models to Megalith checkpoints and back",
    "checkpoint": "look into checkpoints, and check every byte of them",
    "from-megatron": "turn Megatron arguments or a launch script into a run",
    "bench": "measure this machine against its own limits",
    "doctor": "what this machine offers, and what is missing for what",
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
    alone = (
        argv is None and "RANK" not in os.environ
    )  # of a job's worker, whoever started it hears how it ended
    try:
        return _guarded(words[0], words[1:], alone=alone)
    finally:
        if alone:
            _end_at_next_interrupt()


def run_command(name: str, argv: list[str]) -> int:
    """Import the command's file and run it.

    Raises:
        ConfigError: there is no such command.
    """
    if name not in available():
        advice = did_you_mean(name, available()) or f" Commands: {', '.join(available())}."
        raise ConfigError(
            f"{name} is not a command.{advice} Run `megalith --help` to see them all."
        )
    code = importlib.import_module(_module(name)).main(argv)
    assert isinstance(code, int), f"{name} returned {code!r} instead of an exit code"
    return code


def available() -> list[str]:
    """The commands that exist, in the order of the help."""
    return [name for name in SUMMARIES if find_spec(_module(name)) is not None]


def help_text() -> str:
    """What `megalith --help` prints."""
    rows = "\n".join(f"  {name:<15}{SUMMARIES[name]}" for name in available())
    return (
        "Train, tune and serve transformers at any scale, from one laptop CPU to ten thousand "
        f"GPUs.\n\nusage: megalith COMMAND [...]\n\n{rows}\n\n"
        "`megalith COMMAND --help` shows the options of one command. `megalith train tiny_cpu` "
        "trains something now."
    )


def _module(name: str) -> str:
    return f"megalith.cli.{name.replace('-', '_')}"


def _guarded(name: str, argv: list[str], *, alone: bool) -> int:
    """Run a command; what a person can fix is one text on standard error, a fault keeps its
    traceback. `alone`: the process has nothing else to do."""
    try:
        if "RANK" in os.environ:  # one of many: a failure is told once, by whoever started them
            from megalith.parallel.launch import worker_main

            return worker_main(lambda: run_command(name, argv), os.environ)
        _check_encoding([name, *argv])
        code = run_command(name, argv)
        sys.stdout.flush()  # here, where a reader that has left is known to be no fault
        return code
    except UserError as error:
        print(f"megalith {name}: {error}", file=sys.stderr)
        return 2
    except (
        RankError
    ) as error:  # its text is the traceback of the process that failed; ours would only hide it
        print(f"megalith {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if alone:
            _end_at_next_interrupt()
        print(f"megalith {name}: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe (`| head`) has seen enough
        return _reader_left()
    except OSError as error:
        if (
            error.errno != errno.ENAMETOOLONG
        ):  # any path or name on the command line or in an input file
            raise
        path = f"{error.filename!s:.80}..."
        print(
            f"megalith {name}: {path}: {len(str(error.filename))} characters are too long for a "
            "path on this file "
            f"system. Use a shorter name or path.",
            file=sys.stderr,
        )
        return 2
    except (
        SystemExit
    ) as stop:  # the option parser's way out: 0 after --help, 2 after a value it cannot read
        if isinstance(stop.__context__, BrokenPipeError):  # rich turns that into exit code 1
            return _reader_left()
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _check_encoding(words: Sequence[str]) -> None:
    """Reject words that are not UTF-8: no message, configuration or log could hold them.

    Raises:
        ConfigError: a word of the command line is not UTF-8.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"{word!r:.80} is not UTF-8 text. Pass it in UTF-8.") from None


def _end_at_next_interrupt() -> None:
    """The process is on its way out: one more Ctrl-C ends it there and then, and Python shows no
    traceback of what it was tidying up."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _reader_left() -> int:
    """Nobody reads what is still to be written, and Python must not complain about that at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
