"""How parameters start and how fast they learn, by name: spreads of first weights, and muP's
factors; no torch."""

import math
from fnmatch import fnmatchcase
from typing import NamedTuple

from megalith.config.model import ModelConfig

EMBEDDINGS = ("embed.weight", "positions.weight")
"""What tokens begin as."""

TABLES = (*EMBEDDINGS, "relative.weight")
"""Looked up, not multiplied with."""

STACKED = ("kv", "kv_bias", "gate_up", "gate_up_bias")
"""Two matrices of the same shape, one after the other."""


class InitialValues(NamedTuple):
    """How the values of a parameter are spread."""

    std: float
    uniform: bool = False
    """From -sqrt(3) std to sqrt(3) std; else normal."""


class ParameterRates(NamedTuple):
    """What an optimizer's settings are multiplied by for one parameter."""

    lr: float = 1.0
    eps: float = 1.0
    decay: float = 1.0
    """0: its weights do not decay."""

    lr_of: str = ""
    """The group whose learning rate it has; empty: the schedule's."""

    decay_of: str = ""
    """The group whose weight decay it has; empty: the schedule's."""

    vector_decays: bool = False
    """Of a vector: it decays as matrices do."""


PLAIN = ParameterRates()


def start_of(
    model: ModelConfig, name: str, shape: tuple[int, ...], inputs: int, std: float
) -> InitialValues:
    """How a parameter of this global shape starts, whose layer says `std`; its last `inputs` dims
    are inputs.

    The first of `init_overrides` that fits the name decides alone. Source of xavier_uniform: Glorot
    and Bengio 2010, "Understanding the difficulty of training deep feedforward neural networks",
    equation 16.
    """
    given = next((own for pattern, own in model.init_overrides if fnmatchcase(name, pattern)), None)
    if given is not None:
        return InitialValues(given)
    if std == 0 or inputs == 0 or name in TABLES[len(EMBEDDINGS) :]:
        return InitialValues(std)
    table = model.init_std if model.embedding_init_std is None else model.embedding_init_std
    if name in EMBEDDINGS or (name == "head.weight" and model.mup is not None):
        return InitialValues(table)
    if model.init == "xavier_uniform":
        return InitialValues(math.sqrt(2 / sum(_fans(name, shape, inputs))), uniform=True)
    return InitialValues(std if name == "head.weight" else std / math.sqrt(model.width_factor()))


def _fans(name: str, shape: tuple[int, ...], inputs: int) -> tuple[int, int]:
    """Inputs and outputs of one matrix; several experts, and stacked ones, are several matrices."""
    outputs = shape[:-inputs]
    outputs = outputs[1:] if ".experts." in name else outputs
    outputs = outputs[1:] if name.rsplit(".", 1)[1] in STACKED else outputs
    return math.prod(shape[-inputs:]), math.prod(outputs)


def rates_of(model: ModelConfig, optimizer: str, name: str, inputs: int) -> ParameterRates:
    """What muP makes of rate and eps for a parameter with so many dims of inputs; adapters learn at
    the given rate.

    Tables whose spread is chosen for them keep it: they do not decay towards zero. Source: Yang et
    al. 2022, arXiv:2203.03466, table 8; eps: Wortsman et al. 2023, arXiv:2309.14322, section 3.4.
    """
    m, kept = model.width_factor(), name in EMBEDDINGS and model.embedding_init_std is not None
    plain = ParameterRates(decay=0.0) if kept else PLAIN
    if m == 1 or name.rsplit(".", 1)[1] in ("lora_a", "lora_b"):
        return plain
    hidden = inputs > 0 and name not in (*TABLES, "head.weight")
    if optimizer == "sgd":
        return plain if hidden else plain._replace(lr=m)
    return ParameterRates(lr=1 / m, eps=1 / m) if hidden else plain
