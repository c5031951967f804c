"""Local checkpoints: each rank stores its boxes on its machine, with copies of a peer's, and a run
continues from what the ranks have left.

    /dev/shm/megalith-NAME-1a2b3c4d5e6f7788/    or in checkpoint.local.folder; the run's name and id
      rank_00002/
        step_0001200/
          __2_0.distcp      this rank's boxes
          __1_0.distcp      copies of the boxes of rank 1
          state.json        training state
          local.json        run, step, save, and every box with its SHA-256; written last

A local checkpoint is complete if the boxes of the folders that are left cover every tensor, so any
layout and number of ranks can load it. A box is hashed before it is written into a tensor.
"""

import errno
import json
import logging
import os
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megalith import storage
from megalith.checkpoint.copies import PeerAddress, find_own_address
from megalith.checkpoint.format import CheckpointEntry, TensorPiece, inner_view
from megalith.checkpoint.keys import MasterWeightPair
from megalith.checkpoint.load import Checkpoint
from megalith.checkpoint.local_table import (
    SPACE_ADVICE,
    TABLE,
    LocalTable,
    box_file,
    commit_local_folder,
    explain_full,
    parse_table,
)
from megalith.checkpoint.manifest import (
    STATE,
    Manifest,
    StoredBox,
    StoredTensor,
    WrittenPart,
    dump_part,
    folder_name,
    parse_part,
    sha256,
    show_box,
    show_bytes,
    step_folders,
)
from megalith.checkpoint.save import dump_state, write_boxes
from megalith.config.checkpoint import CheckpointConfig, LocalCheckpointConfig
from megalith.errors import CheckpointError, PlanError
from megalith.parallel.group import Group, raise_on_all_ranks
from megalith.parallel.transfer import exchange_bytes, receive_bytes, send_bytes
from megalith.plan.shards import Box, intersect
from megalith.plan.tiers import (
    BoxRead,
    LocalFolder,
    LocalStep,
    list_local_steps,
    merge_reports,
    plan_peers,
    plan_reads,
)

SHARED_MEMORY = Path("/dev/shm")
"""Memory file system of Linux."""

RUN_ID = "run_id"
"""File in the folder of a run's checkpoints with the id that its local checkpoints carry. If that
folder is deleted, they belong to no run."""

_SPACE_FACTOR = 1.05
"""Free space that a save needs, relative to its tensors: the specification's margin."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalSaveReport:
    """Size and duration of a local save."""

    step: int
    nbytes: int
    """Bytes in this rank's folder, with the copies for others."""

    seconds: float
    num_copies: int
    """Number of ranks that store each box."""

    def __str__(self) -> str:
        return (
            f"local checkpoint of step {self.step}: {show_bytes(self.nbytes)} per rank, "
            f"replication factor {self.num_copies}, in {self.seconds:.2f} s"
        )


class LocalSaveError(CheckpointError):
    """A local checkpoint could not be saved; older ones are unchanged."""


@dataclass(frozen=True, slots=True)
class _SaveSize:
    """What a rank announces before a local save."""

    save: str
    machine: str
    device: int
    """Number of the file system."""

    free: int
    nbytes: int
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    address: PeerAddress | None = None
    """Where its writer process receives copies."""


@dataclass(frozen=True, slots=True)
class LocalSave:
    """What the writer process of a rank needs for a local checkpoint, besides the values."""

    staging: Path
    table: LocalTable
    peers: tuple[PeerAddress, ...]
    sources: tuple[int, ...]
    """Ranks of whose boxes this rank stores copies."""


@dataclass(frozen=True, slots=True)
class _RankReport:
    """Folders that a rank can read."""

    machine: str
    tables: tuple[tuple[LocalTable, Path], ...]
    problems: tuple[str, ...]


class LocalTier:
    """Local checkpoints of one rank. All methods are collective over the run's ranks, except those
    that say otherwise."""

    def __init__(
        self,
        config: LocalCheckpointConfig,
        name: str,
        checkpoints: Path,
        world: Group,
        device: torch.device,
        *,
        machine: str | None = None,
    ) -> None:
        """`name`: of the run; `checkpoints`: folder of its persistent checkpoints; `device`: of the
        messages between ranks; `machine`: of this rank, by default the name of the host.

        Raises:
            CheckpointError: on every rank: the folder cannot be used, or there is no peer.
        """
        self._config, self._world, self._device = config, world, device
        self._machine = socket.gethostname() if machine is None else machine
        self._checkpoints = checkpoints
        self.run = raise_on_all_ranks(
            lambda: read_run_id(checkpoints) if world.rank == 0 else "", world
        )[0]
        self.root = raise_on_all_ranks(
            lambda: _open_root(config, name, self.run, checkpoints, first=world.rank == 0), world
        )[world.rank]
        machines = raise_on_all_ranks(lambda: self._machine, world)
        is_one_machine = len({*machines}) == 1
        self._copy_host = "127.0.0.1" if is_one_machine else find_own_address(os.environ)
        _remove_if_empty(self.root)  # until the first save
        self._peers = plan_peers(
            world=world.size,
            ranks_per_machine=max(machines.count(each) for each in machines),
            factor=config.replication_factor,
            jump=config.replication_jump,
        )
        if world.rank == 0 and world.size == 1 and config.replication_factor > 1:
            _log.info("local checkpoints have no copies, because the run has one rank")
        self._failed = False

    @property
    def folder(self) -> Path:
        """This rank's folder."""
        return self._rank_folder(self._world.rank)

    def _rank_folder(self, rank: int) -> Path:
        return self.root / f"rank_{rank:05d}"

    # --- saving

    def save(
        self,
        step: int,
        entries: Sequence[CheckpointEntry],
        state: Mapping[str, Any],  # JSON
        *,
        lineage: Sequence[int] = (),
    ) -> LocalSaveReport:
        """Save a step, send copies to the peers, and delete older local checkpoints.

        Raises:
            CheckpointError: on every rank with the same text; older local checkpoints are
                unchanged.
        """
        started, world = time.monotonic(), self._world
        staging = self.folder / f"{folder_name(step)}.tmp-{secrets.token_hex(4)}"
        try:
            sizes = raise_on_all_ranks(lambda: self._measure(entries), world)
            raise_on_all_ranks(lambda: self._prepare(staging, sizes), world)
            own: list[WrittenPart] = []
            lengths = raise_on_all_ranks(
                lambda: _write_own(staging, world.rank, entries, own), world
            )
            parts = {world.rank: own[0]}
            outcomes = raise_on_all_ranks(
                lambda: self._receive_copies(staging, own[0], lengths, parts), world
            )
            if problem := next((each for each in outcomes if each), ""):
                raise CheckpointError(problem)
            table = self._build_table(step, sizes, lineage, parts)
            text = dump_state(state)
            raise_on_all_ranks(lambda: commit_local_folder(staging, table, text), world)
        except CheckpointError as error:
            raise self.discard(staging, step, error) from error
        self.delete_old(step)
        nbytes = sum(file.nbytes for part in parts.values() for file in part.files.values())
        return LocalSaveReport(step, nbytes, time.monotonic() - started, 1 + len(self._peers))

    def prepare(
        self,
        step: int,
        entries: Sequence[CheckpointEntry],
        find_copy_address: Callable[[], PeerAddress | None],
        *,
        lineage: Sequence[int] = (),
    ) -> "LocalSave":
        """Create the temporary folder of a save that writer processes do, and return what this
        rank's writer needs for it.

        find_copy_address: returns where this rank's writer receives copies, or None if it does not
            answer; raises CheckpointError if it has ended.

        Raises:
            CheckpointError: on every rank with the same text: there is too little space, or a
                writer cannot receive copies.
        """
        world, peers = self._world, self._peers
        staging = self.folder / f"{folder_name(step)}.tmp-{secrets.token_hex(4)}"
        try:
            sizes = raise_on_all_ranks(lambda: self._measure(entries, find_copy_address()), world)
            unreachable = [
                rank for rank, size in enumerate(sizes) if peers and size.address is None
            ]
            if unreachable:
                raise CheckpointError(f"the writer processes of ranks {unreachable} do not answer.")
            raise_on_all_ranks(lambda: self._prepare(staging, sizes), world)
        except CheckpointError as error:
            raise self.discard(staging, step, error) from error
        addresses = [sizes[(world.rank + jump) % world.size].address for jump in peers]
        return LocalSave(
            staging,
            self._build_table(step, sizes, lineage, {}),
            tuple(address for address in addresses if address is not None),
            tuple((world.rank - jump) % world.size for jump in peers),
        )

    def discard(self, staging: Path, step: int, error: Exception) -> "LocalSaveError":
        """Delete the temporary folder of a failed save, and return its error. Not collective."""
        _remove(staging)
        return LocalSaveError(f"the local checkpoint of step {step} was not saved. {error}")

    def report_saved(self, step: int, nbytes: int, seconds: float) -> LocalSaveReport:
        """Return the report of a save that is complete on all ranks, and delete older local
        checkpoints. Not collective."""
        self.delete_old(step)
        return LocalSaveReport(step, nbytes, seconds, 1 + len(self._peers))

    @property
    def copy_host(self) -> str:
        """Address of this machine at which the writers of the peers reach it."""
        return self._copy_host

    def _build_table(
        self,
        step: int,
        sizes: Sequence["_SaveSize"],
        lineage: Sequence[int],
        parts: Mapping[int, WrittenPart],
    ) -> LocalTable:
        return LocalTable(
            self.run,
            self._world.rank,
            step,
            sizes[0].save,
            secrets.token_hex(8),
            self._world.size,
            tuple(lineage),
            "",
            {key: value for size in sizes for key, value in size.tensors.items()},
            parts,
        )

    def _measure(
        self, entries: Sequence[CheckpointEntry], address: PeerAddress | None = None
    ) -> _SaveSize:
        """Return what this rank saves, and the free space of its folder."""
        if self._world.rank == 0:
            _write_run_id(self._checkpoints, self.run)
        self.root.mkdir(mode=0o700, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        return _SaveSize(
            secrets.token_hex(8),
            self._machine,
            os.stat(self.folder).st_dev,
            shutil.disk_usage(self.folder).free,
            sum(entry.tensor.nbytes for entry in entries if entry.is_writer),
            {
                entry.key: (entry.shard.shape, str(entry.dtype).removeprefix("torch."))
                for entry in entries
            },
            address,
        )

    def _prepare(self, staging: Path, sizes: Sequence[_SaveSize]) -> None:
        """Check the free space, and create the folder.

        Raises:
            CheckpointError: the space does not suffice.
        """
        size = sizes[self._world.rank]
        needed = 0
        for rank, other in enumerate(sizes):
            if (other.machine, other.device) == (size.machine, size.device):
                ranks = {rank, *((rank - peer) % len(sizes) for peer in self._peers)}
                needed += sum(sizes[each].nbytes for each in ranks)
        if needed * _SPACE_FACTOR > size.free:
            raise CheckpointError(
                f"{self.root} needs {show_bytes(needed * _SPACE_FACTOR)} on {size.machine} and has "
                f"{show_bytes(size.free)}. {SPACE_ADVICE}"
            )
        storage.make_folder(staging)

    def _receive_copies(
        self,
        staging: Path,
        own: WrittenPart,
        lengths: Sequence[tuple[int, int]],
        parts: dict[int, WrittenPart],
    ) -> str:
        """Send this rank's table and boxes to its peers, and store those that it receives; return a
        description of a write error.

        After an error it goes on receiving, because other ranks send.
        """
        world, problem = self._world, ""
        name = box_file(world.rank)
        table = dump_part(own)
        for jump in self._peers:
            to, source = (world.rank + jump) % world.size, (world.rank - jump) % world.size
            received = bytearray()
            exchange_bytes(
                lambda start, stop: table[start:stop],
                len(table),
                received.extend,
                lengths[source][0],
                world,
                to=to,
                source=source,
                device=self._device,
            )
            own_file, sink = _OwnFile(staging / name), _CopyFile(staging / box_file(source))
            exchange_bytes(
                own_file.read,
                lengths[world.rank][1],
                sink.write,
                lengths[source][1],
                world,
                to=to,
                source=source,
                device=self._device,
            )
            copy_problem = sink.close()
            problem = problem or own_file.problem or copy_problem
            try:
                parts[source] = parse_part(bytes(received), staging / f"table of rank {source}")
            except CheckpointError as error:
                problem = problem or str(error)
        return problem

    def delete_old(self, step: int) -> None:
        """Delete local checkpoints that are not kept, and those of ranks that are on other machines
        now. A failure is a warning. Not collective."""
        folders = step_folders(self.folder)
        kept = sorted(each for each in folders if each <= step)[-self._config.keep :]
        for name in storage.list_names(self.folder):
            if name not in {folder_name(each) for each in kept}:
                _remove(self.folder / name)
        for name in storage.list_names(self.root):
            other = self.root / name
            if other == self.folder or not name.startswith("rank_"):
                continue
            newest = max(step_folders(other), default=-1)
            if newest < kept[0]:  # no rank of this run saves there any more
                _remove(other)

    def discard_after(self, step: int) -> None:
        """Delete this rank's local checkpoints of later steps, because the run continues from
        `step`. Not collective."""
        for other, path in _step_paths(self.folder).items():
            if other > step:
                _remove(path)

    def remove(self) -> None:
        """Delete this rank's local checkpoints, because a persistent one holds the last step. Not
        collective."""
        _remove(self.folder)
        _remove_if_empty(self.root)

    # --- recovery

    def _scan(self) -> _RankReport:
        """Return the folders of this run that this rank can read; damaged ones as problems."""
        tables, problems = [], []
        for name in storage.list_names(self.root):
            if not name.startswith("rank_"):
                continue
            for path in _step_paths(self.root / name).values():
                try:
                    table = parse_table(storage.read_bytes(path / TABLE), path / TABLE)
                    if table.run != self.run:
                        problems.append(
                            f"{path} is a local checkpoint of run {table.run}, and this is run "
                            f"{self.run}; it is not used"
                        )
                        continue
                    tables.append((_without_lost_files(table, path, problems), path))
                except (OSError, CheckpointError) as error:
                    problems.append(f"{path} is not used: {error}")
        return _RankReport(self._machine, tuple(tables), tuple(problems))

    def find(
        self,
        *,
        at_least: int,
        lineage: Sequence[int] = (),
        excluded: Sequence[str] = (),
        alternative: str,
    ) -> "LocalCheckpoint | None":
        """Return the newest complete local checkpoint from step `at_least` on; None if there is
        none. Collective.

        lineage: rollbacks of the persistent checkpoint of that step; excluded: saves that are
        damaged; alternative: what is used otherwise, for the log.
        """
        world = self._world
        reports = raise_on_all_ranks(self._scan, world)
        if world.rank == 0:
            for line in dict.fromkeys(line for each in reports for line in each.problems):
                _log.warning("%s", line)
        tables = {table.folder: table for each in reports for table, _ in each.tables}
        follows = {
            name
            for name, table in tables.items()
            if table.lineage[: len(lineage)] == tuple(lineage) and table.save not in excluded
        }
        folders = merge_reports(
            [
                [table.as_local_folder() for table, _ in each.tables if table.folder in follows]
                for each in reports
            ]
        )
        steps = [step for step in list_local_steps(folders) if step.step >= at_least]
        chosen = next((step for step in steps if step.is_complete), None)
        if world.rank == 0:
            _log_choice(steps, chosen, folders, at_least, alternative)
        if chosen is None:
            return None
        opened = self._open(chosen, tables, reports)
        if opened is not None:
            return opened
        return self.find(
            at_least=at_least,
            lineage=lineage,
            excluded=(*excluded, chosen.save),
            alternative=alternative,
        )

    def _open(
        self, chosen: LocalStep, tables: Mapping[str, LocalTable], reports: Sequence[_RankReport]
    ) -> "LocalCheckpoint | None":
        """Open a local checkpoint; None if no copy of its state is intact. Collective."""
        own = {table.folder: path for table, path in reports[self._world.rank].tables}
        paths = {each.name: own[each.name] for each in chosen.folders if each.name in own}
        hashes = {each.name: tables[each.name].state_sha256 for each in chosen.folders}
        states = raise_on_all_ranks(lambda: _read_state(paths, hashes), self._world)
        state = next((each for each in states if each is not None), None)
        if state is None:
            _log.warning(
                "the local checkpoint of step %d has no intact %s; it is not used",
                chosen.step,
                STATE,
            )
            return None
        boxes: dict[str, dict[Box, StoredBox]] = {}
        for each in chosen.folders:
            for (key, box), stored in tables[each.name].stored_boxes().items():
                boxes.setdefault(key, {})[box] = stored
        first = tables[chosen.folders[0].name]
        tensors = {
            key: StoredTensor(shape, dtype, tuple(boxes.get(key, {}).values()))
            for key, (shape, dtype) in first.tensors.items()
        }
        return LocalCheckpoint(
            self.root / folder_name(chosen.step),
            Manifest(chosen.step, first.world_size, tensors, {}),
            state,
            "",
            tier=self,
            chosen=chosen,
            paths=paths,
            machines=tuple(each.machine for each in reports),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCheckpoint(Checkpoint):
    """A complete local checkpoint: a rank reads the boxes of the folders on its machine, and
    receives the others."""

    tier: LocalTier = field(repr=False)
    chosen: LocalStep = field(repr=False)
    """Its folders."""

    paths: Mapping[str, Path] = field(repr=False)
    """Folders that this rank can read."""

    machines: tuple[str, ...] = field(repr=False)
    """Machine of each rank."""

    @property
    def save(self) -> str:
        """Id of the save."""
        return self.chosen.save

    def warnings(self) -> list[str]:
        """Return nothing: its files were compared with their tables when it was opened."""
        return []

    def _reads_in_parallel(self, rules: CheckpointConfig, world: Group) -> bool:
        """Return False: each box is already read once and sent to the ranks that need it."""
        return False

    def _weights_of(self, pair: MasterWeightPair) -> torch.Tensor:
        """Return the rounded master weights, which equal the weights that the same run saved."""
        return pair.wide.to(self.dtype(f"model.{pair.shard.name}"))

    def _fill_on_all_ranks(
        self,
        wanted: Mapping[str, Sequence[TensorPiece]],
        world: Group,
        report_progress: Callable[[], None] | None,
    ) -> None:
        """Fill the pieces of every rank. A damaged box is requested from its next copy. Collective.

        Raises:
            CheckpointError: on every rank: no copy of a box is intact.
        """
        needs = raise_on_all_ranks(lambda: self._list_needs(wanted), world)
        damaged: set[tuple[str, str, Box]] = set()
        failed: list[BoxRead] = []
        while any(needs):
            try:
                reads = plan_reads(self.chosen.folders, needs, self.machines, damaged=damaged)
            except PlanError as error:
                raise CheckpointError(
                    f"step {self.step}: {error} (damaged: {self._describe_copies(damaged)})."
                ) from error
            if world.rank == 0:
                self._log_replacements(failed, reads)
            rank_failures = raise_on_all_ranks(
                partial(self._execute, reads, wanted, report_progress), world
            )
            needs = [[(read.key, read.box) for read in each] for each in rank_failures]
            failed = [read for each in rank_failures for read in each]
            damaged |= {(read.folder, read.key, read.box) for read in failed}

    def _describe_copies(self, copies: Iterable[tuple[str, str, Box]]) -> str:
        """Return up to five boxes with the ranks that have saved these copies."""
        ranks = {each.name: each.rank for each in self.chosen.folders}
        texts = sorted(
            f"{key} {show_box(box)} from rank {ranks[folder]}" for folder, key, box in copies
        )
        return ", ".join(texts[:5]) + (f" and {len(texts) - 5} more" if texts[5:] else "")

    def _log_replacements(self, failed: Sequence[BoxRead], reads: Sequence[BoxRead]) -> None:
        """Log where each box is read whose copy was damaged."""
        ranks = {each.name: each.rank for each in self.chosen.folders}
        replacements = {(read.key, read.box): ranks[read.folder] for read in reads}
        for copy in dict.fromkeys((read.key, read.box, ranks[read.folder]) for read in failed):
            key, box, rank = copy
            _log.warning(
                "step %d: box %s %s from rank %d is damaged; read from rank %d",
                self.step,
                key,
                show_box(box),
                rank,
                replacements[key, box],
            )

    def _list_needs(self, wanted: Mapping[str, Sequence[TensorPiece]]) -> list[tuple[str, Box]]:
        """Return the stored boxes that intersect this rank's pieces."""
        return [
            (key, stored.box)
            for key, parts in sorted(wanted.items())
            for stored in self.manifest.tensors[key].boxes
            if any(intersect(piece.box, stored.box) is not None for piece in parts)
        ]

    def _execute(
        self,
        reads: Sequence[BoxRead],
        wanted: Mapping[str, Sequence[TensorPiece]],
        report_progress: Callable[[], None] | None,
    ) -> list[BoxRead]:
        """Execute this rank's part of a plan, one box at a time; return the boxes that it received
        damaged.

        Raises:
            CheckpointError: a box with the right hash is not a tensor; after all messages, because
                other ranks wait for them.
        """
        world, device, failed = self.tier._world, self.tier._device, []
        problem: CheckpointError | None = None
        stored_boxes = {
            (key, stored.box): stored
            for key, tensor in self.manifest.tensors.items()
            for stored in tensor.boxes
        }
        for read in reads:
            if world.rank not in (read.sender, read.receiver):
                continue
            if report_progress is not None:
                report_progress()
            stored = stored_boxes[read.key, read.box]
            data = (
                receive_bytes(stored.nbytes, world, read.sender, device=device)
                if read.sender != world.rank
                else _read_padded(self.paths[read.folder], stored)
            )
            if read.receiver != world.rank:
                send_bytes(data, world, read.receiver, device=device)
            elif sha256(data) != stored.sha256:
                failed.append(read)
            else:
                try:
                    self._fill_pieces(read, stored, data, wanted[read.key])
                except CheckpointError as error:
                    problem = problem or error
        if problem is not None:
            raise problem
        return failed

    def _fill_pieces(
        self, read: BoxRead, stored: StoredBox, data: memoryview, parts: Sequence[TensorPiece]
    ) -> None:
        """Copy the values of a box, whose hash was checked, into the pieces."""
        place = f"{self.path}: box {read.key} {show_box(read.box)}"
        values = TensorPiece(stored.box, self._parse_box(read.key, stored, data, place))
        for piece in parts:
            common = intersect(piece.box, stored.box)
            if common is not None:
                inner_view(piece, common).copy_(inner_view(values, common))


def read_run_id(checkpoints: Path) -> str:
    """Return the id of a run, stored with its persistent checkpoints; a new one if there is
    none."""
    try:
        text = storage.read_bytes(checkpoints / RUN_ID).decode(errors="replace").strip()
    except FileNotFoundError:
        text = ""
    return text if text.isalnum() else secrets.token_hex(8)


def _write_run_id(checkpoints: Path, run: str) -> None:
    """Store the id of a run, before its first local checkpoint."""
    if read_run_id(checkpoints) != run:
        checkpoints.mkdir(parents=True, exist_ok=True)
        storage.replace_file(checkpoints / RUN_ID, f"{run}\n".encode())


def _open_root(
    config: LocalCheckpointConfig, name: str, run: str, checkpoints: Path, *, first: bool
) -> Path:
    """Create the folder of a run's local checkpoints and return it.

    Raises:
        CheckpointError: it cannot be created or written.
    """
    if config.folder is None and not SHARED_MEMORY.is_dir():
        raise CheckpointError(
            f"checkpoint.local.every={config.every} needs checkpoint.local.folder, because this "
            f"system has no {SHARED_MEMORY}. Set it to a folder of a memory file system or of a "
            "local disk, such as /tmp."
        )
    parent = SHARED_MEMORY if config.folder is None else Path(config.folder).expanduser()
    root = parent / f"megalith-{name}-{run}"
    shown = f"checkpoint.local.folder={config.folder or f'{SHARED_MEMORY} (the default)'}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        root.mkdir(mode=0o700, exist_ok=True)
        _check_owner(root)
        probe = root / f".probe-{secrets.token_hex(4)}"
        probe.write_bytes(b"1")
        probe.unlink()
    except OSError as error:
        raise CheckpointError(
            f"{shown}: {root} cannot be written ({error.strerror}). Set checkpoint.local.folder to "
            "a folder that this user may write, such as /tmp."
        ) from error
    if first:
        _log_neighbors(parent, root, name, checkpoints, shown)
    return root


def _check_owner(root: Path) -> None:
    """Check that no other user has created a folder or link of this name where all users may, such
    as in /dev/shm: it could contain other weights.

    Raises:
        OSError: another user has.
    """
    is_shared = os.stat(root.parent).st_mode & stat.S_IWOTH
    owner = os.lstat(root).st_uid
    if is_shared and owner != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to user {owner}, and this process to another one")


def _log_neighbors(parent: Path, root: Path, name: str, checkpoints: Path, shown: str) -> None:
    """Log local checkpoints of other runs of this name, and a folder that is no faster than the
    persistent one."""
    others = [
        each
        for each in storage.list_names(parent)
        if each.rpartition("-")[0] == f"megalith-{name}" and each != root.name
    ]
    if others:
        _log.warning(
            "%s also holds local checkpoints of other runs with the name %s, which this run does "
            "not read: %s. Delete those of runs that have ended.",
            parent,
            name,
            ", ".join(others[:5]),
        )
    persistent = next(
        each for each in (checkpoints, *checkpoints.absolute().parents) if each.exists()
    )
    if os.stat(root).st_dev == os.stat(persistent).st_dev:
        _log.warning(
            "%s is on the same file system as %s: local checkpoints there are no faster than "
            "persistent ones. Unset it, or use a memory file system or a local disk.",
            shown,
            checkpoints,
        )


def _log_choice(
    steps: Sequence[LocalStep],
    chosen: LocalStep | None,
    folders: Sequence[LocalFolder],
    at_least: int,
    alternative: str,
) -> None:
    """Log why newer local checkpoints are not used, and what is used instead."""
    used = alternative if chosen is None else f"the local checkpoint of step {chosen.step}"
    for step in steps:
        if step is chosen:
            break
        _log.warning("%s; using %s", step.describe_missing(), used)
    if not steps and folders:
        newest = max(folder.step for folder in folders)
        _log.info(
            "the newest local checkpoint is of step %d, before step %d; using %s",
            newest,
            at_least,
            used,
        )


def _write_own(
    staging: Path, rank: int, entries: Sequence[CheckpointEntry], own: list[WrittenPart]
) -> tuple[int, int]:
    """Write this rank's boxes, append their table to `own`, and return the lengths of table and
    boxes."""
    with explain_full(staging.parent.parent):
        written = write_boxes(staging, rank, entries)
    plan = sha256(repr(sorted(written.tensors)).encode())
    own.append(WrittenPart(plan, written.tensors, written.files))
    return len(dump_part(own[0])), sum(file.nbytes for file in written.files.values())


class _OwnFile:
    """File of this rank's boxes, as it is sent. A read error is kept, and zeros are sent, because
    other ranks receive."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem = ""
        """The read error; empty if there was none."""

    def read(self, start: int, stop: int) -> bytes:
        """Return bytes [start, stop)."""
        data = b""
        try:
            data = storage.read_range(self._path, start, stop - start)
            reason = "it is too short" if len(data) < stop - start else ""
        except OSError as error:
            reason = str(error.strerror)
        if reason:
            self.problem = self.problem or f"{self._path} cannot be read ({reason})."
        return data.ljust(stop - start, b"\0")


class _CopyFile:
    """File of the boxes of another rank. A write error is kept until `close`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._problem = ""
        self._file: BinaryIO | None = None

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        if self._problem:
            return
        try:
            if self._file is None:
                self._file = storage.open_new(self._path)
            self._file.write(data)
        except OSError as error:
            self._problem = f"{self._path.parent} cannot be written ({error.strerror})."

    def close(self) -> str:
        """Return the write error with advice; empty if there was none."""
        if self._file is not None:
            try:
                with self._file:
                    storage.sync_file(self._file)
            except OSError as error:  # an exception here would end the exchanges with other peers
                reason = f"{self._path.parent} cannot be written ({error.strerror})."
                self._problem = self._problem or reason
        return f"{self._problem} {SPACE_ADVICE}" if self._problem else ""


def _without_lost_files(table: LocalTable, path: Path, problems: list[str]) -> LocalTable:
    """Return a table without the boxes whose file is missing or has another length."""
    parts = {}
    for rank, part in table.parts.items():
        for name, file in part.files.items():
            try:
                nbytes = storage.file_nbytes(path / name)
            except OSError:
                nbytes = -1
            if nbytes != file.nbytes:
                problems.append(
                    f"{path / name}: missing"
                    if nbytes < 0
                    else f"{path / name} is {nbytes:,} bytes, expected {file.nbytes:,}"
                )
                break
        else:
            parts[rank] = part
    return replace(table, parts=parts)


def _read_state(paths: Mapping[str, Path], hashes: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the first intact training state in some folders."""
    for name, path in paths.items():
        try:
            data = storage.read_bytes(path / STATE)
        except OSError:
            continue
        if sha256(data) == hashes[name]:
            state = json.loads(data)
            return state if isinstance(state, dict) else None
    return None


def _read_padded(path: Path, stored: StoredBox) -> memoryview:
    """Return the bytes of a box; zeros, whose hash differs, where they cannot be read."""
    try:
        data = storage.mapped(path / stored.file, stored.offset, stored.nbytes)
    except (OSError, ValueError):  # mmap raises ValueError for a truncated file
        data = memoryview(b"")
    return data if len(data) == stored.nbytes else memoryview(bytes(stored.nbytes))


def _step_paths(folder: Path) -> dict[int, Path]:
    """Return the folders of a rank's local checkpoints by step, oldest first."""
    return {step: folder / folder_name(step) for step in step_folders(folder)}


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


def _remove(path: Path) -> None:
    """Delete a folder; a failure is a warning."""
    try:
        storage.remove_tree(path)
    except OSError as error:
        _log.warning("could not delete the local checkpoint %s: %s", path, error)
