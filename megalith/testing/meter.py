"""Measures saved activations: the memory that autograd keeps between forward and backward, by
module.

Tensors that share memory count once, with all of that memory; parameters do not count. Tensors that
only Python variables hold, and temporaries inside operations, are not measured.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class ActivationMeter:
    """Bytes of saved activations: current, peak, and by module."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self.path = [""]
        """Names of the modules that are running, outermost first."""

        self.live = 0
        """Bytes that are saved now."""

        self.peak = 0
        """Maximum of `live`."""

        self.kept: Counter[str] = Counter()
        """Total bytes by name of the module that saved them first; "" outside of modules."""

        self._models = models
        self._excluded = {
            x.untyped_storage()._cdata
            for one in models
            for x in (*one.parameters(), *one.buffers())
        }
        self._uses: Counter[int] = Counter()

    def layers(self) -> Mapping[str, int]:
        """Return `kept` by layer ("layers.0", ...); modules outside of layers by their own
        names."""
        nbytes_by_layer: Counter[str] = Counter()
        for name, nbytes in self.kept.items():
            parts = name.split(".")
            nbytes_by_layer[".".join(parts[:2]) if parts[0] == "layers" else name] += nbytes
        return nbytes_by_layer

    def pack(self, x: Tensor) -> "Tensor | MeteredTensor":
        """Record a tensor that autograd saves (pack hook)."""
        storage = x.untyped_storage()
        if storage._cdata in self._excluded or self._is_parameter(storage._cdata):
            return x
        return MeteredTensor(x.detach(), self)

    def _is_parameter(self, key: int) -> bool:
        """Return whether a storage is that of a parameter; with zero=3 parameters change while
        layers run."""
        return any(
            p.untyped_storage()._cdata == key for model in self._models for p in model.parameters()
        )

    def begins(self, key: int, nbytes: int) -> None:
        """Count one more tensor in a storage."""
        self._uses[key] += 1
        if self._uses[key] == 1:
            self.kept[self.path[-1]] += nbytes
            self.live += nbytes
            self.peak = max(self.peak, self.live)

    def ends(self, key: int, nbytes: int) -> None:
        """Count one tensor less in a storage."""
        self._uses[key] -= 1
        if self._uses[key] == 0:
            del self._uses[key]  # the storage is freed, and its address may be reused
            self.live -= nbytes


class MeteredTensor:
    """A saved tensor, which updates the meter when it is freed."""

    def __init__(self, x: Tensor, meter: ActivationMeter) -> None:
        storage = x.untyped_storage()
        self.x, self.meter, self.key, self.nbytes = x, meter, storage._cdata, storage.nbytes()
        meter.begins(self.key, self.nbytes)

    def __del__(self) -> None:
        self.meter.ends(self.key, self.nbytes)


@contextmanager
def measure_saved_activations(*models: nn.Module) -> Iterator[ActivationMeter]:
    """Measure all tensors saved for backward inside the context, until they are freed, inside or
    later.

    Only the innermost saved-tensor hooks are called: activations inside a checkpointed region are
    not saved and not measured, and an offloaded layer reports its own.
    """
    meter = ActivationMeter(models)
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


def _unpack(saved: Tensor | MeteredTensor) -> Tensor:
    return saved.x if isinstance(saved, MeteredTensor) else saved


def _enter(
    meter: ActivationMeter, name: str, module: nn.Module, given: Any
) -> None:  # Any: whatever the module takes
    meter.path.append(name)


def _leave(meter: ActivationMeter, module: nn.Module, given: Any, result: Any) -> None:
    meter.path.pop()


@contextmanager
def _handle(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
