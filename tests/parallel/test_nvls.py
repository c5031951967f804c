"""NVLS collectives give the results of the process group, over simulated multicast; all ranks of a
group use the same ones."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from itertools import combinations, count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megalith.config.serve import CollectivesName
from megalith.errors import ConfigError
from megalith.kernels.triton import launch
from megalith.observe.flight import FlightRecorder
from megalith.parallel import nvls
from megalith.parallel.collectives import PROCESS_GROUP
from megalith.parallel.group import Group, single_rank_group
from megalith.parallel.nvls import (
    DeviceCapabilities,
    MulticastBuffer,
    NvlsCollectives,
    choose_collectives,
    find_missing,
    find_one_shot_limit,
    local_capabilities,
    nvls_unavailable_reason,
)
from megalith.testing.ranks import run_ranks, world_group
from tests.parallel.multicast import SimulatedMulticast, simulate_multicast

CPU, GPU = torch.device("cpu"), torch.device("cuda")
NBYTES = 1 << 13
NAMES = "all_gather", "reduce_scatter", "all_reduce"
needs_triton = pytest.mark.skipif(not launch.has_triton(), reason="Triton is not installed")


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Integers, whose sums are exact in every order and format."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- results


def compare(rank: int, world: int, path: Path) -> tuple[dict[str, int], list[str]]:
    """Compare with the process group; return the calls that used it, and what was recorded."""
    flight = FlightRecorder()
    group = replace(world_group(rank, world, "tp"), flight=flight)
    with simulate_multicast(group, path, NBYTES) as simulated:
        subject = NvlsCollectives(group, simulated.buffer, one_shot_limit=256)
        recorded: list[str] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        for call in range(8):  # both halves, several times
            for dtype in (torch.float32, torch.bfloat16):
                # 3 tokens per rank; features of a wider tensor, with strides
                x = draw(3 * world, 32, seed=100 * call + rank, dtype=dtype)[
                    :, : 16 + 8 * (call % 2)
                ]
                for name in NAMES:
                    expected = getattr(PROCESS_GROUP, name)(x, group)
                    before = len(flight.entries)
                    actual = getattr(subject.collectives, name)(x, group)
                    pairs.append((actual, expected))
                    assert actual.dtype == dtype and actual.is_contiguous()
                    recorded += [entry.op for entry in list(flight.entries)[before:]]
        # compared last: results are no views of a buffer that later calls overwrite
        assert all(torch.equal(*pair) for pair in pairs)
        assert not subject.process_group_calls, subject.process_group_calls
        for x in (
            draw(3 * world + 1, 16, seed=rank),  # rows that do not divide
            draw(world, 3, seed=rank),  # 12 bytes per part, 36 of 3 ranks
            draw(4 * world, 512, seed=rank),  # larger than a half
            draw(world, 16, seed=rank, dtype=torch.float64),
            draw(2 * world, 16, seed=rank).requires_grad_(),
        ):
            for name in NAMES:
                if name == "reduce_scatter" and x.shape[0] % world:
                    continue  # sizes differ between ranks
                actual = getattr(subject.collectives, name)(x, group)
                assert torch.equal(actual, getattr(PROCESS_GROUP, name)(x, group)), name
    return dict(subject.process_group_calls), sorted(set(recorded))


@needs_triton
@pytest.mark.parametrize("world", [2, 3])
def test_results_are_those_of_the_process_group(world: int, tmp_path: Path) -> None:
    results = run_ranks(compare, world, tmp_path / "parts")
    calls, recorded = results[0]
    assert results == [(calls, recorded)] * world, "ranks decide differently"
    assert recorded == ["nvls_all_gather", "nvls_all_reduce", "nvls_reduce_scatter"]
    reasons = Counter(reason.partition(": ")[2] for reason in calls)
    half = NBYTES // 2
    assert reasons == {
        "parts are empty or no multiple of 16 bytes": 3,
        f"more than {half} bytes": 3,
        "the switch does not add torch.float64": 2,
        "a gradient is needed": 3,
    }


def uneven(rank: int, world: int, path: Path) -> tuple[dict[str, int], list[int]]:
    group = world_group(rank, world, "tp")
    with simulate_multicast(group, path, NBYTES) as simulated:
        subject = NvlsCollectives(group, simulated.buffer)
        x = draw(2 * world + 1, 16, seed=rank)
        part = subject.reduce_scatter(x, group)
        assert torch.equal(part, PROCESS_GROUP.reduce_scatter(x, group))
    return dict(subject.process_group_calls), list(part.shape)


@needs_triton
def test_uneven_rows_are_scattered_by_the_process_group(tmp_path: Path) -> None:
    calls = {"reduce-scatter: rows do not divide by 2": 1}
    assert run_ranks(uneven, 2, tmp_path / "parts") == [(calls, [3, 16]), (calls, [2, 16])]


def test_collectives_reject_another_group() -> None:
    group = Group(axes=("tp",), ranks=(0, 1), rank=0, name="tp")
    buffer = MulticastBuffer(torch.empty(64, dtype=torch.uint8), 1, lambda: None)
    with pytest.raises(AssertionError, match="those of one group"):
        NvlsCollectives(group, buffer).all_reduce(torch.ones(4), replace(group, ranks=(2, 3)))


# --- alternating halves

CALLS = 5


class OneHalf(NvlsCollectives):
    """Planted fault: every call uses the same half."""

    def _next_half(self, x: Tensor, shape: Sequence[int]) -> tuple[Tensor, int]:
        self._num_calls = 0
        return super()._next_half(x, shape)


class NoReset(NvlsCollectives):
    """Planted fault: replays of an odd number of calls follow each other without a barrier."""

    def reset_buffers(self) -> None:
        self._num_calls = 0


def scatter_late(
    kind: type[NvlsCollectives], monkeypatch: pytest.MonkeyPatch, num_replays: int = 1
) -> list[list[Tensor]]:
    """Outputs of consecutive reduce-scatters of two ranks, of which the second reads only after the
    first is at its next barrier, or has written its next message."""
    parts = torch.zeros(2, 512, dtype=torch.uint8)
    gate = threading.Barrier(2)
    written = [threading.Event() for _ in range(num_replays * (CALLS + 1) + 1)]
    calls = [count(), count()]

    def wait(rank: int) -> None:
        call = next(calls[rank])
        if rank == 0:
            written[call].set()
        gate.wait(timeout=30)
        if rank == 1:
            assert written[call + 1].wait(timeout=30)

    outputs: list[list[Tensor]] = [[], []]

    def run(rank: int) -> None:
        simulated = SimulatedMulticast(parts, rank, lambda: wait(rank))
        group = Group(axes=("tp",), ranks=(0, 1), rank=rank, name="tp")
        subject = kind(group, simulated.buffer)
        for call in range(num_replays * CALLS):
            outputs[rank].append(subject.reduce_scatter(draw(4, 8, seed=2 * call + rank), group))
            if call % CALLS == CALLS - 1 and num_replays > 1:
                subject.reset_buffers()
                assert subject._num_calls % 2 == 0  # a replay uses the halves of the first one
        if rank == 0:
            for event in written:
                event.set()

    stand_in = SimulatedMulticast(parts, 0, lambda: None).sum_multicast
    monkeypatch.setattr("megalith.kernels.triton.multicast.sum_multicast", stand_in)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return outputs


def sums(rank: int, calls: int = CALLS) -> list[Tensor]:
    totals = (draw(4, 8, seed=2 * call) + draw(4, 8, seed=2 * call + 1) for call in range(calls))
    return [total.chunk(2)[rank] for total in totals]


@needs_triton
def test_a_late_rank_reads_the_message_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = scatter_late(NvlsCollectives, monkeypatch)
    for rank in range(2):
        assert len(outputs[rank]) == CALLS
        for actual, expected in zip(outputs[rank], sums(rank), strict=True):
            assert torch.equal(actual, expected)


@needs_triton
def test_a_late_rank_reads_the_next_message_from_a_single_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outputs = scatter_late(OneHalf, monkeypatch)
    is_right = [torch.equal(*pair) for pair in zip(outputs[1], sums(1), strict=True)]
    assert is_right == [False] * (CALLS - 1) + [True]


@needs_triton
@pytest.mark.parametrize("kind", [NvlsCollectives, NoReset])
def test_replays_of_an_odd_number_of_calls_are_separated_by_a_barrier(
    kind: type[NvlsCollectives], monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs = scatter_late(kind, monkeypatch, num_replays=3)
    is_right = [torch.equal(*pair) for pair in zip(outputs[1], sums(1, 3 * CALLS), strict=True)]
    # without the barrier, the last message of a replay is overwritten by the first of the next
    is_last = [call % CALLS == CALLS - 1 and call < 2 * CALLS for call in range(3 * CALLS)]
    assert is_right == [kind is NvlsCollectives or not last for last in is_last]
    assert all(map(torch.equal, outputs[0], sums(0, 3 * CALLS)))


# --- availability


def capable(rank: int, **changes: object) -> DeviceCapabilities:
    each = DeviceCapabilities(
        rank,
        "cuda",
        gpu=rank,
        compute_capability=(9, 0),
        multicast=True,
        nvlink_domain="a",
        free_bytes=1 << 30,
    )
    return replace(each, **changes)  # type: ignore[arg-type]  # by name


LIMIT = 1 << 27
REASONS: dict[str, tuple[dict[str, object], str]] = {
    "device": ({"device": "cpu"}, "rank 2 computes on cpu, and NVLS needs NVIDIA GPUs"),
    "missing": ({"missing": "Triton"}, "rank 2 has no Triton"),
    "generation": (
        {"compute_capability": (8, 9)},
        "the GPU of rank 2 has compute capability 8.9, and NVLS needs 9.0 (Hopper) or later",
    ),
    "multicast": (
        {"multicast": False},
        "GPU or driver of rank 2 do not support multicast, which needs NVSwitches",
    ),
    "memory": (
        {"free_bytes": LIMIT - 1},
        f"the GPU of rank 2 has {LIMIT - 1} free bytes, and the buffer takes {LIMIT}",
    ),
    "domain": (
        {"nvlink_domain": "b"},
        "rank 0 is on a and rank 2 on b, and NVLink multicast needs one machine",
    ),
    "gpu": ({"gpu": 1}, "ranks 1 and 2 both compute on GPU 1"),
    "address": (
        {"mapping_error": "no switch"},
        "rank 2 has no multicast address: no switch",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_rank_without_nvls_is_named(name: str) -> None:
    change, reason = REASONS[name]
    capabilities = [capable(rank) for rank in range(4)]
    assert nvls_unavailable_reason(capabilities, LIMIT) is None
    capabilities[2] = capable(2, **change)
    assert nvls_unavailable_reason(capabilities, LIMIT) == reason


def test_every_combination_of_missing_requirements_has_a_reason() -> None:
    for size in range(1, len(REASONS) + 1):
        for names in combinations(REASONS, size):
            changes = {key: value for name in names for key, value in REASONS[name][0].items()}
            capabilities = [capable(0), capable(1), capable(2, **changes)]
            assert nvls_unavailable_reason(capabilities, LIMIT) is not None, names


@pytest.mark.parametrize("generation", [(9, 0), (10, 0), (12, 1)])
def test_later_generations_are_supported(generation: tuple[int, int]) -> None:
    ranks = [capable(rank, compute_capability=generation) for rank in range(2)]
    assert nvls_unavailable_reason(ranks, LIMIT) is None


def choose(name: CollectivesName, group: Group, device: torch.device = GPU) -> tuple[str, str]:
    """Return the name of what was chosen, and the error."""
    try:
        chosen = choose_collectives(name, group, device)
    except ConfigError as error:
        return "", str(error)
    return "process_group" if chosen is PROCESS_GROUP else "nvls", ""


def choices(
    rank: int, world: int, fault: str | None, path: Path
) -> tuple[tuple[str, str], tuple[str, str], tuple[str, str]]:
    """Choices where the last rank lacks something, or no rank does."""
    group = world_group(rank, world, "tp")
    changes: dict[str, object] = {}
    if fault is not None and fault != "address" and rank == world - 1:
        changes = REASONS[fault][0]
    with pytest.MonkeyPatch.context() as patch:
        buffer = MulticastBuffer(torch.zeros(64, dtype=torch.uint8), 1, lambda: None)
        has_address = fault != "address" or rank != world - 1
        patch.setattr(nvls, "local_capabilities", lambda *arguments: capable(rank, **changes))
        patch.setattr(
            nvls, "allocate_multicast_buffer", lambda *arguments: buffer if has_address else None
        )
        patch.setattr(nvls, "measure_one_shot_limit", lambda *arguments: 0)
        names: tuple[CollectivesName, ...] = ("auto", "nvls", "process_group")
        first, second, third = (choose(name, group) for name in names)
    return first, second, third


def test_all_ranks_choose_nvls(tmp_path: Path) -> None:
    chosen = ("nvls", ""), ("nvls", ""), ("process_group", "")
    assert run_ranks(choices, 3, None, tmp_path) == [chosen] * 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("multicast", "GPU or driver of rank 2 do not support multicast, which needs NVSwitches"),
        (
            "address",
            "rank 2 has no multicast address: symmetric memory was mapped without multicast",
        ),
        ("device", "rank 2 computes on cpu, and NVLS needs NVIDIA GPUs"),
    ],
)
def test_no_rank_chooses_nvls_where_one_lacks_it(fault: str, reason: str, tmp_path: Path) -> None:
    text = (
        f"parallel.collectives=nvls is not available to ranks [0, 1, 2]: {reason}. Set "
        "parallel.collectives to auto or process_group."
    )
    chosen = ("process_group", ""), ("", text), ("process_group", "")
    assert run_ranks(choices, 3, fault, tmp_path) == [chosen] * 3


def fail(*arguments: object) -> None:
    raise RuntimeError("CUDA driver error: out of memory\nand a trace")


def test_a_failed_allocation_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvls, "allocate_multicast_buffer", fail)
    group = single_rank_group("tp")
    assert nvls._try_to_allocate(group, GPU) == (None, "CUDA driver error: out of memory")


def on_cpus(rank: int, world: int) -> tuple[tuple[str, str], tuple[str, str]]:
    group = world_group(rank, world, "tp")
    return choose("auto", group, CPU), choose("nvls", group, CPU)


def test_on_cpus_auto_is_the_process_group_and_nvls_is_rejected() -> None:
    text = (
        "parallel.collectives=nvls is not available to ranks [0, 1]: rank 0 computes on cpu, and "
        "NVLS needs NVIDIA GPUs. Set parallel.collectives to auto or process_group."
    )
    assert run_ranks(on_cpus, 2) == [(("process_group", ""), ("", text))] * 2
    assert choose("nvls", single_rank_group("tp")) == ("process_group", "")


def test_the_choice_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvls, "gather_objects", lambda value, group: [value, value])
    group = Group(axes=("tp",), ranks=(4, 5), rank=0, name="tp")
    with caplog.at_level("INFO", "megalith.parallel.nvls"):
        choose("auto", group, CPU)
        choose("auto", replace(group, rank=1), CPU)
    (record,) = caplog.records
    assert record.getMessage() == (
        "parallel.collectives=auto: ranks [4, 5] use process_group, because rank 4 computes on "
        "cpu, and NVLS needs NVIDIA GPUs"
    )


def test_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, gpu))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (100, 200))
    monkeypatch.setattr(nvls, "find_missing", lambda: "")
    monkeypatch.setattr(nvls, "_has_multicast", lambda gpu: gpu == 1)
    each = local_capabilities(5, torch.device("cuda:1"))
    assert (each.rank, each.device, each.gpu, each.compute_capability) == (5, "cuda", 1, (9, 1))
    assert each.multicast and each.nvlink_domain and each.free_bytes == 100
    assert local_capabilities(3, CPU) == DeviceCapabilities(3, "cpu")


def test_missing_parts_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvls, "has_triton", lambda: True)
    assert find_missing() == "", "torch 2.13 has all of them"
    monkeypatch.setattr(nvls, "OPERATORS", (*nvls.OPERATORS, "multimem_new"))
    assert find_missing() == f"torch.ops.symm_mem.multimem_new in torch {torch.__version__}"
    monkeypatch.setattr(nvls, "_MODULE", "torch.distributed._no_such_memory")
    assert find_missing() == f"torch.distributed._no_such_memory in torch {torch.__version__}"
    monkeypatch.setattr(nvls, "has_triton", lambda: False)
    assert find_missing() == "Triton"


@pytest.mark.parametrize("address", [0, 4096])
def test_memory_without_a_multicast_address_is_no_buffer(
    address: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = SimpleNamespace(multicast_ptr=address, barrier=lambda: None)
    module = import_module("torch.distributed._symmetric_memory")
    monkeypatch.setattr(module, "empty", torch.empty)
    monkeypatch.setattr(module, "rendezvous", lambda memory, name: handle)
    group = replace(single_rank_group("tp"), name="tp")
    buffer = nvls.allocate_multicast_buffer(group, CPU, 64)
    assert (buffer is None) == (address == 0)
    if buffer is not None:
        assert (buffer.memory.numel(), buffer.memory.dtype) == (64, torch.uint8)
        assert (buffer.multicast_address, buffer.barrier) == (4096, handle.barrier)


def test_one_shot_limit_is_measured_with_messages_of_every_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[tuple[int, bool]] = []

    def time_all_reduce(subject: NvlsCollectives, x: Tensor, *, one_shot: bool) -> float:
        measured.append((x.nbytes, one_shot))
        return x.nbytes / (1 << 15) if one_shot else 2.0

    monkeypatch.setattr(nvls, "_time_all_reduce", time_all_reduce)
    buffer = MulticastBuffer(torch.empty(64, dtype=torch.uint8), 1, lambda: None)
    subject = NvlsCollectives(single_rank_group("tp"), buffer)
    assert nvls.measure_one_shot_limit(subject, CPU) == 1 << 16
    assert measured == [(size, one) for size in nvls.ONE_SHOT_SIZES for one in (True, False)]


@pytest.mark.parametrize(
    ("times", "limit"),
    [
        ([{8: (1.0, 2.0), 16: (1.0, 1.0), 32: (3.0, 2.0)}], 16),
        ([{8: (3.0, 2.0), 16: (1.0, 2.0)}], 0),  # smaller messages were slower
        ([{8: (1.0, 2.0), 16: (1.0, 2.0)}, {8: (1.0, 1.0), 16: (9.0, 8.0)}], 8),
    ],
)
def test_one_shot_limit_is_that_of_the_slowest_rank(
    times: list[dict[int, tuple[float, float]]], limit: int
) -> None:
    assert find_one_shot_limit(times) == limit


# --- GPUs


def on_gpus(rank: int, world: int) -> None:
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    group = world_group(rank, world, "tp")
    chosen = choose_collectives("nvls", group, device)
    for call in range(9):
        for dtype, tokens in ((torch.bfloat16, 1), (torch.bfloat16, 2048), (torch.float32, 33)):
            xs = [
                draw(world * tokens, 512, seed=world * call + other, dtype=dtype).to(device)
                for other in range(world)
            ]
            total = torch.stack(xs).float().sum(0).to(dtype)
            assert torch.equal(chosen.all_reduce(xs[rank], group), total)
            part = chosen.reduce_scatter(xs[rank], group)
            assert torch.equal(part, total.chunk(world)[rank])
            assert torch.equal(chosen.all_gather(part, group), total)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs that NVSwitches connect")
def test_multicast_gives_the_results_of_sums() -> None:
    run_ranks(on_gpus, torch.cuda.device_count(), timeout=120.0)
