"""What runs of published models share."""

from megalith.config.model import ModelConfig
from megalith.recipes.published import pretraining, warmed_cosine


def test_a_run_has_the_models_vocabulary_and_trains_in_bf16_on_made_up_tokens() -> None:
    model = ModelConfig(vocab_size=9, hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=2, ffn_hidden_size=8)
    run = pretraining("x", model, warmed_cosine(1e-3), seq_len=16)
    assert (run.tokenizer.vocab_size, run.precision.params, run.data.mock, run.train.seq_len) == (9, "bf16", True, 16)
    assert (run.schedule.lr, run.schedule.min_lr, run.schedule.warmup_steps) == (1e-3, 1e-4, 2000)
