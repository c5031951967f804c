"""The share of the mean loss that one rank differentiates."""

import torch

from megalith.parallel.mesh import mesh_of_one
from megalith.train.loss import share_of_mean, share_of_means


def test_the_shares_of_all_microbatches_add_up_to_the_mean_over_their_labels() -> None:
    sums = torch.tensor([6.0, 0.0, 3.5], dtype=torch.float64)
    shares = [share_of_mean(loss, num_labels=10, mesh=mesh_of_one()) for loss in sums]
    assert sum(shares) == 0.95


def test_a_batch_without_labels_is_divided_by_one() -> None:
    assert share_of_mean(torch.zeros(()), num_labels=0, mesh=mesh_of_one()) == 0.0


def test_every_further_depth_is_divided_by_its_own_labels_and_their_mean_is_weighed() -> None:
    losses = [torch.tensor(value, dtype=torch.float64) for value in (6.0, 4.0, 9.0)]
    share = share_of_means(losses, num_labels=(10, 8, 0), weight=0.5, mesh=mesh_of_one(), scale=4.0)
    assert float(share) == 4.0 * (6.0 / 10 + 0.5 * (4.0 / 8 + 9.0) / 2)
    assert share_of_means(losses[:1], num_labels=(10,), weight=0.5, mesh=mesh_of_one()) == 0.6
