"""The loader: every layout sees the same global batch, labels that do not count are dropped, counts are global."""

import numpy as np
import torch

from megalith.data.loader import Loader, Masks, build_batch
from megalith.data.sample import Sample
from megalith.parallel.group import Group, alone
from megalith.parallel.mesh import build_mesh
from megalith.plan.grid import dense_grid
from megalith.testing.ranks import run_ranks

CPU = torch.device("cpu")


class Counting:
    """Sample k is k, k + 1, k + 2 ...; sample 3 is half padding."""

    num_samples = 24
    fingerprint = "counting"

    def __len__(self) -> int:
        return self.num_samples

    def sample(self, k: int) -> Sample:
        return Sample(np.arange(10 * k, 10 * k + 5, dtype=np.int64), 3 if k == 3 else 5)


def loader(group: Group, *, micro: int = 2, consumed: int = 0, steps: int = 2) -> Loader:
    return Loader(
        Counting(),
        Masks(),
        group,
        global_batch_size=8,
        micro_batch_size=micro,
        consumed=consumed,
        steps=steps,
        device=CPU,
    )


def test_a_step_is_rows_of_tokens_and_their_next_tokens() -> None:
    step = loader(alone("dp")).next()
    assert len(step.microbatches) == 4
    first = step.microbatches[0]
    assert first.ids.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    assert first.labels.tolist() == [1, 2, 3, 4, 11, 12, 13, 14]
    assert first.tokens.uniform == 4
    assert step.microbatches[1].labels.tolist()[4:] == [31, 32, -1, -1]
    assert step.num_labels == 8 * 4 - 2


def _rows_read(rank: int, world: int) -> tuple[list[int], int]:
    """First token of every row that one rank reads, and the count of labels it was told."""
    grid = dense_grid(world=world).factor(axis="tp", outer=("tp_kv", 1), inner=("tp_copy", 1))
    step = loader(build_mesh(grid, rank=rank).dp).next()
    return [int(i) for batch in step.microbatches for i in batch.ids[::4]], step.num_labels


def test_two_ranks_read_the_same_global_batch_as_one_and_know_its_label_count() -> None:
    (first, count), (second, other) = run_ranks(_rows_read, 2)
    assert sorted(first + second) == [10 * k for k in range(8)]
    assert count == other == 8 * 4 - 2  # the short row is on one rank only


def test_a_resumed_loader_goes_on_where_it_was() -> None:
    running = loader(alone("dp"))
    running.next()
    later = running.next()
    resumed = loader(alone("dp"), consumed=8, steps=1).next()
    assert [b.ids.tolist() for b in later.microbatches] == [b.ids.tolist() for b in resumed.microbatches]


def test_documents_start_after_each_end_and_drop_the_label_that_crosses() -> None:
    sample = Sample(np.array([5, 6, 9, 7, 8, 9, 4], dtype=np.int64), 7)
    batch = build_batch([sample], Masks(eod=9, documents=True), device=CPU)
    assert batch.tokens.lengths == ((3, 3), (3, 3))
    assert batch.tokens.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.labels.tolist() == [6, 9, -1, 8, 9, -1]
    assert batch.num_labels == 4


def test_end_of_document_labels_can_be_masked_without_documents() -> None:
    sample = Sample(np.array([5, 9, 7, 8], dtype=np.int64), 4)
    batch = build_batch([sample], Masks(eod=9, eod_mask_loss=True), device=CPU)
    assert batch.labels.tolist() == [9, -1, 8]
    assert batch.tokens.uniform == 3
