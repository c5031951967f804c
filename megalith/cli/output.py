"""Output of commands: JSON documents and tables of settings on standard output, and warnings on
standard error."""

import json
import math
import sys
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from megalith.config.fields import Plain, describe
from megalith.config.tree import flatten

if TYPE_CHECKING:  # keep --help free of the torch import
    from megalith.hf.pretrained import Pretrained


def print_json(document: Any) -> None:  # Any: whatever JSON can hold
    """Print one JSON document to standard output. NaN and infinities become null."""
    print(json.dumps(finite(document), indent=2, ensure_ascii=False))


def finite(value: Any) -> Any:  # Any: JSON in, JSON out
    """Return the data with NaN and infinities replaced by None, tuples by lists and keys by
    text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def print_warnings(source: "Pretrained") -> None:
    """Print the warnings of a model to standard error."""
    for line in source.warnings():
        print(f"{source.path}: {line}", file=sys.stderr)


def build_run_table(run: object) -> Table:
    """Return a table of every setting: dotted name, value, meaning. Values that differ from the
    default are bold and show the default."""
    settings = {setting.path: setting for setting in describe(type(run))}
    table = Table("setting", "value", "meaning", box=box.SIMPLE_HEAD, pad_edge=False)
    section = ""
    for path, value in flatten(run).items():
        setting = settings.get(path)
        if path.rpartition(".")[0] != section:
            section = path.rpartition(".")[0]
            table.add_section()
        chosen = setting is None or setting.required or setting.default != value
        shown = Text(format_value(value), style="bold" if chosen else "dim")
        if chosen and setting is not None and not setting.required:
            shown.append(f"  (default {format_value(setting.default)})", style="dim not bold")
        table.add_row(path, shown, Text(setting.doc if setting else ""))
    return table


def build_difference_table(rows: list[tuple[str, Plain, Plain]], left: str, right: str) -> Table:
    """Return a table of the settings that differ between two runs, one column per run."""
    table = Table("setting", left, right, box=box.SIMPLE_HEAD, pad_edge=False)
    for path, a, b in rows:
        table.add_row(path, Text(format_value(a)), Text(format_value(b)))
    return table


def format_value(value: Plain) -> str:
    """Format a value as in YAML; None becomes `unset`."""
    if value is None:
        return "unset"
    if isinstance(value, str) and value:
        return value
    return json.dumps(value, ensure_ascii=False)
