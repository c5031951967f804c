"""What a trace tells: traces made by hand, of which the answer is known."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megalith.errors import DataError
from megalith.observe.routing import (
    RoutingPredictability,
    analyze_trace,
    likeliest,
    read_trace_steps,
    sort_layers,
)

Experts = NDArray[np.int64]
DRAW = np.random.default_rng(7)


def write(
    folder: Path,
    layers: dict[str, Experts],
    *,
    steps: int = 1,
    rank: int = 0,
    split: int = 1,
    **place: int,
) -> None:
    """A rank's trace of some layers; every step has the next part of the tokens, in `split`
    microbatches."""
    folder.mkdir(exist_ok=True)
    with (folder / f"rank_{rank:05d}.jsonl").open("a") as file:
        for step in range(steps):
            for layer, experts in layers.items():
                for microbatch, part in enumerate(
                    np.array_split(np.array_split(experts, steps)[step], split)
                ):
                    row: dict[str, Any] = {
                        "step": step + 1,
                        "layer": layer,
                        "dp": 0,
                        "cp": 0,
                        "tp": 0,
                        **place,
                    }
                    row |= {
                        "microbatch": microbatch,
                        "num_tokens": len(part),
                        "top_k": part.shape[1],
                    }
                    file.write(json.dumps(row | {"experts": part.tolist()}) + "\n")


def pair(
    folder: Path, here: Experts, there: Experts, experts: int, **how: Any
) -> RoutingPredictability:
    """How far the first layer tells the second."""
    write(folder, {"layers.0": here, "layers.1": there}, **how)
    (result,) = analyze_trace(folder, experts=experts)[1]
    assert (result.layer, result.following, result.tokens) == ("layers.0", "layers.1", len(here))
    return result


def distinct(tokens: int, top_k: int, experts: int) -> Experts:
    """Choices of `top_k` different experts, all equally likely."""
    return DRAW.random((tokens, experts)).argsort(1)[:, :top_k]


@pytest.mark.parametrize("top_k", [1, 2])
def test_permutation_has_full_mutual_information(tmp_path: Path, top_k: int) -> None:
    here = distinct(3000, top_k, 6)
    result = pair(tmp_path, here, np.array([3, 5, 0, 4, 1, 2])[here], 6, steps=2, split=3)
    assert result.information == pytest.approx(1.0, abs=1e-3)
    assert result.first == result.all == 1.0
    assert result.first_blind == pytest.approx(
        1 / 6, abs=0.03
    ) and result.all_blind == pytest.approx(top_k / 6, abs=0.03)


@pytest.mark.parametrize(("tokens", "experts"), [(4000, 4), (300, 40)])
def test_independent_choices_have_no_information(tmp_path: Path, tokens: int, experts: int) -> None:
    here, there = distinct(tokens, 2, experts), distinct(tokens, 2, experts)
    result = pair(tmp_path, here, there, experts)
    assert result.information < 0.005
    assert result.all == pytest.approx(2 / experts, abs=0.03) and result.first == pytest.approx(
        1 / experts, abs=0.04
    )
    both = np.zeros((experts, experts))
    np.add.at(both, (here[:, 0], there[:, 0]), 1 / tokens)
    apart = np.outer(both.sum(1), both.sum(0))
    of_itself = (both[both > 0] * np.log(both[both > 0] / apart[both > 0])).sum() / math.log(
        experts
    )
    assert (of_itself > 0.3) == (tokens == 300), "by its own counts it would tell a lot"


def test_noisy_choice_has_the_information_of_its_channel(tmp_path: Path) -> None:
    """Of two equal experts one in ten tokens goes to the other: 1 - H(0.1) bits of 1."""
    here = np.tile([[0], [1]], (10000, 1))
    there = np.where(DRAW.random((20000, 1)) < 0.1, 1 - here, here)
    result = pair(tmp_path, here, there, 2, split=4)
    expected = 1 + 0.1 * math.log2(0.1) + 0.9 * math.log2(0.9)
    assert result.information == pytest.approx(expected, abs=0.02)
    assert result.first == pytest.approx(0.9, abs=0.01) and result.first_blind == pytest.approx(
        0.5, abs=0.01
    )


def test_predictions_are_evaluated_on_the_other_half(tmp_path: Path) -> None:
    """What the second half does after each expert, the first half never did."""
    here = np.tile(np.arange(4), 50).reshape(-1, 1)
    there = np.concatenate([here[:100], 3 - here[100:]])
    result = pair(tmp_path, here, there, 4)
    assert (result.first, result.information) == (0.0, 0.0)


def test_concentration_of_choices(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "layers.2": np.array([[0, 1], [0, 1], [0, 2], [0, 3]]),
            "layers.10": np.array([[0, 1], [2, 3]]),
        },
    )
    few, even = analyze_trace(tmp_path, experts=4)[0]
    assert (few.layer, even.layer) == ("layers.2", "layers.10")
    assert few.shares == (0.5, 0.25, 0.125, 0.125) and (few.tokens, few.load, few.half) == (
        4,
        2.0,
        1,
    )
    assert few.entropy == pytest.approx(1.75 / 2)
    assert (even.load, even.half) == (1.0, 2) and even.entropy == pytest.approx(1.0)


def test_rows_of_all_ranks_are_joined_by_token(tmp_path: Path) -> None:
    places = [distinct(200, 1, 3) for _ in range(2)]
    for dp, here in enumerate(places):
        write(tmp_path, {"layers.0": here}, rank=dp, dp=dp)
    for dp, here in enumerate(places):
        write(tmp_path, {"layers.1": 2 - here, "mtp.0.layer": here}, rank=3 - dp, dp=dp)
    uses, pairs = analyze_trace(tmp_path, experts=3)
    assert [use.tokens for use in uses] == [400, 400, 400]
    assert [(one.layer, one.following, one.tokens, one.all) for one in pairs] == [
        ("layers.0", "layers.1", 400, 1.0),
        ("layers.1", "mtp.0.layer", 400, 1.0),
    ]


def test_last_layer_has_no_predictability(tmp_path: Path) -> None:
    write(tmp_path, {"layers.4": distinct(5, 1, 3)})
    assert analyze_trace(tmp_path, experts=3)[1] == []
    assert sort_layers(["mtp.0.layer", "layers.10", "layers.9"]) == [
        "layers.9",
        "layers.10",
        "mtp.0.layer",
    ]
    assert likeliest(np.eye(3), np.zeros((0, 1), dtype=np.int16), 2).shape == (0, 2)


def test_folder_without_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"no routing trace in this folder .* Run with observe.routing_trace=1"
    ):
        analyze_trace(tmp_path, experts=3)
    write(tmp_path, {"layers.0": np.array([[5]])})
    with pytest.raises(
        DataError,
        match=r"step 1, layers.0: expert 5 of 3. Use the trace .* model.moe.num_experts=3",
    ):
        analyze_trace(tmp_path, experts=3)
    file = tmp_path / "rank_00000.jsonl"
    file.write_text(file.read_text() + '{"step": 2, "lay')
    assert [step for step, _ in read_trace_steps(tmp_path)] == [1], (
        "a crash cut the last line short"
    )
    file.write_text(file.read_text() + "\n")
    with pytest.raises(
        DataError,
        match="line 2 is not a row of a routing trace .JSONDecodeError: .* Remove the line, or run",
    ):
        list(read_trace_steps(tmp_path))


@pytest.mark.parametrize(
    ("changed", "reported"),
    [
        ({"experts": [[70000]]}, "OverflowError"),
        ({"layer": 3}, "layer '3', expected layers.0"),
        ({"layer": "laye"}, "layer 'laye', expected layers.0"),
        ({"num_tokens": 7}, "ValueError"),
    ],
)
def test_damaged_row_is_reported_with_its_line(
    tmp_path: Path, changed: dict[str, Any], reported: str
) -> None:
    write(tmp_path, {"layers.0": np.array([[1]]), "mtp.0.layer": np.array([[2]])})
    file = tmp_path / "rank_00000.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{json.dumps(json.loads(second) | changed)}\n")
    with pytest.raises(
        DataError,
        match=rf"line 2 is not a row of a routing trace .*{reported}.* Remove the line, or run",
    ):
        analyze_trace(tmp_path, experts=3)


def test_negative_expert_and_empty_trace_are_errors(tmp_path: Path) -> None:
    write(tmp_path, {"layers.0": np.array([[1, -3]])})
    with pytest.raises(DataError, match="step 1, layers.0: expert -3 of 3"):
        analyze_trace(tmp_path, experts=3)
    (tmp_path / "rank_00000.jsonl").write_text("")
    with pytest.raises(
        DataError, match=r"this routing trace has no steps.* Run with observe.routing_trace=1"
    ):
        analyze_trace(tmp_path, experts=3)
