"""The plain transport gives what the others give, and a package's own is called by its name."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.config.parallel import ParallelConfig
from megalith.errors import ConfigError
from megalith.kernels.routing import Choice
from megalith.parallel.expert import LocalDispatcher, build_transport, load_transport
from megalith.parallel.mesh import build_mesh, build_single_rank_mesh
from megalith.plan.grid import model_grid
from megalith.plan.layers.moe import GROUP
from megalith.testing.ranks import run_ranks
from tests.parallel.test_expert import MODEL, answer, made

KINDS = ("anything", "one expert", "nothing from the first")

CODE = """
from megalith.parallel.expert import ReferenceDispatcher

calls = []

def build(**given):
    calls.append(sorted(given))
    return ReferenceDispatcher(**given)
"""


def there_and_back(
    rank: int, world: int, ep: int, etp: int, name: str, kind: str, order: str, folder: str | None
) -> tuple[Tensor, ...]:
    if folder is not None:
        sys.path.insert(0, folder)
    mesh = build_mesh(
        model_grid(ParallelConfig(dp=world, ep=ep, etp=etp, order=order), MODEL, world), rank=rank
    )
    x, choice = made(rank, kind)
    choice = Choice(choice.experts, choice.weights.requires_grad_())
    x.requires_grad_()
    sent, way = build_transport(name, mesh, 4, drops_tokens=True)(x, choice).wait()
    local = mesh.over("ep").rank * (4 // ep) + torch.arange(4 // ep)
    expert = local.repeat_interleave(torch.tensor(sent.groups.on_host()))
    y = way.combine(
        answer(
            sent.rows,
            sent.weights,
            expert,
            (mesh.over("etp").rank + 1) / (etp * (etp + 1) / 2),
        )
    )
    y.square().sum().backward()
    assert x.grad is not None and choice.weights.grad is not None
    if folder is not None:
        from fast_wires import calls  # type: ignore[import-not-found]  # written by the test

        assert calls == [["both", "drops_tokens", "ep", "etp", "num_experts"]]
        sys.path.remove(folder)
        del sys.modules["fast_wires"]
    return y.detach(), x.grad, choice.weights.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ep", "etp", "order"), [(2, 1, ""), (1, 2, ""), (2, 2, ""), (2, 2, "ep before tp"), (4, 1, "")]
)
def test_reference_dispatcher_matches_alltoall_and_allgather(
    ep: int, etp: int, order: str, kind: str
) -> None:
    order = "ep-tp-cp-dp-pp" if order else ParallelConfig().order
    results = {
        name: run_ranks(there_and_back, ep * etp, ep, etp, name, kind, order, None)
        for name in ("reference", "alltoall", "allgather")
    }
    for other in ("alltoall", "allgather"):
        for actual, reference in zip(results["reference"], results[other], strict=True):
            torch.testing.assert_close(actual, reference, rtol=1e-13, atol=1e-14)


@pytest.fixture
def package(install_package: Callable[[str, dict[str, str]], Path]) -> Path:
    """An installed package with a transport that works, and one whose code lacks something."""
    folder = install_package(GROUP, {"fast": "fast_wires:build", "broken": "no_such_wires:build"})
    (folder / "fast_wires.py").write_text(CODE)
    return folder


def test_dispatcher_of_another_package_is_used(package: Path) -> None:
    order = ParallelConfig().order
    plain = run_ranks(there_and_back, 2, 2, 1, "alltoall", "anything", order, None)
    own = run_ranks(there_and_back, 2, 2, 1, "fast", "anything", order, str(package))
    for actual, reference in zip(own, plain, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-13, atol=1e-14)


def test_dispatcher_that_cannot_be_loaded_is_named(package: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"no_such_wires:build does not load \(ModuleNotFoundError: No module named",
    ):
        load_transport("broken")
    with pytest.raises(
        ConfigError, match="parallel.dispatcher=slow: no installed package provides it. Use one of"
    ):
        load_transport("slow")


def test_single_rank_dispatcher_sends_nothing() -> None:
    assert isinstance(build_transport("reference", build_single_rank_mesh(), 4), LocalDispatcher)
