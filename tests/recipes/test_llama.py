"""Batch sizes, positions and memory of the Llama recipes."""

from megalith.estimate.advise import verdict
from megalith.estimate.memory import memory_ledger, worst
from megalith.estimate.workload import plan_workload
from megalith.plan.devices import DEVICES
from megalith.recipes import build_recipe


def test_a_step_of_llama_2_has_four_million_tokens_and_the_run_two_trillion() -> None:
    for run in (build_recipe("llama2_7b"), build_recipe("llama2_70b")):
        tokens = run.train.global_batch_size * run.train.seq_len
        assert tokens == 2**22 and round(tokens * run.train.steps / 1e9) == 2001
        assert (run.optim.eps, run.schedule.warmup_steps, run.schedule.min_lr * 10) == (
            1e-5,
            2000,
            run.schedule.lr,
        )


def test_llama_2_70b_fits_sixteen_nodes_and_not_one() -> None:
    result = {}
    for world in (8, 128):
        held = worst(
            memory_ledger(plan_workload(build_recipe("llama2_70b"), world), DEVICES["h100"])
        ).memory.total
        result[world] = verdict(held, DEVICES["h100"])
    assert result[128] == "fits" and result[8] != "fits"


def test_rope_scaling_of_llama_3_is_the_published_one() -> None:
    rope = build_recipe("llama3_8b").model.rope
    assert (rope.theta, rope.scaling, rope.factor) == (500_000.0, "llama3", 8.0)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position) == (
        1.0,
        4.0,
        8192,
    )
    assert build_recipe("llama3_1b").model.rope.factor == 32.0


def test_the_batch_of_llama_3_70b_divides_over_4096_ranks() -> None:
    run = build_recipe("llama3_70b")
    replicas = 4096 // run.parallel.tp
    assert run.train.global_batch_size % (replicas * run.train.micro_batch_size) == 0


def test_the_batch_of_llama_3_405b_divides_over_16384_ranks() -> None:
    run = build_recipe("llama3_405b")
    replicas = 16_384 // (run.parallel.tp * run.parallel.pp)
    rows = run.train.global_batch_size
    assert rows * run.train.seq_len == 16_777_216, "tokens of a step, as published"
    assert rows // replicas % run.parallel.pp == 0, (
        "whole groups of microbatches for the interleaved schedule"
    )


def test_llama_3_405b_fits_the_gpus_it_was_trained_on() -> None:
    held = worst(
        memory_ledger(plan_workload(build_recipe("llama3_405b"), 16_384), DEVICES["h100"])
    ).memory.total
    assert verdict(held, DEVICES["h100"]) == "fits"
