"""Rules of tokenizer settings."""

import pytest

from megalith.config.data import TokenizerConfig, tokenizer_problems


def test_each_kind_has_a_correct_form() -> None:
    assert tokenizer_problems(TokenizerConfig()) == []
    assert tokenizer_problems(TokenizerConfig(kind="huggingface", path="folder", eod="</s>")) == []
    assert tokenizer_problems(TokenizerConfig(kind="null", vocab_size=100)) == []


@pytest.mark.parametrize(
    "tokenizer, text",
    [
        (
            TokenizerConfig(kind="huggingface"),
            "tokenizer.kind=huggingface needs tokenizer.path. Set it to a folder",
        ),
        (
            TokenizerConfig(path="gpt2"),
            "tokenizer.path=gpt2 applies to tokenizers that are read from files",
        ),
        (
            TokenizerConfig(eod="x"),
            "tokenizer.eod=x applies to tokenizers that are read from files",
        ),
        (
            TokenizerConfig(kind="null"),
            "tokenizer.vocab_size=None: the null tokenizer needs a vocabulary size",
        ),
        (
            TokenizerConfig(vocab_size=300),
            "tokenizer.vocab_size=300: a byte tokenizer defines its own size",
        ),
    ],
)
def test_each_violated_rule_is_reported_with_its_value(
    tokenizer: TokenizerConfig, text: str
) -> None:
    assert [problem.startswith(text) for problem in tokenizer_problems(tokenizer)] == [True]
