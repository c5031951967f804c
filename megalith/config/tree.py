"""Conversion of config trees (nested frozen dataclasses) from and to dicts, YAML files and dotted
overrides, with type checks.

Every function accepts any root dataclass made of dataclasses, numbers, text, `Literal`s, `X |
None`, lists, tuples and dicts. All problems of an input are reported together, each with its dotted
path.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import yaml
from yaml.error import MarkedYAMLError

from megalith import storage
from megalith.config.fields import (
    Hint,
    Plain,
    describe_type,
    field_docs,
    field_types,
    find_section_type,
    find_setting_successor,
    find_value_successor,
    hint_at,
    is_required,
    is_section_type,
    is_sequence_type,
    item_hints,
    join_path,
    literal_values,
    plain,
    translate_stored_settings,
    type_origin,
    union_options,
    unknown_setting,
)
from megalith.errors import MAX_PROBLEMS, ConfigError, did_you_mean, raise_all

Override: TypeAlias = str | list[str]  # one value as typed, or several for a list
T = TypeVar("T")

MAX_YAML_CHARACTERS = 2**19
"""Maximum number of characters of a YAML text, and of its keys and values after aliases are
expanded. Heuristic: a run has 10 thousand."""

MAX_YAML_NODES = 20_000
"""Maximum number of keys, values, lists and mappings of a YAML text after aliases are expanded.
Heuristic: PyYAML reads about as many per second."""

MAX_YAML_DEPTH = 50
"""Maximum nesting of mappings and lists after aliases are expanded. Heuristic: the settings of a
run nest five deep."""

_MAX_SHOWN = 200
"""Maximum number of characters of a wrong value in a message."""

# YAML 1.1 reads 3e-4 (without a point) as text; users mean a number.
_EXPONENT = re.compile(r"[+-]?\d[\d_]*(\.\d*)?[eE][+-]?\d+")
_NOT_TEXT = re.compile("[\x00\ud800-\udfff]")
MAX_INT = 2**63 - 1
"""Largest whole number of a setting: the largest int64 of torch and NumPy."""

_BOOL_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NONE_WORDS = "none", "null", "unset"


# --- dict <-> tree


def from_dict(cls: type[T], data: Mapping[str, Plain]) -> T:
    """Build a tree of type `cls` from nested plain data.

    Raises:
        ConfigError: unknown or missing names and wrong types, all of them together.
    """
    return _build(cls, data, [])


def build_section(
    cls: type, data: Mapping[str, Plain], path: str, problems: list[str]
) -> Any:  # Any: an instance of `cls`
    """Build a section whose type is no part of the root, such as the settings of a callback.

    data: plain data, or text as on the command line. path: dotted name of the section. Adds its
    problems to `problems`; returns None if it has any.
    """
    hints = field_types(cls)
    parsed = {
        name: _parse(hints[name], value) if isinstance(value, str) and name in hints else value
        for name, value in data.items()
    }
    return _section(cls, parsed, path, _Report(cls, problems))


def to_dict(run: object) -> dict[str, Plain]:
    """Convert the tree to nested plain data; tuples become lists. `from_dict(type(run),
    to_dict(run)) == run`."""
    data = plain(run)
    assert isinstance(data, dict), f"{type(run).__name__} is not a dataclass"
    return data


def flatten(run: object) -> dict[str, Plain]:
    """Return every leaf of the tree by its dotted path, in the order of the fields; a list is
    one leaf."""
    return flatten_plain(to_dict(run))


def differences(a: object, b: object) -> list[tuple[str, Plain, Plain]]:
    """Return (path, value in a, value in b) of every leaf that differs; a missing leaf is None."""
    left, right = flatten(a), flatten(b)
    paths = dict.fromkeys([*left, *right])
    return [
        (path, left.get(path), right.get(path))
        for path in paths
        if left.get(path) != right.get(path)
    ]


def flatten_plain(data: Mapping[str, Plain], prefix: str = "") -> dict[str, Plain]:
    """Return every leaf of nested plain data by its dotted path; a list is one leaf."""
    leaves = {}
    for key, value in data.items():
        path = join_path(prefix, str(key))
        leaves.update(flatten_plain(value, path) if isinstance(value, dict) else {path: value})
    return leaves


# --- YAML


def load_yaml(path: str | Path, cls: type[T], *, stored: bool = False) -> T:
    """Read a tree of type `cls` from a YAML file.

    `stored`: a run wrote the file, possibly with an older version, so renamed settings are
    translated. In a user's file they are errors that name the successor.

    Raises:
        ConfigError: the file is missing, is not YAML, writes a name twice, or does not fit `cls`.
    """
    data, problems = read_yaml_mapping(Path(path), cls)
    return build_from_file(cls, translate_stored_settings(data) if stored else data, path, problems)


def read_yaml_mapping(path: Path, cls: type) -> tuple[dict[str, Plain], list[str]]:
    """Return the mapping in a YAML file of settings of `cls`, and an error for each repeated name.

    Raises:
        ConfigError: the file is missing, is not YAML, or is not a mapping.
    """
    text = _read_text(path)
    try:
        data, repeated = _parse_document(text)
    except yaml.YAMLError as error:
        # PyYAML's name for a text without a file
        reason = str(error).replace("<unicode string>", str(path))
        raise ConfigError(
            f"{path} is not YAML: {reason}. The file must be a mapping of settings."
        ) from None
    if not isinstance(data, dict):
        content = "nothing" if data is None else f"only {data!r:.60}"
        raise ConfigError(
            f"{path} contains {content}: expected a mapping of "
            f"{', '.join(f.name for f in _fields(cls))}."
        )
    return data, [
        f"{name:.{_MAX_SHOWN}} is set more than once. Remove all but one." for name in repeated
    ]


def build_from_file(
    cls: type[T], data: Mapping[str, Plain], path: str | Path, problems: list[str]
) -> T:
    """Build the tree of a file's data, after earlier `problems` of the file.

    Raises:
        ConfigError: with the path of the file: there are problems, or the data does not fit `cls`.
    """
    try:
        return _build(cls, data, problems)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def save_yaml(run: object, path: str | Path) -> None:
    """Write the whole tree, including defaults, to a YAML file; `load_yaml` reads it."""
    Path(path).write_text(dump_yaml(run), encoding="utf-8")


def dump_yaml(run: object) -> str:
    """Return the tree as YAML text, in the order of the fields."""
    return str(yaml.safe_dump(to_dict(run), sort_keys=False, allow_unicode=True, width=100))


def _read_text(path: Path) -> str:
    try:
        return storage.read_text(path)
    except FileNotFoundError:
        beside = sorted(file.name for file in path.parent.glob("*.y*ml"))
        advice = did_you_mean(path.name, beside)
        raise ConfigError(f"{path}: no such file.{advice} Pass a YAML file that exists.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not text: byte {error.start} is not UTF-8. Pass a YAML file."
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}. Pass a readable YAML file."
        ) from None


def parse_yaml(text: str | bytes) -> Plain:
    """Parse a YAML text from an untrusted source: only plain data, of bounded size and depth.

    Raises:
        yaml.YAMLError: the text is not YAML, a value does not fit its tag, or a limit is exceeded.
    """
    return _parse_document(text)[0]


def parse_stored_settings(text: str | bytes) -> Plain:
    """Parse the text of a config.yaml that a run wrote, and translate renamed settings.

    Raises:
        yaml.YAMLError: as for `parse_yaml`.
    """
    data: Plain = translate_stored_settings(parse_yaml(text))
    return data


def _parse_document(text: str | bytes) -> tuple[Plain, list[str]]:
    """Return the data of a YAML text and the dotted paths of repeated keys."""
    if len(text) > MAX_YAML_CHARACTERS:
        raise yaml.YAMLError(
            f"it has {len(text):,} characters, and the limit is {MAX_YAML_CHARACTERS:,}"
        )
    loader = _BoundedLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, []
        keys = _KeyChecker()
        keys.visit(node, "", 0)
        return loader.construct_document(node), keys.repeated
    finally:
        loader.dispose()


class _BoundedLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
    """YAML loader of plain data that rejects deep nesting and reports values that do not match
    their tag."""

    def __init__(self, text: str | bytes) -> None:
        super().__init__(text)
        self._depth = self._num_nodes = 0

    def compose_node(
        self, parent: yaml.Node | None, index: Any
    ) -> yaml.Node | None:  # Any: PyYAML's own type
        """Read one node; called recursively for nested nodes."""
        self._num_nodes += 1
        _check_limits(self._depth, self._num_nodes, 0, self.peek_event().start_mark)
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Plain:
        """Return the plain data of one node."""
        try:
            data = super().construct_object(node, deep)
            if isinstance(data, int) and abs(data) > MAX_INT:
                raise ValueError(f"the largest is {MAX_INT}")
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:  # raised by int("abc"), for example
            value = f"{node.value!r:.60}" if isinstance(node, yaml.ScalarNode) else "this value"
            # other errors are internal to PyYAML
            reason = f" ({error})" if isinstance(error, ValueError) else ""
            text = f"{value} is not a valid {node.tag.rpartition(':')[2]}{reason:.80}"
            raise MarkedYAMLError(None, None, text, node.start_mark) from None
        return data


def _check_limits(depth: int, num_nodes: int, num_characters: int, mark: yaml.Mark) -> None:
    if depth > MAX_YAML_DEPTH:
        text = (
            f"mappings and lists are nested more than {MAX_YAML_DEPTH} deep, or an alias "
            "contains itself"
        )
    elif num_nodes > MAX_YAML_NODES:
        text = (
            f"the text has more than {MAX_YAML_NODES:,} keys and values (each use of an alias "
            "counts)"
        )
    elif num_characters > MAX_YAML_CHARACTERS:
        text = (
            f"the text has more than {MAX_YAML_CHARACTERS:,} characters (each use of an alias "
            "counts)"
        )
    else:
        return
    raise MarkedYAMLError(None, None, text, mark)


class _KeyChecker:
    """Visits every node of a document, with aliases expanded and within the limits, and collects
    repeated keys.

    YAML by itself keeps the last of several equal keys without a warning.
    """

    def __init__(self) -> None:
        self.repeated: list[str] = []
        self.num_nodes = self.num_characters = 0

    def visit(self, node: yaml.Node, path: str, depth: int) -> None:
        """Check a node and all nodes below it.

        Raises:
            yaml.YAMLError: the expanded document is too deep or too long.
        """
        self.num_nodes += 1
        self.num_characters += len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        _check_limits(depth, self.num_nodes, self.num_characters, node.start_mark)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.visit(item, path, depth + 1)
        elif isinstance(node, yaml.MappingNode):
            seen = set()
            for key, value in node.value:
                name = join_path(
                    path, str(key.value) if isinstance(key, yaml.ScalarNode) else key.tag
                )
                if name in seen:
                    self.repeated.append(name)
                seen.add(name)
                self.visit(key, path, depth + 1)
                self.visit(value, name, depth + 1)


# --- overrides


def apply_overrides(run: T, overrides: Mapping[str, Override]) -> T:
    """Return a copy of `run` with dotted fields replaced by values given as text: `{"parallel.tp":
    "2"}`.

    Values are numbers, `true`/`false`, `none` for an optional field, or a list of texts for a list;
    nested values may also be YAML in one text (`"[a, b]"`, `"{theta: 500000}"`). A mapping replaces
    the whole section.

    Raises:
        ConfigError: unknown names and values of the wrong type, all of them together.
    """
    data = to_dict(run)
    problems = []
    for path, text in overrides.items():
        hint = hint_at(type(run), path)
        if hint is None:
            problems.append(unknown_setting(type(run), path, _typed(text)))
        else:
            _put(type(run), data, path, _parse(hint, text))
    return _build(type(run), data, problems)


def _typed(text: Override) -> str:
    return text if isinstance(text, str) else " ".join(text)


def _put(cls: type, data: dict[str, Plain], path: str, value: Plain) -> None:
    """Set one leaf. An unset section on its path is created with defaults; a section given as a
    single word keeps that word in its `shorthand` field."""
    *sections, leaf = path.split(".")
    for number, section in enumerate(sections, 1):
        before = data.get(section)
        if not isinstance(before, dict):
            word = getattr(
                find_section_type(hint_at(cls, ".".join(sections[:number]))), "shorthand", None
            )
            data[section] = {} if word is None or before is None else {word: before}
        data = data[section]
    data[leaf] = value


def _parse(hint: Hint, text: Override) -> Plain:
    """Parse text as plain data of type `hint`; text that does not fit is returned unchanged and
    reported later with its path."""
    if isinstance(text, list):
        many = next((option for option in union_options(hint) if is_sequence_type(option)), None)
        if many is None:
            return _parse(hint, text[0]) if len(text) == 1 else text
        hints = item_hints(many, len(text))
        return (
            [_parse(item, word) for item, word in zip(hints, text)]
            if len(hints) == len(text)
            else text
        )
    if (
        type(None) in union_options(hint)
        and text.lower() in _NONE_WORDS
        and text not in literal_values(hint)
    ):
        return None
    candidates = [
        _parse_one(option, text) for option in union_options(hint) if option is not type(None)
    ]
    return next((value for value in candidates if _fits(hint, value)), candidates[0])


def _parse_one(option: Hint, text: str) -> Plain:
    if option is bool:
        return _BOOL_WORDS.get(text.lower(), text)
    if type_origin(option) is Literal:
        return next((value for value in get_args(option) if str(value) == text), text)
    if option in (int, float):
        try:
            return option(text)
        except ValueError:
            return text
    nested = is_sequence_type(option) or is_section_type(option) or type_origin(option) is dict
    if nested and text[:1] in ("[", "{"):
        try:
            return parse_yaml(text)
        except yaml.YAMLError:
            return text
    return _parse(option, [text]) if is_sequence_type(option) else text


# --- checking


@dataclass(frozen=True, slots=True)
class _Report:
    """Collects problems while a tree of type `root` is built; without a root only their number
    matters."""

    root: type | None
    problems: list[str]

    def unknown(self, path: str, value: Plain) -> None:
        """Add an unknown name, or each unknown name of a renamed section."""
        if isinstance(value, Mapping) and value and find_setting_successor(path) is not None:
            for name, item in value.items():
                self.unknown(join_path(path, str(name)), item)
            return
        if self.root is None or len(self.problems) >= MAX_PROBLEMS:
            self.problems.append(f"{path}: there is no such setting.")
        else:
            self.problems.append(unknown_setting(self.root, path, f"{value!r:.60}"))

    def renamed(self, path: str, value: Plain, successor: str) -> None:
        """Add a value that was renamed."""
        self.problems.append(f"{path}={value}: this value was renamed. Use {path}={successor}.")

    def mismatch(self, path: str, hint: Hint, value: Plain) -> None:
        """Add a value of the wrong type."""
        if self.root is None or len(self.problems) >= MAX_PROBLEMS:
            self.problems.append(f"{path}: wrong type.")
        else:
            self.problems.append(_mismatch(path, hint, value))


def _build(cls: type[T], data: Mapping[str, Plain], problems: list[str]) -> T:
    """Build a tree, or raise `problems` together with all problems of `data`."""
    run: T = _section(cls, data, "", _Report(cls, problems))
    raise_all(problems)
    return run


def _section(
    cls: type, data: Mapping[Any, Plain], path: str, report: _Report
) -> Any:  # Any: an instance of `cls`
    hints, values, before = field_types(cls), {}, len(report.problems)
    for key in data:
        if key not in hints:
            report.unknown(join_path(path, f"{key!s:.{_MAX_SHOWN}}"), data[key])
    for field in _fields(cls):
        hint, at = hints[field.name], join_path(path, field.name)
        if field.name in data:
            values[field.name] = _value(hint, data[field.name], at, report)
        elif is_required(field):
            report.problems.append(_missing(cls, field.name, at))
    return cls(**values) if len(report.problems) == before else None


def _missing(cls: type, name: str, path: str) -> str:
    hint = field_types(cls)[name]
    section = find_section_type(hint)
    if section is None:
        return (
            f"{path} is missing. Set it to {describe_type(hint)}: {field_docs(cls).get(name, '')}"
        )
    needed = [join_path(path, field.name) for field in _fields(section) if is_required(field)]
    return (
        f"{path} is missing: {field_docs(cls).get(name, '')} Set "
        f"{' and '.join(needed) or path + ' to a mapping'}."
    )


def _value(
    hint: Hint, value: Plain, path: str, report: _Report
) -> Any:  # Any: as dynamic as `hint`
    """Convert `value` to the type `hint`. Problems go to `report`; the result is then undefined."""
    successor = find_value_successor(path, value)
    if successor is not None:
        return report.renamed(path, value, successor)
    if hint is Any:  # checked later, by the code that defines the setting
        return value
    if type(value) is hint and _scalar(hint, value) is not None:  # fast path for most values
        return value
    if value is None and type(None) in union_options(hint):
        return None
    options = [option for option in union_options(hint) if option is not type(None)]
    section = find_section_type(hint)
    if section is not None and isinstance(value, Mapping):
        return _section(section, value, path, report)
    if len(options) > 1:
        fitting = [option for option in options if _fits(option, value)]
        # 1 stays an int in `float | int`
        exact = [option for option in fitting if option is type(value)]
        if not fitting:
            return report.mismatch(path, hint, value)
        return _value((exact or fitting)[0], value, path, report)
    (option,) = options
    if is_sequence_type(option) and isinstance(value, list | tuple):
        return _many(option, value, path, report)
    if type_origin(option) is dict and isinstance(value, Mapping):
        return {
            str(k): _value(get_args(option)[1], v, join_path(path, str(k)), report)
            for k, v in value.items()
        }
    scalar = _scalar(option, value)
    return report.mismatch(path, hint, value) if scalar is None else scalar


def _many(
    option: Hint, items: Sequence[Plain], path: str, report: _Report
) -> Any:  # Any: a list or a tuple
    hints = item_hints(option, len(items))
    if len(hints) != len(items):
        return report.mismatch(path, option, list(items))
    values = [
        _value(hint, item, f"{path}[{i}]", report)
        for i, (hint, item) in enumerate(zip(hints, items))
    ]
    return tuple(values) if type_origin(option) is tuple else values


def _scalar(option: Hint, value: Plain) -> Plain:
    """Return `value` as a bool, int, float, text or literal; None if it is not of that type."""
    if type_origin(option) is Literal:
        return next(
            (word for word in get_args(option) if word == value and type(word) is type(value)), None
        )
    if option in (int, float) and isinstance(value, str) and _EXPONENT.fullmatch(value):
        number = float(value)
        value = int(number) if option is int and number.is_integer() else number
    if option is float and type(value) is int and abs(value) < MAX_INT:
        return float(value)
    if (option is int and type(value) is int and abs(value) > MAX_INT) or (
        option is str and not _is_text(value)
    ):
        return None
    return value if type(value) is option else None


def _fits(hint: Hint, value: Plain) -> bool:
    report = _Report(None, [])
    _value(hint, value, "", report)
    return not report.problems


def _is_text(value: Plain) -> bool:
    """Return whether a value is text that UTF-8 and file names can hold: no NUL, no lone
    surrogate."""
    return isinstance(value, str) and not _NOT_TEXT.search(value)


def _mismatch(path: str, hint: Hint, value: Plain) -> str:
    short = (
        isinstance(value, str)
        and value.isprintable()
        and value.strip()
        and len(value) <= _MAX_SHOWN
    )
    shown = value if short else f"{value!r:.60}"
    if isinstance(value, str) and str in union_options(hint) and not _is_text(value):
        return (
            f"{path}={shown}: it contains NUL or a character that is not valid Unicode. Use "
            "UTF-8 text without it."
        )
    if int in union_options(hint) and type(value) is int and abs(value) > MAX_INT:
        return (
            f"{path}={shown}: the largest whole number is {MAX_INT} (2**63 - 1). Use a smaller one."
        )
    if literal_values(hint) and all(
        type_origin(option) is Literal or option is type(None) or is_section_type(option)
        for option in union_options(hint)
    ):
        choices = describe_type(hint)
        return (
            f"{path}={shown}: there is no such choice.{_nearest_choice(hint, value)} Use {choices}."
        )
    return (
        f"{path}={shown}: expected {describe_type(hint)}, found "
        f"{describe_type(type(value))}.{_advice(hint, value)}"
    )


def _nearest_choice(hint: Hint, value: Plain) -> str:
    """Suggest the intended choice: a different spelling of it, else similar names (not for
    numbers)."""
    words = literal_values(hint)
    if value in [str(word) for word in words]:
        return " Remove the quotes."
    typed = str(value).strip().lower().replace("_", "-").replace(" ", "-")
    for word in words:
        same_number = type(word) is int and typed.removesuffix(".0") == str(word)
        if same_number or str(word).lower().replace("_", "-") == typed:
            return f" Did you mean {word}?"
    return did_you_mean(str(value), [word for word in words if isinstance(word, str)])


def _advice(hint: Hint, value: Plain) -> str:
    """Suggest a value that would work, if there is an obvious one."""
    options = union_options(hint)
    many = next((option for option in options if is_sequence_type(option)), None)
    if isinstance(value, str) and literal_values(hint):
        return _nearest_choice(hint, value)
    if int in options and isinstance(value, float) and value.is_integer():
        return f" Use {int(value)}."
    if isinstance(value, str) and many is not None and _fits(many, [value]):
        return f" Use [{value}]."
    if isinstance(value, str) and many is not None and literal_values(item_hints(many, 1)[0]):
        return _nearest_choice(item_hints(many, 1)[0], value)
    if isinstance(value, str) and not isinstance(_parse(hint, value), str):
        return " Remove the quotes."
    if str in options and isinstance(value, bool | int | float):
        return f" Put it in quotes: '{value}'."
    return ""


def _fields(cls: type) -> Any:  # Any: `fields` of a class not known to be a dataclass until now
    return fields(cls)
