"""log.txt: what the package logs, with times, appended over restarts."""

import logging
from pathlib import Path

import pytest

from megalith.observe.metrics import log_to


def test_log_is_appended_and_excludes_other_loggers(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.txt"
    for text in ("first", "second"):
        with log_to(path):
            logging.getLogger("megalith.train.loop").info(text)
            logging.getLogger("other").info("not ours")
    lines = path.read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["first", "second"]
    assert "INFO megalith.train.loop" in lines[0]


def test_warnings_reach_the_terminal_and_nothing_is_logged_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log_to(tmp_path / "log.txt"):
        logging.getLogger("megalith.data").warning("short split")
        logging.getLogger("megalith.data").info("quiet")
    assert capsys.readouterr().err == "short split\n"
    logging.getLogger("megalith.data").info("later")
    assert "later" not in (tmp_path / "log.txt").read_text()
