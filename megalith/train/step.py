"""One training step: gradient accumulation over microbatches, gradient clipping, optimizer
update."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from megalith.config.train import TrainRun
from megalith.data.loader import Batch, StepBatches
from megalith.errors import CallbackError, DataError
from megalith.observe.timers import Timers
from megalith.optim.clip import (
    clip_factor,
    first_replica_gradients,
    num_zeros,
    sum_of_squares,
    sum_of_squares_by_group,
)
from megalith.optim.diloco import OuterOptimizer
from megalith.optim.ema import WeightEMA
from megalith.optim.loss_scale import LossScale
from megalith.optim.schedule import NO_GROUPS, GroupRates
from megalith.optim.slots import Optimizer
from megalith.parallel.grad_sync import GradSync, ShardedParam, sum_bits
from megalith.parallel.group import Group, all_reduce_, gather_objects
from megalith.parallel.mesh import Mesh
from megalith.plan.fault_policy import RankGradients, SampleShift, StepRun, plan_sample_shift
from megalith.plan.param_groups import GRAD_NORM_GROUPS, find_grad_norm_group
from megalith.plan.qk_clip import LargestScore
from megalith.plan.shards import Shard
from megalith.train.attention_scores import ScoreMonitor
from megalith.train.forward_backward import (
    PipelineModel,
    StepLogitStats,
    collect_logit_stats,
)
from megalith.train.moe import list_routing_sums
from megalith.train.objective import MAIN_LOSS, build_loss_normalizer
from megalith.train.synchronizer import SINGLE_JOB, StepSynchronizer


class WriteGuard:
    """Waits before saved tensors are written, while an asynchronous save still copies them."""

    def __init__(self) -> None:
        self.wait_staged: Callable[[], None] | None = None
        """Returns when the copy is complete; None: saves are synchronous."""

    def wait(self) -> None:
        """Return when the tensors of `checkpoint_entries` may be written. All code that writes them
        calls this first."""
        if self.wait_staged is not None:
            self.wait_staged()


WeightUpdate = Callable[[nn.ModuleList, Mesh], None]
"""Changes weights of this rank's model chunks after the optimizer's step, before updated parameters
are all-gathered; collective over the mesh."""


@dataclass(frozen=True, slots=True)
class Trainer:
    """Model, gradient synchronization, optimizer and loss scale of one rank."""

    run: TrainRun
    mesh: Mesh
    device: torch.device
    pipeline_model: PipelineModel
    data: GradSync
    optimizer: Optimizer
    loss_scale: LossScale | None
    """Loss scaling state; None unless the run is in fp16."""
    first_replicas: frozenset[str] = frozenset()
    """Names of the parameters of which this rank has the first replica, which counts in the
    gradient norm."""

    unclipped: frozenset[str] = frozenset()
    """Names of the parameters whose gradients are neither clipped nor counted in the norm
    (optim.muon.clip_grad)."""

    weight_updates: Sequence[WeightUpdate] = ()
    """Applied in this order after each optimizer step, such as the update of the expert bias."""

    ema: WeightEMA | None = None
    """Moving average of the weights, which the last of `weight_updates` updates; None: there is
    none."""

    score_monitor: ScoreMonitor | None = None
    """Measures the largest attention scores; None: the run needs none."""

    outer: OuterOptimizer | None = None
    """Outer optimizer of DiLoCo; None: replica groups, if any, sum gradients."""

    write_guard: WriteGuard = field(default_factory=WriteGuard)
    """Must be awaited before weights or optimizer state are written."""

    @property
    def model(self) -> nn.Module:
        """The model, if this rank has only one model chunk."""
        (model,) = self.pipeline_model.modules
        return model

    @property
    def timers(self) -> Timers:
        """Timers of this rank's steps."""
        return self.pipeline_model.timers


StepStatsMessage = Tensor
"""float64 [2 + other sums + losses + requests + 3]: sum of squares and zeros of the gradients,
other sums of squares (of gradients that are not clipped, if there are any; of each group with
observe.grad_norm_by_group), losses, number of ranks with each kind of request, `SaveCounts`,
number of ranks that lost a replica group."""


class SaveCounts(NamedTuple):
    """Number of ranks whose part of the asynchronous save in flight is written, or has failed."""

    written: int = 0
    failed: int = 0


MAX_NAMES = 5
"""Parameters that a rank names in a message."""

MAX_RERUNS = 3
"""Reruns of one step after which another request ends the run (heuristic: a transient fault is
gone in the first one)."""


class StepRequest(enum.Flag):
    """What callbacks ask the loop to do, in increasing priority; combined with |."""

    NONE = 0
    PROFILE = enum.auto()
    """Profile the next steps (profile.steps, after profile.warmup)."""
    EVALUATE = enum.auto()
    """Evaluate after the step."""
    SAVE = enum.auto()
    """Save a checkpoint after the step."""
    SKIP = enum.auto()
    """Do not update the weights; the samples count as consumed."""
    RERUN = enum.auto()
    """Repeat forward and backward on the same batches, and compare the gradients."""
    RERUN_SHIFTED = enum.auto()
    """The same, with the samples of each data-parallel rank on another one (`SampleShift`)."""
    ROLLBACK = enum.auto()
    """Discard the step, restore the newest checkpoint, and continue with the next samples."""
    STOP = enum.auto()
    """Save after the step, unless it is divergent, and end the run."""
    STOP_NOW = enum.auto()
    """Discard the step and end the run without a save."""


_SHARED_WITH_GROUPS = StepRequest.SAVE, StepRequest.SKIP
"""Requests of one replica group that all groups execute: the save may be due on another group."""

RERUNS = StepRequest.RERUN | StepRequest.RERUN_SHIFTED
"""Requests to repeat the step."""

AFTER_STEP = StepRequest.PROFILE | StepRequest.EVALUATE | StepRequest.SAVE | StepRequest.STOP
"""Requests that do not change the step itself."""


def resolve_requests(requests: StepRequest) -> StepRequest:
    """Return the requests that are executed: of requests that exclude each other, the later kind.

    >>> resolve_requests(StepRequest.SKIP | StepRequest.ROLLBACK)
    <StepRequest.ROLLBACK: 64>
    """
    if StepRequest.STOP_NOW in requests:
        return StepRequest.STOP_NOW
    if StepRequest.STOP in requests:
        return requests & ~(RERUNS | StepRequest.ROLLBACK)
    if StepRequest.ROLLBACK in requests:
        return StepRequest.ROLLBACK
    if StepRequest.RERUN_SHIFTED in requests:
        return requests & ~(StepRequest.SKIP | StepRequest.RERUN)
    if StepRequest.RERUN in requests:
        return requests & ~StepRequest.SKIP
    return requests


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of a step before its update, the same on every rank."""

    loss: float
    """Mean of -log p(label) over the global batch."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping, without the loss scale."""

    num_zeros: int | None = None
    """Number of gradient elements that are zero; None unless optim.count_zeros."""

    unclipped_grad_norm: float | None = None
    """Norm of the gradients that are neither clipped nor part of `grad_norm`; None unless
    optim.muon.clip_grad=false."""

    grad_norms: Mapping[str, float] = field(default_factory=dict)
    """Gradient norm of each group of parameters (observe.grad_norm_by_group)."""

    other_losses: Mapping[str, float] = field(default_factory=dict)
    """Mean over the global batch of the objective's other losses by name, such as those of MTP
    depths."""

    z_loss: float | None = None
    """Mean over labels of train.z_loss * logsumexp^2, not included in `loss`; None if logit
    statistics are off."""

    max_logit: float | None = None
    """Largest logit of a labeled token; None if logit statistics are off."""

    largest_score: LargestScore | None = None
    """Largest attention score; None if the step measures none."""

    empty: bool = False
    """Whether the global batch has no labels."""

    num_reruns: int = 0
    """Number of times that forward and backward were repeated on request."""

    differing_ranks: tuple[int, ...] = ()
    """Ranks whose losses or summed gradient shards are not bitwise equal to those of the run
    before the last rerun."""

    runs: tuple[StepRun, ...] = field(default=(), compare=False)
    """Measurements of each rank in every run of the step, if it was repeated."""

    @property
    def total_grad_norm(self) -> float:
        """Norm of all gradients, those that are not clipped included."""
        return math.hypot(self.grad_norm, self.unclipped_grad_norm or 0.0)

    @property
    def is_finite(self) -> bool:
        """Whether the gradients have no NaN or infinite values."""
        return math.isfinite(self.grad_norm) and math.isfinite(self.unclipped_grad_norm or 0.0)


@dataclass(frozen=True, slots=True)
class StepResult(StepStats):
    """Result of one step, the same on every rank."""

    updated: bool = field(kw_only=True)
    """False if the gradient norm was not finite or too large, there were no labels, or a callback
    requested it; then nothing changed."""

    skipped_reason: str = field(default="", kw_only=True)
    """Why the weights were not updated: "no labels", "not finite" (a gradient), "grad_norm" (above
    optim.grad_norm_skip_threshold) or "requested" by a callback; empty if they were."""

    requests: StepRequest = field(kw_only=True)
    """Requests of all ranks that are executed."""

    save_counts: SaveCounts = field(default=SaveCounts(), kw_only=True)
    """State of the save in flight on all ranks."""

    is_committed: bool = field(default=True, kw_only=True)
    """Whether all replica groups have completed the step; otherwise it is repeated."""

    update_norm: float | None = field(default=None, kw_only=True)
    """Global L2 norm of the optimizer's update; None without an update, and without
    fault_detector.check_update_size."""

    @property
    def is_discarded(self) -> bool:
        """Whether the step does not count, because of a rollback, an immediate stop or the loss of
        a replica group."""
        return not self.is_committed or bool(
            self.requests & (StepRequest.ROLLBACK | StepRequest.STOP_NOW)
        )


class StepHooks:
    """Events within a step; a step without callbacks uses this class, which requests nothing."""

    def after_microbatch(self, index: int) -> None:
        """Called when backward of microbatch `index` has been issued on this rank."""

    def after_backward(self, local_params: Sequence[ShardedParam]) -> StepRequest:
        """Receive this rank's summed gradients before clipping; return its requests."""
        return StepRequest.NONE

    def count_saves(self) -> SaveCounts:
        """Return 1 for a part of a save that this rank has written, or that has failed; called
        directly before the message of the step."""
        return SaveCounts()

    def before_update(self, stats: StepStats) -> StepRequest:
        """Receive values that are equal on all ranks; return requests that are equal as well."""
        return StepRequest.NONE

    def log_requests(self, requests: StepRequest, executed: StepRequest) -> str:
        """Log who requested to change the course of the step; return the requesting callbacks.

        Collective; called only if there are such requests.
        """
        return ""


NO_HOOKS = StepHooks()


def train_step(
    trainer: Trainer,
    batches: StepBatches,
    *,
    lr: float,
    weight_decay: float,
    hooks: StepHooks = NO_HOOKS,
    groups: Mapping[str, GroupRates] = NO_GROUPS,
    synchronizer: StepSynchronizer = SINGLE_JOB,
    step: int = 0,
) -> StepResult:
    """Run one step. Collective over the whole mesh; the host waits for the device once, at the end.

    `groups`: learning rate and weight decay of `optim.groups`. `synchronizer`: of this step, number
    `step`, with other replica groups.

    Raises:
        DataError: the gradient norm is not finite and optim.nonfinite_grad is `raise`.
        CallbackError: a callback requests more than `MAX_RERUNS` reruns.
    """
    backward = _run_backward(trainer, batches, hooks, synchronizer)
    if backward.is_partial:
        synchronizer.commit(step, ok=False)
        return _build_result(backward, requests=StepRequest.NONE, is_committed=False)
    requests = _limit_to_groups(_decide(backward, hooks), synchronizer)
    ends_run = bool(requests & (StepRequest.STOP | StepRequest.STOP_NOW))
    if not synchronizer.commit(step, ok=True, last=ends_run):
        return _build_result(backward, requests=StepRequest.NONE, is_committed=False)
    after_step = StepRequest.NONE  # requests that a rerun does not fulfill
    while requests & RERUNS:
        after_step |= requests & ~RERUNS
        shift = int(StepRequest.RERUN_SHIFTED in requests)
        backward = _rerun_backward(trainer, batches, hooks, backward, shift=shift)
        requests = _decide(backward, hooks, after_step)
    stats, scale = backward.stats, backward.scale
    applies = not requests & (StepRequest.SKIP | StepRequest.ROLLBACK | StepRequest.STOP_NOW)
    keeps_step = not requests & (StepRequest.ROLLBACK | StepRequest.STOP_NOW)
    if trainer.loss_scale is not None and not stats.empty and keeps_step:
        trainer.loss_scale.update(overflow=not stats.is_finite)
    reason = _find_skipped_reason(trainer, stats, applies=applies)
    updates = not reason
    synchronizer.note_update(updated=updates)
    update_norm: float | None = None
    if updates:
        update_norm = _update(
            trainer, backward.local_params, backward.norm, scale, lr, weight_decay, groups
        )
    elif applies and not stats.is_finite and trainer.run.optim.nonfinite_grad == "raise":
        raise DataError(
            f"gradient norm {stats.total_grad_norm}: not finite in "
            f"{describe_nonfinite_gradients(trainer)}. "
            "Reduce schedule.lr, check the data, or set optim.nonfinite_grad=skip."
        )
    result = _build_result(backward, requests=requests, updated=updates, update_norm=update_norm)
    return replace(result, skipped_reason=reason)


def _find_skipped_reason(trainer: Trainer, stats: StepStats, *, applies: bool) -> str:
    """Return why a step does not update the weights, as in `StepResult.skipped_reason`; the same on
    every rank.

    applies: no callback requested to skip it.
    """
    if stats.empty:  # momentum and weight decay would still change the weights
        return "no labels"
    if not stats.is_finite:
        return "not finite"
    if not applies:
        return "requested"
    threshold = trainer.run.optim.grad_norm_skip_threshold
    return "grad_norm" if threshold is not None and stats.grad_norm > threshold else ""


def _update(
    trainer: Trainer,
    local_params: Sequence[ShardedParam],
    norm: Tensor,
    scale: float,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates],
) -> float | None:
    """Update the weights from summed gradients, and all-gather them; return the norm of the update
    if it is measured."""
    with trainer.timers.section("optimizer"):
        trainer.write_guard.wait()
        before = _copy_master_weights(trainer)
        trainer.optimizer.step(
            [param.gradient for param in local_params],
            lr=lr,
            weight_decay=weight_decay,
            groups=groups,
            scale=_gradient_multiplier(norm, trainer.run.optim.clip_grad, scale),
            unclipped_scale=_gradient_multiplier(norm, 0.0, scale),
        )
        update_norm = _measure_update(trainer, before)
        for update_weights in trainer.weight_updates:
            update_weights(trainer.pipeline_model.modules, trainer.mesh)
    with trainer.timers.section("param_gather"):
        trainer.data.all_gather_params()
    return update_norm


def create_zero_sums(trainer: Trainer) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Return gradients with routing statistics, losses and largest logit (None: it is not logged)
    of a step without samples, for a replica group that takes part in its sums."""
    gradients = [torch.zeros_like(param.gradient) for param in trainer.data.local_params]
    routing = list_routing_sums(trainer.pipeline_model.modules, trainer.device)
    gradients += [torch.zeros_like(each) for each in routing]
    logs_logits = trainer.pipeline_model.logit_stats is not None
    num_losses = len(trainer.pipeline_model.objective.losses) + logs_logits
    losses = torch.zeros(num_losses, dtype=torch.float64, device=trainer.device)
    return gradients, losses, losses.new_zeros(1) if logs_logits else None


def replay_update(
    trainer: Trainer,
    gradients: Sequence[Tensor],
    *,
    scale: float,
    lr: float,
    weight_decay: float,
    groups: Mapping[str, GroupRates],
) -> None:
    """Repeat the update of a step from gradients that are summed over ranks and replica groups and
    have this loss scale, and routing statistics. Collective; with the message of a step, so that
    the norm has the same bits."""
    local_params = trainer.data.local_params
    trainer.data.wait_params()
    routing = list_routing_sums(trainer.pipeline_model.modules, trainer.device)
    targets = [*(param.gradient for param in local_params), *routing]
    for target, values in zip(targets, gradients, strict=True):
        target.copy_(values)
    _, losses, _ = create_zero_sums(trainer)
    norm = reduce_step_stats(trainer, local_params, losses)[0].sqrt() / scale
    _update(trainer, local_params, norm, scale, lr, weight_decay, groups)


def _build_result(
    backward: "_Backward",
    *,
    requests: StepRequest,
    updated: bool = False,
    is_committed: bool = True,
    update_norm: float | None = None,
) -> StepResult:
    """Return the result of a step whose update has been applied, skipped or discarded."""
    stats = backward.stats
    values = {each.name: getattr(stats, each.name) for each in fields(StepStats)}
    return StepResult(
        **values,
        updated=updated,
        requests=requests,
        save_counts=backward.save_counts,
        is_committed=is_committed,
        update_norm=update_norm,
    )


def _limit_to_groups(requests: StepRequest, synchronizer: StepSynchronizer) -> StepRequest:
    """Return the requests that a step with replica groups can execute.

    A rerun of summed gradients would compare the ranks of one group only, so the step is not
    repeated; gradients that are not finite are skipped as always.

    Raises:
        CallbackError: a rollback was requested.
    """
    if StepRequest.ROLLBACK in requests and not synchronizer.allows_rollbacks:
        raise CallbackError(
            "a callback requested a rollback, which is not possible with replica_group. Request "
            "SKIP or STOP instead, or run without the callback."
        )
    return requests if synchronizer.allows_reruns else requests & ~RERUNS


def _copy_master_weights(trainer: Trainer) -> list[Tensor]:
    """Return copies of the master weights of which this rank has the first replica; none without
    fault_detector.check_update_size."""
    if not trainer.run.fault_detector.check_update_size:
        return []
    return [each.detach().clone() for each in _list_master_weights(trainer)]


def _list_master_weights(trainer: Trainer) -> list[Tensor]:
    weights = [(slot.shard, slot.read_master()) for slot in trainer.optimizer.slots]
    return first_replica_gradients(weights, trainer.first_replicas)


def _measure_update(trainer: Trainer, before: Sequence[Tensor]) -> float | None:
    """Return the norm of the difference between the master weights and earlier copies; None without
    fault_detector.check_update_size, whose measurement is collective over the mesh."""
    if not trainer.run.fault_detector.check_update_size:
        return None
    after = _list_master_weights(trainer)
    changes = [new - old for new, old in zip(after, before, strict=True)]
    squares = sum_of_squares(changes, trainer.device)
    return math.sqrt(all_reduce_(squares, trainer.mesh.world).item())


@dataclass(frozen=True, slots=True)
class _Backward:
    """Result of forward and backward of a step."""

    stats: StepStats
    requests: StepRequest
    """Requests of all ranks in the message of the step."""
    save_counts: SaveCounts
    local_params: Sequence[ShardedParam]
    losses: Tensor
    """This rank's summed losses."""
    norm: Tensor
    """Gradient norm without the loss scale, on the device."""
    scale: float
    """Loss scale that the gradients contain."""
    is_partial: bool = False
    """Whether the sums lack a replica group that was lost."""


def _run_backward(
    trainer: Trainer,
    batches: StepBatches,
    hooks: StepHooks,
    synchronizer: StepSynchronizer = SINGLE_JOB,
    *,
    is_rerun: bool = False,
) -> _Backward:
    """Run forward and backward of all microbatches and combine the statistics of all ranks."""
    data, mesh = trainer.data, trainer.mesh
    # Of one rank, the gradients after the reduction are compared.
    records = mesh.world.size > 1 and (is_rerun or trainer.run.fault_detector.uses_reruns)
    # Other devices may add in another order each time, so that only norms can be compared.
    data.record_local_gradients(
        bits=records, norms=is_rerun or (records and trainer.device.type != "cpu")
    )
    scale = 1.0 if trainer.loss_scale is None else trainer.loss_scale.scale
    data.begin_step(len(batches.microbatches))
    objective, monitor = trainer.pipeline_model.objective, trainer.score_monitor
    score_record = None if monitor is None else monitor.start_step()
    normalizer = build_loss_normalizer(objective, batches, mesh, scale=scale)
    with trainer.timers.section("forward_backward"):
        losses = trainer.pipeline_model.forward_backward(
            batches.microbatches,
            normalizer,
            after_microbatch=hooks.after_microbatch,
            score_record=score_record,
        )
    with trainer.timers.section("grad_reduce"):
        local_params = data.finish()
    requests_of_rank = hooks.after_backward(local_params)
    with trainer.timers.section("step_stats"):
        logit_stats = _collect_logit_stats(trainer)
        local_losses, largest = losses, None
        if logit_stats is not None:
            local_losses = torch.cat([losses - logit_stats.z, logit_stats.z[:1]])
            largest = logit_stats.largest
        over_groups = synchronizer.sum_step(
            [param.gradient for param in local_params],
            local_losses,
            count_shared_requests(requests_of_rank),
            largest,
            scale,
        )
        largest = over_groups.max_logit
        requests_of_rank |= read_shared_requests(over_groups.requests)
        message = reduce_step_stats(
            trainer,
            local_params,
            over_groups.losses,
            requests_of_rank,
            hooks.count_saves(),
            failed=over_groups.failed,
        )
        values = message if largest is None else torch.cat([message, largest])
        largest_score = None
        if monitor is not None and score_record is not None:
            scores = monitor.reduce(score_record, mesh, trainer.device)
            all_values = torch.cat([values, scores]).tolist()
            largest_score = monitor.receive(all_values[len(values) :])
            squares, zeros, *sums = all_values[: len(values)]
        else:
            squares, zeros, *sums = values.tolist()
    num_unclipped, num_groups = _count_other_sums(trainer)
    others = [math.sqrt(value) / scale for value in sums[: num_unclipped + num_groups]]
    sums = sums[num_unclipped + num_groups :]
    max_logit = None if largest is None else sums.pop()
    num_failed = sums.pop()
    save_counts = SaveCounts(*map(int, sums[-2:]))
    requests = _read_requests(sums[-len(StepRequest) - 2 : -2])
    means = normalizer.mean_losses(sums[: len(normalizer.terms)])
    z_loss = None
    if largest is not None:
        z_loss = sums[len(normalizer.terms)] / max(1, batches.num_labels)
    stats = StepStats(
        means.pop(MAIN_LOSS),
        math.sqrt(squares) / scale,
        int(zeros) if trainer.run.optim.count_zeros else None,
        others[0] if num_unclipped else None,
        dict(zip(GRAD_NORM_GROUPS[:num_groups], others[num_unclipped:], strict=True)),
        means,
        z_loss,
        max_logit,
        largest_score,
        empty=not any(normalizer.totals[term.count] for term in normalizer.terms.values()),
    )
    norm = message[0].sqrt() / scale
    return _Backward(
        stats, requests, save_counts, local_params, losses, norm, scale, num_failed > 0
    )


def _rerun_backward(
    trainer: Trainer, batches: StepBatches, hooks: StepHooks, earlier: _Backward, *, shift: int
) -> _Backward:
    """Repeat forward and backward, compare the result with `earlier`, whose gradients are
    overwritten, and add the measurements of all ranks to the statistics. Collective.

    `shift`: 1 to shift the samples, else 0.
    """
    runs = earlier.stats.runs or (StepRun(_gather_gradients(trainer, earlier)),)
    if shift:
        batches = replace(batches, microbatches=_shift_microbatches(trainer, batches.microbatches))
    backward = _run_backward(trainer, batches, hooks, is_rerun=True)
    run = StepRun(_gather_gradients(trainer, backward), shift)
    before = [(each.reduced_bits, each.bits[-1]) for each in runs[-1].ranks]
    after = [(each.reduced_bits, each.bits[-1]) for each in run.ranks]
    stats = replace(
        backward.stats,
        num_reruns=earlier.stats.num_reruns + 1,
        differing_ranks=tuple(
            rank
            for rank, one, two in zip(trainer.mesh.world.ranks, before, after, strict=True)
            if one != two
        ),
        runs=(*runs, run),
    )
    return replace(backward, stats=stats)


def _gather_gradients(trainer: Trainer, backward: _Backward) -> tuple[RankGradients, ...]:
    """Return the measurements of all ranks in the run that has just finished, by rank.
    Collective."""
    data, losses = trainer.data, backward.losses
    bits = [*data.local_gradient_bits(), sum_bits(losses)]
    reduced = [sum_bits(param.gradient.contiguous()) for param in backward.local_params]
    is_alone = trainer.mesh.world.size == 1
    local = RankGradients(
        bits=tuple(torch.stack(bits).tolist()),
        norm=float(backward.norm) if is_alone else data.local_gradient_norm(),
        loss=float(losses.sum()),
        nonfinite=tuple(data.nonfinite()[:MAX_NAMES]),
        reduced_bits=tuple(torch.stack(reduced).tolist()) if reduced else (),
    )
    gathered = gather_objects(local, trainer.mesh.world)
    return tuple(each for each in gathered if isinstance(each, RankGradients))


def find_sample_shift(mesh: Mesh) -> SampleShift:
    """Return the shift of the samples in reruns (`StepRequest.RERUN_SHIFTED`)."""
    if mesh.grid.experts is None:
        return plan_sample_shift(mesh.dp.size, [0])
    ranks = mesh.over("ep", "etp").ranks
    return plan_sample_shift(mesh.dp.size, [mesh.grid.coordinates(rank)["dp"] for rank in ranks])


def _shift_microbatches(trainer: Trainer, microbatches: list[Batch]) -> list[Batch]:
    """Return the microbatches of an earlier data-parallel rank; ranks may have unequal numbers of
    them. Collective.

    Records and replays of routing stay with their samples, and are omitted.
    """
    group, device = trainer.mesh.dp, trainer.device
    sent = [_move_tensors(replace(batch, routing=None), "cpu") for batch in microbatches]
    gathered = gather_objects(sent, group)
    received = gathered[group.rank - find_sample_shift(trainer.mesh).num_ranks]
    assert isinstance(received, list), "every rank sends its microbatches"
    return [_move_tensors(batch, device) for batch in received]


T = TypeVar("T")


def _move_tensors(value: T, device: torch.device | str) -> T:
    """Return a dataclass, tuple or mapping with its tensors on `device`."""
    moved: Any = value  # Any: what is rebuilt below has the type of `value`
    if isinstance(value, Tensor):
        moved = value.to(device)
    elif is_dataclass(value) and not isinstance(value, type):
        moved = copy(value)
        for each in fields(value):
            changed = _move_tensors(getattr(value, each.name), device)
            object.__setattr__(moved, each.name, changed)  # it may be frozen
    elif isinstance(value, tuple):
        items = [_move_tensors(each, device) for each in value]
        moved = type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    elif isinstance(value, list):
        moved = [_move_tensors(each, device) for each in value]
    elif isinstance(value, dict):
        moved = {key: _move_tensors(each, device) for key, each in value.items()}
    return cast(T, moved)  # the same type, see above


def _decide(
    backward: _Backward, hooks: StepHooks, earlier: StepRequest = StepRequest.NONE
) -> StepRequest:
    """Return the requests to execute, from the message of the step and `before_update`.

    Raises:
        CallbackError: on every rank: the step was rerun too often.
    """
    decided = hooks.before_update(backward.stats)
    requests = backward.requests | earlier | decided
    # A fault that is not yet classified is classified before the run stops.
    executed = resolve_requests(requests & ~StepRequest.STOP if decided & RERUNS else requests)
    if StepRequest.STOP in requests:
        executed = executed | StepRequest.STOP if executed & RERUNS else resolve_requests(requests)
        if decided & StepRequest.ROLLBACK and StepRequest.STOP in executed:
            executed |= StepRequest.SKIP  # the state that is saved is without this bad step
    names = ""
    if requests & ~AFTER_STEP:
        names = hooks.log_requests(requests, executed)
    if executed & RERUNS and backward.stats.num_reruns == MAX_RERUNS:
        raise CallbackError(
            f"the step was rerun {MAX_RERUNS} times, and another rerun was requested by {names}. "
            "Return SKIP, ROLLBACK or STOP from before_update if stats.num_reruns > 0 and the "
            "result is still wrong."
        )
    return executed


def reduce_step_stats(
    trainer: Trainer,
    local_params: Sequence[ShardedParam],
    losses: Tensor,
    requests: StepRequest = StepRequest.NONE,
    save_counts: SaveCounts = SaveCounts(),  # noqa: B008 - it is immutable
    *,
    failed: bool = False,
) -> StepStatsMessage:
    """All-reduce the statistics of a step in one message. Collective over the mesh.

    `failed`: this rank's gradients were not summed over the replica groups.
    """
    mesh = trainer.mesh
    gradients = [(o.shard, o.gradient) for o in local_params]
    local_gradients = first_replica_gradients(gradients, trainer.first_replicas)
    clipped = local_gradients
    if trainer.unclipped:
        clipped = first_replica_gradients(gradients, trainer.first_replicas - trainer.unclipped)
    zeros = (
        num_zeros(local_gradients, trainer.device)
        if trainer.run.optim.count_zeros
        else losses.new_zeros(())
    )
    # Losses are equal on all tensor-parallel ranks, so only the first contributes; they are 0
    # before the last stage.
    local_losses = losses if mesh.tp.rank == 0 else torch.zeros_like(losses)
    gradient_stats = torch.stack([sum_of_squares(clipped, trainer.device), zeros])
    other_sums = _sum_other_squares(trainer, gradients)
    # A sum over ranks: each kind of request has its own count.
    requested = [float(kind in requests) for kind in StepRequest]
    counts = [*requested, *map(float, save_counts), float(failed)]
    local_counts = losses.new_tensor(counts)
    message = torch.cat([gradient_stats, *other_sums, local_losses, local_counts])
    return all_reduce_(message, mesh.world)


def _count_other_sums(trainer: Trainer) -> tuple[int, int]:
    """Return the number of sums of unclipped gradients and of groups in the message of a step; the
    same on every rank."""
    run = trainer.run
    num_groups = len(GRAD_NORM_GROUPS) if run.observe.grad_norm_by_group else 0
    return int(not run.optim.muon.clip_grad), num_groups


def _sum_other_squares(trainer: Trainer, gradients: Sequence[tuple[Shard, Tensor]]) -> list[Tensor]:
    """Return this rank's sums of squares of unclipped gradients [1] and of groups [groups]."""
    num_unclipped, num_groups = _count_other_sums(trainer)
    sums = []
    if num_unclipped:
        names = trainer.first_replicas & trainer.unclipped
        excluded = [gradient for shard, gradient in gradients if shard.name in names]
        sums.append(sum_of_squares(excluded, trainer.device).unsqueeze(0))
    if num_groups:
        counted = [pair for pair in gradients if pair[0].name in trainer.first_replicas]
        groups = [find_grad_norm_group(shard.name) for shard, _ in counted]
        values = [gradient for _, gradient in counted]
        sums.append(sum_of_squares_by_group(values, groups, num_groups, trainer.device))
    return sums


def reduce_requests(requests: StepRequest, mesh: Mesh, device: torch.device) -> StepRequest:
    """Return the requests of all ranks that are executed, in a step that sends no other message.
    Collective over the mesh."""
    counts = [float(kind in requests) for kind in StepRequest]
    message = torch.tensor(counts, dtype=torch.float64, device=device)
    return resolve_requests(_read_requests(all_reduce_(message, mesh.world).tolist()))


def count_shared_requests(requests: StepRequest) -> list[float]:
    """Return 1 for each kind of shared request that a replica group has, otherwise 0."""
    return [float(kind in requests) for kind in _SHARED_WITH_GROUPS]


def read_shared_requests(counts: Sequence[float]) -> StepRequest:
    """Return the shared requests of all replica groups, from the number of groups with each
    kind."""
    requests = StepRequest.NONE
    for kind, count in zip(_SHARED_WITH_GROUPS, counts, strict=True):
        requests |= kind if count else StepRequest.NONE
    return requests


def _read_requests(counts: Sequence[float]) -> StepRequest:
    """Return the requests of all ranks from the number of ranks with each kind."""
    requests = StepRequest.NONE
    for kind, count in zip(StepRequest, counts, strict=True):
        if count:
            requests |= kind
    return requests


def _collect_logit_stats(trainer: Trainer) -> StepLogitStats | None:
    """Return the logit statistics of the heads, if the run logs them. Collective in that case."""
    heads = trainer.pipeline_model.logit_stats
    if heads is None:
        return None
    depths = trainer.run.model.mtp.num_layers
    return collect_logit_stats(heads, trainer.mesh, depths=depths, device=trainer.device)


def _gradient_multiplier(norm: Tensor, limit: float, scale: float) -> Tensor | None:
    """Return the factor that clips the gradients and removes the loss scale; None if it is 1."""
    factor = clip_factor(norm, limit)
    if scale == 1.0:
        return factor
    return (torch.ones_like(norm) if factor is None else factor) / scale


def describe_nonfinite_gradients(trainer: Trainer) -> str:
    """Describe the first parameters with non-finite gradients and their ranks. Collective; equal on
    all ranks.

    If gradients were checked before their reduction, names the ranks where they were not finite
    first.
    """
    world = trainer.mesh.world
    nonfinite_gradients = _gather_names(trainer.data.nonfinite(), world)
    if not nonfinite_gradients:
        names_after_reduction = [
            param.shard.name
            for param in trainer.data.local_params
            if not bool(torch.isfinite(param.gradient).all())
        ]
        nonfinite_gradients = _gather_names(names_after_reduction, world)
    texts = [
        f"{', '.join(names[:5])} on rank {rank}"
        for rank, names in list(nonfinite_gradients.items())[:5]
    ]
    return "; ".join(texts) or "no single gradient, only their sum of squares"


def _gather_names(names: list[str], group: Group) -> dict[int, list[str]]:
    """Return the names of every rank that has any, by rank. Collective over `group`."""
    gathered = gather_objects(names, group)
    return {
        rank: rank_names
        for rank, rank_names in zip(group.ranks, gathered, strict=True)
        if isinstance(rank_names, list) and rank_names
    }
