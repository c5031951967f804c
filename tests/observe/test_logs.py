"""log.txt: what the package logs, with times, appended over restarts."""

import json
import logging
from pathlib import Path

import pytest

from megalith.config.observe import ObserveConfig
from megalith.observe.logs import log_to

DEFAULT = ObserveConfig()


def test_log_is_appended_and_excludes_other_loggers(tmp_path: Path) -> None:
    path = tmp_path / "run" / "log.txt"
    for text in ("first", "second"):
        with log_to(path, DEFAULT):
            logging.getLogger("megalith.train.loop").info(text)
            logging.getLogger("other").info("not ours")
    lines = path.read_text().splitlines()
    assert [line.split(": ", 1)[1] for line in lines] == ["first", "second"]
    assert "INFO megalith.train.loop" in lines[0]


def test_warnings_reach_the_terminal_and_nothing_is_logged_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with log_to(tmp_path / "log.txt", DEFAULT):
        logging.getLogger("megalith.data").warning("short split")
        logging.getLogger("megalith.data").info("quiet")
    assert capsys.readouterr().err == "short split\n"
    logging.getLogger("megalith.data").info("later")
    assert "later" not in (tmp_path / "log.txt").read_text()


def test_levels_apply_to_one_logger_and_are_restored(tmp_path: Path) -> None:
    config = ObserveConfig(log_level="ERROR", log_levels=("megalith.data=DEBUG",))
    with log_to(tmp_path / "log.txt", config):
        logging.getLogger("megalith.data").debug("detail")
        logging.getLogger("megalith.train").warning("hidden")
    assert [line.split(": ")[1] for line in (tmp_path / "log.txt").read_text().splitlines()] == [
        "detail"
    ]
    assert logging.getLogger("megalith.data").level == logging.NOTSET


def test_warnings_reach_the_terminal_whatever_the_level_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ObserveConfig(log_level="ERROR", log_levels=("megalith.data=INFO",))
    with log_to(tmp_path / "log.txt", config):
        logging.getLogger("megalith.train.loop").warning("short split")
        logging.getLogger("megalith.train.loop").info("quiet")
        logging.getLogger("megalith.data.loader").info("detail")
    assert capsys.readouterr().err == "short split\n"
    assert (tmp_path / "log.txt").read_text().endswith("INFO megalith.data.loader: detail\n")
    assert "short split" not in (tmp_path / "log.txt").read_text()


def test_json_lines_have_a_traceback(tmp_path: Path) -> None:
    with log_to(tmp_path / "log.txt", ObserveConfig(log_format="json")):
        try:
            raise ZeroDivisionError("planted")
        except ZeroDivisionError:
            logging.getLogger("megalith.train").exception("failed with %s", "it")
    (line,) = (tmp_path / "log.txt").read_text().splitlines()
    fields = json.loads(line)
    assert (fields["level"], fields["message"]) == ("ERROR", "failed with it")
    assert fields["traceback"].endswith("ZeroDivisionError: planted")
