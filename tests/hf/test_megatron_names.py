"""Rules and spellings of Megatron's tensors, on random values."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.chunks import ChunkedTensor, MegatronFolder, TensorChunk
from megalith.config.model import (
    AttentionConfig,
    LayersConfig,
    MLAConfig,
    ModelConfig,
    MTPConfig,
)
from megalith.config.moe import AuxLossConfig, MoEConfig, RouterConfig
from megalith.errors import CheckpointError
from megalith.hf.megatron_names import (
    EMBEDDING,
    MEGATRON,
    OUTPUT_LAYER,
    list_megatron_tensors,
    normalize_tensors,
    parse_key,
    reorder_qkv_rows,
)
from megalith.hf.tensor_rules import (
    build_rules,
    group_by_parameter,
    locate_box,
    to_parameter_layout,
    to_tensor_layout,
    unpadded_shape,
)
from megalith.plan.parameters import held_parameters
from megalith.plan.shards import Box

DENSE = ModelConfig(
    vocab_size=50,
    hidden_size=16,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=4,
    ffn_hidden_size=24,
    max_seq_len=32,
)
MOE = replace(
    DENSE,
    moe=MoEConfig(
        num_experts=4,
        ffn_hidden_size=8,
        shared_ffn_hidden_size=6,
        shared_gate=True,
        router=RouterConfig(expert_bias=True, score="sigmoid"),
        layers=(False, True, True),
    ),
)
MLA = replace(
    DENSE,
    head_dim=None,
    hidden_size=18,
    num_kv_heads=6,
    mla=MLAConfig(kv_rank=6, q_rank=5, nope_dim=3, rope_dim=2, value_dim=4),
)
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
MODELS = {
    "gqa": replace(DENSE, qkv_bias=True),
    "biases": replace(DENSE, **BIASES, norm="layer", positions="learned", tied_embeddings=True),
    "one head per group": replace(DENSE, num_kv_heads=6, qkv_bias=True, gated=False),
    "ungated": replace(DENSE, **BIASES, gated=False, activation="squared_relu"),
    "qk norm, sinks": replace(DENSE, attention=AttentionConfig(qk_norm="head", sinks=True)),
    "qk layer norm": replace(DENSE, norm="layer", attention=AttentionConfig(qk_norm="head")),
    "gate": replace(DENSE, qkv_bias=True, attention=AttentionConfig(gated=True)),
    "moe": MOE,
    "moe biases": replace(
        MOE,
        **BIASES,
        moe=MoEConfig(
            num_experts=3,
            ffn_hidden_size=8,
            biases=True,
            latent_size=5,
            router=RouterConfig(bias=True),
            aux_loss=AuxLossConfig(quantile=True),
        ),
    ),
    "ungated moe": replace(MOE, gated=False, activation="squared_relu"),
    "mla": MLA,
    "mla without q_rank": replace(
        MLA, norm="layer", mla=MLAConfig(kv_rank=6, nope_dim=3, rope_dim=2, value_dim=4)
    ),
    "mla without norms": replace(
        MLA, mla=MLAConfig(kv_rank=6, q_rank=5, nope_dim=3, rope_dim=2, value_dim=4, norms=False)
    ),
    "mtp": replace(MOE, mtp=MTPConfig(num_layers=2)),
    "heterogeneous": replace(
        DENSE,
        layers=LayersConfig(
            attention=("full", "linear", "none"),
            mlp=("linear", "full", "full"),
            num_kv_heads=(1, 2, 2),
            ffn_hidden_size=(24, 24, 8),
        ),
    ),
}
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


def random_parameters(model: ModelConfig) -> dict[str, Tensor]:
    """Return random values of all parameters, without padding rows."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(unpadded_shape(rules), generator=generator)
        for name, rules in group_by_parameter(build_rules(MEGATRON, model)).items()
    }


def to_megatron(model: ModelConfig, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return canonical tensors by the rules."""
    tensors: dict[str, Tensor] = {}
    for name, (shape, rules) in list_megatron_tensors(model).items():
        tensors[name] = torch.full(shape, math.nan)
        for rule in rules:
            assert rule.parameter is not None
            part = to_tensor_layout(rule, parameters[rule.parameter][_slices(rule.box)])
            tensors[name].view(rule.view)[_slices(rule.at)] = part
    return tensors


def from_megatron(model: ModelConfig, tensors: Mapping[str, ChunkedTensor]) -> dict[str, Tensor]:
    """Return parameters by the rules, from slices of the tensors."""
    parameters: dict[str, Tensor] = {}
    for name, rules in group_by_parameter(build_rules(MEGATRON, model)).items():
        parameters[name] = torch.full(unpadded_shape(rules), math.nan)
        for rule in rules:
            place = locate_box(rule, rule.box)
            box = tuple((part.start, part.stop) for part in place.slices)
            values = tensors[rule.name].read(box).view(place.view)[place.at]
            parameters[name][_slices(rule.box)] = to_parameter_layout(rule, values)
    return parameters


def make_folder(tensors: Mapping[str, Tensor], *, version: float = 3.0) -> MegatronFolder:
    """Return tensors, each stored as two chunks of rows."""
    chunked = {}
    for name, tensor in tensors.items():
        rows, others = tensor.shape[0], tuple((0, size) for size in tensor.shape[1:])
        chunks = []
        for start, stop in ((0, rows // 2), (rows // 2, rows)):
            part = tensor[start:stop]
            if part.numel():
                chunks.append(TensorChunk(((start, stop), *others), lambda part=part: part))
        chunked[name] = ChunkedTensor(name, tuple(tensor.shape), tensor.dtype, chunks)
    common = {"checkpoint_version": version}
    return MegatronFolder(Path("iter_0000001"), "torch_dist", chunked, common)


def check_equal(tensors: Mapping[str, ChunkedTensor], expected: Mapping[str, Tensor]) -> None:
    """Check that the tensors are equal bit for bit."""
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        assert tensor.shape == expected[name].shape, name
        assert torch.equal(tensor.read(), expected[name]), name


@each_model
def test_rules_cover_every_parameter(model: ModelConfig) -> None:
    shapes = {
        name: unpadded_shape(rules)
        for name, rules in group_by_parameter(build_rules(MEGATRON, model)).items()
    }
    held = {one.name: one.rows * one.columns for one in held_parameters(model)}
    assert set(shapes) == set(held)
    for name, shape in shapes.items():
        expected = held[name]
        if name in ("embed.weight", "head.weight"):
            expected = model.vocab_size * model.hidden_size
        assert math.prod(shape) == expected, name


@each_model
def test_parameters_become_canonical_tensors_and_return(model: ModelConfig) -> None:
    parameters = random_parameters(model)
    tensors = to_megatron(model, parameters)
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    returned = from_megatron(model, normalize_tensors(make_folder(tensors), model))
    assert set(returned) == set(parameters)
    for name, values in parameters.items():
        assert torch.equal(returned[name], values), name


@pytest.mark.parametrize("name", ["gqa", "one head per group", "gate"])
def test_qkv_rows_are_grouped_by_kv_head(name: str) -> None:
    model = MODELS[name]
    parameters = random_parameters(model)
    tensors = to_megatron(model, parameters)
    heads_per_group = model.num_heads // model.num_kv_heads
    for suffix, kind in (("", "weight"), ("_bias", "bias")):
        layer = "layers.1.attention"
        q, kv = parameters[f"{layer}.q{suffix}"], parameters[f"{layer}.kv{suffix}"]
        rows = []
        for group in range(model.num_kv_heads):
            own = slice(group * heads_per_group, (group + 1) * heads_per_group)
            rows += list(q[own])
            if model.attention.gated:
                rows += list(parameters[f"{layer}.gate{suffix}"][own])
            rows += [kv[0, group], kv[1, group]]
        stored = tensors[f"decoder.layers.1.self_attention.linear_qkv.{kind}"]
        assert torch.equal(stored, torch.cat(rows))


# --- spellings


def stack_layers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the layers stacked."""
    result: dict[str, Tensor] = {}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("decoder.layers."):
            stacks.setdefault("decoder.layers." + name.split(".", 3)[3], []).append(tensor)
        else:
            result[name] = tensor
    return result | {name: torch.stack(layers) for name, layers in stacks.items()}


def split_halves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with separate gate and up."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(("linear_fc1.weight", "linear_fc1.bias")):
            gate, up = tensor.chunk(2, dim=1 if ".experts." in name else 0)
            result |= {f"{name}_w": gate, f"{name}_v": up}
        else:
            result[name] = tensor
    return result


def split_experts(spelling: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a function that gives each expert tensors of its own."""

    def split(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            prefix, is_expert, rest = name.partition("mlp.experts.experts.")
            layer, half = rest, ""
            if rest.endswith(("_w", "_v")):
                layer, half = rest[:-2], rest[-2:]
            for expert in range(len(tensor) if is_expert else 0):
                text = spelling.format(expert=expert, rest=layer) + half
                result[f"{prefix}mlp.experts.{text}"] = tensor[expert]
            if not is_expert:
                result[name] = tensor
        return result

    return split


def rename(*pairs: tuple[str, str]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a function that replaces parts of names."""

    def apply(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        result = {}
        for name, tensor in tensors.items():
            for old, new in pairs:
                name = name.replace(old, new)
            result[name] = tensor
        return result

    return apply


def add_prefix(prefix: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """Return a function that adds a prefix to all names."""
    return lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def pad_vocabulary(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with padding rows that are not zero."""
    return {
        name: torch.cat([tensor, torch.ones(14, tensor.shape[1])])
        if name in (EMBEDDING, OUTPUT_LAYER)
        else tensor
        for name, tensor in tensors.items()
    }


def group_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return experts as two transposed matrices."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "experts.experts." not in name:
            result[name] = tensor
            continue
        prefix, _, rest = name.partition("experts.experts.")
        memory = tensor.transpose(1, 2).contiguous()
        is_first = rest.startswith("linear_fc1")
        shape = (memory.shape[1], -1) if is_first else (-1, memory.shape[2])
        result[f"{prefix}experts.weight{1 if is_first else 2}"] = memory.reshape(shape)
    return result


SEPARATE_NORMS = rename(
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    ("self_attention.layer_norm_", "input_layernorm."),
    ("mlp.layer_norm_", "pre_mlp_layernorm."),
    ("linear_q_up_proj.layer_norm_", "q_layernorm."),
    ("linear_kv_up_proj.layer_norm_", "kv_layernorm."),
)
FUSED_NORMS = rename(
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
)
LEGACY = rename(
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "post_attention_layernorm."),
    ("self_attention.linear_qkv", "attention.query_key_value"),
    ("self_attention.linear_proj", "attention.dense"),
    ("linear_fc1", "dense_h_to_4h"),
    ("linear_fc2", "dense_4h_to_h"),
    ("decoder.", "language_model.transformer."),
    ("embedding.", "language_model.embedding."),
    ("output_layer.", "language_model.output_layer."),
)
OLD_LEGACY = rename(
    ("self_attention.linear_qkv.layer_norm_", "input_norm."),
    ("mlp.linear_fc1.layer_norm_", "post_attention_norm."),
    ("self_attention.linear_qkv", "self_attention.query_key_value"),
    ("self_attention.linear_proj", "self_attention.dense"),
    ("final_layernorm", "final_norm"),
    ("decoder.", "language_model.encoder."),
)
SPELLINGS = [
    ("gqa", stack_layers),
    ("biases", stack_layers),
    ("mla", stack_layers),
    ("moe biases", stack_layers),
    ("qk norm, sinks", stack_layers),
    ("gqa", split_halves),
    ("moe", split_halves),
    ("moe", lambda tensors: split_experts("experts.{expert}.{rest}")(split_halves(tensors))),
    ("moe", split_experts("experts.{expert}.{rest}")),
    ("moe", split_experts("local_experts.{expert}.{rest}")),
    ("ungated moe", split_experts("{rest}{expert}")),
    ("moe biases", lambda tensors: split_experts("{rest}{expert}")(split_halves(tensors))),
    ("moe", group_experts),
    ("ungated moe", group_experts),
    ("biases", SEPARATE_NORMS),
    ("mla", SEPARATE_NORMS),
    ("heterogeneous", SEPARATE_NORMS),
    ("moe", FUSED_NORMS),
    ("mla", FUSED_NORMS),
    ("biases", LEGACY),
    ("gqa", OLD_LEGACY),
    ("mtp", rename(("transformer_layer", "mtp_model_layer"))),
    ("moe", add_prefix("model.module.")),
    ("gqa", add_prefix("model0.")),
    ("gqa", pad_vocabulary),
]


@pytest.mark.parametrize(("name", "spell"), SPELLINGS)
def test_every_spelling_gives_the_same_tensors(
    name: str, spell: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    model = MODELS[name]
    tensors = to_megatron(model, random_parameters(model))
    spelled = spell(dict(tensors))
    assert any(
        not torch.equal(spelled.get(name, torch.empty(0)), tensors[name]) for name in tensors
    )
    check_equal(normalize_tensors(make_folder(spelled), model), tensors)


def test_parts_of_a_tensor_are_read_without_the_others() -> None:
    model = MODELS["moe"]
    tensors = to_megatron(model, random_parameters(model))
    spelled = split_experts("experts.{expert}.{rest}")(split_halves(tensors))
    name = "decoder.layers.2.mlp.experts.experts.linear_fc1.weight"
    read = normalize_tensors(make_folder(spelled), model)[name].read(((1, 3), (5, 11), (2, 4)))
    assert torch.equal(read, tensors[name][1:3, 5:11, 2:4])


def test_optimizer_states_have_the_names_of_their_weights() -> None:
    model = DENSE
    tensors = to_megatron(model, random_parameters(model))
    stacked = split_halves(tensors)
    states = {
        f"chained_0.optimizer.state.{word}.{name}": value + step
        for step, word in enumerate(("fp32_param", "exp_avg", "exp_avg_sq"), 1)
        for name, value in stacked.items()
    }
    last = {f"optimizer.state.module.{name}.exp_avg": value + 2 for name, value in stacked.items()}
    expected = tensors | {
        f"optimizer.{role}.{name}": value + step
        for step, role in enumerate(("master", "exp_avg", "exp_avg_sq"), 1)
        for name, value in tensors.items()
    }
    check_equal(normalize_tensors(make_folder(stacked | states), model), expected)
    moments = {name: expected[name] for name in expected if ".master." not in name}
    moments = {name: value for name, value in moments.items() if ".exp_avg_sq." not in name}
    check_equal(normalize_tensors(make_folder(stacked | last), model), moments)


@pytest.mark.parametrize(
    "key",
    [
        "decoder.layers.self_attention._extra_state",
        "rng_state",
        "decoder.layers.1.mlp.router.local_tokens_per_expert",
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(a).bucket_idx_0.param",
        "rotary_pos_emb.inv_freq",
        "word_embeddings_for_head.weight",
    ],
)
def test_tensors_without_parameters_are_ignored(key: str) -> None:
    assert parse_key(key, DENSE) == []


def test_tied_output_layer_is_ignored_and_an_untied_one_is_not() -> None:
    assert parse_key(OUTPUT_LAYER, replace(DENSE, tied_embeddings=True)) == []
    assert parse_key(OUTPUT_LAYER, DENSE) is not None


# --- old orders of queries, keys and values


def _old_rows(tensor: Tensor, num_heads: int, *, version: int, tp: int) -> Tensor:
    """Return rows of each tensor-parallel rank in the order of an old version."""
    ranks = []
    for rows in tensor.chunk(tp):
        heads = rows.view(num_heads // tp, 3, 4, *rows.shape[1:])
        heads = heads.transpose(0, 1) if version == 0 else heads.transpose(1, 2)
        ranks.append(heads.reshape(rows.shape))
    return torch.cat(ranks)


@pytest.mark.parametrize("version", [0, 1])
def test_old_orders_of_queries_keys_and_values_are_reordered(version: int) -> None:
    model = replace(MODELS["biases"], num_kv_heads=6)
    tensors = to_megatron(model, random_parameters(model))
    old = {
        name: _old_rows(tensor, 6, version=version, tp=2) if ".linear_qkv.w" in name else tensor
        for name, tensor in tensors.items()
    }
    old = {
        name: _old_rows(tensor, 6, version=version, tp=2) if name.endswith("qkv.bias") else tensor
        for name, tensor in old.items()
    }
    check_equal(normalize_tensors(make_folder(old, version=version), model), tensors)


def test_old_order_with_kv_groups_is_an_error() -> None:
    folder = make_folder(to_megatron(DENSE, random_parameters(DENSE)), version=1)
    with pytest.raises(CheckpointError, match="without KV groups, but the model has 6 heads and 2"):
        normalize_tensors(folder, DENSE)


def test_new_order_is_unchanged() -> None:
    values = torch.arange(24.0).view(24, 1)
    assert torch.equal(reorder_qkv_rows(values, version=2, head_size=4), values)


# --- damaged or foreign checkpoints


def _failure(tensors: Mapping[str, Tensor], model: ModelConfig) -> str:
    with pytest.raises(CheckpointError) as caught:
        normalize_tensors(make_folder(tensors), model)
    return str(caught.value)


def test_unknown_missing_and_wrong_tensors_are_reported_together() -> None:
    tensors = to_megatron(DENSE, random_parameters(DENSE))
    tensors["decoder.layers.0.self_attention.mystery.weight"] = torch.zeros(2)
    tensors["decoder.layers.7.mlp.linear_fc2.weight"] = torch.zeros(2)
    del tensors["decoder.layers.1.mlp.linear_fc2.weight"]
    tensors["decoder.final_layernorm.weight"] = torch.zeros(5)
    text = _failure(tensors, DENSE)
    assert "mystery.weight, decoder.layers.7.mlp.linear_fc2.weight" in text
    assert "missing tensors: decoder.layers.1.mlp.linear_fc2.weight" in text
    assert "final_layernorm.weight: shape [5], but the arguments give [16]" in text


def test_vocabulary_with_too_few_rows_is_an_error() -> None:
    tensors = to_megatron(DENSE, random_parameters(DENSE))
    tensors[EMBEDDING] = tensors[EMBEDDING][:49]
    assert "word_embeddings.weight: shape [49, 16]" in _failure(tensors, DENSE)


def test_missing_experts_and_halves_are_reported() -> None:
    model = MODELS["moe"]
    tensors = to_megatron(model, random_parameters(model))
    tensors = split_experts("experts.{expert}.{rest}")(split_halves(tensors))
    del tensors["decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight_v"]
    del tensors["decoder.layers.0.mlp.linear_fc1.weight_w"]
    text = _failure(tensors, model)
    assert "missing expert 2 half _v" in text
    assert "layers.0.mlp.linear_fc1.weight: missing half _w" in text


def test_tensor_given_twice_is_an_error() -> None:
    tensors = to_megatron(DENSE, random_parameters(DENSE))
    name = "decoder.layers.0.input_layernorm.weight"
    tensors[name] = torch.zeros(16)
    assert f"layer_norm_weight, {name} are the same tensor" in _failure(tensors, DENSE)


def test_stacked_layers_of_another_count_are_an_error() -> None:
    tensors = stack_layers(to_megatron(DENSE, random_parameters(DENSE)))
    text = _failure(tensors, replace(DENSE, num_layers=4))
    assert "decoder.layers.mlp.linear_fc2.weight: shape [3, 16, 24] has no dim of 4 layers" in text
