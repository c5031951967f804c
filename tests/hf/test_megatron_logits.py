"""Models of megatron-core: their tensors, arguments and logits.

The files are written by `tools/write_megatron_logits.py` with megatron-core 0.16.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from megalith.checkpoint.chunks import ChunkedTensor, MegatronFolder, TensorChunk
from megalith.config.model import ModelConfig
from megalith.hf.megatron_args import translate_args
from megalith.hf.megatron_names import normalize_tensors
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import Decoder
from megalith.testing.tolerance import relative_error
from tests.hf.conftest import blank, entries
from tests.hf.test_megatron_names import from_megatron

FOLDER = Path(__file__).parent / "megatron_logits"
CASES = sorted(path.stem for path in FOLDER.glob("*.safetensors"))
TOLERANCE = 2e-6
"""Relative error of fp32 logits of two layers; measured: at most 1e-6."""

OUTPUTS = ("logits", "tokens", "mtp_logits.")


def read_case(name: str) -> tuple[ModelConfig, dict[str, Tensor], dict[str, Tensor]]:
    """Return the model of a file, its stored tensors, and its inputs and outputs."""
    with safe_open(FOLDER / f"{name}.safetensors", framework="pt") as file:
        args = json.loads(file.metadata()["args"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # no mapping
    translated = translate_args(args)
    outputs = {key: value for key, value in tensors.items() if key.startswith(OUTPUTS)}
    weights = {key: value for key, value in tensors.items() if key not in outputs}
    return translated.require_model(name), weights, outputs


def build_model(config: ModelConfig, stored: dict[str, Tensor]) -> Decoder:
    """Return our model with the stored tensors; padding rows of the vocabulary stay zero."""
    chunked = {
        name: ChunkedTensor(
            name,
            tuple(tensor.shape),
            tensor.dtype,
            [TensorChunk(tuple((0, size) for size in tensor.shape), lambda tensor=tensor: tensor)],
        )
        for name, tensor in stored.items()
    }
    folder = MegatronFolder(FOLDER, "torch_dist", chunked, {"checkpoint_version": 3.0})
    parameters = from_megatron(config, normalize_tensors(folder, config))
    built = blank(config)
    by_name = {entry.shard.name: entry for entry in entries(built)}
    assert set(by_name) == set(parameters)
    with torch.no_grad():
        for name, values in parameters.items():
            target = by_name[name].tensor.view(by_name[name].shard.box_shape)
            target.zero_()
            target[tuple(slice(size) for size in values.shape)] = values
    return built


def compute_logits(ours: Decoder, ids: Tensor) -> list[Tensor]:
    """Return the logits of the model and of each MTP layer."""
    inputs = LayerInputs(seq_params_from_rows(1, len(ids)))
    shifted = torch.cat([ids[1:], ids[:1]])
    mtp_inputs = [(shifted, shifted)] * ours.config.mtp.num_layers
    with torch.no_grad():
        outputs = ours.outputs(ids, inputs, mtp_inputs=mtp_inputs)
        return [ours.head.logits(hidden) for hidden in outputs.hidden]


@pytest.mark.parametrize("name", CASES)
def test_logits_match_megatron(name: str) -> None:
    config, weights, outputs = read_case(name)
    ours = build_model(config, weights)
    logits = compute_logits(ours, outputs["tokens"])
    expected = [outputs["logits"]]
    expected += [values for key, values in outputs.items() if key.startswith("mtp_logits.")]
    vocab = config.vocab_size
    for depth, (own, megatron) in enumerate(zip(logits, expected, strict=True)):
        known = len(megatron) - depth  # the last tokens have no next ones
        error = relative_error(own[:known, :vocab], megatron[:known, :vocab])
        print(f"{name}: logits {depth} {error:.1e}")
        assert error <= TOLERANCE, depth


def test_there_is_a_file_of_every_case() -> None:
    assert len(CASES) == 10
