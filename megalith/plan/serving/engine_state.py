"""States of an engine: running, paused, or suspended; and the commands that change them.

    running --pause--> paused --suspend--> suspended
       ^                 | ^                   |
       +-----resume------+ +------wake_up------+

A paused engine executes no steps. A suspended one is paused, and has released device memory.
`suspend` also pauses a running engine. A repeated command has no effect. A suspended engine whose
weights are in device memory can also release them.
"""

from dataclasses import dataclass, replace
from typing import Literal

from megalith.errors import ConfigError, UserError, did_you_mean

KVCacheMode = Literal["persist", "offload", "recompute"]
"""What happens to the KV cache of a suspended engine. persist: it stays in device memory; offload:
the blocks in use are copied to host memory, and back; recompute: it is dropped, the prefix cache is
emptied, and the requests in flight are prefilled again."""

KV_CACHE_MODES: tuple[KVCacheMode, ...] = ("persist", "offload", "recompute")


class InvalidStateError(UserError):
    """A command that the present state of the engine does not allow."""


@dataclass(frozen=True, slots=True)
class Suspension:
    """What a suspended engine has released."""

    kv_cache: KVCacheMode = "offload"
    offload_weights: bool = False
    """Whether the weights are in host memory."""

    @property
    def releases_memory(self) -> bool:
        """Whether any device memory is released."""
        return self.kv_cache != "persist" or self.offload_weights

    def __str__(self) -> str:
        return f"kv_cache={self.kv_cache}, offload_weights={str(self.offload_weights).lower()}"

    def check(self) -> None:
        """Check the name of the mode.

        Raises:
            ConfigError: there is none of this name.
        """
        if self.kv_cache not in KV_CACHE_MODES:
            raise ConfigError(
                f"kv_cache={self.kv_cache!r:.40}: there is no such mode."
                f"{did_you_mean(str(self.kv_cache), KV_CACHE_MODES)} Use one of "
                f"{', '.join(KV_CACHE_MODES)}."
            )


@dataclass(frozen=True, slots=True)
class EngineState:
    """Whether an engine executes steps, and what it has released."""

    is_paused: bool = False
    suspension: Suspension | None = None

    @property
    def name(self) -> Literal["running", "paused", "suspended"]:
        """Return the name of the state."""
        if self.suspension is not None:
            return "suspended"
        return "paused" if self.is_paused else "running"

    def pause(self) -> "EngineState":
        """Return the state after `pause`."""
        return replace(self, is_paused=True)

    def resume(self) -> "EngineState":
        """Return the state after `resume`.

        Raises:
            InvalidStateError: the engine is suspended.
        """
        if self.suspension is not None:
            raise InvalidStateError(
                f"resume: the engine is suspended ({self.suspension}). Call wake_up first, then "
                "resume."
            )
        return EngineState()

    def suspend(self, suspension: Suspension) -> "EngineState":
        """Return the state after `suspend`.

        Raises:
            ConfigError: there is no such mode.
            InvalidStateError: the engine is suspended with other options, apart from weights that
                are not released yet.
        """
        suspension.check()
        current = self.suspension
        if current is not None and suspension not in (
            current,
            replace(current, offload_weights=True),
        ):
            raise InvalidStateError(
                f"suspend with {suspension}: the engine is suspended with {current}. Call "
                "wake_up first, then suspend."
            )
        return EngineState(is_paused=True, suspension=suspension)

    def wake_up(self) -> "EngineState":
        """Return the state after `wake_up`: a suspended engine is paused."""
        return replace(self, suspension=None)
