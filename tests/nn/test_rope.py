"""Rotations of a model: which tables a layer turns by, and that scores see only distances."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.attention import AttentionConfig
from megalith.config.model import ModelConfig
from megalith.config.rope import RopeConfig
from megalith.kernels.rope import rope_frequencies, rope_tables
from megalith.kernels.tokens import tokens_of_lengths
from megalith.nn.rope import Rotations, Turned, turn_of_layer, unturned


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=8, hidden_size=24, num_layers=4, num_heads=3, num_kv_heads=3, ffn_hidden_size=8, **changes
    )


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_layers_turn_by_their_own_pair_of_tables() -> None:
    local = RopeConfig(local_theta=50.0, scaling="linear", factor=4.0, skip=(False, False, False, True))
    model = config(rope=local, attention=AttentionConfig(window=3, window_layers=(True, False)))
    assert [turn_of_layer(model, layer) for layer in range(4)] == [
        Turned(2, False), Turned(0, False), Turned(2, False), unturned,
    ]  # fmt: skip
    tokens = Rotations(model, torch.float64).given_to(tokens_of_lengths([5, 2]))
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    assert len(tokens.rotary) == 4
    everywhere = rope_tables(positions, rope_frequencies(RopeConfig(scaling="linear", factor=4.0), 8), torch.float64)
    windowed = rope_tables(positions, rope_frequencies(RopeConfig(theta=50.0), 8), torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(tokens.rotary, (*everywhere, *windowed), strict=True))


def test_a_model_without_rotary_positions_has_no_tables() -> None:
    model = config(positions="learned")
    assert Rotations(model, torch.float64).given_to(tokens_of_lengths([3])).rotary == ()
    assert turn_of_layer(model, 0) is unturned


@pytest.mark.parametrize("rope", [RopeConfig(), RopeConfig(interleaved=True), RopeConfig(fraction=0.5)])
def test_scores_depend_on_distances_alone(rope: RopeConfig) -> None:
    model = config(rope=rope)
    q, k, turn = seeded(6, 3, 8), seeded(6, 3, 8, seed=1), turn_of_layer(model, 0)
    whole = Rotations(model, torch.float64).given_to(tokens_of_lengths([13]))
    found = []
    for first in (0, 7):
        cos, sin = (table[first : first + 6] for table in whole.rotary)
        tokens = tokens_of_lengths([6])
        object.__setattr__(tokens, "rotary", (cos, sin))
        found.append(torch.einsum("qnd,knd->nqk", turn(q, tokens), turn(k, tokens)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)  # angles are fp32


def test_dynamic_scaling_begins_behind_the_first_training() -> None:
    model = config(rope=RopeConfig(scaling="dynamic", factor=2.0, original_max_position=8))
    plain = config(rope=RopeConfig())
    for length, same in ((8, True), (9, False)):
        ours, theirs = (Rotations(m, torch.float64).given_to(tokens_of_lengths([length])) for m in (model, plain))
        assert torch.equal(ours.rotary[0], theirs.rotary[0]) == same


def test_dynamic_scaling_looks_at_each_document_and_not_at_its_neighbours() -> None:
    model = config(rope=RopeConfig(scaling="dynamic", factor=2.0, original_max_position=8))
    together = Rotations(model, torch.float64).given_to(tokens_of_lengths([11, 5]))
    apart = [Rotations(model, torch.float64).given_to(tokens_of_lengths([length])) for length in (11, 5)]
    for table, first, second in zip(together.rotary, *(tokens.rotary for tokens in apart), strict=True):
        assert torch.equal(table, torch.cat([first, second]))
