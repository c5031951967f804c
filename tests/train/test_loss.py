"""What heads minimize, and the share of the mean loss that one rank differentiates."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megalith.config.model import MTPConfig
from megalith.config.train import TrainRun
from megalith.kernels.backend import AUTO
from megalith.parallel.cross_entropy import (
    LossWithLogitStats,
    linear_cross_entropy,
    linear_cross_entropy_with_stats,
    recomputed_cross_entropy,
)
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.parallel.tensor import iter_vocab_heads
from megalith.testing.tiny import tiny_run
from megalith.train.objective import LossNormalizer, LossTerm
from megalith.train.step import StepResult, train_step
from megalith.train.trainer import build_head_loss, build_trainer
from megalith.verify.ranks import _loader as loader_of


def run_with(
    *, max_logit: bool = False, depths: int = 0, **train: Any
) -> TrainRun:  # settings of the loop
    run = tiny_run()
    model = replace(run.model, mtp=MTPConfig(num_layers=depths))
    observe = replace(run.observe, max_logit=max_logit)
    precision = replace(run.precision, params="fp64")
    return replace(
        run, model=model, observe=observe, precision=precision, train=replace(run.train, **train)
    )


def steps_of(run: TrainRun) -> list[StepResult]:
    trainer = build_trainer(run, build_single_rank_mesh(), torch.device("cpu"))
    loader = loader_of(run, trainer.mesh, consumed=0, steps=2)
    return [train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1) for _ in range(2)]


def test_head_loss_follows_settings() -> None:
    assert build_head_loss(run_with(), AUTO) is linear_cross_entropy
    chunked = build_head_loss(run_with(loss_chunk=7, label_smoothing=0.1), AUTO)
    assert isinstance(chunked, partial) and chunked.func is linear_cross_entropy
    assert chunked.keywords == {"smoothing": 0.1, "chunk": 7}
    assert build_head_loss(run_with(loss_backward="recomputed"), AUTO) is recomputed_cross_entropy
    reported = build_head_loss(run_with(z_loss=0.5), AUTO)
    assert isinstance(reported, LossWithLogitStats) and reported.z_loss == 0.5
    assert (
        isinstance(reported.compute, partial)
        and reported.compute.func is linear_cross_entropy_with_stats
    )


def test_every_head_has_its_own_statistics_and_backward_mode() -> None:
    for train, reads in (
        ({"z_loss": 0.5}, False),
        ({"z_loss": 0.5, "loss_backward": "recomputed"}, True),
    ):
        trainer = build_trainer(
            run_with(depths=2, **train), build_single_rank_mesh(), torch.device("cpu")
        )
        heads = list(iter_vocab_heads(trainer.pipeline_model.chunks))
        assert (
            heads[0] is trainer.model.head
            and [head.reads_table_again for head in heads] == [reads] * 3
        )
        records = [
            head.summed_loss.logit_stats
            for head in heads
            if isinstance(head.summed_loss, LossWithLogitStats)
        ]
        assert len({id(record) for record in records}) == 3


@pytest.mark.parametrize("backward", ["kept", "recomputed"])
def test_z_loss_is_minimized_and_reported_separately(backward: str) -> None:
    plain, reported = (
        steps_of(run_with(depths=1)),
        steps_of(run_with(depths=1, max_logit=True, loss_backward=backward)),
    )
    costly = steps_of(run_with(depths=1, z_loss=0.3, loss_backward=backward))
    assert (plain[0].z_loss, plain[0].max_logit) == (None, None)
    for actual, reference in zip(reported, plain, strict=True):
        assert actual.loss == pytest.approx(reference.loss, rel=1e-12) and actual.z_loss == 0.0
        assert actual.other_losses == pytest.approx(reference.other_losses, rel=1e-12)
    assert costly[0].loss == pytest.approx(plain[0].loss, rel=1e-12)
    assert costly[0].other_losses == pytest.approx(plain[0].other_losses, rel=1e-12)
    assert costly[0].max_logit == reported[0].max_logit
    # log of some 300 tokens, squared, and weighed
    assert costly[0].z_loss is not None and costly[0].z_loss > 0.3
    assert costly[0].grad_norm != pytest.approx(plain[0].grad_norm, rel=1e-3)


def normalizer(
    totals: dict[str, float], *, weight: float = 1.0, scale: float = 1.0
) -> LossNormalizer:
    terms = {name: LossTerm(name, weight if number else 1.0) for number, name in enumerate(totals)}
    return LossNormalizer(terms, totals, build_single_rank_mesh(), scale)


def test_scaled_losses_of_all_microbatches_sum_to_the_mean_over_labels() -> None:
    sums = torch.tensor([6.0, 0.0, 3.5], dtype=torch.float64)
    assert sum(normalizer({"labels": 10}).scale_loss({"labels": loss}) for loss in sums) == 0.95


def test_a_batch_without_labels_is_divided_by_one() -> None:
    assert normalizer({"labels": 0}).scale_loss({"labels": torch.zeros(())}) == 0.0


def test_losses_are_normalized_by_their_own_counts_and_weighted() -> None:
    totals = {"labels": 10, "mtp_1_labels": 8, "mtp_2_labels": 0}
    losses = dict(zip(totals, map(torch.tensor, (6.0, 4.0, 9.0)), strict=True))
    losses = {name: loss.double() for name, loss in losses.items()}
    share = normalizer(totals, weight=0.25, scale=4.0).scale_loss(losses)
    assert float(share) == 4.0 * (6.0 / 10 + 0.25 * 4.0 / 8 + 0.25 * 9.0)
    assert normalizer(totals).mean_losses([6.0, 4.0, 9.0]) == {
        "labels": 0.6,
        "mtp_1_labels": 0.5,
        "mtp_2_labels": 9.0,
    }
