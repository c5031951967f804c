"""Composition of YAML files of settings: `include` merges other files, `${NAME}` inserts
environment variables, and each value keeps its source."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import yaml

from megalith.config.fields import Plain, join_path
from megalith.config.tree import build_from_file, parse_yaml, read_yaml_mapping
from megalith.errors import ConfigError

T = TypeVar("T")

INCLUDE = "include"
"""Key of a section that names other files, whose settings are merged below those of the section."""

MAX_INCLUDE_DEPTH = 10
"""Maximum nesting of included files. Heuristic: more is a mistake."""

MAX_INCLUDED_FILES = 100
"""Maximum number of included files. Heuristic: files that include two others each, ten deep, would
be a thousand."""

_VARIABLE = re.compile(r"\$\$\{|\$\{([^}:]*)(?::([^}]*))?\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(slots=True)
class ComposedSettings:
    """Settings of a YAML file with its included files, before they are checked."""

    data: dict[str, Plain]
    sources: dict[str, str]
    """Source of each leaf by its dotted path: a file, also with the environment variables."""

    problems: list[str] = field(default_factory=list)


def load_composed(path: Path, cls: type[T], variables: Mapping[str, str]) -> T:
    """Read a tree of type `cls` from a user's YAML file, which may include other files and
    `variables`.

    Raises:
        ConfigError: a file is missing or not YAML, includes itself, names a variable that is not
            set, or the result does not fit `cls`.
    """
    composed = compose(path, cls, variables)
    return build_from_file(cls, composed.data, path, composed.problems)


def compose(path: Path, cls: type, variables: Mapping[str, str]) -> ComposedSettings:
    """Read a YAML file of settings of `cls`, with the files that it includes and `variables`.

    Raises:
        ConfigError: a file is missing or is not a mapping, or a file includes itself.
    """
    composer = _Composer(cls, variables)
    data = composer.read(path, "", ())
    return ComposedSettings(data, composer.sources, composer.problems)


class _Composer:
    """Reads files recursively and collects sources and problems."""

    def __init__(self, cls: type, variables: Mapping[str, str]) -> None:
        self.cls, self.variables = cls, variables
        self.sources: dict[str, str] = {}
        self.problems: list[str] = []
        self.num_files = 0

    def read(self, path: Path, section: str, parents: tuple[Path, ...]) -> dict[str, Plain]:
        """Return the data of a file; `section`: dotted path of the section that it is part of."""
        self.num_files += 1
        if path.resolve() in [parent.resolve() for parent in parents]:
            chain = " -> ".join(map(str, (*parents, path)))
            raise ConfigError(f"{path} includes itself: {chain}. Remove one of the includes.")
        if len(parents) > MAX_INCLUDE_DEPTH or self.num_files > MAX_INCLUDED_FILES:
            raise ConfigError(
                f"{parents[0]} includes too many files: at most {MAX_INCLUDED_FILES} files, nested "
                f"at most {MAX_INCLUDE_DEPTH} deep. Merge some of them."
            )
        data, repeated = read_yaml_mapping(path, self.cls)
        self.problems += [f"{path}: {problem}" if parents else problem for problem in repeated]
        return self._expand_section(data, path, section, (*parents, path))

    def _expand_section(
        self, data: Mapping[str, Plain], path: Path, section: str, parents: tuple[Path, ...]
    ) -> dict[str, Plain]:
        """Return a section with its includes merged and its variables replaced."""
        merged: dict[str, Plain] = {}
        for name in self._included_files(data, path, section):
            merged = _merge(merged, self.read(path.parent / name, section, parents))
        own: dict[str, Plain] = {}
        for key, value in data.items():
            if key == INCLUDE:
                continue
            name = join_path(section, str(key))
            if isinstance(value, dict):
                self.sources.pop(name, None)  # of a single value that the section replaces
                own[key] = self._expand_section(value, path, name, parents)
            else:
                self._forget(name)
                self.sources[name] = str(path)
                own[key] = self._expand(value, path, name)
        return _merge(merged, own)

    def _included_files(self, data: Mapping[str, Plain], path: Path, section: str) -> list[str]:
        """Return the names of the files that a section includes."""
        names = data.get(INCLUDE, [])
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not all(map(_is_file_name, names)):
            where = join_path(section, INCLUDE)
            self.problems.append(
                f"{where}={data[INCLUDE]!r:.60} in {path} must be the name of a YAML file, or a "
                f"list of names. Use for example {where}: base.yaml."
            )
            return []
        expanded = [
            self._expand_text(str(name), path, join_path(section, INCLUDE), {}) for name in names
        ]
        return [name for name in expanded if "${" not in name]

    def _forget(self, name: str) -> None:
        """Remove the sources of a section that a single value replaces."""
        for path in [path for path in self.sources if path.startswith(f"{name}.")]:
            del self.sources[path]

    def _expand(self, value: Plain, path: Path, name: str) -> Plain:
        """Return a value with variables replaced; text that consists of one variable is parsed as
        YAML, so that numbers are numbers."""
        if isinstance(value, list):
            return [self._expand(item, path, name) for item in value]
        if isinstance(value, dict):
            return {key: self._expand(item, path, name) for key, item in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        used: dict[str, str] = {}
        text = self._expand_text(value, path, name, used)
        if used:
            self.sources[name] = f"{path}, environment variable {', '.join(used)}"
        whole = _VARIABLE.fullmatch(value)
        if whole is None or whole[0] == "$${":
            return text
        try:
            return parse_yaml(text)
        except yaml.YAMLError:
            return text

    def _expand_text(self, text: str, path: Path, name: str, used: dict[str, str]) -> str:
        """Return text with variables replaced; adds those of the environment to `used`."""

        def replace_variable(match: re.Match[str]) -> str:
            variable, default = match[1], match[2]
            if match[0] == "$${":
                return "${"
            if not _NAME.fullmatch(variable):
                self.problems.append(
                    f"{name}={text!r:.60} in {path}: {variable!r} is not the name of an "
                    "environment variable. Use ${NAME} or ${NAME:default}, or $${ for the "
                    "characters ${."
                )
            elif variable in self.variables:
                used[variable] = self.variables[variable]
                return self.variables[variable]
            elif default is not None:
                return str(default)
            else:
                self.problems.append(
                    f"{name}={text!r:.60} in {path}: the environment variable {variable} is not "
                    f"set. Set it, or write a default: ${{{variable}:default}}."
                )
            return match[0]

        return _VARIABLE.sub(replace_variable, text)


def _is_file_name(name: Plain) -> bool:
    return isinstance(name, str) and "\0" not in name


def _merge(base: Mapping[str, Plain], over: Mapping[str, Plain]) -> dict[str, Plain]:
    """Return `base` with the settings of `over`: sections are merged, other values replaced."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = (
            _merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
        )
    return merged
