"""Tests of megalith/megatron/mapped.py."""

from megalith.config.fields import setting_names
from megalith.config.train import TrainRun
from megalith.megatron.mapped import MAPPED


def test_every_flag_becomes_settings_that_exist() -> None:
    names = set(setting_names(TrainRun))
    assert {field for row in MAPPED for field in row.fields} - names == set()
    assert all(row.fields for row in MAPPED)


def test_a_flag_and_its_other_spellings_stand_once() -> None:
    names = [name for row in MAPPED for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))
    assert all(name.startswith("--") for name in names)


def test_choices_and_defaults_fit() -> None:
    for row in MAPPED:
        assert bool(row.choices) == (row.takes == "choice"), row.name
        assert row.default is None or not row.choices or row.default in row.choices, row.name
        expected = {"int": int, "float": float}.get(row.takes)
        assert row.default is None or expected is None or type(row.default) is expected, row.name


def test_what_no_flag_of_megatrons_can_say_is_known() -> None:
    """Settings of ours without a counterpart; a new one is added here or gets its row."""
    ours = {
        "checkpoint.allow_model_changes",
        "checkpoint.max_save_failures",
        "checkpoint.missing_keys",
        "checkpoint.new_rows",
        "checkpoint.prefer_weights",
        "checkpoint.skip",
        "checkpoint.unexpected_keys",
        "checkpoint.load_mode",
        "data.keep_partial_valid",
        "data.mock_lengths.kind",
        "data.mock_lengths.mean",
        "data.mock_lengths.path",
        "data.mock_lengths.shortest",
        "data.mock_lengths.sigma",
        "data.mock_max_tokens",
        "data.mock_num_documents",
        "data.overlong",
        "data.sft.date",
        "data.sft.packs",
        "kernels",
        "train.balance_rows",
        "lora.alpha",
        "lora.dropout",
        "lora.layers",
        "lora.load",
        "lora.rank",
        "lora.rslora",
        "lora.targets",
        "model.attention.causal",
        "model.attention.chunked",
        "model.attention.qk_norm_eps",
        "model.attention.qk_norm_layers",
        "model.attention.scale",
        "model.cross.layers",
        "model.cross.memory",
        "model.attention.softcap",
        "model.attention.window_right",
        "model.block",
        "model.init_overrides",
        "model.logit_softcap",
        "model.moe.aux_loss.of_choices",
        "model.moe.router.group_score",
        "model.norm_placement",
        "model.relative.buckets",
        "model.relative.max_distance",
        "model.residual_scale",
        "model.rope.high_freq_factor",
        "model.rope.local_theta",
        "model.rope.long_factors",
        "model.rope.low_freq_factor",
        "model.rope.short_factors",
        "model.rope.skip_growth",
        "model.rope.skip_step",
        "name",
        "observe.peak_tflops",
        "observe.plots",
        "offload.min_numel",
        "optim.frozen",
        "optim.nesterov",
        "optim.trained",
        "parallel.check_collectives",
        "parallel.context.slicing",
        "parallel.dp",
        "parallel.overlap",
        "parallel.pipeline.schedule",
        "parallel.collective_matmul",
        "precision.loss_scale.max_overflows",
        "recompute.check",
        "recompute.device",
        "tokenizer.eod",
        "train.compile",
        "train.label_smoothing",
        "train.threads",
        "kernels.all",
        "kernels.cross_entropy",
        "kernels.dropout",
        "kernels.experts",
        "kernels.matmul",
        "kernels.norm",
        "observe.max_logit",
        "train.loss_backward",
        "train.loss_chunk",
        "train.z_loss",
    }
    assert set(setting_names(TrainRun)) - {field for row in MAPPED for field in row.fields} == ours
