"""torch's varlen_attn: supported scores and arguments."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.kernels.attention import sdpa
from megalith.kernels.attention.dispatch import (
    attention,
    reference_attention,
    select_attention_backend,
)
from megalith.kernels.attention.scores import PLAIN, Scores
from megalith.kernels.attention.sdpa import (
    can_use,
    has_varlen,
    starts,
    varlen_attention,
    varlen_window,
)
from megalith.kernels.packed import seq_params_from_queries
from megalith.testing.tolerance import relative_error

LENGTHS = ((150, 150), (3, 3), (40, 90), (1, 130))


def test_cumulative_lengths() -> None:
    queries, keys = starts(LENGTHS, torch.device("cpu"))
    assert queries.tolist() == [0, 150, 153, 193, 194] and keys.tolist() == [0, 150, 153, 243, 373]
    assert (
        queries.dtype == keys.dtype == torch.int32
        and queries.is_contiguous()
        and keys.is_contiguous()
    )


def test_window_size_excludes_the_token_itself() -> None:
    assert varlen_window(PLAIN) == (-1, 0)
    assert varlen_window(Scores(window=1)) == (0, 0)
    assert varlen_window(Scores(window=4, causal=False)) == (3, 3)
    assert varlen_window(Scores(window=4, right=0, causal=False)) == (3, 0)
    assert varlen_window(Scores(causal=False)) == (-1, -1)


@pytest.mark.skipif(not has_varlen(), reason="this torch has no varlen_attn with windows")
@pytest.mark.parametrize("scores", [PLAIN, Scores(window=33, scale=0.2), Scores(causal=False)])
def test_arguments_of_varlen_attn_match_the_reference(
    scores: Scores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in that reads the arguments as torch's documentation has them."""
    import torch.nn.attention.varlen as theirs

    def stand_in(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_kv: Tensor,
        max_seqlen_q: int,
        max_seqlen_kv: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        assert enable_gqa and (max_seqlen_q, max_seqlen_kv) == (150, 150)
        left, right = (10**6 if side < 0 else side for side in window_size)
        outs = []
        for i in range(len(cu_seqlens_q) - 1):
            rows, keys = (
                slice(cu_seqlens_q[i], cu_seqlens_q[i + 1]),
                slice(cu_seqlens_kv[i], cu_seqlens_kv[i + 1]),
            )
            n, m = (
                int(cu_seqlens_q[i + 1] - cu_seqlens_q[i]),
                int(cu_seqlens_kv[i + 1] - cu_seqlens_kv[i]),
            )
            place, key = torch.arange(m - n, m).unsqueeze(1), torch.arange(m)
            hidden = (key < place - left) | (key > place + right)
            seen, values = (x.repeat_interleave(2, 1).transpose(0, 1) for x in (k[keys], v[keys]))
            outs.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q[rows].transpose(0, 1), seen, values, attn_mask=~hidden, scale=scale
                ).transpose(0, 1)
            )
        return torch.cat(outs)

    monkeypatch.setattr(theirs, "varlen_attn", stand_in)
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=draw) for shape in [(194, 4, 16), (373, 2, 16), (373, 2, 16)]
    )
    expected = reference_attention(q, k, v, seq_params_from_queries(list(LENGTHS)), scores)
    assert relative_error(varlen_attention(q, k, v, LENGTHS, scores), expected) <= 1e-5


class OnGPU:
    """What the choice of a way asks of tensors, as on a GPU."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape, self.dtype, self.device = shape, dtype, torch.device("cuda:0")

    def __len__(self) -> int:
        return self.shape[0]


def test_gpu_backend_selection_by_supported_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(sdpa, "has_varlen", lambda: True)
    monkeypatch.setattr("megalith.kernels.attention.flex.has_triton", lambda: True)
    q: Any = OnGPU(8, 2, 64)
    wide: Any = OnGPU(8, 2, 64, dtype=torch.float32)
    odd: Any = OnGPU(8, 2, 20)
    sinks = torch.zeros(2)
    rows, packed = ((4, 4), (4, 4)), ((5, 5), (3, 3))
    assert select_attention_backend(q, q, rows, PLAIN, None) == "torch"
    assert (
        select_attention_backend(q, q, packed, PLAIN, None)
        == select_attention_backend(q, q, rows, Scores(window=2), None)
        == "varlen"
    )
    assert (
        select_attention_backend(wide, wide, packed, PLAIN, None)
        == select_attention_backend(q, odd, packed, PLAIN, None)
        == "torch"
    )
    assert select_attention_backend(wide, wide, rows, Scores(window=2), None) == "flex"
    assert (
        select_attention_backend(q, q, rows, PLAIN, sinks)
        == select_attention_backend(q, q, packed, Scores(softcap=2.0), None)
        == "flex"
    )
    monkeypatch.setattr("megalith.kernels.attention.flex.has_triton", lambda: False)
    assert select_attention_backend(q, q, rows, PLAIN, sinks) == "split_kv"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert select_attention_backend(q, q, packed, PLAIN, None) == "torch"


def test_cpu_tensors_are_not_supported() -> None:
    q = torch.empty(3, 2, 16, dtype=torch.bfloat16)
    assert not can_use(q, q, PLAIN, None)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU: CPUs have no varlen_attn"
)
@pytest.mark.parametrize("scores", [PLAIN, Scores(window=33, scale=0.2), Scores(causal=False)])
def test_varlen_attention_on_gpu_matches_the_reference(scores: Scores) -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(194, 4, 64), (373, 2, 64), (373, 2, 64)]
    q, k, v = (
        torch.randn(shape, generator=draw).to("cuda", torch.bfloat16).requires_grad_()
        for shape in shapes
    )
    tokens = seq_params_from_queries(list(LENGTHS), device="cuda")
    actual, reference = (
        attention(q, k, v, tokens, scores),
        reference_attention(q.double(), k.double(), v.double(), tokens, scores),
    )
    assert relative_error(actual, reference) <= 2e-2
    dy = torch.randn_like(actual)
    for a, b in zip(
        torch.autograd.grad(actual, (q, k, v), dy),
        torch.autograd.grad(reference, (q, k, v), dy.double()),
    ):
        assert relative_error(a, b) <= 4e-2
