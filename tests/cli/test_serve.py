"""Tests of the options of `megalith serve`."""

from typing import Any

import pytest

from megalith.cli.main import main
from megalith.config.kernels import KernelsConfig
from megalith.config.server import ServeConfig, ServeRun
from megalith.config.tree import from_dict
from megalith.serve import server


def test_settings_of_engine_and_kernels_reach_the_engine_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[ServeConfig, dict[str, Any]]] = []

    async def record(
        config: ServeConfig, listener: object, settings: dict[str, Any], show: object
    ) -> int:
        calls.append((config, settings))
        return 0

    monkeypatch.setattr(server, "serve", record)
    monkeypatch.setattr(server, "open_listener", lambda config: None)
    words = "models/tiny --port 8000 --engine.max_num_seqs 8 --kernels.small_batch_matmul torch"
    assert main(["serve", *words.split(), "--kernels.attention", "paged"]) == 0
    assert main(["serve", "models/tiny", "--kernels", "reference"]) == 0
    (config, settings), (_, plain) = calls
    run = from_dict(ServeRun, {name: settings[name] for name in ("engine", "kernels")})
    assert (config.port, config.served_model_name) == (8000, "tiny")
    assert run.engine.max_num_seqs == 8
    assert run.kernels == KernelsConfig(small_batch_matmul="torch", attention="paged")
    assert plain["kernels"] == "reference"


def test_help_lists_the_groups_of_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert "\n  engine.cache " in text and "\n  --parallel.dp INT  Data-parallel" in text
    words = " ".join(text.split())
    assert "--port INT TCP port; 0 chooses a free one, which is printed. (default: 5000)" in words
    assert "--nproc INT Number of processes" in words and "--drain-timeout-s FLOAT" in words
    assert main(["serve", "--help", "engine"]) == 0
    assert "--engine.cache.block_size INT" in capsys.readouterr().out


def test_unknown_kernel_backend_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "models/tiny", "--kernels.small_batch_matmul", "fast"]) == 2
    assert "kernels.small_batch_matmul=fast: there is no such choice" in capsys.readouterr().err
