import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.cli.main import main
from megalith.config.checkpoint import CheckpointConfig, checkpoint_problems
from megalith.config.data import TokenizerConfig
from megalith.config.train import TrainRun
from megalith.config.tree import dump_yaml, load_yaml
from megalith.data.huggingface import train_bpe
from megalith.errors import CheckpointError
from megalith.hf.convert import (
    Kind,
    convert,
    list_written_tensors,
    plan_moves,
    source_format,
    token_ids,
)
from megalith.hf.families import MISTRAL, PHI3, QWEN2, SMOLLM3
from megalith.hf.family import Family
from megalith.hf.folder import HuggingFaceFolder
from megalith.hf.pretrained import load_pretrained, open_pretrained
from megalith.hf.release import parameters, release_run
from megalith.hf.staging import ConversionOptions
from megalith.parallel.group import single_rank_group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_embeddings": True}, {"qkv_bias": True, "output_bias": True, "mlp_bias": True}],
)
def test_a_round_trip_is_bit_exact(
    changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(
        tmp_path / "theirs", tiny.config(**changes), dtype=dtype, extra={"eos_token_id": [3, 4]}
    )
    source = open_pretrained(tmp_path / "theirs")
    convert(
        replace(source, model=replace(source.model, pad_vocab_to_multiple_of=16)),
        tmp_path / "ours",
        "megalith",
    )
    ours = open_pretrained(tmp_path / "ours")
    assert source_format(ours) == "megalith" and ours.model.padded_vocab_size() == 48
    convert(ours, tmp_path / "back", "huggingface", shard_nbytes=2000)
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    after = {
        name: tensor
        for file in (tmp_path / "back").glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == dtype and torch.equal(after[name], tensor), name
    configs = [
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "back")
    ]
    assert configs[0] == configs[1]
    assert (tmp_path / "back" / "generation_config.json").read_text() == (
        tmp_path / "theirs" / "generation_config.json"
    ).read_text()


@pytest.mark.parametrize("to", ["megalith", "huggingface"])
@pytest.mark.parametrize("kind", ["folder", "release"])
def test_the_plan_lists_every_tensor_with_its_bytes(
    to: Any, kind: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "folder", tiny.config(num_layers=1, vocab_size=40))
    source = open_pretrained(tmp_path / "folder")
    source = replace(source, model=replace(source.model, pad_vocab_to_multiple_of=8))
    convert(source, tmp_path / "release", "megalith")
    source = open_pretrained(tmp_path / kind) if kind == "release" else source
    moves = plan_moves(source, to, torch.bfloat16)
    written_nbytes: list[int] = []
    assert convert(
        source, tmp_path / "x", to, ConversionOptions(torch.bfloat16, written_nbytes.append)
    ) == sum(written_nbytes)
    assert sum(move.nbytes for move in moves) == sum(written_nbytes)
    assert {move.source_dtype for move in moves} == {"float32"} and {
        move.target_dtype for move in moves
    } == {"bfloat16"}
    key = next(
        move
        for move in moves
        if "k_proj" in move.source + move.target or move.source.endswith(".kv")
    )
    reference, ours = (
        "model.layers.0.self_attn.k_proj.weight",
        "layers.0.attention.kv[0:1, 0:2, 0:2, 0:12]",
    )
    expected = {
        ("folder", "megalith"): (reference, ours),
        ("release", "huggingface"): (ours, reference),
        ("folder", "huggingface"): (reference, reference),
        ("release", "megalith"): ("layers.0.attention.kv",) * 2,
    }
    assert (key.source, key.target) == expected[kind, to]


def test_checkpoint_of_a_run_is_exported_with_its_tokenizer(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tokenizer = train_bpe(
        ["some text, some more"] * 3, vocab_size=258, path=str(tmp_path / "words")
    )
    config, words = (
        tiny.config(vocab_size=300),
        TokenizerConfig(kind="huggingface", path=str(tmp_path / "words")),
    )
    model = tiny.model(config)
    text = dump_yaml(release_run("run", config, words, tmp_path))
    path = save_checkpoint(
        tmp_path, 4, tiny.entries(model), {}, single_rank_group("world"), config_text=text
    ).path
    source = open_pretrained(path)
    assert token_ids(source) == {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eod,
        "pad_token_id": None,
    }
    convert(source, tmp_path / "x", "huggingface")
    assert (tmp_path / "x" / "tokenizer.json").read_bytes() == (
        tmp_path / "words" / "tokenizer.json"
    ).read_bytes()
    assert json.loads((tmp_path / "x" / "config.json").read_text())["eos_token_id"] == tokenizer.eod
    convert(open_pretrained(tmp_path / "x"), tmp_path / "y", "megalith")
    run = load_yaml(tmp_path / "y" / "config.yaml", TrainRun)
    assert run.tokenizer.path == run.checkpoint.load == str(tmp_path / "y") and run.name == "y"
    assert open_pretrained(tmp_path / "y").tokenizer == run.tokenizer


def test_a_release_of_a_run_keeps_its_settings_and_drops_its_moments(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    entries = tiny.entries(tiny.model(tiny.config()))
    moments = [replace(entry, role="exp_avg") for entry in entries]
    text = dump_yaml(release_run("run", tiny.config(), TokenizerConfig(), tmp_path))
    path = save_checkpoint(
        tmp_path, 4, entries + moments, {}, single_rank_group("world"), config_text=text
    ).path
    convert(open_pretrained(path), tmp_path / "x", "megalith")
    released = open_pretrained(tmp_path / "x").checkpoint
    assert released is not None and released.config_text == text
    assert released.keys() == sorted(f"model.{shard.name}" for shard in parameters(tiny.config()))
    assert released.state == {
        "token_ids": {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}
    }


def test_missing_biases_are_planned_as_zeros(tmp_path: Path, tiny: SimpleNamespace) -> None:
    config = tiny.config(qkv_bias=True, num_layers=1)
    text = dump_yaml(
        release_run("run", config, TokenizerConfig(kind="null", vocab_size=37), tmp_path)
    )
    entries = tiny.entries(tiny.model(config))
    path = save_checkpoint(
        tmp_path, 4, entries, {}, single_rank_group("world"), config_text=text
    ).path
    source = open_pretrained(path)
    zeros = [
        move.target for move in plan_moves(source, "huggingface", None) if move.source == "zeros"
    ]
    assert zeros == ["model.layers.0.self_attn.o_proj.bias"]
    convert(source, tmp_path / "x", "huggingface")
    assert not load_file(tmp_path / "x" / "model.safetensors")[zeros[0]].any()


@pytest.mark.parametrize("to", ["megalith", "huggingface"])
def test_several_workers_write_the_same_files(
    to: Kind, tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.hf.release.BATCH_NBYTES", 6000)
    tiny.folder(tmp_path / "source", tiny.config(), shard_nbytes=3000)
    for workers in (1, 2):
        source = open_pretrained(tmp_path / "source")
        options = ConversionOptions(workers=workers)
        convert(source, tmp_path / f"by{workers}", to, options, shard_nbytes=3000)
    first, second = (
        {
            file.name: file.read_bytes()
            for file in (tmp_path / f"by{workers}").iterdir()
            if "config" not in file.name
        }
        for workers in (1, 2)
    )
    assert len(first) > 3 and {name for name in first if first[name] != second.get(name)} <= {
        "manifest.json"
    }


def test_sentencepiece_model_survives_a_round_trip(tmp_path: Path, tiny: SimpleNamespace) -> None:
    library = pytest.importorskip(
        "sentencepiece", reason="makes a SentencePiece model, which needs the library"
    )
    tiny.folder(tmp_path / "theirs", tiny.config())
    (tmp_path / "text").write_text("a few words of text\n" * 20)
    library.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "theirs" / "tokenizer"),
        vocab_size=14,
        minloglevel=2,
    )
    source = open_pretrained(tmp_path / "theirs")
    assert source.tokenizer == TokenizerConfig(kind="sentencepiece", path=str(tmp_path / "theirs"))
    convert(source, tmp_path / "ours", "megalith")
    (tmp_path / "ours").rename(tmp_path / "moved")
    moved = open_pretrained(tmp_path / "moved")
    assert moved.tokenizer == TokenizerConfig(kind="sentencepiece", path=str(tmp_path / "moved"))
    convert(moved, tmp_path / "again", "huggingface")
    model = (tmp_path / "theirs" / "tokenizer.model").read_bytes()
    assert (tmp_path / "again" / "tokenizer.model").read_bytes() == model


def test_several_moves_may_fill_one_written_tensor(tmp_path: Path, tiny: SimpleNamespace) -> None:
    tiny.folder(tmp_path / "x", tiny.config(), family=PHI3)
    source = open_pretrained(tmp_path / "x")
    stored = load_file(tmp_path / "x" / "model.safetensors")
    moves = plan_moves(source, "huggingface", None)
    assert list_written_tensors(moves) == stored.keys() and len(moves) > len(stored)
    ours = {shard.name for shard in parameters(source.model)}
    assert list_written_tensors(plan_moves(source, "megalith", None)) == ours
    assert (
        list_written_tensors([replace(moves[0], nbytes=0), replace(moves[1], target="zeros")])
        == set()
    )


def convert_words(source: Path, target: Path, *words: str) -> int:
    """megalith convert."""
    return main(["convert", str(source), str(target), *words])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_new_rows_are_the_mean_of_the_others_and_removed_on_export(
    dtype: str, tmp_path: Path, tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalith.hf.folder.PIECE_NBYTES", 1000)
    kept = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model = tiny.folder(
        tmp_path / "theirs", tiny.config(vocab_size=40, pad_vocab_to_multiple_of=1), dtype=kept
    )
    words = ("--new-rows", "mean", "--vocab-size", "45", "--pad-vocab-to-multiple-of", "16")
    assert convert_words(tmp_path / "theirs", tmp_path / "ours", *words) == 0
    result, before = open_checkpoint(tmp_path / "ours"), tiny.tensors(model)
    for name in ("embed.weight", "head.weight"):
        rows, table = before[name].to(kept), result.read(f"model.{name}")
        assert rows.shape[0] == 40 and table.shape[0] == 48 and torch.equal(table[:40], rows)
        assert torch.equal(table[40:], rows.double().mean(0).to(kept).expand(8, -1))
    assert convert_words(tmp_path / "ours", tmp_path / "back") == 0
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back["model.embed_tokens.weight"].shape[0] == 45, "padding is cropped, and tokens stay"
    assert json.loads((tmp_path / "back" / "config.json").read_text())["vocab_size"] == 45
    assert (
        convert_words(tmp_path / "theirs", tmp_path / "wider", "--to", "huggingface", *words[:4])
        == 0
    )
    wider = load_file(tmp_path / "wider" / "model.safetensors")
    assert wider.keys() == back.keys() and all(
        torch.equal(wider[name], back[name]) for name in back
    )
    assert convert_words(tmp_path / "theirs", tmp_path / "zeros", "--vocab-size", "45") == 0
    assert not open_checkpoint(tmp_path / "zeros").read("model.embed.weight")[40:].any()


def test_a_run_initializes_new_rows_on_every_tp_rank(tmp_path: Path, tiny: SimpleNamespace) -> None:
    model = tiny.folder(tmp_path / "x", tiny.config(vocab_size=40, pad_vocab_to_multiple_of=1))
    wider = tiny.config(vocab_size=46, pad_vocab_to_multiple_of=1)
    blank = tiny.blank(wider)
    rules = CheckpointConfig(load="x", new_rows="mean", allow_model_changes=("model.vocab_size",))
    load_pretrained(
        tiny.entries(blank),
        str(tmp_path / "x"),
        single_rank_group("world"),
        model=wider,
        rules=rules,
    )
    for name in ("embed.weight", "head.weight"):
        rows = tiny.tensors(model)[name]
        assert torch.equal(
            tiny.tensors(blank)[name][40:], rows.double().mean(0).float().expand(6, -1)
        )
    slices, folder = HuggingFaceFolder(tmp_path / "x"), tiny.tensors(blank)["embed.weight"]
    slices.new_rows = "mean"
    assert torch.equal(
        slices.read("embed.weight", ((38, 44), (3, 9)), torch.float32), folder[38:44, 3:9]
    )


def test_new_rows_without_added_rows_are_rejected(
    tmp_path: Path, tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.folder(tmp_path / "x", tiny.config(vocab_size=40, pad_vocab_to_multiple_of=1))
    assert convert_words(tmp_path / "x", tmp_path / "ours") == 0
    refused = {
        (
            "x",
            "--new-rows",
            "mean",
            "--pad-vocab-to-multiple-of",
            "8",
        ): "--new-rows=mean: ",
        ("x", "--vocab-size", "39"): "--vocab-size=39: ",
        ("ours", "--vocab-size", "80"): "--vocab-size=80: ",
        (
            "ours",
            "--new-rows",
            "mean",
        ): "ours is not a Hugging Face folder, so no rows are added to its tables. Remove",
    }
    for (source, *words), text in refused.items():
        assert convert_words(tmp_path / source, tmp_path / "y", *words) == 2
        assert text in capsys.readouterr().err, words
    rules, same = (
        CheckpointConfig(load="ours", new_rows="mean"),
        tiny.config(vocab_size=40, pad_vocab_to_multiple_of=64),
    )
    with pytest.raises(
        CheckpointError, match="checkpoint.new_rows=mean: .*ours is not a Hugging Face folder"
    ):
        load_pretrained(
            tiny.entries(tiny.blank(same)),
            str(tmp_path / "ours"),
            single_rank_group("world"),
            model=same,
            rules=rules,
        )
    (text,) = checkpoint_problems(CheckpointConfig(new_rows="mean"))
    assert "checkpoint.new_rows=mean needs checkpoint.load, which is unset" in text


# --- the family that a model was converted from


def round_trip(tmp_path: Path) -> None:
    """Convert the folder `theirs` to a checkpoint, and that to the folder `back`."""
    convert(open_pretrained(tmp_path / "theirs"), tmp_path / "ours", "megalith")
    convert(open_pretrained(tmp_path / "ours"), tmp_path / "back", "huggingface")


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json."""
    raw = json.loads((folder / "config.json").read_text())
    assert isinstance(raw, dict)
    return raw


@pytest.mark.parametrize(
    ("family", "changes"),
    [(QWEN2, {"qkv_bias": True}), (PHI3, {}), (MISTRAL, {}), (SMOLLM3, {"tied_embeddings": True})],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_round_trip_through_a_checkpoint_keeps_the_architecture_and_its_tensors(
    family: Family, changes: dict[str, Any], tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(tmp_path / "theirs", tiny.config(**changes), family=family)
    round_trip(tmp_path)
    assert read_hf_config(tmp_path / "back") == read_hf_config(tmp_path / "theirs")
    assert read_hf_config(tmp_path / "back")["architectures"] == [family.architecture]
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "back")
    )
    assert before.keys() == after.keys() and all(
        torch.equal(before[name], after[name]) for name in before
    )
    copied = open_pretrained(tmp_path / "ours")
    convert(copied, tmp_path / "copy", "megalith")
    assert open_pretrained(tmp_path / "copy").hf_source == copied.hf_source


@pytest.mark.parametrize("name", ["gelu_new", "gelu_pytorch_tanh", "swish"])
def test_a_round_trip_keeps_the_name_of_the_activation(
    name: str, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    config = tiny.config(activation="silu" if name == "swish" else "gelu_tanh")
    tiny.folder(tmp_path / "theirs", config, activation_names={"hidden_act": name})
    assert read_hf_config(tmp_path / "theirs")["hidden_act"] == name
    round_trip(tmp_path)
    convert(open_pretrained(tmp_path / "theirs"), tmp_path / "copy", "huggingface")
    for folder in ("back", "copy"):
        assert read_hf_config(tmp_path / folder)["hidden_act"] == name


def test_an_activation_that_was_changed_gets_its_own_name(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    tiny.folder(
        tmp_path / "theirs",
        tiny.config(activation="gelu_tanh"),
        activation_names={"hidden_act": "gelu_new"},
    )
    source = open_pretrained(tmp_path / "theirs")
    convert(source, tmp_path / "ours", "megalith")
    ours = open_pretrained(tmp_path / "ours")
    convert(
        replace(ours, model=replace(ours.model, activation="relu")),
        tmp_path / "back",
        "huggingface",
    )
    assert read_hf_config(tmp_path / "back")["hidden_act"] == "relu"


def test_family_selects_another_architecture(
    tmp_path: Path, tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.folder(tmp_path / "theirs", tiny.config(qkv_bias=True), family=QWEN2)
    convert(open_pretrained(tmp_path / "theirs"), tmp_path / "ours", "megalith")
    command = ["convert", str(tmp_path / "ours"), str(tmp_path / "back")]
    assert main([*command, "--family", "llama"]) == 0
    assert read_hf_config(tmp_path / "back")["architectures"] == ["LlamaForCausalLM"]
    command[2] = str(tmp_path / "other")
    rejected = {
        "phi3": r"cannot be exported as Phi3ForCausalLM: model.qkv_bias=True: Phi3ForCausalLM "
        r"cannot express this setting; .*"
        r"Or set --family=llama to export it as LlamaForCausalLM",
        "quen2": "--family=quen2: unknown family. Did you mean qwen2",
    }
    capsys.readouterr()
    for name, message in rejected.items():
        assert main([*command, "--family", name]) == 2
        assert re.search(message, capsys.readouterr().err.replace("\n", " ")), name
    for source, target in (("theirs", "huggingface"), ("ours", "megalith")):
        command[1] = str(tmp_path / source)
        assert main([*command, "--family", "llama", "--to", target]) == 2
        assert (
            "--family=llama selects the architecture of a Hugging Face folder"
            in capsys.readouterr().err
        )
    assert not (tmp_path / "other").exists()


def test_a_damaged_record_of_the_family_is_rejected(tmp_path: Path, tiny: SimpleNamespace) -> None:
    text = dump_yaml(release_run("run", tiny.config(), TokenizerConfig(), tmp_path))
    entries = tiny.entries(tiny.model(tiny.config()))
    for step, record in enumerate(
        ["Qwen2ForCausalLM", {"architecture": "Other", "activation_names": {}}, {}]
    ):
        state = {"huggingface": record}
        path = save_checkpoint(
            tmp_path, step, entries, state, single_rank_group("world"), config_text=text
        ).path
        with pytest.raises(
            CheckpointError, match=r"the state records the Hugging Face model .*Convert the model's"
        ):
            open_pretrained(path)
