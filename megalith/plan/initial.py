"""Initial values and per-parameter learning-rate factors (muP), by parameter name; no torch."""

import math
from fnmatch import fnmatchcase
from typing import NamedTuple

from megalith.config.model import ModelConfig

EMBEDDINGS = ("embed.weight", "positions.weight")
"""Lookup tables that produce the input of the first layer."""

TABLES = (*EMBEDDINGS, "relative.weight")
"""Parameters that are looked up, not multiplied with."""

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


def mup_factors(model: ModelConfig, optimizer: str, name: str, inputs: int) -> ParameterRates:
    """Return muP's factors for learning rate and eps of a parameter with this many input dims; 1
    for adapters.

    Embeddings with an `embedding_init_std` of their own have no weight decay. Source: Yang et al.
    2022, arXiv:2203.03466, table 8; eps: Wortsman et al. 2023, arXiv:2309.14322, section 3.4.
    """
    m, has_own_std = (
        model.width_factor(),
        name in EMBEDDINGS and model.embedding_init_std is not None,
    )
    plain = ParameterRates(decay=0.0) if has_own_std else PLAIN
    if m == 1 or name.rsplit(".", 1)[1] in ("lora_a", "lora_b"):
        return plain
    hidden = inputs > 0 and name not in (*TABLES, "head.weight")
    if optimizer == "sgd":
        return plain if hidden else plain._replace(lr=m)
    return ParameterRates(lr=1 / m, eps=1 / m) if hidden else plain
