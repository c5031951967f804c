"""Serves a tiny model, and generates, scores and evaluates with the same model without a server.

`python -m tests.clients.reference FOLDER` runs in the environment of megalith, not of the clients.
It prints the URL of the server, then answers every line of JSON from standard input with one.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megalith.config.generation import SamplingParams
from megalith.config.train import SuiteConfig
from megalith.hf.release import release_run
from megalith.infer.llm import LLM
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.train.run_folder import RunFolder
from megalith.train.suites import run_suite
from tests.serve.servers import CONFIG, TOKENIZER, make_run, running_server


def score(llm: LLM, context: str, continuation: str) -> float:
    """Return the log-likelihood of a continuation."""
    encode = llm.generator.tokenizer.encode
    num_context = len(encode(context))
    params = SamplingParams(max_new_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([encode(context + continuation)], params)
    assert output.prompt_logprobs is not None
    return sum(item.logprob for item in output.prompt_logprobs[num_context - 1 :])


def chat(llm: LLM, messages: list[dict[str, str]], max_new_tokens: int) -> str:
    """Return the greedy answer to a conversation."""
    params = SamplingParams(temperature=0, max_new_tokens=max_new_tokens)
    return llm.chat(messages, params, template_name="chatml").outputs[0].text


def evaluate(folder: Path, questions: str) -> dict[str, float | None]:
    """Return the accuracies of a suite of multiple-choice questions, a JSONL file."""
    suite = SuiteConfig(kind="choice", path=(questions,))
    run = replace(release_run("tiny", CONFIG, TOKENIZER, folder), evaluate={"quiz": suite})
    mesh, device = build_single_rank_mesh(), torch.device("cpu")
    return {**run_suite(run, RunFolder(folder), mesh, device, name="quiz").metrics("quiz")}


def answer(llm: LLM, folder: Path, request: dict[str, Any]) -> Any:
    """Return the result of one line."""
    if "questions" in request:
        return evaluate(folder, request["questions"])
    if "messages" in request:
        return chat(llm, request["messages"], request["max_new_tokens"])
    return score(llm, request["context"], request["continuation"])


def main() -> None:
    """Serve until standard input is closed."""
    run = make_run(Path(sys.argv[1]))
    llm = LLM(run)
    with running_server(run, "--served-model-name", "tiny", "--template", "chatml") as server:
        print(server.url, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(llm, run, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
