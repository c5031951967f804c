"""Tests of megalith/megatron/optimizer.py."""

import pytest

from megalith.config.optim import GroupConfig
from megalith.rules.run import run_problems
from tests.megatron.conftest import Translate


def test_the_optimizer_takes_megatrons_defaults_and_not_ours(tiny: Translate) -> None:
    done = tiny()
    assert done.run is not None
    o, s = done.run.optim, done.run.schedule
    assert (o.beta1, o.beta2, o.eps, o.clip_grad, o.decoupled_weight_decay) == (
        0.9,
        0.999,
        1e-8,
        1.0,
        True,
    )
    assert (s.style, s.weight_decay, s.min_lr, s.warmup_steps) == ("linear", 0.01, 0.0, 0)
    listed = {entry.setting: entry.flag for entry in done.entries if entry.verdict == "mapped"}
    assert listed["optim.beta2"] == "--adam-beta2 0.999 (left out)"
    assert "optim.beta1" not in listed  # the same here


def test_the_optimizer_is_copied(tiny: Translate) -> None:
    added = (
        "--adam-beta1 0.8 --adam-beta2 0.9 --adam-eps 1e-6 --clip-grad 0 "
        "--no-decoupled-weight-decay"
    )
    run = tiny(f"{added} --no-check-for-nan-in-loss-and-grad").run
    assert run is not None
    o = run.optim
    assert (o.beta1, o.beta2, o.eps, o.clip_grad, o.decoupled_weight_decay) == (
        0.8,
        0.9,
        1e-6,
        0.0,
        False,
    )
    assert o.nonfinite_grad == "skip"


def test_sgd_keeps_its_momentum_and_leaves_adams_arguments_out(tiny: Translate) -> None:
    done = tiny("--optimizer sgd --sgd-momentum 0.8 --adam-beta1 0.8 --no-decoupled-weight-decay")
    assert done.run is not None and done.refusals(strict=True) == []
    assert (done.run.optim.kind, done.run.optim.momentum, done.run.optim.beta1) == ("sgd", 0.8, 0.9)
    output = {
        entry.flag for entry in done.entries if entry.text == "is read with --optimizer adam only"
    }
    assert output == {"--adam-beta1 0.8", "--no-decoupled-weight-decay"}
    adam = tiny("--sgd-momentum 0.8")
    assert (
        adam.run is not None and adam.run.optim.momentum == 0.9 and adam.run.optim.kind == "adamw"
    )
    assert any(entry.text == "is read with --optimizer sgd only" for entry in adam.entries)


def test_another_optimizer_is_another_training(tiny: Translate) -> None:
    refusals = tiny("--optimizer muon").refusals(strict=False)
    assert refusals == [
        "--optimizer muon: not yet: optimizers beside AdamW and SGD. Use adam or sgd."
    ]
    assert "Did you mean sgd" in tiny("--optimizer sdg").problems[0]


def test_fp16_brings_its_loss_scale_and_leaves_steps_out_that_overflow(tiny: Translate) -> None:
    scale = "--initial-loss-scale 1024 --min-loss-scale 2 --loss-scale-window 50 --hysteresis 3"
    done = tiny(f"--fp16 {scale}")
    assert done.run is not None and run_problems(done.run, 1) == []
    s = done.run.precision.loss_scale
    assert (s.initial, s.min, s.window, s.hysteresis, s.constant) == (1024.0, 2.0, 50, 3, None)
    assert (done.run.precision.params, done.run.optim.nonfinite_grad) == ("fp16", "skip")
    default = tiny("--fp16").run
    assert default is not None and default.precision.loss_scale.initial == 2.0**32
    left_out = tiny(scale)
    assert left_out.run is not None and left_out.run.precision.loss_scale.initial == 2.0**32
    assert sum(entry.text == "is read with --fp16 only" for entry in left_out.entries) == 4


def test_constant_loss_scale_is_mapped_and_differences_are_reported(tiny: Translate) -> None:
    done = tiny("--fp16 --loss-scale 512")
    assert done.run is not None and run_problems(done.run, 1) == []
    assert done.run.precision.loss_scale.constant == 512.0
    assert any("Megatron ends the run there" in entry.text for entry in done.entries)
    same = tiny("--fp16 --loss-scale 512 --no-check-for-nan-in-loss-and-grad")
    assert not any("Megatron ends the run" in entry.text for entry in same.entries)


def test_weights_have_one_format(tiny: Translate) -> None:
    assert tiny("--fp16 --bf16").problems == (
        "--fp16 and --bf16: weights have one format. Use one of them.",
    )


def test_a_wrong_loss_scale_is_refused_with_the_words_of_the_rules(tiny: Translate) -> None:
    run = tiny("--fp16 --initial-loss-scale 1 --min-loss-scale 4").run
    assert run is not None
    (problem,) = run_problems(run, 1)
    assert "precision.loss_scale.min=4 is above precision.loss_scale.initial=1" in problem


@pytest.mark.parametrize("added", ["--log-num-zeros-in-grad", ""])
def test_zeros_are_counted_when_asked_for(tiny: Translate, added: str) -> None:
    run = tiny(added).run
    assert run is not None and run.optim.count_zeros == bool(added)


def test_rates_of_embedding_and_output_become_a_group(tiny: Translate) -> None:
    done = tiny("--decoupled-lr 1e-4 --decoupled-min-lr 1e-5")
    assert done.run is not None and done.refusals(strict=True) == []
    (group,) = done.run.optim.groups
    tables = (
        ("embed.weight",) if done.run.model.tied_embeddings else ("embed.weight", "head.weight")
    )
    assert group == GroupConfig(name="embedding_and_output", match=tables, lr=1e-4, min_lr=1e-5)
    assert run_problems(done.run, 1) == []
    other = tiny(
        "--decoupled-lr 1e-4"
        + ("" if len(tables) == 1 else " --untie-embeddings-and-output-weights")
    ).run
    assert other is not None and other.optim.groups[0].min_lr is None
    alone = tiny("--decoupled-min-lr 1e-5")
    assert alone.run is not None and not alone.run.optim.groups
    assert any(entry.text == "is read with --decoupled-lr only" for entry in alone.entries)
    constant = tiny("--decoupled-lr 1e-4 --decoupled-min-lr 1e-5 --lr-decay-style constant")
    assert constant.run is not None and constant.run.optim.groups[0].min_lr is None


def test_norms_of_queries_and_keys_decay_when_they_are_there(tiny: Translate) -> None:
    for added in (
        "--apply-wd-to-qk-layernorm",
        "--no-weight-decay-cond-type apply_wd_to_qk_layernorm",
    ):
        done = tiny(f"--qk-layernorm {added}")
        assert done.run is not None and done.refusals(strict=True) == []
        assert done.run.optim.decayed_vectors == ("*.q_norm.*", "*.k_norm.*")
        assert run_problems(done.run, 1) == []
    without = tiny("--apply-wd-to-qk-layernorm")
    assert without.run is not None and without.run.optim.decayed_vectors == ()
    assert any("no norms of queries and keys" in entry.text for entry in without.entries)


def test_the_map_of_groups_goes_to_the_folder_of_the_run(tiny: Translate) -> None:
    done = tiny("--dump-param-to-param-group-map somewhere.json")
    assert done.run is not None and done.run.observe.parameters and done.refusals(strict=True) == []
