"""A process asks for no more than its container grants."""

import pytest

from megalith.observe import limits as subject
from megalith.observe.limits import available_cores, available_memory


@pytest.mark.parametrize(
    "quota, cores", [("150000 100000", 2), ("10000 100000", 1), ("max 100000", 6), ("", 6)]
)
def test_cores_respect_the_limit_of_the_container(
    quota: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(subject, "_control_group", lambda name: quota)
    assert available_cores() == cores


def test_memory_respects_the_limit_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_control_group", lambda name: "max")
    whole = available_memory()
    monkeypatch.setattr(subject, "_control_group", lambda name: str(2**28))
    assert available_memory() == 2**28 < whole
