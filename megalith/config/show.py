"""Tables of settings for the terminal."""

import json

from rich import box
from rich.table import Table
from rich.text import Text

from megalith.config.fields import Plain, describe
from megalith.config.tree import flatten


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
