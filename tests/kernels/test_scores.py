"""The reference of attention: visible keys, and queries without visible keys."""

import pytest
import torch

from megalith.kernels.attention.scores import (
    Scores,
    build_scores_mask,
    causal_mask,
    masked_attention,
)


def test_default_scale_is_one_over_sqrt_head_dim() -> None:
    assert Scores().factor(64) == 0.125
    assert Scores(scale=0.3).factor(64) == 0.3


@pytest.mark.parametrize("window", [None, 1, 2, 9])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 5), (1, 3), (0, 0), (0, 3)])
def test_causal_window_mask(queries: int, keys: int, window: int | None) -> None:
    mask = causal_mask(queries, keys, window=window, device=torch.device("cpu"))
    assert mask.shape == (queries, keys)
    for i in range(queries):
        own = keys - queries + i
        assert [j for j in range(keys) if mask[i, j]] == [
            j for j in range(keys) if j <= own and (window is None or own - j < window)
        ]


@pytest.mark.parametrize("window", [None, 1, 2, 9])
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 5), (1, 3)])
def test_bidirectional_window_is_symmetric(queries: int, keys: int, window: int | None) -> None:
    mask = build_scores_mask(
        queries, keys, Scores(window=window, causal=False), device=torch.device("cpu")
    )
    if window is None or window >= keys:
        assert mask is None
        return
    assert mask is not None
    for i in range(queries):
        own = keys - queries + i
        assert [j for j in range(keys) if mask[i, j]] == [
            j for j in range(keys) if abs(own - j) < window
        ]


@pytest.mark.parametrize(("window", "right"), [(3, 0), (1, 4), (9, 1), (2, 9), (9, 9)])
def test_window_may_be_asymmetric(window: int, right: int) -> None:
    scores = Scores(window=window, right=right, causal=False)
    mask = build_scores_mask(3, 6, scores, device=torch.device("cpu"))
    assert (mask is None) == (window >= 6 and right >= 5) == (not scores.hides(6))
    for i in range(3 if mask is not None else 0):
        assert mask is not None
        own = 3 + i
        assert [j for j in range(6) if mask[i, j]] == [
            j for j in range(6) if own - window < j <= own + right
        ]
    assert scores.after == right and Scores(window=window, causal=False).after == window - 1
    assert Scores(causal=False).after is None and Scores(right=3).after == 0, (
        "without a window, or causal"
    )


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0])])
def test_query_without_visible_keys_gives_zero_and_no_gradient(sinks: torch.Tensor | None) -> None:
    q, k, v = (
        torch.randn(*shape, requires_grad=True) for shape in ((3, 2, 4), (2, 1, 4), (2, 1, 3))
    )
    visible = torch.tensor([[True, False], [False, False], [True, True]])
    y = masked_attention(q, k, v, visible, sinks=sinks)
    assert not y[1].any() and bool(y[[0, 2]].any(-1).all())
    grads = torch.autograd.grad(y.square().sum(), (q, k, v))
    assert all(bool(torch.isfinite(grad).all()) for grad in grads) and not grads[0][1].any()


def test_no_mask_equals_a_mask_that_hides_nothing() -> None:
    q, k, v = (torch.randn(*shape) for shape in ((3, 2, 4), (5, 1, 4), (5, 1, 3)))
    everything = torch.ones(3, 5, dtype=torch.bool)
    for sinks in (None, torch.tensor([0.5, -1.0])):
        scores = Scores(softcap=2.0)
        y = masked_attention(q, k, v, None, scores, sinks)
        torch.testing.assert_close(y, masked_attention(q, k, v, everything, scores, sinks))


def test_softmax_is_fp32_in_low_precision() -> None:
    q, k, v = (torch.randn(*shape).bfloat16() for shape in ((3, 2, 4), (5, 1, 4), (5, 1, 3)))
    y = masked_attention(q, k, v, None, sinks=torch.zeros(2, dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
    exact = masked_attention(q.double(), k.double(), v.double(), None, sinks=torch.zeros(2))
    assert (y - exact).abs().max() < 2e-2
