"""`megalith bench overlap` on real ranks: rows of the table and error messages."""

import json

import pytest

from megalith.cli.main import main

TINY = (
    "tiny_cpu",
    "--model.num_layers",
    "2",
    "--train.global_batch_size",
    "4",
    "--train.micro_batch_size",
    "1",
    "--train.seq_len",
    "32",
    "--parallel.bucket_numel",
    "2000",
)


def test_simulated_latency_shows_in_the_table_of_two_ranks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [
        "bench",
        "overlap",
        *TINY,
        "--nproc",
        "2",
        "--steps",
        "2",
        "--latency-ms",
        "20",
        "--json",
    ]
    assert main(words) == 0
    document = json.loads(capfd.readouterr().out)
    rows = {(row["kind"], row["over"]): row for row in document["traffic"]}
    sums = rows["all_reduce", "dp"]
    assert sums["per_step"] > 2 and sums["megabytes"] > 0
    assert sums["seconds"] >= 0.02 * sums["per_step"]
    assert 0 < document["exposed_seconds"] <= document["step_seconds"] * 1.1


def test_one_rank_has_no_communication(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "overlap", *TINY, "--steps", "1"]) == 0
    assert "without communication, because it has one rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["overlapp", "tiny_cpu"], "Did you mean overlap?"),
        (["overlap", "tiny_cpu", "--steps", "0"], "--steps=0 must be at least 1"),
        (
            ["overlap", "tiny_cpu", "--latency-ms", "-1"],
            "--latency-ms=-1.0 must be a finite number of at least 0",
        ),
        (
            ["overlap", "tiny_cpu", "--latency-ms", "nan"],
            "--latency-ms=nan must be a finite number of at least 0",
        ),
        (
            ["overlap", "tiny_cpu", "--latency-ms", "inf"],
            "--latency-ms=inf must be a finite number of at least 0",
        ),
        (
            ["overlap", "tiny_cpu", "--gigabytes-per-second", "0"],
            "--gigabytes-per-second=0.0 must be a finite number above 0",
        ),
        (
            ["overlap", "tiny_cpu", "--gigabytes-per-second", "nan"],
            "--gigabytes-per-second=nan must be a finite number",
        ),
        (
            ["overlap", "tiny_cpu", "--gigabytes-per-second", "inf"],
            "--gigabytes-per-second=inf must be a finite number",
        ),
        (["overlap", "tiny_cpu", "--parallel.tp", "3"], "parallel.tp"),
    ],
)
def test_user_errors_are_messages(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_help_describes_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    out = capsys.readouterr().out
    assert "megalith bench SUBCOMMAND" in out and "  overlap " in out and "  serve " in out
