"""A rank knows its place from the environment, joins the others, and refuses those that were
started differently."""

import logging
import os
import socket
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist

from megalith.errors import ConfigError, RankError
from megalith.launch.launcher import LISTENER
from megalith.launch.worker import (
    Worker,
    check_consistent_settings,
    connect,
    describe_slow_tp,
    disconnect,
    open_rendezvous,
    set_threads,
)
from megalith.parallel.group import all_reduce_, gather_objects, single_rank_group
from megalith.plan.grid import dense_grid
from megalith.testing.ranks import run_ranks, world_group

PLACE = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine cores and no GPU."""
    monkeypatch.setattr("megalith.launch.worker.available_cores", lambda: 9)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_launcher_one_process_is_the_whole_job() -> None:
    worker = Worker.from_environment({"PATH": "x"})
    assert (worker.rank, worker.world, worker.local_rank, worker.local_world) == (0, 1, 0, 1)
    assert (worker.device, worker.backend, worker.threads) == (torch.device("cpu"), "gloo", None)


def test_rank_is_read_from_the_environment() -> None:
    worker = Worker.from_environment(PLACE)
    assert (worker.rank, worker.world, worker.local_rank, worker.local_world) == (5, 8, 1, 4)
    assert worker.threads == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"RANK": None, "MASTER_PORT": None},
            r"WORLD_SIZE=8, .* is set .* but not RANK, MASTER_PORT\. Use torchrun",
        ),
        ({"RANK": "8"}, r"RANK=8 and WORLD_SIZE=8 .*RANK must be one of 0 to WORLD_SIZE - 1"),
        ({"RANK": "-1"}, r"RANK=-1 and"),
        (
            {"LOCAL_WORLD_SIZE": "many"},
            r"LOCAL_RANK=1 and LOCAL_WORLD_SIZE=many .*use torchrun or --nproc",
        ),
    ],
)
def test_invalid_environment_is_rejected(change: Mapping[str, str | None], message: str) -> None:
    environment = {
        name: value for name, value in (PLACE | dict(change)).items() if value is not None
    }
    with pytest.raises(ConfigError, match=message):
        Worker.from_environment(environment)


def test_incomplete_rank_variables_are_rejected_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"^MASTER_ADDR=here is set .*not RANK, WORLD_SIZE, .*unset them all"
    ):
        Worker.from_environment({"MASTER_ADDR": "here"})


def test_each_rank_has_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    worker = Worker.from_environment(PLACE)
    assert (str(worker.device), worker.backend) == ("cuda:1", "cpu:gloo,cuda:nccl")
    with pytest.raises(
        ConfigError, match=r"LOCAL_RANK=2, but this machine has 2 GPUs. Use --nproc 2 or fewer"
    ):
        Worker.from_environment(PLACE | {"LOCAL_RANK": "2"})


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, None),
        ({"OMP_NUM_THREADS": "1"}, None),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 2),
        ({"OMP_NUM_THREADS": "3", "TORCHELASTIC_RUN_ID": "x"}, None),
        ({"TORCHELASTIC_RUN_ID": "x"}, 2),
    ],
)
def test_omp_num_threads_of_the_user_overrides_that_of_torchrun(
    environment: dict[str, str], threads: int | None
) -> None:
    assert Worker.from_environment(PLACE | environment).threads == threads


def test_overriding_torchrun_threads_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    environment = PLACE | {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}
    with caplog.at_level(logging.WARNING):
        for rank in range(4):
            Worker.from_environment(environment | {"RANK": str(rank)})
    assert [record.message for record in caplog.records] == [
        "torchrun sets OMP_NUM_THREADS=1; using 2 threads per rank (train.threads to change)"
    ]


def _threads_used(rank: int, world: int) -> list[int]:
    used = []
    for environment, requested in (({}, None), (PLACE, None), (PLACE, 3)):
        torch.set_num_threads(1)
        worker = Worker(0, 1, 0, 1, torch.device("cpu"), "gloo", 2 if environment else None)
        set_threads(worker, requested)
        used.append(torch.get_num_threads())
    return used


def test_the_setting_decides_then_the_launcher_then_torch() -> None:
    assert run_ranks(_threads_used, 1) == [[1, 2, 3]]


def _connects(rank: int, world: int) -> tuple[bool, float, tuple[int, ...], bool]:
    # stays open: nobody else can have the port
    server = socket.create_server(("127.0.0.1", 0)) if rank == 0 else None
    port = everyone_hears(None if server is None else server.getsockname()[1], rank, world)
    places = rank, world, rank, world, "127.0.0.1", port
    environment = {name: str(value) for name, value in zip(PLACE, places, strict=True)}
    os.environ.update(environment)
    worker = Worker.from_environment(
        environment if server is None else environment | {LISTENER: str(server.detach())}
    )
    group = connect(worker, timeout_seconds=30)
    total = all_reduce_(torch.tensor([rank + 1.0]), group).item()
    joined = dist.is_initialized()
    disconnect(worker)
    return joined, total, group.ranks, dist.is_initialized()


def everyone_hears(value: object, rank: int, world: int) -> object:
    """Rank 0's value, on every rank; then the process group that run_ranks made is gone, and all
    know it."""
    values = gather_objects(value, world_group(rank, world, "world"))
    dist.barrier()  # a rank that leaves while another still talks would take it down
    dist.destroy_process_group()
    return values[0]


def test_ranks_initialize_and_destroy_the_process_group() -> None:
    assert run_ranks(_connects, 2) == [(True, 3.0, (0, 1), False)] * 2


def _comes_alone(rank: int, world: int) -> str:
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    places = 0, 3, 0, 3, "127.0.0.1", port
    environment = {name: str(value) for name, value in zip(PLACE, places, strict=True)} | {
        LISTENER: str(server.detach())
    }
    with pytest.raises(RankError) as caught:
        open_rendezvous(Worker.from_environment(environment), timeout_seconds=0.3)
    return str(caught.value)


def test_absent_ranks_are_named() -> None:
    assert run_ranks(_comes_alone, 1) == [
        "ranks [1, 2] of 3 did not join within parallel.timeout_seconds=0.3. Read their output, "
        "and start as many ranks as the launcher expects."
    ]


def test_single_rank_job_has_no_process_group() -> None:
    worker = Worker.from_environment({})
    assert connect(worker, timeout_seconds=1) == single_rank_group("world")
    assert not dist.is_initialized()
    disconnect(worker)


@pytest.mark.parametrize(
    ("world", "tp", "local_world", "order", "fits"),
    [
        (16, 8, 8, "tp-cp-ep-dp-pp", None),
        (16, 16, 8, "tp-cp-ep-dp-pp", "Set parallel.tp to 8"),
        (12, 6, 4, "tp-cp-ep-dp-pp", "Set parallel.tp to 2"),
        (16, 4, 8, "dp-tp-cp-ep-pp", "Set parallel.tp to 2"),
        (16, 2, 8, "dp-tp-cp-ep-pp", "Set parallel.tp to 1, or begin parallel.order with tp."),
    ],
)
def test_tensor_parallelism_over_several_machines_is_warned_about(
    world: int, tp: int, local_world: int, order: str, fits: str | None
) -> None:
    problem = describe_slow_tp(dense_grid(world=world, tp=tp, order=order), local_world)
    assert (problem is None) == (fits is None)
    if fits is not None:
        assert problem is not None
        assert problem.startswith(
            f"parallel.tp={tp} spans machines of {local_world} ranks each, so "
        )
        assert fits in problem


def _agrees(rank: int, world: int, settings: list[dict[str, object]]) -> None:
    check_consistent_settings(settings[rank], world_group(rank, world, "world"))


def test_equal_settings_pass() -> None:
    run_ranks(_agrees, 2, [{"a": 1, "b": None}, {"b": None, "a": 1}])
    check_consistent_settings({"a": 1}, single_rank_group("world"))


def test_different_settings_are_listed_with_the_ranks_that_have_them() -> None:
    same = {"train.steps": 10, "optim.lr": 0.1, "data.path": ["x"]}
    with pytest.raises(RankError) as caught:
        run_ranks(
            _agrees, 3, [same, {**same, "optim.lr": 0.2}, {"train.steps": 10, "optim.lr": 0.1}]
        )
    assert (
        "ConfigError: ranks were started with different settings:\n"
        '  data.path: ["x"] on ranks 0, 1; not set on rank 2\n'
        "  optim.lr: 0.1 on ranks 0, 2; 0.2 on rank 1\n"
        "On every rank, use the same command and files."
    ) in str(caught.value)


def test_a_long_list_of_differences_is_cut() -> None:
    left, right = ({f"f{number:02}": rank for number in range(13)} for rank in range(2))
    with pytest.raises(
        RankError, match=r"f09: 0 on rank 0; 1 on rank 1\n  and 3 more\nOn every rank"
    ):
        run_ranks(_agrees, 2, [left, right])
