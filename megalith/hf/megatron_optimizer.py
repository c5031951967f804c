"""Optimizer state of Megatron checkpoints: fp32 master weights and moments by canonical name, for
each sharding type of Megatron-LM's optimizers.

The default format (`dp_reshardable`) stores flat buckets without names; their layout is rebuilt
from the args of the checkpoint, and `verify_buckets` compares the master weights with the weights.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.checkpoint.chunks import (
    ChunkedTensor,
    MegatronFolder,
    MegatronFormat,
    TensorChunk,
)
from megalith.checkpoint.format import divide, lengths, numel, show_box
from megalith.checkpoint.safe_pickle import ArchiveTensor, Record, require_plain
from megalith.config.model import ModelConfig
from megalith.errors import CheckpointError
from megalith.hf.megatron_names import EMBEDDING, OUTPUT_LAYER, crop_rows, normalize_tensors
from megalith.plan.megatron_buckets import (
    FlatBucket,
    FlatParam,
    FlatSlot,
    build_flat_buckets,
    list_bucket_sizes,
    match_buckets,
)
from megalith.plan.megatron_layout import (
    EXPERTS,
    compute_registration_key,
    find_layer,
    read_count,
    read_flag,
    read_layout,
    slice_local_tensor,
)
from megalith.plan.shards import Box

LOAD_MODES = "Use checkpoint.load_mode=weights, or =progress with new moments."

ROLES = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Megatron's names of the tensors of a bucket -> Megalith's names."""

NO_PARAMETERS = re.compile(
    r".*\.(expert_bias|qb_beta|local_tokens_per_expert|global_tokens_per_expert|inv_freq)"
)
"""Buffers: stored as weights, without optimizer state."""

REJECTED_TYPES = {
    "fully_sharded_bucket_space": "its buckets depend on the number of dp ranks",
    "dp_zero_gather_scatter": "its flat buffers are pickled objects",
}
"""Deprecated values of `distrib_optim_sharding_type` that are not read, and the reason."""

CHUNK_NUMEL = 1 << 22
"""Elements of a bucket that are read, and master weights that are compared, at a time: 16 MB of
fp32. Heuristic."""

_BUCKET = re.compile(
    r"(?P<prefix>(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+)\.gbuf_idx_(?P<gbuf>\d{1,9})"
    r"\.dtype_\((?P<dtype>[\w.]+), ?[\w.]+\)\.bucket_idx_(?P<bucket>\d{1,9})\.(?P<role>\w+)"
)


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerState:
    """Optimizer state of a Megatron checkpoint."""

    tensors: dict[str, ChunkedTensor]
    """`master.NAME`, `exp_avg.NAME` and `exp_avg_sq.NAME`, for canonical names of parameters."""

    step: int | None
    """Number of optimizer updates; None if the checkpoint does not state it."""

    loss_scale: float | None
    """Scale of a dynamic fp16 loss scaler; None without one."""

    format: MegatronFormat
    """Format of the files."""

    sharding_type: str
    """`distrib_optim_sharding_type` of the files; `replicated` without a distributed optimizer."""

    needs_verification: bool
    """True if `verify_buckets` must accept the tensors before they are used: they are assigned to
    parameters by position, or were written by a function that may have shifted them."""


def read_optimizer(
    folder: MegatronFolder, model: ModelConfig, weights: Mapping[str, ChunkedTensor]
) -> OptimizerState:
    """Return the optimizer state of a checkpoint; nothing but small objects is read.

    `weights` are the canonical tensors of `normalize_tensors`; optimizer states among them are
    used.

    Raises:
        CheckpointError: the state is missing, incomplete, of a kind that is not supported, or does
            not fit the args of the checkpoint.
    """
    if folder.optimizer_problem is not None:
        raise CheckpointError(folder.optimizer_problem)
    kind = find_sharding_type(folder)
    params = {
        name: tensor
        for name, tensor in weights.items()
        if not name.startswith("optimizer.") and not NO_PARAMETERS.fullmatch(name)
    }
    if kind == "dp_reshardable":
        tensors, states = _read_buckets(folder, model, params)
    else:
        if not any(name.startswith("optimizer.") for name in weights):
            weights = normalize_tensors(folder, model)
        tensors, states = _select_states(weights), [folder.common.get("optimizer")]
    _check_complete(folder, tensors, params)
    return OptimizerState(
        tensors=tensors,
        step=_find_step(folder, states),
        loss_scale=_find_loss_scale(states),
        format=folder.format,
        sharding_type=kind,
        needs_verification=kind == "dp_reshardable"
        or folder.format == "torch"
        or (kind == "fully_reshardable" and _may_be_shifted(folder)),
    )


def _may_be_shifted(folder: MegatronFolder) -> bool:
    """Return whether Megatron-core may have stored states of the wrong elements.

    To write `fully_reshardable`, Megatron-core 0.16 joins buckets without the padding at their
    ends, and then cuts them at positions that count it; so with several buckets in a buffer, all
    parameters after the first bucket have shifted values. Buffers have several buckets if stages
    share an embedding, or with `--overlap-grad-reduce`.
    """
    args = read_args(folder)
    layout = read_layout(args)
    is_shared = layout.pp > 1 and (layout.tied or layout.has_mtp)
    return is_shared or read_flag(args, "overlap_grad_reduce")


def read_args(folder: MegatronFolder) -> Mapping[str, object]:
    """Return the `args` of a checkpoint as a mapping.

    Raises:
        CheckpointError: the checkpoint has none.
    """
    args = folder.common.get("args")
    if isinstance(args, Record):
        return args.state
    if isinstance(args, Mapping):
        return args
    raise CheckpointError(
        f"{folder.path}: the checkpoint has no args, so the layout of its parts is unknown. Use "
        "one that Megatron-LM's training loop wrote."
    )


def find_sharding_type(folder: MegatronFolder) -> str:
    """Return the `distrib_optim_sharding_type` of a checkpoint, or `replicated`.

    Raises:
        CheckpointError: the checkpoint has no optimizer state, or of a type that is not read.
    """
    names = list(folder.tensors)
    has_buckets = any(_BUCKET.fullmatch(name) for name in names)
    has_states = any("optimizer.state." in name for name in names)
    metadata = folder.common.get("content_metadata")
    stated = metadata.get("distrib_optim_sharding_type") if isinstance(metadata, Mapping) else None
    optimizer = folder.common.get("optimizer")
    if stated is None and isinstance(optimizer, Mapping):
        stated = optimizer.get("param_state_sharding_type")
    zero_objects = [key for key in folder.objects if ".param_state/" in key]
    if stated is None and zero_objects and not has_states:
        stated = "dp_zero_gather_scatter"
    if not has_buckets and not has_states and not zero_objects:
        raise CheckpointError(f"{folder.path}: the checkpoint has no optimizer state. {LOAD_MODES}")
    if isinstance(stated, str) and stated in REJECTED_TYPES:
        raise CheckpointError(
            f"{folder.path}: optimizer state of the deprecated type {stated} is not read: "
            f"{REJECTED_TYPES[stated]}. Save it again with Megatron-LM and "
            f"--dist-ckpt-optim-fully-reshardable. {LOAD_MODES}"
        )
    if has_buckets:
        return "dp_reshardable"
    if stated is None:
        return "replicated"
    known = ("fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor")
    if stated not in known:
        raise CheckpointError(
            f"{folder.path}: distrib_optim_sharding_type={stated!r} is not one of "
            f"{', '.join(known)}, dp_reshardable. {LOAD_MODES}"
        )
    return str(stated)


def _select_states(weights: Mapping[str, ChunkedTensor]) -> dict[str, ChunkedTensor]:
    roles = tuple(f"optimizer.{role}." for role in ROLES.values())
    return {
        name.removeprefix("optimizer."): tensor
        for name, tensor in weights.items()
        if name.startswith(roles)
    }


def _check_complete(
    folder: MegatronFolder, tensors: dict[str, ChunkedTensor], params: Mapping[str, ChunkedTensor]
) -> None:
    """Check that every parameter has moments and a master weight, which is the weight itself if it
    is stored in fp32."""
    missing = [
        f"{role}.{name}"
        for role in ("exp_avg", "exp_avg_sq")
        for name in params
        if f"{role}.{name}" not in tensors
    ]
    for name, weight in params.items():
        if f"master.{name}" not in tensors:
            if weight.dtype == torch.float32:
                tensors[f"master.{name}"] = weight
            else:
                missing.append(f"master.{name}")
    if missing:
        shown = ", ".join(missing[:10]) + (" and more" if len(missing) > 10 else "")
        raise CheckpointError(
            f"{folder.path}: the optimizer state lacks {len(missing)} tensors: {shown}. "
            f"{LOAD_MODES}"
        )


# --- step and loss scale


def _find_states(value: object) -> Iterator[Mapping[Any, Any]]:
    """Yield the state dicts of optimizers with param groups in nested containers."""
    pending = [value]
    while pending:
        node = pending.pop()
        if isinstance(node, Mapping):
            if "param_groups" in node:
                yield node
            else:
                pending += [node[key] for key in node if key != "param_state"]
        elif isinstance(node, list | tuple):
            pending += node


def _find_step(folder: MegatronFolder, states: Sequence[object]) -> int | None:
    steps: set[int] = set()
    for state in (one for value in states for one in _find_states(value)):
        groups = state["param_groups"]
        for group in groups if isinstance(groups, list | tuple) else ():
            if isinstance(group, Mapping) and group.get("step") is not None:
                steps.add(_read_step(folder, group["step"]))
        inner = state.get("state")
        if isinstance(inner, Mapping) and inner.get("common_step") is not None:
            steps.add(_read_step(folder, inner["common_step"]))
    if len(steps) > 1:
        raise CheckpointError(
            f"{folder.path}: the optimizer state has parts of different steps "
            f"({', '.join(map(str, sorted(steps)))}), so files of several saves are mixed. Copy "
            "one checkpoint completely."
        )
    return steps.pop() if steps else None


def _read_step(folder: MegatronFolder, value: object) -> int:
    number = _read_number(value)
    if number is None or number != int(number) or number < 0:
        raise CheckpointError(
            f"{folder.path}: the optimizer's step {show_value(value)} is not a whole number. "
            f"{LOAD_MODES}"
        )
    return int(number)


def show_value(value: object) -> str:
    """Return a short text of a value that a file contains."""
    return repr(value)[:60]


def _read_number(value: object) -> float | None:
    """Return a finite number: a Python number, or a tensor with one element."""
    if isinstance(value, ArchiveTensor) and prod(value.shape) == 1:
        value = value.read().item()
    elif isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _find_loss_scale(states: Sequence[object]) -> float | None:
    """Return the scale of the first `grad_scaler` in nested containers."""
    pending = list(states)
    while pending:
        node = pending.pop(0)
        if isinstance(node, Mapping):
            scaler = node.get("grad_scaler")
            if isinstance(scaler, Mapping) and scaler.get("scale") is not None:
                return _read_number(scaler["scale"])
            pending += [node[key] for key in node if key not in ("param_groups", "state")]
        elif isinstance(node, list | tuple):
            pending += node
    return None


# --- buckets


class _Buffer(NamedTuple):
    """Parameters of one flat buffer, in registration order, and the model chunk that holds them."""

    chunk: int
    dtype: torch.dtype
    params: list[FlatParam]


class _Optimizer(NamedTuple):
    """One of the chained optimizers of a rank."""

    prefix: str
    chunks: range
    is_expert: bool


class _StoredBucket(NamedTuple):
    dtype: str
    roles: dict[str, ChunkedTensor]


class _BucketReader:
    """Assigns the flat buckets of one checkpoint to parameters."""

    def __init__(
        self, folder: MegatronFolder, model: ModelConfig, params: Mapping[str, ChunkedTensor]
    ) -> None:
        self.folder = folder
        self.params = params
        self.args = read_args(folder)
        self.layout = read_layout(self.args)
        self.gated = model.gated
        self.shapes = {name: self._stored_shape(name) for name in params}
        self.split_dims = {name: self._find_split(name) for name in params}
        self.stored = _group_buckets(folder)
        self.chunks: dict[str, list[TensorChunk]] = {}
        self.owners: dict[str, tuple[int, int]] = {}
        self.states: list[object] = []

    def run(self) -> dict[str, ChunkedTensor]:
        """Return the tensors of all buckets by role and name."""
        layout = self.layout
        for pp_rank in range(layout.pp):
            members = [self._chunk_params(pp_rank, c) for c in range(len(layout.stages[pp_rank]))]
            for optimizer in self._optimizers():
                buffers = self._buffers(members, optimizer)
                num_params = sum(param.numel for _, _, params in members for param in params)
                if optimizer.is_expert:
                    for ep_rank in range(layout.ep):
                        for rank in range(layout.etp):
                            group = rank + layout.etp * (ep_rank + layout.ep * pp_rank)
                            ranks = _PartRanks(pp_rank, rank, ep_rank, num_params)
                            self._read_group(optimizer, group, buffers, ranks)
                else:
                    for rank in range(layout.tp):
                        ranks = _PartRanks(pp_rank, rank, 0, num_params)
                        self._read_group(optimizer, pp_rank * layout.tp + rank, buffers, ranks)
        if self.stored:
            raise CheckpointError(
                f"{self.folder.path}: {next(iter(self.stored))} belongs to no part of a run with "
                f"tp={layout.tp}, pp={layout.pp}, ep={layout.ep}, which its args state, so files "
                f"of several runs are mixed. {LOAD_MODES}"
            )
        return {key: self._tensor(key, chunks) for key, chunks in self.chunks.items()}

    def _tensor(self, key: str, chunks: Sequence[TensorChunk]) -> ChunkedTensor:
        name = key.partition(".")[2]
        tensor = ChunkedTensor(f"optimizer.{key}", self.shapes[name], torch.float32, chunks)
        rows = self.params[name].shape[0]
        return tensor if self.shapes[name][0] == rows else crop_rows(tensor, rows)

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the global shape with the padding rows of the vocabulary."""
        shape = self.params[name].shape
        if name not in (EMBEDDING, OUTPUT_LAYER):
            return shape
        stored = self.folder.tensors.get(name)
        if stored is not None and len(stored.shape) == len(shape):
            return (stored.shape[0], *shape[1:])
        padded = self.args.get("padded_vocab_size")
        return shape if padded is None else (_read_vocab(padded), *shape[1:])

    def _find_split(self, name: str) -> int | None:
        """Return the dim that is split over tp ranks, from the chunks of the weight."""
        shape = self.shapes[name]
        is_expert = EXPERTS in name
        parts = self.layout.etp if is_expert else self.layout.tp
        if name in (EMBEDDING, OUTPUT_LAYER):
            dim, sizes = 0, (shape[0] // parts,)
        else:
            dim = int(is_expert)
            boxes = [lengths(chunk.box) for chunk in self.params[name].chunks]
            sizes = tuple(min(column) for column in zip(*boxes, strict=True))[dim:]
        for index, size in enumerate(sizes, dim):
            total = shape[index]
            local = size * 2 if index == dim and self._has_halves(name) else size
            if local == total:
                continue
            if local * parts == total:
                return index
            raise CheckpointError(
                f"{self.folder.path}: {name} {list(shape)} is stored in parts of {list(sizes)}, "
                f"which are not those of tp={parts}, as the args of the checkpoint state. "
                f"{LOAD_MODES}"
            )
        return None

    def _has_halves(self, name: str) -> bool:
        """Return whether a tensor has a gate and an up half, whose parts are stored apart."""
        return self.gated and name.endswith((".linear_fc1.weight", ".linear_fc1.bias"))

    def _optimizers(self) -> list[_Optimizer]:
        layout = self.layout
        chunks = range(len(layout.stages[0]))
        kinds = [(chunks, False)]
        if read_flag(self.args, "overlap_param_gather_with_optimizer_step"):
            kinds = [(chunks[:1], False), (chunks[1:], False)]
        if layout.ep > 1 and any(EXPERTS in name for name in self.params):
            kinds.append((chunks, True))
        chained = len(kinds) > 1
        return [
            _Optimizer(f"chained_{number}." if chained else "", *kind)
            for number, kind in enumerate(kinds)
        ]

    def _chunk_params(self, pp_rank: int, chunk: int) -> _Buffer:
        """Return the parameters of a model chunk in registration order."""
        names = self._chunk_names(pp_rank, chunk)
        ordered: list[tuple[tuple[int, ...], FlatParam]] = []
        for position, name in names:
            self.owners.setdefault(name, (pp_rank, chunk))
            shape = self.shapes[name]
            is_expert = EXPERTS in name
            parts = self.layout.etp if is_expert else self.layout.tp
            numel = prod(shape) // (parts if self.split_dims[name] is not None else 1)
            if not is_expert:
                key = compute_registration_key(position, self.layout)
                shared = name == EMBEDDING and self._is_shared(pp_rank, chunk)
                ordered.append((key, FlatParam(name, numel, own_bucket=shared)))
                continue
            num_local = shape[0] // self.layout.ep
            for expert in range(num_local):
                key = compute_registration_key(position, self.layout, expert=expert)
                ordered.append((key, FlatParam(name, numel // shape[0], expert=expert)))
        ordered.sort(key=lambda item: item[0])
        return _Buffer(chunk, torch.float32, [param for _, param in ordered])

    def _is_shared(self, pp_rank: int, chunk: int) -> bool:
        """Return whether ranks of several stages hold the word embedding of this chunk."""
        contents = self.layout.stages[pp_rank][chunk]
        if self.layout.pp == 1 or not (self.layout.tied or self.layout.has_mtp):
            return False
        if contents.embedding:
            return not contents.loss
        return contents.mtp or (contents.loss and self.layout.tied)

    def _chunk_names(self, pp_rank: int, chunk: int) -> list[tuple[str, str]]:
        """Return (name of the position, name) of the parameters of a model chunk: the output layer
        of the last stage of a tied model is at its own position but is the embedding."""
        layout = self.layout
        contents = layout.stages[pp_rank][chunk]
        last_layer = max((r.layers.stop for rank in layout.stages for r in rank), default=0)
        names = []
        for name in self.params:
            parts = find_layer(name)
            if parts is not None:
                held = contents.mtp if parts[0] == "mtp" else parts[1] in contents.layers
            elif name.startswith("embedding."):
                held = contents.embedding or contents.mtp
            elif name.startswith("decoder.final_layernorm."):
                ends = contents.layers.stop == last_layer and len(contents.layers) > 0
                held = ends if layout.has_mtp else contents.loss
            else:
                held = contents.loss
            if held:
                names.append((name, name))
        is_copy = layout.tied and contents.loss and not contents.embedding and not contents.mtp
        if is_copy and EMBEDDING in self.params:
            names.append((OUTPUT_LAYER, EMBEDDING))
        return names

    def _buffers(self, members: Sequence[_Buffer], optimizer: _Optimizer) -> list[_Buffer]:
        """Return the buffers of an optimizer: by chunk, then by dtype in order of registration."""
        buffers = []
        for chunk in optimizer.chunks:
            by_dtype: dict[torch.dtype, list[FlatParam]] = {}
            for param in members[chunk].params:
                in_expert_buffer = param.expert is not None and self.layout.ep > 1
                if in_expert_buffer == optimizer.is_expert:
                    by_dtype.setdefault(self.params[param.name].dtype, []).append(param)
            buffers += [_Buffer(chunk, dtype, params) for dtype, params in by_dtype.items()]
        return buffers

    def _read_group(
        self, optimizer: _Optimizer, group: int, buffers: Sequence[_Buffer], ranks: "_PartRanks"
    ) -> None:
        """Add the tensors of one group of dp ranks."""
        prefix = f"{optimizer.prefix}optimizer.distributed.dp_group_idx_{group}"
        stored = self.stored.pop(prefix, {})
        if sorted(stored) != list(range(len(buffers))):
            raise CheckpointError(
                f"{self.folder.path}: {prefix} has the buffers {sorted(stored)}, but the args of "
                f"the checkpoint give {len(buffers)} buffers to pp rank {ranks.pp_rank}, tp rank "
                f"{ranks.tp_rank}. {LOAD_MODES}"
            )
        if not buffers:
            return
        padded = self._read_sizes(f"{prefix}.per_bucket_numel", len(buffers))
        unpadded = self._read_sizes(f"{prefix}.per_bucket_numel_unpadded", len(buffers))
        for key in ("optimizer", "grad_scaler"):
            if load := self.folder.objects.get(f"{prefix}.{key}/shard_0_1"):
                state = require_plain(load(), what=key, source=str(self.folder.path))
                self.states.append({key: state} if key == "grad_scaler" else state)
        dp = self.layout.expert_dp if optimizer.is_expert else self.layout.dp
        high_bandwidth = read_flag(self.args, "ddp_pad_buckets_for_high_nccl_busbw")
        for number, buffer in enumerate(buffers):
            what = f"{self.folder.path}: {prefix}.gbuf_idx_{number}"
            candidates = [
                build_flat_buckets(
                    buffer.params, bucket_size=size, dp=dp, high_bandwidth=high_bandwidth
                )
                for size in list_bucket_sizes(
                    self.args,
                    self.layout,
                    pp_rank=ranks.pp_rank,
                    chunk=buffer.chunk,
                    num_params=ranks.num_params,
                )
            ]
            buckets = match_buckets(
                candidates, numel=padded[number], numel_unpadded=unpadded[number], what=what
            )
            self._read_buffer(what, buckets, stored[number], buffer, ranks)

    def _read_buffer(
        self,
        what: str,
        buckets: Sequence[FlatBucket],
        stored: Mapping[int, _StoredBucket],
        buffer: _Buffer,
        ranks: "_PartRanks",
    ) -> None:
        for index, bucket in enumerate(buckets):
            stored_bucket = stored.get(index)
            roles = {} if stored_bucket is None else stored_bucket.roles
            sizes = {role: roles[role].shape for role in ROLES if role in roles}
            if sizes != dict.fromkeys(ROLES, (bucket.numel_unpadded,)):
                raise CheckpointError(
                    f"{what}.bucket_idx_{index}: shapes {sizes} of the stored tensors; "
                    f"{', '.join(ROLES)} of {bucket.numel_unpadded} elements are needed. Copy the "
                    f"checkpoint again, with all of its files. {LOAD_MODES}"
                )
            if stored_bucket is not None and stored_bucket.dtype != str(buffer.dtype):
                raise CheckpointError(
                    f"{what}.bucket_idx_{index} holds parameters of {stored_bucket.dtype}, but the "
                    f"weights of {bucket.slots[0].param.name} are {buffer.dtype}. {LOAD_MODES}"
                )
            for slot in bucket.slots:
                if self.owners[slot.param.name] == (ranks.pp_rank, buffer.chunk):
                    self._add_slot(slot, roles, ranks)

    def _add_slot(
        self, slot: FlatSlot, roles: Mapping[str, ChunkedTensor], ranks: "_PartRanks"
    ) -> None:
        name = slot.param.name
        dim = self.split_dims[name]
        is_expert = slot.param.expert is not None
        if dim is None and ranks.tp_rank > 0:
            return  # replicas: the first is used
        shape = self.shapes[name][1:] if is_expert else self.shapes[name]
        slices = slice_local_tensor(
            shape,
            dim=None if dim is None else dim - is_expert,
            parts=self.layout.etp if is_expert else self.layout.tp,
            rank=ranks.tp_rank,
            gated=self._has_halves(name),
        )
        for piece in slices:
            box: Box = piece.box
            if slot.param.expert is not None:
                num_local = self.shapes[name][0] // self.layout.ep
                expert = ranks.ep_rank * num_local + slot.param.expert
                box = ((expert, expert + 1), *box)
            start = slot.start + piece.start
            for part in divide(box, CHUNK_NUMEL):
                span = (start, start + numel(part))
                start = span[1]
                for role, key in ROLES.items():
                    chunk = TensorChunk(part, _read_span(roles[role], span, lengths(part)))
                    self.chunks.setdefault(f"{key}.{name}", []).append(chunk)

    def _read_sizes(self, key: str, num_buffers: int) -> list[list[int]]:
        """Return the bucket sizes of each buffer, from a pickled object."""
        load = self.folder.objects.get(f"{key}/shard_0_1")
        value = None if load is None else load()
        while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
            value = value[0]
        sizes: list[list[int]] = []
        for entry in value if isinstance(value, list) else ():
            lists = list(entry.values()) if isinstance(entry, Mapping) else []
            if len(lists) == 1 and isinstance(lists[0], list):
                sizes.append([size for size in lists[0] if type(size) is int])
        if len(sizes) != num_buffers:
            raise CheckpointError(
                f"{self.folder.path}: {key} is missing or does not list the buckets of "
                f"{num_buffers} buffers. Copy the checkpoint again, with all of its files. "
                f"{LOAD_MODES}"
            )
        return sizes


class _PartRanks(NamedTuple):
    """Ranks of one part of the model, and the elements of its pipeline rank's parameters."""

    pp_rank: int
    tp_rank: int
    ep_rank: int
    num_params: int


def _read_buckets(
    folder: MegatronFolder, model: ModelConfig, params: Mapping[str, ChunkedTensor]
) -> tuple[dict[str, ChunkedTensor], list[object]]:
    reader = _BucketReader(folder, model, params)
    return reader.run(), reader.states


def _read_vocab(value: object) -> int:
    return read_count({"padded_vocab_size": value}, "padded_vocab_size", maximum=1 << 31)


def _read_span(
    bucket: ChunkedTensor, span: tuple[int, int], shape: tuple[int, ...]
) -> Callable[[], Tensor]:
    return lambda: bucket.read((span,)).reshape(shape)


def _group_buckets(folder: MegatronFolder) -> dict[str, dict[int, dict[int, _StoredBucket]]]:
    """Return the flat tensors by prefix of the dp group, number of the buffer, number of the
    bucket."""
    stored: dict[str, dict[int, dict[int, _StoredBucket]]] = {}
    for name, tensor in folder.tensors.items():
        if match := _BUCKET.fullmatch(name):
            buckets = stored.setdefault(match["prefix"], {}).setdefault(int(match["gbuf"]), {})
            bucket = buckets.setdefault(int(match["bucket"]), _StoredBucket(match["dtype"], {}))
            bucket.roles[match["role"]] = tensor
    return stored


# --- verification


def verify_buckets(
    state: OptimizerState,
    weights: Mapping[str, ChunkedTensor],
    *,
    rank: int = 0,
    world_size: int = 1,
) -> None:
    """Compare the master weights, rounded to the stored dtype, with the weights, element for
    element; each rank compares its share of the parameters.

    Does nothing if the state has names of its own.

    Raises:
        CheckpointError: they differ, so the state belongs to other parameters; the first one that
            differs is named.
    """
    if not state.needs_verification:
        return
    for name in _select_for_rank(state, weights, rank=rank, world_size=world_size):
        master = state.tensors[f"master.{name}"]
        weight = weights[name]
        if master is weight:
            continue
        for part in master.chunks:
            for box in divide(part.box, CHUNK_NUMEL):
                stored = weight.read(box)
                rounded = master.read(box).to(weight.dtype)
                differs = (rounded != stored) & ~(rounded.isnan() & stored.isnan())
                if differs.any():
                    text = _describe_difference(name, box, differs, rounded, stored)
                    raise CheckpointError(f"{text} {_explain_difference(state)} {LOAD_MODES}")


def _explain_difference(state: OptimizerState) -> str:
    if state.sharding_type == "fully_reshardable" and state.format != "torch":
        return (
            "Megatron-core 0.16 stores shifted optimizer states in fully_reshardable if a buffer "
            "has several buckets (tied embeddings with pipeline parallelism, "
            "--overlap-grad-reduce), so the moments are wrong, too."
        )
    return (
        "So the order of parameters in the optimizer state is not the one that the args of the "
        "checkpoint give, and its moments cannot be assigned."
    )


def _select_for_rank(
    state: OptimizerState,
    weights: Mapping[str, ChunkedTensor],
    *,
    rank: int,
    world_size: int,
) -> list[str]:
    """Return the parameters that a rank compares, in the order of the weights: the largest are
    assigned first, each to the rank with the fewest elements."""
    names = [name for name in weights if f"master.{name}" in state.tensors]
    loads = [0] * world_size
    chosen = set()
    for name in sorted(names, key=lambda n: -prod(state.tensors[f"master.{n}"].shape)):
        target = loads.index(min(loads))
        loads[target] += prod(state.tensors[f"master.{name}"].shape)
        if target == rank:
            chosen.add(name)
    return [name for name in names if name in chosen]


def _describe_difference(
    name: str, box: Box, differs: Tensor, rounded: Tensor, stored: Tensor
) -> str:
    position = tuple(differs.nonzero()[0].tolist())
    index = [start + offset for (start, _), offset in zip(box, position, strict=True)]
    return (
        f"the master weights of {name} do not round to its weights in {int(differs.sum())} of "
        f"{differs.numel()} elements of {show_box(box)}; at {index}, {rounded[position].item()} "
        f"instead of {stored[position].item()}."
    )
