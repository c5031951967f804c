"""Interface of callbacks, which observe a run and request actions; the list that calls them; the
callbacks that a user names, and their settings `callbacks.NAME.field`.

A callback is `package.module:Class` on the command line, or an installed entry point in the
settings. A settings file never names a module.
"""

import functools
import importlib
import inspect
import json
import logging
import operator
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, Literal

import torch
from torch import nn

from megalith.checkpoint.save import SaveReport, ignore_progress
from megalith.config.fields import Plain, field_types, range_problems
from megalith.config.train import CALLBACK_GROUP, TrainRun
from megalith.config.tree import build_section, to_dict
from megalith.data.loader import StepBatches
from megalith.errors import (
    CallbackError,
    CheckpointError,
    ConfigError,
    UserError,
    did_you_mean,
    raise_all,
)
from megalith.observe.metrics import Value
from megalith.observe.timers import SECTION_LEVELS, Timers, summarize_times
from megalith.optim.schedule import GroupRates
from megalith.parallel.grad_sync import ShardedParam
from megalith.parallel.group import gather_objects
from megalith.parallel.mesh import Mesh
from megalith.plan.rollback import RollbackPlan, combine_plans
from megalith.train.resume import PreparedRun
from megalith.train.run_folder import RunFolder
from megalith.train.step import (
    AFTER_STEP,
    RERUNS,
    SaveCounts,
    StepHooks,
    StepRequest,
    StepResult,
    StepStats,
)
from megalith.train.suites import SuiteResults

_log = logging.getLogger(__name__)

StepMetrics = dict[str, Value]
"""Metrics of a step, written to metrics.jsonl if the step is logged (train.log_every)."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A finished step: its batches, learning rates, result and duration."""

    step: int
    batches: StepBatches
    lr: float
    group_rates: Mapping[str, GroupRates]
    result: StepResult
    seconds: float
    """From reading the data to the end of the step, without callbacks, evaluation and saving."""
    num_samples: int
    """Global batch size of the step."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How and at which step a run ended."""

    kind: Literal["done", "stopped", "suspect"]
    """suspect: a machine is at fault, so the run must continue on others."""
    step: int
    reason: str = ""
    saved: bool = True
    """Whether `step` is saved; it is not after an immediate stop, or if its loss or gradient norm
    is not finite."""
    tier: Literal["persistent", "local"] = "persistent"
    """Where `step` is saved. local: there was no time for a persistent checkpoint."""


RecordEvent = Callable[[str, Mapping[str, Any]], None]  # Any: JSON
"""Writes an event: its name and its fields."""


def ignore_event(event: str, fields: Mapping[str, Any]) -> None:  # Any: JSON
    """Do nothing: the run has no file of events."""


@dataclass(frozen=True, slots=True)
class RunView:
    """What a callback sees of a run. A callback changes neither the weights nor the counters."""

    prepared: PreparedRun
    """Trainer, data, tokenizer and counters of the run."""

    log: Callable[[str], None]
    """Prints a line above the progress bar and logs it; on rank 0."""

    request: Callable[[StepRequest], None]
    """Requests an action on all ranks. A request made before backward has finished takes effect
    in the current step, a later one in the next step."""

    record_event: RecordEvent = ignore_event
    """Writes an event with its fields to events.jsonl; on rank 0."""

    report_progress: Callable[[], None] = ignore_progress
    """Records that this rank makes progress. A callback whose method runs for longer than a minute
    calls it from time to time; otherwise the rank may be killed as one that hangs."""

    @property
    def config(self) -> TrainRun:
        """Settings of the run."""
        return self.prepared.run

    @property
    def mesh(self) -> Mesh:
        """Process groups of this rank."""
        return self.prepared.mesh

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self.prepared.trainer.device

    @property
    def folder(self) -> RunFolder:
        """Output files of the run."""
        return self.prepared.folder

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.prepared.state.step

    @property
    def is_writer(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.prepared.is_writer

    @property
    def chunks(self) -> nn.ModuleList:
        """Model chunks of this rank: one, except in interleaved pipeline schedules."""
        return self.prepared.trainer.pipeline_model.modules

    @property
    def local_params(self) -> Sequence[ShardedParam]:
        """Parameter shards that this rank updates, with their gradients."""
        return self.prepared.trainer.data.local_params

    def is_logged(self, step: int) -> bool:
        """Return whether the metrics of a step are logged."""
        train = self.config.train
        return step % train.log_every == 0 or step == train.steps


class Callback:
    """Base class of callbacks: every method does nothing unless it is overridden.

    Methods run on every rank in the order of the list, `on_error` and `on_end` in reverse order. A
    callback whose method raises an error is no longer called on that rank, with a warning, and the
    run continues; see `collective` and `essential`.
    """

    name: str = ""
    """Unique in the list; the key of the callback's state in a checkpoint. Empty: the name of the
    class."""

    collective = False
    """Whether methods communicate, so that all ranks must run them; an error ends the run."""

    essential = False
    """Whether an error on any rank ends the run on all ranks, after the next step."""

    rollback_plan: RollbackPlan | None = None
    """Steps to undo when this callback requests a rollback, set before the request on any rank;
    None: the newest checkpoint is restored, and the samples since then are skipped."""

    @dataclass(frozen=True)
    class Config:
        """Settings `callbacks.NAME.field`: fields with defaults, ranges and docstrings."""

    config: Any = Config()  # Any: an instance of the subclass's Config
    """Settings of this callback; complete before `on_start`."""

    def on_start(self, run: RunView) -> None:
        """Receive the run, once before its first step."""

    def before_step(self, step: int, batches: StepBatches) -> StepBatches | None:
        """Receive the batches of step `step`; return batches with recorders attached, or None."""

    def before_skipped_step(self, step: int) -> StepRequest | None:
        """Called instead of all other hooks of step `step` if its samples are read without training
        on them (train.skip_steps); may request what is executed after a step."""

    def after_skipped_step(self, step: int, requests: StepRequest) -> None:
        """Receive the requests of all ranks that are executed after skipped step `step`."""

    def after_microbatch(self, index: int) -> None:
        """Called when backward of microbatch `index` has been issued on this rank; it must not
        wait for the device."""

    def after_backward(self, local_params: Sequence[ShardedParam]) -> StepRequest | None:
        """Receive this rank's gradient shards, summed over ranks, before clipping. A request takes
        effect in this step."""

    def before_update(self, stats: StepStats) -> StepRequest | None:
        """Receive the statistics of the step, equal on all ranks, before the update. A request
        takes effect in this step; it must depend on `stats` alone, and an error ends the run."""

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> StepRequest | None:
        """Receive a finished step; add values to `metrics`. A request takes effect after the next
        step."""

    def on_log(self, metrics: Mapping[str, Value]) -> None:
        """Receive a complete row of metrics, of a step or of an evaluation; on rank 0."""

    def before_evaluate(self, step: int) -> None:
        """Called before an evaluation after step `step`."""

    def after_evaluate(self, results: SuiteResults, metrics: StepMetrics) -> StepRequest | None:
        """Receive the results of an evaluation, equal on all ranks, by suite: `eval` is the
        validation split. Add values to the row `metrics`, which is logged."""

    def after_save(self, report: SaveReport) -> None:
        """Receive the path and size of a complete checkpoint."""

    def after_save_failed(self, error: CheckpointError) -> None:
        """Receive the error of a failed save, after which the run continues."""

    def after_rollback(self, step: int) -> None:
        """Continue after step `step`, whose checkpoint has been restored: remove outputs of later
        steps. The state of the checkpoint has been loaded."""

    def on_error(self, error: BaseException) -> None:
        """Close files, because the run ends with an error."""

    def on_end(self, outcome: Outcome) -> None:
        """Close files, because the run has ended; after the last save."""

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """Return the state to save in checkpoints: JSON, small, equal on all ranks."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, before `on_start`; not called if it has none."""


class CallbackList(StepHooks):
    """Calls the methods of callbacks, collects their requests and handles their errors."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        """`callbacks`: in the order in which they are called.

        Raises:
            ConfigError: two callbacks have the same name.
        """
        self._callbacks = check_callbacks(callbacks)
        self._started: list[Callback] = []
        self._requests: list[tuple[StepRequest, str]] = []  # with the name of the callback
        self._sent = self._requests  # those in the message of the current step
        self._earlier: list[tuple[StepRequest, str]] = []  # made before the current step
        self._running = ""
        """Name of the callback that is called at this time; empty outside of callbacks."""
        self._step = 0
        self._failures: list[str] = []  # of essential callbacks on this rank
        self._removed: list[str] = []  # errors of other callbacks on this rank
        self._timers: Timers | None = None
        """Measures the callbacks; None before they are started, or if no times are logged."""
        self._num_timed_steps = 0
        self.save_counts: Callable[[], SaveCounts] = SaveCounts
        """Returns the state of this rank's asynchronous save."""
        self.stop_reason: str | None = None
        """Which callback of this rank requested to stop the run."""

    def request(self, requests: StepRequest) -> None:
        """Add requests of this rank to its next message.

        Raises:
            TypeError: the argument is not a StepRequest.
        """
        if not isinstance(requests, StepRequest):
            raise TypeError(
                f"{requests!r} was requested. Use a StepRequest, such as StepRequest.SAVE."
            )
        if not requests:
            return
        name = self._running or "run.request"
        self._requests.append((requests, name))
        if requests & _STOPS and self.stop_reason is None:
            self.stop_reason = f"requested by callback {name}"

    def on_start(self, run: RunView) -> None:
        """Restore the states of callbacks and start them. Collective.

        Raises:
            CallbackError: on every rank, if an essential callback failed on any.
        """
        states, self._step, self._run = run.prepared.callback_states, run.step, run
        for name, callback in [*self._callbacks.items()]:
            if name in states:
                self._call(name, "load_state_dict", states[name])
            if name in self._callbacks:
                self._call(name, "on_start", run)
                self._started.append(callback)
        if run.is_writer and (unused := sorted(states.keys() - self._callbacks.keys())):
            _log.warning(
                "the checkpoint has the state of callbacks that this run does not use: %s. Its own "
                "checkpoints will not contain them; pass --callback to continue with them.",
                ", ".join(unused),
            )
        self.raise_failures(run.mesh)
        observe = run.config.observe
        if observe.timer_level or observe.callback_times:
            self._timers = run.prepared.trainer.timers

    def before_step(self, step: int, batches: StepBatches) -> StepBatches:
        """Return the batches of step `step` with the recorders of all callbacks."""
        self._step, self._earlier = step, [*self._requests]
        for name in [*self._callbacks]:
            changed = self._call(name, "before_step", step, batches)
            batches = batches if changed is None else changed
        return batches

    def before_skipped_step(self, step: int) -> StepRequest:
        """Return the requests of this rank that are executed after a skipped step; others wait for
        the next step."""
        self._step, self._earlier = step, [*self._requests]
        self.notify("before_skipped_step", step)
        requests = _combine(self._requests) & AFTER_STEP
        waiting = ((kinds & ~AFTER_STEP, name) for kinds, name in self._requests)
        self._requests = [(kinds, name) for kinds, name in waiting if kinds]
        return requests

    def restore_requests(self) -> None:
        """Send the requests that were made before the current step again: the step is repeated,
        because the replica groups have discarded it."""
        self._requests = [*dict.fromkeys([*self._earlier, *self._requests])]

    def after_microbatch(self, index: int) -> None:
        """Call the callbacks after backward of a microbatch."""
        for name, callback in [*self._callbacks.items()]:
            if type(callback).after_microbatch is not Callback.after_microbatch:
                self._call(name, "after_microbatch", index)

    def after_backward(self, local_params: Sequence[ShardedParam]) -> StepRequest:
        """Call `after_backward` and return the requests of this rank since the last message."""
        self.notify("after_backward", local_params)
        self._sent, self._requests = self._requests, []
        return _combine(self._sent)

    def count_saves(self) -> SaveCounts:
        """Return the state of this rank's part of the asynchronous save in flight."""
        return self.save_counts()

    def before_update(self, stats: StepStats) -> StepRequest:
        """Return the requests of all callbacks for the current step.

        Raises:
            CallbackError: parallel.check_collectives is set and ranks request different actions.
        """
        num_sent = len(self._sent)
        for name, callback in [*self._callbacks.items()]:
            if decides_update(callback):
                requests = self._call(name, "before_update", stats)
                self._sent += [(requests, name)] if requests else []
        own = self._sent[num_sent:]
        if self._run.config.parallel.check_collectives:
            _check_equal_requests(own, self._step, self._run.mesh)
        return _combine(own)

    def log_requests(self, requests: StepRequest, executed: StepRequest) -> str:
        """Log which callbacks requested to change the course of the step, and which of them are
        overruled; return the requesting callbacks. Collective."""
        world = self._run.mesh.world
        gathered = gather_objects([(kinds.value, name) for kinds, name in self._sent], world)
        names = {kind: _describe_requesters(kind, gathered, world.ranks) for kind in requests}
        described = {kind: names[kind] or "an earlier request" for kind in names}
        winner = [*executed][-1]
        for kind, requesters in described.items():
            if kind not in executed:
                self._run.log(
                    f"step {self._step}: {_show(kind)}, requested by {requesters}, gives way to "
                    f"{_show(winner)}, requested by {described[winner]}"
                )
            elif kind & (StepRequest.SKIP | RERUNS | StepRequest.ROLLBACK):
                self._run.log(f"step {self._step}: {_show(kind)}, requested by {requesters}")
        return described[winner]

    def after_step(self, finished: FinishedStep) -> StepMetrics:
        """Return the metrics of a finished step from all callbacks."""
        metrics: StepMetrics = {}
        self.notify("after_step", finished, metrics)
        self._num_timed_steps += 1
        if self._timers is not None and self._run.is_logged(finished.step):
            metrics |= self._summarize(self._timers.take(), num_steps=self._num_timed_steps)
            self._num_timed_steps = 0
        return metrics

    def section_times(self, name: str) -> StepMetrics:
        """Return the metrics of one section since the last call, for a row of its own; empty if
        sections are not measured. Collective."""
        if self._timers is None or self._timers.level == 0:
            return {}
        return self._summarize({name: self._timers.take_section(name)}, num_steps=1)

    def _summarize(self, seconds: Mapping[str, float], *, num_steps: int) -> StepMetrics:
        """Return the metrics of the seconds of all ranks. Collective."""
        world = self._run.mesh.world
        gathered = gather_objects(seconds, world)
        times = [seconds for seconds in gathered if isinstance(seconds, dict)]
        return summarize_times(times, world.ranks, num_steps=num_steps)

    def combine_rollback_plans(self) -> RollbackPlan | None:
        """Return the plan of the callbacks of all ranks for the requested rollback; None if no
        callback has one. Collective."""
        own = [each.rollback_plan for each in self._callbacks.values()]
        gathered = gather_objects([plan for plan in own if plan], self._run.mesh.world)
        plans = [plan for each in gathered if isinstance(each, list) for plan in each]
        return combine_plans(plans)

    def after_rollback(self, step: int) -> None:
        """Restore the states of callbacks as of step `step`, and notify them."""
        for callback in self._callbacks.values():
            callback.rollback_plan = None
        self._step, states = step, self._run.prepared.callback_states
        self._requests.clear()  # they are about discarded steps
        self._num_timed_steps = 0
        if self._timers is not None:
            self._timers.clear()
        for name in [*self._callbacks]:
            if name in states:
                self._call(name, "load_state_dict", states[name])
        self.notify("after_rollback", step)

    def notify(self, method: str, *arguments: object) -> None:
        """Call a method of every callback, in reverse order for `on_end`; add requests that it
        returns."""
        for name in reversed([*self._callbacks]) if method == "on_end" else [*self._callbacks]:
            requests = self._call(name, method, *arguments)
            if requests:
                self._running = name
                self.request(requests)
                self._running = ""

    def on_error(self, error: BaseException) -> None:
        """End the callbacks that were started, because the run ends with an error."""
        for callback in reversed(self._started):
            try:
                callback.on_error(error)
            except Exception:  # the first error must be the one that is raised
                _log.warning("callback %s failed in on_error", name_of(callback), exc_info=True)

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """Return the states of the callbacks that have one, by name."""
        states = {name: self._call(name, "state_dict") for name in [*self._callbacks]}
        return {name: state for name, state in states.items() if state}

    def raise_failures(self, mesh: Mesh) -> None:
        """Raise the errors of essential callbacks; rank 0 logs those of the others on all ranks,
        whose own output may be discarded. Collective over the mesh.

        Raises:
            CallbackError: on every rank with the same text, if an essential callback failed on any.
        """
        texts = self._gather_by_rank(self._failures, mesh)
        # rank 0 has logged its own
        removed = self._gather_by_rank(self._removed if mesh.world.rank else (), mesh)
        self._removed.clear()
        if mesh.world.rank == 0:
            for text in removed:
                _log.warning("%s. The run continued without it.", text)
        if texts:
            raise CallbackError("\n".join(texts))

    @staticmethod
    def _gather_by_rank(texts: Sequence[str], mesh: Mesh) -> list[str]:
        """Return the texts of all ranks, each with its rank. Collective over the mesh."""
        gathered = gather_objects(list(texts), mesh.world)
        return [
            f"rank {rank}: {text}" if mesh.world.size > 1 else text
            for rank, local_texts in zip(mesh.world.ranks, gathered, strict=True)
            for text in (local_texts if isinstance(local_texts, list) else ())
        ]

    def _call(
        self, name: str, method: str, *arguments: object
    ) -> Any:  # Any: the result depends on the method
        """Call a method of a callback; return None if it failed and the run continues."""
        callback = self._callbacks[name]
        self._running, started = name, time.perf_counter()
        try:
            return _call_checked(callback, method, *arguments)
        except Exception as error:
            where = f"callback {name} failed in {method} at step {self._step}"
            if callback.collective or decides_update(callback):
                if not isinstance(error, UserError):
                    error.add_note(
                        f"{where} on rank {os.environ.get('RANK', '0')}. The run ends, because "
                        "the other ranks wait for this callback or depend on its decision. Correct "
                        "the callback, or run without it."
                    )
                raise
            del self._callbacks[name]
            text = f"{where}: {error!r}"
            if isinstance(error, UserError):  # it says what to do
                self._failures.append(str(error))
                self.request(StepRequest.STOP)
                _log.error("%s: %s", where, error)
            elif callback.essential:
                self._failures.append(f"{text}. Correct the callback, or run without it.")
                self.request(StepRequest.STOP)
                _log.error(text, exc_info=True)
            else:
                self._removed.append(text)
                _log.warning("%s. The run continues without it.", text, exc_info=True)
        finally:
            if self._timers is not None:
                self._timers.add(name, time.perf_counter() - started)
            self._running = ""
        return None


def _call_checked(
    callback: Callback, method: str, *arguments: Any
) -> Any:  # Any: the arguments and the result depend on the method
    """Call a method of a callback, and check what it returns and writes into the metrics.

    Raises:
        TypeError: the result or a metric has another type than the interface says; the metrics are
            as before the call.
    """
    metrics = arguments[1] if method in ("after_step", "after_evaluate") else {}
    before = dict(metrics)
    result = getattr(callback, method)(*arguments)
    if wrong := [name for name, value in metrics.items() if not isinstance(value, _VALUE_TYPES)]:
        metrics.clear()
        metrics.update(before)
        raise TypeError(
            f"metrics[{wrong[0]!r}] is not a number, a text, a list of counts or None. Use "
            "float(value)."
        )
    if method == "state_dict":
        expected: type = dict
        json.dumps(result)
    else:
        expected = StepBatches if method == "before_step" else StepRequest
    if not isinstance(result, expected | None):
        raise TypeError(f"{method} returned {result!r:.80}. Return a {expected.__name__} or None.")
    return result


_VALUE_TYPES = int, float, str, list, type(None)
"""Types of a metric: those of `Value`."""

_STOPS = StepRequest.STOP | StepRequest.STOP_NOW


def name_of(callback: Callback) -> str:
    """Return the name of a callback: the key of its settings and its state."""
    return callback.name or type(callback).__name__


def check_callbacks(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return the callbacks by name.

    Raises:
        ConfigError: two callbacks have the same name or one that of a section of the timers, or a
            method is misspelled or does not accept the arguments of the interface.
    """
    by_name: dict[str, Callback] = {}
    for callback in callbacks:
        name = name_of(callback)
        if name in by_name:
            raise ConfigError(
                f"callback {name}: two callbacks have this name, under which checkpoints store "
                f"their state. Set `name` of one of them, for example to {name}2."
            )
        if name in SECTION_LEVELS:
            raise ConfigError(
                f"callback {name}: time_{name}_ms is the time of a section of the step. Set `name` "
                f"to another one, for example to {name}2."
            )
        _check_methods(name, type(callback))
        by_name[name] = callback
    return by_name


def decides_update(callback: Callback) -> bool:
    """Return whether a callback defines `before_update`, whose requests must be equal on all
    ranks."""
    return type(callback).before_update is not Callback.before_update


def _combine(requests: Sequence[tuple[StepRequest, str]]) -> StepRequest:
    return functools.reduce(operator.or_, (kinds for kinds, _ in requests), StepRequest.NONE)


MAX_LISTED_RANKS = 8
"""Ranks up to which the log lists those that request the same."""


def _describe_requesters(
    kind: StepRequest, gathered: Sequence[object], ranks: Sequence[int]
) -> str:
    """Return the callbacks that request `kind`, with their ranks. `gathered`: the requests and
    names of each rank."""
    ranks_by_name: dict[str, list[int]] = {}
    for rank, sent in zip(ranks, gathered, strict=True):
        for kinds, name in sent if isinstance(sent, list) else ():
            if kind in StepRequest(kinds) and rank not in ranks_by_name.setdefault(name, []):
                ranks_by_name[name].append(rank)
    texts = []
    for name, requesting in ranks_by_name.items():
        if len(requesting) > MAX_LISTED_RANKS:
            texts.append(f"callback {name} ({len(requesting)} of {len(ranks)} ranks)")
        else:
            texts += [f"callback {name} (rank {rank})" for rank in requesting]
    return ", ".join(texts)


def _show(kind: StepRequest) -> str:
    return str(kind.name).lower().replace("_", " ")


def _check_equal_requests(
    requests: Sequence[tuple[StepRequest, str]], step: int, mesh: Mesh
) -> None:
    """Compare the requests of `before_update` over ranks. Collective.

    Raises:
        CallbackError: on every rank: they differ.
    """
    described = ", ".join(f"{name}: {kinds}" for kinds, name in requests) or "none"
    gathered = gather_objects(described, mesh.world)
    for rank, other in zip(mesh.world.ranks, gathered, strict=True):
        if other != gathered[0]:
            raise CallbackError(
                f"step {step}: callbacks request different actions in before_update: {gathered[0]} "
                f"on rank {mesh.world.ranks[0]}, {other} on rank {rank}. Decide from `stats` "
                "alone, which is equal on all ranks, or return the request from after_backward."
            )


def _check_methods(name: str, cls: type[Callback]) -> None:
    """Check the names and parameters of the methods that a callback overrides.

    Raises:
        ConfigError: a method is misspelled, or does not accept the arguments of the interface.
    """
    interface = {each for each in vars(Callback) if inspect.isfunction(getattr(Callback, each))}
    for method in dir(cls):
        if method in interface:
            parameters = inspect.signature(getattr(Callback, method)).parameters
            if not callable(getattr(cls, method)):
                raise ConfigError(
                    f"callback {name}: {method}={getattr(cls, method)!r} is not a method. Define "
                    f"it as {method}({', '.join(parameters)})."
                )
            try:
                inspect.signature(getattr(cls, method)).bind(*parameters)
            except TypeError as error:
                raise ConfigError(
                    f"callback {name}: {method}{inspect.signature(getattr(cls, method))} does not "
                    f"accept the arguments of a callback ({error}). Define it as "
                    f"{method}({', '.join(parameters)})."
                ) from error
        elif method.startswith(("on_", "before_", "after_")):
            raise ConfigError(
                f"callback {name}: {method} is not called by the training loop."
                f"{did_you_mean(method, interface)} Use one of {', '.join(sorted(interface))}, or "
                "another name for an own method."
            )


# --- callbacks that a user names, and their settings `callbacks.NAME.field`


def configure_callbacks(run: TrainRun, callbacks: Sequence[Callback]) -> TrainRun:
    """Set `config` of the callbacks that the settings `callbacks.NAME` name; return the run with
    the defaults of these settings filled in.

    Raises:
        ConfigError: a callback is not valid, or there is no such callback or setting, or a value is
            not valid; all problems of settings together.
    """
    by_name = check_callbacks(callbacks)
    problems: list[str] = []
    for name, values in run.callbacks.items():
        if values is None or name in by_name:
            continue
        problems.append(
            f"callbacks.{name}: this run has no callback of this name."
            f"{did_you_mean(name, by_name)} Add it with --callback package.module:Class or "
            f"train.callbacks, or remove its settings with --callbacks.{name} none."
        )
    for name, callback in by_name.items():
        problems += _configure(callback, f"callbacks.{name}", run.callbacks.get(name) or {})
    raise_all(problems)
    resolved: dict[str, dict[str, Plain] | None] = {
        name: to_dict(by_name[name].config)
        for name, values in run.callbacks.items()
        if values is not None
    }
    return replace(run, callbacks=resolved)


def _configure(callback: Callback, path: str, given: Mapping[str, Plain]) -> list[str]:
    """Set `config` of a callback to its values with those of the settings; return the problems."""
    config_class = type(callback).Config
    names = [*field_types(config_class)]
    listed = ", ".join(f"{path}.{name}" for name in names)
    problems = [
        f"{path}.{name}={value}: the callback has no such setting."
        f"{did_you_mean(name, names)} {f'Use one of {listed}' if names else 'It has none'}."
        for name, value in given.items()
        if name not in names
    ]
    own = to_dict(callback.config) if "config" in vars(callback) else {}
    values = own | {name: value for name, value in given.items() if name in names}
    config = build_section(config_class, values, path, problems)
    if config is not None:
        problems += range_problems(config, path)
        callback.config = config
    return problems


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Import and create the callbacks of `--callback`, each `package.module:Class`.

    The current folder is searched after the installed packages.

    Raises:
        ConfigError: a name is not of this form, its module cannot be imported, or its class is not
            a callback that can be created without arguments.
    """
    if names and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return [_create(_import_class(name), f"--callback={name}") for name in names]


def load_installed_callbacks(names: Sequence[str]) -> list[Callback]:
    """Create the callbacks of `train.callbacks`, which are installed entry points; the rules have
    checked the names.

    Raises:
        ConfigError: the object of an entry point is not a callback class.
    """
    points = {point.name: point for point in entry_points(group=CALLBACK_GROUP)}
    return [_create(points[name].load(), f"train.callbacks={name}") for name in names]


def _import_class(name: str) -> object:
    module_name, colon, class_name = name.partition(":")
    if not (colon and module_name and class_name):
        raise ConfigError(
            f"--callback={name} does not name a class. Use --callback package.module:Class; entry "
            "points of installed packages are named in train.callbacks."
        )
    if module_name.startswith("."):
        raise ConfigError(
            f"--callback={name}: a relative module name has no package that it refers to. Use "
            f"--callback {name.lstrip('.')}."
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"--callback={name}: importing {module_name} failed: {error}. Install "
                f"{error.name}, or remove the option."
            ) from error
        raise ConfigError(
            f"--callback={name}: there is no module {error.name}."
            f"{did_you_mean(error.name, _list_modules(error.name))} It must be installed or in the "
            "current folder."
        ) from error
    classes = [
        each
        for each, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Callback) and value is not Callback
    ]
    if not hasattr(module, class_name):
        raise ConfigError(
            f"--callback={name}: {module_name} has no {class_name}."
            f"{did_you_mean(class_name, classes)} Use one of its callbacks: "
            f"{', '.join(classes) or 'it has none'}."
        )
    return getattr(module, class_name)


def _list_modules(name: str) -> list[str]:
    """Return the modules of the package of `name`, or the top-level modules."""
    package, dot, _ = name.rpartition(".")
    path = getattr(sys.modules.get(package), "__path__", None) if dot else None
    return [f"{package}{dot}{module.name}" for module in pkgutil.iter_modules(path)]


def _create(cls: object, source: str) -> Callback:
    if not (inspect.isclass(cls) and issubclass(cls, Callback)):
        raise ConfigError(
            f"{source} is not a subclass of megalith.train.callbacks.base.Callback. Use a class "
            "that is derived from it."
        )
    required = [
        parameter.name
        for parameter in inspect.signature(cls).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if required:
        raise ConfigError(
            f"{source} cannot be created without arguments: {cls.__name__} requires "
            f"{', '.join(required)}. Set defaults for them, or pass the callback to run_training."
        )
    return cls()
