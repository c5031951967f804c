"""Per-matrix rules on assigned ranks: equal to one process under every layout, bitwise with and
without overlap, and resumed under another layout."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.config.optim import MuonConfig, OptimConfig
from megalith.config.parallel import ParallelConfig
from megalith.optim.assigned_ranks import (
    AssignedMatrices,
    flat_offset,
    iter_rectangles,
)
from megalith.optim.muon import Muon
from megalith.optim.optimizer import RuleSlots
from megalith.optim.rules import UpdateScalars
from megalith.optim.slots import OptimizerSlot, build_slot
from megalith.parallel.matrix_exchange import start_uneven_all_to_all
from megalith.parallel.mesh import Mesh, build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.shards import Shard, shard_rows
from megalith.testing.ranks import run_ranks, world_group
from megalith.testing.tiny import tiny_run
from megalith.verify.matrix import parse_row, tiny
from megalith.verify.ranks import compare_with_one_process, layout_case, resharded_run

CPU = torch.device("cpu")

ROWS = {
    "tp2": "tiny tp2 optim.kind=muon optim.muon.split=heads",
    "sp": "tiny tp2 sp optim.kind=muon optim.muon.split=fused",
    "tied-pp2": "four tied pp2 optim.kind=muon",
    "cp2": "tiny cp2 zero2 optim.kind=muon optim.muon.split=fused",
    "dp2": "tiny dp2 optim.kind=muon",
    "dp3": "tiny dp3 zero1 optim.kind=muon optim.muon.split=heads",
    "zero2": "tiny dp2 zero2 optim.kind=muon no-overlap",
    "zero3": "tiny dp2 zero3 optim.kind=muon",
    "hsdp": "tiny dp4 replicate=2 zero1 optim.kind=muon optim.muon.second_moment=normuon",
    "hsdp-zero3": "tiny dp4 replicate=2 zero3 optim.kind=muon optim.muon.second_moment=adamuon",
    "experts": "narrow dp4 ep2 etp2 zero1 rows=1 optim.kind=muon",
    "latent": "latent tp2 dp2 zero1 optim.kind=muon",
    "latent-heads": "latent tp3 sp optim.kind=muon optim.muon.split=heads",
    "shared-heads": "shared tp4 optim.kind=muon optim.muon.second_moment=normuon",
    "adapters": "tiny tp2 dp2 zero1 lora optim.kind=adamw optim.groups=[]",
    "scaled-by-shape": "uneven tp3 optim.kind=muon optim.muon.scale=unit_rms",
    "soap": "tiny tp2 dp2 zero1 optim.kind=soap optim.soap.max_precondition_dim=20",
    "adafactor": "tiny tp2 dp2 zero1 optim.kind=adafactor",
    "adafactor-experts": "experts dp4 ep2 zero1 optim.kind=adafactor",
    "adafactor-latent": "latent tp2 dp2 zero3 optim.kind=adafactor",
}
