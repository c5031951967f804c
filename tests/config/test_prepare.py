"""Rules of the settings of prepare."""

from megalith.config.data import PrepareConfig, TokenizerConfig, prepare_problems


def test_a_plain_config_is_accepted() -> None:
    assert prepare_problems(PrepareConfig(input=("a.txt",), output="a")) == []


def test_all_violated_rules_are_reported_together() -> None:
    config = PrepareConfig(
        input=(),
        output="a",
        keys=("text", "text"),
        workers=0,
        resume=True,
        overwrite=True,
        tokenizer=TokenizerConfig(kind="null"),
    )
    printed = "\n".join(prepare_problems(config))
    for text in (
        "tokenizer.vocab_size=None",
        "input=() is empty",
        "keys=('text', 'text'): use one or more different keys",
        "workers=0 must be at least 1",
        "resume=True and overwrite=True exclude each other. Use resume to continue",
    ):
        assert text in printed
