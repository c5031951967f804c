"""Faults planted in one rank of a run: classified, attributed to the rank, and acted on."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.load import open_checkpoint
from megalith.data.loader import StepBatches
from megalith.errors import CallbackError, DataError
from megalith.observe.metrics import read_metrics
from megalith.parallel.grad_sync import byte_checksum
from megalith.parallel.group import gather_objects
from megalith.parallel.mesh import build_mesh
from megalith.plan import fault_policy
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks import fault_detection
from megalith.train.callbacks.base import Callback, FinishedStep, Outcome, RunView, StepMetrics
from megalith.train.callbacks.fault_detection import (
    RERUN_STATS_FILE,
    SUSPECTS,
    read_suspect_exits,
)
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from megalith.train.step import StepRequest

CPU = torch.device("cpu")
FAULT_STEP = 6
MIN_ACCEPTED_STEPS = 4
"""Accepted steps before spikes are detected, in these short runs."""
BASE = {
    "train.steps": "8",
    "train.eval_steps": "0",
    "schedule.warmup_steps": "0",
    "checkpoint.every": "3",
    "checkpoint.keep": "none",
    "fault_detector.spike": "rerun",
}
LAYOUTS: dict[str, dict[str, str]] = {
    "dp2": {"parallel.dp": "2"},
    "dp3": {"parallel.dp": "3"},
    "dp4": {"parallel.dp": "4"},
    "zero1": {"parallel.dp": "2", "parallel.zero": "1"},
    "zero2": {"parallel.dp": "2", "parallel.zero": "2"},
    "zero3": {"parallel.dp": "2", "parallel.zero": "3"},
    "tp2": {"parallel.tp": "2"},
    "pp2": {"parallel.pp": "2"},
    "dp2_tp2": {"parallel.dp": "2", "parallel.tp": "2"},
    "dp1": {},
}


@dataclass(frozen=True)
class Fault:
    """A planted fault. `persistent`: also in reruns and later steps."""

    target: str
    persistent: bool = False
    rank: int = 1
    value: float = math.nan
    step: int = FAULT_STEP
    stops: bool = False
    """Whether the rank requests to stop in the same step, as after a signal."""


class Planted(Callback):
    """Plants a fault in one rank, or in the samples of its first run of the step."""

    collective = True

    def __init__(self, fault: Fault | None) -> None:
        self.fault = fault
        self.weights: list[int] = []
        self.num_forward = 0
        self._step = self._num_faults = 0
        self._bad_sample: int | None = None

    def on_start(self, run: RunView) -> None:
        self._run, fault = run, self.fault
        if fault is None:
            return
        trainer, is_faulty = run.prepared.trainer, run.mesh.world.rank == fault.rank
        if fault.target == "sample":
            for chunk in run.chunks:
                chunk.register_forward_hook(self._corrupt_sample, with_kwargs=False)
        elif is_faulty and fault.target == "activation":
            for chunk in run.chunks:
                chunk.register_forward_hook(self._corrupt_activation)
        elif is_faulty and fault.target == "loss":
            model = trainer.pipeline_model
            object.__setattr__(model, "objective", Corrupted(model.objective, self))
        elif is_faulty and fault.target == "gradient":
            data: Any = trainer.data  # Any: replaces methods
            if hasattr(data, "units"):  # ZeRO-3
                for unit in data.units:
                    if hasattr(unit, "record_message"):
                        unit.record_message = partial(self._corrupt_message, unit.record_message)
            else:
                data._start_next = partial(self._corrupt_bucket, data, data._start_next)

    def _corrupt_bucket(self, data: Any, start_next: Callable[[], None]) -> None:
        if data._next == 0 and self.is_due():
            first = data.plan.buckets[0].members[0]
            data._view(first).view(-1)[5] = self.fault.value if self.fault else 0.0
        start_next()

    def _corrupt_message(
        self, record: Callable[[Tensor, int], None], message: Tensor, ranks: int
    ) -> None:
        if self.is_due():
            message.view(-1)[5] = self.fault.value if self.fault else 0.0
        record(message, ranks)

    def is_due(self) -> bool:
        """Return whether the fault occurs now, and count it."""
        fault = self.fault
        assert fault is not None
        if self._step < fault.step or (self._num_faults and not fault.persistent):
            return False
        self._num_faults += 1
        return True

    def before_step(self, step: int, batches: StepBatches) -> None:
        self._step, fault = step, self.fault
        if fault is None or step != fault.step:
            return
        if fault.stops:
            self._run.request(StepRequest.STOP)
        world = self._run.mesh.world
        sums = gather_objects(int(batches.microbatches[0].ids.sum()), world)
        self._bad_sample = int(str(sums[fault.rank]))
        if world.rank == fault.rank and fault.target in ("weight", "moment"):
            trainer = self._run.prepared.trainer
            trainer.data.wait_params()
            state = trainer.optimizer.slots[1].state
            tensor = trainer.data.local_params[1].weight if fault.target == "weight" else None
            tensor = state["exp_avg"] if tensor is None else tensor
            tensor.detach().view(-1)[3] = fault.value

    def _corrupt_sample(self, _chunk: object, inputs: Sequence[Any], output: Any) -> None:
        if self._step == FAULT_STEP and int(inputs[0].sum()) == self._bad_sample:
            output["hidden"].detach()[0, 0] = math.nan

    def _corrupt_activation(self, _chunk: object, _inputs: object, output: Any) -> None:
        if self.is_due():
            output["hidden"].detach()[0, 0] = self.fault.value if self.fault else 0.0

    def after_step(self, finished: FinishedStep, metrics: StepMetrics) -> None:
        trainer = self._run.prepared.trainer
        trainer.data.wait_params()
        self.weights.append(byte_checksum([param.weight for param in trainer.data.local_params]))


class Corrupted:
    """Training losses that are wrong when a fault is due."""

    def __init__(self, objective: Any, planted: Planted) -> None:  # Any: wraps an Objective
        self._objective, self._planted = objective, planted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def __call__(self, *arguments: Any) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = self._objective(*arguments)
        assert self._planted.fault is not None
        if self._planted.is_due():
            return {name: loss * self._planted.fault.value for name, loss in losses.items()}
        return losses


Report = tuple[Outcome | str, list[int]]
"""Outcome or text of the error, and checksums of the weights after each step."""


@dataclass(frozen=True)
class Case:
    """One run: its fault, its folder, settings and hosts."""

    path: Path
    fault: Fault | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    host: str = "host"


def _train_rank(rank: int, world: int, layout: str, cases: Sequence[Case]) -> list[Report]:
    """Train on one rank, one run after the other."""
    reports: list[Report] = []
    for case in cases:
        run = tiny_run(BASE | LAYOUTS[layout] | dict(case.settings))
        mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
        planted = Planted(case.fault)
        names: Callable[[torch.device], tuple[str, str]] = partial(_name_machine, case.host, rank)
        with (
            patched(fault_detection, "describe_machine", names),
            patched(fault_policy, "MIN_ACCEPTED_STEPS", MIN_ACCEPTED_STEPS),
        ):
            try:
                outcome = run_training(
                    run, RunFolder(case.path), mesh, CPU, show=False, callbacks=[planted]
                )
            except DataError as error:
                reports.append((str(error), planted.weights))
            else:
                reports.append((outcome, planted.weights))
    return reports


def _name_machine(host: str, rank: int, device: torch.device) -> tuple[str, str]:
    return f"{host}{rank}", device.type


def train(layout: str, *cases: Case) -> list[list[Report]]:
    """Run cases in a layout, in which every rank has a host of its own; return the reports of all
    ranks by case."""
    parallel = tiny_run(BASE | LAYOUTS[layout]).parallel
    world = parallel.tp * parallel.pp * (parallel.dp or 1)
    seconds = 20.0 * max(3, len(cases))
    by_rank = run_ranks(_train_rank, world, layout, cases, timeout=seconds)
    return [[reports[number] for reports in by_rank] for number in range(len(cases))]


def suspects(path: Path) -> list[tuple[str, int, str, bool]]:
    """Return kind, rank, host and whether the run has ended, of each line of suspects.jsonl."""
    file = path / SUSPECTS
    lines = file.read_text().splitlines() if file.exists() else []
    records = [json.loads(line) for line in lines]
    return [(r["kind"], r["rank"], r["host"], r["exits"]) for r in records]


def saved_steps(path: Path) -> list[int]:
    return sorted(int(each.name[5:]) for each in (path / "checkpoints").glob("step_*"))


def replica_ranks(layout: str, rank: int, settings: Mapping[str, str]) -> set[int]:
    """Return the ranks of the data-parallel replica of a rank, or of its expert-parallel group."""
    parallel = tiny_run(BASE | LAYOUTS[layout] | dict(settings)).parallel
    size = parallel.tp * parallel.pp * parallel.ep
    first = rank - rank % size
    return set(range(first, first + size))


def check_case(
    layout: str, clean: list[Report], reports: list[Report], case: Case, expected: str
) -> None:
    """Check classification, rank, outcome and weights of a run with a planted fault. `expected`:
    the kind in suspects.jsonl, or `model`."""
    fault = case.fault
    assert fault is not None
    reached = FAULT_STEP - 1
    for (outcome, weights), (_, clean_weights) in zip(reports, clean, strict=True):
        assert weights[:reached] == clean_weights[:reached], fault
        if expected == "transient":
            assert outcome == Outcome("done", 8), fault
            assert weights == clean_weights, fault  # the second result is used
        elif expected == "model":
            assert outcome == Outcome("done", 8), fault
            assert weights[reached] == weights[reached - 1] != weights[reached + 1], fault
        else:
            assert isinstance(outcome, Outcome) and outcome.kind == "suspect", (fault, outcome)
            assert outcome.step == reached, fault
    records = suspects(case.path)
    if expected == "model":
        assert records == [], fault
        return
    assert {record[0] for record in records} == {expected}, (fault, records)
    ranks = {record[1] for record in records}
    assert fault.rank in ranks, (fault, records)
    if expected == "undecided" or fault.target in ("activation", "loss"):
        # wrong values reach the other ranks of the replica, but no other replica
        assert ranks <= replica_ranks(layout, fault.rank, case.settings), (fault, records)
    else:
        exits = expected != "transient"
        assert records == [(expected, fault.rank, f"host{fault.rank}", exits)], fault
    keeps_weights = fault.target not in ("weight", "moment")
    if expected != "transient":
        assert (saved_steps(case.path)[-1] == reached) == keeps_weights, fault


def list_cases(path: Path, layout: str) -> list[tuple[Case, str]]:
    """Return planted faults and their causes."""
    alone = LAYOUTS[layout].get("parallel.dp") is None
    persistent = "undecided" if alone else "persistent"
    settings = {"fault_detector.nonfinite": "rerun"}
    faults = [
        (Fault(target, persistent=lasts, value=value), persistent if lasts else "transient")
        for target, value in (
            ("gradient", math.nan),
            ("gradient", 1e6),
            ("activation", math.nan),
            ("loss", math.inf),
            ("loss", 1e4),
        )
        for lasts in (False, True)
    ]
    if not alone:
        faults += [(Fault("sample", persistent=True), "model")]
        if layout in ("dp2", "dp3"):  # every rank has its own copy of the weights
            faults += [(Fault("weight", value=1e9), persistent), (Fault("weight"), persistent)]
    return [
        (Case(path / str(number), fault, settings), expected)
        for number, (fault, expected) in enumerate(faults)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("dp1", "dp4")])
def test_planted_faults_are_classified_and_attributed(tmp_path: Path, layout: str) -> None:
    cases = list_cases(tmp_path, layout)
    every = Case(tmp_path / "every", settings={"fault_detector.rerun_every": "1"})
    clean, reruns, *reports = train(
        layout, Case(tmp_path / "clean"), every, *(case for case, _ in cases)
    )
    assert reruns == clean
    assert suspects(tmp_path / "clean") == suspects(every.path) == []
    for report, (case, expected) in zip(reports, cases, strict=True):
        check_case(layout, clean, report, case, expected)


EXPERTS = {
    "model.moe.num_experts": "4",
    "model.moe.top_k": "2",
    "model.moe.ffn_hidden_size": "10",
    "parallel.ep": "2",
}
UNEVEN = {
    "train.global_batch_size": "3",
    "train.micro_batch_size": "1",
    "train.uneven_batch": "allow",
}
VARIANTS = {
    "experts of all ranks": ("dp2", EXPERTS),
    "two expert groups": ("dp4", EXPERTS),
    "unequal numbers of microbatches": ("dp2", UNEVEN),
    "unequal numbers, ZeRO-3": ("zero3", UNEVEN),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_shifted_samples_with_experts_and_uneven_batches(tmp_path: Path, variant: str) -> None:
    layout, settings = VARIANTS[variant]
    settings = settings | {"fault_detector.nonfinite": "rerun"}
    faults = [
        (Fault("sample", persistent=True), "model"),
        (Fault("gradient", persistent=True), "persistent"),
        (Fault("gradient", persistent=True, value=1e6), "persistent"),
        (Fault("loss", value=1e4), "transient"),
        (Fault("loss", persistent=True, value=1e4), "persistent"),
    ]
    cases = [
        (Case(tmp_path / str(number), fault, settings), expected)
        for number, (fault, expected) in enumerate(faults)
    ]
    every = {"fault_detector.rerun_every": "1"}
    clean, reruns, *reports = train(
        layout,
        Case(tmp_path / "clean", settings=settings),
        Case(tmp_path / "every", settings=settings | every),
        *(case for case, _ in cases),
    )
    assert reruns == clean
    assert suspects(tmp_path / "every") == []
    for report, (case, expected) in zip(reports, cases, strict=True):
        check_case(layout, clean, report, case, expected)


def test_reruns_of_one_rank_without_a_fault_find_none(tmp_path: Path) -> None:
    every = {"train.steps": "4", "fault_detector.rerun_every": "1"}
    assert _train_rank(0, 1, "dp1", [Case(tmp_path, settings=every)])[0][0] == Outcome("done", 4)
    assert suspects(tmp_path) == []
    log = (tmp_path / "log.txt").read_text()
    assert log.count("rerun, requested by callback FaultDetector") == 4


def test_faults_of_one_of_two_ranks_and_of_samples(tmp_path: Path) -> None:
    every = {"fault_detector.rerun_every": "2"}
    faults = [
        (
            Case(tmp_path / "persistent", Fault("gradient", persistent=True, value=1e6)),
            "persistent",
        ),
        (Case(tmp_path / "model", Fault("sample", persistent=True)), "model"),
        # no statistic shows this value
        (Case(tmp_path / "silent", Fault("gradient", value=1e-3), every), "transient"),
    ]
    clean, *reports = train(
        "dp2",
        Case(tmp_path / "clean", settings={"fault_detector.report_stats": "true"} | every),
        *(case for case, _ in faults),
    )
    for report, (case, expected) in zip(reports, faults, strict=True):
        check_case("dp2", clean, report, case, expected)
    assert suspects(tmp_path / "clean") == []
    file = tmp_path / "clean" / RERUN_STATS_FILE
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    compared = {(row["step"], row["rank"]) for row in rows}
    assert compared == set(product((2, 4, 6, 8), (0, 1)))
    assert all(row["num_different"] == row["max_difference"] == 0 for row in rows)
    log = (tmp_path / "persistent" / "log.txt").read_text()
    assert "so its machine is at fault" in log and "rank 1 (host1, cpu)" in log
    state = open_checkpoint(tmp_path / "persistent" / "checkpoints" / "step_0000005").state
    assert state["train"]["step"] == 5 and state["train"]["consumed_samples"] == 60


def _train_alone(path: Path, fault: Fault, settings: Mapping[str, str], host: str) -> Outcome | str:
    """Train on one process, in which the fault occurs."""
    case = Case(path, replace(fault, rank=0), settings, host)
    return _train_rank(0, 1, "dp1", [case])[0][0]


def test_undecided_fault_ends_the_run_once_and_is_of_the_model_elsewhere(tmp_path: Path) -> None:
    fault = Fault("gradient", persistent=True)
    rerun = {"fault_detector.nonfinite": "rerun"}
    outcome = _train_alone(tmp_path, fault, rerun, "first")
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.step, outcome.saved) == ("suspect", 5, True)
    assert "no other rank can compute the samples of rank 0 (first0, cpu" in outcome.reason
    assert suspects(tmp_path) == [("undecided", 0, "first0", True)]
    assert len(read_suspect_exits(tmp_path)) == 1
    again = _train_alone(tmp_path, fault, rerun, "first")
    assert isinstance(again, str)
    assert again.startswith("step 6: loss ") and "Exclude these hosts, or reduce" in again
    assert "The run has ended at this step before because of the same fault" in again
    elsewhere = _train_alone(tmp_path, replace(fault, step=6, persistent=False), rerun, "second")
    assert elsewhere == Outcome("done", 8)


def test_unset_action_skips_a_step_that_no_other_rank_can_check(tmp_path: Path) -> None:
    fault = Fault("sample", persistent=True)
    assert _train_alone(tmp_path, fault, {}, "host") == Outcome("done", 8)
    assert not (tmp_path / SUSPECTS).exists()
    log = (tmp_path / "log.txt").read_text()
    assert "step 6: loss nan, gradient norm nan; repeating the step" in log
    assert "step 6: loss nan, gradient norm nan; no update" in log


def test_corrupt_optimizer_state_is_found_and_not_saved(tmp_path: Path) -> None:
    outcome = _train_alone(tmp_path, Fault("moment", value=1e9), {}, "host")
    assert isinstance(outcome, Outcome)
    assert (outcome.kind, outcome.step, outcome.saved) == ("suspect", 6, False)
    assert "the memory of rank 0 (host0, cpu, in " in outcome.reason
    assert "training cannot produce" in outcome.reason
    assert suspects(tmp_path) == [("state", 0, "host0", True)]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kind"), [("dp2", "persistent"), ("zero1", "state")])
@pytest.mark.parametrize("value", [1e9, -math.inf])
def test_wrong_moments_are_attributed_to_their_rank(
    tmp_path: Path, layout: str, kind: str, value: float
) -> None:
    case = Case(tmp_path, Fault("moment", value=value), {"checkpoint.every": "5"})
    ((report, _),) = train(layout, case)
    assert isinstance(report[0], Outcome) and report[0].kind == "suspect"
    assert (report[0].step, report[0].saved) == (6, False)
    assert suspects(tmp_path) == [(kind, 1, "host1", True)]
    assert saved_steps(tmp_path) == [5]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("stop", "step 6: spike of loss 8"),
        ("warn", "step 6: spike of loss 8"),
        ("skip", "step 6: skip, requested by callback FaultDetector"),
    ],
)
def test_actions_after_a_spike(tmp_path: Path, action: str, message: str) -> None:
    fault = Fault("loss", value=1e4)
    outcome = _train_alone(tmp_path, fault, {"fault_detector.spike": action}, "host")
    rows = {row["step"]: row for row in read_metrics(tmp_path / "metrics.jsonl")}
    if action == "stop":
        assert isinstance(outcome, str) and outcome.startswith(message)
        assert "Reduce schedule.lr, check the data" in outcome
        assert saved_steps(tmp_path) == [3] and 6 not in rows
        state = open_checkpoint(tmp_path / "checkpoints" / "diverged" / "step_0000005").state
        assert (state["healthy"], state["train"]["step"]) == (False, 5)
        return
    assert outcome == Outcome("done", 8)
    assert message in (tmp_path / "log.txt").read_text()
    assert "spike_rate" not in rows[5] and rows[6]["spike_rate"] == 1 / 6
    assert rows[8]["skipped"] == int(action == "skip")


def test_rollback_is_requested_with_the_bad_step(tmp_path: Path) -> None:
    settings = {"fault_detector.spike": "rollback", "fault_detector.rollback_steps": "0"}
    fault = Fault("loss", value=1e4)
    assert _train_alone(tmp_path, fault, settings, "host") == Outcome("done", 8)
    log = (tmp_path / "log.txt").read_text()
    assert "step 6: spike of loss 8" in log
    assert "step 6: rollback, requested by callback FaultDetector" in log
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert max(row["loss"] for row in rows) < 10


@pytest.mark.parametrize("action", ["rollback", "skip"])
def test_update_size_shows_corrupt_optimizer_state(tmp_path: Path, action: str) -> None:
    settings = {
        "fault_detector.spike": action,
        "fault_detector.check_update_size": "true",
        "fault_detector.rollback_steps": "0",
        "optim.count_zeros": "true",
    }
    fault = Fault("moment", value=1e3)
    if action == "rollback":  # the fault recurs after each rollback
        with pytest.raises(CallbackError, match="step 7: a callback requested a rollback after 3"):
            _train_alone(tmp_path, fault, settings, "host")
    else:
        _train_alone(tmp_path, fault, settings, "host")
    log = (tmp_path / "log.txt").read_text()
    assert "step 6: spike of update_norm" in log
    if action == "skip":
        assert "the update is applied (fault_detector.spike=rollback undoes it)" in log
        norms = [row.get("update_norm") for row in read_metrics(tmp_path / "metrics.jsonl")]
        assert norms[5] > 100 * norms[4] and norms[6:] == [None, None]
    else:
        assert log.count("step 7: rolled back to the checkpoint of step 3") == 3


@pytest.mark.slow
def test_error_after_shifted_reruns_names_the_rank_of_the_samples(tmp_path: Path) -> None:
    settings = {"optim.nonfinite_grad": "raise", "fault_detector.model_fault": "warn"}
    case = Case(tmp_path, Fault("sample", persistent=True), settings)
    ((report, other),) = train("dp2", case)
    assert isinstance(report[0], str) and report == other
    assert " on rank 1. Reduce schedule.lr" in report[0]
    assert " on rank 0" not in report[0]
    assert suspects(tmp_path) == []


def test_fault_is_classified_before_a_requested_stop(tmp_path: Path) -> None:
    """An incomplete classification is never saved as a state to resume."""
    fault = Fault("gradient", persistent=False, stops=True)
    outcome = _train_alone(tmp_path, fault, {"fault_detector.nonfinite": "rerun"}, "host")
    assert isinstance(outcome, Outcome) and (outcome.kind, outcome.step) == ("stopped", 6)
    assert suspects(tmp_path) == [("transient", 0, "host0", False)]
    state = open_checkpoint(tmp_path / "checkpoints" / "step_0000006").state["train"]
    assert (state["step"], state["skipped"]) == (6, 0)


def test_bad_step_of_a_run_that_is_stopped_is_not_applied(tmp_path: Path) -> None:
    settings = {"fault_detector.spike": "rollback"}
    fault = Fault("loss", value=1e4, stops=True)
    outcome = _train_alone(tmp_path, fault, settings, "host")
    assert isinstance(outcome, Outcome) and (outcome.kind, outcome.step) == ("stopped", 6)
    assert (
        "rollback, requested by callback FaultDetector (rank 0), gives way to stop"
        in (tmp_path / "log.txt").read_text()
    )
    state = open_checkpoint(tmp_path / "checkpoints" / "step_0000006").state["train"]
    assert (state["step"], state["skipped"]) == (6, 1)


def test_history_of_statistics_survives_a_restart(tmp_path: Path) -> None:
    for steps in ("6", "8"):
        _train_rank(0, 1, "dp1", [Case(tmp_path, settings={"train.steps": steps})])
    states = [
        open_checkpoint(tmp_path / "checkpoints" / f"step_000000{step}").state["callbacks"]
        for step in (6, 8)
    ]
    first, last = (state["FaultDetector"]["values"]["loss"] for state in states)
    assert (len(first), len(last)) == (6, 8) and last[:6] == first
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert last == [row["loss"] for row in rows]


RAMP_UP = "[{size: 4}, {size: 8, samples: 400}, {size: 12, samples: 2000}]"
CLEAN: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16": {"precision.params": "bf16"},
    "fp16": {"precision.params": "fp16", "precision.loss_scale.window": "50"},
    "ramp_up": {"train.batch_size_schedule": RAMP_UP},
    "experts": {
        "model.moe.num_experts": "4",
        "model.moe.top_k": "2",
        "model.moe.ffn_hidden_size": "10",
        "train.z_loss": "1e-4",
    },
    "sgd": {"optim.kind": "sgd", "model.mtp.num_layers": "1", "schedule.lr": "0.02"},
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", CLEAN)
def test_clean_training_raises_no_alarm(tmp_path: Path, recipe: str) -> None:
    settings = {
        "train.steps": "500",
        "train.eval_steps": "0",
        "schedule.warmup_steps": "40",
        "checkpoint.every": "0",
        "observe.plots": "false",
    }
    run = tiny_run(settings | CLEAN[recipe])
    mesh = build_mesh(model_grid(run.parallel, run.model, 1), rank=0)
    outcome = run_training(run, RunFolder(tmp_path), mesh, CPU, show=False)
    assert outcome == Outcome("done", 500)
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert len(rows) == 500 and not any("spike_rate" in row for row in rows)
    log = (tmp_path / "log.txt").read_text()
    assert "repeating the step" not in log and "spike" not in log
    assert suspects(tmp_path) == []
