"""Checkpoint format: names of the files, boxes of tensors, and `manifest.json`, which describes the
contents.

    checkpoints/
      latest                      name of the newest one, for people; loading does not use it
      step_0000100/
        __0_0.distcp              boxes of tensors in `torch.save` format, one file per writing rank
        state.json                training state: everything that is not a tensor
        config.yaml               the run's settings
        tokenizer.json            tokenizer files, if it is read from files; config.yaml names them
        .metadata                 the same boxes for torch.distributed.checkpoint; never read
        manifest.json             length and SHA-256 of every box and file; written last
      step_0000200.tmp-1a2b3c4d   a save in progress, or one that was interrupted

A folder without a manifest is not a checkpoint.

In an object store the files are put under their final prefix, the manifest last. A step that is
saved again gets a prefix of its own, step_0000100.rXXXXXXXX, and the older one is deleted then.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith import storage
from megalith.errors import CheckpointError
from megalith.object_store import StorePath
from megalith.plan.shards import Box, intersect
from megalith.storage import StoragePath

# --- boxes of tensors


def lengths(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """Return the number of elements of a box."""
    return math.prod(lengths(box))


def show_box(box: Box) -> str:
    """Format a box like an index: `[0:4, 2:6]`."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def describe_tiling_problem(shape: tuple[int, ...], boxes: Sequence[Box]) -> str | None:
    """Describe why `boxes` do not cover each element of a tensor exactly once; None if they do."""
    for box in boxes:
        if len(box) != len(shape) or not all(
            0 <= a < b <= n for (a, b), n in zip(box, shape, strict=True)
        ):
            return f"{show_box(box)} is not inside its shape {list(shape)}"
    overlap = _first_overlap(boxes)
    if overlap is not None:
        return f"{show_box(overlap)} of {list(shape)} is written twice"
    if sum(map(numel, boxes)) < math.prod(shape):
        return f"{show_box(_first_hole(shape, boxes))} of {list(shape)} is not written"
    return None


def divide(box: Box, max_numel: int) -> Iterator[Box]:
    """Split a box that is contiguous in memory into contiguous boxes of at most `max_numel`
    elements.

    >>> list(divide(((4, 7), (0, 2)), 4))
    [((4, 6), (0, 2)), ((6, 7), (0, 2))]
    """
    if numel(box) <= max_numel:
        yield box
        return
    dim = next(d for d, (start, stop) in enumerate(box) if stop - start > 1)
    rows = max(1, max_numel // numel(box[dim + 1 :]))
    start, stop = box[dim]
    for first in range(start, stop, rows):
        yield from divide(
            (*box[:dim], (first, min(first + rows, stop)), *box[dim + 1 :]), max_numel
        )


def _first_overlap(boxes: Sequence[Box]) -> Box | None:
    """Return a box that two of `boxes` share. Sweeps along the dim with the most distinct
    ranges."""
    if len(boxes) < 2:
        return None
    if not boxes[0]:
        return ()
    dim = max(range(len(boxes[0])), key=lambda d: len({box[d] for box in boxes}))
    open_boxes: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim]):
        open_boxes = [other for other in open_boxes if other[dim][1] > box[dim][0]]
        for other in open_boxes:
            both = intersect(box, other)
            if both is not None:
                return both
        open_boxes.append(box)
    return None


def _first_hole(shape: tuple[int, ...], boxes: Sequence[Box]) -> Box:
    """Return a box of `shape` that none of `boxes` intersects; there must be one."""
    left: list[Box] = [tuple((0, n) for n in shape)]
    for box in boxes:
        left = [rest for part in left for rest in _without(part, box)]
    return left[0]


def _without(part: Box, taken: Box) -> Iterator[Box]:
    """Yield `part` without its intersection with `taken`, as boxes."""
    both = intersect(part, taken)
    if both is None:
        yield part
        return
    for dim, ((start, stop), (first, last)) in enumerate(zip(part, both, strict=True)):
        if start < first:
            yield *both[:dim], (start, first), *part[dim + 1 :]
        if last < stop:
            yield *both[:dim], (last, stop), *part[dim + 1 :]


FORMAT = 1
"""Format version; increased when an older build can no longer read the files."""

MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"
METADATA = ".metadata"
LATEST = "latest"

MANIFEST_SHA256 = "manifest_sha256"
"""Last field of the manifest: `manifest_digest` of the other fields. Missing in manifests saved
before 2026-11-24."""

DTYPE_NAMES = (
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
)
"""Dtypes that tensors in a checkpoint may have."""

DAMAGED_MANIFEST = "manifest.damaged.json"
"""Manifest of a damaged checkpoint in an object store, where folders cannot be renamed."""

_STEP_NAME = re.compile(r"step_(\d{7,})(?:\.(?:old-[0-9a-f]{8}|r([0-9a-f]{8})))?")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|\.metadata")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file of a checkpoint."""

    nbytes: int
    sha256: str | None = None
    """None for files of boxes, whose boxes have their own hashes."""


@dataclass(frozen=True, slots=True)
class StoredBox:
    """Position and hash of one box of a tensor in a file."""

    box: Box
    file: str
    offset: int
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Shape, dtype and boxes of one full tensor."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a checkpoint."""

    step: int
    world_size: int
    """Number of ranks that saved it; any number can load it."""

    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]

    sha256: str | None = field(default=None, compare=False)
    """`manifest_digest` of the file it was read from; None if the file has none, or there is no
    file."""


def folder_name(step: int) -> str:
    """Return the name of a step's folder: `step_0000100`."""
    return f"step_{step:07d}"


def parse_step_name(name: str) -> tuple[int, int] | None:
    """Return the step and the revision in the name of a checkpoint's folder; None for other names.

    In an object store, a step that is saved again gets another revision, because nothing can be
    renamed; the highest complete one is the checkpoint. The first save of a step has revision 0.

    >>> parse_step_name("step_0000100.r0000000b")
    (100, 11)
    """
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), int(match[2], 16) if match[2] else 0


def step_folders(folder: StoragePath) -> dict[int, StoragePath]:
    """Return the folder of every step, oldest first, complete or not.

    Saving a step that exists moves the old folder aside first. If that was interrupted, the old
    folder is returned.
    """
    # Names are sorted, so step_0000100 comes before step_0000100.old-... and is kept.
    names = storage.list_names(folder)
    if isinstance(folder, StorePath) and (named := read_pointer(folder)) not in (None, *names):
        names = [*names, str(named)]  # a listing of a store may be old
    names_by_step: dict[int, dict[int, str]] = {}
    for name in names:
        if (parsed := parse_step_name(name)) is not None:
            names_by_step.setdefault(parsed[0], {}).setdefault(parsed[1], name)
    folders = {}
    for step, revisions in sorted(names_by_step.items()):
        newest_first = [folder / name for _, name in sorted(revisions.items(), reverse=True)]
        folders[step] = newest_first[0]
        if len(newest_first) > 1:
            complete = (path for path in newest_first if storage.exists(path / MANIFEST))
            folders[step] = next(complete, newest_first[0])
    return folders


def find_saved_again(path: StoragePath) -> StoragePath:
    """Return the newest save of the step of a checkpoint's path in a store, if it has no manifest
    itself; other paths are returned unchanged."""
    parsed = parse_step_name(path.name)
    if isinstance(path, Path) or parsed is None or storage.exists(path / MANIFEST):
        return path
    return step_folders(path.parent).get(parsed[0], path)


def read_pointer(folder: StoragePath) -> str | None:
    """Return the content of `latest`; None if it cannot be read. Loading does not use it."""
    try:
        return storage.read_bytes(folder / LATEST).decode(errors="replace").strip()
    except OSError:
        return None


def show_bytes(nbytes: float) -> str:
    """Format a number of bytes with powers of ten: `1.4 GB`, `12 kB`."""
    if nbytes < 1000:
        return f"{nbytes:.0f} B"
    power = 1 if nbytes < 1e6 else 2 if nbytes < 1e9 else 3 if nbytes < 1e12 else 4
    scaled, unit = nbytes / 1000**power, ("kB", "MB", "GB", "TB")[power - 1]
    return f"{scaled:.1f} {unit}" if scaled < 10 else f"{scaled:.0f} {unit}"


def sha256(data: bytes | memoryview) -> str:
    """Return the hexadecimal SHA-256 digest."""
    return hashlib.sha256(data).hexdigest()


def merge_tensors(
    parts: Iterable[Mapping[str, StoredTensor]], *, check_tiling: bool = True
) -> dict[str, StoredTensor]:
    """Merge the tensors of all ranks; exactly one rank must write each element.

    `check_tiling`: check that; False if the same boxes were checked before.

    Raises:
        CheckpointError: ranks disagree about a tensor, or its boxes overlap or leave a hole; all
            such keys are named.
    """
    merged: dict[str, StoredTensor] = {}
    problems: dict[str, str] = {}
    for part in parts:
        for key, tensor in part.items():
            known = merged.setdefault(key, StoredTensor(tensor.shape, tensor.dtype, ()))
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                problems[key] = (
                    f"{list(known.shape)} {known.dtype} on one rank, {list(tensor.shape)} "
                    f"{tensor.dtype} on another"
                )
            merged[key] = StoredTensor(known.shape, known.dtype, known.boxes + tensor.boxes)
    for key, tensor in merged.items() if check_tiling else ():
        problem = describe_tiling_problem(tensor.shape, [stored.box for stored in tensor.boxes])
        if problem and key not in problems:
            problems[key] = problem
    if problems:
        lines = "\n".join(f"  {key}: {problem}" for key, problem in problems.items())
        raise CheckpointError(
            f"{len(problems)} tensors are not written exactly once (expected: one writer per "
            "element):\n"
            f"{lines}"
        )
    return merged


PARTS = "parts"
"""Folder in a staging folder for the tables of ranks that are saved asynchronously."""


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """Table of what one rank has written, stored until the manifest contains it."""

    plan: str
    """Digest of the rank's tensors and boxes; equal if a later save writes the same ones."""

    tensors: dict[str, StoredTensor]
    files: dict[str, StoredFile]


def part_name(rank: int) -> str:
    """Return the name of a rank's table in the folder `PARTS`."""
    return f"__{rank}.json"


def dump_part(part: WrittenPart) -> bytes:
    """Return the text of a rank's table."""
    raw = {
        "plan": part.plan,
        "tensors": {key: _plain_tensor(tensor) for key, tensor in part.tensors.items()},
        "files": {name: _plain_file(file) for name, file in part.files.items()},
    }
    return json.dumps(raw).encode()


def parse_part(data: bytes, path: StoragePath) -> WrittenPart:
    """Parse a rank's table.

    Raises:
        CheckpointError: `path` is truncated or damaged.
    """
    try:
        raw = storage.parse_json(data)
        files = {_file_name(name): _stored_file(file) for name, file in raw["files"].items()}
        tensors = {
            str(key): StoredTensor(
                tuple(_natural(n) for n in tensor["shape"]),
                _dtype_name(key, tensor["dtype"]),
                tuple(_stored_box(box, files) for box in tensor["boxes"]),
            )
            for key, tensor in raw["tensors"].items()
        }
        return WrittenPart(_digest(raw["plan"]), tensors, files)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: this is not the table of a rank's boxes ({type(error).__name__}: {error}). "
            "The next save writes a new one; check the disk if it recurs."
        ) from error


def dump_manifest(manifest: Manifest, versions: Mapping[str, str]) -> bytes:
    """Return the text of `manifest.json`, with one line per tensor for searching and diffs."""
    tensors = {key: _plain_tensor(tensor) for key, tensor in sorted(manifest.tensors.items())}
    files = {name: _plain_file(file) for name, file in sorted(manifest.files.items())}
    head = {
        "format": FORMAT,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "versions": dict(versions),
        "files": files,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    entries = ",\n".join(
        f"  {json.dumps(key)}: {json.dumps(tensor)}" for key, tensor in tensors.items()
    )
    digest = manifest_digest(head | {"tensors": tensors})
    lines += [
        '"tensors": {\n' + entries + "\n}",
        f"{json.dumps(MANIFEST_SHA256)}: {json.dumps(digest)}",
    ]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def manifest_digest(raw: Mapping[str, Any]) -> str:  # JSON
    """Return the SHA-256 of a manifest's fields, without the digest itself, as JSON with sorted
    keys and no spaces."""
    fields = {name: value for name, value in raw.items() if name != MANIFEST_SHA256}
    return sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def parse_manifest(data: bytes, path: StoragePath) -> Manifest:
    """Parse and validate the manifest in `data`, which is not trusted.

    Raises:
        CheckpointError: `path` names the file; the text is not a manifest, has a newer format,
            contradicts itself, or was changed after it was saved.
    """
    try:
        raw = json.loads(data)
        version = _natural(raw["format"])
        if version <= FORMAT:
            manifest, computed = _manifest(raw), manifest_digest(raw)
            if manifest.sha256 in (None, computed):
                return manifest
            raise CheckpointError(
                f"{path}: this file was changed after it was saved. {MANIFEST_SHA256} says "
                f"{manifest.sha256}, and its other fields have {computed}. Copy the folder again, "
                "or use another checkpoint."
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: this is not the manifest of a checkpoint ({type(error).__name__}: {error}). "
            "Copy the folder again, or use another checkpoint."
        ) from error
    raise CheckpointError(
        f"{path}: written in format {version}, and this build reads formats up to {FORMAT}. Use a "
        "newer Megalith to load it."
    )


def _plain_tensor(tensor: StoredTensor) -> dict[str, Any]:  # JSON
    return {
        "shape": tensor.shape,
        "dtype": tensor.dtype,
        "boxes": [_plain_box(stored) for stored in tensor.boxes],
    }


def _plain_file(file: StoredFile) -> dict[str, Any]:  # JSON
    return {"nbytes": file.nbytes} | ({"sha256": file.sha256} if file.sha256 else {})


def _plain_box(stored: StoredBox) -> dict[str, Any]:  # JSON
    return {
        "box": stored.box,
        "file": stored.file,
        "offset": stored.offset,
        "nbytes": stored.nbytes,
        "sha256": stored.sha256,
    }


def _manifest(raw: Any) -> Manifest:  # untrusted JSON, as in the functions below
    files = {_file_name(name): _stored_file(file) for name, file in raw["files"].items()}
    tensors = {
        str(key): _stored_tensor(str(key), tensor, files) for key, tensor in raw["tensors"].items()
    }
    for name in (STATE, CONFIG):
        if name not in files or files[name].sha256 is None:
            raise ValueError(f"no hash of {name}, expected one")
    digest = _digest(raw[MANIFEST_SHA256]) if MANIFEST_SHA256 in raw else None
    return Manifest(_natural(raw["step"]), _natural(raw["world_size"]), tensors, files, digest)


def _stored_file(raw: Any) -> StoredFile:
    return StoredFile(_natural(raw["nbytes"]), _digest(raw["sha256"]) if "sha256" in raw else None)


def _stored_tensor(key: str, raw: Any, files: Mapping[str, StoredFile]) -> StoredTensor:
    shape = tuple(_natural(n) for n in raw["shape"])
    dtype = _dtype_name(key, raw["dtype"])
    boxes = tuple(_stored_box(box, files) for box in raw["boxes"])
    problem = describe_tiling_problem(shape, [stored.box for stored in boxes])
    if problem:
        raise ValueError(f"{key}: {problem}, expected once")
    return StoredTensor(shape, dtype, boxes)


def _dtype_name(key: str, name: Any) -> str:
    if name not in DTYPE_NAMES:
        raise ValueError(f"{key} is of dtype {name!r}, expected one of {', '.join(DTYPE_NAMES)}")
    return str(name)


def _stored_box(raw: Any, files: Mapping[str, StoredFile]) -> StoredBox:
    box = tuple((_natural(start), _natural(stop)) for start, stop in raw["box"])
    stored = StoredBox(
        box, raw["file"], _natural(raw["offset"]), _natural(raw["nbytes"]), _digest(raw["sha256"])
    )
    if stored.offset + stored.nbytes > files[stored.file].nbytes:
        raise ValueError(f"a box ends behind the end of {stored.file}, expected inside")
    return stored


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a count was expected")
    return value


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
        raise ValueError(f"{value!r} where a SHA-256 was expected")
    return value


def _file_name(name: str) -> str:
    """Check that a name is plain, so that a manifest cannot name files outside its folder."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot be a file of a checkpoint, expected a plain name")
    return name


# --- folders of checkpoints, without their tensors

_COPY = "Copy the checkpoint again"

MAX_STORE_READS = 3
"""Number of times that bytes of an object are read until their hash is correct (heuristic: an error
on the way is not repeated)."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """Contents of a complete checkpoint except its tensors."""

    manifest: Manifest
    state: dict[str, Any]  # JSON
    config_text: str


def read_folder(path: StoragePath) -> CheckpointFolder:
    """Read a `step_NNNNNNN` folder without its tensors, checking file lengths and hashes of text
    files.

    The hashes of tensors are checked when these are read.

    Raises:
        CheckpointError: it is not a checkpoint, incomplete, damaged, or in a newer format.
    """
    manifest = read_manifest(path)
    wrong = find_wrong_lengths(path, manifest)
    wrong.pop(METADATA, None)  # not read by Megalith: see `Checkpoint.warnings`
    if wrong:
        lines = "\n".join(wrong.values())
        raise CheckpointError(f"{lines}\n{_COPY}, or use an older one.")
    state_text, config_text = (
        map_checked_bytes(path / name, manifest.files[name], str(path / name))
        for name in (STATE, CONFIG)
    )
    try:
        state = json.loads(bytes(state_text))
        if not isinstance(state, dict):
            raise ValueError(f"expected an object, found {type(state).__name__}")
        return CheckpointFolder(manifest, state, bytes(config_text).decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: {STATE} or {CONFIG} cannot be read ({error}). Use another checkpoint."
        ) from error


def is_complete(path: StoragePath) -> bool:
    """Return whether a folder is a complete checkpoint."""
    try:
        read_folder(path)
    except CheckpointError:
        return False
    return True


def list_complete_checkpoints(folder: StoragePath) -> dict[int, StoragePath]:
    """Return the complete checkpoints in `folder` by step, oldest first.

    Tensors are not read, which would take as long as loading them.
    """
    return {step: path for step, path in step_folders(folder).items() if is_complete(path)}


def read_manifest(path: StoragePath) -> Manifest:
    """Read the manifest of the checkpoint in `path`; if there is none, the error describes the
    folder."""
    try:
        data = storage.read_bytes(path / MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {_describe_folder(path)}") from None
    except OSError as error:
        raise CheckpointError(
            f"{path / MANIFEST} cannot be read ({error}). {_COPY}, or use an older one."
        ) from error
    return parse_manifest(data, path / MANIFEST)


def _describe_folder(path: StoragePath) -> str:
    """Describe a folder without a manifest, and what to use instead."""
    if not storage.is_folder(path):
        return "no such folder. Set the path to a step_NNNNNNN folder of a run's checkpoints."
    names = storage.list_names(path)
    steps = [
        step_folder
        for folder in (path, path / "checkpoints")
        for step_folder in step_folders(folder).values()
    ]
    if steps:
        return (
            "this folder holds checkpoints and is not one itself. Use one of "
            f"{', '.join(map(str, steps))}."
        )
    if any(name.endswith(".safetensors") for name in names):
        return (
            "this looks like a Hugging Face model, not a checkpoint of a run. Run `megalith "
            "convert` on it."
        )
    shown = ", ".join(names[:5]) or "nothing"
    return (
        f"not a complete checkpoint: it has no {MANIFEST} (found: {shown}). {_COPY}, or use "
        "an older one."
    )


def find_wrong_lengths(path: StoragePath, manifest: Manifest) -> dict[str, str]:
    """Return a message for each file that is missing or has another length than in the manifest."""
    wrong = {}
    lengths_on_disk = storage.file_lengths(path, sorted(manifest.files))
    for name, nbytes in lengths_on_disk.items():
        file = manifest.files[name]
        if isinstance(nbytes, OSError):
            tensors = sum(
                any(box.file == name for box in tensor.boxes)
                for tensor in manifest.tensors.values()
            )
            wrong[name] = (
                f"{path / name}: cannot be read ({nbytes.strerror}); expected {file.nbytes:,} "
                f"bytes{f', parts of {tensors} tensors' if tensors else ''}."
            )
            continue
        if nbytes != file.nbytes:
            wrong[name] = (
                f"{path / name} is {nbytes:,} bytes, expected {file.nbytes:,}: the checkpoint is "
                "incomplete."
            )
    return wrong


def map_bytes(path: StoragePath, stored: StoredFile | StoredBox, place: str) -> memoryview:
    """Memory-map the bytes of a file or of a box in it; `place` names them in errors."""
    try:
        data = storage.mapped(
            path, stored.offset if isinstance(stored, StoredBox) else 0, stored.nbytes
        )
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be read ({error}). {_COPY}, or use an older one."
        ) from error
    if len(data) != stored.nbytes:
        raise CheckpointError(
            f"{place}: the file ends after {len(data):,} of them. {_COPY}, or use an older one."
        )
    return data


def map_checked_bytes(path: StoragePath, stored: StoredFile | StoredBox, place: str) -> memoryview:
    """Memory-map the bytes and check their hash; bytes of an object store are read again if they
    are damaged."""
    for _ in range(MAX_STORE_READS if isinstance(path, StorePath) else 1):
        data = map_bytes(path, stored, place)
        digest = sha256(data)
        if digest == stored.sha256:
            break
    if digest != stored.sha256:
        raise CheckpointError(
            f"{place}: damaged. SHA-256 expected {stored.sha256}, found {digest}. {_COPY}, or use "
            "an older one."
        )
    return data
