"""A server for programs that are written for other servers: `make clients`, in an environment of
their own without megalith."""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("langchain_openai", "litellm", "lm_eval")
# In the environment of `make test` these tests are not collected.
collect_ignore_glob = [] if all(map(find_spec, PACKAGES)) else ["test_*.py"]
ROOT = Path(__file__).resolve().parents[2]

os.environ["HF_HUB_OFFLINE"] = os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "1"
os.environ["OPENAI_API_KEY"] = "unused"


@dataclass(frozen=True, slots=True)
class Reference:
    """A running server of a tiny model, and the same model without a server."""

    process: "subprocess.Popen[str]"
    url: str

    def ask(self, **request: Any) -> Any:
        """Generate or score without the server, see `reference.py`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """The server of all tests, run by the Python that MEGALITH_PYTHON names."""
    run = tmp_path_factory.mktemp("clients") / "run"
    process = subprocess.Popen(
        [os.environ["MEGALITH_PYTHON"], "-m", "tests.clients.reference", str(run)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://"), f"the server ended with {process.wait(60)}"
        yield Reference(process, url)
        process.stdin.close()
        assert process.wait(60) == 0
    finally:
        process.kill()
