"""Optimizer state of Megatron checkpoints, from fixtures of megatron-core at tp 2 x pp 2."""

import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.checkpoint.chunks import ChunkedTensor, MegatronFolder, TensorChunk
from megalith.checkpoint.dcp import read_dcp_folder
from megalith.checkpoint.format import numel
from megalith.checkpoint.safe_pickle import Record
from megalith.config.model import MLAConfig, ModelConfig
from megalith.config.moe import MoEConfig
from megalith.errors import CheckpointError
from megalith.hf import megatron_optimizer
from megalith.hf.megatron_names import normalize_tensors
from megalith.hf.megatron_optimizer import (
    OptimizerState,
    find_sharding_type,
    read_optimizer,
    verify_buckets,
)

ARCHIVES = Path(__file__).parent.parent / "checkpoint" / "megatron"
DENSE = ModelConfig(
    vocab_size=24,
    hidden_size=8,
    num_layers=4,
    num_heads=4,
    num_kv_heads=1,
    head_dim=2,
    ffn_hidden_size=12,
    max_seq_len=16,
)
SMALL = replace(DENSE, num_layers=2)
MODELS = {
    "dense_dp_reshardable": DENSE,
    "dense_tied_fully_reshardable": replace(SMALL, tied_embeddings=True, vocab_size=32, head_dim=4),
    "dense_singleton": SMALL,
    "moe_dp_reshardable": replace(SMALL, moe=MoEConfig(num_experts=4, ffn_hidden_size=6)),
    "moe_fully_reshardable": replace(SMALL, moe=MoEConfig(num_experts=4, ffn_hidden_size=6)),
    "mla_dp_reshardable": replace(
        SMALL,
        num_kv_heads=4,
        head_dim=None,
        mla=MLAConfig(kv_rank=4, q_rank=6, nope_dim=4, rope_dim=2, value_dim=4),
    ),
}
MODES = r"checkpoint\.load_mode=weights"


@dataclass
class Fixture:
    """A checkpoint of megatron-core, and the tensors of its modules and optimizers."""

    model: ModelConfig
    folder: MegatronFolder
    weights: dict[str, ChunkedTensor]
    reference: dict[str, Tensor]

    def read(self, **changes: Any) -> OptimizerState:
        """Read the optimizer state of the folder with changed fields."""
        return read_optimizer(replace(self.folder, **changes), self.model, self.weights)

    def with_args(self, **changes: object) -> OptimizerState:
        """Read the optimizer state with changed args."""
        args = self.folder.common["args"]
        changed = Record(args.name, args.args, {**args.state, **changes})
        return self.read(common={**self.folder.common, "args": changed})


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Fixture]:
    root = tmp_path_factory.mktemp("megatron")
    loaded: dict[str, Fixture] = {}

    def load_one(name: str) -> Fixture:
        if name not in loaded:
            with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
                archive.extractall(root, filter="data")
            folder = read_dcp_folder(root / name / "iter_0000002")
            weights = normalize_tensors(folder, MODELS[name])
            reference = load_file(root / name / "reference.safetensors")
            loaded[name] = Fixture(MODELS[name], folder, weights, reference)
        return loaded[name]

    return load_one


def _reference(fixture: Fixture, key: str) -> Tensor:
    """Return a tensor of the reference; experts are separate there."""
    role, _, name = key.partition(".")
    experts = "mlp.experts.experts."
    if experts not in name or f"optimizer.{role}.{name}" in fixture.reference:
        return fixture.reference[f"optimizer.{role}.{name}"]
    numbers = range(4)
    names = [name.replace(experts, f"{experts}{number}.") for number in numbers]
    return torch.stack([fixture.reference[f"optimizer.{role}.{one}"] for one in names])


@pytest.mark.parametrize("name", MODELS)
def test_states_of_megatron_core_are_read_bit_for_bit(
    load: Callable[[str], Fixture], name: str
) -> None:
    fixture = load(name)
    state = fixture.read()
    assert state.step == 2
    assert state.loss_scale is None
    kind = "dp_reshardable" if name.endswith("dp_reshardable") else "fully_reshardable"
    assert state.sharding_type == kind
    has_several_buckets = name == "dense_tied_fully_reshardable"
    assert state.needs_verification == (name.endswith("dp_reshardable") or has_several_buckets)
    verify_buckets(state, fixture.weights)
    params = [key for key in fixture.weights if not key.startswith("optimizer.")]
    assert sorted(state.tensors) == sorted(
        f"{role}.{key}" for role in ("master", "exp_avg", "exp_avg_sq") for key in params
    )
    for key, tensor in state.tensors.items():
        values = tensor.read()
        expected = _reference(fixture, key)[: values.shape[0]]
        assert values.dtype == torch.float32
        assert torch.equal(values, expected), key


def test_states_that_megatron_core_shifted_are_rejected(load: Callable[[str], Fixture]) -> None:
    """Megatron-core 0.16 saves wrong elements of tied models with pipeline parallelism, unless each
    bucket is a multiple of 128 elements."""
    fixture = load("dense_tied_fully_reshardable")
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    master = fixture.weights[f"optimizer.master.{name}"]
    shifted = master.read().roll(32)
    chunk = TensorChunk(tuple((0, size) for size in master.shape), lambda: shifted)
    weights = {**fixture.weights, f"optimizer.master.{name}": replace(master, chunks=[chunk])}
    state = read_optimizer(fixture.folder, fixture.model, weights)
    with pytest.raises(
        CheckpointError,
        match=rf"{name} do not round to.* Megatron-core 0\.16 stores shifted.*{MODES}",
    ):
        verify_buckets(state, weights)


def test_swapped_parameters_in_a_bucket_are_rejected_by_name(
    load: Callable[[str], Fixture],
) -> None:
    fixture = load("dense_dp_reshardable")
    names = [f"decoder.layers.{layer}.mlp.linear_fc2.weight" for layer in (0, 1)]
    weights = dict(fixture.weights)
    weights[names[0]], weights[names[1]] = weights[names[1]], weights[names[0]]
    state = read_optimizer(fixture.folder, fixture.model, weights)
    errors = []
    for rank in range(3):
        try:
            verify_buckets(state, weights, rank=rank, world_size=3)
        except CheckpointError as error:
            errors.append(str(error))
    assert {name for name in names if any(name in text for text in errors)}
    for text in errors:
        assert "do not round to its weights in" in text
        assert "=weights, or =progress with new moments" in text
    with pytest.raises(CheckpointError, match=rf"master weights of {names[0]} do not round"):
        verify_buckets(state, weights)


def test_order_of_another_layer_spec_is_rejected(load: Callable[[str], Fixture]) -> None:
    fixture = load("moe_dp_reshardable")
    with pytest.raises(CheckpointError, match=rf"master weights of decoder.*{MODES}"):
        verify_buckets(fixture.with_args(moe_grouped_gemm=True), fixture.weights)


def test_large_parameters_are_read_in_parts(
    load: Callable[[str], Fixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron_optimizer, "CHUNK_NUMEL", 10)
    for name in ("dense_dp_reshardable", "moe_dp_reshardable"):
        fixture = load(name)
        state = fixture.read()
        for key, tensor in state.tensors.items():
            assert all(numel(chunk.box) <= 10 for chunk in tensor.chunks), key
            assert torch.equal(tensor.read(), _reference(fixture, key)[: tensor.shape[0]]), key


def test_ranks_verify_each_parameter_once(load: Callable[[str], Fixture]) -> None:
    fixture = load("dense_dp_reshardable")
    state = fixture.read()
    compared: list[str] = []

    class Weights(dict[str, ChunkedTensor]):
        def __getitem__(self, name: str) -> ChunkedTensor:
            compared.append(name)
            return super().__getitem__(name)

    counts = []
    for rank in range(4):
        verify_buckets(state, Weights(fixture.weights), rank=rank, world_size=4)
        counts.append(len(compared))
    names = [name for name in fixture.weights if not name.startswith("optimizer.")]
    assert sorted(compared) == sorted(names)
    assert all(after > before for before, after in pairwise(counts))


def test_bucket_sizes_are_compared_with_the_args(load: Callable[[str], Fixture]) -> None:
    fixture = load("dense_dp_reshardable")
    with pytest.raises(CheckpointError, match=rf"dp_group_idx_0\.gbuf_idx_0: .*buckets.*{MODES}"):
        fixture.with_args(ddp_bucket_size=100_000)
    with pytest.raises(CheckpointError, match=rf"dp_group_idx_0\.gbuf_idx_0: .*{MODES}"):
        fixture.with_args(data_parallel_size=3, world_size=12)
    with pytest.raises(CheckpointError, match=r"args\.decoder_first_pipeline_num_layers='x'"):
        fixture.with_args(decoder_first_pipeline_num_layers="x")
    with pytest.raises(CheckpointError, match=rf"which are not those of tp=4.*{MODES}"):
        fixture.with_args(tensor_model_parallel_size=4, world_size=16)
    with pytest.raises(CheckpointError, match=r"args\.padded_vocab_size=-1"):
        tensors = {k: t for k, t in fixture.folder.tensors.items() if "word_embeddings" not in k}
        args = fixture.folder.common["args"]
        record = Record(args.name, args.args, {**args.state, "padded_vocab_size": -1})
        fixture.read(tensors=tensors, common={**fixture.folder.common, "args": record})


def _without(values: Mapping[str, Any], part: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if part not in key}


def test_missing_and_unexpected_buckets_are_named(load: Callable[[str], Fixture]) -> None:
    fixture = load("dense_dp_reshardable")
    tensors, objects = fixture.folder.tensors, fixture.folder.objects
    key = "optimizer.distributed.dp_group_idx_1"
    with pytest.raises(CheckpointError, match=rf"{key}\.per_bucket_numel is missing.*{MODES}"):
        fixture.read(objects=_without(objects, f"{key}.per_bucket_numel/"))
    first = next(name for name in tensors if name.startswith(f"{key}.gbuf_idx_0"))
    bucket = first.rpartition(".")[0]
    with pytest.raises(CheckpointError, match=r"exp_avg_sq of \d+ elements are needed"):
        fixture.read(tensors=_without(tensors, f"{bucket}.exp_avg_sq"))
    with pytest.raises(CheckpointError, match=rf"{key} has the buffers \[\], but .* 1 buffers"):
        fixture.read(tensors=_without(tensors, f"{key}.gbuf_idx_0"))
    unexpected = {first.replace("dp_group_idx_1", "dp_group_idx_9"): tensors[first]}
    with pytest.raises(CheckpointError, match=r"dp_group_idx_9 belongs to no part of a run"):
        fixture.read(tensors={**tensors, **unexpected})
    with pytest.raises(CheckpointError, match=r"the checkpoint has no args"):
        fixture.read(common={**fixture.folder.common, "args": None})


def test_types_that_are_not_read_are_rejected(load: Callable[[str], Fixture]) -> None:
    fixture = load("dense_dp_reshardable")
    for kind in ("fully_sharded_bucket_space", "dp_zero_gather_scatter"):
        common = {
            **fixture.folder.common,
            "content_metadata": {"distrib_optim_sharding_type": kind},
        }
        with pytest.raises(
            CheckpointError, match=rf"{kind} is not read.*--dist-ckpt-optim-fully-reshardable"
        ):
            fixture.read(common=common)
    weights = {k: t for k, t in fixture.folder.tensors.items() if "optimizer" not in k}
    folder = replace(fixture.folder, tensors=weights, common={})
    with pytest.raises(CheckpointError, match=rf"no optimizer state\. .*{MODES}"):
        find_sharding_type(folder)
    zero = {"optimizer.distributed.dp_group_idx_0.param_state/shard_0_1": lambda: None}
    with pytest.raises(CheckpointError, match=r"dp_zero_gather_scatter is not read"):
        find_sharding_type(replace(folder, objects=zero))
    tied = load("dense_tied_fully_reshardable")
    common = {**tied.folder.common, "content_metadata": {"distrib_optim_sharding_type": "new"}}
    with pytest.raises(CheckpointError, match=rf"distrib_optim_sharding_type='new' .*{MODES}"):
        tied.read(common=common)


def test_replicated_optimizers_are_read(load: Callable[[str], Fixture]) -> None:
    """An optimizer that is not distributed stores fp32_param and one common step."""
    fixture = load("dense_singleton")
    renamed = {
        name.replace("optimizer.state.param.", "optimizer.state.fp32_param."): tensor
        for name, tensor in fixture.folder.tensors.items()
    }
    optimizer = {
        "optimizer": {
            "state": {"common_step": torch.tensor(5.0)},
            "param_groups": [{"params": []}],
        },
        "grad_scaler": {"scale": torch.tensor([8.0])},
    }
    common = {"args": fixture.folder.common["args"], "optimizer": optimizer}
    folder = replace(fixture.folder, tensors=renamed, common=common)
    state = read_optimizer(folder, fixture.model, normalize_tensors(folder, fixture.model))
    assert (state.sharding_type, state.step, state.loss_scale) == ("replicated", 5, 8.0)
    metadata = {"distrib_optim_sharding_type": "fully_sharded_model_space"}
    old = {
        f"chained_0.{name}" if name.startswith("optimizer.") else name: tensor
        for name, tensor in renamed.items()
    }
    folder = replace(folder, tensors=old, common={**common, "content_metadata": metadata})
    model_space = read_optimizer(folder, fixture.model, normalize_tensors(folder, fixture.model))
    assert model_space.sharding_type == "fully_sharded_model_space"
    for one in (state, model_space):
        assert not one.needs_verification
        for key, tensor in one.tensors.items():
            expected = _reference(fixture, key)
            assert torch.equal(tensor.read(), expected[: tensor.shape[0]]), key


def test_incomplete_states_and_mixed_steps_are_named(load: Callable[[str], Fixture]) -> None:
    fixture = load("dense_singleton")
    name = "exp_avg.decoder.layers.0.mlp.linear_fc2.weight"
    weights = _without(fixture.weights, f"optimizer.{name}")
    with pytest.raises(CheckpointError, match=rf"lacks 1 tensors: {name}\. .*{MODES}"):
        read_optimizer(fixture.folder, fixture.model, weights)
    for step, message in ((3, r"parts of different steps \(2, 3\)"), ("x", r"step 'x' is not")):
        groups = [{"step": 2}, {"step": step}]
        common = {**fixture.folder.common, "optimizer": [{"param_groups": groups}]}
        with pytest.raises(CheckpointError, match=message):
            fixture.read(common=common)
