"""The surroundings of the tests hold what they promise."""

import os
import socket

import pytest
import torch


def test_a_connection_to_another_machine_is_refused() -> None:
    with socket.socket() as client, pytest.raises(ConnectionRefusedError, match=r"192\.0\.2\.1.*offline"):
        client.connect(("192.0.2.1", 80))


def test_a_connection_to_this_machine_is_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())


def test_tests_run_on_one_thread() -> None:
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert torch.get_num_threads() == 1
