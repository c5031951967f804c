"""Tests of megalith/estimate/times.py: the closed form against what torch counts in models that
compute again."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalith.config.kernels import KernelsConfig
from megalith.config.lora import LoraConfig
from megalith.config.model import AttentionConfig, LayersConfig, MLAConfig, ModelConfig, MTPConfig
from megalith.config.moe import MoEConfig
from megalith.config.parallel import RecomputeConfig, RecomputedModule
from megalith.estimate.times import repeated_flops
from megalith.kernels.backend import Backends
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_lengths
from megalith.models.decoder import Decoder, allocate, initialize
from megalith.nn.build import build_context
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.stages import Stage, single_stage
from megalith.recipes import resolve
from megalith.train.objective import sum_lm_losses

DOCUMENTS = (5, 11, 2)
MODEL = ModelConfig(
    vocab_size=48,
    pad_vocab_to_multiple_of=1,
    hidden_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=40,
    attention=AttentionConfig(causal=False),
)
"""All tokens of a document see one another, so that the plain definition forms no score that is
hidden."""

LATENT = replace(
    MODEL, num_kv_heads=4, mla=MLAConfig(kv_rank=12, q_rank=10, nope_dim=8, rope_dim=4, value_dim=6)
)
MIXTURE = replace(
    MODEL, moe=MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, shared_ffn_hidden_size=20)
)
MTP_MODEL = replace(MODEL, mtp=MTPConfig(num_layers=2))
UNLIKE = replace(
    MODEL, layers=LayersConfig(attention=("full", "none", "linear"), mlp=("linear", "full", "full"))
)


def chosen(*modules: RecomputedModule) -> RecomputeConfig:
    return RecomputeConfig(granularity="selective", modules=modules, check=True)


def counted(model: ModelConfig, recompute: RecomputeConfig) -> int:
    """Operations that torch counts in one forward and backward of the model of plain
    definitions."""
    decoder = Decoder(
        build_context(
            model,
            build_single_rank_mesh(),
            dtype=torch.float64,
            recompute=recompute,
            backends=Backends(KernelsConfig(all="reference")),
        )
    )
    allocate(decoder, torch.device("cpu"))
    initialize(decoder, seed=1)
    tokens = LayerInputs(seq_params_from_lengths(list(DOCUMENTS)))
    ids = torch.randint(
        0,
        model.vocab_size,
        (tokens.seq_params.num_tokens,),
        generator=torch.Generator().manual_seed(2),
    )
    with FlopCounterMode(display=False) as counter:
        losses = sum_lm_losses(
            decoder.outputs(ids, tokens, mtp_inputs=((ids, ids),) * model.mtp.num_layers),
            ids,
            ((ids, ids),) * model.mtp.num_layers,
        )
        torch.stack(losses).sum().backward()
    return int(counter.get_total_flops())


def repeated(
    model: ModelConfig, recompute: RecomputeConfig, *, lora: LoraConfig | None = None
) -> int:
    run = replace(resolve("tiny_cpu"), model=model, recompute=recompute, lora=lora)
    squares = sum(length**2 for length in DOCUMENTS)
    stages = (single_stage(model.num_layers),)
    return repeated_flops(run, stages, tokens=sum(DOCUMENTS), squared_lengths=squares)


FULL = RecomputeConfig(granularity="full", check=True)
CASES = {
    "whole layers": (MODEL, FULL),
    "two of three layers": (MODEL, replace(FULL, method="block", num_layers=2)),
    "two layers together": (UNLIKE, replace(FULL, num_layers=2)),
    "mtp predictions": (MTP_MODEL, FULL),
    "parts of multi-token predictions": (MTP_MODEL, chosen("core_attention", "norm")),
    "attention and mlp": (MODEL, chosen("core_attention", "mlp")),
    "activations alone": (MODEL, chosen("mlp_act", "norm")),
    "from short vectors on": (LATENT, chosen("mla_up_proj", "core_attention")),
    "a mixture": (MIXTURE, chosen("mlp", "shared_experts")),
    "experts for all": (MIXTURE, chosen("shared_experts")),
    "unlike layers": (UNLIKE, chosen("mlp", "core_attention")),
}


@pytest.mark.parametrize("name", CASES)
def test_recomputed_flops_match_those_counted_by_torch(name: str) -> None:
    """With `check`, which runs every region to its end; without it backward stops at what is saved
    last."""
    model, recompute = CASES[name]
    more = counted(model, recompute) - counted(model, RecomputeConfig())
    assert more == repeated(model, recompute)
    assert (more > 0) == (name != "activations alone")


def test_no_flops_are_repeated_without_recomputation() -> None:
    assert repeated(MTP_MODEL, RecomputeConfig()) == 0


def test_layers_below_all_adapters_are_not_recomputed() -> None:
    every, above = LoraConfig(), LoraConfig(layers=(2,))
    assert repeated(MODEL, FULL, lora=every) == 3 * repeated(MODEL, FULL, lora=above) > 0
    assert repeated(MODEL, chosen("mlp"), lora=every) == 3 * repeated(
        MODEL, chosen("mlp"), lora=above
    )


def test_layers_below_all_trained_parameters_are_not_recomputed() -> None:
    run = replace(resolve("tiny_cpu"), model=MODEL, recompute=FULL)
    above = replace(
        run, optim=replace(run.optim, frozen=("embed.*", "layers.0.*", "layers.1.attention.*"))
    )
    table = replace(run, optim=replace(run.optim, frozen=("layers.*",)))
    results = [
        repeated_flops(one, (single_stage(3),), tokens=8, squared_lengths=64)
        for one in (run, above, table)
    ]
    assert results[0] * 2 == results[1] * 3 and results[2] == results[0], (
        "the embedding is below all layers"
    )


def test_each_stage_chooses_among_its_own_layers() -> None:
    run = replace(resolve("tiny_cpu"), model=MODEL, recompute=replace(FULL, method="block"))
    stages = (Stage(range(2), embedding=True), Stage(range(2, 3), loss=True))
    result = repeated_flops(run, stages, tokens=8, squared_lengths=64)
    assert result == 2 * repeated_flops(run, (single_stage(3),), tokens=8, squared_lengths=64)
