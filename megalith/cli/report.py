"""`megalith report`: goodput and lost time of a run by cause, for all of its starts."""

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from megalith.checkpoint.lock import find_running_process
from megalith.cli.arguments import parse_options
from megalith.cli.evaluate import find_run
from megalith.cli.output import print_json
from megalith.errors import CheckpointError, ConfigError
from megalith.plan.goodput import CAUSES, GoodputReport, StartReport, compute_goodput
from megalith.plan.goodput import find_event_problem as find_problem
from megalith.train.start_records import read_records, read_starts

MAX_STARTS = 20
"""Maximum number of starts in the table; the document of --json has all."""


@dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Report the goodput of a run: the share of its wall time in productive steps, the other time
    by cause, and the optimal checkpoint interval.

    Reads starts.jsonl and events.jsonl; the run may be in progress.
    """

    run: Positional[str]
    """Folder of a run: a path, or its name under runs/."""

    plot: bool = False
    """Draw RUN/plots/goodput.png: the time of each start by cause."""

    json: bool = False
    """Print one JSON document."""


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    command = parse_options(ReportCommand, argv, prog="megalith report")
    folder = find_run(command.run)
    report, problems = read_report(folder)
    is_running = _is_running(folder)
    plot = draw_goodput(report, folder) if command.plot else None
    if command.json:
        print_json(describe_as_json(folder, report, problems, is_running=is_running, plot=plot))
        return 0
    lines = format_report(folder, report, is_running=is_running)
    print("\n".join([*lines, *([f"drew {plot}"] if plot else [])]))
    for problem in (*problems, *report.notes):
        print(f"megalith report: {problem}", file=sys.stderr)
    return 0


def read_report(folder: Path) -> tuple[GoodputReport, list[str]]:
    """Return the goodput of a run, and what could not be read.

    Raises:
        ConfigError: the folder has no starts and no events.
    """
    starts, problems = read_starts(folder)
    path = folder / "events.jsonl"
    records, more = read_records(path)
    problems += more
    if not starts and not records:
        raise ConfigError(
            f"{folder} has neither starts.jsonl nor events.jsonl with a start of the run, so its "
            "time is not known. They are written since version 0.2.0: train in the folder with "
            "`megalith train`, or name another run."
        )
    events: list[dict[str, Any]] = []  # Any: JSON
    for record in records:
        if problem := find_problem(record):
            problems.append(f"{path}: {record!r:.80} is ignored ({problem})")
        else:
            events.append(record)
    return compute_goodput(starts, events), problems


def _is_running(folder: Path) -> bool:
    try:
        find_running_process(folder)
    except CheckpointError:
        return False
    return True


def describe_as_json(
    folder: Path,
    report: GoodputReport,
    problems: list[str],
    *,
    is_running: bool,
    plot: Path | None,
) -> dict[str, Any]:  # Any: JSON
    """Return the document of --json."""
    fields = asdict(report)
    fields["starts"] = [asdict(start) | {"goodput": start.goodput} for start in report.starts]
    return (
        {"run": str(folder), "running": is_running, "goodput": report.goodput}
        | fields
        | {
            "optimal_interval_seconds": report.optimal_interval_seconds,
            "optimal_interval_steps": report.optimal_interval_steps,
            "problems": problems,
            "plot": None if plot is None else str(plot),
        }
    )


def format_report(folder: Path, report: GoodputReport, *, is_running: bool) -> list[str]:
    """Format the report as lines of text."""
    repeated = report.num_repeated_steps
    steps = _count(report.num_steps, "step") + (f" and {repeated} repeated ones" * bool(repeated))
    state = "the run is in progress" if is_running else "the run is not in progress"
    lines = [
        f"{folder}: {_count(len(report.starts), 'start')}, {_count(report.num_faults, 'fault')}, "
        f"{steps}; {state}",
        f"goodput {report.goodput:.1%}: {format_seconds(report.causes['productive'])} of "
        f"{format_seconds(report.wall_seconds)}",
        "",
        f"{'cause':<12}{'time':>14}{'share':>8}  meaning",
    ]
    for cause, meaning in CAUSES.items():
        seconds = report.causes[cause]
        share = seconds / report.wall_seconds if report.wall_seconds else 0.0
        lines.append(f"{cause:<12}{format_seconds(seconds):>14}{share:>8.1%}  {meaning}")
    lines += ["", *_format_starts(report.starts), "", _format_interval(report)]
    return lines


def _format_starts(starts: tuple[StartReport, ...]) -> list[str]:
    """Format the table of the last starts."""
    lines = [
        f"{'start':<7}{'began':<21}{'ranks':>5}{'steps':>14}{'time':>14}{'goodput':>9}"
        f"  {'lost most to':<12}  end"
    ]
    shown = starts[-MAX_STARTS:]
    if len(shown) < len(starts):
        lines.append(f"... {len(starts) - len(shown)} earlier starts")
    for start in shown:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start.began))
        steps = f"{start.step + 1}-{start.last_step}" if start.last_step > start.step else "none"
        lost = {cause: start.causes[cause] for cause in CAUSES if cause != "productive"}
        most = max(lost, key=lambda cause: lost[cause])
        end = "no exit was recorded"
        if start.exit is not None:
            host = f" on {start.exit.host}" if start.exit.is_fault and start.exit.host else ""
            rank = f"rank {start.exit.rank}{host}: " if start.exit.rank is not None else ""
            end = f"{rank}{start.exit.cause[:80]} (exit code {start.exit.code})"
        lines.append(
            f"{start.number:<7}{began:<21}{start.world_size:>5}{steps:>14}"
            f"{format_seconds(start.seconds):>14}{start.goodput:>9.1%}  {most:<12}  {end}"
        )
    return lines


def _format_interval(report: GoodputReport) -> str:
    """Format the optimal checkpoint interval."""
    save, between = report.mean_save_seconds, report.mtbf_seconds
    if save is None:
        return "optimal checkpoint interval: not known, because nothing was saved"
    if between is None:
        return (
            f"optimal checkpoint interval: not known, because there was no fault (a save delays "
            f"training by {format_seconds(save)})"
        )
    now = "" if report.checkpoint_every is None else f"; checkpoint.every={report.checkpoint_every}"
    seconds, steps = report.optimal_interval_seconds, report.optimal_interval_steps
    assert seconds is not None, "there were saves and faults"
    in_steps = "" if steps is None else f", {_count(steps, 'step')}"
    return (
        f"optimal checkpoint interval: {format_seconds(seconds)}{in_steps}, MTBF "
        f"{format_seconds(between)}, saves that delay training by {format_seconds(save)} "
        f"(Young 1974, Daly 2006){now}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_seconds(seconds: float) -> str:
    """Format a duration.

    >>> [format_seconds(value) for value in (0.01234, 3.2, 75, 3 * 3600 + 61, 200_000)]
    ['0.012 s', '3.2 s', '1 min 15 s', '3 h 1 min', '2 d 7 h']
    """
    if seconds < 1:
        return f"{seconds:.3f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 60:
        return f"{minutes} min {int(seconds % 60)} s"
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"


def draw_goodput(report: GoodputReport, folder: Path) -> Path:
    """Draw the time of each start by cause, and that between starts; return the file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2 + 0.35 * min(len(report.starts), MAX_STARTS)))
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    starts = report.starts[-MAX_STARTS:]
    labels = [f"start {start.number}" for start in starts]
    left = [0.0] * len(starts)
    for number, cause in enumerate(CAUSES):
        widths = [start.causes.get(cause, 0.0) for start in starts]
        if sum(widths) > 0:
            axes.barh(labels, widths, left=left, label=cause, color=f"C{number}")
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=6, fontsize="small")
    axes.set_title(
        f"{folder.name}: goodput {report.goodput:.1%}, downtime "
        f"{format_seconds(report.causes['downtime'])}"
    )
    target = folder / "plots" / "goodput.png"
    target.parent.mkdir(exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(target)
    return target
