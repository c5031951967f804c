"""docs/glossary.md is well formed and current, and the standard terms occur in the packages that
implement them."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs/glossary.md"
COLUMNS = ["term", "meaning", "Megatron Core", "Hugging Face", "torchtitan"]

PACKAGES = {
    "gradient accumulation": "train",
    "gradient clipping": "optim",
    "activation checkpointing": "parallel",
    "activation offload": "parallel",
    "KV cache": "infer",
    "token dispatcher": "parallel",
    "expert parallel": "parallel",
    "expert bias": "nn",
    "aux loss": "nn",
    "capacity factor": "rules",
    "dropless": "rules",
    "token dropping": "rules",
    "loss mask": "data",
    "attention mask": "kernels",
    "position ids": "kernels",
    "sequence packing": "data",
    "ring attention": "parallel",
    "Ulysses": "parallel",
    "load-balanced context parallel": "plan",
    "zig-zag": "plan",
    "distributed optimizer": "parallel",
    "ZeRO": "parallel",
    "main_grad": "kernels",
    "master weights": "optim",
    "loss scaling": "optim",
    "deferred weight gradient": "parallel",
    "warmup": "plan",
    "cooldown": "plan",
    "device mesh": "parallel",
    "state_dict": "train",
    "preemption": "train",
    "fault tolerance": "launch",
    "1F1B": "plan",
    "interleaved": "plan",
    "zero bubble": "plan",
    "tensor parallel": "parallel",
    "sequence parallel": "parallel",
    "pipeline parallel": "parallel",
    "data parallel": "parallel",
    "HSDP": "parallel",
    "FSDP": "parallel",
    "MFU": "observe",
    "exposed communication": "train",
    "multi-token prediction": "nn",
}
"""Term -> the package that implements it, and has the term in a docstring."""


def read_rows() -> list[list[str]]:
    """Return the cells of every row of the glossary, without the rows of column names."""
    lines = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [row for row in rows if row != COLUMNS and not row[0].startswith("---")]


@cache
def docstrings_of(package: str) -> str:
    """Return all docstrings of a package, with single spaces for white space and hyphens."""
    texts = []
    for path in sorted((ROOT / "megalith" / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                texts.append(str(node.value.value))
    return _join_words(" \n ".join(texts))


def _join_words(text: str) -> str:
    return " ".join(re.sub(r"(?<=\w)-(?=\w)", " ", text).split())


@cache
def names_in_package() -> frozenset[str]:
    """Return every identifier and every word of a string in the code of the package."""
    texts = [path.read_text() for path in (ROOT / "megalith").rglob("*.py")]
    return frozenset(name for text in texts for name in re.findall(r"\w+", text))


@pytest.mark.parametrize(("term", "package"), PACKAGES.items())
def test_a_docstring_of_the_package_has_the_standard_term(term: str, package: str) -> None:
    is_acronym = term != term.lower()
    text, words = docstrings_of(package), _join_words(term)
    match = re.search(rf"\b{re.escape(words)}", text, 0 if is_acronym else re.IGNORECASE)
    assert match, f"no docstring of megalith/{package} has the term {term!r}"


def test_every_row_of_the_glossary_has_a_term_a_meaning_and_three_other_names() -> None:
    for row in read_rows():
        assert len(row) == len(COLUMNS), row
        assert all(row), row
        assert row[1].endswith("."), row


def test_no_term_of_the_glossary_has_two_rows() -> None:
    terms = [row[0] for row in read_rows()]
    assert len(terms) == len(set(terms))


@pytest.mark.parametrize("term", [row[0] for row in read_rows() if "`" in row[0]])
def test_names_in_the_glossary_occur_in_the_package(term: str) -> None:
    for name in re.findall(r"`([^`]+)`", term):
        assert set(re.findall(r"\w+", name)) <= names_in_package(), f"{name} is not in megalith/"


@pytest.mark.parametrize("term", PACKAGES)
def test_the_glossary_explains_every_standard_term(term: str) -> None:
    terms = _join_words(" ".join(row[0] for row in read_rows())).lower()
    assert _join_words(term).lower() in terms, f"docs/glossary.md has no row for {term!r}"
