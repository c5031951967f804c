"""`megalith checkpoint info|verify` from the command line."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megalith.checkpoint.format import CheckpointEntry
from megalith.checkpoint.save import save_checkpoint
from megalith.cli.main import main
from megalith.errors import CheckpointError
from megalith.parallel.group import single_rank_group
from megalith.plan.shards import Shard


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints of 7 weights and as many moments."""
    for step in (1, 2):
        entries = [
            CheckpointEntry(
                Shard.full("norm.weight", (7,), dtype="bf16"),
                "param",
                torch.full((7,), step, dtype=torch.bfloat16),
                True,
            ),
            CheckpointEntry(Shard.full("norm.weight", (7,)), "exp_avg", torch.zeros(7), True),
        ]
        save_checkpoint(
            tmp_path / "checkpoints",
            step,
            entries,
            {"train": {}},
            single_rank_group("world"),
            config_text="name: x\n",
        )
    return tmp_path


def call(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


def damage(step: Path) -> None:
    """Change one byte in the middle of the tensors."""
    file = next(step.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_info_prints_step_and_contents(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("info", run) == 0
    output = capsys.readouterr().out
    for text in (
        "step_0000002: step 2, saved by 1 ranks, ",
        "parameters  7",
        "exp_avg     1 tensors, 7 elements of float32",
    ):
        assert text in output
    assert call("info", run / "checkpoints" / "step_0000001", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["step"], document["tensors"], document["state"]) == (1, 2, ["train"])
    assert document["roles"]["weights"] == {"tensors": 1, "numel": 7, "dtypes": ["bfloat16"]}


def test_info_prints_tensors_and_value_statistics(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("info", run, "--only", "model.*") == 0
    output = capsys.readouterr().out
    assert (
        "  model.norm.weight  [7] bfloat16 in 1 boxes\n" in output
        and "optimizer.exp_avg.norm.weight" not in output
    )
    assert call("info", run, "--values") == 0
    output = capsys.readouterr().out
    assert (
        "model.norm.weight  [7] bfloat16 in 1 boxes: mean 2, std 0, least 2, largest 2\n" in output
    )
    assert (
        "optimizer.exp_avg.norm.weight  [7] float32 in 1 boxes: mean 0, std 0, least 0, largest 0\n"
        in output
    )
    assert call("info", run, "--only", "model.*", "--values", "--json") == 0
    (tensor,) = json.loads(capsys.readouterr().out)["listed"]
    assert (tensor["shape"], tensor["mean"], tensor["not_finite"]) == ([7], 2.0, 0)
    assert call("info", run, "--only", "head.*") == 2
    assert "--only=head.* matches none of the tensors of" in capsys.readouterr().err


def test_deep_verify_reports_nan_and_infinite_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = torch.tensor([1.0, float("nan"), float("-inf"), 2.0])
    entries = [CheckpointEntry(Shard.full("norm.weight", (4,)), "param", weights, True)]
    save_checkpoint(
        tmp_path / "checkpoints",
        3,
        entries,
        {"train": {}},
        single_rank_group("world"),
        config_text="name: x\n",
    )
    assert call("verify", tmp_path) == 0
    assert call("verify", tmp_path, "--deep") == 1
    assert "model.norm.weight: 2 of 4 elements are nan or infinite" in capsys.readouterr().out
    assert call("info", tmp_path, "--values") == 0
    assert "mean 1.5, std 0.5, least 1, largest 2, 2 not finite\n" in capsys.readouterr().out


@pytest.mark.parametrize("where", [".", "checkpoints", "checkpoints/step_0000002"])
def test_verify_checks_one_checkpoint_or_all_of_a_run(
    run: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("verify", run / where) == 0
    output = capsys.readouterr().out
    assert output.count(": valid\n") == (1 if where.endswith("2") else 2)


def test_verify_warns_of_a_missing_dot_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "checkpoints" / "step_0000001" / ".metadata"
    file.unlink()
    assert call("verify", run) == 0
    printed = capsys.readouterr().out
    assert printed.count(": valid\n") == 2
    assert (
        f"step_0000001: valid\n  warning: {file}: cannot be read" in printed
        and printed.count("warning") == 1
    )


def test_damage_is_reported_with_exit_code_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run / "checkpoints" / "step_0000001")
    assert call("verify", run) == 1
    output = capsys.readouterr().out
    assert "step_0000001: 1 problems\n  " in output
    assert "step_0000002: valid" in output
    assert call("verify", run, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert [len(problems) for problems in document.values()] == [1, 0]


def test_interrupted_save_is_not_a_valid_or_latest_checkpoint(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step_0000002" / "manifest.json").unlink()
    assert call("verify", run) == 1
    assert "step_0000002: 1 problems" in capsys.readouterr().out
    assert call("info", run) == 0
    assert "step_0000001: step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("verify", "nowhere"),
            "nowhere: no such folder, neither in the working directory nor in runs/. Use a "
            "step_NNNNNNN folder",
        ),
        (
            ("info", "file.txt"),
            "file.txt is a file. Use its folder, or the folder of a run.",
        ),
        (("diff", ".", "file.txt"), "not a complete checkpoint: it has no manifest.json"),
        (
            ("diff", ".", ".", "--atol", "-1"),
            "--atol=-1.0 must be a finite number of at least 0. Use",
        ),
        (("info", "."), "not a complete checkpoint: it has no manifest.json"),
        (
            ("verfy", "."),
            "verfy is not a subcommand of `megalith checkpoint`. Did you mean verify? Use one of "
            "info, verify, diff, list, prune, copy, average, merge.",
        ),
    ],
)
def test_paths_without_a_checkpoint_are_rejected(
    tmp_path: Path,
    words: tuple[str, ...],
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("")
    assert call(*words) == 2
    assert text in capsys.readouterr().err


def test_help_needs_no_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    assert (
        "usage: megalith checkpoint {info,verify,diff,list,prune,copy,average,merge} PATH ... "
        in capsys.readouterr().out
    )


def test_runs_are_found_by_name(
    run: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = tmp_path_factory.mktemp("here")
    (here / "runs").mkdir()
    (here / "runs" / "first").symlink_to(run)
    monkeypatch.chdir(here)
    assert (
        call("info", "first") == 0
        and call("verify", "first") == 0
        and call("diff", "first", "first") == 0
    )
    assert "runs/first/checkpoints/step_0000002: step 2" in capsys.readouterr().out
    assert call("info", "frist") == 2
    assert (
        "frist: no such folder, neither in the working directory nor in runs/. Did you mean first?"
        in capsys.readouterr().err
    )


def test_diff_ends_with_a_summary_of_weights_and_optimizer_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, added in (("a", 0.0), ("b", 0.5)):
        weights = [torch.arange(4.0), torch.arange(4.0) + added * torch.tensor([0, 0, 1, 4])]
        entries = [
            CheckpointEntry(Shard.full("head.weight", (4,)), "param", weights[0], True),
            CheckpointEntry(Shard.full("norm.weight", (4,)), "param", weights[1], True),
            CheckpointEntry(Shard.full("norm.weight", (4,)), "exp_avg", torch.zeros(4), True),
        ]
        entries += (
            [CheckpointEntry(Shard.full("odd.weight", (2,)), "exp_avg", torch.zeros(2), True)]
            if name == "b"
            else []
        )
        save_checkpoint(tmp_path / name, 1, entries, {}, single_rank_group("world"), config_text="")
    assert call("diff", tmp_path / "a", tmp_path / "b") == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "2 tensors are equal, 2 differ",
        "  exp_avg     0 of 2 tensors differ, 1 only in one",
        "  weights     1 of 2 tensors differ: 2 of 8 elements (0.25), by 2 at most, in "
        "model.norm.weight",
    ]
    assert call("diff", tmp_path / "a", tmp_path / "b", "--json") == 1
    moments, weights_summary = json.loads(capsys.readouterr().out)["summary"]
    assert (moments["role"], moments["missing"], moments["largest_in"]) == ("exp_avg", 1, None)
    assert (weights_summary["differing"], weights_summary["numel"], weights_summary["largest"]) == (
        2,
        8,
        2.0,
    )


def test_diff_reports_differences_with_exit_code_1(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = (run / "checkpoints" / f"step_000000{step}" for step in (1, 2))
    assert call("diff", one, two) == 1
    output = capsys.readouterr().out
    assert "model.norm.weight: 7 of 7 elements differ, by 1 at most" in output
    assert "1 tensors are equal, 1 differ" in output
    assert call("diff", one, one) == 0 and call("diff", one, two, "--atol", "1") == 0
    assert call("diff", one, run, "--only", "optimizer.*") == 0
    capsys.readouterr()
    assert call("diff", one, two, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["step_a"], document["step_b"], document["same"]) == (1, 2, 1)
    assert [(each["name"], each["largest"]) for each in document["different"]] == [
        ("model.norm.weight", 1.0)
    ]
    assert call("diff", one, two, "--only", "nothing.*") == 2
    assert "--only=nothing.* matches none of the tensors" in capsys.readouterr().err
    assert call("diff", one) == 2


@pytest.fixture
def megatron(megatron_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a folder that Megatron-core saved: iteration 2, tp 2, pp 2."""
    return Path(shutil.copytree(megatron_folder("dense_singleton"), tmp_path / "megatron"))


def test_info_prints_format_args_and_contents_of_megatron_checkpoint(
    megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("info", megatron, "--only", "model.layers.0.attention.q") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{megatron / 'iter_0000002'}: step 2, saved by 4 ranks, ")
    for line in (
        "  parameters  1,320",
        "  exp_avg     17 tensors, 1,320 elements of float32",
        "  weights     17 tensors, 1,320 elements of bfloat16",
        "  format      torch_dist, checkpoint_version 3.0",
        "  optimizer   fully_reshardable",
        "  args        tensor_model_parallel_size=2",
        "  args        params_dtype=torch.bfloat16",
    ):
        assert line in lines
    assert lines[-1] == "  model.layers.0.attention.q  [4, 2, 8] bfloat16 in 1 boxes"
    assert call("info", megatron / "iter_0000002", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["step"] == 2 and document["roles"]["master"]["numel"] == 1320
    assert document["megatron"]["args"]["consumed_train_samples"] == 16
    assert call("info", megatron / "iter_0000009") == 2
    assert "Use one of its iterations: iter_0000002" in capsys.readouterr().err


def test_info_reports_unreadable_optimizer_state_beside_the_weights(
    megatron: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("bucket 0 has 5 elements, expected 8.")

    monkeypatch.setattr("megalith.hf.megatron_checkpoint.read_optimizer", fail)
    assert call("info", megatron) == 0
    output = capsys.readouterr().out
    assert "  cannot read bucket 0 has 5 elements, expected 8.\n" in output
    assert "  weights     17 tensors" in output and "exp_avg" not in output
    assert call("verify", megatron) == 1
    assert "  bucket 0 has 5 elements, expected 8.\n" in capsys.readouterr().out


def test_diff_reports_unreadable_optimizer_state_and_compares_the_weights(
    megatron: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("bucket 0: the rounded master weights differ from the weights.")

    iteration = megatron / "iter_0000002"
    assert call("diff", megatron, iteration) == 0
    assert "  exp_avg     0 of 17 tensors differ" in capsys.readouterr().out
    monkeypatch.setattr("megalith.hf.megatron_checkpoint.verify_buckets", fail)
    assert call("diff", megatron, iteration) == 1
    output = capsys.readouterr().out
    assert "17 tensors are equal, 0 differ\n" in output and "exp_avg" not in output
    assert (
        f"the optimizer state was not compared, because that of {iteration} cannot be read:\n"
        "  bucket 0: the rounded master weights differ from the weights.\n"
    ) in output
    assert call("diff", megatron, iteration, "--only", "model.*") == 0
    capsys.readouterr()
    assert call("diff", megatron, iteration, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["different"] == [] and str(iteration) in document["problems"]


def test_verify_reports_interrupted_saves_and_verifies_the_others(
    megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(megatron / "iter_0000002", megatron / "iter_0000004")
    (megatron / "iter_0000004" / "metadata.json").unlink()
    assert call("verify", megatron) == 1
    output = capsys.readouterr().out
    assert f"{megatron / 'iter_0000002'}: valid" in output
    assert f"{megatron / 'iter_0000004'}: 1 problems" in output
    assert "has no metadata.json, which Megatron writes last: the save was interrupted" in output


def test_verify_compares_the_hashes_of_megatron_files(
    megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = megatron / "iter_0000002"
    assert call("verify", megatron, "--deep") == 0
    assert capsys.readouterr().out == f"{folder}: valid\n"
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
    (folder / "integrity.json").write_text(json.dumps(hashes))
    assert call("verify", megatron) == 0
    damage(folder)
    assert call("verify", megatron) == 1
    damaged = next(folder.glob("*.distcp"))
    assert (
        f"  hash mismatch in {damaged.name} (expected {hashes[damaged.name]}, got "
        in capsys.readouterr().out
    )
    (folder / "integrity.json").write_text(json.dumps({"../secret": "0" * 64}))
    assert call("verify", megatron) == 1
    assert "names ../secret, which is outside the folder." in capsys.readouterr().out


def test_verify_reports_missing_and_truncated_megatron_files(
    megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = megatron / "iter_0000002" / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert call("verify", megatron) == 1
    assert "__0_0.distcp" in capsys.readouterr().out
    file.unlink()
    assert call("verify", megatron) == 1
    assert "__0_0.distcp" in capsys.readouterr().out
