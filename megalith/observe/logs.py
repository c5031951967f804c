"""log.txt of a run: log messages with times; warnings are also printed to the terminal."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Append the package's log messages to `path` inside the context; warnings also go to standard
    error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("megalith")
    before = logger.level
    file, terminal = logging.FileHandler(path, encoding="utf-8"), logging.StreamHandler()
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    terminal.setLevel(logging.WARNING)
    logger.setLevel(logging.INFO)
    for handler in (file, terminal):
        logger.addHandler(handler)
    try:
        yield
    finally:
        for handler in (file, terminal):
            logger.removeHandler(handler)
        logger.setLevel(before)
        file.close()
