"""The loss plot is a PNG, and there is none without rows."""

from pathlib import Path

from megalith.observe.plots import plot_run


def test_loss_plot_is_a_png(tmp_path: Path) -> None:
    rows = ['{"step": 1, "loss": 3.0, "grad_norm": 1.0, "lr": 0.1}', '{"step": 1, "eval_loss": 2.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    target = plot_run(tmp_path)
    assert target == tmp_path / "plots" / "loss.png"
    assert target.read_bytes().startswith(b"\x89PNG")


def test_without_rows_there_is_no_plot(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert plot_run(tmp_path) is None
