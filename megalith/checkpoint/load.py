"""Loads checkpoints under any layout: reads the requested boxes from the stored boxes.

No code in the folder is executed: the manifest is validated JSON, pickles of tensors are parsed by
`safe_pickle`, and `.metadata`, another pickle, is not opened.
"""

import atexit
import functools
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint import format as layout
from megalith.checkpoint.format import (
    CheckpointEntry,
    Manifest,
    StoredBox,
    StoredTensor,
    TensorPiece,
    decode_for_loading,
    inner_view,
    lengths,
    pieces,
    show_box,
)
from megalith.checkpoint.keys import (
    EMA,
    MASTER,
    MODEL,
    LoadReport,
    MasterWeightPair,
    Purpose,
    Wanted,
    check_patterns,
    compare_keys,
    describe_master_differences,
    differ_only_in_padding,
    differences,
    group_by_pattern,
    is_moment,
    is_state,
    is_table,
    log_load_report,
    pair_master_weights,
    reconcile,
    select_rejected_keys,
)
from megalith.checkpoint.manifest import (
    find_wrong_lengths,
    list_complete_checkpoints,
    map_bytes,
    map_checked_bytes,
    read_folder,
    read_manifest,
)
from megalith.checkpoint.parallel_read import fill_in_parallel, list_needed_boxes
from megalith.checkpoint.safe_pickle import ArchiveTensor, parse_archive, require_plain
from megalith.config.checkpoint import CheckpointConfig
from megalith.errors import CheckpointError, DamagedCheckpointError
from megalith.object_store import StorePath
from megalith.parallel.group import Group, raise_on_all_ranks
from megalith.plan.shards import Box, intersect
from megalith.storage import StoragePath

_DECODED_NBYTES = 64 * 2**20
"""Bytes of encoded values that are decoded at once while a checkpoint is loaded, or those of one
larger parameter (heuristic: as large as a stored box)."""

STRICT = CheckpointConfig()
"""Rules of a load with no missing and no unexpected keys."""

WeightsRole = Literal["param", "ema"]
"""Role that weights are read from: the weights themselves, or their moving average."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint. Tensors are read, and their hashes checked, on request."""

    path: StoragePath
    manifest: Manifest
    state: dict[str, Any]  # JSON
    """Training state: everything saved that is not a tensor."""

    config_text: str
    """The run's settings, the text of `config.yaml`."""

    _verified_boxes: set[tuple[str, int]] = field(default_factory=set, repr=False, compare=False)
    """File and offset of the boxes whose hash was checked; each is checked once."""

    @property
    def step(self) -> int:
        """Step after which the checkpoint was saved."""
        return self.manifest.step

    def require_state(self, *keys: str) -> dict[str, Any]:  # JSON
        """Return the state after checking that it has these keys.

        Raises:
            CheckpointError: keys are missing, for example in weights that were released without
                training state.
        """
        missing = [key for key in keys if key not in self.state]
        if missing:
            raise CheckpointError(
                f"{self.path}: no run can be resumed from it, because its {layout.STATE} lacks "
                f"{', '.join(missing)} (found: {', '.join(self.state) or 'nothing'}). To start "
                f"from its weights, move it out of {self.path.parent} and set checkpoint.load to "
                "its new path."
            )
        return self.state

    def warnings(self) -> list[str]:
        """Return a warning for each problem of the files that does not prevent loading."""
        warnings = []
        if self.manifest.sha256 is None:
            warnings.append(
                f"{self.path / layout.MANIFEST} has no {layout.MANIFEST_SHA256}, as it was saved "
                "by an older version: changes to the file would not be noticed. Checkpoints that "
                "are saved from now on have it."
            )
        problem = find_wrong_lengths(self.path, self.manifest).get(layout.METADATA)
        if problem is not None:
            warnings.append(
                f"{problem} Megalith does not read this file, torch.distributed.checkpoint does. "
                "If you need it, copy the checkpoint with a tool that copies files whose names "
                "begin with a dot, such as cp -r."
            )
        return warnings

    def describe_settings(self) -> str:
        """Return where the settings of its run are, for errors."""
        return str(self.path / layout.CONFIG)

    def describe_missing_optimizer(self) -> str:
        """Return why it has no optimizer state, and how to continue without, for errors."""
        return (
            f"{self.path} has no optimizer state: its run had checkpoint.save_optimizer=false, "
            "or it was made from weights. To continue with zero moments in the run's own "
            "folder, set checkpoint.missing_keys=warn; in another folder, set checkpoint.load "
            "to it and checkpoint.load_mode=progress."
        )

    def keys(self) -> list[str]:
        """Return the sorted names of the tensors: `model.NAME` and `optimizer.ROLE.NAME`."""
        return sorted(self.manifest.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        return self._tensor(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the stored dtype."""
        return layout.DTYPES[self._tensor(key).dtype]

    def read(self, key: str, box: Box | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Read a box of a tensor (by default the full tensor) into host memory, in `dtype` (by
        default as stored).

        Raises:
            CheckpointError: there is no such tensor, the box is outside it, or a file is damaged.
        """
        shape = self.shape(key)
        box = tuple((0, n) for n in shape) if box is None else box
        if len(box) != len(shape) or not all(
            0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True)
        ):
            raise CheckpointError(
                f"{self.path}: {key} has shape {list(shape)}, and {show_box(box)} was requested. "
                "Use a box inside."
            )
        values = torch.empty(lengths(box), dtype=self.dtype(key) if dtype is None else dtype)
        self._fill({key: [TensorPiece(box, values)]})
        return values

    def view(self, key: str, box: Box) -> Tensor | None:
        """Return a read-only view of a box if it is inside one stored box, else None.

        Raises:
            CheckpointError: there is no such tensor, or a file is damaged.
        """
        for stored in self._tensor(key).boxes:
            if intersect(stored.box, box) == box:
                return inner_view(TensorPiece(stored.box, self._read_box(key, stored)), box)
        return None

    def local_folder(self) -> Path:
        """Return the folder of the files that are not tensors; of a checkpoint in a store, a local
        copy of them."""
        return self.path if isinstance(self.path, Path) else copy_auxiliary_files_locally(self.path)

    def load_into(
        self,
        entries: Sequence[CheckpointEntry],
        world: Group,
        *,
        rules: CheckpointConfig = STRICT,
        purpose: Purpose = "resume",
        vocab_size: int | None = None,
        weights_role: WeightsRole = "param",
        report_progress: Callable[[], None] | None = None,
    ) -> LoadReport:
        """Fill the tensors of every rank's `entries`, whatever layout and dtype they were saved in.

        Weights and their fp32 master weights are one parameter in two precisions: `master` tensors
        that the checkpoint lacks are read from the weights, and weights in another dtype than the
        stored one are read from the master weights if these are stored. If both are stored and
        differ by more than rounding, rank 0 warns, and `rules.prefer_weights` selects one. Skipped
        or missing tensors keep their values, and rank 0 reports their number; a resumed run skips
        none. If `vocab_size` is given, tables of the vocabulary may have different numbers of
        padding rows, which are set to zero. With `weights_role` ema, weights are read from their
        moving average; parameters that were not trained have none. Averages (role `ema`) that
        the checkpoint lacks are read from the weights. `report_progress` is called after each
        stored box.

        Raises:
            CheckpointError: on every rank with the same text: shapes differ, or `rules` do not
                permit the missing or unexpected keys (all are named, before anything is changed).
            DamagedCheckpointError: on every rank with the same text: a file could not be read or is
                damaged; some tensors may be filled already. The complete checkpoints in the same
                folder are named.
        """
        sources = {entry.key: self._source(entry, weights_role) for entry in entries}
        rank_keys = raise_on_all_ranks(
            lambda: [(entry.key, sources[entry.key], entry.shard.shape) for entry in entries], world
        )
        requested = {key: (source, shape) for part in rank_keys for key, source, shape in part}
        report = self._check_keys(requested, rules, purpose, vocab_size)
        filled = [
            entry for entry in entries if entry.key not in report.missing_keys + report.skipped
        ]
        reads_in_parallel = self._reads_in_parallel(rules, world)
        rank_differences: list[dict[str, float]] = []
        try:
            for batch in _divide_encoded_entries(filled, world):
                with decode_for_loading(batch) as decoded:
                    rank_differences += self._load_decoded(
                        decoded,
                        sources,
                        world,
                        rules=rules,
                        vocab_size=vocab_size,
                        report_progress=report_progress,
                        reads_in_parallel=reads_in_parallel,
                    )
        except CheckpointError as error:
            advice = raise_on_all_ranks(
                lambda: _describe_alternatives(self.path) if world.rank == 0 else "", world
            )[0]
            raise DamagedCheckpointError(str(error), self.path, advice) from error
        if world.rank == 0:
            log_load_report(report, rules, self.path)
            if line := describe_master_differences(
                rank_differences, prefer_weights=rules.prefer_weights
            ):
                _log.warning("%s: %s", self.path, line)
        return report

    def _load_decoded(
        self,
        entries: Sequence[CheckpointEntry],
        sources: Mapping[str, str],
        world: Group,
        *,
        rules: CheckpointConfig,
        vocab_size: int | None,
        report_progress: Callable[[], None] | None,
        reads_in_parallel: bool,
    ) -> Sequence[dict[str, float]]:
        """Fill the tensors of entries; return each rank's differences between weights and master
        weights. Collective."""
        parts: dict[str, list[TensorPiece]] = {}
        for entry in entries:
            parts.setdefault(sources[entry.key], []).extend(pieces(entry))
        pairs = self._pairs_to_reconcile(entries, sources)
        if reads_in_parallel:
            pairs = [self._request_weights(pair, parts) for pair in pairs]
            buffer_nbytes = rules.exchange_buffer_mb * 2**20
            read_box = partial(self._read_and_report, report_progress)
            fill_in_parallel(self.manifest, parts, read_box, world, buffer_nbytes=buffer_nbytes)
        else:
            self._fill_on_all_ranks(parts, world, report_progress)
        if vocab_size is not None:
            for piece in (piece for key in parts if is_table(key) for piece in parts[key]):
                piece.values[max(0, vocab_size - piece.box[0][0]) :].zero_()
        return raise_on_all_ranks(
            lambda: self._reconcile(pairs, prefer_weights=rules.prefer_weights), world
        )

    def _tensor(self, key: str) -> StoredTensor:
        if key in self.manifest.tensors:
            return self.manifest.tensors[key]
        near = ", ".join(get_close_matches(key, self.manifest.tensors, n=3) or self.keys()[:3])
        raise CheckpointError(
            f"{self.path}: there is no tensor {key}. Use one of its names, such as {near}."
        )

    @property
    def has_ema(self) -> bool:
        """Whether it has a moving average of the weights (role `ema`)."""
        return any(key.startswith(EMA) for key in self.manifest.tensors)

    def require_ema(self) -> None:
        """Check that the checkpoint has a moving average of the weights.

        Raises:
            CheckpointError: it has none.
        """
        if not self.has_ema:
            raise CheckpointError(
                f"--role=ema: {self.path} has no moving average of the weights (role ema), because "
                "its run had train.ema unset. Use --role param, or train with train.ema.decay, "
                "for example 0.999."
            )

    def _source(self, entry: CheckpointEntry, weights_role: WeightsRole) -> str:
        """Return the stored tensor that an entry is read from."""
        weights, master = f"{MODEL}{entry.shard.name}", f"{MASTER}{entry.shard.name}"
        average, stored = f"{EMA}{entry.shard.name}", self.manifest.tensors
        if weights_role == "ema" and entry.role in ("param", "master"):
            return average if average in stored else weights
        if entry.role == "ema" and average not in stored:
            return master if master in stored else weights
        if entry.role == "master" and master not in stored:
            return weights
        if (
            entry.role == "param"
            and master in stored
            and weights in stored
            and entry.dtype != self.dtype(weights)
        ):
            return master
        return entry.key

    def _check_keys(
        self, wanted: Wanted, rules: CheckpointConfig, purpose: Purpose, vocab_size: int | None
    ) -> LoadReport:
        """Compare the requested keys with the stored ones and return those that will not be filled.

        Raises:
            CheckpointError: `rules` do not permit that, shapes differ, or a skip pattern matches
                nothing.
        """
        stored = self.manifest.tensors
        skip = rules.skip if purpose == "start" else ()
        check_patterns(skip, wanted.keys(), stored.keys())
        report = compare_keys(wanted, stored.keys(), skip=skip, purpose=purpose)
        differ = [
            f"{key} is {list(shape)} in this run and {list(stored[source].shape)} in the checkpoint"
            for key, (source, shape) in sorted(wanted.items())
            if source in stored
            and stored[source].shape != shape
            and key not in report.skipped
            and not (
                is_table(key) and differ_only_in_padding(stored[source].shape, shape, vocab_size)
            )
        ]
        rejected = select_rejected_keys(report, rules, purpose)
        has_no_state = report.fresh_state and not any(map(is_moment, report.unexpected_keys))
        if (
            has_no_state
            and rejected.missing_keys
            and not differ
            and all(map(is_state, rejected.missing_keys))
        ):
            raise CheckpointError(self.describe_missing_optimizer())
        if (
            rejected.unexpected_keys
            and not differ
            and not rejected.missing_keys
            and all(key.startswith(EMA) for key in rejected.unexpected_keys)
        ):
            raise CheckpointError(
                f"train.ema is unset, and {self.path} has a moving average of the weights "
                f"({'; '.join(group_by_pattern(rejected.unexpected_keys)[:1])}, ...). Set "
                "train.ema.decay as its config.yaml says, or set checkpoint.unexpected_keys=warn "
                "to continue without the average."
            )
        if differ or rejected.missing_keys or rejected.unexpected_keys:
            raise CheckpointError(
                f"{self.path} is a checkpoint of another model:\n"
                f"{differences(differ, rejected)}\n"
                f"Set model.* and optim.* to what {self.describe_settings()} says, or choose "
                "another checkpoint."
            )
        return report

    def _reads_in_parallel(self, rules: CheckpointConfig, world: Group) -> bool:
        """Return whether ranks exchange the boxes that several of them need. Collective."""
        if world.size == 1 or rules.parallel_load is False:
            return False
        if rules.parallel_load is True or isinstance(self.path, StorePath):
            return True
        path = self.path
        return any(raise_on_all_ranks(lambda: storage.is_network_folder(path), world))

    def _pairs_to_reconcile(
        self, entries: Sequence[CheckpointEntry], sources: Mapping[str, str]
    ) -> list[MasterWeightPair]:
        """Return the shards of which weights and master weights are stored and can be compared:
        values that were rounded while loading cannot."""
        return [
            pair
            for pair in pair_master_weights(entries, sources)
            if f"{MODEL}{pair.shard.name}" in self.manifest.tensors
            and torch.promote_types(self.dtype(f"{MASTER}{pair.shard.name}"), pair.wide.dtype)
            == pair.wide.dtype
        ]

    def _request_weights(
        self, pair: MasterWeightPair, wanted: dict[str, list[TensorPiece]]
    ) -> MasterWeightPair:
        """Add the stored weights of a pair to the pieces to read, unless they are among them."""
        if pair.low is not None:
            return pair
        key = f"{MODEL}{pair.shard.name}"
        stored = torch.zeros(pair.wide.shape, dtype=self.dtype(key), device=pair.wide.device)
        wanted.setdefault(key, []).extend(pieces(CheckpointEntry(pair.shard, "param", stored)))
        return replace(pair, low=stored)

    def _reconcile(
        self, pairs: Sequence[MasterWeightPair], *, prefer_weights: bool
    ) -> dict[str, float]:
        """Make weights and master weights of this rank consistent; return {parameter: largest
        difference}."""
        differences_by_name: dict[str, float] = {}
        for pair in pairs:
            stored = pair.low if pair.low is not None else self._weights_of(pair)
            largest = reconcile(stored, pair.wide, prefer_weights=prefer_weights)
            if largest is None:
                continue
            differences_by_name[pair.shard.name] = max(
                differences_by_name.get(pair.shard.name, 0.0), largest
            )
            if pair.other is not None:
                pair.other.copy_(pair.wide)
        return differences_by_name

    def _weights_of(self, pair: MasterWeightPair) -> Tensor:
        """Read the stored weights of a pair, in the order of its elements."""
        key = f"{MODEL}{pair.shard.name}"
        # some keys may be missing
        stored = torch.zeros(pair.wide.shape, dtype=self.dtype(key), device=pair.wide.device)
        self._fill({key: pieces(CheckpointEntry(pair.shard, "param", stored))})
        return stored

    def _fill_on_all_ranks(
        self,
        wanted: Mapping[str, Sequence[TensorPiece]],
        world: Group,
        report_progress: Callable[[], None] | None,
    ) -> None:
        """Fill the pieces of every rank. Collective.

        Raises:
            CheckpointError: on every rank: a file could not be read or is damaged.
        """
        raise_on_all_ranks(lambda: self._fill(wanted, report_progress), world)

    def _fill(
        self,
        wanted: Mapping[str, Sequence[TensorPiece]],
        report_progress: Callable[[], None] | None = None,
    ) -> None:
        """Copy stored values into the pieces, reading each stored box once, in file order."""
        for needed in list_needed_boxes(self.manifest, wanted):
            needed.fill(self._read_and_report(report_progress, needed.key, needed.stored))

    def _read_and_report(
        self, report_progress: Callable[[], None] | None, key: str, stored: StoredBox
    ) -> Tensor:
        """Read one stored box and report progress."""
        values = self._read_box(key, stored)
        if report_progress is not None:
            report_progress()
        return values

    def _read_box(self, key: str, stored: StoredBox) -> Tensor:
        """Read one stored box and check its hash.

        Raises:
            CheckpointError: the bytes are damaged, or are not the expected tensor.
        """
        path = self.path / stored.file
        place = (
            f"{path}: the {stored.nbytes:,} bytes from {stored.offset:,} on ({key} "
            f"{show_box(stored.box)})"
        )
        known = (stored.file, stored.offset) in self._verified_boxes
        data = map_bytes(path, stored, place) if known else map_checked_bytes(path, stored, place)
        self._verified_boxes.add((stored.file, stored.offset))
        return self._parse_box(key, stored, data, place)

    def _parse_box(self, key: str, stored: StoredBox, data: memoryview, place: str) -> Tensor:
        """Return the tensor in the bytes of a box.

        Raises:
            CheckpointError: the bytes are not the expected tensor; `place` names them.
        """
        try:
            value = require_plain(
                parse_archive(data, source="the bytes"), what="the tensor", source="the archive"
            )
        except CheckpointError as error:
            raise CheckpointError(
                f"{place} are not a plain tensor, and nothing in them was run "
                f"({_first_line(error)}). Use a checkpoint from a trusted source."
            ) from error
        tensor = value.read() if isinstance(value, ArchiveTensor) else value
        expected = lengths(stored.box), layout.DTYPES[self.manifest.tensors[key].dtype]
        if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != expected:
            actual = (
                f"{list(tensor.shape)} {tensor.dtype}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            raise CheckpointError(
                f"{place} hold {actual}; expected {list(expected[0])} {expected[1]}. Use another "
                "checkpoint."
            )
        return tensor


def _divide_encoded_entries(
    entries: Sequence[CheckpointEntry], world: Group
) -> list[list[CheckpointEntry]]:
    """Divide entries into batches that are decoded, filled and encoded one after the other, so that
    few values are decoded at once; equally many on every rank. Collective.

    All entries of a parameter are in one batch. Parameters without encoded entries are in the
    first.
    """
    encoded = {entry.shard.name for entry in entries if entry.encoded is not None}
    batches = [[entry for entry in entries if entry.shard.name not in encoded]]
    entries_by_name: dict[str, list[CheckpointEntry]] = {}
    for entry in entries:
        if entry.shard.name in encoded:
            entries_by_name.setdefault(entry.shard.name, []).append(entry)
    nbytes = 0
    for of_parameter in entries_by_name.values():
        added = sum(entry.tensor.nbytes for entry in of_parameter if entry.encoded is not None)
        if nbytes + added > _DECODED_NBYTES:
            batches.append([])
            nbytes = 0
        batches[-1] += of_parameter
        nbytes += added
    counts = raise_on_all_ranks(lambda: len(batches), world)
    return batches + [[] for _ in range(max(counts) - len(batches))]


@functools.cache
def copy_auxiliary_files_locally(path: StorePath) -> Path:
    """Copy the files of a checkpoint in a store that are not tensors, such as the tokenizer's, to a
    temporary folder; it is removed at the end of this process.

    Raises:
        CheckpointError: a file is damaged.
    """
    folder = Path(tempfile.mkdtemp(prefix="megalith-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    storage.write_new(folder / layout.MANIFEST, storage.read_bytes(path / layout.MANIFEST))
    for name, file in read_manifest(path).files.items():
        if file.sha256 is not None:
            storage.write_new(folder / name, map_checked_bytes(path / name, file, str(path / name)))
    return folder


def open_checkpoint(path: StoragePath) -> Checkpoint:
    """Open the checkpoint in a `step_NNNNNNN` folder, checking file lengths and hashes of text
    files.

    The hashes of tensors are checked when these are read.

    Raises:
        CheckpointError: it is not a checkpoint, incomplete, damaged, or in a newer format.
    """
    contents = read_folder(path)
    return Checkpoint(path, contents.manifest, contents.state, contents.config_text)


def find_latest(folder: StoragePath) -> StoragePath | None:
    """Return the newest complete checkpoint under `folder`; None if there are no checkpoints. Run
    by one rank.

    Newer checkpoints that are incomplete or damaged are skipped with a warning; so is a pointer
    file that names another one. Nothing is written, because the run may be in progress.

    Raises:
        CheckpointError: there are checkpoints, but none can be used; the run does not silently
            start anew.
    """
    problems: list[str] = []
    for path in reversed(layout.step_folders(folder).values()):
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            _log.warning("skipping checkpoint %s: %s", path.name, error)
            problems.append(f"  {path.name}: {error}")
            continue
        _warn_of_pointer(folder, path.name.partition(".old-")[0])
        return path
    if problems:
        lines = "\n".join(problems)
        raise CheckpointError(
            f"{folder}: none of its {len(problems)} checkpoints can be used:\n"
            f"{lines}\n"
            "Copy one of them here again, or choose another folder with --run to start from the "
            "beginning."
        )
    return None


def verify_checkpoint(path: StoragePath) -> list[str]:
    """Return all problems of a checkpoint: file lengths, hashes, bytes that are not tensors. Empty
    if it is intact.

    A missing `.metadata` is not a problem but one of `Checkpoint.warnings`.
    """
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    if not storage.exists(path / layout.METADATA):
        manifest.files.pop(layout.METADATA, None)
    wrong = find_wrong_lengths(path, manifest)
    problems = list(wrong.values())
    for name, file in sorted(manifest.files.items()):
        try:
            if name not in wrong and file.sha256 is not None:
                map_checked_bytes(path / name, file, str(path / name))
        except CheckpointError as error:
            problems.append(str(error))
    opened = Checkpoint(path, manifest, {}, "")
    for key, stored in _in_file_order(manifest, manifest.tensors):
        try:
            if stored.file not in wrong:
                opened._read_box(key, stored)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def list_other_checkpoints(path: StoragePath) -> list[StoragePath]:
    """Return the other complete checkpoints in the folder of the one in `path`, newest first."""
    complete = reversed(list_complete_checkpoints(path.parent).values())
    return [other for other in complete if other.name != path.name]


def _describe_alternatives(path: StoragePath) -> str:
    """Describe how to continue with another complete checkpoint of the folder; empty if there is
    none."""
    complete = [folder.name for folder in list_other_checkpoints(path)]
    if not complete:
        return ""
    more = f" and {len(complete) - 3} more" if len(complete) > 3 else ""
    return (
        "\n"
        f"Complete in the same folder: {', '.join(complete[:3])}{more}. To resume from "
        f"{complete[0]}, remove {path}, or rename it to {path.name}.damaged."
    )


def _in_file_order(manifest: Manifest, keys: Iterable[str]) -> list[tuple[str, StoredBox]]:
    """Return the stored boxes of some tensors in file order, for sequential reads."""
    boxes = [(key, stored) for key in keys for stored in manifest.tensors[key].boxes]
    return sorted(boxes, key=lambda item: (item[1].file, item[1].offset))


def _warn_of_pointer(folder: StoragePath, name: str) -> None:
    named = layout.read_pointer(folder)
    if named != name:
        _log.warning(
            "%s says %r; the newest complete checkpoint is %s and is used",
            folder / layout.LATEST,
            named,
            name,
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
