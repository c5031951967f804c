import io
import re
from pathlib import Path

import pytest

from megalith.cli.main import main
from megalith.config.data import data_problems
from megalith.data.build import build_datasets
from megalith.data.sample import SampleSettings
from megalith.data.tokenizer import ByteTokenizer
from megalith.recipes import build_recipe


def test_its_conversations_fit_its_rows_and_most_of_a_row_is_filled() -> None:
    run = build_recipe("sft_tiny")
    assert data_problems(run.data) == []
    splits = build_datasets(
        run.data,
        SampleSettings(
            seq_len=run.train.seq_len, seed=run.seed, vocab_size=run.model.vocab_size, eod=256
        ),
        train_samples=8,
        valid_samples=8,
        tokenizer=ByteTokenizer(),
    )
    assert splits.train is not None and len(splits.notes) == 2
    assert "600 conversations; " in splits.notes[0], "none is cut or left out"


@pytest.mark.slow  # trains the whole recipe: a minute on two idle cores
def test_chat_with_the_trained_model_gives_whole_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    assert main(["train", "sft_tiny", "--run", run]) == 0
    questions = [(a, b) for a in range(2, 9, 2) for b in range(1, 10, 3)]
    lines = [f"What is {a} plus {b}?\n/reset\n" for a, b in questions]
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(lines)))
    capsys.readouterr()
    assert main(["chat", run]) == 0
    answers = capsys.readouterr().out.strip().splitlines()
    well_formed = [answer for answer in answers if re.fullmatch(r"\d plus \d is \d+\.", answer)]
    assert len(well_formed) >= len(questions) - 1, answers
    repeated = sum(
        answer.startswith(f"{a} plus {b} is ") for answer, (a, b) in zip(answers, questions)
    )
    assert repeated >= len(questions) / 2, answers
