"""`megalith doctor`."""

import json
from dataclasses import replace

import pytest

from megalith.cli.main import main
from megalith.observe import machine
from megalith.observe.machine import DeviceRates

RATES = DeviceRates(
    device="cpu",
    threads=4,
    tflops={"fp32": 0.2, "bf16": 0.4},
    peak_tflops={"fp32": None, "bf16": None},
    bandwidth_gb_per_second=20.0,
)


def test_one_json_document_holds_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-measure"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["cores"] >= 1
    assert report["capabilities"]["gloo"]["present"] is True
    assert report["rates"] == []
    assert report["advice"]
    backends = {
        (backend["operation"], backend["backend"]): backend for backend in report["kernels"]
    }
    assert backends["norm", "numba"]["takes"].startswith("fp32, bf16 on CPUs; RMSNorm")
    assert (
        backends["attention", "sdpa"]["here"] == "yes"
        and backends["attention", "flex"]["deterministic"] == "not guaranteed"
    )


def test_report_shows_measured_rates(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "measure", lambda device: replace(RATES, device=device))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "cpu, 4 threads" in text
    assert "fp32 TFLOP/s" in text
    assert "several ranks on CPUs" in text
    assert "cross_entropy" in text and "deterministic" in text
