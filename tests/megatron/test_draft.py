"""Tests of megalith/megatron/draft.py."""

from megalith.megatron.arguments import read_arguments
from megalith.megatron.draft import Draft, judge_unmapped, mention_the_rest


def draft(words: str) -> Draft:
    """A draft of these arguments."""
    return Draft(read_arguments(words.split()))


def test_a_given_argument_is_listed_and_one_left_out_only_where_ours_differs() -> None:
    found = draft("--adam-beta1 0.9")
    for flag in ("--adam-beta1", "--adam-beta2", "--adam-eps"):
        found.copy(flag)
    assert [(entry.flag, entry.setting, entry.value) for entry in found.entries] == [
        ("--adam-beta1 0.9", "optim.beta1", 0.9),
        ("--adam-beta2 0.999 (left out)", "optim.beta2", 0.999),
    ]
    assert found.settings == {"optim.beta1": 0.9, "optim.beta2": 0.999, "optim.eps": 1e-8}


def test_a_value_is_converted_by_its_factor() -> None:
    found = draft("--distributed-timeout-minutes 2")
    found.copy("--distributed-timeout-minutes")
    assert found.settings == {"parallel.timeout_seconds": 120.0}


def test_an_argument_that_could_not_be_read_is_not_missing_too() -> None:
    assert not draft("--lr high").need("--lr", "a rate")
    found = draft("--lr high")
    found.need("--lr", "a rate")
    assert found.problems == []
    empty = draft("")
    empty.need("--lr", "the highest rate")
    assert empty.problems == [
        "--lr is missing: Megatron needs it. Pass --lr with the highest rate."
    ]


def test_counts_of_arguments_that_become_nothing() -> None:
    found = draft("--pipeline-model-parallel-size 4 --context-parallel-size x")
    assert found.count("--pipeline-model-parallel-size", 1) == 4
    assert (
        found.count("--context-parallel-size", 1)
        == found.count("--expert-model-parallel-size", 1)
        == 1
    )


def test_what_becomes_nothing_is_judged_where_it_is_given_and_asks_for_something() -> None:
    nothing = draft("")
    judge_unmapped(nothing)
    assert nothing.entries == []
    given = draft("--exp-avg-dtype fp32 --is-hybrid-model")
    judge_unmapped(given)
    assert [entry.verdict for entry in given.entries] == ["already", "not mapped"]


def test_a_flag_behind_a_switch_counts_with_it_only() -> None:
    alone, together = draft("--finetune"), draft("--finetune --load x")
    for found in (alone, together):
        judge_unmapped(found)
    assert [entry.effect for entry in alone.entries if entry.flag == "--finetune"] == ["none"]
    assert [entry.effect for entry in together.entries if entry.flag == "--finetune"] == ["model"]


def test_nothing_given_stays_unmentioned() -> None:
    found = draft("--most-recent-k 3 --lr 1")
    found.copy("--lr")
    mention_the_rest(found)
    assert [entry.flag for entry in found.entries] == ["--lr 1", "--most-recent-k 3"]
