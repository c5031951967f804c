import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig, MTPConfig
from megalith.config.parallel import OffloadConfig, ParallelConfig, PipelineConfig, RecomputeConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import (
    Decoder,
    allocate,
    build_chunks,
    initialize,
    iter_parameter_specs,
)
from megalith.nn.build import build_context
from megalith.nn.layer import MTPLayer
from megalith.nn.rope import RotaryEmbedding
from megalith.parallel.mesh import build_meta_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.packing import shift_tokens_within_documents
from megalith.testing.tolerance import EXACT, FP64, PARITY, assert_close, assert_equals
from megalith.train.objective import complete, mtp_acceptance_rate, sum_lm_losses

SIZES: dict[str, Any] = {
    "vocab_size": 37,
    "pad_vocab_to_multiple_of": 4,
    "hidden_size": 12,
    "num_layers": 2,
    "num_heads": 3,
    "num_kv_heads": 3,
    "ffn_hidden_size": 10,
    "max_seq_len": 32,
    "init_std": 0.3,
}
LENGTHS = [5, 1, 3]


def config(depths: int = 2, **changes: Any) -> ModelConfig:
    return ModelConfig(**SIZES, mtp=MTPConfig(num_layers=depths), **changes)


def model(config: ModelConfig, dtype: torch.dtype = torch.float64, **options: Any) -> Decoder:
    """Random weights; norms are not one."""
    decoder = Decoder(build_context(config, build_single_rank_mesh(), dtype=dtype, **options))
    allocate(decoder, torch.device("cpu"))
    initialize(decoder, seed=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(
                    torch.rand(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
                )
    return decoder


def text() -> tuple[Tensor, Tensor, LayerInputs]:
    """Ids and labels of three documents; the last token of each has no label."""
    ids = torch.randint(0, 37, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1)
    labels[torch.tensor(LENGTHS).cumsum(0) - 1] = -1
    return ids, labels, LayerInputs(seq_params_from_lengths(LENGTHS))


def mtp_inputs(ids: Tensor, labels: Tensor, depths: int) -> tuple[tuple[Tensor, Tensor], ...]:
    """What the loader hands to each depth."""
    pairs = []
    for depth in range(1, depths + 1):
        source = torch.from_numpy(shift_tokens_within_documents(LENGTHS, depth))
        pairs.append(
            (torch.where(source >= 0, ids[source], 0), torch.where(source >= 0, labels[source], -1))
        )
    return tuple(pairs)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def test_mtp_depth_matches_the_formula_of_the_paper() -> None:
    built, (ids, labels, tokens) = model(config()), text()
    built.layers = torch.nn.ModuleList()  # what the depths read is then known
    hidden = built.hidden_states(ids, tokens)
    losses = sum_lm_losses(
        built.outputs(ids, tokens, mtp_inputs=mtp_inputs(ids, labels, 2)),
        labels,
        mtp_inputs(ids, labels, 2),
    )
    turned = built.rotations.add_to(tokens)
    x = hidden
    for depth, ((their_ids, their_labels), result) in enumerate(
        zip(mtp_inputs(ids, labels, 2), losses[1:], strict=True)
    ):
        layer = built.mtp.layers[depth]
        assert isinstance(layer, MTPLayer)
        w = {d.shard.name: getattr(module, name) for d, module, name in iter_parameter_specs(layer)}
        name = f"mtp.{depth}"
        halves = [
            normed(built.embed.weight[their_ids], w[f"{name}.embed_norm.weight"]),
            normed(x, w[f"{name}.hidden_norm.weight"]),
        ]
        u = torch.cat(halves, -1) @ w[f"{name}.project"].T
        x = normed(layer.layer(u, turned), w[f"{name}.norm.weight"])
        scores = (x @ built.head.weight[:37].T).log_softmax(-1)
        kept = their_labels >= 0
        assert_equals("loss", result, -scores[kept, their_labels[kept]].sum(), FP64)


@pytest.mark.parametrize("positions", ["learned", "none", "relative"])
def test_mtp_embeddings_use_their_own_positions(positions: Any) -> None:
    """In each document, and nothing where neither a document nor the table has such a place."""
    built, (ids, labels, tokens) = (
        model(replace(config(positions=positions), max_seq_len=5)),
        text(),
    )
    for depth, (their_ids, _) in enumerate(mtp_inputs(ids, labels, 2)):
        layer = built.mtp.layers[depth]
        assert isinstance(layer, MTPLayer)
        expected = built.embed.weight[their_ids]
        if positions == "learned":
            assert layer.input_embedding.position_table() is built.input_embedding.position_table()
            table = torch.cat(
                [built.input_embedding.positions.weight, torch.zeros(2, 12, dtype=torch.float64)]
            )
            expected = expected + table[tokens.seq_params.position_ids + depth + 1]
        assert_equals(
            "embeddings", layer.input_embedding(layer.embed(their_ids), tokens), expected, EXACT
        )


def test_next_token_loss_matches_a_model_without_mtp() -> None:
    ids, labels, tokens = text()
    plain = model(config(depths=0)).loss(ids, labels, tokens)
    deep = model(config())
    with torch.no_grad():  # their random norms are drawn one after the other
        for actual, reference in zip(
            deep.parameters(), model(config(depths=0)).parameters(), strict=False
        ):
            actual.copy_(reference)
    losses = sum_lm_losses(
        deep.outputs(ids, tokens, mtp_inputs=mtp_inputs(ids, labels, 2)),
        labels,
        mtp_inputs(ids, labels, 2),
    )
    assert len(losses) == 3 and len(sum_lm_losses(deep.outputs(ids, tokens), labels)) == 1
    assert_equals("loss", losses[0], plain, EXACT)


def test_mtp_layers_share_the_rope_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built, (ids, labels, tokens), result, look_up = (
        model(config()),
        text(),
        [],
        RotaryEmbedding._pair,
    )

    def noted(self: RotaryEmbedding, *these: Any) -> tuple[Tensor, Tensor]:
        result.append(these)
        return look_up(self, *these)

    monkeypatch.setattr(RotaryEmbedding, "_pair", noted)
    sum_lm_losses(
        built.outputs(ids, tokens, mtp_inputs=mtp_inputs(ids, labels, 2)),
        labels,
        mtp_inputs(ids, labels, 2),
    )
    assert len(result) == 1


def test_token_is_accepted_if_all_earlier_depths_are_right() -> None:
    labels = [torch.tensor([4, 5, 6, -1, -1]), torch.tensor([5, 6, 7, 8, -1])]
    right = [torch.tensor([1, 1, 0, 1, 0]).bool(), torch.tensor([1, 0, 1, 1, 0]).bool()]
    assert complete(labels).tolist() == [True, True, True, False, False]
    assert mtp_acceptance_rate(right, labels).tolist() == [3.0, 3.0, 2.0 + 1.0 + 0.0]


def test_number_of_mtp_inputs_equals_number_of_depths() -> None:
    built, (ids, labels, tokens) = model(config()), text()
    with pytest.raises(ValueError, match="shorter"):
        sum_lm_losses(
            built.outputs(ids, tokens, mtp_inputs=mtp_inputs(ids, labels, 1)),
            labels,
            mtp_inputs(ids, labels, 1),
        )


def loss_at(made: Decoder, ids: Tensor, depth: int, place: int, label: int) -> Tensor:
    """The loss of one token at one depth."""
    pairs = list(mtp_inputs(ids, ids.roll(-1), 2))
    pairs[depth] = (pairs[depth][0], torch.where(torch.arange(len(ids)) == place, label, -1))
    return sum_lm_losses(
        made.outputs(ids, LayerInputs(seq_params_from_lengths(LENGTHS)), mtp_inputs=tuple(pairs)),
        ids.roll(-1),
        tuple(pairs),
    )[1 + depth]


@pytest.mark.parametrize("depth", [0, 1])
def test_mtp_does_not_attend_to_its_labels_or_other_documents(depth: int) -> None:
    built, (ids, labels, _) = model(config()), text()
    places = [
        place
        for place, label in enumerate(mtp_inputs(ids, labels, 2)[depth][1].tolist())
        if label >= 0
    ]
    assert places == ([0, 1, 2, 6] if depth == 0 else [0, 1])
    for place in places:
        predicted, first = place + depth + 2, 6 if place >= 6 else 0
        unseen = torch.arange(len(ids))
        changed = torch.where((unseen >= predicted) | (unseen < first), (ids + 1) % 37, ids)
        result = loss_at(built, changed, depth, place, int(ids[predicted]))
        assert torch.equal(result, loss_at(built, ids, depth, place, int(ids[predicted])))
        # the last that it reads
        changed = torch.where(unseen == predicted - 1, (ids + 1) % 37, ids)
        assert not torch.equal(result, loss_at(built, changed, depth, place, int(ids[predicted])))


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_mtp_layers_are_recomputed_like_layers(granularity: Any) -> None:
    ids, labels, tokens = text()
    results = []
    for options in (
        {},
        {"recompute": RecomputeConfig(granularity=granularity), "offload": OffloadConfig(layers=1)},
    ):
        outputs = model(config(), **options)
        torch.stack(
            sum_lm_losses(
                outputs.outputs(ids, tokens, mtp_inputs=mtp_inputs(ids, labels, 2)),
                labels,
                mtp_inputs(ids, labels, 2),
            )
        ).sum().backward()
        results.append(
            {name: part.grad for name, part in outputs.named_parameters() if part.grad is not None}
        )
    assert_close(results[0], results[1], FP64)
    assert any(name.startswith("mtp.layers.1.layer") for name in results[0])


@pytest.mark.parametrize("pipeline", [PipelineConfig(), PipelineConfig(schedule="zb-v", vpp=2)])
def test_loss_stage_has_a_copy_of_learned_positions(pipeline: PipelineConfig) -> None:
    parallel, sizes = (
        ParallelConfig(pp=2, pipeline=pipeline),
        replace(config(positions="learned"), num_layers=4),
    )
    chunks = torch.nn.ModuleList(
        build_chunks(
            build_context(sizes, build_meta_mesh(model_grid(parallel, sizes, 2), rank=0), parallel)
        )
    )
    (shard,) = [
        d.shard for d, _, _ in iter_parameter_specs(chunks) if d.shard.name == "positions.weight"
    ]
    assert shard.stages == ((0,) if pipeline.vpp == 2 else (0, 1))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pipeline", [PipelineConfig(), PipelineConfig(schedule="zb-v", vpp=2)])
def test_loss_stage_has_mtp_layers_and_a_copy_of_the_embedding(
    tied: bool, pipeline: PipelineConfig
) -> None:
    parallel = ParallelConfig(pp=2, pipeline=pipeline)
    sizes = replace(config(), tied_embeddings=tied, num_layers=4)
    grid = model_grid(parallel, sizes, 2)
    held: list[dict[str, tuple[int, ...]]] = []
    for rank in range(2):
        chunks = torch.nn.ModuleList(
            build_chunks(build_context(sizes, build_meta_mesh(grid, rank=rank), parallel))
        )
        shards = [declared.shard for declared, _, _ in iter_parameter_specs(chunks)]
        assert len({shard.name for shard in shards}) == len(shards)
        held.append({shard.name: shard.stages for shard in shards})
    last = 0 if pipeline.vpp == 2 else 1  # in a V both ends lie on the first rank
    assert held[last]["embed.weight"] == ((0,) if last == 0 else (0, 1)) and held[0]["embed.weight"]
    assert {name.split(".")[1] for name in held[last] if name.startswith("mtp.")} == {"0", "1"}
    assert not any(name.startswith("mtp.") for name in held[1 - last])
    assert ("head.weight" in held[last]) == (not tied)


def test_mtp_matches_transformers() -> None:
    layers = pytest.importorskip("transformers.modeling_layers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import (
        LlamaDecoderLayer,
        LlamaRMSNorm,
        LlamaRotaryEmbedding,
    )

    theirs_config = LlamaConfig(
        hidden_size=12,
        intermediate_size=10,
        num_attention_heads=3,
        num_key_value_heads=3,
        rms_norm_eps=1e-5,
        attn_implementation="eager",
    )
    reference = layers.MtpLayer(theirs_config, LlamaDecoderLayer, LlamaRMSNorm, 0)
    outputs = model(config(depths=1), dtype=torch.float32)
    ours = outputs.mtp.layers[0]
    assert isinstance(ours, MTPLayer)
    w = {d.shard.name[6:]: getattr(module, name) for d, module, name in iter_parameter_specs(ours)}
    block = reference.mtp_block
    pairs = {
        "embed_norm.weight": reference.enorm.weight,
        "hidden_norm.weight": reference.hnorm.weight,
        "project": reference.eh_proj.weight,
        "norm.weight": reference.post_norm.weight,
        "layer.attention_norm.weight": block.input_layernorm.weight,
        "layer.attention.q": block.self_attn.q_proj.weight,
        "layer.attention.o": block.self_attn.o_proj.weight,
        "layer.mlp.down": block.mlp.down_proj.weight,
        "layer.mlp_norm.weight": block.post_attention_layernorm.weight,
    }
    with torch.no_grad():
        for name, parameter in pairs.items():
            parameter.copy_(w[name])
        block.self_attn.k_proj.weight.copy_(w["layer.attention.kv"][:12])
        block.self_attn.v_proj.weight.copy_(w["layer.attention.kv"][12:])
        block.mlp.gate_proj.weight.copy_(w["layer.mlp.gate_up"][:10])
        block.mlp.up_proj.weight.copy_(w["layer.mlp.gate_up"][10:])
    hidden, ids, tokens = (
        torch.randn(7, 12),
        torch.arange(7),
        LayerInputs(seq_params_from_lengths([7])),
    )
    positions = torch.arange(7)[None]
    rotary = LlamaRotaryEmbedding(theirs_config)(hidden[None], positions)
    mask = torch.full((1, 1, 7, 7), -math.inf).triu(1)
    expected = reference(
        outputs.embed.weight[ids][None], hidden[None], rotary, mask, positions, None
    )
    assert_equals(
        "hidden states", ours(hidden, ids, outputs.rotations.add_to(tokens)), expected[0], PARITY
    )
