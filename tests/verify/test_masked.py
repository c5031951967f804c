"""Attention masks are verified on every axis, in addition to the causal mask and instead of it."""

from dataclasses import replace

import pytest
import torch

from megalith.config.model import ModelConfig
from megalith.config.parallel import ContextConfig, ParallelConfig
from megalith.kernels.layer_inputs import LayerInputs
from megalith.parallel.context import local_slicing
from megalith.parallel.mesh import build_meta_mesh
from megalith.plan.context import KINDS
from megalith.plan.grid import model_grid
from megalith.testing.inject import patched
from megalith.verify import types
from megalith.verify.matrix import SINKS, tiny
from megalith.verify.ranks import RaggedRows
from megalith.verify.types import paper_batch, type_check

FEW = tiny(num_kv_heads=2)


def test_mock_rows_have_masks_of_every_kind_and_fully_masked_queries() -> None:
    beside = [RaggedRows(12, 61, 9, (), masks="beside").sample(k).mask for k in range(6)]
    assert [None if mask is None else mask.seen.ndim for mask in beside] == [None, 1, 2] * 2
    alone = [RaggedRows(12, 61, 9, (), masks="alone").sample(k).mask for k in range(6)]
    assert all(mask is not None and mask.alone and mask.seen.shape == (12, 12) for mask in alone)
    assert any(mask is not None and not mask.seen.any(1).all() for mask in alone)
    plain = RaggedRows(12, 61, 9, ())
    assert (
        plain.sample(4).mask is None
        and plain.fingerprint != RaggedRows(12, 61, 9, (), masks="alone").fingerprint
    )


@pytest.mark.parametrize("kind", KINDS)
def test_masks_type_check_under_context_parallelism(kind: str) -> None:
    context = ContextConfig(kind=kind, a2a=2 if kind == "a2a+ring" else None)  # type: ignore[arg-type]  # one of them
    parallel = ParallelConfig(cp=4 if kind == "a2a+ring" else 2, context=context)
    assert type_check(FEW, parallel, world=8, ranks=(5,), masked=True).problems == ()


@pytest.mark.parametrize("model", [FEW, SINKS])
def test_masks_type_check_under_tensor_parallelism(model: ModelConfig) -> None:
    assert type_check(model, ParallelConfig(tp=2, sp=True), world=4, masked=True).problems == ()


def test_mask_without_a_declared_type_is_rejected() -> None:
    declare = types.declare_inputs

    def without_masks(batch: types.PaperBatch) -> None:
        declare(replace(batch, inputs=LayerInputs(replace(batch.inputs.seq_params, visible=None))))

    with patched(types, "declare_inputs", without_masks):
        assert type_check(FEW, ParallelConfig(tp=2, sp=True), world=2, masked=True).problems


def test_meta_batch_has_masks_of_documents_and_padding() -> None:
    parallel = ParallelConfig(cp=2)
    mesh = build_meta_mesh(model_grid(parallel, FEW, 2), rank=1)
    for documents in (True, False):
        for slicing in (local_slicing(parallel, mesh), local_slicing(ParallelConfig(), mesh)):
            batch = paper_batch(parts=1, documents=documents, slicing=slicing, masked=True)
            visible = batch.inputs.seq_params.whole.visible
            assert visible is not None and visible.pairs is not None and visible.keys is not None
            assert visible.pairs.is_meta and visible.pairs.dtype == torch.bool
            assert visible.starts[:2] == (0, None)
