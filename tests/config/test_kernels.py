"""One word for all operations, or a word for each; read, written and overridden."""

from typing import get_type_hints

import pytest

from megalith.config.kernels import (
    Kernel,
    KernelsConfig,
    is_explicit_backend,
    kernels_of,
    plainly,
    switch_of,
)
from megalith.config.tree import apply_overrides, from_dict, to_dict
from megalith.errors import ConfigError
from megalith.testing.tiny import tiny_run


def test_the_switch_goes_for_what_is_not_named() -> None:
    kernels = KernelsConfig(all="torch", norm="numba")
    assert (kernels.of("norm"), kernels.of("rope")) == ("numba", "torch")
    assert (
        kernels_of("reference") == KernelsConfig(all="reference") and switch_of(kernels) == "torch"
    )
    words: tuple[Kernel, ...] = ("auto", "torch", "reference")
    assert (
        not any(map(is_explicit_backend, words))
        and is_explicit_backend("numba")
        and is_explicit_backend("sdpa")
    )


def test_one_word_and_single_operations_are_read_and_written_as_they_are() -> None:
    plain = tiny_run({"kernels": "reference"})
    assert plain.kernels == "reference" and to_dict(plain)["kernels"] == "reference"
    own = tiny_run({"kernels.norm": "numba"})
    assert own.kernels == KernelsConfig(norm="numba")
    assert from_dict(type(own), to_dict(own)) == own


@pytest.mark.parametrize("names", [["kernels", "kernels.norm"], ["kernels.all", "kernels.norm"]])
def test_an_operation_beside_the_switch_leaves_it_as_it_is(names: list[str]) -> None:
    run = apply_overrides(tiny_run(), dict(zip(names, ["torch", "numba"], strict=True)))
    assert run.kernels == KernelsConfig(all="torch", norm="numba")


def test_a_way_that_an_operation_does_not_know_is_no_choice() -> None:
    with pytest.raises(
        ConfigError,
        match="kernels.rope=cpu_tiled: there is no such choice.* Use one of auto, torch",
    ):
        tiny_run({"kernels.rope": "cpu_tiled"})
    with pytest.raises(
        ConfigError,
        match="kernels=fast: there is no such choice.* Use one of auto, torch, reference",
    ):
        tiny_run({"kernels": "fast"})


def test_every_operation_has_a_setting() -> None:
    assert set(get_type_hints(KernelsConfig)) >= {
        "all",
        "norm",
        "rope",
        "attention",
        "experts",
        "cross_entropy",
    }


def test_ways_by_name_can_be_left_to_the_switch() -> None:
    assert plainly("reference") == "reference"
    assert plainly(KernelsConfig(all="torch", norm="numba", rope="reference")) == KernelsConfig(
        all="torch", rope="reference"
    )
