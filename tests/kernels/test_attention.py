"""Attention inside documents: causal and bidirectional, with KV cache, windows, soft caps, sinks
and masks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalith.config.kernels import BackendName, Kernel
from megalith.errors import ConfigError
from megalith.kernels.attention import dispatch as ways
from megalith.kernels.attention.dispatch import (
    AttentionBackend,
    attention,
    drop_keys_before_window,
    reference_attention,
    select_attention_backend,
    select_masked_backend,
    split_into_chunks,
    visible_key_lengths,
)
from megalith.kernels.attention.scores import (
    PLAIN,
    AttentionMask,
    Scores,
    WeightDropout,
    build_scores_mask,
    masked_attention,
    reference_biases,
)
from megalith.kernels.dropout import DropoutKey, dropped_weights
from megalith.kernels.packed import (
    PackedSeqParams,
    seq_params_from_lengths,
    seq_params_from_queries,
    seq_params_from_rows,
    with_masks,
    with_padding,
)

LAYOUTS = {
    "long rows": seq_params_from_rows(2, 70),
    "one row": seq_params_from_rows(1, 9),
    "long documents": seq_params_from_lengths([70, 3, 100, 1, 64, 40]),
    "padded documents": seq_params_from_queries([(90, 90), (0, 0), (38, 38), (0, 0)]),
    "rows": seq_params_from_rows(3, 5),
    "rows of one token": seq_params_from_rows(4, 1),
    "documents": seq_params_from_lengths([4, 1, 7, 3]),
    "cache": seq_params_from_queries([(1, 6), (2, 5), (4, 4), (1, 1)]),
    "padded": seq_params_from_queries([(3, 3), (0, 0), (2, 4), (0, 0)]),
}


VARIANTS = {
    "scale": (Scores(scale=0.3), False),
    "window": (Scores(window=5), False),
    "window of one": (Scores(window=1), False),
    "chunks": (Scores(window=4, chunked=True), False),
    "long chunks, sinks": (Scores(window=64, chunked=True), True),
    "chunks bidirectional": (Scores(window=3, chunked=True, causal=False), False),
    "softcap": (Scores(softcap=1.5), False),
    "sinks": (PLAIN, True),
    "everything": (Scores(scale=0.4, window=3, softcap=2.0), True),
    "off by one": (Scores(off_by_one=True), False),
    "bidirectional": (Scores(causal=False), False),
    "bidirectional, everything": (Scores(scale=0.4, window=3, softcap=2.0, causal=False), True),
    "mtp to the left": (Scores(window=4, right=1, causal=False), False),
    "nothing to the right": (Scores(window=3, right=0, causal=False, softcap=2.0), False),
    "all to the left": (Scores(window=500, right=2, causal=False), True),
    "all to the right": (Scores(window=1, right=500, causal=False), False),
}


def qkv(
    tokens: PackedSeqParams,
    *,
    heads: int,
    kv_heads: int,
    d: int = 8,
    d_v: int = 8,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    queries, keys = tokens.num_tokens, sum(kv for _, kv in tokens.lengths)
    shapes = [(queries, heads, d), (keys, kv_heads, d), (keys, kv_heads, d_v)]
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for s in shapes
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_result_and_gradients_equal_the_reference(layout: str, heads: int, kv_heads: int) -> None:
    tokens = LAYOUTS[layout]
    inputs = qkv(tokens, heads=heads, kv_heads=kv_heads)
    y, expected = attention(*inputs, tokens), reference_attention(*inputs, tokens)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    for actual, reference in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy)
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


def sinks_of(heads: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1, 2, heads, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_variant_equals_the_reference(layout: str, variant: str) -> None:
    """With values of another width than keys, as latent attention has them."""
    tokens, (scores, has_sinks) = LAYOUTS[layout], VARIANTS[variant]
    inputs = qkv(tokens, heads=4, kv_heads=2, d=6, d_v=4)
    sinks = sinks_of(4) if has_sinks else None
    y, expected = (
        attention(*inputs, tokens, scores, sinks),
        reference_attention(*inputs, tokens, scores, sinks),
    )
    assert y.shape == (tokens.num_tokens, 4, 4)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    wanted = inputs if sinks is None else [*inputs, sinks]
    for actual, reference in zip(
        torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy)
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_match_finite_differences(variant: str) -> None:
    scores, has_sinks = VARIANTS[variant]
    tokens = seq_params_from_lengths([2, 6])
    inputs = [*qkv(tokens, heads=2, kv_heads=1, d=3, d_v=2), *([sinks_of(2)] if has_sinks else [])]

    def outputs(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        return attention(q, k, v, tokens, scores, *sinks)

    assert torch.autograd.gradcheck(outputs, inputs)


@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_all_backends_match(variant: str, kernel: Kernel) -> None:
    tokens, (scores, has_sinks) = LAYOUTS["long documents"], VARIANTS[variant]
    q, k, v = (x.detach() for x in qkv(tokens, heads=4, kv_heads=2, dtype=torch.float32))
    sinks = sinks_of(4, torch.float32).detach() if has_sinks else None
    expected = reference_attention(q.double(), k.double(), v.double(), tokens, scores, sinks)
    y = attention(q, k, v, tokens, scores, sinks, kernel=kernel)
    assert y.dtype == torch.float32
    assert (y - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_in_low_precision_match_float64(variant: str, dtype: torch.dtype) -> None:
    tokens, (scores, has_sinks) = seq_params_from_lengths([100, 90]), VARIANTS[variant]
    inputs = qkv(tokens, heads=4, kv_heads=2, dtype=dtype) + (
        [sinks_of(4, dtype)] if has_sinks else []
    )
    exact = [x.detach().double().requires_grad_() for x in inputs]
    dy = torch.randn(tokens.num_tokens, 4, 8, generator=torch.Generator().manual_seed(1)).to(dtype)

    def found(all_inputs: list[Tensor]) -> list[Tensor]:
        q, k, v, *sinks = all_inputs
        y = attention(q, k, v, tokens, scores, *sinks)
        return [y.detach(), *torch.autograd.grad(y, all_inputs, dy.to(y.dtype))]

    tolerance = 5e-6 if dtype == torch.float32 else 2e-2
    for actual, right in zip(found(inputs), found(exact)):
        assert actual.dtype == dtype
        # who sees one key has no gradient of its score
        size = right.norm() if right.norm() > 1e-9 else dy.norm()
        assert (actual - right).norm() <= tolerance * size


def test_reference_of_each_variant_matches_its_formula() -> None:
    """Query by query, for one head: scaled, then capped, then hidden; a sink is one more score with
    no value."""
    tokens = seq_params_from_rows(1, 5)
    q, k, v = (x.detach() for x in qkv(tokens, heads=1, kv_heads=1))
    sink = torch.tensor([0.4], dtype=torch.float64)
    y = reference_attention(q, k, v, tokens, Scores(scale=0.5, window=2, softcap=0.8), sink)[:, 0]
    for i in range(5):
        seen = [j for j in range(5) if i - 2 < j <= i]
        capped = [0.8 * torch.tanh(0.5 * (q[i, 0] @ k[j, 0]) / 0.8) for j in seen]
        weights = torch.softmax(torch.stack([*capped, sink[0]]), dim=0)[:-1]
        torch.testing.assert_close(y[i], weights @ v[seen, 0])


def test_bidirectional_and_off_by_one_attention_match_their_formulas() -> None:
    """A query sees what comes after it, too, a window to each side; and weights are exp(s) / (1 +
    sum of exp(s))."""
    tokens = seq_params_from_lengths([3, 5])
    q, k, v = (x.detach() for x in qkv(tokens, heads=1, kv_heads=1))
    y = reference_attention(
        q, k, v, tokens, Scores(scale=0.5, window=2, causal=False, off_by_one=True)
    )[:, 0]
    for i in range(8):
        seen = [j for j in range(8) if abs(i - j) < 2 and (i < 3) == (j < 3)]
        raised = torch.stack([0.5 * (q[i, 0] @ k[j, 0]) for j in seen]).exp()
        torch.testing.assert_close(y[i], raised @ v[seen, 0] / (1 + raised.sum()))
    zero = torch.zeros(1, dtype=torch.float64)
    same = reference_attention(q, k, v, tokens, Scores(scale=0.5, window=2, causal=False), zero)[
        :, 0
    ]
    torch.testing.assert_close(y, same)


def test_off_by_one_is_finite_for_low_scores() -> None:
    tokens = seq_params_from_rows(1, 4)
    q, k, v = (1e3 * x.detach() for x in qkv(tokens, heads=1, kv_heads=1))
    for kernel in ("auto", "reference"):
        y = attention(q, k, v, tokens, Scores(off_by_one=True), kernel=kernel)  # type: ignore[arg-type]
        assert bool(torch.isfinite(y).all())


def drawn(tokens: PackedSeqParams, seed: int = 0) -> list[Tensor | None]:
    """Masks of all documents but every third, with a query here and there that may see nothing."""
    draw = torch.Generator().manual_seed(seed)
    masks = [torch.rand(queries, keys, generator=draw) < 0.6 for queries, keys in tokens.lengths]
    return [
        None if n % 3 == 2 else mask & (torch.rand(len(mask), 1, generator=draw) < 0.9)
        for n, mask in enumerate(masks)
    ]


def unpadded(tokens: PackedSeqParams, seed: int = 1) -> Tensor:
    keys = sum(keys for _, keys in tokens.lengths)
    return torch.rand(keys, generator=torch.Generator().manual_seed(seed)) < 0.8


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: PackedSeqParams,
    masks: list[Tensor | None],
    scores: Scores,
    sinks: Tensor | None,
    *,
    alone: bool = False,
) -> Tensor:
    """Every document by the definition, with what it sees spelled out."""
    outs, counts, every = [], *zip(*tokens.lengths)
    for queries, keys, values, mask in zip(q.split(counts), k.split(every), v.split(every), masks):
        rule = build_scores_mask(len(queries), len(keys), scores, device=q.device)
        if alone:  # the mask takes the place of causality; a window ends where it did
            band = scores.window is not None and not scores.chunked
            rule = (
                rule
                if band
                else build_scores_mask(
                    len(queries), len(keys), replace(scores, causal=False), device=q.device
                )
            )
        seen = rule if mask is None else mask if rule is None else mask & rule
        outs.append(masked_attention(queries, keys, values, seen, scores, sinks))
    return torch.cat(outs)


MASKS = ["pairs", "padding", "both", "alone"]


def masked(tokens: PackedSeqParams, kind: str) -> tuple[PackedSeqParams, list[Tensor | None]]:
    """Tokens with masks, and which pairs those let see."""
    masks: list[Tensor | None] = [None] * len(tokens.lengths)
    if kind in ("pairs", "both"):
        masks = drawn(tokens)
        tokens = with_masks(tokens, masks)
    if kind == "alone":
        masks = [
            torch.rand(size, generator=torch.Generator().manual_seed(2)) < 0.7
            for size in tokens.lengths
        ]
        tokens = with_masks(tokens, masks, alone=True)
    if kind in ("padding", "both"):
        text = unpadded(tokens)
        tokens = with_padding(tokens, text)
        hidden = text.split([keys for _, keys in tokens.lengths])
        masks = [one[None] if mask is None else mask & one for mask, one in zip(masks, hidden)]
    return tokens, masks


@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
@pytest.mark.parametrize("layout", ["long rows", "long documents", "rows", "cache", "padded"])
@pytest.mark.parametrize("kind", MASKS)
def test_attention_masks_hide_keys_in_addition_to_scores(
    kind: str, layout: str, kernel: Kernel
) -> None:
    tokens, masks = masked(LAYOUTS[layout], kind)
    for scores, has_sinks in VARIANTS.values():
        inputs, sinks = (
            qkv(tokens, heads=4, kv_heads=2, d=6, d_v=4),
            sinks_of(4) if has_sinks else None,
        )
        y = attention(*inputs, tokens, scores, sinks, kernel=kernel)
        expected = by_hand(*inputs, tokens, masks, scores, sinks, alone=kind == "alone")
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
        wanted = inputs if sinks is None else [*inputs, sinks]
        for actual, reference in zip(
            torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy)
        ):
            assert bool(torch.isfinite(actual).all())
            torch.testing.assert_close(actual, reference, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masked_attention_in_low_precision_matches_float64(
    dtype: torch.dtype, kernel: Kernel
) -> None:
    tokens, _ = masked(LAYOUTS["long documents"], "both")
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    for scores, has_sinks in VARIANTS.values():
        inputs, sinks = (
            qkv(tokens, heads=4, kv_heads=2, d=8, dtype=dtype),
            sinks_of(4) if has_sinks else None,
        )
        exact = [x.detach().double().requires_grad_() for x in inputs]
        y = attention(
            *inputs, tokens, scores, None if sinks is None else sinks.to(dtype), kernel=kernel
        )
        expected = reference_attention(*exact, tokens, scores, sinks)
        torch.testing.assert_close(y.double(), expected, rtol=bound, atol=bound)
        for actual, reference in zip(
            torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(expected.sum(), exact)
        ):
            torch.testing.assert_close(actual.double(), reference, rtol=4 * bound, atol=4 * bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
def test_masked_keys_do_not_change_the_output_and_get_no_gradient(
    kernel: Kernel, dtype: torch.dtype
) -> None:
    """Keys and values that are padding, and pairs that a mask hides; queries that see nothing give
    0."""
    text, layout = (
        torch.rand(140, generator=torch.Generator().manual_seed(3)) < 0.7,
        LAYOUTS["long rows"],
    )
    text[:3] = False  # so that the first queries of a causal document see nothing
    hidden = torch.ones(70, 70, dtype=torch.bool)
    hidden[4:40, 20:30] = False
    tokens = with_padding(with_masks(layout, [hidden, None]), text)
    for scores, has_sinks in VARIANTS.values():
        q, k, v = qkv(tokens, heads=4, kv_heads=2, dtype=dtype)
        sinks = sinks_of(4).detach().to(dtype) if has_sinks else None
        y = attention(q, k, v, tokens, scores, sinks, kernel=kernel)
        other = [torch.where(text[:, None, None], x, x + 3.0).detach() for x in (k, v)]
        assert torch.equal(attention(q, *other, tokens, scores, sinks, kernel=kernel), y)
        other = [x.detach().clone() for x in (k, v)]
        for x in other:
            x[20:30] += 3.0
        assert torch.equal(
            attention(q, *other, tokens, scores, sinks, kernel=kernel)[4:20], y[4:20]
        )
        if scores.causal:
            assert not y[:3].any()
        dq, dk, dv = torch.autograd.grad(y.square().sum(), (q, k, v))
        assert not dk[~text].any() and not dv[~text].any() and bool(torch.isfinite(dq).all())
        assert not scores.causal or not dq[:3].any()
        y = attention(q, k, v, tokens, scores, sinks, kernel=kernel)
        assert not any(part[20:30].any() for part in torch.autograd.grad(y[4:20].sum(), (k, v)))


@pytest.mark.parametrize("kind", MASKS)
def test_masked_decoding_with_kv_cache_matches_full_attention(kind: str) -> None:
    """Also where a cache has dropped what no later query sees."""
    whole, masks = masked(seq_params_from_rows(1, 12), kind)
    for scores, has_sinks in VARIANTS.values():
        if not scores.causal:
            continue
        q, k, v = (x.detach() for x in qkv(whole, heads=4, kv_heads=2, d_v=6))
        sinks = sinks_of(4).detach() if has_sinks else None
        expected = attention(q, k, v, whole, scores, sinks)
        for first, last in ((3, 4), (3, 12), (11, 12), (0, 7)):
            part = seq_params_from_queries([(last - first, last)])
            own = masks[0].expand(12, 12)[first:last, :last] if masks[0] is not None else None
            part = with_masks(part, [own], alone=kind == "alone")
            if kind == "alone" and last < 12 and (scores.window is None or scores.chunked):
                continue  # queries look at what comes later
            y = attention(q[first:last], k[:last], v[:last], part, scores, sinks)
            torch.testing.assert_close(y, expected[first:last], rtol=1e-12, atol=1e-12)
            ((_, left),) = visible_key_lengths(part.lengths, scores)
            assert torch.equal(
                attention(
                    q[first:last], k[last - left : last], v[last - left : last], part, scores, sinks
                ),
                y,
            )


def test_masks_that_replace_causality_show_later_tokens() -> None:
    tokens = with_masks(
        seq_params_from_rows(1, 6), [torch.ones(6, 6, dtype=torch.bool)], alone=True
    )
    q, k, v = qkv(tokens, heads=4, kv_heads=2)
    torch.testing.assert_close(
        attention(q, k, v, tokens),
        attention(q, k, v, seq_params_from_rows(1, 6), Scores(causal=False)),
    )
    windowed = attention(q, k, v, seq_params_from_rows(1, 6), Scores(window=3))
    torch.testing.assert_close(attention(q, k, v, tokens, Scores(window=3)), windowed)


@pytest.mark.parametrize("kind", MASKS)
def test_attention_masks_combine_with_dropout_and_biases(kind: str) -> None:
    tokens, _ = masked(LAYOUTS["long documents"], kind)
    table = torch.linspace(-2, 3, 8 * 4, dtype=torch.float64).view(8, 4).requires_grad_()
    key = DropoutKey(5, torch.arange(tokens.num_tokens))
    for dropout, relative, cap in (
        (0.4, None, None),
        (0.4, 20, 2.0),
        (None, 20, None),
        (None, 20, 2.0),
    ):
        drop = None if dropout is None else WeightDropout(dropout, 99, 2)
        scores = Scores(window=30, softcap=cap, relative=relative, dropout=drop)
        inputs = qkv(tokens, heads=4, kv_heads=2)
        y, expected = (
            attention(*inputs, tokens, scores, attention_bias=table, dropout_key=key),
            reference_attention(*inputs, tokens, scores, attention_bias=table, dropout_key=key),
        )
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        wanted = [*inputs, table] if relative else inputs
        for actual, reference in zip(
            torch.autograd.grad(y.sum(), wanted), torch.autograd.grad(expected.sum(), wanted)
        ):
            torch.testing.assert_close(actual, reference, rtol=1e-11, atol=1e-11)


def test_layers_with_equal_masks_share_one_cached_mask() -> None:
    tokens, _ = masked(seq_params_from_rows(2, 9), "both")
    q, k, v = qkv(tokens, heads=4, kv_heads=4)
    kept: list[int] = []

    def note(saved: Tensor) -> Tensor:
        if saved.shape[-2:] == (9, 9):
            kept.append(saved.untyped_storage().data_ptr())
        return saved

    with saved_tensors_hooks(note, lambda saved: saved):
        outs = [attention(q, k, v, tokens) for _ in range(3)]
    assert torch.equal(outs[0], outs[2]) and len(kept) == 3 and len({*kept}) == 1
    other = with_padding(tokens, torch.zeros(18, dtype=torch.bool))
    assert not attention(q, k, v, other).any() and torch.equal(attention(q, k, v, tokens), outs[0])


def test_masked_attention_uses_backends_that_support_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tiled_attention", "sdpa_attention"):
        monkeypatch.setattr(ways, name, None)
    for layout in LAYOUTS.values():
        for scores, has_sinks in VARIANTS.values():
            tokens, _ = masked(layout, "both")
            attention(
                *qkv(tokens, heads=4, kv_heads=2),
                tokens,
                scores,
                sinks_of(4) if has_sinks else None,
            )
    q = torch.empty(1, 2, 8)
    strange = Scores(window=3)
    given = q, q, ((1, 1),)
    assert [
        select_masked_backend(*given, scores, None, AttentionMask())
        for scores in (PLAIN, Scores(causal=False), strange)
    ] == [
        "torch",
        "torch",
        "split_kv",
    ]
    assert (
        select_masked_backend(*given, replace(strange, relative=4), torch.zeros(2), AttentionMask())
        == "torch"
    )
    assert (
        select_masked_backend(q.to("meta"), q.to("meta"), ((1, 1),), strange, None, AttentionMask())
        == "split_kv"
    )


def test_padding_of_long_causal_documents_builds_no_full_mask() -> None:
    q, pairs, long = (
        torch.empty(1, 2, 8),
        AttentionMask(pairs=torch.ones(4, dtype=torch.bool)),
        ((5, 9), (3, 4096)),
    )
    both = Scores(causal=False)
    for lengths, scores, visible, backend in (
        (long, PLAIN, AttentionMask(), "split_kv"),
        (((5, 2048), (1, 4096)), PLAIN, AttentionMask(), "torch"),
        (long, PLAIN, pairs, "torch"),
        (long, PLAIN, replace(pairs, alone=True), "torch"),
        (long, both, AttentionMask(), "torch"),
        (long, Scores(relative=4), AttentionMask(), "torch"),
    ):
        assert select_masked_backend(q, q, lengths, scores, None, visible) == backend


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["long rows", "long documents", "rows"])
def test_attention_dropout_matches_the_reference(layout: str, variant: str) -> None:
    tokens, (scores, has_sinks) = LAYOUTS[layout], VARIANTS[variant]
    numbers = torch.arange(700, 700 + tokens.num_tokens)
    key = DropoutKey(5, numbers)
    dropping = replace(scores, dropout=WeightDropout(0.4, 99, 2))
    inputs, sinks = qkv(tokens, heads=4, kv_heads=2, d=6, d_v=4), sinks_of(4) if has_sinks else None
    y, expected = (
        attention(*inputs, tokens, dropping, sinks, dropout_key=key),
        reference_attention(*inputs, tokens, dropping, sinks, dropout_key=key),
    )
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert (y - attention(*inputs, tokens, dropping, sinks)).abs().max() > 0.1, (
        "evaluation drops nothing"
    )
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    wanted = inputs if sinks is None else [*inputs, sinks]
    for actual, reference in zip(
        torch.autograd.grad(y, wanted, dy), torch.autograd.grad(expected, wanted, dy)
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-11, atol=1e-11)
    assert bool(dropped_weights(0.4, 99, numbers[:5], numbers[:5], range(2, 6)).any())


@pytest.mark.parametrize("kernel", ["auto", "torch", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "variant", ["scale", "window", "everything", "bidirectional", "bidirectional, everything"]
)
def test_relative_biases_are_added_to_the_scores(variant: str, layout: str, kernel: Kernel) -> None:
    scores, has_sinks = VARIANTS[variant]
    table = torch.linspace(-2, 3, 8 * 4, dtype=torch.float64).view(8, 4).requires_grad_()
    tokens, biased = LAYOUTS[layout], replace(scores, relative=20)
    inputs, sinks = (
        [*qkv(tokens, heads=4, kv_heads=2, d=6, d_v=4), table],
        sinks_of(4) if has_sinks else None,
    )
    y = attention(*inputs[:3], tokens, biased, sinks, attention_bias=table, kernel=kernel)
    outs, counts, every = [], *zip(*tokens.lengths)
    for q, k, v in zip(inputs[0].split(counts), inputs[1].split(every), inputs[2].split(every)):
        bias = (
            reference_biases(table, len(q), len(k), max_distance=20, causal=scores.causal)
            if len(k)
            else None
        )
        seen = build_scores_mask(len(q), len(k), scores, device=q.device)
        outs.append(masked_attention(q, k, v, seen, scores, sinks, bias=bias))
    expected = torch.cat(outs)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    for actual, reference in zip(
        torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy)
    ):
        torch.testing.assert_close(actual, reference, rtol=1e-11, atol=1e-11)


def test_queries_and_keys_may_be_different_tokens() -> None:
    """As in cross attention: documents of a memory, one of them empty."""
    tokens = seq_params_from_queries([(5, 3), (2, 70), (4, 0), (1, 1)])
    for scores in (
        Scores(causal=False),
        Scores(causal=False, softcap=2.0),
        Scores(causal=False, off_by_one=True),
    ):
        inputs = qkv(tokens, heads=4, kv_heads=2)
        y, expected = (
            attention(*inputs, tokens, scores),
            reference_attention(*inputs, tokens, scores),
        )
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        for actual, reference in zip(
            torch.autograd.grad(y.sum(), inputs), torch.autograd.grad(expected.sum(), inputs)
        ):
            torch.testing.assert_close(actual, reference, rtol=1e-12, atol=1e-12)


def test_sink_takes_its_share_of_softmax() -> None:
    tokens = seq_params_from_rows(1, 1)
    q, k, v = (x.detach() for x in qkv(tokens, heads=2, kv_heads=1))
    sinks = torch.tensor([(q[0, 0] @ k[0, 0]) / 8**0.5, -1e4], dtype=torch.float64)
    y = attention(q, k, v, tokens, sinks=sinks)
    torch.testing.assert_close(y[0, 0], v[0, 0] / 2)  # as high a score as the only token's
    assert torch.equal(y[0, 1], v[0, 0])


def test_the_reference_is_softmax_over_visible_scores() -> None:
    q, k, v = qkv(seq_params_from_rows(1, 3), heads=1, kv_heads=1)
    y = reference_attention(q, k, v, seq_params_from_rows(1, 3))[:, 0]
    for i in range(3):
        weights = torch.softmax(
            torch.stack([q[i, 0] @ k[j, 0] for j in range(i + 1)]) / 8**0.5, dim=0
        )
        torch.testing.assert_close(y[i], weights @ v[: i + 1, 0])


@pytest.mark.parametrize("lengths", [[3, 3, 3], [2, 4, 3], [40, 90, 10, 60], [100, 100]])
def test_token_does_not_affect_earlier_tokens_or_other_documents(lengths: list[int]) -> None:
    tokens = seq_params_from_lengths(lengths)
    q, k, v = (x.detach() for x in qkv(tokens, heads=2, kv_heads=2))
    before = attention(q, k, v, tokens)
    changed = lengths[0] + 1  # inside the second document
    k, v = k.clone(), v.clone()
    k[changed] += 1
    v[changed] -= 2
    moved = (attention(q, k, v, tokens) != before).flatten(1).any(1)
    same_document = tokens.document_ids == tokens.document_ids[changed]
    assert torch.equal(moved, same_document & (torch.arange(tokens.num_tokens) >= changed))


def test_decoding_with_kv_cache_matches_full_attention() -> None:
    whole = seq_params_from_rows(1, 6)
    q, k, v = (x.detach() for x in qkv(whole, heads=4, kv_heads=2))
    expected = attention(q, k, v, whole)
    for i in range(6):
        step = seq_params_from_queries([(1, i + 1)])
        torch.testing.assert_close(
            attention(q[i : i + 1], k[: i + 1], v[: i + 1], step), expected[i : i + 1]
        )
    chunk = seq_params_from_queries([(2, 6)])
    torch.testing.assert_close(attention(q[4:], k, v, chunk), expected[4:])


@pytest.mark.parametrize("layout", ["rows", "documents"])
def test_slices_of_one_wide_projection_need_no_copy(layout: str) -> None:
    tokens = LAYOUTS[layout]
    wide = torch.randn(tokens.num_tokens, 4 + 2 + 2, 8, dtype=torch.float64)
    q, k, v = wide.split([4, 2, 2], dim=1)
    expected = attention(q.clone(), k.clone(), v.clone(), tokens)
    torch.testing.assert_close(attention(q, k, v, tokens), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("layout", ["rows", "documents", "cache"])
def test_low_precision_matches_float64(dtype: torch.dtype, tolerance: float, layout: str) -> None:
    tokens = LAYOUTS[layout]
    inputs = [x.detach() for x in qkv(tokens, heads=4, kv_heads=2, dtype=dtype)]
    y = attention(*inputs, tokens)
    assert y.dtype == dtype
    expected = reference_attention(*(x.double() for x in inputs), tokens)
    assert (y.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shapes_on_meta_device(layout: str) -> None:
    tokens = LAYOUTS[layout]
    q, k, v = (x.detach().to("meta").requires_grad_() for x in qkv(tokens, heads=4, kv_heads=2))
    y = attention(q, k, v, tokens)
    assert y.shape == q.shape
    y.sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape


def test_values_do_not_keep_the_qkv_projection_alive() -> None:
    kept: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        kept[saved.untyped_storage()._cdata] = saved.untyped_storage().nbytes()
        return saved

    product = torch.randn(12, 8 * 6, requires_grad=True) * 1
    q, k, v = (part.unflatten(-1, (-1, 6)) for part in product.split([24, 12, 12], dim=-1))
    with saved_tensors_hooks(note, lambda saved: saved):
        out = attention(q.contiguous(), k.contiguous(), v, seq_params_from_rows(1, 12))
    assert sorted(kept.values()) == sorted(
        4 * size for size in (12 * 24, 12 * 12, 12 * 12, 12 * 4, 12 * 24)
    )
    with saved_tensors_hooks(note, lambda saved: saved):
        assert torch.equal(attention(q, k, v, seq_params_from_rows(1, 12)), out)
    assert product.untyped_storage()._cdata in kept, (
        "where queries keep it anyway, a copy would only add to it"
    )


def lengths_of(*pairs: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return pairs


ATTENTION_BACKENDS: list[
    tuple[AttentionBackend, tuple[tuple[int, int], ...], torch.dtype, int, Scores]
] = [
    ("cpu_tiled", lengths_of((512, 512), (512, 512)), torch.float32, 8, PLAIN),
    ("cpu_tiled", lengths_of((20, 20), (40, 40)), torch.float32, 8, PLAIN),
    ("cpu_tiled", lengths_of((20, 20)), torch.bfloat16, 8, PLAIN),
    ("cpu_tiled", lengths_of((512, 512)), torch.float32, 4, Scores(scale=2.0)),
    ("torch", lengths_of((20, 20)), torch.float32, 8, PLAIN),
    ("torch", lengths_of((4096, 4096)), torch.bfloat16, 8, Scores(scale=2.0)),
    ("torch", lengths_of((1, 512)), torch.float32, 8, PLAIN),
    ("torch", lengths_of((1, 4096)), torch.float32, 4, PLAIN),
    ("split_kv", lengths_of((4096, 4096)), torch.float32, 4, PLAIN),
    ("split_kv", lengths_of((512, 512)), torch.float32, 8, Scores(window=8)),
    ("split_kv", lengths_of((512, 512)), torch.float32, 8, Scores(softcap=8.0)),
    ("cpu_tiled", lengths_of((512, 512)), torch.float32, 8, Scores(causal=False)),
    ("torch", lengths_of((20, 20)), torch.float32, 8, Scores(causal=False)),
    ("torch", lengths_of((512, 100)), torch.float32, 8, Scores(causal=False)),
    ("split_kv", lengths_of((512, 512)), torch.float32, 8, Scores(off_by_one=True)),
    ("split_kv", lengths_of((20, 20)), torch.float32, 8, Scores(dropout=WeightDropout(0.1, 1, 0))),
]


@pytest.mark.parametrize(("backend", "lengths", "dtype", "d_v", "scores"), ATTENTION_BACKENDS)
def test_backend_selection_by_device_lengths_and_scores(
    backend: AttentionBackend,
    lengths: tuple[tuple[int, int], ...],
    dtype: torch.dtype,
    d_v: int,
    scores: Scores,
) -> None:
    q, v = torch.empty(1, 2, 8, dtype=dtype), torch.empty(1, 1, d_v, dtype=dtype)
    assert select_attention_backend(q, v, lengths, scores, None) == backend
    assert select_attention_backend(q, v, lengths, scores, torch.zeros(2)) == "split_kv"
    elsewhere = select_attention_backend(q.to("meta"), v.to("meta"), lengths, scores, None)
    strange = scores.window or scores.softcap or scores.off_by_one or scores.dropout
    assert elsewhere == ("split_kv" if strange else "torch")


def test_window_over_whole_documents_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "span_attention", None)
    tokens = seq_params_from_lengths([7, 4])
    q, k, v = qkv(tokens, heads=4, kv_heads=2)
    assert torch.equal(attention(q, k, v, tokens, Scores(window=7)), attention(q, k, v, tokens))
    with pytest.raises(TypeError):
        attention(q, k, v, tokens, Scores(window=6))


def test_decoded_token_attends_only_to_its_window() -> None:
    k = torch.arange(9.0).view(9, 1, 1)
    keys, values, lengths = drop_keys_before_window(k, -k, ((1, 4), (2, 5), (0, 0)), 2)
    assert keys.flatten().tolist() == [2, 3, 6, 7, 8] and torch.equal(values, -keys)
    assert lengths == ((1, 2), (2, 3), (0, 0))
    assert drop_keys_before_window(k, k, ((4, 4), (5, 5)), 1)[0] is k
    assert drop_keys_before_window(keys, values, ((1, 4), (2, 5), (0, 0)), 2) == (
        keys,
        values,
        lengths,
    ), "dropped by the cache"


def test_chunks_become_documents_and_use_only_the_current_cached_chunk() -> None:
    k = torch.arange(12.0).view(12, 1, 1)
    keys, values, lengths = split_into_chunks(k, -k, ((1, 4), (4, 7), (0, 1)), 3)
    assert keys.flatten().tolist() == [3, 7, 8, 9, 10] and torch.equal(values, -keys)
    assert lengths == ((1, 1), (3, 3), (1, 1), (0, 0))
    assert split_into_chunks(keys, values, ((1, 4), (4, 7), (0, 1)), 3)[0] is keys, (
        "dropped by the cache"
    )
    assert split_into_chunks(k, k, ((5, 5), (7, 7)), 4) == (k, k, ((4, 4), (1, 1), (4, 4), (3, 3)))


@pytest.mark.parametrize(
    "variant", [name for name, (scores, _) in VARIANTS.items() if scores.causal]
)
def test_continued_prefill_with_kv_cache_matches_full_attention(variant: str) -> None:
    scores, has_sinks = VARIANTS[variant]
    whole = seq_params_from_rows(1, 12)
    q, k, v = (x.detach() for x in qkv(whole, heads=4, kv_heads=2, d_v=6))
    sinks = sinks_of(4).detach() if has_sinks else None
    expected = attention(q, k, v, whole, scores, sinks)
    for first in range(12):
        for last in {first + 1, 12}:
            part = seq_params_from_queries([(last - first, last)])
            y = attention(q[first:last], k[:last], v[:last], part, scores, sinks)
            torch.testing.assert_close(y, expected[first:last], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_torch_compile_excludes_split_kv_from_the_graph() -> None:
    """What is planned for lengths at hand would be traced and compiled once more for all others."""
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count)
    def layer(q: Tensor, k: Tensor, v: Tensor, tokens: PackedSeqParams) -> Tensor:
        return attention(q * 2, k, v, tokens, Scores(window=3)) + 1

    for first in range(2, 5):
        tokens = seq_params_from_lengths([first, 9 - first])
        q, k, v = (x.detach() for x in qkv(tokens, heads=4, kv_heads=2))
        expected = reference_attention(q * 2, k, v, tokens, Scores(window=3)) + 1
        torch.testing.assert_close(layer(q, k, v, tokens), expected, rtol=1e-12, atol=1e-12)
        if first == 2:
            before = len(graphs)
    assert len(graphs) <= before + 1


def test_explicit_backend_is_used_or_rejected() -> None:
    q, k, v = (torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(n)) for n in range(3))
    rows, windowed = seq_params_from_rows(2, 4), Scores(window=2)
    plain = reference_attention(q, k, v, rows)
    forms: tuple[BackendName, ...] = "cpu_tiled", "sdpa", "split_kv"
    for form in forms:
        torch.testing.assert_close(
            attention(q, k, v, rows, kernel=form), plain, rtol=1e-5, atol=1e-5
        )
    result = attention(q, k, v, rows, windowed, kernel="split_kv")
    torch.testing.assert_close(
        result, reference_attention(q, k, v, rows, windowed), rtol=1e-5, atol=1e-5
    )
    for form in ("cpu_tiled", "sdpa"):
        with pytest.raises(
            ConfigError,
            match=f"kernels.attention={form}: supported inputs: .*plain scores.* Set kernels.atten",
        ):
            attention(q, k, v, rows, windowed, kernel=form)
    for form in ("varlen", "flex"):
        with pytest.raises(
            ConfigError,
            match=f"kernels.attention={form}: .* Set kernels.attention to torch, which su",
        ):
            attention(q, k, v, rows, kernel=form)
