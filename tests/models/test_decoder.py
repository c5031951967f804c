from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from megalith.config.kernels import Kernel, KernelsConfig
from megalith.config.model import (
    AttentionConfig,
    CrossConfig,
    DropoutConfig,
    ModelConfig,
    MTPConfig,
    RopeConfig,
)
from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig, PipelineConfig
from megalith.hf.families import QWEN2
from megalith.hf.folder import HFSource, write_folder
from megalith.infer.cache import attention_views
from megalith.kernels.backend import Backends
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.linear import stacked
from megalith.kernels.packed import (
    seq_params_from_lengths,
    seq_params_from_queries,
    seq_params_from_rows,
    with_masks,
    with_multimodal_positions,
    with_padding,
)
from megalith.models.decoder import (
    Decoder,
    allocate,
    build_chunks,
    initialize,
    iter_parameter_specs,
)
from megalith.nn.build import build_context
from megalith.nn.moe import Router
from megalith.parallel.mesh import build_mesh, build_meta_mesh, build_single_rank_mesh
from megalith.plan.costs import num_parameters
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, assert_close, assert_equals, relative_error
from megalith.train.objective import sum_eval_losses, sum_lm_losses
from megalith.verify.matrix import NARROW, PLAIN, VARIANTS
from tests.infer.engines import SequenceCache

BIASED = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied_embeddings": True},
    "biases": {**BIASED, "head_dim": 4},
}


def ids_of(count: int, vocab_size: int = 37) -> Tensor:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES.keys())
def test_number_of_declared_elements_matches_the_formula(
    changes: dict[str, Any], tiny: SimpleNamespace
) -> None:
    config = tiny.config(pad_vocab_to_multiple_of=1, **changes)
    model = Decoder(build_context(config, build_single_rank_mesh()))
    assert sum(
        declared.shard.numel for declared, _, _ in iter_parameter_specs(model)
    ) == num_parameters(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(config)


def test_decoder_is_built_on_the_meta_device(tiny: SimpleNamespace) -> None:
    huge = tiny.config(
        vocab_size=128_256, hidden_size=8192, num_heads=64, num_kv_heads=8, ffn_hidden_size=28_672
    )
    assert all(
        parameter.is_meta
        for parameter in Decoder(build_context(huge, build_single_rank_mesh())).parameters()
    )


def test_every_parameter_is_declared_once_and_in_order(tiny: SimpleNamespace) -> None:
    model = Decoder(build_context(tiny.config(tied_embeddings=True), build_single_rank_mesh()))
    names = [declared.shard.name for declared, _, _ in iter_parameter_specs(model)]
    assert (
        len(set(names)) == len(names) and names[0] == "embed.weight" and names[-1] == "norm.weight"
    )
    assert {id(getattr(module, name)) for _, module, name in iter_parameter_specs(model)} == {
        id(parameter) for parameter in model.parameters()
    }


def test_a_tied_head_shares_its_parameter_in_every_state(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(tied_embeddings=True))
    assert model.head.weight is model.embed.weight


def test_matrices_of_one_matmul_are_contiguous_without_a_copy(
    tiny: SimpleNamespace,
) -> None:
    attention = tiny.model(tiny.config()).layers[0].attention
    both = attention.qkv.accumulated_parameters()
    assert len(both) == 2 and stacked(both).data_ptr() == both[0].data_ptr()


def test_documents_do_not_attend_to_each_other(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    ids = ids_of(16)
    together = model.hidden_states(ids, LayerInputs(seq_params_from_lengths([5, 1, 10])))
    apart = [
        model.hidden_states(part, LayerInputs(seq_params_from_lengths([len(part)])))
        for part in ids.split([5, 1, 10])
    ]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": AttentionConfig(window=3)},
        {"attention": AttentionConfig(sinks=True)},
        {"positions": "relative"},
        {"positions": "learned"},
        {"head_dim": 4, "rope": RopeConfig(scaling="dynamic", original_max_position=8)},
        {"attention": AttentionConfig(window=4, chunked=True)},
        {"moe": MoEConfig(num_experts=3, ffn_hidden_size=5)},
    ],
    ids=["plain", "window", "sinks", "relative", "learned", "dynamic", "chunks", "experts"],
)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_documents_without_a_token_change_nothing(
    changes: dict[str, Any], kernel: Kernel, tiny: SimpleNamespace
) -> None:
    backends = Backends(KernelsConfig(all=kernel))
    model = tiny.model(tiny.config(**changes), backends=backends)
    ids, result = ids_of(24), []
    for lengths in ([13, 1, 10], [0, 13, 0, 0, 1, 10, 0]):
        model.zero_grad()
        loss = model.loss(ids, ids, LayerInputs(seq_params_from_lengths(lengths)))
        loss.backward()
        result.append([loss.detach(), *(one.grad.clone() for one in model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*result, strict=True))


def test_tokens_do_not_attend_to_later_tokens(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    ids = ids_of(9)
    changed = ids.clone()
    changed[6:] = (changed[6:] + 1) % 37
    tokens = LayerInputs(seq_params_from_rows(1, 9))
    a, b = model.hidden_states(ids, tokens), model.hidden_states(changed, tokens)
    assert torch.equal(a[:6], b[:6]) and not torch.equal(a[6:], b[6:])


def test_loss_is_the_sum_over_labels_computed_from_logits(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config())
    ids, labels = ids_of(12), ids_of(12).flip(0)
    labels[3:7] = -1
    tokens = LayerInputs(seq_params_from_rows(2, 6))
    scores = model.head.logits(model.hidden_states(ids, tokens))
    expected = torch.nn.functional.cross_entropy(scores, labels, ignore_index=-1, reduction="sum")
    torch.testing.assert_close(model.loss(ids, labels, tokens), expected)
    assert scores.shape == (12, 37), "padded rows are no tokens"


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_initial_weights_do_not_depend_on_the_layout(tp: int, tiny: SimpleNamespace) -> None:
    config = tiny.config(num_kv_heads=3 if tp == 3 else 2, hidden_size=600, vocab_size=300)
    whole, grid = (
        tiny.tensors(tiny.model(config, seed=5)),
        model_grid(ParallelConfig(tp=tp), config, tp),
    )
    for rank in range(tp):
        part = tiny.model(config, seed=5, mesh=build_meta_mesh(grid, rank=rank))
        for entry in tiny.entries(part):
            box = tuple(slice(a, b) for a, b in entry.shard.box)
            assert torch.equal(
                entry.tensor.view(entry.shard.box_shape), whole[entry.shard.name][box]
            )
    assert not torch.equal(
        whole["embed.weight"], tiny.tensors(tiny.model(config, seed=6))["embed.weight"]
    )


def test_initial_output_projections_are_scaled_by_depth_and_others_are_not(
    tiny: SimpleNamespace,
) -> None:
    config = tiny.config(
        hidden_size=120, ffn_hidden_size=300, num_layers=8, init_std=0.02, **BIASED
    )
    model = Decoder(build_context(config, build_single_rank_mesh()))
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    for entry in tiny.entries(model):
        last = entry.shard.name.rpartition(".")[2]
        if last.endswith("bias"):
            assert not entry.tensor.any()
        elif "norm" in entry.shard.name:
            assert (entry.tensor == 1).all()
        else:
            expected = 0.02 / 4 if last in ("o", "down") else 0.02
            real = entry.tensor[:37] if last == "weight" else entry.tensor
            assert abs(real.std().item() / expected - 1) < 0.05, entry.shard.name


def step(
    config: ModelConfig, parallel: ParallelConfig, rank: int, world: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss, and this rank's gradients before they are summed, in float64."""
    mesh = (
        build_mesh(model_grid(parallel, config, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    model = Decoder(build_context(config, mesh, parallel, dtype=torch.float64))
    allocate(model, torch.device("cpu"))
    initialize(model, seed=3)
    ids, labels = ids_of(12), ids_of(12).flip(0)
    labels[2:5] = -1
    loss = model.loss(ids, labels, LayerInputs(seq_params_from_lengths([7, 5])))
    loss.backward()
    gradients = {
        declared.shard.name: getattr(module, name).grad.view(declared.shard.box_shape)
        for declared, module, name in iter_parameter_specs(model)
    }
    return loss.detach(), gradients


def pieces_of_gradients(
    rank: int, world: int, config: ModelConfig, parallel: ParallelConfig
) -> Any:
    mesh = build_meta_mesh(model_grid(parallel, config, world), rank=rank)
    boxes = {
        d.shard.name: d.shard
        for d, _, _ in iter_parameter_specs(Decoder(build_context(config, mesh, parallel)))
    }
    return *step(config, parallel, rank, world), boxes


@pytest.mark.parametrize(
    ("tp", "sp", "changes"),
    [(2, False, "tied"), (2, True, "plain"), (3, True, "biases"), (4, False, "biases")],
)
def test_ranks_compute_the_loss_and_gradients_of_one_process(
    tp: int, sp: bool, changes: str, tiny: SimpleNamespace
) -> None:
    config = tiny.config(**CHANGES[changes] | {"num_kv_heads": 3 if tp == 3 else 2})
    loss, gradients = step(config, ParallelConfig(), 0, 1)
    results = run_ranks(pieces_of_gradients, tp, config, ParallelConfig(tp=tp, sp=sp))
    summed = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for rank_loss, local, shards in results:
        assert_equals("loss", rank_loss.reshape(1), loss.reshape(1), FP64)
        for name, gradient in local.items():
            box = tuple(slice(a, b) for a, b in shards[name].box)
            whole_already = "tp_kv" in shards[name].invariant
            summed[name][box] += gradient / (tp if whole_already else 1)
    assert_close(summed, gradients, FP64)


STAGES = {
    "even": (ParallelConfig(pp=2), 4),
    "two chunks each": (ParallelConfig(pp=2, pipeline=PipelineConfig(vpp=2)), 4),
    "a V": (ParallelConfig(pp=2, pipeline=PipelineConfig(schedule="zb-v", vpp=2)), 4),
    "standalone and empty stages": (
        ParallelConfig(pp=5, pipeline=PipelineConfig(layout="E|tt||tt|L")),
        4,
    ),
}
MTP_MODEL = {
    "a stage of their own": ParallelConfig(pp=4, pipeline=PipelineConfig(layout="E|t*4|mm|L")),
    "with the last layers": ParallelConfig(pp=4, pipeline=PipelineConfig(layout="E|tt|ttmm|L")),
    "with the loss alone": ParallelConfig(pp=3, pipeline=PipelineConfig(layout="E|t*4|mmL")),
    "between empty stages": ParallelConfig(pp=6, pipeline=PipelineConfig(layout="E|t*4||mm||L")),
    "a chunk of their own": ParallelConfig(
        pp=2, pipeline=PipelineConfig(vpp=2, layout="Ett|tt|mm|L")
    ),
}


def chunks_of(config: ModelConfig, parallel: ParallelConfig) -> list[list[Decoder]]:
    """Every rank's chunks, filled."""
    grid = model_grid(parallel, config, parallel.pp)
    ranks = []
    for rank in range(parallel.pp):
        chunks = nn.ModuleList(
            build_chunks(
                build_context(
                    config, build_meta_mesh(grid, rank=rank), parallel, dtype=torch.float64
                )
            )
        )
        allocate(chunks, torch.device("cpu"))
        initialize(chunks, seed=3)
        ranks.append(list(chunks))
    return ranks


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("tied", [False, True])
def test_model_chunks_in_sequence_match_the_whole_model(
    name: str, tied: bool, tiny: SimpleNamespace
) -> None:
    parallel, num_layers = STAGES[name]
    config = tiny.config(num_layers=num_layers, tied_embeddings=tied)
    whole = Decoder(build_context(config, build_single_rank_mesh(), dtype=torch.float64))
    allocate(whole, torch.device("cpu"))
    initialize(whole, seed=3)
    ids, labels, tokens = (
        ids_of(12),
        ids_of(12).flip(0),
        LayerInputs(seq_params_from_lengths([7, 5])),
    )
    in_order = sorted(
        (c for rank in chunks_of(config, parallel) for c in rank),
        key=lambda c: (not c.stage.embedding, c.stage.loss, c.stage.layers.start),
    )
    received: dict[str, Tensor] = {}
    for chunk in in_order[:-1]:
        received = chunk(ids, tokens, received=received)
    assert in_order[-1].stage.loss
    torch.testing.assert_close(
        in_order[-1].outputs(ids, tokens, received=received).loss(labels),
        whole.loss(ids, labels, tokens),
    )


@pytest.mark.parametrize("name", MTP_MODEL)
@pytest.mark.parametrize("tied", [False, True])
def test_mtp_layers_on_any_stage_match_the_whole_model(
    name: str, tied: bool, tiny: SimpleNamespace
) -> None:
    config, parallel = (
        tiny.config(num_layers=4, tied_embeddings=tied, mtp=MTPConfig(num_layers=2)),
        MTP_MODEL[name],
    )
    whole = Decoder(build_context(config, build_single_rank_mesh(), dtype=torch.float64))
    allocate(whole, torch.device("cpu"))
    initialize(whole, seed=3)
    ids, labels, tokens = (
        ids_of(12),
        ids_of(12).flip(0),
        LayerInputs(seq_params_from_lengths([7, 5])),
    )
    mtp_inputs = tuple((ids.roll(-depth), labels.roll(-depth)) for depth in (1, 2))
    ranks, stages = chunks_of(config, parallel), parallel.pp * parallel.pipeline.vpp
    in_order = [ranks[stage % parallel.pp][stage // parallel.pp] for stage in range(stages)]
    received: dict[str, Tensor] = {}
    for chunk in in_order[:-1]:
        received = chunk(ids, tokens, mtp_inputs=mtp_inputs, received=received)
    last, pairs = in_order[-1], mtp_inputs
    outputs = last.outputs(ids, tokens, mtp_inputs=pairs, received=received)
    expected = whole.outputs(ids, tokens, mtp_inputs=pairs)
    losses = sum_lm_losses(outputs, labels, pairs)
    assert len(losses) == 3
    torch.testing.assert_close(losses, sum_lm_losses(expected, labels, pairs))
    torch.testing.assert_close(
        sum_eval_losses(outputs, labels, pairs), sum_eval_losses(expected, labels, pairs)
    )
    held = {
        d.shard.name: d.shard.stages
        for chunk in in_order
        for d, _, _ in iter_parameter_specs(chunk)
    }
    assert sorted(held) == sorted(d.shard.name for d, _, _ in iter_parameter_specs(whole))


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_on_the_stages_that_its_shard_names(
    name: str, tied: bool, tiny: SimpleNamespace
) -> None:
    parallel, num_layers = STAGES[name]
    config = tiny.config(num_layers=num_layers, tied_embeddings=tied)
    results: dict[str, list[int]] = {}
    tensors: dict[str, Tensor] = {}
    for rank, chunks in enumerate(chunks_of(config, parallel)):
        for declared, module, attribute in iter_parameter_specs(nn.ModuleList(chunks)):
            results.setdefault(declared.shard.name, []).append(rank)
            assert rank in declared.shard.stages
            value = getattr(module, attribute).detach()
            assert torch.equal(tensors.setdefault(declared.shard.name, value), value), (
                "copies start bitwise equal"
            )
    whole = [
        declared.shard.name
        for declared, _, _ in iter_parameter_specs(
            Decoder(build_context(config, build_single_rank_mesh()))
        )
    ]
    assert sorted(results) == sorted(whole)
    several = {parameter for parameter, ranks in results.items() if len(ranks) > 1}
    assert several == ({"embed.weight"} if tied and name != "a V" else set())


def test_routers_of_all_stages_and_mtp_layers_have_separate_noise(
    tiny: SimpleNamespace,
) -> None:
    moe = MoEConfig(num_experts=2, top_k=1, ffn_hidden_size=3)
    config = tiny.config(num_layers=4, moe=moe, mtp=MTPConfig(num_layers=2))
    parallel = ParallelConfig(pp=2)
    stages = [
        build_chunks(
            build_context(
                config, build_meta_mesh(model_grid(parallel, config, 2), rank=rank), parallel
            )
        )
        for rank in (0, 1)
    ]
    routers = [
        module
        for chunks in stages
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, Router)
    ]
    assert [router.noise.layer for router in routers] == [0, 1, 2, 3, 4, 5]


def test_two_chunks_of_one_rank_share_a_tied_table(tiny: SimpleNamespace) -> None:
    parallel, num_layers = STAGES["a V"]
    first, second = chunks_of(tiny.config(num_layers=num_layers, tied_embeddings=True), parallel)[0]
    assert first.embed.weight is second.head.weight


def test_multimodal_rope_matches_qwen2_vl(tmp_path: Path, tiny: SimpleNamespace) -> None:
    theirs_of = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    rope = RopeConfig(theta=50.0, sections=(2, 1, 1))
    config = tiny.config(tied_embeddings=True, qkv_bias=True, head_dim=8, hidden_size=48, rope=rope)
    outputs = tiny.model(config)
    # the family of text has the same tensors
    text = replace(config, rope=replace(rope, sections=()))
    write_folder(
        tmp_path / "x", text, tiny.InMemory(tiny.tensors(outputs)), hf_source=HFSource(QWEN2)
    )
    tensors = load_file(tmp_path / "x" / "model.safetensors")
    theirs_config = theirs_of.Qwen2VLTextConfig(
        vocab_size=37,
        hidden_size=48,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        pad_token_id=None,
        attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 50.0, "mrope_section": [2, 1, 1]},
    )
    reference = theirs_of.Qwen2VLTextModel(theirs_config).eval()
    reference.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, strict=True
    )
    ids, places = (
        ids_of(9),
        torch.randint(0, 20, (3, 9), generator=torch.Generator().manual_seed(2)),
    )
    mask = torch.full((1, 1, 9, 9), -torch.inf).triu(1)
    for given in (places, torch.arange(9).expand(3, 9)):
        hidden = reference(
            ids[None], position_ids=given[:, None], attention_mask=mask
        ).last_hidden_state[0]
        tokens = LayerInputs(with_multimodal_positions(seq_params_from_rows(1, 9), given.numpy()))
        assert (
            relative_error(
                outputs.head.logits(outputs.hidden_states(ids, tokens)),
                hidden @ tensors["model.embed_tokens.weight"].T,
            )
            < 2e-5
        )
    plain = tiny.blank(text)
    plain.load_state_dict(outputs.state_dict())
    assert torch.equal(
        outputs.hidden_states(ids, tokens),
        plain.hidden_states(ids, LayerInputs(seq_params_from_rows(1, 9))),
    )
    assert torch.equal(
        outputs.hidden_states(ids, LayerInputs(seq_params_from_rows(1, 9))),
        plain.hidden_states(ids, LayerInputs(seq_params_from_rows(1, 9))),
    )


def _plain_cross_layer_attention(
    w: dict[str, Tensor], config: ModelConfig, ids: Tensor, lengths: list[int]
) -> Tensor:
    """A decoder whose layers from `cross.memory` on look at the memory, in plain operations; no
    positions, no biases.

    x1 = x + Attn(N(x)), x2 = x1 + Cross(N(x1), N(memory)), y = x2 + MLP(N(x2)).
    """
    document = torch.tensor(
        [number for number, length in enumerate(lengths) for _ in range(length)]
    )
    seen = (document[:, None] == document) & torch.ones(len(ids), len(ids)).tril().bool()
    shared = config.num_heads // config.num_kv_heads

    def norm(x: Tensor, name: str) -> Tensor:
        return (
            x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * w[f"{name}.weight"]
        )

    def attend(name: str, x: Tensor, other: Tensor) -> Tensor:
        q = torch.einsum("th,ndh->ntd", x, w[f"{name}.q"])
        k, v = torch.einsum("th,cgdh->cgtd", other, w[f"{name}.kv"]).repeat_interleave(
            shared, dim=1
        )
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
        return torch.einsum("ntd,hnd->th", scores.softmax(-1) @ v, w[f"{name}.o"])

    assert config.cross is not None
    x, memory = w["embed.weight"][ids], torch.empty(0)
    for layer in range(config.num_layers):
        name = f"layers.{layer}"
        if layer == config.cross.memory:
            memory = norm(x, "memory_norm")
        normed = norm(x, f"{name}.attention_norm")
        x = x + attend(f"{name}.attention", normed, normed)
        if layer >= config.cross.memory:
            x = x + attend(f"{name}.cross", norm(x, f"{name}.cross_norm"), memory)
        gate, up = torch.einsum(
            "th,cfh->ctf", norm(x, f"{name}.mlp_norm"), w[f"{name}.mlp.gate_up"]
        )
        x = x + (torch.nn.functional.silu(gate) * up) @ w[f"{name}.mlp.down"].T
    return norm(x, "norm")


@pytest.mark.parametrize("memory", [0, 1, 2])
def test_cross_layer_attention_matches_plain_operations_forward_and_backward(
    memory: int, tiny: SimpleNamespace
) -> None:
    config = tiny.config(num_layers=3, positions="none", cross=CrossConfig(memory=memory))
    model, ids, lengths = tiny.blank(config, dtype=torch.float64), ids_of(11), [4, 1, 6]
    initialize(model, seed=3)
    places = [(d.shard, getattr(module, name)) for d, module, name in iter_parameter_specs(model)]
    weights = {
        shard.name: p.detach().view(shard.shape).clone().requires_grad_() for shard, p in places
    }
    result = model.hidden_states(ids, LayerInputs(seq_params_from_lengths(lengths)))
    expected = _plain_cross_layer_attention(weights, config, ids, lengths)
    assert_equals("hidden states", result, expected, FP64)
    for y in (result, expected):
        (y * torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view_as(y)).sum().backward()
    for shard, parameter in places:
        if shard.name != "head.weight":
            assert_equals(
                shard.name, parameter.grad.view(shard.shape), weights[shard.name].grad, FP64
            )


@pytest.mark.slow  # the graphs take some seconds
def test_cross_layer_attention_matches_when_compiled(tiny: SimpleNamespace) -> None:
    config, ids, tokens = (
        tiny.config(cross=CrossConfig(memory=1)),
        ids_of(11),
        LayerInputs(seq_params_from_lengths([4, 7])),
    )
    plain, traced = (tiny.blank(config, dtype=torch.float64) for _ in range(2))
    for model in (plain, traced):
        initialize(model, seed=3)
    for layer in traced.layers:
        layer.compile(backend="aot_eager")
    for model in (plain, traced):
        model.loss(ids, ids.roll(1), tokens).backward()
    for one, other in zip(traced.parameters(), plain.parameters(), strict=True):
        assert_equals("gradient", one.grad, other.grad, FP64)


@pytest.mark.parametrize("name", [*VARIANTS, "narrow"])
def test_padding_does_not_change_the_result(name: str) -> None:
    """Values, gradients, and not one bit of them by what is in it."""
    config = {**VARIANTS, "narrow": NARROW}[name]
    config = config if name != "bidirectional" else replace(config, dropout=DropoutConfig())
    config = replace(config, mtp=MTPConfig(), rope=replace(config.rope, sections=None))
    model = build_chunks(
        build_context(config, build_single_rank_mesh(), ParallelConfig(), dtype=torch.float64)
    )[0]
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    ids, text = ids_of(20), torch.ones(20, dtype=torch.bool)
    text[5:8] = text[17:] = False  # behind the text of two documents of 8 and 12 tokens
    tokens, ids[~text] = LayerInputs(with_padding(seq_params_from_lengths([8, 12]), text)), 36
    ids[text] = ids[text] % 36
    result = model.hidden_states(ids, tokens)
    assert isinstance(result, Tensor)
    assert_equals(
        "hidden states",
        result[text],
        model.hidden_states(ids[text], LayerInputs(seq_params_from_lengths([5, 9]))),
        FP64,
    )
    other = ids.masked_fill(~text, 35)
    again = model.hidden_states(other, tokens)
    assert isinstance(again, Tensor)
    assert torch.equal(result[text], again[text])
    (dx,) = torch.autograd.grad(result[text].square().sum(), model.embed.weight)
    assert not dx[36].any() and dx[ids[0]].any()


@pytest.mark.parametrize(
    "name", ["plain", "latent", "chunked", "sinks", "normed around", "cross-layer"]
)
def test_masked_text_continued_from_a_cache_matches_one_forward(name: str) -> None:
    config = {**VARIANTS, "plain": PLAIN}[name]
    model = build_chunks(
        build_context(config, build_single_rank_mesh(), ParallelConfig(), dtype=torch.float64)
    )[0]
    allocate(model, torch.device("cpu"))
    initialize(model, seed=1)
    text, mask = (
        torch.arange(14) % 4 != 1,
        torch.rand(14, 14, generator=torch.Generator().manual_seed(1)) < 0.7,
    )
    whole = LayerInputs(with_padding(with_masks(seq_params_from_lengths([14]), [mask]), text))
    ids = ids_of(14)
    with torch.no_grad():
        expected, cache = model.hidden_states(ids, whole), SequenceCache(attention_views(config))
        assert isinstance(expected, Tensor)
        for start, end in ((0, 7), (7, 8), (8, 12), (12, 13), (13, 14)):
            part = seq_params_from_queries([(end - start, end)], reach=[14])
            part = with_padding(with_masks(part, [mask[start:end, :end]]), text[:end])
            caches = cache.layers(start, end - start)
            result = model.hidden_states(ids[start:end], LayerInputs(part), caches)
            assert isinstance(result, Tensor)
            assert_equals(f"tokens {start} to {end}", result, expected[start:end], FP64)
