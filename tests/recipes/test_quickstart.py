"""The recipe quickstart."""

from megalith.plan.costs import num_parameters
from megalith.recipes import build_recipe


def test_quickstart_reads_a_million_tokens_with_a_vocabulary_of_at_least_4096() -> None:
    run = build_recipe("quickstart")
    assert run.model.vocab_size >= 4096
    assert 0.99e6 < run.train.steps * run.train.global_batch_size * run.train.seq_len <= 1.0e6
    assert 1e6 < num_parameters(run.model) < 3e6
