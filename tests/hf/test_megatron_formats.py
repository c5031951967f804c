"""Legacy and zarr folders of Megatron, opened with the interface of `Checkpoint`."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.checkpoint.keys import MASTER, MODEL
from megalith.errors import CheckpointError
from megalith.hf.megatron_checkpoint import MegatronCheckpoint, open_megatron, verify_megatron
from tests.checkpoint.test_zarr import write_tensor
from tests.hf.test_megatron_legacy import DENSE, MLA, MOE, SPLITS, STEP, TIED, LegacyWriter

Extract = Callable[[str], Path]

TRAINING: dict[str, Any] = {
    "seq_length": 16,
    "global_batch_size": 4,
    "micro_batch_size": 1,
    "train_iters": 20,
    "consumed_train_samples": 36,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-5,
    "add_bias_linear": False,
    "vocab_size": 30,
    "tokenizer_type": "NullTokenizer",
    "params_dtype": torch.bfloat16,
    "bf16": True,
    "use_distributed_optimizer": True,
    "optimizer": "adam",
    "lr": 0.01,
    "min_lr": 0.001,
    "lr_decay_style": "cosine",
}
"""Arguments of `LegacyWriter` for training."""

ROLES = {MODEL: "weight", MASTER: "param", "optimizer.exp_avg.": "exp_avg"}
LEGACY = {
    "tp, pp, vpp": LegacyWriter(DENSE, vpp=2, changes=TRAINING),
    "tied": LegacyWriter(TIED, changes=TRAINING),
    "experts": LegacyWriter(MOE, ep=2, changes=TRAINING | {"moe_router_topk": 2}),
    "mla": LegacyWriter(
        MLA,
        splits=SPLITS | {"linear_q_down_proj": 0, "linear_kv_down_proj": 0},
        changes=TRAINING | {"qk_layernorm": True},
    ),
}


def _read(checkpoint: MegatronCheckpoint, name: str, prefix: str) -> torch.Tensor:
    """Return a parameter, the rows of the vocabulary without padding."""
    values = checkpoint.read(f"{prefix}{name}")
    return values[: checkpoint.run.model.vocab_size] if name in TABLES else values


TABLES = ("embed.weight", "head.weight")


@pytest.mark.parametrize("optimizer", ["distributed", "replicated"])
@pytest.mark.parametrize("name", LEGACY)
def test_legacy_folders_are_opened_with_all_roles(
    name: str, optimizer: str, tmp_path: Path
) -> None:
    writer = LEGACY[name]
    path = writer.write(tmp_path / "iter_0000009", optimizer)
    checkpoint = open_megatron(path).with_optimizer()
    model, groups = checkpoint.run.model, DENSE.num_kv_heads or 1
    assert (model.num_layers, model.tied_embeddings) == (
        writer.model.num_layers,
        writer.model.tied_embeddings,
    )
    for prefix, role in ROLES.items():
        first = "decoder.layers.0."
        stored = {key: roles[role] for key, roles in writer.tensors.items()}
        table = stored["embedding.word_embeddings.weight"][:30]
        assert torch.equal(_read(checkpoint, "embed.weight", prefix), table), prefix
        if not model.tied_embeddings:
            table = stored["output_layer.weight"][:30]
            assert torch.equal(_read(checkpoint, "head.weight", prefix), table), prefix
        if model.mla is None:
            rows = stored[f"{first}self_attention.linear_qkv.weight"].view(groups, 4, 2, 8)
            q = _read(checkpoint, "layers.0.attention.q", prefix)
            kv = _read(checkpoint, "layers.0.attention.kv", prefix)
            assert torch.equal(q.reshape(groups, 2, 2, 8), rows[:, :2]), prefix
            assert torch.equal(kv, rows[:, 2:].transpose(0, 1)), prefix
        if model.moe is None:
            rows = stored[f"{first}mlp.linear_fc1.weight"]
            gate_up = _read(checkpoint, "layers.0.mlp.gate_up", prefix)
        else:
            rows = stored[f"{first}mlp.experts.experts.linear_fc1.weight"]
            gate_up = _read(checkpoint, "layers.0.moe.experts.gate_up", prefix)
        assert torch.equal(gate_up.reshape(rows.shape), rows), prefix
    assert checkpoint.state["train"] == {
        "step": 9,
        "consumed_samples": 36,
        "scheduled_samples": 36,
        "tokens": 36 * 16,
        "skipped": 0,
        "skipped_in_a_row": 0,
    }
    assert checkpoint.state["optimizer_updates"] == STEP
    scale = {"scale": 1024.0, "growth_tracker": 0, "hysteresis_tracker": 0}
    assert checkpoint.state.get("loss_scale") == (scale if optimizer == "replicated" else None)
    assert verify_megatron(path) == []


def test_weights_of_a_legacy_folder_do_not_need_its_optimizer_state(tmp_path: Path) -> None:
    path = LEGACY["tied"].write(tmp_path / "iter_0000009")
    (path / "mp_rank_00_001" / "distrib_optim.pt").write_bytes(b"no archive")
    checkpoint = open_megatron(path)
    assert checkpoint.read("model.norm.weight").dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match=r"distrib_optim\.pt.*checkpoint\.load_mode=weights"):
        checkpoint.with_optimizer()
    (problem,) = verify_megatron(path)
    assert "mp_rank_00_001/distrib_optim.pt" in problem


def test_training_args_without_a_setting_are_named(tmp_path: Path) -> None:
    changes = TRAINING | {"rampup_batch_size": ["2", "2", "8"], "mtp_detach_heads": False}
    path = LegacyWriter(TIED, pp=1, changes=changes).write(tmp_path / "iter_0000009", None)
    (unused,) = open_megatron(path).unused_settings
    assert unused.startswith("no setting corresponds to args.rampup_batch_size=['2', '2', '8'], so")
    for name, changed, text in (
        ("b", {"optimizer": "adam_mini"}, "some settings .* defaults, .* --optimizer adam_"),
        ("d", {"lr": None}, "all settings of training are defaults, .* --lr is missing"),
    ):
        writer = LegacyWriter(TIED, pp=1, changes=TRAINING | changed)
        path = writer.write(tmp_path / name / "iter_0000009", None)
        (unused,) = open_megatron(path).unused_settings
        assert re.match(text, unused)
    path = LEGACY["tied"].write(tmp_path / "c" / "iter_0000009", None)
    assert (open_megatron(path).unused_settings, open_megatron(path).warnings()) == ((), [])


def test_unknown_tokenizer_and_optimizer_do_not_affect_the_weights(tmp_path: Path) -> None:
    changes = TRAINING | {"tokenizer_type": "QwenTokenizer", "optimizer": "adam_mini"}
    path = LegacyWriter(TIED, pp=1, changes=changes).write(tmp_path / "iter_0000009", None)
    checkpoint = open_megatron(path)
    assert checkpoint.read("model.norm.weight").shape == (8,)
    (warning,) = checkpoint.warnings()
    assert warning.startswith("args.tokenizer_type='QwenTokenizer' names no tokenizer")
    (unused,) = checkpoint.unused_settings
    assert "--optimizer adam_mini" in unused and "--tokenizer-type QwenTokenizer" in unused


def test_optimizer_state_of_other_weights_is_rejected_and_weights_load(tmp_path: Path) -> None:
    path = LEGACY["tied"].write(tmp_path / "iter_0000009")
    parts = [path / f"mp_rank_{tp:02d}_001" / "distrib_optim.pt" for tp in (0, 1)]
    swapped = parts[0].read_bytes()
    parts[0].write_bytes(parts[1].read_bytes())
    parts[1].write_bytes(swapped)
    checkpoint = open_megatron(path)
    with pytest.raises(CheckpointError, match=r"do not round to its weights in .*=weights"):
        checkpoint.with_optimizer()
    assert any("do not round" in problem for problem in verify_megatron(path))


@pytest.mark.parametrize("name", ["dense_tied_fully_reshardable", "moe_fully_reshardable"])
def test_zarr_folders_equal_the_torch_dist_folders_of_the_same_run(
    name: str, tmp_path: Path, megatron_folder: Extract
) -> None:
    source = megatron_folder(name) / "iter_0000002"
    expected = open_megatron(source).with_optimizer()
    path = tmp_path / "iter_0000002"
    path.mkdir()
    for key, tensor in expected.folder.tensors.items():
        values = tensor.read()
        chunks = tuple(max(1, -(-size // 2)) for size in values.shape)
        write_tensor(path / key, values, chunks)
    shutil.copy(source / "common.pt", path)
    (path / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    checkpoint = open_megatron(path).with_optimizer()
    assert checkpoint.folder.format == "zarr"
    assert replace(checkpoint.run, name="") == replace(expected.run, name="")
    assert list(checkpoint.keys()) == list(expected.keys())
    for key in expected.keys():  # noqa: SIM118 - a method of checkpoints
        assert torch.equal(checkpoint.read(key), expected.read(key)), key
    drop = {"megatron"}
    assert {k: v for k, v in checkpoint.state.items() if k not in drop} == {
        k: v for k, v in expected.state.items() if k not in drop
    }
