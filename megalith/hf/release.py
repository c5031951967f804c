"""Write weights from any source as a checkpoint, without or with optimizer state, a few tensors at
a time.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.format import divide, folder_name
from megalith.checkpoint.keys import OPTIMIZER
from megalith.checkpoint.load import Checkpoint
from megalith.checkpoint.save import BOX_NBYTES, commit
from megalith.config.checkpoint import CheckpointConfig
from megalith.config.data import DataConfig, TokenizerConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import ScheduleConfig
from megalith.config.train import LoopConfig, TrainRun
from megalith.hf.box_files import BoxesToWrite, split_into_files, write_box_files
from megalith.hf.folder import Weights
from megalith.hf.staging import CONVERSION, ConversionOptions, open_staging, publish
from megalith.hf.tensor_rules import dtype_to_write
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.shards import Box, Shard

BATCH_NBYTES = 256 * 2**20
"""Approximate size of a file (heuristic)."""


def parameters(model: ModelConfig) -> list[Shard]:
    """Return the full shard of every parameter of a model, in the order of the forward pass."""
    return [
        spec.shard
        for spec, _, _ in iter_parameter_specs(
            Decoder(build_context(model, build_single_rank_mesh()))
        )
    ]


def release_run(name: str, model: ModelConfig, tokenizer: TokenizerConfig, path: Path) -> TrainRun:
    """Return settings to train from such a checkpoint; they name no dataset yet."""
    return TrainRun(
        name=name,
        model=model,
        data=DataConfig(),
        tokenizer=tokenizer,
        train=LoopConfig(steps=1000, global_batch_size=8, seq_len=min(2048, model.max_seq_len)),
        schedule=ScheduleConfig(lr=1e-5, warmup_steps=0.05),  # common for pretrained models
        checkpoint=CheckpointConfig(load=str(path.absolute())),
    )


def write_release(
    path: Path,
    model: ModelConfig,
    weights: Weights,
    options: ConversionOptions = CONVERSION,
    *,
    config_text: str,
    state: Mapping[str, Any] | None = None,  # JSON
    auxiliary_files: Mapping[str, bytes] | None = None,
    training_state: Checkpoint | None = None,
) -> int:
    """Write the checkpoint folder `path` and return the bytes of its tensors. The folder appears
    complete or not at all. `auxiliary_files` are written beside the weights.

    training_state: its step and its optimizer state are written too; unset: step 0, weights only.

    Raises:
        CheckpointError: the path exists, or writing failed.
    """
    with open_staging(path, options.attempt) as work:
        step = 0 if training_state is None else training_state.step
        staging = work.folder / f"{folder_name(step)}.tmp"
        finished = staging.with_suffix("")
        if finished.exists():  # killed between writing the last file and renaming the folder
            storage.rename(finished, staging)
        items = [
            _plan_parameter(
                shard, weights, dtype_to_write(shard.name, weights.dtype(shard.name), options.dtype)
            )
            for shard in parameters(model)
        ]
        items += [] if training_state is None else plan_optimizer_state(training_state)
        files = split_into_files(items, BATCH_NBYTES)
        written = write_box_files(staging, files, options, work.journal)
        for name, contents in (auxiliary_files or {}).items():
            storage.write_new(staging / name, contents)
        committed, _ = commit(staging, step, [written], dict(state or {}), config_text)
        assert isinstance(committed, Path), "the staging folder is local"
        publish(work, committed, path)
    return sum(item.nbytes for item in items)


def _plan_parameter(shard: Shard, weights: Weights, dtype: torch.dtype) -> BoxesToWrite:
    def read(box: Box) -> list[Tensor]:
        return [weights.read(shard.name, part, dtype) for part in _slices(box)]

    boxes = tuple(divide(shard.box, BOX_NBYTES // dtype.itemsize))
    return BoxesToWrite(f"model.{shard.name}", shard.shape, dtype, boxes, read)


def plan_optimizer_state(checkpoint: Checkpoint) -> list[BoxesToWrite]:
    """Return the optimizer state of a checkpoint, to be written unchanged."""

    def plan(key: str) -> BoxesToWrite:
        shape, dtype = checkpoint.shape(key), checkpoint.dtype(key)
        whole = tuple((0, size) for size in shape)
        boxes = tuple(divide(whole, BOX_NBYTES // dtype.itemsize))
        return BoxesToWrite(key, shape, dtype, boxes, lambda box: [checkpoint.read(key, box)])

    return [plan(key) for key in checkpoint.manifest.tensors if key.startswith(OPTIMIZER)]


def _slices(box: Box) -> list[Box]:
    """Split a box of a few stacked matrices, such as keys and values: other formats store them
    separately."""
    (start, stop), *rest = box
    is_stacked = len(rest) > 1 and stop - start <= 4
    return [((i, i + 1), *rest) for i in range(start, stop)] if is_stacked else [box]
