"""Settings that were renamed: the table `renamed.yaml`, successors for error messages, and
translation of stored configs."""

import functools
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any, NamedTuple

import yaml


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
