"""Tests of megalith/megatron/waiting.py, and of what holds for all groups of flags that
become nothing."""

import re

from megalith.megatron.already import ALREADY, EXPLAINED
from megalith.megatron.arguments import FILE_FLAGS, ROWS, UNMAPPED
from megalith.megatron.elsewhere import OTHERS, REMOVED
from megalith.megatron.waiting import LATER, MODEL, NUMBERS

GROUPS = (*ALREADY, *EXPLAINED, *LATER, *NUMBERS, *MODEL, *REMOVED, *OTHERS)


def test_no_flag_is_both_mapped_and_not() -> None:
    assert {*ROWS} & {*UNMAPPED} == set() and {*FILE_FLAGS} & {*ROWS, *UNMAPPED} == set()


def test_every_reason_is_a_text_that_ends_without_a_full_stop() -> None:
    for group in GROUPS:
        assert len(group.reason) > 15 and not group.reason.endswith("."), group.reason


def test_a_refused_flag_says_what_to_do() -> None:
    for group in GROUPS:
        if group.effect == "model":
            assert re.search(r"\b(Use|use|Remove|Convert|Pass|pass)\b", group.reason), group.reason


def test_what_is_so_anyway_has_no_effect() -> None:
    assert all(group.effect == "none" for group in GROUPS if group.verdict == "already")
    assert all(group.verdict == "already" for group in ALREADY)
    assert all(group.verdict == "explained" for group in EXPLAINED)


def test_a_switch_is_a_flag_of_megatrons() -> None:
    switches = {group.switch for group in GROUPS if group.switch}
    gated = [group.reason for group in GROUPS if "is read with" in group.reason]
    named = {name for reason in gated for name in re.findall(r"--[a-z][\w-]+", reason)}
    assert switches | named <= {*ROWS, *UNMAPPED}
