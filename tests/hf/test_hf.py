import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalith import storage
from megalith.checkpoint import safetensors
from megalith.checkpoint.format import CheckpointEntry
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.hf import folder as hf
from megalith.hf.families import LLAMA
from megalith.hf.family import UnexportedFieldsError
from megalith.hf.folder import (
    HuggingFaceFolder,
    find_family,
    list_auxiliary_files,
    plan_files,
    write_folder,
)
from megalith.hf.staging import ConversionOptions
from megalith.parallel.mesh import build_meta_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import Shard
from megalith.rules.model import network_problems


def edit(folder: Path, **fields: Any) -> None:
    """Change fields of config.json; None removes one."""
    raw = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in raw.items() if value is not None})
    )


def edit_tensors(folder: Path, **tensors: Tensor | None) -> None:
    """Change tensors of a folder with one file; __ stands for a dot, None removes one."""
    result = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        result.pop(name.replace("__", "."), None)
        if tensor is not None:
            result[name.replace("__", ".")] = tensor
    save_file(result, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("shard_nbytes", [10**9, 1500])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": True}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}],
)
def test_written_weights_are_read_back_bitwise(
    changes: dict[str, Any], shard_nbytes: int, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    config = tiny.config(**changes)
    model = tiny.folder(tmp_path / "x", config, shard_nbytes=shard_nbytes)
    folder = HuggingFaceFolder(tmp_path / "x")
    assert replace(folder.model_config, pad_vocab_to_multiple_of=8) == config
    back = tiny.blank(config)
    folder.fill(tiny.entries(back))
    for name, tensor in tiny.tensors(model).items():
        assert torch.equal(tiny.tensors(back)[name], tensor), name


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6])
def test_every_layout_reads_its_boxes(tp: int, tmp_path: Path, tiny: SimpleNamespace) -> None:
    config = tiny.config(
        qkv_bias=True, output_bias=True, mlp_bias=True, num_kv_heads=2 if tp != 3 else 3
    )
    expected = tiny.tensors(tiny.folder(tmp_path / "x", config, shard_nbytes=3000))
    folder = HuggingFaceFolder(tmp_path / "x")
    grid = model_grid(ParallelConfig(tp=tp), config, tp)
    for rank in range(tp):
        part = tiny.blank(config, build_meta_mesh(grid, rank=rank))
        folder.fill(tiny.entries(part))
        for entry in tiny.entries(part):
            box = tuple(slice(a, b) for a, b in entry.shard.box)
            assert torch.equal(
                entry.tensor.view(entry.shard.box_shape), expected[entry.shard.name][box]
            )


def test_flat_ranges_are_filled_too(tmp_path: Path, tiny: SimpleNamespace) -> None:
    expected = tiny.tensors(tiny.folder(tmp_path / "x", tiny.config()))
    folder = HuggingFaceFolder(tmp_path / "x")
    for name, tensor in expected.items():
        shard = Shard.full(name, tuple(tensor.shape))
        start, stop = tensor.numel() // 3, tensor.numel() - 1
        actual = torch.full((stop - start,), -7.0)
        folder.fill([CheckpointEntry(replace(shard, flat=(start, stop)), "param", actual)])
        assert torch.equal(actual, tensor.flatten()[start:stop]), name


@pytest.mark.parametrize("multiple", [1, 16, 64])
def test_vocabulary_padding_is_zero_on_import_and_dropped_on_export(
    multiple: int, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    config = tiny.config(pad_vocab_to_multiple_of=multiple)
    back = tiny.blank(config)
    HuggingFaceFolder(tmp_path / "x").fill(tiny.entries(back))
    table = tiny.tensors(back)["head.weight"]
    assert table.shape[0] == config.padded_vocab_size() and table[36].any() and not table[37:].any()
    write_folder(tmp_path / "y", config, tiny.InMemory(tiny.tensors(back)))
    assert load_file(tmp_path / "y" / "model.safetensors")["lm_head.weight"].shape == (37, 12)


def test_only_the_boxes_are_read(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    folder, read = HuggingFaceFolder(tmp_path / "x"), []

    def counted(name: str, *rest: Any) -> Tensor:
        values = safetensors.read_box(name, *rest)
        read.append((name, tuple(values.shape)))
        return values

    monkeypatch.setattr(hf, "read_box", counted)
    shard = Shard("layers.1.attention.kv", (2, 2, 2, 12), ((0, 2), (1, 2), (0, 2), (0, 12)))
    folder.fill([CheckpointEntry(shard, "param", torch.empty(4, 12))])
    assert read == [(f"model.layers.1.self_attn.{name}_proj.weight", (2, 12)) for name in "kv"]


def test_large_tensors_are_read_in_parts(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.folder(tmp_path / "x", tiny.config())
    monkeypatch.setattr(hf, "PIECE_NBYTES", 100)
    sizes = []

    def counted(*args: Any) -> Tensor:
        values = safetensors.read_box(*args)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(hf, "read_box", counted)
    back = tiny.blank(tiny.config())
    HuggingFaceFolder(tmp_path / "x").fill(tiny.entries(back))
    assert max(sizes) <= 100
    for name, tensor in tiny.tensors(model).items():
        assert torch.equal(tiny.tensors(back)[name], tensor), name


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_cast_to_the_requested_dtype(
    stored: torch.dtype, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.folder(tmp_path / "x", tiny.config(), dtype=stored)
    folder = HuggingFaceFolder(tmp_path / "x")
    assert folder.dtype("embed.weight") == folder.dtype("norm.weight") == stored
    back = tiny.blank(tiny.config())
    folder.fill(tiny.entries(back))
    expected = tiny.tensors(model)["layers.0.mlp.down"].to(stored).float()
    assert torch.equal(tiny.tensors(back)["layers.0.mlp.down"], expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head__weight": None}, r"lm_head.weight is missing \(set tie_word_embeddings to true"),
        (
            {"model__norm__weight": None, "lm_head__weight": None},
            "missing: lm_head.weight, model.norm.weight",
        ),
        ({"model__extra": torch.ones(2)}, "unexpected in LlamaForCausalLM: model.extra"),
        (
            {"model__layers__0__mlp__up_proj__bias": torch.ones(10)},
            "unexpected in LlamaForCausalLM: model.layers.0.mlp.up_",
        ),
        ({"model__norm__weight": torch.ones(11)}, r"model.norm.weight is \[11\], expected \[12\]"),
        (
            {"model__norm__weight": torch.ones(12, dtype=torch.int8)},
            "norm.weight is stored as I8, expected one of F64",
        ),
        (
            {"model__norm__weight": torch.ones(12).to(torch.float8_e4m3fn)},
            "stored as F8_E4M3, expected one of",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    change: dict[str, Any], message: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    edit_tensors(tmp_path / "x", **change)
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceFolder(tmp_path / "x")


def test_buffers_of_old_conversions_are_ignored(tmp_path: Path, tiny: SimpleNamespace) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    edit_tensors(tmp_path / "x", model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(1))
    HuggingFaceFolder(tmp_path / "x")


def test_a_tied_model_may_store_its_head_only_if_it_is_the_embedding(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny.folder(tmp_path / "x", tiny.config(tied_embeddings=True))
    table = tiny.tensors(model)["embed.weight"][:37].clone()
    edit_tensors(tmp_path / "x", lm_head__weight=table)
    HuggingFaceFolder(tmp_path / "x")
    table[36, 11] += 1e-7
    edit_tensors(tmp_path / "x", lm_head__weight=table)
    with pytest.raises(
        CheckpointError,
        match="lm_head.weight differs from model.embed_tokens.weight. Set tie_word_",
    ):
        HuggingFaceFolder(tmp_path / "x")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["XLNetLMHeadModel"]},
            "architecture XLNetLMHeadModel is not supported. Use one of Llama",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "LlamaForSequenceClassification is not supported",
        ),
        (
            {"architectures": None, "model_type": "bert"},
            "model_type bert is not supported. Use one of LlamaForCausalLM",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0}, "rope_parameters": None},
            "config.json: .*longrope",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_x.OtherForCausalLM"}},
            "config.json: auto_map=.*OtherForCausalLM'}: the model needs custom code.* "
            "Use a folder that",
        ),
        ({"hidden_act": "mish"}, "config.json: hidden_act='mish' is not supported"),
    ],
)
def test_other_models_are_rejected_by_name(
    fields: dict[str, Any], message: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    edit(tmp_path / "x", **fields)
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceFolder(tmp_path / "x")


def test_an_unknown_architecture_is_rejected_with_all_supported_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Use one of LlamaForCausalLM") as excinfo:
        find_family({"architectures": ["X"]}, tmp_path)
    assert all(family.architecture in str(excinfo.value) for family in hf.FAMILIES)


def test_auto_map_with_a_transformers_class_is_accepted(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    edit(
        tmp_path / "x", auto_map={"AutoModelForCausalLM": "someone/x--modeling_x.LlamaForCausalLM"}
    )
    assert HuggingFaceFolder(tmp_path / "x").family.architecture == "LlamaForCausalLM"


def test_the_family_with_the_fewest_unsupported_settings_is_reported(
    tiny: SimpleNamespace,
) -> None:
    with pytest.raises(UnexportedFieldsError) as excinfo:
        hf.find_exporting_family(tiny.config(up_offset=0.5, norm_eps=0.1))
    assert excinfo.value.settings == ("up_offset",)


def test_an_invalid_model_is_rejected_although_its_tensors_match(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(
        tmp_path / "x", tiny.config(moe=MoEConfig(num_experts=3, top_k=2, ffn_hidden_size=5))
    )
    HuggingFaceFolder(tmp_path / "x")
    edit(tmp_path / "x", num_experts_per_tok=4)
    events = (
        r"config.json describes an invalid model: num_experts_per_tok=4 is more than "
        r"num_local_experts=3. Set"
    )
    with pytest.raises(CheckpointError, match=events):
        HuggingFaceFolder(tmp_path / "x")


def test_config_without_architectures_is_identified_by_its_model_type(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    edit(tmp_path / "x", architectures=None)
    assert HuggingFaceFolder(tmp_path / "x").family.architecture == "LlamaForCausalLM"


def test_damaged_folders_are_reported_with_what_is_missing(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config(), shard_nbytes=1500)
    first = sorted((tmp_path / "x").glob("*.safetensors"))[0]
    data = first.read_bytes()
    first.write_bytes(data[:-4])
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight cut off"):
        HuggingFaceFolder(tmp_path / "x")
    first.unlink()
    with pytest.raises(
        CheckpointError, match="index.json names model-00001-of-.*which are missing"
    ):
        HuggingFaceFolder(tmp_path / "x")
    for file in (tmp_path / "x").glob("model*"):
        file.unlink()
    (tmp_path / "x" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(
        CheckpointError,
        match=r"neither model.safetensors nor .*pytorch_model.bin\). Use safetensors",
    ):
        HuggingFaceFolder(tmp_path / "x")


def test_an_index_cannot_lead_outside_its_folder(tmp_path: Path, tiny: SimpleNamespace) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    os.rename(tmp_path / "x" / "model.safetensors", tmp_path / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "x" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointError, match=r"names ../model.safetensors, not files of this folder"
    ):
        HuggingFaceFolder(tmp_path / "x")


def test_index_with_very_long_file_name_is_rejected_with_short_message(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    (tmp_path / "x" / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "a" * 5000}}
    (tmp_path / "x" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"names a{200}, not files of this folder"):
        HuggingFaceFolder(tmp_path / "x")


def test_an_index_with_missing_tensors_is_rejected(tmp_path: Path, tiny: SimpleNamespace) -> None:
    tiny.folder(tmp_path / "x", tiny.config(), shard_nbytes=1500)
    file = tmp_path / "x" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.extra"] = index["weight_map"]["lm_head.weight"]
    file.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="lists model.extra"):
        HuggingFaceFolder(tmp_path / "x")


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_config_that_is_not_an_object_is_rejected(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json (cannot be read|holds).* Use "):
        HuggingFaceFolder(tmp_path)


def test_a_model_of_another_shape_is_rejected_before_anything_is_read(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config())
    other = tiny.blank(tiny.config(ffn_hidden_size=11, qkv_bias=True))
    with pytest.raises(CheckpointError, match="has a different model") as excinfo:
        HuggingFaceFolder(tmp_path / "x").fill(tiny.entries(other))
    assert "layers.0.mlp.gate_up is [2, 11, 12] in this run and [2, 10, 12] in the folder" in str(
        excinfo.value
    )
    assert "layers.0.attention.q_bias is in this run but not in the folder" in str(excinfo.value)
    assert all((parameter == -7).all() for parameter in other.parameters())


def test_files_stay_below_their_limit_and_keep_the_order_of_the_forward_pass(
    tiny: SimpleNamespace,
) -> None:
    rules = LLAMA.rules(tiny.config())
    files = plan_files(rules, lambda rule: torch.float32, 1800)
    assert [rule for file in files for parts, _ in file for rule in parts] == rules
    sizes = [sum(planned.nbytes for _, planned in file) for file in files]
    assert all(size <= 1800 for size in sizes) and len(files) < 8
    assert len(plan_files(rules, lambda rule: torch.float32, 1)) == len(rules)


def test_the_index_names_every_tensor_and_the_sum_of_their_bytes(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "x", tiny.config(), shard_nbytes=1800)
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"]) == [rule.name for rule in LLAMA.rules(tiny.config())]
    held = {
        name: file.name
        for file in (tmp_path / "x").glob("*.safetensors")
        for name in load_file(file)
    }
    assert held == index["weight_map"]
    nbytes = sum(
        tensor.nbytes
        for file in (tmp_path / "x").glob("*.safetensors")
        for tensor in load_file(file).values()
    )
    assert index["metadata"]["total_size"] == nbytes


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, tiny: SimpleNamespace) -> None:
    config = tiny.config()
    events: list[str] = []

    class Watched(tiny.InMemory):  # type: ignore[misc, name-defined]  # a fixture's class
        def read(self, parameter: str, *rest: Any) -> Tensor:
            events.append(parameter)
            values: Tensor = super().read(parameter, *rest)
            return values

    write_folder(
        tmp_path / "x",
        config,
        Watched(tiny.tensors(tiny.model(config))),
        ConversionOptions(on_written=lambda nbytes: events.append("written")),
    )
    assert events[1::2] == ["written"] * len(LLAMA.rules(config)), (
        "the next tensor is read when the last one is in the file"
    )


def test_folder_is_created_atomically(tmp_path: Path, tiny: SimpleNamespace) -> None:
    class Broken(tiny.InMemory):  # type: ignore[misc, name-defined]  # a fixture's class
        def read(self, parameter: str, *rest: Any) -> Tensor:
            if parameter == "norm.weight":
                raise OSError(28, "No space left on device")
            values: Tensor = super().read(parameter, *rest)
            return values

    with pytest.raises(
        CheckpointError, match="x: not written .*No space left on device.*Free some space"
    ):
        write_folder(tmp_path / "x", tiny.config(), Broken(tiny.tensors(tiny.model(tiny.config()))))
    assert os.listdir(tmp_path) == []


def test_writing_fewer_values_than_planned_fails(tmp_path: Path, tiny: SimpleNamespace) -> None:
    class Short(tiny.InMemory):  # type: ignore[misc, name-defined]  # a fixture's class
        def read(self, parameter: str, *rest: Any) -> Tensor:
            values: Tensor = super().read(parameter, *rest)
            return values[1:] if parameter == "norm.weight" else values

    with pytest.raises(AssertionError, match="model.safetensors"):
        write_folder(tmp_path / "x", tiny.config(), Short(tiny.tensors(tiny.model(tiny.config()))))
    assert os.listdir(tmp_path) == []


def test_parent_folder_is_synced_at_the_end(
    tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[list[str]] = []

    def seen(folder: Path) -> None:
        names.append(os.listdir(folder) if folder == tmp_path else [])

    monkeypatch.setattr(storage, "sync_folder", seen)
    tiny.folder(tmp_path / "x", tiny.config())
    assert names[-1] == ["x"]


def test_an_existing_target_is_not_overwritten(tmp_path: Path, tiny: SimpleNamespace) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(
        CheckpointError, match="x already exists and is not overwritten. Choose another target"
    ):
        tiny.folder(tmp_path / "x", tiny.config())
    assert os.listdir(tmp_path / "x") == []


def test_a_model_that_no_family_can_express_is_rejected_before_writing(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    with pytest.raises(ConfigError, match="model.up_offset=0.5"):
        tiny.folder(tmp_path / "x", tiny.config(up_offset=0.5))
    assert os.listdir(tmp_path) == []


def test_auxiliary_files_and_token_ids_are_written_with_the_weights(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "secret.txt").write_text("no")
    files = {name: file.read_bytes() for name, file in list_auxiliary_files(tmp_path).items()}
    tiny.folder(
        tmp_path / "x",
        tiny.config(),
        auxiliary_files=files,
        extra={"eos_token_id": [3, 4], "bos_token_id": 1},
    )
    assert (tmp_path / "x" / "tokenizer.json").read_text() == "{}" and not (
        tmp_path / "x" / "secret.txt"
    ).exists()
    raw = json.loads((tmp_path / "x" / "config.json").read_text())
    assert (raw["eos_token_id"], raw["bos_token_id"], raw["pad_token_id"]) == ([3, 4], 1, None)
    generation = json.loads((tmp_path / "x" / "generation_config.json").read_text())
    assert generation == {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": [3, 4]}
    assert raw["dtype"] == raw["torch_dtype"] == "float32"


def test_advice_for_new_runs_does_not_reject_hugging_face_models(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(
        tmp_path / "x", tiny.config(moe=MoEConfig(num_experts=3, top_k=2, ffn_hidden_size=5))
    )
    edit(tmp_path / "x", num_experts_per_tok=1)
    assert network_problems(HuggingFaceFolder(tmp_path / "x").model_config), (
        "nobody should begin with such a router"
    )


def test_tied_head_of_integers_is_rejected(tmp_path: Path, tiny: SimpleNamespace) -> None:
    tiny.folder(tmp_path / "x", tiny.config(tied_embeddings=True))
    edit_tensors(tmp_path / "x", lm_head__weight=torch.zeros(37, 12, dtype=torch.int64))
    with pytest.raises(
        CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight"
    ):
        HuggingFaceFolder(tmp_path / "x")


# --- links


def write_hub_cache(cache: Path, tiny: SimpleNamespace) -> Path:
    """Write a model as the cache of the Hugging Face hub has it; returns the snapshot, which
    consists of links."""
    snapshot, blobs = (
        cache / "models--org--name" / "snapshots" / "0123",
        cache / "models--org--name" / "blobs",
    )
    tiny.folder(snapshot, tiny.config())
    (snapshot / "LICENSE").write_text("terms")
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / f"hash{number}")
        file.symlink_to(Path("../../blobs") / f"hash{number}")
    return snapshot


def test_the_links_of_a_hub_cache_are_followed(tmp_path: Path, tiny: SimpleNamespace) -> None:
    snapshot = write_hub_cache(tmp_path, tiny)
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "link"):
        assert HuggingFaceFolder(path).model_config.vocab_size == 37
        assert list_auxiliary_files(path)["LICENSE"].read_text() == "terms"


@pytest.mark.parametrize("name", ["LICENSE", "config.json", "model.safetensors", "other"])
@pytest.mark.parametrize("place", ["folder", "cache", "blob"])
def test_links_that_lead_out_of_the_folder_are_rejected(
    name: str, place: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    if place == "folder":
        tiny.folder(tmp_path / "x", tiny.config())
    path = tmp_path / "x" if place == "folder" else write_hub_cache(tmp_path, tiny)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    storage.remove_file(path / name)
    target = secret
    if place == "blob":  # a link to a link
        target = path / "../../blobs/hash9"
        target.symlink_to(secret)
    (path / name).symlink_to(target)
    with pytest.raises(
        CheckpointError,
        match=rf"{name} is a link to .*secret, outside of its folder.* copy of the f",
    ):
        HuggingFaceFolder(path)
    if name == "LICENSE":
        with pytest.raises(CheckpointError, match="LICENSE is a link to"):
            list_auxiliary_files(path)


def test_a_blobs_folder_that_is_a_link_does_not_allow_other_files(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    snapshot = write_hub_cache(tmp_path, tiny)
    (snapshot / "../../blobs").rename(tmp_path / "elsewhere")
    (tmp_path / "models--org--name" / "blobs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link to .*elsewhere"):
        HuggingFaceFolder(snapshot)
