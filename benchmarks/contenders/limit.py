"""The limit: the matmuls and the attention of one training step, alone.

Every weight is multiplied three times (forward, gradient of its input, gradient of itself), in the
stacks in which the model multiplies them and by the functions that it multiplies them with;
attention runs forward and backward. There are no norms, no activations, no loss, no optimizer, no
conversions. A step cannot be faster without other matmuls or another attention; how close it comes
says what everything else costs.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.kernels.attention.dispatch import attention
from megalith.kernels.attention.sdpa import sdpa_documents
from megalith.kernels.linear import forward, input_grad
from megalith.kernels.packed import seq_params_from_rows
from megalith.train.trainer import DTYPES


class Product(NamedTuple):
    """What the three matmuls of one weight read, and where its gradient goes."""

    x: Tensor
    w: Tensor
    dy: Tensor
    dw: Tensor


def weight_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of every matmul with weights, in the order of the forward pass; the
    vocabulary is the last."""
    h, f, n, g, d = (
        config.hidden_size,
        config.ffn_hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_size(),
    )
    layer = [((n + 2 * g) * d, h), (h, n * d), (2 * f, h), (h, f)]
    return layer * config.num_layers + [(config.padded_vocab_size(), h)]


class Matmuls:
    """Every matmul with weights. Weights and gradients have memory of their own; activations of one
    shape share it."""

    def __init__(self, run: TrainRun, device: torch.device) -> None:
        dtype = DTYPES[run.precision.params]
        self.microbatches = run.train.global_batch_size // run.train.micro_batch_size
        tokens = run.train.micro_batch_size * run.train.seq_len
        sizes = {size for shape in weight_shapes(run.model) for size in shape}
        # Not all zeros: processors may run faster on those.
        activations = {
            size: torch.randn(tokens, size, dtype=dtype, device=device) for size in sizes
        }
        self.products = [
            Product(
                activations[inputs],
                torch.randn(outputs, inputs, dtype=dtype, device=device),
                activations[outputs],
                torch.empty(outputs, inputs, dtype=dtype, device=device),
            )
            for outputs, inputs in weight_shapes(run.model)
        ]

    def step(self) -> None:
        """Forward through all layers and back."""
        with torch.no_grad():
            for _ in range(self.microbatches):
                for p in self.products:
                    forward(p.x, p.w)
                for p in reversed(self.products):
                    input_grad(p.dy, p.w)
                    torch.mm(p.dy.t(), p.x, out=p.dw)


class Attention:
    """Attention of every layer, forward and backward: by our kernel, or by torch's."""

    def __init__(self, run: TrainRun, device: torch.device, *, ours: bool) -> None:
        config, dtype = run.model, DTYPES[run.precision.params]
        self.times = config.num_layers * (run.train.global_batch_size // run.train.micro_batch_size)
        rows, length = run.train.micro_batch_size, run.train.seq_len
        tokens = seq_params_from_rows(rows, length, device=device)
        q_shape = (rows * length, config.num_heads, config.head_size())
        kv_shape = (rows * length, config.num_kv_heads, config.head_size())
        self.inputs = [
            torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
            for shape in (q_shape, kv_shape, kv_shape)
        ]
        self.dout = torch.randn(q_shape, dtype=dtype, device=device)
        self.run: Callable[[Tensor, Tensor, Tensor], Tensor] = (
            (lambda q, k, v: attention(q, k, v, tokens))
            if ours
            else (lambda q, k, v: sdpa_documents(q, k, v, length))
        )

    def step(self) -> None:
        """Forward and backward, once per layer."""
        for _ in range(self.times):
            torch.autograd.grad(self.run(*self.inputs), self.inputs, self.dout)
