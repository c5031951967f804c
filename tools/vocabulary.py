"""The old words of tools/old_words.yaml and British spellings, searched for in names and texts.

docs/glossary.md explains the terms that replace them. `tools/lint_project.py` applies this file to
the repository.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

OLD_WORDS = Path(__file__).with_name("old_words.yaml")


def split_words(text: str) -> list[str]:
    """Return the words of identifiers or of prose, in lower case.

    >>> split_words("_FurtherLoss of num_read HTTPHeader")
    ['further', 'loss', 'of', 'num', 'read', 'http', 'header']
    """
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)]


@dataclass(frozen=True, slots=True)
class OldWord:
    """One entry of tools/old_words.yaml: an old word and its replacement."""

    word: str
    use: str
    scope: tuple[str, ...] = ()
    """Globs of the paths in which it is not allowed; empty: everywhere."""

    def applies_to(self, path: str) -> bool:
        """Whether the word is not allowed in the file `path`."""
        return not self.scope or any(fnmatchcase(path, glob) for glob in self.scope)

    def is_part_of(self, words: Sequence[str]) -> bool:
        """Whether its words follow each other in `words`."""
        wanted = self.word.split()
        if len(wanted) == 1:
            return self.word in words
        return any(
            words[i : i + len(wanted)] == wanted for i in range(len(words) - len(wanted) + 1)
        )

    def is_setting_in(self, text: str) -> bool:
        """Whether `text` names this setting, with or without the sections above it.

        >>> old = OldWord("moe.experts", "moe.num_experts")
        >>> texts = "model.moe.experts=8", "layers.1.moe.experts", "moe.experts.up"
        >>> [old.is_setting_in(text) for text in texts]
        [True, False, False]
        """
        return (
            re.search(
                rf"(?<![\w.*])(?:[a-z_]+\.)*{re.escape(self.word)}(?!\w|\*|\.[\w*]|\.\Z)", text
            )
            is not None
        )


@dataclass(frozen=True, slots=True)
class Spellings:
    """Words by which British spelling is recognized."""

    british: Mapping[str, str]
    """British spelling -> American spelling, of words that follow no rule."""

    british_our: tuple[str, ...]
    """Stems in -our whose American spelling ends in -or."""

    american_ise: frozenset[str]
    """Words that end in -ise in American spelling too; all words in -wise do."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The contents of tools/old_words.yaml."""

    words: tuple[OldWord, ...]
    names: tuple[OldWord, ...]
    values: tuple[OldWord, ...]
    settings: tuple[OldWord, ...]
    stored_strings: tuple[str, ...]
    files: tuple[str, ...]
    spellings: Spellings

    def skips(self, path: str) -> bool:
        """Whether the file `path` may quote old words."""
        return any(fnmatchcase(path, glob) for glob in self.files)

    def for_file(self, path: str) -> "Vocabulary":
        """Return the words that are not allowed in the file `path`."""
        return replace(
            self,
            words=self._select(self.words, path),
            names=self._select(self.names, path),
            values=self._select(self.values, path),
            settings=self._select(self.settings, path),
        )

    def _select(self, entries: Sequence[OldWord], path: str) -> tuple[OldWord, ...]:
        return () if self.skips(path) else tuple(old for old in entries if old.applies_to(path))

    def without_stored_strings(self, text: str) -> str:
        """Return `text` without the strings that are data."""
        for stored in self.stored_strings:
            text = text.replace(stored, " ")
        return text

    def faults_of_name(self, name: str) -> Iterator[str]:
        """Old words in an identifier."""
        words = split_words(self.without_stored_strings(name))
        for old in self.words:
            if old.is_part_of(words):
                yield f'name {name}: old word "{old.word}". Use {old.use}.'
        for old in self.names:
            if fnmatchcase(name.lstrip("_"), old.word):
                yield f'old name "{name}". Use {old.use}.'

    def faults_of_text(self, text: str) -> Iterator[str]:
        """Old words in a message, or in the first line of a docstring."""
        words = split_words(self.without_stored_strings(text))
        for old in self.words:
            if old.is_part_of(words):
                yield f'text {_shorten(text)!r}: old word "{old.word}". Use {old.use}.'

    def faults_of_value(self, text: str) -> Iterator[str]:
        """Old names of choices: string literals that are one."""
        for old in self.values:
            if text == old.word:
                yield f'old value "{text}". Use {old.use}.'

    def faults_of_settings(self, text: str) -> Iterator[str]:
        """Old names of settings in a text."""
        for old in self.settings:
            if old.is_setting_in(text):
                yield f'old setting "{old.word}". Use {old.use}.'

    def faults_of_file_name(self, path: str) -> Iterator[str]:
        """Old words in the path below the top folder."""
        words = split_words("/".join(Path(path).with_suffix("").parts[1:]))
        for old in self.words:
            if old.is_part_of(words):
                yield f'file name {path}: old word "{old.word}". Use {old.use}.'


def _shorten(text: str) -> str:
    """The first line of `text`, 40 characters at most."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= 40 else f"{line[:37]}..."


@cache
def read_vocabulary(path: Path = OLD_WORDS) -> Vocabulary:
    """Read the list of old words.

    Raises:
        ValueError: a list or a key is unknown or missing, or a scope is neither `all` nor a list of
        globs.
    """
    document: dict[str, Any] = yaml.safe_load(path.read_text())  # Any: YAML
    expected = {"words", "names", "values", "settings", "stored_strings", "files", "spellings"}
    if set(document) != expected:
        raise ValueError(
            f"{path.name} has the lists {sorted(document)}. Use exactly {sorted(expected)}."
        )
    kinds = ("words", "names", "values", "settings")
    entries = {kind: tuple(_read_old_word(entry) for entry in document[kind]) for kind in kinds}
    return Vocabulary(
        **entries,
        stored_strings=tuple(document["stored_strings"]),
        files=tuple(document["files"]),
        spellings=_read_spellings(document["spellings"]),
    )


def _read_spellings(document: Mapping[str, Any]) -> Spellings:  # Any: YAML
    return Spellings(
        british=document["british"],
        british_our=tuple(document["british_our"]),
        american_ise=frozenset(document["american_ise"]),
    )


def _read_old_word(entry: Mapping[str, object]) -> OldWord:
    word, use, scope = entry.get("word"), entry.get("use"), entry.get("scope", "all")
    if (
        not isinstance(word, str)
        or not isinstance(use, str)
        or set(entry) - {"word", "use", "scope"}
    ):
        raise ValueError(f"old word {dict(entry)}: expected the texts word and use, and a scope.")
    globs = tuple(scope) if isinstance(scope, list) else ()
    if not globs and scope != "all":
        raise ValueError(f"old word {word!r}: scope={scope!r}. Use all, or a list of globs.")
    return OldWord(word, use, globs)


def find_american_spelling(word: str) -> str | None:
    """Return the American spelling of a British word in lower case; None for any other word.

    Words in -ise and -our, unless listed as American too, and a list of words that follow no rule.

    >>> words = "initialised", "raising", "neighbours", "four", "rowwise"
    >>> [find_american_spelling(word) for word in words]
    ['initialized', None, 'neighbors', None, None]
    """
    spellings = read_vocabulary().spellings
    if word in spellings.british:
        return spellings.british[word]
    for stem in spellings.british_our:
        if stem in word:
            return word.replace(stem, f"{stem.removesuffix('our')}or")
    match = re.fullmatch(r"(\w{2,})is(e|ed|er|ers|es|ing|able|ation|ations)", word)
    if match is None:
        return None
    verb = f"{match[1]}ise"
    if verb in spellings.american_ise or verb.endswith("wise") or word == "crises":
        return None
    return f"{match[1]}iz{match[2]}"
