"""Evaluation is the mean over the samples asked for, however they are dealt out."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from megalith.config.train import TrainRun
from megalith.data.loader import MaskSettings, build_batch
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import CheckpointError, ConfigError
from megalith.observe.machine import DTYPES
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import FP64
from megalith.train.evaluate import Evaluation, allocate_weights, evaluate, run_evaluation
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.trainer import build_pipeline_model, build_trainer
from megalith.verify.ranks import RaggedDocuments, RaggedRows

CPU = torch.device("cpu")
SAMPLES = 7
FP64_RUN = tiny_run({"precision.params": "fp64"})


def dataset(run: TrainRun) -> RaggedRows:
    """Rows with uneven numbers of labels."""
    return RaggedRows(run.train.seq_len, run.model.vocab_size, 20, masked=(3,))


def evaluation(
    rank: int, world: int, run: TrainRun, rows: int, samples: int = SAMPLES
) -> Evaluation:
    """The mean over some samples, as one rank of a layout."""
    mesh = (
        build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    run = replace(run, train=replace(run.train, micro_batch_size=rows))
    trainer = build_trainer(run, mesh, CPU)
    return evaluate(
        trainer.pipeline_model,
        dataset(run),
        MaskSettings(),
        samples=samples,
        tokenizer=ByteTokenizer(),
    )


def test_the_mean_is_over_labels_not_over_rows() -> None:
    trainer = build_trainer(FP64_RUN, build_single_rank_mesh(), CPU)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    total, labels, num_bytes = 0.0, 0, 0
    for k in range(SAMPLES):
        batch = build_batch([dataset(FP64_RUN).sample(k)], MaskSettings(), device=CPU)
        total += trainer.model.loss(batch.ids, batch.labels, batch.layer_inputs()).item()
        labels += batch.num_labels
        num_bytes += sum(0 <= label < 256 for label in batch.labels.tolist())
    result = evaluation(0, 1, FP64_RUN, rows=3)
    assert result.loss == pytest.approx(total / labels, rel=FP64.relative)
    assert result.num_labels == labels
    assert result.bits_per_byte == pytest.approx(total / math.log(2) / num_bytes, rel=FP64.relative)
    assert result.perplexity == pytest.approx(math.exp(total / labels))
    assert all(
        torch.equal(p, before[name]) and p.grad is None
        for name, p in trainer.model.named_parameters()
    )


@pytest.mark.parametrize("rows", [1, 2, 7, 10])
def test_number_of_rows_per_microbatch_does_not_matter(rows: int) -> None:
    reference, result = evaluation(0, 1, FP64_RUN, rows=3), evaluation(0, 1, FP64_RUN, rows=rows)
    assert result.loss == pytest.approx(reference.loss, rel=FP64.relative)
    assert (result.num_labels, result.bits_per_byte) == (
        reference.num_labels,
        pytest.approx(reference.bits_per_byte),
    )


@pytest.mark.parametrize(
    ("world", "settings", "samples"),
    [
        (2, {"parallel.dp": "2"}, SAMPLES),
        (3, {"parallel.dp": "3"}, 2),  # one rank has nothing to do
        (
            2,
            {"parallel.dp": "2", "parallel.zero": "3"},
            5,
        ),  # nor has one here, in the last batch, but it gathers
        (2, {"parallel.tp": "2", "parallel.sp": "true"}, SAMPLES),
        (
            2,
            {"parallel.tp": "2", "parallel.sp": "true", "train.seq_len": "11"},
            SAMPLES,
        ),  # a last row of odd length
        (2, {"parallel.cp": "2"}, SAMPLES),
        (
            2,
            {"parallel.cp": "2", "train.seq_len": "11", "parallel.context.slicing": "document"},
            SAMPLES,
        ),
    ],
)
def test_evaluation_is_equal_under_any_layout(
    world: int, settings: dict[str, str], samples: int
) -> None:
    run = tiny_run({"precision.params": "fp64"} | settings)
    alone = tiny_run({"precision.params": "fp64", "train.seq_len": str(run.train.seq_len)})
    reference = evaluation(0, 1, alone, 2, samples)
    for result in run_ranks(evaluation, world, run, 2, samples):
        assert result.loss == pytest.approx(reference.loss, rel=FP64.relative)
        assert (result.num_labels, result.bits_per_byte) == (
            reference.num_labels,
            pytest.approx(reference.bits_per_byte),
        )


PACKS = {
    "precision.params": "fp64",
    "train.tokens_per_microbatch": "24",
    "train.micro_batch_size": "1",
    "data.overlong": "truncate",
}


def packed_evaluation(rank: int, world: int, capacity: str) -> tuple[Evaluation, list[int]]:
    """The mean over some documents in packs, and the reported numbers of documents."""
    run, reported = tiny_run(PACKS | {"train.tokens_per_microbatch": capacity}), list[int]()
    mesh = (
        build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    documents = RaggedDocuments(12, run.model.vocab_size, 20)
    result = evaluate(
        build_trainer(run, mesh, CPU).pipeline_model,
        documents,
        MaskSettings(),
        samples=SAMPLES,
        tokenizer=ByteTokenizer(),
        report_progress=reported.append,
    )
    return result, reported


def test_packed_evaluation_is_equal_for_any_budget_and_ranks_and_reports_all_documents() -> None:
    reference, _ = packed_evaluation(0, 1, "12")
    for result, reported in [packed_evaluation(0, 1, "40"), *run_ranks(packed_evaluation, 2, "24")]:
        assert result.loss == pytest.approx(reference.loss, rel=FP64.relative)
        assert (
            result.num_labels == reference.num_labels
            and reported == sorted(reported)
            and reported[-1] == SAMPLES
        )


MTP_MODEL = {
    "precision.params": "fp64",
    "model.mtp.num_layers": "2",
    "model.vocab_size": "5",
    "model.num_layers": "2",
}


def test_mtp_losses_and_acceptance_match_plain_computation() -> None:
    run = tiny_run(MTP_MODEL)
    trainer, result = (
        build_trainer(run, build_single_rank_mesh(), CPU),
        evaluation(0, 1, run, rows=3),
    )
    (model,) = trainer.pipeline_model.chunks
    losses, right, labels, runs, places = [0.0] * 3, [0, 0], [0] * 3, 0, 0
    for k in range(SAMPLES):
        batch = build_batch([dataset(run).sample(k)], MaskSettings(), device=CPU, num_mtp_layers=2)
        tokens = model.rotations.add_to(batch.layer_inputs())
        x = model.hidden_states(batch.ids, tokens)
        scores, depths = [model.head.logits(x)], batch.mtp_inputs
        for depth, (ids, _) in enumerate(depths):
            x = model.mtp.layers[depth](x, ids, tokens)
            scores.append(model.head.logits(x))
        wanted = [batch.labels, *(labels for _, labels in depths)]
        for depth, (each, here) in enumerate(zip(scores, wanted, strict=True)):
            losses[depth] += cross_entropy(each, here, ignore_index=-1, reduction="sum").item()
            labels[depth] += int((here >= 0).sum())
        hits = [each.argmax(-1) == here for each, here in zip(scores[1:], wanted[1:], strict=True)]
        right = [count + int(hit.sum()) for count, hit in zip(right, hits, strict=True)]
        for first, second, last in zip(*hits, wanted[2], strict=True):
            if last >= 0:  # labels that are left out are at the end of a row
                places += 1
                runs += int(first) + int(first and second)
    assert result.mtp_losses == pytest.approx(
        [losses[d] / labels[d] for d in (1, 2)], rel=FP64.relative
    )
    assert (
        result.acceptance_rates == (right[0] / labels[1], right[1] / labels[2])
        and 0 < result.acceptance_rates[0] < 1
    )
    assert result.acceptance_length == pytest.approx(1 + runs / places) and runs > 0
    assert result.loss == pytest.approx(losses[0] / labels[0], rel=FP64.relative)
    row = result.metrics("eval")
    assert (
        row["mtp_2_acceptance_rate"] == result.acceptance_rates[1]
        and row["eval_mtp_1_loss"] == result.mtp_losses[0]
    )
    assert (
        f"MTP acceptance rates {result.acceptance_rates[0]:.1%}".replace("%", " %")
        in result.describe_mtp()
    )


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"parallel.tp": "2", "parallel.sp": "true"}),
        (2, {"parallel.cp": "2"}),
        (2, {"parallel.dp": "2", "parallel.zero": "3"}),
        (2, {"parallel.pp": "2"}),
        (3, {"parallel.pp": "3", "parallel.pipeline.layout": "Et|tmm|L"}),
        (
            2,
            {
                "parallel.pp": "2",
                "parallel.pipeline.vpp": "2",
                "parallel.pipeline.layout": "Et|t|mm|L",
            },
        ),
    ],
)
def test_mtp_acceptance_is_equal_under_every_layout(world: int, settings: dict[str, str]) -> None:
    reference = evaluation(0, 1, tiny_run(MTP_MODEL), 2)
    for result in run_ranks(evaluation, world, tiny_run(MTP_MODEL | settings), 2):
        assert (result.acceptance_rates, result.acceptance_length) == (
            reference.acceptance_rates,
            reference.acceptance_length,
        )
        assert result.mtp_losses == pytest.approx(reference.mtp_losses, rel=FP64.relative)


def test_a_finished_run_is_evaluated_from_its_newest_checkpoint(tmp_path: Path) -> None:
    run, folder = tiny_run(), RunFolder(tmp_path)
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        run_evaluation(run, folder, build_single_rank_mesh(), CPU, split="valid", samples=12)
    run_training(run, folder, build_single_rank_mesh(), CPU, show=False)
    logged = read_metrics(folder.metrics)[-1]["eval_loss"]
    result = run_evaluation(run, folder, build_single_rank_mesh(), CPU, split="valid", samples=12)
    assert result.loss == pytest.approx(logged, rel=1e-6)
    whole = run_evaluation(run, folder, build_single_rank_mesh(), CPU, split="valid", samples=None)
    assert whole.num_labels > 5 * result.num_labels
    assert (
        run_evaluation(
            run, folder, build_single_rank_mesh(), CPU, split="train", samples=5
        ).num_labels
        == 60
    )


def saved_loss(rank: int, world: int, run: TrainRun, path: Path) -> tuple[Evaluation, int, int]:
    """What one rank of a layout finds of a run's newest checkpoint; weights it holds, and those of
    the model."""
    mesh = (
        build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    result = run_evaluation(run, RunFolder(path), mesh, CPU, split="valid", samples=5)
    pipeline_model = build_pipeline_model(run, mesh, CPU, dtype=DTYPES[run.precision.params])
    whole = sum(parameter.numel() for parameter in pipeline_model.modules.parameters())
    return result, sum(rows.numel() for _, rows in allocate_weights(pipeline_model)), whole


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, {"parallel.dp": "2"}),
        (3, {"parallel.dp": "3", "model.tied_embeddings": "true"}),
        (4, {"parallel.tp": "2", "parallel.dp": "2"}),
        (4, {"parallel.pp": "2", "parallel.dp": "2"}),
    ],
)
def test_fsdp_evaluation_loads_shards_without_full_weights(
    world: int, settings: dict[str, str], tmp_path: Path
) -> None:
    alone = tiny_run(
        {"precision.params": "fp64"} | {k: v for k, v in settings.items() if "model." in k}
    )
    run_training(alone, RunFolder(tmp_path), build_single_rank_mesh(), CPU, show=False)
    (reference, all_of_it, _) = saved_loss(0, 1, alone, tmp_path)
    run = tiny_run({"precision.params": "fp64", "parallel.zero": "3"} | settings)
    results = run_ranks(saved_loss, world, run, tmp_path)
    for evaluation_of_rank, held, whole in results:
        assert evaluation_of_rank.loss == pytest.approx(reference.loss, rel=FP64.relative)
        assert evaluation_of_rank.num_labels == reference.num_labels
        assert held < 0.6 * whole  # rows do not divide evenly
    if run.parallel.tp * run.parallel.pp == 1:
        assert sum(held for _, held, _ in results) == all_of_it


def test_empty_split_is_rejected(tmp_path: Path) -> None:
    run = tiny_run({"data.split": "9,1"})
    with pytest.raises(
        ConfigError, match=r"data.split=9,1 assigns no data to test.*Set a test share above 0"
    ):
        run_evaluation(
            run, RunFolder(tmp_path), build_single_rank_mesh(), CPU, split="test", samples=1
        )


def test_perplexity_of_random_text_is_finite() -> None:
    assert math.isfinite(Evaluation(loss=1e6, bits_per_byte=None, num_labels=1).perplexity)
