"""The flight recorder counts alike on every rank, and its report names the ranks that are
missing."""

import json
import time
from dataclasses import asdict, replace
from weakref import ref

import pytest

from megalith.observe import flight as flight_module
from megalith.observe.flight import (
    PUBLISHED,
    RANKS_SHOWN,
    RECORDED,
    Event,
    FlightRecorder,
    RankSnapshot,
    describe_hang,
    message_lane,
    missing_from,
)
from megalith.parallel.pipeline import DualBatchOverlap


def enter(
    flight: FlightRecorder, op: str = "all_reduce", lane: str = "1", ranks: tuple[int, ...] = (0, 1)
) -> None:
    """One operation that is over at once."""
    flight.enter(
        op, ("dp_replica", "dp_shard"), ranks, lane, shape=(3, 4), dtype="torch.float32"
    ).done = True


def event(
    lane: str,
    number: int,
    *,
    ranks: tuple[int, ...] = (),
    age: float = 1.0,
    peer: int | None = None,
) -> Event:
    """An operation as another rank tells it; `ranks`: those of its group, if it is not over."""
    name = f"all_reduce {number} over {lane}"
    return Event(name, f"{name}, at here.py:1", lane, number, peer, ranks, age, not ranks)


def test_every_group_is_counted_by_itself() -> None:
    flight = FlightRecorder()
    for lane in ("1", "2", "1", "1"):
        enter(flight, lane=lane)
    assert [(entry.lane, entry.number) for entry in flight.entries] == [
        ("1", 0),
        ("2", 0),
        ("1", 1),
        ("1", 2),
    ]
    assert flight.counts == {"1": 3, "2": 1}


def test_record_describes_data_and_call_site() -> None:
    flight = FlightRecorder()
    enter(flight)
    rows = flight.enter(
        "all_to_all",
        ("cp_ring", "cp_a2a"),
        (0, 1),
        "2",
        shape=(8,),
        dtype="torch.bfloat16",
        rows=([1, 2], [3, 4]),
    )
    assert flight.entries[0].describe().startswith("all_reduce 0 over dp of float32 [3, 4], at ")
    assert "test_flight.py:" in flight.entries[0].describe()
    assert (
        "all_to_all 0 over cp of bfloat16 [8], sending [1, 2] and receiving [3, 4] rows, at"
        in rows.describe()
    )


def test_only_last_collectives_are_recorded_but_all_are_counted() -> None:
    flight = FlightRecorder()
    for _ in range(RECORDED + 5):
        enter(flight)
    assert len(flight.entries) == RECORDED
    assert flight.counts["1"] == RECORDED + 5


def test_recording_costs_microseconds() -> None:
    flight = FlightRecorder()
    began = time.thread_time()
    for _ in range(1000):
        enter(flight)
    # 2 us on an idle core; a gloo sum of 4 bytes takes 100 us
    assert (time.thread_time() - began) / 1000 < 50e-6


class Handle:
    """A torch Work."""

    def __init__(self) -> None:
        self.completed = False

    def is_completed(self) -> bool:
        return self.completed


def test_operation_is_finished_when_handle_completes_or_is_dropped() -> None:
    flight = FlightRecorder()
    handles = [Handle(), Handle(), Handle()]
    for handle in handles:
        flight.enter("all_reduce", ("dp",), (0, 1), "1").work = ref(handle)
    handles[0].completed = True
    assert [entry.number for entry in flight.unfinished()] == [1, 2]
    del handles[1]
    assert [entry.number for entry in flight.unfinished()] == [2]


def test_snapshot_json_keeps_old_waits_and_newest_entries() -> None:
    flight = FlightRecorder()
    flight.enter("barrier", ("pp",), (0, 2), "9")  # never over
    for _ in range(PUBLISHED + 7):
        enter(flight)
    place = flight.place(2)
    assert RankSnapshot.from_json(json.loads(json.dumps(asdict(place)))) == place
    assert len(place.events) == PUBLISHED + 1
    assert place.waiting is not None
    assert (place.waiting.name, place.waiting.ranks) == ("barrier 0 over pp", (0, 2))
    assert any("test_flight.py" in line for line in place.doing)


def test_position_of_a_rank_is_that_of_the_active_lane() -> None:
    turns, result = DualBatchOverlap(), list[str]()

    def look() -> None:
        result.extend(FlightRecorder().place(0).doing)

    turns.both(lambda: None, look)  # the forward lane is over, and the main thread waits
    assert " in look" in result[0] and "test_flight.py" in result[0]
    result.clear()
    turns.both(look, lambda: None)
    assert " in look" in result[0]
    look()
    assert " in look" in result[0]


def test_missing_rank_is_named_despite_indirect_waits() -> None:
    places = {
        0: RankSnapshot(0, {"dp": 4, "tp": 2}, [event("tp", 1, ranks=(0, 1), age=9.0)], []),
        1: RankSnapshot(1, {"dp": 4, "tp": 1}, [event("dp", 3, ranks=(1, 3), age=11.0)], []),
        2: RankSnapshot(2, {"dp": 4, "tp": 1}, [event("tp", 0)], ["loader.py:9 in next"]),
        3: RankSnapshot(
            3, {"dp": 3, "tp": 1}, [event("tp", 0)], ["loader.py:7 in read", "loop.py:1 in run"]
        ),
    }
    reported = describe_hang(
        places, 4, timeout_seconds=8, where=lambda rank: f"{rank} (dp={rank // 2})"
    ).splitlines()
    assert reported[0] == "rank 3 (dp=1) did not arrive at all_reduce 3 over dp, at here.py:1"
    assert (
        reported[1] == "Rank 1 (dp=0) has waited there for 11 s, which is longer than "
        "parallel.timeout_seconds=8."
    )
    assert reported[3:] == [
        "  rank 1 (dp=0): in all_reduce 3 over dp, at here.py:1, for 11 s",
        "  rank 3 (dp=1): in no collective, the last was all_reduce 0 over tp; now at loader.py:7 "
        "in read < loop.py:1 "
        "in run",
        "  rank 0 (dp=0): in all_reduce 1 over tp, at here.py:1, for 9 s",
        "  rank 2 (dp=1): in no collective, the last was all_reduce 0 over tp; now at loader.py:9 "
        "in next",
    ]


def test_a_rank_that_does_not_answer_is_missing() -> None:
    reported = describe_hang(
        {0: RankSnapshot(0, {"dp": 1}, [event("dp", 0, ranks=(0, 1))], [])}, 2, timeout_seconds=0.5
    )
    assert reported.startswith("rank 1 did not arrive at all_reduce 0 over dp")
    assert "  rank 1: does not answer: dead, stopped, or holding the GIL" in reported


def test_deadlock_is_reported() -> None:
    places = {
        0: RankSnapshot(0, {"tp": 1}, [event("tp", 0, ranks=(0, 1))], []),
        1: RankSnapshot(1, {"dp": 1}, [event("dp", 0, ranks=(0, 1))], []),
    }
    assert describe_hang(places, 2, timeout_seconds=1).startswith(
        "ranks wait for each other: none of them can reach "
    )


def test_ranks_in_different_operations_of_the_same_number_are_named() -> None:
    other = replace(event("tp", 0, ranks=(0, 1)), text="barrier 0 over tp, at there.py:2")
    places = {
        0: RankSnapshot(0, {"tp": 1}, [event("tp", 0, ranks=(0, 1), age=2.0)], []),
        1: RankSnapshot(1, {"tp": 1}, [other], []),
    }
    assert describe_hang(places, 2, timeout_seconds=1).startswith(
        "rank 0 is in all_reduce 0 over tp, at here.py:1, but rank 1 entered barrier 0 over tp, at "
        "there.py:2 instead\n"
    )
    places[1] = replace(places[1], events=[event("tp", 0, ranks=(0, 1))])
    assert (
        "all ranks entered all_reduce 0 over tp, at here.py:1, but it does not finish"
        in describe_hang(places, 2, timeout_seconds=1)
    )


def test_missing_message_is_reported_at_its_other_end() -> None:
    waits = event(message_lane("5", 3, sends=False), 1, ranks=(1, 3), peer=3)
    for sent, missing in ((1, [3]), (2, [])):
        places = {
            1: RankSnapshot(1, {}, [waits], []),
            3: RankSnapshot(3, {message_lane("5", 1, sends=True): sent}, [], []),
        }
        assert missing_from(waits, 1, places) == missing


def test_a_thousand_ranks_fit_on_a_screen() -> None:
    waits = event("dp", 5, ranks=tuple(range(1000)))
    places = {rank: RankSnapshot(rank, {"dp": 6}, [waits], []) for rank in range(1000)}
    places |= {
        rank: RankSnapshot(rank, {"dp": 5}, [], [f"x.py:{rank} in f"])
        for rank in range(0, 1000, 30)
    }
    lines = describe_hang(places, 1000, timeout_seconds=1).splitlines()
    assert lines[0].count("rank ") == RANKS_SHOWN
    assert " and 18 more did not arrive" in lines[0]
    assert len(lines) == 3 + RANKS_SHOWN + 1
    assert lines[-1].startswith("  and ")


def test_no_report_if_no_rank_waited_longer_than_timeout() -> None:
    gone_on = {
        0: RankSnapshot(0, {"dp": 1}, [event("dp", 0)], []),
        1: RankSnapshot(1, {"dp": 1}, [event("dp", 0)], []),
    }
    assert (
        describe_hang(gone_on, 2, timeout_seconds=1)
        == describe_hang({}, 2, timeout_seconds=1)
        == ""
    )
    gone_on[1] = RankSnapshot(1, {"dp": 2}, [event("dp", 1, ranks=(0, 1), age=0.2)], [])
    assert describe_hang(gone_on, 2, timeout_seconds=1) == "", (
        "as world_group waits for a moment, all the time"
    )
    assert describe_hang(gone_on, 2, timeout_seconds=0.22).startswith("rank 0 did not arrive"), (
        "ages are rounded"
    )


def test_record_of_a_collective_of_torch_can_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_module, "inside_torch", lambda: True)
    flight = FlightRecorder()
    enter(flight)
    for _ in range(2):
        flight.record_torch_collective((0, 1))
        assert flight.counts["torch"] == 1 and len(flight.unfinished()) == 1
        flight.remove_torch_collectives()
        assert flight.counts == {"1": 1} and not flight.unfinished()
