"""metrics.jsonl: each step once, whatever a crash left behind."""

import json
from pathlib import Path

import pytest

from megalith.errors import DataError
from megalith.observe.metrics import MetricsFile, cut_after, read_metrics


def test_rows_are_read_back_with_a_time(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", resume_at=0)
    file.write({"step": 1, "loss": 2.5})
    file.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["loss"] == 2.5
    assert str(row["time_utc"]).endswith("+00:00")


def test_resume_removes_later_steps_and_an_incomplete_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)) + '{"step": 5, "lo'
    )
    file = MetricsFile(path, resume_at=2)
    file.write({"step": 3, "loss": 1.0})
    file.close()
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_evaluation_row_of_the_last_saved_step_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 2}\n{"step": 2, "eval_loss": 1}\n{"step": 3}\n')
    cut_after(path, 2)
    assert [row.get("eval_loss") for row in read_metrics(path)] == [None, 1]


@pytest.mark.parametrize("line", ["step 2", "{}", "[2]", "2", "null", '{"step": "2"}'])
def test_invalid_line_is_named_and_file_is_unchanged(line: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    text = '{"step": 1}\n' + line + '\n{"step": 3}\n'
    path.write_text(text)
    reported = r"metrics\.jsonl: line 2 is not a row of metrics \(.+\)\. Remove the line, or move"
    with pytest.raises(DataError, match=reported):
        cut_after(path, 2)
    assert path.read_text() == text


def test_counts_are_a_list_in_the_file_and_a_histogram_with_a_bar_for_each_in_tensorboard(
    tmp_path: Path,
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    file = MetricsFile(
        tmp_path / "metrics.jsonl", resume_at=0, tensorboard=tmp_path / "tensorboard"
    )
    file.write({"step": 3, "loss": 2.5, "moe_layers_0_tokens": [6, 0, 2]})
    file.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row["moe_layers_0_tokens"] == [6, 0, 2]
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Histograms("moe_layers_0_tokens")
    reported = event.histogram_value
    assert (
        event.step,
        reported.num,
        reported.sum,
        reported.sum_squares,
        reported.min,
        reported.max,
    ) == (
        3,
        8,
        4,
        8,
        -0.5,
        2.5,
    )
    assert (reported.bucket_limit, reported.bucket) == ([0.5, 1.5, 2.5], [6, 0, 2])
    assert [event.value for event in events.Scalars("loss")] == [2.5]


def test_missing_metrics_file_is_ignored(tmp_path: Path) -> None:
    cut_after(tmp_path / "metrics.jsonl", 5)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_nonfinite_loss_is_written_as_null(
    tmp_path: Path,
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", resume_at=0)
    file.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf"), "lr": 0.5})
    file.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["loss"], row["grad_norm"], row["lr"]) == (None, None, 0.5)
