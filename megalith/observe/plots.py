"""Plots of a run, drawn from its metrics."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.config.train import TrainRun
from megalith.config.tree import load_yaml
from megalith.observe.metrics import read_metrics
from megalith.observe.routing import ExpertLoad, RoutingPredictability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
