"""Recorded forward passes: repeat the operations of a step without the Python code of the layers.

With few tokens on a CPU, the Python code of the layers takes as long as their matmuls (29M Llama,
one token: 9 of 19 ms). The operations of a forward pass depend only on the number of tokens; so
the second pass of each number is recorded, and later ones repeat the recorded calls on the same
tensors, as CUDA graphs do on GPUs. Attention depends on the lengths of the sequences, and is called
in each step with its caches ("piecewise" in vLLM); where it consists of compiled loops, these are
called with the block tables of the step. Results have the same bits.

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

from megalith.infer.cache import PagedLayerCache
from megalith.kernels.attention.paged import RecordedAttention
from megalith.kernels.cpu_threads import LoopCall, observe_loops
from megalith.kernels.layer_inputs import (
    Attend,
    AttendOptions,
    LayerCache,
    LayerInputs,
    StateStep,
    StepFunction,
)
from megalith.kernels.packed import PackedSeqParams
from megalith.models.decoder import CachedLayers

logger = logging.getLogger(__name__)

MAX_TOKENS = 64
"""Largest number of tokens of a recorded pass: with more, the Python code takes a few percent of
the time (heuristic)."""

MAX_BYTES = 1 << 28
"""Largest size of the tensors of all recordings (heuristic: a 24M model has 0.3 MiB per token, 40
MiB for the counts 1 to 16; an 8B model, whose Python code takes a few percent, 5 MiB per token)."""

ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
"""Operations whose results have no values yet."""

CONVERSIONS = frozenset({torch.ops.aten.to.dtype, torch.ops.aten._to_copy.default})
"""Operations whose result is its first argument in another dtype or layout."""


@dataclass(slots=True)
class _CurrentStep:
    """The caches and inputs of a step."""

    caches: Sequence[LayerCache]
    inputs: LayerInputs

    def inputs_of(self, index: int | None) -> LayerInputs:
        """Return the inputs of a layer with this cache."""
        cache = None if index is None else self.caches[index]
        return replace(self.inputs, cache=cache)


@dataclass(frozen=True, slots=True)
class _AttendCall:
    """Attention with the cache of the current step; its result is copied to `output`."""

    step: _CurrentStep
    index: int
    core: Attend
    queries: tuple[Tensor, Tensor, Tensor]
    options: AttendOptions
    output: Tensor
    loops: RecordedAttention | None
    """Loops that compute the output."""

    def __call__(self) -> None:
        """Compute attention by the loops, or else copy it."""
        cache, seq_params = self.step.caches[self.index], self.step.inputs.seq_params
        if self.loops is not None:
            assert isinstance(cache, PagedLayerCache), "as in the recorded step"
            if cache.repeat_attend(self.loops, seq_params):
                return
        self.output.copy_(cache.attend(self.core, *self.queries, seq_params, **self.options))


@dataclass(frozen=True, slots=True)
class _StepCall:
    """A part of a layer that is called in each step; its result is copied to `output`."""

    step: _CurrentStep
    index: int | None
    """Of the layer's cache."""

    function: StepFunction
    tensors: Sequence[Tensor]
    output: Tensor

    def __call__(self) -> None:
        """Call the function, and copy its result."""
        self.output.copy_(self.function(*self.tensors, self.step.inputs_of(self.index)))


@dataclass(slots=True)
class _Recording:
    """The operations of a forward pass, and the tensors that they read and write."""

    inputs: tuple[Tensor, ...]
    """x [t, h], and the rotary tables."""

    step: _CurrentStep
    operations: list[Callable[[], object]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    """Tensors that the operations read and write, which keep their addresses."""

    own: list[Tensor] = field(default_factory=list)
    """Results of the operations, and the inputs."""

    output: Tensor | None = None

    def count_bytes(self) -> int:
        """Return the bytes of the tensors that belong to the recording."""
        storages = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in self.own}
        return sum(storages.values())

    def replay(self, inputs: Sequence[Tensor], step: _CurrentStep) -> Tensor:
        """Repeat the operations with other inputs; returns x [t, h]."""
        for recorded, current in zip(self.inputs, inputs, strict=True):
            recorded.copy_(current)
        self.step.caches, self.step.inputs = step.caches, step.inputs
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
        self._add_call(call, call.output, [each for each in tensors if each is not None])

    def record_call(
        self, function: StepFunction, tensors: Sequence[Tensor], inputs: LayerInputs
    ) -> Tensor:
        """Return `function(*tensors, inputs)` with the cache of the step, and record the call."""
        step = self.recording.step
        index = inputs.cache.index if isinstance(inputs.cache, _RecordedCache) else None
        with self.pause(), observe_loops(None):
            output = function(*tensors, step.inputs_of(index))
        self._add_call(_StepCall(step, index, function, tensors, output), output, tensors)
        return output

    def _add_call(
        self, call: Callable[[], None], output: Tensor, tensors: Sequence[Tensor]
    ) -> None:
        self._check_known(tensors, "a call")
        self._add_outputs([output])
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
        new = [each for each in outputs if not self._is_known(each)]
        self._addresses |= set(map(_address, new))
        self.recording.own += new
        self.recording.tensors += outputs

    def _check_known(self, tensors: Sequence[Tensor], reader: str) -> None:
        if not all(map(self._is_known, tensors)):
            self.fail(f"{reader} reads a tensor that is allocated in each step")

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
        self._recorder, self.index = recorder, index
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
        loops = None
        if isinstance(self._cache, PagedLayerCache):
            loops = self._cache.record_attend(q, k, v, output, options)
        call = _AttendCall(step, self.index, core, (q, k, v), options, output, loops)
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
        self._recorder.fail("attention to latent vectors is not called in each step")
        return self._cache.attend_latent(
            core, q, latent, seq_params, value_size=value_size, **options
        )

    def read(self, rows: Tensor, *, value_size: int) -> Tensor:
        """Return the stored rows, which is not recorded."""
        self._recorder.fail("rows of latent vectors are not read in each step")
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
        """By tokens and threads, least recently used first."""

        self.num_bytes = 0
        """Size of the tensors of the recordings."""

        self._seen: set[tuple[int, int]] = set()
        self._weights: tuple[int, ...] = ()
        """Addresses of the weights in the recordings."""

        self.failure: str | None = None
        """Why the passes of this model cannot be repeated; None: they can."""

        self.num_replays = 0
        self.max_tokens = MAX_TOKENS
        """Largest number of tokens of a recording."""

    def reset(self) -> None:
        """Drop all recordings, which keep their tensors in memory."""
        self._recordings, self._seen, self._weights = {}, set(), ()
        self.num_bytes = 0

    def run(
        self, forward: CachedLayers, x: Tensor, inputs: LayerInputs, caches: Sequence[LayerCache]
    ) -> tuple[Tensor, LayerInputs]:
        """Return the result of `forward`: x [t, h], and the inputs of what follows the layers."""
        key = len(x), torch.get_num_threads()
        if self.failure is not None or key[0] > self.max_tokens:
            return forward(x, inputs, caches)
        weights = tuple(weight.data_ptr() for weight in self._constants)
        if weights != self._weights:
            self.reset()
            self._weights = weights
        step, tensors = _CurrentStep(caches, inputs), (x, *inputs.rope)
        recording = self._recordings.pop(key, None)
        if recording is not None:
            self._recordings[key] = recording
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
        recording = _Recording((x, *rope), step, own=[x, *rope])
        recorder = _Recorder(recording, self._constants)
        caches = [_RecordedCache(recorder, index) for index in range(len(step.caches))]
        recorded_inputs = replace(inputs, rope=tuple(rope), recorder=recorder)
        with _ReadDetector(recorder), recorder, observe_loops(recorder.record_loop):
            recording.output, outputs = forward(x, recorded_inputs, caches)
        if outputs is not recorded_inputs:
            recorder.fail("a later stage reads a tensor of these layers")
        if recorder.failure is None:
            self._store(key, recording)
        else:
            self.failure = recorder.failure
            logger.info("forward passes are not recorded: %s", self.failure)
        return recording.output.clone(), replace(outputs, rope=inputs.rope, recorder=None)

    def _store(self, key: tuple[int, int], recording: _Recording) -> None:
        """Store a recording, and drop the least recently used ones beyond the largest size."""
        num_bytes = recording.count_bytes()
        if num_bytes > MAX_BYTES:
            self.max_tokens = key[0] - 1
            return
        self._recordings[key] = recording
        self.num_bytes += num_bytes
        while self.num_bytes > MAX_BYTES:
            oldest = next(iter(self._recordings))
            self.num_bytes -= self._recordings.pop(oldest).count_bytes()
            self._seen.discard(oldest)


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
    if func in CONVERSIONS and isinstance(result, Tensor):
        return partial(result.copy_, args[0])

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
