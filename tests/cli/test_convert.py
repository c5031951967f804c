import errno
import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.cli.main import main
from megalith.config.data import TokenizerConfig
from megalith.config.model import ModelConfig
from megalith.config.tree import dump_yaml
from megalith.errors import CheckpointError
from megalith.hf.convert import convert
from megalith.hf.pretrained import open_pretrained
from megalith.hf.release import release_run
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh

CONFIG = ModelConfig(
    vocab_size=257,
    hidden_size=12,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    ffn_hidden_size=10,
    max_seq_len=64,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint."""
    model = Decoder(build_context(CONFIG, build_single_rank_mesh()))
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    entries = [
        CheckpointEntry(d.shard, "param", getattr(module, name))
        for d, module, name in iter_parameter_specs(model)
    ]
    text = dump_yaml(release_run("run", CONFIG, TokenizerConfig(), tmp_path))
    save_checkpoint(
        tmp_path / "run" / "checkpoints",
        7,
        entries,
        {},
        single_rank_group("world"),
        config_text=text,
    )
    return tmp_path / "run"


def test_run_round_trips_through_hugging_face(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference, ours = run.parent / "theirs", run.parent / "ours"
    assert main(["convert", str(run), str(reference), "--shard-gb", "1e-5"]) == 0
    error_text = capsys.readouterr()
    assert error_text.out.startswith(f"wrote {reference}: 21 tensors, ")
    assert error_text.err == "" and len(list(reference.glob("*.safetensors"))) > 1
    assert main(["convert", str(reference), str(ours)]) == 0
    before, after = open_checkpoint(run / "checkpoints" / "step_0000007"), open_checkpoint(ours)
    keys = before.keys()
    assert keys == after.keys()
    for key in keys:
        assert torch.equal(before.read(key), after.read(key))


def test_the_dry_run_lists_every_tensor_and_writes_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(run), str(run.parent / "x"), "--dry-run", "--dtype", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    kv = "layers.0.attention.kv[1:2, 0:2, 0:2, 0:12] -> model.layers.0.self_attn.v_proj.weight"
    assert f"{kv}  (4, 12) float32 -> bfloat16" in lines
    assert (
        lines[-1].startswith("21 tensors, ")
        and lines[-1].endswith("nothing was written")
        and len(lines) == 22
    )
    assert not (run.parent / "x").exists()


def test_missing_tokenizer_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference, ours = run.parent / "theirs", run.parent / "ours"
    assert main(["convert", str(run), str(reference)]) == 0  # a run on bytes
    error_text = capsys.readouterr().out
    assert " tensors, " in error_text and " kB, from " in error_text
    assert (
        "the folder has no tokenizer: programs that read it must" in error_text
        and "megalith generate" not in error_text
    )
    assert not (reference / "tokenizer.json").exists()
    assert main(["convert", str(run), str(ours), "--to", "megalith"]) == 0
    assert capsys.readouterr().out.endswith(f"try: megalith generate {ours}\n")


def test_json_is_one_document(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = run.parent / "x"
    assert main(["convert", str(run), str(target), "--json", "--dtype", "bf16"]) == 0
    error_text = json.loads(capsys.readouterr().out)
    assert (error_text["source"], error_text["target"]) == (
        str(run / "checkpoints" / "step_0000007"),
        str(target),
    )
    assert (error_text["to"], error_text["dry_run"], len(error_text["tensors"])) == (
        "huggingface",
        False,
        21,
    )
    assert error_text["tokenizer"] is None
    tensors = load_file(target / "model.safetensors")
    assert error_text["nbytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_target_format_can_be_selected(run: Path) -> None:
    reference, ours = run.parent / "theirs", run.parent / "ours"
    assert main(["convert", str(run), str(ours), "--to", "megalith", "--dtype", "bf16"]) == 0
    assert open_checkpoint(ours).dtype("model.norm.weight") == torch.bfloat16
    assert main(["convert", str(ours), str(reference)]) == 0
    assert (
        main(
            [
                "convert",
                str(reference),
                str(run.parent / "again"),
                "--to",
                "huggingface",
                "--dtype",
                "fp16",
            ]
        )
        == 0
    )
    assert (
        load_file(run.parent / "again" / "model.safetensors")["lm_head.weight"].dtype
        == torch.float16
    )


def test_run_round_trips_through_megatron(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    megatron, ours = run.parent / "megatron", run.parent / "ours"
    words = ["convert", str(run), str(megatron), "--to", "megatron"]
    assert main([*words, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    queries_and_keys = "layers.1.attention.q + layers.1.attention.kv"
    target = "decoder.layers.self_attention.linear_qkv.weight[1]  (20, 12) float32"
    assert f"{queries_and_keys} -> {target}" in lines
    assert lines[-1] == "9 tensors, 36.9 kB, weights only; nothing was written"
    assert not megatron.exists()

    assert main([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["to"], document["contents"]) == ("megatron", "weights only")
    names = sorted(path.name for path in megatron.iterdir())
    assert names == ["latest_checkpointed_iteration.txt", "release"]
    assert main(words) == 2
    assert f"{megatron} already exists" in capsys.readouterr().err

    assert main(["convert", str(megatron), str(ours)]) == 0
    before, after = open_checkpoint(run / "checkpoints" / "step_0000007"), open_checkpoint(ours)
    keys = before.keys()
    for key in keys:
        assert torch.equal(before.read(key)[:257], after.read(key)[:257]), key
    assert keys == after.keys()


def test_vocabulary_is_padded_to_the_given_multiple(run: Path) -> None:
    assert main(["convert", str(run), str(run.parent / "a")]) == 0
    assert (
        main(
            [
                "convert",
                str(run.parent / "a"),
                str(run.parent / "b"),
                "--pad-vocab-to-multiple-of",
                "100",
            ]
        )
        == 0
    )
    assert open_checkpoint(run.parent / "b").shape("model.embed.weight") == (300, 12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone", "x"], "gone: no such folder"),
        (["RUN", "RUN"], "already exists and is not overwritten. Choose another target"),
        (["RUN", "x", "--shard-gb", "0"], "--shard-gb=0.0 must be above 0. Use 5"),
        (
            ["RUN", "x", "--restart", "--take-over"],
            "--restart=True with --take-over=True: one starts again, the other",
        ),
        (
            ["RUN", "x", "--to", "peft", "--keep"],
            "--keep=True with --to=peft: adapters are written in one step. Remove it.",
        ),
        (
            ["RUN", "x", "--workers", "0"],
            "--workers=0 must be at least 1. Use 2, or as many as there are cores",
        ),
        (
            ["RUN", "x", "--pad-vocab-to-multiple-of", "0"],
            "--pad-vocab-to-multiple-of=0 must be at least 1. Use 64",
        ),
        (
            ["RUN", "x", "--pad-vocab-to-multiple-of", "8"],
            "--pad-vocab-to-multiple-of=8 applies to checkpoints converted from Hugging Face "
            "folders",
        ),
        (
            ["RUN", "x", "--dtpye", "bf16"],
            "--dtpye is not an option of this command. Did you mean --dtype",
        ),
    ],
)
def test_invalid_input_is_reported(
    words: list[str],
    message: str,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run.parent)
    assert main(["convert", *(str(run) if word == "RUN" else word for word in words)]) == 2
    error_text = capsys.readouterr()
    assert message in error_text.err and "Traceback" not in error_text.err and error_text.out == ""


def test_an_unsupported_architecture_is_named_with_the_supported_ones(
    theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(theirs, architectures=["BloomForCausalLM"])
    assert main(["convert", str(theirs), str(theirs.parent / "x")]) == 2
    error_text = capsys.readouterr().err
    assert (
        "the architecture BloomForCausalLM is not supported. Use one of LlamaForCausalLM,"
        in error_text
    )


@pytest.fixture
def theirs(run: Path) -> Path:
    """The same weights as a Hugging Face folder of several files."""
    convert(
        open_pretrained(run / "checkpoints" / "step_0000007"),
        run.parent / "theirs",
        "huggingface",
        shard_nbytes=9000,
    )
    return run.parent / "theirs"


def change(folder: Path, **fields: Any) -> None:
    """Set fields of config.json."""
    raw = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(raw))


def first_of(folder: Path) -> Path:
    """The file with the embedding."""
    return sorted(folder.glob("*.safetensors"))[0]


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the first file of weights."""
    tensors = load_file(first_of(folder))
    change(tensors)
    save_file(tensors, first_of(folder), metadata={"format": "pt"})


def cut(folder: Path) -> None:
    data = first_of(folder).read_bytes()
    first_of(folder).write_bytes(data[:-5])


def cut_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-20])


def pointer(folder: Path) -> None:
    text = (
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4976698672\n"
    )
    first_of(folder).write_text(text)


TABLE = "model.embed_tokens.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown field": (
        lambda at: change(at, attention_flux=2),
        "attention_flux=2: unknown field, which may change what",
    ),
    "rope": (
        lambda at: change(
            at, rope_scaling={"rope_type": "spiral", "factor": 2.0}, rope_parameters=None
        ),
        "rope_type='spiral'",
    ),
    "cut off": (cut, "bytes, expected"),
    "shape": (
        lambda at: edit(at, lambda tensors: tensors.update({TABLE: torch.zeros(256, 12)})),
        f"{TABLE} is [256, 12], expected [257, 12]. Use the config.json that came with the weights",
    ),
    "dtype": (
        lambda at: edit(at, lambda tensors: tensors.update({TABLE: tensors[TABLE].to(torch.int8)})),
        f"{TABLE} is stored as I8, expected one of F64, F32, BF16, F16",
    ),
    "tied in words": (
        lambda at: change(at, tie_word_embeddings=True),
        "tie_word_embeddings=true, but lm_head.weight differs from model.embed_tokens.weight. Set "
        "tie_word_embeddings",
    ),
    "index": (cut_index, "model.safetensors.index.json cannot be read"),
    "a file is missing": (
        lambda at: first_of(at).unlink(),
        ", which are missing. Copy the folder again",
    ),
    "a tensor is missing": (
        lambda at: edit(at, lambda tensors: tensors.pop(TABLE)),
        "model.safetensors.index.json lists model.embed_tokens.weight, which the files do not "
        "contain. Copy",
    ),
    "pointer": (
        pointer,
        "is a Git LFS pointer to a file of 4,976,698,672 bytes, not that file. Run `git lfs pull` "
        "in",
    ),
    "no weights": (
        lambda at: [file.rename(file.with_suffix(".bin")) for file in at.glob("model*")],
        "has neither model.safetensors nor model.safetensors.index.json (found: model",
    ),
    "no config": (
        lambda at: (at / "config.json").unlink(),
        "or a Hugging Face folder with config.json",
    ),
}
"""Damage to a folder, and the expected part of the error message."""


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_folder_is_rejected_before_writing(
    kind: str, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, text = DAMAGE[kind]
    damage(theirs)
    before = sorted(os.listdir(theirs.parent))
    assert main(["convert", str(theirs), str(theirs.parent / "x")]) == 2
    error_text = capsys.readouterr()
    assert (
        error_text.err.startswith("megalith convert: ")
        and text in error_text.err
        and "Traceback" not in error_text.err
    )
    assert error_text.out == "" and sorted(os.listdir(theirs.parent)) == before


@pytest.mark.parametrize("kind", ["unknown field", "cut off", "shape", "tied in words"])
def test_training_rejects_the_damaged_folder_with_the_same_message(
    kind: str, theirs: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(theirs.parent)
    damage, text = DAMAGE[kind]
    damage(theirs)
    assert main(["train", "tiny_cpu", "--checkpoint.load", str(theirs)]) == 2
    error_text = capfd.readouterr().err
    assert text in error_text and "Traceback" not in error_text


def test_missing_untied_head_is_reported(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = sorted(theirs.glob("*.safetensors"))
    tensors = {
        name: tensor
        for file in files
        for name, tensor in load_file(file).items()
        if name != "lm_head.weight"
    }
    for file in [*files, theirs / "model.safetensors.index.json"]:
        file.unlink()
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})
    assert main(["convert", str(theirs), str(theirs.parent / "x")]) == 2
    assert (
        "lm_head.weight is missing (set tie_word_embeddings to true if" in capsys.readouterr().err
    )


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("to", ["megalith", "huggingface"])
@pytest.mark.parametrize("fault", ["no room", "full", "full at the end", "interrupted"])
def test_a_conversion_that_ends_early_leaves_nothing_behind(
    fault: str,
    to: str,
    theirs: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, count = sorted(os.listdir(theirs.parent)), itertools.count()

    def full(*file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def broken(*file: object) -> None:
        done = next(count)
        if fault == "interrupted" and done == 3:
            os.kill(os.getpid(), signal.SIGINT)  # from any thread: Ctrl-C is for the process
        if fault == "full" and done >= 3:
            full()

    monkeypatch.setattr("megalith.hf.release.BATCH_NBYTES", 3000)
    monkeypatch.setattr("megalith.hf.folder.BATCH_NBYTES", 3000)
    monkeypatch.setattr(storage, "begin_sync", broken)
    if fault == "full at the end":
        for name in ("sync_file", "sync_written"):
            monkeypatch.setattr(storage, name, full)
    if fault == "no room":
        monkeypatch.setattr(storage, "free_nbytes", lambda folder: 12_345)
    wanted = 130 if fault == "interrupted" else 2
    assert (
        main(["convert", str(theirs), str(theirs.parent / "x"), "--to", to, "--shard-gb", "1e-5"])
        == wanted
    )
    error_text = capsys.readouterr().err
    text = {"no room": "has 12 kB free, but", "interrupted": "megalith convert: interrupted."}
    assert (
        text.get(fault, "No space left on device). Free some space, or choose another target")
        in error_text
    )
    assert "Traceback" not in error_text and sorted(os.listdir(theirs.parent)) == before


def test_a_checkpoint_with_one_wrong_bit_is_rejected_and_nothing_is_left(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "checkpoints" / "step_0000007" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert main(["convert", str(run), str(run.parent / "x")]) == 2
    error_text = capsys.readouterr().err
    assert (
        "damaged. SHA-256 expected" in error_text
        and "Copy the checkpoint again" in error_text
        and "Traceback" not in error_text
    )
    assert os.listdir(run.parent) == ["run"]


@pytest.mark.parametrize("to", ["huggingface", "megalith"])
def test_target_inside_a_file_is_rejected(
    to: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.parent / "file").touch()
    assert main(["convert", str(run), str(run.parent / "file" / "x"), "--to", to]) == 2
    error_text = capsys.readouterr().err
    assert (
        "file, which is a file. Choose another target" in error_text
        and "Traceback" not in error_text
    )


@pytest.mark.parametrize("to", ["huggingface", "megalith"])
def test_unreadable_folder_is_rejected(
    to: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = storage.list_names

    def guarded(folder: Path) -> list[str]:
        if folder == run.parent / "drop":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return plain(folder)

    (run.parent / "drop").mkdir()
    monkeypatch.setattr(storage, "list_names", guarded)
    assert main(["convert", str(run), str(run.parent / "drop" / "x"), "--to", to]) == 2
    error_text = capsys.readouterr().err
    assert (
        "x: not written (" in error_text
        and "Permission denied" in error_text
        and "Choose another target" in error_text
    )


def test_a_license_that_links_to_another_file_is_not_copied(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, secret = run.parent / "folder", run.parent / "secret"
    secret.write_text("secret")
    assert main(["convert", str(run), str(folder)]) == 0
    for source in (folder, run / "checkpoints" / "step_0000007"):
        (source / "LICENSE").symlink_to(secret)
        capsys.readouterr()
        assert main(["convert", str(source), str(run.parent / "x"), "--to", "huggingface"]) == 2
        assert "LICENSE is a link to" in capsys.readouterr().err and not (run.parent / "x").exists()


# --- Megatron checkpoints


def test_megatron_checkpoint_is_converted_with_its_optimizer_state(
    megatron_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = megatron_folder("dense_singleton"), tmp_path / "ours"
    assert main(["convert", str(source), str(target)]) == 0
    assert f"wrote {target}: 68 tensors, 18.5 kB, from {source}" in capsys.readouterr().out
    assert main(["checkpoint", "diff", str(source), str(target)]) == 0
    converted = open_checkpoint(target)
    assert converted.step == 2
    assert converted.state["train"]["consumed_samples"] == 16
    assert converted.state["optimizer_updates"] == 2
    settings = yaml.safe_load(converted.config_text)
    assert settings["model"]["vocab_size"] == 21
    assert settings["checkpoint"]["load"] == str(target)


def test_weights_of_megatron_checkpoint_are_converted_alone(
    megatron_folder: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = megatron_folder("moe_fully_reshardable"), tmp_path / "ours"
    words = ["convert", str(source), str(target), "--weights-only", "--step", "2"]
    assert main(words) == 0
    converted = open_checkpoint(target)
    assert converted.step == 0 and converted.state == {"token_ids": {}}
    assert not any(key.startswith("optimizer.") for key in converted.keys())  # noqa: SIM118
    assert main(["checkpoint", "diff", str(source), str(target), "--only", "model.*"]) == 0


def test_megatron_checkpoint_is_converted_to_hugging_face(
    megatron_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source, target = megatron_folder("dense_singleton"), tmp_path / "theirs"
    assert main(["convert", str(source), str(target), "--to", "huggingface"]) == 0
    assert main(["convert", str(target), str(tmp_path / "back")]) == 0
    words = ["--only", "model.layers.*", "--json"]
    assert main(["checkpoint", "diff", str(source), str(tmp_path / "back"), *words]) == 0


def test_step_selects_an_iteration_of_a_megatron_folder(
    megatron_folder: Callable[[str], Path],
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = megatron_folder("dense_singleton")
    assert main(["convert", str(source), str(tmp_path / "x"), "--step", "150"]) == 2
    assert (
        f"{source} has no iteration 150. Use one of its iterations: iter_0000002."
        in capsys.readouterr().err
    )
    assert main(["convert", str(run), str(tmp_path / "x"), "--step", "7"]) == 2
    assert (
        f"--step=7 selects an iteration of a Megatron folder, and {run} is not one. Remove --step, "
        "or pass the folder of the checkpoint." in capsys.readouterr().err
    )


def test_unreadable_optimizer_state_is_left_out_on_request(
    megatron_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("bucket 0 has 5 elements, expected 8.")

    monkeypatch.setattr("megalith.hf.megatron_checkpoint.read_optimizer", fail)
    words = ["convert", str(megatron_folder("dense_singleton")), str(tmp_path / "x")]
    assert main(words) == 2
    assert "bucket 0 has 5 elements, expected 8. Or pass --weights-only." in capsys.readouterr().err
    assert main([*words, "--weights-only"]) == 0
