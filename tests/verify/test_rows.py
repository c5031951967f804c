"""What rows of the matrix are made of: layouts with pipelines, rows that ranks can share, and the
case to prove."""

import pytest

from megalith.config.lora import LoraConfig
from megalith.config.parallel import ParallelConfig, RecomputeConfig
from megalith.verify.rows import FOUR, SHARED, TIED, UNEVEN, Layout, row_of, staged, table, tiny


def test_a_row_has_as_many_processes_as_its_axes_say_and_a_case_with_all_of_it() -> None:
    row = Layout(
        area="memory",
        name="some",
        model=FOUR,
        parallel=staged(2, tp=3, dp=2),
        rows=2,
        documents=True,
        smoothing=0.1,
        recompute=RecomputeConfig(granularity="full"),
        lora=LoraConfig(rank=2),
    )
    case = row.case()
    assert (
        row.world == case.world == 12
        and case.run.train.micro_batch_size == 2
        and case.run.data.document_masking
    )
    assert case.run.recompute.granularity == "full" and case.run.train.label_smoothing == 0.1
    assert case.run.lora == row.lora and case.run.checkpoint.load == "base"
    plain = Layout(area="memory", name="plain", model=FOUR, parallel=ParallelConfig(cp=2))
    assert plain.world == 2 and plain.case().run.checkpoint.load is None


@pytest.mark.parametrize(
    ("parallel", "tokens"),
    [
        (ParallelConfig(), 12),
        (ParallelConfig(tp=4, sp=True), 12),
        (ParallelConfig(cp=2), 12),
        (ParallelConfig(cp=2, tp=2, sp=True), 16),
        (ParallelConfig(cp=4), 16),
        (ParallelConfig(cp=3, tp=2), 12),
    ],
)
def test_rows_are_as_long_as_ranks_that_share_them_can_divide(
    parallel: ParallelConfig, tokens: int
) -> None:
    assert row_of(parallel) == tokens
    assert tokens % (2 * parallel.cp * (parallel.tp if parallel.sp else 1)) == 0 or parallel.cp == 1


def test_what_is_left_over_of_a_layout_with_stages_are_settings_of_its_pipeline() -> None:
    found = staged(2, cp=2, zero=1, vpp=2, schedule="zb-v")
    assert (found.pp, found.cp, found.dp, found.zero) == (2, 2, 1, 1)
    assert (found.pipeline.vpp, found.pipeline.schedule) == (2, "zb-v")


def test_the_models_of_many_rows_are_what_their_names_say() -> None:
    assert TIED.tied_embeddings and FOUR.num_layers == 4 and tiny(bias=True).mlp_bias
    assert SHARED.num_kv_heads < 4 and UNEVEN.num_heads % 4


def test_a_table_gives_a_row_for_every_name() -> None:
    first, second = table(
        "pipeline",
        {"one": (FOUR, staged(2)), "three": (TIED, ParallelConfig(cp=2), 3)},
        sample=["three"],
    )
    assert (first.name, first.rows, first.sample, first.area) == ("one", None, False, "pipeline")
    assert (second.name, second.rows, second.sample, second.model) == ("three", 3, True, TIED)
