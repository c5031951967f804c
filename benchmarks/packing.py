"""Packed rows against the same documents padded to the row length: valid tokens per second of whole
training steps.

    python benchmarks/packing.py [--size 6m|29m] [--documents 24] [--fill 0.6] [--rounds 11]
    [--dtype bf16] [--json]

Document lengths are drawn so that one document fills a row to 60 % on average. Both contenders
train the same model on the same documents, forward, backward and update: padded, each has a row of
its own whose rest is filler that costs what padding costs; packed, rows are filled by `best_fit`.
They take turns in one process. Both read the same valid tokens in a step, so the ratio of their
rates is that of their times. Bar: 1.1.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from contenders.ours import Ours, with_precision
from paired import Spread, take_turns, times_as_fast

from megalith.config.train import TrainRun
from megalith.data.loader import MaskSettings, StepBatches, build_batch
from megalith.data.sample import PackedSample
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.plan.packing import PackedDocuments, pack_best_fit_decreasing
from megalith.recipes import recipes

RECIPES = {"6m": recipes()["llama_6m"], "29m": recipes()["llama_29m"]}
BAR = 1.1


@dataclass(frozen=True, slots=True)
class Report:
    """What both took."""

    size: str
    dtype: str
    documents: int
    tokens: int
    """Valid ones of a step."""

    padded_rows: int
    packed_rows: int
    padded_fill: float
    packed_fill: float
    packed_tokens_per_second: float
    times_as_fast: Spread
    """Valid tokens per second, packed / padded."""

    holds: bool


def lengths_with_fill(count: int, room: int, fill: float, *, seed: int = 0) -> list[int]:
    """Lognormal lengths, none above a row, whose mean is the share of it asked for."""
    draw = np.random.default_rng(seed).lognormal(sigma=0.5, size=count)
    low, high = 0.0, float(room) * 100
    for _ in range(60):  # the scale by bisection: clipping to a row bends the mean
        scale = (low + high) / 2
        low, high = (
            (scale, high) if np.clip(draw * scale, 1, room).mean() < fill * room else (low, scale)
        )
    return [int(length) for length in np.clip(draw * high, 1, room).round()]


def rows_of(
    filled: PackedDocuments, lengths: list[int], room: int, vocab: int
) -> list[PackedSample]:
    """The same random documents in other rows, every token but a document's last with a label."""
    rows = []
    for number in range(filled.num_rows):
        ids, labels, end = np.zeros(room, np.int64), np.full(room, -1, np.int64), 0
        documents = filled.row(number).tolist()
        for document in documents:
            text = np.random.default_rng(document).integers(0, vocab, lengths[document])
            ids[end : end + len(text)], labels[end : end + len(text) - 1] = text, text[1:]
            end += len(text)
        filler = [room - end] if end < room else []
        rows.append(
            PackedSample(
                ids, labels, (*(lengths[document] for document in documents), *filler), end
            )
        )
    return rows


def step_of(rows: list[PackedSample], size: int) -> StepBatches:
    """Microbatches of up to `size` rows."""
    device = torch.device("cpu")
    batches = [
        build_batch(rows[first : first + size], MaskSettings(), device=device)
        for first in range(0, len(rows), size)
    ]
    labels, read = (
        sum(getattr(batch, name) for batch in batches) for name in ("num_labels", "num_tokens")
    )
    return StepBatches(batches, labels, (), read)


def measure(size: str, *, documents: int, fill: float, rounds: int, dtype: str) -> Report:
    """Train both by turns."""
    run: TrainRun = with_precision(RECIPES[size](), dtype)
    room, vocab = run.train.seq_len, run.model.vocab_size
    lengths = lengths_with_fill(documents, room, fill)
    alone = PackedDocuments(np.arange(documents), np.arange(documents + 1))
    steps = {
        name: step_of(rows_of(filled, lengths, room, vocab), run.train.micro_batch_size)
        for name, filled in (("padded", alone), ("packed", pack_best_fit_decreasing(lengths, room)))
    }
    assert steps["padded"].num_labels == steps["packed"].num_labels
    device = torch.device("cpu")
    contenders = {name: Ours(replace(run, name=name), step, device) for name, step in steps.items()}
    losses = {name: contender.step() for name, contender in contenders.items()}
    assert abs(losses["padded"] - losses["packed"]) < 1e-2 * losses["padded"], losses
    turns = take_turns(
        {name: each.step for name, each in contenders.items()}, rounds=rounds, warmup=1
    )
    ratio = times_as_fast(turns.seconds["packed"], turns.seconds["padded"])
    rows = {
        name: sum(batch.ids.numel() for batch in step.microbatches) // room
        for name, step in steps.items()
    }
    tokens = sum(lengths)
    return Report(
        size,
        dtype,
        documents,
        tokens,
        rows["padded"],
        rows["packed"],
        tokens / rows["padded"] / room,
        tokens / rows["packed"] / room,
        tokens / float(np.median(turns.seconds["packed"])),
        ratio,
        ratio.median >= BAR,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=list(RECIPES), default="6m")
    parser.add_argument("--documents", type=int, default=24, help="of a step")
    parser.add_argument(
        "--fill", type=float, default=0.6, help="of a row by a document alone, on average"
    )
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    keep_freed_memory()
    result = measure(
        options.size,
        documents=options.documents,
        fill=options.fill,
        rounds=options.rounds,
        dtype=options.dtype,
    )
    text = (
        f"{result.size} {result.dtype}: {result.documents} documents, {result.tokens} tokens; "
        f"padded "
        f"{result.padded_rows} "
        f"rows ({result.padded_fill:.1%} full), packed {result.packed_rows} "
        f"({result.packed_fill:.1%}); packed "
        f"{result.packed_tokens_per_second:,.0f} valid tokens/s, {result.times_as_fast} times as "
        f"many as padded  {'holds' if result.holds else 'MISSED'} median >= {BAR}"
    )
    print(json.dumps(asdict(result), indent=2) if options.json else text)


if __name__ == "__main__":
    main()
