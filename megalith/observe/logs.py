"""Log messages of a run: log.txt of rank 0, and on request one file per rank."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from megalith.config.observe import ObserveConfig
from megalith.observe.rank_warnings import PACKAGE, is_merging_warnings


class JsonFormatter(logging.Formatter):
    """Formats a message as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return time, level, logger, text, and the traceback if there is one."""
        time = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time_utc": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _LevelFilter(logging.Filter):
    """Selects the messages of each logger from its level on."""

    def __init__(self, levels: Mapping[str, int]) -> None:
        """`levels`: by logger; of others, that of the nearest parent applies."""
        super().__init__()
        self._levels = levels

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a message is selected."""
        name = record.name
        while name not in self._levels:
            name = name.rpartition(".")[0]
        return record.levelno >= self._levels[name]


@contextmanager
def log_to(path: Path, config: ObserveConfig) -> Iterator[None]:
    """Append the package's log messages to `path` inside the context, from the levels of the
    settings on, and write warnings to standard error, whatever the levels; not those that
    `merge_warnings` prints."""
    path.parent.mkdir(parents=True, exist_ok=True)
    levels = {PACKAGE: config.log_level} | dict(parse_log_levels(config.log_levels))
    before = {name: logging.getLogger(name).level for name in levels}
    file = logging.FileHandler(path, encoding="utf-8")
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    file.setFormatter(JsonFormatter() if config.log_format == "json" else text)
    numbers = {name: logging.getLevelNamesMapping()[level] for name, level in levels.items()}
    file.addFilter(_LevelFilter(numbers))
    handlers: list[logging.Handler] = [file]
    if not is_merging_warnings():
        terminal = logging.StreamHandler()
        terminal.setLevel(logging.WARNING)
        handlers.append(terminal)
    for name, number in numbers.items():
        logging.getLogger(name).setLevel(min(number, logging.WARNING))
    for handler in handlers:
        logging.getLogger(PACKAGE).addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            logging.getLogger(PACKAGE).removeHandler(handler)
        for name, number in before.items():
            logging.getLogger(name).setLevel(number)
        file.close()


def parse_log_levels(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Split `NAME=LEVEL` texts, which the rules have checked."""
    return [(name, level) for name, _, level in (text.partition("=") for text in texts)]
