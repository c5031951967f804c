"""The peer: Hugging Face transformers' Llama in a plain PyTorch training step, eager or compiled.

Everything that could make it faster without leaving the common recipe is on: sdpa attention, fused
AdamW, multi-tensor (`foreach`) clipping and copies, gradients dropped instead of zeroed. In bf16
the module is bf16 and the optimizer works on fp32 copies of weights and gradients; autocast over
fp32 weights, the other common recipe, was slower (docs/log.md).
"""

from collections.abc import Mapping
from typing import Any

import torch
from contenders.ours import LR, WEIGHT_DECAY
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
)  # lint: allow optional-import: the peer that we measure against

from megalith.config.train import TrainRun
from megalith.data.loader import StepBatches
from megalith.hf.families import LLAMA
from megalith.train.trainer import DTYPES


class TransformersLlama:
    """Holds model, master weights and optimizer; `step()` is one optimizer update."""

    def __init__(
        self, run: TrainRun, batches: StepBatches, weights: Mapping[str, Tensor], *, compiled: bool
    ) -> None:
        """`weights`: ours, by our names; they are copied."""
        config = LlamaConfig(**LLAMA.write_config(run.model), attn_implementation="sdpa")
        self.model = (
            LlamaForCausalLM(config)
            .to(batches.microbatches[0].ids.device, DTYPES[run.precision.params])
            .train()
        )
        _load(self.model, run, weights)
        self.batches, self.rows = batches, (run.train.micro_batch_size, run.train.seq_len)
        self.clip_grad = run.optim.clip_grad
        self.params = [
            parameter for parameter in self.model.parameters() if parameter.requires_grad
        ]
        self.master_weights = _master_weights(self.params)
        self.optimizer = torch.optim.AdamW(
            self.master_weights,
            lr=LR,
            betas=(run.optim.beta1, run.optim.beta2),
            eps=run.optim.eps,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )
        self.forward: Any = (
            torch.compile(self.model) if compiled else self.model
        )  # Any: an nn.Module or its wrapper

    def step(self) -> float:
        """One update; the loss before it."""
        total = torch.zeros((), device=self.params[0].device)
        for batch in self.batches.microbatches:
            labels = batch.labels.where(batch.labels >= 0, -100).view(self.rows)
            loss = self.forward(
                input_ids=batch.ids.view(self.rows),
                labels=labels,
                shift_labels=labels,
                use_cache=False,
                num_items_in_batch=self.batches.num_labels,
            ).loss
            loss.backward()
            total += loss.detach()
        self._update()
        return float(total)

    def _update(self) -> None:
        separate = self.master_weights[0] is not self.params[0]
        if separate:
            torch._foreach_copy_(
                [_gradient(m) for m in self.master_weights], [_gradient(p) for p in self.params]
            )
        nn.utils.clip_grad_norm_(self.master_weights, self.clip_grad)
        self.optimizer.step()
        if separate:
            torch._foreach_copy_(
                [p.data for p in self.params], [m.data for m in self.master_weights]
            )
        for parameter in self.params:
            parameter.grad = None


def _master_weights(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """fp32 copies with fp32 gradients, or the parameters themselves where they are fp32."""
    if params[0].dtype == torch.float32:
        return params
    master_weights = [nn.Parameter(parameter.detach().float()) for parameter in params]
    for master in master_weights:
        master.grad = torch.zeros_like(master)
    return master_weights


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@torch.no_grad()
def _load(model: nn.Module, run: TrainRun, weights: Mapping[str, Tensor]) -> None:
    """Copy our weights into their tensors, as the map of the family says."""
    reference = dict(model.named_parameters())
    for rule in LLAMA.rules(run.model):
        assert rule.parameter is not None, f"{rule.name} has no counterpart of ours"
        box = tuple(slice(start, stop) for start, stop in rule.box)
        reference[rule.name].copy_(weights[rule.parameter][box].reshape(rule.shape))
