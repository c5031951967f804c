"""One server for all tests of a process, and the same model without a server."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalith.config.serve import CacheConfig, EngineConfig
from megalith.infer.llm import LLM
from tests.serve.peers import Peer
from tests.serve.servers import Server, make_run, running_server


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a tiny model, whose tokens are bytes."""
    return make_run(tmp_path_factory.mktemp("serve") / "run")


@pytest.fixture(scope="session")
def server(run: Path) -> Iterator[Server]:
    """A server of the model under the name tiny, with a chat template."""
    options = ["--served-model-name", "tiny", "--template", "chatml"]
    with running_server(run, *options) as running:
        yield running


@pytest.fixture(scope="session")
def llm(run: Path) -> LLM:
    """The same model in this process."""
    return LLM(run)


@pytest.fixture(scope="session")
def new_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the same model with other weights."""
    return make_run(tmp_path_factory.mktemp("serve") / "new", seed=2)


@pytest.fixture
def peer(run: Path) -> Iterator[Peer]:
    """An engine's loop on a thread."""
    config = EngineConfig(cache=CacheConfig(num_blocks=40))
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket is short
        peer = Peer(Path(folder), LLM(run, config=config))
        yield peer
        peer.close()
