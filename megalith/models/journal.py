"""What a conversion has written so far, one line for each piece, so that the next one goes on where
it was killed."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith import storage

NAME = "journal.jsonl"

Recipe = Mapping[str, str]
"""What decides every byte of a conversion: its source and its settings, each under a name for
people."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A conversion that may be the second one of its kind."""

    recipe: Recipe
    restart: bool = False
    """Begin anew whatever an earlier one left."""

    take_over: bool = False
    """Go on also with what a conversion left that another machine may still be at work at."""

    keep: bool = False
    """Leave what is whole to the next one if this one ends early; what was there before is left in
    any case."""


class ConversionJournal:
    """The pieces that are whole, by name. Threads may add some at the same time."""

    def __init__(
        self, path: Path | None, done: Mapping[str, Any] | None = None
    ) -> None:  # Any: JSON
        """`path` unset: nothing is written down."""
        self._path, self._done, self._lock = path, dict(done or {}), threading.Lock()

    def __len__(self) -> int:
        return len(self._done)

    def moved_to(self, folder: Path) -> "ConversionJournal":
        """The same, in a folder that was renamed; a line that was cut short is ended, and nobody's
        then."""
        if storage.read_bytes(folder / NAME)[-1:] != b"\n":
            storage.append_line(folder / NAME, b"")
        return ConversionJournal(folder / NAME, self._done)

    def found(self, name: str) -> Any | None:  # JSON
        """What was written down of a piece."""
        return self._done.get(name)

    def add(self, name: str, record: Any) -> None:  # JSON
        """Write down that a piece is whole.

        Raises:
            OSError: the disk refused.
        """
        with self._lock:
            if self._path is not None:
                storage.append_line(
                    self._path, json.dumps([name, record], separators=(",", ":")).encode()
                )
            self._done[name] = record


def begin_journal(folder: Path, recipe: Recipe) -> ConversionJournal:
    """An empty one in a new folder."""
    storage.append_line(folder / NAME, json.dumps(dict(recipe)).encode())
    return ConversionJournal(folder / NAME)


def read_journal(folder: Path) -> tuple[Recipe, ConversionJournal] | None:
    """The one that a conversion left, as far as its lines are whole; None: it left none that can be
    read."""
    try:
        first, *lines = storage.read_bytes(folder / NAME).split(b"\n")
        recipe = storage.parse_json(first)
    except (OSError, ValueError):
        return None
    if not isinstance(recipe, dict):
        return None
    done = {}
    for line in lines[
        :-1
    ]:  # after the last end of a line there is nothing, or a line that was cut short
        try:
            name, record = storage.parse_json(line)
        except (ValueError, TypeError):
            continue
        done[str(name)] = record
    return {str(name): str(value) for name, value in recipe.items()}, ConversionJournal(
        folder / NAME, done
    )


def changed(before: Recipe, now: Recipe) -> list[str]:
    """How two conversions differ, a line each."""
    names = dict.fromkeys((*now, *before))
    return [
        f"{name}: {before.get(name, 'nothing')} then, {now.get(name, 'nothing')} now"
        for name in names
        if before.get(name) != now.get(name)
    ]
