"""Routers on hidden states of a sidecar: their own, of which they find all, and those of the layer
before."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megalith.config.moe import MoEConfig, RouterConfig
from megalith.errors import CheckpointError
from megalith.train.routing_predictability import apply_routers, predict_experts

SIGMOID = RouterConfig(score="sigmoid", expert_bias=True)
MOE = MoEConfig(num_experts=6, top_k=2, ffn_hidden_size=3, router=SIGMOID)
NAME = "rank_00000_step_0000001.safetensors"


def trace_of(folder: Path, tensors: dict[str, Tensor], chosen: dict[str, Tensor]) -> None:
    """A trace of one step and rank, and what lies beside it."""
    place = {"step": 1, "dp": 0, "cp": 0, "tp": 0, "microbatch": 0, "sidecar": NAME}
    rows = [
        place
        | {
            "layer": layer,
            "num_tokens": len(experts),
            "top_k": experts.shape[1],
            "experts": experts.tolist(),
        }
        for layer, experts in chosen.items()
    ]
    (folder / "rank_00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_file(tensors, folder / NAME)


def mixed(*, alike: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two layers of a model whose second router reads what the first does, or something else; and
    their choices."""
    draw = torch.Generator().manual_seed(3)
    hidden = [torch.randn(400, 12, generator=draw).bfloat16() for _ in range(2)]
    hidden[1] = hidden[0] if alike else hidden[1]
    weights = [torch.randn(6, 12, generator=draw) for _ in range(2)]
    # world_group chooses expert 1, which logits alone do not tell
    bias = torch.tensor([0.0, 5.0, 0.0, 0.0, 0.0, 0.0])
    tensors, chosen = {}, {}
    for layer in (0, 1):
        own = {"weight": weights[layer], "balancing_bias": bias}
        tensors |= {f"layers.{layer}/router/{name}": values.clone() for name, values in own.items()}
        tensors[f"layers.{layer}/0/hidden"] = hidden[layer].clone()
        chosen[f"layers.{layer}"] = predict_experts(hidden[layer], own, MOE)
    return tensors, chosen


@pytest.mark.parametrize("alike", [True, False])
def test_next_router_predicts_choices_from_equal_hidden_states(tmp_path: Path, alike: bool) -> None:
    trace_of(tmp_path, *mixed(alike=alike))
    results = {(one.layer, one.router): one for one in apply_routers(tmp_path, MOE)}
    assert list(results) == [
        ("layers.0", "layers.0"),
        ("layers.0", "layers.1"),
        ("layers.1", "layers.1"),
    ]
    assert all(results[layer, layer].hits == 1.0 for layer in ("layers.0", "layers.1"))
    predicted = results["layers.0", "layers.1"]
    if alike:
        assert (predicted.hits, predicted.load, predicted.tokens) == (1.0, pytest.approx(1.0), 400)
    else:
        assert predicted.hits == pytest.approx((1 + 1 / 5) / 2, abs=0.05), (
            "the biased expert, and one of the others"
        )
        assert 0.8 < predicted.load < 1


def test_predictions_use_expert_biases_and_offsets() -> None:
    hidden, weight = torch.ones(1, 2), torch.tensor([[1.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    moe = MoEConfig(num_experts=3, top_k=1, ffn_hidden_size=3)
    assert predict_experts(hidden, {"weight": weight}, moe).tolist() == [[0]]
    assert predict_experts(
        hidden, {"weight": weight, "router_bias": torch.tensor([0.0, 1.0, 0.0])}, moe
    ).tolist() == [[1]]
    moved = {"weight": weight, "balancing_offset": torch.tensor([3.0, 1.0, -1.0])}
    assert predict_experts(hidden, moved, moe).tolist() == [[2]]


def test_trace_without_captures_gives_no_predictions(tmp_path: Path) -> None:
    tensors, chosen = mixed(alike=True)
    for left in ("hidden", "router"):
        trace_of(
            tmp_path, {name: values for name, values in tensors.items() if left not in name}, chosen
        )
        assert apply_routers(tmp_path, MOE) == []


def test_missing_captures_file_is_named(tmp_path: Path) -> None:
    trace_of(tmp_path, *mixed(alike=True))
    (tmp_path / NAME).unlink()
    with pytest.raises(CheckpointError, match=f"{NAME} cannot be read .* Copy the folder again"):
        apply_routers(tmp_path, MOE)
