"""Parallel layout of a Megatron-LM run, from the `args` of its checkpoint: the layers of each
pipeline stage, and the registration order of parameters.

The values come from a file that another program wrote, so every number is checked before use.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from megalith.errors import CheckpointError, PlanError
from megalith.plan.stages import parse_layout

MAX_SIZE = 1 << 16
"""Limit of a parallel size or a number of layers: more than any run has; bounds the memory that a
damaged file can request."""

MAX_PARTS = 1 << 20
"""Limit of tp * pp * ep * vpp: bounds the loops over model-parallel ranks and model chunks."""


class StageContents(NamedTuple):
    """What one model chunk of a pipeline rank holds."""

    layers: range
    embedding: bool
    mtp: bool
    loss: bool


@dataclass(frozen=True, slots=True)
class MegatronLayout:
    """Parallel sizes of a Megatron-LM run, and the contents of its model chunks."""

    tp: int
    ep: int
    etp: int
    world_size: int
    stages: tuple[tuple[StageContents, ...], ...]
    """Model chunks of each pipeline rank."""

    optimizer_instances: int = 1
    """Number of replicas of the sharded optimizer state (`num_distributed_optimizer_instances`)."""

    tied: bool = True
    """True if the output layer is the word embedding."""

    local_spec: bool = False
    """True for `--transformer-impl local`, whose norms are modules of their own."""

    grouped_experts: bool = False
    """True if all experts of a rank are in one grouped linear layer (`--moe-grouped-gemm`)."""

    @property
    def pp(self) -> int:
        """Pipeline-parallel size."""
        return len(self.stages)

    @property
    def has_mtp(self) -> bool:
        """Whether a model chunk has MTP layers."""
        return any(chunk.mtp for rank in self.stages for chunk in rank)

    @property
    def dp(self) -> int:
        """Ranks that share the optimizer state of a dense parameter, context parallel included."""
        return self.world_size // (self.tp * self.pp * self.optimizer_instances)

    @property
    def expert_dp(self) -> int:
        """Ranks that share the optimizer state of an expert."""
        return self.world_size // (self.etp * self.ep * self.pp * self.optimizer_instances)


def read_count(
    args: Mapping[str, object],
    name: str,
    *,
    default: int | None = None,
    minimum: int = 1,
    maximum: int = MAX_SIZE,
) -> int:
    """Return a whole number of `args`; `default` replaces a missing or unset value.

    Raises:
        CheckpointError: the value is not a whole number from `minimum` to `maximum`.
    """
    value = args.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise CheckpointError(
            f"args.{name}={value!r} of the checkpoint is not a whole number from {minimum} to "
            f"{maximum}, so the parallel layout of its files is unknown. Use a checkpoint as "
            "Megatron-LM wrote it."
        )
    return value


def read_flag(args: Mapping[str, object], name: str, *, default: bool = False) -> bool:
    """Return a boolean of `args`; `default` replaces a missing value.

    Raises:
        CheckpointError: the value is neither True nor False.
    """
    value = args.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(
            f"args.{name}={value!r} of the checkpoint must be True or False. Use a "
            "checkpoint as Megatron-LM wrote it."
        )
    return value


def read_layout(args: Mapping[str, object]) -> MegatronLayout:
    """Return the layout of a run from the `args` of its checkpoint.

    Raises:
        CheckpointError: a size is not a number, or the sizes contradict each other.
    """
    tp = read_count(args, "tensor_model_parallel_size", default=1)
    pp = read_count(args, "pipeline_model_parallel_size", default=1)
    vpp = read_count(args, "virtual_pipeline_model_parallel_size", default=1)
    ep = read_count(args, "expert_model_parallel_size", default=1)
    etp = read_count(args, "expert_tensor_parallel_size", default=tp)
    instances = read_count(args, "num_distributed_optimizer_instances", default=1)
    if tp * pp * vpp * max(ep, 1) > MAX_PARTS:
        raise CheckpointError(
            f"args of the checkpoint: tensor_model_parallel_size={tp} * "
            f"pipeline_model_parallel_size={pp} * virtual_pipeline_model_parallel_size={vpp} * "
            f"expert_model_parallel_size={ep} are more than {MAX_PARTS} parts, which no run has. "
            "Load it with the args of the run that wrote it."
        )
    smallest = max(tp * pp, etp * ep * pp) * instances
    world_size = _read_world_size(args, tp=tp, pp=pp, smallest=smallest)
    for name, parts in (
        (f"tensor_model_parallel_size={tp}", tp * pp * instances),
        (f"expert_model_parallel_size={ep}", etp * ep * pp * instances),
    ):
        if world_size % parts:
            raise CheckpointError(
                f"args of the checkpoint: world_size={world_size} is not a multiple of the "
                f"{parts} ranks of one replica of the model ({name}, "
                f"pipeline_model_parallel_size={pp}). Use a multiple, such as {parts}."
            )
    return MegatronLayout(
        tp=tp,
        ep=ep,
        etp=etp,
        world_size=world_size,
        stages=assign_layers(args, pp=pp, vpp=vpp),
        optimizer_instances=instances,
        tied=not read_flag(args, "untie_embeddings_and_output_weights"),
        local_spec=args.get("transformer_impl") == "local",
        grouped_experts=read_flag(args, "moe_grouped_gemm"),
    )


def _read_world_size(args: Mapping[str, object], *, tp: int, pp: int, smallest: int) -> int:
    """Return the number of ranks of the run, also from files that state only the dp size."""
    if args.get("world_size") is not None:
        return read_count(args, "world_size", maximum=MAX_PARTS)
    if args.get("data_parallel_size") is None:
        return smallest
    cp = read_count(args, "context_parallel_size", default=1)
    return read_count(args, "data_parallel_size", maximum=MAX_PARTS) * tp * pp * cp


def assign_layers(
    args: Mapping[str, object], *, pp: int, vpp: int
) -> tuple[tuple[StageContents, ...], ...]:
    """Return the contents of each model chunk of each pipeline rank.

    Raises:
        CheckpointError: the layers cannot be split as the args state.

    >>> stages = assign_layers({"num_layers": 8}, pp=2, vpp=2)
    >>> [[list(chunk.layers) for chunk in rank] for rank in stages]
    [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    layout = args.get("pipeline_model_parallel_layout")
    # Megatron replaces the string by an object that contains it
    state = getattr(layout, "state", None)
    layout = state.get("input_data", layout) if isinstance(state, Mapping) else layout
    if layout is not None:
        return _assign_by_layout(args, layout, pp=pp, vpp=vpp)
    counts = _count_layers(args, pp=pp, vpp=vpp)
    num_mtp = read_count(args, "mtp_num_layers", default=0, minimum=0)
    stages: list[list[StageContents]] = [[] for _ in range(pp)]
    start = 0
    for chunk in range(vpp):
        for rank in range(pp):
            last = chunk == vpp - 1 and rank == pp - 1
            layers = range(start, start + counts[rank][chunk])
            contents = StageContents(
                layers, embedding=chunk == 0 and rank == 0, mtp=last and num_mtp > 0, loss=last
            )
            stages[rank].append(contents)
            start = layers.stop
    return tuple(tuple(rank) for rank in stages)


def _assign_by_layout(
    args: Mapping[str, object], layout: object, *, pp: int, vpp: int
) -> tuple[tuple[StageContents, ...], ...]:
    field = "args.pipeline_model_parallel_layout"
    if not isinstance(layout, str):
        raise CheckpointError(
            f"{field} of the checkpoint is a {type(layout).__name__}, not a string such as "
            "'Et|t|tL'. Use checkpoint.load_mode=weights."
        )
    try:
        groups = parse_layout(layout)
    except PlanError as error:
        raise CheckpointError(f"{field}={layout[:72]!r} of the checkpoint: {error}") from error
    if len(groups) != pp * vpp:
        raise CheckpointError(
            f"{field}={layout[:72]!r} of the checkpoint has {len(groups)} stages, not "
            f"pipeline_model_parallel_size={pp} * virtual_pipeline_model_parallel_size={vpp}. "
            f"Use a layout of {pp * vpp} stages."
        )
    stages: list[list[StageContents]] = [[] for _ in range(pp)]
    start = 0
    for number, items in enumerate(groups):
        kinds = [item.kind for item in items]
        layers = range(start, start + kinds.count("t"))
        contents = StageContents(layers, "E" in kinds, "m" in kinds, "L" in kinds)
        stages[number % pp].append(contents)
        start = layers.stop
    num_layers = read_count(args, "num_layers")
    if start != num_layers:
        raise CheckpointError(
            f"{field}={layout[:72]!r} of the checkpoint has {start} layers, not "
            f"num_layers={num_layers}. Use a layout with {num_layers} times t."
        )
    return tuple(tuple(rank) for rank in stages)


def _count_layers(args: Mapping[str, object], *, pp: int, vpp: int) -> list[list[int]]:
    """Return the number of layers of each model chunk of each pipeline rank."""
    num_layers = read_count(args, "num_layers")
    first = _read_optional(args, "decoder_first_pipeline_num_layers")
    last = _read_optional(args, "decoder_last_pipeline_num_layers")
    embedding = read_flag(args, "account_for_embedding_in_pipeline_split")
    loss = read_flag(args, "account_for_loss_in_pipeline_split")
    if pp == 1:
        if vpp > 1:
            raise CheckpointError(
                f"args.virtual_pipeline_model_parallel_size={vpp} of the checkpoint needs "
                "pipeline_model_parallel_size of at least 2. Use 2 or unset it."
            )
        return [[num_layers]]
    remaining = num_layers - (first or 0) - (last or 0) + embedding + loss
    middle = pp - (first is not None) - (last is not None)
    if remaining < 0 or (remaining % middle if middle else remaining):
        raise CheckpointError(
            f"args of the checkpoint: num_layers={num_layers} cannot be split over "
            f"pipeline_model_parallel_size={pp} with decoder_first_pipeline_num_layers={first}, "
            f"decoder_last_pipeline_num_layers={last}, account_for_embedding_in_pipeline_split="
            f"{embedding}, account_for_loss_in_pipeline_split={loss}. Use a multiple of "
            f"{max(middle, 1)} for the other stages."
        )
    per_rank = [remaining // middle if middle else 0] * pp
    per_rank[0] = per_rank[0] if first is None else first
    per_rank[-1] = per_rank[-1] if last is None else last
    if uneven := [count for count in per_rank if count % vpp]:
        raise CheckpointError(
            f"args.virtual_pipeline_model_parallel_size={vpp} of the checkpoint does not divide "
            f"the {uneven[0]} layers of a pipeline rank. Use a divisor of {uneven[0]}."
        )
    counts = [[count // vpp] * vpp for count in per_rank]
    counts[0][0] -= embedding
    counts[-1][-1] -= loss
    if min(counts[0][0], counts[-1][-1]) < 0:
        raise CheckpointError(
            f"args of the checkpoint: num_layers={num_layers} leaves no room for "
            f"account_for_embedding_in_pipeline_split={embedding} and "
            f"account_for_loss_in_pipeline_split={loss} at pipeline_model_parallel_size={pp}. "
            f"Use at least {pp * vpp} items."
        )
    return counts


def _read_optional(args: Mapping[str, object], name: str) -> int | None:
    return None if args.get(name) is None else read_count(args, name, minimum=0)


# --- registration order of parameters (order of `named_parameters` in Megatron-core 0.16)

TOP_ORDER = (
    "embedding.word_embeddings",
    "embedding.position_embeddings",
    "embedding.tokentype_embeddings",
    "decoder.layers",
    "decoder.final_layernorm",
    "mtp.layers",
    "output_layer",
)

LAYER_ORDER = (
    "input_layernorm",
    "self_attention.core_attention",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.kv_layernorm",
    "self_attention.k_layernorm",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.fc1_latent_proj",
    "mlp.fc2_latent_proj",
    "mlp.experts.experts",
    "mlp.shared_experts",
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Modules of a layer. A module's own parameters come before those of its children, so the gate of
shared experts is first."""

MTP_ORDER = ("enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer", "final_layernorm")

LEAF_ORDER = ("gate_weight", "layer_norm_weight", "layer_norm_bias", "weight", "bias")
"""Parameters of one module: a fused norm is registered before the matrix."""

SEPARATE_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Canonical names of fused norms, and their modules with `--transformer-impl local`."""

EXPERTS = "mlp.experts.experts."
LAYER = re.compile(r"(decoder|mtp)\.layers\.(\d{1,9})\.(.+)")


def find_layer(name: str) -> tuple[str, int, str] | None:
    """Return the block (`decoder` or `mtp`), layer number and rest of a tensor's name."""
    match = LAYER.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), match[3])


def compute_registration_key(
    name: str, layout: MegatronLayout, *, expert: int = 0
) -> tuple[int, ...]:
    """Return the position of a parameter in the registration order of its model chunk, as a sort
    key; `expert` is the number of the expert for a tensor of experts.

    Raises:
        CheckpointError: the position of the parameter is not known.
    """
    parts = find_layer(name)
    if parts is None:
        module, _, leaf = name.rpartition(".")
        return (_index(TOP_ORDER, module, name), _index(LEAF_ORDER, leaf, name))
    block, layer, rest = parts
    top = _index(TOP_ORDER, f"{block}.layers", name)
    if block == "mtp":
        child, _, inner = rest.partition(".")
        position = _index(MTP_ORDER, child, name)
        if inner in LEAF_ORDER:
            return (top, layer, position, _index(LEAF_ORDER, inner, name))
        return (top, layer, position, *_layer_key(inner, name, layout, expert))
    return (top, layer, *_layer_key(rest, name, layout, expert))


def _layer_key(rest: str, name: str, layout: MegatronLayout, expert: int) -> tuple[int, ...]:
    if layout.local_spec:
        for fused, separate in SEPARATE_NORMS.items():
            if rest.startswith(fused):
                rest = separate + rest.removeprefix(fused)
    module, _, leaf = rest.rpartition(".")
    if rest.startswith(EXPERTS):
        linear = _index(("linear_fc1", "linear_fc2"), module.removeprefix(EXPERTS), name)
        within = (linear, expert) if layout.grouped_experts else (expert, linear)
        position = LAYER_ORDER.index(EXPERTS.removesuffix("."))
        return (position, *within, _index(LEAF_ORDER, leaf, name))
    if rest == "self_attention.core_attention.softmax_offset":
        return (LAYER_ORDER.index(module), 0)
    return (_index(LAYER_ORDER, module, name), _index(LEAF_ORDER, leaf, name))


def _index(order: tuple[str, ...], key: str, name: str) -> int:
    if key not in order:
        raise CheckpointError(
            f"{name} has no known position in Megatron's registration order, so the optimizer "
            "state of dp_reshardable buckets cannot be assigned to parameters. Use "
            "checkpoint.load_mode=weights, or =progress with new moments."
        )
    return order.index(key)


# --- local parts of tensors


class LocalSlice(NamedTuple):
    """Elements [start, stop) of a rank's local tensor in row-major order, and their box of the
    global tensor."""

    start: int
    stop: int
    box: tuple[tuple[int, int], ...]


def find_split_dim(
    local: tuple[int, ...], expected: tuple[int, ...], *, parts: int
) -> int | str | None:
    """Return the dim that is split over `parts` ranks, None if each has the whole tensor, or what
    is wrong with the local shape.

    >>> find_split_dim((6, 4), (12, 4), parts=2), find_split_dim((12, 4), (12, 4), parts=2)
    (0, None)
    >>> find_split_dim((5, 4), (12, 4), parts=2)
    'the args of the checkpoint give [12, 4], whole or with one dim split over 2 ranks'
    """
    if local == expected:
        return None
    if len(local) == len(expected):
        differing = [d for d in range(len(local)) if local[d] != expected[d]]
        if len(differing) == 1 and local[differing[0]] * parts == expected[differing[0]]:
            return differing[0]
    ranks = f", whole or with one dim split over {parts} ranks" if parts > 1 else ""
    return f"the args of the checkpoint give {list(expected)}{ranks}"


def slice_local_tensor(
    shape: tuple[int, ...], *, dim: int | None, parts: int, rank: int, gated: bool = False
) -> list[LocalSlice]:
    """Return the slices of a rank's part of a tensor of global `shape`, split along `dim`.

    `gated`: the first dim has a gate and an up half, and a rank has its part of each, one after
    the other.

    >>> [tuple(s) for s in slice_local_tensor((8, 3), dim=0, parts=2, rank=1, gated=True)]
    [(0, 6, ((2, 4), (0, 3))), (6, 12, ((6, 8), (0, 3)))]
    """
    whole = tuple((0, size) for size in shape)
    if dim is None:
        return [LocalSlice(0, prod(shape), whole)]
    halves = 2 if gated and dim == 0 else 1
    length = shape[dim] // (parts * halves)
    numel = prod(shape) // (parts * halves)
    slices = []
    for half in range(halves):
        start = half * shape[dim] // halves + rank * length
        box = (*whole[:dim], (start, start + length), *whole[dim + 1 :])
        slices.append(LocalSlice(half * numel, (half + 1) * numel, box))
    return slices
