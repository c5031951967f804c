"""Division of steps over replica groups: every sample is computed once, by any number of groups,
also when groups are lost within a step."""

import random

from megalith.plan.batch_assignment import MicrobatchCounts
from megalith.plan.replica_groups import GroupAssignment, GroupShare, list_missing_samples
from tests.cases import loop_over


def assign(
    samples: tuple[int, ...], groups: int, rng: random.Random, counts: MicrobatchCounts
) -> list[list[int]]:
    """Return the samples of each group."""
    sizes = {"micro_batch_size": rng.randint(1, 4), "dp": rng.randint(1, 3)}
    return [
        GroupAssignment(
            samples=samples, share=GroupShare(index, groups), counts=counts, **sizes
        ).list_own_samples()
        for index in range(groups)
    ]


@loop_over("seed", range(300))
def test_groups_compute_every_sample_once_when_groups_are_lost(seed: int) -> None:
    rng = random.Random(seed)
    batch, groups = rng.randint(1, 40), rng.randint(1, 5)
    counts = MicrobatchCounts(equal=rng.random() < 0.5)
    kept: dict[int, set[int]] = {group: set() for group in range(groups)}
    samples = tuple(range(batch))
    while samples:
        shares = assign(samples, len(kept), rng, counts)
        assert sorted(number for share in shares for number in share) == [*samples]
        for group, share in zip(sorted(kept), shares, strict=True):
            kept[group] |= {*share}
        for group in rng.sample(sorted(kept), rng.randint(0, len(kept) - 1)):
            del kept[group]
        num_kept = [sum(number in own for own in kept.values()) for number in range(batch)]
        samples = list_missing_samples(num_kept)
    assert sum(map(len, kept.values())) == batch
