"""docs/howto/from_vllm.md names options, settings and parameters that exist."""

import re
from dataclasses import fields
from pathlib import Path

from megalith.cli.serve import ServeOptions
from megalith.config.fields import setting_names
from megalith.config.generation import SamplingParams
from megalith.config.server import ServeRun
from megalith.infer.llm import LLM, AsyncLLM
from megalith.serve.chat import FIELDS as CHAT_FIELDS
from megalith.serve.completions import FIELDS as COMPLETION_FIELDS

PAGE = Path(__file__).parents[2] / "docs/howto/from_vllm.md"
NAMED_DIFFERENTLY = {"SOURCE", "MEGALITH_API_KEY"}


def read_table(heading: str) -> list[tuple[str, str]]:
    """Return the first two cells of the rows of the table with a heading."""
    lines = PAGE.read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    rows = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows.append((cells[0], " ".join(cells[1:])))
    return rows


def find_words(text: str) -> list[str]:
    """Return what is marked as code."""
    return re.findall(r"`([^`]+)`", text)


def test_every_option_of_the_server_exists() -> None:
    options = {field.name.replace("_", "-") for field in fields(ServeOptions)}
    names = options | set(setting_names(ServeRun))
    rows = read_table("`vllm serve`")
    assert len(rows) > 30
    for _, text in rows:
        for word in find_words(text):
            for option in re.findall(r"--([\w.-]+)", word):
                assert option in names, option
            assert word.startswith("--") or word in NAMED_DIFFERENTLY, word


def test_every_sampling_parameter_exists() -> None:
    names = {field.name for field in fields(SamplingParams)}
    rows = read_table("`SamplingParams` of vLLM")
    assert len(rows) > 8
    for _, text in rows:
        columns = find_words(text)
        assert columns and set(columns) <= names, columns


def test_every_method_exists() -> None:
    classes = {"LLM": LLM, "AsyncLLM": AsyncLLM}
    count = 0
    for _, text in read_table("vLLM"):
        for name, method in re.findall(r"\b(LLM|AsyncLLM)\.(\w+)", text):
            assert hasattr(classes[name], method), (name, method)
            count += 1
    assert count > 5


def test_every_field_of_requests_is_accepted() -> None:
    text = PAGE.read_text().partition("completions and chat requests accept")[2].partition(".")[0]
    assert len(find_words(text)) > 10
    for word in find_words(text):
        assert word in CHAT_FIELDS, word
        assert word in COMPLETION_FIELDS or word == "chat_template_kwargs", word
