"""The loss plot is a PNG, and there is none without rows."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes

from megalith.observe.plots import plot_experts, plot_run


def test_loss_plot_is_a_png(tmp_path: Path) -> None:
    rows = ['{"step": 1, "loss": 3.0, "grad_norm": 1.0, "lr": 0.1}', '{"step": 1, "eval_loss": 2.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    target = plot_run(tmp_path)
    assert target == tmp_path / "plots" / "loss.png"
    assert target.read_bytes().startswith(b"\x89PNG")


def test_without_rows_there_is_no_plot(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert plot_run(tmp_path) is None


def test_losses_of_single_layers_are_not_drawn_among_those_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = (
        '{"step": 1, "moe_batch_loss": 1.5, "moe_max_load": 2.0, "moe_layers_0_load": 2.0, "moe_mtp_0_layer_load": 1.0,'
        ' "moe_layers_0_batch_loss": 1.0, "moe_mtp_0_layer_batch_loss": 2.0, "moe_layers_0_tokens": [3, 1]}'
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
