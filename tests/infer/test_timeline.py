"""Timelines of engines."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.errors import ConfigError
from megalith.infer.timeline import EngineTimeline
from tests.infer.engines import build, run

PARAMS = SamplingParams(max_new_tokens=12, temperature=0.0)


def test_timeline_shows_a_preempted_sequence_that_is_prefilled_again(
    tiny: SimpleNamespace, tmp_path: Path
) -> None:
    timeline = EngineTimeline()
    model = tiny.model(tiny.config(), dtype=torch.float64)
    engine = build(
        model,
        num_blocks=9,
        block_size=4,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        prefix_caching=False,
        min_prefill_chunk_tokens=2,
        callbacks=[timeline],
    )
    run(engine, [([1] * 10, PARAMS), ([2] * 9, PARAMS)])
    first, second = timeline.format_text().splitlines()
    assert first == "    0 PP" + "d" * 11 + "." * (len(second) - 19), "it is never preempted"
    assert "x" in second and second.index("x") < second.rindex("P") < second.rindex("d")
    assert len(timeline.starts) - 1 == len(second) - 6
    for name in ("timeline.png", "timeline.txt"):
        timeline.write(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 0
    assert (tmp_path / "timeline.txt").read_text() == timeline.format_text() + "\n"
    with pytest.raises(ConfigError, match="the suffix '.gif' is none of .png, .svg, .pdf, .txt"):
        timeline.write(tmp_path / "timeline.gif")
    timeline.clear()
    assert timeline.format_text() == ""
