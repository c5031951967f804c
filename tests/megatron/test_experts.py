"""Tests of megalith/megatron/experts.py."""

import pytest

from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.rules.run import model_problems, run_problems
from tests.megatron.conftest import Translate

PLAIN = "--disable-bias-linear --swiglu --normalization RMSNorm"


def moe_of(tiny: Translate, added: str) -> MoEConfig:
    run = tiny(f"{PLAIN} {added}").run
    assert run is not None and run.model.moe is not None
    assert model_problems(run) == []
    return run.model.moe


def test_no_experts_unless_asked_for(tiny: Translate) -> None:
    for added in ("", "--num-experts 0", "--moe-router-topk 4 --moe-ffn-hidden-size 64"):
        run = tiny(added).run
        assert run is not None and run.model.moe is None


def test_defaults_are_megatrons(tiny: Translate) -> None:
    run = tiny(f"{PLAIN} --num-experts 8 --ffn-hidden-size 96").run
    assert run is not None
    expected = MoEConfig(
        num_experts=8, top_k=2, ffn_hidden_size=96, router=RouterConfig(dtype="model")
    )
    assert run.model.moe == expected
    assert (run.parallel.dispatcher, run.parallel.ep, run.parallel.etp) == ("allgather", 1, None)


def test_a_mixture_as_deepseek_v3_has_it(tiny: Translate) -> None:
    moe = moe_of(
        tiny,
        "--num-experts 16 --moe-ffn-hidden-size 32 --moe-router-topk 4 --moe-router-score-function "
        "sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2 "
        "--moe-router-num-groups 4 "
        "--moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 "
        "--moe-shared-expert-intermediate-size 32 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 1e-4 --moe-token-dispatcher-type alltoall",
    )
    assert moe.router == RouterConfig(
        score="sigmoid",
        expert_bias=True,
        expert_bias_update_rate=0.01,
        num_groups=4,
        topk_groups=2,
        routed_scaling_factor=2.5,
    )
    assert moe.aux_loss == AuxLossConfig(sequence_coeff=1e-4)
    assert (moe.num_experts, moe.top_k, moe.ffn_hidden_size, moe.shared_ffn_hidden_size) == (
        16,
        4,
        32,
        32,
    )


@pytest.mark.parametrize(
    ("added", "router"),
    [
        ("--moe-router-pre-softmax", RouterConfig(norm_topk_prob=False, dtype="model")),
        (
            "--moe-router-topk 1 --moe-router-score-function sigmoid",
            RouterConfig(score="sigmoid", norm_topk_prob=False, dtype="model"),
        ),
        (
            "--moe-input-jitter-eps 0.1 --moe-router-dtype fp64",
            RouterConfig(jitter=0.1, dtype="fp64"),
        ),
        (
            "--moe-router-load-balancing-type sinkhorn",
            RouterConfig(norm_topk_prob=False, dtype="model"),
        ),
        (
            "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
            RouterConfig(score="sigmoid", norm_topk_prob=False, dtype="model"),
        ),
        (
            "--moe-router-score-function sqrtsoftplus",
            RouterConfig(score="sqrt_softplus", dtype="model"),
        ),
        ("--moe-router-force-biased -0.5", RouterConfig(force_biased=0.5, dtype="model")),
        (
            "--moe-router-force-load-balancing",
            RouterConfig(force_load_balancing=True, dtype="model"),
        ),
    ],
)
def test_routers(tiny: Translate, added: str, router: RouterConfig) -> None:
    assert moe_of(tiny, f"--num-experts 4 {added}").router == router


@pytest.mark.parametrize(
    ("freq", "layers"),
    [("1", ()), ("2", (True, False)), ("[0,1]", (False, True)), ("([0]*1+[1]*1)", (False, True))],
)
def test_layers_with_experts_count_from_the_first(
    tiny: Translate, freq: str, layers: tuple[bool, ...]
) -> None:
    assert moe_of(tiny, f"--num-experts 4 --moe-layer-freq {freq}").layers == layers


def test_a_weight_alone_is_of_the_loss_over_each_microbatch(tiny: Translate) -> None:
    """As --moe-router-load-balancing-type is aux_loss by default."""
    assert moe_of(tiny, "--num-experts 4 --moe-aux-loss-coeff 0.01").aux_loss == AuxLossConfig(
        batch_coeff=0.01
    )
    for without in (
        "",
        "--moe-router-load-balancing-type seq_aux_loss",
        "--moe-router-load-balancing-type none",
    ):
        found = tiny(f"{PLAIN} --num-experts 4 {without}")
        assert found.run is not None and found.run.model.moe is not None
        assert found.run.model.moe.aux_loss == AuxLossConfig()
        assert any(entry.text == "no loss keeps experts busy" for entry in found.entries)


def test_several_losses_have_a_weight_each(tiny: Translate) -> None:
    both = (
        "--num-experts 4 --moe-router-load-balancing-type aux_loss global_aux_loss "
        "--moe-aux-loss-coeff"
    )
    assert moe_of(tiny, f"{both} 0.1 0.2 --moe-z-loss-coeff 1e-3").aux_loss == AuxLossConfig(
        batch_coeff=0.1, global_batch_coeff=0.2, z_loss_coeff=1e-3
    )
    for other in ("0.1 0.2 0.3", "0.1"):  # Megatron takes one for none of several, either
        (problem,) = tiny(f"{both} {other}").problems
        assert (
            "expected one weight for each loss. Use --moe-aux-loss-coeff with 2 numbers." in problem
        )
    assert moe_of(
        tiny, "--num-experts 4 --moe-router-load-balancing-type sinkhorn"
    ).aux_loss.sinkhorn
    assert (
        moe_of(tiny, "--num-experts 4 --moe-router-load-balancing-type none").aux_loss
        == AuxLossConfig()
    )
    quantile = (
        "--num-experts 4 --moe-router-load-balancing-type quantile_balancing "
        "--moe-router-quantile-balancing-ema"
    )
    assert moe_of(tiny, f"{quantile} 0.9").aux_loss == AuxLossConfig(
        quantile=True, quantile_ema=0.9
    )


def test_capacities(tiny: Translate) -> None:
    limited = "--num-experts 4 --moe-expert-capacity-factor 1.5"
    assert moe_of(tiny, limited).capacity == CapacityConfig(factor=1.5)
    assert moe_of(tiny, f"{limited} --moe-token-drop-policy position").capacity.drop == "last"
    assert moe_of(tiny, f"{limited} --moe-pad-expert-input-to-capacity").capacity.pad
    assert (
        moe_of(tiny, "--num-experts 4 --moe-expert-capacity-factor -1").capacity == CapacityConfig()
    )


def test_biases_are_in_all_matrices_or_none(tiny: Translate) -> None:
    run = tiny("--num-experts 4", without=("--disable-bias-linear",)).run
    assert run is not None and run.model.moe is not None
    assert run.model.moe.biases and run.model.moe.router.bias
    without = moe_of(tiny, "--num-experts 4")
    assert not without.biases and not without.router.bias


def test_layouts_of_experts(tiny: Translate) -> None:
    run = tiny(
        f"{PLAIN} --num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
    ).run
    assert run is not None and (run.parallel.ep, run.parallel.etp) == (2, 1)


def test_what_is_not_built_is_refused_with_experts_only(tiny: Translate) -> None:
    flag = "--moe-router-load-balancing-type balanced_by_hand"
    found = tiny(f"--num-experts 4 {flag}").refusals(strict=False)
    assert any("balanced_by_hand is not built" in text for text in found)
    assert tiny("--moe-router-padding-for-fp8").refusals(strict=True) == []
    for flag in ("--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization"):
        (text,) = tiny(f"{PLAIN} --num-experts 4 {flag}").refusals(strict=False)
        assert text == (
            f"{flag}: not yet: it rounds each expert's rows up to what products in 8 or 4 bits "
            "take, and there are "
            "none here. Remove it, together with --fp8-format or --fp4-format: in bf16 experts "
            "take any number of "
            f"rows."
        )


@pytest.mark.parametrize(
    ("added", "steps"),
    [
        ("--num-experts 4 --moe-routing-trace-path x --moe-routing-trace-max-training-iters 3", 3),
        ("--num-experts 4 --moe-routing-trace-path $UNSET/x", None),
        (
            "--num-experts 4 --moe-routing-trace-path x --moe-routing-trace-max-training-iters 0",
            None,
        ),
        ("--num-experts 4 --moe-routing-trace-max-training-iters 3", 0),
        ("--moe-routing-trace-path x --moe-routing-trace-max-training-iters 3", 0),
    ],
)
def test_traces_are_of_so_many_steps_or_of_all(
    tiny: Translate, added: str, steps: int | None
) -> None:
    found = tiny(f"{PLAIN} {added}")
    assert found.run is not None and found.refusals(strict=True) == []
    assert found.run.observe.routing_trace == (found.run.train.steps if steps is None else steps)
    assert run_problems(found.run, 1) == []
    flags = [word for word in added.split() if word.startswith("--moe-routing")]
    message = " ".join(entry.flag for entry in found.entries)
    assert all(flag in message for flag in flags)


def test_beside_a_trace_is_what_was_asked_for(tiny: Translate) -> None:
    flags = "--moe-routing-trace-dump-weights --moe-routing-trace-capture-hidden-states"
    found = tiny(f"{PLAIN} --num-experts 4 --moe-routing-trace-path x {flags}")
    assert (
        found.run is not None
        and found.refusals(strict=True) == []
        and run_problems(found.run, 1) == []
    )
    assert found.run.observe.routing_captures == ("hidden", "routers")
    logits = tiny(
        f"{PLAIN} --num-experts 4 --moe-routing-trace-path x --moe-routing-trace-capture-logits"
    ).run
    assert logits is not None and logits.observe.routing_captures == ("logits",)
    for without in ("--num-experts 4", "--moe-routing-trace-path x"):
        found = tiny(f"{PLAIN} {without} {flags}")
        assert found.run is not None and found.run.observe.routing_captures == ()
        assert found.refusals(strict=True) == [] and run_problems(found.run, 1) == []
        output = {entry.flag: entry.text for entry in found.entries}
        needed = "--num-experts" if "path" in without else "--moe-routing-trace-path"
        assert all(output[flag] == f"is read with {needed} only" for flag in flags.split())


def test_what_each_layer_did_is_written_where_there_are_experts(tiny: Translate) -> None:
    interval = "--save-tokens-per-expert-interval 5"
    for added, output in (
        ("--num-experts 4 --moe-per-layer-logging", True),
        ("--moe-per-layer-logging", False),
        (f"--num-experts 4 {interval}", True),
        (interval, False),
    ):
        found = tiny(f"{PLAIN} {added}")
        assert (
            found.run is not None
            and found.run.observe.per_layer is output
            and found.refusals(strict=True) == []
        )
        assert run_problems(found.run, 1) == []


def test_overlap_is_asked_for_with_experts_alone_and_shared_experts_need_no_word(
    tiny: Translate,
) -> None:
    added = "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    found = tiny(f"{PLAIN} {added} --overlap-moe-expert-parallel-comm --moe-shared-expert-overlap")
    assert (
        found.run is not None
        and found.run.parallel.overlap_experts
        and found.refusals(strict=True) == []
    )
    plain = tiny(f"{PLAIN} {added}").run
    assert plain is not None and not plain.parallel.overlap_experts
    (output,) = (
        entry.text for entry in found.entries if entry.flag == "--moe-shared-expert-overlap"
    )
    assert output.startswith("experts for all tokens always compute while tokens are on their way")


def test_biases_of_mlps_stay_where_there_are_any(tiny: Translate) -> None:
    for added, there in (
        ("", False),
        ("--moe-layer-freq 2", True),
        ("--moe-shared-expert-intermediate-size 32", True),
        ("--moe-layer-freq [1]*2", False),
    ):
        done = tiny(f"--num-experts 8 {added}", without=("--disable-bias-linear",))
        assert done.run is not None and done.run.model.mlp_bias is there, added
        assert (
            done.run.model.moe is not None
            and done.run.model.moe.biases
            and model_problems(done.run) == []
        )
        assert any(entry.setting == "model.mlp_bias" for entry in done.entries) is there
