"""Write a model, with or without its optimizer state, as a checkpoint of Megatron-LM
(`torch_dist`).

    TARGET/
      latest_checkpointed_iteration.txt   the iteration, or `release`
      iter_0000123/                       or release/, for weights without a step
        __0_0.distcp                      boxes of tensors in `torch.save` format
        .metadata                         names and positions, for torch.distributed.checkpoint
        common.pt                         arguments, optimizer settings, schedule
        metadata.json                     name of the format
        tokenizer.json                    files of the tokenizer
"""

import io
import json
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import METADATA, lengths, numel, show_dtype
from megalith.checkpoint.iterations import BACKEND, COMMON, RELEASE, TRACKER
from megalith.checkpoint.load import Checkpoint
from megalith.checkpoint.save import BOX_NBYTES, StoredObject, dcp_metadata
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.train import TrainRun
from megalith.config.tree import from_dict, parse_stored_settings
from megalith.data.tokenizer import moved_to
from megalith.errors import CheckpointError, ConfigError, raise_all
from megalith.hf.box_files import BoxesToWrite, split_into_files, write_box_files
from megalith.hf.convert import Move, copy_auxiliary_files, token_ids
from megalith.hf.megatron_args import model_to_args
from megalith.hf.megatron_checkpoint import MegatronCheckpoint
from megalith.hf.megatron_names import MEGATRON
from megalith.hf.megatron_state import (
    build_common_state,
    build_dtype_args,
    build_layout_args,
    build_progress_args,
    build_tokenizer_args,
    build_training_args,
    build_vocabulary_args,
    describe_optimizer_problems,
)
from megalith.hf.pretrained import Pretrained
from megalith.hf.staging import ConversionOptions, open_staging, publish
from megalith.hf.tensor_rules import (
    TensorRule,
    build_rules,
    dtype_to_write,
    group_by_tensor,
    to_tensor_layout,
)
from megalith.plan.shards import Box

BACKEND_CONTENT = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
"""Contents of `metadata.json`."""

BATCH_NBYTES = 256 * 2**20
"""Approximate size of a file (heuristic)."""

Role = Literal["param", "master", "exp_avg", "exp_avg_sq"]

PREFIXES: Mapping[Role, str] = {
    "param": "",
    "master": "optimizer.state.param.",
    "exp_avg": "optimizer.state.exp_avg.",
    "exp_avg_sq": "optimizer.state.exp_avg_sq.",
}
"""Prefix of the names of tensors in each role. Megatron's distributed optimizer names the fp32
master weights `param`."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_LINEAR = re.compile(r"(.+\.(?:linear_\w+|fc[12]_latent_proj|eh_proj)\.)weight")
_EXPERTS = ".experts.experts."


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """What is written to a Megatron checkpoint."""

    folder: str
    """`iter_0000123` or `release`."""

    tensors: tuple["ExportedTensor", ...]
    args: Mapping[str, Any]  # values of argparse
    run: TrainRun | None
    """Settings of the run that trained the weights; None: the checkpoint has no step."""

    has_optimizer: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def describe(self) -> str:
        """Describe the contents: `iteration 100 with optimizer state`, or `weights only`."""
        if self.run is None:
            return "weights only"
        optimizer = "with" if self.has_optimizer else "without"
        return f"iteration {self.args['iteration']} {optimizer} optimizer state"


@dataclass(frozen=True, slots=True)
class ExportedTensor:
    """A tensor of one layer, or outside of layers, in one role."""

    name: str
    """Name in the files."""

    layer: int | None
    """Index in the first dim of a tensor of stacked layers; None: it is not stacked."""

    num_layers: int
    """Size of the first dim of stacked layers; 0 if it is not stacked."""

    rules: tuple[TensorRule, ...]
    """Parts of the tensor and their parameters."""

    role: Role
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape without the dim of stacked layers."""
        return self.rules[0].shape

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def plan_export(
    source: Pretrained, dtype: torch.dtype | None = None, *, weights_only: bool = False
) -> ExportPlan:
    """Return what is written for a source, without reading values.

    dtype: dtype of the weights; unset: as stored. weights_only: leave out the optimizer state and
    the step.

    Raises:
        ConfigError: Megatron cannot express the model, or cannot continue with its optimizer.
        CheckpointError: optimizer state of some parameters is missing.
    """
    args = model_to_args(source.model)
    rules = build_rules(MEGATRON, _with_padded_rows(source.model))
    checkpoint = None if weights_only else source.checkpoint
    run = None if checkpoint is None else _read_run(checkpoint)
    has_optimizer = run is not None and checkpoint is not None and _has_moments(checkpoint)
    if run is not None and has_optimizer:
        raise_all(describe_optimizer_problems(run))
    stacked = args.get("moe_layer_freq", 1) == 1
    tensors = [
        _stack_layer(
            ExportedTensor(
                name, None, 0, tuple(parts), "param", _weight_dtype(parts, source, dtype)
            ),
            source.model.num_layers if stacked else 0,
        )
        for name, parts in group_by_tensor(rules).items()
    ]
    if has_optimizer:
        assert checkpoint is not None
        tensors += _plan_optimizer(checkpoint, tensors)
    folder_args = _build_args(source, tensors[0].dtype, checkpoint, run)
    # no random state is stored, and without these settings Megatron would look for it
    args = {**args, **folder_args, "no_save_rng": True, "no_save_optim": not has_optimizer}
    folder = RELEASE if run is None else f"iter_{args['iteration']:07d}"
    return ExportPlan(folder, tuple(tensors), args, run, has_optimizer)


def plan_megatron_moves(plan: ExportPlan, source: Pretrained) -> list[Move]:
    """Return how each tensor of a plan is converted."""
    return [_describe_move(tensor, source) for tensor in plan.tensors]


def write_megatron(
    target: Path, source: Pretrained, plan: ExportPlan, options: ConversionOptions
) -> int:
    """Write the Megatron folder `target` and return the bytes of its tensors. The folder appears
    complete or not at all; an interrupted conversion resumes with `options.attempt`.

    Raises:
        CheckpointError: the target exists, a source file is damaged, or writing failed.
        DataError: the tokenizer of the model no longer exists.
    """
    files = copy_auxiliary_files(source, dict(token_ids(source)), to_huggingface=False)
    final = target.absolute() / plan.folder
    tokenizer = moved_to(source.tokenizer, final)
    args = dict(plan.args) | build_tokenizer_args(tokenizer)
    state = {} if source.checkpoint is None else source.checkpoint.state
    common = build_common_state(args, run=plan.run, state=state, with_optimizer=plan.has_optimizer)
    files[COMMON] = _dump_archive(common)
    items = [_plan_item(tensor, source) for tensor in plan.tensors]
    with open_staging(target, options.attempt) as work:
        root = work.folder / "checkpoint"
        folder = root / plan.folder
        if not root.exists():
            storage.make_folder(root)
        batches = split_into_files(items, BATCH_NBYTES)
        # Megatron stores no hashes
        written = write_box_files(folder, batches, options, work.journal, hashes=False)
        extra_file = f"__{len(batches)}_0.distcp"
        files[extra_file] = _dump_archive([None])  # megatron-core stores lists of one element
        extra_state = StoredObject(extra_file, 0, len(files[extra_file]))
        objects = dict.fromkeys(list_extra_states(plan.tensors), extra_state)
        files[METADATA] = pickle.dumps(dcp_metadata(written.tensors, objects))
        files[BACKEND] = json.dumps(BACKEND_CONTENT).encode()
        for name, contents in files.items():
            storage.write_new(folder / name, contents)
        storage.sync_folder(folder)
        iteration = RELEASE if plan.run is None else str(plan.args["iteration"])
        storage.replace_file(root / TRACKER, iteration.encode())
        publish(work, root, target)
    return plan.nbytes


def list_extra_states(tensors: Sequence[ExportedTensor]) -> list[str]:
    """Return the names of the `_extra_state` of all linear layers: the fp8 state of Transformer
    Engine, which is None without fp8. Megatron has one per layer and expert, and its load fails
    without them.

    Name and position follow `ShardedObject.unique_key` of megatron-core 0.16.
    """
    names = []
    for tensor in tensors:
        match = _LINEAR.fullmatch(tensor.name)
        if match is None or tensor.role != "param":
            continue
        spans = [] if tensor.layer is None else [(tensor.layer, tensor.num_layers)]
        num_experts = tensor.shape[0] if _EXPERTS in tensor.name else 0
        for expert in range(max(1, num_experts)):
            position = [*spans, (expert, num_experts)] if num_experts else spans or [(0, 1)]
            offset, shape = (".".join(map(str, each)) for each in zip(*position, strict=True))
            names.append(f"{match[1]}_extra_state/shard_{offset}_{shape}")
    return names


def _dump_archive(value: object) -> bytes:
    """Return a value in `torch.save` format."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


# --- plan: which tensors are written, with which dtype


def _read_run(checkpoint: Checkpoint) -> TrainRun | None:
    """Return the settings of the run that saved a checkpoint; None if it has no step.

    Raises:
        CheckpointError: the settings cannot be read.
    """
    if "train" not in checkpoint.state:
        return None
    if isinstance(checkpoint, MegatronCheckpoint) and (
        checkpoint.args.get("lr") != checkpoint.run.schedule.lr
    ):  # its arguments were not translated, and the settings are defaults
        raise CheckpointError(
            f"{checkpoint.path}: some of its args for training have no counterpart, so they would "
            "not be written. Pass --weights-only to write the weights without them."
        )
    try:
        return from_dict(TrainRun, parse_stored_settings(checkpoint.config_text))
    except (yaml.YAMLError, ConfigError, TypeError) as error:
        raise CheckpointError(
            f"{checkpoint.path / 'config.yaml'} does not describe a run ({error}). Pass "
            "--weights-only to write the weights without it."
        ) from error


def _build_args(
    source: Pretrained, dtype: torch.dtype, checkpoint: Checkpoint | None, run: TrainRun | None
) -> dict[str, Any]:  # values of argparse
    """Return Megatron's arguments besides those of the model; `dtype`: that of the weights."""
    args = build_tokenizer_args(source.tokenizer)
    if run is None or checkpoint is None:
        args |= build_dtype_args(dtype) | build_layout_args(ParallelConfig())
        args |= build_progress_args({"train": {"step": 0, "consumed_samples": 0}})
    else:
        args |= build_training_args(run) | build_progress_args(checkpoint.state)
    return args | build_vocabulary_args(source.model, args["tensor_model_parallel_size"])


def _with_padded_rows(model: ModelConfig) -> ModelConfig:
    """Return the model whose rules include the padded rows of the vocabulary, which Megatron
    stores."""
    return replace(model, vocab_size=model.padded_vocab_size(), pad_vocab_to_multiple_of=1)


def _has_moments(checkpoint: Checkpoint) -> bool:
    return any(key.startswith("optimizer.exp_avg.") for key in checkpoint.manifest.tensors)


def _stack_layer(tensor: ExportedTensor, num_layers: int) -> ExportedTensor:
    """Return a tensor of a layer as part of a tensor of `num_layers` stacked layers; 0: layers are
    not stacked."""
    match = _LAYER.fullmatch(tensor.name)
    if match is None or num_layers == 0:
        return tensor
    name, layer = f"decoder.layers.{match[2]}", int(match[1])
    return replace(tensor, name=name, layer=layer, num_layers=num_layers)


def _weight_dtype(
    rules: Sequence[TensorRule], source: Pretrained, requested: torch.dtype | None
) -> torch.dtype:
    """Return the dtype in which a tensor of weights is written: one that represents all parts."""
    dtypes = [
        dtype_to_write(rule.parameter, source.weights.dtype(rule.parameter), requested)
        for rule in rules
        if rule.parameter is not None
    ]
    result = dtypes[0]
    for other in dtypes[1:]:
        result = torch.promote_types(result, other)
    return result


def _plan_optimizer(
    checkpoint: Checkpoint, weights: Sequence[ExportedTensor]
) -> list[ExportedTensor]:
    """Return the master weights and moments of the weights that are trained.

    Raises:
        CheckpointError: a tensor is stored for some parts of a tensor, and not for others.
    """
    stored = checkpoint.manifest.tensors
    tensors = []
    for role in ("master", "exp_avg", "exp_avg_sq"):
        for weight in weights:
            parameters = [rule.parameter for rule in weight.rules if rule.parameter is not None]
            # expert biases are no parameters of the optimizer
            trained = [name for name in parameters if f"optimizer.exp_avg.{name}" in stored]
            missing = sorted(set(parameters) - set(trained))
            if trained and missing:
                raise CheckpointError(
                    f"{checkpoint.path} has no moments of {', '.join(missing)}, which "
                    f"{weight.name} also contains. Pass --weights-only to write the weights "
                    "without optimizer state."
                )
            if trained:
                dtype = checkpoint.dtype(_find_key(checkpoint, role, trained[0]))
                wide = torch.promote_types(dtype, torch.float32)
                tensors.append(replace(weight, role=role, dtype=wide))
    return tensors


def _find_key(checkpoint: Checkpoint, role: Role, parameter: str) -> str:
    """Return the stored tensor of a parameter in a role; runs in fp32 have no master weights."""
    key = f"optimizer.{role}.{parameter}"
    is_missing = role == "master" and key not in checkpoint.manifest.tensors
    return f"model.{parameter}" if role == "param" or is_missing else key


def _describe_move(tensor: ExportedTensor, source: Pretrained) -> Move:
    parameters = dict.fromkeys(rule.parameter or "zeros" for rule in tensor.rules)
    role = "" if tensor.role == "param" else f"optimizer.{tensor.role}."
    index = "" if tensor.layer is None else f"[{tensor.layer}]"
    first = next(rule.parameter for rule in tensor.rules if rule.parameter is not None)
    stored = source.weights.dtype(first)
    if tensor.role != "param":
        assert source.checkpoint is not None
        stored = source.checkpoint.dtype(_find_key(source.checkpoint, tensor.role, first))
    return Move(
        " + ".join(f"{role}{name}" for name in parameters),
        f"{PREFIXES[tensor.role]}{tensor.name}{index}",
        tensor.shape,
        show_dtype(stored),
        show_dtype(tensor.dtype),
        tensor.nbytes,
    )


# --- values


ReadBox = Callable[[str, Box], Tensor]
"""Return a box of a parameter."""


def _plan_item(tensor: ExportedTensor, source: Pretrained) -> BoxesToWrite:
    """Return the boxes of a tensor that are written, with their values."""
    boxes = _split_rows(tensor.rules, tensor.dtype)
    read_parameter = _make_box_reader(tensor, source)
    key, shape = f"{PREFIXES[tensor.role]}{tensor.name}", tensor.shape
    if tensor.layer is None:
        read = partial(_read_box, tensor.rules, read_parameter, tensor.dtype)
        return BoxesToWrite(key, shape, tensor.dtype, tuple(boxes), read)
    span = (tensor.layer, tensor.layer + 1)

    def read_layer(box: Box) -> list[Tensor]:
        return _read_box(tensor.rules, read_parameter, tensor.dtype, box[1:])

    return BoxesToWrite(
        key,
        (tensor.num_layers, *shape),
        tensor.dtype,
        tuple((span, *box) for box in boxes),
        read_layer,
    )


def _make_box_reader(tensor: ExportedTensor, source: Pretrained) -> ReadBox:
    """Return the function that reads parameters in the role and dtype of a tensor."""
    if tensor.role == "param":
        return lambda parameter, box: source.weights.read(parameter, box, tensor.dtype)
    checkpoint = source.checkpoint
    assert checkpoint is not None

    def read(parameter: str, box: Box) -> Tensor:
        key = _find_key(checkpoint, tensor.role, parameter)
        view = checkpoint.view(key, box)
        return checkpoint.read(key, box, tensor.dtype) if view is None else view.to(tensor.dtype)

    return read


def _split_rows(rules: Sequence[TensorRule], dtype: torch.dtype) -> list[Box]:
    """Split a tensor into boxes of rows, if the rules do not split its first dim: the vocabulary,
    or experts."""
    full = tuple((0, size) for size in rules[0].shape)
    if any(rule.view[0] != rule.shape[0] for rule in rules):
        return [full]
    row_nbytes = numel(full[1:]) * dtype.itemsize
    rows = max(1, BOX_NBYTES // max(1, row_nbytes))
    return [
        ((start, min(start + rows, full[0][1])), *full[1:]) for start in range(0, full[0][1], rows)
    ]


def _read_box(
    rules: Sequence[TensorRule], read: ReadBox, dtype: torch.dtype, box: Box
) -> list[Tensor]:
    """Return tensors whose concatenated elements are those of a box, which contains whole rows.

    They are views where the parts of the tensor follow one another in memory.
    """
    shape = lengths(box)
    parts = []
    for rule in rules:
        part = _restrict(rule, box)
        if part is None:
            continue
        if part.parameter is None:
            values = torch.zeros(lengths(part.at), dtype=dtype)
        else:
            values = to_tensor_layout(part, read(part.parameter, part.box))
        parts.append((part, values))
    if all(_is_contiguous(part) for part, _ in parts):
        parts.sort(key=lambda item: _find_offset(item[0]))
        return [values for _, values in parts]
    result = torch.empty(shape, dtype=dtype)
    for part, values in parts:
        spans = tuple(slice(start, stop) for start, stop in part.at)
        result.view(part.view)[spans].copy_(values)
    return [result]


def _restrict(rule: TensorRule, box: Box) -> TensorRule | None:
    """Return the part of a rule that is inside a box of rows, with positions inside the box; None
    if there is none."""
    (first, last), *_ = box
    if (first, last) == (0, rule.shape[0]):
        return rule
    (start, stop), *others = rule.at
    new_start, new_stop = max(start, first), min(stop, last)
    if new_start >= new_stop:
        return None
    spans = list(rule.box)
    if 0 in rule.dims:  # otherwise the parameter has no such dim, and the part is one row
        dim = rule.dims.index(0)
        origin = spans[dim][0] - start
        spans[dim] = (origin + new_start, origin + new_stop)
    return replace(
        rule,
        shape=(last - first, *rule.shape[1:]),
        box=tuple(spans),
        view=(last - first, *rule.view[1:]),
        at=((new_start - first, new_stop - first), *others),
    )


def _is_contiguous(rule: TensorRule) -> bool:
    """Return whether the part of the tensor is one range of its elements in row-major order."""
    spans = list(zip(rule.at, rule.view, strict=True))
    outer = next((dim for dim, ((a, b), _) in enumerate(spans) if b - a > 1), len(spans) - 1)
    return all((a, b) == (0, size) for (a, b), size in spans[outer + 1 :])


def _find_offset(rule: TensorRule) -> int:
    """Return the position of the first element of the part in the tensor."""
    offset = 0
    for (start, _), size in zip(rule.at, rule.view, strict=True):
        offset = offset * size + start
    return offset
