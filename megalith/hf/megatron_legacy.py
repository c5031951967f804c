"""Reader of Megatron-LM's legacy checkpoint format (`--ckpt-format torch`): one file per tensor-,
pipeline- and expert-parallel rank, read as one checkpoint of global tensors.

A part is the folder of one such rank (`mp_rank_TT_PPP_EEE`).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.checkpoint.chunks import ChunkedTensor, MegatronFolder, TensorChunk
from megalith.checkpoint.format import describe_tiling_problem, lengths
from megalith.checkpoint.safe_pickle import ArchiveTensor, Record, read_archive
from megalith.errors import CheckpointError
from megalith.hf.megatron_optimizer import LOAD_MODES, NO_PARAMETERS, show_value
from megalith.plan.megatron_buckets import (
    FlatParam,
    build_flat_buckets,
    coalesce_buckets,
    list_bucket_sizes,
)
from megalith.plan.megatron_layout import (
    MegatronLayout,
    StageContents,
    find_split_dim,
    read_count,
    read_flag,
    read_layout,
    slice_local_tensor,
)
from megalith.plan.shards import Box

WEIGHTS_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"

MAX_NAMED = 5
"""Number of names in an error message; more are not read."""

MAX_DIM = 1 << 24
"""Maximum size of a dim; a larger one in the args is rejected. Heuristic: no model has it."""

_PART = re.compile(r"mp_rank_(\d{2,5})(?:_(\d{3,5}))?(?:_(\d{3,5}))?")
_LAYER = re.compile(r"(.*\blayers\.)(\d{1,9})(\..*)")
_LOCAL_EXPERT = re.compile(r"(.*\blocal_experts\.)(\d{1,9})(\..*)")
_GROUPED_EXPERT = re.compile(r"(.*\bmlp\.experts\.linear_fc[12]\.(?:weight|bias))(\d{1,9})()")
_REMOVED_GROUPED = re.compile(r".*\bmlp\.experts\.weight[12]")
_IGNORED = re.compile(r".*(_extra_state|\.inv_freq|\.ga_steps|_tokens_per_expert)")
_OUTPUT = re.compile(r"(language_model\.)?output_layer\.weight|word_embeddings_for_head\.weight")
_EMBEDDING = re.compile(r"(language_model\.)?embedding\.word_embeddings\.weight")
_GATED = re.compile(r".*\b(linear_fc1|dense_h_to_4h)\.(weight|bias)\d*")


class _Rank(NamedTuple):
    """Position of one part: ranks along tp, pp and ep."""

    tp: int
    pp: int
    ep: int


@dataclass(frozen=True, slots=True, eq=False)
class _LocalTensor:
    """A tensor of one part, under its global name."""

    name: str
    value: ArchiveTensor
    shape: tuple[int, ...]
    """Global shape."""

    split_dim: int | None
    is_expert: bool
    is_copy: bool
    """True for the copy of a tied embedding on the last stage."""


@dataclass(slots=True, eq=False)
class _Collector:
    """Chunks of global tensors by name, of which the first of equal boxes is used."""

    chunks: dict[str, dict[Box, TensorChunk]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        tensor: _LocalTensor,
        rank: _Rank,
        layout: MegatronLayout,
        read: Callable[[], Tensor],
        dtype: torch.dtype,
        *,
        gated: bool,
    ) -> None:
        """Add a part of the global tensor `name`: `read` returns the local elements, flat."""
        self.shapes.setdefault(name, (tensor.shape, dtype))
        if self.shapes[name][0] != tensor.shape:
            raise CheckpointError(
                f"{name} has the shape {list(self.shapes[name][0])} in one part of the checkpoint "
                f"and {list(tensor.shape)} in another, so files of several runs are mixed. Copy "
                "one checkpoint completely."
            )
        slices = slice_local_tensor(
            tensor.shape,
            dim=tensor.split_dim,
            parts=layout.tp,
            rank=rank.tp,
            gated=gated and _GATED.fullmatch(tensor.name) is not None,
        )
        boxes = self.chunks.setdefault(name, {})
        for piece in slices:
            reader = _read_slice(read, piece.start, piece.stop, lengths(piece.box))
            boxes.setdefault(piece.box, TensorChunk(piece.box, reader))

    def tensors(self, path: Path) -> dict[str, ChunkedTensor]:
        """Return the global tensors.

        Raises:
            CheckpointError: the parts do not cover one of them.
        """
        for name, boxes in self.chunks.items():
            if problem := describe_tiling_problem(self.shapes[name][0], list(boxes)):
                raise CheckpointError(
                    f"{path}: the parts of {name} do not cover it ({problem}), so a part lacks it. "
                    "Copy the checkpoint again, with all of its files."
                )
        return {
            name: ChunkedTensor(name, *self.shapes[name], list(boxes.values()))
            for name, boxes in self.chunks.items()
        }


def _read_slice(
    read: Callable[[], Tensor], start: int, stop: int, shape: tuple[int, ...]
) -> Callable[[], Tensor]:
    return lambda: read()[start:stop].reshape(shape)


def read_legacy_folder(path: Path) -> MegatronFolder:
    """Return the global tensors of an `iter_NNNNNNN` folder in the legacy format, by the names in
    the files with global layer and expert numbers; optimizer states as `optimizer.state.ROLE.NAME`.

    Raises:
        CheckpointError: parts are missing, damaged or of another run, or the format is not
            supported.
    """
    parts = _list_parts(path)
    first = next(iter(parts.values()))
    content = _read_part(first)
    args = _read_args(content, first)
    version = _read_version(content, args, first)
    layout = read_layout(args)
    _check_support(args, layout, path)
    ranks = _match_parts(path, parts, layout)

    shapes = ExpectedShapes(args)
    weights, state = _Collector(), _OptimizerCollector()
    for rank, folder in ranks.items():
        part = content if folder == first else _read_part(folder)
        reader = _PartReader(folder, part, rank, layout, args, shapes, weights)
        reader.read_weights()
        state.add(reader)
    optimizer_tensors, optimizer = state.finish(path)
    common = {
        key: value
        for key, value in content.items()
        if isinstance(key, str) and not key.startswith("model") and key != "optimizer"
    }
    kind = {"distrib_optim_sharding_type": "fully_reshardable"} if state.has_master_params else {}
    common |= {"args": args, "checkpoint_version": version, "optimizer": optimizer}
    common |= {"content_metadata": kind}
    tensors = weights.tensors(path) | optimizer_tensors
    return MegatronFolder(path, "torch", tensors, common, optimizer_problem=state.problem)


@dataclass(slots=True, eq=False)
class _OptimizerCollector:
    """Optimizer state of all parts, or the first reason why it cannot be read."""

    collector: _Collector = field(default_factory=_Collector)
    steps: set[float] = field(default_factory=set)
    scalers: list[object] = field(default_factory=list)
    has_master_params: bool = False
    problem: str | None = None

    def add(self, reader: "_PartReader") -> None:
        """Add the optimizer state of one part."""
        if self.problem is not None:
            return
        try:
            reader.read_optimizer(self.collector)
        except CheckpointError as error:
            self.problem = _add_load_modes(str(error))
            return
        self.steps |= reader.steps
        self.scalers += reader.scalers
        self.has_master_params = self.has_master_params or reader.has_master_params

    def finish(self, path: Path) -> tuple[dict[str, ChunkedTensor], dict[str, object]]:
        """Return the tensors of all parts, and the non-tensor state."""
        if len(self.steps) > 1 and self.problem is None:
            shown = ", ".join(str(step) for step in sorted(self.steps)[:MAX_NAMED])
            self.problem = (
                f"{path}: its parts have optimizer states of different steps ({shown}), so files "
                f"of several saves are mixed. Copy one checkpoint completely. {LOAD_MODES}"
            )
        tensors: dict[str, ChunkedTensor] = {}
        try:
            tensors = {} if self.problem is not None else self.collector.tensors(path)
        except CheckpointError as error:
            self.problem = _add_load_modes(str(error))
        group = {"step": next(iter(self.steps))} if self.steps else {}
        optimizer: dict[str, object] = {"optimizer": {"param_groups": [group]}}
        if self.scalers:
            optimizer["grad_scaler"] = self.scalers[0]
        return tensors, optimizer


def _add_load_modes(text: str) -> str:
    """Return a problem of the optimizer state with the load modes that work without it."""
    return text if LOAD_MODES in text else f"{text.rstrip('.')}. {LOAD_MODES}"


# --- parts


def _list_parts(path: Path) -> dict[str, Path]:
    """Return the `mp_rank_…` folders by name."""
    names = sorted(entry.name for entry in path.glob("mp_rank_*") if entry.is_dir())
    for name in names:
        if not _PART.fullmatch(name):
            raise CheckpointError(
                f"{path / name}: the name is not that of a part of a legacy checkpoint. Use "
                "mp_rank_TT, mp_rank_TT_PPP, mp_rank_TT_EEE or mp_rank_TT_PPP_EEE, such as "
                "mp_rank_00_001."
            )
    if not names:
        raise CheckpointError(
            f"{path}: no mp_rank_… folder. Use a folder that Megatron-LM wrote with --ckpt-format "
            "torch, such as iter_0000100."
        )
    return {name: path / name for name in names}


def _part_names(layout: MegatronLayout) -> Iterator[tuple[_Rank, str]]:
    """Yield the ranks of each part and the name of its folder."""
    for pp, tp, ep in product(range(layout.pp), range(layout.tp), range(layout.ep)):
        name = f"mp_rank_{tp:02d}"
        name += f"_{pp:03d}" if layout.pp > 1 else ""
        name += f"_{ep:03d}" if layout.ep > 1 else ""
        yield _Rank(tp, pp, ep), name


def _match_parts(
    path: Path, parts: Mapping[str, Path], layout: MegatronLayout
) -> dict[_Rank, Path]:
    """Return the folder of each part, after checking that the folders are those that the args
    give."""
    sizes = f"tp={layout.tp}, pp={layout.pp}, ep={layout.ep}"
    missing = list(
        islice((name for _, name in _part_names(layout) if name not in parts), MAX_NAMED)
    )
    if missing:
        raise CheckpointError(
            f"{path}: the args of the checkpoint state {sizes}, but these parts are missing: "
            f"{', '.join(missing)}. Copy the checkpoint again, with all of its folders."
        )
    ranks = {rank: parts[name] for rank, name in _part_names(layout)}
    used = {folder.name for folder in ranks.values()}
    if extra := [name for name in parts if name not in used]:
        raise CheckpointError(
            f"{path}: the args of the checkpoint state {sizes}, to which {extra[0]} does not "
            "belong, so the folder has files of several runs. Remove those of the other run."
        )
    return ranks


def _read_part(folder: Path) -> Mapping[Any, object]:
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing. Copy the checkpoint again, with all of its files."
        )
    content = read_archive(file)
    if not isinstance(content, Mapping):
        raise CheckpointError(
            f"{file} holds a {type(content).__name__}, not the dict of a Megatron checkpoint. Copy "
            "it again."
        )
    return content


def _read_args(content: Mapping[Any, object], folder: Path) -> Mapping[str, object]:
    args = content.get("args")
    if isinstance(args, Record):
        return args.state
    if isinstance(args, Mapping):
        return args
    raise CheckpointError(
        f"{folder / WEIGHTS_FILE} has no args, so the layout of its parts is unknown. Use a "
        "checkpoint that Megatron-LM's training loop wrote."
    )


def _read_version(content: Mapping[Any, object], args: Mapping[str, object], folder: Path) -> float:
    version = content.get("checkpoint_version", 0)
    if isinstance(version, bool) or not isinstance(version, int | float) or not 0 <= version < 4:
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: checkpoint_version={show_value(version)} is not a number "
            "from 0 to 3. Use a checkpoint that Megatron-LM wrote."
        )
    groups = args.get("num_query_groups")
    if version < 2 and read_flag(args, "group_query_attention"):
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: checkpoint_version={version} is older than grouped-query "
            f"attention, but the args state num_query_groups={show_value(groups)}. Use the "
            "checkpoint_version of the run, such as 3.0."
        )
    return float(version)


def _check_support(args: Mapping[str, object], layout: MegatronLayout, path: Path) -> None:
    has_experts = args.get("num_experts") is not None
    if has_experts and read_count(args, "num_experts") % layout.ep:
        raise CheckpointError(
            f"{path}: args.num_experts={args['num_experts']} is not a multiple of "
            f"expert_model_parallel_size={layout.ep}. Use a divisor of it."
        )
    if has_experts and layout.etp != layout.tp:
        raise CheckpointError(
            f"{path}: a legacy checkpoint with expert_tensor_parallel_size={layout.etp} and "
            f"tensor_model_parallel_size={layout.tp} is not read. Save it with Megatron-LM and "
            "--ckpt-format torch_dist."
        )


# --- shapes


class ExpectedShapes:
    """Global shapes of tensors, from the args of a checkpoint."""

    def __init__(self, args: Mapping[str, object]) -> None:
        """Raises CheckpointError if a size is not a number."""
        size = partial(read_count, args, maximum=MAX_DIM)
        hidden = size("hidden_size")
        heads = size("num_attention_heads")
        head_dim = size("kv_channels", default=max(hidden // heads, 1))
        groups = heads
        if read_flag(args, "group_query_attention"):
            groups = size("num_query_groups", default=heads)
        ffn = size("ffn_hidden_size", default=4 * hidden)
        halves = 2 if read_flag(args, "swiglu") else 1
        mla = read_flag(args, "multi_latent_attention")
        nope = size("qk_head_dim", default=128) if mla else 0
        rope = size("qk_pos_emb_head_dim", default=64) if mla else 0
        value = size("v_head_dim", default=128) if mla else head_dim
        q_rank = size("q_lora_rank", default=hidden)
        kv_rank = size("kv_lora_rank", default=32)
        experts = read_count(args, "num_experts", default=1)
        expert_ffn = size("moe_ffn_hidden_size", default=ffn)
        shared_ffn = size("moe_shared_expert_intermediate_size", default=ffn)
        gate = 2 if read_flag(args, "attention_output_gate") else 1
        vocab = read_count(args, "padded_vocab_size", maximum=1 << 31)
        positions = read_count(args, "max_position_embeddings", default=1, maximum=1 << 31)
        up, down = "(linear_fc1|dense_h_to_4h)", "(linear_fc2|dense_4h_to_h)"
        rows = (
            (r"(word_embeddings|word_embeddings_for_head|output_layer)", (vocab, hidden)),
            (r"position_embeddings", (positions, hidden)),
            (r"(linear_qkv|query_key_value)", ((gate * heads + 2 * groups) * head_dim, hidden)),
            (r"(self_)?attention\.(linear_proj|dense)", (hidden, heads * value)),
            (r"linear_q_proj", (heads * (nope + rope), hidden)),
            (r"linear_q_down_proj", (q_rank, hidden)),
            (r"linear_q_up_proj", (heads * (nope + rope), q_rank)),
            (r"linear_kv_down_proj", (kv_rank + rope, hidden)),
            (r"linear_kv_up_proj", (heads * (nope + value), kv_rank)),
            (rf"(experts|local_experts\.\d+)\.{up}", (halves * expert_ffn, hidden)),
            (rf"(experts|local_experts\.\d+)\.{down}", (hidden, expert_ffn)),
            (rf"shared_experts\.{up}", (halves * shared_ffn, hidden)),
            (rf"shared_experts\.{down}", (hidden, shared_ffn)),
            (rf"mlp\.{up}", (halves * ffn, hidden)),
            (rf"mlp\.{down}", (hidden, ffn)),
            (r"router", (experts, hidden)),
            (r"eh_proj", (hidden, 2 * hidden)),
        )
        self._matrices = [(re.compile(rf"(.*\.)?{module}"), shape) for module, shape in rows]
        latent = {"q": q_rank, "kv": kv_rank} if mla else {"q": head_dim, "k": head_dim}
        vectors = (
            (r"linear_q_up_proj\.layer_norm_(weight|bias)", q_rank),
            (r"linear_kv_up_proj\.layer_norm_(weight|bias)", kv_rank),
            *((rf"{kind}_layernorm\.(weight|bias)", length) for kind, length in latent.items()),
            (r"layer_norm_(weight|bias)", hidden),
            (r"\w*(norm|layernorm)\.(weight|bias)", hidden),
            (r"core_attention\.softmax_offset", heads),
            (r"router\.expert_bias", experts),
        )
        self._vectors: list[tuple[re.Pattern[str], tuple[int, ...]]] = [
            (re.compile(rf"(.*\.)?{name}"), (length,)) for name, length in vectors
        ]
        self._gate = (1, hidden)

    def find(self, name: str) -> tuple[int, ...] | None:
        """Return the global shape of a tensor; None if the args do not determine it."""
        for pattern, shape in self._vectors:
            if pattern.fullmatch(name):
                return shape
        if name.endswith("shared_experts.gate_weight"):
            return self._gate
        module, _, leaf = name.rpartition(".")
        kind = leaf.rstrip("0123456789")
        for pattern, shape in self._matrices:
            if pattern.fullmatch(module) and kind in ("weight", "bias"):
                return shape if kind == "weight" else shape[:1]
        return None


# --- one part


def _flatten(value: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the values of nested dicts by dotted name, in order."""
    if isinstance(value, Mapping) and depth < 16:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    else:
        yield prefix, value


class _PartReader:
    """Adds the tensors of one part to the global tensors."""

    def __init__(
        self,
        folder: Path,
        content: Mapping[Any, object],
        rank: _Rank,
        layout: MegatronLayout,
        args: Mapping[str, object],
        shapes: ExpectedShapes,
        weights: _Collector,
    ) -> None:
        self.folder = folder
        self.content = content
        self.rank = rank
        self.layout = layout
        self.args = args
        self.shapes = shapes
        self.collector = weights
        """Where tensors are added."""
        self.gated = read_flag(args, "swiglu")
        self.params: list[list[_LocalTensor]] = []
        """Parameters of each model chunk in order of registration, which is that of the file."""
        self.steps: set[float] = set()
        self.scalers: list[object] = []
        self.has_master_params = False

    def fail(self, reason: str) -> CheckpointError:
        """Return an error about this part."""
        return CheckpointError(f"{self.folder}: {reason}")

    # weights

    def read_weights(self) -> None:
        """Add the weights of each model chunk."""
        chunks = self.layout.stages[self.rank.pp]
        keys = ["model"] if len(chunks) == 1 else [f"model{i}" for i in range(len(chunks))]
        for key, contents in zip(keys, chunks, strict=True):
            state = self.content.get(key)
            if not isinstance(state, Mapping):
                raise self.fail(
                    f"{WEIGHTS_FILE} has no {key!r}, which the args of the checkpoint give "
                    f"(virtual_pipeline_model_parallel_size={len(chunks)}). Copy it again."
                )
            tensors = list(self._local_tensors(state, contents))
            self.params.append([one for one in tensors if not NO_PARAMETERS.fullmatch(one.name)])
            for tensor in tensors:
                if not tensor.is_copy:
                    value = tensor.value
                    self._add(tensor.name, tensor, _read_flat(value), value.dtype)

    def _local_tensors(
        self, state: Mapping[Any, object], contents: StageContents
    ) -> Iterator[_LocalTensor]:
        for key, value in _flatten(state):
            if not isinstance(value, ArchiveTensor) or _IGNORED.fullmatch(key):
                continue
            if not value.shape:
                raise self.fail(
                    f"{key} is a scalar, but no weight of the model is one. Copy the file again."
                )
            if _REMOVED_GROUPED.fullmatch(key) and self.layout.tp * self.layout.ep > 1:
                raise self.fail(
                    f"{key}: weights of the removed grouped GEMM (--moe-use-legacy-grouped-gemm) "
                    "are read at tp=1 and ep=1 only. Save the checkpoint with --ckpt-format "
                    "torch_dist."
                )
            name, is_expert = self._rename(key, contents)
            shape = self.shapes.find(name)
            if shape is None and self.layout.tp == 1:
                shape = value.shape
            if shape is None:
                raise self.fail(f"{key}: the args of the checkpoint give no shape for this tensor.")
            dim = find_split_dim(value.shape, shape, parts=self.layout.tp)
            if isinstance(dim, str):
                raise self.fail(f"{key} has the shape {list(value.shape)}, but {dim}.")
            is_copy = self.layout.tied and _OUTPUT.fullmatch(name) is not None
            yield _LocalTensor(name, value, shape, dim, is_expert, is_copy)

    def _rename(self, key: str, contents: StageContents) -> tuple[str, bool]:
        """Return a name with global layer and expert numbers, and whether it is an expert's."""
        layer = _LAYER.fullmatch(key)
        if layer and not key.startswith("mtp."):
            number = int(layer[2])
            if number >= len(contents.layers):
                raise self.fail(
                    f"{key}: the args of the checkpoint give {len(contents.layers)} layers to this "
                    "part. Use the args of the run that wrote it."
                )
            key = f"{layer[1]}{contents.layers.start + number}{layer[3]}"
        expert = _LOCAL_EXPERT.fullmatch(key) or _GROUPED_EXPERT.fullmatch(key)
        if expert is None:
            return key, False
        num_local = read_count(self.args, "num_experts", default=1) // self.layout.ep
        if int(expert[2]) >= num_local:
            raise self.fail(
                f"{key}: the args of the checkpoint give {num_local} experts to this part. Use the "
                "args of the run that wrote it."
            )
        return f"{expert[1]}{self.rank.ep * num_local + int(expert[2])}{expert[3]}", True

    def _add(
        self, name: str, tensor: _LocalTensor, read: Callable[[], Tensor], dtype: torch.dtype
    ) -> None:
        self.collector.add(name, tensor, self.rank, self.layout, read, dtype, gated=self.gated)

    # optimizer state

    def read_optimizer(self, collector: _Collector) -> None:
        """Add the optimizer state of this part, if it has any; after `read_weights`."""
        self.collector = collector
        if other := next(self.folder.glob("layer_wise_optimizer_*.pt"), None):
            raise CheckpointError(
                f"{other}: files of a layer-wise optimizer are not read. Save the checkpoint with "
                f"Megatron-LM and --ckpt-format torch_dist. {LOAD_MODES}"
            )
        state = self.content.get("optimizer")
        for one in state if isinstance(state, list | tuple) else (state,):
            if isinstance(one, Mapping) and one.get("grad_scaler"):
                self.scalers.append(one["grad_scaler"])
        file = self.folder / OPTIMIZER_FILE
        if file.is_file():
            self._read_steps(state)
            self._read_flat_buffers(read_archive(file))
        elif state:
            self._read_replicated(state)

    def _read_steps(self, state: object) -> None:
        pending = [state]
        while pending:
            node = pending.pop()
            if isinstance(node, list | tuple):
                pending += node
            elif isinstance(node, Mapping) and "param_groups" not in node:
                pending += [node.get("optimizer")]
            elif isinstance(node, Mapping) and isinstance(node["param_groups"], list | tuple):
                self._add_steps(node["param_groups"])

    def _add_steps(self, entries: Sequence[object]) -> None:
        for entry in entries:
            step = entry.get("step") if isinstance(entry, Mapping) else None
            if isinstance(step, ArchiveTensor) and prod(step.shape) == 1:
                step = step.read().item()
            if isinstance(step, int | float):
                self.steps.add(float(step))
            elif step is not None:
                raise self.fail(f"the optimizer's step {show_value(step)} is not a number.")

    def _members(self, *, expert: bool) -> list[list[_LocalTensor]]:
        """Return the parameters of one of the chained optimizers, by model chunk."""
        separate = self.layout.ep > 1
        return [
            [one for one in chunk if (one.is_expert and separate) == expert]
            for chunk in self.params
        ]

    def _read_flat_buffers(self, content: object) -> None:
        """Add the states of a distributed optimizer (`distrib_optim.pt`)."""
        what = OPTIMIZER_FILE
        optimizers = content if isinstance(content, list | tuple) else [content]
        for number, buffers in enumerate(optimizers):
            if buffers is None:
                continue  # stored by another part
            if not isinstance(buffers, Mapping) or not buffers.get("buckets_coalesced"):
                raise self.fail(
                    f"{what} was written before February 2024 (without buckets_coalesced), which "
                    "is not read. Convert it with Megatron-LM and "
                    f"--ckpt-convert-update-legacy-dist-opt-format. {LOAD_MODES}"
                )
            members = self._members(expert=number > 0)
            num_params = sum(prod(one.value.shape) for chunk in self.params for one in chunk)
            index = 0
            for chunk, tensors in enumerate(members):
                by_dtype: dict[torch.dtype, list[_LocalTensor]] = {}
                for tensor in tensors:
                    by_dtype.setdefault(tensor.value.dtype, []).append(tensor)
                for dtype, own in by_dtype.items():
                    label = f"{what}[{number}][{index}]" if number else f"{what}[{index}]"
                    stored = buffers.get(index)
                    self._read_buffer(label, stored, own, dtype, chunk, num_params)
                    index += 1
            if extra := [key for key in buffers if isinstance(key, int) and key >= index]:
                raise self.fail(
                    f"{what} has {extra[0] + 1} buffers, but the weights and the args give {index}."
                    f" {LOAD_MODES}"
                )

    def _read_buffer(
        self,
        label: str,
        stored: object,
        tensors: Sequence[_LocalTensor],
        dtype: torch.dtype,
        chunk: int,
        num_params: int,
    ) -> None:
        by_dtype = list(stored.items()) if isinstance(stored, Mapping) else []
        key, flat = by_dtype[0] if len(by_dtype) == 1 else (None, None)
        if not isinstance(flat, Mapping) or not isinstance(key, tuple) or key[:1] != (dtype,):
            raise self.fail(
                f"{label} is missing, or is not of the dtype {dtype} of the weights. {LOAD_MODES}"
            )
        params = [
            FlatParam(str(i), prod(tensor.value.shape), own_bucket=self._is_shared(tensor, chunk))
            for i, tensor in enumerate(tensors)
        ]
        sizes = list_bucket_sizes(
            self.args, self.layout, pp_rank=self.rank.pp, chunk=chunk, num_params=num_params
        )
        layouts = [build_flat_buckets(params, bucket_size=size, dp=1) for size in sizes]
        totals = [sum(bucket.numel_unpadded for bucket in buckets) for buckets in layouts]
        numel = flat.get("numel_unpadded")
        roles = {role: flat.get(role) for role in ("param", "exp_avg", "exp_avg_sq")}
        shapes = {
            role: value.shape if isinstance(value, ArchiveTensor) else None
            for role, value in roles.items()
        }
        if numel not in totals or shapes != dict.fromkeys(roles, (numel,)):
            raise self.fail(
                f"{label} has {show_value(numel)} elements and the tensors {shapes}, but the "
                f"weights and the args give {totals[0]}. {LOAD_MODES}"
            )
        self.has_master_params = True
        for slot in coalesce_buckets(layouts[totals.index(numel)]):
            tensor = tensors[int(slot.param.name)]
            for role, value in roles.items():
                if isinstance(value, ArchiveTensor) and not tensor.is_copy:
                    read = _read_range(value, slot.start, slot.stop)
                    self._add(f"optimizer.state.{role}.{tensor.name}", tensor, read, value.dtype)

    def _is_shared(self, tensor: _LocalTensor, chunk: int) -> bool:
        """Return whether ranks of several stages hold this word embedding."""
        if self.layout.pp == 1:
            return False
        contents = self.layout.stages[self.rank.pp][chunk]
        if tensor.is_copy:
            return not contents.embedding
        is_embedding = _EMBEDDING.fullmatch(tensor.name) is not None
        return is_embedding and (self.layout.tied or self.layout.has_mtp) and not contents.loss

    def _read_replicated(self, state: object) -> None:
        """Add the states of an optimizer that is not distributed: by param group and position."""
        optimizers = state if isinstance(state, list | tuple) else [state]
        for number, optimizer in enumerate(optimizers):
            inner = optimizer.get("optimizer", optimizer) if isinstance(optimizer, Mapping) else {}
            groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
            states = inner.get("state") if isinstance(inner, Mapping) else None
            if not isinstance(groups, list) or not isinstance(states, Mapping):
                raise self.fail(f"the optimizer state has no param_groups and state. {LOAD_MODES}")
            master_weights = optimizer.get("fp32_from_fp16_params", optimizer.get("fp32_from_fp16"))
            self._add_steps(groups)
            self._add_steps([one for one in states.values() if isinstance(one, Mapping)])
            if not states:
                continue
            expert = number > 0
            members = [one for chunk in self._members(expert=expert) for one in chunk]
            for index, group in enumerate(groups):
                indices = group.get("params") if isinstance(group, Mapping) else None
                if not isinstance(indices, list):
                    raise self.fail(f"param group {index} of the optimizer lists no params.")
                own = (
                    master_weights[index]
                    if isinstance(master_weights, list) and index < len(master_weights)
                    else []
                )
                entries = [states.get(one) for one in indices if _is_index(one)]
                self._read_group(index, entries, own, members)

    def _read_group(
        self,
        index: int,
        entries: Sequence[object],
        master_weights: object,
        members: Sequence[_LocalTensor],
    ) -> None:
        """Assign the states of a param group to parameters: Megatron-LM puts vectors and biases,
        which have no weight decay, in groups of their own, in order of registration."""
        shapes = [_moment_shape(entry) for entry in entries]
        candidates = [
            [one for one in members if (len(one.value.shape) == 1) == is_vector]
            for is_vector in (False, True)
        ]
        candidates.append(list(members))
        matches = [c for c in candidates if [one.value.shape for one in c] == shapes]
        if not entries:
            return
        if not matches:
            raise self.fail(
                f"param group {index} of the optimizer has {len(entries)} parameters whose shapes "
                "are neither those of the matrices nor those of the vectors of this part. "
                f"{LOAD_MODES}"
            )
        halves = [one for one in matches[0] if one.value.dtype != torch.float32]
        stored = master_weights if isinstance(master_weights, list) else []
        if [getattr(m, "shape", None) for m in stored] != [one.value.shape for one in halves]:
            raise self.fail(
                f"param group {index} of the optimizer has {len(stored)} master weights that are "
                f"not those of its {len(halves)} 16-bit parameters. {LOAD_MODES}"
            )
        for tensor, master in zip(halves, stored, strict=True):
            self._add_state("fp32_param", tensor, master)
        for tensor, entry in zip(matches[0], entries, strict=True):
            if isinstance(entry, Mapping):
                self._add_state("exp_avg", tensor, entry.get("exp_avg"))
                self._add_state("exp_avg_sq", tensor, entry.get("exp_avg_sq"))

    def _add_state(self, role: str, tensor: _LocalTensor, value: object) -> None:
        if not isinstance(value, ArchiveTensor) or value.shape != tensor.value.shape:
            raise self.fail(
                f"the optimizer's {role} of {tensor.name} is {show_value(value)}, not a tensor of "
                f"shape {list(tensor.value.shape)}. {LOAD_MODES}"
            )
        if not tensor.is_copy:
            name = f"optimizer.state.{role}.{tensor.name}"
            self._add(name, tensor, _read_flat(value), value.dtype)


def _is_index(value: object) -> bool:
    return isinstance(value, int)


def _moment_shape(entry: object) -> tuple[int, ...] | None:
    moment = entry.get("exp_avg") if isinstance(entry, Mapping) else None
    return moment.shape if isinstance(moment, ArchiveTensor) else None


def _read_flat(tensor: ArchiveTensor) -> Callable[[], Tensor]:
    return lambda: tensor.read().reshape(-1)


def _read_range(tensor: ArchiveTensor, start: int, stop: int) -> Callable[[], Tensor]:
    return lambda: tensor.read()[start:stop]
