"""What a newcomer gets from `megalith quickstart` in a fresh folder: how long it takes, how well it
reads and writes.

    python benchmarks/quickstart.py [--folder runs/quickstart-benchmark] [--seeds 5]

Bars: 4 minutes of training on 2 processes, 9 in all (installing may take the tenth), at most 2.35
bits per byte on held-out files, and at least 80 % of the words of a 500-token sample occur in the
corpus. Samples differ by chance, so that share is the mean of several, drawn as the quickstart
draws its own.
"""

import argparse
import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

from megalith.cli.main import run_command
from megalith.cli.quickstart import sample_words
from megalith.data.prepare import find_local_text, known_word_fraction, zlib_bits_per_byte

BAR_BITS, BAR_WORDS, BAR_TRAINING, BAR_ALL = 2.35, 0.80, 240.0, 540.0


def training_seconds(run: Path) -> float:
    """Time in training steps, from the run's own metrics."""
    rows = [
        json.loads(line)
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return math.fsum(float(row["step_ms"]) for row in rows if "step_ms" in row) / 1000


def json_of(*words: str) -> dict[str, object]:
    """What a command prints with --json."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        run_command(words[0], [*words[1:], "--json"])
    document: dict[str, object] = json.loads(output.getvalue())
    return document


def known_words(run: Path, seed: int) -> float:
    """The share of known words in one sample."""
    text = find_local_text()
    result = json_of("generate", str(run), *sample_words(seed))["results"][0]  # type: ignore[index]  # JSON
    return known_word_fraction(result["prompt"] + result["text"], (*text.training, *text.held_out))


def main() -> int:
    """Run it and hold it to its bars; 0 when all hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as built:
        run = given.folder or Path(built) / "run"
        started = time.monotonic()
        if run_command("quickstart", ["--folder", str(run)]) != 0:
            return 1
        seconds, training = time.monotonic() - started, training_seconds(run)
        bits = json_of("evaluate", str(run))["bits_per_byte"]
        shares = [known_words(run, seed) for seed in range(1, given.seeds + 1)]
    assert isinstance(bits, float)
    bars = {
        f"held-out files {bits:.3f} bits per byte (zlib -9: "
        f"{zlib_bits_per_byte(find_local_text().held_out):.3f}) "
        f"<= {BAR_BITS}": bits <= BAR_BITS,
        f"known words {statistics.mean(shares):.1%} "
        f"({', '.join(f'{share:.0%}' for share in shares)}) "
        f">= {BAR_WORDS:.0%}": statistics.mean(shares) >= BAR_WORDS,
        f"training {training:.0f} s <= {BAR_TRAINING:.0f}": training <= BAR_TRAINING,
        f"all of it {seconds:.0f} s <= {BAR_ALL:.0f}": seconds <= BAR_ALL,
    }
    for text, holds in bars.items():
        print(f"{'holds ' if holds else 'MISSED'} {text}")
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
