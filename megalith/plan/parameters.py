"""Names, sizes and initial values of the parameters that one rank holds, in the order in which the
model registers them; no torch."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from megalith.config.model import ModelConfig
from megalith.plan.layers import branch_parameters, branches
from megalith.plan.layers.attention import source_norm_parameters
from megalith.plan.layers.base import (
    ExpertPart,
    HeldParameter,
    LayerKind,
    LayerRank,
    TensorPart,
    norm_parameters,
    tensor_part,
)
from megalith.plan.layers.embedding import bias_table, mtp_parameters, position_tables, token_table
from megalith.plan.stages import Stage, single_stage

WHOLE_LAYERS = LayerRank()
"""The only rank of layers that are not split."""


def distinct_ranks(
    model: ModelConfig, *, tp: int, experts: Sequence[ExpertPart] | None = None
) -> list[int]:
    """Return the first tensor-parallel rank of every group of ranks with equal shares of every
    layer.

    experts: expert shard of each rank; unset: experts are split over tp.
    """
    firsts: dict[tuple[TensorPart | HeldParameter, ...], int] = {}
    for rank in range(tp):
        own = None if experts is None else experts[rank]
        shares: list[TensorPart | HeldParameter] = []
        for layer in count_equal_layers(model):
            shares.append(tensor_part(model.at(layer), tp=tp, rank=rank))
            shares += layer_parameters(model, layer, tp=tp, tp_rank=rank, experts=own)
        firsts.setdefault(tuple(shares), rank)
    return list(firsts.values())


def count_equal_layers(model: ModelConfig) -> dict[int, int]:
    """Return the number of layers with the same parameters, by the first such layer."""
    firsts: dict[tuple[LayerKind | ModelConfig, ...], int] = {}
    counts: Counter[int] = Counter()
    for layer in range(model.num_layers):
        kinds = (one.kind for one in branches(model, layer))
        counts[firsts.setdefault((model.at(layer), *kinds), layer)] += 1
    return counts


def layer_parameters(
    model: ModelConfig,
    index: int,
    *,
    tp: int = 1,
    tp_rank: int = 0,
    experts: ExpertPart | None = None,
) -> list[HeldParameter]:
    """Return the parameters of a layer by its global number; `experts`: see `LayerRank`."""
    return [
        replace(one, name=f"layers.{index}.{one.name}")
        for one in _layer(model, index, LayerRank(tp, tp_rank, experts))
    ]


def _layer(model: ModelConfig, index: int, rank: LayerRank) -> list[HeldParameter]:
    return [one for branch in branches(model, index) for one in branch_parameters(branch, rank)]


def held_parameters(
    model: ModelConfig, stage: Stage | None = None, rank: LayerRank = WHOLE_LAYERS
) -> list[HeldParameter]:
    """Return the parameters that one rank holds of a pipeline stage; unset: of the whole model.

    A tied head and the tables of MTP layers are the embedding's parameters; a stage without the
    embedding holds copies of them. Every stage with layers has a copy of the table of relative
    positions, and the stage of the cross-layer source has its norm.
    """
    stage = stage or single_stage(model.num_layers, model.mtp.num_layers)
    table, places = token_table(model, rank), position_tables(model)
    held = [table, *places] if stage.embedding else []
    if stage.reads_biases(model):
        held.append(bias_table(model, rank))
    for index in stage.layers:
        held += layer_parameters(model, index, tp=rank.tp, tp_rank=rank.rank, experts=rank.experts)
    if model.cross is not None and model.cross.memory in stage.layers:
        held += source_norm_parameters(model)
    if stage.norm:
        held += norm_parameters("norm", model)
    if stage.loss and not model.tied_embeddings:
        held.append(token_table(model, rank, name="head.weight"))
    if stage.reads_table(model) and not stage.embedding:
        held.append(table)
    if stage.num_mtp_layers and not stage.embedding:
        held += places
    for depth in range(stage.num_mtp_layers):
        last = _layer(model, model.num_layers - 1, rank)
        held += [
            replace(one, name=f"mtp.{depth}.{one.name}") for one in mtp_parameters(model, last)
        ]
    return held


# --- initial values and per-parameter learning-rate factors (muP), by parameter name

EMBEDDINGS = ("embed.weight", "positions.weight")
"""Lookup tables that produce the input of the first layer."""

TABLES = (*EMBEDDINGS, "relative.weight")
"""Parameters that are looked up, not multiplied with."""

PER_MATRIX_RULES = ("muon", "soap", "adafactor")
"""Built-in update rules that need whole matrices, or sums over them."""

STACKED = ("kv", "kv_bias", "gate_up", "gate_up_bias")
"""Parameters that stack two matrices of the same shape."""


class InitialValues(NamedTuple):
    """Distribution of a parameter's initial values."""

    std: float
    uniform: bool = False
    """Uniform from -sqrt(3) std to sqrt(3) std; otherwise normal."""


class ParameterRates(NamedTuple):
    """Factors of one parameter for the optimizer's learning rate, eps and weight decay."""

    lr: float = 1.0
    eps: float = 1.0
    decay: float = 1.0
    """0: no weight decay."""

    lr_of: str = ""
    """Parameter group whose learning rate applies; empty: the schedule's."""

    decay_of: str = ""
    """Parameter group whose weight decay applies; empty: the schedule's."""

    vector_decays: bool = False
    """Whether weight decay applies although the parameter is a vector."""

    rule: str = ""
    """Update rule of the parameter; empty: that of optim.kind or optim.scalar_optimizer."""


PLAIN = ParameterRates()


def initial_values(
    model: ModelConfig, name: str, shape: tuple[int, ...], inputs: int, std: float
) -> InitialValues:
    """Return the initial distribution of a parameter of this global shape, whose layer sets `std`
    and whose last `inputs` dims are inputs.

    The first pattern of `init_overrides` that matches the name takes precedence over everything
    else. Source of xavier_uniform: Glorot and Bengio 2010, "Understanding the difficulty of
    training deep feedforward neural networks", equation 16.
    """
    override = next(
        (own for pattern, own in model.init_overrides if fnmatchcase(name, pattern)), None
    )
    if override is not None:
        return InitialValues(override)
    if std == 0 or inputs == 0 or name in TABLES[len(EMBEDDINGS) :]:
        return InitialValues(std)
    table = model.init_std if model.embedding_init_std is None else model.embedding_init_std
    if name in EMBEDDINGS or (name == "head.weight" and model.mup is not None):
        return InitialValues(table)
    if model.init == "xavier_uniform":
        return InitialValues(math.sqrt(2 / sum(_fans(name, shape, inputs))), uniform=True)
    return InitialValues(std if name == "head.weight" else std / math.sqrt(model.width_factor()))


def _fans(name: str, shape: tuple[int, ...], inputs: int) -> tuple[int, int]:
    """Return inputs and outputs of one matrix; experts and stacked parameters are several
    matrices."""
    outputs = shape[:-inputs]
    outputs = outputs[1:] if ".experts." in name else outputs
    outputs = outputs[1:] if name.rsplit(".", 1)[1] in STACKED else outputs
    return math.prod(shape[-inputs:]), math.prod(outputs)


def mup_factors(model: ModelConfig, rule: str, name: str, inputs: int) -> ParameterRates:
    """Return muP's factors for learning rate and eps of a parameter with this update rule and this
    many input dims; 1 for adapters and for parameters of a per-matrix rule.

    Embeddings with an `embedding_init_std` of their own have no weight decay. Source: Yang et al.
    2022, arXiv:2203.03466, table 8; eps: Wortsman et al. 2023, arXiv:2309.14322, section 3.4.
    """
    m, has_own_std = (
        model.width_factor(),
        name in EMBEDDINGS and model.embedding_init_std is not None,
    )
    plain = ParameterRates(decay=0.0) if has_own_std else PLAIN
    is_adapter = name.rsplit(".", 1)[1] in ("lora_a", "lora_b")
    if m == 1 or is_adapter or rule in PER_MATRIX_RULES:
        return plain
    hidden = inputs > 0 and name not in (*TABLES, "head.weight")
    if rule == "sgd":
        return plain if hidden else plain._replace(lr=m)
    return ParameterRates(lr=1 / m, eps=1 / m) if hidden else plain
