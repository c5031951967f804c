"""The path of one training step: which modules it executes, compared with docs/tour.md."""

import re
import sys
from pathlib import Path
from types import FrameType

import torch

import megalith
from megalith.data.loader import BatchSettings, Loader
from megalith.parallel.mesh import build_mesh
from megalith.plan.batch_schedule import constant_batch_size
from megalith.plan.grid import model_grid
from megalith.testing.ranks import run_ranks
from megalith.testing.tiny import tiny_run
from megalith.train.step import train_step
from megalith.train.trainer import build_trainer
from megalith.verify.ranks import RaggedRows

PACKAGE = Path(megalith.__file__).parent
TOUR = PACKAGE.parent / "docs" / "tour.md"
MAX_MODULES = 45
MAX_CORE_MODULES = 30
# Which of these run depends on the machine.
OUTSIDE_CORE = (
    "kernels/attention/",
    "kernels/cpu_",
    "kernels/triton/",
    "observe/",
    "config/",
)


def modules_of_a_step(rank: int, world: int) -> list[str]:
    """Return the modules whose functions the second step of a dense tp 2 run calls."""
    run = tiny_run({"parallel.tp": str(world)})
    mesh = build_mesh(model_grid(run.parallel, run.model, world), rank=rank, timeout_seconds=60)
    cpu = torch.device("cpu")
    trainer = build_trainer(run, mesh, cpu)
    rows = RaggedRows(run.train.seq_len, run.model.vocab_size, 24, (1,))
    batch = {
        "batch_schedule": constant_batch_size(12),
        "micro_batch_size": run.train.micro_batch_size,
    }
    loader = Loader(rows, BatchSettings(**batch), mesh.dp, consumed=0, steps=2, device=cpu)
    train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1)
    files = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    train_step(trainer, loader.next(), lr=1e-2, weight_decay=0.1)
    sys.setprofile(None)
    inside = (Path(file) for file in files if Path(file).is_relative_to(PACKAGE))
    return sorted(file.relative_to(PACKAGE).as_posix() for file in inside)


def test_step_executes_the_modules_that_the_tour_lists() -> None:
    executed = run_ranks(modules_of_a_step, 2)[0]
    core = {name for name in executed if not name.startswith(OUTSIDE_CORE)}
    section = TOUR.read_text().split("## Modules of a step")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("- ")]
    listed = set(re.findall(r"`([\w/]+\.py)`", "\n".join(rows)))
    assert core == listed, (
        f"docs/tour.md lacks {sorted(core - listed)} and has too many {sorted(listed - core)}"
    )
    assert len(executed) <= MAX_MODULES and len(core) <= MAX_CORE_MODULES, executed
