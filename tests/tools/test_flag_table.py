"""Tests of tools/flag_table.py, and of the page that it writes."""

from megalith.megatron.parse import MegatronFlag, read_flag_table
from tools.flag_table import HEADINGS, PAGE, SERVING_HEADINGS, build_tables, insert_tables


def test_page_contains_the_current_tables() -> None:
    page = PAGE.read_text()
    assert insert_tables(page, build_tables(read_flag_table())) == page


def test_every_flag_is_in_one_row() -> None:
    tables = build_tables(read_flag_table())
    first_cells = " ".join(line.split(" | ")[0] for line in tables.splitlines())
    for flag in read_flag_table():
        assert all(first_cells.count(f"`{name}`") == 1 for name in (flag.flag, *flag.aliases)), flag
        headings = HEADINGS if flag.program == "train" else SERVING_HEADINGS
        key = (flag.verdict, flag.effect) if flag.program == "train" else flag.verdict
        assert flag.verdict == "mapped" or key in headings, flag


def test_flags_with_the_same_reason_share_a_row() -> None:
    flags = [
        MegatronFlag(flag=name, verdict="already", reason="a | b", requires="--c")
        for name in ("--a", "--b")
    ]
    mapped = MegatronFlag(flag="--seed", verdict="mapped", type="int", setting=("seed",))
    lines = build_tables([*flags, mapped]).splitlines()
    assert "| `--a`, `--b` | a \\| b; only with --c |" in lines
    assert "| `--seed` | `seed` | |" in lines
