"""lm-eval evaluates a served model: its log-likelihoods and texts are those of the engine, and its
accuracies those of an evaluation suite."""

import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent / "tasks"
NUM_GENERATED = 24  # max_gen_toks in generation.yaml


@pytest.fixture(autouse=True)
def dataset_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the data files again in every test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))


def evaluate(task: str, model: str, url: str, **options: Any) -> dict[str, Any]:
    """Evaluate a served model with a task on disk; returns metrics and samples."""
    results = lm_eval.simple_evaluate(
        model=model,
        model_args={"model": "tiny", "base_url": url, "num_concurrent": 4, "max_length": 256},
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )
    assert results is not None
    return {"metrics": results["results"][task], "samples": results["samples"][task]}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_log_likelihoods_equal_scoring_without_a_server(reference: Any, batch_size: int) -> None:
    url = f"{reference.url}/v1/completions"
    result = evaluate("choice", "local-completions", url, batch_size=batch_size)
    num_correct = 0
    for sample in result["samples"]:
        choices = sample["doc"]["choices"]
        scores = []
        for choice, ((value, _),) in zip(choices, sample["resps"], strict=True):
            context = f"Question: {sample['doc']['question']}\nAnswer:"
            expected = reference.ask(context=context, continuation=f" {choice}")
            assert float(value) == pytest.approx(expected, abs=1e-4), (context, choice)
            scores.append(expected)
        num_correct += scores.index(max(scores)) == sample["doc"]["answer"]
    assert len(result["samples"]) == 5
    assert result["metrics"]["acc,none"] == pytest.approx(num_correct / 5)


def test_evaluation_suite_has_the_accuracies_of_lm_eval(reference: Any, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (TASKS / "choice.jsonl").read_text().splitlines()]
    (tmp_path / "quiz.jsonl").write_text(
        "".join(
            json.dumps({**row, "context": f"Question: {row['question']}\nAnswer:"}) + "\n"
            for row in rows
        )
    )
    accuracies = reference.ask(questions=str(tmp_path / "quiz.jsonl"))
    metrics = evaluate("choice", "local-completions", f"{reference.url}/v1/completions")["metrics"]
    assert 0 < metrics["acc,none"] < 1 and metrics["acc,none"] != metrics["acc_norm,none"]
    for name in ("acc", "acc_norm"):
        assert accuracies[f"quiz_{name}"] == pytest.approx(metrics[f"{name},none"])


def test_generated_chat_messages_equal_generation_without_a_server(reference: Any) -> None:
    url = f"{reference.url}/v1/chat/completions"
    result = evaluate("generation", "local-chat-completions", url, apply_chat_template=True)
    assert len(result["samples"]) == 5
    for sample in result["samples"]:
        messages = [{"role": "user", "content": sample["doc"]["question"]}]
        expected = reference.ask(messages=messages, max_new_tokens=NUM_GENERATED)
        assert sample["resps"] == [[expected]]
