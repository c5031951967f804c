"""SDPA in one call for documents of equal length, else document by document."""

import pytest
import torch

from megalith.kernels.attention.scores import Scores, causal_mask, masked_attention
from megalith.kernels.attention.sdpa import Lengths, sdpa_attention, sdpa_documents, sdpa_masked


@pytest.mark.parametrize(
    "lengths", [((4, 4), (4, 4)), ((3, 3), (5, 5)), ((1, 6), (2, 5)), ((0, 0), (2, 4), (0, 3))]
)
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("causal", [True, False])
def test_documents_match_the_reference(lengths: Lengths, scale: float | None, causal: bool) -> None:
    t, keys = (sum(column) for column in zip(*lengths))
    q, k, v = (
        torch.randn(*shape, dtype=torch.float64)
        for shape in ((t, 4, 6), (keys, 2, 6), (keys, 2, 5))
    )
    y = sdpa_attention(q, k, v, lengths, scale=scale, causal=causal)
    assert y.shape == (t, 4, 5)
    at, first = 0, 0
    for queries, count in lengths:
        mask = causal_mask(queries, count, device=q.device) if causal else None
        actual = q[at : at + queries], k[first : first + count], v[first : first + count]
        expected = masked_attention(*actual, mask, Scores(scale=scale))
        torch.testing.assert_close(y[at : at + queries], expected, rtol=1e-12, atol=1e-12)
        at, first = at + queries, first + count


def test_documents_of_equal_length_use_one_call() -> None:
    q, k, v = (torch.randn(12, heads, 6) for heads in (4, 2, 2))
    assert torch.equal(sdpa_attention(q, k, v, ((4, 4),) * 3), sdpa_documents(q, k, v, 4))


def test_fully_masked_queries_give_zero() -> None:
    q, k, v = (
        torch.randn(*shape, requires_grad=True) for shape in ((3, 4, 6), (2, 2, 6), (2, 2, 5))
    )
    mask = torch.tensor([[True, False], [False, False], [True, True]])
    y, expected = (
        sdpa_masked(q, k, v, mask, scale=0.3),
        masked_attention(q, k, v, mask, Scores(scale=0.3)),
    )
    torch.testing.assert_close(y, expected)
    assert not y[1].any()
    for actual, reference in zip(
        *(torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (y, expected))
    ):
        torch.testing.assert_close(actual, reference)
    assert sdpa_masked(q, k[:0], v[:0], mask[:, :0]).shape == (3, 4, 5)
    torch.testing.assert_close(sdpa_masked(q, k, v, None), masked_attention(q, k, v, None))
