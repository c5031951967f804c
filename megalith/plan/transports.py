"""Ways for tokens to reach their experts: those that are here, and those that installed packages
bring.

A package brings one as an entry point of the group `megalith.transports`, whose name is what
`parallel.dispatcher` says and whose object is a `Transport` of parallel/transports.py. Nothing
registers itself: what is installed is there.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from megalith.config.suggest import did_you_mean

GROUP = "megalith.transports"

BUILT_IN = ("alltoall", "allgather", "reference")
"""What is here; a package cannot take these names."""


def installed_transports() -> Mapping[str, EntryPoint]:
    """Those of other packages, by name; nothing of them is loaded."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def transport_problems(name: str) -> list[str]:
    """That no such way is there, as a message for the user."""
    if name in BUILT_IN:
        return []
    known = (*BUILT_IN, *sorted(installed_transports()))
    if name in known:
        return []
    return [
        f"parallel.dispatcher={name} is no way for tokens to reach "
        f"experts.{did_you_mean(name, known)} Use one of "
        f"{', '.join(known)}, or install the package that brings it."
    ]
