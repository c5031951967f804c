"""Timeline of an engine: what each step processed of every sequence, as text or as a plot."""

from dataclasses import dataclass
from pathlib import Path

from megalith.errors import ConfigError
from megalith.infer.outputs import RequestOutput, TokenOutput
from megalith.plan.serving.scheduler import SchedulerStats, StepPlan

COLORS = {"prefill": "#4c8bd6", "decode": "#5aa469", "preempted": "#c8503c"}
SYMBOLS = {"prefill": "P", "decode": "d", "preempted": "x"}
SUFFIXES = (".png", ".svg", ".pdf", ".txt")


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """What a step did with a sequence."""

    step: int
    sequence: int
    kind: str
    """prefill, decode or preempted."""

    num_tokens: int


class EngineTimeline:
    """Engine callback that records the rows and preemptions of every step."""

    def __init__(self) -> None:
        self.events: list[TimelineEvent] = []
        self.starts: list[float] = [0.0]
        """Start of each step in seconds after the first one, and the end of the last; without the
        time between steps."""

    def clear(self) -> None:
        """Forget the recorded steps."""
        self.events, self.starts = [], [0.0]

    def on_request(self, request: RequestOutput) -> None:
        """Requests are not recorded."""

    def on_step(self, plan: StepPlan, stats: SchedulerStats, seconds: float) -> None:
        """Record a step."""
        step = len(self.starts) - 1
        self.starts.append(self.starts[-1] + seconds)
        self.events += [TimelineEvent(step, number, "preempted", 0) for number in plan.preempted]
        for row in plan.rows:
            is_decode = row.samples and row.count == 1 + len(row.draft_ids)
            kind = "decode" if is_decode else "prefill"
            self.events.append(TimelineEvent(step, row.seq_id, kind, row.count))

    def on_token(self, output: TokenOutput) -> None:
        """Tokens are not recorded."""

    def on_finish(self, request: RequestOutput) -> None:
        """Ends are not recorded."""

    def format_text(self) -> str:
        """Return a line per sequence with a character per step: P prefill, d decode, x preempted,
        a dot for no row.

        A sequence that a step preempts and admits again has only the P.
        """
        num_steps = len(self.starts) - 1
        lines: dict[int, list[str]] = {}
        for event in self.events:
            line = lines.setdefault(event.sequence, ["."] * num_steps)
            line[event.step] = SYMBOLS[event.kind]
        return "\n".join(f"{number:>5} {''.join(line)}" for number, line in sorted(lines.items()))

    def write(self, target: Path) -> None:
        """Write the timeline to a file: .txt as text, others as a plot over time.

        Raises:
            ConfigError: the suffix is unknown.
        """
        check_suffix(target)
        if target.suffix == ".txt":
            target.write_text(self.format_text() + "\n", encoding="utf-8")
            return
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

        rows = {number: row for row, number in enumerate(sorted({e.sequence for e in self.events}))}
        figure = Figure(figsize=(12, 1.5 + 0.2 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for event in self.events:
            start, end = self.starts[event.step : event.step + 2]
            axes.barh(
                rows[event.sequence],
                end - start,
                left=start,
                height=0.8,
                color=COLORS[event.kind],
                edgecolor="white",
                linewidth=0.3,
            )
        axes.set_yticks(range(len(rows)), [str(number) for number in rows])
        axes.invert_yaxis()
        axes.set_xlabel("time (s)")
        axes.set_ylabel("sequence")
        axes.legend(handles=[Patch(color=color, label=kind) for kind, color in COLORS.items()])
        figure.savefig(target)


def check_suffix(target: Path) -> None:
    """Check that a timeline can be written to a file of this name.

    Raises:
        ConfigError: the suffix is unknown.
    """
    if target.suffix not in SUFFIXES:
        raise ConfigError(
            f"--timeline={target}: the suffix {target.suffix!r} is none of {', '.join(SUFFIXES)}. "
            "Use timeline.png."
        )
