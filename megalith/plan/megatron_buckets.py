"""Flat buckets of Megatron-LM's distributed optimizer: the positions of parameters in a buffer that
is stored without names.

One buffer holds the parameters of one model chunk, dtype and kind (dense or expert), in reverse
order of registration. Source: Megatron-core 0.16, `_ParamAndGradBuffer`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm

from megalith.errors import CheckpointError
from megalith.plan.buckets import round_up
from megalith.plan.megatron_layout import MegatronLayout, read_count, read_flag

PARAM_ALIGNMENT = 64
"""A parameter starts at a multiple of 64 elements (128 bytes of a 16-bit dtype)."""

BUCKET_ALIGNMENT = 128
"""A bucket ends at a multiple of 128 elements and of the dp size."""

HIGH_BANDWIDTH_ALIGNMENT = 1 << 16
"""Additional alignment of buckets with `--ddp-pad-buckets-for-high-nccl-busbw`."""


@dataclass(frozen=True, slots=True)
class FlatParam:
    """A parameter of one rank, or one expert of it."""

    name: str
    """Canonical name of the global tensor."""

    numel: int
    """Elements of the rank's local part."""

    expert: int | None = None
    """Number of the expert on the leading axis of the global tensor; None for other tensors."""

    own_bucket: bool = False
    """True for a word embedding that the first and the last pipeline stage share."""


@dataclass(frozen=True, slots=True)
class FlatSlot:
    """Elements [start, stop) of a bucket that hold one parameter."""

    param: FlatParam
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """Layout of one bucket: elements outside of the slots are padding."""

    slots: tuple[FlatSlot, ...]
    numel_unpadded: int
    """Elements that are stored: up to the end of the last parameter."""

    numel: int
    """Elements with the padding that makes equal slices for the dp ranks."""


def build_flat_buckets(
    params: Sequence[FlatParam],
    *,
    bucket_size: int | None,
    dp: int,
    high_bandwidth: bool = False,
    aligned: bool = True,
) -> list[FlatBucket]:
    """Return the buckets of one buffer; `params` are in registration order.

    A bucket closes once it holds `bucket_size` elements (unset: one bucket). Not `aligned`:
    without the distributed optimizer nothing is padded and no parameter has its own bucket.

    >>> params = [FlatParam("a", 10), FlatParam("b", 100)]
    >>> [bucket] = build_flat_buckets(params, bucket_size=None, dp=2)
    >>> [(slot.param.name, slot.start, slot.stop) for slot in bucket.slots]
    [('b', 0, 100), ('a', 128, 138)]
    >>> bucket.numel_unpadded, bucket.numel
    (138, 256)
    """
    divisor = lcm(dp, BUCKET_ALIGNMENT, HIGH_BANDWIDTH_ALIGNMENT if high_bandwidth else 1)
    buckets: list[FlatBucket] = []
    slots: list[FlatSlot] = []

    for param in reversed(params):
        start = slots[-1].stop if slots else 0
        start = round_up(start, PARAM_ALIGNMENT) if aligned else start
        alone = param.own_bucket and aligned
        if alone and slots:
            buckets.append(_close_bucket(slots, start, divisor if aligned else 1))
            start, slots = 0, []
        slots.append(FlatSlot(param, start, start + param.numel))
        if alone or (bucket_size is not None and slots[-1].stop >= bucket_size):
            buckets.append(_close_bucket(slots, slots[-1].stop, divisor if aligned else 1))
            slots = []
    if slots:
        buckets.append(_close_bucket(slots, slots[-1].stop, divisor if aligned else 1))
    return buckets


def _close_bucket(slots: Sequence[FlatSlot], numel_unpadded: int, divisor: int) -> FlatBucket:
    return FlatBucket(tuple(slots), numel_unpadded, round_up(numel_unpadded, divisor))


def coalesce_buckets(buckets: Sequence[FlatBucket]) -> list[FlatSlot]:
    """Return the slots of a buffer whose buckets are stored one after the other without the padding
    at their ends, as in `distrib_optim.pt`."""
    slots = []
    offset = 0
    for bucket in buckets:
        slots += [
            replace(slot, start=offset + slot.start, stop=offset + slot.stop)
            for slot in bucket.slots
        ]
        offset += bucket.numel_unpadded
    return slots


def list_bucket_sizes(
    args: Mapping[str, object],
    layout: MegatronLayout,
    *,
    pp_rank: int,
    chunk: int,
    num_params: int,
) -> list[int | None]:
    """Return the bucket sizes that versions of Megatron-LM use for one buffer, newest first.

    `num_params` counts the elements of the pipeline rank's parameters. Only the first chunk of
    pipeline rank 0 has several buckets, and only with `--overlap-grad-reduce`.

    Raises:
        CheckpointError: a value of the args is not a number.
    """
    overlap = read_flag(args, "overlap_grad_reduce")
    whole_chunk = read_flag(args, "overlap_param_gather_with_optimizer_step")
    if not overlap or whole_chunk or pp_rank > 0 or chunk > 0:
        return [None]
    if args.get("ddp_num_buckets") is not None:
        return [num_params // read_count(args, "ddp_num_buckets")]
    if args.get("ddp_bucket_size") is not None:
        return [_read_bucket_size(args)]
    cp = read_count(args, "context_parallel_size", default=1)
    groups = {layout.dp * layout.optimizer_instances // cp, layout.dp, layout.dp // cp}
    return list(dict.fromkeys(max(40_000_000, 1_000_000 * group) for group in sorted(groups)))


def _read_bucket_size(args: Mapping[str, object]) -> int:
    value = args["ddp_bucket_size"]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 48:
        raise CheckpointError(
            f"args.ddp_bucket_size={value!r} of the checkpoint is not a number of elements, so the "
            "buckets of its optimizer state are unknown. Use checkpoint.load_mode=weights."
        )
    return value


def match_buckets(
    candidates: Sequence[Sequence[FlatBucket]],
    *,
    numel: Sequence[int],
    numel_unpadded: Sequence[int],
    what: str,
) -> Sequence[FlatBucket]:
    """Return the first layout whose buckets have the stored sizes.

    Raises:
        CheckpointError: none has; the message names the first bucket that differs.
    """
    for buckets in candidates:
        sizes = [bucket.numel for bucket in buckets]
        unpadded = [bucket.numel_unpadded for bucket in buckets]
        if sizes == list(numel) and unpadded == list(numel_unpadded):
            return buckets
    planned = [(bucket.numel_unpadded, bucket.numel) for bucket in candidates[0]]
    stored = list(zip(numel_unpadded, numel, strict=False))
    differs = next(
        (i for i, (a, b) in enumerate(zip(planned, stored, strict=False)) if a != b),
        min(len(planned), len(stored)),
    )
    raise CheckpointError(
        f"{what}: the file has {len(stored)} buckets and the args of the checkpoint give "
        f"{len(planned)}; bucket {differs} has (unpadded, padded) elements "
        f"{_show(stored, differs)} in the file and {_show(planned, differs)} by the args. The "
        "positions of parameters are unknown. Use checkpoint.load_mode=weights, or =progress with "
        "new moments."
    )


def _show(sizes: Sequence[tuple[int, int]], index: int) -> str:
    return str(sizes[index]) if index < len(sizes) else "none"
