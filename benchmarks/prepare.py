"""Throughput of `prepare`, beside the bare `tokenizers` library on the same documents.

    python benchmarks/prepare.py [--megabytes 40] [--rounds 5]

The corpus is the source code of this Python's standard library as JSONL, the tokenizer a BPE
trained on it. One worker of ours against one process that reads the lines, encodes them in batches
with the library's threads off and writes nothing; then two against two, start-up included on both
sides. The figure is the median of the paired ratios of throughput (bars: 0.90 and 0.85).
"""

import argparse
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from paired import take_turns, times_as_fast
from tokenizers import Tokenizer

from megalith.config.data import PrepareConfig, TokenizerConfig
from megalith.data.huggingface import train_bpe
from megalith.data.prepare import prepare

BARS = {1: 0.90, 2: 0.85}
DOCUMENT = 4000  # characters
VOCAB_SIZE = 16384


def documents(nbytes: int) -> Iterator[str]:
    """Pieces of the standard library's source code, over and over until there are enough."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("**/*.py"))
    files = [file for file in files if "site-packages" not in file.parts]
    while nbytes > 0:
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            for start in range(0, len(text), DOCUMENT):
                yield text[start : start + DOCUMENT]
                nbytes -= DOCUMENT
                if nbytes <= 0:
                    return


def write_corpus(path: Path, nbytes: int) -> None:
    """One JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for text in documents(nbytes):
            file.write(json.dumps({"text": text}) + "\n")


def encode_share(corpus: str, tokenizer: str, share: int, shares: int) -> int:
    """The peer: read every shares-th line and encode in batches of a thousand. Returns the number
    of tokens."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    tokens = 0
    with open(corpus, "rb") as file:
        lines = islice(file, share, None, shares)
        while texts := [json.loads(line)["text"] for line in islice(lines, 1000)]:
            tokens += sum(len(encoding.ids) for encoding in encoder.encode_batch_fast(texts))
    return tokens


def encode_with(processes: int, corpus: str, tokenizer: str) -> None:
    """The peer in one or more processes."""
    if processes == 1:
        encode_share(corpus, tokenizer, 0, 1)
        return
    context = get_context("spawn")
    team = [
        context.Process(target=encode_share, args=(corpus, tokenizer, n, processes))
        for n in range(processes)
    ]
    for process in team:
        process.start()
    for process in team:
        process.join()
    assert all(process.exitcode == 0 for process in team)


def prepare_with(workers: int, corpus: str, tokenizer: str, output: str) -> None:
    """Ours."""
    config = TokenizerConfig(kind="huggingface", path=tokenizer)
    prepare(
        PrepareConfig(
            input=(corpus,), output=output, tokenizer=config, workers=workers, overwrite=True
        )
    )


def measure(folder: Path, rounds: int, workers: int) -> bool:
    """Print one ratio; False when its bar is missed."""
    corpus, tokenizer = str(folder / "corpus.jsonl"), str(folder / "tokenizer")
    contenders = {
        "ours": partial(prepare_with, workers, corpus, tokenizer, str(folder / "out")),
        "peer": partial(encode_with, workers, corpus, tokenizer),
    }
    seconds = take_turns(contenders, rounds=rounds, warmup=0).seconds
    ratio = times_as_fast(seconds["ours"], seconds["peer"])
    rate = Path(corpus).stat().st_size / 1e6 / min(seconds["ours"])
    print(
        f"prepare, {workers} worker{'s' * (workers > 1)}: {ratio} of the throughput of {workers} "
        "bare tokenizers "
        f"process{'es' * (workers > 1)} (bar {BARS[workers]:.2f}; ours {rate:.1f} MB/s at best)"
    )
    return ratio.median >= BARS[workers]


def main(argv: Sequence[str] | None = None) -> int:
    """Run both comparisons; 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus.jsonl", options.megabytes * 1_000_000)
        train_bpe(documents(8_000_000), vocab_size=VOCAB_SIZE, path=str(folder / "tokenizer"))
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # for both, after training
        met = [measure(folder, options.rounds, workers) for workers in BARS]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
