"""Ours against transformers on random small weights: scores, loss, gradients, text, and the way there and back.

`pytest -s tests/models/test_parity.py` prints the figures.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.boxes import Entry
from megalith.config.sample import SampleConfig
from megalith.infer.generate import generate
from megalith.kernels.tokens import tokens_of_rows
from megalith.models.decoder import Decoder, allocate, declared_parameters
from megalith.models.hf import HuggingFaceFolder, write_folder
from megalith.models.names import by_parameter, in_our_order
from megalith.parallel.mesh import mesh_of_one
from megalith.testing.tolerance import EXACT, PARITY, assert_close, assert_equals, compare, relative_error

transformers = pytest.importorskip("transformers")

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FAST = {"rope_type": "default", "rope_theta": 3.0}
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True, "vocab_size": 64},
    # A bias of the keys alone shifts all scores of a query alike and has no gradient; fast rotations change that.
    "biases": {"attention_bias": True, "mlp_bias": True, "rope_parameters": FAST},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "head_dim": {"head_dim": 10, "num_key_value_heads": 3},
    "one key/value head": {"num_key_value_heads": 1, "hidden_size": 36},
    "every head its own": {"num_key_value_heads": 6},
}


def their_model(*, std: float = 0.2, **changes: Any) -> Any:  # LlamaForCausalLM, loaded lazily
    """A Llama of theirs with weights large enough to matter, norms and biases included."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float("norm" in name), std, generator=generator)
    return model


def our_model(folder: HuggingFaceFolder) -> Decoder:
    """The same weights in a model of ours."""
    model = Decoder(folder.model_config, mesh_of_one())
    allocate(model, torch.device("cpu"))
    folder.fill([Entry(d.shard, "param", getattr(module, name)) for d, module, name in declared_parameters(model)])
    return model


def batch(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids [3, 11] and labels that are the ids one further on, some left out."""
    text = torch.randint(0, vocab_size, (3, 12), generator=torch.Generator().manual_seed(5))
    labels = text[:, 1:].clone()
    labels[1, 2:6] = -100
    return text[:, :-1], labels


def our_gradients(model: Decoder, folder: HuggingFaceFolder) -> dict[str, Tensor]:
    """Gradients under their names, in their shapes."""
    rules, found = by_parameter(folder.rules), {}
    for declared, module, name in declared_parameters(model):
        gradient = getattr(module, name).grad.view(declared.shard.shape)
        for rule in rules[declared.shard.name]:
            box = tuple(slice(start, stop) for start, stop in rule.box)
            theirs = found.setdefault(rule.name, torch.zeros(rule.shape))
            place = theirs.view(rule.view)[tuple(slice(start, stop) for start, stop in rule.at)]
            in_our_order(rule, place).copy_(gradient[box])
    return found


@pytest.mark.parametrize("case", CASES)
def test_scores_loss_and_every_gradient_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = their_model(**CASES[case])
    theirs.save_pretrained(tmp_path)
    folder = HuggingFaceFolder(tmp_path)
    ours = our_model(folder)
    ids, labels = batch(theirs.config.vocab_size)
    tokens = tokens_of_rows(*ids.shape)

    scores = theirs(ids).logits
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)
    loss.backward()
    our_loss = ours.loss(ids.flatten(), labels.flatten(), tokens)
    our_loss.backward()

    found = {"scores": ours.head.logits(ours(ids.flatten(), tokens)), "loss": our_loss.reshape(1)}
    found |= our_gradients(ours, folder)
    expected = {"scores": scores.flatten(0, 1), "loss": loss.reshape(1)}
    expected |= {name: parameter.grad for name, parameter in theirs.named_parameters()}
    print(f"{case}: scores {relative_error(found['scores'], expected['scores']):.1e}, {compare(found, expected)}")
    assert_close(found, expected, PARITY)
    assert all(tensor.any() for tensor in expected.values())


@pytest.mark.parametrize("case", ["untied", "tied", "biases", "llama3 rope", "head_dim"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_is_read_by_from_pretrained_and_every_bit_comes_back(
    case: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    theirs = their_model(**CASES[case]).to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    folder = HuggingFaceFolder(tmp_path / "theirs")
    write_folder(tmp_path / "ours", folder.model_config, folder, shard_nbytes=6000)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 3
    assert_close(dict(read.named_parameters()), dict(theirs.named_parameters()), EXACT)
    for name in ("rope_parameters", "tie_word_embeddings", "attention_bias", "mlp_bias", "head_dim", "rms_norm_eps"):
        assert getattr(read.config, name) == getattr(theirs.config, name)
    read.save_pretrained(tmp_path / "again")
    assert HuggingFaceFolder(tmp_path / "again").model_config == folder.model_config
    back = our_model(HuggingFaceFolder(tmp_path / "again"))
    assert_close(dict(back.named_parameters()), dict(our_model(folder).named_parameters()), EXACT)


def test_a_model_of_ours_with_biases_that_llama_lacks_computes_the_same_there(tmp_path: Path) -> None:
    theirs = their_model(attention_bias=True)
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.o_proj.bias.zero_()
    theirs.save_pretrained(tmp_path / "theirs")
    ids, _ = batch(97)
    folder = HuggingFaceFolder(tmp_path / "theirs")
    write_folder(tmp_path / "ours", replace(folder.model_config, output_bias=False), folder)
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert_equals("scores", read(ids).logits, theirs(ids).logits, EXACT)


def test_greedy_text_is_that_of_transformers(tmp_path: Path) -> None:
    theirs = their_model(std=0.6, rope_parameters=LLAMA3)
    theirs.save_pretrained(tmp_path)
    ours = our_model(HuggingFaceFolder(tmp_path))
    prompts = [[5, 17, 96, 3, 44], [8], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    found: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    for written in generate(ours, prompts, SampleConfig(temperature=0.0, max_new_tokens=32)):
        found[written.sequence].append(written.token)
    for number, prompt in enumerate(prompts):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=32, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert found[number] == expected[0, len(prompt) :].tolist()
        assert len(set(found[number])) > 3, "a text that only repeats itself shows little"
