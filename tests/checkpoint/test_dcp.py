"""Reading checkpoints that megatron-core 0.16 saved at tp 2 x pp 2, and folders of plain DCP."""

import argparse
import dataclasses
import itertools
import json
import logging
import math
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megalith.checkpoint.chunks import MegatronFolder
from megalith.checkpoint.dcp import COMMON_ENTRY, read_dcp_folder
from megalith.checkpoint.iterations import detect_megatron_format, locate_iteration
from megalith.checkpoint.safe_pickle import Record, parse_archive
from megalith.errors import CheckpointError

LOCAL_NAMES = (
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
    (".linear_q_up_proj.layer_norm_", ".q_layernorm."),
    (".linear_kv_up_proj.layer_norm_", ".kv_layernorm."),
)
"""Canonical names of norms, and the names that modules without TransformerEngine store for some
models."""


def read_reference(folder: Path, stored: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the expected tensors: weights under the names of the files, where the tensors of
    layers are stacked; optimizer state under those of `fully_reshardable`."""
    roles = {"master": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
    layers: dict[str, dict[int, torch.Tensor]] = {}
    tensors = {}
    for key, values in load_file(folder / "reference.safetensors").items():
        match = re.fullmatch(r"optimizer\.(master|exp_avg_sq|exp_avg)\.(.*)", key)
        prefix, name = (f"optimizer.state.{roles[match[1]]}.", match[2]) if match else ("", key)
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
        if match:
            layers.setdefault(f"{prefix}decoder.layers.{match[2]}", {})[int(match[1])] = values
        else:
            tensors[prefix + name] = values
    for name, parts in layers.items():
        spellings = [name, *(name.replace(canonical, local) for canonical, local in LOCAL_NAMES)]
        used = next((spelling for spelling in spellings if spelling in stored), name)
        tensors[used] = torch.stack([parts[index] for index in sorted(parts)])
    return tensors


def assert_equal(folder: MegatronFolder, expected: dict[str, torch.Tensor]) -> None:
    for name, values in expected.items():
        stored = folder.tensors[name]
        assert (stored.shape, stored.dtype) == (tuple(values.shape), values.dtype), name
        assert torch.equal(stored.read(), values), name


@pytest.mark.parametrize("name", ["dense_tied_fully_reshardable", "moe_fully_reshardable"])
def test_weights_and_moments_equal_those_of_the_processes_that_saved(
    megatron_folder: Callable[[str], Path], name: str
) -> None:
    path = megatron_folder(name)
    folder = read_dcp_folder(path / "iter_0000002")
    expected = read_reference(path, folder.tensors)
    assert_equal(folder, expected)
    assert folder.format == "torch_dist"
    assert folder.tensors.keys() == expected.keys()
    assert any("exp_avg_sq" in key for key in expected)


@pytest.mark.parametrize(
    "name", ["dense_dp_reshardable", "moe_dp_reshardable", "mla_dp_reshardable"]
)
def test_weights_equal_those_of_the_processes_that_saved(
    megatron_folder: Callable[[str], Path], name: str
) -> None:
    path = megatron_folder(name)
    folder = read_dcp_folder(path / "iter_0000002")
    reference = read_reference(path, folder.tensors)
    weights = {key: t for key, t in reference.items() if not key.startswith("opt")}
    assert_equal(folder, weights)
    others = folder.tensors.keys() - weights.keys()
    assert others and all(".bucket_idx_" in key for key in others)
    for key in others:  # padding between parameters is not initialized by Megatron
        bucket = folder.tensors[key]
        assert bucket.read().shape == bucket.shape and bucket.dtype == torch.float32


def test_layers_with_own_keys_and_split_gate_are_read(
    megatron_folder: Callable[[str], Path],
) -> None:
    path = megatron_folder("dense_singleton")
    folder = read_dcp_folder(path / "iter_0000002")
    reference = load_file(path / "reference.safetensors")
    for layer in range(2):
        name = f"decoder.layers.{layer}.mlp.linear_fc1.weight"
        gate, up = folder.tensors[f"{name}_w"].read(), folder.tensors[f"{name}_v"].read()
        assert torch.equal(torch.cat([gate, up]), reference[name])
        moment = folder.tensors[f"optimizer.state.exp_avg.{name}_v"].read()
        assert torch.equal(moment, reference[f"optimizer.exp_avg.{name}"].chunk(2)[1])


def test_common_state_is_parsed_into_records(megatron_folder: Callable[[str], Path]) -> None:
    folder = read_dcp_folder(megatron_folder("dense_dp_reshardable") / "iter_0000002")
    args = folder.common["args"]
    assert isinstance(args, Record) and args.name == "argparse.Namespace"
    assert args.state["num_query_groups"] == 1
    assert args.state["tensor_model_parallel_size"] == 2
    assert folder.common["iteration"] == 2
    assert folder.common["content_metadata"]["distrib_optim_sharding_type"] == "dp_reshardable"
    assert folder.common["opt_param_scheduler"]["num_steps"] == 16


def test_byte_entries_are_parsed_without_their_list(
    megatron_folder: Callable[[str], Path],
) -> None:
    folder = read_dcp_folder(megatron_folder("dense_dp_reshardable") / "iter_0000002")
    prefix = "optimizer.distributed.dp_group_idx_0"
    groups = folder.objects[f"{prefix}.optimizer/shard_0_1"]()["param_groups"]
    assert groups[0]["step"] == 2.0
    sizes = folder.objects[f"{prefix}.per_bucket_numel_unpadded/shard_0_1"]()
    assert list(sizes[0]) == [(torch.bfloat16, torch.float32)]


def test_boxes_of_a_tensor_are_read(megatron_folder: Callable[[str], Path]) -> None:
    folder = read_dcp_folder(megatron_folder("dense_dp_reshardable") / "iter_0000002")
    tensor = folder.tensors["decoder.layers.mlp.linear_fc1.weight"]
    box = ((1, 3), (5, 20), (2, 7))
    assert torch.equal(tensor.read(box), tensor.read()[1:3, 5:20, 2:7])
    assert torch.equal(tensor.select(3).read(), tensor.read()[3])


# --- folders of plain DCP


def save_dcp(path: Path, state: dict[str, Any]) -> None:
    path.mkdir(parents=True)
    dcp.save(state, checkpoint_id=path, no_dist=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["torch_dcp", "fsdp_dtensor"])
def test_folder_without_metadata_json_is_read(tmp_path: Path, kind: str) -> None:
    weight = torch.randn(6, 4)
    state = {
        "model": {"module.decoder.layers.0.mlp.linear_fc1.weight": weight},
        "optimizer": {"state": {"a": {"exp_avg": weight * 2}}, "param_groups": [{"lr": 0.5}]},
        "args": argparse.Namespace(ckpt_format=kind, hidden_size=4),
        "iteration": 7,
        "opt_param_scheduler": {"num_steps": 56},
        "rng_state": [1, 2],
    }
    save_dcp(tmp_path / "iter_0000007", state)
    folder = read_dcp_folder(tmp_path / "iter_0000007")
    assert folder.format == kind
    name = "model.module.decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(folder.tensors[name].read(), weight)
    assert torch.equal(folder.tensors["optimizer.state.a.exp_avg"].read(), weight * 2)
    assert folder.common["args"].state["hidden_size"] == 4
    assert folder.common["iteration"] == 7
    assert folder.common["opt_param_scheduler"] == {"num_steps": 56}
    assert "rng_state" not in folder.common


def test_damaged_optimizer_entry_does_not_affect_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = {"param_groups": [{"lr": 0.5}]}
    path = tmp_path / "iter_0000007"
    save_dcp(path, {"model": {"w": torch.ones(2)}, "optimizer": groups, "iteration": 7})

    def parse(data: memoryview, *, source: str) -> object:
        if damaged in source:
            raise CheckpointError(f"cannot read {source}: truncated. Copy it again.")
        return parse_archive(data, source=source)

    monkeypatch.setattr("megalith.checkpoint.dcp.parse_archive", parse)
    damaged = "optimizer.param_groups"
    folder = read_dcp_folder(path)
    assert torch.equal(folder.tensors["model.w"].read(), torch.ones(2))
    assert "optimizer.param_groups" in str(folder.optimizer_problem)
    damaged = "(iteration)"
    with pytest.raises(CheckpointError, match=r"\(iteration\): truncated"):
        read_dcp_folder(path)


@pytest.mark.filterwarnings("ignore")
def test_common_state_in_a_byte_entry_is_read(tmp_path: Path) -> None:
    path = tmp_path / "iter_0000007"
    common = {"args": argparse.Namespace(hidden_size=4), "iteration": 7}
    path.mkdir()
    state = {"w": torch.ones(2), COMMON_ENTRY: [common]}
    dcp.save(
        state,
        checkpoint_id=path,
        no_dist=True,
        planner=DefaultSavePlanner(flatten_state_dict=False),
    )
    (path / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    folder = read_dcp_folder(path)
    assert folder.common["iteration"] == 7
    assert folder.common["args"].state == {"hidden_size": 4}
    assert COMMON_ENTRY not in folder.objects


# --- flattened optimizer state of old versions


def write_folder(path: Path, tensors: dict[str, Any], flat: dict[str, Any]) -> None:
    """Write a torch_dist folder: `tensors` is {name: (shape, {offset: chunk})}, and `flat` has the
    true shapes of tensors that are stored as flat ranges."""
    path.mkdir(parents=True)
    described, locations = {}, {}
    with open(path / "__0_0.distcp", "wb") as file:
        for name, (shape, chunks) in tensors.items():
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=torch.float32),
                torch.Size(shape),
                [
                    ChunkStorageMetadata(torch.Size(offset), chunk.shape)
                    for offset, chunk in chunks.items()
                ],
            )
            for offset, chunk in chunks.items():
                start = file.tell()
                torch.save(chunk.clone(), file)
                place = _StorageInfo("__0_0.distcp", start, file.tell() - start)
                locations[MetadataIndex(name, torch.Size(offset))] = place
    metadata = Metadata(described, storage_data=locations)
    reshaped = {
        name: {"nd_reformulated_orig_global_shape": torch.Size(shape)}
        for name, shape in flat.items()
    }
    metadata.__dict__["mcore_data"] = reshaped  # as in Megatron's subclass
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"args": argparse.Namespace(), "iteration": 7}, path / "common.pt")


def cut_into_flat_ranges(
    full: torch.Tensor, grid: tuple[int, ...], cuts: list[int]
) -> tuple[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]]:
    """Return the stored shape and chunks of a tensor whose parts on a grid are cut flat."""
    sizes = [n // parts for n, parts in zip(full.shape, grid, strict=True)]
    numel = math.prod(sizes)
    chunks = {}
    for cell in itertools.product(*map(range, grid)):
        part = full[tuple(slice(at * n, at * n + n) for at, n in zip(cell, sizes, strict=True))]
        bounds = [0, *cuts, numel]
        for start, stop in itertools.pairwise(bounds):
            values = part.reshape(-1)[start:stop]
            chunks[(*cell, start)] = values.view(*[1] * len(grid), -1)
    return (*grid, numel), chunks


def test_flat_ranges_of_old_optimizer_state_have_their_true_shape(tmp_path: Path) -> None:
    cases = [
        ((12, 4), (2, 1), [3, 17]),
        ((3, 4, 10), (3, 2, 1), [7]),
        ((2, 6, 4, 5), (2, 3, 1, 1), [1, 38]),
        ((8,), (2,), [3]),
        ((6, 4), (1, 2), []),
    ]
    full = {f"t{n}": torch.randn(shape) for n, (shape, _, _) in enumerate(cases)}
    stored = {
        f"t{n}": cut_into_flat_ranges(full[f"t{n}"], grid, cuts)
        for n, (_, grid, cuts) in enumerate(cases)
    }
    write_folder(tmp_path / "iter_0000007", stored, {name: t.shape for name, t in full.items()})
    folder = read_dcp_folder(tmp_path / "iter_0000007")
    assert_equal(folder, full)
    for name, values in full.items():
        dims, ranges = values.ndim, len(stored[name][1])
        assert len(folder.tensors[name].chunks) <= ranges * (2 * dims - 1)


# --- damaged folders


def change_metadata(path: Path, change: Callable[[Metadata], None]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.fixture
def damaged(megatron_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """Return a copy of an iteration, which a test damages."""
    source = megatron_folder("dense_tied_fully_reshardable") / "iter_0000002"
    path = Path(shutil.copytree(source, tmp_path / "iter_0000002"))
    # the plans of the processes are most of the file, and are not read
    change_metadata(path, lambda metadata: setattr(metadata, "all_local_plans", None))
    return path


def read_error(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_dcp_folder(path)
    return str(caught.value)


def test_missing_and_truncated_files_are_all_named_before_anything_is_read(damaged: Path) -> None:
    (damaged / "__1_0.distcp").unlink()
    os.truncate(damaged / "__4_0.distcp", 1024)
    error = read_error(damaged)
    assert re.search(
        r"iter_0000002/__1_0.distcp is missing: parts of \d\d tensors are in it", error
    )
    assert re.search(
        r"iter_0000002/__4_0.distcp is 1,024 bytes, metadata needs [\d,]+ → checkpoint incomplete",
        error,
    )
    assert "Copy the checkpoint again, with all of its files" in error


def test_missing_metadata_file_is_named(damaged: Path) -> None:
    (damaged / ".metadata").unlink()
    assert "has no .metadata, which names its tensors" in read_error(damaged)


def test_truncated_metadata_file_is_named(damaged: Path) -> None:
    data = (damaged / ".metadata").read_bytes()
    (damaged / ".metadata").write_bytes(data[: len(data) // 2])
    assert re.search(r"cannot read .*\.metadata: truncated pickle", read_error(damaged))


def test_interrupted_save_without_metadata_json_is_rejected(damaged: Path) -> None:
    (damaged / "metadata.json").unlink()
    error = read_error(damaged)
    assert "has no metadata.json, which Megatron writes last: the save was interrupted" in error


def test_damaged_metadata_json_is_replaced_with_a_warning(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for text in ("{", "[1]", '{"sharded_backend": 3}', "\xff", '{"a":' * 5000):
        (damaged / "metadata.json").write_bytes(text.encode("latin1"))
        caplog.clear()
        assert read_dcp_folder(damaged).format == "torch_dist"
        assert "metadata.json cannot be read" in caplog.text


def test_other_backends_and_versions_are_rejected_by_name(damaged: Path) -> None:
    (damaged / "metadata.json").write_text('{"sharded_backend": "zarr_two_stage"}')
    assert "sharded_backend is 'zarr_two_stage', which is not read" in read_error(damaged)
    (damaged / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 3}'
    )
    assert "torch_dist of version 3, and this build reads version 1" in read_error(damaged)


def test_folder_without_common_state_is_rejected(damaged: Path) -> None:
    (damaged / "common.pt").unlink()
    assert f"has neither common.pt nor the entry {COMMON_ENTRY}" in read_error(damaged)
    torch.save([1, 2], damaged / "common.pt")
    assert "common.pt: found list, expected a dict of names" in read_error(damaged)
    (damaged / "common.pt").write_bytes(b"no archive")
    assert "common.pt" in read_error(damaged)
    (damaged / "common.pt").unlink()
    os.mkfifo(damaged / "common.pt")
    assert "common.pt: it is not a regular file" in read_error(damaged)


def test_stored_iteration_that_differs_from_the_folder_is_an_error(damaged: Path) -> None:
    other = damaged.rename(damaged.with_name("iter_0000009"))
    error = read_error(other)
    assert "the folder is iteration 9 by its name, and its files say 2" in error
    assert "iter_0000002" in error


def test_unused_files_and_files_of_different_age_are_reported(
    damaged: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (damaged / "__8_0.distcp").write_bytes(b"old")
    os.utime(damaged / "__5_0.distcp", (1_000_000, 1_000_000))
    read_dcp_folder(damaged)
    assert "1 data files are not named by .metadata" in caplog.text
    assert "__8_0.distcp" in caplog.text
    assert "possible interrupted overwrite" in caplog.text


def test_damaged_chunk_is_an_error_only_when_it_is_read(damaged: Path) -> None:
    file = damaged / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    folder = read_dcp_folder(damaged)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp: the [\d,]+ bytes from"):
        folder.tensors["embedding.word_embeddings.weight"].read()
    with pytest.raises(CheckpointError, match="__0_0.distcp"):
        folder.objects["decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"]()


NAME = "embedding.word_embeddings.weight"


def set_location(metadata: Metadata, **fields: Any) -> None:
    index = MetadataIndex(NAME, torch.Size([0, 0]))
    place = metadata.storage_data[index]
    metadata.storage_data[index] = dataclasses.replace(place, **fields)


def set_tensor(metadata: Metadata, **fields: Any) -> None:
    old = metadata.state_dict_metadata[NAME]
    metadata.state_dict_metadata[NAME] = dataclasses.replace(old, **fields)


CHUNK = ChunkStorageMetadata
HOSTILE: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "file outside": (
        lambda m: set_location(m, relative_path="../other/__0_0.distcp"),
        "is in file '../other/__0_0.distcp', expected a name in the folder",
    ),
    "absolute file": (
        lambda m: set_location(m, relative_path="/etc/passwd"),
        "is in file '/etc/passwd', expected a name in the folder",
    ),
    "compressed": (
        lambda m: set_location(m, transform_descriptors=["zstd"]),
        "compressed entries are not read",
    ),
    "negative start": (lambda m: set_location(m, offset=-1), r"is \[-1\], expected sizes from 0"),
    "start that is no number": (
        lambda m: set_location(m, offset="0"),
        r"position of .* is \[…\], expected sizes",
    ),
    "huge length": (
        lambda m: set_location(m, length=2**59),
        "metadata needs .* → checkpoint incomplete",
    ),
    "short length": (
        lambda m: set_location(m, length=8),
        "has 8 bytes, expected at least 256",
    ),
    "no location": (
        lambda m: m.storage_data.pop(MetadataIndex(NAME, torch.Size([0, 0]))),
        r"storage_data lacks embedding.word_embeddings.weight at \[0, 0\]",
    ),
    "no entry": (
        lambda m: setattr(m, "storage_data", None),
        "storage_data is None, expected a dict",
    ),
    "huge shape": (
        lambda m: set_tensor(m, size=torch.Size([2**40, 2**40])),
        "expected sizes from 0 on",
    ),
    "many dims": (lambda m: set_tensor(m, size=torch.Size([1] * 500)), "expected sizes from 0 on"),
    "shape that is no list": (lambda m: set_tensor(m, size=7), "is 7, expected sizes from 0 on"),
    "chunk outside": (
        lambda m: set_tensor(m, size=torch.Size([3, 8])),
        r"chunk .* of embedding.word_embeddings.weight is outside \[3, 8\]",
    ),
    "other number of dims": (
        lambda m: set_tensor(m, chunks=[CHUNK(torch.Size([0]), torch.Size([24]))]),
        "offset of embedding.word_embeddings.weight is .*, expected sizes",
    ),
    "chunks that are no list": (lambda m: set_tensor(m, chunks={}), "expected a list"),
    "dtype that is not read": (
        lambda m: set_tensor(m, properties=TensorProperties(dtype=torch.qint8)),
        "is of dtype torch.qint8, which is not read",
    ),
    "other class": (
        lambda m: m.state_dict_metadata.update({NAME: TensorProperties()}),
        "found .*TensorProperties of .*, expected TensorStorageMetadata",
    ),
    "name that is no text": (
        lambda m: m.state_dict_metadata.update({5: m.state_dict_metadata[NAME]}),
        "a key of state_dict_metadata is 5, expected a name",
    ),
    "flat ranges of another shape": (
        lambda m: m.__dict__.update(
            mcore_data={NAME: {"nd_reformulated_orig_global_shape": (5, 5, 0)}}
        ),
        "which are not flat parts of its shape",
    ),
    "flat ranges without shape": (
        lambda m: m.__dict__.update(mcore_data={NAME: {}}),
        "is None, expected sizes from 0 on",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_metadata_is_rejected_with_the_reason(damaged: Path, case: str) -> None:
    change, text = HOSTILE[case]
    change_metadata(damaged, change)
    assert re.search(text, read_error(damaged))


def test_metadata_of_another_class_is_rejected(damaged: Path) -> None:
    for content in (3, {}, argparse.Namespace()):
        (damaged / ".metadata").write_bytes(pickle.dumps(content))
        assert "expected Metadata" in read_error(damaged)


def test_chunks_that_do_not_tile_are_an_error_only_when_read(damaged: Path) -> None:
    def enlarge(metadata: Metadata) -> None:
        set_tensor(metadata, size=torch.Size([2**40, 8]))

    change_metadata(damaged, enlarge)
    folder = read_dcp_folder(damaged)
    with pytest.raises(CheckpointError, match="is not covered by the stored chunks"):
        folder.tensors[NAME].read()
    assert folder.tensors[NAME].read(((0, 24), (0, 8))).shape == (24, 8)


def test_chunk_of_another_dtype_is_an_error_when_read(damaged: Path) -> None:
    properties = TensorProperties(dtype=torch.float16)
    change_metadata(damaged, lambda m: set_tensor(m, properties=properties))
    with pytest.raises(CheckpointError, match="hold .* torch.bfloat16; expected .* torch.float16"):
        read_dcp_folder(damaged).tensors[NAME].read()


def test_mutated_metadata_gives_only_checkpoint_errors(damaged: Path) -> None:
    data = (damaged / ".metadata").read_bytes()
    for seed in range(25):
        generator = random.Random(seed)
        mutated = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            mutated[generator.randrange(len(mutated))] = generator.randrange(256)
        (damaged / ".metadata").write_bytes(mutated)
        try:
            for tensor in read_dcp_folder(damaged).tensors.values():
                tensor.read()
        except CheckpointError:
            pass
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error


# --- detection and tracker


def test_formats_are_detected(damaged: Path, tmp_path: Path) -> None:
    assert detect_megatron_format(damaged) == "torch_dist"
    assert detect_megatron_format(damaged.parent) == "torch_dist"
    ours = tmp_path / "ours"
    legacy = tmp_path / "legacy" / "iter_0000005" / "mp_rank_00"
    zarr = tmp_path / "zarr" / "weight"
    plain = tmp_path / "plain"
    for folder in (ours, legacy, zarr, plain):
        folder.mkdir(parents=True)
    (ours / "manifest.json").touch()
    (ours / ".metadata").touch()
    (zarr / ".zarray").touch()
    (plain / ".metadata").touch()
    assert detect_megatron_format(ours) is None
    assert detect_megatron_format(legacy.parent) == "torch"
    assert detect_megatron_format(legacy.parents[1]) == "torch"
    assert detect_megatron_format(zarr.parent) == "zarr"
    assert detect_megatron_format(plain) == "torch_dcp"
    assert detect_megatron_format(tmp_path / "absent") is None
    assert detect_megatron_format(plain / ".metadata") is None
    with pytest.raises(CheckpointError, match="not a Megatron checkpoint"):
        read_dcp_folder(ours)
    with pytest.raises(CheckpointError, match="is in format torch, expected one with .metadata"):
        read_dcp_folder(legacy.parent)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run's folder with iterations 100, 200, 300, of which 300 is incomplete."""
    for step in (100, 200, 300):
        (tmp_path / f"iter_{step:07d}").mkdir()
        (tmp_path / f"iter_{step:07d}" / "common.pt").touch()
    for step in (100, 200):
        text = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
        (tmp_path / f"iter_{step:07d}" / "metadata.json").write_text(text)
    return tmp_path


def set_tracker(run: Path, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    (run / "latest_checkpointed_iteration.txt").write_bytes(data)


def test_tracker_names_the_iteration(run: Path) -> None:
    set_tracker(run, "100\n")
    assert locate_iteration(run) == run / "iter_0000100"
    assert locate_iteration(run, 200) == run / "iter_0000200"
    assert locate_iteration(run / "iter_0000200") == run / "iter_0000200"
    assert locate_iteration(run / "iter_0000200", 200) == run / "iter_0000200"
    (run / "release").mkdir()
    set_tracker(run, "release")
    assert locate_iteration(run) == run / "release"


@pytest.mark.parametrize("text", [None, "", "metadata", "-5", "12 13", b"\xff\0", "9" * 5000])
def test_missing_or_garbage_tracker_is_replaced_by_a_scan(
    run: Path, caplog: pytest.LogCaptureFixture, text: str | bytes | None
) -> None:
    if text is not None:
        set_tracker(run, text)
    assert locate_iteration(run) == run / "iter_0000200"
    assert "scanned directory, using iter_0000200" in caplog.text
    assert "skipping" in caplog.text and "iter_0000300" in caplog.text
    if text == "":
        assert "tracker file contains ''; scanned directory, using iter_0000200" in caplog.text


def test_tracker_of_a_missing_folder_selects_an_older_one(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    set_tracker(run, "150")
    assert locate_iteration(run) == run / "iter_0000100"
    assert "tracker file names iter_0000150, which does not exist" in caplog.text
    set_tracker(run, "release")
    assert locate_iteration(run) == run / "iter_0000200"
    set_tracker(run, "50")
    with pytest.raises(CheckpointError, match="no older iteration is complete"):
        locate_iteration(run)


def test_missing_iteration_lists_those_that_exist(run: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        locate_iteration(run, 150)
    assert "has no iteration 150" in str(caught.value)
    assert "iter_0000300, iter_0000200, iter_0000100" in str(caught.value)
    with pytest.raises(CheckpointError, match="is not iteration 100"):
        locate_iteration(run / "iter_0000200", 100)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(CheckpointError, match="has no Megatron checkpoint: no iter_NNNNNNN"):
        locate_iteration(empty)
