"""A meter of activation memory: what autograd keeps between forward and backward, module by module.

Tensors that share memory count once, with all of that memory; parameters do not count. What is kept
only because a Python variable still holds it is not seen, and neither is what appears for a while
inside an operation.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Meter:
    """Bytes that are kept, now and at most, and by whom."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.path = [""]
        """Names of the modules that are running, outermost first."""

        self.live = 0
        """Bytes that are kept now."""

        self.peak = 0
        """The most there have been."""

        self.kept: Counter[str] = Counter()
        """Bytes by name of the module that kept them first; "" outside of modules. Grows only."""

        self._models = models
        self._excluded = {
            x.untyped_storage()._cdata
            for one in models
            for x in (*one.parameters(), *one.buffers())
        }
        self._uses: Counter[int] = Counter()

    def layers(self) -> Mapping[str, int]:
        """`kept` by layer: "layers.0" and so on, and what is outside of layers by its own name."""
        found: Counter[str] = Counter()
        for name, nbytes in self.kept.items():
            words = name.split(".")
            found[".".join(words[:2]) if words[0] == "layers" else name] += nbytes
        return found

    def pack(self, x: Tensor) -> "Tensor | Saved":
        """Note a tensor that is being saved."""
        storage = x.untyped_storage()
        if storage._cdata in self._excluded or self._is_parameter(storage._cdata):
            return x
        return Saved(x.detach(), self)

    def _is_parameter(self, key: int) -> bool:
        """Asked each time: with zero=3 a layer has its parameters, and other ones, only while it
        runs."""
        return any(
            p.untyped_storage()._cdata == key for model in self._models for p in model.parameters()
        )

    def begins(self, key: int, nbytes: int) -> None:
        """One more tensor in this memory."""
        self._uses[key] += 1
        if self._uses[key] == 1:
            self.kept[self.path[-1]] += nbytes
            self.live += nbytes
            self.peak = max(self.peak, self.live)

    def ends(self, key: int, nbytes: int) -> None:
        """One tensor less."""
        self._uses[key] -= 1
        if self._uses[key] == 0:
            del self._uses[key]  # the memory is free, and its number may come again
            self.live -= nbytes


class Saved:
    """A saved tensor, which tells the meter when it goes."""

    def __init__(self, x: Tensor, meter: Meter) -> None:
        storage = x.untyped_storage()
        self.x, self.meter, self.key, self.nbytes = x, meter, storage._cdata, storage.nbytes()
        meter.begins(self.key, self.nbytes)

    def __del__(self) -> None:
        self.meter.ends(self.key, self.nbytes)


@contextmanager
def metered(*models: nn.Module) -> Iterator[Meter]:
    """Measure everything that is saved for backward inside, and when it is let go, inside or later.

    Only the innermost hooks on saved tensors are called: what a recomputed region would keep is not
    kept and not seen, and an offloaded layer reports by itself.
    """
    meter = Meter(models)
    with ExitStack() as stack:
        for model in models:
            for name, module in model.named_modules():
                stack.enter_context(
                    _handle(module.register_forward_pre_hook(partial(_enter, meter, name)))
                )
                hook = module.register_forward_hook(partial(_leave, meter), always_call=True)
                stack.enter_context(_handle(hook))
        stack.enter_context(saved_tensors_hooks(meter.pack, _unpack))
        yield meter


def _unpack(saved: Tensor | Saved) -> Tensor:
    return saved.x if isinstance(saved, Saved) else saved


def _enter(
    meter: Meter, name: str, module: nn.Module, given: Any
) -> None:  # Any: whatever the module takes
    meter.path.append(name)


def _leave(meter: Meter, module: nn.Module, given: Any, result: Any) -> None:
    meter.path.pop()


@contextmanager
def _handle(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
