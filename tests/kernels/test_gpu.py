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
from tests.kernels.triton_interpreter import use_triton

FOLDER = Path(__file__).parent
LAYERS = "gated", "loss", "norm", "rope", "multicast"
PAGED, MATMULS = ("paged",), ("small_batch",)


@pytest.mark.skipif(not launch.has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize(
    ("names", "marker"),
    [
        *((names, "not slow") for names in (LAYERS, PAGED, MATMULS)),
        pytest.param(PAGED, "slow", marks=pytest.mark.slow),
    ],
)
def test_triton_kernels_pass_their_tests_in_the_interpreter(
    names: tuple[str, ...], marker: str
) -> None:
    # About 10 s of computing: an interpreter is slow, and one process runs several files, because
    # starting it takes 3 s.
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-m",
            marker,
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *(str(FOLDER / f"test_triton_{name}.py") for name in names),
        ],
        env={**os.environ, INTERPRET: "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout[-4000:]
    assert "skipped" not in result.stdout


@pytest.mark.skipif(not launch.has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize(
    ("name", "instruction"),
    [("f32", "add.v4.f32"), ("bf16", "add.acc::f32.v4.bf16x2")],
)
def test_multicast_kernel_compiles_for_hopper(
    name: str, instruction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's compiler and assembler need no GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megalith.kernels.triton import multicast

    source = ASTSource(
        fn=multicast._sum_multicast,
        signature={
            "multicast_address": "i64",
            "out_at": "*i32",
            "num_chunks": "i32",
            "FORMAT": "constexpr",
            "BLOCK": "constexpr",
        },
        constexprs={"FORMAT": name, "BLOCK": multicast.CHUNKS},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert f"multimem.ld_reduce.relaxed.sys.global.{instruction} " in compiled.asm["ptx"]
    assert compiled.asm["cubin"]


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


class FakeDriver:
    """A driver of a GPU that is not present: kernels are compiled for it, and not launched."""

    def __init__(self, generation: int) -> None:
        self._generation = generation

    def get_current_target(self) -> Any:  # GPUTarget of Triton, imported on use
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._generation, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def call_inference_kernels() -> None:
    """Call the kernels of the paged KV cache and small-batch matmuls with the sizes of models."""
    from megalith.kernels.attention.paged import paged_attention, paged_latent_attention, store
    from megalith.kernels.attention.scores import Scores
    from megalith.kernels.linear_small_batch import small_batch_grouped_linear, small_batch_linear
    from tests.kernels.test_paged import build_step

    sizes: dict[str, Any] = {"heads": 8, "kv_heads": 2, "d": 128, "d_v": 128, "block_size": 16}
    lengths, bf16 = [(1, 1000), (2, 30)], torch.bfloat16
    capped = Scores(window=100, softcap=2.0)
    for dtype, cache_dtype, scores in (
        (bf16, None, Scores()),
        (bf16, torch.int8, capped),
        (torch.float32, torch.float8_e4m3fn, Scores(off_by_one=True)),
    ):
        step = build_step(lengths, **sizes, dtype=dtype, cache_dtype=cache_dtype)
        caches, rows = (step.key_cache, step.value_cache), torch.zeros(3, 2, 128, dtype=dtype)
        sinks = torch.zeros(8) if scores is capped else None
        paged_attention(step.q, *caches, step.metadata, scores, sinks, kernel="triton")
        store(step.key_cache, rows, torch.arange(3), kernel="triton")
    step = build_step(lengths, heads=16, kv_heads=1, d=576, d_v=16, block_size=64, dtype=bf16)
    queries, caches = (x.split([512, 64], dim=-1) for x in (step.q, step.key_cache))
    scores = Scores(scale=0.1)
    paged_latent_attention(*queries, *caches, step.metadata, scores, kernel="triton")
    w = torch.zeros(1024, 4096, dtype=bf16)
    for tile in range(4):
        small_batch_linear(torch.zeros(17, 4096, dtype=bf16), w, tile=tile)
    x, scale = torch.zeros(3, 4096, dtype=bf16), torch.zeros(1024)
    small_batch_grouped_linear(x, w.to(torch.int8), [1, 2, 0, 0], scale)
    small_batch_linear(x.float(), w.float())


@pytest.mark.slow
@pytest.mark.skipif(not launch.has_triton(), reason="Triton is not installed")
@pytest.mark.parametrize("generation", [80, 90])
def test_kernels_of_inference_compile_for_other_gpus(
    generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from megalith.kernels.triton import paged_attention, small_batch

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        shared[self.__name__] = max(kernel.metadata.shared, shared.get(self.__name__, 0))

    def operand_type(x: torch.Tensor) -> Any:  # that of a GPU
        tl = paged_attention.tl
        return tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float32

    run, shared = JITFunction.run, dict[str, int]()
    use_triton(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", compile_only)
    for module in (paged_attention, small_batch):
        monkeypatch.setattr(module, "operand_type", operand_type)
    monkeypatch.setattr(driver, "_active", FakeDriver(generation))
    call_inference_kernels()
    names = {"_attend", "_merge_segments", "_store_rows", "_multiply", "_add_parts"}
    assert set(shared) == names
    assert max(shared.values()) <= 99 << 10, shared  # the smallest limit since Ampere
