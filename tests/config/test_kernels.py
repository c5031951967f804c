"""Kernel backend settings: one word, or one per operation."""

from typing import get_type_hints

import pytest

from megalith.config.kernels import (
    Kernel,
    KernelsConfig,
    default_backend,
    expand_kernel_setting,
    is_explicit_backend,
    reset_explicit_backends,
)
from megalith.config.tree import apply_overrides, from_dict, to_dict
from megalith.errors import ConfigError
from megalith.testing.tiny import tiny_run


def test_all_applies_to_operations_left_at_auto() -> None:
    kernels = KernelsConfig(all="torch", norm="numba")
    assert (kernels.backend_name("norm"), kernels.backend_name("rope")) == ("numba", "torch")
    assert (
        expand_kernel_setting("reference") == KernelsConfig(all="reference")
        and default_backend(kernels) == "torch"
    )
    words: tuple[Kernel, ...] = ("auto", "torch", "reference")
    assert (
        not any(map(is_explicit_backend, words))
        and is_explicit_backend("numba")
        and is_explicit_backend("sdpa")
    )


def test_single_word_and_per_operation_settings_round_trip() -> None:
    plain = tiny_run({"kernels": "reference"})
    assert plain.kernels == "reference" and to_dict(plain)["kernels"] == "reference"
    own = tiny_run({"kernels.norm": "numba"})
    assert own.kernels == KernelsConfig(norm="numba")
    assert from_dict(type(own), to_dict(own)) == own


@pytest.mark.parametrize("names", [["kernels", "kernels.norm"], ["kernels.all", "kernels.norm"]])
def test_setting_one_operation_keeps_all(names: list[str]) -> None:
    run = apply_overrides(tiny_run(), dict(zip(names, ["torch", "numba"], strict=True)))
    assert run.kernels == KernelsConfig(all="torch", norm="numba")


def test_backend_of_another_operation_is_rejected() -> None:
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


def test_explicit_backends_can_be_reset_to_auto() -> None:
    assert reset_explicit_backends("reference") == "reference"
    assert reset_explicit_backends(
        KernelsConfig(all="torch", norm="numba", rope="reference")
    ) == KernelsConfig(all="torch", rope="reference")
