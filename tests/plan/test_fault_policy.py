"""Decisions about numeric faults: spikes, and the cause of a fault from simulated reruns."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from megalith.config.fault_detection import FaultDetectorConfig
from megalith.plan.fault_policy import (
    MAX_SPIKES_IN_A_ROW,
    MIN_ACCEPTED_STEPS,
    SPIKE_RATE_STEPS,
    Diagnosis,
    RankGradients,
    StepHistory,
    StepRun,
    SuspectExit,
    bound_moment_ratio,
    choose_action,
    choose_first_action,
    diagnose_runs,
    find_spikes,
    plan_sample_shift,
)

MAX_RERUNS = 3


@dataclass(frozen=True)
class Layout:
    """Data-parallel replicas of several ranks; rank = position + replica * positions."""

    dp: int
    positions: int = 1

    @property
    def dp_groups(self) -> list[list[int]]:
        return [
            [position + replica * self.positions for replica in range(self.dp)]
            for position in range(self.positions)
        ]


Corrupt = Callable[[int, int, int], float | None]
"""(run, rank, sample) -> a wrong norm; None: the right one."""


def simulate(
    layout: Layout, corrupt: Corrupt, *, first_passes: bool | None = None
) -> tuple[Diagnosis, list[StepRun]]:
    """Repeat a step as the loop does until its cause is known. The statistics of a run pass the
    checks if all norms are below 10."""
    runs: list[StepRun] = []
    passes: list[bool] = []
    shift = 0
    while True:
        ranks = []
        for rank in range(layout.dp * layout.positions):
            replica, position = divmod(rank, layout.positions)
            sample = (replica - shift) % layout.dp
            norm = 1 + sample / 7 + position / 31
            wrong = corrupt(len(runs), rank, sample)
            norm = norm if wrong is None else wrong
            ranks.append(RankGradients((hash(str(norm)), 1), norm=norm))
        runs.append(StepRun(tuple(ranks), shift))
        good = all(each.norm < 10 for each in ranks)
        passes.append(first_passes if first_passes is not None and len(runs) == 1 else good)
        diagnosis = diagnose_runs(runs, passes, layout.dp_groups, max_reruns=MAX_RERUNS)
        if diagnosis.cause is not None:
            return diagnosis, runs
        shift = diagnosis.shift
        assert len(runs) <= MAX_RERUNS, "too many reruns"


LAYOUTS = [Layout(1), Layout(2), Layout(3), Layout(5), Layout(1, 2), Layout(2, 2), Layout(3, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 100.0])
def test_transient_faults_are_attributed_to_their_ranks(layout: Layout, wrong: float) -> None:
    for seed in range(50):
        num_ranks = layout.dp * layout.positions
        ranks = set(random.Random(seed).sample(range(num_ranks), min(2, num_ranks)))
        diagnosis, runs = simulate(
            layout, lambda run, rank, _, ranks=ranks: wrong if run == 0 and rank in ranks else None
        )
        assert diagnosis == Diagnosis("transient", tuple(sorted(ranks))), seed
        assert len(runs) == 2, seed


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each.dp > 1], ids=str)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, 100.0])
def test_faults_that_stay_on_a_rank_are_persistent(layout: Layout, wrong: float) -> None:
    for faulty in range(layout.dp * layout.positions):
        diagnosis, runs = simulate(
            layout, lambda _, rank, __, faulty=faulty: wrong if rank == faulty else None
        )
        assert diagnosis == Diagnosis("persistent", (faulty,))
        assert [run.shift for run in runs] == [0, 0, 1]


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each.dp > 1], ids=str)
def test_fault_of_a_whole_replica_names_its_ranks(layout: Layout) -> None:
    """An activation that is wrong on one rank reaches the other ranks of its replica."""
    for replica in range(layout.dp):
        first = replica * layout.positions
        ranks = tuple(range(first, first + layout.positions))
        diagnosis, _ = simulate(
            layout, lambda _, rank, __, ranks=ranks: 50.0 + rank if rank in ranks else None
        )
        assert diagnosis == Diagnosis("persistent", ranks)


@pytest.mark.parametrize("layout", [each for each in LAYOUTS if each.dp > 1], ids=str)
@pytest.mark.parametrize("wrong", [math.nan, 100.0])
def test_faults_that_move_with_the_samples_are_of_the_model(layout: Layout, wrong: float) -> None:
    for bad_samples in ({0}, {layout.dp - 1}, set(range(layout.dp))):
        diagnosis, _ = simulate(
            layout, lambda _, __, sample, bad=bad_samples: wrong if sample in bad else None
        )
        assert diagnosis == Diagnosis("model")


def test_one_replica_cannot_decide_between_machine_and_model() -> None:
    assert simulate(Layout(1), lambda *_: math.nan)[0] == Diagnosis("undecided", (0,))
    nan_on_second: Corrupt = lambda _, rank, __: math.nan if rank == 1 else None  # noqa: E731
    assert simulate(Layout(1, 3), nan_on_second)[0] == Diagnosis("undecided", (1,))
    all_large = simulate(Layout(1, 2), lambda *_: 100.0)[0]
    assert all_large == Diagnosis("undecided", (0, 1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_results_that_differ_each_time_are_persistent(layout: Layout) -> None:
    diagnosis, _ = simulate(layout, lambda run, rank, _: 100.0 + run if rank == 0 else None)
    assert diagnosis == Diagnosis("persistent", (0,))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("wrong_run", [0, 1])
def test_comparison_of_good_runs_finds_which_of_two_was_wrong(
    layout: Layout, wrong_run: int
) -> None:
    last = layout.dp * layout.positions - 1
    diagnosis, runs = simulate(
        layout, lambda run, rank, _: 2.0 if (run, rank) == (wrong_run, last) else None
    )
    assert diagnosis == Diagnosis("transient", (last,))
    assert len(runs) == 3
    assert simulate(layout, lambda *_: None) == (Diagnosis("none"), simulate(layout, no_fault)[1])


def no_fault(run: int, rank: int, sample: int) -> None:
    return None


def test_silent_results_that_differ_in_three_runs_are_persistent() -> None:
    diagnosis, _ = simulate(Layout(2), lambda run, rank, _: 2.0 + run if rank == 1 else None)
    assert diagnosis == Diagnosis("persistent", (1,))


def test_rerun_that_is_itself_wrong_does_not_hide_the_fault() -> None:
    """The first run is good, and the rerun that compares bits has a fault."""
    diagnosis, _ = simulate(Layout(2), lambda run, rank, _: 99.0 if (run, rank) == (1, 1) else None)
    assert diagnosis == Diagnosis("transient", (1,))


def test_difference_after_the_reduction_alone_names_its_rank() -> None:
    same = RankGradients((1,), norm=1.0, reduced_bits=(5,))
    other = RankGradients((1,), norm=1.0, reduced_bits=(6,))
    runs = [StepRun((same, other)), StepRun((same, same))]
    assert diagnose_runs(runs, [False, True], [[0, 1]], max_reruns=3) == Diagnosis(
        "transient", (1,)
    )


def test_tolerance_ignores_differences_of_the_order_of_additions() -> None:
    def run(norm: float, bits: int) -> StepRun:
        return StepRun((RankGradients((bits,), norm=norm), RankGradients((bits,), norm=1.0)))

    runs = [run(1.0, 1), run(1.00001, 2)]
    assert diagnose_runs(runs, [True, True], [[0, 1]], max_reruns=3, tolerance=1e-3).cause == "none"
    assert diagnose_runs(runs, [True, True], [[0, 1]], max_reruns=3).cause is None
    runs = [run(1.1, 1), run(1.0, 2)]
    found = diagnose_runs(runs, [False, True], [[0, 1]], max_reruns=3, tolerance=1e-3)
    assert found == Diagnosis("transient", (0,))
    runs = [run(math.nan, 1), run(1.0, 2)]
    found = diagnose_runs(runs, [False, True], [[0, 1]], max_reruns=3, tolerance=1e-3)
    assert found == Diagnosis("transient", (0,))


def test_random_faults_are_never_attributed_to_another_rank() -> None:
    for seed in range(2000):
        choose = random.Random(seed)
        layout = choose.choice([each for each in LAYOUTS if each.dp > 1])
        faulty = choose.randrange(layout.dp * layout.positions)
        wrong = choose.choice([math.nan, math.inf, 11.0, 1e6])
        kind = choose.choice(["transient", "persistent", "model"])
        bad_sample = choose.randrange(layout.dp)

        def corrupt(
            run: int,
            rank: int,
            sample: int,
            arguments: tuple[str, int, int, float] = (kind, faulty, bad_sample, wrong),
        ) -> float | None:
            kind, faulty, bad_sample, wrong = arguments
            if kind == "model":
                return wrong if sample == bad_sample else None
            return wrong if rank == faulty and (run == 0 or kind == "persistent") else None

        diagnosis, runs = simulate(layout, corrupt)
        assert diagnosis.cause == kind, seed
        assert diagnosis.ranks == (() if kind == "model" else (faulty,)), seed
        assert len(runs) <= 3, seed


def test_moments_of_any_gradients_are_within_their_bound() -> None:
    for seed in range(300):
        choose = random.Random(seed)
        beta1, beta2 = choose.choice([(0.9, 0.95), (0.9, 0.999), (0.0, 0.99), (0.8, 0.7)])
        bound, mean, square = bound_moment_ratio(beta1, beta2), 0.0, 0.0
        for _ in range(choose.randrange(1, 200)):
            # constant, alternating, bursts and growth, over many magnitudes
            magnitude = 10 ** choose.uniform(-6, 6)
            gradient = magnitude * choose.choice([1.0, -1.0, 0.0, choose.gauss(0, 1)])
            mean = beta1 * mean + (1 - beta1) * gradient
            square = beta2 * square + (1 - beta2) * gradient**2
            assert abs(mean) <= bound * math.sqrt(square) * (1 + 1e-9), seed
    assert bound_moment_ratio(0.99, 0.95) == math.inf
    assert bound_moment_ratio(0.0, 0.75) == 2


# --- actions


def choose(diagnosis: Diagnosis, exits: Sequence[SuspectExit] = (), **settings: object) -> str:
    config = FaultDetectorConfig(**settings)  # type: ignore[arg-type]  # values of the test
    return choose_action(
        diagnosis,
        config,
        failed_check="nonfinite",
        step=7,
        hosts=["a", "b"],
        exits=exits,
    )


def test_first_action_is_that_of_the_setting() -> None:
    actions = ("warn", "skip", "rerun", "rollback", "stop")
    assert [choose_first_action(action) for action in actions] == [
        "update",
        "skip",
        "rerun",
        "rollback",
        "stop",
    ]


def test_second_result_of_a_transient_fault_is_used() -> None:
    assert choose(Diagnosis("transient", (1,))) == "update"
    assert choose(Diagnosis("none")) == "update"


@pytest.mark.parametrize("model_fault", ["skip", "rollback", "stop"])
def test_model_fault_has_its_own_action(model_fault: str) -> None:
    assert choose(Diagnosis("model"), model_fault=model_fault) == model_fault
    assert choose(Diagnosis("model"), model_fault="warn") == "update"


def test_persistent_fault_exits_once_for_each_machine() -> None:
    fault = Diagnosis("persistent", (1,))
    assert choose(fault) == choose(Diagnosis("state", (1,))) == "exit"
    assert choose(fault, [SuspectExit(6, frozenset("b"))]) == "exit"  # of another step
    assert choose(fault, [SuspectExit(7, frozenset("a"))]) == "exit"
    assert choose(fault, [SuspectExit(7, frozenset("b"))]) == "exit_again"
    two = [SuspectExit(7, frozenset("c")), SuspectExit(7, frozenset("d"))]
    assert choose(fault, two) == "exit_again"


def test_undecided_fault_exits_once_and_is_of_the_model_if_it_recurs_elsewhere() -> None:
    fault = Diagnosis("undecided", (1,))
    assert choose(fault) == "skip"  # fault_detector.nonfinite is unset
    assert choose(fault, nonfinite="rerun") == "exit"
    assert choose(fault, [SuspectExit(7, frozenset("a"))], nonfinite="rerun") == "skip"
    assert choose(fault, [SuspectExit(7, frozenset("b"))], nonfinite="rerun") == "exit_again"


# --- spikes


def history(values: Sequence[float], name: str = "loss", window: int = 128) -> StepHistory:
    made = StepHistory()
    for value in values:
        made = made.accept({name: value}, window=window)
    return made


def test_spike_is_above_median_and_robust_deviation() -> None:
    for seed in range(20):
        choose = random.Random(seed)
        noisy = history([choose.gauss(3.0, 0.05) for _ in range(200)])
        assert len(noisy.values["loss"]) == 128
        assert find_spikes(noisy, {"loss": 3.3}, sigmas=6) == (), seed  # 6 sigma, not 1.5 * median
        assert find_spikes(noisy, {"loss": 4.4}, sigmas=6) == (), seed
        (spike,) = find_spikes(noisy, {"loss": 4.7, "other": 99.0}, sigmas=6)
        assert (spike.name, spike.value) == ("loss", 4.7), seed
        wide = history([choose.gauss(3.0, 0.5) for _ in range(200)])
        assert find_spikes(wide, {"loss": 4.7}, sigmas=6) == (), seed  # 1.5 * median, not 6 sigma
        assert find_spikes(wide, {"loss": 9.0}, sigmas=6), seed


def test_nothing_is_a_spike_before_32_accepted_steps_or_if_it_is_not_finite() -> None:
    assert find_spikes(history([1.0] * (MIN_ACCEPTED_STEPS - 1)), {"loss": 99.0}, sigmas=6) == ()
    enough = history([1.0] * MIN_ACCEPTED_STEPS)
    assert find_spikes(enough, {"loss": 99.0}, sigmas=6)
    assert find_spikes(enough, {"loss": math.nan}, sigmas=6) == ()
    assert history([1.0, math.inf, math.nan]).values["loss"] == (1.0,)
    assert find_spikes(enough.without_values(), {"loss": 99.0}, sigmas=6) == ()


def test_negative_values_have_a_threshold_above_their_median() -> None:
    logits = history([-4.0 - 0.01 * (step % 7) for step in range(64)], "max_logit")
    assert find_spikes(logits, {"max_logit": -3.0}, sigmas=6) == ()
    assert find_spikes(logits, {"max_logit": -1.0}, sigmas=6)


def test_spikes_are_not_accepted_and_a_lasting_change_restarts_the_window() -> None:
    changed = history([1.0] * 64)
    for step in range(65, 65 + MAX_SPIKES_IN_A_ROW):
        assert find_spikes(changed, {"loss": 5.0}, sigmas=6)
        changed = changed.add_spike(step)
    assert changed.values == {} and len(changed.spike_steps) == MAX_SPIKES_IN_A_ROW
    for _ in range(MIN_ACCEPTED_STEPS):
        changed = changed.accept({"loss": 5.0}, window=128)
    assert find_spikes(changed, {"loss": 5.5}, sigmas=6) == ()


def test_spike_rate_is_over_the_last_1000_steps() -> None:
    rated = StepHistory().add_spike(5).add_spike(10)
    assert rated.spike_rate(20) == 2 / 20
    assert rated.spike_rate(SPIKE_RATE_STEPS + 4) == 2 / SPIKE_RATE_STEPS
    assert rated.spike_rate(SPIKE_RATE_STEPS + 6) == 1 / SPIKE_RATE_STEPS
    assert rated.add_spike(SPIKE_RATE_STEPS + 7).spike_steps == (10, SPIKE_RATE_STEPS + 7)


def test_clean_statistics_of_training_raise_no_alarm() -> None:
    """Heavy-tailed noise of decreasing losses and gradient norms."""
    for seed in range(6):
        noise, statistics = random.Random(seed), StepHistory()
        for step in range(800):
            loss = 2 + 8 * math.exp(-step / 200) + noise.gauss(0, 0.15)
            norm = (0.5 + 3 * math.exp(-step / 100)) * math.exp(noise.gauss(0, 0.15))
            values = {"loss": loss, "grad_norm": norm}
            assert find_spikes(statistics, values, sigmas=6) == (), (seed, step)
            statistics = statistics.accept(values, window=128)


def _rank(loss: float, norm: float) -> RankGradients:
    return RankGradients((hash((loss, norm)),), norm=norm, loss=loss)


@pytest.mark.parametrize(
    ("first", "shifted", "expected"),
    [
        # a bad sample makes the gradients of all experts NaN, but only its own loss
        ([(2.0, math.nan), (math.nan, math.nan)], [(math.nan, math.nan), (2.0, math.nan)], None),
        # so does a bad machine, whose loss does not move
        ([(2.0, math.nan), (math.nan, math.nan)], [(2.5, math.nan), (math.nan, math.nan)], (1,)),
        # rounding errors of experts that get their tokens in another order
        ([(2.0, 1e6), (2.5, 1.0)], [(2.5, 1.0000001), (2.0, 1e6 + 0.1)], None),
        ([(2.0, 1.0), (2.5, 1e6)], [(2.5, 1.0), (2.0, 1e6)], (1,)),
    ],
)
def test_experts_of_all_data_parallel_ranks_are_compared_with_a_tolerance(
    first: list[tuple[float, float]],
    shifted: list[tuple[float, float]],
    expected: tuple[int, ...] | None,
) -> None:
    run = StepRun(tuple(_rank(*each) for each in first))
    runs = [run, run, StepRun(tuple(_rank(*each) for each in shifted), shift=1)]
    diagnosis = diagnose_runs(
        runs, [False] * 3, [[0, 1]], max_reruns=MAX_RERUNS, shift_tolerance=1e-3
    )
    wanted = Diagnosis("model") if expected is None else Diagnosis("persistent", expected)
    assert diagnosis == wanted


def test_wrong_losses_of_all_ranks_of_an_expert_group_are_undecided() -> None:
    ranks = (_rank(math.nan, math.nan), _rank(math.nan, math.nan))
    runs = [StepRun(ranks), StepRun(ranks), StepRun(ranks, shift=1)]
    diagnosis = diagnose_runs(
        runs, [False] * 3, [[0, 1]], max_reruns=MAX_RERUNS, shift_tolerance=1e-3
    )
    assert diagnosis == Diagnosis("undecided", (0, 1))


def test_sample_shift_moves_whole_expert_groups() -> None:
    for dp in range(1, 13):
        for size in (each for each in range(1, dp + 1) if dp % each == 0):
            shift = plan_sample_shift(dp, range(size))
            assert shift.is_exact == (size == 1 or size < dp), (dp, size)
            cycles = shift.list_cycles(range(dp))
            assert sorted(rank for cycle in cycles for rank in cycle) == [*range(dp)], (dp, size)
            for cycle in cycles:
                following = [*cycle[1:], cycle[0]]
                targets = [(rank + shift.num_ranks) % dp for rank in cycle]
                assert following == targets, (dp, size)
