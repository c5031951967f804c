"""Merges of fine-tuned models equal a direct float64 computation on full tensors."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.load import open_checkpoint, verify_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.cli.main import main
from megalith.config.tree import dump_yaml
from megalith.hf.release import parameters
from megalith.parallel.group import single_rank_group
from megalith.plan.shards import Shard
from megalith.posttrain.average import open_models, write_weights
from megalith.posttrain.merge import (
    MergeMethod,
    MergeSettings,
    compute_disjoint_mean,
    find_kth_largest,
    merge_models,
    trim_,
)
from megalith.testing.tiny import tiny_run


def constant(values: Sequence[float]) -> Callable[[], Tensor]:
    return lambda: torch.tensor(values, dtype=torch.float64)


def make_checkpoint(path: Path, weights: dict[str, Tensor], *, parts: int) -> Path:
    """Write weights as fp32 master weights and bf16 weights, each in `parts` flat ranges."""
    run, entries = tiny_run(), []
    for shard in parameters(run.model):
        wide = weights[shard.name]
        cuts = [shard.numel * number // parts for number in range(parts + 1)]
        for span in pairwise(cuts):
            part = wide.reshape(-1)[slice(*span)]
            flat = replace(shard, flat=span)
            entries.append(CheckpointEntry(replace(flat, dtype="bf16"), "param", part.bfloat16()))
            entries.append(CheckpointEntry(flat, "master", part))
    world = single_rank_group("world")
    return save_checkpoint(path, 1, entries, {}, world, config_text=dump_yaml(run)).path


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base and three models tuned from it, in as many layouts."""
    root, generator = tmp_path_factory.mktemp("merge"), torch.Generator().manual_seed(3)

    def draw(shard: Shard) -> Tensor:
        return torch.randn(shard.box_shape, generator=generator)

    shards = parameters(tiny_run().model)
    base = {shard.name: draw(shard) for shard in shards}
    tuned = [
        {name: values + 0.1 * draw(shard) for shard, (name, values) in zip(shards, base.items())}
        for _ in range(3)
    ]
    return [
        make_checkpoint(root / f"{number}", weights, parts=1 + number % 3)
        for number, weights in enumerate([base, *tuned])
    ]


def merge_directly(
    base: Tensor,
    models: Sequence[Tensor],
    *,
    weights: Sequence[float],
    scale: float,
    density: float | None,
) -> Tensor:
    """The merge of full tensors, with torch.topk: TIES, or task arithmetic without a density."""
    deltas = torch.stack([model - base for model in models])
    factors = torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * base.ndim)
    if density is None:
        return base + scale * (factors * deltas).sum(0)
    flat = deltas.view(len(models), -1)
    kept = flat.abs().topk(max(1, -int(-density * flat.shape[1] // 1)), dim=1).indices
    mask = torch.zeros_like(flat).scatter_(1, kept, 1.0)
    trimmed = (flat * mask).view_as(deltas)
    sign = (factors * trimmed).sum(0).sign()
    elected = (trimmed.sign() == sign) & (trimmed != 0)
    weight = (factors * elected).sum(0)
    mean = (factors * trimmed * elected).sum(0) / weight.where(weight > 0, 1.0)
    return base + scale * mean


def check_merge(target: Path, sources: Sequence[Path], **settings: object) -> None:
    result = open_checkpoint(target)
    assert verify_checkpoint(target) == []
    opened = [open_checkpoint(path) for path in sources]
    for shard in parameters(tiny_run().model):
        key = f"optimizer.master.{shard.name}"
        base, *models = (each.read(key, dtype=torch.float64) for each in opened)
        expected = merge_directly(base, models, **settings)  # type: ignore[arg-type]  # by name
        master = result.read(key)
        torch.testing.assert_close(master.double(), expected, rtol=1e-7, atol=1e-7)
        assert torch.equal(result.read(f"model.{shard.name}"), master.to(torch.bfloat16))


def test_kth_largest_equals_sorting() -> None:
    for seed in range(12):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        values = torch.randn(rng.randint(1, 400), generator=generator, dtype=torch.float64)
        if seed % 3 == 0:
            values = (values * 4).round() / 4  # with equal values and zeros
        if seed % 4 == 0:
            values *= 1e-310  # subnormal
        blocks = values.split(rng.randint(1, 90))
        for k in {1, len(values), rng.randint(1, len(values))}:
            expected = float(values.abs().sort(descending=True).values[k - 1])
            assert find_kth_largest(lambda part=blocks: part, k) == expected, (seed, k)  # type: ignore[misc]


def test_elected_mean_ignores_values_of_the_other_sign() -> None:
    parts = [constant([3.0, 1.0, 0.0, 2.0]), constant([1.0, -4.0, 0.0, -2.0])]
    mean = compute_disjoint_mean(parts, [1.0, 1.0])
    assert mean.tolist() == [2.0, -4.0, 0.0, 0.0]
    weighted = compute_disjoint_mean(parts, [5.0, 1.0])
    assert weighted.tolist() == [16 / 6, 1.0, 0.0, 2.0]
    assert trim_(torch.tensor([0.5, -2.0, 1.0, -1.0]), 1.0).tolist() == [0.0, -2.0, 1.0, -1.0]


@pytest.mark.parametrize(
    ("method", "weights", "scale", "density", "box_numel"),
    [
        ("task", [1.0, -0.5, 0.25], 0.4, None, 1500),
        ("ties", [1.0, 2.0, 0.5], 0.7, 0.45, 1500),
    ],
)
def test_merge_equals_a_direct_computation(
    tmp_path: Path,
    sources: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    *,
    method: MergeMethod,
    weights: list[float],
    scale: float,
    density: float | None,
    box_numel: int,
) -> None:
    monkeypatch.setattr("megalith.posttrain.average.BOX_NBYTES", 8 * box_numel)
    monkeypatch.setattr("megalith.posttrain.merge.BOX_NBYTES", 8 * box_numel)
    base, *models = open_models([str(path) for path in sources])
    settings = MergeSettings(method, weights, scale, density or 0.2)
    write_weights(tmp_path / "out", merge_models(base, models, settings))
    check_merge(tmp_path / "out", sources, weights=weights, scale=scale, density=density)
    made_from = open_checkpoint(tmp_path / "out").state["made_from"]
    assert (made_from["method"], made_from["base"]) == (method, str(sources[0]))


def test_merge_command(
    tmp_path: Path, sources: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    base, first, second = map(str, sources[:3])
    out = str(tmp_path / "out")
    words = [first, second, out, "--base", base, "--method", "ties", "--density", "0.5"]
    assert main(["checkpoint", "merge", *words]) == 0
    assert f"wrote {out}: " in capsys.readouterr().out
    check_merge(tmp_path / "out", sources[:3], weights=[1.0, 1.0], scale=1.0, density=0.5)
    other = str(tmp_path / "other")
    words = [first, other, "--base", base, "--weights=-1"]
    assert main(["checkpoint", "merge", *words]) == 0
    check_merge(tmp_path / "other", sources[:2], weights=[-1.0], scale=1.0, density=None)
    capsys.readouterr()
    new = str(tmp_path / "new")
    cases: list[tuple[list[str], str]] = [
        ([new, "--base", base], "a merge needs at least one fine-tuned model"),
        ([first, new, "--base", base, "--scale", "inf"], "--scale=inf must be a finite number"),
        (
            [first, new, "--base", base, "--method", "ties", "--density", "0"],
            "--density=0.0 must be above 0 and at most 1",
        ),
        (
            [first, new, "--base", base, "--density", "0.5"],
            "--density=0.5 with --method=task, which trims nothing",
        ),
        (
            [first, new, "--base", base, "--method", "ties", "--weights=-1"],
            "--weights=-1 with --method=ties: weights must be positive",
        ),
        ([first, new, "--base", base, "--weights", "1,1"], "has 2 numbers for 1 models"),
        ([first, new, "--base", str(tmp_path / "none")], "no such folder"),
        (
            [new, first, second, "--base", base],
            f"Use: megalith checkpoint merge {first} {second} {new} --base {base}.",
        ),
    ]
    for words, text in cases:
        assert main(["checkpoint", "merge", *words]) == 2, words
        assert text in capsys.readouterr().err.replace("\n", " "), words
    assert not Path(new).exists()
