"""Without a terminal, progress is plain lines, few of them, the last step always."""

import pytest

from megalith.observe.progress import StepProgress


def test_plain_lines_first_and_last(capsys: pytest.CaptureFixture[str]) -> None:
    with StepProgress(total=3, show=True) as progress:
        for step in (1, 2, 3):
            progress.step(step, {"loss": "1.0"})
        progress.say("saved")
    assert capsys.readouterr().out.splitlines() == ["step 1/3 · loss 1.0", "step 3/3 · loss 1.0", "saved"]


def test_other_ranks_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with StepProgress(total=1, show=False) as progress:
        progress.step(1, {"loss": "1.0"})
        progress.say("saved")
    assert capsys.readouterr().out == ""
