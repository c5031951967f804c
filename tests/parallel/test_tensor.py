"""Every layer that tensor parallelism cuts computes what it does whole: outputs, gradients of
inputs and weights."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from megalith.models.decoder import allocate
from megalith.parallel.collectives import all_gather
from megalith.parallel.cross_entropy import LogitTransform, VocabShard, linear_cross_entropy
from megalith.parallel.group import Group, all_reduce_, local_range
from megalith.parallel.tensor import (
    ONES,
    ZEROS,
    ColumnParallelLinear,
    Init,
    ParameterSpec,
    RowParallelLinear,
    SequenceParallelComm,
    TensorParallelComm,
    TPComm,
    VocabParallelEmbedding,
    VocabParallelHead,
)
from megalith.plan.shards import Shard, split_evenly
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tolerance import FP64, assert_equals

TOKENS, INPUTS, OUTPUTS, VOCAB = 12, 5, 7, 17  # tokens divide by 2 and 3, nothing else does
START = Init(1.0)


def seeded(*shape: int, seed: int = 0) -> Tensor:
    """The same float64 numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def group_of(rank: int, world: int) -> Group:
    """All ranks as the tensor-parallel group."""
    return world_group(rank, world, "tp_kv", "tp_copy")


def region_of(group: Group, sp: bool) -> TPComm:
    return SequenceParallelComm(group) if sp else TensorParallelComm(group)


def cut(shard: Shard, dim: int, group: Group) -> Shard:
    """My part of one dim, as even as can be."""
    return shard.split_dim(dim, split_evenly(shard.shape[dim], group.size), group.rank, group.axes)


def part(x: Tensor, dim: int, group: Group) -> Tensor:
    """The same part of a whole tensor."""
    start, stop = local_range(split_evenly(x.shape[dim], group.size), group.rank)
    return x.narrow(dim, start, stop - start)


def filled(layer: nn.Module, values: dict[str, Tensor]) -> None:
    """Give the layer memory, and each parameter my box of its whole value."""
    allocate(layer, torch.device("cpu"))
    with torch.no_grad():
        for name, declared in layer.__dict__["param_specs"].items():
            box = values[name][tuple(slice(start, stop) for start, stop in declared.shard.box)]
            getattr(layer, name).copy_(box.reshape(declared.shard.matrix_shape))


def same(name: str, mine: Tensor | None, reference: Tensor | None) -> None:
    assert mine is not None and reference is not None, name
    assert_equals(name, mine.detach(), reference.detach().reshape(mine.shape), FP64)


def local_input(x: Tensor, group: Group, sp: bool) -> Tensor:
    """Activations outside divided work: all tokens, or my part of them."""
    return (part(x, 0, group) if sp else x).clone().requires_grad_()


def column(rank: int, world: int, sp: bool) -> None:
    """Two stacked matrices with biases, cut along their outputs."""
    group = group_of(rank, world)
    values = {"a": seeded(OUTPUTS, INPUTS, seed=1), "b": seeded(4, INPUTS, seed=2)}
    values |= {"a_bias": seeded(OUTPUTS, seed=3), "b_bias": seeded(4, seed=4)}
    shards = {
        name: cut(Shard.full(f"x.{name}", tuple(v.shape), inputs=v.dim() - 1), 0, group)
        for name, v in values.items()
    }
    weights = [ParameterSpec(shards[name], START) for name in ("a", "b")]
    biases = [ParameterSpec(shards[name], ZEROS) for name in ("a_bias", "b_bias")]
    layer = ColumnParallelLinear(weights, biases, region_of(group, sp), dtype=torch.float64)
    filled(layer, values)
    x, wanted = seeded(TOKENS, INPUTS, seed=5), seeded(TOKENS, OUTPUTS + 4, seed=6)
    local = local_input(x, group, sp)
    y = layer(local)
    dense = {name: value.clone().requires_grad_() for name, value in (values | {"x": x}).items()}
    a, b = (dense["x"] @ dense[name].T + dense[f"{name}_bias"] for name in ("a", "b"))
    (torch.cat([a, b], 1) * wanted).sum().backward()
    pieces = wanted.split([OUTPUTS, 4], dim=1)
    same("y", y, torch.cat([part(a, 1, group), part(b, 1, group)], 1))
    (y * torch.cat([part(piece, 1, group) for piece in pieces], 1)).sum().backward()
    same("dx", local.grad, part(dense["x"].grad, 0, group) if sp else dense["x"].grad)  # type: ignore[arg-type]
    for name in values:
        gradient = dense[name].grad
        assert gradient is not None
        same(name, getattr(layer, name).grad, part(gradient, 0, group))


def row(rank: int, world: int, sp: bool) -> None:
    """One matrix with a bias, cut along its inputs."""
    group = group_of(rank, world)
    tp_comm = region_of(group, sp)
    values = {"w": seeded(OUTPUTS, INPUTS, seed=1), "w_bias": seeded(OUTPUTS, seed=2)}
    weight = cut(Shard.full("x.w", (OUTPUTS, INPUTS)), 1, group)
    bias = Shard.full("x.w_bias", (OUTPUTS,), invariant=tp_comm.invariant, inputs=0)
    layer = RowParallelLinear(
        ParameterSpec(weight, START), ParameterSpec(bias, ZEROS), tp_comm, dtype=torch.float64
    )
    filled(layer, values)
    x, wanted = seeded(TOKENS, INPUTS, seed=5), seeded(TOKENS, OUTPUTS, seed=6)
    actual = part(x, 1, group).clone().requires_grad_()
    y = layer(actual)
    dense = {name: value.clone().requires_grad_() for name, value in (values | {"x": x}).items()}
    reference = dense["x"] @ dense["w"].T + dense["w_bias"]
    (reference * wanted).sum().backward()
    same("y", y, part(reference, 0, group) if sp else reference)
    (y * (part(wanted, 0, group) if sp else wanted)).sum().backward()
    assert dense["x"].grad is not None and dense["w"].grad is not None
    same("dx", actual.grad, part(dense["x"].grad, 1, group))
    same("dw", layer.w.grad, part(dense["w"].grad, 1, group))
    summed = layer.w_bias.grad.clone()
    # the rule that its shard states
    same("db", all_reduce_(summed, group) if sp else summed, dense["w_bias"].grad)


def embedding(rank: int, world: int, sp: bool) -> None:
    """A table cut along its rows."""
    group = group_of(rank, world)
    table, ids = seeded(VOCAB, INPUTS, seed=1), torch.arange(TOKENS) * 5 % VOCAB
    ids[3] = ids[0]  # a row that is used twice
    layer = VocabParallelEmbedding(
        ParameterSpec(cut(Shard.full("e.weight", (VOCAB, INPUTS)), 0, group), START),
        region_of(group, sp),
        dtype=torch.float64,
    )
    filled(layer, {"weight": table})
    wanted = seeded(TOKENS, INPUTS, seed=6)
    y, dense = layer(ids), table.clone().requires_grad_()
    reference = functional.embedding(ids, dense)
    (reference * wanted).sum().backward()
    same("y", y, part(reference, 0, group) if sp else reference)
    (y * (part(wanted, 0, group) if sp else wanted)).sum().backward()
    assert dense.grad is not None
    same("dw", layer.weight.grad, part(dense.grad, 0, group))


def head(rank: int, world: int, sp: bool) -> None:
    """Losses over a vocabulary that is cut along its rows, some labels masked; padded rows are
    never chosen."""
    group = group_of(rank, world)
    known = VOCAB - 2
    table, x = seeded(VOCAB, INPUTS, seed=1), seeded(TOKENS, INPUTS, seed=2)
    labels = torch.arange(TOKENS) * 4 % known
    labels[[0, 7]] = -1
    shard = cut(Shard.full("h.weight", (VOCAB, INPUTS)), 0, group)
    for each, logit_transform in product(
        (False, True), (LogitTransform(), LogitTransform(0.6), LogitTransform(1.4, softcap=1.5))
    ):
        spread = 0.0 if each else logit_transform.scale / 8
        layer = VocabParallelHead(
            ParameterSpec(shard, START),
            region_of(group, sp),
            VocabShard(group, shard.box[0][0], known, logit_transform),
            tied=None,
            dtype=torch.float64,
            build_loss=lambda backends, smoothing=spread * (known - 1) / known: partial(
                linear_cross_entropy, smoothing=smoothing
            ),
        )
        filled(layer, {"weight": table})
        actual, dense_x, dense = (
            local_input(x, group, sp),
            x.clone().requires_grad_(),
            table.clone().requires_grad_(),
        )
        logits = dense_x @ dense[:known].T * logit_transform.scale
        if logit_transform.softcap is not None:
            logits = logit_transform.softcap * torch.tanh(logits / logit_transform.softcap)
        reference = functional.cross_entropy(
            logits,
            labels,
            ignore_index=-1,
            reduction="none" if each else "sum",
            label_smoothing=spread,
        )
        result = layer.token_losses(actual, labels) if each else layer.loss(actual, labels)
        same("loss", result, reference)
        evaluated_loss = functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")
        same("evaluated loss", layer.loss(actual.detach(), labels, evaluating=True), evaluated_loss)
        weights = seeded(TOKENS, seed=7) if each else torch.tensor(3.0)
        (result * weights).sum().backward()
        (reference * weights).sum().backward()
        assert dense_x.grad is not None and dense.grad is not None
        same("dx", actual.grad, part(dense_x.grad, 0, group) if sp else dense_x.grad)
        same("dw", layer.weight.grad, part(dense.grad, 0, group))
        with torch.no_grad():
            local_logits = layer.logits(all_gather(actual, group) if sp else actual)
            same("logits", local_logits, logits[:, slice(*shard.box[0])])


def regions(rank: int, world: int, sp: bool) -> None:
    """The two ways, and what they promise of parameters that are used between them."""
    group = group_of(rank, world)
    tp_comm = region_of(group, sp)
    assert tp_comm.invariant == (frozenset() if sp else {"tp_kv", "tp_copy"})
    x = seeded(TOKENS, 3)
    entered = tp_comm.prepare_input(part(x, 0, group).contiguous() if sp else x)
    same("entered", entered, x)
    parts = [seeded(TOKENS, 3, seed=r) for r in range(world)]
    left, total = tp_comm.reduce_output(parts[rank]), torch.stack(parts).sum(0)
    same("left", left, part(total, 0, group) if sp else total)


@pytest.mark.parametrize("sp", [False, True], ids=["whole", "sp"])
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize(
    "layer", [column, row, embedding, head, regions], ids=lambda layer: layer.__name__
)
def test_tensor_parallel_layers_match_one_rank(layer: object, tp: int, sp: bool) -> None:
    assert callable(layer)
    run_ranks(layer, tp, sp)


def test_tied_head_uses_the_parameter_of_the_embedding() -> None:
    group = Group(("tp_kv", "tp_copy"), (0,), 0)
    shard = Shard.full("embed.weight", (VOCAB, INPUTS))
    embed = VocabParallelEmbedding(
        ParameterSpec(shard, START), TensorParallelComm(group), dtype=torch.float32
    )
    tied = VocabParallelHead(
        ParameterSpec(shard, START),
        TensorParallelComm(group),
        VocabShard(group, 0, VOCAB),
        tied=embed.weight,
        dtype=torch.float32,
    )
    assert tied.weight is embed.weight
    assert "param_specs" not in tied.__dict__ and list(embed.__dict__["param_specs"]) == ["weight"]


def test_layers_are_built_without_memory() -> None:
    group = Group(("tp_kv", "tp_copy"), (0, 1), 1)
    shard = cut(Shard.full("x.w", (2**30, 4096)), 0, group)
    layer = ColumnParallelLinear(
        [ParameterSpec(shard, ONES)], [], TensorParallelComm(group), dtype=torch.bfloat16
    )
    assert layer.w.is_meta and layer.w.shape == (2**29, 4096) and layer.w.dtype == torch.bfloat16
    assert layer.accumulated_parameters() == [layer.w]
