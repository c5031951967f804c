"""Documents packed into rows compute what each computes alone, in float64, under every axis; and
none sees another."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.config.data import DataConfig, SFTConfig
from megalith.data.loader import Batch, MaskSettings, StepBatches, build_batch
from megalith.data.sample import PackedSample, SampleSettings
from megalith.data.sft import (
    Conversation,
    ConversationDataset,
    build_conversations,
    generate_mock_conversations,
)
from megalith.data.tokenizer import ByteTokenizer
from megalith.models.decoder import Decoder, allocate, initialize
from megalith.nn.build import build_context
from megalith.observe.metrics import read_metrics
from megalith.parallel.context import local_slicing
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import FP64, compare
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import Trainer, train_step
from megalith.train.trainer import build_trainer

CPU = torch.device("cpu")
LENGTHS = (5, 3, 8, 1, 11, 2)
ROWS = ((0, 1, 2), (3, 4, 5))
"""Documents of each row of 24 tokens, of which 16 and 14 are used."""
OTHER_ORDER = ((5, 2, 3), (1, 0, 4))
LAYOUTS: dict[str, dict[str, str]] = {
    "tp2 sp": {"parallel.tp": "2", "parallel.sp": "true"},
    "cp2": {"parallel.cp": "2"},
    "cp2 by document": {"parallel.cp": "2", "parallel.context.slicing": "document"},
    "pp2": {"parallel.pp": "2"},
    "dp2": {"parallel.dp": "2"},
    "cp2 pp2 by document": {
        "parallel.cp": "2",
        "parallel.pp": "2",
        "parallel.context.slicing": "document",
    },
    "tp2 cp2 sp, all to all": {
        "parallel.tp": "2",
        "parallel.cp": "2",
        "parallel.sp": "true",
        "parallel.context.kind": "gather",
    },
}
DEFAULT = {"tp2 sp", "cp2 by document"}
ALL = [pytest.param(name, marks=[] if name in DEFAULT else [pytest.mark.slow]) for name in LAYOUTS]


def document(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids, and labels of which about half count; the first document has none."""
    draw = np.random.default_rng(number)
    ids = draw.integers(0, 257, LENGTHS[number] + 1)
    labels = (
        np.where(draw.random(LENGTHS[number]) < 0.5, ids[1:], -1)
        if number
        else np.full(LENGTHS[0], -1)
    )
    return ids[:-1], labels


def row(numbers: Sequence[int], length: int = 24) -> PackedSample:
    """Some documents and filler."""
    ids, labels = np.zeros(length, np.int64), np.full(length, -1, np.int64)
    end = 0
    for number in numbers:
        its_ids, its_labels = document(number)
        ids[end : end + len(its_ids)], labels[end : end + len(its_ids)] = its_ids, its_labels
        end += len(its_ids)
    lengths = [LENGTHS[number] for number in numbers] + ([length - end] if end < length else [])
    return PackedSample(ids, labels, tuple(lengths), end)


def step_of(trainer: Trainer, rows: Sequence[Sequence[int]], length: int = 24) -> StepBatches:
    """My share of a step with these rows, a row in each microbatch."""
    dp, slicing = trainer.mesh.dp, local_slicing(trainer.run.parallel, trainer.mesh)
    every = [
        build_batch([row(numbers, length)], MaskSettings(), device=CPU, slicing=slicing)
        for numbers in rows
    ]
    local = every[dp.rank :: dp.size]
    return StepBatches(
        local,
        sum(batch.num_labels for batch in every),
        (),
        sum(batch.num_tokens for batch in every),
    )


def build(settings: Mapping[str, str], rank: int = 0, world: int = 1) -> Trainer:
    run = tiny_run(
        {"precision.params": "fp64", "train.seq_len": "24", "optim.clip_grad": "0", **settings}
    )
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    )
    return build_trainer(run, mesh, CPU)


def gradients(trainer: Trainer, step: StepBatches) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, norm, and my slices of the gradients; nothing is learned, so that another step starts
    from the same."""
    result = train_step(trainer, step, lr=0.0, weight_decay=0.0)
    trainer.data.wait_params()
    return (
        result.loss,
        result.grad_norm,
        {o.shard.name: o.gradient.clone() for o in trainer.data.local_params},
    )


def _packed_and_apart(rank: int, world: int, settings: Mapping[str, str]) -> tuple[float, float]:
    trainer = build(settings, rank, world)
    apart = [(number,) for number in range(len(LENGTHS))]
    loss, norm, expected = gradients(trainer, step_of(trainer, apart))
    for rows in (ROWS, OTHER_ORDER):
        packed, its_norm, result = gradients(trainer, step_of(trainer, rows))
        difference = compare(result, expected)
        assert difference.error <= FP64.relative and not difference.unpaired, difference
        assert packed == pytest.approx(loss, rel=1e-12) and its_norm == pytest.approx(
            norm, rel=1e-12
        )
    return loss, norm


def _alone() -> tuple[float, float]:
    """Every document in a row of its own length: no filler at all."""
    trainer = build({})
    batches = [
        build_batch([row((n,), LENGTHS[n])], MaskSettings(), device=CPU)
        for n in range(len(LENGTHS))
    ]
    assert all(len(batch.seq_params.lengths) == 1 for batch in batches)
    loss, norm, expected = gradients(
        trainer, StepBatches(batches, sum(batch.num_labels for batch in batches))
    )
    assert sum(bool(gradient.abs().max() > 0) for gradient in expected.values()) == len(expected)
    return loss, norm


def test_packed_documents_match_separate_documents_in_any_order() -> None:
    assert _packed_and_apart(0, 1, {}) == pytest.approx(_alone(), rel=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_packed_documents_match_under_every_axis(name: str) -> None:
    world = (
        4
        if len([key for key in LAYOUTS[name] if key.endswith(("tp", "cp", "pp", "dp"))]) == 2
        else 2
    )
    expected = pytest.approx(_alone(), rel=1e-9)
    assert all(result == expected for result in run_ranks(_packed_and_apart, world, LAYOUTS[name]))


def outputs(batch: Batch) -> Tensor:
    model = Decoder(build_context(tiny_run().model, build_single_rank_mesh()))
    allocate(model, CPU)
    initialize(model, seed=3)
    with torch.no_grad():
        hidden: Tensor = model.hidden_states(batch.ids, batch.layer_inputs())
    return hidden


def test_changing_one_document_leaves_the_others_bitwise_equal() -> None:
    first = row((0, 1, 2))
    changed = PackedSample(first.ids.copy(), first.labels, first.lengths, first.num_valid)
    changed.ids[5:8] = 200
    before, after = (
        outputs(build_batch([each], MaskSettings(), device=CPU)) for each in (first, changed)
    )
    assert torch.equal(before[:5], after[:5]) and torch.equal(before[8:], after[8:])
    assert not torch.equal(before[5:8], after[5:8])


def test_comparison_detects_joined_documents() -> None:
    """Rows whose documents see one another give another loss: the proofs above can fail."""
    trainer = build({})
    step = step_of(trainer, ROWS)
    joined = [PackedSample(r.ids, r.labels, (24,), r.num_valid) for r in map(row, ROWS)]
    batches = [build_batch([each], MaskSettings(), device=CPU) for each in joined]
    result = gradients(trainer, StepBatches(batches, step.num_labels))[0]
    assert abs(result - gradients(trainer, step)[0]) > 1e-4


def test_padding_has_no_effect() -> None:
    batch = build_batch([row((0, 1)), row((5,))], MaskSettings(), device=CPU)
    assert batch.num_tokens == 10 and batch.squared_lengths == 25 + 9 + 4
    assert batch.seq_params.lengths == ((5, 5), (3, 3), (16, 16), (2, 2), (22, 22))


# --- conversations


ROOM = 192
TALKS = tuple(generate_mock_conversations(9, 0))


def build_sample(talk: Conversation) -> PackedSample:
    """A conversation alone in a row of its own length, byte by byte: answers and their ends are
    learned."""
    tokens, learned = [], []
    for message in talk.messages:
        answer = message["role"] == "assistant"
        part = [*message["content"].encode(), *([256] if answer else [])]
        tokens += part
        learned += [answer] * len(part)
    labels = np.where(learned[1:], tokens[1:], -1)
    return PackedSample(np.array(tokens[:-1]), labels, (len(labels),), len(labels))


def filled() -> list[PackedSample]:
    """The same conversations in rows, as a run reads them."""
    sft = SFTConfig(mock_conversations=len(TALKS), template="identity", packing="best_fit")
    dataset = build_conversations(
        DataConfig(sft=sft),
        SampleSettings(seq_len=ROOM, seed=1, vocab_size=257),
        split="train",
        num_samples=None,
        tokenizer=ByteTokenizer(),
        tokenizer_path=None,
    )
    return [dataset.sample(k) for k in range(len(dataset))]


def with_room(sample: PackedSample) -> PackedSample:
    """In a row as long as the others."""
    left = ROOM - len(sample.ids)
    ids, labels = (
        np.pad(sample.ids, (0, left)),
        np.pad(sample.labels, (0, left), constant_values=-1),
    )
    return PackedSample(ids, labels, (*sample.lengths, left), sample.num_valid)


def step_with(trainer: Trainer, rows: Sequence[PackedSample]) -> StepBatches:
    """All of these rows, one in each microbatch."""
    slicing = local_slicing(trainer.run.parallel, trainer.mesh)
    batches = [build_batch([each], MaskSettings(), device=CPU, slicing=slicing) for each in rows]
    return StepBatches(batches, sum(batch.num_labels for batch in batches))


def _talks_packed_and_apart(
    rank: int, world: int, settings: Mapping[str, str]
) -> tuple[float, float]:
    trainer = build({**settings, "train.seq_len": str(ROOM)}, rank, world)
    loss, norm, expected = gradients(
        trainer, step_with(trainer, [with_room(build_sample(talk)) for talk in TALKS])
    )
    packed, its_norm, result = gradients(trainer, step_with(trainer, filled()))
    difference = compare(result, expected)
    assert difference.error <= FP64.relative and not difference.unpaired, difference
    assert packed == pytest.approx(loss, rel=1e-12) and its_norm == pytest.approx(norm, rel=1e-12)
    return packed, its_norm


def talks_alone() -> tuple[float, float]:
    """One process, one conversation after the other, without filler."""
    trainer = build({})
    return gradients(trainer, step_with(trainer, [build_sample(talk) for talk in TALKS]))[:2]


@pytest.mark.parametrize("slicing", ["row", pytest.param("document", marks=pytest.mark.slow)])
def test_packed_conversations_match_unpacked_ones_under_tp_and_cp(slicing: str) -> None:
    settings = {
        "parallel.tp": "2",
        "parallel.cp": "2",
        "parallel.sp": "true",
        "parallel.context.slicing": slicing,
    }
    expected = pytest.approx(talks_alone(), rel=1e-9)
    assert len(filled()) <= len(TALKS) // 2 + 1
    assert all(result == expected for result in run_ranks(_talks_packed_and_apart, 4, settings))


def _one_too_early(self: ConversationDataset, k: int) -> PackedSample:
    """Which labels count is decided a token too early."""
    row = RIGHT_ROW(self, k)
    tokens = np.append(row.ids[1:], 0)
    return replace(row, labels=np.where(np.append(row.labels[1:], -1) >= 0, tokens, -1))


def _not_shifted(self: ConversationDataset, k: int) -> PackedSample:
    """Each token is to predict itself."""
    row = RIGHT_ROW(self, k)
    return replace(row, labels=np.where(row.labels >= 0, row.ids, -1))


def _seeing_one_another(self: ConversationDataset, k: int) -> PackedSample:
    """Conversations of a row are one document."""
    row = RIGHT_ROW(self, k)
    return replace(row, lengths=(row.num_valid, *row.lengths[len(row.lengths_without_padding) :]))


RIGHT_ROW = ConversationDataset.sample


@pytest.mark.parametrize("fault", [None, _one_too_early, _not_shifted, _seeing_one_another])
def test_comparison_detects_a_fault_in_rows_of_conversations(
    fault: Callable[..., PackedSample] | None,
) -> None:
    with nullcontext() if fault is None else patched(ConversationDataset, "sample", fault):
        trainer = build({"train.seq_len": str(ROOM)})
        result = gradients(trainer, step_with(trainer, filled()))[:2]
    assert (result == pytest.approx(talks_alone(), rel=1e-9)) is (fault is None)


SFT = {
    "data.mock": "false",
    "data.sft.mock_conversations": "15",
    "data.sft.template": "identity",
    "train.seq_len": "80",
    "model.max_seq_len": "96",
    "train.global_batch_size": "4",
    "data.sft.overlong": "drop",
    "checkpoint.every": "2",
    "schedule.style": "constant",
    "train.eval_every": "2",
}


def _train(rank: int, world: int, folder: Path, steps: int) -> None:
    run = tiny_run(SFT | {"train.steps": str(steps)})
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    )
    run_training(run, RunFolder(folder), mesh, CPU, show=False)


def test_resume_reads_the_same_rows(tmp_path: Path) -> None:
    """Over more than an epoch; on two ranks the same rows are dealt out."""
    _train(0, 1, tmp_path / "whole", 6)
    _train(0, 1, tmp_path / "parts", 2)
    _train(0, 1, tmp_path / "parts", 6)
    whole, parts = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    reported = ("step", "loss", "grad_norm", "fill", "supervised_share", "tokens", "eval_loss")
    assert [[row.get(key) for key in reported] for row in whole] == [
        [row.get(key) for key in reported] for row in parts
    ]
    fills, shares = (
        [float(row[key] or 0) for row in whole if key in row]
        for key in ("fill", "supervised_share")
    )
    assert len(fills) == 6 and min(fills) > 0.5 >= max(shares) > min(shares) > 0
    run_ranks(_train, 2, tmp_path / "ranks", 2)
    rows = [row for row in read_metrics(tmp_path / "ranks" / "metrics.jsonl") if "loss" in row]
    assert [row["fill"] for row in rows] == fills[:2]
    losses = [row["loss"] for row in whole if "loss" in row]
    assert [row["loss"] for row in rows] == pytest.approx(losses[:2], rel=1e-5)
