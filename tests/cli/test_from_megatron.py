"""Tests of megalith/cli/from_megatron.py, and of the page that explains it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from megalith.cli.from_megatron import FromMegatron, report, split_options
from megalith.cli.main import main
from megalith.config.fields import describe
from megalith.config.train import TrainRun
from megalith.config.tree import flatten, from_dict, load_yaml
from megalith.hf.megatron_checkpoint import open_megatron
from megalith.megatron.launch import read_script
from megalith.megatron.parse import FlagReport
from megalith.rules.run import run_problems
from tests.megatron.conftest import TINY_LLAMA

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "coming_from_megatron.md").read_text()
FLAGS = (Path(__file__).parent / "megatron_flags.txt").read_text().split()


def run(*words: str) -> int:
    """The command on these words."""
    return main(["from-megatron", *words])


def block(kind: str) -> str:
    """The page's one fenced block of a kind."""
    (result,) = re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)
    assert isinstance(result, str)
    return result


def test_own_options_are_not_flags_of_megatron() -> None:
    own = {f"--{setting.path}" for setting in describe(FromMegatron)}
    assert own == {
        "--script",
        "--set",
        "--serve",
        "--output",
        "--name",
        "--world",
        "--strict",
        "--json",
    }
    assert own & {*FLAGS, "--help", "-h"} == set()


def test_own_options_are_accepted_anywhere() -> None:
    own, words = split_options(
        ["--lr", "1", "--set", "A=1", "--json", "--bf16", "--set=B=x=y", "--world=8", "--strict"]
    )
    assert own == ["--json", "--world", "8", "--strict", "--set", "A=1", "B=x=y"]
    assert words == ["--lr", "1", "--bf16"]


# --- what it prints


def test_arguments_become_yaml_that_loads_and_violates_no_rule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*TINY_LLAMA.split(), "--bf16", "--name", "first") == 0
    printed = capsys.readouterr()
    file = tmp_path / "run.yaml"
    file.write_text(printed.out)
    loaded = load_yaml(file, TrainRun)
    assert (loaded.name, loaded.model.num_kv_heads, loaded.precision.params) == ("first", 3, "bf16")
    assert run_problems(loaded, 1) == []
    assert "--adam-beta2 0.999 (left out)" in printed.err and "optim.beta2 = 0.999" in printed.err


def test_yaml_does_not_overwrite_an_existing_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "run.yaml")
    assert run(*TINY_LLAMA.split(), "--output", file) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and f"megalith train {file}" in printed.err
    assert run(*TINY_LLAMA.split(), "--output", file) == 2
    assert f"--output {file} already exists. Use another name" in capsys.readouterr().err
    assert run(*TINY_LLAMA.split(), "--output", str(tmp_path / "none" / "run.yaml")) == 2
    assert "Use a folder that exists" in capsys.readouterr().err


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY_LLAMA.split(), "--json", "--enable-cuda-graph", "--grad-reduce-in-bf16") == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert printed.err == "" and document["refused"] == []
    assert document["run"]["model"]["num_layers"] == 2 and document["ranks"] == 1
    assert {"--num-layers 2"} <= {entry["flag"] for entry in document["mapped"]}
    assert [entry["flag"] for entry in document["not_mapped"]] == ["--enable-cuda-graph"]
    assert "--grad-reduce-in-bf16" in {entry["flag"] for entry in document["explained"]}
    assert "--mock-data" not in {entry["flag"] for entry in document["already"]}


def test_arguments_of_a_different_model_are_rejected_with_all_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*TINY_LLAMA.split(), "--is-hybrid-model"]
    assert run(*words, "--enable-mhc-connections") == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "2 settings must be changed" in printed.err
    for reason in ("state-space", "other places"):
        assert reason in printed.err
    assert run(*words, "--json") == 2
    document = json.loads(capsys.readouterr().out)
    assert document["run"] is None and len(document["refused"]) == 1


def test_strict_rejects_arguments_that_change_the_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*TINY_LLAMA.split(), "--renormalize-blend-weights"]
    assert run(*words) == 0
    text = "not mapped, which changes the numbers\n  --renormalize-blend-weights"
    assert text in capsys.readouterr().err
    assert run(*words, "--strict") == 2
    text = "--renormalize-blend-weights: not implemented: blend weights that change"
    assert text in capsys.readouterr().err


def test_violated_rules_of_the_run_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY_LLAMA.split(), "--num-attention-heads", "4", "--lr-warmup-iters", "50") == 2
    error = capsys.readouterr().err
    assert "model.num_kv_heads=3 does not divide model.num_heads=4" in error
    assert "schedule.warmup_steps=50 leaves no step" in error


def test_an_unknown_argument_is_compared_with_megatrons(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY_LLAMA.split(), "--sequence-paralel") == 2
    assert "Did you mean --sequence-parallel" in capsys.readouterr().err


def test_empty_arguments_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert (
        "0 arguments were given. Pass Megatron arguments, or --script FILE."
        in capsys.readouterr().err
    )


def test_help_shows_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "--script" in capsys.readouterr().out


def test_reports_with_the_same_text_share_a_line() -> None:
    entries = [FlagReport(verdict="not mapped", flag=flag, text="why") for flag in ("--a", "--b 1")]
    mapped = FlagReport(verdict="mapped", flag="--c 2", text="because", setting="seed", value=2)
    shown = report([*entries, mapped])
    assert re.sub(" +", " ", shown).split("\n") == [
        "mapped",
        " --c 2 seed = 2 (because)",
        "",
        "not mapped; the numbers stay the same",
        " --a, --b 1",
        " why",
    ]


# --- scripts


def test_whole_command_line_is_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    words = TINY_LLAMA.split()
    place = words.index("--global-batch-size")
    del words[place : place + 2]
    assert run("torchrun", "--nproc_per_node", "3", "pretrain_gpt.py", *words) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["train"]["global_batch_size"] == 3
    assert "--nproc 3" in printed.err
    assert run(*words) == 2
    assert run(*words, "--world", "5") == 0


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        (None, (), "cannot be read: .*Pass a bash script"),
        ("ls", (), "none of the script's 1 commands starts a training"),
        ("torchrun pretrain_t5.py --num-layers 2", (), "pretrain_t5.py trains T5"),
        ("python pretrain_gpt.py --lr '1", (), "line 1: expected a closing ', and there is none"),
        (
            "python pretrain_gpt.py --num-layers $N",
            (),
            "\\$N is not set. Pass --set N=VALUE",
        ),
        ("python pretrain_gpt.py --num-layers $N", ("--set", "N"), "--set N: expected NAME=VALUE"),
    ],
)
def test_unusable_script_is_rejected(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    words: Sequence[str],
    message: str,
) -> None:
    script = tmp_path / "launch.sh"
    if text is not None:
        script.write_text(text)
    assert run("--script", str(script), *words) == 2
    assert re.search(message, capsys.readouterr().err)


def test_set_needs_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*TINY_LLAMA.split(), "--set", "A=1") == 2
    assert "--set A=1 needs a script" in capsys.readouterr().err
    assert run("--script") == 2
    assert "--script has no value. Use --script VALUE." in capsys.readouterr().err


def test_script_is_never_executed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, built = tmp_path / "launch.sh", tmp_path / "made"
    script.write_text(
        f"touch {built}\nX=$(touch {built})\n`touch {built}`\npython pretrain_gpt.py {TINY_LLAMA}\n"
    )
    assert run("--script", str(script)) == 0
    assert yaml.safe_load(capsys.readouterr().out)["name"] == "launch"
    assert not built.exists()


def test_arguments_after_a_script_override_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "launch.sh"
    script.write_text(f"python pretrain_gpt.py {TINY_LLAMA}\n")
    assert run("--script", str(script), "--num-layers", "7") == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"]["num_layers"] == 7


def test_vocabulary_size_is_read_from_a_local_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"w{i}": i for i in range(77)}, unk_token="w0")).save(
        str(tmp_path / "tokenizer.json")
    )
    words = TINY_LLAMA.split()
    words = words[: words.index("--tokenizer-type")]
    assert (
        run(*words, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path))
        == 0
    )
    assert yaml.safe_load(capsys.readouterr().out)["model"]["vocab_size"] == 77
    assert (
        run(
            *words,
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            str(tmp_path / "none"),
        )
        == 2
    )
    assert "Pass --vocab-size" in capsys.readouterr().err


def test_translating_never_loads_torch() -> None:
    code = (
        "import sys; from megalith.cli.main import main; "
        f"code = main(['from-megatron', *{TINY_LLAMA.split()!r}]); assert 'torch' not in "
        "sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# --- text generation servers


def test_script_of_a_server_becomes_a_serve_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, output = tmp_path / "serve.sh", tmp_path / "serve_8b.sh"
    script.write_text(block("sh"))
    assert run("--script", str(script), "--strict") == 0
    printed = capsys.readouterr()
    (command,) = re.findall(r"^    (megalith serve /.*)$", PAGE, re.MULTILINE)
    assert printed.out == f"{command}\n"
    assert "engine.max_num_seqs = 16" in printed.err
    assert "engine.graphs.num_buckets = 16" in printed.err
    assert run("--script", str(script), "--output", str(output)) == 0
    assert capsys.readouterr().out == "" and output.read_text() == printed.out
    assert run("--script", str(script), "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["run"]["engine"]["max_num_seqs"] == 16 and document["refused"] == []
    assert document["command"][:2] == ["megalith", "serve"]


def test_serve_option_translates_arguments_without_a_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("--serve", "--inference-max-requests", "8") == 0
    assert capsys.readouterr().out == "megalith serve SOURCE --engine.max_num_seqs 8\n"
    assert run("--serve", "--port", "0x") == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "--port 0x: expected a whole number" in printed.err


# --- the page


def test_example_of_the_page_is_translated_as_documented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train_llama3_8b.sh"
    script.write_text(block("bash"))
    output = tmp_path / "llama3_8b.yaml"
    assert run("--strict", "--script", str(script), "--output", str(output)) == 0
    error = capsys.readouterr().err
    settings = flatten(load_yaml(output, TrainRun))
    defaults = {
        setting.path: setting.default for setting in describe(TrainRun) if not setting.required
    }
    required = {setting.path for setting in describe(TrainRun) if setting.required}
    changed = {
        path: value
        for path, value in settings.items()
        if (path in defaults and defaults[path] != value)
        or (path in required and value is not None)
    }
    del changed["name"]
    assert changed == yaml.safe_load(block("yaml"))
    assert "not mapped" not in error and "done differently" not in error.replace(
        "done differently\n  --save", ""
    )
    assert "--nproc 8" in error


@pytest.mark.parametrize("words", [["nosuch.sh"], ["bash", "nosuch.sh", "--num-layers", "2"]])
def test_script_without_its_option_is_reported_with_the_option(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "megalith from-megatron: nosuch.sh is not a Megatron argument, and the file does not "
        "exist. Use --script FILE to read a launch script.\n"
    )


def test_stray_word_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("stray", *TINY_LLAMA.split()) == 2
    assert capsys.readouterr().err.count("stray precedes the first argument") == 1


LAUNCH = "torchrun pretrain_gpt.py --num-layers 2"
EXPANDS = "its variables and functions expand to more than 300,000 characters and words"
DOUBLING = "f0() { echo; }\n" + "".join(f"f{i}() {{ f{i - 1}; f{i - 1}; }}\n" for i in range(1, 50))
CHAIN = "f0() { echo; }\n" + "".join(f"f{i}() {{ f{i - 1}; }}\n" for i in range(1, 500))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("A=x\n" + "A=$A$A\n" * 60, EXPANDS),
        ("A=x\n" + "A+=$A\n" * 60, EXPANDS),
        ("A=(x)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60, EXPANDS),
        (DOUBLING + "f49\n", EXPANDS),
        ("f() {\n" * 20_000, EXPANDS),
        ("A=" + "${A:-" * 100 + "x" + "}" * 100 + "\n", "more than 20 defaults inside each other"),
        (CHAIN + "f499\n", "more than 50 functions or `bash -c` call each other"),
        ("#" * 5_000_000 + "\n", "characters, and the limit is 131,072. Use a shorter script"),
    ],
)
def test_script_that_expands_without_end_is_rejected(
    script: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.sh").write_text(script + LAUNCH)
    assert main(["from-megatron", "--script", str(tmp_path / "run.sh")]) == 2
    assert reason in (error := capsys.readouterr().err)
    assert len(error) < 500


@pytest.mark.parametrize(
    "script",
    [
        "A=9\n" + "A=$((A*A))\n" * 60,
        "A=$((" + "(" * 9000 + "1" + ")" * 9000 + "))\n",
        "A=$((1" + "+1" * 9000 + "))\n",
        "cat <<E\n" + "\n" * 100_000 + "E\n",
        "! " * 60_000 + "\n",
        "A=1 " * 30_000 + "\n",
    ],
)
def test_script_with_many_irrelevant_lines_is_parsed(script: str) -> None:
    assert read_script(script + LAUNCH, {}).arguments == ("--num-layers", "2")


def test_device_as_script_or_data_file_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for words in (["--script"], ["--data-args-path"]):
        assert main(["from-megatron", *words, str(tmp_path / "zeros")]) == 2
        assert "not a regular file, but a device, pipe or socket" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--num-layers", *["2"] * 500_000],
        ["--num-layers", "2" * 5_000_000],
        ["--" + "z" * 5_000_000],
        [f"--zz{number}" for number in range(5000)],
        ["x"] * 100_000,
    ],
    ids=["words", "long-word", "long-flag", "flags", "no-flag"],
)
def test_very_long_arguments_are_reported_in_short(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["from-megatron", *words]) == 2
    assert len(capsys.readouterr().err) < 20_000


def test_use_checkpoint_args_reads_the_model_of_the_checkpoint(
    megatron_folder: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = megatron_folder("dense_dp_reshardable")
    training = (
        "--mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 10 --lr 1e-3 "
        "--seq-length 16 --tokenizer-type NullTokenizer"
    )
    words = ["from-megatron", "--use-checkpoint-args", "--load", str(folder), *training.split()]
    assert main(words) == 0
    run = from_dict(TrainRun, yaml.safe_load(capsys.readouterr().out))
    stored = open_megatron(folder / "iter_0000002").run.model
    assert run.model.num_layers == stored.num_layers
    assert run.model.num_kv_heads == stored.num_kv_heads
    assert (run.checkpoint.load, run.checkpoint.load_mode) == (str(folder), "all")
    assert main([*words, "--hidden-size", "7"]) == 2
    message = capsys.readouterr().err
    assert "--hidden-size 7" in message and f"has {stored.hidden_size}" in message


def test_use_checkpoint_args_needs_a_megatron_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["from-megatron", "--use-checkpoint-args"]) == 2
    assert "Pass --load or --pretrained-checkpoint" in capsys.readouterr().err
    assert main(["from-megatron", "--use-checkpoint-args", "--load", str(tmp_path)]) == 2
    assert "is not a folder of Megatron checkpoints" in capsys.readouterr().err
