"""Stages: every layer once and in order under every way of dividing, and a fix that works in every
refusal."""

import random
import re
from dataclasses import replace

import pytest

from megalith.config.model import MTPConfig
from megalith.config.parallel import PipelineConfig
from megalith.errors import PlanError
from megalith.plan.stages import (
    Stage,
    format_layout,
    plan_stages,
    proposed_layout,
    select_rank_stages,
    single_stage,
    stage_boundary,
    stages_problems,
    table_stages,
)
from megalith.verify.matrix import FOUR, FOUR_TIED, RELATIVE
from tests.cases import loop_over


def counts(pipeline: PipelineConfig, pp: int, num_layers: int) -> list[int]:
    return [len(stage.layers) for stage in plan_stages(pipeline, pp=pp, num_layers=num_layers)]


def one_problem(pipeline: PipelineConfig, pp: int, num_layers: int) -> str:
    problems = stages_problems(pipeline, pp=pp, num_layers=num_layers)
    assert len(problems) == 1, problems
    with pytest.raises(PlanError, match="must be divided otherwise"):
        plan_stages(pipeline, pp=pp, num_layers=num_layers)
    return problems[0]


def test_16_layers_on_4_ranks_with_two_chunks() -> None:
    pipeline = PipelineConfig(vpp=2)
    stages = plan_stages(pipeline, pp=4, num_layers=16)
    held = [
        [
            layer
            for stage in select_rank_stages(stages, rank, pipeline, pp=4)
            for layer in stage.layers
        ]
        for rank in range(4)
    ]
    assert held == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert [stage.embedding for stage in stages] == [True] + [False] * 7
    assert [stage.loss for stage in stages] == [False] * 7 + [True]


def test_first_and_last_stage_of_a_v_are_on_one_rank() -> None:
    pipeline = PipelineConfig(schedule="zb-v", vpp=2)
    stages = plan_stages(pipeline, pp=3, num_layers=6)
    first = select_rank_stages(stages, 0, pipeline, pp=3)
    assert first == [Stage(range(1), embedding=True), Stage(range(5, 6), loss=True, norm=True)]
    assert table_stages(FOUR_TIED, stages, pipeline, pp=3)["embed.weight"] == (0,)


@pytest.mark.parametrize(("pp", "ranks"), [(1, (0,)), (2, (0, 1)), (5, (0, 4))])
def test_the_ranks_of_a_tied_table(pp: int, ranks: tuple[int, ...]) -> None:
    stages = plan_stages(PipelineConfig(), pp=pp, num_layers=5 * pp)
    assert table_stages(FOUR_TIED, stages, PipelineConfig(), pp=pp)["embed.weight"] == ranks
    assert table_stages(FOUR, stages, PipelineConfig(), pp=pp)["embed.weight"] == (0,)


def test_one_stage_is_the_whole_model_for_all_settings() -> None:
    pipeline = PipelineConfig(layout="nonsense", first_layers=7)
    assert plan_stages(pipeline, pp=1, num_layers=5) == (single_stage(5),)
    assert stages_problems(pipeline, pp=1, num_layers=5) == []


@pytest.mark.parametrize(
    ("settings", "pp", "num_layers", "expected"),
    [
        ({}, 4, 8, [2, 2, 2, 2]),
        ({"vpp": 2}, 2, 8, [2, 2, 2, 2]),
        ({"first_layers": 1}, 3, 7, [1, 3, 3]),
        ({"last_layers": 0}, 3, 6, [3, 3, 0]),
        ({"first_layers": 1, "last_layers": 2}, 4, 9, [1, 3, 3, 2]),
        ({"first_layers": 4, "last_layers": 3}, 2, 7, [4, 3]),
        ({"first_layers": 2, "vpp": 2}, 2, 8, [1, 3, 1, 3]),
        ({"first_layers": 2, "vpp": 2, "schedule": "zb-v"}, 2, 8, [1, 3, 3, 1]),
        ({"count_embedding": True}, 4, 7, [1, 2, 2, 2]),
        ({"count_embedding": True, "count_loss": True}, 4, 10, [2, 3, 3, 2]),
        ({"count_loss": True}, 4, 3, [1, 1, 1, 0]),
        ({"layout": "E|tt|ttt||L"}, 5, 5, [0, 2, 3, 0, 0]),
        ({"layout": "Et*3|(tt|)*2L", "vpp": 2}, 2, 7, [3, 2, 2, 0]),
    ],
)
def test_layers_of_each_stage(
    settings: dict[str, int | str], pp: int, num_layers: int, expected: list[int]
) -> None:
    assert counts(PipelineConfig(**settings), pp, num_layers) == expected  # type: ignore[arg-type]  # by name


@loop_over("seed", range(300))
def test_every_layer_is_on_one_stage_or_the_error_names_a_valid_layout(seed: int) -> None:
    draw = random.Random(seed)
    pp, num_layers = draw.randint(1, 6), draw.randint(1, 30)
    ends = draw.choice(
        [{}, {"first_layers": draw.randint(-1, 8)}, {"last_layers": draw.randint(0, 8)}]
    )
    counted = (
        {} if ends else {"count_embedding": draw.random() < 0.3, "count_loss": draw.random() < 0.3}
    )
    vpp = draw.randint(1, 3)
    pipeline = PipelineConfig(vpp=vpp, **ends, **counted)
    problems = stages_problems(pipeline, pp=pp, num_layers=num_layers)
    if problems:
        for problem in problems:
            assert "Use " in problem or "Set " in problem
        proposals = re.findall(r"layout=(\S+?)(?: instead)?\.$", problems[0])
        pipeline = PipelineConfig(
            vpp=vpp, layout=(proposals or [proposed_layout(num_layers, pp * vpp)])[0]
        )
    stages = plan_stages(pipeline, pp=pp, num_layers=num_layers)
    assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
    assert len(stages) == pp * vpp
    assert [n for n, stage in enumerate(stages) if stage.embedding] == [0]
    assert [n for n, stage in enumerate(stages) if stage.loss] == [len(stages) - 1]
    again = PipelineConfig(vpp=vpp, layout=format_layout(stages))
    assert plan_stages(again, pp=pp, num_layers=num_layers) == stages


def test_30_layers_on_4_ranks_are_rejected_and_not_reduced_to_28() -> None:
    problem = one_problem(PipelineConfig(), 4, 30)
    assert problem == (
        "model.num_layers=30 does not divide over parallel.pp * parallel.pipeline.vpp = 4 * 1 = 4 "
        "stages. Set parallel.pp to one of [1, 2, 3, 5, 6, 10, 15], or "
        "parallel.pipeline.layout=Et*7|t*8|t*8|t*7L."
    )


def test_error_with_counted_embedding_states_what_was_counted() -> None:
    problem = one_problem(PipelineConfig(count_embedding=True), 4, 8)
    assert problem.startswith(
        "model.num_layers=8 + 1 (parallel.pipeline.count_embedding=true) does not divide over"
    )


def test_two_methods_of_dividing_layers_are_rejected_with_all_values() -> None:
    problem = one_problem(PipelineConfig(layout="Et|tL", first_layers=1, count_loss=True), 2, 2)
    assert problem == (
        "parallel.pipeline.layout=Et|tL, parallel.pipeline.first_layers=1, "
        "parallel.pipeline.count_loss=true: these are 3 methods of dividing the "
        "layers. Use one of them, or parallel.pipeline.layout=Et|tL."
    )


@pytest.mark.parametrize(
    ("settings", "pp", "num_layers", "text"),
    [
        (
            {"first_layers": 2},
            3,
            7,
            "parallel.pipeline.first_layers=2 leave 7 - 2 = 5 of model.num_layers=7 for 2",
        ),
        (
            {"first_layers": 2, "last_layers": 2},
            2,
            7,
            "leave 7 - 2 - 2 = 3 of model.num_layers=7 for 0 other stages. "
            "Use counts that leave none",
        ),
        ({"last_layers": 9}, 3, 7, "leave 7 - 9 = -2 of model.num_layers=7"),
        (
            {"first_layers": 3, "vpp": 2},
            2,
            9,
            "does not divide over the 2 chunks of its rank "
            "(parallel.pipeline.vpp=2). Set it to 2 or 4.",
        ),
        (
            {"first_layers": -1},
            2,
            9,
            "parallel.pipeline.first_layers=-1 must be at least 0. Use 0 or more.",
        ),
        (
            {"first_layers": 2, "vpp": 2},
            1,
            9,
            "need parallel.pp > 1, and it is 1. Use parallel.pipeline.layout=",
        ),
    ],
)
def test_invalid_first_and_last_stage_sizes(
    settings: dict[str, int], pp: int, num_layers: int, text: str
) -> None:
    assert text in one_problem(PipelineConfig(**settings), pp, num_layers)  # type: ignore[arg-type]  # by name


@pytest.mark.parametrize(
    ("layout", "texts"),
    [
        (
            "Ett|tL|",
            [
                "has 3 stages, but parallel.pp * parallel.pipeline.vpp = 2 * 1 = 2. Use 1 bars",
                "there is a bar, which makes an empty stage after the loss, at character 6:",
            ],
        ),
        (
            "|EtttL",
            ["there is a bar, which makes an empty stage before the embedding, at character 2:"],
        ),
        ("tEt|tL", ["there is something before the embedding, at character 2:"]),
        ("Et|tLt", ["there is something after the loss, at character 5:"]),
        ("Ett|t", ["has no L: the loss is on no stage. Use one L at the end."]),
        ("tt|tL", ["has no E: the embedding is on no stage. Use one E at the beginning."]),
        ("EttE|tL", ["the embedding (E) comes 2 times, at character 4:"]),
        ("Et|ttLL", ["the loss (L) comes 2 times, at character 7:"]),
        ("Et|tL", ["has 2 layers (t), but model.num_layers=3. Use 3, as in Ett|tL."]),
        ("Ett|tmL", ["this model has no multi-token prediction layers, at character 6:"]),
        ("Ett|tmmL", ["Use no m, or set model.mtp.num_layers=2."]),
        (
            "L|t*5E|",
            [
                "has 3 stages",
                "empty stage after the loss",
                "something before the embedding",
                "has 5 layers",
            ],
        ),
        ("Ett(|tL", ["this ( is never closed, at character 4:"]),
    ],
)
def test_all_errors_of_a_layout_are_reported_together(layout: str, texts: list[str]) -> None:
    problems = stages_problems(PipelineConfig(layout=layout), pp=2, num_layers=3)
    assert len(problems) == len(texts), problems
    for problem in problems:
        assert problem.startswith(f"parallel.pipeline.layout={layout}") and "Use " in problem
    for text in texts:
        assert any(text in problem for problem in problems), (text, problems)


def test_counts_below_one_are_another_rule() -> None:
    assert stages_problems(PipelineConfig(vpp=0, layout="x"), pp=2, num_layers=3) == []


@pytest.mark.parametrize(
    ("layout", "mtp", "ranks"),
    [
        ("E|tt|ttL", 0, (1, 2)),
        ("Ett|tt|L", 0, (0, 1)),
        ("Ett|tt|mL", 1, (0, 1, 2)),
        ("Etttt|mm|L", 2, (0, 1)),
    ],
)
def test_stages_whose_layers_read_biases_by_distance_hold_them(
    layout: str, mtp: int, ranks: tuple[int, ...]
) -> None:
    model = replace(RELATIVE, mtp=MTPConfig(num_layers=mtp))
    pipeline = PipelineConfig(layout=layout)
    stages = plan_stages(pipeline, pp=3, num_layers=4, depths=mtp)
    assert table_stages(model, stages, pipeline, pp=3)["relative.weight"] == ranks
    assert (
        table_stages(replace(model, positions="rope"), stages, pipeline, pp=3)["relative.weight"]
        == ()
    )


# --- multi-token predictions


@pytest.mark.parametrize(
    ("layout", "norm", "num_mtp_layers", "tied", "untied"),
    [
        ("E|tttt|m|L", 1, 2, (0, 2, 3), (0, 2)),
        ("E|tt|ttm|L", 2, 2, (0, 2, 3), (0, 2)),
        ("Et|ttt||mL", 1, 3, (0, 3), (0, 3)),
        ("Ett|ttm||L", 1, 1, (0, 1, 3), (0, 1)),
        ("Et|t|t|tmL", 3, 3, (0, 3), (0, 3)),
    ],
)
def test_last_norm_is_on_the_last_layers_stage_and_tables_where_they_are_used(
    layout: str, norm: int, num_mtp_layers: int, tied: tuple[int, ...], untied: tuple[int, ...]
) -> None:
    pipeline, mtp = PipelineConfig(layout=layout), MTPConfig(num_layers=1)
    stages = plan_stages(pipeline, pp=4, num_layers=4, depths=1)
    assert [n for n, stage in enumerate(stages) if stage.norm] == [norm]
    assert [n for n, stage in enumerate(stages) if stage.num_mtp_layers] == [num_mtp_layers]
    for model, ranks in ((FOUR_TIED, tied), (FOUR, untied)):
        held = table_stages(replace(model, mtp=mtp, positions="learned"), stages, pipeline, pp=4)
        assert (held["embed.weight"], held["positions.weight"]) == (ranks, untied)


def test_hidden_states_of_every_depth_are_sent_from_their_stage_to_the_loss() -> None:
    model = replace(FOUR, mtp=MTPConfig(num_layers=2))
    stages = plan_stages(PipelineConfig(layout="E|tttt||mm||L"), pp=6, num_layers=4, depths=2)
    boundaries = [stage_boundary(model, stages, number) for number in range(7)]
    mtp_hidden = ["mtp_hidden.1", "mtp_hidden.2"]
    assert [[tensor.name for tensor in boundary] for boundary in boundaries] == [
        [],
        ["hidden"],
        ["hidden"],
        ["hidden"],
        ["hidden", *mtp_hidden],
        ["hidden", *mtp_hidden],
        [],
    ]
    assert [boundary[0].dtype for boundary in boundaries[1:-1]] == ["residual", *["model"] * 4]
    assert {tensor.sizes(num_tokens=6, hidden_size=4) for tensor in boundaries[4]} == {(6, 4)}
    without_inputs = stage_boundary(model, stages, 5, depths=0)
    assert [tensor.name for tensor in without_inputs] == ["hidden"]


def test_mtp_layers_are_on_the_loss_stage_by_default() -> None:
    for pipeline, pp in (
        (PipelineConfig(), 2),
        (PipelineConfig(last_layers=0), 3),
        (PipelineConfig(), 1),
    ):
        stages = plan_stages(pipeline, pp=pp, num_layers=4, depths=3)
        assert [stage.num_mtp_layers for stage in stages] == [0] * (pp - 1) + [3]
        assert [stage.norm for stage in stages].index(True) == (
            1 if pipeline.last_layers == 0 else pp - 1
        )


@pytest.mark.parametrize(
    ("layout", "depths", "texts"),
    [
        (
            "Etm|t|L",
            1,
            [
                "m needs the output of all layers, so the first stage would be the "
                "whole model, at character 3:",
                "m comes before a layer (t), but needs the output of all layers, at character 3:",
            ],
        ),
        ("Ettm||L", 1, ["so the first stage would be the whole model, at character 4:"]),
        (
            "Et|mt|L",
            1,
            ["m comes before a layer (t), but needs the output of all layers, at character 4:"],
        ),
        (
            "Et|tm|mL",
            2,
            [
                "m is on a second stage, but all MTP layers share one copy of the "
                "embedding, at character 7:"
            ],
        ),
        (
            "Et|t|L",
            1,
            ["has 0 MTP layers (m), but model.mtp.num_layers=1. Use 1, as in Et|t|mL."],
        ),
        (
            "Et|t|mmmL",
            2,
            ["has 3 MTP layers (m), but model.mtp.num_layers=2. Use 2, as in "],
        ),
        ("Et|tL|m", 1, ["there is something after the loss, at character 5:"]),
    ],
)
def test_misplaced_mtp_layers_are_reported(layout: str, depths: int, texts: list[str]) -> None:
    problems = stages_problems(PipelineConfig(layout=layout), pp=3, num_layers=2, depths=depths)
    assert len(problems) == len(texts), problems
    for problem, text in zip(problems, texts, strict=True):
        assert (
            text in problem
            and problem.startswith(f"parallel.pipeline.layout={layout}")
            and "Use " in problem
        )
        for example in re.findall(r"as in (\S+)\.", problem):
            assert (
                stages_problems(PipelineConfig(layout=example), pp=3, num_layers=2, depths=depths)
                == []
            )


@loop_over("seed", range(60))
def test_suggested_layouts_are_valid_for_any_number_of_mtp_layers(seed: int) -> None:
    draw = random.Random(seed)
    num_stages, num_layers, depths = draw.randint(2, 9), draw.randint(1, 20), draw.randint(0, 4)
    layout = proposed_layout(num_layers, num_stages, depths)
    stages = plan_stages(
        PipelineConfig(layout=layout), pp=num_stages, num_layers=num_layers, depths=depths
    )
    assert format_layout(stages) == layout
    assert (
        sum(len(stage.layers) for stage in stages) == num_layers
        and stages[-1].num_mtp_layers == depths
    )
