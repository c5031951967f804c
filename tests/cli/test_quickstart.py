"""`megalith quickstart`, shrunk: a small corpus, a few steps of a tiny model; every file and every
line is there."""

import json
import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from megalith import recipes
from megalith.cli import quickstart
from megalith.cli.main import main
from megalith.config.train import TrainRun
from megalith.data.indexed import IndexedDataset
from megalith.data.prepare import find_local_text
from megalith.data.stores import PrepareJournal
from megalith.recipes import resolve
from megalith.train.callbacks.base import Outcome


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two kilobytes of some files of the standard library, under their names."""
    text, folder = find_local_text(), tmp_path_factory.mktemp("corpus")
    top = Path(json.__file__).parent.parent
    for file in (*text.training[:150], *text.held_out[:5]):
        copy = folder / file.relative_to(top)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text()[:2000])
    return folder


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training stops before its first step."""
    monkeypatch.setattr(
        "megalith.train.loop.run_training",
        lambda *arguments, **options: Outcome("stopped", 0, "SIGTERM"),
    )


@pytest.fixture
def shrunk(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that find the small corpus, and a recipe of a few steps; everything in this
    process."""

    def small(target: str) -> TrainRun:
        run = resolve(target)
        if target != "quickstart":
            return run
        train = replace(
            run.train, steps=4, global_batch_size=4, micro_batch_size=2, seq_len=32, eval_every=2
        )
        model = replace(
            run.model, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_hidden_size=24
        )
        schedule = replace(run.schedule, warmup_steps=1)
        observe = replace(run.observe, peak_tflops=1.0, tensorboard=False)
        return replace(run, train=train, model=model, schedule=schedule, observe=observe)

    monkeypatch.setattr(recipes, "resolve", small)
    monkeypatch.setattr(quickstart, "find_local_text", lambda: find_local_text(corpus))
    # the commands catch them for their process: ours
    monkeypatch.setattr(signal, "signal", lambda *arguments: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_outputs_exist_and_a_second_run_skips_completed_steps(
    shrunk: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["quickstart", "--folder", "runs/first", "--nproc", "1"]
    assert main(words) == 0
    output = capsys.readouterr().out
    text = find_local_text(corpus)
    assert output.startswith(f"corpus: {len(text.training)} files, 0.")
    assert f"held out: {len(text.held_out)} files, 0.0 MB" in output
    assert [line for line in output.splitlines() if line.startswith("$ megalith prepare")][1].count(
        "data/valid"
    ) == 2
    assert "$ megalith train quickstart --run ./runs/first --nproc 1" in output
    assert "step 4/4 · loss" in output
    results = {
        name: output.split(name)[1].split()[0] for name in ("held-out files: ", "zlib -9 needs ")
    }
    assert 3 < float(results["held-out files: "]) < 12
    assert 1 < float(results["zlib -9 needs "]) < 5
    assert "no effect here" not in output, "the recipe's own settings need no warning"
    assert re.search(
        r"sample.txt, the best of 4: \d+% of its words occur in the corpus \(on average \d+%\)",
        output,
    )
    assert output.rstrip().splitlines()[-5] == "try next:"
    assert main(shlex.split(output.split("try next:\n  megalith ")[1].splitlines()[0])) == 0
    assert capsys.readouterr().out
    run = shrunk / "runs" / "first"
    for file in (
        "data/train.bin",
        "data/valid.idx",
        "data/tokenizer/tokenizer.json",
        "plots/loss.png",
        "sample.txt",
    ):
        assert (run / file).stat().st_size > 0, file
    assert main(words) == 0
    again = capsys.readouterr().out
    assert "$ megalith prepare" not in again and "is already at step 4 of 4" in again


def test_the_sample_with_most_known_words_is_shown(
    shrunk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["qqxzj qqxyz", "return zzqqy", "return import", "zzxqy"]
    results = [{"prompt": "def ", "text": text} for text in texts]
    outputs = {"evaluate": {"bits_per_byte": 2.0}, "generate": {"results": results}}
    monkeypatch.setattr(quickstart, "_captured", lambda name, *words: json.dumps(outputs[name]))
    assert quickstart._show_results(shrunk, quickstart.find_local_text(), 0.0) == 0
    printed = capsys.readouterr().out
    assert (
        shrunk / "sample.txt"
    ).read_text() == "def return import" and "\ndef return import\n" in printed
    assert "the best of 4: 100% of its words occur in the corpus (on average 38%)" in printed


def test_held_out_files_are_not_trained_on(shrunk: Path, corpus: Path) -> None:
    assert main(["quickstart", "--folder", "runs/first", "--nproc", "1"]) == 0
    data = shrunk / "runs" / "first" / "data"
    texts = {
        name: {json.loads(line)["text"] for line in (data / f"{name}.jsonl").open()}
        for name in ("train", "valid")
    }
    assert len(texts["valid"]) == len(find_local_text(corpus).held_out)
    assert not texts["train"] & texts["valid"]


def test_stopped_step_ends_quickstart_with_its_exit_code(
    shrunk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "megalith.train.loop.run_training",
        lambda *arguments, **options: Outcome("stopped", 2, "SIGTERM"),
    )
    assert main(["quickstart", "--folder", "runs/first", "--nproc", "1"]) == 75
    assert "held-out files" not in capsys.readouterr().out


def test_interrupted_prepare_is_resumed(
    shrunk: Path,
    untrained: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words, data = (
        ["quickstart", "--folder", "runs/first", "--nproc", "1"],
        shrunk / "runs" / "first" / "data",
    )

    def stop(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:  # after the first block, before the store has its names
        stopped.setattr(PrepareJournal, "finish", stop)
        assert main(words) == 75
    stopped_message = capsys.readouterr().err
    assert stopped_message.endswith(".preparing. Run the same command again to continue.\n")
    assert "--resume" not in stopped_message  # an option that quickstart does not have
    results = [data / "train.jsonl", data / "tokenizer" / "tokenizer.json"]
    before = [file.stat().st_mtime_ns for file in results]
    assert (data / "train.preparing" / "state.json").exists() and not (data / "train.idx").exists()
    capsys.readouterr()
    assert main(words) == 75
    first, second = [
        line
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("$ megalith prepare")
    ]
    assert (
        first.endswith("--resume") and "--train-tokenizer" not in first and "--resume" not in second
    )
    assert [file.stat().st_mtime_ns for file in results] == before


def test_run_killed_before_the_first_save_is_resumed(shrunk: Path, untrained: None) -> None:
    data = shrunk / "runs" / "first" / "data"
    (data / "train.preparing").mkdir(parents=True)
    (data / "train.preparing" / "lock").write_text("")
    (data / "train.jsonl.writing").write_text("half a li")
    (data / "tokenizer").mkdir()
    assert main(["quickstart", "--folder", "runs/first", "--nproc", "1"]) == 75
    assert IndexedDataset(str(data / "train")).num_documents > 100


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nproc", "0"], "--nproc=0 must be at least 1. Use"),
        (
            ["--folder", "file/below"],
            "--folder=file/below: file/below/data is not writable",
        ),
    ],
)
def test_invalid_options_are_rejected_first(
    shrunk: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (shrunk / "file").write_text("")
    assert main(["quickstart", *words]) == 2
    assert text in capsys.readouterr().err
    assert [path.name for path in shrunk.iterdir()] == ["file"]


@pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs a folder that not even root can write to"
)
def test_data_folder_without_write_access_is_rejected(
    shrunk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shrunk / "run").mkdir()
    (shrunk / "run" / "data").symlink_to("/proc/self")
    assert main(["quickstart", "--folder", "run"]) == 2
    assert "--folder=run: run/data is not writable (" in capsys.readouterr().err


def test_text_that_cannot_be_prepared_ends_quickstart(
    shrunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quickstart, "VOCABULARY", 3)  # fewer than bytes
    assert main(["quickstart", "--folder", "runs/first", "--nproc", "1"]) == 2
