"""Facts about the checker library that megalith/verify/types.py builds on; an upgrade that changes
one is seen here."""

import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import spmd_types as checker
import torch
from spmd_types import I, MeshAxis, P, R, SpmdTypeError, V, rules
from spmd_types.checker import typecheck
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

DP, TP = MeshAxis.of(4, 8), MeshAxis.of(8, 1)
MESH = {"dp": DP, "cp": MeshAxis.of(1, 8), "tp": TP}
Op = Callable[[Tensor], Any]


@pytest.fixture
def checking() -> Iterator[None]:
    with checker.traceback_filtering("off"), typecheck(), checker.set_current_mesh(MESH):
        yield


def tensor(tp: Any, *shape: int, dp: Any = R, grad: bool = True) -> Tensor:
    """Return a leaf of those types, of shape [4, 4] by default."""
    x = torch.empty(shape or (4, 4), device="meta", requires_grad=grad)
    checker.assert_type(x, {DP: dp, TP: tp})
    return x


def along_tp(x: Any) -> Any:
    return checker.get_local_type(x)[TP]


def test_version_of_the_checker_is_pinned() -> None:
    assert importlib.metadata.version("spmd_types") == "0.3.1"


# --- types of products and sums


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [(R, R, R), (I, I, I), (V, V, V), (R, V, V), (V, R, V), (P, R, P), (R, P, P)],
)
def test_matmul_has_the_type(checking: None, left: Any, right: Any, result: Any) -> None:
    assert along_tp(tensor(left) @ tensor(right)) is result
    assert along_tp(tensor(left) * tensor(right)) is result


@pytest.mark.parametrize(("left", "right"), [(I, V), (I, R), (I, P), (P, V), (P, P)])
def test_matmul_is_rejected(checking: None, left: Any, right: Any) -> None:
    with pytest.raises(SpmdTypeError, match="MeshAxis\\(8:1\\)"):
        tensor(left) @ tensor(right)


@pytest.mark.parametrize(("left", "right"), [(P, R), (P, V), (P, I), (I, R), (I, V)])
def test_sum_is_rejected(checking: None, left: Any, right: Any) -> None:
    with pytest.raises(SpmdTypeError):
        tensor(left) + tensor(right)


def test_contraction_of_two_sharded_tensors_is_not_typed_as_partial(checking: None) -> None:
    """The reason why every such line says `partial`."""
    assert along_tp(tensor(V) @ tensor(V)) is V


PASSES_P: dict[str, Op] = {
    "add": lambda x: x + x,
    "sub": lambda x: x - x,
    "times a number": lambda x: 2.0 * x,
    "divided by a number": lambda x: x / 2,
    "sum": lambda x: x.sum(),
    "reshape": lambda x: x.reshape(2, 8),
    "view": lambda x: x.view(16),
    "split": lambda x: x.split([1, 3])[1],
    "chunk": lambda x: x.chunk(2)[0],
    "cat": lambda x: torch.cat([x, x]),
    "transpose": lambda x: x.transpose(0, 1),
    "T": lambda x: x.T,
    "detach": lambda x: x.detach(),
}
REFUSES_P: dict[str, Op] = {
    "to": lambda x: x.to(torch.float64),
    "float": lambda x: x.double(),
    "index": lambda x: x[:2],
    "masked_fill": lambda x: x.masked_fill(torch.ones(4, 4, dtype=torch.bool, device="meta"), 0.0),
    "linear": lambda x: torch.nn.functional.linear(x, tensor(R)),
    "relu": lambda x: x.relu(),
    "plus a number": lambda x: x + 1.0,
    "divisor": lambda x: 1.0 / x,
}


@pytest.mark.parametrize("name", PASSES_P)
def test_partial_sum_passes(checking: None, name: str) -> None:
    assert along_tp(PASSES_P[name](tensor(P))) is P


@pytest.mark.parametrize("name", REFUSES_P)
def test_partial_sum_is_rejected(checking: None, name: str) -> None:
    with pytest.raises(SpmdTypeError):
        REFUSES_P[name](tensor(P))


@pytest.mark.parametrize(("fixed", "free", "result"), [(I, R, I), (R, I, R)])
def test_replicated_and_invariant_mix_if_one_has_no_gradient(
    checking: None, fixed: Any, free: Any, result: Any
) -> None:
    assert along_tp(tensor(fixed) * tensor(free, grad=False)) is result


def test_number_that_depends_on_the_rank_is_not_detected(checking: None) -> None:
    rank = 3
    assert along_tp(tensor(R) * rank) is R
    assert along_tp(tensor(R)[rank:]) is R


# --- what is typed, and when


@pytest.mark.parametrize(
    "make", [torch.zeros, torch.ones, lambda n, **kw: torch.full((n,), 1.0, **kw), torch.arange]
)
def test_constants_are_replicated(checking: None, make: Callable[..., Tensor]) -> None:
    assert along_tp(make(4, device="meta")) is R


@pytest.mark.parametrize("make", [torch.empty, torch.randn])
def test_other_new_tensors_have_no_type_and_are_rejected(
    checking: None, make: Callable[..., Tensor]
) -> None:
    x = make(4, device="meta")
    assert checker.get_local_type(x) == {}
    with pytest.raises(SpmdTypeError, match="missing axis"):
        x + 1


@pytest.mark.parametrize(("has", "asked"), [(R, I), (I, R), (V, R), (P, V), (V, I)])
def test_asserting_another_type_is_rejected(checking: None, has: Any, asked: Any) -> None:
    with pytest.raises(SpmdTypeError, match="mismatch"):
        checker.assert_type(tensor(has), {TP: asked})


def test_asserting_partial_of_a_varying_tensor_is_accepted(checking: None) -> None:
    """The reason why our rules compare types themselves."""
    assert along_tp(checker.assert_type(tensor(V), {TP: P})) is P


def test_axis_of_one_rank_is_removed(checking: None) -> None:
    names = checker.current_mesh_names()
    assert names == {"dp": DP, "tp": TP}
    x = checker.assert_type(torch.empty(2, device="meta"), {DP: R, MESH["cp"]: V, TP: R})
    assert set(checker.get_local_type(x)) == {DP, TP}


def test_axis_is_its_size_and_stride() -> None:
    assert (
        MeshAxis.of(8, 1) == TP and hash(MeshAxis.of(8, 1)) == hash(TP) and MeshAxis.of(8, 2) != TP
    )
    assert TP.size() == 8
    assert repr(TP) == "MeshAxis(8:1)"


def test_varying_tokens_convert_to_another_grid_and_mixed_ones_do_not(
    checking: None,
) -> None:
    other = frozenset({MeshAxis.of(2, 16), MeshAxis.of(16, 1)})
    crossed = checker.reinterpret_mesh(tensor(V, dp=V), other)
    assert set(checker.get_local_type(crossed).values()) == {V}
    with pytest.raises(SpmdTypeError):
        checker.reinterpret_mesh(tensor(I, dp=V), other)


# --- autograd functions


class Untyped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor | None = None) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2


def with_hook(hook: Any) -> Any:
    return type("Hooked", (Untyped,), {"spmd_typecheck": hook})


def test_autograd_function_without_a_rule_is_rejected(checking: None) -> None:
    with pytest.raises(SpmdTypeError, match="not registered"):
        with_hook(None).apply(tensor(R))


def test_a_hook_runs_after_the_function_and_names_its_arguments(checking: None) -> None:
    def hook(out: Tensor, *, x: Tensor) -> None:
        rules.ignore(x)
        checker.assert_type(out, {DP: R, TP: V})

    assert along_tp(with_hook(staticmethod(hook)).apply(tensor(I))) is V


def test_a_hook_may_be_an_object_that_can_be_called(checking: None) -> None:
    class Hook:
        def __call__(self, out: Tensor, *, x: Tensor) -> None:
            rules.ignore(x)
            checker.assert_type(out, {DP: R, TP: V})

    assert along_tp(with_hook(Hook()).apply(tensor(I))) is V


def test_hook_that_omits_an_argument_is_rejected(checking: None) -> None:
    def hook(out: Tensor, *, x: Tensor) -> None:
        rules.ignore(x)
        checker.assert_type(out, {DP: R, TP: V})

    with pytest.raises(SpmdTypeError, match="'y' was not accounted for"):
        with_hook(staticmethod(hook)).apply(tensor(R), tensor(R))


def test_hook_that_leaves_the_result_untyped_is_rejected(checking: None) -> None:
    with pytest.raises(SpmdTypeError, match="left untyped"):
        with_hook(staticmethod(lambda out, *, x: rules.ignore(x))).apply(tensor(R))


def test_a_function_can_have_the_types_of_its_plain_composition(checking: None) -> None:
    Fused: Any = type("Fused", (Untyped,), {})
    checker.register_decomposition(Fused, lambda x: x * tensor(V))
    assert along_tp(Fused.apply(tensor(R))) is V
    with pytest.raises(SpmdTypeError):
        Fused.apply(tensor(I))
    del Fused.typecheck_forward  # all that has to be undone


def test_an_einsum_rule_follows_its_operands(checking: None) -> None:
    assert along_tp(rules.einsum("th,vh->tv", tensor(R), tensor(V))) is V
    with pytest.raises(SpmdTypeError):
        rules.einsum("th,vh->tv", tensor(I), tensor(V))


# --- backward


@pytest.mark.parametrize("kind", [V, R])
def test_backward_from_a_varying_loss_is_rejected(checking: None, kind: Any) -> None:
    with pytest.raises(SpmdTypeError, match="would produce incorrect gradients"):
        tensor(kind, dp=I).sum().backward()


@pytest.mark.parametrize("kind", [I, P])
def test_backward_from_an_invariant_or_partial_loss_is_accepted(checking: None, kind: Any) -> None:
    x = tensor(kind, dp=P)
    x.sum().backward()
    assert x.grad is not None


def test_a_gradient_that_is_passed_to_backward_is_not_checked(checking: None) -> None:
    loss = tensor(V).sum()
    loss.backward(torch.empty((), device="meta"))


def test_checkpointing_passes_unless_it_is_reentrant(checking: None) -> None:
    x = tensor(I, dp=P)
    checkpoint(lambda y: 2 * y, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    with pytest.raises(SpmdTypeError, match="CheckpointFunction"):
        checkpoint(lambda y: 2 * y, x, use_reentrant=True)


def test_attention_passes_forward_and_backward(checking: None) -> None:
    q, k, v = (tensor(V, 1, 2, 4, 8) for _ in range(3))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert along_tp(out) is V
    out.sum().backward(torch.empty((), device="meta"))
    assert q.grad is not None


# --- around the check


def test_autograd_patch_is_removed_also_after_an_error() -> None:
    before = Function.__dict__["apply"]
    with pytest.raises(SpmdTypeError), typecheck(), checker.set_current_mesh(MESH):
        assert Function.__dict__["apply"] is not before
        tensor(I) + tensor(V)
    assert Function.__dict__["apply"] is before
    assert checker.current_mesh() is None and not checker.is_type_checking()


def test_an_error_has_its_message_first_and_the_operation_apart(checking: None) -> None:
    with pytest.raises(SpmdTypeError) as caught:
        tensor(I) * tensor(V)
    assert isinstance(caught.value, RuntimeError)
    message = str(caught.value.args[0])
    assert "Are you missing a collective or a reinterpret/convert call? e.g.," in message
    assert "convert(tensor, MeshAxis(8:1), src=I, dst=R) on the Invariant operand" in message
    assert caught.value.context is not None and caught.value.context.startswith("  In mul(")
    assert "TRACEBACK" not in message


def test_functional_collectives_have_shapes_on_meta_without_a_process_group() -> None:
    ops, x = torch.ops._c10d_functional, torch.empty(6, 2, device="meta")
    assert ops.wait_tensor(ops.all_reduce(x, "sum", "any text")).shape == (6, 2)
    assert ops.wait_tensor(ops.all_gather_into_tensor(x, 3, "any text")).shape == (18, 2)
    assert ops.wait_tensor(ops.reduce_scatter_tensor(x, "sum", 3, "any text")).shape == (2, 2)
    assert ops.wait_tensor(ops.all_to_all_single(x, [1, 4], [2, 4], "any text")).shape == (5, 2)
