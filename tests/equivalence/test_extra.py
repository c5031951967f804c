"""Extra tensors of a dataset stay aligned with the labels under every layout, in float64."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.config.data import DataConfig
from megalith.config.parallel import ContextConfig, ParallelConfig
from megalith.config.train import TrainRun
from megalith.data import loader as loader_file
from megalith.data.loader import Batch, BatchSettings, Loader, MaskSettings, build_batch, build_pack
from megalith.data.sample import ExtraTensor, PackedSample, Row, Sample, declared_extra
from megalith.errors import ConfigError, DataError
from megalith.observe.metrics import read_metrics
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.batch_assignment import DocumentCost, TokenBudget
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.context import Slicing
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.objective import LossTerm, ModelOutputs
from megalith.train.run_folder import RunFolder
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify import ranks
from megalith.verify.matrix import PLAIN
from megalith.verify.ranks import (
    LayoutCase,
    RaggedDocuments,
    RankResult,
    compare_results,
    compare_with_one_process,
    compute_reference,
    join_ranks,
    layout_case,
    one_process_run,
    run_case,
)
from megalith.verify.shrink import shrink

CPU = torch.device("cpu")


class Weighted:
    """Dataset of another package: documents with token weights, a reward and a sample weight."""

    extra: ClassVar[Mapping[str, ExtraTensor]] = {
        "weight": ExtraTensor("token"),
        "reward": ExtraTensor("document", "float64"),
        "scales": ExtraTensor("sample", shape=(2,)),
    }
    fingerprint = "weighted"

    def __init__(self, data: DataConfig, *, num_samples: int | None, **_: Any) -> None:
        self.num_samples = max(num_samples or 0, 48)

    def __len__(self) -> int:
        return self.num_samples

    def document_lengths(self, k: int) -> tuple[int, ...]:
        return (5, 4, 2) if k % 2 else (12,)

    def sample(self, k: int) -> PackedSample:
        lengths, draw = self.document_lengths(k), np.random.default_rng(k)
        filler = (12 - sum(lengths),) if sum(lengths) < 12 else ()
        ids, extra = (
            draw.integers(1, 257, 13),
            ranks.draw_extra(self.extra, k, num_tokens=12, num_documents=len(lengths)),
        )
        labels = np.where(np.arange(12) < sum(lengths), ids[1:], -1)
        return PackedSample(ids[:-1], labels, (*lengths, *filler), sum(lengths), extra=extra)


class WeightedLosses:
    """Objective with a weight per token, a reward per document and two scales per sample."""

    losses: ClassVar[dict[str, LossTerm]] = {
        "loss": LossTerm("extra.weight"),
        "reward_loss": LossTerm("extra.reward", weight=0.5),
        "sample_loss": LossTerm("labels", weight=0.25),
    }

    def __init__(self, run: TrainRun) -> None:
        self.run = run

    def __call__(self, outputs: ModelOutputs, batch: Batch) -> dict[str, Tensor]:
        losses, extra = outputs.token_losses(batch.labels), batch.extra
        rewards = extra["reward"][batch.seq_params.document_ids]
        scales = extra["scales"][batch.sample_ids]
        return {
            "loss": (extra["weight"] * losses).sum(),
            "reward_loss": (rewards * losses.square()).sum(),
            "sample_loss": (scales[:, 0] * losses + scales[:, 1] * losses.square()).sum(),
        }


class MisnamedCount(WeightedLosses):
    """Objective that divides by a tensor that the dataset does not have."""

    losses: ClassVar[dict[str, LossTerm]] = {"loss": LossTerm("extra.weigth")}


def name_of(thing: type) -> str:
    return f"tests.equivalence.test_extra:{thing.__name__}"


def with_plugins(run: TrainRun, objective: type = WeightedLosses) -> TrainRun:
    return replace(
        run,
        data=replace(run.data, mock=False, plugin=name_of(Weighted)),
        train=replace(run.train, loss_plugin=name_of(objective)),
    )


def weighted_case(
    parallel: ParallelConfig, *, documents: bool = False, budget: int | None = None
) -> LayoutCase:
    case = layout_case(PLAIN, parallel, 2, documents=documents, micro_batch_size=1)
    run = with_plugins(case.run)
    return replace(case, run=replace(run, train=replace(run.train, tokens_per_microbatch=budget)))


def by_document(kind: str = "ring") -> ContextConfig:
    return ContextConfig(kind=kind, slicing="document")  # type: ignore[arg-type]


LAYOUTS = {
    "tp2 sp": (ParallelConfig(tp=2, sp=True), True, None),
    "pp2": (ParallelConfig(pp=2), True, None),
    "cp2 ring, packed": (ParallelConfig(cp=2), True, None),
    "dp2, token budget": (ParallelConfig(dp=2), False, 24),
}
SLOW_LAYOUTS = {
    "cp2 all-gather": (ParallelConfig(cp=2, context=ContextConfig(kind="gather")), True, None),
    "cp2 a2a by document": (ParallelConfig(cp=2, context=by_document("a2a")), True, None),
    "cp2 by document, token budget": (ParallelConfig(cp=2, context=by_document()), False, 24),
    "pp2, token budget": (ParallelConfig(pp=2), False, 24),
    "dp2 zero 3": (ParallelConfig(dp=2, zero=3), False, None),
}


@pytest.mark.parametrize(
    "name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)]
)
def test_objective_with_extra_tensors_matches_one_process(name: str) -> None:
    parallel, documents, budget = (LAYOUTS | SLOW_LAYOUTS)[name]
    case = weighted_case(parallel, documents=documents, budget=budget)
    assert [each for each in compare_with_one_process(case) if not each.holds] == []


def roll_extra(original: Any, batch: Batch, *arguments: Any) -> Batch:
    """Fault: the tensors of each token belong to the next token."""
    extended = original(batch, *arguments)
    weights = extended.extra["weight"].roll(1)
    return replace(extended, extra={**extended.extra, "weight": weights})


def keep_local_sums(original: Any, count: Tensor, group: Any) -> Any:
    """Fault: the sums of extra tensors are those of one rank."""
    return None if count.dtype == torch.float64 else original(count, group)


FAULTS = {
    "cp2, tokens of another position": (ParallelConfig(cp=2), "_with_extra", roll_extra),
    "dp2, local sums": (ParallelConfig(dp=2), "start_all_reduce_", keep_local_sums),
}


def run_with_fault(rank: int, world: int, case: LayoutCase, folder: str, name: str) -> RankResult:
    _, attribute, fault = FAULTS[name]
    original = getattr(loader_file, attribute)
    with patched(loader_file, attribute, partial(fault, original)):
        return run_case(rank, world, case, folder)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_in_extra_tensors_is_rejected(name: str, tmp_path: Path) -> None:
    case = weighted_case(FAULTS[name][0], documents=True)
    result = join_ranks(run_ranks(run_with_fault, 2, case, str(tmp_path), name))
    differences = compare_results(result, compute_reference(LayoutCase(one_process_run(case), 1)))
    wrong = {each.what for each in differences if not each.holds}
    assert {"first loss", "gradients"} <= wrong


def test_verify_proves_the_objective_of_a_run() -> None:
    run = with_plugins(layout_case(PLAIN, ParallelConfig(dp=2), 2).run)
    case, *_ = shrink(run, 2)
    assert case.run.train.loss_plugin == name_of(WeightedLosses)
    loader = ranks._loader(case.run, build_single_rank_mesh(), consumed=0, steps=1)
    assert loader.next().microbatches[0].extra.keys() == Weighted.extra.keys()


# --- the loader


class Numbered:
    """Rows of documents whose tokens, labels and extra tensors are 10 * sample + document."""

    extra: ClassVar[Mapping[str, ExtraTensor]] = {
        "label": ExtraTensor("token", "int64"),
        "document": ExtraTensor("document", "int64"),
        "sample": ExtraTensor("sample", "float64"),
    }
    num_samples, fingerprint = 40, "numbered"

    def __init__(self, *, single: bool = False) -> None:
        """`single`: samples are single documents."""
        self.single = single

    def __len__(self) -> int:
        return self.num_samples

    def document_lengths(self, k: int) -> tuple[int, ...]:
        return (1 + k % 7,) if self.single else ((8,) if k % 2 else (3, 2, 1))

    def sample(self, k: int) -> PackedSample:
        lengths = self.document_lengths(k)
        numbers = 10 * k + np.arange(len(lengths))
        end = sum(lengths)
        filler = 0 if self.single else 8 - end
        ids = np.pad(np.repeat(numbers, lengths), (0, filler))
        labels = np.where(np.arange(len(ids)) < end, ids, -1)
        extra = {"label": ids, "document": numbers, "sample": np.float64(k)}
        return PackedSample(ids, labels, (*lengths, *[filler] * (filler > 0)), end, extra=extra)


def assert_aligned(batch: Batch) -> None:
    real, extra = batch.labels >= 0, batch.extra
    assert real.any() and batch.sample_ids is not None
    assert torch.equal(extra["label"][real], batch.labels[real])
    documents = extra["document"][batch.seq_params.document_ids]
    assert torch.equal(documents[real], batch.labels[real])
    assert torch.equal(extra["sample"][batch.sample_ids][real], (batch.labels // 10)[real].double())
    assert not extra["label"][~real].any()


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("by", ["row", "document"])
def test_extra_tensors_of_rows_are_sliced_and_assigned_like_labels(balanced: bool, by: Any) -> None:
    sums = []
    for dp_rank in range(2):
        for cp_rank in range(2):
            group = replace(single_rank_group("dp"), rank=dp_rank, ranks=(0, 1))
            with patched(loader_file, "start_all_reduce_", lambda count, group: None):
                step = Loader(
                    Numbered(),
                    BatchSettings(
                        batch_schedule=constant_batch_size(8),
                        micro_batch_size=2,
                        cost=DocumentCost(0, 1),
                        balanced=balanced,
                    ),
                    group,
                    consumed=8,
                    steps=1,
                    device=CPU,
                    slicing=Slicing(ranks=2, rank=cp_rank, by=by),
                ).next()
            for batch in step.microbatches:
                assert_aligned(batch)
                assert batch.extra["sample"].shape == (2,)
            sums.append(step.extra_sums)
    assert sums[0] == sums[1] and sums[2] == sums[3]
    totals = {name: sums[0][name] + sums[2][name] for name in sums[0]}
    samples = [Numbered().sample(k) for k in range(8, 16)]
    assert totals == {
        name: sum(float(np.sum(sample.extra[name])) for sample in samples)
        for name in Numbered.extra
    }


def test_extra_tensors_of_packed_documents_follow_their_documents() -> None:
    budget = TokenBudget(capacity=24, longest=8)
    for documents in ([3, 11, 5, 2], [2, 5, 3, 11]):
        batch = build_pack(Numbered(single=True), documents, budget, device=CPU)
        assert_aligned(batch)
        assert batch.extra["sample"][:4].tolist() == documents
        assert batch.extra_sums["sample"] == sum(documents)
    empty = build_pack(Numbered(single=True), [], budget, device=CPU)
    assert empty.extra_sums == dict.fromkeys(Numbered.extra, 0.0)
    for name in ("document", "sample"):
        assert not empty.extra[name][empty.seq_params.document_ids].any()


def test_count_of_a_token_tensor_excludes_masked_labels() -> None:
    sample = Sample(np.array([5, 9, 7, 8, 6]), 4, extra={"weight": np.array([1.0, 2.0, 4.0, 8.0])})
    masks = MaskSettings(eod=9, documents=True)
    batch = build_batch(
        [sample], masks, device=CPU, extra={"weight": ExtraTensor("token", "float64")}
    )
    assert batch.labels.tolist() == [9, -1, 8, -1]
    assert batch.extra["weight"].tolist() == [1.0, 2.0, 4.0, 8.0]
    assert batch.extra_sums == {"weight": 5.0}


@pytest.mark.parametrize(
    "extra, message",
    [
        ({}, r"has the extra tensors \[\], but the attribute `extra` .* declares \['weight'\]"),
        ({"weight": np.ones(5)}, r"weight .* shape \[5\] .* Return an array of shape \[4\]"),
        ({"weight": np.ones(4, complex)}, r"dtype complex128: .* and dtype float32"),
    ],
)
def test_samples_must_have_the_declared_extra_tensors(extra: Any, message: str) -> None:
    row: Row = Sample(np.arange(5), 5, extra=extra)
    with pytest.raises(DataError, match=message):
        build_batch([row], MaskSettings(), device=CPU, extra={"weight": ExtraTensor("token")})
    if extra:
        with pytest.raises(DataError, match=r"declares \[\]"):
            build_batch([row], MaskSettings(), device=CPU, extra={})


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (["weight"], "has extra=['weight']: it must map each name to an ExtraTensor"),
        ({"weight": "float32"}, "it must map each name to an ExtraTensor"),
        (
            {"weight": ExtraTensor("tokens")},
            "weight per tokens with dtype float32. Use one of token",
        ),  # type: ignore[arg-type]  # that is tested
        ({"weight": ExtraTensor("token", "bfloat16")}, "and a dtype of float16, float32, float64"),
    ],
)
def test_invalid_declaration_of_extra_tensors_is_rejected(declared: Any, message: str) -> None:
    dataset = Weighted(DataConfig(), num_samples=None)
    with patched(Weighted, "extra", declared), pytest.raises(DataError) as raised:
        declared_extra(dataset)
    assert message in str(raised.value)


def test_datasets_without_extra_tensors_add_nothing_to_a_batch() -> None:
    assert declared_extra(RaggedDocuments(30, 61, 40)) == {}
    budget = TokenBudget(capacity=64, longest=30)
    batch = build_pack(RaggedDocuments(30, 61, 40), [1, 2], budget, device=CPU)
    assert (batch.extra, batch.extra_sums, batch.sample_ids) == ({}, {}, None)


# --- training


def test_objective_must_name_a_count_of_the_data() -> None:
    run = with_plugins(layout_case(PLAIN, ParallelConfig(), 1).run, MisnamedCount)
    trainer = build_trainer(run, build_single_rank_mesh(), CPU)
    step = ranks._loader(run, trainer.mesh, consumed=0, steps=1).next()
    with pytest.raises(ConfigError) as caught:
        train_step(trainer, step, lr=1e-2, weight_decay=0.0)
    assert str(caught.value) == (
        "train.loss_plugin: the loss loss has the count extra.weigth, which the data does not have."
        " Did you mean extra.weight? Use one of labels, tokens, extra.weight, extra.reward, "
        "microbatches, or declare weigth in the attribute `extra` of the dataset (data.plugin) and "
        "use extra.weigth."
    )


def test_run_with_extra_tensors_resumes_bitwise(tmp_path: Path) -> None:
    settings = {"train.steps": "4", "train.balance_rows": "true", "precision.params": "fp64"}
    run = with_plugins(tiny_run(settings))
    rows = []
    for name, stops in (("once", (4,)), ("resumed", (2, 4))):
        for steps in stops:
            part = replace(run, train=replace(run.train, steps=steps))
            folder = RunFolder(tmp_path / name)
            run_training(part, folder, build_single_rank_mesh(), CPU, show=False)
        metrics = read_metrics(tmp_path / name / "metrics.jsonl")
        rows.append(
            [
                [row[key] for key in ("step", "loss", "reward_loss", "sample_loss", "grad_norm")]
                for row in metrics
                if "reward_loss" in row
            ]
        )
    assert rows[0] == rows[1] and len(rows[0]) == 4
