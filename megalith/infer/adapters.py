"""LoRA adapters of requests: loading and unloading while the engine runs, and the groups of tokens
of a step.

A name stands for the weights that were loaded last under it. Requests in flight keep the adapter
that they started with, also when its name is unloaded or gets other weights.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from megalith.config.lora import LoraConfig
from megalith.errors import CheckpointError, ConfigError, DataError, did_you_mean
from megalith.hf.peft import (
    ADAPTER_CONFIG,
    Adapters,
    check_adapter_names,
    fingerprint,
    peft_adapters,
)
from megalith.hf.pretrained import (
    Pretrained,
    find_export_family,
    locate_local_source,
    open_adapters,
    read_base_record,
)
from megalith.infer.refit import WeightSource
from megalith.models.decoder import Decoder
from megalith.nn.batched_lora import AdapterGroup, BatchedLora, LoraMatrices, StepAdapters
from megalith.parallel.group import Group, raise_on_all_ranks
from megalith.plan.serving.scheduler import PlannedRow, SequenceState
from megalith.plan.shards import Shard

logger = logging.getLogger(__name__)


class UnknownAdapterError(DataError):
    """A request names an adapter that is not loaded."""


class ReplacedAdapterError(DataError):
    """A continued request has tokens of other weights than those that its adapter's name stands
    for."""


class AdaptersInUseError(DataError):
    """Every adapter in memory has requests in flight, so that no other one can be loaded."""


@dataclass(slots=True)
class LoadedAdapter:
    """An adapter in memory."""

    number: int
    fingerprint: bytes
    """SHA-256 of its weights and scale."""

    matrices: Mapping[str, LoraMatrices]
    num_requests: int = 0
    """Requests in flight."""

    is_named: bool = True
    """False: its name was unloaded or has other weights, and its last requests finish."""


@dataclass(slots=True)
class _NamedAdapter:
    """What a name stands for."""

    path: str
    number: int
    """Of an adapter that is in memory unless it was evicted."""

    fingerprint: bytes


class AdapterManager:
    """The adapters of an engine. All ranks make the same calls in the same order."""

    def __init__(
        self,
        model: Decoder,
        step: StepAdapters,
        source: Pretrained,
        group: Group,
        *,
        max_adapters: int,
        max_rank: int,
    ) -> None:
        """`step`: that of the model's layers; `source`: its weights; `group`: the ranks that share
        it."""
        self._model, self._step, self._source, self._group = model, step, source, group
        self._max_adapters, self._max_rank = max_adapters, max_rank
        self._names: dict[str, _NamedAdapter] = {}
        self._in_memory: dict[int, LoadedAdapter] = {}
        """By number, the least recently used first."""
        self._num_loaded = 0

    @property
    def paths(self) -> dict[str, str]:
        """Return the folder of each adapter, by name."""
        return {name: named.path for name, named in self._names.items()}

    @property
    def fingerprints(self) -> dict[str, bytes]:
        """Return the SHA-256 of the weights of each adapter, by name."""
        return {name: named.fingerprint for name, named in self._names.items()}

    @property
    def is_empty(self) -> bool:
        """Whether no adapter is loaded, and no request in flight has one."""
        return not self._names and not self._in_memory

    def list_tensors(self) -> list[Tensor]:
        """Return the matrices of the adapters in memory."""
        return [
            tensor
            for adapter in self._in_memory.values()
            for matrices in adapter.matrices.values()
            for tensor in (matrices.a, *(columns.b for columns in matrices.columns))
        ]

    def check_update(self, source: WeightSource) -> None:
        """Check that the weights of the model can be updated.

        Raises:
            ConfigError: adapters are loaded, or new ones could not be compared with the weights.
        """
        if not self.is_empty:
            raise ConfigError(
                f"max_adapters={self._max_adapters}: adapters are loaded or in use, which "
                "belong to the old weights. Unload them, update the weights when their requests "
                "are finished, and load adapters of the new weights."
            )
        if not isinstance(source, str | Path):
            raise ConfigError(
                f"max_adapters={self._max_adapters}: adapters are compared with the files of "
                "the weights. Update from a path, or set max_adapters to 0."
            )

    def set_source(self, source: Pretrained) -> None:
        """Set the present weights of the model, with which later adapters are compared."""
        self._source = source
        self.__dict__.pop("_base_fingerprint", None)

    def load(self, name: str, path: str) -> None:
        """Load an adapter, or replace the weights of a name. Collective over the ranks.

        Raises:
            AdaptersInUseError: every adapter in memory has requests in flight.
            CheckpointError: it cannot be read, or belongs to another model.
            ConfigError: the name is empty.
        """
        if not name:
            raise ConfigError(f"lora_name={name!r} is empty. Use a name for requests, such as sql.")
        adapter = self._read(path)
        previous = self._names.get(name)
        if previous is not None and previous.fingerprint == adapter.fingerprint:
            previous.path = path
            return
        replaced = None if previous is None else self._in_memory.get(previous.number)
        if replaced is None or replaced.num_requests > 0:
            self._evict_least_recently_used(name)
        if replaced is not None:
            self._drop_name(replaced)
        self._in_memory[adapter.number] = adapter
        self._names[name] = _NamedAdapter(path, adapter.number, adapter.fingerprint)

    def unload(self, name: str) -> None:
        """Forget a name; its requests in flight finish.

        Raises:
            UnknownAdapterError: there is none of this name.
        """
        named = self._find_named(name)
        del self._names[name]
        if named.number in self._in_memory:
            self._drop_name(self._in_memory[named.number])

    def find(self, name: str, fingerprint: bytes | None = None) -> LoadedAdapter:
        """Return the adapter of a request; an evicted one is read again. Collective over the ranks.
        `fingerprint`: of the weights that have generated the first tokens of the request.

        Raises:
            AdaptersInUseError: every adapter in memory has requests in flight.
            CheckpointError: it was evicted, and its files were changed or removed.
            ReplacedAdapterError: it has other weights than those that the request started with.
            UnknownAdapterError: there is none of this name.
        """
        named = self._find_named(name)
        if fingerprint not in (None, named.fingerprint):
            raise ReplacedAdapterError(
                f"adapter={name}: the first tokens of this request were generated with other "
                "weights, which another replica had under this name. Send the request again to "
                "use the present ones."
            )
        adapter = self._in_memory.pop(named.number, None)
        if adapter is None:
            self._evict_least_recently_used(name)
            adapter = self._read(named.path)
            if adapter.fingerprint != named.fingerprint:
                raise CheckpointError(
                    f"adapter={name}: {named.path} has other weights than when it was loaded. Load "
                    "it again to use them."
                )
            named.number = adapter.number
        self._in_memory[adapter.number] = adapter  # the most recently used
        return adapter

    def release(self, number: int) -> None:
        """A request with this adapter ended."""
        adapter = self._in_memory[number]
        adapter.num_requests -= 1
        self._drop_unused(adapter)

    @contextmanager
    def apply(
        self, rows: Sequence[PlannedRow], states: Mapping[int, SequenceState]
    ) -> Iterator[None]:
        """Add to the outputs of the model's layers, inside a `with` block, the adapter of each row
        of a step."""
        self._step.groups = self._group_tokens(rows, states)
        try:
            yield
        finally:
            self._step.groups = ()

    def _group_tokens(
        self, rows: Sequence[PlannedRow], states: Mapping[int, SequenceState]
    ) -> list[AdapterGroup]:
        """Return the tokens of a step by adapter; those of the base model are in no group."""
        numbers = [states[row.seq_id].adapter for row in rows]
        device = next(self._model.parameters()).device
        groups: list[AdapterGroup] = []
        for number in dict.fromkeys(numbers):
            if number is None:
                continue
            tokens = keys = None
            if any(each != number for each in numbers):
                selected = [each == number for each in numbers]
                tokens = find_spans(selected, [row.count for row in rows]).to(device)
                if self._model.config.mla is not None:
                    keys = find_spans(selected, [row.start + row.count for row in rows]).to(device)
            groups.append(AdapterGroup(self._in_memory[number].matrices, tokens, keys))
        return groups

    def _find_named(self, name: str) -> _NamedAdapter:
        named = self._names.get(name)
        if named is None:
            known = ", ".join(self._names) or "none"
            raise UnknownAdapterError(
                f"adapter={name!r:.100}: there is no such adapter."
                f"{did_you_mean(name, self._names)} Loaded: {known}."
            )
        return named

    def _drop_name(self, adapter: LoadedAdapter) -> None:
        """Remove an adapter when its requests in flight are finished."""
        adapter.is_named = False
        self._drop_unused(adapter)

    def _drop_unused(self, adapter: LoadedAdapter) -> None:
        """Remove an adapter that no later request can name."""
        if not adapter.is_named and adapter.num_requests == 0:
            self._in_memory.pop(adapter.number, None)

    def _evict_least_recently_used(self, name: str) -> None:
        """Evict the least recently used adapter without requests if there is no room for another.

        Raises:
            AdaptersInUseError: all have requests.
        """
        if len(self._in_memory) < self._max_adapters:
            return
        for number, adapter in self._in_memory.items():
            if adapter.num_requests == 0:
                del self._in_memory[number]
                return
        raise AdaptersInUseError(
            f"adapter={name}: all max_adapters={self._max_adapters} adapters in memory have "
            "requests in flight. Try again when some are finished, or increase max_adapters."
        )

    # --- reading

    def _read(self, path: str) -> LoadedAdapter:
        """Read this rank's part of an adapter. Collective over the ranks.

        Raises:
            CheckpointError: on every rank: it cannot be read, or belongs to another model.
        """
        parts: list[LoadedAdapter] = []

        def read_part() -> bytes:
            parts.append(self._read_part(path))
            return parts[0].fingerprint

        fingerprints = raise_on_all_ranks(read_part, self._group)
        if len(set(fingerprints)) > 1:
            raise CheckpointError(
                f"lora_path={path}: the ranks read different weights. Copy the same folder to "
                "every machine."
            )
        self._num_loaded += 1
        return parts[0]

    def _read_part(self, path: str) -> LoadedAdapter:
        adapters = self._open(path)
        lora = adapters.lora
        if lora.rank > self._max_rank:
            raise CheckpointError(
                f"lora_path={path}: rank {lora.rank} is above max_lora_rank={self._max_rank}. Set "
                f"max_lora_rank to {lora.rank}."
            )
        check_adapter_names(adapters, lora, self._source.model)
        values = {name: adapters.read(name) for name in sorted(adapters.names)}
        for name, value in values.items():
            if not value.isfinite().all():
                raise CheckpointError(
                    f"lora_path={path}: {name} has NaN or infinite values. Use adapters with "
                    "finite weights."
                )
        matrices = self._build_matrices(lora, values, path)
        return LoadedAdapter(self._num_loaded, compute_fingerprint(lora, values), matrices)

    def _open(self, path: str) -> Adapters:
        """Open adapters and check that they were trained with the weights of this model, if they
        record those."""
        folder = locate_local_source(path)
        base = read_base_record(folder)
        if base is None:
            logger.warning(
                "lora_path=%s names no local base: only names and shapes are checked",
                path,
            )
        elif base["fingerprint"] != self._base_fingerprint:
            raise CheckpointError(
                f"lora_path={path}: these adapters were trained with {base['base']}, whose weights "
                f"differ from those of {self._source.path}. Use adapters of this model."
            )
        if (folder / ADAPTER_CONFIG).exists():
            return peft_adapters(folder, find_export_family(self._source), self._source.model)
        return open_adapters(folder)

    @cached_property
    def _base_fingerprint(self) -> str:
        return fingerprint(self._source.weights, self._source.model)

    def _build_matrices(
        self, lora: LoraConfig, values: Mapping[str, Tensor], path: str
    ) -> dict[str, LoraMatrices]:
        """Return this rank's matrices of every adapted layer."""
        device = next(self._model.parameters()).device

        def read(shard: Shard) -> Tensor:
            value = values[shard.name]
            if tuple(value.shape) != shard.shape:
                raise CheckpointError(
                    f"lora_path={path}: {shard.name} is {list(value.shape)}, expected "
                    f"{list(shard.shape)}. Use adapters of this model."
                )
            local = value[tuple(slice(*span) for span in shard.box)]
            return local.reshape(shard.matrix_shape).to(device, self._model.dtype, copy=True)

        matrices: dict[str, LoraMatrices] = {}
        for module in self._model.modules():
            if isinstance(module, BatchedLora):
                built = module.build_matrices(lora, frozenset(values), read)
                if built is not None:
                    matrices[module.name] = built
        return matrices


def find_spans(selected: Sequence[bool], lengths: Sequence[int]) -> Tensor:
    """Return the indices of the elements of the selected spans, which follow each other.

    >>> find_spans([True, False, True], [1, 3, 2]).tolist()
    [0, 4, 5]
    """
    return torch.tensor(selected).repeat_interleave(torch.tensor(lengths)).nonzero().flatten()


def compute_fingerprint(lora: LoraConfig, values: Mapping[str, Tensor]) -> bytes:
    """Return the SHA-256 of the weights and the scale of an adapter, whatever its name: the salt of
    its blocks in the prefix cache."""
    digest = sha256(lora.scale.hex().encode())
    for name, value in sorted(values.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.digest()
