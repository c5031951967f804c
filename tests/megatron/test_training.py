"""Batch, optimizer, schedule and checkpoint settings from Megatron's arguments."""

from typing import Any

import pytest

from megalith.config.fault_detection import FaultDetectorConfig
from megalith.config.optim import GroupConfig, OptimizerStatesConfig, QkClipConfig
from megalith.megatron.translate import Translation
from megalith.optim.schedule import learning_rate, schedule_lengths, schedule_problems
from megalith.plan.batch_schedule import constant_batch_size
from megalith.rules.run import run_problems
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


def test_default_steps_are_those_of_megatron(tiny: Translate) -> None:
    run = tiny().run
    assert run is not None
    assert (run.seed, run.train.log_every, run.precision.params) == (1234, 100, "fp32")
    assert (run.parallel.timeout_seconds, run.checkpoint.keep, run.optim.nonfinite_grad) == (
        600.0,
        None,
        "raise",
    )


def test_default_global_batch_is_one_microbatch_per_dp_rank(tiny: Translate) -> None:
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
    assert tiny(layout, world=25).run is not None  # the batch is given: the layout has no effect


def test_samples_are_converted_to_steps_and_keep_their_order(tiny: Translate) -> None:
    run = tiny("--train-samples 100", without=("--train-iters",)).run
    assert run is not None and (run.train.steps, run.data.num_train_samples) == (16, 100)
    whole = tiny("--train-samples 96", without=("--train-iters",)).run
    assert whole is not None and (whole.train.steps, whole.data.num_train_samples) == (16, None)


def test_run_length_must_be_unique(tiny: Translate) -> None:
    for translation in (tiny("--train-samples 100"), tiny(without=("--train-iters",))):
        assert translation.run is None
        assert "expected exactly one of them" in translation.problems[0]


def test_evaluation_is_that_of_megatron(tiny: Translate) -> None:
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
    written = tiny("--save x --save-interval 20 --async-save --dist-ckpt-workers 2").run
    assert written is not None
    assert (written.checkpoint.async_save, written.checkpoint.writer_threads) == (True, 2)
    nothing = tiny().run
    assert nothing is not None and nothing.checkpoint.every == 0
    assert nothing.checkpoint.async_save == "auto"
    assert "--save-interval is missing" in tiny("--save x").problems[0]


def test_non_persistent_checkpoints_of_type_local_are_mapped(tiny: Translate) -> None:
    flags = "--save x --save-interval 20 --non-persistent-save-interval 5"
    copies = "--replication --replication-jump 8"
    expected = {
        "--non-persistent-ckpt-type local": (5, None, 1, None),
        f"--non-persistent-ckpt-type local {copies}": (5, None, 2, 8),
        f"--non-persistent-ckpt-type local {copies} --replication-factor 3": (5, None, 3, 8),
        "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir /a": (5, "/a", 1, None),
        "--non-persistent-ckpt-type global": (None, None, 2, None),
    }
    for more, (every, folder, factor, jump) in expected.items():
        run = tiny(f"{flags} {more}").run
        assert run is not None, more
        local = run.checkpoint.local
        settings = local.every, local.folder, local.replication_factor, local.replication_jump
        assert settings == (every, folder, factor, jump), more


def test_checkpoint_to_start_from_is_mapped_with_its_load_mode(tiny: Translate) -> None:
    expected = {
        "--load x": ("x", "all"),
        "--load x --save y --save-interval 5": ("x", "all"),
        "--load x/ --ckpt-step 30": ("x/iter_0000030", "all"),
        "--load x --no-load-optim": ("x", "progress"),
        "--load x --no-load-optim --finetune": ("x", "weights"),
        "--load x --pretrained-checkpoint z": ("x", "all"),
        "--pretrained-checkpoint z": ("z", "weights"),
        "--load x --save x --save-interval 5 --pretrained-checkpoint z": ("z", "weights"),
        "--load x --save x --save-interval 5": (None, "weights"),
        # Megatron reads them with --load only
        "--finetune --no-load-optim --ckpt-step 3": (None, "weights"),
    }
    for added, settings in expected.items():
        translation = tiny(added)
        assert translation.refusals(strict=True) == [], added
        assert translation.run is not None
        checkpoint = translation.run.checkpoint
        assert (checkpoint.load, checkpoint.load_mode) == settings, added


def test_reports_say_how_to_continue_a_megatron_checkpoint_in_the_save_folder(
    tiny: Translate,
) -> None:
    entries = tiny("--load x --save x --save-interval 5").entries
    text = next(entry.text for entry in entries if entry.flag.split()[0] == "--load")
    assert "--checkpoint.load x --checkpoint.load_mode all" in text
    assert (
        "--override-ckpt-iteration"
        in tiny("--load x --override-ckpt-iteration 3").refusals(strict=True)[0]
    )


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
        == "--train-iters and --train-samples are missing: expected exactly one of them. Set one "
        "of them."
    )
    (text,) = tiny("--train-samples 60").problems
    assert text.startswith("--train-iters 50 and --train-samples 60: expected exactly one of them.")


# --- optimizer


def test_optimizer_defaults_are_those_of_megatron(tiny: Translate) -> None:
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


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        ("", {}),
        ("--rerun-mode validate_results", {"nonfinite": "rerun"}),
        ("--rerun-mode disabled", {"nonfinite": "warn"}),
        ("--rerun-mode report_stats", {"rerun_every": 1, "report_stats": True}),
        ("--check-for-spiky-loss", {"spike": "rerun"}),
        ("--check-for-large-grads", {"spike": "rerun"}),
    ],
)
def test_reruns_and_checks_of_spikes_become_fault_detection(
    tiny: Translate, added: str, expected: dict[str, Any]
) -> None:
    done = tiny(added)
    assert done.run is not None and done.refusals(strict=True) == []
    assert done.run.fault_detector == FaultDetectorConfig(**expected)


def test_sgd_ignores_the_flags_of_adam(tiny: Translate) -> None:
    done = tiny("--optimizer sgd --sgd-momentum 0.8 --adam-beta1 0.8 --no-decoupled-weight-decay")
    assert done.run is not None and done.refusals(strict=True) == []
    assert (done.run.optim.kind, done.run.optim.momentum, done.run.optim.beta1) == ("sgd", 0.8, 0.9)
    output = {
        entry.flag
        for entry in done.entries
        if entry.text == "takes effect only with --optimizer adam"
    }
    assert output == {"--adam-beta1 0.8", "--no-decoupled-weight-decay"}
    adam = tiny("--sgd-momentum 0.8")
    assert (
        adam.run is not None and adam.run.optim.momentum == 0.9 and adam.run.optim.kind == "adamw"
    )
    assert any(entry.text == "takes effect only with --optimizer sgd" for entry in adam.entries)


def test_muon_has_the_settings_of_megatron(tiny: Translate) -> None:
    done = tiny("--optimizer muon --clip-grad 2 --muon-extra-scale-factor 0.2")
    assert done.run is not None and run_problems(done.run, 1) == []
    optim, muon = done.run.optim, done.run.optim.muon
    assert (optim.kind, optim.scalar_optimizer, optim.groups) == ("muon", "adamw", ())
    assert (muon.momentum, muon.nesterov, muon.factor) == (0.9, False, 0.2)
    assert (muon.scale, muon.split, muon.dtype) == ("spectral", "matrices", "bf16")
    assert done.refusals(strict=False) == []
    other = tiny(
        "--optimizer adaptive_muon --muon-use-nesterov --muon-scale-mode shape_scaling "
        "--muon-coefficient-type polar_express --muon-num-ns-steps 8 --muon-no-split-qkv "
        "--muon-scalar-optimizer lion --lion-beta1 0.9 --adaptive-muon-moment2-method normuon "
        "--muon-fp32-matmul-prec high --adam-beta1 0.8"
    )
    assert other.run is not None and run_problems(other.run, 1) == []
    optim, muon = other.run.optim, other.run.optim.muon
    assert (optim.scalar_optimizer, optim.lion.beta1, optim.beta1) == ("lion", 0.9, 0.9)
    assert (muon.nesterov, muon.scale, muon.coefficients) == (True, "shape", "polar_express")
    assert (muon.ns_steps, muon.split, muon.dtype) == (8, "fused", "fp32")
    assert (muon.second_moment, muon.beta2) == ("normuon", 0.95)
    ignored = {e.flag for e in other.entries if e.text == "takes effect only with --optimizer adam"}
    assert ignored == {"--adam-beta1 0.8"}


def test_muon_updates_routers_as_in_megatron(tiny: Translate) -> None:
    done = tiny("--optimizer dist_muon --num-experts 4 --moe-ffn-hidden-size 8 --decoupled-lr 1e-3")
    assert done.run is not None
    routers, ends = done.run.optim.groups
    assert (routers.match, routers.kind) == (("*.moe.router",), "muon")
    assert (ends.name, ends.lr) == ("embedding_and_output", 1e-3)
    assert (done.run.parallel.zero, done.run.parallel.bucket_alignment) == (1, "none")
    dense = tiny("--optimizer dist_muon")
    assert dense.run is not None
    assert (dense.run.parallel.zero, dense.run.parallel.bucket_alignment) == (1, "matrices")


def test_lion_and_soap_are_translated(tiny: Translate) -> None:
    lion = tiny("--optimizer lion --lion-beta2 0.9 --muon-momentum 0.8")
    assert lion.run is not None and run_problems(lion.run, 1) == []
    assert (lion.run.optim.kind, lion.run.optim.lion.beta2) == ("lion", 0.9)
    assert any(e.text == "takes effect only with --optimizer muon" for e in lion.entries)
    soap = tiny("--optimizer soap --adam-beta1 0.95 --soap-precondition-frequency 10")
    assert soap.run is not None and run_problems(soap.run, 1) == []
    own = soap.run.optim.soap
    assert (own.beta1, own.beta2, own.precondition_frequency, own.kl) == (0.95, 0.999, 10, True)
    assert "Did you mean sgd" in tiny("--optimizer sdg").problems[0]


def test_grad_norm_skip_threshold_is_translated(tiny: Translate) -> None:
    done = tiny("--grad-norm-skip-threshold 50")
    assert done.run is not None and done.run.optim.grad_norm_skip_threshold == 50.0
    unlimited = tiny("")
    assert unlimited.run is not None and unlimited.run.optim.grad_norm_skip_threshold is None


def test_precision_aware_optimizer_has_remainders_and_low_precision_moments(
    tiny: Translate,
) -> None:
    aware = "--use-precision-aware-optimizer"
    done = tiny(f"--bf16 {aware} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8")
    assert done.run is not None and run_problems(done.run, 1) == []
    states = done.run.precision.optimizer_states
    assert (states.master_weights, states.first_moment) == ("remainder", "bf16")
    assert states.second_moment == "fp8"
    for arguments in (aware, "--exp-avg-dtype fp32", "--bf16"):
        run = tiny(arguments).run
        assert run is not None
        assert run.precision.optimizer_states == OptimizerStatesConfig(), arguments
    (problem,) = tiny("--bf16 --exp-avg-sq-dtype fp16").problems
    assert problem == (
        "--exp-avg-sq-dtype fp16 without --use-precision-aware-optimizer: Megatron stores fp32 "
        "moments then. Add --use-precision-aware-optimizer, or remove --exp-avg-sq-dtype."
    )


def test_fp16_has_loss_scaling_and_skips_overflows(tiny: Translate) -> None:
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
    assert sum(entry.text == "takes effect only with --fp16" for entry in left_out.entries) == 4


def test_constant_loss_scale_is_mapped_and_differences_are_reported(tiny: Translate) -> None:
    done = tiny("--fp16 --loss-scale 512")
    assert done.run is not None and run_problems(done.run, 1) == []
    assert done.run.precision.loss_scale.constant == 512.0
    assert any("Megatron ends the run there" in entry.text for entry in done.entries)
    same = tiny("--fp16 --loss-scale 512 --no-check-for-nan-in-loss-and-grad")
    assert not any("Megatron ends the run" in entry.text for entry in same.entries)


def test_fp16_and_bf16_together_are_rejected(tiny: Translate) -> None:
    assert tiny("--fp16 --bf16").problems == (
        "--fp16 and --bf16: weights have one dtype. Use one of them.",
    )


def test_invalid_loss_scale_violates_a_rule(tiny: Translate) -> None:
    run = tiny("--fp16 --initial-loss-scale 1 --min-loss-scale 4").run
    assert run is not None
    (problem,) = run_problems(run, 1)
    assert "precision.loss_scale.min=4 is above precision.loss_scale.initial=1" in problem


@pytest.mark.parametrize("added", ["--log-num-zeros-in-grad", ""])
def test_zeros_are_counted_on_request(tiny: Translate, added: str) -> None:
    run = tiny(added).run
    assert run is not None and run.optim.count_zeros == bool(added)


def test_decoupled_learning_rate_becomes_a_parameter_group(tiny: Translate) -> None:
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
    assert any(entry.text == "takes effect only with --decoupled-lr" for entry in alone.entries)
    constant = tiny("--decoupled-lr 1e-4 --decoupled-min-lr 1e-5 --lr-decay-style constant")
    assert constant.run is not None and constant.run.optim.groups[0].min_lr is None


def test_query_and_key_norms_decay_if_the_model_has_them(tiny: Translate) -> None:
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


def test_parameter_map_is_written_to_the_run_folder(tiny: Translate) -> None:
    done = tiny("--dump-param-to-param-group-map somewhere.json")
    assert done.run is not None and done.run.observe.parameters and done.refusals(strict=True) == []


# --- schedule


@pytest.mark.parametrize(
    ("added", "expected"),
    [
        (
            "--lr-decay-style cosine --min-lr 1e-5 --lr-warmup-iters 5",
            ("cosine", 1e-5, 5, None, None),
        ),
        (
            "--lr-decay-style inverse-square-root --lr-warmup-fraction 0.1",
            ("inverse_square_root", 0.0, 5, None, None),
        ),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 10", ("wsd", 0.0, 0, None, 10)),
        ("--lr-decay-iters 40 --lr-warmup-fraction 0.1", ("linear", 0.0, 4, 40, None)),
        ("--lr-decay-iters 50", ("linear", 0.0, 0, None, None)),
        (
            "--lr-decay-style constant --min-lr 1e-5 --lr-decay-iters 40",
            ("constant", 0.0, 0, None, None),
        ),
        (
            "--lr-decay-style cosine --lr-wsd-decay-iters 10 --lr-warmup-init 1e-6",
            ("cosine", 0.0, 0, None, None),
        ),
    ],
)
def test_schedule_flags_without_effect_are_left_out(
    tiny: Translate, added: str, expected: tuple[object, ...]
) -> None:
    done = tiny(added)
    assert done.run is not None and done.refusals(strict=True) == []
    s = done.run.schedule
    assert (s.style, s.min_lr, s.warmup_steps, s.decay_steps, s.wsd_decay_steps) == expected
    assert schedule_problems(s, done.run.train.steps) == []


def test_wsd_decay_style_has_the_default_of_megatron(tiny: Translate) -> None:
    default = tiny("--lr-decay-style WSD --lr-wsd-decay-iters 10").run
    given = tiny("--lr-decay-style WSD --lr-wsd-decay-iters 10 --lr-wsd-decay-style minus_sqrt").run
    assert default is not None and default.schedule.wsd_decay_style == "exponential"
    assert given is not None and given.schedule.wsd_decay_style == "minus_sqrt"


def test_lengths_in_samples_become_steps(tiny: Translate) -> None:
    added = (
        "--train-samples 600 --lr-decay-samples 480 --lr-warmup-samples 60 --lr-decay-style cosine"
    )
    done = tiny(added, without=("--train-iters",))
    assert done.run is not None and done.refusals(strict=True) == []
    assert (done.run.schedule.decay_steps, done.run.schedule.warmup_steps) == (80, 10)


def test_warmup_that_ends_inside_a_step_is_rounded_and_reported(tiny: Translate) -> None:
    done = tiny("--train-samples 600 --lr-warmup-samples 62", without=("--train-iters",))
    assert done.run is not None and done.run.schedule.warmup_steps == 10
    assert (
        "--lr-warmup-samples 62: 10.3333 steps are rounded to 10" in done.refusals(strict=True)[0]
    )


def test_steps_and_samples_do_not_mix(tiny: Translate) -> None:
    done = tiny("--lr-warmup-samples 60 --lr-decay-samples 100")
    assert len(done.problems) == 2
    assert (
        "--lr-decay-samples 100: this run is measured with --train-iters. Use --lr-decay-iters."
        in done.problems
    )
    both = tiny("--lr-warmup-fraction 0.1 --lr-warmup-iters 3").problems
    assert "--lr-warmup-fraction 0.1 and --lr-warmup-iters: expected one of them" in both[0]


def test_increasing_weight_decay_needs_both_ends(tiny: Translate) -> None:
    run = tiny(
        "--weight-decay-incr-style cosine --start-weight-decay 0.1 --end-weight-decay 0.2"
    ).run
    assert run is not None
    s = run.schedule
    assert (s.weight_decay_style, s.weight_decay, s.end_weight_decay) == ("cosine", 0.1, 0.2)
    half = tiny("--weight-decay-incr-style linear --start-weight-decay 0").problems
    assert "--end-weight-decay is missing" in half[0]
    assert "the weight decay is constant" in tiny("--start-weight-decay 0.1").problems[0]


def test_learning_rate_of_each_step_is_that_of_megatron(tiny: Translate) -> None:
    """Max 1, min 0.1, 10 steps of warm-up, decay over 100: values of Megatron's formulas, counted
    in samples."""
    added = (
        "--train-iters 120 --lr 1 --min-lr 0.1 --lr-warmup-iters 10 --lr-decay-iters 100 "
        "--lr-decay-style"
    )
    expected = {"linear": (0.5, 0.82, 0.55, 0.1), "cosine": (0.5, 0.914058, 0.55, 0.1)}
    for style, rates in expected.items():
        run = tiny(f"{added} {style}").run
        assert run is not None
        lengths = schedule_lengths(
            run.schedule, batch_schedule=constant_batch_size(6), total_steps=120
        )
        results = [learning_rate(run.schedule, step * 6, lengths) for step in (5, 28, 55, 101)]
        assert results == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize(
    ("added", "refusal"),
    [
        ("--fp8-format hybrid --fp8-recipe delayed", "fp8 and fp4 matmuls"),
        ("--embedding-weights-in-fp32", "fp32 embeddings with bf16 matrices"),
        ("--dataloader-type external", "samples come from code that is passed to Megatron"),
        ("--main-params-dtype fp16", "fp16 master weights"),
    ],
)
def test_strict_rejects_flags_that_change_the_numbers(
    tiny: Translate, added: str, refusal: str
) -> None:
    assert tiny(added).refusals(strict=False) == []
    assert len(strict := tiny(added).refusals(strict=True)) == 1 and refusal in strict[0]


def test_linear_rampup_becomes_a_batch_size_schedule(tiny: Translate) -> None:
    run = tiny(
        "--rampup-batch-size 2 2 60 --train-samples 200 --lr-warmup-samples 8",
        without=("--train-iters",),
    ).run
    assert run is not None
    entries = [(entry.samples, entry.size) for entry in run.train.batch_size_schedule]
    assert entries == [(0, 2), (30, 4), (60, 6)]
    assert run.train.steps == 15 + 8 + 23 and run.schedule.warmup_steps == 4
    assert "an increment that divides 4" in tiny("--rampup-batch-size 2 3 60").problems[0]
    assert "expected three whole numbers" in tiny("--rampup-batch-size 2 3").problems[0]


def test_step_schedule_becomes_a_batch_size_schedule(tiny: Translate) -> None:
    run = tiny("--step-batch-size-schedule 0:2 1K:6", without=("--global-batch-size",)).run
    assert run is not None and run.train.global_batch_size == 6
    entries = [(entry.samples, entry.size) for entry in run.train.batch_size_schedule]
    assert entries == [(0, 2), (1000 // 32, 6)]
    assert "expected one of them" in tiny("--step-batch-size-schedule 0:2 1K:6").problems[0]


def test_skipped_iterations_are_counted_from_one(tiny: Translate) -> None:
    run = tiny("--iterations-to-skip 3 7 900").run
    assert run is not None and run.train.skip_steps == (4, 8)


def test_experiment_trackers_and_log_level(tiny: Translate) -> None:
    arguments = "--wandb-project p --wandb-exp-name e --wandb-entity t --logging-level 35"
    run = tiny(f"{arguments} --timing-log-level 2").run
    assert run is not None and run.observe.wandb is not None
    wandb = run.observe.wandb
    assert (wandb.project, wandb.name, wandb.entity) == ("p", "e", "t")
    assert (run.observe.log_level, run.observe.timer_level) == ("WARNING", 2)
    without = tiny("--wandb-exp-name e").run
    assert without is not None and without.observe.wandb is None


def test_profiles_and_measurements(tiny: Translate) -> None:
    arguments = "--profile --use-pytorch-profiler --profile-step-start 4 --profile-step-end 6"
    arguments += " --pytorch-profiler-collect-shapes --profile-ranks 0 --log-params-norm"
    run = tiny(f"{arguments} --log-energy --manual-gc --manual-gc-interval 7").run
    assert run is not None
    window = run.profile
    assert (window.tool, window.start, window.steps, window.ranks) == ("torch", 5, 2, (0,))
    assert (window.shapes, window.stacks) == (True, False)
    assert (run.observe.param_norm, run.observe.energy, run.train.gc_interval) == (True, True, 7)
    without = tiny("--profile-step-start 4 --manual-gc-interval 7")
    assert without.run is not None and without.run.profile.start is None
    assert without.run.train.gc_interval is None
    texts = [entry.text for entry in without.entries]
    assert "takes effect only with --profile" in texts
    assert "takes effect only with --manual-gc" in texts


def test_intervals_of_saved_tensors_become_dumps(tiny: Translate) -> None:
    run = tiny("--save-params-interval 4 --save-wgrads-interval 4").run
    assert run is not None
    dump = run.observe.dump
    assert (dump.every, dump.weights, dump.gradients) == (4, True, True)
    run = tiny("--save-wgrads-interval 3").run
    assert run is not None
    assert (run.observe.dump.every, run.observe.dump.weights) == (3, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--save-params-interval 4 --save-wgrads-interval 2", "dumps have one interval, observe"),
        ("--profile --profile-ranks 0 all", "--profile-ranks all: expected the numbers of ranks."),
    ],
)
def test_invalid_measurements_are_reported(tiny: Translate, arguments: str, message: str) -> None:
    assert any(message in problem for problem in tiny(arguments).problems)


def test_validation_sets_become_suites(tiny: Translate) -> None:
    run = tiny("--full-validation --eval-interval 10 --eval-micro-batch-size 3").run
    assert run is not None and run.train.eval_steps == 0
    suite = run.evaluate["valid"]
    assert (suite.split, suite.every, suite.num_samples, suite.micro_batch_size) == (
        "valid",
        10,
        None,
        3,
    )
    paths = "--train-data-path a --valid-data-path b c --multiple-validation-sets"
    arguments = f"{paths} --validation-set-names code --eval-iters 4 --eval-global-batch-size 5"
    run = tiny(f"{arguments} --start-eval-at-iter 7", without=("--mock-data",)).run
    assert run is not None
    assert {name: suite.path for name, suite in run.evaluate.items()} == {
        "code": ("b",),
        "valid_1": ("c",),
    }
    assert {(suite.num_samples, suite.start) for suite in run.evaluate.values()} == {(20, 7)}


def test_names_of_validation_sets_become_unique_names_of_suites(tiny: Translate) -> None:
    paths = "--train-data-path a --valid-data-path b c d e f --multiple-validation-sets"
    arguments = f"{paths} --validation-set-names a_4 C++ C-- eval a --eval-iters 4"
    run = tiny(arguments, without=("--mock-data",)).run
    assert run is not None and not run_problems(run, 1)
    assert [*run.evaluate] == ["a_4", "C__", "C___2", "valid_eval", "a"]
    run = tiny(arguments.replace(" eval a ", " a a "), without=("--mock-data",)).run
    assert run is not None and [*run.evaluate] == ["a_4", "C__", "C___2", "a", "a_4_4"]


def test_validation_sets_without_paths_are_rejected(tiny: Translate) -> None:
    (problem,) = tiny("--multiple-validation-sets").problems
    assert problem == (
        "--multiple-validation-sets evaluates each set of --valid-data-path, which is missing. "
        "Pass --valid-data-path with the prefixes of the sets, or remove "
        "--multiple-validation-sets."
    )


def test_qk_clip_and_the_log_of_attention_scores_are_translated(tiny: Translate) -> None:
    run = tiny("--qk-clip --qk-clip-alpha 0.25 --log-max-attention-logit").run
    assert run is not None and run.optim.qk_clip == QkClipConfig(threshold=100.0, balance=0.25)
    assert run.observe.max_attention_logit
    run = tiny("--qk-clip --qk-clip-threshold 50").run
    assert run is not None and run.optim.qk_clip == QkClipConfig(threshold=50.0)
    assert not run.observe.max_attention_logit
    without = tiny("--qk-clip-threshold 50 --qk-clip-alpha 0.25")
    assert without.run is not None and without.run.optim.qk_clip is None
    texts = [entry.text for entry in without.entries if entry.flag.startswith("--qk-clip")]
    assert texts == ["takes effect only with --qk-clip"] * 2
