"""What commands print: with `--json` exactly one document on standard output, and beside it what to
know of a model."""

import json
import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # help should not have to wait for torch
    from megalith.models.pretrained import Pretrained


def print_json(document: Any) -> None:  # Any: whatever JSON can hold
    """Write one JSON document to standard output. Numbers that JSON lacks (nan, infinity) become
    null."""
    print(json.dumps(finite(document), indent=2, ensure_ascii=False))


def finite(value: Any) -> Any:  # Any: JSON in, JSON out
    """The same data with nan and infinities replaced by None, tuples by lists and keys by text."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def tell_warnings(source: "Pretrained") -> None:
    """Say on standard error what to know of a model before it is used."""
    for line in source.warnings():
        print(f"{source.path}: {line}", file=sys.stderr)
