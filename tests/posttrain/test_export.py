"""Adapters go out as the peft library has them, come back the same, and make the same model merged
and beside it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry
from megalith.cli.main import main
from megalith.config.lora import LoraConfig
from megalith.config.tree import to_dict
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.pretrained import load_pretrained, locate_source, open_adapters, open_pretrained
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import Decoder, allocate, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.posttrain.export import peft_config, plan_peft
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

CPU = torch.device("cpu")
IDS = torch.arange(11) * 7 % 61
GPT2: dict[str, Any] = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 20,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}


def folder(path: Path, kind: str = "LlamaConfig", **changes: Any) -> Path:
    """A random model of theirs."""
    torch.manual_seed(2)
    config = getattr(transformers, kind)(**(changes or LLAMA))
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(path)
    return path


def train(path: Path, load: Path, **settings: str) -> Path:
    """Three steps of adapters beside it, fast enough that they matter."""
    read = open_pretrained(load).model
    fixed = {
        "lora.rank": "3",
        "train.steps": "3",
        "schedule.lr": "0.1",
        "checkpoint.load": str(load),
    }
    run = tiny_run(fixed | settings | {"train.eval_steps": "0"})
    run_training(
        replace(run, model=read), RunFolder(path), build_single_rank_mesh(), CPU, show=False
    )
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peft")
    run = train(path / "run", folder(path / "base"))
    assert main(["convert", str(run), str(path / "adapters"), "--to", "peft"]) == 0
    assert main(["convert", str(run), str(path / "merged")]) == 0
    return path


def theirs(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager"
    ).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS.unsqueeze(0)).logits[0]
    return result


def ours(source: Path) -> Tensor:
    """Logits of our own model, filled from a run, a checkpoint or any folder."""
    opened = open_pretrained(locate_source(str(source)))
    model = Decoder(build_context(opened.model, build_single_rank_mesh()))
    allocate(model, CPU)
    entries = [
        CheckpointEntry(d.shard, "param", getattr(m, n)) for d, m, n in iter_parameter_specs(model)
    ]
    load_pretrained(entries, str(source), build_single_rank_mesh().world, model=opened.model)
    with torch.no_grad():
        return model.head.logits(
            model.hidden_states(IDS, LayerInputs(seq_params_from_lengths([len(IDS)], device="cpu")))
        )


def test_adapters_loaded_by_the_library_give_the_same_outputs(trained: Path) -> None:
    model = peft.PeftModel.from_pretrained(theirs(trained / "base"), trained / "adapters")
    result = ours(trained / "run")
    torch.testing.assert_close(logits(model.eval()), result, rtol=0, atol=2e-5)
    assert (result - logits(theirs(trained / "base"))).abs().max() > 0.1, "adapters do something"


def test_the_merged_model_is_the_base_with_adapters(trained: Path) -> None:
    model = peft.PeftModel.from_pretrained(theirs(trained / "base"), trained / "adapters")
    merged, plain = (
        load_file(trained / "merged/model.safetensors"),
        model.merge_and_unload().state_dict(),
    )
    for name, value in merged.items():
        torch.testing.assert_close(value, plain[name], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        logits(theirs(trained / "merged")), ours(trained / "run"), rtol=0, atol=2e-5
    )


def test_release_is_the_merged_model(trained: Path, tmp_path: Path) -> None:
    assert (
        main(["convert", str(trained / "run"), str(tmp_path / "release"), "--to", "megalith"]) == 0
    )
    assert torch.equal(ours(tmp_path / "release"), ours(trained / "run"))


@pytest.mark.parametrize(("alpha", "written"), [(8.0, 8), (4.5, 4.5)])
def test_alpha_is_exported_with_its_type(alpha: float, written: float) -> None:
    adapters = SimpleNamespace(lora=LoraConfig(rank=3, alpha=alpha, rslora=True, dropout=0.05))
    document = peft_config([], SimpleNamespace(base_path=Path("base"), adapters=adapters))  # type: ignore[arg-type]
    assert (
        document["r"],
        document["lora_alpha"],
        document["use_rslora"],
        document["lora_dropout"],
    ) == (
        3,
        written,
        True,
        0.05,
    )
    assert type(document["lora_alpha"]) is type(written), (
        "PEFT has whole numbers where they are whole"
    )


def test_a_peft_folder_survives_a_round_trip(trained: Path, tmp_path: Path) -> None:
    there, here = (
        open_adapters(trained / "adapters"),
        open_adapters(locate_source(str(trained / "run"))),
    )
    assert there.names == here.names and to_dict(there.lora)["rank"] == 3
    assert all(torch.equal(there.read(name), here.read(name)) for name in there.names)
    torch.testing.assert_close(ours(trained / "adapters"), ours(trained / "run"), rtol=0, atol=1e-6)
    run = train(
        tmp_path / "run",
        trained / "base",
        **{"lora.load": str(trained / "adapters"), "schedule.lr": "0.0"},
    )
    torch.testing.assert_close(ours(run), ours(trained / "run"), rtol=0, atol=1e-6)


def test_adapters_of_the_library_are_read(trained: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=2,
        lora_alpha=3,
        use_rslora=True,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(theirs(trained / "base"), config)
    model.save_pretrained(tmp_path / "theirs")
    result = open_adapters(tmp_path / "theirs")
    assert (result.lora.targets, result.lora.rank, result.lora.rslora) == (("q", "kv"), 2, True)
    torch.testing.assert_close(ours(tmp_path / "theirs"), logits(model.eval()), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"use_dora": True}, "use_dora=True: these adapters do not compute"),
        ({"r": 0}, "r=0: these adapters"),
        (
            {"base_model_name_or_path": "someone/model"},
            "base_model_name_or_path='someone/model' is not a local folder",
        ),
    ],
)
def test_other_kinds_of_adapters_are_rejected(
    trained: Path, tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    save_file(
        load_file(trained / "adapters/adapter_model.safetensors"),
        tmp_path / "adapter_model.safetensors",
    )
    raw = json.loads((trained / "adapters/adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError, match=text):
        open_pretrained(locate_source(str(tmp_path)))


def test_adapters_of_another_model_are_rejected_by_name(trained: Path, tmp_path: Path) -> None:
    other = folder(tmp_path / "other", **LLAMA | {"hidden_size": 32})
    with pytest.raises(
        CheckpointError,
        match=r"is for another base: .*q_proj.lora_A.weight is \[3, 24\], expected \[3, 32\]",
    ):
        open_pretrained(locate_source(str(trained / "adapters")), base=str(other))
    tensors = load_file(trained / "adapters/adapter_model.safetensors")
    tensors["base_model.model.lm_head.lora_A.weight"] = tensors.pop(sorted(tensors)[0])
    (tmp_path / "damaged").mkdir()
    save_file(tensors, tmp_path / "damaged/adapter_model.safetensors")
    (tmp_path / "damaged/adapter_config.json").write_text(
        (trained / "adapters/adapter_config.json").read_text()
    )
    with pytest.raises(
        CheckpointError,
        match=r"missing: base_model.*; unexpected: base_model.model.lm_head.lora_A",
    ):
        open_pretrained(locate_source(str(tmp_path / "damaged")))


DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "q_lora_rank": 7,
    "kv_lora_rank": 5,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 3,
    "first_k_dense_replace": 2,
}
OF_LATENT = {
    "lora.dropout": "0.3",
    "lora.layers": "[1]",
    "lora.targets": "[q_down, q_up, kv_down, kv_up, o]",
}
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def test_mla_matrices_have_the_names_of_the_library(tmp_path: Path) -> None:
    base = folder(tmp_path / "base", "DeepseekV3Config", **DEEPSEEK)
    run = train(tmp_path / "run", base, **OF_LATENT)
    assert main(["convert", str(run), str(tmp_path / "adapters"), "--to", "peft"]) == 0
    raw = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    assert set(LATENT) == set(raw["target_modules"]) and (
        raw["layers_to_transform"],
        raw["lora_dropout"],
    ) == ([1], 0.3)
    model = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "adapters")
    torch.testing.assert_close(logits(model.eval()), ours(run), rtol=0, atol=2e-5)
    assert (ours(run) - logits(theirs(base))).abs().max() > 1e-3, "adapters do something"
    result = open_adapters(tmp_path / "adapters")
    assert (result.lora.layers, result.lora.targets[:4]) == (
        (1,),
        ("q_down", "q_up", "kv_down", "kv_up"),
    )
    torch.testing.assert_close(ours(tmp_path / "adapters"), ours(run), rtol=0, atol=1e-6)


EXPERTS: dict[str, dict[str, Any]] = {
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "head_dim": 6,
    },
}


@pytest.mark.parametrize("model", ["DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_mlp_that_the_library_treats_as_experts_is_not_exported(model: str, tmp_path: Path) -> None:
    kind = model.replace("ForCausalLM", "Config")
    sizes = DEEPSEEK if "Deepseek" in kind else LLAMA | EXPERTS[kind] | {"mlp_only_layers": [0]}
    run = train(tmp_path / "run", folder(tmp_path / "base", kind, **sizes))
    with pytest.raises(
        ConfigError, match=rf"in {model} PEFT treats every MLP as experts.*--to huggingf"
    ):
        plan_peft(open_pretrained(locate_source(str(run))))
    assert main(["convert", str(run), str(tmp_path / "merged")]) == 0
    torch.testing.assert_close(logits(theirs(tmp_path / "merged")), ours(run), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", EXPERTS)
def test_layers_with_experts_have_adapters_of_other_matrices(kind: str, tmp_path: Path) -> None:
    base = folder(tmp_path / "base", kind, **LLAMA | EXPERTS[kind])
    run = train(tmp_path / "run", base)
    assert main(["convert", str(run), str(tmp_path / "adapters"), "--to", "peft"]) == 0
    model = peft.PeftModel.from_pretrained(theirs(base), tmp_path / "adapters")
    torch.testing.assert_close(logits(model.eval()), ours(run), rtol=0, atol=2e-5)
    assert (ours(run) - logits(theirs(base))).abs().max() > 1e-3, "adapters do something"
    torch.testing.assert_close(ours(tmp_path / "adapters"), ours(run), rtol=0, atol=1e-6)


def test_layers_selected_by_the_library_are_read(trained: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], layers_to_transform=[1], init_lora_weights=False
    )
    model = peft.get_peft_model(theirs(trained / "base"), config)
    model.save_pretrained(tmp_path / "theirs")
    result = open_adapters(tmp_path / "theirs")
    assert result.lora.layers == (1,) and result.names == {
        f"layers.1.attention.q.lora_{word}" for word in "ab"
    }
    torch.testing.assert_close(ours(tmp_path / "theirs"), logits(model.eval()), rtol=0, atol=2e-5)
    with pytest.raises(
        CheckpointError, match=r"lora.layers is \(1,\) in the adapters and \(0, 1\) in this run"
    ):
        train(
            tmp_path / "run",
            trained / "base",
            **{
                "lora.load": str(tmp_path / "theirs"),
                "lora.rank": "2",
                "lora.alpha": "8",
                "lora.targets": "[q]",
            },
        )


def test_adapters_of_a_shallower_model_have_missing_layers(trained: Path, tmp_path: Path) -> None:
    deeper = folder(tmp_path / "deeper", **LLAMA | {"num_hidden_layers": 3})
    with pytest.raises(
        CheckpointError, match=r"is for another base: missing: base_model.*layers.2"
    ):
        open_pretrained(locate_source(str(trained / "adapters")), base=str(deeper))


def test_layers_selected_by_a_regular_expression_are_read(trained: Path, tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=r".*\.1\..*(q|up)_proj", init_lora_weights=False)
    model = peft.get_peft_model(theirs(trained / "base"), config)
    model.save_pretrained(tmp_path / "theirs")
    result = open_adapters(tmp_path / "theirs")
    assert (result.lora.layers, result.lora.targets) == ((1,), ("q", "gate_up"))
    torch.testing.assert_close(ours(tmp_path / "theirs"), logits(model.eval()), rtol=0, atol=2e-5)


def test_a_base_that_is_named_elsewhere_is_that_of_the_run(
    trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "adapters").mkdir()
    save_file(
        load_file(trained / "adapters/adapter_model.safetensors"),
        tmp_path / "adapters/adapter_model.safetensors",
    )
    raw = json.loads((trained / "adapters/adapter_config.json").read_text())
    (tmp_path / "adapters/adapter_config.json").write_text(
        json.dumps(raw | {"base_model_name_or_path": "some/hub"})
    )
    settings = {"lora.load": str(tmp_path / "adapters"), "schedule.lr": "0.0"}
    torch.testing.assert_close(
        ours(train(tmp_path / "run", trained / "base", **settings)),
        ours(trained / "run"),
        rtol=0,
        atol=1e-6,
    )
    assert "names no local base: only names and shapes of its matrices are checked" in caplog.text


FUSED = {
    "Phi3Config": ("qkv_proj", LLAMA),
    "GPTNeoXConfig": ("query_key_value", SIZES | {"rotary_pct": 1.0}),
    "GPT2Config": (
        "c_attn",
        GPT2 | {name: SIZES[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")},
    ),
}


@pytest.mark.parametrize("kind", FUSED)
def test_families_with_fused_matrices_are_rejected_by_name_and_can_merge(
    kind: str, tmp_path: Path
) -> None:
    tensor, sizes = FUSED[kind]
    run = train(tmp_path / "run", folder(tmp_path / "base", kind, **sizes))
    with pytest.raises(
        ConfigError, match=rf"stores matrices fused or transposed \(q is in .*{tensor}.*--to hugg"
    ):
        plan_peft(open_pretrained(locate_source(str(run))))
    assert main(["convert", str(run), str(tmp_path / "merged")]) == 0
    torch.testing.assert_close(logits(theirs(tmp_path / "merged")), ours(run), rtol=0, atol=2e-5)


def test_a_model_without_adapters_has_none_to_export(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(trained / "base"), str(trained / "none"), "--to", "peft"]) == 2
    assert "holds a model, not adapters. Use --to huggingface" in capsys.readouterr().err
    assert (
        main(
            [
                "convert",
                str(trained / "base"),
                str(trained / "none"),
                "--base",
                str(trained / "run"),
            ]
        )
        == 2
    )
    assert "--base=" in capsys.readouterr().err


def test_a_dry_run_lists_the_linear_layers(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["convert", str(trained / "run"), str(trained / "x"), "--to", "peft", "--dry-run"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    key = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    assert f"layers.1.attention.kv.lora_b[1] -> {key}  (12, 3) float32" in lines
    assert len(lines) == 2 * 14 + 1 and not (trained / "x").exists()
    assert lines[-1].startswith("14 linear layers with adapters, ") and lines[-1].endswith(
        " MB; nothing was written"
    )
    assert (
        main(
            [
                "convert",
                str(trained / "run"),
                str(trained / "x"),
                "--to",
                "peft",
                "--dry-run",
                "--json",
            ]
        )
        == 0
    )
    document = json.loads(capsys.readouterr().out)
    stored = load_file(trained / "adapters" / "adapter_model.safetensors")
    assert {one["target"]: tuple(one["shape"]) for one in document["tensors"]} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    assert len(document["modules"]) == 14


@pytest.mark.parametrize("to", ["huggingface", "megalith"])
def test_dry_run_lists_the_tensors_that_adapters_are_added_to(
    to: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["convert", str(trained / "run"), str(trained / "x"), "--to", to, "--dry-run"]
    assert main(words) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    merged = [line for line in lines if " · lora_b · lora_a -> " in line]
    assert 0 < len(merged) < len(lines) and not any(
        "norm" in line or "embed" in line for line in merged
    )
    assert (
        f"{len(merged)} of them with adapters of rank 3 from " in last
        and f"added to {trained / 'base'}" in last
    )
    assert main([*words, "--json"]) == 0
    assert "with adapters of rank 3" in json.loads(capsys.readouterr().out)["merged"]
    assert main(["convert", str(trained / "base"), str(trained / "x"), "--dry-run"]) == 0
    assert "lora" not in capsys.readouterr().out
