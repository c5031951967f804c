"""Output of commands: JSON documents on standard output, and warnings about a model on standard
error."""

import json
import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # keep --help free of the torch import
    from megalith.models.pretrained import Pretrained


def print_json(document: Any) -> None:  # Any: whatever JSON can hold
    """Print one JSON document to standard output. NaN and infinities become null."""
    print(json.dumps(finite(document), indent=2, ensure_ascii=False))


def finite(value: Any) -> Any:  # Any: JSON in, JSON out
    """Return the data with NaN and infinities replaced by None, tuples by lists and keys by
    text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def print_warnings(source: "Pretrained") -> None:
    """Print the warnings of a model to standard error."""
    for line in source.warnings():
        print(f"{source.path}: {line}", file=sys.stderr)
