"""Settings of restarts in place: ranks that survive a fault keep their processes."""

from dataclasses import dataclass
from typing import Annotated

from megalith.config.fields import Example, Ge, Gt


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """Restart in place: after a fault of a rank, the others keep their processes, dead ranks are
    replaced, and all load the newest checkpoint."""

    max_in_place: Annotated[int, Ge(0), Example(3)] = 0
    """Maximum number of restarts in place within `window_minutes`; 0: a fault ends all ranks."""

    rendezvous_timeout_seconds: Annotated[float, Gt(0)] = 30.0
    """Seconds that ranks have to leave their collectives after a fault, and that new processes have
    to start. Ranks that need longer are killed and replaced; if new processes do, whole replicas
    are removed from data parallelism."""

    window_minutes: Annotated[float, Gt(0)] = 60.0
    """Minutes in which at most `max_in_place` restarts happen."""
