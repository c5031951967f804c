import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megalith.checkpoint.boxes import Entry
from megalith.checkpoint.load import open_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.cli.main import main
from megalith.config.model import ModelConfig
from megalith.config.tokenizer import TokenizerConfig
from megalith.config.tree import dump_yaml
from megalith.models.decoder import Decoder, allocate, declared_parameters, initialise
from megalith.models.release import release_run
from megalith.parallel.group import alone
from megalith.parallel.mesh import mesh_of_one

CONFIG = ModelConfig(
    vocab_size=257, hidden_size=12, num_layers=2, num_heads=6, num_kv_heads=2, ffn_hidden_size=10, max_seq_len=64
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with one checkpoint."""
    model = Decoder(CONFIG, mesh_of_one())
    allocate(model, torch.device("cpu"))
    initialise(model, seed=1)
    entries = [Entry(d.shard, "param", getattr(module, name)) for d, module, name in declared_parameters(model)]
    text = dump_yaml(release_run("run", CONFIG, TokenizerConfig(), tmp_path))
    save_checkpoint(tmp_path / "run" / "checkpoints", 7, entries, {}, alone("world"), config_text=text, keep=None)
    return tmp_path / "run"


def test_a_run_goes_out_and_comes_back_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = run.parent / "theirs", run.parent / "ours"
    assert main(["convert", str(run), str(theirs), "--shard-gb", "1e-5"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"wrote {theirs}: 21 tensors, ")
    assert said.err == "" and len(list(theirs.glob("*.safetensors"))) > 1
    assert main(["convert", str(theirs), str(ours)]) == 0
    before, after = open_checkpoint(run / "checkpoints" / "step_0000007"), open_checkpoint(ours)
    keys = before.keys()
    assert keys == after.keys()
    for key in keys:
        assert torch.equal(before.read(key), after.read(key))


def test_the_dry_run_lists_every_tensor_and_writes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(run), str(run.parent / "x"), "--dry-run", "--dtype", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    kv = "layers.0.attention.kv[1:2, 0:2, 0:2, 0:12] -> model.layers.0.self_attn.v_proj.weight"
    assert f"{kv}  (4, 12) float32 -> bfloat16" in lines
    assert lines[-1].startswith("21 tensors, ") and lines[-1].endswith("nothing was written") and len(lines) == 22
    assert not (run.parent / "x").exists()


def test_a_folder_without_a_tokenizer_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, ours = run.parent / "theirs", run.parent / "ours"
    assert main(["convert", str(run), str(theirs)]) == 0  # a run on bytes
    said = capsys.readouterr().out
    assert "the folder has no tokenizer: programs that read it must" in said and "megalith generate" not in said
    assert not (theirs / "tokenizer.json").exists()
    assert main(["convert", str(run), str(ours), "--to", "megalith"]) == 0
    assert capsys.readouterr().out.endswith(f"try: megalith generate {ours}\n")


def test_json_is_one_document(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = run.parent / "x"
    assert main(["convert", str(run), str(target), "--json", "--dtype", "bf16"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["source"], said["target"]) == (str(run / "checkpoints" / "step_0000007"), str(target))
    assert (said["to"], said["dry_run"], len(said["tensors"])) == ("huggingface", False, 21)
    assert said["tokenizer"] is None
    tensors = load_file(target / "model.safetensors")
    assert said["nbytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


def test_either_kind_can_be_asked_for(run: Path) -> None:
    theirs, ours = run.parent / "theirs", run.parent / "ours"
    assert main(["convert", str(run), str(ours), "--to", "megalith", "--dtype", "bf16"]) == 0
    assert open_checkpoint(ours).dtype("model.norm.weight") == torch.bfloat16
    assert main(["convert", str(ours), str(theirs)]) == 0
    assert main(["convert", str(theirs), str(run.parent / "again"), "--to", "huggingface", "--dtype", "fp16"]) == 0
    assert load_file(run.parent / "again" / "model.safetensors")["lm_head.weight"].dtype == torch.float16


def test_the_vocabulary_is_padded_as_asked(run: Path) -> None:
    assert main(["convert", str(run), str(run.parent / "a")]) == 0
    assert main(["convert", str(run.parent / "a"), str(run.parent / "b"), "--vocab-multiple", "100"]) == 0
    assert open_checkpoint(run.parent / "b").shape("model.embed.weight") == (300, 12)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone", "x"], "gone: no such folder"),
        (["RUN", "RUN"], "exists already and is left as it is. Choose another target"),
        (["RUN", "x", "--shard-gb", "0"], "--shard-gb=0.0 must be above 0. Use 5"),
        (["RUN", "x", "--workers", "0"], "--workers=0 must be at least 1. Use 2, or as many as there are cores"),
        (["RUN", "x", "--vocab-multiple", "0"], "--vocab-multiple=0 must be at least 1. Use 64"),
        (["RUN", "x", "--vocab-multiple", "8"], "--vocab-multiple=8 is for checkpoints made from Hugging Face folders"),
        (["RUN", "x", "--dtpye", "bf16"], "--dtpye is not an option of this command. Did you mean --dtype"),
    ],
)
def test_bad_input_is_told_in_words(
    words: list[str], message: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    assert main(["convert", *(str(run) if word == "RUN" else word for word in words)]) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err and said.out == ""


def test_an_unsupported_architecture_is_named_with_the_supported_ones(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = run.parent / "theirs"
    assert main(["convert", str(run), str(theirs)]) == 0
    raw = json.loads((theirs / "config.json").read_text()) | {"architectures": ["BloomForCausalLM"]}
    (theirs / "config.json").write_text(json.dumps(raw))
    assert main(["convert", str(theirs), str(run.parent / "x")]) == 2
    said = capsys.readouterr().err
    assert "the architecture BloomForCausalLM is not supported. Use one of LlamaForCausalLM," in said
