"""Folders written for Megatron, read by torch, which knows neither Megatron's names nor ours."""

import json
import pickletools
import zipfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megalith import storage
from megalith.checkpoint.dcp import read_dcp_folder
from megalith.checkpoint.load import open_checkpoint
from megalith.config.model import ModelConfig
from megalith.config.optim import LossScaleConfig, OptimConfig, PrecisionConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.errors import CheckpointError, ConfigError
from megalith.hf import megatron_write
from megalith.hf.megatron_checkpoint import MegatronCheckpoint, open_megatron
from megalith.hf.megatron_state import build_common_state, describe_optimizer_problems
from megalith.hf.megatron_write import plan_export, plan_megatron_moves, write_megatron
from megalith.hf.pretrained import (
    CheckpointWeights,
    Pretrained,
    locate_source,
    open_pretrained,
)
from megalith.hf.staging import CONVERSION, Attempt, ConversionOptions
from tests.cases import loop_over
from tests.hf.megatron_runs import DENSE, LATER_MOE, MLA, MOE, build_run, save_run

ROLES = {
    "model.": "",
    "optimizer.master.": "optimizer.state.param.",
    "optimizer.exp_avg.": "optimizer.state.exp_avg.",
    "optimizer.exp_avg_sq.": "optimizer.state.exp_avg_sq.",
}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all tensors of a folder with torch."""
    reader = FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with pytest.warns(UserWarning, match="single process"):
        load(dict(tensors), storage_reader=reader, no_dist=True)
    return tensors


def list_objects(folder: Path) -> set[str]:
    """Return the names of the values of layers that are not tensors."""
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name
        for name, entry in entries.items()
        if isinstance(entry, BytesStorageMetadata) and name.startswith("decoder.")
    }


def read_common(folder: Path) -> dict[str, Any]:
    """Read the state besides tensors as megatron-core does, with arguments as the only class."""
    with torch.serialization.safe_globals([Namespace]):
        common: dict[str, Any] = torch.load(folder / "common.pt", weights_only=True)
    return common


def stack_qkv(q: Tensor, kv: Tensor) -> Tensor:
    """Return rows of queries, keys and values for each KV group."""
    groups = kv.shape[1]
    heads = q.view(groups, -1, *q.shape[1:])
    parts = [torch.cat([heads[g], kv[0, g : g + 1], kv[1, g : g + 1]]) for g in range(groups)]
    return torch.cat(parts).flatten(0, 1)


def expect_layer(values: dict[str, Tensor], prefix: str, model: ModelConfig) -> dict[str, Tensor]:
    """Return what Megatron stores for one layer, from its parameters in one role."""
    parameters = {
        key.removeprefix(prefix): tensor for key, tensor in values.items() if key.startswith(prefix)
    }
    own = {name: tensor for name, tensor in parameters.items() if not name.startswith("moe")}
    tensors = {
        "self_attention.linear_proj.weight": own["attention.o"].flatten(1),
    }
    if model.mla is None:
        tensors["self_attention.linear_qkv.weight"] = stack_qkv(
            own["attention.q"], own["attention.kv"]
        )
        tensors["self_attention.linear_qkv.layer_norm_weight"] = own["attention_norm.weight"]
    else:
        tensors |= {
            "input_layernorm.weight": own["attention_norm.weight"],
            "self_attention.linear_q_up_proj.layer_norm_weight": own[
                "attention.q_down_norm.weight"
            ],
            "self_attention.linear_kv_up_proj.layer_norm_weight": own[
                "attention.kv_down_norm.weight"
            ],
            "self_attention.linear_q_down_proj.weight": own["attention.q_down"],
            "self_attention.linear_kv_down_proj.weight": own["attention.kv_down"],
            "self_attention.linear_q_up_proj.weight": own["attention.q_up"].flatten(0, 1),
            "self_attention.linear_kv_up_proj.weight": own["attention.kv_up"].flatten(0, 1),
        }
    if "mlp.down" in own:
        return tensors | {
            "mlp.linear_fc1.layer_norm_weight": own["mlp_norm.weight"],
            "mlp.linear_fc1.weight": own["mlp.gate_up"].flatten(0, 1),
            "mlp.linear_fc2.weight": own["mlp.down"],
        }
    tensors |= {
        "pre_mlp_layernorm.weight": own["mlp_norm.weight"],
        "mlp.router.weight": parameters["moe.router"],
        "mlp.experts.experts.linear_fc1.weight": parameters["moe.experts.gate_up"].flatten(1, 2),
        "mlp.experts.experts.linear_fc2.weight": parameters["moe.experts.down"],
        "mlp.shared_experts.linear_fc1.weight": parameters["moe.shared.gate_up"].flatten(0, 1),
        "mlp.shared_experts.linear_fc2.weight": parameters["moe.shared.down"],
    }
    if "moe.balancing_bias" in parameters:
        tensors["mlp.router.expert_bias"] = parameters["moe.balancing_bias"]
    return tensors


def expect_tensors(values: dict[str, Tensor], model: ModelConfig) -> dict[str, Tensor]:
    """Return all tensors of a Megatron folder, from the tensors of a checkpoint."""
    tensors = {}
    stacked = model.moe is None or not model.moe.layers
    for role, prefix in ROLES.items():
        if f"{role}norm.weight" not in values:
            continue
        layers = [expect_layer(values, f"{role}layers.{i}.", model) for i in range(3)]
        tensors |= {
            f"{prefix}embedding.word_embeddings.weight": values[f"{role}embed.weight"],
            f"{prefix}decoder.final_layernorm.weight": values[f"{role}norm.weight"],
            f"{prefix}output_layer.weight": values[f"{role}head.weight"],
        }
        if stacked:
            tensors |= {
                f"{prefix}decoder.layers.{name}": torch.stack([layer[name] for layer in layers])
                for name in layers[0]
            }
        else:
            tensors |= {
                f"{prefix}decoder.layers.{number}.{name}": tensor
                for number, layer in enumerate(layers)
                for name, tensor in layer.items()
            }
    return tensors


def export(
    folder: Path, run: TrainRun, options: ConversionOptions = CONVERSION, **settings: Any
) -> tuple[dict[str, Tensor], Path]:
    """Save a run and write it for Megatron; return the tensors saved, and the folder of the
    checkpoint."""
    values = save_run(folder, run)
    source = open_pretrained(folder / "step_0000007")
    plan = plan_export(source, options.dtype, **settings)
    write_megatron(folder / "out", source, plan, options)
    return values, folder / "out" / plan.folder


def check_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys(), sorted(actual.keys() ^ expected.keys())
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


MODELS = {
    "gqa": DENSE,
    "one head per group": replace(DENSE, num_kv_heads=6),
    "moe": MOE,
    "moe in later layers": LATER_MOE,
    "mla": MLA,
}


@loop_over("name", MODELS)
def test_weights_master_weights_and_moments_are_written_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    values, folder = export(tmp_path / name, build_run(MODELS[name]))
    check_equal(read_tensors(folder), expect_tensors(values, MODELS[name]))
    assert (folder.parent / "latest_checkpointed_iteration.txt").read_text() == "7"
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["sharded_backend"] == "torch_dist"
    # our own reader, too, with the state besides tensors
    checkpoint = open_megatron(folder).with_optimizer()
    keys = checkpoint.keys()
    check_equal({key: checkpoint.read(key) for key in keys}, values)
    saved = open_checkpoint(tmp_path / name / "step_0000007")
    for key in ("train", "optimizer_updates"):
        assert checkpoint.state[key] == saved.state[key], key


@loop_over("name", ["dense_dp_reshardable", "mla_dp_reshardable", "moe_dp_reshardable"])
def test_states_of_linear_layers_have_the_names_of_megatron_core(
    name: str, tmp_path: Path, megatron_folder: Callable[[str], Path]
) -> None:
    """megatron-core, which wrote the fixtures, loads no folder that lacks one of them."""
    source = open_pretrained(locate_source(str(megatron_folder(name))))
    plan = plan_export(source, weights_only=True)
    write_megatron(tmp_path / name, source, plan, CONVERSION)
    written, fixture = tmp_path / name / "release", source.checkpoint
    assert isinstance(fixture, MegatronCheckpoint)
    names = list_objects(fixture.path)
    assert names and list_objects(written) == names
    objects = read_dcp_folder(written).objects
    assert {objects[each]() for each in names} == {None}


def test_a_folder_of_megatron_is_written_again(tmp_path: Path) -> None:
    values, folder = export(tmp_path, build_run(DENSE))
    source = open_pretrained(folder)
    assert isinstance(source.checkpoint, MegatronCheckpoint)
    source = replace(source, weights=CheckpointWeights(source.checkpoint.with_optimizer()))
    plan = plan_export(source)
    write_megatron(tmp_path / "again", source, plan, CONVERSION)
    again = tmp_path / "again" / "iter_0000007"
    check_equal(read_tensors(again), expect_tensors(values, DENSE))
    before, after = (vars(read_common(path)["args"]) for path in (folder, again))
    divisors = [args.pop("make_vocab_size_divisible_by") for args in (before, after)]
    assert before == after and divisors == [4, 64]  # both give 64 rows

    untranslated = replace(source.checkpoint, args={**source.checkpoint.args, "lr": 3.0})
    source = replace(source, weights=CheckpointWeights(untranslated))
    with pytest.raises(CheckpointError, match="args for training have no counterpart"):
        plan_export(source)


def test_tensors_may_be_split_into_boxes_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_write, "BOX_NBYTES", 300)
    monkeypatch.setattr(megatron_write, "BATCH_NBYTES", 3000)
    values, folder = export(tmp_path, build_run(MOE), ConversionOptions(workers=2))
    check_equal(read_tensors(folder), expect_tensors(values, MOE))
    assert len(list(folder.glob("__*_0.distcp"))) > 5
    entry = (
        FileSystemReader(folder)
        .read_metadata()
        .state_dict_metadata["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    )
    assert isinstance(entry, TensorStorageMetadata) and len(entry.chunks) == 3 * 4


def test_runs_in_fp32_have_their_weights_as_master_weights(tmp_path: Path) -> None:
    values, folder = export(tmp_path, build_run(DENSE, params="fp32"))
    master_weights = {
        key.replace("model.", "optimizer.master."): tensor
        for key, tensor in values.items()
        if key.startswith("model.")
    }
    check_equal(read_tensors(folder), expect_tensors(values | master_weights, DENSE))


def test_common_state_has_plain_values_that_continue_the_run(tmp_path: Path) -> None:
    _, folder = export(tmp_path, build_run(DENSE))
    common = read_common(folder)
    args = common["args"]
    assert common["iteration"] == args.iteration == 7 and common["checkpoint_version"] == 3.0
    assert (args.consumed_train_samples, args.global_batch_size, args.train_iters) == (56, 8, 40)
    assert (args.padded_vocab_size, args.vocab_size, args.num_query_groups) == (64, 61, 2)
    assert args.bf16 and args.params_dtype == torch.bfloat16 and args.no_save_rng
    assert not args.no_save_optim and args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters == 10
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    scheduler = common["opt_param_scheduler"]
    assert (scheduler["num_steps"], scheduler["lr_warmup_steps"]) == (48, 32)
    assert (scheduler["lr_decay_steps"], scheduler["wd_incr_steps"]) == (320, 320)
    decayed, others = common["optimizer"]["optimizer"]["param_groups"]
    assert (decayed["wd_mult"], decayed["weight_decay"], decayed["step"]) == (1.0, 0.1, 6)
    assert (others["wd_mult"], others["weight_decay"], others["lr"]) == (0.0, 0.0, 1e-3)
    assert decayed["betas"] == (0.9, 0.98)

    with zipfile.ZipFile(folder / "common.pt") as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        data = archive.read(name)
    names = {argument for code, argument, _ in pickletools.genops(data) if code.name == "GLOBAL"}
    assert names == {"argparse Namespace", "torch bfloat16"}


def test_experts_over_several_ranks_have_an_optimizer_of_their_own() -> None:
    run = replace(build_run(MOE), parallel=ParallelConfig(ep=2))
    state = {"train": {"scheduled_samples": 48}, "optimizer_updates": 6}
    common = build_common_state({"iteration": 7}, run=run, state=state, with_optimizer=True)
    kinds = {
        number: [group["is_expert_parallel"] for group in part["optimizer"]["param_groups"]]
        for number, part in common["optimizer"].items()
    }
    assert kinds == {0: [False, False], 1: [True, True]}


def test_loss_scale_of_fp16_is_written() -> None:
    dynamic = build_run(DENSE, params="fp16")
    scale = {"scale": 1024.0, "growth_tracker": 5, "hysteresis_tracker": 2}
    state = {"train": {"scheduled_samples": 48}, "optimizer_updates": 6, "loss_scale": scale}
    common = build_common_state({"iteration": 7}, run=dynamic, state=state, with_optimizer=True)
    assert common["optimizer"]["grad_scaler"] == scale | {"scale": torch.tensor([1024.0])}
    constant = replace(
        dynamic, precision=PrecisionConfig(params="fp16", loss_scale=LossScaleConfig(constant=8.0))
    )
    common = build_common_state({"iteration": 7}, run=constant, state=state, with_optimizer=True)
    assert common["optimizer"]["grad_scaler"] == {}


def test_weights_only_are_a_release(tmp_path: Path) -> None:
    options = ConversionOptions(dtype=torch.float32)
    values, folder = export(tmp_path, build_run(DENSE), options, weights_only=True)
    master_weights = {
        key.replace("optimizer.master.", "model."): tensor
        for key, tensor in values.items()
        if key.startswith("optimizer.master.")
    }
    check_equal(read_tensors(folder), expect_tensors(master_weights, DENSE))
    common = read_common(folder)
    assert folder.name == "release" and common["iteration"] == 0 and common["args"].no_save_optim
    assert "optimizer" not in common and "opt_param_scheduler" not in common
    assert (folder.parent / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_checkpoints_without_moments_keep_the_step(tmp_path: Path) -> None:
    save_run(tmp_path, build_run(DENSE), optimizer=False)
    source = open_pretrained(tmp_path / "step_0000007")
    plan = plan_export(source)
    assert plan.describe() == "iteration 7 without optimizer state"
    assert plan.folder == "iter_0000007" and plan.args["no_save_optim"]


def test_moves_name_parameters_and_tensors(tmp_path: Path) -> None:
    save_run(tmp_path, build_run(DENSE))
    source = open_pretrained(tmp_path / "step_0000007")
    moves = {move.target: move for move in plan_megatron_moves(plan_export(source), source)}
    move = moves["optimizer.state.param.decoder.layers.self_attention.linear_qkv.weight[1]"]
    queries, keys = (f"optimizer.master.layers.1.attention.{name}" for name in ("q", "kv"))
    assert move.source == f"{queries} + {keys}"
    assert (move.shape, move.target_dtype, move.nbytes) == ((20, 12), "float32", 960)


def open_run(folder: Path, run: TrainRun) -> Pretrained:
    save_run(folder, run)
    return open_pretrained(folder / "step_0000007")


def test_optimizers_that_megatron_does_not_have_are_rejected() -> None:
    run = build_run(DENSE)
    cases = {
        "optim.kind=sgd: Megatron's distributed optimizer stores the moments of Adam only": replace(
            run, optim=OptimConfig(kind="sgd")
        ),
        "schedule.plugin=mine: Megatron has no such schedule": replace(
            run, schedule=replace(run.schedule, plugin="mine")
        ),
        "optim.frozen=['embed.*']: frozen parameters have no moments": replace(
            run, optim=OptimConfig(frozen=("embed.*",))
        ),
    }
    for text, case in cases.items():
        (problem,) = describe_optimizer_problems(case)
        assert text in problem and "Pass --weights-only" in problem


def test_models_that_megatron_cannot_express_are_rejected(tmp_path: Path) -> None:
    model = replace(DENSE, attention=replace(DENSE.attention, softcap=30.0))
    source = open_run(tmp_path, build_run(model))
    with pytest.raises(
        ConfigError, match="model.attention.softcap=30.0: the arguments of Megatron"
    ):
        plan_export(source)


def test_partly_stored_moments_are_rejected(tmp_path: Path) -> None:
    source = open_run(tmp_path, build_run(DENSE))
    assert source.checkpoint is not None
    del source.checkpoint.manifest.tensors["optimizer.exp_avg.layers.1.attention.kv"]
    with pytest.raises(CheckpointError, match="has no moments of layers.1.attention.kv, which"):
        plan_export(source)


def test_a_full_disk_leaves_nothing_and_kept_files_are_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_run(tmp_path, build_run(DENSE))
    plan, target = plan_export(source), tmp_path / "out"
    monkeypatch.setattr(megatron_write, "BATCH_NBYTES", 3000)

    def fail(path: Path, data: bytes = b"", **settings: object) -> None:
        raise OSError(28, "No space left on device")

    for keep in (False, True):
        attempt = Attempt({"source": "a run"}, keep=keep)
        with monkeypatch.context() as patch:
            patch.setattr(storage, "write_new", fail)
            with pytest.raises(CheckpointError, match="not written .*No space left"):
                write_megatron(target, source, plan, ConversionOptions(attempt=attempt))
        left = [path.name for path in tmp_path.iterdir() if "out" in path.name]
        assert not target.exists() and len(left) == keep

    with monkeypatch.context() as patch:
        patch.setattr("megalith.hf.box_files.BoxFile", fail)  # no file is written again
        write_megatron(target, source, plan, ConversionOptions(attempt=attempt))
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]
    assert read_tensors(target / "iter_0000007")["output_layer.weight"].shape == (64, 12)
