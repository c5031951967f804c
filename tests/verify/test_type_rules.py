"""Every type rule accepts exactly the types that it declares."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import spmd_types as checker
import torch
from spmd_types import I, MeshAxis, P, R, SpmdTypeError, V
from spmd_types.checker import typecheck
from torch import Tensor

from megalith.kernels.attention.scores import Distances, PairBiases, Scores
from megalith.kernels.attention.split_kv import span_attention
from megalith.parallel import collectives
from megalith.parallel.context import RingPairs, ring_attention
from megalith.parallel.cross_entropy import VocabShard, token_losses
from megalith.parallel.group import Group, single_rank_group
from megalith.plan.context import KeySpans
from megalith.verify.type_rules import find_types, installed_rules, our_functions


def test_every_autograd_function_has_a_type_rule() -> None:
    assert len(our_functions()) >= 15
    assert [
        cls
        for cls in our_functions()
        if not hasattr(cls, "moves") and not hasattr(cls, "reference")
    ] == []


GROUP = Group(axes=("tp_kv", "tp_copy"), ranks=tuple(range(8, 16)), rank=3, name="paper")
AXES = {
    "dp": MeshAxis.of(4, 8),
    "cp": MeshAxis.of(1, 8),
    "tp_kv": MeshAxis.of(4, 2),
    "tp_copy": MeshAxis.of(2, 1),
}
SIZES = [1, 2, 1, 1, 1, 1, 1, 0]


def in_two(x: Tensor) -> Tensor:
    """An exchange whose beginning and end lie apart."""
    async_all_to_all = collectives.AsyncAllToAll(GROUP, SIZES, [2] * 8)
    return collectives.wait_all_to_all(
        collectives.start_all_to_all(x, async_all_to_all), async_all_to_all
    )


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], Any, Any, tuple[int, int]]] = {
    "copy_to_tp": (lambda x: collectives.copy_to_tp(x, GROUP), I, R, (8, 2)),
    "reduce_from_tp": (lambda x: collectives.reduce_from_tp(x, GROUP), P, I, (8, 2)),
    "all_reduce": (lambda x: collectives.all_reduce(x, GROUP), P, R, (8, 2)),
    "gather": (lambda x: collectives.all_gather(x, GROUP, dim=1), V, R, (8, 16)),
    "gather_uneven": (
        lambda x: collectives.all_gather(x, GROUP, sizes=[8] * 7 + [4]),
        V,
        R,
        (60, 2),
    ),
    "reduce_scatter": (lambda x: collectives.reduce_scatter(x, GROUP), P, V, (1, 2)),
    "reduce_scatter_uneven": (
        lambda x: collectives.reduce_scatter(x, GROUP, sizes=SIZES),
        P,
        V,
        (1, 2),
    ),
    "all_gather_invariant": (lambda x: collectives.all_gather_invariant(x, GROUP), V, I, (64, 2)),
    "scatter_to_sp": (lambda x: collectives.scatter_to_sp(x, GROUP), I, V, (1, 2)),
    "all_to_all": (
        lambda x: collectives.all_to_all(x, GROUP, send=SIZES, receive=[2] * 8),
        V,
        V,
        (16, 2),
    ),
    "start_all_to_all": (lambda x: in_two(x), V, V, (16, 2)),
    "partial": (lambda x: collectives.mark_partial(x, GROUP), V, P, (8, 2)),
}


@contextmanager
def checking() -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    with (
        installed_rules(counts),
        checker.traceback_filtering("off"),
        typecheck(),
        checker.set_current_mesh(AXES),
    ):
        yield counts


def tensor(tp: Any, *shape: int, dp: Any = V, grad: bool = True) -> Tensor:
    x = torch.empty(shape or (8, 2), device="meta", requires_grad=grad)
    checker.assert_type(x, {AXES["dp"]: dp, AXES["tp_kv"]: tp, AXES["tp_copy"]: tp})
    return x


@pytest.mark.parametrize("name", CALLS)
def test_collective_changes_types_of_its_own_axes_only(name: str) -> None:
    call, before, after, shape = CALLS[name]
    with checking() as counts:
        x = tensor(before)
        out = call(x)
        assert find_types(out) == {"dp": V, "tp_kv": after, "tp_copy": after}
        assert find_types(x) == {"dp": V, "tp_kv": before, "tp_copy": before}
        out.sum().backward(torch.empty((), device="meta"))
    assert out.shape == shape and x.grad is not None and x.grad.shape == (8, 2)
    assert sum(counts.values()) == (name != "partial")


@pytest.mark.parametrize("given", [R, I, V, P])
@pytest.mark.parametrize("name", CALLS)
def test_collective_rejects_every_other_type(name: str, given: Any) -> None:
    call, before, _, _ = CALLS[name]
    if given is before:
        return
    function = name.removesuffix("_uneven")
    with (
        checking(),
        pytest.raises(
            SpmdTypeError, match=f"{function} over MeshAxis\\(4:2\\) expects {before!r} \\("
        ),
    ):
        call(tensor(given))


def ring(*, sinks: Any = None, values: Any = None, **given: Any) -> Tensor:
    """A ring over tp, of tensors of these types."""
    q, k, v = (
        tensor(given.get(name, V), 8, heads, 2) for name, heads in (("q", 4), ("k", 2), ("v", 2))
    )
    offsets = None if sinks is None else tensor(sinks, 4)
    numbers = torch.arange(8)
    biases = (
        None
        if values is None
        else [PairBiases(tensor(values, 4, 7), Distances(numbers, numbers, 3))] * 8
    )
    spans = [KeySpans(1, np.zeros((8, 2), np.int64), ())] * 8
    return ring_attention(
        q, k, v, GROUP, RingPairs(spans, biases=biases), Scores(softcap=2.0), offsets
    )


def test_ring_attention_has_varying_inputs_and_outputs() -> None:
    with checking() as counts:
        out = ring()
        assert find_types(out) == {"dp": V, "tp_kv": V, "tp_copy": V} and out.shape == (8, 4, 2)
        out.sum().backward(torch.empty((), device="meta"))
    assert counts == {"ring_attention over tp_kv_tp_copy": 1}


@pytest.mark.parametrize("given", [R, I, P])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_ring_attention_rejects_replicated_and_partial_inputs(name: str, given: Any) -> None:
    with (
        checking(),
        pytest.raises(
            SpmdTypeError, match=f"ring_attention, {name} over MeshAxis.* expects V .* got"
        ),
    ):
        ring(**{name: given})


def test_sinks_are_replicated_over_the_ring() -> None:
    with checking():
        assert find_types(ring(sinks=R)) == {"dp": V, "tp_kv": V, "tp_copy": V}
    for given in (V, I, P):
        with (
            checking(),
            pytest.raises(
                SpmdTypeError, match="ring_attention, sinks over MeshAxis.* expects R .* got"
            ),
        ):
            ring(sinks=given)


def test_relative_biases_are_replicated_over_the_ring() -> None:
    with checking():
        assert find_types(ring(values=R)) == {"dp": V, "tp_kv": V, "tp_copy": V}
    for given in (V, I, P):
        with (
            checking(),
            pytest.raises(SpmdTypeError, match="ring_attention, values over .* expects R .* got"),
        ):
            ring(values=given)


def test_heads_sharded_over_tp_have_sharded_sinks() -> None:
    spans = KeySpans(2, np.zeros((4, 2), np.int64), ())
    with checking():
        q, k, v = (tensor(V, 8, heads, 2) for heads in (4, 2, 2))
        assert (
            find_types(span_attention(q, k, v, spans, Scores(softcap=2.0), tensor(V, 4, dp=R)))[
                "tp_kv"
            ]
            is V
        )
        with pytest.raises(SpmdTypeError):
            span_attention(q, k, v, spans, Scores(), tensor(P, 4, dp=R))


def test_replicated_and_invariant_are_equal_without_gradient() -> None:
    with checking():
        assert find_types(collectives.copy_to_tp(tensor(R, grad=False), GROUP))["tp_kv"] is R
        assert find_types(collectives.scatter_to_sp(tensor(R, grad=False), GROUP))["tp_kv"] is V
        with torch.no_grad():
            assert find_types(collectives.copy_to_tp(tensor(R), GROUP))["tp_kv"] is R
        with pytest.raises(SpmdTypeError, match="but got V"):
            collectives.copy_to_tp(tensor(V, grad=False), GROUP)


def test_tensor_of_one_tp_axis_is_rejected_over_both() -> None:
    x = torch.empty(8, 2, device="meta")
    with (
        checking(),
        pytest.raises(SpmdTypeError, match="gather over MeshAxis\\(2:1\\) expects V .* but got R"),
    ):
        checker.assert_type(x, {AXES["dp"]: V, AXES["tp_kv"]: V, AXES["tp_copy"]: R})
        collectives.all_gather(x, GROUP)


def test_tensor_without_types_is_rejected() -> None:
    with (
        checking(),
        pytest.raises(
            SpmdTypeError,
            match="over .* but got \\? \\(created outside of the check",
        ),
    ):
        collectives.reduce_from_tp(torch.empty(8, 2, device="meta"), GROUP)


def test_group_with_another_size_than_its_axes_is_rejected() -> None:
    half = Group(axes=("tp_kv", "tp_copy"), ranks=(8, 9), rank=0, name="paper")
    with checking(), pytest.raises(SpmdTypeError, match="has 2 ranks, but its axes do not"):
        collectives.copy_to_tp(tensor(I), half)


def test_tokens_of_the_expert_grid_are_typed_on_the_dense_grid() -> None:
    with checking():
        x = torch.empty(8, 2, device="meta")
        with checker.set_current_mesh({"edp": MeshAxis.of(2, 16), "ep": MeshAxis.of(16, 1)}):
            checker.assert_type(x, {MeshAxis.of(2, 16): V, MeshAxis.of(16, 1): V})
        assert find_types(collectives.all_gather(x, GROUP)) == {"dp": V, "tp_kv": R, "tp_copy": R}


def losses(x: Tensor, weight: Tensor, labels: Tensor, group: Group = GROUP) -> Tensor:
    return token_losses(x, weight, labels, vocab=VocabShard(group, 0, 40))


def labels_of(tp: Any) -> Tensor:
    labels = torch.empty(8, device="meta", dtype=torch.int64)
    checker.assert_type(labels, {AXES["dp"]: V, AXES["tp_kv"]: tp, AXES["tp_copy"]: tp})
    return labels


def test_token_losses_are_invariant_over_vocabulary_shards() -> None:
    with checking():
        x, weight = tensor(R), tensor(V, 5, 2, dp=R)
        out = losses(x, weight, labels_of(R))
        assert out.shape == (8,) and find_types(out) == {"dp": V, "tp_kv": I, "tp_copy": I}
        collectives.mark_partial(
            out.sum(), Group(axes=("dp",), ranks=(3, 11, 19, 27), rank=1, name="paper")
        ).backward()
    assert x.grad is not None and weight.grad is not None


@pytest.mark.parametrize(
    ("x", "weight", "labels", "text"),
    [
        (I, V, R, "token_losses, x over .* expects R .* got I .* Use copy_to_tp first"),
        (V, V, R, "token_losses, x over .* expects R .* got V .* Use gather first"),
        (R, R, R, "token_losses, weight over .* expects V"),
        (R, V, V, "token_losses, labels over .* expects R"),
    ],
)
def test_loss_rejects_wrong_operand_types(x: Any, weight: Any, labels: Any, text: str) -> None:
    with checking(), pytest.raises(SpmdTypeError, match=text):
        losses(tensor(x), tensor(weight, 5, 2, dp=R), labels_of(labels))


def test_loss_over_one_vocabulary_shard_is_varying() -> None:
    with checking():
        out = losses(
            tensor(R), tensor(V, 5, 2, dp=R), labels_of(R), single_rank_group("tp_kv", "tp_copy")
        )
        assert find_types(out)["tp_kv"] is V
