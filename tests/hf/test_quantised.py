"""Weights in few bits are what their authors and transformers make of them, whole and box by
box."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megalith.checkpoint.safetensors import read_header
from megalith.cli.main import main
from megalith.errors import CheckpointError
from megalith.hf.folder import HuggingFaceFolder
from megalith.hf.pretrained import open_pretrained
from megalith.hf.quantized import E2M1, dequantize
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from tests.hf.families import CASES, Case, batch, our_model, saved

FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [4, 3],
}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def fp8(shape: tuple[int, int], block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Random numbers and scales."""
    grid = [-(-size // length) for size, length in zip(shape, block, strict=True)]
    return torch.randn(shape).mul_(50).to(torch.float8_e4m3fn), torch.rand(grid) + 0.01


def by_formula(values: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Element by element."""
    result = torch.empty(values.shape)
    for row, column in itertools.product(*map(range, values.shape)):
        result[row, column] = (
            values[row, column].float() * scales[row // block[0], column // block[1]].float()
        )
    return result


def mxfp4(experts: int, rows: int, runs: int) -> tuple[Tensor, Tensor]:
    """All bytes, and exponents from very small to very large."""
    blocks = torch.randint(0, 256, (experts, rows, runs, 16), dtype=torch.uint8)
    return blocks, torch.randint(90, 160, (experts, rows, runs), dtype=torch.uint8)


def opened(
    path: Path, config: dict[str, Any], **tensors: Tensor
) -> Any:  # the one that is dequantized
    path.mkdir()
    save_file(tensors, path / "x.safetensors")
    result = dequantize({"quantization_config": config}, read_header(path / "x.safetensors"), path)
    assert len(result) == 1
    return result.popitem()[1]


def check_boxes(read: Callable[[tuple[slice, ...]], Tensor], whole: Tensor) -> None:
    """Every kind of box is that part of the whole."""
    cuts = [
        (slice(0, size), slice(1, size), slice(0, size // 2), slice(size // 3, size - 1))
        for size in whole.shape
    ]
    for part in itertools.product(*cuts):
        assert torch.equal(read(part), whole[part]), part


@pytest.mark.parametrize(
    ("shape", "block"), [((7, 5), (4, 3)), ((12, 6), (4, 3)), ((3, 130), (128, 128))]
)
def test_fp8_numbers_are_multiplied_by_the_scale_of_their_block(
    shape: tuple[int, int], block: tuple[int, int], tmp_path: Path
) -> None:
    torch.manual_seed(1)
    values, scales = fp8(shape, block)
    config = FP8 | {"weight_block_size": list(block)}
    result = opened(tmp_path / "x", config, **{"a.weight": values, "a.weight_scale_inv": scales})
    assert (result.name, result.shape, result.dtype) == ("a.weight", shape, "BF16")
    check_boxes(result.read, by_formula(values, scales, block))


def test_fp8_in_whole_blocks_matches_transformers(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values, scales = fp8((256, 384), (128, 128))
    config = FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    result = opened(tmp_path / "x", config, **{"a.weight": values, "a.weight_scale_inv": scales})
    reference = library.Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
    assert torch.equal(result.read((slice(0, 256), slice(0, 384))).bfloat16(), reference)


def test_mxfp4_experts_match_transformers(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers.integrations.mxfp4")
    torch.manual_seed(2)
    blocks, scales = mxfp4(3, 5, 2)
    result = opened(tmp_path / "x", MXFP4, gate_up_proj_blocks=blocks, gate_up_proj_scales=scales)
    assert (result.name, result.shape) == ("gate_up_proj", (3, 64, 5))
    reference = library.convert_moe_packed_tensors(blocks, scales)
    check_boxes(lambda part: result.read(part).bfloat16(), reference)
    check_boxes(result.read, reference.float())  # exact: a few bits times a power of two


def test_mxfp4_values_have_sign_exponent_and_one_mantissa_bit() -> None:
    for code, value in enumerate(E2M1):
        sign, exponent, bit = code >> 3, code >> 1 & 3, code & 1
        plain = bit / 2 if exponent == 0 else (1 + bit / 2) * 2 ** (exponent - 1)
        assert value == (-plain if sign else plain)


@pytest.fixture
def theirs(tmp_path: Path, tiny: SimpleNamespace) -> Path:
    """A Llama whose projections are in FP8."""
    torch.manual_seed(3)
    tiny.folder(tmp_path / "theirs", tiny.config(), dtype=torch.bfloat16)
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if "proj" in name]:
        tensors[name], tensors[f"{name}_scale_inv"] = fp8(
            (len(tensors[name]), tensors[name].shape[1]), (4, 3)
        )
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    (tmp_path / "theirs" / "config.json").write_text(
        json.dumps(config | {"quantization_config": FP8})
    )
    return tmp_path / "theirs"


def test_a_folder_in_fp8_becomes_a_checkpoint_and_a_plain_folder(
    theirs: Path, tmp_path: Path, tiny: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(theirs), str(tmp_path / "ours"), "--dry-run"]) == 0
    output = capsys.readouterr().out
    down = "model.layers.1.mlp.down_proj.weight"
    assert (
        f"{down} -> layers.1.mlp.down[0:12, 0:10]  (12, 10) fp8 dequantized -> bfloat16" in output
    )
    assert output.count("fp8 dequantized") == 14 and "scale_inv" not in output
    assert main(["convert", str(theirs), str(tmp_path / "ours")]) == 0
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert (
        main(
            [
                "convert",
                str(theirs),
                str(tmp_path / "wide"),
                "--to",
                "huggingface",
                "--dtype",
                "fp32",
            ]
        )
        == 0
    )
    stored = load_file(theirs / "model.safetensors")
    back, wide = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "wide"))
    assert back.keys() == wide.keys() == {name for name in stored if "scale_inv" not in name}
    for name in back:
        exact = stored[name].float()
        if "proj" in name:
            exact = by_formula(stored[name], stored[f"{name}_scale_inv"], (4, 3))
        assert torch.equal(wide[name], exact), name
        assert torch.equal(back[name], exact.bfloat16()), name
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    built = tiny.blank(tiny.config())
    HuggingFaceFolder(theirs).fill(tiny.entries(built))
    assert torch.equal(tiny.tensors(built)["layers.1.mlp.down"], wide[down])
    assert open_pretrained(theirs).weights.dtype("layers.1.mlp.down") == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "quantization_config.quant_method='gptq': this quantization is not",
        ),
        (
            {"quant_method": "bitsandbytes"},
            "this quantization is not supported, only 'fp8' and 'mxfp4' are",
        ),
        (
            {"weight_block_size": None},
            r"weight_block_size=None, expected two whole numbers, as \[128, 128\]",
        ),
        (
            {"fmt": "e5m2"},
            "quantization_config.fmt='e5m2', which is not supported: it must be 'e4m3'",
        ),
        (
            {"rotation": 3},
            "quantization_config has the unknown fields rotation",
        ),
        (
            {"weight_block_size": [8, 3]},
            r"_proj.weight_scale_inv is \[3, 4\] F32, expected \[2, 4\] F32 or BF16",
        ),
    ],
)
def test_other_kinds_are_rejected_by_name(
    changes: dict[str, Any], text: str, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config | {"quantization_config": FP8 | changes}))
    with pytest.raises(CheckpointError, match=text):
        HuggingFaceFolder(theirs)
    assert main(["convert", str(theirs), str(theirs.parent / "x")]) == 2
    output = capsys.readouterr().err
    assert "bf16 weights" in output and "Traceback" not in output


def test_quantized_tensors_without_valid_scales_are_rejected(theirs: Path) -> None:
    tensors = load_file(theirs / "model.safetensors")
    key = "model.layers.0.self_attn.q_proj.weight_scale_inv"
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != key},
        theirs / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError, match=rf"{key} is missing: the scales of .* expected \[3, 4\]"
    ):
        HuggingFaceFolder(theirs)
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    with pytest.raises(
        CheckpointError, match=r"unexpected in LlamaForCausalLM: .*weight_scale_inv"
    ):
        HuggingFaceFolder(theirs)


@pytest.mark.parametrize(
    ("blocks", "scales", "text"),
    [
        (
            (2, 5, 3, 8),
            (2, 5, 3),
            r"x_blocks is \[2, 5, 3, 8\], expected \[experts, rows, runs, 16\]",
        ),
        ((2, 5, 3, 16), (2, 5, 4), r"x_scales is \[2, 5, 4\] U8, expected \[2, 5, 3\] U8"),
    ],
)
def test_experts_of_other_shapes_are_rejected(
    blocks: tuple[int, ...], scales: tuple[int, ...], text: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=text):
        opened(
            tmp_path / "x",
            MXFP4,
            x_blocks=torch.zeros(blocks, dtype=torch.uint8),
            x_scales=torch.zeros(scales, dtype=torch.uint8),
        )


def test_a_gpt_oss_with_experts_in_mxfp4_computes_what_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4}
    case = Case("GptOssConfig", {**CASES["gpt_oss"].fields, **sizes, "swiglu_limit": 7.0})
    plain, _ = saved(case, tmp_path / "x")
    tensors, e = load_file(tmp_path / "x" / "model.safetensors"), plain.config.num_local_experts
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        _, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (e, outputs, inputs // 32, 16), dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(
            121, 126, (e, outputs, inputs // 32), dtype=torch.uint8
        )
    save_file(tensors, tmp_path / "x" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "x" / "config.json").read_text()) | {
        "quantization_config": MXFP4
    }
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "x",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
        dtype=torch.float32,
        attn_implementation="eager",
    )
    ids, _ = batch(plain.config.vocab_size)
    folder = HuggingFaceFolder(tmp_path / "x")
    assert folder.stored_as("model.layers.1.mlp.experts.down_proj") == "mxfp4 dequantized"
    ours = our_model(folder)
    with torch.no_grad():
        scores = ours.head.logits(
            ours.hidden_states(ids.flatten(), LayerInputs(seq_params_from_rows(*ids.shape)))
        )
        expected = reference(ids).logits.flatten(0, 1)
    assert float((scores - expected).abs().max() / expected.abs().max()) < 1e-5


def test_deepseek_v3_with_fp8_experts_equals_the_dequantized_model(tmp_path: Path) -> None:
    plain, _ = saved(CASES["deepseek_v3, experts"], tmp_path / "x")
    tensors, exact = load_file(tmp_path / "x" / "model.safetensors"), {}
    scaled = [name for name in tensors if "_proj.weight" in name]
    assert sum(".experts." in name for name in scaled) == 3 * plain.config.n_routed_experts
    for name in scaled:
        rows, columns = tensors[name].shape
        tensors[name], tensors[f"{name}_scale_inv"] = fp8((rows, columns), (4, 3))
        exact[name] = by_formula(tensors[name], tensors[f"{name}_scale_inv"], (4, 3))
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    save_file(tensors, tmp_path / "few" / "model.safetensors", metadata={"format": "pt"})
    wide = {
        name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")
    } | exact
    save_file(wide, tmp_path / "x" / "model.safetensors", metadata={"format": "pt"})
    few = HuggingFaceFolder(tmp_path / "few")
    assert few.stored_as("model.layers.1.mlp.experts.3.up_proj.weight") == "fp8 dequantized"
    result, expected = (
        our_model(few).state_dict(),
        our_model(HuggingFaceFolder(tmp_path / "x")).state_dict(),
    )
    assert result.keys() == expected.keys() and all(
        torch.equal(result[name], expected[name]) for name in result
    )
