"""Plots of a run, drawn from its metrics."""

from collections.abc import Sequence
from pathlib import Path

from megalith.observe.metrics import read_metrics


def plot_run(folder: Path) -> Path | None:
    """Draw `plots/loss.png`: loss, gradient norm and learning rate by step. None when there is nothing to draw."""
    rows = read_metrics(folder / "metrics.jsonl")
    curves = {name: _curve(rows, name) for name in ("loss", "eval_loss", "grad_norm", "lr")}
    if not curves["loss"][0]:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
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
    figure.suptitle(folder.name)
    target = folder / "plots" / "loss.png"
    target.parent.mkdir(exist_ok=True)
    FigureCanvasAgg(figure)  # draws without a screen
    figure.savefig(target)
    return target


def _curve(rows: Sequence[dict[str, float | int | str | None]], name: str) -> tuple[list[float], list[float]]:
    points = [(float(row["step"] or 0), float(row[name] or 0)) for row in rows if row.get(name) is not None]
    return [x for x, _ in points], [y for _, y in points]
