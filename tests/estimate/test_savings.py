"""Memory savings of recomputation and offload, as logged at the start of a run."""

from dataclasses import replace

import pytest

from megalith.config.model import MLAConfig, ModelConfig
from megalith.config.parallel import OffloadConfig, RecomputeConfig
from megalith.estimate.advise import describe_savings, saving_lines, savings
from megalith.estimate.workload import layer_rows_without_recompute, stage_activations
from megalith.plan.layers.base import LayerSetting, total
from megalith.testing.tiny import tiny_run

MODEL = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=160,
    max_seq_len=1024,
)
PLAIN = LayerSetting(model=MODEL, dtype="bf16", lengths=(256,) * 2)
FULL = RecomputeConfig(granularity="full")
PARTS = RecomputeConfig(
    granularity="selective", modules=("core_attention", "norm", "mlp", "mlp_act")
)


@pytest.mark.parametrize(
    "recompute",
    [FULL, replace(FULL, method="block", num_layers=3), replace(FULL, num_layers=3), PARTS],
)
def test_savings_of_regions_sum_to_the_removed_activations(recompute: RecomputeConfig) -> None:
    setting = replace(PLAIN, recompute=recompute)
    saved = sum(saving.nbytes for saving in savings(setting, num_layers=4))
    assert (
        saved
        == stage_activations(PLAIN, num_layers=4).nbytes
        - stage_activations(setting, num_layers=4).nbytes
        > 0
    )


def test_whole_layers_cost_one_forward_pass_of_them_and_parts_only_their_own() -> None:
    full, half = (
        savings(replace(PLAIN, recompute=one), num_layers=4)[0].extra
        for one in (
            FULL,
            replace(FULL, method="block", num_layers=2),
        )
    )
    # the head's part of a step is not computed again
    assert half == full / 2 and 0.3 < full < 1 / 3
    extra = {
        saving.region: saving.extra
        for saving in savings(replace(PLAIN, recompute=PARTS), num_layers=4)
    }
    assert (
        0 < extra["core_attention"] < extra["mlp"] < full and extra["norm"] == extra["mlp_act"] == 0
    )


def test_mla_projections_save_and_cost_more_than_the_attention_between_them() -> None:
    model = replace(
        MODEL,
        num_kv_heads=4,
        mla=MLAConfig(kv_rank=24, q_rank=32, nope_dim=16, rope_dim=8, value_dim=16),
    )
    result = {}
    for modules in (("core_attention",), ("mla_up_proj",), ("core_attention", "mla_up_proj")):
        again = RecomputeConfig(granularity="selective", modules=modules)
        setting = replace(PLAIN, model=model, recompute=again)
        every = savings(setting, num_layers=4)
        result[modules] = sum(one.nbytes for one in every), sum(one.extra for one in every)
        kept = stage_activations(setting, num_layers=4).nbytes
        assert (
            abs(
                stage_activations(
                    replace(setting, recompute=RecomputeConfig()), num_layers=4
                ).nbytes
                - kept
            )
            > 0
        )
    core, up, both = result.values()
    assert both == up and up[0] > core[0] and up[1] > core[1] > 0
    assert "Remove it" not in "\n".join(saving_lines(setting, num_layers=4))


def test_offloading_moves_bytes_and_costs_no_operations() -> None:
    setting = replace(PLAIN, offload=OffloadConfig(layers=2, min_numel=1))
    (saving,) = savings(setting, num_layers=4)
    assert saving.region == "host memory" and saving.extra == 0
    assert saving.nbytes == 2 * total(layer_rows_without_recompute(PLAIN))


def test_lines_show_savings_and_cost() -> None:
    lines = saving_lines(replace(PLAIN, recompute=replace(FULL, num_layers=9)), num_layers=4)
    assert lines[0].startswith("recompute.num_layers=9 is more than the 4 layers of a stage")
    assert lines[1].startswith("4 of 4 layers: ") and lines[1].endswith("% more operations")
    assert lines[2].startswith("activations of a microbatch: ") and " instead of " in lines[2]


def test_core_attention_without_saving_is_reported_with_its_bytes() -> None:
    long = replace(PLAIN, lengths=(1024,), recompute=RecomputeConfig(granularity="selective"))
    text = "\n".join(saving_lines(long, num_layers=4))
    assert "core_attention, which frees 0 bytes here: attention saves no probabilities" in text
    short = "\n".join(saving_lines(replace(long, lengths=(512,)), num_layers=4))
    assert "which frees" not in short and "core_attention: " in short


def test_no_saving_lines_without_recomputation() -> None:
    assert describe_savings(tiny_run(), 1, pp_rank=0, tp_rank=0, accelerator=False) == []
    lines = describe_savings(
        tiny_run({"recompute.granularity": "full", "parallel.tp": "2"}),
        2,
        pp_rank=0,
        tp_rank=1,
        accelerator=False,
    )
    assert lines[0].startswith("2 of 2 layers: ") and len(lines) == 2
