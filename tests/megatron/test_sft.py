"""Tests of megalith/megatron/sft.py."""

from megalith.config.data import data_problems
from megalith.plan.batch_assignment import budget_problems
from tests.megatron.conftest import Translate

HUB = ("--mock-data", "--tokenizer-type")
SFT = "--sft --tokenizer-type SFTTokenizer --tokenizer-model folder"


def test_conversations_are_packed_as_in_megatron(tiny: Translate) -> None:
    run = tiny(
        f"{SFT} --data-path a.jsonl --valid-data-path b.jsonl --sft-tokenizer-prompt-format "
        "identity",
        without=HUB,
    ).run
    assert run is not None and data_problems(run.data) == []
    sft = run.data.sft
    assert (sft.path, sft.valid_path, sft.template, sft.loss_on) == (
        ("a.jsonl",),
        ("b.jsonl",),
        "identity",
        "assistant",
    )
    assert (sft.packing, sft.shuffle, sft.overlong) == ("row", "none", "truncate")
    assert (
        run.data.path == () and run.tokenizer.kind == "huggingface" and run.train.eval_steps == 100
    )


def test_the_default_format_learns_everything_and_without_a_validation_file_nothing_is_evaluated(
    tiny: Translate,
) -> None:
    done = tiny(
        f"{SFT} --data-path a.jsonl --sft-tokenizer-prompt-format default --eod-mask-loss",
        without=HUB,
    )
    assert done.run is not None and data_problems(done.run.data) == []
    assert (done.run.data.sft.template, done.run.data.sft.loss_on) == (None, "all")
    assert done.run.train.eval_steps == 0 and done.refusals(strict=True) == []


def test_fine_tuning_without_another_word_has_megatrons_format(tiny: Translate) -> None:
    plain = f"{SFT} --data-path a.jsonl"
    for added, template in (
        ("", "nemotron-h-aligned"),
        ("--sft-tokenizer-prompt-format nemotron-nano-v2",) * 2,
    ):
        done = tiny(f"{plain} {added}", without=HUB)
        assert (
            done.run is not None
            and data_problems(done.run.data) == []
            and done.refusals(strict=True) == []
        )
        assert (done.run.data.sft.template, done.run.data.sft.loss_on) == (
            template.split()[-1],
            "assistant",
        )


def test_formats_that_are_not_built_in_change_the_numbers(tiny: Translate) -> None:
    other = f"{SFT} --data-path a.jsonl --sft-tokenizer-prompt-format gemma3"
    (text,) = tiny(other, without=HUB).refusals(strict=True)
    assert (
        "the template of gemma3 is not built in. Put it into a Jinja file and set data.sft.template"
        in text
    )
    (text,) = tiny(
        f"{SFT} --data-path a.jsonl --split 9,1,0 --sft-tokenizer-prompt-format default",
        without=HUB,
    ).refusals(strict=True)
    assert "Divide it, and name the parts with --valid-data-path" in text


def test_made_up_conversations_stay_made_up(tiny: Translate) -> None:
    run = tiny(f"{SFT} --sft-tokenizer-prompt-format identity", without=("--tokenizer-type",)).run
    assert run is not None and run.data.sft.mock_conversations == 10_000 and not run.data.mock
    assert data_problems(run.data) == []


def test_conversations_packed_step_by_step_have_a_budget(tiny: Translate) -> None:
    plain = f"{SFT} --data-path a.jsonl --sft-tokenizer-prompt-format identity --micro-batch-size 1"
    without = (*HUB, "--micro-batch-size")
    done = tiny(
        f"{plain} --sequence-packing-scheduler dp_balanced --max-seqlen-per-dp-cp-rank 4096",
        without=without,
    )
    assert done.run is not None and done.refusals(strict=True) == []
    run = done.run
    assert run.train.tokens_per_microbatch == 4096 and run.data.sft.packing == "best_fit"
    assert budget_problems(run.train, run.parallel, run.data) == []
    other = tiny(f"{plain} --sequence-packing-scheduler default_dynamic_cp", without=without)
    (text,) = (entry.text for entry in other.entries if entry.verdict == "not mapped")
    assert (
        "as many context-parallel ranks as each conversation needs" in text
        and "dp_balanced" in text
    )
    assert (
        tiny(f"{plain} --max-seqlen-per-dp-cp-rank 64", without=without).refusals(strict=True) == []
    )
