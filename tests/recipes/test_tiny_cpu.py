"""The recipe tiny_cpu."""

from megalith.plan.costs import num_parameters, step_flops
from megalith.recipes import build_recipe


def test_tiny_cpu_is_of_the_5m_class_and_a_minute_of_one_slow_core() -> None:
    run = build_recipe("tiny_cpu")
    assert 4e6 < num_parameters(run.model) < 6e6
    tokens = run.train.global_batch_size * run.train.seq_len
    flops = run.train.steps * step_flops(
        run.model, tokens=tokens, squared_lengths=tokens * run.train.seq_len
    )
    assert flops / 25e9 < 60  # 25 GFLOP/s: a quarter of what one current core reaches
