"""What every test runs under: one thread, no network, no GPU-dependent default, a fixed
environment."""

import functools
import gc
import ipaddress
import os
import re
import signal
import socket
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before anything imports torch
os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
gc.disable()  # until all tests are collected


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, which would make every run of two ranks ask for two of them; `pytest -m gpu` uses
    them."""
    if "gpu" not in re.sub(r"not\s+gpu", "", str(config.option.markexpr)):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Exempt modules and test items, which live until the end, from garbage collection; it costs 40
    % of collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # tests make many short-lived objects; heuristic
    gc.enable()


def is_local(address: Any) -> bool:  # whatever a socket takes: (host, port, ...), or a path
    """Whether connecting to `address` stays on this machine."""
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    if host in ("", "localhost", socket.gethostname(), socket.getfqdn()):
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(scope="session")
def megatron_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that extracts an archive of `tests/checkpoint/megatron/`: a folder that
    megatron-core saved, with `reference.safetensors`. Tests that change files copy the folder."""

    @functools.cache
    def extract(name: str) -> Path:
        folder = tmp_path_factory.mktemp("megatron")
        archive = Path(__file__).parent / "checkpoint" / "megatron" / f"{name}.tar.xz"
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        return folder / name

    return extract


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A process that was started in the background of a shell ignores SIGINT, one that was started
    by `nohup` SIGHUP; here it does not."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGHUP, hangup)


@pytest.fixture
def install_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, dict[str, str]], Path]:
    """Installs a package `fast-wires`, which lasts as long as the test: gives its folder."""

    def install(group: str, entry_points: dict[str, str]) -> Path:
        info = tmp_path / "fast_wires-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fast-wires\nVersion: 1.0\n")
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entry_points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    return install


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Refuse connections to other machines, so that no test can need one."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
        yield


def _guarded(connect: Any) -> Any:  # a slot of a C type, with no written signature
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.type == socket.SOCK_STREAM and not is_local(address):
            raise ConnectionRefusedError(
                f"a test connects to {address}: tests run offline. Use data made by the test."
            )
        return connect(self, address)

    return guarded
