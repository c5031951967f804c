"""Evaluation suites: full passes under any layout, and accuracies as lm-eval defines them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from torch import Tensor

from megalith.config.train import SuiteConfig, TrainRun
from megalith.data.huggingface import HuggingFaceTokenizer
from megalith.data.indexed import IndexedDatasetBuilder
from megalith.data.loader import Batch, MaskSettings, build_batch
from megalith.data.sample import Sample
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import CallbackError, ConfigError, DataError
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.rules.run import run_problems
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import FP64
from megalith.train.callbacks.base import Callback, FinishedStep, StepMetrics
from megalith.train.forward_backward import PipelineModel
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepRequest
from megalith.train.suites import (
    ChoiceScores,
    ChoiceSuite,
    Question,
    encode_choice,
    open_suite,
    read_questions,
    run_suite,
    score_questions,
)
from megalith.train.trainer import build_trainer

CPU = torch.device("cpu")
TOKENIZER = ByteTokenizer()
QUESTIONS = [
    Question("The sky is", ("blue", "a very long answer", "red"), 0, "nature"),
    Question("", ("é", "ee"), 1),
    Question("Two plus two is ", ("four", "five", "six", "7"), 3, "math"),
    Question(
        "A context that is longer than thirty-two tokens of the model", ("x", "yy"), 0, "math"
    ),
    Question("odd", ("one", "three"), 1, "nature"),
]


PACKED = {
    "train.tokens_per_microbatch": "64",
    "train.micro_batch_size": "1",
    "data.overlong": "truncate",
}
"""Settings of sequence packing."""


def write_questions(path: Path) -> Path:
    """Write the questions as JSONL."""
    rows = [question._asdict() | {"choices": [*question.choices]} for question in QUESTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _log_probs(rank: int, world: int, run: TrainRun) -> list[float]:
    """The log-probability of each choice, as one rank of a layout."""
    mesh = (
        build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    trainer = build_trainer(run, mesh, CPU)
    config = SuiteConfig(kind="choice", micro_batch_size=3)
    suite = ChoiceSuite(config, QUESTIONS, TOKENIZER, max_length=32)
    return suite.log_probs(trainer.pipeline_model, MaskSettings())


@pytest.mark.parametrize("size", [None, 1, 3, 100])
def test_log_probabilities_of_choices_are_those_of_the_model(
    monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    """Compared with the loss of the labels of each choice, computed row by row; a microbatch has
    the given number of choices."""
    run = tiny_run({"precision.params": "fp64", "train.micro_batch_size": "4"})
    trainer = build_trainer(run, build_single_rank_mesh(), CPU)
    num_documents: list[int] = []
    document_losses = PipelineModel.document_losses

    def record(model: PipelineModel, batches: list[Batch]) -> Tensor:
        num_documents.extend(len(batch.lengths) for batch in batches)
        return document_losses(model, batches)

    monkeypatch.setattr(PipelineModel, "document_losses", record)
    config = SuiteConfig(kind="choice", micro_batch_size=size)
    suite = ChoiceSuite(config, QUESTIONS, TOKENIZER, max_length=32)
    log_probs = iter(suite.log_probs(trainer.pipeline_model, MaskSettings()))
    num_choices = sum(len(question.choices) for question in QUESTIONS)
    full, remainder = divmod(num_choices, size or 4)
    assert num_documents == [size or 4] * full + [remainder] * (remainder > 0)
    for question in QUESTIONS:
        for choice in question.choices:
            text = f"{question.context.rstrip()}"
            context = [*text.encode()] or [TOKENIZER.eod]
            continuation = [*f"{question.context[len(text) :]} {choice}".encode()]
            ids = np.array([*context, *continuation][-33:])
            batch = build_batch([Sample(ids, len(ids))], MaskSettings(), device=CPU)
            labels = batch.labels.clone()
            labels[: -len(continuation)] = -1
            loss = trainer.model.loss(batch.ids, labels, batch.layer_inputs()).item()
            assert next(log_probs) == pytest.approx(-loss, rel=FP64.relative)


LAYOUTS = [
    (2, {"parallel.dp": "2"}),
    (2, {"parallel.dp": "2", "parallel.zero": "3"}),
    (2, {"parallel.tp": "2"}),
    (2, {"parallel.tp": "2", "parallel.sp": "true"}),
    (2, {"parallel.pp": "2"}),
    (2, {"parallel.cp": "2"}),
    (4, {"parallel.tp": "2", "parallel.dp": "2"}),
]
"""World sizes with their settings."""


@pytest.mark.parametrize(("world", "settings"), LAYOUTS)
def test_log_probabilities_are_equal_under_any_layout(world: int, settings: dict[str, str]) -> None:
    reference = _log_probs(0, 1, tiny_run({"precision.params": "fp64"}))
    run = tiny_run({"precision.params": "fp64"} | settings)
    for log_probs in run_ranks(_log_probs, world, run):
        assert log_probs == pytest.approx(reference, rel=FP64.relative)


def test_choices_have_one_microbatch_size_with_packed_training() -> None:
    settings = {"evaluate.a.kind": "choice", "evaluate.a.path": "x"}
    settings |= {"evaluate.a.micro_batch_size": "2"} | PACKED
    assert run_problems(tiny_run(settings), 1) == []


def test_accuracies_are_those_of_lm_eval() -> None:
    """Worked by hand from its formulas: argmax of the sums, and of the sums per character and per
    byte; the first of equal scores."""
    questions = [
        Question("", ("a", "bbbb"), 1, "g"),  # -2 > -4; per character -2 < -1
        Question("", ("éé", "bbb"), 0, "g"),  # -3 < -2.9; per character -1.5 < -0.97
        Question("", ("éé", "bb"), 0),  # equal: the first; per byte -0.75 > -1.5
        Question("", ("aa", "b"), 1),
    ]
    log_probs = [[-2.0, -4.0], [-3.0, -2.9], [-3.0, -3.0], [-4.0, -1.0]]
    scores = score_questions(questions, log_probs)
    assert (scores.acc, scores.acc_norm, scores.acc_bytes) == (0.5, 0.75, 1.0)
    assert scores.groups == {"g": ChoiceScores(0.0, 0.5, 1.0, 2)}
    assert scores.metrics("s")["s_g_acc_norm"] == 0.5


def test_spaces_move_to_the_choice_and_the_context_is_cut_at_its_start() -> None:
    encoded = encode_choice("ab ", "c", TOKENIZER, max_length=32)
    assert encoded.ids.tolist() == [*b"ab  "]
    assert encoded.labels.tolist() == [-1, *b"  c"]
    encoded = encode_choice("", "c", TOKENIZER, max_length=32)
    assert (encoded.ids.tolist(), encoded.labels.tolist()) == ([256, *b" "], [*b" c"])
    encoded = encode_choice("abcdefgh", "xy", TOKENIZER, max_length=4)
    assert encoded.ids.tolist() == [*b"gh x"]
    assert encoded.labels.tolist() == [-1, *b" xy"]
    with pytest.raises(DataError, match="has 5 tokens, and model.max_seq_len=4. Shorten"):
        encode_choice("a", "bcde", TOKENIZER, max_length=4)


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_choices_are_encoded_without_added_special_tokens(tmp_path: Path, template: str) -> None:
    words = ["<s>", "</s>", "sky", "is", "blue"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(words[:2])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    encoded = encode_choice("sky is", "blue", tokenizer, max_length=32)
    assert (encoded.ids.tolist(), encoded.labels.tolist()) == ([2, 3], [-1, 4])
    encoded = encode_choice("", "blue sky", tokenizer, max_length=32)
    assert (encoded.ids.tolist(), encoded.labels.tolist()) == ([0, 4], [4, 2])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "context is not text"),
        ('{"context": "a", "choices": ["b"], "answer": 0}', "choices is not a list of two or more"),
        ('{"context": "a", "choices": ["b", ""], "answer": 0}', "choices is not a list of two or"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "answer=2 is not an index from 0"),
        ('{"context": "a", "choices": ["b", "c"], "answer": true}', "answer=True is not an index"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 0, "shots": "x"}', "shots is not a"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 0, "group": 1}', "group is not text"),
    ],
)
def test_wrong_questions_are_rejected(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"context": "a", "choices": ["b", "c"], "answer": 0}\n' + line + "\n")
    with pytest.raises(DataError) as raised:
        read_questions(path)
    assert problem in str(raised.value) and 'Use {"context": "2 + 2 ="' in str(raised.value)


def test_missing_and_empty_files_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: .*Use a JSONL file"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no questions. Each line is a JSON object"):
        read_questions(tmp_path / "empty.jsonl")


def test_examples_precede_the_context(tmp_path: Path) -> None:
    row = {"context": "q", "choices": ["a", "b"], "answer": 0, "shots": ["one", "two"]}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    assert read_questions(tmp_path / "q.jsonl")[0].context == "one\n\ntwo\n\nq"


def write_store(path: Path) -> Path:
    """Write a corpus of 11 documents whose tokens fill no whole number of rows."""
    with IndexedDatasetBuilder(str(path), np.uint16) as builder:
        for number in range(11):
            builder.add_item(np.array([number + 1] * (5 + number) + [256]))
            builder.end_document()
        builder.finalize()
    return path


def _text_loss(rank: int, world: int, run: TrainRun) -> tuple[float, int]:
    mesh = (
        build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        if world > 1
        else build_single_rank_mesh()
    )
    trainer = build_trainer(run, mesh, CPU)
    suite = open_suite(run, "code", TOKENIZER)
    result = suite.evaluate(trainer.pipeline_model, MaskSettings(), TOKENIZER)
    return result.loss, result.num_labels  # type: ignore[attr-defined]  # it is of text


def test_one_pass_counts_every_label_once(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    total = sum(5 + number + 1 for number in range(11))
    settings = {"precision.params": "fp64", "evaluate.code.path": str(store)}
    loss, num_labels = _text_loss(0, 1, tiny_run(settings))
    assert num_labels == total - 1
    for added in ({"evaluate.code.micro_batch_size": "5"}, {"train.micro_batch_size": "3"}):
        other = _text_loss(0, 1, tiny_run(settings | added))
        assert other == (pytest.approx(loss, rel=FP64.relative), num_labels)


@pytest.mark.parametrize(("world", "layout"), LAYOUTS)
def test_one_pass_is_equal_under_any_layout(
    tmp_path: Path, world: int, layout: dict[str, str]
) -> None:
    store = write_store(tmp_path / "store")
    settings = {"precision.params": "fp64", "evaluate.code.path": str(store)}
    loss, num_labels = _text_loss(0, 1, tiny_run(settings))
    settings |= {"evaluate.code.micro_batch_size": "3"} | layout
    for other in run_ranks(_text_loss, world, tiny_run(settings)):
        assert other == (pytest.approx(loss, rel=FP64.relative), num_labels)


def test_one_pass_reads_the_last_row_of_every_split(tmp_path: Path) -> None:
    store = write_store(tmp_path / "store")
    total = sum(5 + number + 1 for number in range(11))
    settings = {"data.mock": "false", "data.path": str(store), "data.split": "1,1,1"}
    num_labels = 0
    for split in ("train", "valid", "test"):
        num_labels += _text_loss(0, 1, tiny_run(settings | {"evaluate.code.split": split}))[1]
    assert num_labels == total - 3  # the first token of each split has no label


def test_suites_have_their_own_steps_and_metrics(tmp_path: Path) -> None:
    questions = write_questions(tmp_path / "questions.jsonl")
    settings = {
        "train.steps": "4",
        "train.eval_every": "3",
        "evaluate.quiz.kind": "choice",
        "evaluate.quiz.path": str(questions),
        "evaluate.quiz.every": "1",
        "evaluate.quiz.start": "2",
        "evaluate.quiz.num_samples": "3",
        "evaluate.test.split": "test",
        "evaluate.test.num_samples": "5",
        "tokenizer.kind": "byte",
    }
    run = tiny_run(settings)
    assert not run_problems(run, 1)
    folder = RunFolder(tmp_path / "run")
    run_training(run, folder, build_single_rank_mesh(), CPU, show=False)
    rows = [row for row in read_metrics(folder.metrics) if "loss" not in row]
    names = ("quiz_acc", "eval_loss", "test_loss")
    assert [(row["step"], [name for name in names if name in row]) for row in rows] == [
        (2, ["quiz_acc"]),
        (3, ["quiz_acc", "eval_loss"]),
        (4, [*names]),
    ]
    assert all(0 <= row["quiz_acc_norm"] <= 1 for row in rows)
    assert {"quiz_nature_acc", "quiz_math_acc"} <= rows[0].keys()
    assert math.isfinite(rows[-1]["test_bits_per_byte"] or 0.0)
    mesh = build_single_rank_mesh()
    result = run_suite(run, folder, mesh, CPU, name="quiz")
    metrics = result.metrics("quiz")
    assert metrics == {name: rows[-1][name] for name in metrics}
    with pytest.raises(ConfigError, match="--suite=qiz: the run has no suite of this name. Did yo"):
        run_suite(run, folder, mesh, CPU, name="qiz")
    with pytest.raises(ConfigError, match=r"no suite of this name\. Set --evaluate\.quiz\.path\.$"):
        run_suite(tiny_run(), folder, mesh, CPU, name="quiz")


def test_missing_data_of_a_suite_ends_the_run_at_the_start(tmp_path: Path) -> None:
    run = tiny_run({"evaluate.quiz.kind": "choice", "evaluate.quiz.path": "missing.jsonl"})
    with pytest.raises(CallbackError) as raised:
        run_training(run, RunFolder(tmp_path / "run"), build_single_rank_mesh(), CPU, show=False)
    assert str(raised.value).startswith("evaluate.quiz: missing.jsonl cannot be read")
    assert "callback" not in str(raised.value)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"evaluate.a.every": "2"}, "evaluate.a needs exactly one source. Set evaluate.a.path"),
        ({"evaluate.a.path": "x", "evaluate.a.split": "test"}, "evaluate.a needs exactly one sou"),
        ({"evaluate.a.kind": "choice"}, "evaluate.a.kind=choice reads the questions of one JSONL"),
        (
            {"evaluate.eval.split": "test"},
            "evaluate.eval: the name is a prefix of metrics, and eva",
        ),
        ({"evaluate.a b.split": "test"}, "evaluate.a b: the name is a prefix of metrics"),
        ({"evaluate.z.split": "test"}, "evaluate.z: the name is a prefix of metrics"),
        ({"evaluate.a_mtp_1.split": "test"}, "z, mtp_1 and moe_... those of other losses. Use l"),
        (
            {"evaluate.a.path": "['1',x,'2',y]"},
            "evaluate.a.path=1 x 2 y has weights, and a pass over all rows reads each once. Remove "
            "the weights, or set evaluate.a.num_samples.",
        ),
        ({"evaluate.a.path": "['1',x,y,z]"}, "evaluate.a.path=1 x y z: 'y' is not a weight, but"),
        (
            {
                "evaluate.a.kind": "choice",
                "evaluate.a.path": "x",
                "model.attention.causal": "false",
            },
            "evaluate.a.kind=choice scores each token from the tokens before it, and "
            "model.attention.causal=false. Set kind to text, or remove the suite.",
        ),
        (
            {"evaluate.a.split": "test", "evaluate.a.micro_batch_size": "2"} | PACKED,
            "evaluate.a.micro_batch_size=2 is the number of samples of a microbatch, and train.tok"
            "ens_per_microbatch=64 packs documents. Set evaluate.a.micro_batch_size to none.",
        ),
    ],
)
def test_wrong_suites_are_rejected(settings: dict[str, str], problem: str) -> None:
    problems = run_problems(tiny_run(settings), 1)
    assert len(problems) == 1 and problem in problems[0]


def test_weights_apply_to_a_number_of_rows() -> None:
    settings = {"evaluate.a.path": "['1',x,'2',y]", "evaluate.a.num_samples": "5"}
    assert run_problems(tiny_run(settings), 1) == []


def test_errors_of_data_name_the_suite(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^evaluate.code: data: no token store at .*/missing: "):
        open_suite(tiny_run({"evaluate.code.path": f"{tmp_path}/missing"}), "code", TOKENIZER)
    settings = {"evaluate.code.split": "test", "data.split": "9,1,0"}
    with pytest.raises(ConfigError, match=r"^evaluate.code: data.split=9,1,0 assigns no data to "):
        open_suite(tiny_run(settings), "code", TOKENIZER)


def test_group_with_the_metrics_of_another_suite_is_rejected(tmp_path: Path) -> None:
    path = str(write_questions(tmp_path / "questions.jsonl"))
    settings = {"evaluate.quiz.kind": "choice", "evaluate.quiz.path": path}
    run = tiny_run(settings | {"evaluate.quiz_math.split": "test"})
    with pytest.raises(DataError, match="the metrics of group 'math' have the names of those of "):
        open_suite(run, "quiz", TOKENIZER)


def test_groups_of_two_suites_with_equal_metrics_are_rejected(tmp_path: Path) -> None:
    settings = {}
    for name, group in (("quiz", "math_x"), ("quiz_math", "x")):
        row = {"context": "q", "choices": ["a", "b"], "answer": 0, "group": group}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row))
        settings |= {f"evaluate.{name}.kind": "choice"}
        settings |= {f"evaluate.{name}.path": str(tmp_path / f"{name}.jsonl")}
    message = "group 'x' of evaluate.quiz_math: its metrics quiz_math_x_acc have the names of"
    with pytest.raises(CallbackError, match=message):
        run_training(
            tiny_run(settings),
            RunFolder(tmp_path / "run"),
            build_single_rank_mesh(),
            CPU,
            show=False,
        )


def test_group_that_is_not_a_name_is_rejected(tmp_path: Path) -> None:
    row = {"context": "q", "choices": ["a", "b"], "answer": 0, "group": "a b"}
    (tmp_path / "q.jsonl").write_text(json.dumps(row))
    settings = {"evaluate.quiz.kind": "choice", "evaluate.quiz.path": str(tmp_path / "q.jsonl")}
    with pytest.raises(DataError, match="group 'a b' is part of the names of metrics. Use letters"):
        open_suite(tiny_run(settings), "quiz", TOKENIZER)


class RequestEvaluation(Callback):
    """Requests an evaluation after step 2."""

    def __init__(self) -> None:
        self.evaluated: list[int] = []

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> StepRequest | None:
        return StepRequest.EVALUATE if finished.step == 1 else None

    def before_evaluate(self, step: int) -> None:
        self.evaluated.append(step)


def test_request_evaluates_all_suites_even_if_one_is_due(tmp_path: Path) -> None:
    settings = {"train.steps": "4", "train.eval_every": "2", "evaluate.test.split": "test"}
    callback, folder = RequestEvaluation(), RunFolder(tmp_path)
    mesh = build_single_rank_mesh()
    timed = {"observe.timer_level": "2", "evaluate.test.num_samples": "2"}
    run = tiny_run(settings | timed)
    run_training(run, folder, mesh, CPU, show=False, callbacks=[callback])
    rows = read_metrics(folder.metrics)
    evaluations = [row for row in rows if "eval_loss" in row]
    assert [(row["step"], "test_loss" in row) for row in evaluations] == [(2, True), (4, True)]
    assert callback.evaluated == [2, 4]
    # the time of an evaluation is in its row
    assert [row for row in rows if "time_evaluate_ms" in row] == evaluations


def test_request_without_suites_is_reported(tmp_path: Path) -> None:
    callback, folder = RequestEvaluation(), RunFolder(tmp_path)
    run, mesh = tiny_run({"train.steps": "2", "train.eval_steps": "0"}), build_single_rank_mesh()
    run_training(run, folder, mesh, CPU, show=False, callbacks=[callback])
    assert callback.evaluated == []
    assert "step 2: a callback requested an evaluation, and this run has no samples" in (
        folder.log.read_text()
    )


def test_evaluation_is_not_measured_as_training() -> None:
    """megalith evaluate, which logs no steps, keeps no times either."""
    trainer = build_trainer(tiny_run({"observe.timer_level": "2"}), build_single_rank_mesh(), CPU)
    suite = ChoiceSuite(SuiteConfig(kind="choice"), QUESTIONS, TOKENIZER, max_length=32)
    suite.evaluate(trainer.pipeline_model, MaskSettings(), TOKENIZER)
    assert trainer.timers.take() == {}


def test_range_of_a_suite_setting_is_checked() -> None:
    settings = {"evaluate.a.split": "test", "evaluate.a.num_samples": "0"}
    assert "evaluate.a.num_samples=0 must be at least 1" in "\n".join(
        run_problems(tiny_run(settings), 1)
    )
