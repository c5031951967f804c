"""One rank's failure is everybody's, in the same words."""

import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from megalith.config.checkpoint import CheckpointConfig
from megalith.errors import CheckpointError, DataError, RankError, UserError
from megalith.hf.megatron_checkpoint import is_megatron, open_megatron
from megalith.hf.pretrained import load_weights_with_records, with_optimizer
from megalith.parallel.group import Group, raise_on_all_ranks, single_rank_group
from megalith.train.resume import open_checkpoint_source


def test_results_come_in_the_order_of_ranks(run_threads: Callable[..., list[Any]]) -> None:
    assert (
        run_threads(3, lambda world: raise_on_all_ranks(lambda: world.rank * 10, world))
        == [[0, 10, 20]] * 3
    )
    assert raise_on_all_ranks(lambda: "x", single_rank_group("world")) == ["x"]


def test_all_ranks_raise_the_same_text_when_one_fails(
    run_threads: Callable[..., list[Any]],
) -> None:
    def work(world: Group) -> None:
        if world.rank == 1:
            raise OSError(errno.ENOSPC, "No space left on device", "/disk/a")

    errors = run_threads(3, lambda world: raise_on_all_ranks(lambda: work(world), world))
    assert {type(error) for error in errors} == {CheckpointError}
    assert {str(error) for error in errors} == {
        "rank 1: OSError: [Errno 28] No space left on device: '/disk/a'. Free some space, or set "
        "checkpoint.keep to a "
        "lower number."
    }
    assert isinstance(errors[1].__cause__, OSError) and errors[0].__cause__ is None


@pytest.mark.parametrize("mode", ["all", "progress", "weights"])
def test_megatron_folder_that_one_rank_cannot_read_is_an_error_of_all(
    mode: Literal["all", "progress", "weights"],
    run_threads: Callable[..., list[Any]],
    megatron_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = megatron_folder("dense_tied_fully_reshardable") / "iter_0000002"
    model = open_megatron(path).run.model
    rules = CheckpointConfig(load=str(path), load_mode=mode)
    calls = itertools.count()

    def check(folder: Path) -> bool:
        if next(calls) == 1:
            raise CheckpointError(f"{folder} cannot be read. Mount it on every host.")
        return is_megatron(folder)

    def load(world: Group) -> object:
        if mode == "weights":
            return load_weights_with_records([], str(path), world, model=model, rules=rules)
        return open_checkpoint_source(rules, world, vocab_size=model.vocab_size)

    monkeypatch.setattr("megalith.train.resume.is_megatron", check)
    monkeypatch.setattr("megalith.hf.pretrained.is_megatron", check)
    errors = run_threads(2, load)
    assert [str(error) for error in errors] == [
        f"{path} cannot be read. Mount it on every host."
    ] * 2


def test_each_rank_verifies_its_own_share_of_flat_buckets(
    run_threads: Callable[..., list[Any]],
    megatron_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares = []

    def verify(*_: object, rank: int, world_size: int) -> None:
        shares.append((rank, world_size))
        if rank == 2:
            raise CheckpointError("the master weights of q do not round to its weights.")

    monkeypatch.setattr("megalith.hf.megatron_checkpoint.verify_buckets", verify)
    checkpoint = open_megatron(megatron_folder("dense_dp_reshardable") / "iter_0000002")
    errors = run_threads(3, lambda world: with_optimizer(checkpoint, world))
    assert sorted(shares) == [(0, 3), (1, 3), (2, 3)]
    assert {str(error) for error in errors} == {
        "the master weights of q do not round to its weights."
    }


def test_error_of_several_ranks_is_reported_once(
    run_threads: Callable[..., list[Any]],
) -> None:
    def work() -> None:
        raise CheckpointError("x=3: too large. Set x to 2.")

    errors = run_threads(2, lambda world: raise_on_all_ranks(work, world))
    assert [str(error) for error in errors] == ["x=3: too large. Set x to 2."] * 2


@pytest.mark.parametrize(
    "error,text",
    [
        (
            PermissionError(errno.EACCES, "Permission denied", "/disk"),
            "Make the folder writable, or choose another",
        ),
        (OSError(errno.EROFS, "Read-only file system", "/disk"), "Make the folder writable"),
        (OSError(errno.EFBIG, "File too large"), "Free some space"),
        (OSError("odd"), "^OSError: odd.$"),
    ],
)
def test_error_has_advice(error: Exception, text: str) -> None:
    def work() -> None:
        raise error

    with pytest.raises(CheckpointError, match=text):
        raise_on_all_ranks(work, single_rank_group("world"))


def test_internal_error_reaches_every_rank_as_rank_error(
    run_threads: Callable[..., list[Any]],
) -> None:
    fault = ValueError("odd")

    def work(rank: int) -> None:
        if rank == 2:
            raise fault
        if rank == 1:
            raise DataError("x=3: too large. Set x to 2.")

    errors = run_threads(4, lambda world: raise_on_all_ranks(lambda: work(world.rank), world))
    assert errors[2] is fault
    others = [errors[rank] for rank in (0, 1, 3)]
    assert {type(error) for error in others} == {RankError} and not issubclass(RankError, UserError)
    assert all(str(error).startswith("Traceback (most recent call last):") for error in others)
    assert "ValueError: odd\nThis was rank 2; rank 0 ends because of it." in str(errors[0])
    with pytest.raises(ValueError, match="^odd$"):
        raise_on_all_ranks(lambda: work(2), single_rank_group("world"))


def test_a_signal_is_not_a_failure_to_agree_on() -> None:
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        raise_on_all_ranks(work, single_rank_group("world"))
