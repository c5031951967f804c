"""Plots of a run, drawn from its metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.observe.metrics import read_metrics
from megalith.observe.routing import Foresight, Use

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_run(folder: Path) -> Path | None:
    """Draw `plots/loss.png`: loss, gradient norm and learning rate by step. None when there is nothing to draw."""
    rows = read_metrics(folder / "metrics.jsonl")
    curves = {name: _curve(rows, name) for name in ("loss", "eval_loss", "grad_norm", "lr")}
    if not curves["loss"][0]:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    loss, norm, rate = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    loss.plot(*curves["loss"], linewidth=1, label="training")
    if curves["eval_loss"][0]:
        loss.plot(*curves["eval_loss"], "o-", markersize=3, label="held out")
    loss.set_ylabel("loss, nats per token")
    loss.legend()
    norm.plot(*curves["grad_norm"], linewidth=1)
    norm.set_ylabel("gradient norm")
    rate.plot(*curves["lr"], linewidth=1)
    rate.set_ylabel("learning rate")
    rate.set_xlabel("step")
    for axes in (loss, norm, rate):
        axes.grid(alpha=0.3)
    return _saved(figure, folder, "loss")


def plot_experts(folder: Path) -> Path | None:
    """Draw `plots/experts.png`: the load of every layer's busiest expert, and the losses of balance, by step. None for
    models without experts."""
    rows = read_metrics(folder / "metrics.jsonl")
    names = {name for row in rows for name in row if name.startswith("moe_")}
    loads = sorted((name for name in names if name.endswith("_load") and name != "moe_max_load"), key=_number)
    if not loads:
        return None
    from matplotlib.figure import Figure

    whole = (name for name in names if not name.startswith(("moe_layers_", "moe_mtp_")))
    losses = sorted(name for name in whole if name.endswith("_loss"))
    figure = Figure(figsize=(8, 6), layout="constrained")
    load, loss = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for name in loads:
        load.plot(*_curve(rows, name), linewidth=1, label=name.removeprefix("moe_").removesuffix("_load"))
    load.axhline(1.0, color="grey", linewidth=0.8)
    load.set_ylabel("tokens of the busiest expert, mean = 1")
    if len(loads) <= 12:
        load.legend(fontsize="small", ncols=2)
    for name in losses:
        loss.plot(*_curve(rows, name), linewidth=1, label=name.removeprefix("moe_").removesuffix("_loss"))
    loss.set_ylabel("losses of balance")
    loss.set_xlabel("step")
    if losses:
        loss.legend(fontsize="small")
    for axes in (load, loss):
        axes.grid(alpha=0.3)
    return _saved(figure, folder, "experts")


def plot_routing(
    folder: Path, uses: Sequence[Use], pairs: Sequence[Foresight], found: Mapping[tuple[str, str], float]
) -> Path:
    """Draw `plots/routing.png`: each layer's experts, busiest first, and what the layer before tells of its choices.

    `found`: of layers' choices, what a router finds in the hidden states of a layer, itself or the one before.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    share, told = figure.subplots(2, 1)
    busiest = [sorted((value * len(use.shares) for value in use.shares), reverse=True) for use in uses]
    image = share.imshow(busiest, aspect="auto", interpolation="nearest", vmin=0.0)
    figure.colorbar(image, ax=share, label="choices, mean = 1")
    share.set_yticks(range(len(uses)), [use.layer for use in uses], fontsize="small")
    share.set_xlabel("experts, the busiest first")
    curves = {
        "known of the best choice": [pair.information for pair in pairs],
        "all k, by counts": [pair.all for pair in pairs], "all k, blind": [pair.all_blind for pair in pairs],
    }  # fmt: skip
    if any(one != other for one, other in found):
        by_router = [found.get((pair.layer, pair.following), float("nan")) for pair in pairs]
        curves["all k, by the router on hidden states before"] = by_router
    for label, values in curves.items():
        told.plot(range(len(pairs)), values, "o-", markersize=3, linewidth=1, label=label)
    told.set_xticks(range(len(pairs)), [pair.following for pair in pairs], fontsize="small", rotation=90)
    told.set_ylim(-0.02, 1.02)
    told.set_ylabel("told by the layer before")
    told.legend(fontsize="small")
    told.grid(alpha=0.3)
    return _saved(figure, folder, "routing")


def _saved(figure: "Figure", folder: Path, name: str) -> Path:
    """Write a figure among the plots of a run, without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.suptitle(folder.name)
    target = folder / "plots" / f"{name}.png"
    target.parent.mkdir(exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(target)
    return target


def _number(name: str) -> tuple[str, int]:
    """Names with a number in them, in its order."""
    digits = "".join(filter(str.isdigit, name))
    return name.split(digits)[0] if digits else name, int(digits or 0)


def _curve(rows: Sequence[dict[str, float | int | str | None]], name: str) -> tuple[list[float], list[float]]:
    points = [(float(row["step"] or 0), float(row[name] or 0)) for row in rows if row.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]
