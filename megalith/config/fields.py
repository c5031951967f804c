"""Introspection of config dataclasses: names, types, valid ranges, defaults and documentation of
their settings, and the table of renamed settings.
"""

import ast
import functools
import inspect
import math
import textwrap
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from importlib import resources
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeAlias,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import yaml

from megalith.errors import did_you_mean

# --- settings that were renamed: the table `renamed.yaml`, successors for error messages, and
# translation of stored configs


class RenamedSettings(NamedTuple):
    """Names and values of settings in older versions, each with its successor."""

    settings: Mapping[str, str]
    """Old dotted name -> new dotted name, of settings and of whole sections."""

    values: Mapping[str, Mapping[str, str]]
    """New dotted name -> {old value: new value}."""


@functools.cache
def read_renamed_settings() -> RenamedSettings:
    """Return the table that ships with the package."""
    table = yaml.safe_load(
        resources.files(__package__).joinpath("renamed.yaml").read_text(encoding="utf-8")
    )
    return RenamedSettings(table["settings"], table["values"])


def find_setting_successor(path: str) -> str | None:
    """Return the name that replaces the dotted name `path`, or None if it was not renamed.

    >>> find_setting_successor("model.mtp.depths"), find_setting_successor("model.hidden_size")
    ('model.mtp.num_layers', None)
    """
    names = read_renamed_settings().settings
    sections = path.split(".")
    for length in range(len(sections), 0, -1):
        new = names.get(".".join(sections[:length]))
        if new is not None:
            return ".".join([new, *sections[length:]])
    return None


def find_value_successor(path: str, value: object) -> str | None:
    """Return the value that replaces `value` of the setting `path` (its current name), or None
    if it was not renamed."""
    return (
        read_renamed_settings().values.get(path, {}).get(value) if isinstance(value, str) else None
    )


def translate_stored_settings(
    data: Any,
) -> Any:  # parsed YAML of any shape; anything but a mapping is returned unchanged
    """Return the settings of a stored config.yaml with renamed settings and values translated;
    unknown names are unchanged."""
    if not isinstance(data, Mapping):
        return data
    translated: dict[str, Any] = {}
    for path, value in _leaves(data, ""):
        new = find_setting_successor(path) or path
        section = translated
        *parents, leaf = new.split(".")
        for parent in parents:
            inner = section.setdefault(parent, {})
            section = inner if isinstance(inner, dict) else section
        section[leaf] = find_value_successor(new, value) or value
    return translated


def _leaves(data: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, path)
        else:
            yield path, value


Hint: TypeAlias = Any  # a type annotation: a class, `int | None`, `Literal[...]`, `tuple[str, ...]`
Plain: TypeAlias = Any  # JSON or YAML data: None, bool, int, float, str, list, dict


# --- valid ranges, as metadata of fields: `Annotated[int, Ge(1)]`, `Annotated[float | None, Gt(0)]`

MAX_NUMBER = 1e6
"""Largest absolute value of a float whose field has no other bound. Heuristic: far above all common
values, and small enough that it alone causes no fp32 overflow in the first steps."""


@dataclass(frozen=True, slots=True)
class Bound(ABC):
    """Bound of the numbers of a field, of each item in a list; an unset field satisfies it."""

    limit: float
    words: ClassVar[str]

    @abstractmethod
    def holds(self, value: float) -> bool:
        """Return whether a number satisfies the bound; NaN does not."""

    def __str__(self) -> str:
        limit = self.limit
        return f"{self.words} {limit if isinstance(limit, int) else format(limit, 'g')}"


class Ge(Bound):
    """Greater than or equal to a limit."""

    words = "at least"

    def holds(self, value: float) -> bool:
        """Return whether a number satisfies the bound."""
        return value >= self.limit


class Gt(Bound):
    """Greater than a limit."""

    words = "above"

    def holds(self, value: float) -> bool:
        """Return whether a number satisfies the bound."""
        return value > self.limit


class Le(Bound):
    """Less than or equal to a limit."""

    words = "at most"

    def holds(self, value: float) -> bool:
        """Return whether a number satisfies the bound."""
        return value <= self.limit


class Lt(Bound):
    """Less than a limit."""

    words = "below"

    def holds(self, value: float) -> bool:
        """Return whether a number satisfies the bound."""
        return value < self.limit


@dataclass(frozen=True, slots=True)
class Example:
    """Value of a field that messages recommend."""

    value: float


class FieldRange(NamedTuple):
    """Valid range of the numbers of a field."""

    bounds: tuple[Bound, ...]
    """Bounds of whole numbers."""

    float_bounds: tuple[Bound, ...]
    """Bounds of floats, at most `MAX_NUMBER` by default."""

    example: float | None
    """Recommended value."""

    default: Plain
    """Default of the field."""


@functools.cache
def field_ranges(cls: type) -> Mapping[str, FieldRange]:
    """Return the valid range of every field of a dataclass, from the metadata of its type."""
    ranges = {}
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        metadata = getattr(hints[field.name], "__metadata__", ())
        bounds = tuple(item for item in metadata if isinstance(item, Bound))
        float_bounds = bounds
        if not any(isinstance(bound, Ge | Gt) for bound in bounds):
            float_bounds = Ge(-MAX_NUMBER), *float_bounds
        if not any(isinstance(bound, Le | Lt) for bound in bounds):
            float_bounds = *float_bounds, Le(MAX_NUMBER)
        example = next((item.value for item in metadata if isinstance(item, Example)), None)
        ranges[field.name] = FieldRange(bounds, float_bounds, example, field_default(field))
    return ranges


def range_problems(
    section: object,
    path: str = "",
    *,
    kinds: tuple[type, ...] = (int, float),
    names: Sequence[str] | None = None,
) -> list[str]:
    """Return a message for every number of a config section, and of the sections in it, that is
    outside the range of its field, NaN or infinite.

    path: dotted name of the section; kinds: types of the numbers that are checked; names: fields of
    the section that are checked; None: all.
    """
    return [
        text
        for name, value, valid in _iter_numbers(section, path, None, names)
        if type(value) in kinds and (text := _range_problem(name, value, valid)) is not None
    ]


def _iter_numbers(
    value: object, path: str, valid: FieldRange | None, names: Sequence[str] | None = None
) -> Iterator[tuple[str, float, FieldRange]]:
    """Yield every number of a value with its dotted name and the range of its field; `names`: the
    fields of a section that are read; None: all."""
    if is_dataclass(value) and not isinstance(value, type):
        ranges = field_ranges(type(value))
        for name in ranges if names is None else names:
            yield from _iter_numbers(getattr(value, name), join_path(path, name), ranges[name])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _iter_numbers(item, f"{path}[{index}]", valid)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if is_dataclass(item):
                yield from _iter_numbers(item, join_path(path, str(key)), valid)
    elif isinstance(value, int | float) and not isinstance(value, bool) and valid is not None:
        yield path, value, valid


def _range_problem(path: str, value: float, valid: FieldRange) -> str | None:
    """Return the message about a number that is outside its range."""
    bounds = valid.float_bounds if isinstance(value, float) else valid.bounds
    broken = next((bound for bound in bounds if not bound.holds(value)), None)
    if broken is None:
        return None
    if not math.isfinite(value):
        if not valid.bounds:
            return f"{path}={value} must be a finite number. Use {valid.default}."
        broken = valid.bounds[0]
    reason = f"must be {broken}"
    if isinstance(value, float) and isinstance(broken, Ge | Gt):
        reason = f"must be a finite number {'of ' if isinstance(broken, Ge) else ''}{broken}"
    return f"{path}={value} {reason}. {_range_advice(path, broken, valid)}"


def _range_advice(path: str, broken: Bound, valid: FieldRange) -> str:
    """Return which value to use instead of one that breaks a bound."""
    limit = str(broken).removeprefix(f"{broken.words} ")
    if isinstance(broken, Le):
        return f"Set {path} to {limit} or less."
    if isinstance(broken, Ge) and valid.example is None:
        return f"Set {path} to {limit} or more."
    example = valid.default if valid.example is None else valid.example
    return f"Use {example if isinstance(example, int | float) else broken.limit + 1}."


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingLeaf:
    """One setting (leaf field) of a config tree."""

    path: str
    """Dotted name."""

    hint: Hint
    """Type annotation."""

    required: bool
    """Whether it has no default."""

    default: Plain
    """Default value as plain data; None if required."""

    doc: str
    """Docstring, in one line."""

    bounds: tuple[Bound, ...] = ()
    """Valid range."""


def describe(cls: type) -> tuple[SettingLeaf, ...]:
    """Return every setting of `cls`, in the order of the fields."""
    return _describe(cls, "")


def setting_names(cls: type) -> list[str]:
    """Return the dotted name of every setting of `cls`."""
    return [setting.path for setting in describe(cls)]


def hint_at(cls: type, path: str) -> Hint | None:
    """Return the type of the section or setting at a dotted path; None if it does not exist."""
    hint: Hint = cls
    for part in path.split("."):
        section = find_section_type(hint)
        mapping = next(
            (option for option in union_options(hint) if type_origin(option) is dict), None
        )
        if section is not None:
            hint = field_types(section).get(part)
        else:
            hint = get_args(mapping)[1] if mapping is not None else None
        if hint is None:
            return None
    return hint


def unknown_setting(cls: type, path: str, value: str | None = None) -> str:
    """Return the error message for a dotted name that `cls` does not have, with its successor or
    similar names."""
    given = path if value is None else f"{path}={value}"
    successor = find_setting_successor(path)
    if successor is not None and hint_at(cls, successor) is not None:
        return f"{given}: this setting was renamed. Use {successor}."
    item = _find_item_section(cls, path)
    if item is not None:
        names = [join_path(path.rpartition(".")[0], name) for name in field_types(item)]
        advice = did_you_mean(path, names) or f" Use one of {', '.join(names)}."
        return f"{given}: there is no such setting.{advice}"
    advice = did_you_mean(path, [*field_types(cls), *setting_names(cls)])
    if not advice:
        prefix = path.rpartition(".")[0]
        hint = hint_at(cls, prefix)
        section = find_section_type(hint)
        names = (
            [join_path(prefix, name) for name in field_types(section)]
            if section
            else [*field_types(cls)]
        )
        advice = (
            f" Use one of {', '.join(names)}."
            if section or hint is None
            else f" {prefix} is a single value. Set {prefix} instead."
        )
    return f"{given}: there is no such setting.{advice}"


def _find_item_section(cls: type, path: str) -> type | None:
    """Return the section of the list entry whose setting a path such as a.list[0].name names; None
    if it is no such path."""
    entry, _, name = path.rpartition(".")
    listed, bracket, _ = entry.rpartition("[")
    hint = hint_at(cls, listed) if entry.endswith("]") and name and "[" not in listed else None
    many = next((each for each in union_options(hint) if is_sequence_type(each)), None)
    return None if many is None or not bracket else find_section_type(item_hints(many, 1)[0])


def is_required(field: "Field[Any]") -> bool:
    """Return whether a dataclass field has no default."""
    return field.default is MISSING and field.default_factory is MISSING


def field_default(field: "Field[Any]") -> Any:
    """Return the default of a dataclass field; None if it is required."""
    if field.default_factory is not MISSING:
        return field.default_factory()
    return None if field.default is MISSING else field.default


@functools.cache
def field_types(cls: type) -> Mapping[str, Hint]:
    """Return the type of every field of a dataclass."""
    return get_type_hints(cls)


@functools.cache
def field_docs(cls: type) -> Mapping[str, str]:
    """Return the docstring of each field of a dataclass, in one line."""
    docs: dict[str, str] = {}
    for base in cls.__bases__:
        if is_dataclass(base):
            docs |= field_docs(base)
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except OSError:  # a frozen application has no source files, so its help has no docstrings
        return docs
    assert isinstance(tree, ast.ClassDef)
    for field, text in zip(tree.body, tree.body[1:]):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(doc))
            ):
                docs[name] = " ".join(doc.split())
    return docs


def plain(value: object) -> Plain:
    """Convert nested dataclasses, mappings and tuples to dicts and lists."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def join_path(prefix: str, name: str) -> str:
    """Join a dotted prefix and a name; the prefix of the root is empty."""
    return f"{prefix}.{name}" if prefix else name


@functools.cache
def _describe(cls: type, prefix: str) -> tuple[SettingLeaf, ...]:
    settings: list[SettingLeaf] = []
    for field in fields(cls):
        path, hint = join_path(prefix, field.name), field_types(cls)[field.name]
        section = find_section_type(hint)
        if section is not None and not literal_values(hint):
            settings += _describe(section, path)
            continue
        setting = SettingLeaf(
            path=path,
            hint=hint,
            required=is_required(field),
            default=plain(field_default(field)),
            doc=field_docs(cls).get(field.name, ""),
            bounds=field_ranges(cls)[field.name].bounds,
        )
        settings.append(setting)
        # the section may be a single word or a mapping
        settings += () if section is None else _describe(section, path)
    return tuple(settings)


def describe_type(hint: Hint) -> str:
    """Describe a type in words: `a whole number`, `true or false`, `one of a, b`, `a list of
    text`, `a number or null`."""
    options = union_options(hint)
    if len(options) > 1:
        return " or ".join(describe_type(option) for option in options)
    (option,) = options
    if type_origin(option) is Literal:
        return f"one of {', '.join(str(value) for value in get_args(option))}"
    if is_sequence_type(option):
        arguments = get_args(option)
        if type_origin(option) is list or arguments[-1:] == (Ellipsis,):
            return f"a list of {describe_type(arguments[0])}"
        return (
            f"a list of {len(arguments)}: "
            f"{', '.join(describe_type(argument) for argument in arguments)}"
        )
    if type_origin(option) is dict or is_section_type(option):
        return "a mapping"
    words = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        type(None): "null",
    }
    words |= {dict: "a mapping", list: "a list"}
    return words.get(option, str(option))


def union_options(hint: Hint) -> tuple[Hint, ...]:
    """Return the alternatives of a union; any other type is its only alternative."""
    return get_args(hint) if type_origin(hint) in (Union, types.UnionType) else (hint,)


def literal_values(hint: Hint) -> list[Plain]:
    """Return the values that a `Literal` among the alternatives allows."""
    return [
        value
        for option in union_options(hint)
        if type_origin(option) is Literal
        for value in get_args(option)
    ]


@functools.cache
def find_section_type(hint: Hint) -> type | None:
    """Return the dataclass of a section, also if it is optional; None for a leaf."""
    return next((option for option in union_options(hint) if is_section_type(option)), None)


def is_section_type(option: Hint) -> bool:
    """Return whether this type is a dataclass."""
    return isinstance(option, type) and is_dataclass(option)


def is_sequence_type(option: Hint) -> bool:
    """Return whether this type is a list or a tuple."""
    return type_origin(option) in (list, tuple)


def item_hints(option: Hint, count: int) -> list[Hint]:
    """Return the type of each of `count` items of a list or tuple; a tuple of fixed length has
    its own count."""
    arguments = get_args(option)
    if type_origin(option) is list or arguments[-1:] == (Ellipsis,):
        return [arguments[0]] * count
    return list(arguments)


@functools.cache  # called for every value of every config that is built
def type_origin(hint: Hint) -> Any:  # Any: list, tuple, dict, Literal or Union, which share no type
    """Return `list` for `list[str]`, `Literal` for `Literal[1]`, None for a plain class."""
    return get_origin(hint)
