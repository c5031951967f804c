"""log.txt of a run: what Megalith's loggers say, with times; warnings go to the terminal too."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def log_to(path: Path) -> Iterator[None]:
    """Append what the package logs to `path` while this lasts; warnings are shown on standard error
    as well."""
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
