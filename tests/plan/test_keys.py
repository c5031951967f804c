"""Keys of random draws depend on all of their arguments and on nothing else."""

import subprocess
import sys
from itertools import product

import pytest

from megalith.plan.keys import key


def test_equal_arguments_give_the_same_key_and_any_other_argument_another() -> None:
    seeds, purposes, names = (0, 1, -1, 2**63), ("init", "dropout"), ("a", "b", "")
    indices = ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (10,), (1, 0, 0))
    combinations = list(product(seeds, purposes, names, indices))
    keys = [key(seed, purpose, name, *index) for seed, purpose, name, index in combinations]
    assert len(set(keys)) == len(combinations)
    assert keys == [key(seed, purpose, name, *index) for seed, purpose, name, index in combinations]


def test_order_of_arguments_matters() -> None:
    assert key(0, "ab", "c") != key(0, "a", "bc")
    assert key(0, "a", "b1") != key(0, "a", "b", 1)
    assert key(0, "a", "b", 12) != key(0, "a", "b", 1, 2)
    assert key(1, "a", "b") != key(0, "a", "b", 1)


def test_a_key_is_a_seed_that_torch_and_numpy_take() -> None:
    keys = [key(seed, "init", "layers.0.mlp.down", 3, 4) for seed in range(1000)]
    assert all(0 <= each < 2**63 for each in keys)
    for bit in range(63):
        assert 400 < sum(each >> bit & 1 for each in keys) < 600, (
            "every bit is one half of the time"
        )


@pytest.mark.parametrize(
    ("arguments", "golden"),
    [
        ((1234, "init", "embed.weight", 0, 0), 6429881319213375503),
        ((0, "dropout", "", 7), 5232080943124407863),
    ],
)
def test_keys_are_the_same_on_every_machine(arguments: tuple[int, str, str], golden: int) -> None:
    assert key(*arguments) == golden, "weights of existing runs could not be drawn again"


def test_keys_do_not_depend_on_pythons_own_hash_seed() -> None:
    code = "from megalith.plan.keys import key; print(key(3, 'init', 'norm.weight', 1))"
    command = [sys.executable, "-c", code]
    printed = {
        subprocess.check_output(
            command, env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}, text=True
        )
        for seed in ("1", "2")
    }
    assert printed == {f"{key(3, 'init', 'norm.weight', 1)}\n"}
