"""Evaluation suites: text datasets, and multiple-choice questions scored as in lm-eval."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from megalith import storage
from megalith.checkpoint.load import WeightsRole
from megalith.config.data import SFTConfig
from megalith.config.train import SuiteConfig, TrainRun, is_suite_name
from megalith.data.build import build_dataset
from megalith.data.loader import Batch, MaskSettings, build_batch, build_mask_settings
from megalith.data.sample import Dataset, PackedSample, SampleSettings
from megalith.data.tokenizer import Tokenizer, build_tokenizer
from megalith.errors import ConfigError, DataError, did_you_mean
from megalith.parallel.context import local_slicing
from megalith.parallel.group import all_reduce_
from megalith.parallel.mesh import Mesh
from megalith.train.evaluate import (
    MICROBATCHES_PER_RANK,
    Evaluation,
    evaluate,
    ignore_progress,
    load_newest_weights,
    never_stop,
)
from megalith.train.forward_backward import PipelineModel
from megalith.train.run_folder import RunFolder


class SuiteResult(Protocol):
    """Result of one suite."""

    def metrics(self, name: str) -> Mapping[str, float | None]:
        """Return the values of a metrics row; `name`: of the suite."""

    def describe(self) -> str:
        """Return the result as text for a log line."""


SuiteResults = Mapping[str, SuiteResult]
"""Results of an evaluation by suite; `eval` is the validation split."""


class Suite(Protocol):
    """Evaluation suite whose data is open."""

    @property
    def config(self) -> SuiteConfig:
        """Settings of the suite."""

    def evaluate(
        self,
        pipeline_model: PipelineModel,
        masks: MaskSettings,
        tokenizer: Tokenizer,
        report_progress: Callable[[int], None] = ignore_progress,
        check_stop: Callable[[], None] = never_stop,
    ) -> SuiteResult:
        """Evaluate the model. Collective over the mesh. `report_progress` is called with a growing
        number, `check_stop` equally often on all ranks; it may end the evaluation by an error."""


def open_suite(run: TrainRun, name: str, tokenizer: Tokenizer) -> Suite:
    """Open the data of `evaluate.NAME`.

    Raises:
        DataError, ConfigError: it is missing, damaged or empty.
    """
    config = run.evaluate[name]
    try:
        if config.kind == "choice":
            return _open_questions(run, name, tokenizer)
        return _open_text(run, config, tokenizer)
    except (ConfigError, DataError) as error:
        raise type(error)(f"evaluate.{name}: {error}") from error


def check_metric_names(suites: Mapping[str, Suite]) -> None:
    """Check that no group of a suite has the metrics of another suite or of its groups.

    Raises:
        DataError: the names of metrics are equal.
    """
    owners = {name: f"evaluate.{name}" for name in suites}
    for name, suite in suites.items():
        for group in suite.groups if isinstance(suite, ChoiceSuite) else ():
            prefix, owner = f"{name}_{group}", f"group {group!r} of evaluate.{name}"
            if prefix in owners:
                raise DataError(
                    f"{owner}: its metrics {prefix}_acc have the names of those of "
                    f"{owners[prefix]}. Rename the group or the suite."
                )
            owners[prefix] = owner


def _open_questions(run: TrainRun, name: str, tokenizer: Tokenizer) -> "ChoiceSuite":
    config = run.evaluate[name]
    questions = read_questions(Path(config.path[0]))[: config.num_samples]
    for group in sorted({question.group for question in questions} - {""}):
        if not is_suite_name(f"{name}_{group}"):
            raise DataError(
                f"{config.path[0]}: group {group!r} is part of the names of metrics. Use letters, "
                "digits and underscores, for example math."
            )
        if f"{name}_{group}" in run.evaluate:
            raise DataError(
                f"{config.path[0]}: the metrics of group {group!r} have the names of those of "
                f"evaluate.{name}_{group}. Rename the group or the suite."
            )
    return ChoiceSuite(config, questions, tokenizer, max_length=run.model.max_seq_len)


def _open_text(run: TrainRun, config: SuiteConfig, tokenizer: Tokenizer) -> "TextSuite":
    split = config.split or "valid"
    data = run.data
    if config.path:
        data = replace(
            data,
            mock=False,
            plugin=None,
            path=(),
            train_path=config.path,
            valid_path=config.path,
            test_path=(),
            split=None,
            sft=SFTConfig(),
        )
    dataset = build_dataset(
        data,
        replace(SampleSettings.of_run(run, eod=tokenizer.eod), keep_partial=True),
        tokenizer,
        split=split,
        num_samples=config.num_samples,
        tokenizer_path=run.tokenizer.path,
    )
    if dataset is None or dataset.num_samples == 0:
        source = f"split={config.split}" if config.split else f"path={' '.join(config.path)}"
        raise ConfigError(f"{source} has no samples. Use a set of more tokens.")
    num_samples = min(config.num_samples or dataset.num_samples, dataset.num_samples)
    return TextSuite(config, dataset, num_samples)


@dataclass(frozen=True, slots=True)
class TextSuite:
    """Samples of text: loss and bits per byte."""

    config: SuiteConfig
    dataset: Dataset
    num_samples: int

    def evaluate(
        self,
        pipeline_model: PipelineModel,
        masks: MaskSettings,
        tokenizer: Tokenizer,
        report_progress: Callable[[int], None] = ignore_progress,
        check_stop: Callable[[], None] = never_stop,
    ) -> Evaluation:
        """Return the mean loss over all labels, however the samples are distributed. Collective.

        `report_progress` is called with the number of samples that all ranks have read.
        """
        return evaluate(
            pipeline_model,
            self.dataset,
            masks,
            samples=self.num_samples,
            tokenizer=tokenizer,
            micro_batch_size=self.config.micro_batch_size,
            report_progress=report_progress,
            check_stop=check_stop,
        )


def run_suite(
    run: TrainRun,
    folder: RunFolder,
    mesh: Mesh,
    device: torch.device,
    *,
    name: str,
    role: WeightsRole = "param",
) -> SuiteResult:
    """Evaluate a run's newest checkpoint on `evaluate.NAME`; with `role` ema the moving average of
    its weights. Collective.

    Raises:
        ConfigError: the run has no such suite.
        DataError: its data is missing or damaged.
        CheckpointError: the run has no checkpoint yet, or it is of another model.
    """
    if name not in run.evaluate:
        names = f"Use one of {', '.join(run.evaluate)}, or set" if run.evaluate else "Set"
        raise ConfigError(
            f"--suite={name}: the run has no suite of this name.{did_you_mean(name, run.evaluate)} "
            f"{names} --evaluate.{name}.path."
        )
    tokenizer = build_tokenizer(run.tokenizer)
    suite = open_suite(run, name, tokenizer)
    pipeline_model, _ = load_newest_weights(run, folder, mesh, device, role=role)
    masks = build_mask_settings(run.data, run.model, tokenizer.eod)
    return suite.evaluate(pipeline_model, masks, tokenizer)


# --- multiple-choice questions


class Question(NamedTuple):
    """A context, the choices that may follow it, and the index of the correct one."""

    context: str
    choices: tuple[str, ...]
    answer: int
    group: str = ""


def read_questions(path: Path) -> list[Question]:
    """Read the questions of a JSONL file.

    Raises:
        DataError: the file is missing or empty, or a line is not a question.
    """
    try:
        lines = storage.read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}. Use a JSONL file.") from None
    questions = [
        _parse_question(line, f"{path}: line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not questions:
        raise DataError(f"{path} has no questions. Each line is a JSON object with {_EXAMPLE}.")
    return questions


_EXAMPLE = '{"context": "2 + 2 =", "choices": ["3", "4"], "answer": 1}'


def _parse_question(line: str, at: str) -> Question:
    try:
        row: Any = json.loads(line)  # Any: JSON, checked below
    except ValueError as error:
        raise DataError(f"{at} is not JSON ({error}). Use {_EXAMPLE}.") from None
    values: dict[str, Any] = {"shots": [], "group": ""} | (row if isinstance(row, dict) else {})
    context, choices = values.get("context"), values.get("choices")
    answer: Any = values.get("answer")
    shots, group = values["shots"], values["group"]
    problem = ""
    if not isinstance(context, str):
        problem = "context is not text"
    elif not (isinstance(choices, list) and len(choices) > 1 and all(map(_is_text, choices))):
        problem = "choices is not a list of two or more texts"
    elif type(answer) is not int or not 0 <= answer < len(choices):
        problem = f"answer={answer} is not an index from 0 to {len(choices) - 1}"
    elif not (isinstance(shots, list) and all(map(_is_text, shots))):
        problem = "shots is not a list of texts"
    elif not isinstance(group, str):
        problem = "group is not text"
    if problem:
        raise DataError(f"{at} is not a question: {problem}. Use {_EXAMPLE}.")
    return Question("\n\n".join([*shots, str(context)]), tuple(choices or ()), answer, group)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


@dataclass(frozen=True, slots=True)
class ChoiceScores:
    """Accuracies on multiple-choice questions, named as in lm-eval: the fraction of questions
    whose correct choice has the highest score."""

    acc: float
    """Score: log-probability of the choice."""

    acc_norm: float
    """Score: log-probability per character of the choice."""

    acc_bytes: float
    """Score: log-probability per UTF-8 byte of the choice."""

    num_questions: int
    groups: Mapping[str, "ChoiceScores"] = field(default_factory=dict)
    """Scores of each group of questions."""

    def metrics(self, name: str) -> dict[str, float | None]:
        """Return the accuracies of all questions and of each group."""
        metrics: dict[str, float | None] = {
            f"{name}_acc": self.acc,
            f"{name}_acc_norm": self.acc_norm,
            f"{name}_acc_bytes": self.acc_bytes,
        }
        for group, scores in self.groups.items():
            metrics |= scores.metrics(f"{name}_{group}")
        return metrics

    def describe(self) -> str:
        """Return the accuracies as text for a log line.

        >>> ChoiceScores(0.5, 0.25, 0.25, 8).describe()
        'acc 0.5000, acc_norm 0.2500 (8 questions)'
        """
        return f"acc {self.acc:.4f}, acc_norm {self.acc_norm:.4f} ({self.num_questions} questions)"


def score_questions(
    questions: Sequence[Question], log_probs: Sequence[Sequence[float]]
) -> ChoiceScores:
    """Return the accuracies from the log-probability of each choice; of equal scores the first
    choice counts.

    Source: `multiple_choice` tasks of lm-eval 0.4.
    """
    correct = []
    for question, choice_log_probs in zip(questions, log_probs, strict=True):
        scores = np.array(choice_log_probs)
        num_chars = np.array([len(choice) for choice in question.choices])
        num_bytes = np.array([len(choice.encode()) for choice in question.choices])
        best = [np.argmax(x) for x in (scores, scores / num_chars, scores / num_bytes)]
        correct.append([int(choice) == question.answer for choice in best])
    names = [question.group for question in questions]
    groups = {
        name: _average([each for each, group in zip(correct, names, strict=True) if group == name])
        for name in dict.fromkeys(names)
        if name
    }
    return replace(_average(correct), groups=groups)


def _average(correct: Sequence[Sequence[bool]]) -> ChoiceScores:
    """Return the accuracies over questions, of which each has one value per kind of score."""
    acc, acc_norm, acc_bytes = (sum(column) / len(correct) for column in zip(*correct, strict=True))
    return ChoiceScores(acc, acc_norm, acc_bytes, len(correct))


class EncodedChoice(NamedTuple):
    """Tokens of a context and a choice, without the last one, and their labels."""

    ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    """-1 in the context."""


def encode_choice(
    context: str, choice: str, tokenizer: Tokenizer, *, max_length: int
) -> EncodedChoice:
    """Encode a context and a choice after a space, as lm-eval does: without the special tokens that
    the tokenizer adds, spaces at the end of the context belong to the choice, and a context that is
    too long loses its beginning. An empty context is one token: bos, else the end of a document.

    Raises:
        DataError: the choice alone is longer than `max_length` tokens.
    """
    stripped = context.rstrip()
    continuation = f"{context[len(stripped) :]} {choice}"
    if stripped:
        whole = tokenizer.encode_marked(stripped + continuation)
        num_context = len(tokenizer.encode_marked(stripped))
    else:
        first = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
        whole, num_context = [first, *tokenizer.encode_marked(continuation)], 1
    if len(whole) - num_context > max_length:
        raise DataError(
            f"the choice {choice!r:.60} has {len(whole) - num_context} tokens, and "
            f"model.max_seq_len={max_length}. Shorten the choice."
        )
    labels = [-1] * (num_context - 1) + whole[num_context:]
    ids = np.array(whole[:-1][-max_length:], np.int64)
    return EncodedChoice(ids, np.array(labels[-max_length:], np.int64))


class ChoiceSuite:
    """Multiple-choice questions; a microbatch has several choices, packed as documents of one
    row."""

    def __init__(
        self,
        config: SuiteConfig,
        questions: Sequence[Question],
        tokenizer: Tokenizer,
        *,
        max_length: int,
    ) -> None:
        """Encode all choices.

        Raises:
            DataError: a choice is too long.
        """
        self.config, self._questions = config, questions
        self._encoded = [
            encode_choice(question.context, choice, tokenizer, max_length=max_length)
            for question in questions
            for choice in question.choices
        ]

    @property
    def groups(self) -> list[str]:
        """Names of the groups of questions."""
        return sorted({question.group for question in self._questions} - {""})

    def evaluate(
        self,
        pipeline_model: PipelineModel,
        masks: MaskSettings,
        tokenizer: Tokenizer,
        report_progress: Callable[[int], None] = ignore_progress,
        check_stop: Callable[[], None] = never_stop,
    ) -> ChoiceScores:
        """Return the accuracies. Collective over the mesh.

        `report_progress` is called with the number of microbatches that this rank has read.
        """
        log_probs = iter(self.log_probs(pipeline_model, masks, report_progress, check_stop))
        return score_questions(
            self._questions,
            [[*islice(log_probs, len(question.choices))] for question in self._questions],
        )

    def log_probs(
        self,
        pipeline_model: PipelineModel,
        masks: MaskSettings,
        report_progress: Callable[[int], None] = ignore_progress,
        check_stop: Callable[[], None] = never_stop,
    ) -> list[float]:
        """Return the log-probability of each choice, question after question. Collective over the
        mesh: the choices are distributed over the data-parallel ranks, which run equally many
        microbatches."""
        mesh, device = pipeline_model.mesh, pipeline_model.device
        log_probs = torch.zeros(len(self._encoded), dtype=torch.float64, device=device)
        counts_labels = pipeline_model.has_loss and mesh.tp.rank == 0
        microbatches = self._iter_microbatches(pipeline_model, masks)
        size, num_microbatches = 1 if mesh.pp.size == 1 else MICROBATCHES_PER_RANK * mesh.pp.size, 0
        while group := list(islice(microbatches, size)):
            losses = pipeline_model.document_losses([batch for _, batch in group])
            if counts_labels:
                for (choices, _), document_losses in zip(group, losses, strict=True):
                    log_probs[choices] = -document_losses[: len(choices)]
            num_microbatches += len(group)
            report_progress(num_microbatches)
            check_stop()
        return all_reduce_(log_probs, mesh.world).tolist()

    def _iter_microbatches(
        self, pipeline_model: PipelineModel, masks: MaskSettings
    ) -> Iterator[tuple[list[int], Batch]]:
        """Yield the indices of this rank's choices with their microbatch, the longest first, so
        that ranks have similar numbers of tokens; in the last one a rank may have no choices."""
        run, mesh = pipeline_model.run, pipeline_model.mesh
        slicing = local_slicing(run.parallel, mesh)
        multiple = 2 * mesh.cp.size * mesh.tp.size  # zig-zag slices, and sequence parallelism
        size = self.config.micro_batch_size or run.train.micro_batch_size
        lengths = [len(encoded.ids) for encoded in self._encoded]
        longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        for first in range(0, len(lengths), size * mesh.dp.size):
            choices = longest_first[first : first + size * mesh.dp.size]
            local_choices = choices[mesh.dp.rank :: mesh.dp.size]
            row = _pack_row([self._encoded[index] for index in local_choices or choices], multiple)
            yield (
                local_choices,
                build_batch(
                    [row if local_choices else row.blank()],
                    masks,
                    device=pipeline_model.device,
                    slicing=slicing,
                    num_mtp_layers=run.model.mtp.num_layers,
                ),
            )


def _pack_row(choices: Sequence[EncodedChoice], multiple: int) -> PackedSample:
    """Return a row whose documents are the choices, with padding up to a multiple of tokens."""
    lengths = [len(choice.ids) for choice in choices]
    num_valid = sum(lengths)
    padding = -num_valid % multiple
    return PackedSample(
        np.concatenate([*(choice.ids for choice in choices), np.zeros(padding, np.int64)]),
        np.concatenate([*(choice.labels for choice in choices), np.full(padding, -1)]),
        (*lengths, padding) if padding else tuple(lengths),
        num_valid,
    )
