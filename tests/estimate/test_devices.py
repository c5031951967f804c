"""Tests of megalith/estimate/times.py."""

import pytest

from megalith.errors import ConfigError
from megalith.plan.devices import DEVICES, GIB, device_named


def test_a_device_is_named_or_given_as_gib() -> None:
    assert device_named("H100", world=1, host_memory=0) is DEVICES["h100"]
    custom = device_named("48", world=8, host_memory=0)
    assert custom.memory == 48 * GIB and custom.accelerator and custom.tflops is None
    assert device_named("23.5GiB", world=8, host_memory=0).memory == int(23.5 * GIB)


def test_ranks_on_a_cpu_share_its_memory() -> None:
    cpu = device_named("cpu", world=4, host_memory=16 * GIB)
    assert cpu.memory == 4 * GIB and not cpu.accelerator


@pytest.mark.parametrize(
    "text, expected",
    [
        ("h10", "Did you mean h100?"),
        ("tpu", "Use one of a100, h100, h200, b200, cpu, or a number of GiB, at most 1048576."),
        ("-3", "--device=-3 is not a known device"),
        ("1e99", "--device=1e99 is not a known device"),
        ("inf", "--device=inf is not a known device"),
        ("nan", "--device=nan is not a known device"),
    ],
)
def test_unknown_device_is_rejected_with_the_known_ones(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        device_named(text, world=1, host_memory=GIB)
    assert expected in str(error.value)
