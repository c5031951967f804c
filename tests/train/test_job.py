"""A rank joins the others only when the run fits them and all were started alike, and leaves in
order."""

import io
import logging
import os
import re
import socket
from contextlib import redirect_stderr

import pytest
import torch
import torch.distributed as dist

from megalith.errors import CollectiveError, ConfigError
from megalith.launch.launcher import LISTENER
from megalith.parallel.group import all_reduce_, gather_objects
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tiny import tiny_run
from megalith.train.distributed import join_job


def environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    places = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    return {name: str(value) for name, value in places.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_without_a_launcher_one_process_is_the_whole_job() -> None:
    with join_job(tiny_run(), {}) as job:
        assert (job.mesh.world.size, job.first, job.device) == (1, True, torch.device("cpu"))
        assert not dist.is_initialized()


def test_threads_are_those_of_the_settings() -> None:
    before = torch.get_num_threads()
    try:
        with join_job(tiny_run({"train.threads": "2"}), {}):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_run_that_does_not_fit_the_ranks_is_rejected_before_rendezvous() -> None:
    with (
        pytest.raises(ConfigError, match="train.global_batch_size=12 is not a multiple"),
        join_job(tiny_run(), environment(0, 5, 1)),
    ):
        pass


def reported_to(rank: int, world: int) -> dict[str, str]:
    """What our launcher tells a rank; the pool's own process group makes way."""
    server = socket.create_server(("127.0.0.1", 0))  # rank 0's is used, and stays open until then
    ports = gather_objects(server.getsockname()[1], world_group(rank, world, "world"))
    dist.barrier()  # a rank that leaves while another still connects would take it down
    dist.destroy_process_group()
    reported = environment(rank, world, int(str(ports[0])))
    os.environ.update(reported)
    return reported | ({LISTENER: str(server.detach())} if rank == 0 else {})


def meet(rank: int, world: int, seeds: list[str], fail: bool) -> list[object]:
    """Join as a rank of our launcher would."""
    reported = reported_to(rank, world)
    try:
        with join_job(tiny_run({"seed": seeds[rank], "parallel.tp": "2"}), reported) as job:
            objects = gather_objects((job.mesh.coordinates["tp_kv"], job.first), job.mesh.tp)
            if fail:
                raise ValueError("a fault of ours")
    finally:
        assert not dist.is_initialized()
    return objects


def test_two_ranks_initialize_and_destroy_the_process_group() -> None:
    assert run_ranks(meet, 2, ["1", "1"], False) == [[(0, True), (1, False)]] * 2


def refused(rank: int, world: int) -> str:
    """Return the error of a rank if the others were started with another seed."""
    with pytest.raises(ConfigError) as caught:
        meet(rank, world, ["1", "2"], False)
    return str(caught.value)


def test_ranks_with_other_settings_are_rejected_with_the_difference() -> None:
    output = run_ranks(refused, 2)
    assert (
        output[0]
        == output[1]
        == (
            "ranks were started with different settings:\n  seed: 1 on rank 0; 2 on rank 1\n"
            "On every rank, use the same command and files."
        )
    )


def warn(rank: int, world: int) -> str:
    """Return what a rank prints of its warnings, one of which all ranks have."""
    printed = io.StringIO()
    with redirect_stderr(printed), join_job(tiny_run(), reported_to(rank, world)):
        dist.barrier()  # one of them may have needed longer to join
        logging.getLogger("megalith.data").warning("short split")
        logging.getLogger("megalith.data").warning("slow disk of machine %d", rank)
    return printed.getvalue()


def test_equal_warnings_of_ranks_are_printed_once_with_the_ranks() -> None:
    printed, nothing = run_ranks(warn, 2)
    own = ["ranks 0-1: short split", "slow disk of machine 0", "rank 1: slow disk of machine 1"]
    assert sorted(printed.splitlines()) == sorted(own)
    assert nothing == ""


def fails(rank: int, world: int) -> None:
    """A fault inside leaves no process group behind."""
    with pytest.raises(ValueError, match="a fault of ours"):
        meet(rank, world, ["1", "1"], True)


def test_failing_rank_destroys_its_process_group() -> None:
    run_ranks(fails, 2)


def checks(rank: int, world: int) -> str:
    """Return the error of a rank that starts another collective than the others, with
    check_collectives."""
    reported = reported_to(rank, world)
    run = tiny_run({"parallel.tp": "2", "parallel.check_collectives": "true"})
    with pytest.raises(CollectiveError) as caught, join_job(run, reported) as job:
        all_reduce_(torch.ones(3 + rank), job.mesh.tp)
    return str(caught.value)


def test_the_setting_turns_the_comparison_on() -> None:
    for output in run_ranks(checks, 2):
        assert re.search(r"rank 0 \(tp=0\): all_reduce \d+ over tp of float32 \[3\], at ", output)
        assert re.search(r"rank 1 \(tp=1\): all_reduce \d+ over tp of float32 \[4\], at ", output)
