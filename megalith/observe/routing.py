"""Routing traces, and plots of metrics and routing."""

import heapq
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalith import storage
from megalith.config.train import TrainRun
from megalith.config.tree import load_yaml
from megalith.errors import DataError
from megalith.observe.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
        counts, heldout = pair.best[1 - half], pair.best[half]
        right += float(heldout[np.arange(len(heldout)), most_frequent(counts)].sum())
        blind += float(heldout[:, int(counts.sum(0).argmax())].sum())
        before, after = heldout_cross_entropy(counts, heldout)
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


def most_frequent(counts: Counts) -> Counts:
    """Return the most frequent next expert after each expert, [E]; overall if the expert was never
    chosen."""
    predictions: Counts = np.where(counts.any(1), counts.argmax(1), counts.sum(0).argmax())
    return predictions


def heldout_cross_entropy(counts: Counts, heldout: Counts) -> tuple[float, float]:
    """Return the cross-entropy of `heldout` [E, E] in nats under `counts` [E, E], without and with
    the previous choice.

    q(y) = (n_y + 1) / (n + E) and q(y|x) = (n_xy + a q(y)) / (n_x + a), where a is the power of 4
    with the lowest leave-one-out cross-entropy of `counts`. Source: MacKay and Peto 1995, Nat.
    Lang. Eng. 1(3).
    """
    alone = (counts.sum(0) + 1) / (counts.sum() + len(counts))
    rows = counts.sum(1, keepdims=True)

    def left_out(weight: float) -> float:
        known = np.maximum(counts - 1, 0) + weight * alone
        return float(-(counts * np.log(known / np.maximum(rows - 1 + weight, weight))).sum())

    weight = min((4.0**power for power in range(-3, 9)), key=left_out)
    known = (counts + weight * alone) / (rows + weight)
    return float(-(heldout.sum(0) * np.log(alone)).sum()), float(-(heldout * np.log(known)).sum())


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


# --- plots of a run, drawn from its metrics

MEAN_SHARE = 25
"""Heuristic: the running mean of the loss covers 1/25 of the rows."""

MAX_LEGEND_ENTRIES = 12
"""Heuristic: of more layers only some are named in the legend."""


def plot_run(folder: Path) -> Path | None:
    """Draw `plots/loss.png`: loss, gradient norm, learning rate and throughput by step.

    Returns None if there is no row with a loss.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    names = ("loss", "eval_loss", "grad_norm", "lr", "tokens_per_second")
    curves = {name: _curve(rows, name) for name in names}
    steps, losses = curves["loss"]
    if not steps:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    loss, norm, rate, throughput = figure.subplots(4, 1, sharex=True, height_ratios=(3, 1, 1, 1))
    window = len(losses) // MEAN_SHARE
    if window > 1:
        loss.plot(steps, losses, linewidth=0.8, alpha=0.35, color="C0", label="training")
        means = running_mean(losses, window)
        loss.plot(
            steps,
            means,
            linewidth=1.8,
            color="C0",
            label=f"training, running mean of {window} logged steps",
        )
    else:
        loss.plot(steps, losses, linewidth=1.2, color="C0", label="training")
    if curves["eval_loss"][0]:
        loss.plot(*curves["eval_loss"], "o-", markersize=4, color="C1", label="held out")
    loss.set_ylabel("loss (nats per token)")
    loss.legend()
    norm.plot(*curves["grad_norm"], linewidth=1)
    norm.set_ylabel("gradient norm")
    rate.plot(*curves["lr"], linewidth=1)
    rate.set_ylabel("learning rate")
    throughput.plot(*curves["tokens_per_second"], linewidth=1)
    throughput.set_ylabel("tokens/s (all ranks)")
    for axes in (norm, rate, throughput):
        axes.set_ylim(bottom=0)
    throughput.set_xlabel("step")
    _finish_panels(figure, (loss, norm, rate, throughput))
    return _saved(figure, folder, "loss")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean around each value: `window` values wide, and narrower at both ends.

    >>> running_mean([1.0, 2.0, 6.0, 4.0], 3)
    [1.5, 3.0, 4.0, 5.0]
    """
    before, after = window // 2, window - window // 2
    parts = [values[max(0, i - before) : i + after] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def plot_experts(folder: Path) -> Path | None:
    """Draw `plots/experts.png`: the load of each layer's busiest expert, and the aux losses, by
    step.

    Returns None for models without experts.
    """
    rows = read_metrics(folder / "metrics.jsonl")
    names = {name for row in rows for name in row if name.startswith("moe_")}
    loads = sorted(
        (name for name in names if name.endswith("_load") and name != "moe_max_load"), key=_number
    )
    if not loads:
        return None
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    whole = (name for name in names if not name.startswith(("moe_layers_", "moe_mtp_")))
    losses = sorted(name for name in whole if name.endswith("_loss"))
    figure = Figure(figsize=(9, 8), layout="constrained")
    load, loss = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    stride = -(-len(loads) // MAX_LEGEND_ENTRIES)
    for i, name in enumerate(loads):
        label = name.removeprefix("moe_").removesuffix("_load")
        color = colormaps["viridis"](i / max(1, len(loads) - 1) * 0.9)
        load.plot(
            *_curve(rows, name),
            linewidth=1,
            color=color,
            label=label if i % stride == 0 else f"_{label}",
        )
    load.axhline(
        1.0, color="gray", linewidth=1.2, linestyle="--", label="balanced: all experts equally busy"
    )
    run = _run_of(folder)
    if run is not None and run.model.moe is not None:
        collapse = run.model.moe.num_experts / run.model.moe.top_k
        text = (
            f"collapse: all tokens choose the same {run.model.moe.top_k} of "
            f"{run.model.moe.num_experts} experts"
        )
        load.axhline(collapse, color="red", linewidth=1.2, linestyle=":", label=text)
    load.set_title(
        "Load of each layer's busiest expert: its tokens divided by the mean over all experts"
    )
    load.set_ylabel("load of the busiest expert")
    load.set_ylim(bottom=0)
    load.legend(fontsize="small", ncols=2)
    for name in losses:
        loss.plot(
            *_curve(rows, name), linewidth=1, label=name.removeprefix("moe_").removesuffix("_loss")
        )
    loss.set_title("Aux losses of the routers, before their coefficients")
    loss.set_ylabel("aux loss")
    loss.set_xlabel("step")
    if losses:
        loss.legend(fontsize="small")
    _finish_panels(figure, (load, loss))
    return _saved(figure, folder, "experts")


def plot_routing(
    folder: Path,
    uses: Sequence[ExpertLoad],
    pairs: Sequence[RoutingPredictability],
    hits: Mapping[tuple[str, str], float],
) -> Path:
    """Draw `plots/routing.png`: the load of each layer's experts, and how well each layer predicts
    the next.

    `hits`: hit rates of a layer's router applied to the hidden states of the same or the previous
    layer.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 10), layout="constrained")
    share, prediction = figure.subplots(2, 1)
    busiest = [
        sorted((value * len(use.shares) for value in use.shares), reverse=True) for use in uses
    ]
    image = share.imshow(busiest, aspect="auto", interpolation="nearest", vmin=0.0)
    figure.colorbar(image, ax=share, label="load (tokens of the expert / mean); balanced: 1")
    share.set_yticks(range(len(uses)), [use.layer for use in uses], fontsize="small")
    share.set_title("Load of the experts, each layer's busiest first")
    share.set_xlabel("expert's rank by load within its layer (0 = busiest)")
    share.set_ylabel("layer")
    curves = {
        "hits, predicted from the choices one layer before": [pair.all for pair in pairs],
        "hits, predicting the k most used experts for every token (baseline)": [
            pair.all_blind for pair in pairs
        ],
        "share of the best choice's entropy that the best choice one layer before explains": [
            pair.information for pair in pairs
        ],
    }
    if any(one != other for one, other in hits):
        by_router = [hits.get((pair.layer, pair.following), float("nan")) for pair in pairs]
        curves["hits, this layer's router applied to the hidden states one layer before"] = (
            by_router
        )
    for label, values in curves.items():
        prediction.plot(range(len(pairs)), values, "o-", markersize=4, linewidth=1, label=label)
    prediction.set_xticks(
        range(len(pairs)), [pair.following for pair in pairs], fontsize="small", rotation=90
    )
    prediction.set_ylim(-0.02, 1.02)
    prediction.set_title("How well a token's experts can be predicted one layer before")
    prediction.set_xlabel("layer whose choices are predicted")
    prediction.set_ylabel("hits: share of the token's k experts")
    prediction.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.3))
    prediction.grid(alpha=0.3)
    return _saved(figure, folder, "routing")


def _finish_panels(figure: "Figure", panels: Iterable["Axes"]) -> None:
    """Give stacked panels a grid, the same x limits, and aligned y labels."""
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.margins(x=0.01)
    figure.align_ylabels()


def _run_of(folder: Path) -> TrainRun | None:
    """Return the settings of the run, if its folder has them."""
    file = folder / "config.yaml"
    return load_yaml(file, TrainRun, stored=True) if file.is_file() else None


def describe_run(run: TrainRun) -> str:
    """Return the main settings of a run in two lines: model, then batch, learning rate, precision
    and layout."""
    model, train, parallel = run.model, run.train, run.parallel
    size = [f"{model.num_layers} layers", f"hidden {model.hidden_size}", f"{model.num_heads} heads"]
    size += (
        [f"{model.moe.num_experts} experts, top {model.moe.top_k}"] if model.moe is not None else []
    )
    batch = f"{train.global_batch_size} x {train.seq_len} tokens"
    work = [f"{train.steps} steps of {batch}", f"lr {run.schedule.lr:g}", run.precision.params]
    degrees = {name: getattr(parallel, name) for name in ("tp", "pp", "cp", "ep", "dp")}
    work += [
        f"{name} {degree}" for name, degree in degrees.items() if degree is not None and degree > 1
    ]
    return f"{', '.join(size)}\n{', '.join(work)}"


def _saved(figure: "Figure", folder: Path, name: str) -> Path:
    """Save a figure in the run's plots folder, without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    run = _run_of(folder)
    figure.suptitle(folder.name if run is None else f"{folder.name}: {describe_run(run)}")
    target = folder / "plots" / f"{name}.png"
    target.parent.mkdir(exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(target)
    return target


def _number(name: str) -> tuple[str, int]:
    """Return the sort key of a name with a number."""
    digits = "".join(filter(str.isdigit, name))
    return name.split(digits)[0] if digits else name, int(digits or 0)


def _curve(
    rows: Sequence[dict[str, float | int | str | None]], name: str
) -> tuple[list[float], list[float]]:
    points = [
        (float(row["step"] or 0), float(row[name] or 0))
        for row in rows
        if row.get(name) is not None
    ]
    return [x for x, _ in points], [y for _, y in points]
