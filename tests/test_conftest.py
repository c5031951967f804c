"""The surroundings of the tests hold what they promise."""

import os
import socket
from types import SimpleNamespace

import pytest
import torch


def test_a_connection_to_another_machine_is_rejected() -> None:
    with (
        socket.socket() as client,
        pytest.raises(ConnectionRefusedError, match=r"192\.0\.2\.1.*offline"),
    ):
        client.connect(("192.0.2.1", 80))


def test_a_connection_to_this_machine_is_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())


@pytest.mark.parametrize(
    ("expression", "hidden"),
    [("", True), ("not slow and not gpu", True), ("gpu", False), ("slow or gpu", False)],
)
def test_gpus_are_hidden_unless_requested(
    expression: str, hidden: bool, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    plugins = pytestconfig.pluginmanager.get_plugins()
    ours = next(
        each
        for each in plugins
        if (getattr(each, "__file__", None) or "").endswith("tests/conftest.py")
    )
    ours.pytest_configure(SimpleNamespace(option=SimpleNamespace(markexpr=expression)))
    assert (os.environ["CUDA_VISIBLE_DEVICES"] == "") == hidden


def test_tests_run_on_one_thread() -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert torch.get_num_threads() == 1
