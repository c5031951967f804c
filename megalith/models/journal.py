"""Journal of a conversion: a line for each finished piece, from which an interrupted conversion is
resumed."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith import storage

NAME = "journal.jsonl"

Recipe = Mapping[str, str]
"""What determines every byte of a conversion, by readable names: its source and its settings."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """How a conversion treats the work of an interrupted one with the same recipe."""

    recipe: Recipe
    restart: bool = False
    """Discard the work of an interrupted conversion."""

    take_over: bool = False
    """Also resume a conversion that may still be running on another machine."""

    keep: bool = False
    """Keep finished pieces if this conversion fails; resumed ones are always kept."""


class ConversionJournal:
    """The finished pieces of a conversion, by name. Thread-safe."""

    def __init__(
        self, path: Path | None, done: Mapping[str, Any] | None = None
    ) -> None:  # Any: JSON
        """`path` unset: no file is written."""
        self._path, self._done, self._lock = path, dict(done or {}), threading.Lock()

    def __len__(self) -> int:
        return len(self._done)

    def reopen(self, folder: Path) -> "ConversionJournal":
        """Return the journal in a renamed folder; a truncated last line is terminated and
        ignored."""
        if storage.read_bytes(folder / NAME)[-1:] != b"\n":
            storage.append_line(folder / NAME, b"")
        return ConversionJournal(folder / NAME, self._done)

    def found(self, name: str) -> Any | None:  # JSON
        """Return the record of a piece."""
        return self._done.get(name)

    def add(self, name: str, record: Any) -> None:  # JSON
        """Record that a piece is finished.

        Raises:
            OSError: writing failed.
        """
        with self._lock:
            if self._path is not None:
                storage.append_line(
                    self._path, json.dumps([name, record], separators=(",", ":")).encode()
                )
            self._done[name] = record


def begin_journal(folder: Path, recipe: Recipe) -> ConversionJournal:
    """Create an empty journal in a new folder."""
    storage.append_line(folder / NAME, json.dumps(dict(recipe)).encode())
    return ConversionJournal(folder / NAME)


def read_journal(folder: Path) -> tuple[Recipe, ConversionJournal] | None:
    """Read the complete lines of the journal of an interrupted conversion; None: there is no
    readable one."""
    try:
        first, *lines = storage.read_bytes(folder / NAME).split(b"\n")
        recipe = storage.parse_json(first)
    except (OSError, ValueError):
        return None
    if not isinstance(recipe, dict):
        return None
    done = {}
    for line in lines[:-1]:  # the last element is empty or a truncated line
        try:
            name, record = storage.parse_json(line)
        except (ValueError, TypeError):
            continue
        done[str(name)] = record
    return {str(name): str(value) for name, value in recipe.items()}, ConversionJournal(
        folder / NAME, done
    )


def describe_changes(before: Recipe, now: Recipe) -> list[str]:
    """Return how two recipes differ, a line each."""
    names = dict.fromkeys((*now, *before))
    return [
        f"{name}: {before.get(name, 'nothing')} before, {now.get(name, 'nothing')} now"
        for name in names
        if before.get(name) != now.get(name)
    ]
