"""Training losses: the objective, which computes named losses of a microbatch, and their
normalization by the counts of the global batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megalith.config.plugins import load_plugin
from megalith.config.train import TrainRun
from megalith.data.loader import Batch, StepBatches
from megalith.errors import ConfigError, did_you_mean
from megalith.kernels.layer_inputs import AuxLossScale
from megalith.parallel.collectives import mark_partial
from megalith.parallel.mesh import Mesh

MTPInputs = Sequence[tuple[Tensor, Tensor]]
"""(ids, labels), each [t], of every MTP depth."""

MAIN_LOSS = "loss"
"""Name of the main loss, in objectives and in metrics."""


class ModelOutputs(Protocol):
    """Outputs of the model that losses are computed from, on the stage with the output head; full
    logits are never materialized."""

    def loss(self, labels: Tensor, *, depth: int = 0, evaluating: bool = False) -> Tensor:
        """Return the training loss of an MTP depth (0: the next token), summed over the labels [t]
        that are not negative; `evaluating`: the sum of -log p(label)."""

    def token_losses(self, labels: Tensor, *, depth: int = 0) -> Tensor:
        """Return -log p(label) of each token [t], 0 where the label is negative."""

    def is_most_likely(self, labels: Tensor, *, depth: int = 0) -> Tensor:
        """Return where the label is the most likely token: bool [t], False without a label."""


@dataclass(frozen=True, slots=True)
class LossTerm:
    """Count and weight of a named loss. The loss of the global batch is its sum over all
    microbatches and ranks, divided by the total of the count."""

    count: str
    """Name of the count: `labels`, `mtp_DEPTH_labels`, `tokens`, `microbatches`, or `extra.NAME`,
    the sum of a tensor of `Batch.extra`."""

    weight: float = 1.0
    """Factor of the loss in what is minimized; metrics show the loss without it."""


class Objective(Protocol):
    """Training losses of a model: (outputs, batch) -> {name: (sum, count)}, built as `Class(run)`.

    The counts are named in advance and taken from the batch, because backward of the first
    microbatch needs their totals over the global batch, and because ranks without the output head
    report the losses, too.
    """

    @property
    def losses(self) -> Mapping[str, LossTerm]:
        """All losses by name, equal on all ranks: `loss` first; other names end in `_loss`."""

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sum of each loss over this rank's tokens of one microbatch, equal on all
        tensor-parallel ranks; runs on the pipeline stage with the output head."""


class LMObjective:
    """Language-model loss of the next token and of every MTP depth."""

    def __init__(self, run: TrainRun) -> None:
        mtp = run.model.mtp
        self.losses = {MAIN_LOSS: LossTerm("labels")} | {
            f"mtp_{depth}_loss": LossTerm(f"mtp_{depth}_labels", mtp.loss_weight / mtp.num_layers)
            for depth in range(1, 1 + mtp.num_layers)
        }

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, Tensor]:
        """Return the summed losses of the labels."""
        sums = sum_lm_losses(outputs, batch.labels, batch.mtp_inputs)
        return dict(zip(self.losses, sums, strict=True))


def sum_lm_losses(
    outputs: ModelOutputs, labels: Tensor, mtp_inputs: MTPInputs = ()
) -> tuple[Tensor, ...]:
    """Return the training loss of the next token, then of every MTP depth, each summed over its
    labels."""
    mtp_losses = (outputs.loss(own, depth=n) for n, (_, own) in enumerate(mtp_inputs, start=1))
    return outputs.loss(labels), *mtp_losses


def sum_eval_losses(outputs: ModelOutputs, labels: Tensor, mtp_inputs: MTPInputs = ()) -> Tensor:
    """Return the sums of -log p(label) of the next token and of every MTP depth, followed by the
    MTP acceptance rates if the model has MTP layers: float64."""
    depths = [own for _, own in mtp_inputs]
    losses = [outputs.loss(labels, evaluating=True)]
    is_correct = []
    for depth, own in enumerate(depths, start=1):
        losses.append(outputs.loss(own, depth=depth, evaluating=True))
        is_correct.append(outputs.is_most_likely(own, depth=depth))
    sums = torch.stack(losses).double()
    return torch.cat([sums, mtp_acceptance_rate(is_correct, depths)]) if is_correct else sums


def sum_document_losses(outputs: ModelOutputs, batch: Batch, *, num_documents: int) -> Tensor:
    """Return the sum of -log p(label) of each document of a microbatch, over this rank's tokens:
    float64 [num_documents], 0 past its last document."""
    losses = outputs.token_losses(batch.labels).double()
    sums = torch.zeros(num_documents, dtype=torch.float64, device=losses.device)
    return sums.index_add_(0, batch.seq_params.document_ids, losses)


def mtp_acceptance_rate(right: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
    """Return the counts behind the MTP acceptance rates: float64 [depths + 1].

    right: bool [t] of each depth; labels: [t] of each. The number of correct tokens of each depth,
    and the number of tokens that are correct at all depths up to theirs, summed over the
    `complete` tokens. Source: Leviathan et al. 2023, arXiv:2211.17192, section 3.
    """
    num_leading = torch.stack(list(right)).long().cumprod(0).sum(0)
    return torch.stack(
        [*(correct.sum() for correct in right), num_leading[complete(labels)].sum()]
    ).double()


def complete(labels: Sequence[Tensor]) -> Tensor:
    """Return which tokens have a label at every depth: bool [t]."""
    return torch.stack([one >= 0 for one in labels]).all(0)


def build_objective(run: TrainRun) -> Objective:
    """Return the objective of a run: the language-model losses, or that of `train.loss_plugin`.

    Raises:
        ConfigError: the plug-in does not name its losses as the metrics need them.
    """
    name = run.train.loss_plugin
    if name is None:
        return LMObjective(run)
    objective: Objective = load_plugin("loss", name)(run)
    losses = getattr(objective, "losses", {})
    if not isinstance(losses, Mapping) or not all(
        isinstance(term, LossTerm) for term in losses.values()
    ):
        raise ConfigError(
            f"train.loss_plugin={name} has losses={losses!r:.200}: it must map each name to a "
            f"LossTerm. Use losses = {{'{MAIN_LOSS}': LossTerm('labels')}}."
        )
    names = list(losses)
    if names[:1] != [MAIN_LOSS] or not all(other.endswith("_loss") for other in names[1:]):
        raise ConfigError(
            f"train.loss_plugin={name} has losses={names}: the first must be named {MAIN_LOSS}, "
            f"and the names of the others must end in _loss. Use losses = {{'{MAIN_LOSS}': "
            "LossTerm('labels')}."
        )
    return objective


def check_losses(losses: Mapping[str, Tensor], terms: Mapping[str, LossTerm]) -> None:
    """Check that an objective has returned the losses that it has declared, each as a scalar.

    Raises:
        ConfigError: it has not.
    """
    if not isinstance(losses, Mapping):
        raise ConfigError(
            f"train.loss_plugin returned {type(losses).__name__}. Return a dict with the sum of "
            f"each loss: {', '.join(terms)}."
        )
    if losses.keys() != terms.keys():
        raise ConfigError(
            f"train.loss_plugin returned the losses {sorted(losses)}, but its attribute `losses` "
            f"has {sorted(terms)}. Return one sum for each name."
        )
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            shape = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"value {loss!r}"
            raise ConfigError(
                f"train.loss_plugin returned the loss {name} with {shape}. Return the sum over "
                "this rank's tokens, a tensor of shape []."
            )


@dataclass(frozen=True, slots=True)
class LossNormalizer:
    """The one place where losses are normalized: converts the losses of a microbatch to its part of
    the loss over the global batch, which backward starts from.

    The parts of all microbatches and of all dp and cp ranks sum to the loss, so gradients are
    summed over these ranks, not averaged.
    """

    terms: Mapping[str, LossTerm]
    totals: Mapping[str, float]
    """Counts of the global batch, over all ranks; 0 divides as 1."""

    mesh: Mesh
    scale: float = 1.0
    """Loss scale of fp16; the gradients are divided by it before use."""

    def scale_loss(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Return the weighted sum of the losses, each divided by the total of its own count."""
        parts = []
        for name, term in self.terms.items():
            total = self.totals[term.count] or 1
            loss = losses[name]
            parts.append(loss / total if term.weight == 1.0 else loss * (term.weight / total))
        mean = parts[0]
        for part in parts[1:]:
            mean = mean + part
        return mark_partial(mean if self.scale == 1.0 else mean * self.scale, self.mesh.dp_cp)

    def aux_loss_scale(self, microbatch: int, num_microbatches: int, part: float) -> AuxLossScale:
        """Return the scale of the routers' aux losses, which are means over the microbatches of the
        global batch; `part`: tokens of the microbatch divided by their mean. `num_microbatches`: of
        this rank."""
        total = self.totals["microbatches"]
        # Recorded losses are averaged over the microbatches that all ranks run, with empty ones.
        share = part * (num_microbatches * self.mesh.dp.size / total)
        return AuxLossScale(microbatch, num_microbatches, self.scale / total * part, share)

    def mean_losses(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the losses of the global batch by name, from their sums over all ranks."""
        return {
            name: loss / (self.totals[term.count] or 1)
            for (name, term), loss in zip(self.terms.items(), sums, strict=True)
        }


def build_loss_normalizer(
    objective: Objective, batches: StepBatches, mesh: Mesh, *, scale: float = 1.0
) -> LossNormalizer:
    """Return the normalizer of a step's losses.

    Raises:
        ConfigError: a loss is divided by a count that the batches do not have.
    """
    num_microbatches = batches.num_microbatches or len(batches.microbatches) * mesh.dp.size
    totals = {**batches.totals(), "microbatches": num_microbatches}
    for name, term in objective.losses.items():
        if term.count not in totals:
            tensor = term.count.removeprefix("extra.")
            raise ConfigError(
                f"train.loss_plugin: the loss {name} has the count {term.count}, which the data "
                f"does not have.{did_you_mean(term.count, totals)} Use one of "
                f"{', '.join(totals)}, or declare {tensor} in the attribute `extra` of the dataset "
                f"(data.plugin) and use extra.{tensor}."
            )
    return LossNormalizer(objective.losses, totals, mesh, scale)
