"""Command lines: dotted overrides are ours, checked against the config tree; the fixed options of a command are tyro's.

A command that takes a run looks like this:

    rest, overrides = split_overrides(argv, TrainRun)
    options = parse_options(TrainOptions, rest, prog="megalith train", root=TrainRun)
    run = apply_overrides(resolve(options.recipe), overrides)
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

import tyro

from megalith.config.fields import hint_at, is_many, options_of, setting_names, unknown_setting
from megalith.config.suggest import nearest
from megalith.config.tree import Override
from megalith.errors import ConfigError, raise_all
from megalith.recipes import resolve

OptionsT = TypeVar("OptionsT")

# Positional words are shown by name, a flag as `--json` alone, an option that may be left out without "None".
_STYLE = (tyro.conf.PositionalMetavarFromFieldName, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone)
_FLAG_WORDS = ("true", "false", "yes", "no", "on", "off", "none", "null", "unset", "1", "0")


def split_overrides(argv: Sequence[str], root: type) -> tuple[list[str], dict[str, Override]]:
    """Take `--parallel.tp 2`, `--parallel.tp=2`, `--data.path a b`, `--data.documents` and `--seed 3` out of `argv`.

    Every option with a dot belongs to the tree `root`, and so does one that names a leaf of the root itself. A list
    takes all words up to the next option; true/false alone means true, and takes the word behind it where that is a
    value or, the recipe being named already, can only be meant as one; the last of two counts, as in a shell.

    Returns:
        The words that are left, and the overrides as text for `apply_overrides`.

    Raises:
        ConfigError: names that the tree lacks and options without a value, all of them together.
    """
    top = [name for name in setting_names(root) if "." not in name]
    words, rest = list(argv), list[str]()
    named = False  # the recipe or run has been seen
    overrides: dict[str, Override] = {}
    problems: list[str] = []
    while words:
        word = words.pop(0)
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or not ("." in name or name in top):
            named = named or not (word.startswith("-") or (rest and rest[-1].startswith("--")))
            rest.append(word)
            continue
        hint = hint_at(root, name)
        given = [value] if equals else _take_values(words, hint, named=named)
        if hint is None:
            problems.append("--" + unknown_setting(root, name, " ".join(given) or None))
        elif not given:
            problems.append(f"--{name} has no value. Use --{name} VALUE.")
        else:
            overrides[name] = given if len(given) > 1 else given[0]
    raise_all(problems)
    return rest, overrides


def _take_values(words: list[str], hint: Any, *, named: bool) -> list[str]:  # Any: a type annotation
    """Remove from the front of `words` what belongs to an option of type `hint`, and return it."""
    ahead = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    options = options_of(hint)
    if bool in options and (ahead == 0 or not (named or words[0].lower() in _FLAG_WORDS)):
        return ["true"]
    count = ahead if any(is_many(option) for option in options) else min(ahead, 1)
    taken = words[:count]
    del words[:count]
    return taken


def parse_options(cls: type[OptionsT], argv: Sequence[str], *, prog: str, root: type | None = None) -> OptionsT:
    """Read the fixed options of a command, a dataclass with documented fields; `--help` prints them and exits.

    With `root`, the help goes on with every dotted setting of that tree, showing the values of the recipe on the
    command line if there is one, and unknown options are compared with the tree's names, too.

    Raises:
        ConfigError: unknown options, and words where numbers belong.
        SystemExit: after `--help` (0), or a value that the option cannot take (2).
    """
    if "--help" in argv or "-h" in argv:
        _print_help(cls, argv, prog=prog, root=root)
        raise SystemExit(0)
    assert is_dataclass(cls)
    known = [field.name for field in fields(cls) if not _is_positional(cls, field.name)]
    raise_all([_unknown_option(word, known, root) for word in argv if _is_unknown(word, known)])
    raise_all(_number_problems(cls, argv))
    return tyro.cli(cls, args=list(argv), prog=prog, config=_STYLE)


def _number_problems(cls: type, argv: Sequence[str]) -> list[str]:
    """Options that take a number and were given something else."""
    hints, problems = get_type_hints(cls), []
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        numbers = {int, float}.intersection(options_of(hints.get(name.removeprefix("--").replace("-", "_"))))
        if not (name.startswith("--") and numbers) or not (equals or argv[place + 1 :]):
            continue
        value = value if equals else argv[place + 1]
        kind: type = numbers.pop()
        try:
            kind(value)
        except ValueError:
            words, example = ("a whole number", "8") if kind is int else ("a number", "0.5")
            problems.append(f"{name}={value} is not {words}. Use for example {name} {example}.")
    return problems


def _is_positional(cls: type, name: str) -> bool:
    return tyro.conf.Positional in getattr(get_type_hints(cls, include_extras=True)[name], "__metadata__", ())


def _is_unknown(word: str, known: Sequence[str]) -> bool:
    name = word[2:].partition("=")[0].replace("-", "_")
    return word.startswith("--") and name not in known and name.removeprefix("no_") not in known


def _unknown_option(word: str, known: Sequence[str], root: type | None) -> str:
    name = word[2:].partition("=")[0]
    spelled = [option.replace("_", "-") for option in known]
    near = [f"--{option}" for option in nearest(name, [*spelled, *(setting_names(root) if root else [])])]
    every = ", ".join(f"--{option}" for option in spelled)
    advice = f"Did you mean {' or '.join(near)}?" if near else f"Use one of {every}." if every else "Remove it."
    return f"--{name} is not an option of this command. {advice}"


def _print_help(cls: type, argv: Sequence[str], *, prog: str, root: type | None) -> None:
    """Print the fixed options, and with `root` its settings."""
    with suppress(SystemExit):
        tyro.cli(cls, args=["--help"], prog=prog, config=_STYLE)
    if root is None:
        return
    shown = _run_on(argv, root)
    print("Every setting of the run is an option, too; the recipe gives the required ones.")
    with suppress(SystemExit):
        tyro.cli(
            root,
            args=["--help"],
            prog=f"{prog} ...",
            default=tyro.MISSING_NONPROP if shown is None else shown,
            config=(tyro.conf.FlagConversionOff,),
            use_underscores=True,
        )


def _run_on(argv: Sequence[str], root: type) -> object | None:
    """The run that a command line names, so that its help can show this run's values."""
    for word in argv:
        if not word.startswith("-"):
            with suppress(ConfigError):
                run = resolve(word)
                return run if isinstance(run, root) else None
    return None
