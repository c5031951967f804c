"""Recorded forward passes: repeat the operations of a step without the Python code of the layers.

With few tokens on a CPU, the Python code of the layers takes as long as their matmuls (29M Llama,
one token: 9 of 19 ms). The operations of a forward pass depend only on the number of tokens; so
the second pass of each number is recorded, and later ones repeat the recorded calls on the same
tensors, as CUDA graphs do on GPUs. Attention depends on the lengths of the sequences, and is called
anew with the caches of each step ("piecewise" in vLLM). Results have the same bits.

An operation that cannot be repeated, such as one that reads a tensor of the step which is not an
input of the recording, is found while recording; the model then continues without.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Unpack

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalith.kernels.cpu_threads import LoopCall, observe_loops
from megalith.kernels.layer_inputs import (
    Attend,
    AttendOptions,
    LayerCache,
    LayerInputs,
    StateStep,
)
from megalith.kernels.packed import PackedSeqParams
from megalith.models.decoder import CachedLayers

logger = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Largest number of tokens of a recorded pass: with more, the Python code takes a few percent of
the time (heuristic)."""

ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
"""Operations whose results have no values yet."""


@dataclass(slots=True)
class _CurrentStep:
    """The caches and sequences of a step."""

    caches: Sequence[LayerCache]
    seq_params: PackedSeqParams


@dataclass(frozen=True, slots=True)
class _AttendCall:
    """Attention with the cache of the current step; its result is copied to `output`."""

    step: _CurrentStep
    index: int
    core: Attend
    queries: tuple[Tensor, Tensor, Tensor]
    options: AttendOptions
    output: Tensor

    def __call__(self) -> None:
        """Compute attention, and copy it."""
        attend = self.step.caches[self.index].attend
        self.output.copy_(attend(self.core, *self.queries, self.step.seq_params, **self.options))


@dataclass(slots=True)
class _Recording:
    """The operations of a forward pass, and the tensors that they read and write."""

    inputs: tuple[Tensor, ...]
    """x [t, h], and the rotary tables."""

    step: _CurrentStep
    operations: list[Callable[[], object]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    """Tensors that the operations read and write, which keep their addresses."""

    output: Tensor | None = None

    def replay(self, inputs: Sequence[Tensor], step: _CurrentStep) -> Tensor:
        """Repeat the operations with other inputs; returns x [t, h]."""
        for recorded, current in zip(self.inputs, inputs, strict=True):
            recorded.copy_(current)
        self.step.caches, self.step.seq_params = step.caches, step.seq_params
        for operation in self.operations:
            operation()
        assert self.output is not None, "set at the end of the recording"
        return self.output.clone()


class _Recorder(TorchDispatchMode):
    """Records the operations of PyTorch and the compiled loops that are executed inside a `with`
    block."""

    def __init__(self, recording: _Recording, constants: Sequence[Tensor]) -> None:
        """`constants`: tensors that keep their addresses, such as parameters."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.recording = recording
        self.failure: str | None = None
        """Why the operations cannot be repeated."""

        self.is_recording = True
        self._addresses = {_address(tensor) for tensor in (*constants, *recording.inputs)}

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),  # the arguments of any operation
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # its result
        """Execute an operation, and record it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_recording:
            self._record_operation(func, args, kwargs, result)
        return result

    def record_loop(self, call: LoopCall, tensors: Sequence[Tensor]) -> None:
        """Record the call of a compiled loop."""
        if self.is_recording:
            self._check_known(tensors, "a compiled loop")
            self.recording.tensors += tensors
            self.recording.operations.append(call)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing inside a `with` block."""
        self.is_recording = False
        try:
            yield
        finally:
            self.is_recording = True

    def record_attention(self, call: _AttendCall, tensors: Sequence[Tensor | None]) -> None:
        """Record an attention, which was computed; `tensors`: what it reads."""
        self._check_known([each for each in tensors if each is not None], "attention")
        self._add_outputs([call.output])
        self.recording.operations.append(call)

    def fail(self, reason: str) -> None:
        """Record that the operations cannot be repeated."""
        self.failure = self.failure or reason

    def _record_operation(
        self, func: OpOverload[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any
    ) -> None:
        name = func.overloadpacket.__name__
        read = _tensors((args, kwargs))
        self._check_known(read, name)
        outputs = _tensors(result)
        if not outputs and not read:  # of dtypes, for example
            return
        if not outputs:
            self.fail(f"{name} returns a value to Python")
        elif func._schema.is_mutable:
            self.recording.operations.append(partial(func, *args, **kwargs))
        elif name not in ALLOCATIONS and not all(map(self._is_known, outputs)):
            self.recording.operations.append(_repeat(func, args, kwargs, result))
        self._add_outputs(outputs)
        self.recording.tensors += read

    def _add_outputs(self, outputs: Sequence[Tensor]) -> None:
        self._addresses |= set(map(_address, outputs))
        self.recording.tensors += outputs

    def _check_known(self, tensors: Sequence[Tensor], reader: str) -> None:
        if not all(map(self._is_known, tensors)):
            self.fail(f"{reader} reads a tensor that is made anew in each step")

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor.numel() == 0 or _address(tensor) in self._addresses


READS = frozenset({"tolist", "numpy", "item", "__array__", "__dlpack__"})
"""Methods of a tensor that return its values to Python without an operation."""


class _ReadDetector(TorchFunctionMode):
    """Detects values of tensors that Python reads."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],  # any function of PyTorch
        types: Sequence[type],
        args: Sequence[Any] = (),  # its arguments
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # its result
        """Call a function of PyTorch."""
        name = getattr(func, "__name__", "")
        if name in READS and self._recorder.is_recording:
            self._recorder.fail(f"{name} returns a value to Python")
        return func(*args, **(kwargs or {}))


class _RecordedCache:
    """Cache of one attention while a forward pass is recorded; a `LayerCache`."""

    def __init__(self, recorder: _Recorder, index: int) -> None:
        self._recorder, self._index = recorder, index
        self._cache = recorder.recording.step.caches[index]

    def attend(
        self,
        core: Attend,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        seq_params: PackedSeqParams,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Compute attention with the cache of the step, and record it."""
        with self._recorder.pause(), observe_loops(None):
            output = self._cache.attend(core, q, k, v, seq_params, **options)
        step = self._recorder.recording.step
        call = _AttendCall(step, self._index, core, (q, k, v), options, output)
        read = (q, k, v, options.get("sinks"), options.get("attention_bias"))
        self._recorder.record_attention(call, read)
        return output

    def attend_latent(
        self,
        core: Attend,
        q: Tensor,
        latent: Tensor,
        seq_params: PackedSeqParams,
        *,
        value_size: int,
        **options: Unpack[AttendOptions],
    ) -> Tensor:
        """Compute attention to latent vectors, which is not recorded."""
        self._recorder.fail("MLA chooses its form by the lengths of the sequences")
        return self._cache.attend_latent(
            core, q, latent, seq_params, value_size=value_size, **options
        )

    def read(self, rows: Tensor, *, value_size: int) -> Tensor:
        """Return the stored rows, which is not recorded."""
        self._recorder.fail("MLA chooses its form by the lengths of the sequences")
        return self._cache.read(rows, value_size=value_size)

    def state(
        self, step: StateStep, x: Tensor, seq_params: PackedSeqParams, *, shape: tuple[int, ...]
    ) -> Tensor:
        """Return y of `step`, which is not recorded."""
        self._recorder.fail("recurrent states belong to the sequences of a step")
        return self._cache.state(step, x, seq_params, shape=shape)


class RecordedForwards:
    """The layers of a model, with a recording for each number of tokens."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        """`weights`: parameters and buffers, and the scales of quantized weights, which are only
        changed in place."""
        self._constants = weights
        self._recordings: dict[tuple[int, int], _Recording] = {}
        """By tokens and threads."""

        self._seen: set[tuple[int, int]] = set()
        self._weights: tuple[int, ...] = ()
        """Addresses of the weights in the recordings."""

        self.failure: str | None = None
        """Why the passes of this model cannot be repeated; None: they can."""

        self.num_replays = 0

    def reset(self) -> None:
        """Drop all recordings, which keep their tensors in memory."""
        self._recordings, self._seen, self._weights = {}, set(), ()

    def run(
        self, forward: CachedLayers, x: Tensor, inputs: LayerInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, LayerInputs]:
        """Return the result of `forward`: x [t, h], and the inputs of what follows the layers."""
        key = len(x), torch.get_num_threads()
        if self.failure is not None or key[0] > MAX_TOKENS:
            return forward(x, inputs, caches)
        weights = tuple(weight.data_ptr() for weight in self._constants)
        if weights != self._weights:
            self._recordings, self._seen, self._weights = {}, set(), weights
        step, tensors = _CurrentStep(caches, inputs.seq_params), (x, *inputs.rope)
        recording = self._recordings.get(key)
        if recording is not None:
            self.num_replays += 1
            return recording.replay(tensors, step), inputs
        if key not in self._seen:  # the first pass selects kernels and compiles them
            self._seen.add(key)
            return forward(x, inputs, caches)
        return self._record(key, forward, tensors, inputs, step)

    def _record(
        self,
        key: tuple[int, int],
        forward: CachedLayers,
        tensors: Sequence[Tensor],
        inputs: LayerInputs,
        step: _CurrentStep,
    ) -> tuple[Tensor, LayerInputs]:
        x, *rope = (tensor.clone() for tensor in tensors)
        recording = _Recording((x, *rope), step)
        recorder = _Recorder(recording, self._constants)
        caches = [_RecordedCache(recorder, index) for index in range(len(step.caches))]
        recorded_inputs = replace(inputs, rope=tuple(rope))
        with _ReadDetector(recorder), recorder, observe_loops(recorder.record_loop):
            recording.output, outputs = forward(x, recorded_inputs, caches)
        if outputs is not recorded_inputs:
            recorder.fail("a later stage reads a tensor of these layers")
        if recorder.failure is None:
            self._recordings[key] = recording
        else:
            self.failure = recorder.failure
            logger.info("forward passes are not recorded: %s", self.failure)
        return recording.output.clone(), replace(outputs, rope=inputs.rope)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _repeat(
    func: OpOverload[..., Any], args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> Callable[[], object]:
    """Return a function that executes an operation again, and stores its result in `result`."""
    variant = _find_out_variant(func)
    if variant is not None and isinstance(result, Tensor):
        return partial(variant, *args, **kwargs, out=result)

    def execute() -> None:
        for recorded, current in zip(
            _tensors(result), _tensors(func(*args, **kwargs)), strict=True
        ):
            recorded.copy_(current)

    return execute


@cache
def _find_out_variant(func: OpOverload[..., Any]) -> OpOverload[..., Any] | None:
    """Return the overload of an operation that writes to a tensor `out`; None: it has none."""
    packet = func.overloadpacket
    arguments = [(each.name, str(each.type)) for each in func._schema.arguments]
    for name in packet.overloads():
        schema = getattr(packet, name)._schema
        own = [(each.name, str(each.type)) for each in schema.arguments if not each.is_out]
        outs = [each.name for each in schema.arguments if each.is_out]
        if outs == ["out"] and own == arguments:
            overload: OpOverload[..., Any] = getattr(packet, name)
            return overload
    return None
