"""Tests of megalith/observe/timeline.py."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megalith.errors import ConfigError
from megalith.observe.timeline import (
    ascii_timeline,
    boxes,
    chrome_trace,
    draw_timeline,
    html_timeline,
)
from megalith.plan.schedule import build_schedule, with_transfers
from megalith.plan.simulate import Costs, Simulation, even_costs, simulate

PAGE = Path(__file__).parents[2] / "docs/concepts/pipeline.md"


@pytest.fixture
def one_f_one_b() -> Simulation:
    return simulate(with_transfers(build_schedule("1f1b", num_ranks=2, num_microbatches=3)))


@pytest.fixture
def chunked() -> Simulation:
    schedule = build_schedule("interleaved", num_ranks=2, num_chunks=2, num_microbatches=2)
    return simulate(with_transfers(schedule), even_costs(4, transfer=0.25))


def test_text_shows_every_action_at_its_time(one_f_one_b: Simulation) -> None:
    assert ascii_timeline(one_f_one_b).splitlines() == [
        "1f1b, 2 ranks, 3 microbatches: bubble 25.0% of the step, at most 2 microbatches alive on "
        "a rank",
        "rank 0  F0 F1 ······B0=== F2 B1=== ···B2===",
        "rank 1  ···F0 B0=== F1 B1=== F2 B2=== ······",
    ]


def test_text_names_chunks_and_is_truncated_on_request(chunked: Simulation) -> None:
    lines = ascii_timeline(chunked).splitlines()
    assert lines[0].startswith("interleaved, 2 ranks × 2 chunks, 2 microbatches: ")
    assert lines[1].startswith("rank 0  F0a F1a ")
    cut = ascii_timeline(chunked, width=20).splitlines()
    assert [len(line) for line in cut[1:3]] == [20, 20]
    assert cut[3] == "(shown until 3 of 16.5; use a larger width to see the rest)"


def test_text_is_wide_enough_for_labels_of_short_actions() -> None:
    schedule = build_schedule("1f1b", num_ranks=1, num_microbatches=12)
    costs = Costs(forward=(0.5,), backward_input=(0,), backward_weight=(0,))
    line = ascii_timeline(simulate(schedule, costs)).splitlines()[1]
    assert "F9- F10 F11" in line and "B" not in line


def test_boxes_are_the_compute_actions_of_the_schedule(chunked: Simulation) -> None:
    drawn = list(boxes(chunked))
    assert len(drawn) == sum(action.peer < 0 for row in chunked.schedule.ranks for action in row)
    assert {box.stage for box in drawn} == {0, 1, 2, 3}
    assert max(box.end for box in drawn) == chunked.makespan


def test_trace_has_a_box_per_action_and_an_arrow_per_message(chunked: Simulation) -> None:
    trace = json.loads(json.dumps(chrome_trace(chunked, microseconds=10)))
    events = trace["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(list(boxes(chunked)))
    assert max(event["ts"] + event["dur"] for event in complete) == chunked.makespan * 10
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys() and len(starts) == 12
    assert all(ends[number]["ts"] - start["ts"] == 2.5 for number, start in starts.items())
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["rank 0", "rank 1"]


class Page(HTMLParser):
    """Counts boxes, and collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.boxes = 0
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.boxes += tag == "i"
        self.loads += [value or "" for name, value in attributes if name in ("src", "href")]


def test_html_shows_every_action_without_external_files(chunked: Simulation) -> None:
    text = html_timeline(chunked)
    page = Page()
    page.feed(text)
    assert page.boxes == len(list(boxes(chunked))) and page.loads == [] and "http" not in text
    assert 'title="F of microbatch 1, stage 2: ' in text


@pytest.mark.parametrize("ending", [".txt", ".html", ".json", ".png"])
def test_file_suffix_selects_the_format(chunked: Simulation, tmp_path: Path, ending: str) -> None:
    target = tmp_path / f"timeline{ending}"
    draw_timeline(chunked, target)
    start = {
        ".txt": b"interleaved, ",
        ".html": b"<!doctype html>",
        ".json": b"{",
        ".png": b"\x89PNG",
    }[ending]
    assert target.read_bytes().startswith(start)


def test_unknown_suffixes_and_missing_folders_are_rejected(
    chunked: Simulation, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match="timeline .*pdf: unknown file format. Use a name that ends in one of .txt",
    ):
        draw_timeline(chunked, tmp_path / "timeline.pdf")
    with pytest.raises(
        ConfigError, match="the folder .*nowhere does not exist. Use one that does."
    ):
        draw_timeline(chunked, tmp_path / "nowhere" / "timeline.png")


def test_figures_and_code_of_the_docs_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in ("1f1b", "zb-h1"):
        assert (
            ascii_timeline(simulate(build_schedule(name, num_ranks=4, num_microbatches=8))) in text
        )
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})  # lint: allow eval-exec: our own page
    assert "interleaved, 4 ranks × 2 chunks" in capsys.readouterr().out
