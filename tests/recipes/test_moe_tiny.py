"""The small mixture of experts."""

from megalith.plan.costs import num_parameters
from megalith.recipes.moe_tiny import moe_tiny
from megalith.train.rules import run_problems


def test_moe_tiny_divides_its_experts_over_two_processes() -> None:
    run = moe_tiny()
    assert run.parallel.ep == 2 and run_problems(run, world=2) == []
    assert 1e6 < num_parameters(run.model) < 3e6
    assert run.train.steps * run.train.global_batch_size * run.train.seq_len < 0.5e6
