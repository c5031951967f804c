"""Tests of megalith/megatron/steps.py."""

import pytest

from megalith.megatron.translate import Translation
from tests.megatron.conftest import Translate


def test_batches_and_lengths_are_copied(tiny: Translate) -> None:
    run = tiny("--bf16 --log-interval 7 --exit-duration-in-mins 235 --seed 5").run
    assert run is not None
    t = run.train
    assert (t.steps, t.global_batch_size, t.micro_batch_size, t.seq_len, t.log_every) == (
        50,
        6,
        1,
        32,
        7,
    )
    assert (t.max_minutes, run.seed, run.precision.params) == (235.0, 5, "bf16")


def test_what_was_left_out_is_as_in_megatron(tiny: Translate) -> None:
    run = tiny().run
    assert run is not None
    assert (run.seed, run.train.log_every, run.precision.params) == (1234, 100, "fp32")
    assert (run.parallel.timeout_seconds, run.checkpoint.keep, run.optim.nonfinite_grad) == (
        600.0,
        None,
        "raise",
    )


def test_the_global_batch_is_one_microbatch_of_every_replica_when_left_out(tiny: Translate) -> None:
    missing = ("--global-batch-size",)
    layout = "--micro-batch-size 2 --tensor-model-parallel-size 3 --context-parallel-size 2"
    run = tiny(layout, without=missing, world=24).run
    assert run is not None and run.train.global_batch_size == 2 * 24 // 6
    unknown = tiny(layout, without=missing)
    assert "Pass --global-batch-size, or --world" in unknown.problems[0]
    uneven = tiny(layout, without=missing, world=25)
    assert (
        "25 ranks are not a multiple of tensor · pipeline · context parallel = 3·1·2 = 6"
        in uneven.problems[0]
    )
    assert tiny(layout, world=25).run is not None  # the batch is given: the layout decides nothing


def test_samples_become_steps_and_keep_their_order(tiny: Translate) -> None:
    run = tiny("--train-samples 100", without=("--train-iters",)).run
    assert run is not None and (run.train.steps, run.data.num_train_samples) == (16, 100)
    whole = tiny("--train-samples 96", without=("--train-iters",)).run
    assert whole is not None and (whole.train.steps, whole.data.num_train_samples) == (16, None)


def test_a_run_has_one_length(tiny: Translate) -> None:
    for translation in (tiny("--train-samples 100"), tiny(without=("--train-iters",))):
        assert translation.run is None
        assert "expected exactly one of them" in translation.problems[0]


def test_evaluation_is_megatrons(tiny: Translate) -> None:
    given, default = tiny("--eval-interval 10 --eval-iters 3").run, tiny().run
    assert given is not None and (given.train.eval_every, given.train.eval_steps) == (10, 3)
    assert default is not None and (default.train.eval_every, default.train.eval_steps) == (
        None,
        100,
    )
    off = tiny("--eval-interval 10 --eval-iters 0").run
    assert off is not None and (off.train.eval_every, off.train.eval_steps) == (None, 0)


@pytest.mark.parametrize("added", ["--split 1,0,0", "--train-data-path a --test-data-path b"])
def test_without_validation_data_nothing_is_evaluated(tiny: Translate, added: str) -> None:
    done = tiny(f"{added} --eval-interval 10", without=("--mock-data",) if "path" in added else ())
    assert done.run is not None and (done.run.train.eval_every, done.run.train.eval_steps) == (
        None,
        0,
    )
    assert any("no validation data" in entry.text for entry in done.entries)


def test_checkpoints_are_kept_as_in_megatron(tiny: Translate) -> None:
    every = tiny("--save x --save-interval 20 --load x --tensorboard-dir t").run
    assert every is not None
    assert (every.checkpoint.every, every.checkpoint.keep, every.observe.tensorboard) == (
        20,
        None,
        True,
    )
    retained = tiny("--save x --save-interval 20 --save-retain-interval 100").run
    assert retained is not None and (retained.checkpoint.keep, retained.checkpoint.keep_every) == (
        1,
        100,
    )
    newest = tiny("--save x --save-interval 20 --most-recent-k 2").run
    assert newest is not None and newest.checkpoint.keep == 2
    nothing = tiny().run
    assert nothing is not None and nothing.checkpoint.every == 0
    assert "--save-interval is missing" in tiny("--save x").problems[0]


def test_other_first_weights_are_refused(tiny: Translate) -> None:
    for added in ("--load x", "--load x --save y --save-interval 5", "--pretrained-checkpoint x"):
        refusals = tiny(added).refusals(strict=False)
        assert len(refusals) == 1 and "checkpoint folders" in refusals[0]
    assert len(tiny("--load x --save x --save-interval 5 --finetune").refusals(strict=False)) == 1
    assert (
        tiny("--finetune --no-load-optim").refusals(strict=True) == []
    )  # Megatron reads them with --load only


def test_values_derived_from_missing_or_wrong_ones_are_not_reported(tiny: Translate) -> None:
    def output(translation: Translation) -> dict[str | None, object]:
        assert translation.run is None and translation.problems
        return {
            entry.setting: entry.value for entry in translation.entries if entry.verdict == "mapped"
        }

    for size in ("", "--micro-batch-size x"):
        samples = tiny(
            f"{size} --train-samples 100 --lr-warmup-samples 7",
            without=("--global-batch-size", "--micro-batch-size", "--train-iters"),
            world=4,
        )
        hidden = {
            "train.global_batch_size",
            "train.steps",
            "schedule.warmup_steps",
            "data.num_train_samples",
        }
        assert hidden.isdisjoint(output(samples))
        assert not any("--train-samples" in entry.flag for entry in samples.entries)
        assert not any("rounded" in entry.text for entry in samples.entries)
    wide = tiny(
        "",
        without=(
            "--hidden-size",
            "--ffn-hidden-size",
            "--num-attention-heads",
            "--group-query-attention",
        ),
    )
    assert {"model.ffn_hidden_size", "model.num_kv_heads"}.isdisjoint(output(wide))
    known = tiny(
        "--train-samples 100 --micro-batch-size x", without=("--micro-batch-size", "--train-iters")
    )
    assert output(known)["train.steps"] == 16, "values derived from known ones are still set"


def test_invalid_length_is_reported_as_typed(tiny: Translate) -> None:
    (text,) = tiny("", without=("--train-iters",)).problems
    assert (
        text
        == "--train-iters and --train-samples are missing: expected exactly one of them. Set the "
        "one you mean."
    )
    (text,) = tiny("--train-samples 60").problems
    assert text.startswith("--train-iters 50 and --train-samples 60: expected exactly one of them.")
