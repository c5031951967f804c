"""Settings without effect are named once, with the reason; settings with one are not."""

import pytest

from megalith.config.data import FILES
from megalith.config.fields import describe
from megalith.config.train import TrainRun
from megalith.recipes import recipes
from megalith.rules.no_effect import UNUSED, unused_notes
from megalith.rules.run import run_problems
from megalith.testing.tiny import tiny_run

CASES = [
    (
        {"parallel.pipeline.schedule": "zb-v", "parallel.pipeline.count_loss": "true"},
        2,
        "parallel.pipeline.schedule=zb-v, parallel.pipeline.count_loss=true: no effect here, "
        "because with parallel.pp=1 and parallel.pipeline.vpp=1 there is one stage",
    ),
    (
        {"parallel.context.kind": "a2a", "parallel.context.slicing": "document"},
        2,
        "parallel.context.kind=a2a, parallel.context.slicing=document: no effect here, "
        "because with parallel.cp=1 sequences are not split",
    ),
    (
        {"parallel.collective_matmul": "ring_exchange"},
        2,
        "parallel.collective_matmul=ring_exchange: no effect here, because with "
        "parallel.tp_comm_overlap=false there are no collective matmuls",
    ),
    (
        {
            "model.moe.num_experts": "4",
            "model.moe.ffn_hidden_size": "8",
            "parallel.dispatcher": "allgather",
        },
        2,
        "parallel.dispatcher=allgather: no effect here, because with parallel.ep=1 every rank has "
        "all "
        "experts",
    ),
    (
        {"parallel.bucket_numel": "7"},
        1,
        "parallel.bucket_numel=7: no effect here, because one rank has no communication",
    ),
    (
        {"parallel.bucket_numel": "7", "parallel.zero": "3"},
        2,
        "parallel.bucket_numel=7: no effect here, because with",
    ),
    (
        {"parallel.overlap": "false"},
        1,
        "parallel.overlap=false: no effect here, because one rank has no communication",
    ),
    (
        {"optim.kind": "sgd", "optim.beta2": "0.9"},
        1,
        "optim.beta2=0.9: no effect here, because they belong to optim.",
    ),
    (
        {"optim.momentum": "0.5"},
        1,
        "optim.momentum=0.5: no effect here, because it belongs to optim.kind=sgd",
    ),
    (
        {"precision.loss_scale.window": "5"},
        1,
        "precision.loss_scale.window=5: no effect here, because only precision.",
    ),
    (
        {
            "precision.params": "fp16",
            "precision.loss_scale.constant": "8",
            "precision.loss_scale.window": "5",
        },
        1,
        "precision.loss_scale.window=5: no effect here, because with "
        "precision.loss_scale.constant the scale does not",
    ),
    (
        {"model.rope.theta": "500", "model.rope.local_theta": "100", "model.attention.window": "4"},
        1,
        "model.rope.theta=500.0: no effect here, because all layers with RoPE have a "
        "window, and use model.rope.l",
    ),
    (
        {"model.fp32_residual": "true"},
        1,
        "model.fp32_residual=true: no effect here, because the residual stream is at least",
    ),
    (
        {"schedule.wsd_decay_style": "linear"},
        1,
        "schedule.wsd_decay_style=linear: no effect here, because it belongs",
    ),
    (
        {"fault_detector.repair_replicas": "true"},
        1,
        "fault_detector.repair_replicas=true: no effect here, because with",
    ),
    (
        {"fault_detector.suspect_steps": "5"},
        1,
        "fault_detector.suspect_steps=5: no effect here, because with checkpoint.local.every unset",
    ),
    (
        {"fault_detector.rollback_steps": "5"},
        1,
        "fault_detector.rollback_steps=5: no effect here, because no action of",
    ),
    (
        {"offload.min_numel": "3"},
        1,
        "offload.min_numel=3: no effect here, because with offload.layers=0 nothing is offloaded",
    ),
    (
        {"checkpoint.keep": "none", "checkpoint.keep_every": "4"},
        1,
        "checkpoint.keep_every=4: no effect here, because",
    ),
    (
        {"data.mmap": "false"},
        1,
        "data.mmap=false: no effect here, because with data.mock=true there are no files",
    ),
    (
        {"data.mid_level_dataset_surplus": "0.1"},
        1,
        "data.mid_level_dataset_surplus=0.1: no effect here, because only",
    ),
    (
        {"tokenizer.add_special_tokens": "false"},
        1,
        "tokenizer.add_special_tokens=false: no effect here, because only",
    ),
    (
        {
            "data.mock": "false",
            "data.path": ["a", "b"],
            "data.mock_max_tokens": "6",
            "data.mock_num_documents": "9",
        },
        1,
        "data.mock_num_documents=9, data.mock_max_tokens=6: no effect here, because only "
        "data.mock=true generates doc",
    ),
]


@pytest.mark.parametrize(("changes", "world", "expected"), CASES)
def test_a_setting_without_effect_is_named_with_the_reason(
    changes: dict[str, str | list[str]], world: int, expected: str
) -> None:
    run = tiny_run(changes)
    assert run_problems(run, world) == []
    (note,) = [note for note in unused_notes(run, world) if note.startswith(expected)]
    assert note.count("no effect here, because ") == 1


@pytest.mark.parametrize(
    ("changes", "world"),
    [
        ({}, 1),
        ({"parallel.pp": "2", "parallel.pipeline.schedule": "gpipe"}, 2),
        ({"parallel.pipeline.vpp": "2", "parallel.pipeline.schedule": "interleaved"}, 1),
        ({"parallel.cp": "2", "parallel.context.kind": "gather", "parallel.bucket_numel": "7"}, 2),
        ({"parallel.overlap": "false", "parallel.bucket_numel": "7"}, 2),
        (
            {
                "parallel.tp": "2",
                "parallel.sp": "true",
                "parallel.tp_comm_overlap": "true",
                "parallel.collective_matmul": "fused",
            },
            2,
        ),
        ({"optim.kind": "sgd", "optim.momentum": "0.5"}, 1),
        (
            {
                "model.rope.theta": "500",
                "model.rope.local_theta": "100",
                "model.attention.window": "4",
                "model.attention.window_layers": "[true, false]",
            },
            1,
        ),
        ({"precision.params": "fp16", "precision.loss_scale.window": "5"}, 1),
        (
            {
                "schedule.style": "wsd",
                "schedule.wsd_decay_steps": "2",
                "schedule.wsd_decay_style": "linear",
            },
            1,
        ),
        (
            {
                "data.mock": "false",
                "data.path": ["0.5", "a", "0.5", "b"],
                "data.mid_level_dataset_surplus": "0.1",
            },
            1,
        ),
    ],
)
def test_a_setting_with_an_effect_is_not_mentioned(
    changes: dict[str, str | list[str]], world: int
) -> None:
    run = tiny_run({"data.mock_num_documents": "100000", "data.mock_max_tokens": "4096"} | changes)
    assert unused_notes(run, world) == []


def test_every_name_in_the_table_is_a_setting_or_a_section() -> None:
    names = [setting.path for setting in describe(TrainRun)]
    for row in UNUSED:
        for name in row.settings:
            assert any(path == name or path.startswith(f"{name}.") for path in names), name


def test_settings_of_recipes_have_an_effect() -> None:
    for name, build in recipes().items():
        run = build()
        p = run.parallel
        assert unused_notes(run, p.tp * p.cp * p.pp * (p.dp or 2)) == [], name


def test_all_tokenizers_that_are_read_from_files_have_special_tokens() -> None:
    notes = {}
    for kind in ("byte", "null", *FILES):
        run = tiny_run({"tokenizer.kind": kind, "tokenizer.add_special_tokens": "false"})
        notes[kind] = [text for text in unused_notes(run, 1) if "add_special_tokens" in text]
    assert [kind for kind, texts in notes.items() if texts] == ["byte", "null"]
    assert "because only tokenizers read from files have special tokens" in notes["byte"][0]
