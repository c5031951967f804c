"""Every family learns: a tiny model of each is taken over from its folder, trained, stopped and
resumed to the bit.

With the comparison with transformers and the layouts, both in test_parity.py, these are the four
proofs that a family needs. They are asked of every entry of the registry: one that is new has none,
and fails until it has.
"""

import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.model import ModelConfig
from megalith.config.tree import apply_overrides
from megalith.hf.families import DECILM, FAMILIES
from megalith.hf.family import Family
from megalith.hf.folder import HuggingFaceFolder
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.testing.tiny import tiny_run
from megalith.train.callbacks.base import Outcome
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder
from tests.hf.families import CASES, Case, saved
from tests.hf.test_decilm import RAW, WHOLE
from tests.train.test_loop import hashes, rows

STEPS, HALF = 8, 4

QUICK = ("qwen2", "deepseek_v3")
"""Dense, and with latent attention, experts and balancing biases: in `make test`, the others in
`make test-all`."""

EVERY = [
    pytest.param(
        family, id=family.model_type, marks=[] if family.model_type in QUICK else pytest.mark.slow
    )
    for family in FAMILIES
]


def cases_of(family: Family) -> list[Case]:
    """Tiny models of a family; one with experts is first, where there are some without."""
    kind = re.split("For|LMHead", family.architecture)[0]
    results = {
        name: case
        for name, case in CASES.items()
        if re.sub("(Text)?Config$", "", case.kind) == kind
    }
    return [
        results[name] for name in sorted(results, key=lambda name: not name.endswith("experts"))
    ]


def tiny_folder(family: Family, path: Path, tiny: SimpleNamespace) -> ModelConfig:
    """Write a folder with random weights; by transformers, where that knows the family."""
    if family is DECILM:
        tiny.folder(path, family.read_config(blocks()), family=family)
    else:
        cases = cases_of(family)
        assert cases, (
            f"{family.architecture} has no tiny model. Add one to CASES in tests/hf/families.py."
        )
        pytest.importorskip("transformers")
        saved(cases[0], path, std=0.1)
    folder = HuggingFaceFolder(path)
    assert folder.family is family
    return folder.model_config


def blocks() -> dict[str, Any]:
    """Three blocks that are not alike."""
    first, second, third = (deepcopy(WHOLE) for _ in range(3))
    second["attention"] |= {"n_heads_in_group": None, "no_op": True}
    third["ffn"] |= {"ffn_mult": None, "replace_with_linear": True}
    sizes = {
        "hidden_size": 24,
        "num_attention_heads": 4,
        "vocab_size": 97,
        "max_position_embeddings": 96,
    }
    return {**RAW, **sizes, "num_hidden_layers": 3, "block_configs": [first, second, third]}


def train(model: ModelConfig, load: Path, path: Path, *, steps: int) -> Outcome:
    """Steps on the same four rows, so that losses can be compared; from a folder's weights, or
    where it was left."""
    settings = {
        "checkpoint.load": str(load),
        "checkpoint.every": str(HALF),
        "train.steps": str(steps),
        "train.global_batch_size": "4",
        "train.eval_steps": "0",
        "train.eval_every": "none",
        "data.sampler": "cyclic",
        "data.mock_num_documents": "2",
        "data.num_train_samples": "4",
        "schedule.style": "constant",
        "schedule.lr": "2e-2",
        "tokenizer.kind": "null",
        "tokenizer.vocab_size": str(model.vocab_size),
    }
    run = apply_overrides(replace(tiny_run(), model=model), settings)
    return run_training(
        run, RunFolder(path), build_single_rank_mesh(), torch.device("cpu"), show=False
    )


@pytest.mark.parametrize("family", EVERY)
def test_every_family_trains_and_resumes_bit_for_bit(
    family: Family, tmp_path: Path, tiny: SimpleNamespace
) -> None:
    model = tiny_folder(family, tmp_path / "theirs", tiny)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(model, tmp_path / "theirs", whole, steps=STEPS) == Outcome("done", STEPS)
    losses = [row["loss"] for row in rows(whole) if "loss" in row]
    print(f"{family.model_type}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert len(losses) == STEPS and losses[-1] < 0.9 * losses[0]
    for steps in (HALF, STEPS):
        assert train(model, tmp_path / "theirs", parts, steps=steps) == Outcome("done", steps)
        assert hashes(parts, steps) == hashes(whole, steps)
    assert rows(parts) == rows(whole)
    before, after = hashes(whole, HALF), hashes(whole, STEPS)
    assert before.keys() == after.keys() and sum(
        before[key] != after[key] for key in after
    ) > 0.9 * len(after)


def test_a_family_without_a_tiny_model_fails_with_a_hint(
    tmp_path: Path, tiny: SimpleNamespace
) -> None:
    new = replace(FAMILIES[0], architecture="NovelForCausalLM", model_type="novel")
    with pytest.raises(
        AssertionError,
        match=r"NovelForCausalLM has no tiny model. Add one to CASES in tests/hf/families",
    ):
        tiny_folder(new, tmp_path / "theirs", tiny)
    assert all(cases_of(family) for family in FAMILIES if family is not DECILM)
