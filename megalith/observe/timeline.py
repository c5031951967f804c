"""Timelines of a simulated pipeline step: as text, PNG, HTML, or a trace for chrome://tracing."""

import html
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalith.errors import ConfigError
from megalith.plan.schedule import Kind
from megalith.plan.simulate import Simulation, peak_activation_memory

COLORS: dict[Kind, str] = {"F": "#4c8bd6", "B": "#5aa469", "I": "#5aa469", "W": "#d9a441"}
"""Blue for forward, green for input gradients, yellow for weight gradients."""

FILL: dict[Kind, str] = {"F": "-", "B": "=", "I": "=", "W": "~"}
"""Character that fills an action in text."""

MOST_LABELS = 3000
"""Maximum labeled boxes of a PNG: beyond it the numbers are too small to read."""


@dataclass(frozen=True, slots=True)
class Box:
    """One compute action on the time axis."""

    rank: int
    kind: Kind
    chunk: int
    microbatch: int
    stage: int
    start: float
    end: float


def boxes(simulation: Simulation) -> Iterator[Box]:
    """Yield every compute action, rank by rank, in order."""
    schedule = simulation.schedule
    for rank, actions in enumerate(schedule.ranks):
        for index, (kind, chunk, microbatch, peer) in enumerate(actions):
            if peer < 0:
                start, end = simulation.starts[rank][index], simulation.end(rank, index)
                stage = schedule.stages[rank][chunk]
                yield Box(rank, kind, chunk, microbatch, stage, float(start), float(end))


def title(simulation: Simulation) -> str:
    """Return a one-line summary of the schedule."""
    schedule = simulation.schedule
    held = [float(peak) / schedule.num_chunks for peak in peak_activation_memory(schedule)]
    chunks = f" × {schedule.num_chunks} chunks" if schedule.num_chunks > 1 else ""
    return (
        f"{schedule.name}, {schedule.num_ranks} ranks{chunks}, {schedule.num_microbatches} "
        f"microbatches: bubble {float(simulation.bubble_fraction_of_total):.1%} of the step, "
        f"at most {max(held):g} microbatches alive on a rank"
    )


def ascii_timeline(simulation: Simulation, *, width: int | None = None) -> str:
    """Return the step as text, one line per rank.

    `F3` is the forward of microbatch 3 (`F3b`: of chunk 1); dots are idle time. width: characters
    per line; longer lines are cut, with a note. Unset: no limit.
    """
    drawn = list(boxes(simulation))
    chunks = simulation.schedule.num_chunks
    # Each label fits its box with a space after it; integer costs are whole numbers of characters.
    scale = max(
        (
            math.ceil((len(_label(box, chunks)) + 1) / (box.end - box.start))
            for box in drawn
            if box.end > box.start
        ),
        default=1,
    )
    names = [f"rank {rank}" for rank in range(simulation.schedule.num_ranks)]
    margin = len(names[-1]) + 2
    end = round(float(simulation.makespan) * scale)
    rows = [["·"] * end for _ in names]
    for box in drawn:
        left, right = round(box.start * scale), round(box.end * scale)
        text = _label(box, chunks).ljust(right - left - 1, FILL[box.kind]) + " "
        rows[box.rank][left:right] = text[: right - left]
    lines = [name.ljust(margin) + "".join(row).rstrip() for name, row in zip(names, rows)]
    if width is not None and margin + end > width:
        lines = [line[:width] for line in lines]
        shown = max(width - margin, 0) / scale
        lines.append(
            f"(shown until {shown:g} of {float(simulation.makespan):g}; use a larger width to see "
            "the rest)"
        )
    return "\n".join([title(simulation), *lines])


def chrome_trace(
    simulation: Simulation, *, microseconds: float = 1000.0
) -> dict[str, Any]:  # Any: JSON
    """Return the step for chrome://tracing or ui.perfetto.dev: a row per rank, arrows for messages.

    microseconds: duration of one unit of the costs.
    """
    events: list[dict[str, Any]] = []
    for rank in range(simulation.schedule.num_ranks):
        events.append(
            {
                "ph": "M",
                "name": "thread_name",
                "pid": 0,
                "tid": rank,
                "args": {"name": f"rank {rank}"},
            }
        )
    chunks = simulation.schedule.num_chunks
    for box in boxes(simulation):
        place = {"microbatch": box.microbatch, "chunk": box.chunk, "stage": box.stage}
        event = {
            "ph": "X",
            "name": _label(box, chunks),
            "cat": box.kind,
            "pid": 0,
            "tid": box.rank,
            "args": place,
        }
        events.append(
            event | {"ts": box.start * microseconds, "dur": (box.end - box.start) * microseconds}
        )
    for number, message in enumerate(simulation.messages()):
        source, target, direction = message.channel
        arrow = {"name": direction, "cat": "message", "id": number, "pid": 0}
        events.append(arrow | {"ph": "s", "tid": source, "ts": float(message.start) * microseconds})
        events.append(
            arrow | {"ph": "f", "bp": "e", "tid": target, "ts": float(message.end) * microseconds}
        )
    return {
        "displayTimeUnit": "ms",
        "otherData": {"title": title(simulation)},
        "traceEvents": events,
    }


def html_timeline(simulation: Simulation) -> str:
    """Return the step as a standalone HTML page: boxes with tooltips, and a zoom slider."""
    chunks = simulation.schedule.num_chunks
    lanes: list[list[str]] = [[] for _ in range(simulation.schedule.num_ranks)]
    for box in boxes(simulation):
        details = (
            f"{box.kind} of microbatch {box.microbatch}, stage {box.stage}: {box.start:g} to "
            f"{box.end:g}"
        )
        opacity = _opacity(box.chunk, chunks)
        place = f"--l:{box.start:g};--w:{box.end - box.start:g};opacity:{opacity:.2f}"
        lanes[box.rank].append(
            f'<i class={box.kind} style="{place}" title="{details}">{box.microbatch}</i>'
        )
    rows = "\n".join(
        f"<p><b>rank {rank}</b><span>{''.join(lane)}</span></p>" for rank, lane in enumerate(lanes)
    )
    colors = "".join(f".{kind}{{background:{color}}}" for kind, color in COLORS.items())
    head = html.escape(title(simulation))
    scale = max(1.0, 1200 / float(simulation.makespan))
    return PAGE.format(
        title=head, colors=colors, rows=rows, scale=scale, length=float(simulation.makespan)
    )


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body{{font:13px sans-serif;margin:1em;--s:{scale:.4g}px}}
main{{overflow-x:auto}}
p{{display:flex;margin:2px 0}}
b{{flex:0 0 5em;position:sticky;left:0;background:#fff;z-index:1}}
span{{position:relative;flex:0 0 auto;height:22px;width:calc(var(--s)*{length:g});background:#eee}}
i{{position:absolute;left:calc(var(--s)*var(--l));width:calc(var(--s)*var(--w));height:22px;box-sizing:border-box;
border:1px solid #fff;overflow:hidden;text-align:center;font-style:normal;line-height:20px}}
{colors}
</style>
<h3>{title}</h3>
<label>zoom <input type="range" min="-3" max="5" step="0.1" value="0"
oninput="document.body.style.setProperty('--s',{scale:.4g}*2**this.value+'px')"></label>
F forward (blue), B or I backward (green), W weights (yellow); paler: later chunks; gray: idle
<main>
{rows}
</main></html>
"""


def plot_timeline(simulation: Simulation, target: Path) -> None:
    """Draw the step as a PNG: a lane per rank, and thin lines for messages that take time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    schedule = simulation.schedule
    figure = Figure(figsize=(14, 1.5 + 0.45 * schedule.num_ranks), layout="constrained")
    axes = figure.subplots()
    drawn = list(boxes(simulation))
    for box in drawn:
        shade = _opacity(box.chunk, schedule.num_chunks)
        bar = [(box.start, box.end - box.start)]
        axes.broken_barh(
            bar,
            (box.rank - 0.4, 0.8),
            color=COLORS[box.kind],
            alpha=shade,
            edgecolor="white",
            lw=0.5,
        )
        if len(drawn) <= MOST_LABELS:
            middle = (box.start + box.end) / 2
            axes.text(
                middle,
                box.rank,
                str(box.microbatch),
                ha="center",
                va="center",
                fontsize=6,
                clip_on=True,
            )
    if simulation.costs.transfer:
        ends = [
            (
                (float(message.start), message.channel.source),
                (float(message.end), message.channel.target),
            )
            for message in simulation.messages()
        ]
        axes.add_collection(LineCollection(ends, colors="gray", linewidths=0.4))
    axes.set_xlim(0, float(simulation.makespan))
    axes.set_ylim(schedule.num_ranks - 0.5, -0.5)
    axes.set_yticks(
        range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)]
    )
    axes.set_xlabel("time; blue forward, green backward, yellow weights, paler: later chunks")
    axes.set_title(title(simulation), fontsize=10)
    FigureCanvasAgg(figure)  # draws without a screen
    figure.savefig(target, dpi=120)


def draw_timeline(simulation: Simulation, target: Path) -> None:
    """Write the timeline in the format of the file's suffix: .txt, .png, .html, or .json (a trace).

    Raises:
        ConfigError: unknown suffix, or the folder does not exist.
    """
    texts: dict[str, Callable[[Simulation], str]] = {
        ".txt": lambda one: ascii_timeline(one) + "\n",
        ".html": html_timeline,
        ".json": lambda one: json.dumps(chrome_trace(one)),
    }
    if target.suffix not in (*texts, ".png"):
        raise ConfigError(
            f"timeline {target}: unknown file format. Use a name that ends in one of .txt .png "
            ".html .json."
        )
    if not target.parent.is_dir():
        raise ConfigError(
            f"timeline {target}: the folder {target.parent} does not exist. Use one that does."
        )
    if target.suffix == ".png":
        plot_timeline(simulation, target)
    else:
        target.write_text(texts[target.suffix](simulation), encoding="utf-8")


def _label(box: Box, num_chunks: int) -> str:
    """Return `F3`, or `F3b` for the second of several chunks."""
    if num_chunks == 1:
        return f"{box.kind}{box.microbatch}"
    letter = chr(ord("a") + box.chunk) if box.chunk < 26 else f".{box.chunk}"
    return f"{box.kind}{box.microbatch}{letter}"


def _opacity(chunk: int, num_chunks: int) -> float:
    return 1 - 0.6 * chunk / num_chunks
