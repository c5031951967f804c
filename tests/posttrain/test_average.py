"""Averages of checkpoints equal a direct float64 computation, in any layouts; differences, missing
moments and invalid weights are reported."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.load import open_checkpoint, verify_checkpoint
from megalith.checkpoint.save import save_checkpoint
from megalith.cli.main import main
from megalith.config.model import ModelConfig
from megalith.config.train import TrainRun
from megalith.config.tree import dump_yaml
from megalith.errors import CheckpointError
from megalith.hf.convert import convert
from megalith.hf.pretrained import open_pretrained
from megalith.hf.release import parameters
from megalith.parallel.group import single_rank_group
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.posttrain.average import (
    AveragedWeights,
    average_models,
    compute_decay_coefficients,
    open_models,
    write_weights,
)
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

CPU = torch.device("cpu")


def make_checkpoint(
    path: Path,
    seed: int,
    *,
    run: TrainRun | None = None,
    dtype: torch.dtype = torch.bfloat16,
    roles: Sequence[str] = ("master", "exp_avg"),
    scale: float = 1.0,
    layout: str = "whole",
) -> Path:
    """Write a checkpoint of random weights, with master weights that round to them; in whole
    tensors, in uneven rows as of tensor-parallel ranks, or in flat ranges as of ZeRO."""
    run = run or tiny_run()
    generator = torch.Generator().manual_seed(seed)
    entries = []
    for shard in parameters(run.model):
        wide = torch.randn(shard.box_shape, generator=generator) * scale
        name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
        entries += split(
            CheckpointEntry(replace(shard, dtype=name), "param", wide.to(dtype)), layout
        )
        for role in roles:
            values = wide if role == "master" else torch.randn(wide.shape, generator=generator)
            entries += split(CheckpointEntry(shard, role, values), layout)
    world = single_rank_group("world")
    state = {"train": {"step": seed}, "optimizer_updates": seed}
    text = dump_yaml(run)
    return save_checkpoint(path, seed, entries, state, world, config_text=text).path


def split(entry: CheckpointEntry, layout: str) -> list[CheckpointEntry]:
    """The parts of an entry, as two ranks of a layout hold them."""
    shard, numel, rows = entry.shard, entry.shard.numel, entry.shard.shape[0]
    if layout == "whole" or rows < 2:
        return [entry]
    first = rows // 3 or 1
    if layout == "rows":
        sizes = [first, rows - first]
        shards = [shard.split_dim(0, sizes, rank, ("tp_kv",)) for rank in range(2)]
        tensors: Sequence[Tensor] = entry.tensor.split(sizes)
    else:
        cut = numel // 3 + 1
        shards = [replace(shard, flat=span) for span in ((0, cut), (cut, numel))]
        tensors = entry.tensor.view(-1).split([cut, numel - cut])
    return [replace(entry, shard=one, tensor=part) for one, part in zip(shards, tensors)]


def read_best(path: Path, name: str) -> Tensor:
    """The master weights, or else the weights, in float64."""
    checkpoint = open_checkpoint(path)
    master = f"optimizer.master.{name}"
    key = master if master in checkpoint.manifest.tensors else f"model.{name}"
    return checkpoint.read(key, dtype=torch.float64)


def check_average(target: Path, sources: Sequence[Path], weights: Sequence[float]) -> None:
    """Compare all weights with a direct computation, and weights with rounded master weights."""
    result = open_checkpoint(target)
    assert verify_checkpoint(target) == []
    names = [key.removeprefix("model.") for key in result.manifest.tensors if key[:6] == "model."]
    assert names
    for name in names:
        parts = [weight * read_best(path, name) for weight, path in zip(weights, sources)]
        expected = torch.stack(parts).sum(0)
        stored = result.read(f"model.{name}")
        if f"optimizer.master.{name}" in result.manifest.tensors:
            master = result.read(f"optimizer.master.{name}")
            assert torch.equal(stored, master.to(stored.dtype))
            stored = master
        bound = 1e-7 if stored.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(stored.double(), expected, rtol=bound, atol=bound)


def test_average_over_three_layouts_equals_a_direct_computation(tmp_path: Path) -> None:
    layouts = ("whole", "rows", "flat")
    sources = [
        make_checkpoint(tmp_path / f"{seed}", seed, layout=layout)
        for seed, layout in enumerate(layouts, start=1)
    ]
    models = open_models([str(path) for path in sources])
    for number, weights in enumerate(([0.25, 0.25, 0.5], compute_decay_coefficients(3, 0.9))):
        target = tmp_path / f"out{number}"
        write_weights(target, average_models(models, weights))
        check_average(target, sources, weights)
        result = open_checkpoint(target)
        assert "optimizer.master.norm.weight" in result.manifest.tensors
        assert not any("exp_avg" in key for key in result.manifest.tensors)
        made_from = result.state["made_from"]
        assert made_from["sources"] == [str(path) for path in sources]
        assert (made_from["method"], made_from["weights"]) == ("average", weights)
        assert "train" not in result.state
    assert open_pretrained(target).model == tiny_run().model


def test_box_size_and_workers_do_not_change_the_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [make_checkpoint(tmp_path / f"{seed}", seed) for seed in (1, 2)]
    models = open_models([str(path) for path in sources])
    write_weights(tmp_path / "whole", average_models(models, [0.5, 0.5]))
    monkeypatch.setattr("megalith.posttrain.average.BOX_NBYTES", 8 * 370)
    monkeypatch.setattr("megalith.posttrain.average.BATCH_NBYTES", 4000)
    write_weights(tmp_path / "small", average_models(models, [0.5, 0.5]), workers=1)
    whole, small = open_checkpoint(tmp_path / "whole"), open_checkpoint(tmp_path / "small")
    assert whole.keys() == small.keys()
    boxes = [len(tensor.boxes) for tensor in small.manifest.tensors.values()]
    assert max(boxes) > 15 and len(small.manifest.files) > len(whole.manifest.files) + 5
    assert all(torch.equal(whole.read(key), small.read(key)) for key in whole.manifest.tensors)


def test_weights_without_master_weights_are_averaged_in_float64(tmp_path: Path) -> None:
    sources = [
        make_checkpoint(tmp_path / "a", 1),
        make_checkpoint(tmp_path / "b", 2, roles=()),
        make_checkpoint(tmp_path / "c", 3, dtype=torch.float32, roles=()),
    ]
    models = open_models([str(path) for path in sources])
    write_weights(tmp_path / "out", average_models(models, [0.5, 0.25, 0.25]))
    check_average(tmp_path / "out", sources, [0.5, 0.25, 0.25])
    result = open_checkpoint(tmp_path / "out")
    assert not any(key.startswith("optimizer") for key in result.manifest.tensors)


def test_hugging_face_folder_is_averaged_with_a_checkpoint(tmp_path: Path) -> None:
    run = tiny_run()
    model = replace(run.model, pad_vocab_to_multiple_of=96)
    sources = [
        make_checkpoint(tmp_path / f"{seed}", seed, run=replace(run, model=model), roles=())
        for seed in (1, 2)
    ]
    convert(open_pretrained(sources[1]), tmp_path / "hf", "huggingface")
    models = open_models([str(tmp_path / "hf"), str(sources[0])])
    assert models[0].model.pad_vocab_to_multiple_of == 96
    average = AveragedWeights(models, [0.25, 0.75])
    for shard in parameters(model):
        rows = slice(0, run.model.vocab_size) if shard.name.endswith(("embed.weight",)) else ...
        expected = 0.75 * read_best(sources[0], shard.name) + 0.25 * read_best(
            sources[1], shard.name
        )
        values = average.read(shard.name, shard.box, torch.float64)
        if shard.name in ("embed.weight", "head.weight"):
            rows = slice(0, run.model.vocab_size)
        torch.testing.assert_close(values[rows], expected[rows], rtol=0, atol=1e-7)
    write_weights(tmp_path / "out", average_models(models, [0.25, 0.75]))
    assert verify_checkpoint(tmp_path / "out") == []


def train_as_rank(rank: int, world: int, run: TrainRun, path: Path) -> None:
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    run_training(run, RunFolder(path), mesh, CPU, show=False)


@pytest.mark.slow
def test_runs_of_three_layouts_are_averaged_and_continued(tmp_path: Path) -> None:
    shared = {
        "train.steps": "2",
        "train.eval_every": "none",
        "train.eval_steps": "0",
        "precision.params": "bf16",
    }
    layouts = [{}, {"parallel.tp": "2"}, {"parallel.dp": "2", "parallel.zero": "1"}]
    paths = [tmp_path / f"run{number}" for number in range(3)]
    for path, layout in zip(paths, layouts):
        run = tiny_run(shared | layout | {"schedule.lr": f"{1 + len(layout)}e-2"})
        if layout:
            run_ranks(train_as_rank, 2, run, path)
        else:
            run_training(run, RunFolder(path), build_single_rank_mesh(), CPU, show=False)
    words = [*map(str, paths), str(tmp_path / "out"), "--weights", "1,2,1", "--moments"]
    assert main(["checkpoint", "average", *words]) == 0
    sources = [path / "checkpoints" / "step_0000002" for path in paths]
    check_average(tmp_path / "out", sources, [0.25, 0.5, 0.25])
    result = open_checkpoint(tmp_path / "out")
    key = "optimizer.exp_avg_sq.layers.1.mlp.down"
    parts = [open_checkpoint(path).read(key, dtype=torch.float64) for path in sources]
    expected = 0.25 * parts[0] + 0.5 * parts[1] + 0.25 * parts[2]
    torch.testing.assert_close(result.read(key).double(), expected, rtol=1e-7, atol=1e-12)
    settings = shared | {"train.steps": "3", "checkpoint.load": str(tmp_path / "out")}
    for mode in ("weights", "all"):
        run = tiny_run(settings | {"checkpoint.load_mode": mode})
        outcome = run_training(
            run, RunFolder(tmp_path / mode), build_single_rank_mesh(), CPU, show=False
        )
        assert outcome.step == 3


def test_all_differences_between_models_are_named(tmp_path: Path) -> None:
    run = tiny_run()
    other: ModelConfig = replace(run.model, num_layers=3, rope=replace(run.model.rope, theta=5.0))
    first = make_checkpoint(tmp_path / "a", 1)
    second = make_checkpoint(tmp_path / "b", 2, run=replace(run, model=other))
    wide = replace(run.model, ffn_hidden_size=28)
    third = make_checkpoint(tmp_path / "c", 3, run=replace(run, model=wide))
    with pytest.raises(CheckpointError) as caught:
        open_models([str(first), str(second), str(third)])
    text = str(caught.value)
    for line in (
        f"the models differ from the first one, {first}:",
        f"{second}: model.num_layers is 3, in the first 2",
        f"{second}: model.rope.theta is 5.0, in the first 10000.0",
        f"{second}: layers.2.attention.q is not in the first",
        f"{third}: model.ffn_hidden_size is 28, in the first 20",
        f"{third}: layers.1.mlp.down is [24, 28], in the first [24, 20]",
    ):
        assert line in text


def test_nan_in_a_source_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "a", 1)
    second = make_checkpoint(tmp_path / "b", 2, scale=float("inf"))
    models = open_models([str(first), str(second)])
    with pytest.raises(CheckpointError, match="embed.weight has NaN or infinite elements"):
        write_weights(tmp_path / "out", average_models(models, [0.5, 0.5]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_result_that_overflows_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path / name, seed) for seed, name in enumerate("ab")]
    models = open_models([str(path) for path in paths])
    with pytest.raises(CheckpointError, match="the result has NaN or infinite elements in float32"):
        write_weights(tmp_path / "out", average_models(models, [1e300, 1.0]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_command_reports_invalid_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [make_checkpoint(tmp_path / "a", 1), make_checkpoint(tmp_path / "b", 2, roles=())]
    a, b = map(str, paths)
    out = str(tmp_path / "out")
    cases: list[tuple[list[str], str]] = [
        ([a, out], "an average needs at least two checkpoints, and 1 was given"),
        ([a, b, out, "--weights", "1"], "--weights=1 has 1 numbers for 2 models"),
        ([a, b, out, "--weights", "1,x"], "--weights=1,x: 'x' is not a finite number"),
        ([a, b, out, "--weights", "0,0"], "--weights=0,0: weights of an average must not be"),
        ([a, b, out, "--weights=2,-1"], "--weights=2,-1: weights of an average must not be"),
        ([a, b, out, "--weights=1e308,1e308"], "must be positive and finite. Use for example"),
        ([a, b, out, "--decay", "1"], "--decay=1.0 must be at least 0 and less than 1"),
        ([a, b, out, "--decay", "0.9", "--weights", "1,1"], "Use one of them."),
        ([a, b, out, "--moments"], f"{paths[1]} lacks optimizer.exp_avg.embed.weight"),
        ([], "no paths were given. Name the sources, and last the folder to write"),
        (
            [out, a, b],
            f"{out} does not exist, and {b} does: the sources come first and the folder to write "
            f"last, as in copy and convert. Use: megalith checkpoint average {a} {b} {out}.",
        ),
        ([a, b, a], "already exists and is not overwritten"),
    ]
    for words, text in cases:
        assert main(["checkpoint", "average", *words]) == 2, words
        assert text in capsys.readouterr().err.replace("\n", " "), words
    assert main(["checkpoint", "average", a, b, out, "--decay", "0.5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["method"], document["weights"]) == ("average", [0.5, 0.5])
    assert document["sources"] == [a, b]
