"""Tests of megalith/megatron/translate.py."""

from collections.abc import Sequence

import pytest

from megalith.config.tokenizer import TokenizerConfig
from megalith.config.train import TrainRun
from megalith.config.tree import dump_yaml, from_dict, to_dict
from megalith.megatron.arguments import ROWS, known_flags
from megalith.megatron.mapped import MAPPED
from megalith.megatron.table import FlagRow
from megalith.megatron.translate import Translation, named_tokenizer, translate
from megalith.rules.run import run_problems
from tests.megatron.conftest import Translate


def test_a_llama_becomes_a_run_that_breaks_no_rule(tiny: Translate) -> None:
    done = tiny(
        "--bf16 --tensor-model-parallel-size 3 --sequence-parallel --seq-length 33", world=6
    )
    assert done.run is not None and done.problems == () and done.refusals(strict=True) == []
    assert done.run.name == "tiny"
    assert run_problems(done.run, done.ranks) == []
    assert from_dict(TrainRun, to_dict(done.run)) == done.run
    assert "num_kv_heads: 3" in dump_yaml(done.run)


def test_all_problems_are_reported_together(tiny: Translate) -> None:
    done = tiny(
        "--hybrid-layer-pattern M* --lr fast --is-hybrid-model --nonsense --spec x",
        without=("--num-layers",),
    )
    assert done.run is None and len(done.problems) == 3
    assert len(done.refusals(strict=False)) == 6


@pytest.mark.parametrize("flag", [row.name for row in MAPPED if row.takes in ("int", "float")])
def test_values_out_of_range_are_for_our_rules_and_never_a_crash(
    tiny: Translate, flag: str
) -> None:
    for value in ("0", "-1", "100000"):
        done = tiny(f"{flag} {value}")
        assert done.run is None or isinstance(run_problems(done.run, done.ranks), list)
    assert run_problems(*_run_and_ranks(tiny("--vocab-size -1"))) != []


def _run_and_ranks(done: Translation) -> tuple[TrainRun, int]:
    assert done.run is not None
    return done.run, done.ranks


def test_an_empty_list_names_all_that_is_needed() -> None:
    missing = {problem.split()[0] for problem in translate([], name="x").problems}
    sizes = {
        "--num-layers",
        "--hidden-size",
        "--num-attention-heads",
        "--max-position-embeddings",
        "--seq-length",
    }
    assert {*sizes, "--micro-batch-size", "--global-batch-size", "--lr", "--train-iters"} <= missing


def _typed(row: FlagRow | None) -> Sequence[str]:
    """Words that may stand behind a flag."""
    takes = "nothing" if row is None else row.takes
    if takes == "choice":
        assert row is not None
        return row.choices[:1]
    return {
        "nothing": (),
        "int": ("3",),
        "float": ("0.5",),
        "text": ("a",),
        "place": ("a",),
        "words": ("a",),
    }[takes]


@pytest.mark.parametrize("chunk", range(8))
def test_every_flag_gets_an_answer(tiny: Translate, chunk: int) -> None:
    """No argument is dropped without a word: it is in the entries, or a problem is about it."""
    for flag in known_flags()[chunk::8]:
        row = ROWS.get(flag)
        name = row.name if row else flag
        done = tiny(" ".join((flag, *_typed(row))))
        output = [entry.flag for entry in done.entries] + list(done.problems)
        assert any(text.split()[0].rstrip(":") == name for text in output), flag


def test_the_tokenizer_to_be_measured_is_found() -> None:
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "folder"]
    assert named_tokenizer(words) == TokenizerConfig(kind="huggingface", path="folder")
    assert named_tokenizer([*words, "--vocab-size", "5"]) is None
    assert named_tokenizer(["--tokenizer-type", "NullTokenizer"]) is None
    assert named_tokenizer(words[:2]) is None
