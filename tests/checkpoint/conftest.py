"""Small models cut over made-up ranks, saved rank by rank in one process."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import storage
from megalith.checkpoint.commit import Retention
from megalith.checkpoint.format import CheckpointEntry, folder_name
from megalith.checkpoint.save import SaveReport, commit, save_checkpoint, write_boxes
from megalith.observe.machine import FORMATS
from megalith.parallel import group as consistency
from megalith.parallel.group import Group, local_range, single_rank_group
from megalith.plan.shards import Shard, split_evenly

SHAPES = {
    "embed.weight": (7, 6),
    "layers.0.mlp.gate_up": (2, 5, 6),
    "layers.1.attention.q": (3, 2, 6),
    "norm.weight": (6,),
}


def _values(shape: Sequence[int], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


def _model(seed: int = 0) -> dict[tuple[str, str], Tensor]:
    """Whole tensors by (role, name): bf16 weights, fp32 master and moments."""
    roles = {
        "param": torch.bfloat16,
        "master": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.float32,
    }
    values = {
        (role, name): _values(shape, 100 * seed + 10 * r + n, dtype)
        for r, (role, dtype) in enumerate(roles.items())
        for n, (name, shape) in enumerate(SHAPES.items())
    }
    return values | {("param", name): values["master", name].bfloat16() for name in SHAPES}


def _cut(
    whole_tensors: dict[tuple[str, str], Tensor], tp: int, dp: int, *, blank: bool = False
) -> list[list[CheckpointEntry]]:
    """Entries of tp x dp ranks: the longest dim cut over tp (vectors whole), the optimizer's also
    in ranges over dp."""
    ranks = []
    for rank in range(tp * dp):
        t, d = rank % tp, rank // tp
        entries = []
        for (role, name), tensor in whole_tensors.items():
            shard = Shard.full(name, tuple(tensor.shape), dtype=FORMATS[tensor.dtype])
            if tensor.dim() > 1:
                dim = max(range(tensor.dim()), key=lambda i: tensor.shape[i])
                shard = shard.split_dim(dim, split_evenly(tensor.shape[dim], tp), t, ("tp",))
            local = tensor[tuple(slice(a, b) for a, b in shard.box)].reshape(-1)
            actual = ((d == 0 and role == "param") or role != "param") and (
                tensor.dim() > 1 or t == 0
            )
            if role != "param":
                start, stop = local_range(split_evenly(shard.numel, dp), d)
                shard, local = replace(shard, flat=(start, stop)), local[start:stop]
            entries.append(
                CheckpointEntry(
                    shard, role, torch.zeros_like(local) if blank else local.clone(), actual
                )
            )
        ranks.append(entries)
    return ranks


def _save(
    folder: Path,
    step: int,
    ranks: Sequence[Sequence[CheckpointEntry]],
    state: dict[str, Any] | None = None,
) -> Path:
    """What save_checkpoint does on many ranks, one after the other."""
    staging = folder / f"{folder_name(step)}.tmp-00000000"
    storage.make_folder(staging)
    parts = [write_boxes(staging, rank, entries) for rank, entries in enumerate(ranks)]
    return commit(staging, step, parts, {"step": step} if state is None else state, "name: tiny\n")[
        0
    ]


def _save_alone(
    folder: Path,
    step: int,
    *,
    seed: int = 0,
    roles: Sequence[str] | None = None,
    **retention: int | None,
) -> SaveReport:
    """A save on one rank; of all roles by default."""
    entries = [
        entry for entry in _cut(_model(seed), 1, 1)[0] if roles is None or entry.role in roles
    ]
    state, world = {"step": step}, single_rank_group("world")
    return save_checkpoint(
        folder,
        step,
        entries,
        state,
        world,
        config_text="name: tiny\n",
        retention=Retention(**retention),
    )


@pytest.fixture
def tiny() -> SimpleNamespace:
    """Functions that make, cut and save a tiny model."""
    return SimpleNamespace(
        model=_model, cut=_cut, save=_save, save_alone=_save_alone, values=_values, shapes=SHAPES
    )


@pytest.fixture
def run_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run one function on several ranks that are threads; returns what each gave or raised."""

    def run(size: int, work: Callable[[Group], Any]) -> list[Any]:
        meet, table = threading.Barrier(size, timeout=20), [None] * size
        results: list[Any] = [None] * size

        def gather(value: Any, group: Group) -> list[Any]:
            table[group.rank] = value
            meet.wait()
            values = list(table)
            meet.wait()
            return values

        def one(rank: int) -> None:
            try:
                results[rank] = work(Group(("world",), tuple(range(size)), rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
        with monkeypatch.context() as patch:
            patch.setattr(consistency, "gather_objects", gather)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return results

    return run
