"""Writes the tables of Megatron's flags in docs/coming_from_megatron.md, from
megalith/megatron/flags.yaml.

usage: flag_table.py [--write | --check]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # of a script, Python searches its own folder only
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalith.megatron.parse import MegatronFlag, read_flag_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "coming_from_megatron.md"
START, STOP = "<!-- flags -->", "<!-- /flags -->"
HEADINGS = {
    ("already", "none"): "Implemented, or without effect",
    ("explained", "none"): "Done differently, with the same result",
    ("not mapped", "none"): "Not implemented, without effect on results",
    ("not mapped", "numbers"): "Not implemented, with effect on the loss (rejected by `--strict`)",
    ("not mapped", "model"): "Not implemented or removed, with effect on the model (rejected)",
}
"""Headings of the flags that become no setting, by verdict and effect."""

SERVING_HEADINGS = {
    "already": "Inference: implemented, or without effect",
    "explained": "Inference: done differently",
    "not mapped": "Inference: not implemented",
}
"""Headings of the flags of text generation servers that become no setting, by verdict."""


def build_tables(flags: Sequence[MegatronFlag]) -> str:
    """Return Markdown with a table of the mapped flags, and one of the others per heading."""
    trained = [flag for flag in flags if flag.program == "train"]
    served = [flag for flag in flags if flag.program == "serve"]
    lines = _mapped_table("Mapped to settings", trained)
    for key, heading in HEADINGS.items():
        chosen = [flag for flag in trained if (flag.verdict, flag.effect) == key]
        lines += _reason_table(heading, chosen)
    lines += _mapped_table("Inference: mapped to settings of `megalith serve`", served)
    for verdict, heading in SERVING_HEADINGS.items():
        lines += _reason_table(heading, [flag for flag in served if flag.verdict == verdict])
    return "\n".join(lines).strip("\n")


def _mapped_table(heading: str, flags: Sequence[MegatronFlag]) -> list[str]:
    head = ["", f"### {heading}", "", "| Megatron | Megalith | conversion |", "|---|---|---|"]
    rows = [_mapped_row(flag) for flag in flags if flag.verdict == "mapped"]
    return head + rows if rows else []


def _reason_table(heading: str, flags: Sequence[MegatronFlag]) -> list[str]:
    flags_by_reason: dict[str, list[str]] = {}
    for flag in flags:
        reason = f"{flag.reason}; only with {flag.requires}" if flag.requires else flag.reason
        flags_by_reason.setdefault(reason, []).append(flag.flag)
    rows = [f"| {_code(names)} | {_escape(reason)} |" for reason, names in flags_by_reason.items()]
    return ["", f"### {heading}", "", "| Megatron | reason |", "|---|---|", *rows] if rows else []


def insert_tables(page: str, tables: str) -> str:
    """Return the page with the part between the markers replaced."""
    before, rest = page.split(START, 1)
    return f"{before}{START}\n\n{tables}\n\n{STOP}{rest.split(STOP, 1)[1]}"


def _mapped_row(flag: MegatronFlag) -> str:
    reason = f" {_escape(flag.reason)} |" if flag.reason else " |"
    return f"| {_code([flag.flag, *flag.aliases])} | {_code(flag.setting)} |{reason}"


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, write or check the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--write", action="store_true", help="write the tables to the page")
    choice.add_argument("--check", action="store_true", help="exit with 1 if the page is outdated")
    options = parser.parse_args(arguments)
    tables, page = build_tables(read_flag_table()), PAGE.read_text()
    new_page = insert_tables(page, tables)
    if options.check and new_page != page:
        print("docs/coming_from_megatron.md: the tables of flags are outdated. Run: make fmt")
        return 1
    if options.write:
        PAGE.write_text(new_page)
    elif not options.check:
        print(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main())
