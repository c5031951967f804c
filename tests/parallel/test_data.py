"""The data-parallel engine: flat storage, sinks, buckets that start when they are full, and its oracle, torch's DDP."""

import pytest
import torch
from torch import nn

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.kernels.tokens import tokens_of_rows
from megalith.models.decoder import Decoder, declared_parameters, initialise
from megalith.parallel import data as engine
from megalith.parallel.data import DataParallel
from megalith.parallel.mesh import Mesh, build_mesh, mesh_of_one, model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, assert_close

CONFIG = ModelConfig(
    vocab_size=30, vocab_multiple=4, hidden_size=12, num_layers=2, num_heads=2, num_kv_heads=1, ffn_hidden_size=10,
    qkv_bias=True,
)  # fmt: skip


def build(
    mesh: Mesh, *, overlap: bool = True, sinks: bool = True, bucket_numel: int = 300
) -> tuple[Decoder, DataParallel]:
    """A small float64 model on the engine."""
    model = Decoder(CONFIG, mesh, dtype=torch.float64)
    parameters = [(declared.shard, module, name) for declared, module, name in declared_parameters(model)]
    data = DataParallel(
        model, parameters, mesh, device=torch.device("cpu"), gradient_dtype=torch.float64, bucket_numel=bucket_numel,
        overlap=overlap, sinks=sinks,
    )  # fmt: skip
    initialise(model, seed=5)
    return model, data


def loss_of(model: Decoder, microbatch: int) -> torch.Tensor:
    """One microbatch of two rows."""
    ids = torch.randint(0, 30, (14,), generator=torch.Generator().manual_seed(microbatch))
    return model.loss(ids, ids.roll(-1), tokens_of_rows(2, 7))


def gradients(data: DataParallel) -> dict[str, torch.Tensor]:
    return {owned.shard.name: owned.gradient.clone() for owned in data.finish()}


def test_sinks_and_autograd_give_the_same_gradients_over_several_microbatches() -> None:
    found = []
    for sinks in (True, False):
        model, data = build(mesh_of_one(), sinks=sinks)
        for _ in range(2):  # the second step must not see the first one's sums
            data.begin_step(3)
            for microbatch in range(3):
                loss_of(model, microbatch).backward()
            result = gradients(data)
        found.append(result)
    assert_close(found[0], found[1], FP64)


def test_weights_of_one_matmul_lie_together() -> None:
    model, _ = build(mesh_of_one())
    q, kv = model.layers[0].attention.qkv.sunk()
    assert q.data_ptr() + q.numel() * q.element_size() == kv.data_ptr()


def test_a_tied_head_stays_tied() -> None:
    tied = ModelConfig(**{**{f: getattr(CONFIG, f) for f in CONFIG.__slots__}, "tied_embeddings": True})
    model = Decoder(tied, mesh_of_one())
    parameters = [(declared.shard, module, name) for declared, module, name in declared_parameters(model)]
    DataParallel(
        model, parameters, mesh_of_one(), device=torch.device("cpu"), gradient_dtype=torch.float32, bucket_numel=100,
        overlap=True,
    )  # fmt: skip
    assert model.head.weight is model.embed.weight
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_an_unused_parameter_gets_zeros() -> None:
    model, data = build(mesh_of_one())
    data.begin_step(1)
    loss_of(model, 0).backward()
    gradients(data)
    data.begin_step(1)
    model.embed(torch.arange(5)).sum().backward()
    found = gradients(data)
    assert not found["layers.0.mlp.down"].any()
    assert found["embed.weight"].any()


def _starts_before_the_end(rank: int, world: int) -> list[int]:
    """How many buckets had started when backward ended, and how many there are."""
    mesh = build_mesh(model_grid(ParallelConfig(), CONFIG, world), rank=rank)
    model, data = build(mesh)
    data.begin_step(2)
    loss_of(model, rank).backward()
    first = data._next
    loss_of(model, rank + 7).backward()
    last = data._next
    data.finish()
    return [first, last, len(data.plan.buckets)]


def test_buckets_start_in_the_last_microbatch_while_backward_runs() -> None:
    for first, last, buckets in run_ranks(_starts_before_the_end, 2):
        assert first == 0  # nothing may be summed before the last microbatch has added to it
        assert last == buckets > 3


class _Loss(nn.Module):
    """A module whose forward is the loss, as DistributedDataParallel wants it."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, microbatch: int) -> torch.Tensor:
        return loss_of(self.model, microbatch)


def _equals_ddp(rank: int, world: int) -> bool:
    mesh = build_mesh(model_grid(ParallelConfig(), CONFIG, world), rank=rank)
    model, data = build(mesh)
    data.begin_step(1)
    loss_of(model, rank).backward()
    mine = gradients(data)
    plain = Decoder(CONFIG, mesh_of_one(), dtype=torch.float64)
    plain.to_empty(device="cpu")
    initialise(plain, seed=5)
    wrapped = nn.parallel.DistributedDataParallel(_Loss(plain))
    wrapped(rank).backward()
    names = {id(getattr(module, name)): d.shard.name for d, module, name in declared_parameters(plain)}
    theirs = {names[id(p)]: p.grad * world for p in plain.parameters() if p.grad is not None}  # DDP takes the mean
    assert_close(mine, theirs, FP64)
    return True


def test_summed_gradients_equal_torchs_ddp() -> None:
    assert run_ranks(_equals_ddp, 2) == [True, True]


def _bitwise(rank: int, world: int) -> bool:
    mesh = build_mesh(model_grid(ParallelConfig(), CONFIG, world), rank=rank)
    found = []
    for overlap, bucket_numel in ((True, 300), (False, 300), (True, 10**9)):
        model, data = build(mesh, overlap=overlap, bucket_numel=bucket_numel)
        data.begin_step(1)
        loss_of(model, rank).backward()
        found.append(gradients(data))
    return all(torch.equal(found[0][name], other[name]) for other in found[1:] for name in found[0])


def test_overlap_and_bucket_size_change_no_bit_at_dp_2() -> None:
    assert run_ranks(_bitwise, 2) == [True, True]


def test_removing_the_first_overwrite_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, data = build(mesh_of_one())
    monkeypatch.setattr(engine.DataParallel, "is_fresh", lambda self, numbers: False)
    for _ in range(2):
        data.begin_step(1)
        loss_of(model, 0).backward()
        found = data.owned[2].gradient.clone()
    fresh_model, fresh = build(mesh_of_one())
    monkeypatch.undo()
    fresh.begin_step(1)
    loss_of(fresh_model, 0).backward()
    assert not torch.allclose(found, fresh.owned[2].gradient)
