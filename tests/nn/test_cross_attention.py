"""Cross-attention matches T5, BART and Whisper, and parallel ranks match one rank."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import spmd_types as checker
import torch
from spmd_types import I, V
from spmd_types.checker import typecheck
from torch import Tensor

from megalith.config.model import AttentionConfig, DropoutConfig, ModelConfig, MuPConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import DataError
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import (
    seq_params_from_lengths,
    seq_params_from_queries,
    seq_params_from_slices,
    with_masks,
    with_padding,
)
from megalith.models.decoder import allocate, iter_parameter_specs
from megalith.nn.attention import CrossAttention, CrossLayerAttention, across
from megalith.nn.build import build_context, init_param_
from megalith.parallel.collectives import all_gather
from megalith.parallel.mesh import Mesh, build_mesh, build_meta_mesh, build_single_rank_mesh
from megalith.parallel.tensor import Init
from megalith.plan.context import Slicing, plan_slices
from megalith.plan.grid import model_grid
from megalith.plan.shards import DENSE_AXES
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, assert_equals
from megalith.verify.type_rules import find_types, installed_rules
from megalith.verify.types import declare, mesh_axes

TEXTS, MEMORIES = (
    LayerInputs(seq_params_from_lengths([5, 1, 6])),
    LayerInputs(seq_params_from_lengths([3, 7, 2])),
)
MEMORY_SIZE = 10


def build(
    config: ModelConfig, mesh: Mesh, *, sp: bool = False, dropout: float = 0.0
) -> CrossAttention:
    """In float64 with random weights and biases, the same under every layout."""
    config = replace(config, dropout=DropoutConfig(attention=dropout))
    context = build_context(config, mesh, ParallelConfig(sp=sp), dtype=torch.float64)
    layer = CrossAttention("layers.0.cross", config, context, memory_size=MEMORY_SIZE)
    allocate(layer, torch.device("cpu"))
    for declared, module, name in iter_parameter_specs(layer):
        init_param_(getattr(module, name), declared.shard, Init(0.3, offset=0.1), seed=2)
    return layer


def inputs() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return (
        torch.randn(12, 18, generator=draw, dtype=torch.float64),
        torch.randn(12, MEMORY_SIZE, generator=draw, dtype=torch.float64),
    )


def trained(tokens: LayerInputs, first: int) -> LayerInputs:
    return replace(
        tokens, dropout_key=DropoutKey(3, torch.arange(first, first + tokens.seq_params.num_tokens))
    )


def test_attention_matches_the_formula_of_the_paper(layers: SimpleNamespace) -> None:
    config = layers.config(head_dim=4, attention=AttentionConfig(scale=0.7, softcap=2.0))
    layer = build(config, build_single_rank_mesh())
    w = {
        d.shard.name[15:]: getattr(m, a).detach().view(d.shard.shape)
        for d, m, a in iter_parameter_specs(layer)
    }
    x, memory = inputs()
    q = torch.einsum("th,ndh->tnd", x, w["q"]) + w["q_bias"]
    k, v = torch.einsum("tm,cgdm->ctgd", memory, w["kv"]) + w["kv_bias"][:, None]
    heads = torch.zeros(12, 6, 4, dtype=torch.float64)
    texts, memories = (one.seq_params.document_ids for one in (TEXTS, MEMORIES))
    for t in range(12):
        seen = [s for s in range(12) if memories[s] == texts[t]]
        for n in range(6):
            scores = torch.stack(
                [2.0 * torch.tanh(0.7 * (q[t, n] @ k[s, n // 2]) / 2.0) for s in seen]
            )
            heads[t, n] = scores.softmax(0) @ v[seen, n // 2]
    expected = torch.einsum("tnd,hnd->th", heads, w["o"]) + w["o_bias"]
    assert_equals("cross attention", layer(x, TEXTS, memory, MEMORIES), expected, FP64)


def _on_ranks(
    rank: int, world: int, config: ModelConfig, sp: bool, dropout: float
) -> dict[str, Tensor]:
    """Output, gradients of x and of the memory, and my boxes of the weights' among zeros."""
    mesh = (
        build_mesh(model_grid(ParallelConfig(tp=world), config, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    layer = build(config, mesh, sp=sp, dropout=dropout)
    x, memory = (tensor.requires_grad_() for tensor in inputs())
    local, mine_of_memory = (layer.queries.tp_comm.select_local(tensor) for tensor in (x, memory))
    texts, memories = trained(TEXTS, 100), trained(MEMORIES, 7000)
    y = layer(local, texts, mine_of_memory, memories)
    weights = torch.linspace(-1, 2, 12 * 18, dtype=torch.float64).view(12, 18)
    (y * layer.queries.tp_comm.select_local(weights)).sum().backward()
    assert x.grad is not None and memory.grad is not None
    result = {
        "y": all_gather(y.detach(), mesh.tp) if sp else y.detach(),
        "x": x.grad,
        "memory": memory.grad,
    }
    for declared, module, name in iter_parameter_specs(layer):
        box = tuple(slice(start, stop) for start, stop in declared.shard.box)
        result[declared.shard.name] = torch.zeros(declared.shard.shape, dtype=torch.float64)
        result[declared.shard.name][box] = getattr(module, name).grad.view(declared.shard.box_shape)
    return result


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    ("tp", "kv_heads", "sp"), [(2, 3, False), (2, 3, True), (3, 6, True), (4, 2, False)]
)
def test_tensor_parallel_matches_one_rank(
    tp: int, kv_heads: int, sp: bool, dropout: float, layers: SimpleNamespace
) -> None:
    config = layers.config(num_kv_heads=kv_heads)
    (expected,) = [_on_ranks(0, 1, config, False, dropout)]
    parts = run_ranks(_on_ranks, tp, config, sp, dropout)
    for name, value in expected.items():
        each = [part[name] for part in parts]
        summed = name.startswith("layers") and (not name.endswith("o_bias") or sp)
        tokens = name in ("x", "memory") and sp  # each rank has the gradient of its own tokens
        assert_equals(name, sum(each) if summed or tokens else each[0], value, FP64)  # type: ignore[arg-type]


def test_attention_dropout_depends_on_both_token_numbers(layers: SimpleNamespace) -> None:
    layer, (x, memory) = build(layers.config(), build_single_rank_mesh(), dropout=0.4), inputs()
    outs = [
        layer(x, trained(TEXTS, 100), memory, trained(MEMORIES, first))
        for first in (7000, 7000, 8000)
    ]
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], layer(x, TEXTS, memory, MEMORIES))


def test_packed_documents_attend_to_their_own_encoder_states(
    layers: SimpleNamespace,
) -> None:
    layer, (x, memory) = build(layers.config(output_bias=False), build_single_rank_mesh()), inputs()
    packed = layer(x, TEXTS, memory, MEMORIES)
    for text, own in (
        (slice(0, 5), slice(0, 3)),
        (slice(5, 6), slice(3, 10)),
        (slice(6, 12), slice(10, 12)),
    ):
        count, keys = text.stop - text.start, own.stop - own.start
        alone = layer(
            x[text],
            LayerInputs(seq_params_from_lengths([count])),
            memory[own],
            LayerInputs(seq_params_from_lengths([keys])),
        )
        assert_equals("alone", packed[text], alone, FP64)
    assert not layer(
        x[:2],
        LayerInputs(seq_params_from_lengths([2])),
        memory[:0],
        LayerInputs(seq_params_from_lengths([0])),
    ).any()


def test_encoder_padding_and_attention_masks_hide_keys(layers: SimpleNamespace) -> None:
    layer, (x, memory) = build(layers.config(output_bias=False), build_single_rank_mesh()), inputs()
    # nothing of the third document is left
    text = torch.tensor([1, 0, 1, 1, 1, 0, 1, 1, 0, 1, 0, 0]).bool()
    # which says nothing of a memory
    for_itself = LayerInputs(with_masks(TEXTS.seq_params, [torch.eye(n).bool() for n in (5, 1, 6)]))
    masks_of_keys = [torch.eye(n).bool() for n in (3, 7, 2)]
    hidden = LayerInputs(with_masks(with_padding(MEMORIES.seq_params, text), masks_of_keys))
    result = layer(x, for_itself, memory, hidden)
    left = LayerInputs(seq_params_from_lengths([2, 5, 0]))
    assert_equals("padding", result, layer(x, TEXTS, memory[text], left), FP64)
    assert not result[6:].any(), "what sees nothing finds 0"
    assert torch.equal(
        result, layer(x, TEXTS, torch.where(text[:, None], memory, memory + 1), hidden)
    )
    masks = [torch.zeros(5, 3).bool(), None, torch.tensor([[True, False]] * 6)]
    masks[0][:, 2] = True
    padded = LayerInputs(with_padding(MEMORIES.seq_params, torch.arange(12) != 4))
    alone = layer(x, TEXTS, memory, padded, masks)
    both = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0]).bool()
    assert_equals(
        "masks",
        alone,
        layer(x, TEXTS, memory[both], LayerInputs(seq_params_from_lengths([1, 6, 1]))),
        FP64,
    )
    kept = layer.encode_keys(memory, MEMORIES)
    assert torch.equal(
        layer.attend_encoded(x, TEXTS, kept, masks), layer(x, TEXTS, memory, MEMORIES, masks)
    )
    with pytest.raises(
        DataError, match=r"masks\[0\] has the shape \[5, 5\]: document 0 requires \[5, 3\]"
    ):
        layer(x, TEXTS, memory, MEMORIES, [torch.eye(5).bool(), None, None])


def test_cross_layer_attention_uses_attention_masks(layers: SimpleNamespace) -> None:
    layer = layers.build(CrossLayerAttention, layers.config())
    layer.scores = replace(layer.scores, causal=True)
    x, memory = layers.inputs(12), layers.inputs(12).flip(0)
    mask = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) < 0.5
    tokens = LayerInputs(with_masks(seq_params_from_lengths([12]), [mask]), encoder_hidden=memory)
    other = replace(tokens, encoder_hidden=memory.index_fill(0, torch.tensor([3]), 1.0))
    unlike = (layer(x, tokens) != layer(x, other)).any(1)
    assert torch.equal(unlike, mask.tril()[:, 3]) and unlike.any()


def test_mup_scale_equals_that_of_self_attention(
    layers: SimpleNamespace,
) -> None:
    config = layers.config(head_dim=4, mup=MuPConfig(base_hidden_size=6, base_head_dim=3))
    assert (
        build(config, build_single_rank_mesh()).scores.scale == config.softmax_scale() == 3**0.5 / 4
    )


def test_encoder_keys_are_computed_once_for_decoding(layers: SimpleNamespace) -> None:
    layer, (x, memory) = build(layers.config(), build_single_rank_mesh()), inputs()
    kept = layer.encode_keys(memory, MEMORIES)
    read = [0, 0, 0]
    whole, starts = layer(x, TEXTS, memory, MEMORIES), [0, 5, 6]
    for step in ([2, 1, 3], [3, 0, 1], [0, 0, 2]):
        rows = [
            start + before + n
            for start, before, count in zip(starts, read, step)
            for n in range(count)
        ]
        read = [before + count for before, count in zip(read, step)]
        # as read on with a cache
        result = layer.attend_encoded(
            x[rows], LayerInputs(seq_params_from_queries(list(zip(step, read)))), kept
        )
        assert_equals("look", result, whole[rows], FP64)


@pytest.mark.parametrize("sp", [False, True])
def test_cross_attention_type_checks(sp: bool, layers: SimpleNamespace) -> None:
    """Without sp x and the memory are I, with sp V; what comes out is the same, and the gradient
    reaches both."""
    config = layers.config(num_kv_heads=2)
    grid = model_grid(ParallelConfig(tp=4, dp=2), config, 8)
    mesh = build_meta_mesh(grid, rank=1)
    context = build_context(config, mesh, ParallelConfig(sp=sp))
    layer = CrossAttention("layers.0.cross", config, context)
    wanted: dict[str, Any] = {axis: V if axis.startswith("dp") or sp else I for axis in DENSE_AXES}
    axes, texts, memories = (
        mesh_axes(grid),
        *(LayerInputs(seq_params_from_lengths(list(n), device="meta")) for n in ((5, 7), (6, 6))),
    )
    tensors = [
        torch.empty(12 // (4 if sp else 1), 18, device="meta", requires_grad=True) for _ in range(2)
    ]
    with (
        installed_rules(Counter()),
        checker.traceback_filtering("off"),
        typecheck(),
        checker.set_current_mesh(axes),
    ):
        declare(layer, grid)
        for x in tensors:
            checker.assert_type(x, {place: wanted[axis] for axis, place in axes.items()})
        y = layer(tensors[0], texts, tensors[1], memories)
        assert find_types(y) == {axis: wanted[axis] for axis in find_types(y)}
        y.sum().backward(torch.empty((), device="meta"))
    assert all(x.grad is not None for x in tensors)


def _given(layer: CrossAttention, values: dict[str, Tensor]) -> CrossAttention:
    """The layer with weights from elsewhere, by the last parts of their names; what is not named is
    zero."""
    with torch.no_grad():
        for declared, module, name in iter_parameter_specs(layer):
            parameter = getattr(module, name)
            value = values.get(
                declared.shard.name.removeprefix("cross."), torch.zeros_like(parameter)
            )
            parameter.copy_(value.reshape(parameter.shape))
    return layer


def _plain(config: ModelConfig) -> CrossAttention:
    layer = CrossAttention("cross", config, build_context(config, build_single_rank_mesh()))
    allocate(layer, torch.device("cpu"))
    return layer


def _rows(b: int, s: int, seed: int) -> Tensor:
    return torch.randn(b, s, 18, generator=torch.Generator().manual_seed(seed))


def test_cross_attention_matches_t5(layers: SimpleNamespace) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    reference = t5.T5Attention(
        t5.T5Config(d_model=18, d_kv=4, num_heads=6, is_decoder=True, dropout_rate=0.0)
    ).eval()
    w = {name: getattr(reference, name).weight.detach() for name in "qkvo"}
    config = layers.config(
        num_kv_heads=6, attention=AttentionConfig(scale=1.0), qkv_bias=False, output_bias=False
    )
    layer = _given(_plain(config), {"q": w["q"], "kv": torch.stack([w["k"], w["v"]]), "o": w["o"]})
    x, memory = _rows(2, 5, 0), _rows(2, 7, 1)
    expected = reference(x, key_value_states=memory, mask=torch.zeros(2, 1, 5, 7))[0]
    result = layer(
        x.flatten(0, 1),
        LayerInputs(seq_params_from_lengths([5, 5])),
        memory.flatten(0, 1),
        LayerInputs(seq_params_from_lengths([7, 7])),
    )
    assert (result.view(expected.shape) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_cross_attention_matches_bart_and_whisper(family: str, layers: SimpleNamespace) -> None:
    """Whisper's keys have no bias."""
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    kind, settings = {
        "bart": ("Bart", transformers.BartConfig),
        "whisper": ("Whisper", transformers.WhisperConfig),
    }[family]
    config = settings(d_model=18, decoder_attention_heads=6, attn_implementation="eager")
    reference = getattr(module, f"{kind}Attention")(
        18, 6, is_decoder=True, config=config, layer_idx=0
    ).eval()
    generator = torch.Generator().manual_seed(5)
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.4, generator=generator)
    q, k, v, o = (getattr(reference, f"{name}_proj") for name in ("q", "k", "v", "out"))
    zero = torch.zeros(18)
    values = {
        "q": q.weight,
        "kv": torch.stack([k.weight, v.weight]),
        "o": o.weight,
        "q_bias": q.bias,
        "o_bias": o.bias,
        "kv_bias": torch.stack([zero if k.bias is None else k.bias, v.bias]),
    }
    layer = _given(_plain(layers.config(num_kv_heads=6, head_dim=3)), values)
    x, memory = _rows(2, 5, 0), _rows(2, 7, 1)
    expected = reference(x, key_value_states=memory)[0]
    result = layer(
        x.flatten(0, 1),
        LayerInputs(seq_params_from_lengths([5, 5])),
        memory.flatten(0, 1),
        LayerInputs(seq_params_from_lengths([7, 7])),
    )
    assert (result.view(expected.shape) - expected).abs().max() < 1e-5


def test_cross_layer_attention_is_causal_inside_documents(
    layers: SimpleNamespace,
) -> None:
    config = layers.config(attention=AttentionConfig(softcap=2.0))
    layer = layers.build(CrossLayerAttention, config)
    layer.scores = replace(layer.scores, causal=True)
    x, memory = layers.inputs(12), layers.inputs(12).flip(0)
    plain = layer(x, replace(TEXTS, encoder_hidden=memory))
    for changed, same in (
        (5, 5),
        (6, 6),
        (11, 11),
    ):
        # the second document, and the first and last token of the third
        other = memory.clone()
        other[changed:] += 1.0
        result = layer(x, replace(TEXTS, encoder_hidden=other))
        assert_equals("before", result[:same], plain[:same], FP64)
        assert not torch.isclose(result[changed], plain[changed]).any()
    first = layer(x, replace(TEXTS, encoder_hidden=torch.cat([memory[:5] + 1.0, memory[5:]])))
    assert_equals("after the first document", first[5:], plain[5:], FP64)


def test_unmasked_cross_layer_attention_matches_cross_attention(
    layers: SimpleNamespace,
) -> None:
    config = layers.config(attention=AttentionConfig(causal=False))
    both = layers.build(CrossLayerAttention, config), layers.build(CrossAttention, config)
    x, memory = layers.inputs(12), layers.inputs(12).flip(0)
    assert_equals(
        "look",
        both[0](x, replace(TEXTS, encoder_hidden=memory)),
        both[1](x, TEXTS, memory, TEXTS),
        FP64,
    )


def test_cross_attention_to_other_tokens_rejects_context_parallelism(
    layers: SimpleNamespace,
) -> None:
    slicing = Slicing(ranks=2, rank=0)
    shared = LayerInputs(seq_params_from_slices(plan_slices([8], row=8, slicing=slicing), slicing))
    with pytest.raises(AssertionError, match="does not support context parallelism"):
        across(shared, shared)
