"""Each way to share tokens gives what one rank gives, output and gradients, for windows, documents
and few heads."""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.parallel import ContextConfig, ContextKind, ParallelConfig
from megalith.data.loader import Batch, with_dropout
from megalith.kernels.attention import split_kv
from megalith.kernels.attention.dispatch import attention, reference_attention
from megalith.kernels.attention.scores import PLAIN, AttentionMask, PairMask, Scores, WeightDropout
from megalith.kernels.dropout import DropoutKey
from megalith.kernels.packed import (
    PackedSeqParams,
    seq_params_from_lengths,
    seq_params_from_slices,
    with_masks,
    with_padding,
)
from megalith.parallel import context
from megalith.parallel.context import RingAttend, build_attend, local_slicing
from megalith.parallel.group import Group
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.parallel.tensor_overlap import PendingCollective
from megalith.plan.context import KINDS, Slices, Slicing, plan_slices
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched, slow_link
from megalith.testing.meter import measure_saved_activations
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, relative_error
from tests.cases import least_of


@dataclass(frozen=True)
class Case:
    """Attention of some documents, shared in some way."""

    kind: ContextKind = "ring"
    lengths: tuple[int, ...] = 24, 24
    row: int = 24
    scores: Scores = PLAIN
    sinks: bool = False
    heads: tuple[int, int] = 4, 2
    document: bool = False
    a2a: int | None = None
    masks: Literal["beside", "alone"] | None = None

    @property
    def model(self) -> ModelConfig:
        """Only its heads matter."""
        n, g = self.heads
        return ModelConfig(
            vocab_size=8,
            hidden_size=8,
            num_layers=1,
            num_heads=n,
            num_kv_heads=g,
            ffn_hidden_size=8,
        )

    def parallel(self, world: int) -> ParallelConfig:
        """All ranks share tokens."""
        slicing: Literal["row", "document"] = "document" if self.document else "row"
        return ParallelConfig(
            cp=world, context=ContextConfig(kind=self.kind, a2a=self.a2a, slicing=slicing)
        )

    def whole(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and the gradient of the output, of all tokens."""
        n, g = self.heads
        draw = torch.Generator().manual_seed(3)
        shapes = [(n, 6), (g, 6), (g, 5), (n, 5)]
        total = sum(self.lengths)
        return [
            torch.randn(total, *shape, generator=draw, dtype=torch.float64).to(dtype)
            for shape in shapes
        ]

    def learned(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The sinks of all heads, and the table of biases by distance, if there are any."""
        n = self.heads[0]
        result = {"sinks": torch.linspace(-1, 2, n, dtype=dtype)} if self.sinks else {}
        if self.scores.relative is not None:
            table = torch.randn(
                8, n, generator=torch.Generator().manual_seed(4), dtype=torch.float64
            )
            result["biases"] = table.to(dtype)
        return {name: weight.requires_grad_() for name, weight in result.items()}


def with_case_masks(case: Case, tokens: PackedSeqParams) -> PackedSeqParams:
    """Some pairs are hidden, and some queries see nothing; beside masks, one document has none,
    and some keys are padding."""
    if case.masks is None:
        return tokens
    draw = torch.Generator().manual_seed(6)
    masks = [
        (torch.rand(n, n, generator=draw) < 0.6) & (torch.rand(n, 1, generator=draw) < 0.9)
        for n in case.lengths
    ]
    if case.masks == "alone":
        return with_masks(tokens, masks, alone=True)
    text = torch.rand(sum(case.lengths), generator=draw) < 0.8
    return with_padding(with_masks(tokens, [None, *masks[1:]]), text)


def shared(case: Case, mesh: Mesh, world: int) -> tuple[Slices, PackedSeqParams]:
    slicing = local_slicing(case.parallel(world), mesh)
    slices = plan_slices(case.lengths, row=case.row, slicing=slicing)
    return slices, with_case_masks(case, seq_params_from_slices(slices, slicing))


def _attend(rank: int, world: int, case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """My output and gradients, each in its place among zeros for all other tokens; my part of those
    that are learned."""
    mesh = build_mesh(model_grid(case.parallel(world), case.model, world), rank=rank)
    slices, tokens = shared(case, mesh, world)
    read = torch.from_numpy(slices.as_read(rank))
    q, k, v, dout = (x[read.clamp(min=0)].clone() for x in case.whole(dtype))
    dout[read < 0] = 0  # padding carries no loss
    learned = case.learned(dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)] + list(learned.values())
    attend = build_attend(case.parallel(world).context, 0, mesh)
    batch = Batch(tokens.position_ids, tokens.position_ids, tokens, num_labels=0, lengths=())
    if case.scores.dropout is not None:
        batch = with_dropout(batch, [5, 9], seed=1)  # two rows, far apart
    out = attend(
        q,
        k,
        v,
        tokens,
        scores=case.scores,
        sinks=learned.get("sinks"),
        attention_bias=learned.get("biases"),
        dropout_key=batch.dropout_key,
    )
    assert out.dtype == dtype and out.shape == dout.shape
    out_part, *parts = out.detach(), *torch.autograd.grad(out, inputs, dout)
    parts, dlearnt = [out_part, *parts[:3]], parts[3:]
    real = read >= 0
    whole = [torch.zeros(sum(case.lengths), *part.shape[1:], dtype=dtype) for part in parts]
    for into, part in zip(whole, parts):
        into[read[real]] = part[real]
    return whole + dlearnt


def reference(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    q, k, v, dout = case.whole(dtype)
    learned = case.learned(dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)] + list(learned.values())
    tokens = with_case_masks(case, seq_params_from_lengths(list(case.lengths)))
    numbers = torch.tensor([row * case.row + place for row in (5, 9) for place in range(case.row)])[
        : len(q)
    ]
    out = reference_attention(
        q,
        k,
        v,
        tokens,
        case.scores,
        learned.get("sinks"),
        attention_bias=learned.get("biases"),
        dropout_key=DropoutKey(1, numbers),
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def errors(world: int, case: Case) -> dict[str, float]:
    parts = run_ranks(_attend, world, case)
    joined = [torch.stack(list(same)).sum(0) for same in zip(*parts)]
    names = "out", "dq", "dk", "dv", *(f"d{name}" for name in case.learned(torch.float64))
    return {
        name: relative_error(a, b)
        for name, a, b in zip(names, joined, reference(case), strict=True)
    }


RAGGED = 5, 1, 18, 20, 4
WINDOW = Scores(window=7)
VARIANTS = {
    "scale": (Scores(scale=0.3), False),
    "softcap": (Scores(softcap=1.5), False),
    "sinks": (PLAIN, True),
    "everything": (Scores(scale=0.3, window=6, softcap=1.5), True),
    "bidirectional": (Scores(causal=False, dropout=WeightDropout(0.3, 77, 3)), False),
    "bidirectional, everything": (
        Scores(scale=0.3, window=6, softcap=1.5, causal=False, dropout=WeightDropout(0.3, 77, 0)),
        True,
    ),
}
LEFT = Scores(causal=False, window=9, right=2)
BIDIRECTIONAL, BIASED = Scores(causal=False), Scores(relative=11)
BIASED_ALL = Scores(
    scale=0.3, window=6, softcap=1.5, relative=11, dropout=WeightDropout(0.3, 77, 0)
)
ALL = Scores(scale=0.3, window=6, softcap=1.5)
CASES = {
    "ring": (2, Case()),
    "gather": (2, Case("gather")),
    "a2a": (2, Case("a2a")),
    "a2a+ring": (4, Case("a2a+ring", a2a=2)),
    "ring of three, one key head": (3, Case(heads=(3, 1))),
    "ring, documents and a window": (2, Case(lengths=RAGGED, scores=WINDOW)),
    "gather, documents and a window": (3, Case("gather", lengths=RAGGED, scores=WINDOW)),
    "a2a, documents and a window": (2, Case("a2a", lengths=RAGGED, scores=WINDOW)),
    "a2a+ring, documents and a window": (4, Case("a2a+ring", lengths=RAGGED, scores=WINDOW, a2a=2)),
    "a2a, more ranks than key heads": (4, Case("a2a", heads=(4, 2))),
    "a2a, key heads that do not divide": (3, Case("a2a", heads=(6, 2))),
    "a2a+ring, one key head": (4, Case("a2a+ring", heads=(4, 1), a2a=2)),
    "ring, each document sliced": (2, Case(lengths=RAGGED, document=True)),
    "gather, each document sliced": (
        3,
        Case("gather", lengths=RAGGED, document=True, scores=Scores(window=6)),
    ),
    "a2a, each document sliced": (2, Case("a2a", lengths=RAGGED, document=True)),
    "a2a+ring, each document sliced": (4, Case("a2a+ring", lengths=RAGGED, document=True, a2a=2)),
    **{
        f"{kind}, {name}": (
            4 if kind == "a2a+ring" else 2,
            Case(
                kind,
                lengths=RAGGED,
                scores=scores,
                sinks=sinks,
                a2a=2 if kind == "a2a+ring" else None,
            ),
        )
        for kind in KINDS
        for name, (scores, sinks) in VARIANTS.items()
    },
    "ring, everything, each document sliced": (
        3,
        Case(lengths=RAGGED, document=True, scores=ALL, sinks=True),
    ),
    "a2a, everything, key heads that do not divide": (
        3,
        Case("a2a", heads=(6, 2), scores=ALL, sinks=True),
    ),
    "a2a+ring, everything, one key head": (
        4,
        Case("a2a+ring", heads=(4, 1), scores=ALL, sinks=True, a2a=2),
    ),
    "ring, dropped weights, each document sliced": (
        3,
        Case(
            lengths=RAGGED,
            document=True,
            scores=Scores(off_by_one=True, dropout=WeightDropout(0.3, 77, 0)),
        ),
    ),
    "a2a, dropped weights, rows": (
        2,
        Case("a2a", scores=Scores(dropout=WeightDropout(0.3, 77, 0))),
    ),
    "a2a+ring, dropped weights, rows": (
        4,
        Case("a2a+ring", scores=Scores(dropout=WeightDropout(0.3, 77, 0)), a2a=2),
    ),
    **{
        f"{kind}, bidirectional, each document sliced": (
            2,
            Case(kind, lengths=RAGGED, document=True, scores=Scores(causal=False, window=window)),
        )
        for kind, window in (("ring", None), ("gather", 9), ("a2a", None))
    },
    **{
        f"{kind}, bidirectional, documents that only padding makes alike": (
            2,
            Case(kind, lengths=(3, 4, 2), row=9, document=True, scores=BIDIRECTIONAL),
        )
        for kind in ("ring", "a2a")
    },
    "ring, larger left window, documents": (3, Case(lengths=RAGGED, scores=LEFT, heads=(3, 1))),
    "gather, larger left window, each document sliced": (
        2,
        Case("gather", lengths=RAGGED, document=True, scores=LEFT),
    ),
    "a2a, larger left window, each document sliced": (
        2,
        Case("a2a", lengths=RAGGED, document=True, scores=LEFT),
    ),
    "a2a+ring, larger left window": (4, Case("a2a+ring", a2a=2, scores=LEFT)),
    "ring, biases": (2, Case(scores=BIASED)),
    "gather, biases": (2, Case("gather", scores=BIASED)),
    "a2a, biases": (2, Case("a2a", scores=BIASED)),
    "a2a+ring, biases bidirectional": (
        4,
        Case("a2a+ring", a2a=2, scores=replace(BIASED, causal=False)),
    ),
    "ring of three, biases, documents": (
        3,
        Case(lengths=RAGGED, scores=BIASED_ALL, heads=(6, 2), sinks=True),
    ),
    "a2a+ring, biases, everything": (
        4,
        Case("a2a+ring", a2a=2, lengths=RAGGED, scores=BIASED_ALL, sinks=True),
    ),
    **{
        f"{kind}, biases bidirectional, each document sliced": (
            2,
            Case(kind, lengths=RAGGED, document=True, scores=replace(BIASED, causal=False)),
        )
        for kind in KINDS[:3]
    },
    **{
        f"{kind}, masks {how}, {name}": (
            4 if kind == "a2a+ring" else 2,
            Case(
                kind,
                lengths=lengths,
                row=24,
                document=document,
                scores=scores,
                sinks=sinks,
                a2a=2 if kind == "a2a+ring" else None,
                masks=how,
            ),
        )
        for kind in KINDS
        for how, name, lengths, document, scores, sinks in (
            ("beside", "rows", (24, 24), False, PLAIN, False),
            ("beside", "bidirectional, each document sliced", RAGGED, True, BIDIRECTIONAL, False),
            ("beside", "everything, documents", RAGGED, False, BIASED_ALL, True),
            ("alone", "each document sliced", RAGGED, True, PLAIN, True),
            ("alone", "chunks, documents", RAGGED, False, Scores(window=5, chunked=True), False),
            ("alone", "a window, each document sliced", RAGGED, True, WINDOW, False),
        )
    },
    "gather of three, masks alone, one key head": (3, Case("gather", heads=(3, 1), masks="alone")),
    "ring, masks in tiles of whole chunks": (
        2,
        Case(lengths=(288,), row=288, heads=(2, 1), masks="alone"),
    ),
    "ring, biases in tiles of whole chunks": (
        2,
        Case(lengths=(288,), row=288, heads=(2, 1), scores=BIASED),
    ),
    "ring, tiles of whole chunks": (2, Case(lengths=(288,), row=288, heads=(2, 1))),
}


@pytest.mark.parametrize("name", CASES)
def test_context_parallel_attention_matches_one_rank(name: str) -> None:
    world, case = CASES[name]
    result = errors(world, case)
    assert max(result.values()) < FP64.relative, result


def _changed(rank: int, world: int, case: Case) -> list[bool]:
    """For each document: whether any rank's part of it came out other when only the second document
    was changed."""
    outs = []
    mesh = build_mesh(model_grid(case.parallel(world), case.model, world), rank=rank)
    slices, tokens = shared(case, mesh, world)
    read = torch.from_numpy(slices.as_read(rank))
    first, second = case.lengths[:2]
    for change in (0.0, 1.0):
        inputs = case.whole(torch.float32)
        for x in inputs:
            x[first : first + second] += change
        q, k, v, _ = (x[read.clamp(min=0)] for x in inputs)
        outs.append(build_attend(case.parallel(world).context, 0, mesh)(q, k, v, tokens))
    changed = (outs[0] != outs[1]).flatten(1).any(1) & (read >= 0)
    return [
        bool(changed[tokens.document_ids == number].any()) for number in range(len(case.lengths))
    ]


def _hidden_keys(rank: int, world: int, case: Case) -> tuple[bool, bool, bool]:
    """Whether other keys where padding is change a bit; whether gradients of those are zero;
    whether the first queries, which see nothing, find 0."""
    mesh = build_mesh(model_grid(case.parallel(world), case.model, world), rank=rank)
    slices, tokens = shared(case, mesh, world)
    read = torch.from_numpy(slices.as_read(rank))
    text = torch.arange(sum(case.lengths)) % 5 != 2
    text[:2] = False
    tokens, attend = with_padding(tokens, text), build_attend(case.parallel(world).context, 0, mesh)
    q, k, v, dout = (x[read.clamp(min=0)] for x in case.whole(torch.float32))
    hidden = ~text[read.clamp(min=0)] | (read < 0)
    k, v = k.requires_grad_(), v.requires_grad_()
    out = attend(q, k, v, tokens)
    other = attend(q, *(torch.where(hidden[:, None, None], x + 1, x) for x in (k, v)), tokens)
    dk, dv = torch.autograd.grad(out, (k, v), dout)
    first = (read >= 0) & (read < 2)
    return (
        torch.equal(out, other),
        not dk[hidden].any() and not dv[hidden].any(),
        not out[first].any(),
    )


@pytest.mark.parametrize("kind", ["ring", "gather", "a2a"])
def test_padding_is_bitwise_neutral_and_has_no_gradient(kind: ContextKind) -> None:
    results = run_ranks(_hidden_keys, 2, Case(kind, lengths=(5, 3, 8), row=16, document=True))
    assert results == [(True, True, True)] * 2


def _without_my_own_rows(rank: int, world: int, case: Case) -> list[Tensor]:
    if rank == 0:
        return _attend(rank, world, case)

    class OtherRows(PairMask):
        """Masks of the first rank's queries."""

        def __init__(self, visible: AttentionMask, queries: Tensor, keys: Tensor) -> None:
            super().__init__(visible, context_numbers(case, world), keys)

    with patched(context, "PairMask", OtherRows):
        return _attend(rank, world, case)


def context_numbers(case: Case, world: int) -> Tensor:
    slicing = Slicing(ranks=world, rank=0)
    return torch.from_numpy(plan_slices(case.lengths, row=case.row, slicing=slicing).numbers[0])


@pytest.mark.parametrize("kind", ["ring", "gather"])
def test_comparison_detects_rows_of_another_rank(kind: ContextKind) -> None:
    case = Case(kind, masks="alone")
    joined = [
        torch.stack(list(same)).sum(0) for same in zip(*run_ranks(_without_my_own_rows, 2, case))
    ]
    assert all(relative_error(a, b) > 0.01 for a, b in zip(joined, reference(case), strict=True))


@pytest.mark.parametrize("document", [False, True])
@pytest.mark.parametrize("kind", ["ring", "gather", "a2a"])
def test_documents_are_bitwise_independent(kind: ContextKind, document: bool) -> None:
    results = run_ranks(_changed, 2, Case(kind, lengths=(5, 3, 8), row=16, document=document))
    assert [any(ranks) for ranks in zip(*results)] == [False, True, False]


def test_a2a_ring_with_three_groups_of_neighbors() -> None:
    result = errors(6, Case("a2a+ring", a2a=2, heads=(2, 1)))
    assert max(result.values()) < FP64.relative, result


def _memory(rank: int, world: int, case: Case) -> tuple[int, int]:
    """Bytes kept for backward, and the most chunks of others' keys and values that were alive in a
    step."""
    mesh = build_mesh(model_grid(case.parallel(world), case.model, world), rank=rank)
    slices, tokens = shared(case, mesh, world)
    read = torch.from_numpy(slices.as_read(rank))
    q, k, v = (x[read].requires_grad_() for x in case.whole(torch.float32)[:3])
    arriving: list[weakref.ref[Tensor]] = []
    alive = []

    def pass_on(x: Tensor, group: Group) -> PendingCollective:
        passing = PASS_ON(x, group)
        arriving.append(weakref.ref(passing.x))
        return passing

    def attend(*arguments: Any) -> None:
        counts = []
        for _ in range(20):  # gloo's own thread lets go of what it has sent a moment later
            counts.append(sum(ref() is not None for ref in arriving))
            time.sleep(0.001)
        alive.append(min(counts))
        ATTEND(*arguments)

    with (
        measure_saved_activations() as meter,
        patched(context, "start_ring_exchange", pass_on),
        patched(context, "attend", attend),
    ):
        out = RingAttend(mesh.cp)(q, k, v, tokens)
        kept = meter.live
    del out
    return kept, max(alive)


PASS_ON, ATTEND, ATTEND_BACKWARD = (
    context.start_ring_exchange,
    split_kv.attend,
    split_kv.attend_backward,
)


@pytest.mark.parametrize("world", [2, 4])
def test_ring_attention_holds_at_most_two_extra_chunks_of_keys_and_values(
    world: int,
) -> None:
    case = Case(lengths=(48, 48), row=48)
    (n, g), tokens = case.heads, sum(case.lengths) // world
    share = tokens * (n * 6 + g * (6 + 5) + n * 5 + n) * 4  # q, k and v, the output, lse
    assert run_ranks(_memory, world, case) == [(share, 1 if world == 2 else 2)] * world


def _exposed_share(rank: int, world: int, case: Case) -> float:
    """Return the share of a slow link's added time that is exposed: a ring step takes five times as
    long as a message."""
    mesh = build_mesh(model_grid(case.parallel(world), case.model, world), rank=rank)
    slices, tokens = shared(case, mesh, world)
    read = torch.from_numpy(slices.as_read(rank))
    q, k, v = (x[read].requires_grad_() for x in case.whole(torch.float32)[:3])

    def slowly(function: Callable[..., None], *arguments: Any) -> None:
        function(*arguments)
        time.sleep(0.05)

    with (
        patched(context, "attend", partial(slowly, ATTEND)),
        patched(context, "attend_backward", partial(slowly, ATTEND_BACKWARD)),
        slow_link(latency_seconds=0.01, poison=True) as link,
    ):
        out = RingAttend(mesh.cp)(q, k, v, tokens)
        out.sum().backward()
    results = [out, *(x.grad for x in (q, k, v) if x.grad is not None)]
    # nothing was read before it arrived
    assert len(results) == 4 and all(bool(torch.isfinite(x).all()) for x in results)
    assert all(transfer.waits == 1 for transfer in link.transfers)
    # keys and values twice round, their gradients once
    assert len(link.select("all_to_all")) == 3 * (world - 1)
    return link.exposed_seconds() / link.added_seconds()


@pytest.mark.parametrize("world", [2, 3])
def test_ring_attention_overlaps_a_slow_link_with_its_steps(world: int) -> None:
    case = Case(lengths=(48,), row=48)
    assert least_of(lambda: max(run_ranks(_exposed_share, world, case)), below=0.2) < 0.2


def _bidirectional(rank: int, world: int, kind: ContextKind) -> list[list[Tensor]]:
    """Output and gradients with and without overlap; and what is under way whenever something is
    computed."""
    case = Case(kind, a2a=2 if kind == "a2a+ring" else None)
    mesh = build_mesh(model_grid(case.parallel(world), case.model, world), rank=rank)
    slices, tokens = shared(case, mesh, world)
    read = torch.from_numpy(slices.as_read(rank))
    results = []
    for overlap in (True, False):
        q, k, v, dout = (x[read].clone().requires_grad_() for x in case.whole(torch.float32))
        late: list[bool] = []

        def note(*args: Any, late: list[bool] = late) -> None:
            late.append(any(transfer.waits == 0 for transfer in link.transfers))
            ATTEND(*args)

        with slow_link() as link, patched(context, "attend", note):
            out = build_attend(case.parallel(world).context, 0, mesh, overlap=overlap)(
                q, k, v, tokens
            )
            out.backward(dout.detach())
        assert any(late) == overlap
        results.append([out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)])
    return results


@pytest.mark.parametrize(("world", "kind"), [(2, "ring"), (3, "ring"), (4, "a2a+ring")])
def test_ring_attention_without_overlap_is_bitwise_equal(world: int, kind: ContextKind) -> None:
    for overlapped, plain in run_ranks(_bidirectional, world, kind):
        assert len(plain) == 4
        assert all(torch.equal(a, b) for a, b in zip(overlapped, plain, strict=True))


def test_context_parallel_group_of_one_uses_plain_attention() -> None:
    assert build_attend(ContextConfig(kind="a2a"), 0, build_single_rank_mesh()) is attention


def _kinds(rank: int, world: int) -> list[str]:
    config = ContextConfig(layers=("ring", "gather", "a2a"))
    model = Case().model
    mesh = build_mesh(model_grid(ParallelConfig(cp=world, context=config), model, world), rank=rank)
    return [type(build_attend(config, layer, mesh)).__name__ for layer in range(3)]


def test_layers_may_use_different_context_parallel_kinds() -> None:
    assert run_ranks(_kinds, 2) == [["RingAttend", "AllGatherAttend", "UlyssesAttend"]] * 2


def test_unsliced_tokens_fail_an_assertion() -> None:
    with pytest.raises(
        AssertionError, match="tokens were not sliced over cp: the loader does that"
    ):
        context._context(seq_params_from_lengths([4]))
