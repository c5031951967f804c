"""Simulated object store for tests: objects in memory, faults by call, and an end of the process
at any call."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from unittest.mock import patch

from megalith import object_store
from megalith.object_store import StoreUpload

Fault = Literal[
    "error",
    "throttle",
    "lost",
    "doubled",
    "error after effect",
    "truncated",
    "cut",
    "flipped",
    "expired",
    "hang",
    "forbidden",
    "missing",
    "stale",
    "crash",
]
"""What happens to a call. lost: success without effect; error after effect: an error although it
has succeeded; truncated: half of the data is stored; cut, flipped: a read returns half of the
bytes, or one other bit; stale: a listing of the beginning; crash: the process ends before the
call."""


class SimulatedCrash(BaseException):
    """End of the process; not an `Exception`, so no handler continues."""


class StoreError(Exception):
    """Error of a store's client, of no class that the package knows."""


class NoCredentialsError(Exception):
    """Has the name of botocore's exception."""


FaultSource = Callable[[int, str, str], Fault | None]
"""Returns the fault of a call from its number, kind and key."""


@dataclass(slots=True)
class SimulatedStore:
    """Objects by URL, and the calls so far."""

    objects: dict[str, bytes] = field(default_factory=dict)
    find_fault: FaultSource = lambda number, kind, key: None
    bucket: str = "sim://bucket"
    """Objects of other buckets do not exist."""

    calls: list[tuple[str, str]] = field(default_factory=list)
    """Kind and key of each call."""
    uploads: dict[int, bytearray] = field(default_factory=dict)
    """Incomplete multipart uploads."""
    num_reconnects: int = 0
    has_conditional_requests: bool = True
    """Whether `create` is supported."""
    _first_objects: dict[str, bytes] = field(default_factory=dict, init=False)
    _is_dead: bool = field(default=False, init=False)
    _released: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self._first_objects = dict(self.objects)

    def enter(self, kind: str, key: str) -> Fault | None:
        """Record a call, and return its fault if that concerns the effect or the result."""
        if self._is_dead:
            raise SimulatedCrash
        self.calls.append((kind, key))
        fault = self.find_fault(len(self.calls) - 1, kind, key)
        match fault:
            case "error":
                raise StoreError("500 Internal Server Error")
            case "throttle":
                raise StoreError("503 Slow Down: reduce your request rate")
            case "expired":
                raise PermissionError("ExpiredToken: the provided token has expired")
            case "forbidden":
                raise PermissionError("403 Forbidden")
            case "missing":
                raise FileNotFoundError("404 The specified bucket does not exist")
            case "hang":
                self._released.wait(60)
                raise StoreError("connection reset")
            case "crash":
                self._is_dead = True
                raise SimulatedCrash
        if not key.startswith(self.bucket):
            raise FileNotFoundError("404 The specified bucket does not exist")
        return fault

    def leave(self, fault: Fault | None) -> None:
        """Raise the error of a fault after the effect of a call."""
        if fault == "error after effect":
            raise StoreError("connection reset before the response")

    def release(self) -> None:
        """End the calls that hang."""
        self._released.set()

    # --- the interface

    def reconnect(self) -> None:
        """Count the call."""
        self.num_reconnects += 1

    def put(self, key: str, data: memoryview) -> None:
        """Store an object with one request."""
        fault = self.enter("put", key)
        if fault != "lost":
            self.objects[key] = bytes(data[: len(data) // 2] if fault == "truncated" else data)
        self.leave(fault)

    def create(self, key: str, data: memoryview) -> None:
        """Store an object that does not exist."""
        fault = self.enter("create", key)
        if not self.has_conditional_requests:
            raise NotImplementedError
        if key in self.objects:
            raise FileExistsError(key)
        if fault != "lost":
            self.objects[key] = bytes(data)
        self.leave(fault)

    def begin_upload(self, key: str) -> StoreUpload:
        """Begin to upload an object in parts."""
        fault = self.enter("begin", key)
        number = len(self.calls)
        self.uploads[number] = bytearray()
        self.leave(fault)
        return SimulatedUpload(self, key, number)

    def read(self, key: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop) of an object; fewer if it ends before."""
        fault = self.enter("read", key)
        data = self._get(key, fault)[start:stop]
        if fault == "cut":
            return data[: len(data) // 2]
        if fault == "flipped":
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    def count_bytes(self, key: str) -> int:
        """Return the length of an object."""
        fault = self.enter("count", key)
        return len(self._get(key, fault))

    def list_names(self, prefix: str) -> list[str]:
        """Return the names directly under a prefix."""
        keys = self._list(prefix)
        return sorted({key.removeprefix(f"{prefix}/").partition("/")[0] for key in keys})

    def list_lengths(self, prefix: str) -> dict[str, int]:
        """Return the lengths of all objects under a prefix, by key."""
        return {key: len(data) for key, data in self._list(prefix).items()}

    def delete(self, key: str) -> None:
        """Delete an object."""
        fault = self.enter("delete", key)
        if fault != "lost":
            self.objects.pop(key, None)
        self.leave(fault)

    def _get(self, key: str, fault: Fault | None) -> bytes:
        self.leave(fault)
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key]

    def _list(self, prefix: str) -> Mapping[str, bytes]:
        fault = self.enter("list", prefix)
        objects = self._first_objects if fault == "stale" else self.objects
        self.leave(fault)
        return {key: data for key, data in objects.items() if key.startswith(f"{prefix}/")}


@dataclass(slots=True)
class SimulatedUpload:
    """Multipart upload to a simulated store."""

    store: SimulatedStore
    key: str
    number: int

    def put_part(self, data: memoryview) -> None:
        """Upload the next part."""
        fault = self.store.enter("part", self.key)
        if fault != "lost":
            self.store.uploads[self.number] += data
        self.store.leave(fault)

    def complete(self) -> None:
        """Make the object of the parts appear."""
        fault = self.store.enter("complete", self.key)
        data = bytes(self.store.uploads.pop(self.number))
        if fault != "lost":
            self.store.objects[self.key] = data
        if fault == "doubled":
            raise StoreError("NoSuchUpload: the upload was completed before")
        self.store.leave(fault)

    def abort(self) -> None:
        """Delete the parts."""
        fault = self.store.enter("abort", self.key)
        self.store.uploads.pop(self.number, None)
        self.store.leave(fault)


@contextmanager
def use_store(store: SimulatedStore) -> Iterator[SimulatedStore]:
    """Replace the clients of all URL schemes by a simulated store, with short delays between
    repetitions."""
    with (
        patch.object(object_store, "open_client", lambda scheme: store),
        patch.object(object_store, "FIRST_DELAY_S", 1e-4),
        patch.object(object_store, "MAX_DELAY_S", 1e-3),
    ):
        try:
            yield store
        finally:
            store.release()
