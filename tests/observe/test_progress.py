"""Without a terminal, progress is plain lines, few of them, the last step always."""

import io
import re
import sys

import pytest

from megalith.observe.metrics import StepProgress


def test_plain_lines_first_and_last(capsys: pytest.CaptureFixture[str]) -> None:
    with StepProgress(total=3, show=True) as progress:
        for step in (1, 2, 3):
            progress.step(step, {"loss": "1.0"})
        progress.print_line("saved")
    assert capsys.readouterr().out.splitlines() == [
        "step 1/3 · loss 1.0",
        "step 3/3 · loss 1.0",
        "saved",
    ]


def test_only_first_rank_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with StepProgress(total=1, show=False) as progress:
        progress.step(1, {"loss": "1.0"})
        progress.print_line("saved")
    assert capsys.readouterr().out == ""


def test_progress_noun_and_stream_are_used(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with StepProgress(total=9, show=True, noun="row", stream=sys.stderr) as progress:
        progress.step(4, {})
        progress.step(9, {})
    output = capsys.readouterr()
    assert output.err.splitlines() == ["row 4/9", "row 9/9"] and output.out == ""


def test_a_terminal_gets_a_bar_with_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    with StepProgress(total=9, show=True, noun="row", stream=screen) as progress:
        progress.print_line("reading 9 rows")
        progress.step(9, {})
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert "reading 9 rows\n" in plain and re.search(r"row\s+9/9 \S+", plain)
