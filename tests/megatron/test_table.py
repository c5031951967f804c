"""Tests of megalith/megatron/table.py."""

import pytest

from megalith.megatron.table import FlagGroup, expand


def group(flags: str) -> FlagGroup:
    """A group of these flags."""
    return FlagGroup(verdict="already", effect="none", reason="why", flags=flags)


def test_a_group_is_one_answer_for_many_flags() -> None:
    flags = expand((group("--a --b! --c=0|none"), group("\n  --d\n")))
    assert list(flags) == ["--a", "--b", "--c", "--d"]
    assert [flag.alone for flag in flags.values()] == [False, True, False, False]
    assert [flag.idle for flag in flags.values()] == [(), (), ("0", "none"), ()]
    assert flags["--c"].group.reason == "why"


def test_a_flag_has_one_answer() -> None:
    with pytest.raises(AssertionError, match="--a is in two groups"):
        expand((group("--a"), group("--a!")))
