"""Evaluation: the mean loss over held-out samples, and what it means per byte of text."""

import math
from dataclasses import dataclass

import torch

from megalith.data.loader import Loader, Masks
from megalith.data.sample import Dataset
from megalith.data.tokenizer import Tokenizer
from megalith.parallel.group import all_reduce_
from megalith.train.build import Trainer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What held-out text costs the model."""

    loss: float
    """Mean of -log p(label), in nats per token."""

    bits_per_byte: float | None
    """The same in bits per byte of the text that the labels decode to; None without a tokenizer that knows text."""

    num_labels: int
    """Tokens it was measured on."""


def evaluate(trainer: Trainer, dataset: Dataset, masks: Masks, *, steps: int, tokenizer: Tokenizer | None) -> Evaluation:
    """Mean loss over the first `steps` global batches of `dataset`. Collective over the whole mesh; changes nothing."""
    mesh, train = trainer.mesh, trainer.run.train
    loader = Loader(
        dataset, masks, mesh.dp, global_batch_size=train.global_batch_size, micro_batch_size=train.micro_batch_size,
        consumed=0, steps=steps, device=trainer.device,
    )  # fmt: skip
    total = torch.zeros(3, dtype=torch.float64, device=trainer.device)  # loss, labels, bytes
    with torch.no_grad():
        for _ in range(steps):
            for batch in loader.next().microbatches:
                total[0] += trainer.model.loss(batch.ids, batch.labels, batch.tokens)
                total[1] += batch.num_labels
                if tokenizer is not None:
                    total[2] += tokenizer.num_bytes(batch.labels[batch.labels >= 0].tolist())
    loss_sum, labels, num_bytes = all_reduce_(total, mesh.dp).tolist()
    bits = loss_sum / math.log(2) / num_bytes if num_bytes else None
    return Evaluation(loss_sum / max(1.0, labels), bits, int(labels))
