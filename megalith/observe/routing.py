"""Analysis of a routing trace: expert load, and how well a layer's choices predict the next
layer's.

Counts of one half of the tokens predict the other half, so that no token is predicted from itself.
Source of the question: Yao et al. 2024, arXiv:2401.08383.
"""

import heapq
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith import storage
from megalith.errors import DataError

Counts = NDArray[np.int64]
Place = tuple[int, int, int, int]
"""Identifies the tokens of a row in a step: ranks along dp, cp and tp, and the microbatch."""


LAYER = re.compile(r"(layers|mtp)\.\d+(\..+)?")
"""Pattern of layer names."""


class TraceRow(NamedTuple):
    """A row of a routing trace."""

    step: int
    layer: str
    place: Place
    experts: NDArray[np.int16]
    """[tokens, k], best first."""

    capture_file: Path | None
    """File of the captured tensors, if any."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How often a layer's experts were chosen."""

    layer: str
    tokens: int
    shares: tuple[float, ...]
    """Share of the choices by expert."""

    @property
    def load(self) -> float:
        """Load of the busiest expert, relative to the mean."""
        return max(self.shares) * len(self.shares)

    @property
    def entropy(self) -> float:
        """Entropy of the shares, relative to equal shares."""
        if len(self.shares) < 2:
            return 1.0
        return -sum(share * math.log(share) for share in self.shares if share > 0) / math.log(
            len(self.shares)
        )

    @property
    def half(self) -> int:
        """Smallest number of experts that have half of the choices."""
        return int(np.searchsorted(np.cumsum(sorted(self.shares, reverse=True)), 0.5 - 1e-12)) + 1


@dataclass(frozen=True, slots=True)
class RoutingPredictability:
    """How well a layer's choices predict the next layer's, measured on held-out tokens."""

    layer: str
    following: str
    tokens: int
    information: float
    """Mutual information of the best choices (H(Y) - H(Y|X)) / H(Y): 0 if independent, 1 if
    deterministic."""

    first: float
    """Hit rate of the most frequent next choice given a token's best choice."""

    first_blind: float
    """Hit rate of the most frequent next choice overall (baseline)."""

    all: float
    """Share of a token's k choices that are among the k likeliest given its previous choices."""

    all_blind: float
    """The same for the k most frequent experts (baseline)."""


# --- reading


def read_trace_steps(folder: Path) -> Iterator[tuple[int, dict[str, dict[Place, TraceRow]]]]:
    """Yield every traced step with the rows of all ranks, by layer and place; one step is in memory
    at a time.

    Raises:
        DataError: there is no trace, or a line of it is damaged.
    """
    files = sorted(folder.glob("rank_*.jsonl"))
    if not files:
        raise DataError(
            f"{folder}: no routing trace in this folder (rank_00000.jsonl, ...). Run with "
            "observe.routing_trace=1."
        )
    rows = heapq.merge(*map(read_trace_rows, files), key=lambda row: row.step)
    for step, step_rows in groupby(rows, key=lambda row: row.step):
        rows_by_layer: dict[str, dict[Place, TraceRow]] = {}
        for row in step_rows:
            rows_by_layer.setdefault(row.layer, {})[row.place] = row
        yield step, rows_by_layer


def read_trace_rows(path: Path) -> Iterator[TraceRow]:
    """Yield the rows of a rank's file, except an incomplete last line.

    Raises:
        DataError: a line is damaged.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield _row(storage.parse_json(line), path.parent)
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                raise DataError(
                    f"{path}: line {number} is not a row of a routing trace "
                    f"({type(error).__name__}: {error}). Remove the line, or run with "
                    "observe.routing_trace=1 in another folder."
                ) from error


def _row(row: dict[str, Any], folder: Path) -> TraceRow:  # Any: JSON
    place = (int(row["dp"]), int(row["cp"]), int(row["tp"]), int(row["microbatch"]))
    experts = np.array(row["experts"], dtype=np.int16).reshape(
        int(row["num_tokens"]), int(row["top_k"])
    )
    layer = str(row["layer"])
    if not LAYER.fullmatch(layer):
        raise ValueError(f"layer {layer!r}, expected layers.0 or the like")
    capture_file = row.get("sidecar")  # lint: allow old-word: field of the trace format
    return TraceRow(
        int(row["step"]),
        layer,
        place,
        experts,
        None if capture_file is None else folder / capture_file,
    )


def sort_layers(layers: Iterable[str]) -> list[str]:
    """Sort layer names by number, MTP layers last."""
    return sorted(
        layers, key=lambda layer: (not layer.startswith("layers."), int(layer.split(".")[1]))
    )


# --- counting


@dataclass(frozen=True, slots=True)
class LayerPairCounts:
    """Counts of the tokens' choices in a layer and in the next, by half of the tokens."""

    best: Counts
    """[2, E, E]: best choice in the layer, best choice in the next."""

    every: Counts
    """[2, E, E]: any choice in the layer, any choice in the next."""

    def add(self, choices: NDArray[np.int16], next_choices: NDArray[np.int16]) -> None:
        """Count the choices [n, k] of a microbatch; the first part of its tokens is the first
        half."""
        experts = self.best.shape[1]
        for half, part in enumerate(halves(len(choices))):
            before, after = choices[part].astype(np.int64), next_choices[part].astype(np.int64)
            places = before[:, 0] * experts + after[:, 0]
            self.best[half] += np.bincount(places, minlength=experts**2).reshape(experts, experts)
            places = (before[:, :, None] * experts + after[:, None, :]).ravel()
            self.every[half] += np.bincount(places, minlength=experts**2).reshape(experts, experts)


def halves(tokens: int) -> tuple[slice, slice]:
    """Return the first and second half of a microbatch's tokens; similar neighboring tokens are in
    the same half."""
    return slice(0, tokens // 2), slice(tokens // 2, tokens)


def analyze_trace(
    folder: Path, *, experts: int
) -> tuple[list[ExpertLoad], list[RoutingPredictability]]:
    """Return the expert load of each layer and how well it predicts the next; reads the trace
    twice.

    Raises:
        DataError: there is no trace, a line of it is damaged, or it has other experts.
    """
    counts: dict[str, Counts] = {}
    pairs: dict[tuple[str, str], LayerPairCounts] = {}
    top_k = 1
    for step, layers in read_trace_steps(folder):
        for layer, rows in layers.items():
            for row in rows.values():
                top_k = row.experts.shape[1]
                if row.experts.size and not 0 <= row.experts.min() <= row.experts.max() < experts:
                    wrong = row.experts.min() if row.experts.min() < 0 else row.experts.max()
                    raise DataError(
                        f"{folder}: step {step}, {layer}: expert {wrong} of {experts}. Use the "
                        f"trace of a run with model.moe.num_experts={experts}."
                    )
                layer_counts = counts.setdefault(layer, np.zeros(experts, dtype=np.int64))
                layer_counts += np.bincount(row.experts.ravel(), minlength=experts)
        for layer_name, next_name, before, after in iter_adjacent_layers(layers):
            zeros = np.zeros((2, 2, experts, experts), dtype=np.int64)
            pairs.setdefault((layer_name, next_name), LayerPairCounts(zeros[0], zeros[1])).add(
                before.experts, after.experts
            )
    if not counts:
        raise DataError(
            f"{folder}: this routing trace has no steps: they were removed when the run was "
            "restarted. Run with observe.routing_trace=1 or more from the beginning."
        )
    uses = [_use(layer, counts[layer], top_k) for layer in sort_layers(counts)]
    hits = _count_hits(folder, pairs)
    return uses, [
        _routing_predictability(names, pairs[names], hits[names]) for names in pairs_in_order(pairs)
    ]


def iter_adjacent_layers(
    layers: Mapping[str, dict[Place, TraceRow]],
) -> Iterator[tuple[str, str, TraceRow, TraceRow]]:
    """Yield each layer of a step and the next, with the rows of the same tokens in both."""
    names = sort_layers(layers)
    for layer, next_layer in pairwise(names):
        for place, before in layers[layer].items():
            after = layers[next_layer].get(place)
            if after is not None and len(after.experts) == len(before.experts):
                yield layer, next_layer, before, after


def pairs_in_order(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Sort pairs of layers by the second layer."""
    unique_pairs = {*pairs}
    order = sort_layers({layer for pair in unique_pairs for layer in pair})
    return sorted(unique_pairs, key=lambda pair: (order.index(pair[1]), order.index(pair[0])))


def _use(layer: str, counts: Counts, top_k: int) -> ExpertLoad:
    shares = counts / max(int(counts.sum()), 1)
    return ExpertLoad(layer, int(counts.sum()) // top_k, tuple(float(share) for share in shares))


def _routing_predictability(
    names: tuple[str, str], pair: LayerPairCounts, hits: tuple[float, float]
) -> RoutingPredictability:
    tokens = pair.best.sum((1, 2))
    right = blind = saved = whole = 0.0
    for half in (0, 1):
        seen, asked = pair.best[1 - half], pair.best[half]
        right += float(asked[np.arange(len(asked)), guesses(seen)].sum())
        blind += float(asked[:, int(seen.sum(0).argmax())].sum())
        before, after = surprise(seen, asked)
        whole, saved = whole + before, saved + before - after
    total = int(tokens.sum())
    of = 1.0 / max(total, 1)
    return RoutingPredictability(
        *names,
        total,
        information=max(0.0, saved / whole) if whole > 0 else 0.0,
        first=right * of,
        first_blind=blind * of,
        all=hits[0],
        all_blind=hits[1],
    )


def guesses(seen: Counts) -> Counts:
    """Return the most frequent next expert after each expert, [E]; overall if the expert was never
    chosen."""
    predictions: Counts = np.where(seen.any(1), seen.argmax(1), seen.sum(0).argmax())
    return predictions


def surprise(seen: Counts, asked: Counts) -> tuple[float, float]:
    """Return the cross-entropy of `asked` [E, E] in nats under counts `seen` [E, E], without and
    with the previous choice.

    q(y) = (n_y + 1) / (n + E) and q(y|x) = (n_xy + a q(y)) / (n_x + a), where a is the power of 4
    with the lowest leave-one-out cross-entropy of `seen`. Source: MacKay and Peto 1995, Nat. Lang.
    Eng. 1(3).
    """
    alone = (seen.sum(0) + 1) / (seen.sum() + len(seen))
    rows = seen.sum(1, keepdims=True)

    def left_out(weight: float) -> float:
        known = np.maximum(seen - 1, 0) + weight * alone
        return float(-(seen * np.log(known / np.maximum(rows - 1 + weight, weight))).sum())

    weight = min((4.0**power for power in range(-3, 9)), key=left_out)
    known = (seen + weight * alone) / (rows + weight)
    return float(-(asked.sum(0) * np.log(alone)).sum()), float(-(asked * np.log(known)).sum())


def _count_hits(
    folder: Path, pairs: Mapping[tuple[str, str], LayerPairCounts]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return hit rates of the k likeliest experts given the previous choices, and of the k most
    frequent ones."""
    tables = {
        names: [likelihoods(pair.every[1 - half]) for half in (0, 1)]
        for names, pair in pairs.items()
    }
    hits = {names: np.zeros(3) for names in pairs}
    for _, layers in read_trace_steps(folder):
        for layer, next_layer, before, after in iter_adjacent_layers(layers):
            for half, part in enumerate(halves(len(before.experts))):
                after_each, commonest = tables[layer, next_layer][half]
                actual = after.experts[part]
                best = likeliest(after_each, before.experts[part], actual.shape[1])
                baseline = np.argsort(-commonest, kind="stable")[: actual.shape[1]]
                hits[layer, next_layer] += (
                    count_common_experts(best, actual),
                    np.isin(actual, baseline).sum(),
                    actual.size,
                )
    return {
        names: (right / max(size, 1), baseline / max(size, 1))
        for names, (right, baseline, size) in hits.items()
    }


def likelihoods(every: Counts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the frequency of each expert given the previous one [E, E], and overall [E]."""
    commonest = every.sum(0) / max(int(every.sum()), 1)
    rows = every.sum(1, keepdims=True)
    return np.where(rows > 0, every / np.maximum(rows, 1), commonest), commonest


def likeliest(
    table: NDArray[np.float64], before: NDArray[np.int16], count: int
) -> NDArray[np.int64]:
    """Return the `count` likeliest experts given `before` [n, k], whose likelihoods are added: [n,
    count]."""
    parts = [table[before[at : at + 1024]].sum(1) for at in range(0, len(before), 1024)]
    best = [np.argsort(-part, axis=1, kind="stable")[:, :count] for part in parts]
    return np.concatenate(best) if best else np.zeros((0, count), dtype=np.int64)


def count_common_experts(choices: NDArray[Any], other_choices: NDArray[Any]) -> int:
    """Return the number of experts that are in both choices [n, k] of a token, summed over
    tokens."""
    return int((choices[:, :, None] == other_choices[:, None, :]).sum())
