"""The sizes of a model."""

from megalith.config.model import ModelConfig


def model(**changes: int) -> ModelConfig:
    sizes = {
        "vocab_size": 257,
        "hidden_size": 96,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 3,
    }
    return ModelConfig(**({"ffn_hidden_size": 64} | sizes | changes))


def test_heads_share_the_hidden_size_unless_they_have_their_own() -> None:
    assert model().head_size() == 16
    assert model(head_dim=40).head_size() == 40


def test_the_vocabulary_is_padded_up_to_its_multiple_and_never_down() -> None:
    assert model().padded_vocab_size() == 320
    assert model(vocab_size=256).padded_vocab_size() == 256
    assert model(pad_vocab_to_multiple_of=1).padded_vocab_size() == 257
