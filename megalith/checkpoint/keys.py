"""Keys of a checkpoint: missing, unexpected and skipped keys, and weights that differ from their
fp32 master weights."""

import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from typing import Literal

import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry
from megalith.config.checkpoint import CheckpointConfig, KeyMismatchAction
from megalith.errors import CheckpointError, did_you_mean
from megalith.plan.shards import Shard

MODEL, OPTIMIZER, MASTER, EMA = "model.", "optimizer.", "optimizer.master.", "optimizer.ema."

TABLES = ("embed.weight", "head.weight")
"""Parameters with one row per vocabulary entry; the last rows may be padding."""

EXPERTS = ".moe.experts."
"""Part of the name of tensors that hold all experts of a layer, stacked."""

_OF_EXPERT = re.compile(r"(?P<block>.*)\.experts\.(?P<number>\d+)\.(?P<part>.+)")
"""Name of a tensor of a single expert, as in other libraries."""

Purpose = Literal["resume", "start"]
"""resume: continue a run, which needs all weights regardless of the settings. start: start from the
weights of another model, without its optimizer state."""

Wanted = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensors that all ranks request: {name in a checkpoint: (stored tensor to read from, shape)}."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Keys that a load did not fill or read; empty if run and checkpoint hold the same tensors."""

    missing_keys: tuple[str, ...] = ()
    """Requested, but not in the checkpoint: these tensors keep their values."""

    unexpected_keys: tuple[str, ...] = ()
    """In the checkpoint, but not requested."""

    skipped: tuple[str, ...] = ()
    """Requested, but named by `checkpoint.skip`: these tensors keep their values too."""

    numel: int = 0
    """Elements of the tensors that keep their values; weights and their master weights count
    once."""

    fresh_state: bool = False
    """Whether optimizer moments are requested, and none are in the checkpoint."""

    num_experts: int = 0
    """Number of experts of a layer, if parameters of experts are missing."""

    @property
    def kept(self) -> tuple[str, ...]:
        """Tensors that keep their values; of weights and master weights only the weights."""
        names = {*self.missing_keys, *self.skipped}
        return tuple(
            sorted(key for key in names if key == weights_key(key) or weights_key(key) not in names)
        )


def weights_key(key: str) -> str:
    """Return the weights that belong to a key of master weights; any other key is returned as it
    is."""
    return f"{MODEL}{key.removeprefix(MASTER)}" if key.startswith(MASTER) else key


def is_table(key: str) -> bool:
    """Return whether a key of a checkpoint has one row per vocabulary entry."""
    name = key.removeprefix(MODEL) if key.startswith(MODEL) else key.split(".", 2)[-1]
    return name in TABLES


def differ_only_in_padding(
    stored: tuple[int, ...], wanted: tuple[int, ...], vocab_size: int | None
) -> bool:
    """Return whether two shapes of a table differ only in padding rows after the vocabulary.

    >>> differ_only_in_padding((64, 8), (128, 8), 61)
    True
    >>> differ_only_in_padding((64, 8), (128, 8), 70)
    False
    """
    return (
        vocab_size is not None
        and stored[1:] == wanted[1:]
        and min(stored[0], wanted[0]) >= vocab_size
    )


def is_state(key: str) -> bool:
    """Return whether a key is optimizer state other than master weights."""
    return key == weights_key(key) and key.startswith(OPTIMIZER)


def is_moment(key: str) -> bool:
    """Return whether a key is state that only the optimizer reads: neither master weights nor a
    moving average of the weights."""
    return is_state(key) and not key.startswith(EMA)


def is_skipped(key: str, patterns: Iterable[str]) -> bool:
    """Return whether a key matches one of the patterns of `checkpoint.skip`.

    Patterns match parameters with all their tensors (`head.*`) or keys of a checkpoint
    (`optimizer.exp_avg.*`); weights and their master weights are skipped together.
    """
    key = weights_key(key)
    names = [key, key.removeprefix(MODEL) if key.startswith(MODEL) else key.split(".", 2)[-1]]
    if key.startswith(MODEL):
        names.append(f"{MASTER}{names[1]}")
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def compare_keys(
    wanted: Wanted,
    stored: Collection[str],
    *,
    skip: Sequence[str] = (),
    purpose: Purpose = "resume",
) -> LoadReport:
    """Return the keys that a load will not fill or not read.

    Optimizer state counts as unexpected only if a run resumes and requests some of it.
    """
    skipped = {key for key in wanted if is_skipped(key, skip)}
    missing = {key for key, (source, _) in wanted.items() if source not in stored} - skipped
    used = {source for source, _ in wanted.values()} | wanted.keys()
    used |= {f"{MASTER}{key.removeprefix(MODEL)}" for key in wanted if key.startswith(MODEL)}
    reads_state = purpose == "resume" and any(key.startswith(OPTIMIZER) for key in wanted)
    unexpected = {
        key
        for key in stored
        if key not in used and (reads_state or key.startswith(MODEL)) and not is_skipped(key, skip)
    }
    state = {key for key in wanted if is_moment(key)}
    report = LoadReport(tuple(sorted(missing)), tuple(sorted(unexpected)), tuple(sorted(skipped)))
    numel = sum(prod(wanted[key][1]) for key in report.kept)
    fresh_state, experts = (
        bool(state) and state <= missing,
        [wanted[key][1][0] for key in missing if EXPERTS in key],
    )
    return replace(
        report, numel=numel, fresh_state=fresh_state, num_experts=max(experts, default=0)
    )


def select_rejected_keys(
    report: LoadReport, rules: CheckpointConfig, purpose: Purpose
) -> LoadReport:
    """Return the part of the report that the rules reject."""

    missing = _rejected_keys(report.missing_keys, rules.missing_keys, purpose)
    return LoadReport(
        missing,
        _rejected_keys(report.unexpected_keys, rules.unexpected_keys, purpose),
        num_experts=report.num_experts if any(EXPERTS in key for key in missing) else 0,
    )


def _rejected_keys(
    keys: Sequence[str], answer: KeyMismatchAction, purpose: Purpose
) -> tuple[str, ...]:
    return tuple(
        key for key in keys if answer == "error" or (purpose == "resume" and not is_state(key))
    )


def check_patterns(
    patterns: Sequence[str], wanted: Collection[str], stored: Collection[str]
) -> None:
    """Check that each skip pattern matches something; otherwise its tensors would be loaded.

    Raises:
        CheckpointError: some patterns match neither a tensor of the run nor one of the checkpoint.
    """
    known = {*wanted, *stored}
    idle = [pattern for pattern in patterns if not any(is_skipped(key, [pattern]) for key in known)]
    if idle:
        names = sorted(key.removeprefix(MODEL) for key in known if key.startswith(MODEL))
        advice = (
            did_you_mean(idle[0], names) or f" Parameters: {', '.join(group_by_pattern(names))}."
        )
        raise CheckpointError(
            f"checkpoint.skip={', '.join(idle)} matches no tensor of the run or the "
            f"checkpoint.{advice} Use patterns of names that exist, such as "
            f"{names[-1] if names else 'head.*'}."
        )


def log_load_report(report: LoadReport, rules: CheckpointConfig, path: object) -> None:
    """Log warnings about missing, unexpected and skipped keys; run by one rank."""
    if report.missing_keys and rules.missing_keys == "warn":
        _log.warning("%s lacks %s", path, "; ".join(_with_experts(report)))
    if report.unexpected_keys and rules.unexpected_keys == "warn":
        _log.warning(
            "%s also has %s: not loaded", path, "; ".join(group_by_pattern(report.unexpected_keys))
        )
    if report.kept:
        names = f": {'; '.join(group_by_pattern(report.kept))}" if report.skipped else ""
        _log.warning(
            "%d tensors (%s parameters) kept their initial values%s",
            len(report.kept),
            f"{report.numel:,}",
            names,
        )


def differences(differ: Sequence[str], report: LoadReport) -> str:
    """Describe all differences; keys that differ only in one number share a line."""
    lines = [
        *(f"  {text}" for text in differ),
        *(f"  only in this run: {text}" for text in _with_experts(report)),
        *(f"  only in the checkpoint: {text}" for text in group_by_pattern(report.unexpected_keys)),
    ]
    return "\n".join(lines)


def _with_experts(report: LoadReport) -> list[str]:
    """Describe the missing keys, and which experts they are of."""
    which = f": {format_expert_numbers(range(report.num_experts))}"
    return [
        f"{text}{which if EXPERTS in text else ''}"
        for text in group_by_pattern(report.missing_keys)
    ]


def format_expert_numbers(numbers: Iterable[int]) -> str:
    """Format expert numbers; three and more consecutive ones by the first and the last.

    >>> format_expert_numbers([7, 0, 1, 2, 3, 5])
    'experts 0 to 3, 5, 7'
    """
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]} to {run[-1]}" if run[2:] else ", ".join(map(str, run)) for run in runs]
    return (
        f"expert{'' if len(runs) == len(runs[:1]) and not runs[0][1:] else 's'} {', '.join(parts)}"
        if runs
        else ""
    )


def name_experts(names: Iterable[str]) -> list[str]:
    """Format names of tensors; those of single experts by layer, with experts and tensors.

    >>> name_experts(
    ...     ["h.0.moe.experts.3.up", "h.0.moe.experts.3.down", "h.1.moe.experts.3.up", "norm"]
    ... )
    ['norm', 'expert 3 of h.0.moe (down, up)', 'expert 3 of h.1.moe (up)']
    """
    others: list[str] = []
    numbers_by_part: dict[str, dict[str, list[int]]] = {}
    for name in sorted(names):
        if (match := _OF_EXPERT.fullmatch(name)) is None:
            others.append(name)
        else:
            numbers_by_part.setdefault(match["block"], {}).setdefault(match["part"], []).append(
                int(match["number"])
            )
    for block, parts in numbers_by_part.items():
        parts_by_experts: dict[str, list[str]] = {}
        for part, numbers in parts.items():
            parts_by_experts.setdefault(format_expert_numbers(numbers), []).append(part)
        others += [
            f"{experts} of {block} ({', '.join(some)})"
            for experts, some in parts_by_experts.items()
        ]
    return others


def group_by_pattern(keys: Sequence[str]) -> list[str]:
    """Group keys that differ in one number: `layers.*.attention.q (* = 0, 1, 2)`."""
    groups: dict[str, list[str]] = {}
    for key in keys:
        groups.setdefault(re.sub(r"\d+", "*", key, count=1), []).append(key)
    return [
        group[0]
        if len(group) == 1
        else f"{pattern} (* = {', '.join(re.findall(r'[0-9]+', key)[0] for key in group)})"
        for pattern, group in groups.items()
    ]


# Consistency of weights and their fp32 master weights in a checkpoint: equal except for
# rounding.


@dataclass(frozen=True, slots=True, eq=False)
class MasterWeightPair:
    """A shard of a parameter that was loaded from its master weights."""

    shard: Shard
    wide: Tensor
    """The shard loaded from the master weights."""

    low: Tensor | None
    """The same shard loaded from the stored weights, in their dtype; None if these were not read
    yet."""

    other: Tensor | None
    """Another tensor of the shard that was loaded from the master weights: weights of a third
    dtype."""


def pair_master_weights(
    entries: Sequence[CheckpointEntry], sources: Mapping[str, str]
) -> list[MasterWeightPair]:
    """Return the shards that were loaded from master weights; `sources` is {key: stored tensor it
    was read from}."""
    weights = {(e.shard.name, e.shard.box): e for e in entries if e.role == "param"}
    master_weights = {(e.shard.name, e.shard.box): e for e in entries if e.role == "master"}
    pairs = []
    for place in dict.fromkeys([*master_weights, *weights]):
        low, wide = weights.get(place), master_weights.get(place, weights.get(place))
        if wide is None or sources[wide.key] != f"{MASTER}{wide.shard.name}":
            continue
        same = None if low is None or low is wide else _inside(low, wide.shard)
        filled = low is not None and sources[low.key] == f"{MODEL}{low.shard.name}"
        pairs.append(
            MasterWeightPair(
                wide.shard, wide.tensor.detach(), same if filled else None, None if filled else same
            )
        )
    return pairs


def _inside(entry: CheckpointEntry, shard: Shard) -> Tensor | None:
    """Return the elements of an entry that belong to `shard` of the same box; None if some are
    missing."""
    whole_box = math.prod(b - a for a, b in shard.box)
    first, last = entry.shard.flat or (0, whole_box)
    start, stop = shard.flat or (0, whole_box)
    return (
        entry.tensor.detach().view(-1)[start - first : stop - first]
        if first <= start and stop <= last
        else None
    )


@torch.no_grad()
def reconcile(weights: Tensor, master_weights: Tensor, *, prefer_weights: bool) -> float | None:
    """Overwrite the side that is not preferred, where the two differ by more than rounding.

    Both hold the same elements in the same order, `weights` in their stored dtype. Returns the
    largest difference (inf if one side is NaN), or None if nothing differs.
    """
    flat, wide = weights.view(-1), master_weights.view(-1)
    rounded = wide.to(flat.dtype)
    differ = ~((rounded == flat) | (rounded.isnan() & flat.isnan()))
    if flat.dtype == torch.bfloat16 and wide.dtype == torch.float32:
        # weights with remainders are rounded up in magnitude where the master weight is a tie
        differ &= ~(_is_tie(wide) & (_round_up(wide) == flat))
    if not differ.any():
        return None
    largest = float((wide[differ].double() - flat[differ].double()).abs().max())
    if prefer_weights:
        wide.copy_(torch.where(differ, flat.to(wide.dtype), wide))
    else:
        flat.copy_(rounded)
    return largest if math.isfinite(largest) else math.inf


def _is_tie(values: Tensor) -> Tensor:
    """Return where fp32 values lie in the middle between two bf16 values."""
    return (values.view(torch.int32) & 0xFFFF) == 0x8000


def _round_up(values: Tensor) -> Tensor:
    """Return fp32 values rounded to bf16, with ties away from zero."""
    bits = values.view(torch.int32) + 0x8000
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def describe_master_differences(
    rank_differences: Sequence[Mapping[str, float]], *, prefer_weights: bool
) -> str | None:
    """Describe all ranks' {parameter: largest difference} in one line; None if all are empty."""
    names = {name for part in rank_differences for name in part}
    if not names:
        return None
    largest = {name: max(part.get(name, 0.0) for part in rank_differences) for name in names}
    worst = min(names, key=lambda name: (-largest[name], name))
    preferred, advice = (
        ("weights", "Remove checkpoint.prefer_weights to use the master weights.")
        if prefer_weights
        else ("master weights", "Set checkpoint.prefer_weights=true to use the weights.")
    )
    return (
        f"the weights of {len(names)} parameters are not their master weights, rounded: {worst} "
        f"differs most, by {largest[worst]:.3g}. The {preferred} are used. {advice}"
    )
