"""A run that was converted is loaded by `transformers.pipeline`, which writes what we write."""

from pathlib import Path

import pytest
import torch

from megalith.cli.main import main
from megalith.config.generation import SamplingParams
from megalith.config.tree import apply_overrides
from megalith.data.huggingface import train_bpe
from megalith.infer.generate import generate_text
from megalith.infer.layout import open_source
from megalith.infer.load import load_text_generator
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.rules.run import run_problems
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

TEXTS = ("What is three plus four? It is seven.", "One and one are two, and two and two are four.")
PROMPTS = ("What is", "One and one", "seven")


def tune(path: Path, tokenizer: Path) -> None:
    """A few steps on made-up tokens, of a model with queries that share keys and biases."""
    words = train_bpe(TEXTS * 3, vocab_size=290, path=str(tokenizer))
    settings = {
        "model.vocab_size": str(words.vocab_size),
        "model.qkv_bias": "true",
        "model.init_std": "0.5",
        "model.max_seq_len": "64",
        "train.steps": "2",
        "train.eval_steps": "0",
        "train.eval_every": "none",
        "tokenizer.kind": "huggingface",
        "tokenizer.path": str(tokenizer),
    }
    run = apply_overrides(tiny_run(), settings)
    assert run_problems(run, 1) == []
    run_training(run, RunFolder(path), build_single_rank_mesh(), torch.device("cpu"), show=False)


def test_pipeline_of_transformers_generates_the_same_text(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tune(tmp_path / "run", tmp_path / "words")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "theirs")]) == 0

    source = open_source(str(tmp_path / "run"), 1)
    writer = load_text_generator(
        source, build_single_rank_mesh(), torch.device("cpu"), torch.float32
    )
    params = SamplingParams(temperature=0.0, max_new_tokens=24)
    ours = generate_text(writer, PROMPTS, params, show=lambda text: None)

    pipeline = transformers.pipeline(
        "text-generation", model=str(tmp_path / "theirs"), device="cpu"
    )
    result = pipeline(list(PROMPTS), max_new_tokens=24, do_sample=False, return_full_text=False)
    assert [texts[0]["generated_text"] for texts in result] == [
        transcript.text for transcript in ours
    ]
    assert len({token for transcript in ours for token in transcript.ids}) > 6, (
        "texts that only repeat show little"
    )
    whole = pipeline(PROMPTS[0], max_new_tokens=24, do_sample=False)
    assert whole[0]["generated_text"] == PROMPTS[0] + ours[0].text
    (again,) = pipeline(PROMPTS[0], max_new_tokens=24, do_sample=False, return_tensors=True)
    assert again["generated_token_ids"] == ours[0].prompt_ids + ours[0].ids
