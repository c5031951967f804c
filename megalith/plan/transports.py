"""Token dispatchers: the built-in ones, and those of installed packages.

A package provides a dispatcher as an entry point of the group `megalith.transports`: the entry
point's name is the value of `parallel.dispatcher`, and its object is a `Transport` of
parallel/transports.py.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from megalith.config.suggest import did_you_mean

GROUP = "megalith.transports"

BUILT_IN = ("alltoall", "allgather", "reference")
"""Names of the built-in dispatchers, which a package cannot use."""


def installed_transports() -> Mapping[str, EntryPoint]:
    """Return the dispatchers of other packages by name, without importing them."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


def transport_problems(name: str) -> list[str]:
    """Return an error text if no token dispatcher has this name, else an empty list."""
    if name in BUILT_IN:
        return []
    known = (*BUILT_IN, *sorted(installed_transports()))
    if name in known:
        return []
    return [
        f"parallel.dispatcher={name} is not a known token dispatcher."
        f"{did_you_mean(name, known)} Use one of "
        f"{', '.join(known)}, or install the package that provides it."
    ]
