"""RoPE of a model: tables of each layer, and scores that depend on distances only."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.config.model import AttentionConfig, ModelConfig, RopeConfig
from megalith.errors import DataError
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import (
    seq_params_from_lengths,
    seq_params_from_queries,
    with_multimodal_positions,
)
from megalith.kernels.rope import rope_frequencies, rope_tables
from megalith.nn import rope as rotations
from megalith.nn.build import build_context
from megalith.nn.rope import (
    ApplyRope,
    LayerRope,
    RotaryEmbedding,
    build_apply_rope,
    build_attention_temperature,
    no_rope,
)
from megalith.parallel.mesh import build_single_rank_mesh


def config(**changes: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=8,
        hidden_size=24,
        num_layers=4,
        num_heads=3,
        num_kv_heads=3,
        ffn_hidden_size=8,
        **changes,
    )


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def apply_rope_of(model: ModelConfig, layer: int = 0) -> ApplyRope:
    return build_apply_rope(model, build_context(model, build_single_rank_mesh()).at_layer(layer))


def test_layers_use_their_own_rope_tables() -> None:
    local = RopeConfig(
        local_theta=50.0, scaling="linear", factor=4.0, skip=(False, False, False, True)
    )
    model = config(rope=local, attention=AttentionConfig(window=3, window_layers=(True, False)))
    assert [apply_rope_of(model, layer) for layer in range(4)] == [
        LayerRope(2, False),
        LayerRope(0, False),
        LayerRope(2, False),
        no_rope,
    ]
    tokens = RotaryEmbedding(model, torch.float64).add_to(
        LayerInputs(seq_params_from_lengths([5, 2]))
    )
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    assert len(tokens.rope) == 4
    everywhere = rope_tables(
        positions, rope_frequencies(RopeConfig(scaling="linear", factor=4.0), 8), torch.float64
    )
    windowed = rope_tables(positions, rope_frequencies(RopeConfig(theta=50.0), 8), torch.float64)
    assert all(
        torch.equal(a, b) for a, b in zip(tokens.rope, (*everywhere, *windowed), strict=True)
    )


def test_a_model_without_rotary_positions_has_no_tables() -> None:
    model = config(positions="learned")
    assert (
        RotaryEmbedding(model, torch.float64).add_to(LayerInputs(seq_params_from_lengths([3]))).rope
        == ()
    )
    assert apply_rope_of(model) is no_rope


@pytest.mark.parametrize(
    "rope", [RopeConfig(), RopeConfig(interleaved=True), RopeConfig(fraction=0.5)]
)
def test_scores_depend_on_distances_alone(rope: RopeConfig) -> None:
    model = config(rope=rope)
    q, k, turn = seeded(6, 3, 8), seeded(6, 3, 8, seed=1), apply_rope_of(model)
    whole = RotaryEmbedding(model, torch.float64).add_to(LayerInputs(seq_params_from_lengths([13])))
    results = []
    for first in (0, 7):
        cos, sin = (table[first : first + 6] for table in whole.rope)
        tokens = LayerInputs(seq_params_from_lengths([6]), rope=(cos, sin))
        results.append(torch.einsum("qnd,knd->nqk", turn(q, tokens), turn(k, tokens)))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-5)  # angles are fp32


def test_dynamic_scaling_starts_beyond_the_original_length() -> None:
    model = config(rope=RopeConfig(scaling="dynamic", factor=2.0, original_max_position=8))
    plain = config(rope=RopeConfig())
    for length, same in ((8, True), (9, False)):
        ours, reference = (
            RotaryEmbedding(m, torch.float64).add_to(LayerInputs(seq_params_from_lengths([length])))
            for m in (model, plain)
        )
        assert torch.equal(ours.rope[0], reference.rope[0]) == same


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_length_dependent_scaling_uses_each_documents_length(
    scaling: Any,
) -> None:
    factors: dict[str, Any] = {
        "short_factors": (1.0, 1.5, 2.0, 3.0),
        "long_factors": (1.0, 2.0, 4.0, 8.0),
    }
    rope = RopeConfig(
        scaling=scaling,
        factor=2.0,
        original_max_position=8,
        **factors if scaling == "longrope" else {},
    )
    together = RotaryEmbedding(config(rope=rope), torch.float64).add_to(
        LayerInputs(seq_params_from_lengths([11, 5]))
    )
    apart = [
        RotaryEmbedding(config(rope=rope), torch.float64).add_to(
            LayerInputs(seq_params_from_lengths([length]))
        )
        for length in (11, 5)
    ]
    for table, first, second in zip(together.rope, *(tokens.rope for tokens in apart), strict=True):
        assert torch.equal(table, torch.cat([first, second]))
        assert not torch.equal(first[:5], second)  # turns by other angles


def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions each table that is made from now on has."""
    results: list[int] = []

    def noted(positions: Tensor, *others: Any, **more: Any) -> tuple[Tensor, Tensor]:
        results.append(positions.shape[-1])
        return rope_tables(positions, *others, **more)

    monkeypatch.setattr(rotations, "rope_tables", noted)
    return results


def test_tables_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, model = made(monkeypatch), RotaryEmbedding(config(), torch.float64)
    frequencies = rope_frequencies(RopeConfig(), 8)
    for documents in ([7], [5, 2], [7], [1] * 20):
        tokens = LayerInputs(seq_params_from_lengths(documents))
        expected = rope_tables(tokens.seq_params.position_ids, frequencies, torch.float64)
        assert all(map(torch.equal, model.add_to(tokens).rope, expected))
    assert lengths == [7]
    assert model.add_to(model.add_to(tokens)).rope[0] is not None and lengths == [7]
    for length in range(8, 40):  # as when it writes on, token by token
        tokens = model.add_to(LayerInputs(seq_params_from_queries([(1, length)])))
        assert torch.equal(
            tokens.rope[0], rope_tables(torch.tensor([length - 1]), frequencies, torch.float64)[0]
        )
    assert lengths == [7, 14, 28, 56]


def test_table_cache_stays_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = made(monkeypatch)
    model = RotaryEmbedding(
        config(rope=RopeConfig(scaling="dynamic", original_max_position=4)), torch.float64
    )
    for length in (3, 9, 10, 3, 11, 4, 11):
        model.add_to(LayerInputs(seq_params_from_lengths([length])))
    assert lengths == [3, 9, 10, 11, 6]  # the last is of documents of 4, twice as far as those of 3
    assert len(model._made) == 2


def test_equal_multimodal_positions_match_text_positions() -> None:
    rope = RopeConfig(sections=(1, 2, 1))
    text = seq_params_from_lengths([5, 2])
    three = with_multimodal_positions(text, np.stack([text.position_ids.numpy()] * 3))
    assert three.num_tokens == 7
    plain = RotaryEmbedding(config(), torch.float64).add_to(LayerInputs(text)).rope
    for tokens in (text, three):
        result = RotaryEmbedding(config(rope=rope), torch.float64).add_to(LayerInputs(tokens))
        assert all(
            torch.equal(actual, reference)
            for actual, reference in zip(result.rope, plain, strict=True)
        )


def test_each_section_uses_its_own_position() -> None:
    places = torch.randint(0, 50, (3, 6), generator=torch.Generator().manual_seed(0))
    model = config(rope=RopeConfig(sections=(1, 2, 1), interleaved=True))
    tokens = with_multimodal_positions(seq_params_from_lengths([4, 2]), places.numpy())
    cos, sin = RotaryEmbedding(model, torch.float64).add_to(LayerInputs(tokens)).rope
    frequencies = rope_frequencies(RopeConfig(), 8)
    for pair, axis in enumerate([0, 1, 1, 2]):
        angles = places[axis] * frequencies[pair]
        assert torch.equal(cos[:, pair], angles.cos().double()) and torch.equal(
            sin[:, pair], angles.sin().double()
        )


@pytest.mark.parametrize("changes", [{}, {"positions": "learned"}])
def test_multimodal_positions_are_rejected_by_a_text_model(changes: dict[str, Any]) -> None:
    tokens = with_multimodal_positions(
        seq_params_from_lengths([4]), np.zeros((3, 4), dtype=np.int64)
    )
    with pytest.raises(
        DataError,
        match=r"model.rope.sections=\[\], but tokens have 3 position ids each. Set model.rope",
    ):
        RotaryEmbedding(config(**changes), torch.float64).add_to(LayerInputs(tokens))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_attention_temperature_grows_in_steps_within_each_document(
    dtype: torch.dtype,
) -> None:
    model = config(rope=RopeConfig(skip=(False, True), skip_growth=0.5, skip_step=3))
    assert [build_attention_temperature(model, layer) is no_rope for layer in range(4)] == [
        True,
        False,
        True,
        False,
    ]
    q = seeded(9, 3, 8).to(dtype)
    expected = [1 + 0.5 * np.log(1 + (place + 1) // 3) for place in (0, 1, 2, 3, 4, 5, 6, 0, 1)]
    result = build_attention_temperature(model, 1)(q, LayerInputs(seq_params_from_lengths([7, 2])))
    wide = (q.double() * torch.tensor(expected).view(-1, 1, 1)).to(dtype)
    torch.testing.assert_close(result, wide)
    from_a_cache = build_attention_temperature(model, 1)(
        q[:2], LayerInputs(seq_params_from_queries([(2, 7)]))
    )
    torch.testing.assert_close(
        from_a_cache, (q[:2].double() * torch.tensor(expected[5:7]).view(-1, 1, 1)).to(dtype)
    )
    places = LayerInputs(
        with_multimodal_positions(seq_params_from_lengths([2]), np.array([[5, 6], [0, 0], [0, 1]]))
    )
    torch.testing.assert_close(build_attention_temperature(model, 1)(q[:2], places), from_a_cache)
