"""`megalith train`: output, exit codes, and behavior when ranks are stopped or die."""

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.cli.main import main
from megalith.cli.train import _describe_outcome, _write_suspect_hosts
from megalith.config.parallel import RecomputeConfig
from megalith.config.tree import Override, apply_overrides, save_yaml
from megalith.data.chat_template import find_template
from megalith.data.huggingface import train_bpe
from megalith.data.tokenizer import build_tokenizer
from megalith.hf.convert import find_own_template
from megalith.hf.pretrained import locate_source, open_pretrained
from megalith.observe import health_check
from megalith.observe.metrics import read_metrics
from megalith.recipes import build_recipe, resolve
from megalith.testing.tiny import tiny_yaml
from megalith.train import loop
from megalith.train.callbacks.base import Outcome
from megalith.train.callbacks.fault_detection import describe_machine
from megalith.train.step import StepResult, train_step

PATIENCE_SECONDS = 120.0


def steps(folder: Path) -> list[object]:
    """Logged so far."""
    if not (folder / "metrics.jsonl").exists():
        return []
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]


def start(file: Path, folder: Path, *words: str, waits: bool = True) -> "subprocess.Popen[str]":
    """The command in a process of its own; if it waits, past its second step."""
    process = subprocess.Popen(
        [sys.executable, "-m", "megalith", "train", str(file), "--run", str(folder), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if waits:
        wait_until(lambda: len(steps(folder)) >= 2 or process.poll() is not None)
        assert process.poll() is None, process.communicate()
    return process


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks_of(process: "subprocess.Popen[str]") -> list[int]:
    """Process numbers of the ranks, in order."""
    return [
        int(word)
        for word in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ]


def test_train_prints_its_outputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tiny_yaml(tmp_path / "tiny.yaml")
    assert main(["train", str(file), "--run", str(tmp_path / "run"), "--train.steps", "3"]) == 0
    output = capsys.readouterr().out
    assert "step 3/3 · loss " in output
    assert "step 3: held-out loss " in output and " bits per byte" in output
    assert (
        f"done at step 3: {tmp_path}/run has metrics.jsonl and checkpoints/\ntry: megalith "
        "quickstart, " in output
    )


def test_repeated_callback_option_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["--callback", "package:First", "--callback=package:Second"]
    assert main(["train", "tiny_cpu", *names]) == 2
    assert "List all callbacks after one option" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "overrides", "suggestion"),
    [
        (
            "tiny_cpu",
            {},
            "megalith quickstart, which trains on text; the mock data of this run are numbers",
        ),
        ("tiny_cpu", {"tokenizer.kind": "null"}, "megalith generate runs/x"),  # writes ids
        ("sft_tiny", {}, "megalith chat runs/x"),
        (
            "quickstart",
            {"data.mock": "false", "tokenizer.kind": "byte"},
            "megalith generate runs/x",
        ),
    ],
)
def test_suggested_command_suits_what_the_run_trained_on(
    recipe: str, overrides: dict[str, str], suggestion: str
) -> None:
    run = apply_overrides(resolve(recipe), overrides)
    assert _describe_outcome(Outcome("done", 3), "runs/x", run).endswith(f"\ntry: {suggestion}")


def test_message_names_the_tier_of_the_last_save() -> None:
    outcome = Outcome("stopped", 6, "SIGTERM", tier="local")
    assert _describe_outcome(outcome, "runs/x", resolve("llama_29m")) == (
        "stopped at step 6 (SIGTERM) and saved in the local tier; run the same command again on "
        "the same machines to continue"
    )


def test_recompute_auto_is_resolved_once_and_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    automatic = {"train.steps": "2", "recompute.granularity": "auto", "recompute.device": "80 GiB"}
    file = tiny_yaml(tmp_path / "tiny.yaml", automatic)
    assert main(["train", str(file), "--run", str(tmp_path / "run")]) == 0
    assert "recompute.granularity=auto chose none: everything fits" in capsys.readouterr().err
    assert resolve(str(tmp_path / "run")).recompute == RecomputeConfig()
    assert (
        main(["train", str(file), "--run", str(tmp_path / "other"), "--recompute.device", "0.5"])
        == 2
    )
    assert "more than the 0.5 GiB of recompute.device=0.5" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_output_names_the_plots_that_were_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny_yaml(tmp_path / "tiny.yaml", {"train.steps": "2", "observe.plots": "true"})
    assert main(["train", str(file), "--run", str(tmp_path / "run")]) == 0
    assert (
        f"done at step 2: {tmp_path}/run has metrics.jsonl, plots/ and checkpoints/\n"
        in capsys.readouterr().out
    )


def test_run_folder_is_accepted_as_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tiny_yaml(tmp_path / "tiny.yaml", {"train.steps": "2"}), str(tmp_path / "run")
    assert main(["train", str(file), "--run", folder]) == 0
    file.unlink()
    assert main(["train", folder, "--run", folder, "--train.steps", "4"]) == 0
    assert "train.steps: 2 before, 4 now" in capsys.readouterr().out
    assert steps(tmp_path / "run") == [1, 2, 3, 4]


@pytest.mark.parametrize("typed", ["first", "first/", "./first", "./first/"])
def test_run_folder_is_resumed_however_its_path_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tiny_yaml(tmp_path / "tiny.yaml", {"train.steps": "2"})
    assert main(["train", str(file), "--run", "./first"]) == 0
    capsys.readouterr()
    assert main(["train", typed, "--train.steps", "3"]) == 0
    assert "resuming first at step 2" in capsys.readouterr().out
    assert steps(Path("first")) == [1, 2, 3] and not Path("runs").exists()


def test_yaml_file_cannot_set_a_cache_folder_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    file = tiny_yaml(tmp_path / "tiny.yaml", {"name": "../../outside"})
    assert main(["train", str(file)]) == 2
    assert (
        "name='../../outside' cannot be the name of a folder under runs/" in capsys.readouterr().err
    )
    file = tiny_yaml(tmp_path / "tiny.yaml", {"data.cache_path": str(tmp_path / "outside")})
    assert main(["train", str(file)]) == 2
    assert "A YAML file may not set another folder to write to" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["tiny.yaml", "work"]


WORDS = "the quick brown fox jumps over the lazy dog"


def write_huggingface(folder: Path) -> list[str]:
    train_bpe([WORDS] * 4, vocab_size=280, path=str(folder))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    )
    return ["huggingface", str(folder)]


def write_gpt2(folder: Path) -> list[str]:
    train_bpe([WORDS] * 4, vocab_size=280, path=str(folder))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "small-vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "small-merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return ["huggingface", str(folder / "small-vocab.json")]


def write_sentencepiece(folder: Path) -> list[str]:
    library = pytest.importorskip(
        "sentencepiece", reason="writes a SentencePiece model, which needs the library"
    )
    folder.mkdir()
    (folder / "text").write_text("\n".join(WORDS[n:] for n in range(40)) * 4)
    library.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "words"),
        vocab_size=290,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return ["sentencepiece", str(folder / "words.model")]


def write_tiktoken(folder: Path) -> list[str]:
    pytest.importorskip("tiktoken", reason="reads a tiktoken vocabulary, which needs the library")
    folder.mkdir()
    lines = [base64.b64encode(bytes([byte])) + b" %d\n" % byte for byte in range(256)]
    (folder / "my words").write_bytes(b"".join(lines))
    special = ["--tokenizer.special_tokens", "<|endoftext|>", "--model.vocab_size", "257"]
    return ["tiktoken", str(folder / "my words"), *special]


@pytest.mark.parametrize(
    "write", [write_huggingface, write_gpt2, write_sentencepiece, write_tiktoken]
)
def test_moved_run_keeps_its_own_tokenizer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    write: Callable[[Path], list[str]],
) -> None:
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path / "first")
    kind, path, *more = write(Path("words"))
    settings = {"train.steps": "2", "model.vocab_size": "300", "train.max_minutes": "9"}
    words = ["--tokenizer.kind", kind, "--tokenizer.path", path, *more]
    command = ["train", str(tiny_yaml(Path("tiny.yaml"), settings)), "--run", "./a", *words]
    assert main(command) == 0
    assert main([*command, "--train.steps", "3"]) == 0
    assert "changed since the run was started: tokenizer" not in capsys.readouterr().out
    shutil.move("a", tmp_path / "moved")
    shutil.rmtree(tmp_path / "first" / "words")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "moved", "--train.steps", "4"]) == 0
    shutil.move("moved", "again")
    assert main(["evaluate", "again", "--samples", "2"]) == 0
    assert main(["generate", "again", "the fox", "--max-new-tokens", "2"]) == 0
    assert main(["checkpoint", "verify", "again"]) == 0
    assert main(["convert", "again", "exported"]) == 0
    assert main(["convert", "again", "release", "--to", "megalith"]) == 0
    shutil.rmtree("again")
    for folder in ("release", *(["exported"] if kind == "huggingface" else [])):
        assert main(["generate", folder, "the fox", "--max-new-tokens", "2"]) == 0
    assert main(["train", "release", "--train.steps", "2"]) == 0
    output = capsys.readouterr()
    assert (
        "resuming moved at step 3" in output.out
        and "changed since the run was started: tokenizer" not in output.out
    )


def test_run_without_a_copy_of_its_tokenizer_resumes_and_gets_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, path = write_huggingface(Path("words"))
    settings = {
        "train.steps": "2",
        "model.vocab_size": "300",
        "tokenizer.kind": kind,
        "tokenizer.path": path,
    }
    file = str(tiny_yaml(Path("tiny.yaml"), settings))
    assert main(["train", file, "--run", "./a"]) == 0
    # as an earlier version left a run: the path is relative to the working directory
    shutil.rmtree("a/tokenizer")
    shutil.copy(file, "a/config.yaml")
    assert main(["train", "a/", "--train.steps", "3"]) == 0
    assert "resuming a at step 2" in capsys.readouterr().out
    assert sorted(path.name for path in Path("a/tokenizer").iterdir()) == sorted(
        os.listdir("words")
    )
    assert resolve("a").tokenizer.path == "a/tokenizer/tokenizer.json"


@pytest.mark.parametrize("template", ["none", "chatml", "own.jinja"])
def test_checkpoint_of_conversations_has_the_template_of_its_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    template: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, path = write_huggingface(Path("words"))
    Path("own.jinja").write_text(
        "{% for m in messages %}[{{ m.content }}]<|endoftext|>{% endfor %}"
    )
    settings: dict[str, Override] = {
        "train.steps": "2",
        "model.vocab_size": "300",
        "tokenizer.kind": kind,
        "tokenizer.path": path,
        "data.mock": "false",
        "data.sft.mock_conversations": "50",
        "data.sft.template": template,
        "data.sft.loss_on": "all",
        "data.sft.overlong": "truncate",
    }
    command = ["train", str(tiny_yaml(Path("tiny.yaml"), settings)), "--run", "./a"]
    assert main(command) == 0
    named = None if template == "none" else template
    expected = find_template(
        named, build_tokenizer(resolve("a").tokenizer), path, setting="x"
    ).source
    shutil.move("a", "b")
    shutil.rmtree("words")
    Path("own.jinja").unlink()
    assert main(["train", "b", "--train.steps", "3"]) == 0
    assert "changed since the run was started: data" not in capsys.readouterr().out
    opened = open_pretrained(locate_source("b"))
    tokenizer = build_tokenizer(opened.tokenizer)
    result = find_own_template(opened, tokenizer) or find_template(
        None, tokenizer, opened.tokenizer.path, setting="x"
    )
    assert result.source == expected


def test_run_without_a_folder_is_under_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_yaml(Path("tiny.yaml"), {"train.steps": "2"})
    assert main(["train", "tiny.yaml"]) == 0
    assert main(["train", "tiny.yaml", "--run", "again"]) == 0
    assert steps(Path("runs/tiny")) == steps(Path("runs/again")) == [1, 2]


def test_time_limit_ends_training_with_75(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", str(tiny_yaml(tmp_path / "tiny.yaml")), "--run", str(tmp_path / "run")]
    assert main([*words, "--train.max_minutes", "0"]) == 75
    assert (
        "stopped at step 1 (time limit) and saved; run the same command again to continue"
        in capsys.readouterr().out
    )
    assert main(words) == 0
    assert steps(tmp_path / "run") == list(range(1, 9))


NAN_GRADIENT = {
    "kind": "nan",
    "target": "gradient",
    "confirm": "true",
    "step": "3",
    "times": "0",
}
"""Settings of a persistent fault."""


def test_suspect_machine_ends_training_with_76_and_then_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGALITH_SUSPECTS", str(tmp_path / "hosts"))
    words = ["train", str(tiny_yaml(tmp_path / "tiny.yaml")), "--run", str(tmp_path / "run")]
    for name, value in NAN_GRADIENT.items():
        words += [f"--fault_injector.{name}", value]
    words += ["--fault_detector.nonfinite", "rerun"]
    assert main(words) == 76
    output = capsys.readouterr().out
    assert "stopped before step 3 (loss " in output
    assert "; saved. Run the same command again on other machines: " in output
    assert f"{tmp_path}/run/suspects.jsonl lists the suspect hosts" in output
    assert (tmp_path / "run" / "checkpoints" / "step_0000002" / "manifest.json").exists()
    host = socket.gethostname().partition(".")[0]
    assert (tmp_path / "hosts").read_text() == f"{host}\n"
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "megalith train: step 3: loss " in error
    assert "The run has ended at this step before because of the same fault" in error
    assert main(words[:4]) == 0  # the machine is repaired


def test_suspect_hosts_have_the_names_of_the_batch_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = {"step": 3, "time": 1.0, "host": "node-7.example", "exits": True}
    (tmp_path / "suspects.jsonl").write_text(json.dumps(record) + "\n")
    _write_suspect_hosts(tmp_path, tmp_path / "hosts")
    assert (tmp_path / "hosts").read_text() == "node-7\n"  # as Slurm names it
    monkeypatch.setenv("MEGALITH_HOST", "node-8.example")
    assert describe_machine(torch.device("cpu")) == ("node-8.example", "cpu")
    _write_suspect_hosts(tmp_path, tmp_path / "hosts")
    assert (tmp_path / "hosts").read_text() == "node-7.example\n"


def test_failed_health_check_after_the_last_step_ends_training_with_76(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = iter([True])  # of the check at the start
    monkeypatch.setattr(health_check, "is_exact", lambda *_: next(results, False))
    words = ["train", str(tiny_yaml(tmp_path / "tiny.yaml", {"train.steps": "2"}))]
    words += ["--run", str(tmp_path / "run"), "--fault_detector.health_check_every", "2"]
    assert main(words) == 76
    output = capsys.readouterr().out
    assert "finished its last step 2, but on a suspect machine (device health check: rank 0 " in (
        output
    )
    assert f"; saved. {tmp_path}/run/suspects.jsonl lists the suspect hosts: check " in output


@pytest.mark.slow
def test_launcher_returns_76_if_a_rank_is_on_a_suspect_machine(tmp_path: Path) -> None:
    words = ["--fault_injector.rank", "1", "--nproc", "2"]
    for name, value in NAN_GRADIENT.items():
        words += [f"--fault_injector.{name}", value]
    file = tiny_yaml(tmp_path / "tiny.yaml")
    process = start(file, tmp_path / "run", *words, waits=False)
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 76, errors
    assert "the fault stays on rank 1" in output and "; saved. Run the same" in output
    lines = (tmp_path / "run" / "suspects.jsonl").read_text().splitlines()
    (record,) = map(json.loads, lines)
    assert (record["kind"], record["rank"], record["step"]) == ("persistent", 1, 3)
    assert record["coordinates"]["dp"] == 1 and record["exits"]


def test_nan_loss_at_the_end_is_an_error_and_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverged(*arguments: Any, **options: Any) -> StepResult:
        return replace(train_step(*arguments, **options), loss=float("nan"), updated=False)

    monkeypatch.setattr(loop, "train_step", diverged)
    words = [
        "train",
        str(tiny_yaml(tmp_path / "tiny.yaml", {"train.steps": "2"})),
        "--run",
        str(tmp_path / "run"),
    ]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert (
        "done" not in printed.out
        and "megalith train: the last step, 2, has loss nan" in printed.err
    )
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert main([*words, "--train.max_minutes", "0"]) == 75
    assert (
        "stopped at step 1 (time limit; the loss or gradient norm is NaN or infinite) without "
        "saving; run the same command again" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny_cqu"], "tiny_cqu is neither a recipe nor a file. Did you mean tiny_cpu?"),
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (
            ["tiny_cpu", "--parallel.pt", "2"],
            "--parallel.pt=2: there is no such setting. Did you mean parallel.",
        ),
        (["tiny_cpu", "--train.steps", "ten"], "train.steps=ten"),
        (["tiny_cpu", "--ncores", "2"], "--ncores is not an option of this command."),
        (
            ["tiny_cpu", "--nproc", "0"],
            "--nproc=0 must be at least 1. Use the number of processes to start.",
        ),
        (["tiny_cpu", "--nproc", "3"], "train.global_batch_size=8 is not a multiple"),
        (
            ["tiny_cpu", "--train.seq_len", "600", "--nproc", "3"],
            "2 settings must be changed before this can run:\n",
        ),
        (["tiny_cpu", "--parallel.sp"], "parallel.sp=true needs parallel.tp > 1"),
        (
            ["tiny_cpu", "--data.mock", "false", "--data.path", "gone"],
            "data: no token store at gone",
        ),
        (["tiny_cpu", "--tokenizer.kind", "huggingface", "--tokenizer.path", "gone"], "gone"),
        (["tiny_cpu", "--checkpoint.load", "gone"], "gone"),
        (["lora_tiny"], "Adapters need base weights: train a run of that name first"),
    ],
)
def test_user_errors_are_one_message_and_exit_code_2(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words, "--observe.peak_tflops", "1"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megalith train: ") and message in error, error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == [], "half a run would be met by later commands"


def test_damaged_data_or_another_tokenizer_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.jsonl").write_text(
        '{"text": "some words of a text, again and again and again"}\n' * 40
    )
    # prepare catches them for its process: here, ours
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    assert main(["prepare", "--input", "text.jsonl", "--output", "text"]) == 0
    file = str(
        tiny_yaml(
            Path("tiny.yaml"), {"data.mock": "false", "data.path": "text", "train.steps": "2"}
        )
    )
    assert main(["train", file, "--train.eval_steps", "0", "--train.eval_every", "none"]) == 0
    other = [
        "--model.vocab_size",
        "100",
        "--tokenizer.kind",
        "null",
        "--tokenizer.vocab_size",
        "100",
        "--run",
        "b",
    ]
    assert main(["train", file, *other]) == 2
    assert (
        "token id 256 is outside the vocabulary of 100 ids. Use the tokenizer that wrote"
        in capsys.readouterr().err
    )
    with Path("text.bin").open("r+b") as tokens:
        tokens.truncate(100)
    assert main(["train", file, "--run", "c"]) == 2
    assert "text.bin" in capsys.readouterr().err


def test_sigterm_makes_all_ranks_save_and_stop_with_75(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tiny_yaml(
        tmp_path / "tiny.yaml",
        {"train.steps": "3000", "checkpoint.every": "0", "schedule.style": "constant"},
    )
    folder = tmp_path / "run"
    process = start(file, folder, "--nproc", "2")
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 75, errors
    done = steps(folder)
    assert done == list(range(1, len(done) + 1)) and len(done) < 3000
    assert "SIGTERM: finishing the step and saving; repeat it to end without saving" in output
    assert (
        f"stopped at step {done[-1]} (SIGTERM) and saved; run the same command again to continue"
        in output
    )
    assert (folder / "checkpoints" / f"step_{done[-1]:07d}" / "manifest.json").exists()
    # on one process
    assert (
        main(["train", str(file), "--run", str(folder), "--train.steps", str(len(done) + 2)]) == 0
    )
    assert f"resuming {folder} at step {done[-1]}" in capsys.readouterr().out
    assert steps(folder) == list(range(1, len(done) + 3))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find the ranks")
def test_a_rank_that_dies_ends_all_within_seconds(tmp_path: Path) -> None:
    process = start(
        tiny_yaml(tmp_path / "tiny.yaml", {"train.steps": "3000"}), tmp_path / "run", "--nproc", "2"
    )
    ranks = ranks_of(process)
    began = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    seconds = time.monotonic() - began
    print(f"all ranks had ended {seconds:.1f} s after one was killed")
    assert process.returncode == 1
    assert errors.startswith(
        "megalith train: rank 1 was killed by signal 9 (SIGKILL)\nthen:\n  rank 0: "
    ), errors
    assert seconds < 20  # 5 s for the others to end by themselves, and a busy machine
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.slow  # the time limit of a collective must be longer than any step on a busy machine
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc to find the ranks")
def test_a_rank_that_hangs_ends_all_after_the_time_limit(tmp_path: Path) -> None:
    settings = {"train.steps": "3000", "parallel.timeout_seconds": "15"}
    process = start(tiny_yaml(tmp_path / "tiny.yaml", settings), tmp_path / "run", "--nproc", "2")
    os.kill(ranks_of(process)[1], signal.SIGSTOP)
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert errors.startswith("megalith train: rank 1 (dp=1) did not arrive at "), errors
    assert "  rank 1 (dp=1): does not answer: dead, stopped, or holding the GIL\n" in errors
    assert "Traceback" not in errors


def test_print_config_shows_each_setting_with_its_source_and_does_not_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_yaml(build_recipe("tiny_cpu"), tmp_path / "base.yaml")
    (tmp_path / "mine.yaml").write_text("include: base.yaml\ntrain: {steps: '${STEPS}'}\n")
    monkeypatch.setenv("STEPS", "5")
    assert main(["train", "mine.yaml", "--print-config", "--parallel.tp", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "train.steps = 5  # mine.yaml, environment variable STEPS" in lines
    assert "parallel.tp = 2  # command line" in lines
    assert any(line.startswith("model.hidden_size = ") and "base.yaml" in line for line in lines)
    assert not (tmp_path / "runs").exists()
