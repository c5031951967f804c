from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megalith.config.model import DropoutConfig, MLAConfig
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.attention.scores import Scores
from megalith.kernels.dropout import DropoutKey, dropout
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_lengths, seq_params_from_rows
from megalith.nn.build import build_context
from megalith.nn.dropout import AttentionWithDropout, Dropout, build_core_attention, build_dropout
from megalith.parallel.group import Group
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.parallel.tensor import SequenceParallelComm, TensorParallelComm, TPComm
from megalith.plan.keys import key
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tiny import tiny_run

NUMBERS = torch.arange(700, 712)
X = torch.rand(12, 16, generator=torch.Generator().manual_seed(0)) + 1


def tokens(*, seed: int | None = 5) -> LayerInputs:
    layer_inputs = LayerInputs(seq_params_from_rows(2, 6))
    return (
        layer_inputs
        if seed is None
        else replace(layer_inputs, dropout_key=DropoutKey(seed, NUMBERS))
    )


def made(
    p: float = 0.5, *, place: str = "attention", layer: int = 2, tp_comm: TPComm | None = None
) -> Dropout:
    context = build_context(tiny_run().model, build_single_rank_mesh(), tp_comm=tp_comm)
    return Dropout(place, layer, p, context)


def test_dropout_is_keyed_by_seed_site_layer_and_token_number() -> None:
    expected = dropout(X, 0.5, key(5, "dropout", "attention", 2), NUMBERS)
    assert torch.equal(made()(X, tokens()), expected)
    others = [made(place="mlp")(X, tokens()), made(layer=3)(X, tokens()), made()(X, tokens(seed=6))]
    assert all(not torch.equal(other, expected) for other in others)


def test_dropout_is_the_identity_outside_training() -> None:
    assert made()(X, tokens(seed=None)) is X
    assert made(0.0)(X, tokens()) is X


def _on_a_rank(rank: int, world: int, sp: bool) -> Tensor:
    group: Group = world_group(rank, world, "tp")
    tp_comm = SequenceParallelComm(group) if sp else TensorParallelComm(group)
    local: Tensor = made(tp_comm=tp_comm)(tp_comm.select_local(X), tokens())
    return local


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallel_masks_match_one_rank(tp: int, sp: bool) -> None:
    result, expected = run_ranks(_on_a_rank, tp, sp), made()(X, tokens())
    if sp:
        assert torch.equal(torch.cat(result), expected)
    else:
        assert all(torch.equal(each, expected) for each in result)


def test_zero_probability_builds_no_dropout() -> None:
    context = build_context(tiny_run().model, build_single_rank_mesh())
    assert build_dropout("mlp", 0, 0.0, context) == []
    (step,) = build_dropout("mlp", 2, 0.5, context)
    assert torch.equal(step(X, tokens()), made(place="mlp")(X, tokens()))


@pytest.mark.slow
def test_torch_compile_treats_the_key_as_a_constant() -> None:
    compiled = torch.compile(made(), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X, tokens()), made()(X, tokens()))


# --- attention's weights

DOCUMENTS = seq_params_from_lengths([5, 4])
KEY = DropoutKey(5, torch.arange(300, 309))


def queries(heads: int, *, seed: int) -> Tensor:
    return torch.randn(
        9, heads, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


Q, K, V = queries(6, seed=0), queries(3, seed=1), queries(3, seed=2)


def test_weights_are_dropped_after_softmax_and_the_rest_divided() -> None:
    scores, sinks, result = Scores(softcap=2.0), torch.ones(6).double(), set()
    for token in range(9):  # values that show what weight each query gives to this token
        v = torch.zeros_like(V)
        v[token] = 1.0
        dropped = AttentionWithDropout(attention, 2, 0.4, 0)(
            Q, K, v, DOCUMENTS, scores=scores, sinks=sinks, dropout_key=KEY
        )
        weights = attention(Q, K, v, DOCUMENTS, scores=scores, sinks=sinks)
        result |= set((dropped / weights)[weights != 0].mul(1e6).round().int().tolist())
    assert result == {0, round(1e6 / 0.6)}


def test_tensor_parallel_attention_dropout_matches_one_rank() -> None:
    whole = AttentionWithDropout(attention, 2, 0.4, 0)(Q, K, V, DOCUMENTS, dropout_key=KEY)
    part = AttentionWithDropout(attention, 2, 0.4, 2)(
        Q[:, 2:], K[:, 1:], V[:, 1:], DOCUMENTS, dropout_key=KEY
    )
    torch.testing.assert_close(part, whole[:, 2:])
    other_layer = AttentionWithDropout(attention, 3, 0.4, 0)(Q, K, V, DOCUMENTS, dropout_key=KEY)
    assert not torch.equal(other_layer, whole)


def test_attention_dropout_is_off_outside_training() -> None:
    assert torch.equal(
        AttentionWithDropout(attention, 2, 0.4, 0)(Q, K, V, DOCUMENTS),
        attention(Q, K, V, DOCUMENTS),
    )


@pytest.mark.parametrize("latent", [False, True])
def test_attention_is_wrapped_only_with_dropout(latent: bool, layers: SimpleNamespace) -> None:
    config = layers.config(num_kv_heads=6, mla=MLAConfig(kv_rank=4) if latent else None)
    context = build_context(config, layers.paper(config, 2, 1)).at_layer(2)
    assert build_core_attention(config, context) is attention
    config = replace(config, dropout=DropoutConfig(attention=0.1))
    core = build_core_attention(config, context)
    assert core == AttentionWithDropout(attention, 2, 0.1, first_head=3)
