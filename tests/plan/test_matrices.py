"""Tests of megalith/plan/matrices.py: the matrices of a parameter contain each element once."""

from math import prod
from random import Random

import numpy as np
import pytest

from megalith.plan.matrices import WeightMatrix, split_into_matrices

SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "layers.0.attention.q": ((7, 6, 24), 1),
    "layers.0.attention.kv": ((2, 3, 6, 24), 1),
    "layers.0.attention.gate": ((7, 6, 24), 1),
    "layers.0.attention.o": ((24, 7, 6), 2),
    "layers.0.mlp.gate_up": ((2, 20, 24), 1),
    "layers.0.mlp.up": ((20, 24), 1),
    "layers.0.mlp.down": ((24, 20), 1),
    "layers.0.moe.experts.gate_up": ((5, 2, 20, 24), 1),
    "layers.0.moe.experts.up": ((5, 20, 24), 1),
    "layers.0.moe.experts.down": ((5, 24, 20), 1),
    "layers.0.attention.q_down": ((9, 24), 1),
    "layers.0.attention.q_up": ((7, 10, 9), 1),
    "layers.0.attention.kv_down": ((12, 24), 1),
    "layers.0.attention.kv_up": ((7, 11, 8), 1),
    "layers.0.attention.kv.lora_a": ((2, 4, 24), 1),
    "layers.0.attention.kv.lora_b": ((2, 3, 6, 4), 1),
    "layers.0.attention.o.lora_a": ((4, 7, 6), 2),
    "layers.0.attention.o.lora_b": ((24, 4), 1),
    "layers.0.attention.kv_up.lora_a": ((4, 8), 1),
    "layers.0.attention.kv_up.lora_b": ((7, 11, 4), 1),
    "mtp.0.project": ((24, 48), 1),
}


def split(name: str, kind: str = "matrices") -> list[WeightMatrix]:
    shape, inputs = SHAPES[name]
    # kind is a literal in the tests
    return split_into_matrices(name, shape, inputs, split=kind, nope_dim=6)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["matrices", "heads", "fused"])
@pytest.mark.parametrize("name", SHAPES)
def test_matrices_partition_a_parameter(name: str, kind: str) -> None:
    shape, _ = SHAPES[name]
    counts = np.zeros(shape, dtype=int)
    for matrix in split(name, kind):
        part = counts[tuple(slice(*span) for span in matrix.box)]
        part += 1
        assert part.size == matrix.numel == matrix.rows * matrix.columns
    assert (counts == 1).all()


@pytest.mark.parametrize("kind", ["matrices", "heads", "fused"])
@pytest.mark.parametrize("name", SHAPES)
def test_states_of_equal_matrices_are_numbered(name: str, kind: str) -> None:
    by_state: dict[str, list[WeightMatrix]] = {}
    for matrix in split(name, kind):
        by_state.setdefault(matrix.state_name, []).append(matrix)
    for matrices in by_state.values():
        assert [one.state_index for one in matrices] == list(range(matrices[0].state_count))
        assert len({(one.rows, one.columns, one.state_count) for one in matrices}) == 1


def shapes(name: str, kind: str = "matrices") -> list[tuple[int, int]]:
    return [(one.rows, one.columns) for one in split(name, kind)]


def test_keys_and_values_and_gate_and_up_are_separate_matrices_unless_fused() -> None:
    assert shapes("layers.0.attention.kv") == [(18, 24)] * 2
    assert shapes("layers.0.attention.kv", "fused") == [(36, 24)]
    assert shapes("layers.0.mlp.gate_up") == [(20, 24)] * 2
    assert shapes("layers.0.mlp.gate_up", "fused") == [(40, 24)]


def test_every_expert_is_a_matrix() -> None:
    assert shapes("layers.0.moe.experts.gate_up") == [(20, 24)] * 10
    assert shapes("layers.0.moe.experts.gate_up", "fused") == [(40, 24)] * 5
    assert shapes("layers.0.moe.experts.down", "heads") == [(24, 20)] * 5


def test_split_by_heads_splits_projections_of_attention_only() -> None:
    assert shapes("layers.0.attention.q", "heads") == [(6, 24)] * 7
    assert shapes("layers.0.attention.kv", "heads") == [(6, 24)] * 6
    assert shapes("layers.0.attention.o", "heads") == [(24, 6)] * 7
    assert shapes("layers.0.mlp.gate_up", "heads") == [(20, 24)] * 2
    assert shapes("layers.0.attention.q_down", "heads") == [(9, 24)]


def test_up_projection_of_latent_attention_has_a_key_and_a_value_part() -> None:
    assert shapes("layers.0.attention.kv_up") == [(42, 8), (35, 8)]
    assert [one.state_name.rsplit(".", 1)[1] for one in split("layers.0.attention.kv_up")] == [
        "key",
        "value",
    ]
    assert shapes("layers.0.attention.kv_up", "heads") == [(6, 8)] * 7 + [(5, 8)] * 7
    assert shapes("layers.0.attention.kv_up", "fused") == [(77, 8)]


def test_adapters_are_split_like_their_weights_and_never_by_head() -> None:
    assert shapes("layers.0.attention.kv.lora_a", "heads") == [(4, 24)] * 2
    assert shapes("layers.0.attention.kv.lora_b", "fused") == [(18, 4)] * 2
    assert shapes("layers.0.attention.o.lora_a", "heads") == [(4, 42)]
    assert shapes("layers.0.attention.kv_up.lora_b", "heads") == [(42, 4), (35, 4)]


def test_cost_is_symmetric_and_counts_the_shorter_side() -> None:
    rng = Random(0)
    for _ in range(50):
        m, n = sorted((rng.randint(1, 99), rng.randint(1, 99)))
        costs = {
            split_into_matrices("mtp.0.project", shape, 1)[0].cost for shape in ((m, n), (n, m))
        }
        assert costs == {4 * m * m * n + 2 * m**3}


def test_numel_of_all_matrices_is_that_of_the_parameter() -> None:
    for name, (shape, _) in SHAPES.items():
        assert sum(one.numel for one in split(name)) == prod(shape)
