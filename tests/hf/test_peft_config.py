"""An adapter_config.json is understood field by field."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalith.errors import CheckpointError
from megalith.hf.peft import PLAIN, UNDERSTOOD, WITHOUT_EFFECT, PeftConfig, read_peft_config

RAW: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 3,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "mlp.up_proj"],
}


def read(folder: Path, **changes: Any) -> PeftConfig:
    (folder / "adapter_config.json").write_text(json.dumps(RAW | changes))
    return read_peft_config(folder / "adapter_config.json")


def test_rank_scale_targets_layers_and_base_are_read(tmp_path: Path) -> None:
    result = read(tmp_path, use_rslora=True, layers_to_transform=2, base_model_name_or_path="base")
    assert (result.lora.rank, result.lora.alpha, result.lora.rslora, result.base) == (
        3,
        6.0,
        True,
        "base",
    )
    assert result.layers == frozenset({2}) and read(tmp_path).layers is None


def test_every_field_that_the_library_writes_for_plain_lora_is_known(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"]).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "adapter_config.json").read_text())
    assert read_peft_config(tmp_path / "adapter_config.json").lora.rank == 3
    assert raw.keys() <= UNDERSTOOD | PLAIN.keys() | WITHOUT_EFFECT, (
        "and by name, whatever it holds"
    )


@pytest.mark.parametrize("name", PLAIN)
def test_adapters_other_than_plain_lora_are_rejected_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=rf"{name}='else': these adapters do not compute.* Use plain LoRA"
    ):
        read(tmp_path, **{name: "else"})
    for value in PLAIN[name]:
        read(tmp_path, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 0}, "r=0: these"),
        ({"lora_alpha": None}, "lora_alpha=None: these"),
        ({"target_modules": "(q"}, r"target_modules='\(q'"),
        ({"target_modules": [3]}, r"target_modules=\[3\]"),
        ({"layers_to_transform": []}, r"layers_to_transform=\[\]"),
        (
            {"use_new": False},
            "use_new=False: unknown fields, which may change what the adapters compute.",
        ),
    ],
)
def test_invalid_or_unknown_peft_fields_are_rejected(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, **changes)


def test_unknown_null_fields_are_ignored(tmp_path: Path) -> None:
    assert read(tmp_path, newest_config=None).lora.rank == 3


@pytest.mark.parametrize(
    ("modules", "module", "adapted"),
    [
        (["q_proj"], "model.layers.1.self_attn.q_proj", True),
        (["q_proj"], "model.layers.1.self_attn.my_q_proj", False),
        (["self_attn.q_proj"], "model.layers.1.self_attn.q_proj", True),
        (["model.layers.1.self_attn.q_proj"], "model.layers.1.self_attn.q_proj", True),
        (r".*\.1\..*_proj", "model.layers.1.self_attn.q_proj", True),
        (r".*\.0\..*_proj", "model.layers.1.self_attn.q_proj", False),
        ("all-linear", "model.layers.1.self_attn.q_proj", True),
        (None, "model.layers.1.self_attn.q_proj", True),
    ],
)
def test_targets_are_matched_as_by_the_library(
    modules: Any, module: str, adapted: bool, tmp_path: Path
) -> None:
    assert read(tmp_path, target_modules=modules).adapts(module, 1) == adapted
    assert not read(tmp_path, target_modules=modules, layers_to_transform=[0, 2]).adapts(module, 1)


def test_a_link_that_leads_out_of_the_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "weights").write_bytes(b"")
    (tmp_path / "adapters" / "adapter_model.safetensors").symlink_to(tmp_path / "weights")
    with pytest.raises(
        CheckpointError, match=r"adapter_model.safetensors is a link to .*weights, outside of its"
    ):
        read(tmp_path / "adapters")
