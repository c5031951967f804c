"""Global batches that do not divide over the data-parallel ranks: equal to one process in float64
under any layout, also when the number of ranks changes; rejected at the start unless allowed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalith.cli.train import must_start_workers
from megalith.config.tree import Override
from megalith.errors import ConfigError
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.batch_assignment import describe_uneven_batches
from megalith.plan.grid import model_grid
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import CURVE64, assert_close
from megalith.verify import ranks
from tests.train.test_loop import rows, stored, train, train_as_rank

STEPS = 3
UNEVEN: dict[str, Override] = {
    "train.global_batch_size": "7",
    "train.micro_batch_size": "2",
    "train.uneven_batch": "allow",
    "train.steps": str(STEPS),
    "train.eval_steps": "0",
    "train.eval_every": "none",
    "precision.params": "fp64",
}
EXPERTS: dict[str, Override] = {
    "model.moe.num_experts": "4",
    "model.moe.ffn_hidden_size": "6",
    "model.moe.top_k": "2",
    "model.moe.router.score": "sigmoid",
    "model.moe.router.expert_bias": "true",
    "model.moe.aux_loss.sequence_coeff": "0.1",
    "model.moe.aux_loss.z_loss_coeff": "0.05",
}
CONVERSATIONS: dict[str, Override] = {
    "data.mock": "false",
    "data.sft.mock_conversations": "40",
    "data.sft.template": "identity",
    "data.sft.overlong": "drop",
    "train.seq_len": "96",
    "model.max_seq_len": "96",
}
ONE_MICROBATCH: dict[str, Override] = {"train.micro_batch_size": "7"}
"""Reference: one process with full microbatches."""

CASES: dict[str, tuple[int, dict[str, Override], dict[str, Override], dict[str, Override]]] = {
    # ranks, settings, layout, reference
    "dp 3": (3, {"model.mtp.num_layers": "1"}, {}, ONE_MICROBATCH),
    "ep 2 of experts, zero 3": (
        2,
        EXPERTS,
        {"parallel.ep": "2", "parallel.zero": "3", "train.micro_batch_size": "3"},
        ONE_MICROBATCH,
    ),
    "dp 2": (2, {"model.dropout.residual": "0.1"}, {}, ONE_MICROBATCH),
    "dp 4, fewer microbatches than ranks": (4, {}, {"train.micro_batch_size": "3"}, ONE_MICROBATCH),
    "zero 2": (3, {}, {"parallel.zero": "2"}, ONE_MICROBATCH),
    "pp 2": (2, {"model.mtp.num_layers": "1"}, {"parallel.pp": "2"}, ONE_MICROBATCH),
    "cp 2": (2, {"data.document_masking": "true"}, {"parallel.cp": "2"}, ONE_MICROBATCH),
    "interleaved pp 2, dp 2": (
        4,
        {"model.num_layers": "4"},
        {"parallel.pp": "2", "parallel.pipeline.vpp": "2"},
        ONE_MICROBATCH,
    ),
    "dual-batch overlap": (
        2,
        EXPERTS,
        {"parallel.ep": "2", "parallel.overlap_experts": "true"},
        ONE_MICROBATCH,
    ),
    # These depend on which rows share a microbatch, as the reference does.
    "batch loss and expert capacity": (
        3,
        EXPERTS | {"model.moe.aux_loss.batch_coeff": "0.1", "model.moe.capacity.factor": "1.0"},
        {},
        {},
    ),
    "quantile offsets": (
        2,
        EXPERTS
        | {"model.moe.aux_loss.sequence_coeff": "0", "model.moe.aux_loss.quantile": "true"}
        | {"model.moe.router.expert_bias": "false"}
        | {"train.micro_batch_size": "1"},
        {"parallel.ep": "2"},
        {},
    ),
    "global-batch loss": (
        3,
        EXPERTS | {"model.moe.aux_loss.global_batch_coeff": "0.1"},
        {"train.micro_batch_size": "1"},
        {"train.micro_batch_size": "3"},
    ),
    "rows of conversations": (3, CONVERSATIONS, {}, ONE_MICROBATCH),
    "balanced rows of conversations": (
        2,
        CONVERSATIONS | {"train.balance_rows": "true"},
        {},
        ONE_MICROBATCH,
    ),
}
FAST = {"dp 3"}


def run_on(world: int, settings: dict[str, Override], folder: Path) -> None:
    if world == 1:
        train(folder, settings)
    else:
        run_ranks(train_as_rank, world, tiny_run(settings), folder)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in FAST else pytest.mark.slow) for each in CASES]
)
def test_uneven_batches_on_several_ranks_equal_one_process(tmp_path: Path, name: str) -> None:
    world, settings, layout, reference = CASES[name]
    assert not run_problems(tiny_run(UNEVEN | settings | layout), world)
    run_on(1, UNEVEN | settings | reference, tmp_path / "one")
    run_on(world, UNEVEN | settings | layout, tmp_path / "several")
    assert_close(stored(tmp_path / "several", STEPS), stored(tmp_path / "one", STEPS), CURVE64)
    pairs = list(zip(rows(tmp_path / "several"), rows(tmp_path / "one"), strict=True))
    assert len(pairs) == STEPS
    for row, expected in pairs:
        assert row.keys() == expected.keys()
        changing = {"moe_dropped_share", "imbalance", "fill"} if reference else {"imbalance"}
        for metric in expected.keys() - changing:
            assert row[metric] == pytest.approx(expected[metric], rel=1e-9), (row["step"], metric)


@pytest.mark.slow
def test_number_of_ranks_can_change_to_one_that_does_not_divide(tmp_path: Path) -> None:
    fixed = UNEVEN | {"train.uneven_batch": "none", "schedule.decay_steps": "6"}
    run_on(1, fixed | {"train.steps": "6"} | ONE_MICROBATCH, tmp_path / "one")
    for world, steps in ((2, "2"), (3, "4"), (1, "6")):
        run_on(world, fixed | {"train.steps": steps}, tmp_path / "several")
    log = (tmp_path / "several" / "log.txt").read_text()
    assert "number of ranks: 3 instead of 2; batch size, order of the samples" in log
    assert "number of ranks: 1 instead of 3" in log
    assert_close(stored(tmp_path / "several", 6), stored(tmp_path / "one", 6), CURVE64)
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("several", "one")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9) and len(losses[0]) == 6


def count_work(rank: int, world: int, settings: dict[str, Override]) -> tuple[Any, ...]:
    run = tiny_run(settings)
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    )
    step = ranks._loader(run, mesh, consumed=0, steps=1).next()
    own = sum(batch.num_tokens for batch in step.microbatches)
    return step.num_tokens, step.squared_lengths, step.num_window_pairs, step.num_labels, own


def test_work_of_a_step_is_that_of_all_ranks() -> None:
    documents: dict[str, Override] = {
        "data.document_masking": "true",
        "model.attention.window": "4",
    }
    (expected,) = run_ranks(count_work, 1, UNEVEN | documents | ONE_MICROBATCH)
    counted = run_ranks(count_work, 3, UNEVEN | documents)
    assert {each[:-1] for each in counted} == {expected[:-1]}
    assert [each[-1] for each in counted] == [3 * 12, 2 * 12, 2 * 12]
    assert expected[0] == 7 * 12 and 0 < expected[2] < expected[1] < 7 * 12**2


def test_uneven_batches_are_rejected_at_the_start_and_allowed_on_a_resume(tmp_path: Path) -> None:
    run = tiny_run(UNEVEN | {"train.uneven_batch": "none"})
    (text,) = run_problems(run, 3)
    assert text.startswith("train.global_batch_size=7 is not a multiple of")
    assert text.endswith(
        "Or set train.uneven_batch=allow, which costs: 2 of 3 ranks idle for 1 of 2 microbatches, "
        "the last microbatch has 1 of 2 rows."
    )
    assert run_problems(run, 3, resumes=True) == []
    rejecting = replace(run, train=replace(run.train, uneven_batch="reject"))
    assert run_problems(rejecting, 3, resumes=True) == [text]
    with pytest.raises(ConfigError, match="is not a multiple of"):
        must_start_workers(run, 3, tmp_path)
    (tmp_path / "config.yaml").touch()
    assert must_start_workers(run, 3, tmp_path)


def test_number_of_ranks_that_fits_no_layout_is_rejected_with_the_nearest_ones() -> None:
    def reject(world: int, **settings: Override) -> str:
        layout = {f"parallel.{name}": value for name, value in settings.items()}
        (text,) = run_problems(tiny_run(UNEVEN | layout), world, resumes=True)
        return text

    assert "use 2 or 4 processes" in reject(3, tp="2")
    assert reject(5, zero="1", dp_replicate="2").endswith(" Or use 4 or 6 processes.")
    assert reject(2, zero="1", dp_replicate="4").endswith(" Or use 4 processes.")


def test_cost_of_uneven_batches_is_described_for_each_size() -> None:
    run = tiny_run(UNEVEN | {"train.batch_size_schedule": "[{size: 12}, {samples: 24, size: 7}]"})
    assert describe_uneven_batches(run, 3) == [
        "train.batch_size_schedule[1].size=7 with dp=3: 2 of 3 ranks idle for 1 of 2 microbatches, "
        "the last microbatch has 1 of 2 rows"
    ]
    documents = {"train.tokens_per_microbatch": "32", "train.micro_batch_size": "1"}
    assert describe_uneven_batches(tiny_run(UNEVEN | documents), 3) == []


def test_uneven_batches_in_shuffled_groups_are_rejected() -> None:
    (text,) = run_problems(tiny_run(UNEVEN | {"data.sampler": "cyclic"}), 3)
    assert "train.uneven_batch=allow needs data.sampler=sequential: cyclic shuffles" in text


def test_interleaved_schedule_gets_empty_microbatches() -> None:
    layout = {"parallel.pp": "2", "parallel.pipeline.vpp": "2", "model.num_layers": "4"}
    few = {"train.global_batch_size": "2"}
    assert run_problems(tiny_run(UNEVEN | layout | few), 2) == []
    (text,) = run_problems(tiny_run(UNEVEN | layout | few | {"train.uneven_batch": "reject"}), 2)
    assert "fewer" in text
    assert describe_uneven_batches(tiny_run(UNEVEN | layout | few), 1) == [
        "train.global_batch_size=2 with dp=1: 1 of 2 microbatches are empty on all ranks"
    ]
