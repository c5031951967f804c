"""Command-line parsing: dotted overrides are checked against the config tree; tyro parses the fixed
options.

A command that takes a run looks like this:

    rest, overrides = split_overrides(argv, TrainRun)
    options = parse_options(TrainOptions, rest, prog="megalith train", root=TrainRun)
    run = apply_overrides(resolve(options.recipe), overrides)
"""

import inspect
import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import tyro

from megalith.config.fields import (
    SettingLeaf,
    describe,
    field_default,
    field_docs,
    field_types,
    find_section_type,
    hint_at,
    is_required,
    is_sequence_type,
    item_hints,
    join_path,
    literal_values,
    plain,
    setting_names,
    union_options,
    unknown_setting,
)
from megalith.config.tree import Override, flatten
from megalith.errors import ConfigError, nearest, raise_all
from megalith.recipes import resolve

if TYPE_CHECKING:
    pass


OptionsT = TypeVar("OptionsT")

# Show positional arguments by name, flags as `--json` only, and optional values without "None".
_STYLE = (
    tyro.conf.PositionalMetavarFromFieldName,
    tyro.conf.FlagCreatePairsOff,
    tyro.conf.DisallowNone,
)
COMMON_SETTINGS = (
    "model.num_layers",
    "model.hidden_size",
    "model.ffn_hidden_size",
    "model.num_heads",
    "data.mock",
    "data.train_path",
    "data.valid_path",
    "tokenizer.kind",
    "tokenizer.path",
    "train.steps",
    "train.seq_len",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.eval_every",
    "train.max_minutes",
    "schedule.lr",
    "schedule.warmup_steps",
    "parallel.tp",
    "parallel.pp",
    "parallel.cp",
    "parallel.ep",
    "parallel.dp",
    "parallel.zero",
    "precision.params",
    "recompute.granularity",
    "checkpoint.every",
    "seed",
)
"""Settings listed in the short help."""

MAX_OPTIONS_IN_USAGE = 4
"""Heuristic: with more options the usage line shows `[OPTIONS]`."""

MAX_HELP_COLUMNS, MAX_OPTION_COLUMNS = 110, 36
"""Heuristic: longer lines are hard to read, and longer options get their own line."""

NO_BREAK_SPACE = "\u00a0"
"""Keeps `(default: 8)` on one line; printed as a space."""

_FLAG_WORDS = ("true", "false", "yes", "no", "on", "off", "none", "null", "unset", "1", "0")


def join_overrides(overrides: Mapping[str, Override]) -> list[str]:
    """Return the words of overrides on a command line."""
    words: list[str] = []
    for name, value in overrides.items():
        words += [f"--{name}", *([value] if isinstance(value, str) else value)]
    return words


def split_overrides(argv: Sequence[str], root: type) -> tuple[list[str], dict[str, Override]]:
    """Extract dotted overrides such as `--parallel.tp 2`, `--parallel.tp=2`, `--data.path a b` and
    `--seed 3` from `argv`.

    Every option with a dot belongs to the tree `root`, and so does one that names a leaf of the
    root itself. A list takes all words up to the next option. A boolean without a value is true; it
    takes the next word if that is a boolean, or if the recipe was already given. If an option is
    repeated, the last one applies.

    Returns:
        The remaining words, and the overrides as text for `apply_overrides`.

    Raises:
        ConfigError: unknown names and options without a value, all of them together.
    """
    top = [name for name in setting_names(root) if "." not in name]
    words, rest = list(argv), list[str]()
    named = False  # whether the recipe or run was given
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


def _take_values(
    words: list[str], hint: Any, *, named: bool
) -> list[str]:  # Any: a type annotation
    """Remove the values of an option of type `hint` from the front of `words`, and return them."""
    num_values = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    options = union_options(hint)
    if bool in options and (num_values == 0 or not (named or words[0].lower() in _FLAG_WORDS)):
        return ["true"]
    count = (
        num_values if any(is_sequence_type(option) for option in options) else min(num_values, 1)
    )
    taken = words[:count]
    del words[:count]
    return taken


def parse_options(
    cls: type[OptionsT], argv: Sequence[str], *, prog: str, root: type | None = None
) -> OptionsT:
    """Parse the fixed options of a command, a dataclass with documented fields; `--help` prints
    them and exits.

    With `root`, the help also lists the most common settings of that tree and its groups, `--help
    GROUP` one group, and `--help-all` every setting, with the values of the recipe on the command
    line if there is one. For unknown options, names of the tree are suggested too.

    Raises:
        ConfigError: an option is unknown, or its value is not a number although it must be.
        SystemExit: after `--help` (0), or if a value is invalid (2).
    """
    if {"--help", "-h", "--help-all"} & set(argv):
        _print_help(cls, argv, prog=prog, root=root)
        raise SystemExit(0)
    assert is_dataclass(cls)
    known = [field.name for field in fields(cls) if not _is_positional(cls, field.name)]
    raise_all([_unknown_option(word, known, root) for word in argv if _is_unknown(word, known)])
    raise_all(_number_problems(cls, argv))
    return tyro.cli(cls, args=list(argv), prog=prog, config=_STYLE)


def _number_problems(cls: type, argv: Sequence[str]) -> list[str]:
    """Return errors of numeric options with a value that is not a number."""
    hints, problems = get_type_hints(cls), []
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        numbers = {int, float}.intersection(
            union_options(hints.get(name.removeprefix("--").replace("-", "_")))
        )
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
    return tyro.conf.Positional in getattr(
        get_type_hints(cls, include_extras=True)[name], "__metadata__", ()
    )


def _is_unknown(word: str, known: Sequence[str]) -> bool:
    name = word[2:].partition("=")[0].replace("-", "_")
    return word.startswith("--") and name not in known and name.removeprefix("no_") not in known


def _unknown_option(word: str, known: Sequence[str], root: type | None) -> str:
    name = word[2:].partition("=")[0]
    spelled = [option.replace("_", "-") for option in known]
    near = [
        f"--{option}"
        for option in nearest(name, [*spelled, *(setting_names(root) if root else [])])
    ]
    every = ", ".join(f"--{option}" for option in spelled)
    advice = (
        f"Did you mean {' or '.join(near)}?"
        if near
        else f"Use one of {every}."
        if every
        else "Remove it."
    )
    return f"--{name} is not an option of this command. {advice}"


def _print_help(cls: type, argv: Sequence[str], *, prog: str, root: type | None) -> None:
    """Print the fixed options and, with `root`, its most common settings, one group of them, or
    all."""
    group = _help_group(argv, root)
    if root is None or group is None:
        _print_fixed_options(cls, prog=prog)
    if root is None:
        return
    shown = _run_on(argv, root)
    values = {} if shown is None else flatten(shown)
    settings = describe(root)
    if "--help-all" in argv:
        _print_sections(root, settings, values)
    elif group is not None:
        in_group = [
            one for one in settings if one.path == group or one.path.startswith(f"{group}.")
        ]
        _print_sections(root, in_group, values)
    else:
        by_path = {
            one.path: replace(one, doc=_first_clause(one.doc, end="[.;]")) for one in settings
        }
        common = [by_path[path] for path in COMMON_SETTINGS if path in by_path]
        if common:
            print("\nEvery setting of the run is an option. The most common ones:")
            _print_entries([_setting_entry(setting, values) for setting in common])
        print(
            f"\nGroups of settings; `{prog} --help GROUP` lists one, `{prog} --help-all` "
            "every setting:"
        )
        _print_entries(_group_entries(root))


def _help_group(argv: Sequence[str], root: type | None) -> str | None:
    """Return the group of settings that follows `--help`, as in `--help model.moe`."""
    place = next((i for i, word in enumerate(argv) if word in ("--help", "-h")), len(argv))
    word = next(iter(argv[place + 1 :]), "")
    return (
        word
        if root is not None and word and find_section_type(hint_at(root, word)) is not None
        else None
    )


def _print_fixed_options(cls: type, *, prog: str) -> None:
    """Print the usage, the description and the options of a command's dataclass."""
    assert is_dataclass(cls)
    positional, optional = [], []
    for field in fields(cls):
        required, default = is_required(field), field_default(field)
        metavar, doc = _metavar(field_types(cls)[field.name]), field_docs(cls).get(field.name, "")
        if _is_positional(cls, field.name):
            many = any(
                is_sequence_type(option) for option in union_options(field_types(cls)[field.name])
            )
            word = f"{field.name.upper()} ..." if many else field.name.upper()
            positional.append((word if required else f"[{word}]", doc))
            continue
        name = field.name.replace("_", "-")
        if default is True:
            optional.append((f"--no-{name}", f"Turn this off: {doc}"))
        elif default is False:
            optional.append((f"--{name}", doc))
        else:
            optional.append(
                (
                    f"--{name} {metavar}",
                    doc + _default_words(required, plain(default), show_none=False),
                )
            )
    few = len(optional) <= MAX_OPTIONS_IN_USAGE
    usage = [*(word for word, _ in positional), *(f"[{word}]" for word, _ in optional if few)]
    print(" ".join(["usage:", prog, "[-h]", *usage, *([] if few else ["[OPTIONS]"])]))
    print(f"\n{inspect.cleandoc(cls.__doc__ or '')}\n")
    _print_entries([*positional, *optional, ("-h, --help", "Print this help.")])


def _print_sections(
    root: type, settings: Sequence[SettingLeaf], values: Mapping[str, object]
) -> None:
    """Print settings under the name and the description of their section."""
    for path, members in groupby(settings, key=lambda one: one.path.rpartition(".")[0]):
        summary = _summary(find_section_type(hint_at(root, path)) if path else root)
        print(f"\n{path}: {summary}" if path else f"\n{summary}")
        _print_entries([_setting_entry(one, values) for one in members])


def _group_entries(root: type, prefix: str = "") -> list[tuple[str, str]]:
    """Return every group of settings, including nested ones, with the first clause of its
    description. Nested groups that are described by one word, the name of a method, are left to
    `--help` of the group around them."""
    entries = []
    for name, hint in field_types(root).items():
        if (section := find_section_type(hint)) is not None:
            path = join_path(prefix, name)
            text = _first_clause(_summary(section), end="[.;:,]")
            entries += [(path, text)] if not prefix or " " in text else []
            entries += _group_entries(section, path)
    return entries


def _first_clause(text: str, *, end: str) -> str:
    return re.split(f"{end} ", text, maxsplit=1)[0].removesuffix(".") + "."


def _summary(section: type | None) -> str:
    return (inspect.getdoc(section) or "").partition("\n\n")[0].replace("\n", " ")


def _setting_entry(setting: SettingLeaf, values: Mapping[str, object]) -> tuple[str, str]:
    required = setting.required and setting.path not in values
    value = values.get(setting.path, setting.default)
    return f"--{setting.path} {_metavar(setting.hint)}", setting.doc + _default_words(
        required, value, show_none=True
    )


def _default_words(required: bool, value: object, *, show_none: bool) -> str:
    """Return ` (required)` or ` (default: 8)`; empty for an empty list."""
    if required:
        return " (required)"
    if value in ([], {}, ()) or (value is None and not show_none):
        return ""
    return f" (default:{NO_BREAK_SPACE}{_value_words(value)})"


def _value_words(value: object) -> str:
    if isinstance(value, list):
        return " ".join(_value_words(item) for item in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _metavar(hint: Any) -> str:  # Any: a type annotation
    """Return the type of an option's value: `INT`, `true|false`, `rms|layer`, `STR ...`."""
    words: list[str] = []
    for option in union_options(hint):
        if option is type(None):
            continue
        if literal_values(option):
            words += [str(value) for value in literal_values(option) if value is not None]
        elif is_sequence_type(option):
            items = item_hints(option, 1)
            words.append(
                f"{_metavar(items[0])} ..." if len(items) == 1 else " ".join(map(_metavar, items))
            )
        else:
            names = {bool: "true|false", int: "INT", float: "FLOAT", str: "STR"}
            words.append(names.get(option, "YAML"))
    return "|".join(dict.fromkeys(words))


def _print_entries(entries: Sequence[tuple[str, str]]) -> None:
    """Print options in two columns; the text of an option that is too long for the first starts
    on the next line."""
    width = min(shutil.get_terminal_size().columns, MAX_HELP_COLUMNS)
    indent = min(MAX_OPTION_COLUMNS, 4 + max((len(option) for option, _ in entries), default=0))
    for option, text in entries:
        lines = textwrap.wrap(
            text, max(width - indent, 20), break_on_hyphens=False, break_long_words=False
        )
        first = f"  {option}"
        if len(first) + 2 <= indent and lines:
            first = f"{first:<{indent}}{lines.pop(0)}"
        print(
            "\n".join([first, *(" " * indent + line for line in lines)]).replace(
                NO_BREAK_SPACE, " "
            )
        )


def _run_on(argv: Sequence[str], root: type) -> object | None:
    """Return the run named on a command line, so that its help can show the run's values."""
    for word in argv:
        if not word.startswith("-"):
            with suppress(ConfigError):
                run = resolve(word)
                return run if isinstance(run, root) else None
    return None
