"""Layer patterns, block configs and MoE settings from Megatron's arguments."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalith.config.model import LayersConfig
from megalith.config.moe import AuxLossConfig, CapacityConfig, MoEConfig, RouterConfig
from megalith.megatron.layers import read_layer_pattern
from megalith.megatron.parse import Draft, parse_arguments
from megalith.rules.run import model_problems, run_problems
from tests.megatron.conftest import Translate


def draft(typed: str) -> Draft:
    return Draft(parse_arguments(["--num-layers", "8", "--no-rope-freq", typed]))


@pytest.mark.parametrize(
    ("typed", "pattern"),
    [
        ("4", [False, False, False, True]),
        ("1", [True]),
        ("9", [False]),
        ("([0]*3+[1]*1)*2", [False, False, False, True]),
        ("[1] + [0] * 7", [True, *[False] * 7]),
        ("[0,1,0,1,0,1,0,1]", [False, True]),
    ],
)
def test_number_or_list_becomes_the_shortest_layer_pattern(typed: str, pattern: list[bool]) -> None:
    assert read_layer_pattern(draft(typed), "--no-rope-freq") == pattern


@pytest.mark.parametrize(
    "typed",
    [
        "0",
        "-1",
        "[0,1]",
        "[2]*8",
        "[[1]]*8",
        "open('x')",
        "[1]*99999999",
        "[1]*[2]",
        "1 +",
        "[x]*8",
        "3.5",
    ],
)
def test_invalid_layer_pattern_is_reported_and_not_executed(typed: str) -> None:
    translation = draft(typed)
    assert read_layer_pattern(translation, "--no-rope-freq") is None
    assert translation.problems == [
        f"--no-rope-freq {typed} must be a number above 0, or a list of 8 ones and zeros, one for "
        f"each layer. Use --no-rope-freq 4 for every fourth layer."
    ]


def test_missing_layer_pattern_is_none() -> None:
    assert read_layer_pattern(draft("4"), "--window-attn-skip-freq") is None


# --- blocks


PATH, TEXT = "--heterogeneous-layers-config-path", "--heterogeneous-layers-config-encoded-json"
BLOCKS: list[dict[str, Any]] = [
    {"attention": {"n_heads_in_group": 2}, "mlp": {"ffn_hidden_size": 80}},
    {"attention": {"no_op": True}, "ffn": {"ffn_mult": 4.1}},
]
FILE: dict[str, Any] = {
    "block_configs": BLOCKS,
    "num_hidden_layers": 2,
    "hidden_size": 96,
    "num_attention_heads": 6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "vocab_size": 999,
}
SIZES = ("model.num_kv_heads", "model.ffn_hidden_size")
STRETCHED = "--use-rope-scaling --rope-scaling-factor 8.0"


def as_word(document: object) -> str:
    return json.dumps(document, separators=(",", ":"))


def test_block_configs_from_file_and_text_are_equal(tiny: Translate, tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(FILE))
    runs = [tiny(f"{PATH} {file}").run, tiny(f"{TEXT} {as_word(FILE)}").run]
    assert runs[0] == runs[1] and runs[0] is not None
    model = runs[0].model
    assert (model.num_kv_heads, model.ffn_hidden_size) == (3, 512)
    assert model.layers == LayersConfig(attention=("full", "none"), ffn_hidden_size=(80, 512))
    assert model_problems(runs[0]) == []
    assert file.read_text() == json.dumps(FILE)


def test_block_configs_text_takes_precedence_over_a_file(tiny: Translate) -> None:
    done = tiny(f"{PATH} gone.json {TEXT} {as_word(FILE)}")
    assert done.run is not None and done.run.model.layers.attention == ("full", "none")
    (entry,) = [entry for entry in done.entries if entry.flag.startswith(PATH)]
    assert (entry.verdict, entry.text) == ("already", f"{TEXT} takes precedence")
    assert done.refusals(strict=True) == []
    (text,) = tiny(f"{PATH} gone.json {TEXT} nothing").problems
    assert text.startswith(f"{TEXT} nothing: Expecting value")


def test_text_without_a_file_is_reported_as_equal_layers_in_megatron(tiny: Translate) -> None:
    done = tiny(f"{TEXT} {as_word(FILE)}")
    (entry,) = [entry for entry in done.entries if entry.flag == TEXT]
    assert (
        entry.verdict == "explained"
        and f"but builds equal layers unless {PATH} is also given" in entry.text
    )
    assert done.refusals(strict=False) == []
    assert (
        done.refusals(strict=True) == [f"{TEXT}: {entry.text}."]
        and f"Use {PATH} with a file" in entry.text
    )
    for alike in ({"ffn_hidden_size": 160}, {}):
        equal = {"block_configs": [{"attention": {"n_heads_in_group": 2}, "mlp": alike}] * 2}
        assert tiny(f"{TEXT} {as_word(equal)}").refusals(strict=True) == []


def test_every_block_size_is_translated(tiny: Translate, tmp_path: Path) -> None:
    file = tmp_path / "layers.json"
    file.write_text(json.dumps(FILE))
    done = tiny(f"{PATH} {file}")
    message = [
        (entry.flag.split()[0], entry.value) for entry in done.entries if entry.setting in SIZES
    ]
    assert message == [("--num-query-groups", 3), (PATH, 512)]
    (entry,) = [entry for entry in done.entries if entry.flag.startswith("--ffn-hidden-size")]
    assert (entry.verdict, entry.text) == (
        "already",
        f"applies only to layers without this size in {PATH}",
    )
    assert done.refusals(strict=True) == []
    left_out = tiny(f"{PATH} {file}", without=("--ffn-hidden-size",))
    assert [entry.value for entry in left_out.entries if entry.setting == SIZES[1]] == [512]


def test_different_number_of_kv_heads_is_reported(tiny: Translate) -> None:
    fewer = {
        **FILE,
        "block_configs": [{"attention": {"n_heads_in_group": 3}, "mlp": {}}, BLOCKS[1]],
    }
    (text,) = tiny(f"{TEXT} {as_word(fewer)}").problems
    assert text == (
        f"{TEXT}: block_configs has 2 KV heads, and --num-query-groups makes it 3. Set "
        "--num-query-groups to 2."
    )
    (text,) = tiny(
        f"{TEXT} {as_word(fewer)}", without=("--group-query-attention", "--num-query-groups")
    ).problems
    assert text == (
        f"{TEXT}: block_configs has 2 KV heads, and it would be 6. Pass "
        "--group-query-attention "
        f"--num-query-groups 2."
    )
    assert (
        tiny(
            f"{TEXT} {as_word(fewer)} --num-query-groups 2", without=("--num-query-groups",)
        ).problems
        == ()
    )
    nowhere = {"block_configs": [{"attention": {"no_op": True}, "mlp": {}}] * 2}
    assert tiny(f"{TEXT} {as_word(nowhere)}").problems == ()


def test_blocks_without_a_size_have_that_of_the_arguments(tiny: Translate) -> None:
    run = tiny(f"{TEXT} {as_word({'block_configs': [{'attention': {}, 'mlp': {}}] * 2})}").run
    plain = tiny().run
    assert run is not None and plain is not None and run.model == plain.model


def test_rope_scaling_of_the_file_must_agree(tiny: Translate) -> None:
    stretched = {**FILE, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}}
    run = tiny(f"{TEXT} {as_word(stretched)} {STRETCHED}").run
    assert run is not None and run.model.rope.factor == 8.0
    (text,) = tiny(f"{TEXT} {as_word(stretched)}").problems
    assert text == (
        f"{TEXT}: rope_scaling.factor=8.0, and positions would be not scaled. Pass "
        "--use-rope-scaling "
        f"--rope-scaling-factor 8.0."
    )
    (text,) = tiny(
        f"{TEXT} {as_word(stretched)} --use-rope-scaling --rope-scaling-factor 4.0"
    ).problems
    assert "positions would be scaled by llama3, 4.0. Pass" in text


def test_all_mismatches_are_reported_together(tiny: Translate) -> None:
    other = {
        **FILE,
        "hidden_size": 100,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "num_attention_heads": 12,
    }
    done = tiny(
        f"{TEXT} {as_word(other)} --rotary-percent 0.5 --num-experts 4",
        without=("--swiglu", "--normalization"),
    )
    texts = [text.removeprefix(f"{TEXT}: ") for text in done.problems]
    assert texts == [
        "these layers need --swiglu, and model.activation would be 'gelu'. Pass --swiglu.",
        "these layers need --swiglu, and model.gated would be False. Pass --swiglu.",
        "these layers need --normalization RMSNorm, and model.norm would be 'layer'. Pass "
        "--normalization RMSNorm.",
        "these layers need --rotary-percent 1.0, and model.rope.fraction would be 0.5. Pass "
        "--rotary-percent 1.0.",
        "block configs do not support --num-experts 4. Remove --num-experts, or the block configs.",
        "hidden_size=100, and --hidden-size makes it 96. Set --hidden-size to 100.",
        "num_attention_heads=12, and --num-attention-heads makes it 6. Set --num-attention-heads "
        "to 12.",
        "rope_theta=500000.0, and --rotary-base makes it 10000.0. Set --rotary-base to 500000.0.",
        "tie_word_embeddings=True, and it would be False. Remove "
        "--untie-embeddings-and-output-weights.",
    ]


def test_invalid_blocks_are_reported_with_their_index(tiny: Translate) -> None:
    wrong = {
        "block_configs": [
            {"attention": {"n_heads_in_group": 4}, "mlp": {}},
            {"attention": {}, "mlp": {"moe": 1}},
        ]
    }
    result = tiny(f"{TEXT} {as_word(wrong)}").problems
    assert result == (
        f"{TEXT}: block_configs[0].attention.n_heads_in_group=4 must be a whole number that "
        "divides the 6 query heads. "
        f"Correct the file.",
        f"{TEXT}: block_configs[1].mlp.moe=1 is an unknown field, expected null or false. Correct "
        "the file.",
    )
    (text,) = tiny(f"{TEXT} {as_word({'block_configs': BLOCKS * 2})}").problems
    assert "block_configs has 4 entries, expected a list with one for each of 2 layers." in text
    (text,) = tiny(f"{TEXT} {as_word({})}").problems
    assert "block_configs has None, expected a list" in text


@pytest.mark.parametrize(
    ("flag", "given", "output"),
    [
        (PATH, "gone.json", f"{PATH} gone.json: "),
        (TEXT, "{", f"{TEXT} {{: "),
        (TEXT, "[]", "contains [], expected a JSON object with block_configs."),
    ],
)
def test_unreadable_file_is_reported(tiny: Translate, flag: str, given: str, output: str) -> None:
    done = tiny(f"{flag} {given}")
    assert done.run is None and len(done.problems) == 1 and output in done.problems[0]
    assert "block_configs" in done.problems[0]


def test_missing_sizes_are_reported_once_by_name(tiny: Translate) -> None:
    done = tiny(f"{TEXT} {as_word({'block_configs': BLOCKS})}", without=("--num-layers",))
    assert [
        text for text in done.problems if "block" in text
    ] == [] and "--num-layers is missing" in done.problems[0]


def test_without_block_configs_nothing_is_read(tiny: Translate) -> None:
    run = tiny().run
    assert run is not None and run.model.layers == LayersConfig()


# --- experts


PLAIN = "--disable-bias-linear --swiglu --normalization RMSNorm"


def moe_of(tiny: Translate, added: str) -> MoEConfig:
    run = tiny(f"{PLAIN} {added}").run
    assert run is not None and run.model.moe is not None
    assert model_problems(run) == []
    return run.model.moe


def test_without_num_experts_there_is_no_moe(tiny: Translate) -> None:
    for added in ("", "--num-experts 0", "--moe-router-topk 4 --moe-ffn-hidden-size 64"):
        run = tiny(added).run
        assert run is not None and run.model.moe is None


def test_moe_defaults_are_those_of_megatron(tiny: Translate) -> None:
    run = tiny(f"{PLAIN} --num-experts 8 --ffn-hidden-size 96").run
    assert run is not None
    expected = MoEConfig(
        num_experts=8, top_k=2, ffn_hidden_size=96, router=RouterConfig(dtype="model")
    )
    assert run.model.moe == expected
    assert (run.parallel.dispatcher, run.parallel.ep, run.parallel.etp) == ("allgather", 1, None)


def test_moe_of_deepseek_v3_is_translated(tiny: Translate) -> None:
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
def test_moe_layer_frequency_counts_from_the_first_layer(
    tiny: Translate, freq: str, layers: tuple[bool, ...]
) -> None:
    assert moe_of(tiny, f"--num-experts 4 --moe-layer-freq {freq}").layers == layers


def test_coefficient_alone_is_that_of_the_batch_aux_loss(tiny: Translate) -> None:
    """As --moe-router-load-balancing-type is aux_loss by default."""
    assert moe_of(tiny, "--num-experts 4 --moe-aux-loss-coeff 0.01").aux_loss == AuxLossConfig(
        batch_coeff=0.01
    )
    for without in (
        "",
        "--moe-router-load-balancing-type seq_aux_loss",
        "--moe-router-load-balancing-type none",
    ):
        translation = tiny(f"{PLAIN} --num-experts 4 {without}")
        assert translation.run is not None and translation.run.model.moe is not None
        assert translation.run.model.moe.aux_loss == AuxLossConfig()
        assert any(entry.text == "there is no aux loss" for entry in translation.entries)


def test_each_aux_loss_has_a_coefficient(tiny: Translate) -> None:
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
            "expected one coefficient for each loss. Use --moe-aux-loss-coeff with 2 numbers."
            in problem
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


def test_moe_biases_follow_disable_bias_linear(tiny: Translate) -> None:
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


def test_moe_flags_that_are_not_implemented_are_rejected_with_experts(tiny: Translate) -> None:
    flag = "--moe-router-load-balancing-type balanced_by_hand"
    result = tiny(f"--num-experts 4 {flag}").refusals(strict=False)
    assert any("balanced_by_hand is not implemented" in text for text in result)
    assert tiny("--moe-router-padding-for-fp8").refusals(strict=True) == []
    for flag in ("--moe-router-padding-for-fp8", "--moe-router-padding-for-quantization"):
        (text,) = tiny(f"{PLAIN} --num-experts 4 {flag}").refusals(strict=False)
        assert text == (
            f"{flag}: not implemented: it pads the tokens of each expert for fp8 and fp4 matmuls, "
            "which are not implemented either. Remove it, together with --fp8-format or "
            "--fp4-format: in bf16, experts take any number of tokens."
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
def test_routing_trace_covers_given_steps_or_all(
    tiny: Translate, added: str, steps: int | None
) -> None:
    translation = tiny(f"{PLAIN} {added}")
    assert translation.run is not None and translation.refusals(strict=True) == []
    assert translation.run.observe.routing_trace == (
        translation.run.train.steps if steps is None else steps
    )
    assert run_problems(translation.run, 1) == []
    flags = [word for word in added.split() if word.startswith("--moe-routing")]
    message = " ".join(entry.flag for entry in translation.entries)
    assert all(flag in message for flag in flags)


def test_routing_captures_are_translated(tiny: Translate) -> None:
    flags = "--moe-routing-trace-dump-weights --moe-routing-trace-capture-hidden-states"
    translation = tiny(f"{PLAIN} --num-experts 4 --moe-routing-trace-path x {flags}")
    assert (
        translation.run is not None
        and translation.refusals(strict=True) == []
        and run_problems(translation.run, 1) == []
    )
    assert translation.run.observe.routing_captures == ("hidden", "routers")
    logits = tiny(
        f"{PLAIN} --num-experts 4 --moe-routing-trace-path x --moe-routing-trace-capture-logits"
    ).run
    assert logits is not None and logits.observe.routing_captures == ("logits",)
    for without in ("--num-experts 4", "--moe-routing-trace-path x"):
        translation = tiny(f"{PLAIN} {without} {flags}")
        assert translation.run is not None and translation.run.observe.routing_captures == ()
        assert translation.refusals(strict=True) == [] and run_problems(translation.run, 1) == []
        output = {entry.flag: entry.text for entry in translation.entries}
        needed = "--num-experts" if "path" in without else "--moe-routing-trace-path"
        assert all(output[flag] == f"takes effect only with {needed}" for flag in flags.split())


def test_per_layer_metrics_are_translated_with_experts(tiny: Translate) -> None:
    interval = "--save-tokens-per-expert-interval 5"
    for added, output in (
        ("--num-experts 4 --moe-per-layer-logging", True),
        ("--moe-per-layer-logging", False),
        (f"--num-experts 4 {interval}", True),
        (interval, False),
    ):
        translation = tiny(f"{PLAIN} {added}")
        assert (
            translation.run is not None
            and translation.run.observe.per_layer is output
            and translation.refusals(strict=True) == []
        )
        assert run_problems(translation.run, 1) == []


def test_expert_overlap_is_translated_and_shared_expert_overlap_is_the_default(
    tiny: Translate,
) -> None:
    added = "--num-experts 8 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
    translation = tiny(
        f"{PLAIN} {added} --overlap-moe-expert-parallel-comm --moe-shared-expert-overlap"
    )
    assert (
        translation.run is not None
        and translation.run.parallel.overlap_experts
        and translation.refusals(strict=True) == []
    )
    plain = tiny(f"{PLAIN} {added}").run
    assert plain is not None and not plain.parallel.overlap_experts
    (output,) = (
        entry.text for entry in translation.entries if entry.flag == "--moe-shared-expert-overlap"
    )
    assert output.startswith("shared experts always run while tokens are exchanged")


def test_mlp_bias_is_kept_if_there_are_dense_mlps(tiny: Translate) -> None:
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
