"""checkpoint.parallel_load: ranks that need the same boxes read each once and exchange them."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megalith import storage
from megalith.checkpoint.format import CheckpointEntry, TensorPiece
from megalith.checkpoint.load import Checkpoint, open_checkpoint
from megalith.config.checkpoint import CheckpointConfig
from megalith.errors import DamagedCheckpointError
from megalith.plan.shared_reads import plan_shared_reads
from megalith.testing.inject import patched
from megalith.testing.ranks import run_ranks, world_group


def test_plan_reads_each_box_once_within_the_buffer() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        world, num_boxes, buffer = rng.randint(1, 6), rng.randint(0, 20), rng.randint(1, 40)
        nbytes = {box: rng.randint(1, 30) for box in range(num_boxes)}
        needed = [[box for box in nbytes if rng.random() < 0.4] for _ in range(world)]
        plan = plan_shared_reads(needed, nbytes, buffer_nbytes=buffer)
        reads = [read for reads in plan.rounds for read in reads]
        own = [box for boxes in plan.own for box in boxes]
        assert len({*own, *(read.box for read in reads)}) == len(own) + len(reads), seed
        for rank, boxes in enumerate(needed):
            received = [read.box for read in reads if rank in (read.reader, *read.receivers)]
            assert sorted([*plan.own[rank], *received]) == boxes, seed
        for round_reads in plan.rounds:
            for rank in range(world):
                sizes = [nbytes[r.box] for r in round_reads if rank in (r.reader, *r.receivers)]
                assert sum(sizes) <= buffer or len(sizes) == 1, seed


def test_reads_are_balanced_over_replicas() -> None:
    plan = plan_shared_reads([range(40)] * 4, dict.fromkeys(range(40), 5), buffer_nbytes=50)
    readers = [read.reader for reads in plan.rounds for read in reads]
    assert [readers.count(rank) for rank in range(4)] == [10] * 4
    assert [len(reads) for reads in plan.rounds] == [10] * 4


def _load(
    rank: int, world: int, path: Path, entries: list[list[CheckpointEntry]], rules: CheckpointConfig
) -> tuple[list[torch.Tensor], list[tuple[str, int, int]]]:
    """Load the entries of this rank; return the tensors and the boxes that it has read."""
    reads: list[tuple[str, int, int]] = []
    read_box = Checkpoint._read_box

    def count(self: Checkpoint, key: str, stored: TensorPiece) -> torch.Tensor:
        reads.append((stored.file, stored.offset, stored.nbytes))
        return read_box(self, key, stored)

    with patched(Checkpoint, "_read_box", count):
        group = world_group(rank, world, "world")
        open_checkpoint(path).load_into(entries[rank], group, rules=rules)
    return [entry.tensor for entry in entries[rank]], reads


@pytest.mark.parametrize(
    "world,buffer_mb",
    [pytest.param(4, 0, marks=pytest.mark.slow), (4, 256)],  # 0: one box in each round
)
def test_replicas_read_each_byte_once(
    tmp_path: Path, tiny: SimpleNamespace, world: int, buffer_mb: int
) -> None:
    path = tiny.save(tmp_path, 1, tiny.cut(tiny.model(0), 2, 2))
    blank = [each for _ in range(world // 2) for each in tiny.cut(tiny.model(0), 1, 2, blank=True)]
    settings = CheckpointConfig(parallel_load=True, exchange_buffer_mb=buffer_mb)
    parallel = run_ranks(_load, world, path, blank, settings)
    sequential = run_ranks(_load, world, path, blank, CheckpointConfig(parallel_load=False))
    for (tensors, _), (expected, _) in zip(parallel, sequential, strict=True):
        assert all(map(torch.equal, tensors, expected))
        assert any(tensor.any() for tensor in tensors)
    manifest = open_checkpoint(path).manifest
    stored = [box for tensor in manifest.tensors.values() for box in tensor.boxes]
    boxes = [box for _, reads in parallel for box in reads]
    assert len(boxes) == len({*boxes}) == len(stored), "each box is read once"
    assert sum(nbytes for _, _, nbytes in boxes) == sum(box.nbytes for box in stored)
    assert sum(len(reads) for _, reads in sequential) > len(stored), "otherwise nothing is saved"
    assert all(reads for _, reads in parallel), "every rank reads some"


def _load_damaged(
    rank: int, world: int, path: Path, entries: list[list[CheckpointEntry]], rules: CheckpointConfig
) -> str:
    with pytest.raises(DamagedCheckpointError) as error:
        _load(rank, world, path, entries, rules)
    return str(error.value)


def test_damaged_box_is_an_error_on_every_rank(tmp_path: Path, tiny: SimpleNamespace) -> None:
    path = tiny.save(tmp_path, 1, tiny.cut(tiny.model(0), 1, 1))
    file = next(path.glob("*.distcp"))
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 4
    file.write_bytes(contents)
    blank = [tiny.cut(tiny.model(0), 1, 1, blank=True)[0] for _ in range(2)]
    texts = run_ranks(_load_damaged, 2, path, blank, CheckpointConfig(parallel_load=True))
    assert len({*texts}) == 1
    assert str(file) in texts[0]


def test_network_file_systems_are_recognized() -> None:
    lines = [
        "20 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw",
        "30 20 0:45 / /mnt/my\\040data rw - lustre 10.0.0.1@tcp:/fs rw",
        "31 30 0:46 / /mnt/my\\040data/local rw - xfs /dev/sdb rw",
    ]
    for path, kind in (
        ("/home", "ext4"),
        ("/mnt/my data/run", "lustre"),
        ("/mnt/my data/local/run", "xfs"),
        ("/mnt/my data2", "ext4"),
    ):
        assert storage.parse_file_system_type(lines, Path(path)) == kind
    assert storage.is_network_folder(Path("/proc")) is False
