"""A run that trains adapters: it learns, resumes to the same bits, keeps its base elsewhere, and
knows it again."""

import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.checkpoint.load import open_checkpoint
from megalith.cli.main import main
from megalith.config.tree import Override, dump_yaml
from megalith.errors import CheckpointError, ConfigError
from megalith.hf.peft import RECORD
from megalith.hf.pretrained import locate_source, open_adapters, open_pretrained
from megalith.hf.release import release_run, write_release
from megalith.models.decoder import Decoder, allocate, initialize, iter_parameter_specs
from megalith.nn.build import build_context, init_param_
from megalith.observe.metrics import read_metrics
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.parallel.tensor import Init
from megalith.plan.grid import model_grid
from megalith.plan.shards import Box, Shard
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.testing.tolerance import CURVE64, FP32, FP64, assert_close
from megalith.train import trainer
from megalith.train.callbacks.base import Outcome
from megalith.train.evaluate import run_evaluation
from megalith.train.loop import run_training
from megalith.train.run_folder import RunFolder

CPU = torch.device("cpu")
LORA: dict[str, Override] = {"lora.rank": "3", "schedule.lr": "0.03", "checkpoint.every": "4"}


class Drawn:
    """First weights, read as those of a folder are."""

    def __init__(self, seed: int) -> None:
        self.model = Decoder(build_context(tiny_run().model, build_single_rank_mesh()))
        allocate(self.model, CPU)
        initialize(self.model, seed=seed)
        self.found = {
            d.shard.name: getattr(m, n).data.view(d.shard.shape)
            for d, m, n in iter_parameter_specs(self.model)
        }

    def dtype(self, parameter: str) -> torch.dtype:
        return torch.float32

    def read(self, parameter: str, box: Box, dtype: torch.dtype) -> Tensor:
        values: Tensor = self.found[parameter][tuple(slice(*span) for span in box)]
        return values.to(dtype)


def base(path: Path, seed: int = 3) -> Path:
    """A checkpoint with weights of the tiny model."""
    run = tiny_run()
    text = release_run("base", run.model, run.tokenizer, path)
    write_release(path, run.model, Drawn(seed), config_text=dump_yaml(text))
    return path


def train(path: Path, load: Path, settings: Mapping[str, Override] | None = None) -> Outcome:
    run = tiny_run({"checkpoint.load": str(load), **LORA, **(settings or {})})
    return run_training(run, RunFolder(path), build_single_rank_mesh(), CPU, show=False)


def losses(path: Path) -> list[float]:
    return [
        float(row["loss"] or 0) for row in read_metrics(path / "metrics.jsonl") if "loss" in row
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps beside a base."""
    folder = tmp_path_factory.mktemp("lora")
    train(folder / "run", base(folder / "base"))
    return folder / "run"


def tensors(path: Path) -> dict[str, Tensor]:
    result = open_checkpoint(path)
    return {key: result.read(key) for key in result.keys()}  # noqa: SIM118  # not a mapping


def test_loss_falls_and_a_checkpoint_contains_only_adapters(trained: Path) -> None:
    assert losses(trained)[-1] < losses(trained)[0] - 0.02
    stored = tensors(trained / "checkpoints" / "step_0000008")
    assert all(".lora_" in key for key in stored)
    whole = sum(f.stat().st_size for f in (trained.parent / "base").iterdir())
    assert sum(t.numel() for k, t in stored.items() if k.startswith("model.")) < 0.25 * whole / 4


@pytest.mark.parametrize(("missing", "base_too"), [("error", False), ("warn", True)])
def test_the_base_is_initialized_only_if_missing_keys_are_allowed(
    missing: str, base_too: bool, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []

    def counted(parameter: Tensor, shard: Shard, init: Init, *, seed: int) -> None:
        drawn.append(shard.name)
        init_param_(parameter, shard, init, seed=seed)

    monkeypatch.setattr(trainer, "init_param_", counted)
    train(
        tmp_path / "run",
        trained.parent / "base",
        {"train.steps": "1", "checkpoint.missing_keys": missing},
    )
    assert any(".lora_" not in name for name in drawn) == base_too and len(drawn) >= 20
    if not base_too:
        assert losses(tmp_path / "run")[0] == losses(trained)[0]
        drawn.clear()
        train(
            tmp_path / "more",
            trained.parent / "base",
            {"train.steps": "1", "lora.load": str(trained)},
        )
        assert drawn == []


def test_stopped_and_resumed_run_is_bitwise_equal(trained: Path, tmp_path: Path) -> None:
    load = trained.parent / "base"
    train(tmp_path / "run", load, {"train.steps": "4", "schedule.style": "constant"})
    train(tmp_path / "run", load, {"schedule.style": "constant"})
    train(tmp_path / "once", load, {"schedule.style": "constant"})
    assert losses(tmp_path / "run") == losses(tmp_path / "once")
    again, once = (
        tensors(tmp_path / name / "checkpoints" / "step_0000008") for name in ("run", "once")
    )
    assert again.keys() == once.keys() and all(torch.equal(again[key], once[key]) for key in once)


def test_opened_checkpoint_is_the_base_plus_the_scaled_product(trained: Path) -> None:
    opened = open_pretrained(locate_source(str(trained)))
    result, plain = open_adapters(opened.path), Drawn(3)
    assert (result.lora.rank, opened.model) == (3, tiny_run().model)
    for name, shape in (
        ("attention.kv", (2, 2, 6, 24)),
        ("attention.o", (24, 4, 6)),
        ("mlp.gate_up", (2, 20, 24)),
    ):
        name = f"layers.1.{name}"
        whole: Box = tuple((0, n) for n in shape)
        a, b = result.read(f"{name}.lora_a"), result.read(f"{name}.lora_b")
        left = b.reshape(a.shape[0] if name[-1] != "o" else 1, -1, 3)
        product = (left @ a.reshape(left.shape[0], 3, -1)).view(shape)
        expected = plain.read(name, whole, torch.float32) + result.lora.scale * product
        merged = opened.weights.read(name, whole, torch.float32)
        torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-7)
        assert not torch.equal(merged, plain.read(name, whole, torch.float32))
        box: Box = tuple((n // 3, n) for n in shape)
        part = merged[tuple(slice(*span) for span in box)]
        torch.testing.assert_close(
            opened.weights.read(name, box, torch.float32), part, rtol=1e-6, atol=1e-8
        )
    norm: Box = ((0, 24),)
    assert torch.equal(
        opened.weights.read("norm.weight", norm, torch.float32),
        plain.read("norm.weight", norm, torch.float32),
    )


def test_generation_and_evaluation_use_the_adapters(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = run_evaluation(
        tiny_run({"checkpoint.load": str(trained.parent / "base"), **LORA}),
        RunFolder(trained),
        build_single_rank_mesh(),
        CPU,
        split="valid",
        samples=12,
    )
    rows = [row for row in read_metrics(trained / "metrics.jsonl") if "eval_loss" in row]
    assert evaluation.loss == pytest.approx(rows[-1]["eval_loss"], rel=1e-5)
    assert main(["generate", str(trained), "a", "--max-new-tokens", "3", "--greedy"]) == 0
    capsys.readouterr()


def test_adapters_can_start_from_other_adapters(trained: Path, tmp_path: Path) -> None:
    load = trained.parent / "base"
    train(
        tmp_path / "run",
        load,
        {"lora.load": str(trained), "train.steps": "1", "schedule.lr": "0.0"},
    )
    first, last = (
        tensors(tmp_path / "run/checkpoints/step_0000001"),
        tensors(trained / "checkpoints/step_0000008"),
    )
    assert all(torch.equal(first[key], last[key]) for key in first if key.startswith("model."))
    with pytest.raises(
        CheckpointError,
        match=r"lora.load=.*: the adapters differ .* lora.rank is 3 in the adapters and 2",
    ):
        train(tmp_path / "two", load, {"lora.load": str(trained), "lora.rank": "2"})
    with pytest.raises(
        CheckpointError, match=r"holds a model, not adapters. Use a run that trained adapters"
    ):
        train(tmp_path / "three", load, {"lora.load": str(load)})


def test_adapters_of_another_base_are_rejected_as_start(trained: Path, tmp_path: Path) -> None:
    other = base(tmp_path / "other", seed=4)
    with pytest.raises(
        CheckpointError,
        match=r"lora.load=.* holds adapters of another base: .*base, but checkpoint.load is "
        r".*other\.",
    ):
        train(tmp_path / "run", other, {"lora.load": str(trained)})


def test_adapter_readers_can_be_pickled(trained: Path) -> None:
    weights = open_pretrained(locate_source(str(trained))).weights
    again = pickle.loads(
        pickle.dumps(weights)
    )  # lint: allow pickle-load: what we pickled a moment ago
    box: Box = ((0, 2), (0, 6), (0, 24))
    name = "layers.0.attention.q"
    assert torch.equal(again.read(name, box, torch.float32), weights.read(name, box, torch.float32))


def test_another_base_is_rejected_by_its_values(trained: Path, tmp_path: Path) -> None:
    other = base(tmp_path / "other", seed=4)
    with pytest.raises(
        CheckpointError, match=r"holds adapters of another base: they were trained with .*/base"
    ):
        open_pretrained(locate_source(str(trained)), base=str(other))
    config = tiny_run({"checkpoint.load": str(other), **LORA, "train.steps": "9"})
    with pytest.raises(CheckpointError, match="Use the weights that they were trained with"):
        run_training(config, RunFolder(trained), build_single_rank_mesh(), CPU, show=False)


def test_a_base_may_move_and_is_reported_if_missing(tmp_path: Path) -> None:
    train(tmp_path / "run", base(tmp_path / "base"), {"train.steps": "1"})
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(
        CheckpointError,
        match=r"their base weights are not at .*set --base to their folder",
    ):
        open_pretrained(locate_source(str(tmp_path / "run")))
    assert (
        main(
            [
                "convert",
                str(tmp_path / "run"),
                str(tmp_path / "out"),
                "--base",
                str(tmp_path / "moved"),
            ]
        )
        == 0
    )
    words = [str(tmp_path / "run"), "a", "--max-new-tokens", "2", "--base", str(tmp_path / "moved")]
    assert main(["generate", *words]) == 0
    assert open_adapters(locate_source(str(tmp_path / "run"))).lora.rank == 3, "which are all here"
    train(
        tmp_path / "next",
        tmp_path / "moved",
        {"lora.load": str(tmp_path / "run"), "train.steps": "1"},
    )
    record = open_checkpoint(tmp_path / "run/checkpoints/step_0000001").state[RECORD]
    assert record["base"] == str(tmp_path / "base") and len(record["fingerprint"]) == 32
    train(tmp_path / "run", tmp_path / "moved", {"train.steps": "2"})
    assert open_pretrained(locate_source(str(tmp_path / "run"))).path.name == "step_0000002"


def test_bf16_adapters_have_master_weights_and_the_base_has_none(tmp_path: Path) -> None:
    load = base(tmp_path / "base")
    train(tmp_path / "run", load, {"precision.params": "bf16"})
    stored = tensors(tmp_path / "run" / "checkpoints" / "step_0000008")
    assert losses(tmp_path / "run")[-1] < losses(tmp_path / "run")[0] - 0.02
    master_weights = {key for key in stored if key.startswith("optimizer.master.")}
    assert len(master_weights) == 20 and all(".lora_" in key for key in stored)
    opened = open_pretrained(locate_source(str(tmp_path / "run")))
    assert open_adapters(opened.path).read("layers.0.mlp.down.lora_b").dtype == torch.float32


def test_missing_base_or_base_of_another_shape_is_rejected(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint.load=runs/nothing: .*train a run of that name first, or set",
    ):
        train(tmp_path / "run", Path("runs/nothing"))
    with pytest.raises(CheckpointError, match=r"ffn_hidden_size"):
        train(tmp_path / "other", trained.parent / "base", {"model.ffn_hidden_size": "32"})


def test_lora_settings_cannot_change_when_a_run_is_resumed(trained: Path) -> None:
    with pytest.raises(ConfigError, match="lora.alpha: 32.0 before, 8.0 now"):
        train(trained, trained.parent / "base", {"lora.alpha": "8.0"})


SFT: dict[str, Override] = {
    "data.mock": "false",
    "data.sft.mock_conversations": "15",
    "data.sft.template": "identity",
    "train.seq_len": "80",
    "data.sft.overlong": "drop",
    "lora.dropout": "0.1",
    "train.global_batch_size": "4",
    "checkpoint.every": "2",
    "schedule.style": "constant",
    "train.eval_steps": "0",
}


def _tune(
    rank: int, world: int, path: Path, load: Path, settings: Mapping[str, Override]
) -> Outcome:
    run = tiny_run(
        {"checkpoint.load": str(load), "precision.params": "fp64", **LORA, **SFT, **settings}
    )
    mesh = (
        build_single_rank_mesh()
        if world == 1
        else build_mesh(model_grid(run.parallel, run.model, world), rank=rank)
    )
    return run_training(run, RunFolder(path), mesh, CPU, show=False)


@pytest.mark.parametrize(
    ("axis", "sp"), [("tp", "true"), pytest.param("pp", "false", marks=pytest.mark.slow)]
)
def test_tuning_on_two_processes_resumes_and_merges_like_one_process(
    axis: str, sp: str, tmp_path: Path
) -> None:
    """Conversations, adapters and their dropout together: stopped after two steps of four, on
    ranks, then merged.

    In float64, because Adam divides each gradient by its own size: where a gradient is close to
    zero, the rounding of fp32 sums, which differs from processor to processor, moves a weight by as
    much as the learning rate.
    """
    load = base(tmp_path / "base")
    for steps in ("2", "4"):
        settings = {
            f"parallel.{axis}": "2",
            "parallel.sp": sp,
            "train.micro_batch_size": "2",
            "train.steps": steps,
        }
        run_ranks(_tune, 2, tmp_path / "ranks", load, settings)
    _tune(0, 1, tmp_path / "alone", load, {"train.steps": "4"})
    assert losses(tmp_path / "ranks") == pytest.approx(
        losses(tmp_path / "alone"), rel=FP64.relative
    )
    trained = [
        tensors(tmp_path / name / "checkpoints" / "step_0000004") for name in ("ranks", "alone")
    ]
    assert {values.dtype for key, values in trained[0].items() if key.startswith("model.")} == {
        torch.float64
    }
    assert_close(trained[0], trained[1], CURVE64)
    merged = []
    for name in ("ranks", "alone"):
        assert (
            main(
                [
                    "convert",
                    str(tmp_path / name),
                    str(tmp_path / f"{name}-merged"),
                    "--to",
                    "megalith",
                ]
            )
            == 0
        )
        merged.append(tensors(locate_source(str(tmp_path / f"{name}-merged"))))
    assert merged[0].keys() == merged[1].keys() and not any(".lora_" in key for key in merged[0])
    first = tensors(locate_source(str(load)))
    assert_close(merged[0], merged[1], FP32)  # written in the dtype of the base
    changed = {key for key, values in merged[0].items() if not torch.equal(values, first[key])}
    assert changed == {
        key for key in first if key.rsplit(".", 1)[1] in ("q", "kv", "o", "gate_up", "down")
    }


def test_base_is_upcycled_with_its_adapters_and_the_dry_run_reports_it(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, width = tmp_path / "moe.yaml", tiny_run().model.ffn_hidden_size
    file.write_text(f"num_experts: 4\ntop_k: 2\nffn_hidden_size: {width}\n")
    assert (
        main(["convert", str(trained), str(tmp_path / "x"), "--upcycle", str(file), "--dry-run"])
        == 0
    )
    *lines, last = capsys.readouterr().out.splitlines()
    merged = [line for line in lines if " · lora_b · lora_a -> " in line]
    assert any(
        line.startswith("layers.0.mlp.down + ") and "-> layers.0.moe.experts.down" in line
        for line in merged
    )
    assert any("-> layers.0.attention.q " in line for line in merged)
    assert any(line.startswith("new -> layers.0.moe.router ") for line in lines)
    assert f"{len(merged)} of them with adapters of rank 3 from " in last
