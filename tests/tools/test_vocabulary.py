"""The list of old words is well formed, and spellings are recognized word by word."""

from pathlib import Path

import pytest
import yaml

from tools.vocabulary import find_american_spelling, read_vocabulary, split_words

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("KVCache", ["kv", "cache"]),
        ("_num_read2", ["num", "read"]),
        ("key/value cache", ["key", "value", "cache"]),
        ("HF_TOKEN", ["hf", "token"]),
    ],
)
def test_identifiers_and_texts_are_split_into_words(text: str, words: list[str]) -> None:
    assert split_words(text) == words


def test_no_replacement_contains_the_word_that_it_replaces() -> None:
    vocabulary = read_vocabulary()
    for old in vocabulary.words:
        assert not old.is_part_of(split_words(old.use)), old
    for old in (*vocabulary.names, *vocabulary.values, *vocabulary.settings):
        assert old.word not in old.use.split(), old


def test_every_scope_matches_a_file_of_the_repository() -> None:
    vocabulary = read_vocabulary()
    paths = [path.relative_to(ROOT).as_posix() for path in (ROOT / "megalith").rglob("*.py")]
    for old in (*vocabulary.words, *vocabulary.names, *vocabulary.values):
        assert any(old.applies_to(path) for path in paths), old


def test_a_file_that_may_quote_old_words_has_none() -> None:
    vocabulary = read_vocabulary()
    assert list(vocabulary.for_file("megalith/nn/a.py").faults_of_name("further_loss"))
    assert not list(vocabulary.for_file("docs/log.md").faults_of_name("further_loss"))


def test_every_renamed_setting_is_an_old_setting() -> None:
    document = yaml.safe_load((ROOT / "megalith/config/renamed.yaml").read_text())
    vocabulary = read_vocabulary()
    for name in document["settings"]:
        assert any(old.is_setting_in(name) for old in vocabulary.settings), name
    for name in document["settings"].values():
        assert not any(old.is_setting_in(name) for old in vocabulary.settings), name


@pytest.mark.parametrize(
    ("british", "american"),
    [
        ("optimise", "optimize"),
        ("tokenisation", "tokenization"),
        ("behaviours", "behaviors"),
        ("learnt", "learned"),
        ("neighbouring", "neighboring"),
    ],
)
def test_british_spelling_is_recognized(british: str, american: str) -> None:
    assert find_american_spelling(british) == american


@pytest.mark.parametrize(
    "word", ["otherwise", "noise", "supervised", "raises", "hour", "promising", "list", "axis"]
)
def test_american_spelling_is_accepted(word: str) -> None:
    assert find_american_spelling(word) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("words: []", "has the lists"),
        ("words: [{word: a}]", "expected the texts word and use"),
        ("words: [{word: a, use: b, scope: nn}]", "scope='nn'"),
    ],
)
def test_a_malformed_list_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    rest = (
        ""
        if "[]" in text
        else "\nnames: []\nvalues: []\nsettings: []\nstored_strings: []\nfiles: []\nspellings: {}"
    )
    (tmp_path / "words.yaml").write_text(text + rest)
    with pytest.raises(ValueError, match=message):
        read_vocabulary(tmp_path / "words.yaml")
