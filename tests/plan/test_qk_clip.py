"""Factors of QK-clip, their parts in slices of parameters, and the settings that it rejects."""

import math
import random
from dataclasses import replace

import numpy as np

from megalith.config.fields import range_problems
from megalith.config.lora import LoraConfig
from megalith.config.model import CrossConfig, LayersConfig, MLAConfig, MTPConfig
from megalith.config.optim import OptimConfig, QkClipConfig
from megalith.config.plugins import ModelPlugins
from megalith.config.replica_group import ReplicaGroupConfig
from megalith.config.train import TrainRun
from megalith.plan.param_groups import named_parameters
from megalith.plan.qk_clip import (
    AttentionHeads,
    LargestScore,
    find_largest_score,
    list_attentions,
    list_head_factors,
    qk_clip_problems,
    row_factors,
    split_factors,
)
from megalith.plan.shards import Shard
from megalith.rules.run import run_problems
from megalith.testing.tiny import tiny_run
from megalith.verify.matrix import MODELS
from tests.cases import loop_over

CLIP = QkClipConfig(threshold=100.0, balance=0.25)
GROUPED = AttentionHeads("layers.1.attention", 4, 2)
LATENT = AttentionHeads(
    "layers.1.attention", 2, 2, MLAConfig(kv_rank=7, nope_dim=3, rope_dim=2, value_dim=4)
)


def test_heads_that_share_keys_get_the_smallest_factor_of_the_group() -> None:
    queries, groups = list_head_factors([50.0, 200.0, -math.inf, 100.0], 2, 100.0)
    assert (queries, groups) == ([0.5, 0.5, 1.0, 1.0], [0.5, 1.0])
    assert list_head_factors([400.0, 50.0, math.inf, math.nan], 4, 100.0)[0] == [0.25, 1, 1, 1]
    assert list_head_factors([400.0, -800.0], 1, 100.0) == ([0.25, 0.25], [0.25])


def test_factors_of_queries_and_keys_multiply_to_that_of_the_scores() -> None:
    scores = [50.0, 1600.0, 100.0, 400.0]
    q, kv, bias = (row_factors(GROUPED, f"layers.1.attention.{w}", scores, CLIP) for w in WORDS)
    assert q is not None and kv is not None and bias is not None
    np.testing.assert_allclose(q, [0.5, 0.5, 0.25**0.25, 0.25**0.25])
    np.testing.assert_allclose(kv[0], [0.0625**0.75, 0.25**0.75])
    np.testing.assert_allclose(q[[0, 2]] * kv[0], [0.0625, 0.25])
    assert (kv[1] == 1).all() and (bias == kv).all()
    for name in ("layers.1.attention.o", "layers.0.attention.q", "layers.1.attention.gate"):
        assert row_factors(GROUPED, name, scores, CLIP) is None


WORDS = ("q", "kv", "kv_bias")


def test_rotary_queries_of_latent_attention_get_the_whole_factor() -> None:
    clip = QkClipConfig()
    for word in ("q", "q_up"):
        q = row_factors(LATENT, f"layers.1.attention.{word}", [400.0, 50.0], clip)
        assert q is not None and q.tolist() == [[0.5, 0.5, 0.5, 0.25, 0.25], [1.0] * 5]
    up = row_factors(LATENT, "layers.1.attention.kv_up", [400.0, 50.0], clip)
    assert up is not None and up.tolist() == [[0.5] * 3 + [1.0] * 4, [1.0] * 7]
    for word in ("kv_down", "q_down", "o"):
        assert row_factors(LATENT, f"layers.1.attention.{word}", [400.0, 50.0], clip) is None


@loop_over("seed", range(60))
def test_factors_of_slices_are_those_of_the_whole_parameter(seed: int) -> None:
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(1, 4)))
    leading = draw.randint(1, len(shape))
    factors = np.random.default_rng(seed).random(shape[:leading])
    whole = np.broadcast_to(factors.reshape(factors.shape + (1,) * (len(shape) - leading)), shape)
    box = tuple((start := draw.randint(0, n - 1), draw.randint(start + 1, n)) for n in shape)
    local = whole[tuple(slice(*span) for span in box)].ravel()
    start = draw.randint(0, len(local))
    flat = None if draw.random() < 0.3 else (start, draw.randint(start, len(local)))
    parts = split_factors(Shard("w", shape, box, flat=flat), factors)
    values = [np.broadcast_to(part.factors, part.shape).ravel() for part in parts]
    expected = local if flat is None else local[flat[0] : flat[1]]
    np.testing.assert_array_equal(np.concatenate([*values, []]), expected)
    assert sum(part.numel for part in parts) == len(expected)


@loop_over("name", MODELS)
def test_attention_modules_are_those_of_the_parameters(name: str) -> None:
    model = MODELS[name]
    projections = ("q", "q_up", "kv", "kv_up")
    named = [parameter.name.rpartition(".") for parameter in named_parameters(model, None)]
    prefixes = {prefix for prefix, _, word in named if word in projections}
    assert {attention.name for attention in list_attentions(model)} == prefixes


def test_largest_score_names_the_module_and_the_head() -> None:
    attentions = (GROUPED, LATENT)
    scores = [[-2.0, 3.0, 1.0, 3.0], [-math.inf, 2.0]]
    assert find_largest_score(attentions, scores) == LargestScore(3.0, GROUPED.name, 1)
    assert find_largest_score(attentions, [[-math.inf], [-math.inf]]) is None
    largest = find_largest_score(attentions, [[4.0, math.inf], [math.nan]])
    assert largest is not None and math.isnan(largest.score)


# --- settings


def with_clip(clip: QkClipConfig | None = CLIP, **model: object) -> TrainRun:
    run = tiny_run()
    return replace(run, model=replace(run.model, **model), optim=replace(run.optim, qk_clip=clip))


def test_valid_settings_have_no_problem() -> None:
    assert qk_clip_problems(tiny_run()) == []
    for model in ({}, {"cross": CrossConfig(memory=1)}, {"mtp": MTPConfig(num_layers=1)}):
        assert run_problems(with_clip(**model), 1) == []


@loop_over("norm", ("head", "whole", "l2"))
def test_qk_norms_are_rejected_with_what_bounds_the_scores(norm: str) -> None:
    run = with_clip()
    attention = replace(run.model.attention, qk_norm=norm)
    (problem,) = qk_clip_problems(replace(run, model=replace(run.model, attention=attention)))
    what = {"head": "QK norm of each head", "whole": "QK norm over all heads", "l2": "L2 norm"}
    assert problem.startswith(f"optim.qk_clip with model.attention.qk_norm={norm}: the ")
    assert f"{what[norm]}" in problem and "already bounds the attention scores" in problem
    assert problem.endswith("Set optim.qk_clip=none, or model.attention.qk_norm=none.")


def test_frozen_projections_and_adapters_are_rejected() -> None:
    run = with_clip()
    frozen = replace(run, optim=replace(run.optim, frozen=("layers.1.attention.q",)))
    (problem,) = qk_clip_problems(frozen)
    assert problem.startswith("optim.qk_clip with frozen layers.1.attention.q: QK-clip scales")
    heads = replace(run, optim=replace(run.optim, trained=("head.weight",)))
    assert "frozen layers.0.attention.q and 3 more" in qk_clip_problems(heads)[0]
    (problem,) = qk_clip_problems(replace(run, lora=LoraConfig(rank=2)))
    assert problem.startswith("optim.qk_clip with lora: the projections of queries and keys are")
    assert problem.endswith("Set optim.qk_clip=none.")


def test_summed_replica_groups_are_rejected() -> None:
    group = ReplicaGroupConfig(coordinator="127.0.0.1:29700", id="a")
    run = replace(with_clip(), replica_group=group)
    (problem,) = qk_clip_problems(run)
    assert problem.startswith("optim.qk_clip with replica_group.mode=sync: the largest scores")
    assert "replica_group.mode=diloco" in problem
    assert qk_clip_problems(replace(run, replica_group=replace(group, mode="diloco"))) == []


def test_models_without_queries_and_keys_and_plugins_are_rejected() -> None:
    for clip, logs, names in (
        (CLIP, False, "optim.qk_clip"),
        (None, True, "observe.max_attention_logit=true"),
        (CLIP, True, "optim.qk_clip and observe.max_attention_logit=true"),
    ):
        run = with_clip(clip, layers=LayersConfig(attention=("linear",)))
        run = replace(run, observe=replace(run.observe, max_attention_logit=logs))
        (problem,) = qk_clip_problems(run)
        assert problem.startswith(f"{names} with model.layers.attention=[linear]: no layer has")
        run = with_clip(clip, plugins=ModelPlugins(attention="mine"))
        run = replace(run, observe=replace(run.observe, max_attention_logit=logs))
        (problem,) = qk_clip_problems(run)
        assert problem.startswith(f"{names} with model.plugins.attention=mine: only the built-in")


def test_ranges_are_reported_with_a_value_that_works() -> None:
    for clip, text in (
        (QkClipConfig(threshold=0.0), "threshold=0.0 must be a finite number above 0. Use 100"),
        (QkClipConfig(threshold=-1.0), "threshold=-1.0 must be a finite number above 0. Use 100"),
        (
            QkClipConfig(balance=1.5),
            "balance=1.5 must be at most 1. Set optim.qk_clip.balance to 1 or less",
        ),
        (QkClipConfig(balance=-0.5), "balance=-0.5 must be a finite number of at least 0. Use 0.5"),
        (QkClipConfig(every=0), "every=0 must be at least 1. Use 1"),
    ):
        problems = range_problems(OptimConfig(qk_clip=clip), "optim", kinds=(int, float))
        assert len(problems) == 1 and f"optim.qk_clip.{text}" in problems[0], problems
