"""Sidecars: files that grow while a step goes on, whole in the end or not there, and what goes into
them once."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megalith.data.loader import Batch
from megalith.kernels.layer_inputs import RoutingCapture
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.train.callbacks import trace as capture_files
from megalith.train.callbacks.trace import WAITING, CaptureFile, CaptureWriter


class FakeTokens:
    """Five tokens of a microbatch that nobody shares."""

    context = None
    num_tokens = 5
    valid = torch.ones(5, dtype=torch.bool)

    @property
    def whole(self) -> "FakeTokens":
        return self


class FakeBatch:
    seq_params = FakeTokens()


BATCHES: list[Any] = [FakeBatch(), FakeBatch()]
SEEN = RoutingCapture(
    "layers.1",
    1,
    torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
    torch.arange(20.0).view(5, 4),
    torch.full((5, 2), 0.3),
    {"weight": torch.ones(4, 3, dtype=torch.float64), "balancing_bias": torch.arange(4.0)},
)


def test_captures_file_is_created_atomically_and_readable_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rank_00000_step_0000001.safetensors"
    capture_file = CaptureFile(path, most=20)
    assert not path.parent.exists()
    values = {
        f"layers.{n}/0/hidden": torch.full((n, 3), float(n), dtype=torch.bfloat16)
        for n in range(20)
    }
    for name, tensor in values.items():
        capture_file.put(name, tensor)
    assert not path.exists()
    assert capture_file.finish() and [file.name for file in path.parent.iterdir()] == [path.name]
    result = load_file(path)
    assert result.keys() == values.keys() and all(
        torch.equal(result[name], values[name]) for name in values
    )


def test_captures_file_without_tensors_is_not_created(tmp_path: Path) -> None:
    assert not CaptureFile(tmp_path / "x", most=0).finish() and not [*tmp_path.iterdir()]


def test_number_of_queued_tensors_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = threading.Event()

    def wait(values: Tensor) -> list[memoryview]:
        slow.wait(30)
        return []

    monkeypatch.setattr(capture_files, "as_bytes", wait)
    capture_file = CaptureFile(tmp_path / "x", most=99)
    for number in range(WAITING):
        capture_file.put(str(number), torch.zeros(1))
    late = threading.Thread(target=capture_file.put, args=("late", torch.zeros(1)))
    late.start()
    late.join(0.05)
    assert late.is_alive()
    slow.set()
    late.join(30)
    assert not late.is_alive()
    capture_file.abandon()


def test_full_disk_is_raised_by_finish_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(values: Tensor) -> list[memoryview]:
        raise OSError(28, "No space left on device")

    capture_file = CaptureFile(tmp_path / "x", most=99)
    capture_file.put("first", torch.zeros(3))
    capture_file._wait(at_most=0)
    monkeypatch.setattr(capture_files, "as_bytes", full)
    for number in range(3 * WAITING):
        capture_file.put(str(number), torch.zeros(3))
    with pytest.raises(OSError, match="No space left"):
        capture_file.finish()
    assert not [*tmp_path.iterdir()]


def test_failed_step_leaves_no_captures(tmp_path: Path) -> None:
    capture_file = CaptureFile(tmp_path / "x", most=9)
    capture_file.put("first", torch.zeros(3))
    capture_file._wait(at_most=0)
    assert [file.name for file in tmp_path.iterdir()] == ["x.part"]
    capture_file.abandon()
    assert not [*tmp_path.iterdir()]


def kept(path: Path, kinds: Any, *shown: RoutingCapture) -> dict[str, Tensor]:
    """What a watcher keeps of what it is shown."""
    capture_file = CaptureFile(path, most=40)
    watch = CaptureWriter(kinds, capture_file, list[Batch](BATCHES), build_single_rank_mesh())
    for seen in shown:
        watch(seen)
    assert capture_file.finish()
    return load_file(path)


def test_recomputation_does_not_capture_twice(tmp_path: Path) -> None:
    again = SEEN._replace(hidden=SEEN.hidden + 1, logits=-SEEN.logits)
    result = kept(
        tmp_path / "x", ("hidden", "logits", "weights"), SEEN, again, SEEN._replace(microbatch=0)
    )
    assert result.keys() == {
        f"layers.1/{m}/{kind}" for m in (0, 1) for kind in ("hidden", "logits", "weights")
    }
    assert torch.equal(result["layers.1/1/hidden"], SEEN.hidden.bfloat16())
    assert torch.equal(result["layers.1/1/logits"], SEEN.logits.bfloat16())


def test_only_requested_kinds_are_captured(tmp_path: Path) -> None:
    result = kept(tmp_path / "x", ("routers",), SEEN, SEEN._replace(microbatch=0))
    assert result.keys() == {"layers.1/router/weight", "layers.1/router/balancing_bias"}
    assert result["layers.1/router/weight"].dtype == torch.float64


def test_padding_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokens, "valid", torch.tensor([True, False, True, False, True]))
    result = kept(tmp_path / "x", ("hidden",), SEEN)
    assert torch.equal(result["layers.1/1/hidden"], SEEN.hidden.bfloat16()[[0, 2, 4]])
