"""Triton dispatch, and the Triton kernels' tests in the interpreter on CPUs."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.kernels.triton import launch
from megalith.kernels.triton.launch import ProgramTile, partial_row_tile, whole_row_tile
from megalith.testing.tiny import INTERPRET

FOLDER = Path(__file__).parent
NAMES = "gated", "loss", "norm", "rope", "paged", "small_batch"
FILES = [str(FOLDER / f"test_triton_{name}.py") for name in NAMES]


@pytest.mark.skipif(not launch.has_triton(), reason="Triton is not installed")
def test_triton_kernels_pass_their_tests_in_the_interpreter() -> None:
    # About 10 s of computing: an interpreter is slow, and one process runs all, because starting it
    # takes 3 s.
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *FILES,
        ],
        env={**os.environ, INTERPRET: "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert "skipped" not in result.stdout


def test_cpu_tensors_are_not_supported_and_triton_is_not_imported() -> None:
    code = (
        "import sys, torch\n"
        "from megalith.kernels import activation, norm, rope\n"
        "from megalith.parallel import cross_entropy\n"
        "norm.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-5)\n"
        "assert not any(name.split('.')[0] == 'triton' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert not launch.can_use(torch.ones(2, 4))


@pytest.mark.parametrize("width", [1, 2, 100, 2048, 2049, launch.WIDEST])
def test_tile_sizes_are_powers_of_two(width: int) -> None:
    whole, part = whole_row_tile(width), partial_row_tile(width)
    assert whole.columns >= width
    assert part.columns >= min(width, launch.TILE)
    for tile in (whole, part):
        assert all(number & (number - 1) == 0 and number > 0 for number in tile)
        assert tile.rows * tile.columns >= launch.TILE // 2
    assert whole.warps <= 16


def test_programs_cover_all_rows() -> None:
    assert [ProgramTile(4, 8, 4).programs(rows) for rows in (1, 4, 5)] == [1, 1, 2]


Given = dict[str, Any]  # a program's arguments that are known when it is compiled


def programs() -> Iterator[tuple[Any, Given]]:
    """Every program that something calls, with settings that leave none of its lines out."""
    from megalith.kernels.triton import cross_entropy, layers

    tile = {"ROWS": 2, "COLUMNS": 1024}
    yield layers._norm, {"ADDS": True, "CENTERED": True, "TWICE": True, **tile}
    yield layers._norm_backward, {"ADDS": True, "CENTERED": True, **tile}
    yield layers._rotate, {"INTERLEAVED": True, "RESTS": True, "HEADS": 8, "COLUMNS": 64}
    for kind, gated in (("silu", True), ("gelu", True), ("squared_relu", False), ("relu", False)):
        for program in (layers._activation_forward, layers._activation_backward):
            yield (
                program,
                {"KIND": kind, "A": 1.0, "B": 0.0, "GATED": gated, "WEIGHTED": True, **tile},
            )
    yield cross_entropy._row_sums, tile
    yield cross_entropy._gradient, {"CAPPED": True, **tile}


@pytest.mark.slow
@pytest.mark.skipif(not launch.has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize("generation", [80, 90])
def test_triton_kernels_compile_for_other_gpus(
    generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    numbers = {
        "label_at": "*i64",
        **dict.fromkeys(("eps", "sign", "clamp", "offset", "scale", "cap"), "fp32"),
    }
    for program, known in programs():
        rest = {
            name: numbers.get(name, "*bf16" if name.endswith("_at") else "i32")
            for name in program.arg_names
        }
        source = ASTSource(program, rest | dict.fromkeys(known, "constexpr"), known)
        compiled = triton.compile(
            source, target=GPUTarget("cuda", generation, 32), options={"num_warps": 4}
        )
        assert compiled.asm["cubin"], program.__name__
        assert compiled.metadata.shared <= 48 << 10
