"""Comparison of replicas (fault tolerance): tensors that several ranks must hold with equal bits,
at the start and every fault_detector.replica_check_every steps; attribution and repair of a replica
that differs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.errors import CheckpointError
from megalith.observe.limits import read_host_name
from megalith.optim.ema import EMA
from megalith.optim.slots import MASTER, OptimizerSlot
from megalith.parallel.grad_sync import byte_checksum, byte_checksums
from megalith.parallel.group import Group, gather_objects, start_receive, start_send
from megalith.plan.replicas import (
    ReplicaDifference,
    ReplicaKey,
    find_correct_replica,
    find_differences,
)
from megalith.plan.rollback import RollbackPlan
from megalith.plan.shards import Shard
from megalith.train.callbacks.base import Callback, FinishedStep, RunView, StepMetrics
from megalith.train.step import StepRequest, Trainer

MAX_ELEMENTS = 64
"""Differing elements of a tensor that are compared with recomputed ones (heuristic: a flipped bit
changes one element, and its effect on gradients many)."""

MAX_REPORTED = 5
"""Tensors that a report names (heuristic: the fault of one rank changes many)."""


class ReplicaCheck(Callback):
    """Compares the tensors that several ranks hold, reports the rank whose replica differs, and
    repairs it or requests a rollback."""

    collective = True

    def __init__(self) -> None:
        self.differs = False
        """Whether replicas differ, so that this step must not be saved."""
        self._last_equal = 0  # the last step at which all replicas were equal
        self._undecided: _PendingAttribution | None = None

    def on_start(self, run: RunView) -> None:
        """Compare the weights of replicas and pipeline stages.

        Raises:
            CheckpointError: on every rank, naming the ranks that differ.
        """
        self._run, self._last_equal = run, run.step
        compare_replicas(run.prepared.trainer)
        compare_stages(run.prepared.trainer)

    def after_rollback(self, step: int) -> None:
        """Reset to the restored step; keep the differences to attribute in the repeated steps."""
        self.differs = False
        self._last_equal = min(self._last_equal, step)

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> StepRequest | None:
        """Compare all replicas, if it is due; repair a faulty one, or request a rollback.

        Raises:
            CheckpointError: on every rank: they differ after the last step and are not repaired.
        """
        settings, step = self._run.config.fault_detector, finished.step
        if not settings.replica_check_every or step % settings.replica_check_every:
            return None
        trainer = self._run.prepared.trainer
        trainer.data.wait_params()
        tensors = list_replicas(trainer)
        differences = compare_tensors(tensors, trainer.mesh.world)
        self._attribute_repeated(step, tensors)
        if not differences:
            self._last_equal = step
            return None
        attributions = [self._attribute(each, tensors) for each in differences]
        self._report(step, attributions)
        if settings.repair_replicas and all(each.correct_ranks for each in attributions):
            for attribution in attributions:
                _repair(attribution, tensors, trainer)
            if not compare_tensors(tensors, trainer.mesh.world):
                self._run.log(f"step {step}: the replicas are repaired and equal")
                self._last_equal = step
                return None
        return self._request_rollback(step, attributions)

    def _request_rollback(self, step: int, attributions: Sequence["_Attribution"]) -> StepRequest:
        """Request that the steps since the last comparison are repeated, and keep the differences
        whose faulty replica is unknown until then.

        Raises:
            CheckpointError: on every rank: this is the last step.
        """
        undecided = tuple(each for each in attributions if not each.correct_ranks)
        self.differs = True
        if step >= self._run.config.train.steps:
            raise CheckpointError(
                f"replicas differ after the last step, {step}, which is not saved: "
                f"{attributions[0].describe()}. Run the same command again: it continues from the "
                "newest checkpoint."
            )
        self._undecided = _PendingAttribution(step, undecided) if undecided else None
        self.rollback_plan = RollbackPlan(
            self._last_equal + 1, step, attributions[0].describe(), skips_samples=False
        )
        return StepRequest.ROLLBACK

    def _attribute(
        self, difference: ReplicaDifference, tensors: Mapping[ReplicaKey, Tensor]
    ) -> "_Attribution":
        """Return which replicas are correct: those that most ranks agree on, or that equal the
        rounded master weights. Collective."""
        if difference.correct_ranks:
            return _Attribution(difference, difference.correct_ranks, "by majority")
        trainer = self._run.prepared.trainer
        elements = _gather_elements(difference, tensors.get(difference.key), trainer.mesh.world)
        recomputed = _round_master_elements(difference.key, elements, trainer)
        return _Attribution.recompute(
            difference, elements, recomputed, "by recomputation from the master weights"
        )

    def _attribute_repeated(self, step: int, tensors: Mapping[ReplicaKey, Tensor]) -> None:
        """Report which replica was faulty before a rollback, if the steps since then have been
        repeated. Collective."""
        if self._undecided is None or self._undecided.step != step:
            return
        undecided, self._undecided = self._undecided, None
        attributions = []
        for each in undecided.attributions:
            tensor = tensors.get(each.difference.key)
            local = None if tensor is None else _take(tensor, each.elements.indices)
            values = gather_objects(local, self._run.mesh.world)
            recomputed = next((value for value in values if isinstance(value, tuple)), None)
            attributions.append(
                _Attribution.recompute(
                    each.difference, each.elements, recomputed, "by repeating the steps"
                )
            )
        self._report(step, attributions)

    def _report(self, step: int, attributions: Sequence["_Attribution"]) -> None:
        """Log the tensors that differ, with the faulty ranks and their hosts. Collective."""
        hosts = gather_objects(read_host_name(), self._run.mesh.world)
        for attribution in attributions[:MAX_REPORTED]:
            self._run.log(f"step {step}: {attribution.describe(hosts)}")
        if (num_more := len(attributions) - MAX_REPORTED) > 0:
            self._run.log(f"step {step}: {num_more} more tensors differ between replicas")


@dataclass(frozen=True, slots=True)
class _Elements:
    """Elements at which replicas differ."""

    indices: tuple[int, ...]
    """Row-major indices in the tensor."""
    values: Mapping[int, tuple[float, ...]]
    """Values of the first rank with each distinct replica, by rank."""


NO_ELEMENTS = _Elements((), {})


@dataclass(frozen=True, slots=True)
class _Attribution:
    """Attribution of a difference: the ranks whose replicas of a tensor are correct."""

    difference: ReplicaDifference
    correct_ranks: tuple[int, ...] = ()
    """Empty: unknown."""
    method: str = ""
    elements: _Elements = NO_ELEMENTS

    @classmethod
    def recompute(
        cls,
        difference: ReplicaDifference,
        elements: _Elements,
        recomputed: Sequence[float] | None,
        method: str,
    ) -> "_Attribution":
        """Return the attribution by recomputed elements; None: they cannot be recomputed."""
        correct = None
        if recomputed is not None:
            correct = find_correct_replica(elements.values, recomputed)
        if correct is None:
            return cls(difference, elements=elements)
        return cls(difference, difference.list_ranks(correct), method, elements)

    @property
    def faulty_ranks(self) -> tuple[int, ...]:
        """Ranks whose replica is not correct."""
        return tuple(each for each in self.difference.checksums if each not in self.correct_ranks)

    def describe(self, hosts: Sequence[object] = ()) -> str:
        """Describe the difference and the faulty ranks."""
        name, ranks = self.difference.key.describe(), list(self.difference.checksums)
        if not self.correct_ranks:
            return (
                f"{name} differs between its replicas on ranks {ranks}; the faulty one is "
                "determined when the steps have been repeated"
            )
        faulty = ", ".join(
            f"{rank} (host {hosts[rank]})" if hosts else str(rank) for rank in self.faulty_ranks
        )
        return (
            f"{name} differs between its replicas on ranks {ranks}: rank {faulty} is faulty, "
            f"{self.method}"
        )


@dataclass(frozen=True, slots=True)
class _PendingAttribution:
    """Differences at step `step` whose faulty replica is unknown."""

    step: int
    attributions: tuple[_Attribution, ...]


# --- the tensors that are compared


def list_replicas(trainer: Trainer) -> dict[ReplicaKey, Tensor]:
    """Return this rank's weights, master weights, moments and averages; ranks with the same key
    hold replicas."""
    optimizer, tensors = trainer.optimizer, dict[ReplicaKey, Tensor]()
    for number, slot in enumerate(optimizer.slots):
        roles: dict[str, Tensor] = {"param": slot.weight, **slot.list_stored_tensors()}
        if trainer.ema is not None:
            roles[EMA] = trainer.ema.averages[number]
        for role, tensor in roles.items():
            tensors[_build_key(trainer, slot.shard, role)] = tensor
    for shard, weight in trainer.data.frozen:
        tensors[_build_key(trainer, shard, "param")] = weight
    for shard, weight in trainer.data.gathered_weights():
        tensors[_build_key(trainer, shard, "weight")] = weight
    return {key: tensor.detach() for key, tensor in tensors.items() if tensor.numel()}


def _build_key(trainer: Trainer, shard: Shard, role: str) -> ReplicaKey:
    """Return the key of a tensor. Ranks that compute the same gradient themselves have equal bits
    only if kernels are deterministic."""
    is_deterministic = trainer.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    axes = () if is_deterministic else sorted(shard.invariant)
    coordinates = tuple(trainer.mesh.coordinates[axis] for axis in axes)
    return ReplicaKey(shard.name, role, shard.box, shard.flat, coordinates)


def compare_tensors(tensors: Mapping[ReplicaKey, Tensor], world: Group) -> list[ReplicaDifference]:
    """Return the tensors whose replicas differ; the host waits for the device once. Collective."""
    checksums = dict(zip(tensors, byte_checksums(list(tensors.values())), strict=True))
    tables = gather_objects(checksums, world)
    return find_differences([table for table in tables if isinstance(table, dict)])


# --- attribution and repair


def _gather_elements(
    difference: ReplicaDifference, tensor: Tensor | None, world: Group
) -> _Elements:
    """Return elements at which the replicas of a tensor differ. Collective; all ranks get the same.

    `tensor`: this rank's replica, None if it has none.
    """
    first, *others = difference.representatives
    elements: _Elements | None = None
    if world.rank in others:
        assert tensor is not None, "its checksum was compared"
        start_send(_view_bytes(tensor), world, first).wait()
    if world.rank == first:
        assert tensor is not None, "its checksum was compared"
        replicas = {first: tensor}
        for other in others:
            received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            start_receive(_view_bytes(received), world, other).wait()
            replicas[other] = received
        elements = _find_elements(replicas)
    gathered = gather_objects(elements, world)[first]
    assert isinstance(gathered, _Elements)
    return gathered


def _find_elements(replicas: Mapping[int, Tensor]) -> _Elements:
    """Return elements at which the tensors of several ranks differ."""
    first, *others = (_view_bytes(each).view(each.numel(), -1) for each in replicas.values())
    differs = torch.stack([(first != other).any(dim=1) for other in others]).any(dim=0)
    indices = tuple(differs.nonzero().flatten()[:MAX_ELEMENTS].tolist())
    return _Elements(indices, {rank: _take(each, indices) for rank, each in replicas.items()})


def _take(tensor: Tensor, indices: Sequence[int]) -> tuple[float, ...]:
    """Return elements of a tensor by their row-major indices."""
    chosen = tensor.reshape(-1)[torch.tensor(indices, dtype=torch.int64, device=tensor.device)]
    return tuple(chosen.double().tolist())


def _round_master_elements(
    key: ReplicaKey, elements: _Elements, trainer: Trainer
) -> list[float] | None:
    """Return elements of a weight as rounded from the master weights; None if a rank has no
    separate master weights of them, or if the ranks' results differ. Collective."""
    local: dict[int, float] = {}
    if key.role in ("param", "weight"):
        start = key.flat[0] if key.flat is not None else 0
        positions = [start + index for index in elements.indices]
        for slot in trainer.optimizer.slots:
            if slot.shard.name == key.name and slot.shard.box == key.box:
                local |= _round_slot_elements(slot, positions)
    recomputed: dict[int, set[float]] = {}
    for values in gather_objects(local, trainer.mesh.world):
        for place, value in values.items() if isinstance(values, dict) else ():
            recomputed.setdefault(place, set()).add(value)
    results = [recomputed.get(place, set()) for place in range(len(elements.indices))]
    if not results or any(len(values) != 1 for values in results):
        return None
    return [value for values in results for value in values]


def _round_slot_elements(slot: OptimizerSlot, positions: Sequence[int]) -> dict[int, float]:
    """Return the rounded master weights of the elements that a slot holds, by their place in
    `positions`, which are row-major indices in the box."""
    if not slot.has_master or MASTER in slot.encoded:
        return {}
    start = slot.shard.flat[0] if slot.shard.flat is not None else 0
    places = [
        place
        for place, position in enumerate(positions)
        if 0 <= position - start < slot.master.numel()
    ]
    held = _take(slot.master.to(slot.weight.dtype), [positions[place] - start for place in places])
    return dict(zip(places, held, strict=True))


def _repair(
    attribution: _Attribution, tensors: Mapping[ReplicaKey, Tensor], trainer: Trainer
) -> None:
    """Overwrite the faulty replicas of a tensor with a correct one. Collective."""
    world, source = trainer.mesh.world, attribution.correct_ranks[0]
    tensor = tensors.get(attribution.difference.key)
    if world.rank == source:
        assert tensor is not None, "its checksum was compared"
        for rank in attribution.faulty_ranks:
            start_send(_view_bytes(tensor), world, rank).wait()
    if world.rank in attribution.faulty_ranks:
        assert tensor is not None, "its checksum was compared"
        trainer.write_guard.wait()
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        start_receive(_view_bytes(received), world, source).wait()
        tensor.copy_(received)


def _view_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [nbytes]."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


# --- comparison of weights before the first step


def compare_replicas(trainer: Trainer) -> None:
    """Check that data-parallel ranks start from equal weights: keyed random numbers may differ
    between machine types.

    Raises:
        CheckpointError: on every rank, naming the ranks that differ.
    """
    for checksum, group in trainer.data.checksums():
        checksums = gather_objects(checksum, group)
        if len(set(checksums)) > 1:
            different_ranks = [
                rank
                for rank, value in zip(group.ranks, checksums, strict=True)
                if value != checksums[0]
            ]
            raise CheckpointError(
                f"ranks {different_ranks} start from other weights than rank {group.ranks[0]}. Use "
                "machines of one type, or set checkpoint.load to weights that all of them read."
            )


def compare_stages(trainer: Trainer) -> None:
    """Check that pipeline stages that share an embedding table start from equal copies.

    Raises:
        CheckpointError: on every rank of the pipeline, naming the table and the stages.
    """
    local_checksums = {
        param.shard.name: byte_checksum([param.weight])
        for param in trainer.data.local_params
        if len(param.shard.stages) > 1
    }
    stage_checksums = [
        checksums
        for checksums in gather_objects(local_checksums, trainer.mesh.pp)
        if isinstance(checksums, dict)
    ]
    for name in sorted({name for checksums in stage_checksums for name in checksums}):
        values = {
            rank: checksums[name]
            for rank, checksums in enumerate(stage_checksums)
            if name in checksums
        }
        if len(set(values.values())) > 1:
            raise CheckpointError(
                f"{name} is not the same on pipeline ranks {list(values)}, which share it. Use "
                "machines of one type, or set checkpoint.load to weights that all of them read."
            )
