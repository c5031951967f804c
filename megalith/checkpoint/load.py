"""Reading a checkpoint under any layout: the boxes that are wanted, out of the boxes that are
there.

Nothing a stranger put into the folder is run: the manifest is checked text, tensors are read with
`weights_only`, and `.metadata`, a pickle, is not opened.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint import format as layout
from megalith.checkpoint.agree import raise_on_all_ranks
from megalith.checkpoint.archive import saved_tensor
from megalith.checkpoint.boxes import (
    CheckpointEntry,
    TensorPiece,
    inner_view,
    lengths,
    pieces,
    show_box,
)
from megalith.checkpoint.format import Manifest, StoredBox, StoredFile, StoredTensor
from megalith.checkpoint.masters import MasterWeightPair, pairs_of, reconcile, worst_line
from megalith.checkpoint.strictness import (
    MASTER,
    MODEL,
    LoadReport,
    Purpose,
    Wanted,
    announce,
    check_patterns,
    differences,
    is_state,
    is_table,
    left_out,
    padded_alike,
    refused,
)
from megalith.config.checkpoint import CheckpointConfig
from megalith.errors import CheckpointError, DamagedCheckpointError
from megalith.parallel.group import Group
from megalith.plan.shards import Box, intersect

STRICT = CheckpointConfig()
"""Every tensor must be there, and none too many."""

_AGAIN = "Copy the checkpoint again"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint, opened. Tensors are read, and their hashes compared, when asked
    for."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]  # JSON
    """Everything that was saved and is not a tensor."""

    config_text: str
    """The run's settings, as `config.yaml` has them."""

    _sound: set[tuple[str, int]] = field(default_factory=set, repr=False, compare=False)
    """File and offset of every box whose hash was compared, which is done once for each."""

    @property
    def step(self) -> int:
        """Optimizer updates before it was saved."""
        return self.manifest.step

    def require_state(self, *keys: str) -> dict[str, Any]:  # JSON
        """The state, for a caller that needs these of its entries.

        Raises:
            CheckpointError: some are missing, as in weights that were released without the rest of
            their run.
        """
        missing = [key for key in keys if key not in self.state]
        if missing:
            raise CheckpointError(
                f"{self.path}: no run can be resumed from it, as its {layout.STATE} lacks "
                f"{', '.join(missing)} (found: {', '.join(self.state) or 'nothing'}). To start "
                f"from its weights, move it out of {self.path.parent} and set checkpoint.load to "
                "where it is then."
            )
        return self.state

    def warnings(self) -> list[str]:
        """Return a sentence for everything that is unusual about its files and does not keep it
        from being loaded."""
        warnings = []
        if self.manifest.sha256 is None:
            warnings.append(
                f"{self.path / layout.MANIFEST} has no {layout.MANIFEST_SHA256}, as it was saved "
                "by an older version: changes to the file would not be noticed. Checkpoints that "
                "are saved from now on have it."
            )
        problem = _wrong_lengths(self.path, self.manifest).get(layout.METADATA)
        if problem is not None:
            warnings.append(
                f"{problem} Megalith does not read this file, torch.distributed.checkpoint does. "
                "If you need it, copy the checkpoint with a tool that copies files whose names "
                "begin with a dot, such as cp -r."
            )
        return warnings

    def keys(self) -> list[str]:
        """Names of the tensors, sorted: `model.NAME` and `optimizer.ROLE.NAME`."""
        return sorted(self.manifest.tensors)

    def shape(self, key: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._tensor(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """As stored."""
        return layout.DTYPES[self._tensor(key).dtype]

    def read(self, key: str, box: Box | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A box of a tensor (the whole one by default), on the host, in `dtype` (as stored by
        default).

        Raises:
            CheckpointError: no such tensor, a box outside it, or a damaged file.
        """
        shape = self.shape(key)
        box = tuple((0, n) for n in shape) if box is None else box
        if len(box) != len(shape) or not all(
            0 <= a <= b <= n for (a, b), n in zip(box, shape, strict=True)
        ):
            raise CheckpointError(
                f"{self.path}: {key} has shape {list(shape)}, and {show_box(box)} was asked of it. "
                "Use a box inside."
            )
        values = torch.empty(lengths(box), dtype=self.dtype(key) if dtype is None else dtype)
        self._fill({key: [TensorPiece(box, values)]})
        return values

    def view(self, key: str, box: Box) -> Tensor | None:
        """The same as `read` without a copy, where one stored box has it all; else None. Not to be
        written to.

        Raises:
            CheckpointError: no such tensor, or a damaged file.
        """
        for stored in self._tensor(key).boxes:
            if intersect(stored.box, box) == box:
                return inner_view(TensorPiece(stored.box, self._read_box(key, stored)), box)
        return None

    def load_into(
        self,
        entries: Sequence[CheckpointEntry],
        world: Group,
        *,
        rules: CheckpointConfig = STRICT,
        purpose: Purpose = "resume",
        vocab_size: int | None = None,
    ) -> LoadReport:
        """Fill the tensors of every rank's `entries`, whatever layout and dtype they were saved in.

        Weights and their fp32 master weights are one thing in two precisions: a `master` the
        checkpoint lacks is read from the weights, and weights wanted in another dtype than the
        stored one are read from the master if there is one. Where both are stored and differ by
        more than rounding, rank 0 warns, and `rules.prefer_weights` decides. Tensors that are
        skipped or missing keep their values, and rank 0 says how many; a run that resumes skips
        none. Where `vocab_size` is given, tables of the vocabulary may have other numbers of rows
        behind it, which are zero.

        Raises:
            CheckpointError: on every rank with the same text: shapes differ, or tensors are missing
                or surplus that `rules` do not let pass (all are named, before anything is changed).
            DamagedCheckpointError: on every rank with the same text: a rank could not read a file
                or found it damaged; some tensors may be filled already. The complete checkpoints
                beside it are named.
        """
        sources = {entry.key: self._source(entry) for entry in entries}
        asked = raise_on_all_ranks(
            lambda: [(entry.key, sources[entry.key], entry.shard.shape) for entry in entries], world
        )
        wanted = {key: (source, shape) for part in asked for key, source, shape in part}
        report = self._agree(wanted, rules, purpose, vocab_size)
        filled = [
            entry for entry in entries if entry.key not in report.missing_keys + report.skipped
        ]
        parts: dict[str, list[TensorPiece]] = {}
        for entry in filled:
            parts.setdefault(sources[entry.key], []).extend(pieces(entry))
        try:
            raise_on_all_ranks(lambda: self._fill(parts), world)
            if vocab_size is not None:
                for piece in (piece for key in parts if is_table(key) for piece in parts[key]):
                    piece.values[max(0, vocab_size - piece.box[0][0]) :].zero_()
            found = raise_on_all_ranks(
                lambda: self._reconcile(filled, sources, prefer_weights=rules.prefer_weights), world
            )
        except CheckpointError as error:
            advice = raise_on_all_ranks(
                lambda: _instead_of(self.path) if world.rank == 0 else "", world
            )[0]
            raise DamagedCheckpointError(str(error), self.path, advice) from error
        if world.rank == 0:
            announce(report, rules, self.path)
            if line := worst_line(found, prefer_weights=rules.prefer_weights):
                _log.warning("%s: %s", self.path, line)
        return report

    def _tensor(self, key: str) -> StoredTensor:
        if key in self.manifest.tensors:
            return self.manifest.tensors[key]
        near = ", ".join(get_close_matches(key, self.manifest.tensors, n=3) or self.keys()[:3])
        raise CheckpointError(
            f"{self.path}: it holds no tensor {key}. Use one of its names, such as {near}."
        )

    def _source(self, entry: CheckpointEntry) -> str:
        """The stored tensor that an entry is read from."""
        weights, master = f"{MODEL}{entry.shard.name}", f"{MASTER}{entry.shard.name}"
        stored = self.manifest.tensors
        if entry.role == "master" and master not in stored:
            return weights
        if (
            entry.role == "param"
            and master in stored
            and weights in stored
            and entry.tensor.dtype != self.dtype(weights)
        ):
            return master
        return entry.key

    def _agree(
        self, wanted: Wanted, rules: CheckpointConfig, purpose: Purpose, vocab_size: int | None
    ) -> LoadReport:
        """What of `wanted` will not be filled, once `rules` let that pass.

        Raises:
            CheckpointError: they do not, shapes differ, or a pattern to skip names nothing.
        """
        stored = self.manifest.tensors
        skip = rules.skip if purpose == "start" else ()
        check_patterns(skip, wanted.keys(), stored.keys())
        report = left_out(wanted, stored.keys(), skip=skip, purpose=purpose)
        differ = [
            f"{key} is {list(shape)} in this run and {list(stored[source].shape)} in the checkpoint"
            for key, (source, shape) in sorted(wanted.items())
            if source in stored
            and stored[source].shape != shape
            and key not in report.skipped
            and not (is_table(key) and padded_alike(stored[source].shape, shape, vocab_size))
        ]
        wrong = refused(report, rules, purpose)
        lean = report.fresh_state and not any(map(is_state, report.unexpected_keys))
        if lean and wrong.missing_keys and not differ and all(map(is_state, wrong.missing_keys)):
            raise CheckpointError(
                f"{self.path} has no optimizer state: its run had checkpoint.save_optimizer=false, "
                "or it was made from weights. To go on with moments of zero in the run's own "
                "folder, set checkpoint.missing_keys=warn; in another folder, set checkpoint.load "
                "to it and checkpoint.load_mode=progress."
            )
        if differ or wrong.missing_keys or wrong.unexpected_keys:
            raise CheckpointError(
                f"{self.path} is a checkpoint of another model:\n"
                f"{differences(differ, wrong)}\n"
                f"Set model.* and optim.* to what {self.path / layout.CONFIG} says, or choose "
                "another checkpoint."
            )
        return report

    def _reconcile(
        self,
        entries: Sequence[CheckpointEntry],
        sources: Mapping[str, str],
        *,
        prefer_weights: bool,
    ) -> dict[str, float]:
        """Make weights and masters of this rank agree; {parameter: largest difference} of those
        that did not."""
        found: dict[str, float] = {}
        for pair in pairs_of(entries, sources):
            weights, master = f"{MODEL}{pair.shard.name}", f"{MASTER}{pair.shard.name}"
            wide = torch.promote_types(self.dtype(master), pair.wide.dtype) == pair.wide.dtype
            if (
                weights not in self.manifest.tensors or not wide
            ):  # what was rounded on the way cannot be compared
                continue
            stored = pair.low if pair.low is not None else self._weights_of(pair)
            largest = reconcile(stored, pair.wide, prefer_weights=prefer_weights)
            if largest is None:
                continue
            found[pair.shard.name] = max(found.get(pair.shard.name, 0.0), largest)
            if pair.other is not None:
                pair.other.copy_(pair.wide)
        return found

    def _weights_of(self, pair: MasterWeightPair) -> Tensor:
        """The stored weights where the run's own are not those: as many elements as the pair has,
        in its order."""
        key = f"{MODEL}{pair.shard.name}"
        stored = torch.zeros(
            pair.wide.shape, dtype=self.dtype(key), device=pair.wide.device
        )  # some may not be there
        self._fill({key: pieces(CheckpointEntry(pair.shard, "param", stored))})
        return stored

    def _fill(self, wanted: Mapping[str, Sequence[TensorPiece]]) -> None:
        """Copy what is stored into the pieces, reading each box that any of them needs once, in the
        order of files."""
        for key, stored in _in_file_order(self.manifest, wanted):
            shared = [(piece, intersect(piece.box, stored.box)) for piece in wanted[key]]
            hits = [(piece, box) for piece, box in shared if box is not None]
            if hits:
                values = TensorPiece(stored.box, self._read_box(key, stored))
                for piece, box in hits:
                    inner_view(piece, box).copy_(inner_view(values, box))

    def _read_box(self, key: str, stored: StoredBox) -> Tensor:
        """One stored box, its hash compared.

        Raises:
            CheckpointError: the bytes are not those that were written, or are something else than
            that tensor.
        """
        path = self.path / stored.file
        place = (
            f"{path}: the {stored.nbytes:,} bytes from {stored.offset:,} on ({key} "
            f"{show_box(stored.box)})"
        )
        known = (stored.file, stored.offset) in self._sound
        data = _mapped(path, stored, place) if known else _checked(path, stored, place)
        self._sound.add((stored.file, stored.offset))
        try:
            tensor = saved_tensor(data)
        except Exception as error:  # foreign bytes may raise anything; what they cannot do is run
            raise CheckpointError(
                f"{place} are not a plain tensor, and nothing in them was run "
                f"({_first_line(error)}). Use a checkpoint from someone you know."
            ) from error
        expected = lengths(stored.box), layout.DTYPES[self.manifest.tensors[key].dtype]
        if not isinstance(tensor, Tensor) or (tuple(tensor.shape), tensor.dtype) != expected:
            found = (
                f"{list(tensor.shape)} {tensor.dtype}"
                if isinstance(tensor, Tensor)
                else type(tensor).__name__
            )
            raise CheckpointError(
                f"{place} hold {found}; expected {list(expected[0])} {expected[1]}. Use another "
                "checkpoint."
            )
        return tensor


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a `step_NNNNNNN` folder. File lengths and hashes of texts are compared,
    those of tensors later.

    Raises:
        CheckpointError: it is not a checkpoint, incomplete, damaged, or from a newer format.
    """
    manifest = _read_manifest(path)
    wrong = _wrong_lengths(path, manifest)
    wrong.pop(layout.METADATA, None)  # which is for other tools: `Checkpoint.warnings`
    if wrong:
        lines = "\n".join(wrong.values())
        raise CheckpointError(f"{lines}\n{_AGAIN}, or use an older one.")
    state_text, config_text = (
        _checked(path / name, manifest.files[name], str(path / name))
        for name in (layout.STATE, layout.CONFIG)
    )
    try:
        state = json.loads(bytes(state_text))
        if not isinstance(state, dict):
            raise ValueError(f"expected an object, found {type(state).__name__}")
        return Checkpoint(path, manifest, state, bytes(config_text).decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: {layout.STATE} or {layout.CONFIG} cannot be read ({error}). Use another "
            "checkpoint."
        ) from error


def is_complete(path: Path) -> bool:
    """Whether `open_checkpoint` opens it."""
    try:
        open_checkpoint(path)
    except CheckpointError:
        return False
    return True


def find_latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`, or None when there is none at all; run by one
    rank.

    A newer one that is incomplete or damaged is passed over with a warning that says why; so is a
    pointer file that says something else. Nothing is written: the folder may be that of a run in
    progress.

    Raises:
        CheckpointError: there are checkpoints and none of them can be used: better than starting
        afresh unasked.
    """
    problems: list[str] = []
    for step, path in reversed(layout.step_folders(folder).items()):
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            _log.warning("passing over checkpoint %s: %s", path.name, error)
            problems.append(f"  {path.name}: {error}")
            continue
        _warn_of_pointer(folder, layout.folder_name(step))
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


def verify_checkpoint(path: Path) -> list[str]:
    """Return everything that is wrong with a checkpoint: lengths, hashes, bytes that are not
    tensors. Empty: sound.

    A `.metadata` that was not copied is no problem but one of `Checkpoint.warnings`.
    """
    try:
        manifest = _read_manifest(path)
    except CheckpointError as error:
        return [str(error)]
    if not (path / layout.METADATA).exists():
        manifest.files.pop(layout.METADATA, None)
    wrong = _wrong_lengths(path, manifest)
    problems = list(wrong.values())
    for name, file in sorted(manifest.files.items()):
        try:
            if name not in wrong and file.sha256 is not None:
                _checked(path / name, file, str(path / name))
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


def _read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in `path`; where there is none, the error says what the folder
    looks like."""
    try:
        data = storage.read_bytes(path / layout.MANIFEST)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: {_looks_like(path)}") from None
    except OSError as error:
        raise CheckpointError(
            f"{path / layout.MANIFEST} cannot be read ({error}). {_AGAIN}, or use an older one."
        ) from error
    return layout.parse_manifest(data, path / layout.MANIFEST)


def _looks_like(path: Path) -> str:
    """What a folder without a manifest is, and what to use instead."""
    if not path.exists():
        return "no such folder. Set the path to a step_NNNNNNN folder of a run's checkpoints."
    names = storage.list_names(path)
    steps = [
        found
        for folder in (path, path / "checkpoints")
        for found in layout.step_folders(folder).values()
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
        f"not a complete checkpoint: it has no {layout.MANIFEST} (found: {shown}). {_AGAIN}, or "
        "use an older one."
    )


def list_complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in `folder` by step, oldest first.

    Their tensors are not read: that would take as long as loading each of them.
    """
    return {step: path for step, path in layout.step_folders(folder).items() if is_complete(path)}


def list_other_checkpoints(path: Path) -> list[Path]:
    """Return the complete checkpoints in the same folder as the one in `path`, newest first,
    without that one."""
    complete = reversed(list_complete_checkpoints(path.parent).values())
    return [other for other in complete if other.name != path.name]


def _instead_of(path: Path) -> str:
    """How to go on without the checkpoint in `path`, when there are complete ones beside it; empty
    otherwise."""
    complete = [folder.name for folder in list_other_checkpoints(path)]
    if not complete:
        return ""
    more = f" and {len(complete) - 3} more" if len(complete) > 3 else ""
    return (
        "\n"
        f"Complete in the same folder: {', '.join(complete[:3])}{more}. To resume from "
        f"{complete[0]}, remove {path}, or rename it to {path.name}.damaged."
    )


def _wrong_lengths(path: Path, manifest: Manifest) -> dict[str, str]:
    """Files that are missing or of another length than the manifest says, each with the sentence
    that says so."""
    wrong = {}
    for name, file in sorted(manifest.files.items()):
        try:
            found = storage.file_nbytes(path / name)
        except OSError as error:
            tensors = sum(
                any(box.file == name for box in tensor.boxes)
                for tensor in manifest.tensors.values()
            )
            wrong[name] = (
                f"{path / name}: cannot be read ({error.strerror}); expected {file.nbytes:,} "
                f"bytes{f', parts of {tensors} tensors' if tensors else ''}."
            )
            continue
        if found != file.nbytes:
            wrong[name] = (
                f"{path / name} is {found:,} bytes, expected {file.nbytes:,}: the checkpoint is "
                "incomplete."
            )
    return wrong


def _mapped(path: Path, stored: StoredFile | StoredBox, place: str) -> memoryview:
    """The bytes of a file or of a box in it; `place` names them."""
    try:
        data = storage.mapped(
            path, stored.offset if isinstance(stored, StoredBox) else 0, stored.nbytes
        )
    except OSError as error:
        raise CheckpointError(
            f"{place} cannot be read ({error}). {_AGAIN}, or use an older one."
        ) from error
    if len(data) != stored.nbytes:
        raise CheckpointError(
            f"{place}: the file ends after {len(data):,} of them. {_AGAIN}, or use an older one."
        )
    return data


def _checked(path: Path, stored: StoredFile | StoredBox, place: str) -> memoryview:
    """The same, if they have the hash that was written down."""
    data = _mapped(path, stored, place)
    found = layout.sha256(data)
    if found != stored.sha256:
        raise CheckpointError(
            f"{place}: damaged. SHA-256 expected {stored.sha256}, found {found}. {_AGAIN}, or use "
            "an older one."
        )
    return data


def _in_file_order(manifest: Manifest, keys: Iterable[str]) -> list[tuple[str, StoredBox]]:
    """The stored boxes of some tensors, in the order in which a disk likes to read them."""
    found = [(key, stored) for key in keys for stored in manifest.tensors[key].boxes]
    return sorted(found, key=lambda item: (item[1].file, item[1].offset))


def _warn_of_pointer(folder: Path, name: str) -> None:
    said = layout.read_pointer(folder)
    if said != name:
        _log.warning(
            "%s says %r; the newest complete checkpoint is %s and is used",
            folder / layout.LATEST,
            said,
            name,
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
