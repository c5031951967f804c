"""The loss plot is a PNG, and there is none without rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megalith.config.tree import save_yaml
from megalith.observe import routing
from megalith.observe.routing import (
    ExpertLoad,
    RoutingPredictability,
    plot_experts,
    plot_routing,
    plot_run,
    running_mean,
)
from megalith.recipes import resolve


def test_loss_plot_is_a_png(tmp_path: Path) -> None:
    rows = [
        '{"step": 1, "loss": 3.0, "grad_norm": 1.0, "lr": 0.1}',
        '{"step": 1, "eval_loss": 2.0}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    target = plot_run(tmp_path)
    assert target == tmp_path / "plots" / "loss.png"
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that a test draws, by name."""
    drawn: dict[str, Figure] = {}
    save = routing._saved

    def note(figure: Figure, folder: Path, name: str) -> Path:
        drawn[name] = figure
        return save(figure, folder, name)

    monkeypatch.setattr(routing, "_saved", note)
    return drawn


def labels_of(axes: Axes) -> str:
    legend = axes.get_legend()
    return "" if legend is None else " | ".join(text.get_text() for text in legend.get_texts())


def test_loss_plot_has_a_running_mean_throughput_and_the_main_settings(
    tmp_path: Path, figures: dict[str, Figure]
) -> None:
    save_yaml(resolve("tiny_cpu"), tmp_path / "config.yaml")
    row = {"grad_norm": 1.0, "lr": 0.1, "tokens_per_second": 5000.0}
    rows = [{"step": step, "loss": 3.0 + (-1) ** step, **row} for step in range(1, 101)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert plot_run(tmp_path) is not None
    loss, _, _, throughput = figures["loss"].axes
    assert labels_of(loss) == "training | training, running mean of 4 logged steps"
    means = np.asarray(loss.lines[1].get_ydata(), dtype=float)
    assert np.ptp(means[2:-2]) == 0.0, "the oscillation of the raw loss is gone"
    assert (
        throughput.get_ylabel() == "tokens/s (all ranks)"
        and throughput.lines[0].get_ydata()[0] == 5000.0
    )
    assert {axes.get_xlim() for axes in figures["loss"].axes} == {loss.get_xlim()}
    title = figures["loss"].get_suptitle()
    assert "6 layers, hidden 256, 8 heads\n40 steps of 8 x 128 tokens, lr 0.001, fp32" in title


def test_loss_of_a_few_steps_is_drawn_without_a_mean(
    tmp_path: Path, figures: dict[str, Figure]
) -> None:
    rows = [{"step": step, "loss": 3.0} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_run(tmp_path)
    assert labels_of(figures["loss"].axes[0]) == "training"


def test_running_mean_is_centered_and_narrower_at_the_ends() -> None:
    assert running_mean([1.0, 2.0, 6.0, 4.0], 3) == [1.5, 3.0, 4.0, 5.0]
    assert running_mean([1.0, 2.0], 1) == [1.0, 2.0]


def test_expert_and_routing_plots_have_titles_and_labels(
    tmp_path: Path, figures: dict[str, Figure]
) -> None:
    save_yaml(resolve("moe_tiny"), tmp_path / "config.yaml")
    row = {
        "step": 1,
        "moe_batch_loss": 1.5,
        **{f"moe_layers_{layer}_load": 2.0 for layer in range(30)},
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    plot_experts(tmp_path)
    uses = [
        ExpertLoad(layer=f"layers.{layer}", tokens=8, shares=(0.75, 0.25)) for layer in range(2)
    ]
    pair = RoutingPredictability(
        "layers.0",
        "layers.1",
        tokens=8,
        information=0.1,
        first=0.5,
        first_blind=0.4,
        all=0.6,
        all_blind=0.5,
    )
    plot_routing(tmp_path, uses, [pair], {("layers.0", "layers.1"): 0.7})
    for name in ("experts", "routing"):
        for axes in figures[name].axes[:2]:  # the third is a color bar
            assert axes.get_title() and axes.get_ylabel(), name
        assert (
            figures[name].axes[1].get_xlabel()
            and "8 experts, top 2" in figures[name].get_suptitle()
        )
    legend = labels_of(figures["experts"].axes[0])
    assert "balanced: all experts equally busy" in legend
    assert "collapse: all tokens choose the same 2 of 8 experts" in legend
    assert legend.count("layers_") <= 12, "30 layers would cover the plot"
    assert labels_of(figures["routing"].axes[1]).count("hits, ") == 3


def test_no_plot_without_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert plot_run(tmp_path) is None


def test_per_layer_losses_are_not_in_the_loss_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = (
        '{"step": 1, "moe_batch_loss": 1.5, "moe_max_load": 2.0, "moe_layers_0_load": 2.0, '
        '"moe_mtp_0_layer_load": 1.0,'
        ' "moe_layers_0_batch_loss": 1.0, "moe_mtp_0_layer_batch_loss": 2.0, '
        '"moe_layers_0_tokens": [3, 1]}'
    )
    (tmp_path / "metrics.jsonl").write_text(f"{row}\n")
    drawn: list[object] = []
    plot = Axes.plot

    def noted(self: Axes, *values: Any, **how: Any) -> Any:  # Any: as matplotlib has it
        drawn.append(how.get("label"))
        return plot(self, *values, **how)

    monkeypatch.setattr(Axes, "plot", noted)
    target = plot_experts(tmp_path)
    assert target is not None and target.read_bytes().startswith(b"\x89PNG")
    assert drawn == ["layers_0", "mtp_0_layer", "batch"]
