"""Averages of the weights of several checkpoints of one model, in any layouts, box by box.

Sources: Wortsman et al. 2022, arXiv:2203.05482 (model soups); Sanyal et al. 2023, arXiv:2306.03241
(averages of late checkpoints); averages instead of a learning rate decay: arXiv:2507.17634.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import (
    StoredBox,
    StoredFile,
    StoredTensor,
    divide,
    folder_name,
    merge_tensors,
    show_dtype,
)
from megalith.checkpoint.keys import MASTER, MODEL, group_by_pattern, is_moment
from megalith.checkpoint.load import Checkpoint
from megalith.checkpoint.save import BOX_NBYTES, BoxFile, WrittenFiles, commit
from megalith.config.model import ModelConfig
from megalith.config.tree import differences
from megalith.errors import CheckpointError
from megalith.hf.convert import (
    build_release_state,
    copy_auxiliary_files,
    format_release_config,
    token_ids,
)
from megalith.hf.family import canonical
from megalith.hf.folder import HuggingFaceFolder, Weights, check_free_space
from megalith.hf.pretrained import FREE, Pretrained, locate_source, open_pretrained
from megalith.hf.release import BATCH_NBYTES, parameters
from megalith.hf.staging import open_staging, publish, run_in_order, split_by_nbytes
from megalith.plan.shards import Box

MADE_FROM = "made_from"
"""Key in the state of a checkpoint: the models whose weights it was made from, and how."""

# --- pure functions


def normalize_coefficients(weights: Sequence[float]) -> list[float]:
    """Return the weights of an average divided by their sum, which must be positive.

    >>> normalize_coefficients([1, 3])
    [0.25, 0.75]
    """
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def compute_decay_coefficients(num: int, decay: float) -> list[float]:
    """Return the weights of an exponential moving average over `num` models, oldest first: it
    starts at the first model, and then average = decay * average + (1 - decay) * model.

    >>> compute_decay_coefficients(3, 0.5)
    [0.25, 0.25, 0.5]
    """
    rest = [(1 - decay) * decay ** (num - 1 - number) for number in range(1, num)]
    return [decay ** (num - 1), *rest]


def add_weighted(
    parts: Sequence[Callable[[], Tensor]], coefficients: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Return the sum of coefficient * part in `dtype`; one part is in memory at a time."""
    total: Tensor | None = None
    for read, coefficient in zip(parts, coefficients, strict=True):
        values = read().to(dtype)
        total = values * coefficient if total is None else total.add_(values, alpha=coefficient)
    assert total is not None, "there is at least one part"
    return total


# --- models


def open_models(sources: Sequence[str]) -> list[Pretrained]:
    """Open models that are to be combined: runs (their newest checkpoint), checkpoints, or Hugging
    Face folders, whose vocabulary is padded as that of the others.

    Raises:
        CheckpointError: one of them cannot be opened, or the models differ; all differences are
            named.
    """
    models = [open_pretrained(locate_source(source)) for source in sources]
    padding = next(
        (
            model.model.pad_vocab_to_multiple_of
            for model in models
            if not isinstance(model.weights, HuggingFaceFolder)
        ),
        models[0].model.pad_vocab_to_multiple_of,
    )
    models = [
        replace(model, model=replace(model.model, pad_vocab_to_multiple_of=padding))
        if isinstance(model.weights, HuggingFaceFolder)
        else model
        for model in models
    ]
    lines = [line for other in models[1:] for line in describe_differences(models[0], other)]
    if lines:
        text = "\n".join(f"  {line}" for line in lines)
        raise CheckpointError(
            f"the models differ from the first one, {models[0].path}:\n{text}\nCombine only "
            "checkpoints of one model: equal settings under model.*, names and shapes."
        )
    return models


def describe_differences(first: Pretrained, other: Pretrained) -> list[str]:
    """Return the differences of two models, one per line: settings, names and shapes of tensors."""
    lines = [
        f"{other.path}: model.{name} is {value}, in the first {first_value}"
        for name, first_value, value in differences(canonical(first.model), canonical(other.model))
        if name not in FREE
    ]
    shapes, other_shapes = list_shapes(first), list_shapes(other)
    for present, absent, where in (
        (shapes, other_shapes, "missing"),
        (other_shapes, shapes, "not in the first"),
    ):
        keys = group_by_pattern([name for name in present if name not in absent])
        lines += [f"{other.path}: {key} is {where}" for key in keys]
    return lines + [
        f"{other.path}: {name} is {list(other_shapes[name])}, in the first {list(shape)}"
        for name, shape in shapes.items()
        if name in other_shapes and other_shapes[name] != shape
    ]


def list_shapes(source: Pretrained) -> dict[str, tuple[int, ...]]:
    """Return {parameter: shape}: as stored, or for other sources than checkpoints as the model has
    them."""
    checkpoint = source.checkpoint
    if checkpoint is None:
        return {shard.name: shard.shape for shard in parameters(source.model)}
    return {
        key.removeprefix(MODEL): checkpoint.shape(key)
        for key in checkpoint.manifest.tensors
        if key.startswith(MODEL)
    }


def has_master_weights(models: Sequence[Pretrained], parameter: str) -> bool:
    """Return whether all models have master weights of a parameter."""
    return all(
        model.checkpoint is not None and f"{MASTER}{parameter}" in model.checkpoint.manifest.tensors
        for model in models
    )


def read_finite(weights: Weights, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
    """Return a box of a parameter, from its master weights if there are any.

    Raises:
        CheckpointError: it has NaN or infinite elements.
    """
    values = weights.read(parameter, box, dtype)
    if not bool(torch.isfinite(values).all()):
        raise CheckpointError(
            f"{parameter} has NaN or infinite elements in one of the models, so that the result "
            "would have them too. Use other checkpoints; `megalith checkpoint verify --deep` finds "
            "them."
        )
    return values


@dataclass(frozen=True, slots=True)
class AveragedWeights:
    """Weighted average of the weights of several models, from master weights where these are
    stored."""

    models: Sequence[Pretrained]
    coefficients: Sequence[float]
    """Weight of each model; their sum is 1."""

    accumulation_dtype: torch.dtype = torch.float64

    def dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype of the first model."""
        return self.models[0].weights.dtype(parameter)

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of the average."""
        wide = self.accumulation_dtype
        parts = [partial(read_finite, model.weights, parameter, box, wide) for model in self.models]
        return add_weighted(parts, self.coefficients, wide).to(dtype)


# --- optimizer moments


def list_common_moments(models: Sequence[Pretrained]) -> list[str]:
    """Return the keys of the optimizer's moments, which all models must have.

    Raises:
        CheckpointError: some lack moments; these are named.
    """
    keys = [_moment_keys(model) for model in models]
    union = set[str]().union(*keys)
    lines = [
        f"  {model.path} lacks {'; '.join(group_by_pattern(sorted(union - own))) or 'all moments'}"
        for model, own in zip(models, keys, strict=True)
        if own != union or not union
    ]
    if lines:
        text = "\n".join(lines)
        raise CheckpointError(
            f"--moments: the optimizer moments of all checkpoints are needed:\n{text}\nRemove "
            "--moments, or use checkpoints that were saved with checkpoint.save_optimizer=true."
        )
    return sorted(union)


def _moment_keys(model: Pretrained) -> set[str]:
    checkpoint = model.checkpoint
    return (
        set()
        if checkpoint is None
        else {key for key in checkpoint.manifest.tensors if is_moment(key)}
    )


# --- the result, written as a checkpoint


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """Values that are written as one tensor, or as several in decreasing precision."""

    keys: Sequence[tuple[str, torch.dtype]]
    """Name in the checkpoint and dtype; each tensor is cast from the one before."""

    shape: tuple[int, ...]
    read: Callable[[Box], Tensor]
    """Return the values of a box, in at least the first dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return math.prod(self.shape) * sum(dtype.itemsize for _, dtype in self.keys)


@dataclass(frozen=True, slots=True)
class WeightsOutput:
    """Tensors that are written as a checkpoint, and the model whose metadata it gets."""

    metadata_source: Pretrained
    """Model whose settings, tokenizer and license files are copied to the checkpoint."""

    tensors: Sequence[OutputTensor]
    step: int = 0
    made_from: Mapping[str, Any] = field(default_factory=dict)  # JSON
    """Models and method, for `MADE_FROM` of the state."""

    training_state: Mapping[str, Any] = field(default_factory=dict)  # JSON
    """Counters of a run that can be continued; empty for weights only."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def list_weight_outputs(
    model: ModelConfig, weights: Weights, models: Sequence[Pretrained]
) -> list[OutputTensor]:
    """Return the weights that are computed from `models`, with master weights where all of these
    have them."""
    outputs = []
    for shard in parameters(model):
        keys = [(f"{MODEL}{shard.name}", weights.dtype(shard.name))]
        if has_master_weights(models, shard.name):
            checkpoint = models[0].checkpoint
            assert checkpoint is not None, "it has master weights"
            master = f"{MASTER}{shard.name}"
            keys.insert(0, (master, checkpoint.dtype(master)))
        read = partial(_read_wide, weights, shard.name)
        outputs.append(OutputTensor(keys, shard.shape, read))
    return outputs


def _read_wide(weights: Weights, parameter: str, box: Box) -> Tensor:
    return weights.read(parameter, box, torch.float64)


def list_moment_outputs(
    models: Sequence[Pretrained], coefficients: Sequence[float], dtype: torch.dtype
) -> list[OutputTensor]:
    """Return the averaged moments of the optimizer.

    Raises:
        CheckpointError: some models have none.
    """
    keys = list_common_moments(models)
    checkpoints = [model.checkpoint for model in models if model.checkpoint is not None]
    return [
        OutputTensor(
            [(key, checkpoints[0].dtype(key))],
            checkpoints[0].shape(key),
            partial(_average_moment, checkpoints, key, coefficients, dtype),
        )
        for key in keys
    ]


def _average_moment(
    checkpoints: Sequence[Checkpoint],
    key: str,
    coefficients: Sequence[float],
    dtype: torch.dtype,
    box: Box,
) -> Tensor:
    parts = [partial(checkpoint.read, key, box, dtype) for checkpoint in checkpoints]
    return add_weighted(parts, coefficients, dtype)


def average_models(
    models: Sequence[Pretrained],
    coefficients: Sequence[float],
    *,
    moments: bool = False,
    accumulation_dtype: torch.dtype = torch.float64,
) -> WeightsOutput:
    """Return the average of models; with `moments` also of the optimizer's moments, so that a run
    can be continued at the step of the newest checkpoint.

    Raises:
        CheckpointError: moments are requested, and some models have none.
    """
    weights = AveragedWeights(models, coefficients, accumulation_dtype)
    tensors = list_weight_outputs(models[0].model, weights, models)
    made_from = {
        "method": "average",
        "sources": [str(model.path.absolute()) for model in models],
        "weights": list(coefficients),
        "accumulation": show_dtype(accumulation_dtype),
    }
    if not moments:
        return WeightsOutput(models[0], tensors, made_from=made_from)
    tensors += list_moment_outputs(models, coefficients, accumulation_dtype)
    newest = max(
        (model.checkpoint for model in models if model.checkpoint is not None),
        key=lambda checkpoint: checkpoint.step,
    )
    return WeightsOutput(models[0], tensors, newest.step, made_from, newest.state)


def write_weights(
    path: Path,
    output: WeightsOutput,
    *,
    on_written: Callable[[int], None] = lambda nbytes: None,
    workers: int = 2,
) -> int:
    """Write the checkpoint folder `path` and return the bytes of its tensors. The folder appears
    complete or not at all.

    Each worker holds a box in a few copies (64 MiB each), however large the tensors are.

    Raises:
        CheckpointError: the path exists, a source is damaged, or writing failed.
    """
    source = output.metadata_source
    auxiliary_files = copy_auxiliary_files(source, dict(token_ids(source)), to_huggingface=False)
    state = dict(output.training_state) | build_release_state(source)
    state[MADE_FROM] = dict(output.made_from)
    with open_staging(path, None) as work:
        staging = work.folder / f"{folder_name(output.step)}.tmp"
        storage.make_folder(staging)
        check_free_space(work.folder, output.nbytes)
        batches = split_by_nbytes(output.tensors, lambda tensor: tensor.nbytes, BATCH_NBYTES)
        jobs = [
            partial(_write_batch, staging / f"__{number}_0.distcp", batch, on_written)
            for number, batch in enumerate(batches)
        ]
        parts = list(run_in_order(jobs, workers))
        written = WrittenFiles(
            merge_tensors(part.tensors for part in parts),
            {name: file for part in parts for name, file in part.files.items()},
        )
        config_text = format_release_config(source, path)
        finished, _ = commit(staging, output.step, [written], state, config_text, auxiliary_files)
        assert isinstance(finished, Path), "the staging folder is local"
        publish(work, finished, path)
    return output.nbytes


def _write_batch(
    path: Path, batch: Sequence[OutputTensor], on_written: Callable[[int], None]
) -> WrittenFiles:
    """Write one file of tensors."""
    tensors: dict[str, StoredTensor] = {}
    with BoxFile(path) as file:
        for output in batch:
            boxes: dict[str, list[StoredBox]] = {key: [] for key, _ in output.keys}
            full = tuple((0, size) for size in output.shape)
            for box in divide(full, BOX_NBYTES // torch.float64.itemsize):
                values = output.read(box)
                for key, dtype in output.keys:
                    values = values.to(dtype)
                    if not bool(torch.isfinite(values).all()):
                        raise CheckpointError(
                            f"{key}: the result has NaN or infinite elements in "
                            f"{show_dtype(dtype)}. Use other checkpoints, or smaller weights or a "
                            "smaller scale."
                        )
                    boxes[key].append(file.add(box, [values]))
            for key, dtype in output.keys:
                name = show_dtype(dtype)
                tensors[key] = StoredTensor(output.shape, name, tuple(boxes[key]))
            on_written(output.nbytes)
    return WrittenFiles(tensors, {file.name: StoredFile(file.nbytes)})
