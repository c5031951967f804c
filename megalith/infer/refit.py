"""Weight updates of a running engine (refit): new weights are written into the parameters in place.

Everything that can be wrong with the new weights is checked before the first parameter is written.
Beside both sets of weights, an update needs at most the memory of one parameter.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry, TensorPiece, pieces
from megalith.config.model import MTPConfig
from megalith.errors import CheckpointError, ConfigError, PlanError, did_you_mean
from megalith.hf.folder import Weights
from megalith.hf.pretrained import (
    Pretrained,
    check_same_model,
    locate_source,
    mark_sources,
    open_pretrained,
)
from megalith.hf.release import parameters
from megalith.infer.quantize import (
    PIECE_ELEMENTS,
    iter_quantized_weights,
    iter_row_boxes,
    load_int8_weights,
)
from megalith.models.decoder import Decoder, iter_parameter_specs
from megalith.parallel.group import Group, raise_on_all_ranks, single_rank_group
from megalith.parallel.transfer import execute_transfers
from megalith.plan.shards import Box
from megalith.plan.transfer import WeightTransfer, plan_weight_transfers

logger = logging.getLogger(__name__)

UpdateMode = Literal["drain", "recompute", "keep"]
"""What happens to requests in flight. drain: they finish with the old weights first; recompute:
they continue with the new weights, and their KV cache is computed again; keep: they continue with
the new weights and the KV cache of the old ones."""

UPDATE_MODES: tuple[UpdateMode, ...] = ("drain", "recompute", "keep")

NUM_NAMES = 5
"""Parameters of each kind that an error names."""

SINGLE_RANK = single_rank_group("world")


@dataclass(frozen=True, slots=True)
class TrainingWeights:
    """The weights of a training mesh, or of any other ranks that hold shards of the model."""

    entries: Sequence[CheckpointEntry]
    """Shards of this rank, as for a checkpoint; those with the role `param` are sent, in their
    dtype. For an engine with a wider dtype pass the master weights under this role."""

    group: Group
    """All ranks that train or generate. Those without an engine call `send_weights`."""


WeightSource: TypeAlias = str | Path | Mapping[str, Tensor] | TrainingWeights
"""A run, a checkpoint or a Hugging Face folder; full tensors by parameter name, the same on all
ranks; or a training mesh."""


class TensorWeights:
    """Weights in full tensors by parameter name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def dtype(self, parameter: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return self.tensors[parameter].dtype

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of a tensor, where the tensor is."""
        return self.tensors[parameter].detach()[tuple(slice(*span) for span in box)].to(dtype)


@dataclass(frozen=True, slots=True)
class WeightReading:
    """Checked weights that every rank reads itself."""

    weights: Weights
    source: Pretrained | None = None
    """Set if they are in files."""


@dataclass(frozen=True, slots=True)
class WeightExchange:
    """Checked weights that the ranks of a group send to each other."""

    transfers: Sequence[WeightTransfer]
    sources: Mapping[str, Sequence[Tensor]]
    targets: Mapping[str, Sequence[Tensor]]
    dtypes: Mapping[str, torch.dtype]
    group: Group

    def execute(self) -> None:
        """Write the weights. Collective over the group."""
        execute_transfers(self.transfers, self.sources, self.targets, self.dtypes, self.group)


class _RankParameters(NamedTuple):
    """Parameters of one rank, without their values."""

    held: dict[str, list[Box]]
    wanted: dict[str, list[Box]]
    shapes: dict[str, tuple[int, ...]]
    """Global shapes of the held parameters."""

    dtypes: dict[str, torch.dtype]
    """Of the held parameters."""

    expected: dict[str, tuple[int, ...]] | None
    """Global shapes of all parameters of the engine's model; None without an engine."""


class WeightUpdater:
    """Replaces the weights of a model. All ranks that share it make the same calls."""

    def __init__(
        self, model: Decoder, ranks: Group = SINGLE_RANK, source: Pretrained | None = None
    ) -> None:
        """`ranks`: those that share the model; `source`: its present weights, from which they are
        restored when an update fails; None: they cannot be restored."""
        self._model, self.ranks = model, ranks
        self._weights: Weights | None = None if source is None else source.weights
        self.error: str | None = None
        """Why the model has a mixture of old and new weights; None: it has not."""

    def prepare(self, source: WeightSource, marks: ExitStack) -> WeightReading | WeightExchange:
        """Check new weights without changing the model: names, shapes, files, and that all values
        are finite. Collective over the ranks, and over those of a training mesh.

        marks: receives the marker of a reader, which keeps a run from deleting the checkpoint; to
            close after `write`.

        Raises:
            CheckpointError: on every rank: they cannot be used.
        """
        if isinstance(source, TrainingWeights):
            return prepare_exchange(source, self._model)
        if isinstance(source, Mapping):
            reading = WeightReading(TensorWeights(source))
            shapes = {name: tuple(tensor.shape) for name, tensor in source.items()}
            check_parameters(shapes, self._expected_shapes(), "the tensors")
        else:
            reading = self._open(str(source))
            if reading.source is not None and self.ranks.rank == 0:
                marks.enter_context(mark_sources([reading.source]))
        raise_on_all_ranks(lambda: self._check_values(reading.weights), self.ranks)
        return reading

    def write(self, update: WeightReading | WeightExchange) -> None:
        """Write checked weights into the parameters. Collective as `prepare`.

        Raises:
            CheckpointError: on every rank: a file could not be read any more. The model has its old
                weights again, or `error` is set.
        """
        try:
            if isinstance(update, WeightExchange):
                update.execute()
            else:
                raise_on_all_ranks(lambda: self._write(update.weights), self.ranks)
        except BaseException as error:
            self._restore(error)
            raise
        self.error = None
        self._weights = None
        if isinstance(update, WeightReading) and update.source is not None:
            self._weights = update.weights

    def _restore(self, cause: BaseException) -> None:
        """Write the old weights again after an update failed in the middle."""
        self.error = (
            f"the last weight update failed in the middle ({cause}), and the old weights could not "
            "be restored. Update the weights again."
        )
        weights = self._weights
        if weights is None or not isinstance(cause, CheckpointError):
            return  # from a mesh or memory; or ranks may have ended
        raise_on_all_ranks(lambda: self._write(weights), self.ranks)
        self.error = None

    def _open(self, name: str) -> WeightReading:
        """Open a source that rank 0 locates, and compare its model with this one."""
        ranks = self.ranks
        paths = raise_on_all_ranks(lambda: locate_source(name) if ranks.rank == 0 else None, ranks)
        path = paths[0]
        assert path is not None

        def open_source() -> Pretrained:
            opened = open_pretrained(path)
            config = self._model.config
            if config.mtp == MTPConfig():  # not loaded, so they are not updated either
                opened = replace(opened, model=replace(opened.model, mtp=config.mtp))
            check_same_model(opened, config)
            if opened.checkpoint is not None:
                tensors = opened.checkpoint.manifest.tensors
                shapes = {
                    key.removeprefix("model."): tensor.shape
                    for key, tensor in tensors.items()
                    if key.startswith("model.")
                }
                check_parameters(shapes, self._expected_shapes(), str(path))
            return opened

        opened: list[Pretrained] = []
        raise_on_all_ranks(lambda: opened.append(open_source()), ranks)
        return WeightReading(opened[0].weights, opened[0])

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        return {shard.name: shard.shape for shard in parameters(self._model.config)}

    def _check_values(self, weights: Weights) -> None:
        """Read all values of this rank once.

        Raises:
            CheckpointError: one is NaN or infinite, or cannot be read.
        """
        for entry in list_entries(self._model):
            for piece in pieces(entry, max_numel=PIECE_ELEMENTS):
                values = weights.read(entry.shard.name, piece.box, piece.values.dtype)
                check_finite(values, entry.shard.name)
        for quantized in iter_quantized_weights(self._model):
            for shard in quantized.shards:
                for box in iter_row_boxes(shard, PIECE_ELEMENTS):
                    check_finite(weights.read(shard.name, box, torch.float32), shard.name)

    @torch.no_grad()
    def _write(self, weights: Weights) -> None:
        for entry in list_entries(self._model):
            for piece in pieces(entry, max_numel=PIECE_ELEMENTS):
                piece.values.copy_(weights.read(entry.shard.name, piece.box, piece.values.dtype))
        load_int8_weights(list(iter_quantized_weights(self._model)), weights)


def list_entries(model: Decoder) -> list[CheckpointEntry]:
    """Return the parameters of a model on this rank that are not quantized."""
    quantized = {
        shard.name for weights in iter_quantized_weights(model) for shard in weights.shards
    }
    return [
        CheckpointEntry(spec.shard, "param", getattr(module, name).data)
        for spec, module, name in iter_parameter_specs(model)
        if spec.shard.name not in quantized
    ]


def send_weights(source: TrainingWeights) -> None:
    """Send the weights of this rank, which has no engine, to the ranks that update theirs.
    Collective over the group.

    Raises:
        CheckpointError: on every rank, before anything is changed: the weights cannot be used.
    """
    prepare_exchange(source, None).execute()


def prepare_exchange(source: TrainingWeights, model: Decoder | None) -> WeightExchange:
    """Plan the messages from the shards of a training mesh to those of the engines; `model`: that
    of this rank's engine. Collective over the group.

    Raises:
        CheckpointError: on every rank: parameters are missing, unexpected or have another shape,
            elements are on no rank, or values are NaN or infinite; or an engine is quantized.
    """
    held = _collect_pieces([entry for entry in source.entries if entry.role == "param"])
    wanted = _collect_pieces([] if model is None else list_entries(model))
    ranks = raise_on_all_ranks(lambda: _describe_rank(source, held, wanted, model), source.group)
    shapes = {name: shape for rank in ranks for name, shape in rank.shapes.items()}
    dtypes = {name: dtype for rank in ranks for name, dtype in rank.dtypes.items()}
    for rank in ranks:
        if rank.expected is not None:
            check_parameters(shapes, rank.expected, "the training mesh")
    itemsizes = {name: dtype.itemsize for name, dtype in dtypes.items()}
    try:
        transfers = plan_weight_transfers(
            [rank.held for rank in ranks], [rank.wanted for rank in ranks], itemsizes
        )
    except PlanError as error:
        raise CheckpointError(str(error)) from error
    return WeightExchange(transfers, _get_values(held), _get_values(wanted), dtypes, source.group)


def _collect_pieces(entries: Sequence[CheckpointEntry]) -> dict[str, list[TensorPiece]]:
    """Return the boxes of parameters with their values, by name."""
    collected: dict[str, list[TensorPiece]] = {}
    for entry in entries:
        parts = [part for part in pieces(entry) if part.values.numel()]
        collected.setdefault(entry.shard.name, []).extend(parts)
    return collected


def _get_values(collected: Mapping[str, Sequence[TensorPiece]]) -> dict[str, list[Tensor]]:
    return {name: [part.values for part in parts] for name, parts in collected.items()}


def _describe_rank(
    source: TrainingWeights,
    held: Mapping[str, Sequence[TensorPiece]],
    wanted: Mapping[str, Sequence[TensorPiece]],
    model: Decoder | None,
) -> _RankParameters:
    """Check the values and the engine of this rank, and return what the plan needs to know."""
    for name, parts in held.items():
        for part in parts:
            check_finite(part.values, name)
    expected = None
    if model is not None:
        if next(iter_quantized_weights(model), None) is not None:
            raise ConfigError(
                "engine.quantization=int8: weights of a training mesh are not quantized. Update "
                "from a checkpoint, or set engine.quantization to none."
            )
        expected = {shard.name: shard.shape for shard in parameters(model.config)}
    entries = [entry for entry in source.entries if entry.role == "param"]
    return _RankParameters(
        held={name: [part.box for part in parts] for name, parts in held.items()},
        wanted={name: [part.box for part in parts] for name, parts in wanted.items()},
        shapes={entry.shard.name: entry.shard.shape for entry in entries},
        dtypes={entry.shard.name: entry.tensor.dtype for entry in entries},
        expected=expected,
    )


def check_parameters(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], source: str
) -> None:
    """Check the names and shapes of new weights; MTP layers may be unused.

    Raises:
        CheckpointError: they differ from the expected ones; the first of each kind are named.
    """
    missing = [name for name in expected if name not in shapes]
    unexpected = [name for name in shapes if name not in expected and not name.startswith("mtp.")]
    different = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    problems = [
        f"{kind} {', '.join(names[:NUM_NAMES])}{', ...' if len(names) > NUM_NAMES else ''}"
        for kind, names in (
            ("missing parameters:", missing),
            ("unexpected parameters:", unexpected),
            ("other shapes:", different),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{source} cannot replace the weights; {'; '.join(problems)}. Use weights of the same "
            "model, with the same names."
        )


def check_finite(values: Tensor, name: str) -> None:
    """Check that a parameter has no NaN and no infinite value.

    Raises:
        CheckpointError: it has one.
    """
    if not values.numel() or not values.is_floating_point():
        return
    if not all(math.isfinite(value) for value in torch.aminmax(values)):
        raise CheckpointError(
            f"{name} has NaN or infinite values, so it cannot replace the weights. Use a "
            "checkpoint with finite weights."
        )


def check_update_mode(mode: str) -> None:
    """Check the name of a mode.

    Raises:
        ConfigError: there is none of this name.
    """
    if mode not in UPDATE_MODES:
        raise ConfigError(
            f"mode={mode!r:.40}: there is no such mode of weight updates."
            f"{did_you_mean(str(mode), UPDATE_MODES)} Use one of {', '.join(UPDATE_MODES)}."
        )
