"""Names in pickles that become values: containers, dtypes, tensors, metadata of
`torch.distributed.checkpoint`, enums of Megatron, NumPy scalars.
"""

import math
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from megalith.checkpoint.pickle_interpreter import (
    MEMORY_PER_BYTE,
    MIN_MEMORY,
    Global,
    Interpreter,
    MalformedPickleError,
    NameTable,
    Record,
)

_DTYPE_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("qint8", "quint8", "qint32"),
)
_DTYPES: Mapping[str, torch.dtype] = {
    f"torch.{name}": getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)
}
STORAGE_DTYPES: Mapping[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
    "torch.storage.UntypedStorage": torch.uint8,
    "torch.UntypedStorage": torch.uint8,
}

_DCP = "torch.distributed.checkpoint"
_DCP_CLASSES = {
    "metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "planner": (
        *("SavePlan", "LoadPlan", "WriteItem", "ReadItem", "WriteItemType", "LoadItemType"),
        *("TensorWriteData", "BytesIOWriteData"),
    ),
    "filesystem": ("_StorageInfo", "_StoragePrefix", "SerializationFormat"),
}
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_MEGATRON_CLASSES = {
    "enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
    "transformer.enums": (
        *("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope"),
    ),
    "rerun_state_machine": (
        *("RerunDiagnostic", "RerunMode", "RerunState", "RerunValidationStatus"),
    ),
    "dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "optimizer": ("OptimizerConfig",),
    "optimizer.optimizer_config": ("OptimizerConfig",),
    "transformer.transformer_config": ("TransformerConfig", "MLATransformerConfig"),
    "model_parallel_config": ("ModelParallelConfig",),
}
_OLD_ENUMS = ("ModelType", "LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType")


def _build_records() -> dict[str, str]:
    """Return the classes that become records: the name in the pickle -> the newest name."""
    names = {
        name: name
        for name in (
            *("argparse.Namespace", "types.SimpleNamespace", "torch.device", "signal.Signals"),
            *("numpy.dtype", "numpy.ndarray"),
        )
    }
    names |= {"_io.BytesIO": "io.BytesIO", "io.BytesIO": "io.BytesIO"}
    for module, classes in _DCP_CLASSES.items():
        for class_name in classes:
            newest = f"{_DCP}.{module}.{class_name}"
            names |= {newest: newest}
            names |= {f"torch.distributed._shard.checkpoint.{module}.{class_name}": newest}
    for module, classes in _MEGATRON_CLASSES.items():
        names |= {name: name for name in (f"megatron.core.{module}.{part}" for part in classes)}
    for module in ("megatron.model.enums", "megatron.legacy.model.enums", "megatron.enums"):
        names |= {name: name for name in (f"{module}.{part}" for part in _OLD_ENUMS)}
    names[f"{_SHARDED_TENSOR}.TensorProperties"] = f"{_DCP}.metadata.TensorProperties"
    names[f"{_SHARDED_TENSOR}.MEM_FORMAT_ENCODING"] = f"{_DCP}.metadata._MEM_FORMAT_ENCODING"
    return names


_RECORDS: Mapping[str, str] = _build_records()

_STATE_FIELDS: Mapping[str, tuple[str, ...]] = {
    f"{_DCP}.metadata.TensorProperties": (
        *("dtype", "layout", "requires_grad", "memory_format", "pin_memory"),
    ),
    "numpy.dtype": ("version", "byteorder", "subdtype", "names", "fields", "itemsize", "alignment"),
    "numpy.ndarray": ("version", "shape", "dtype", "fortran_order", "data"),
    "io.BytesIO": ("data", "position", "attributes"),
}
"""Names for the elements of states that are tuples."""

_OLD_MODULES = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "numpy.core": "numpy._core",
    "numpy.core.multiarray": "numpy._core.multiarray",
    "numpy.core.numeric": "numpy._core.numeric",
    "pathlib._local": "pathlib",
}
"""Modules of older versions, and their present names."""

_NUMPY_TYPE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16")


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveStorage:
    """Bytes of one storage in an archive."""

    dtype: torch.dtype
    nbytes: int
    read: Callable[[int, int], memoryview]
    """Return bytes [start, start + nbytes) of the storage, memory-mapped where possible."""


@dataclass(frozen=True, slots=True, eq=False)
class ArchiveTensor:
    """Tensor in an archive, whose values are read on request. Its bounds have been checked."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Stride of each dim, in elements."""

    storage_offset: int
    """Position of the first element in the storage, in elements."""

    storage: ArchiveStorage

    @property
    def span(self) -> int:
        """Number of elements of the storage from the tensor's first to its last element."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def read(self) -> Tensor:
        """Return the values as a view of the file; the caller must not write to it.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if not self.span:
            return torch.empty(self.shape, dtype=self.dtype)
        size = self.dtype.itemsize
        data = self.storage.read(self.storage_offset * size, self.span * size)
        # The address may be unaligned, which x86 and ARM support.
        values = torch.frombuffer(data, dtype=self.dtype, count=self.span)
        return values.as_strided(self.shape, self.stride)


# --- values of the fixed table: each function returns None if the arguments are not the usual ones


def _make_dict(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    if not args:
        return {}
    if len(args) != 1:
        return None
    entries: dict[object, object] = {}
    source = args[0]
    if not isinstance(source, (dict, list, tuple)):
        return None
    interpreter.allocate(16 * len(source))
    pairs: Iterable[object] = source.items() if isinstance(source, dict) else source
    for pair in pairs:
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            return None
        interpreter.check_key(pair[0])
        entries[pair[0]] = pair[1]
    return entries


def _make_default_dict(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    return _make_dict(interpreter, args[1:]) if len(args) <= 2 else None


def _make_set(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    items = args[0] if len(args) == 1 else ()
    if len(args) > 1 or not isinstance(items, (list, tuple)):
        return None
    interpreter.allocate(8 * len(items))
    for item in items:
        interpreter.check_key(item)
    return set(items)


def _make_frozenset(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    items = _make_set(interpreter, args)
    return frozenset(items) if isinstance(items, set) else None


def _make_bytes(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    if not args:
        return b""
    return args[0] if len(args) == 1 and isinstance(args[0], bytes) else None


def _make_complex(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    if len(args) != 2 or not all(type(part) in (int, float) for part in args):
        return None
    return complex(cast(float, args[0]), cast(float, args[1]))


def _encode_text(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    match args:
        case (str() as text, "latin1" | "latin-1"):
            interpreter.allocate(len(text))
            return text.encode("latin1")
    return None


def _get_member(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    match args:
        case (Global() as enum, str() as member) if enum.name in _RECORDS:
            return Record(_RECORDS[enum.name], (), {"name": member})
    return None


def _reconstruct_object(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    match args:
        case (Global() as base, Global(name="builtins.object"), None):
            return interpreter.call(base, ())
    return None


def _construct_new(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    if not args or not isinstance(args[0], Global):
        return None
    interpreter.allocate(8 * len(args))
    return interpreter.call(args[0], args[1:]) if not args[0].name.startswith("copyreg.") else None


def _make_size(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    sizes = args[0] if len(args) == 1 else ()
    if len(args) > 1 or not isinstance(sizes, (list, tuple)):
        return None
    interpreter.allocate(8 * len(sizes))
    return tuple(sizes) if all(type(size) is int for size in sizes) else None


def _get_layout(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    return Record("torch.layout", args)


def _join_path(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    interpreter.allocate(8 * len(args))
    parts = [part for part in args if isinstance(part, str)]
    interpreter.allocate(sum(map(len, parts)))
    if len(parts) < len(args):
        return None
    return posixpath.join(*parts) if parts else "."


def _make_array(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    return Record("numpy.ndarray")


def _make_array_from_buffer(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    if len(args) != 4:
        return None
    data, dtype, shape, order = args
    state = {"version": 1, "shape": shape, "dtype": dtype, "fortran_order": order == "F"}
    return Record("numpy.ndarray", (), state | {"data": data})


def _make_scalar(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    match args:
        case (Record(name="numpy.dtype", args=(str() as code, *_)) as dtype, bytes() as data):
            order = dtype.state.get("byteorder", "<")
            if _NUMPY_TYPE.fullmatch(code) is None or order not in ("<", ">", "|", "="):
                return None
            numpy_dtype = np.dtype(f"{order}{code}")
            if len(data) != numpy_dtype.itemsize:
                raise MalformedPickleError("malformed pickle (a NumPy scalar of a wrong length)")
            return cast(object, np.frombuffer(data, numpy_dtype)[0].item())
    return None


def _rebuild_tensor(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    """Build a tensor from (storage, offset, shape, stride, ...)."""
    if len(args) < 4 or not isinstance(args[0], ArchiveStorage):
        return None
    if len(args) > 6 and args[6]:  # lazy conjugation or negation
        return None
    return _make_tensor(interpreter, args[:4], args[0].dtype)


def _rebuild_tensor_of_dtype(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    """Build a tensor from (storage, offset, shape, stride, requires_grad, hooks, dtype, ...)."""
    if not 7 <= len(args) <= 8 or not isinstance(args[0], ArchiveStorage) or any(args[7:]):
        return None
    return _make_tensor(interpreter, args[:4], args[6])


def _make_tensor(interpreter: Interpreter, args: tuple[object, ...], dtype: object) -> object:
    values, offset, shape, stride = args
    if not isinstance(values, ArchiveStorage) or not isinstance(dtype, torch.dtype):
        raise MalformedPickleError("malformed pickle (a tensor without a storage or dtype)")
    if dtype in _QUANTIZED:
        return None
    if not isinstance(shape, tuple) or not isinstance(stride, tuple) or len(shape) > MAX_DIMS:
        raise MalformedPickleError(f"a tensor without a shape of at most {MAX_DIMS} dims")
    if len(shape) != len(stride) or not all(map(_is_size, (offset, *shape, *stride))):
        raise MalformedPickleError("a tensor whose shape and stride are not whole numbers")
    tensor = ArchiveTensor(dtype, shape, stride, cast(int, offset), values)
    if math.prod(max(1, size) for size in shape) * dtype.itemsize > max(
        MIN_MEMORY, MEMORY_PER_BYTE * values.nbytes
    ):
        raise MalformedPickleError(
            f"a tensor of shape {list(shape)} that repeats a storage of {values.nbytes:,} bytes"
        )
    stop = (tensor.storage_offset + tensor.span) * dtype.itemsize
    if stop > values.nbytes:
        raise MalformedPickleError(
            f"a tensor of shape {list(shape)} and stride {list(stride)} that ends at byte {stop:,} "
            f"of a storage of {values.nbytes:,} bytes"
        )
    return tensor


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


_QUANTIZED = frozenset((torch.qint8, torch.quint8, torch.qint32))
"""Dtypes whose values have a scale that is not in the storage."""

MAX_DIMS = 64
"""Maximum number of dims of a tensor; the limit of NumPy 2."""


def _rebuild_parameter(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    return args[0] if args and isinstance(args[0], ArchiveTensor) else None


def _rebuild_from_type(interpreter: Interpreter, args: tuple[object, ...]) -> object:
    """Build a tensor that has attributes; a subclass becomes a placeholder."""
    match args:
        case (Global() as function, Global() as kind, tuple() as inner, _):
            if kind.name in _TENSOR_CLASSES and function.name in _TENSOR_FUNCTIONS:
                return interpreter.call(function, inner)
    return None


_TENSOR_CLASSES = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
_TENSOR_FUNCTIONS: Mapping[str, Callable[[Interpreter, tuple[object, ...]], object]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_of_dtype,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
}
_CALLS: Mapping[str, Callable[[Interpreter, tuple[object, ...]], object]] = {
    **_TENSOR_FUNCTIONS,
    "collections.OrderedDict": _make_dict,
    "collections.defaultdict": _make_default_dict,
    "builtins.dict": _make_dict,
    "builtins.set": _make_set,
    "builtins.frozenset": _make_frozenset,
    "builtins.bytes": _make_bytes,
    "builtins.bytearray": _make_bytes,
    "builtins.complex": _make_complex,
    "builtins.getattr": _get_member,
    "_codecs.encode": _encode_text,
    "copyreg._reconstructor": _reconstruct_object,
    "copyreg.__newobj__": _construct_new,
    "torch.Size": _make_size,
    "torch.serialization._get_layout": _get_layout,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "numpy._core.multiarray.scalar": _make_scalar,
    "numpy._core.multiarray._reconstruct": _make_array,
    "numpy._core.numeric._frombuffer": _make_array_from_buffer,
    **{
        f"pathlib.{name}": _join_path for name in ("Path", "PosixPath", "PurePath", "PurePosixPath")
    },
}

NAMES = NameTable(
    constants=_DTYPES,
    records=_RECORDS,
    calls=_CALLS,
    state_fields=_STATE_FIELDS,
    stateless=(dict, ArchiveTensor),
    old_modules=_OLD_MODULES,
)
"""Allowlist of the names that checkpoints use."""
