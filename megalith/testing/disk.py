"""Simulated disk for crash tests: records every effect of `storage` on a folder, and returns the
folder as a kill or a power cut after any of them would leave it.

After a kill the disk has everything that was written. After a power cut each file has only what was
synced, and each folder has the names that it had at its last sync, or all of them.
Source: Pillai et al. 2014 (ALICE), OSDI; Mohan et al. 2018 (CrashMonkey), OSDI.
"""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast
from unittest.mock import patch

from megalith import storage

Crash = Literal["kill", "power cut", "power cut, names kept"]
"""kill: all effects remain; power cut: only synced contents and synced names; names kept: only
synced contents, but all names."""

CRASHES: tuple[Crash, ...] = ("kill", "power cut", "power cut, names kept")


@dataclass(frozen=True, slots=True)
class DiskEffect:
    """One effect of a storage call. Paths are relative to the recorded folder."""

    kind: Literal["create", "write", "sync", "folder", "rename", "remove"]
    path: str
    start: int = 0
    """Position of the written data."""

    data: bytes = b""
    target: str = ""
    """New name of a renamed file or folder."""

    def __str__(self) -> str:
        extra = f" -> {self.target}" if self.target else f" {len(self.data)} bytes"
        return f"{self.kind} {self.path or '.'}{extra if self.target or self.data else ''}"


@dataclass(slots=True)
class _File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(slots=True)
class _Folder:
    names: "dict[str, _File | _Folder]" = field(default_factory=dict)
    synced: "dict[str, _File | _Folder]" = field(default_factory=dict)


class SimulatedDisk:
    """Contents of a folder and what of it is on disk, built from effects."""

    def __init__(self, folder: Path) -> None:
        """Begin with the current contents of a real folder, all of them synced."""
        self._root = _read(folder)

    def apply(self, effect: DiskEffect, *, torn: bool = False) -> None:
        """Apply an effect; `torn`: only the first half of the data of a write."""
        parent, name = self._locate(effect.path)
        match effect.kind:
            case "create":
                parent.names[name] = _File()
            case "folder":
                parent.names[name] = _Folder()
            case "write":
                data = effect.data[: len(effect.data) // 2] if torn else effect.data
                file = parent.names[name]
                assert isinstance(file, _File), effect
                file.data.extend(bytes(max(0, effect.start - len(file.data))))
                file.data[effect.start : effect.start + len(data)] = data
            case "sync":
                node = self._root if not effect.path else parent.names[name]
                if isinstance(node, _File):
                    node.synced = bytes(node.data)
                else:
                    node.synced = dict(node.names)
            case "rename":
                new_parent, new_name = self._locate(effect.target)
                new_parent.names[new_name] = parent.names.pop(name)
            case "remove":
                del parent.names[name]

    def contents(self, crash: Crash) -> dict[str, bytes | None]:
        """Return the files by relative path, and None for folders, as a crash leaves them."""
        return dict(_list(self._root, "", crash))

    def _locate(self, path: str) -> tuple[_Folder, str]:
        """Return the folder of a path, and the last part of the path."""
        *folders, name = path.split("/")
        node = self._root
        for part in folders:
            child = node.names[part]
            assert isinstance(child, _Folder), path
            node = child
        return node, name


def _list(folder: _Folder, prefix: str, crash: Crash) -> Iterator[tuple[str, bytes | None]]:
    for name, node in (folder.synced if crash == "power cut" else folder.names).items():
        path = f"{prefix}{name}"
        if isinstance(node, _Folder):
            yield path, None
            yield from _list(node, f"{path}/", crash)
        else:
            yield path, bytes(node.data) if crash == "kill" else node.synced


def _read(folder: Path) -> _Folder:
    names: dict[str, _File | _Folder] = {}
    for child in sorted(folder.iterdir()):
        if child.is_dir():
            names[child.name] = _read(child)
        else:
            data = child.read_bytes()
            names[child.name] = _File(bytearray(data), data)
    return _Folder(names, dict(names))


def write_contents(contents: dict[str, bytes | None], folder: Path) -> None:
    """Create an empty folder with the contents of a simulated disk."""
    folder.mkdir(parents=True)
    for name, data in contents.items():
        path = folder / name
        if data is None:
            path.mkdir()
        else:
            path.write_bytes(data)


def iter_crash_states(
    disk: SimulatedDisk, effects: list[DiskEffect]
) -> Iterator[tuple[str, dict[str, bytes | None]]]:
    """Yield the distinct contents after a crash at each effect, with a description; also those
    after half of a write. Applies the effects to `disk`."""
    seen = set()

    def distinct(crash: Crash, label: str) -> Iterator[tuple[str, dict[str, bytes | None]]]:
        contents = disk.contents(crash)
        key = frozenset(contents.items())
        if key not in seen:
            seen.add(key)
            yield f"{crash} {label}", contents

    for crash in CRASHES:
        yield from distinct(crash, "before the first effect")
    for number, effect in enumerate(effects):
        label = f"effect {number} ({effect})"
        if effect.kind == "write" and len(effect.data) > 1:
            disk.apply(effect, torn=True)
            yield from distinct("kill", f"within {label}")
        disk.apply(effect)
        for crash in CRASHES:
            yield from distinct(crash, f"after {label}")


# --- recording


class _RecordedFile(io.RawIOBase):
    """File that records what is written to it."""

    def __init__(self, file: BinaryIO, record: Callable[[int, bytes], None]) -> None:
        super().__init__()
        self._file, self._record = file, record
        self.name = file.name

    def write(self, data: Any) -> int:  # any buffer
        """Write and record bytes."""
        start = self._file.tell()
        written = bytes(data)
        self._record(start, written)
        return self._file.write(written)

    def fileno(self) -> int:
        """Return the descriptor of the real file."""
        return self._file.fileno()

    def tell(self) -> int:
        """Return the position in the file."""
        return self._file.tell()

    def truncate(self, size: int | None = None) -> int:
        """Extend the file by zeros and record them."""
        assert size is not None, "only the length of a new file"
        self._record(0, bytes(size))
        return self._file.truncate(size)

    def flush(self) -> None:
        """Flush the real file."""
        if not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        """Close the real file."""
        self._file.close()
        super().close()


class _EffectRecorder:
    """Functions of `storage` that also record their effects on a folder."""

    def __init__(self, folder: Path) -> None:
        self.effects: list[DiskEffect] = []
        self._folder = folder.absolute()
        self._real = {name: getattr(storage, name) for name in _RECORDED}

    def _relative(self, path: Path) -> str | None:
        """Return the path inside the folder; None if it is outside."""
        absolute = Path(os.path.abspath(path))
        if not absolute.is_relative_to(self._folder):
            return None
        name = absolute.relative_to(self._folder).as_posix()
        return "" if name == "." else name

    def _add(self, kind: Any, path: Path, **values: Any) -> None:  # Any: fields of DiskEffect
        name = self._relative(path)
        if name is None:
            return
        effect = DiskEffect(kind, name, **values)
        last = self.effects[-1] if self.effects else effect
        if (
            (effect.kind, last.kind) == ("write", "write")
            and effect.path == last.path
            and effect.start == last.start + len(last.data)
        ):
            self.effects.pop()
            effect = replace(last, data=last.data + effect.data)
        self.effects.append(effect)

    def _record_writes(self, file: BinaryIO, path: Path) -> BinaryIO:
        def record(start: int, data: bytes) -> None:
            self._add("write", path, start=start, data=data)

        return cast(BinaryIO, _RecordedFile(file, record))  # it has the methods that are used

    def open_new(self, path: Path) -> BinaryIO:
        """Create a file."""
        file = self._real["open_new"](path)
        self._add("create", path)
        return self._record_writes(file, path)

    def open_part(self, path: Path, start: int) -> BinaryIO:
        """Open a file from a position on."""
        return self._record_writes(self._real["open_part"](path, start), path)

    def append_line(self, path: Path, line: bytes) -> None:
        """Append a line to a file."""
        start = path.stat().st_size if path.exists() else None
        self._real["append_line"](path, line)
        if start is None:
            self._add("create", path)
        self._add("write", path, start=start or 0, data=line + b"\n")

    def _sync(self, handle: int, path: Path) -> None:
        self._real["_sync"](handle, path)
        self._add("sync", path)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder."""
        self._real["rename"](source, target)
        self._add("rename", source, target=self._relative(target))

    def _replace(self, source: Path, target: Path) -> None:
        self._real["_replace"](source, target)
        self._add("rename", source, target=self._relative(target))

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents."""
        missing = [parent for parent in (path, *path.parents) if not parent.exists()]
        self._real["make_folder"](path)
        for parent in reversed(missing):
            self._add("folder", parent)

    def remove_file(self, path: Path) -> None:
        """Delete a file, if it exists."""
        existed = path.exists()
        self._real["remove_file"](path)
        if existed:
            self._add("remove", path)

    def remove_tree(self, path: Path) -> None:
        """Delete a folder, if it exists, one name after the other."""
        if path.is_symlink() or not path.exists():
            self._real["remove_tree"](path)
            return
        for parent, folders, files in os.walk(path, topdown=False):
            for name in (*files, *folders):
                self._add("remove", Path(parent, name))
        self._real["remove_tree"](path)
        self._add("remove", path)


@contextmanager
def record_effects(folder: Path) -> Iterator[list[DiskEffect]]:
    """Yield a list to which every effect of `storage` on the contents of `folder` is appended, in
    this process and all of its threads. Consecutive writes to a file are one effect."""
    recorder = _EffectRecorder(folder)
    with ExitStack() as stack:
        for name in _RECORDED:
            stack.enter_context(patch.object(storage, name, getattr(recorder, name)))
        yield recorder.effects


_RECORDED = (
    "open_new",
    "open_part",
    "append_line",
    "_sync",
    "rename",
    "_replace",
    "make_folder",
    "remove_file",
    "remove_tree",
)
"""Functions of `storage` through which every effect on a disk goes."""
