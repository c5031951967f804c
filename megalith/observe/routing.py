"""What a routing trace tells: how choices of experts concentrate, and how far a layer's choices
tell those of the next.

Counts of one half of the tokens guess the other half, so that what they know of their own tokens
alone counts for nothing. Source of the question: Yao et al. 2024, arXiv:2401.08383.
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
"""Which tokens of a step: ranks along dp, cp and tp, and the microbatch."""


LAYER = re.compile(r"(layers|mtp)\.\d+(\..+)?")
"""How layers are named."""


class Chosen(NamedTuple):
    """A row of a trace."""

    step: int
    layer: str
    place: Place
    experts: NDArray[np.int16]
    """[tokens, k], best first."""

    capture_file: Path | None
    """What lies beside it."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How often a layer's experts were chosen."""

    layer: str
    tokens: int
    shares: tuple[float, ...]
    """Of the choices, by expert."""

    @property
    def load(self) -> float:
        """Of the busiest expert, where 1 is the mean."""
        return max(self.shares) * len(self.shares)

    @property
    def entropy(self) -> float:
        """Of the shares, where 1 is that of equal ones."""
        if len(self.shares) < 2:
            return 1.0
        return -sum(share * math.log(share) for share in self.shares if share > 0) / math.log(
            len(self.shares)
        )

    @property
    def half(self) -> int:
        """The fewest experts that have half of the choices."""
        return int(np.searchsorted(np.cumsum(sorted(self.shares, reverse=True)), 0.5 - 1e-12)) + 1


@dataclass(frozen=True, slots=True)
class RoutingPredictability:
    """How far choices of a layer tell those of the next; shares, found on tokens that were not
    counted."""

    layer: str
    following: str
    tokens: int
    information: float
    """(H(Y) - H(Y|X)) / H(Y) of the best choices: 0 where they are independent, 1 where each
    decides the next."""

    first: float
    """How often the commonest next one after a token's best choice is its best in the next
    layer."""

    first_blind: float
    """The same of the commonest, whatever was chosen before."""

    all: float
    """Which part of its k choices are among the k that are likeliest after its choices before."""

    all_blind: float
    """The same of the k commonest."""


# --- reading


def steps_of_trace(folder: Path) -> Iterator[tuple[int, dict[str, dict[Place, Chosen]]]]:
    """Every traced step, and in it by layer and place what all ranks wrote; a step at a time is in
    memory.

    Raises:
        DataError: there is no trace, or a line of it is damaged.
    """
    files = sorted(folder.glob("rank_*.jsonl"))
    if not files:
        raise DataError(
            f"{folder}: no routing trace there (rank_00000.jsonl, ...). Run with "
            "observe.routing_trace=1."
        )
    rows = heapq.merge(*map(rows_of_file, files), key=lambda row: row.step)
    for step, some in groupby(rows, key=lambda row: row.step):
        found: dict[str, dict[Place, Chosen]] = {}
        for row in some:
            found.setdefault(row.layer, {})[row.place] = row
        yield step, found


def rows_of_file(path: Path) -> Iterator[Chosen]:
    """A rank's rows, one after the other; a last line that a crash cut short is left out.

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
                    f"{path}: line {number} is no row of a trace ({type(error).__name__}: "
                    f"{error}). Remove the line, or run with observe.routing_trace=1 in another "
                    "folder."
                ) from error


def _row(row: dict[str, Any], folder: Path) -> Chosen:  # Any: JSON
    place = (int(row["dp"]), int(row["cp"]), int(row["tp"]), int(row["microbatch"]))
    experts = np.array(row["experts"], dtype=np.int16).reshape(
        int(row["num_tokens"]), int(row["top_k"])
    )
    layer = str(row["layer"])
    if not LAYER.fullmatch(layer):
        raise ValueError(f"layer {layer!r}, expected layers.0 or the like")
    return Chosen(
        int(row["step"]),
        layer,
        place,
        experts,
        folder / row["sidecar"] if "sidecar" in row else None,
    )


def in_order(layers: Iterable[str]) -> list[str]:
    """Layers by number, and after them MTP layers."""
    return sorted(
        layers, key=lambda layer: (not layer.startswith("layers."), int(layer.split(".")[1]))
    )


# --- counting


@dataclass(frozen=True, slots=True)
class LayerPairCounts:
    """Counts of what tokens chose in a layer and in the next, by the half of the tokens."""

    best: Counts
    """[2, E, E]: best choice here, best choice there."""

    every: Counts
    """[2, E, E]: any choice here, any choice there."""

    def add(self, here: NDArray[np.int16], there: NDArray[np.int16]) -> None:
        """Count tokens [n, k], those of a microbatch's first part in the first half."""
        experts = self.best.shape[1]
        for half, part in enumerate(halves(len(here))):
            before, after = here[part].astype(np.int64), there[part].astype(np.int64)
            places = before[:, 0] * experts + after[:, 0]
            self.best[half] += np.bincount(places, minlength=experts**2).reshape(experts, experts)
            places = (before[:, :, None] * experts + after[:, None, :]).ravel()
            self.every[half] += np.bincount(places, minlength=experts**2).reshape(experts, experts)


def halves(tokens: int) -> tuple[slice, slice]:
    """The first half of a microbatch's tokens, and the second: neighbors, who are alike, are in
    the same."""
    return slice(0, tokens // 2), slice(tokens // 2, tokens)


def study_trace(
    folder: Path, *, experts: int
) -> tuple[list[ExpertLoad], list[RoutingPredictability]]:
    """How choices concentrate, layer by layer, and how far each layer's tell the next one's; reads
    the trace twice.

    Raises:
        DataError: there is no trace, a line of it is damaged, or it has other experts.
    """
    counts: dict[str, Counts] = {}
    pairs: dict[tuple[str, str], LayerPairCounts] = {}
    top_k = 1
    for step, layers in steps_of_trace(folder):
        for layer, rows in layers.items():
            for row in rows.values():
                top_k = row.experts.shape[1]
                if row.experts.size and not 0 <= row.experts.min() <= row.experts.max() < experts:
                    wrong = row.experts.min() if row.experts.min() < 0 else row.experts.max()
                    raise DataError(
                        f"{folder}: step {step}, {layer}: expert {wrong} of {experts}. ExpertLoad "
                        f"the trace of a run with model.moe.num_experts={experts}."
                    )
                mine = counts.setdefault(layer, np.zeros(experts, dtype=np.int64))
                mine += np.bincount(row.experts.ravel(), minlength=experts)
        for here, there, before, after in neighbors(layers):
            zeros = np.zeros((2, 2, experts, experts), dtype=np.int64)
            pairs.setdefault((here, there), LayerPairCounts(zeros[0], zeros[1])).add(
                before.experts, after.experts
            )
    if not counts:
        raise DataError(
            f"{folder}: no step is in this routing trace: it was cut where its run began anew. Run "
            "with observe.routing_trace=1 or more from the beginning."
        )
    uses = [_use(layer, counts[layer], top_k) for layer in in_order(counts)]
    hits = _hits_of_all(folder, pairs)
    return uses, [
        _routing_predictability(names, pairs[names], hits[names]) for names in pairs_in_order(pairs)
    ]


def neighbors(
    layers: Mapping[str, dict[Place, Chosen]],
) -> Iterator[tuple[str, str, Chosen, Chosen]]:
    """Each layer of a step and the next, and what the same tokens chose in both."""
    names = in_order(layers)
    for here, there in pairwise(names):
        for place, before in layers[here].items():
            after = layers[there].get(place)
            if after is not None and len(after.experts) == len(before.experts):
                yield here, there, before, after


def pairs_in_order(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of layers by their second."""
    found = {*pairs}
    order = in_order({layer for pair in found for layer in pair})
    return sorted(found, key=lambda pair: (order.index(pair[1]), order.index(pair[0])))


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
    """What was commonest after each expert, [E]; after one that was never seen, what is commonest
    of all."""
    found: Counts = np.where(seen.any(1), seen.argmax(1), seen.sum(0).argmax())
    return found


def surprise(seen: Counts, asked: Counts) -> tuple[float, float]:
    """Nats that `asked` [E, E] costs by counts of `seen` [E, E]: what comes after, alone and
    knowing what was before.

    q(y) = (n_y + 1) / (n + E) and q(y|x) = (n_xy + a q(y)) / (n_x + a), with the a of some powers
    of 4 by which `seen` costs itself least, each token left out of its own counts. Source: MacKay
    and Peto 1995, Nat. Lang. Eng. 1(3).
    """
    alone = (seen.sum(0) + 1) / (seen.sum() + len(seen))
    rows = seen.sum(1, keepdims=True)

    def left_out(weight: float) -> float:
        known = np.maximum(seen - 1, 0) + weight * alone
        return float(-(seen * np.log(known / np.maximum(rows - 1 + weight, weight))).sum())

    weight = min((4.0**power for power in range(-3, 9)), key=left_out)
    known = (seen + weight * alone) / (rows + weight)
    return float(-(asked.sum(0) * np.log(alone)).sum()), float(-(asked * np.log(known)).sum())


def _hits_of_all(
    folder: Path, pairs: Mapping[tuple[str, str], LayerPairCounts]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Which part of their k choices tokens have among the k likeliest after those before, and among
    the commonest."""
    tables = {
        names: [likelihoods(pair.every[1 - half]) for half in (0, 1)]
        for names, pair in pairs.items()
    }
    found = {names: np.zeros(3) for names in pairs}
    for _, layers in steps_of_trace(folder):
        for here, there, before, after in neighbors(layers):
            for half, part in enumerate(halves(len(before.experts))):
                after_each, commonest = tables[here, there][half]
                actual = after.experts[part]
                best = likeliest(after_each, before.experts[part], actual.shape[1])
                blind = np.argsort(-commonest, kind="stable")[: actual.shape[1]]
                found[here, there] += (
                    common(best, actual),
                    np.isin(actual, blind).sum(),
                    actual.size,
                )
    return {
        names: (right / max(size, 1), blind / max(size, 1))
        for names, (right, blind, size) in found.items()
    }


def likelihoods(every: Counts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """How often each expert was chosen after each [E, E], as a share of the choices; and whatever
    was before [E]."""
    commonest = every.sum(0) / max(int(every.sum()), 1)
    rows = every.sum(1, keepdims=True)
    return np.where(rows > 0, every / np.maximum(rows, 1), commonest), commonest


def likeliest(
    table: NDArray[np.float64], before: NDArray[np.int16], count: int
) -> NDArray[np.int64]:
    """The `count` experts that are likeliest after those `before` [n, k], whose tables are added
    up: [n, count]."""
    parts = [table[before[at : at + 1024]].sum(1) for at in range(0, len(before), 1024)]
    found = [np.argsort(-part, axis=1, kind="stable")[:, :count] for part in parts]
    return np.concatenate(found) if found else np.zeros((0, count), dtype=np.int64)


def common(mine: NDArray[Any], others: NDArray[Any]) -> int:
    """How many experts of each token [n, k] are in both, over all tokens."""
    return int((mine[:, :, None] == others[:, None, :]).sum())
