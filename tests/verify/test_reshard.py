"""A checkpoint is loaded under a valid layout other than the one in which it was saved."""

from dataclasses import replace

import pytest

from megalith.config.moe import MoEConfig
from megalith.config.parallel import ParallelConfig
from megalith.rules.run import run_problems
from megalith.verify.matrix import FOUR, load_matrix, parse_parallel, tiny
from megalith.verify.ranks import layout_case, reload_layouts, resharded_run


@pytest.mark.parametrize(
    ("saved", "world", "expected"),
    [
        (ParallelConfig(tp=2), 2, "tp 1, pp 1, dp 2, zero 1"),
        (parse_parallel("pp2"), 2, "tp 1, pp 1, dp 2, zero 3"),
        (ParallelConfig(dp=2), 2, "tp 2, pp 1, dp 1, zero 0"),
        (ParallelConfig(dp=2, zero=1), 2, "tp 2, pp 1, dp 1, zero 0"),
        (ParallelConfig(dp=2, zero=3), 2, "tp 2, pp 1, dp 1, zero 0"),
        (ParallelConfig(cp=2), 2, "tp 1, pp 1, dp 2, zero 1"),
        (parse_parallel("pp2 dp2 zero2"), 4, "tp 4, pp 1, dp 1, zero 0"),
        (ParallelConfig(tp=4), 4, "tp 1, pp 2, dp 2, zero 1"),
        (parse_parallel("tp2 pp2 dp2"), 8, "tp 1, pp 1, dp 8, zero 3"),
    ],
)
def test_checkpoint_is_loaded_under_the_most_different_layout(
    saved: ParallelConfig, world: int, expected: str
) -> None:
    run = resharded_run(layout_case(FOUR, saved, world).run, world)
    assert run is not None
    p = run.parallel
    assert f"tp {p.tp}, pp {p.pp}, dp {p.dp}, zero {p.zero}" == expected


def test_layout_that_is_invalid_for_the_model_is_skipped() -> None:
    odd = replace(tiny(num_heads=5, num_kv_heads=5), num_layers=1)
    run = resharded_run(layout_case(odd, ParallelConfig(dp=2), 2).run, 2)
    assert run is not None and (run.parallel.tp, run.parallel.dp, run.parallel.zero) == (2, 1, 0)
    whole = replace(odd, qkv_bias=True, moe=MoEConfig(num_experts=3, ffn_hidden_size=5))
    run = resharded_run(layout_case(whole, ParallelConfig(dp=5), 5).run, 5)
    assert (
        run is not None
        and not run_problems(run, 5)
        and run.parallel != ParallelConfig(dp=5, bucket_numel=2000)
    )


def test_one_rank_has_no_other_layout() -> None:
    assert list(reload_layouts(ParallelConfig(), 1)) == []
    assert resharded_run(layout_case(tiny(), ParallelConfig(), 1).run, 1) is None


def test_matrix_rows_load_under_every_kind_of_layout() -> None:
    seen: set[tuple[bool, bool, bool, int]] = set()
    for row in (row for row in load_matrix() if row.sample):
        run = resharded_run(row.case().run, row.world)
        assert (run is None) == (row.world == 1), row.name
        if run is not None:
            p = run.parallel
            assert run_problems(run, row.world) == []
            seen.add((p.tp > 1, p.pp > 1, (p.dp or 1) > 1, p.zero))
    assert {zero for *_, zero in seen} == {0, 1, 3}
    assert all(any(kinds[axis] for kinds in seen) for axis in range(3))
