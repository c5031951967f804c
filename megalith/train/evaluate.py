"""Evaluation: mean loss over held-out samples, bits per byte and multi-token prediction (MTP)
acceptance."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from megalith.checkpoint.load import WeightsRole
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.train import TrainRun
from megalith.data.build import build_dataset
from megalith.data.loader import Batch, MaskSettings, build_batch, build_mask_settings, build_pack
from megalith.data.sample import Dataset, HasDocumentLengths, SampleSettings
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import ConfigError
from megalith.hf.pretrained import load_pretrained
from megalith.models.decoder import allocate, iter_parameter_specs
from megalith.observe.machine import DTYPES
from megalith.observe.metrics import StepProgress
from megalith.parallel.context import local_slicing
from megalith.parallel.grad_sync import can_shard_weights
from megalith.parallel.group import all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.plan.batch_assignment import TokenBudget, build_token_budget
from megalith.plan.context import Slicing
from megalith.plan.shards import Shard
from megalith.train.forward_backward import PipelineModel
from megalith.train.objective import complete
from megalith.train.run_folder import RunFolder
from megalith.train.trainer import build_pipeline_model, weight_entries

VALIDATION = "eval"
"""Name of the evaluation on the validation split, in metrics and results."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Losses and MTP acceptance rates on held-out text."""

    loss: float
    """Mean of -log p(label), in nats per token."""

    bits_per_byte: float | None
    """The loss in bits per byte of the text of the labels; None if tokens are not text."""

    num_labels: int
    """Number of labels that the loss is averaged over."""

    mtp_losses: tuple[float, ...] = ()
    """Mean loss of every MTP depth."""

    acceptance_rates: tuple[float, ...] = ()
    """For every MTP depth, the share of labels that are its most likely token."""

    acceptance_length: float | None = None
    """Tokens per forward pass of self-speculative decoding: the next token, and the MTP predictions
    up to the first wrong one. None without MTP layers."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss, at most e^700."""
        return math.exp(min(self.loss, 700.0))

    def metrics(self, name: str) -> dict[str, float | None]:
        """Return the values of a metrics row; `name`: eval for the validation split, or that of a
        suite."""
        metrics = {f"{name}_loss": self.loss, f"{name}_bits_per_byte": self.bits_per_byte}
        if not self.acceptance_rates:
            return metrics
        losses, rates = (
            enumerate(self.mtp_losses, start=1),
            enumerate(self.acceptance_rates, start=1),
        )
        prefix = "" if name == VALIDATION else f"{name}_"
        metrics |= {f"{name}_mtp_{depth}_loss": loss for depth, loss in losses}
        metrics |= {f"{prefix}mtp_{depth}_acceptance_rate": rate for depth, rate in rates}
        return {**metrics, f"{prefix}mtp_acceptance_length": self.acceptance_length}

    def describe(self) -> str:
        """Return loss, bits per byte and MTP acceptance as text for a log line."""
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.3f} bits per byte"
        return f"loss {self.loss:.4f}{bits}{self.describe_mtp()}"

    def describe_mtp(self) -> str:
        """Return the MTP acceptance as text for the end of a log line; empty without MTP layers.

        >>> Evaluation(2.0, None, 9, (2.5, 3.0), (0.5, 0.25), 1.625).describe_mtp()
        ', MTP acceptance rates 50.0 %, 25.0 %, acceptance length 1.62'
        """
        if not self.acceptance_rates:
            return ""
        shares = ", ".join(f"{share:.1%}".replace("%", " %") for share in self.acceptance_rates)
        return f", MTP acceptance rates {shares}, acceptance length {self.acceptance_length:.2f}"


MICROBATCHES_PER_RANK = 8
"""Microbatches per pipeline rank in one forward pass of the pipeline: the bubble is at most an
eighth."""


DOCUMENTS = 64
"""Documents per data-parallel rank that are packed at a time."""


class EvaluationStoppedError(Exception):
    """An evaluation has ended early on all ranks, because the run stops."""


def ignore_progress(rows: int) -> None:
    """Ignore the number of rows that were read."""


def never_stop() -> None:
    """Let an evaluation continue until its end."""


def evaluate(
    pipeline_model: PipelineModel,
    dataset: Dataset,
    masks: MaskSettings,
    *,
    samples: int,
    tokenizer: Tokenizer,
    micro_batch_size: int | None = None,
    report_progress: Callable[[int], None] = ignore_progress,
    check_stop: Callable[[], None] = never_stop,
) -> Evaluation:
    """Return the mean loss over the first `samples` samples, in microbatches of
    `micro_batch_size`; unset: that of the model's run. Collective over the mesh.

    Samples are distributed over the data-parallel ranks; some ranks may have one less, but all run
    the same number of batches. Context-parallel ranks split each sample. If the run has a token
    budget, samples are documents, which are packed and assigned in groups. The last pipeline stage
    counts the labels. `report_progress` is called with the number of rows that all ranks have read.
    `check_stop` is called equally often on all ranks, and may end the evaluation by an error.
    """
    run, mesh, device = pipeline_model.run, pipeline_model.mesh, pipeline_model.device
    depths, read = run.model.mtp.num_layers, 0
    rows = micro_batch_size or run.train.micro_batch_size
    slicing = local_slicing(run.parallel, mesh)
    budget = build_token_budget(run.train, run.parallel, run.model)
    sums = torch.zeros(2 + 2 * depths if depths else 1, dtype=torch.float64, device=device)
    counts = torch.zeros(3 + depths, dtype=torch.float64)
    counts_labels = pipeline_model.has_loss and mesh.tp.rank == 0
    if budget is None:
        batches = _batches(dataset, masks, mesh, samples, rows, device, slicing, depths)
    else:
        batches = _packs(dataset, budget, mesh, samples, device, slicing, depths)
    while group := list(
        islice(batches, 1 if mesh.pp.size == 1 else MICROBATCHES_PER_RANK * mesh.pp.size)
    ):
        losses = pipeline_model.forward(group)
        if counts_labels:
            for microbatch_losses in losses:
                sums += microbatch_losses
            counts += sum(_counts(batch, tokenizer) for batch in group)
        num_local_rows = (
            len(group) * rows if budget is None else sum(len(batch.lengths) for batch in group)
        )
        read += num_local_rows * mesh.dp.size
        report_progress(min(read, samples))
        check_stop()
    if read < samples:  # other ranks had more documents
        report_progress(samples)
    total = all_reduce_(torch.cat([sums, counts.to(device)]), mesh.world).tolist()
    return _summary(total[: len(sums)], total[len(sums) :], depths)


def _counts(batch: Batch, tokenizer: Tokenizer) -> Tensor:
    """Return bytes, labels, labels of every MTP depth, and tokens with labels at all depths:
    float64 [3 + depths]."""
    labels = batch.labels[batch.labels >= 0].tolist()
    mtp_labels = [depth_labels for _, depth_labels in batch.mtp_inputs]
    num_complete = int(complete(mtp_labels).sum()) if mtp_labels else 0
    num_mtp_labels = [int((depth_labels >= 0).sum()) for depth_labels in mtp_labels]
    return torch.tensor(
        [tokenizer.num_bytes(labels), len(labels), *num_mtp_labels, num_complete],
        dtype=torch.float64,
    )


def _summary(sums: Sequence[float], counts: Sequence[float], depths: int) -> Evaluation:
    """Return the result from the sums of `Decoder.evaluate` and `_counts` over all ranks."""
    num_bytes, *labels, num_complete = counts
    bits = sums[0] / math.log(2) / num_bytes if num_bytes else None
    loss, *mtp_losses = (
        total / max(1.0, count) for total, count in zip(sums[: 1 + depths], labels, strict=True)
    )
    acceptance_rates = tuple(
        total / max(1.0, count)
        for total, count in zip(sums[1 + depths : -1], labels[1:], strict=True)
    )
    length = 1 + sums[-1] / max(1.0, num_complete) if depths else None
    return Evaluation(loss, bits, int(labels[0]), tuple(mtp_losses), acceptance_rates, length)


def run_evaluation(
    run: TrainRun,
    folder: RunFolder,
    mesh: Mesh,
    device: torch.device,
    *,
    split: str,
    samples: int | None,
    show: bool = False,
    role: WeightsRole = "param",
) -> Evaluation:
    """Evaluate a run's newest checkpoint on one of its splits; `samples` unset: the whole split,
    once; `role` ema: the moving average of its weights.

    With `show` the first rank reports its progress on standard error, so that standard output holds
    only the results.

    Raises:
        CheckpointError: the run has no checkpoint yet, or it is of another model.
        ConfigError: the split is empty.
    """
    tokenizer = build_tokenizer(run.tokenizer)
    settings = SampleSettings.of_run(run, eod=tokenizer.eod)
    dataset = build_dataset(
        run.data,
        settings,
        tokenizer,
        split=split,
        num_samples=samples,
        tokenizer_path=run.tokenizer.path,
    )
    if dataset is None:
        raise ConfigError(
            f"--split={split} has no samples in this run. Choose one of train, valid, test that "
            "has some."
        )
    pipeline_model, notes = load_newest_weights(run, folder, mesh, device, role=role)
    masks = build_mask_settings(run.data, run.model, tokenizer.eod)
    count = dataset.num_samples if samples is None else min(samples, dataset.num_samples)
    shows_progress = show and mesh.world.rank == 0
    with StepProgress(total=count, show=shows_progress, noun="row", stream=sys.stderr) as progress:
        for line in notes:
            progress.print_line(f"{folder.path}: {line}")
        progress.print_line(f"reading {count:,} rows of {split}")
        return evaluate(
            pipeline_model,
            dataset,
            masks,
            samples=count,
            tokenizer=tokenizer,
            report_progress=lambda read: progress.step(read, {}),
        )


def load_newest_weights(
    run: TrainRun,
    folder: RunFolder,
    mesh: Mesh,
    device: torch.device,
    *,
    role: WeightsRole = "param",
) -> tuple[PipelineModel, Sequence[str]]:
    """Build the model of a run with the weights of its newest checkpoint, or with `role` ema their
    moving average; return it with notes on what was loaded. Collective.

    Raises:
        CheckpointError: the run has no checkpoint yet, or it is of another model.
    """
    merged = replace(run, lora=None)  # adapters are merged into the weights when these are loaded
    pipeline_model = build_pipeline_model(merged, mesh, device, dtype=DTYPES[run.precision.params])
    # No other rule of the run applies: an evaluation needs every weight.
    rules = CheckpointConfig(allow_model_changes=run.checkpoint.allow_model_changes)
    entries = weight_entries(allocate_weights(pipeline_model), mesh)
    notes = load_pretrained(
        entries, str(folder.path), mesh.world, model=run.model, rules=rules, role=role
    )
    return pipeline_model, notes


def allocate_weights(pipeline_model: PipelineModel) -> list[tuple[Shard, Tensor]]:
    """Allocate the weights of this rank's model chunks, without gradients, and return their shards.

    With parallel.zero=3 a rank allocates its shard of each weight, else all of it. Collective over
    the mesh with parallel.zero=3.
    """
    mesh, device, p = pipeline_model.mesh, pipeline_model.device, pipeline_model.run.parallel
    model = pipeline_model.modules
    parameters = [
        (declared.shard, module, name) for declared, module, name in iter_parameter_specs(model)
    ]
    if p.zero == 3 and can_shard_weights(mesh):
        # imported here because FSDP2 takes half a second to load
        from megalith.parallel.fsdp import shard_for_forward

        return shard_for_forward(
            list(model),
            parameters,
            mesh,
            device=device,
            keep_gathered=len(model) * p.pp > 1,
        )
    allocate(model, device)
    return [(shard, getattr(module, name).data) for shard, module, name in parameters]


def _batches(
    dataset: Dataset,
    masks: MaskSettings,
    mesh: Mesh,
    samples: int,
    rows: int,
    device: torch.device,
    slicing: Slicing,
    depths: int,
) -> Iterator[Batch]:
    local_samples = range(mesh.dp.rank, samples, mesh.dp.size)
    for start in range(0, -(-samples // mesh.dp.size), rows):
        # Every rank runs as many batches as the rank with the most samples.
        batch_samples = [dataset.sample(k) for k in local_samples[start : start + rows]]
        # The last batch is padded with rows without labels, because sequence-parallel ranks must
        # split its tokens evenly. A rank without samples runs such rows only, because it must take
        # part in gathering weights.
        empty = (batch_samples or [dataset.sample(0)])[0].blank()
        yield build_batch(
            [*batch_samples, *[empty] * (rows - len(batch_samples))],
            masks,
            device=device,
            slicing=slicing,
            num_mtp_layers=depths,
        )


def _packs(
    dataset: Dataset,
    budget: TokenBudget,
    mesh: Mesh,
    samples: int,
    device: torch.device,
    slicing: Slicing,
    depths: int,
) -> Iterator[Batch]:
    """Yield packs of documents, equally many on every rank; some are empty if there are too few
    documents."""
    assert isinstance(dataset, HasDocumentLengths), "only documents can be packed"
    group_size = DOCUMENTS * mesh.dp.size
    for first in range(0, samples, group_size):
        lengths = [
            sum(dataset.document_lengths(k)) for k in range(first, min(first + group_size, samples))
        ]
        for pack in budget.assign_batches(lengths, mesh.dp.size, forward_only=True).rank_packs(
            mesh.dp.rank
        ):
            yield build_pack(
                dataset,
                [first + number for number in pack],
                budget,
                device=device,
                slicing=slicing,
                num_mtp_layers=depths,
            )
