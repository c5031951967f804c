"""Tables of `megalith plan`."""

from dataclasses import fields

import pytest

from megalith.cli.plan import (
    SHOWN,
    WHAT,
    _bytes,
    _count,
    _gib,
    _ms,
    _some,
    list_transfers,
    print_estimate,
    print_layout,
)
from megalith.estimate.explain import StageRow, explain
from megalith.estimate.memory import RankMemory, memory_ledger, worst
from megalith.estimate.times import step_traffic
from megalith.estimate.workload import plan_workload
from megalith.plan.devices import DEVICES, GIB
from megalith.recipes import resolve
from megalith.testing.tiny import tiny_run


def test_numbers_have_the_digits_that_matter() -> None:
    assert [_gib(int(gib * GIB)) for gib in (79.04, 9.996, 0.25, 0.0123)] == [
        "79.0",
        "10.00",
        "0.25",
        "0.012",
    ]
    assert [_bytes(n) for n in (7, 2048, 3 * 2**20, 200 * GIB, 5 * 2**40)] == [
        "7 B",
        "2.0 KiB",
        "3.0 MiB",
        "200 GiB",
        "5.0 TiB",
    ]
    assert [_ms(seconds) for seconds in (1.5, 0.0012, 0.00001)] == ["1,500", "1.2", "0.010"]
    counts = (12, 1500, 124_000_000, 999_949_999, 999_950_000, 405_850_000_000)
    assert [_count(n) for n in counts] == ["12", "1.5k", "124M", "999.9M", "1B", "405.9B"]


def test_every_kind_of_memory_has_a_description() -> None:
    assert list(WHAT) == [field.name for field in fields(RankMemory)]


@pytest.mark.parametrize("count", [2, 2 * SHOWN, 2 * SHOWN + 1, 126])
def test_of_many_stages_the_first_and_the_last_are_shown(count: int) -> None:
    rows = [
        StageRow(
            stage, 0, 0, "", embedding=False, loss=False, parameters=0, trained=0, flops_share=0.0
        )
        for stage in range(count)
    ]
    shown = list(_some(rows))
    assert len(shown) <= 2 * SHOWN
    assert (
        shown == rows if count <= 2 * SHOWN else shown == [*rows[:SHOWN], None, *rows[1 - SHOWN :]]
    )


def test_a_layout_is_shown_with_its_parameters_and_what_a_rank_sends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workload = plan_workload(tiny_run({"parallel.tp": "2"}), 4)
    ledger = memory_ledger(workload)
    place = worst(ledger)
    print_layout(
        workload, explain(workload), ledger, step_traffic(workload, place.pp_rank, place.tp_rank)
    )
    output = capsys.readouterr().out
    assert (
        "tiny: " in output
        and "parameters on 4 ranks" in output
        and "4 = tp 2 · cp 1 · dp 2 · pp 1" in output
    )
    assert f"A rank of pp {place.pp_rank}, tp {place.tp_rank} sends in a step: tp " in output


def test_experts_of_a_rank_are_shown_with_their_communication(
    capsys: pytest.CaptureFixture[str],
) -> None:
    workload = plan_workload(resolve("olmoe_7b"), 16)
    ledger = memory_ledger(workload)
    print_layout(workload, explain(workload), ledger, [])
    output = capsys.readouterr().out
    assert (
        "expert grid  16 = etp 1 · ep 8 · edp 2 · pp 1" in output
        and "Both grids contain the same ranks." in output
    )
    assert (
        "Experts: 16 layers with 64, 8 of them on each rank; a token is sent to 8 and uses 1.282B "
        "parameters." in output
    )
    assert (
        "Router: softmax scores in fp32, weights as scored; balanced by "
        "aux_loss.batch_coeff=0.01; dropless" in output
    )
    assert (
        "A rank holds up to 805.3M expert parameters, 9.00 GiB with gradients and optimizer "
        "state." in output
    )
    assert (
        "process 32,768 rows with a balanced load, 262,144 if all tokens are sent to them."
        in output
    )
    assert "Each all-to-all, 4 per layer and microbatch, sends 112 MiB from each rank." in output


def test_estimate_shows_memory_of_unbalanced_experts(capsys: pytest.CaptureFixture[str]) -> None:
    for name, there in (("olmoe_7b", True), ("llama3_8b", False)):
        workload, device = plan_workload(resolve(name), 16), DEVICES["h100"]
        print_estimate(workload, device, memory_ledger(workload, device), [], None)
        assert (
            "If all tokens are sent to the experts of one rank: " in capsys.readouterr().out
        ) == there


def test_frozen_and_trained_parameters_are_shown_separately(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    settings = {
        "lora.rank": "2",
        "lora.targets": "[down]",
        "lora.layers": "[1]",
        "checkpoint.load": "base",
    }
    workload = plan_workload(tiny_run(settings | {"parallel.pp": "2"}), 2)
    ledger = memory_ledger(workload)
    print_layout(workload, explain(workload), ledger, [])
    output = capsys.readouterr().out
    trained = 2 * (24 + 20)
    assert f"frozen parameters and {trained} trained ones of adapters (" in output
    assert " + 0 " in output and f" + {trained} " in output, "of the first stage nothing is trained"
    assert "optimizer state " in output.splitlines()[-1] and "It holds " in output.splitlines()[-1]


def test_traffic_has_a_duration_where_the_device_has_links() -> None:
    workload = plan_workload(tiny_run({"parallel.tp": "2"}), 4)
    place = worst(memory_ledger(workload))
    transfers = list_transfers(workload, place, DEVICES["h100"])
    assert {row.axis for row, _ in transfers} == {"tp", "dp"}
    assert all(way is not None and way.seconds > 0 for _, way in transfers)
