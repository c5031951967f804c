"""Input embedding: scales rounded to the dtype, and learned positions."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import DataError
from megalith.kernels.layer_inputs import InsertedEmbeddings, LayerInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context
from megalith.nn.embedding import InputEmbedding, Scale, insert_embeddings
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.parallel.tensor import SequenceParallelComm, TensorParallelComm
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tolerance import FP64, assert_equals


def built(layers: SimpleNamespace, **changes: object) -> InputEmbedding:
    config = layers.config(**changes)
    context = build_context(config, build_single_rank_mesh(), dtype=torch.float64)
    input_embedding = InputEmbedding(config, context).to_empty(device="cpu")
    for declared, module, name in iter_parameter_specs(input_embedding):
        with torch.no_grad():
            getattr(module, name).copy_(
                torch.arange(declared.shard.numel).view(declared.shard.matrix_shape)
            )
    return input_embedding


def test_default_input_embedding_is_the_identity(layers: SimpleNamespace) -> None:
    input_embedding, x = built(layers), layers.inputs(4)
    assert input_embedding(x, layers.layer_inputs(layers.config(), [4])) is x
    assert not list(iter_parameter_specs(input_embedding))


def test_scales_are_rounded_to_the_dtype_first() -> None:
    root = 2560**0.5
    tokens = None
    assert Scale(root, torch.bfloat16)(torch.ones(1, dtype=torch.float64), tokens) == 50.5  # type: ignore[arg-type]
    assert Scale(root, torch.float64)(torch.ones(1, dtype=torch.float64), tokens) == root  # type: ignore[arg-type]


def test_learned_positions_restart_in_each_document(
    layers: SimpleNamespace,
) -> None:
    config = layers.config(positions="learned")
    input_embedding, x = built(layers, positions="learned", embedding_scale=2.0), layers.inputs(5)
    table = torch.arange(32 * 18, dtype=torch.float64).view(32, 18)
    y = input_embedding(x, layers.layer_inputs(config, [3, 2]))
    assert torch.equal(y, 2 * (x + table[torch.tensor([0, 1, 2, 0, 1])])), (
        "the scale is of both, as muP has it"
    )
    y.sum().backward()
    assert input_embedding.positions.weight.grad.sum(1).tolist()[:4] == [72.0, 72.0, 36.0, 0.0]


def test_sequence_parallel_rank_uses_its_own_positions(
    layers: SimpleNamespace,
) -> None:
    group = layers.paper(layers.config(), 3, 1).tp
    assert SequenceParallelComm(group).select_local(torch.arange(9)).tolist() == [3, 4, 5]
    assert TensorParallelComm(group).select_local(torch.arange(9)).tolist() == list(range(9))


def test_document_longer_than_the_position_table_raises_an_error(layers: SimpleNamespace) -> None:
    input_embedding, tokens = (
        built(layers, positions="learned"),
        layers.layer_inputs(layers.config(positions="learned"), [1, 33]),
    )
    with pytest.raises(
        DataError,
        match=r"document has 33 tokens.* only 32 positions. Use documents of at most 32 tokens",
    ):
        input_embedding(layers.inputs(34), tokens)


def loss_with_inserted(rank: int, world: int, config: ModelConfig, sp: bool) -> list[Tensor]:
    """Return the loss of two documents with three inserted embeddings, and their gradient."""
    parallel = ParallelConfig(tp=world, sp=sp)
    mesh = build_mesh(model_grid(parallel, config, world), rank=rank)
    model = Decoder(build_context(config, mesh, parallel, dtype=torch.float64))
    allocate(model, torch.device("cpu"))
    initialize(model, seed=4)
    draw = torch.Generator().manual_seed(0)
    embeddings = torch.randn(3, config.hidden_size, generator=draw, dtype=torch.float64)
    inserted = InsertedEmbeddings(embeddings.requires_grad_(), torch.tensor([9, 1, 4]))
    inputs = LayerInputs(seq_params_from_lengths([7, 5]), inserted=inserted)
    ids = torch.arange(12) % 5
    loss = model.loss(ids, ids.roll(-1), inputs)
    loss.backward()
    assert embeddings.grad is not None
    return [loss.detach(), embeddings.grad]


@pytest.mark.parametrize("sp", [False, True])
def test_inserted_embeddings_match_one_rank(sp: bool, layers: SimpleNamespace) -> None:
    config = layers.config(positions="learned", num_kv_heads=2)
    (expected,) = run_ranks(loss_with_inserted, 1, config, False)
    for result in run_ranks(loss_with_inserted, 2, config, sp):
        for one, other in zip(result, expected, strict=True):
            assert_equals("loss and gradient", one, other, FP64)


def test_inserted_rows_replace_those_of_the_table(layers: SimpleNamespace) -> None:
    x, rows = layers.inputs(5), layers.inputs(2) + 1
    tp_comm = TensorParallelComm(build_single_rank_mesh().tp)
    result = insert_embeddings(x, InsertedEmbeddings(rows, torch.tensor([3, 0])), 5, tp_comm)
    assert torch.equal(result, torch.stack([rows[1], x[1], x[2], rows[0], x[4]]))
