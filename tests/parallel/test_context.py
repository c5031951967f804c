"""Each way to share tokens gives what one rank gives, output and gradients, for windows, documents and few heads."""

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import Tensor

from megalith.config.context import ContextConfig, ContextKind
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.attention import reference_attention
from megalith.kernels.span_attention import window_attention
from megalith.kernels.tokens import Tokens, tokens_of_lengths, tokens_of_slices
from megalith.parallel.context import build_attend, my_slicing
from megalith.parallel.mesh import Mesh, build_mesh, model_grid
from megalith.plan.context import Slices, plan_slices
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, relative_error


@dataclass(frozen=True)
class Case:
    """Attention of some documents, shared in some way."""

    kind: ContextKind = "ring"
    lengths: tuple[int, ...] = (24, 24)
    row: int = 24
    window: int | None = None
    heads: tuple[int, int] = (4, 2)
    document: bool = False
    a2a: int | None = None

    @property
    def model(self) -> ModelConfig:
        """Only its heads matter."""
        n, g = self.heads
        return ModelConfig(vocab_size=8, hidden_size=8, num_layers=1, num_heads=n, num_kv_heads=g, ffn_hidden_size=8)

    def parallel(self, world: int) -> ParallelConfig:
        """All ranks share tokens."""
        slicing: Literal["row", "document"] = "document" if self.document else "row"
        return ParallelConfig(cp=world, context=ContextConfig(kind=self.kind, a2a=self.a2a, slicing=slicing))

    def whole(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and the gradient of the output, of all tokens."""
        n, g = self.heads
        draw = torch.Generator().manual_seed(3)
        shapes = [(n, 6), (g, 6), (g, 5), (n, 5)]
        total = sum(self.lengths)
        return [torch.randn(total, *shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def shared(case: Case, mesh: Mesh, rank: int, world: int) -> tuple[Slices, Tokens]:
    slicing = my_slicing(case.parallel(world), mesh)
    slices = plan_slices(case.lengths, row=case.row, slicing=slicing)
    return slices, tokens_of_slices(slices, slicing)


def _attend(rank: int, world: int, case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """My output and gradients, each in its place among zeros for all other tokens."""
    mesh = build_mesh(model_grid(case.parallel(world), case.model, world), rank=rank)
    slices, tokens = shared(case, mesh, rank, world)
    read = torch.from_numpy(slices.as_read(rank))
    q, k, v, dout = (x[read.clamp(min=0)].clone() for x in case.whole(dtype))
    dout[read < 0] = 0  # padding carries no loss
    inputs = [x.requires_grad_() for x in (q, k, v)]
    attend = build_attend(case.parallel(world).context, 0, mesh)
    out = attend(q, k, v, tokens, window=case.window)
    assert out.dtype == dtype and out.shape == dout.shape
    parts = [out.detach(), *torch.autograd.grad(out, inputs, dout)]
    real = read >= 0
    whole = [torch.zeros(sum(case.lengths), *part.shape[1:], dtype=dtype) for part in parts]
    for into, part in zip(whole, parts):
        into[read[real]] = part[real]
    return whole


def reference(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    q, k, v, dout = case.whole(dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    tokens = tokens_of_lengths(list(case.lengths))
    plain = reference_attention(q, k, v, tokens)
    out = plain if case.window is None else window_attention(q, k, v, tokens, case.window)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def errors(world: int, case: Case) -> dict[str, float]:
    parts = run_ranks(_attend, world, case)
    joined = [torch.stack(list(same)).sum(0) for same in zip(*parts)]
    return {name: relative_error(a, b) for name, a, b in zip(("out", "dq", "dk", "dv"), joined, reference(case))}


RAGGED = (5, 1, 18, 20, 4)
CASES = {
    "ring": (2, Case()),
    "gather": (2, Case("gather")),
    "a2a": (2, Case("a2a")),
    "a2a+ring": (4, Case("a2a+ring", a2a=2)),
    "ring of three, one key head": (3, Case(heads=(3, 1))),
    "ring, documents and a window": (2, Case(lengths=RAGGED, window=7)),
    "gather, documents and a window": (3, Case("gather", lengths=RAGGED, window=7)),
    "a2a, documents and a window": (2, Case("a2a", lengths=RAGGED, window=7)),
    "a2a+ring, documents and a window": (4, Case("a2a+ring", lengths=RAGGED, window=7, a2a=2)),
    "a2a, more ranks than key heads": (4, Case("a2a", heads=(4, 2))),
    "a2a, key heads that do not divide": (3, Case("a2a", heads=(6, 2))),
    "a2a+ring, one key head": (4, Case("a2a+ring", heads=(4, 1), a2a=2)),
    "ring, each document sliced": (2, Case(lengths=RAGGED, document=True)),
    "gather, each document sliced": (3, Case("gather", lengths=RAGGED, document=True, window=6)),
    "a2a, each document sliced": (2, Case("a2a", lengths=RAGGED, document=True)),
    "a2a+ring, each document sliced": (4, Case("a2a+ring", lengths=RAGGED, document=True, a2a=2)),
    "ring, tiles of whole chunks": (2, Case(lengths=(288,), row=288, heads=(2, 1))),
}


@pytest.mark.parametrize("name", CASES)
def test_shared_tokens_attend_like_one_ranks(name: str) -> None:
    world, case = CASES[name]
    found = errors(world, case)
    assert max(found.values()) < FP64.relative, found


def test_more_groups_of_neighbours_than_two() -> None:
    found = errors(6, Case("a2a+ring", a2a=2, heads=(2, 1)))
    assert max(found.values()) < FP64.relative, found
