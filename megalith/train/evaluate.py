"""Evaluation: the mean loss over held-out samples, and what it means per byte of text."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from megalith.config.checkpoint import CheckpointConfig
from megalith.config.train import TrainRun
from megalith.data.build import Splits, build_datasets
from megalith.data.loader import Batch, Masks, build_batch, build_pack, masks_of
from megalith.data.sample import Dataset, Indexed
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import ConfigError
from megalith.models.decoder import allocate, declared_parameters
from megalith.models.pretrained import load_pretrained
from megalith.nn.mtp import complete
from megalith.observe.progress import StepProgress
from megalith.parallel.context import my_slicing
from megalith.parallel.engine import divides
from megalith.parallel.group import all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.plan.context import WHOLE, Slicing
from megalith.plan.deal import Budget, budget_of
from megalith.plan.shards import Shard
from megalith.train.build import DTYPES, weight_entries
from megalith.train.folder import RunFolder
from megalith.train.staged import PipelineModel, build_pipeline_model


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What held-out text costs the model."""

    loss: float
    """Mean of -log p(label), in nats per token."""

    bits_per_byte: float | None
    """The same in bits per byte of the text that the labels decode to; None where tokens are no
    text."""

    num_labels: int
    """PackedSeqParams it was measured on."""

    mtp_losses: tuple[float, ...] = ()
    """The loss of every MTP depth."""

    acceptance_rates: tuple[float, ...] = ()
    """How often the best token of every such depth is the one that came."""

    acceptance_length: float | None = None
    """PackedSeqParams per forward for a reader who takes the next token, and after it guesses of
    depth after depth as long as they are those that came; None where no depth predicts."""

    @property
    def perplexity(self) -> float:
        """e to the loss: as uncertain as a choice among so many equally likely tokens."""
        return math.exp(min(self.loss, 700.0))

    def of_depths(self) -> dict[str, float | None]:
        """What a metrics row says of MTP depths."""
        if not self.acceptance_rates:
            return {}
        both = enumerate(zip(self.mtp_losses, self.acceptance_rates, strict=True), start=1)
        found = {f"eval_mtp_{depth}_loss": loss for depth, (loss, _) in both}
        found |= {
            f"mtp_{depth}_acceptance_rate": share
            for depth, share in enumerate(self.acceptance_rates, start=1)
        }
        return {**found, "mtp_acceptance_length": self.acceptance_length}

    def depths_text(self) -> str:
        """The same in a line for people; empty where there are none.

        >>> Evaluation(2.0, None, 9, (2.5, 3.0), (0.5, 0.25), 1.625).depths_text()
        ', further tokens guessed 50.0 %, 25.0 %, 1.62 tokens at once'
        """
        if not self.acceptance_rates:
            return ""
        shares = ", ".join(f"{share:.1%}".replace("%", " %") for share in self.acceptance_rates)
        return f", further tokens guessed {shares}, {self.acceptance_length:.2f} tokens at once"


AT_ONCE = 8
"""Microbatches per pipeline rank that go through the pipeline together: the bubble is then an
eighth at most."""


DOCUMENTS = 64
"""For each data-parallel rank that are packed at a time."""


def nothing(rows: int) -> None:
    """Tell nobody how many rows were read."""


def evaluate(
    pipeline_model: PipelineModel,
    dataset: Dataset,
    masks: Masks,
    *,
    samples: int,
    rows: int,
    tokenizer: Tokenizer,
    slicing: Slicing = WHOLE,
    tell: Callable[[int], None] = nothing,
    budget: Budget | None = None,
) -> Evaluation:
    """Mean loss over the first `samples` samples, `rows` at a time. Collective over the whole mesh;
    changes nothing.

    Samples are dealt out over the data-parallel ranks, some of which may have one less, but all run
    as many batches; context-parallel ranks share theirs as `slicing` says. With a `budget` samples
    are documents, which are packed and dealt out some at a time. What is counted comes from the
    last stage. `tell` hears how many rows all ranks have read, as far as this one knows.
    """
    mesh, device, depths, read = (
        pipeline_model.mesh,
        pipeline_model.device,
        pipeline_model.run.model.mtp.num_layers,
        0,
    )
    sums = torch.zeros(2 + 2 * depths if depths else 1, dtype=torch.float64, device=device)
    counts = torch.zeros(3 + depths, dtype=torch.float64)
    tells = pipeline_model.has_loss and mesh.tp.rank == 0
    if budget is None:
        batches = _batches(dataset, masks, mesh, samples, rows, device, slicing, depths)
    else:
        batches = _packs(dataset, budget, mesh, samples, device, slicing, depths)
    while some := list(islice(batches, 1 if mesh.pp.size == 1 else AT_ONCE * mesh.pp.size)):
        found = pipeline_model.forward(some)
        if tells:
            sums += found
            counts += sum(_counts(batch, tokenizer) for batch in some)
        mine = len(some) * rows if budget is None else sum(len(batch.lengths) for batch in some)
        read += mine * mesh.dp.size
        tell(min(read, samples))
    if read < samples:  # others had more documents than this rank
        tell(samples)
    total = all_reduce_(torch.cat([sums, counts.to(device)]), mesh.world).tolist()
    return _summary(total[: len(sums)], total[len(sums) :], depths)


def _counts(batch: Batch, tokenizer: Tokenizer) -> Tensor:
    """Bytes and labels, labels of every MTP depth, and tokens with all of these: float64 [3 +
    depths]."""
    mine, mtp_inputs = (
        batch.labels[batch.labels >= 0].tolist(),
        [labels for _, labels in batch.mtp_inputs],
    )
    places = int(complete(mtp_inputs).sum()) if mtp_inputs else 0
    labels = [int((labels >= 0).sum()) for labels in mtp_inputs]
    return torch.tensor(
        [tokenizer.num_bytes(mine), len(mine), *labels, places], dtype=torch.float64
    )


def _summary(sums: Sequence[float], counts: Sequence[float], depths: int) -> Evaluation:
    """From what `Decoder.evaluate` sums and `_counts` counts, over all ranks."""
    num_bytes, *labels, places = counts
    bits = sums[0] / math.log(2) / num_bytes if num_bytes else None
    loss, *mtp_inputs = (
        total / max(1.0, count) for total, count in zip(sums[: 1 + depths], labels, strict=True)
    )
    right = tuple(
        total / max(1.0, count)
        for total, count in zip(sums[1 + depths : -1], labels[1:], strict=True)
    )
    length = 1 + sums[-1] / max(1.0, places) if depths else None
    return Evaluation(loss, bits, int(labels[0]), tuple(mtp_inputs), right, length)


def run_evaluation(
    run: TrainRun,
    folder: RunFolder,
    mesh: Mesh,
    device: torch.device,
    *,
    split: str,
    samples: int | None,
    show: bool = False,
) -> Evaluation:
    """Evaluate a run's newest checkpoint on one of its splits; `samples` unset: all of it, once.

    With `show` the first rank tells on standard error how far it is, so that results stand alone on
    standard output.

    Raises:
        CheckpointError: the run has no checkpoint yet, or it is of another model.
        ConfigError: the split is empty.
    """
    tokenizer = build_tokenizer(run.tokenizer)
    counts: dict[str, int | None] = dict.fromkeys(("train", "valid", "test"), 0)
    counts[split] = samples
    splits: Splits = build_datasets(
        run.data,
        seq_len=run.train.seq_len,
        seed=run.seed,
        train_samples=counts["train"],
        valid_samples=counts["valid"],
        test_samples=counts["test"],
        vocab_size=run.model.vocab_size,
        eod=tokenizer.eod,
        tokenizer=tokenizer,
        tokenizer_path=run.tokenizer.path,
        whole_documents=run.train.tokens_per_microbatch is not None,
    )
    dataset: Dataset | None = getattr(splits, split)
    if dataset is None:
        raise ConfigError(
            f"--split={split} has no samples in this run. Choose one of train, valid, test that "
            "has some."
        )
    merged = replace(run, lora=None)  # adapters are added to the weights as these are read
    pipeline_model = build_pipeline_model(merged, mesh, device, dtype=DTYPES[run.precision.params])
    rules = CheckpointConfig(
        allow_model_changes=run.checkpoint.allow_model_changes
    )  # all weights are needed here
    entries = weight_entries(held_weights(pipeline_model), mesh)
    notes = load_pretrained(entries, str(folder.path), mesh.world, model=run.model, rules=rules)
    masks = masks_of(run.data, run.model, tokenizer.eod)
    count = dataset.num_samples if samples is None else min(samples, dataset.num_samples)
    speaks = show and mesh.world.rank == 0
    with StepProgress(total=count, show=speaks, noun="row", stream=sys.stderr) as progress:
        for line in notes:
            progress.say(f"{folder.path}: {line}")
        progress.say(f"reading {count:,} rows of {split}")
        return evaluate(
            pipeline_model,
            dataset,
            masks,
            samples=count,
            rows=run.train.micro_batch_size,
            tokenizer=tokenizer,
            slicing=my_slicing(run.parallel, mesh),
            tell=lambda read: progress.step(read, {}),
            budget=budget_of(run.train, run.parallel, run.model),
        )


def held_weights(pipeline_model: PipelineModel) -> list[tuple[Shard, Tensor]]:
    """Give the weights of my chunks memory, still to be filled: with parallel.zero=3 my rows of
    each, else all of it.

    Collective over the mesh with parallel.zero=3. Nothing is there for gradients.
    """
    mesh, device, p = pipeline_model.mesh, pipeline_model.device, pipeline_model.run.parallel
    model = pipeline_model.modules
    parameters = [
        (declared.shard, module, name) for declared, module, name in declared_parameters(model)
    ]
    if p.zero == 3 and divides(mesh):
        from megalith.parallel.fsdp import (
            divide_for_forward,
        )  # here: torch's part of it takes half a second to load

        return divide_for_forward(
            pipeline_model.chunks,
            parameters,
            mesh,
            device=device,
            keep_gathered=len(pipeline_model.chunks) * p.pp > 1,
        )
    allocate(model, device)
    return [(shard, getattr(module, name).data) for shard, module, name in parameters]


def _batches(
    dataset: Dataset,
    masks: Masks,
    mesh: Mesh,
    samples: int,
    rows: int,
    device: torch.device,
    slicing: Slicing,
    depths: int,
) -> Iterator[Batch]:
    mine = range(mesh.dp.rank, samples, mesh.dp.size)
    for start in range(
        0, -(-samples // mesh.dp.size), rows
    ):  # as often as the rank with the most samples
        found = [dataset.sample(k) for k in mine[start : start + rows]]
        # Rows without labels fill up the last batch, whose tokens must still divide over
        # sequence-parallel ranks, and are all that a rank has which must still take part in
        # gathering weights.
        empty = (found or [dataset.sample(0)])[0].blank()
        yield build_batch(
            [*found, *[empty] * (rows - len(found))],
            masks,
            device=device,
            slicing=slicing,
            num_mtp_layers=depths,
        )


def _packs(
    dataset: Dataset,
    budget: Budget,
    mesh: Mesh,
    samples: int,
    device: torch.device,
    slicing: Slicing,
    depths: int,
) -> Iterator[Batch]:
    """Packs of documents, equally many on every rank: where there are too few, some hold
    nothing."""
    assert isinstance(dataset, Indexed), "only documents can be packed"
    together = DOCUMENTS * mesh.dp.size
    for first in range(0, samples, together):
        lengths = [sum(dataset.lengths_of(k)) for k in range(first, min(first + together, samples))]
        for pack in budget.assign_batches(lengths, mesh.dp.size, forward_only=True).of(
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
