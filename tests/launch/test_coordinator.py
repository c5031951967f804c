"""Coordinator of replica groups over real connections: commits, losses, restarts, and bad input."""

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalith.cli.main import main
from megalith.errors import ConfigError
from megalith.launch import coordinator as coordinator_module
from megalith.launch.coordinator import CoordinatorServer, StateFolder, format_page, format_status
from megalith.launch.coordinator_client import CoordinatorClient, CoordinatorInterrupted
from megalith.launch.coordinator_protocol import (
    MAX_MESSAGE_NBYTES,
    CoordinatorMessageError,
    decode_message,
    decode_reply,
    encode_message,
    encode_reply,
    parse_address,
    read_group,
    read_join,
    read_vote,
)
from megalith.plan.quorum import Decision, Epoch, QuorumLimits
from tests.cases import loop_over

LIMITS = QuorumLimits(min_groups=2, max_groups=2, timeout_seconds=4.0)
SETTINGS = {"model.num_layers": "2", "optim.lr": "0.001"}


class RunningServer:
    """A coordinator in a thread of this process."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.server = CoordinatorServer(
            folder=StateFolder(folder), host="127.0.0.1", port=port, status_port=0
        )
        self.loop = asyncio.new_event_loop()
        self.is_ready = threading.Event()
        self.error: Exception | None = None
        self.stop = asyncio.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.is_ready.wait()
        if self.error is not None:
            self.close()
            raise self.error

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        except ConfigError as error:
            self.error = error
        finally:
            self.is_ready.set()

    async def _serve(self) -> None:
        try:
            await self.server.start()
            self.is_ready.set()
            await self.server.run(self.stop)
        finally:
            await self.server.close()

    @property
    def port(self) -> int:
        return parse_address(self.server.address)[1]

    def close(self) -> None:
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
        self.server.folder.close()


@contextmanager
def serve(folder: Path, port: int = 0) -> Iterator[RunningServer]:
    server = RunningServer(folder, port)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def connect(
    server: RunningServer,
    *,
    limits: QuorumLimits = LIMITS,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[CoordinatorClient]:
    with CoordinatorClient(server.server.address, limits=limits, should_stop=should_stop) as client:
        yield client


def join(client: CoordinatorClient, group: str, step: int = 0, **settings: str) -> Epoch:
    return client.join(
        group=group,
        addresses=[f"{group}:1"],
        committed_step=step,
        settings=SETTINGS | settings,
        state_addresses=[f"{group}:2"],
    )


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def join_both(
    pool: ThreadPoolExecutor, first: CoordinatorClient, second: CoordinatorClient
) -> Epoch:
    joins = [pool.submit(join, first, "a"), pool.submit(join, second, "b")]
    epochs = [future.result(10) for future in joins]
    assert epochs[0] == epochs[1]
    return epochs[0]


def vote_both(
    pool: ThreadPoolExecutor,
    clients: tuple[CoordinatorClient, CoordinatorClient],
    epoch: Epoch,
    step: int,
    ok: tuple[bool, bool] = (True, True),
) -> list[Decision]:
    votes: list[Future[Decision]] = [
        pool.submit(client.vote, epoch=epoch.number, step=step, ok=each)
        for client, each in zip(clients, ok, strict=True)
    ]
    return [vote.result(10) for vote in votes]


def test_steps_are_committed_by_all_or_none(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with serve(tmp_path) as server, connect(server) as first, connect(server) as second:
        epoch = join_both(pool, first, second)
        assert epoch.participants == ("a", "b")
        assert epoch.addresses == {"a": ("a:1",), "b": ("b:1",)}
        assert epoch.state_addresses == {"a": ("a:2",), "b": ("b:2",)}
        assert vote_both(pool, (first, second), epoch, 1) == [Decision(commit=True)] * 2
        decisions = vote_both(pool, (first, second), epoch, 2, ok=(True, False))
        assert [decision.commit for decision in decisions] == [False, False]
        assert decisions[0].reason == "step 2 was discarded: group b voted against it"
        next_epoch = decisions[0].epoch
        assert next_epoch is not None
        assert (next_epoch.number, next_epoch.step) == (2, 1)
        assert vote_both(pool, (first, second), next_epoch, 2) == [Decision(commit=True)] * 2
        second.leave()
        status = server.server.describe()
        assert (status["committed_step"], status["num_discarded"]) == (2, 1)
        assert [row["group"] for row in status["groups"]] == ["a"]
        assert "committed step 2" in format_page(status)


def test_lost_group_is_excluded_and_joins_again(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    limits = QuorumLimits(min_groups=1, max_groups=2, timeout_seconds=2.0)
    with serve(tmp_path) as server, connect(server, limits=limits) as first:
        with connect(server, limits=limits) as second:
            epoch = join_both(pool, first, second)
        decision = first.vote(epoch=epoch.number, step=1, ok=False)
        assert decision.reason == (
            "step 1 was discarded: group b did not vote, group a voted against it"
        )
        assert decision.epoch is not None
        assert decision.epoch.participants == ("a",)
        assert first.vote(epoch=2, step=1, ok=True) == Decision(commit=True)
        with connect(server, limits=limits) as second:
            waiting = pool.submit(join, second, "b", 0)
            _wait_for(lambda: len(server.server.describe()["groups"]) == 2)
            decision = first.vote(epoch=2, step=2, ok=True)
            assert not waiting.done()  # it misses two steps, and may miss one
            recovery = waiting.result(10)
            assert recovery.recover_from == {"b": "a"}
            assert not recovery.has("b")
            assert recovery.state_addresses == {"a": ("a:2",)}
            waiting = pool.submit(join, second, "b", 2)
            _wait_for(lambda: server.server.describe()["groups"][1]["state"] == "waiting")
            decision = first.vote(epoch=2, step=3, ok=True)
            assert decision.commit
            assert decision.reason == "group b joins"
            assert decision.epoch == waiting.result(10)
            assert decision.epoch.recover_from == {"b": "a"}
            assert decision.epoch.step == 3


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "the condition has not become true"
        time.sleep(0.01)


def test_votes_survive_a_restart_of_the_coordinator(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with serve(tmp_path) as server:
        port = server.port
        first = CoordinatorClient(server.server.address, limits=LIMITS)
        second = CoordinatorClient(server.server.address, limits=LIMITS)
        epoch = join_both(pool, first, second)
        for step in range(1, 4):
            vote_both(pool, (first, second), epoch, step)
        early = pool.submit(first.vote, epoch=epoch.number, step=4, ok=True)
        _wait_for(lambda: "voted" in str(server.server.describe()))
    late = pool.submit(second.vote, epoch=epoch.number, step=4, ok=True)
    with first, second:
        time.sleep(0.1)
        assert not early.done()  # no group continues without the coordinator
        with serve(tmp_path, port) as server:
            assert early.result(10) == late.result(10) == Decision(commit=True)
            assert vote_both(pool, (first, second), epoch, 5) == [Decision(commit=True)] * 2
            assert server.server.describe()["epoch"] == 1
    lines = (tmp_path / "state.jsonl").read_text().splitlines()
    assert [json.loads(line)["commit"] for line in lines[1:]] == [[1, 4], [1, 5]]


def test_incomplete_last_line_of_the_state_is_ignored(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with serve(tmp_path) as server, connect(server) as first, connect(server) as second:
        vote_both(pool, (first, second), join_both(pool, first, second), 1)
    path = tmp_path / "state.jsonl"
    path.write_bytes(path.read_bytes() + b'{"commit": [1, ')
    with serve(tmp_path) as server:
        assert server.server.describe()["committed_step"] == 1


@loop_over("content", [b"", b"{\n", b"[]\n", b'{"version": 9}\n', b'{"version": 1, "id": "x"}\n'])
def test_damaged_state_is_rejected(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="state.jsonl.* Restore it, or delete it"):
        RunningServer(tmp_path)


def test_commit_that_does_not_follow_the_record_is_rejected(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with serve(tmp_path) as server, connect(server) as first, connect(server) as second:
        vote_both(pool, (first, second), join_both(pool, first, second), 1)
    path = tmp_path / "state.jsonl"
    path.write_bytes(path.read_bytes() + b'{"commit": [1, 7]}\n')
    with pytest.raises(ConfigError, match="a commit of step 7 in epoch 1 follows step 1"):
        RunningServer(tmp_path)


def test_second_coordinator_is_rejected(tmp_path: Path) -> None:
    with serve(tmp_path / "run") as server:
        with pytest.raises(ConfigError) as error:
            RunningServer(tmp_path / "run")
        assert str(error.value).startswith(f"--state={tmp_path / 'run'} is in use by the coord")
        assert f"process {os.getpid()} on" in str(error.value)
        assert "Two coordinators would commit different steps" in str(error.value)
        with pytest.raises(ConfigError) as error:
            RunningServer(tmp_path / "other", server.port)
        assert f"--port={server.port} on 127.0.0.1 cannot be opened" in str(error.value)
        assert "choose another --port" in str(error.value)
    with serve(tmp_path / "run"):  # the lock ends with the coordinator
        pass


def test_group_with_other_settings_is_rejected(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    limits = QuorumLimits(min_groups=3, timeout_seconds=4.0)
    with (
        serve(tmp_path) as server,
        connect(server) as first,
        connect(server, limits=limits) as second,
    ):
        waiting = pool.submit(join, first, "a")
        _wait_for(lambda: len(server.server.describe()["groups"]) == 1)
        with pytest.raises(ConfigError) as error:
            second.join(
                group="b",
                addresses=[],
                committed_step=0,
                settings={"model.num_layers": "3", "data.seed": "1", "optim.lr": "0.001"},
            )
        assert str(error.value) == (
            "group b has settings that differ from the connected groups (a). Use the same values:\n"
            "  data.seed: 1 here, unset in the others\n"
            "  model.num_layers: 3 here, 2 in the others\n"
            "  replica_group.max_groups: None here, 2 in the others\n"
            "  replica_group.min_groups: 3 here, 2 in the others"
        )
        with connect(server) as third:
            assert pool.submit(join, third, "c").result(10) == waiting.result(10)


def test_two_processes_with_one_id_are_rejected(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    limits = QuorumLimits(min_groups=2, timeout_seconds=0.3)
    with serve(tmp_path) as server, connect(server, limits=limits) as first:
        waiting = pool.submit(join, first, "a")
        _wait_for(lambda: len(server.server.describe()["groups"]) == 1)
        with connect(server, limits=limits) as second:
            with pytest.raises(ConfigError, match=r"replica_group.id=a is already used by a conn"):
                join(second, "a")
        assert not waiting.done()
        with connect(server, limits=limits) as third:
            assert pool.submit(join, third, "b").result(10) == waiting.result(10)


def test_coordinator_with_other_state_is_rejected(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    with serve(tmp_path / "one") as server:
        port = server.port
        first = CoordinatorClient(server.server.address, limits=LIMITS)
        second = CoordinatorClient(server.server.address, limits=LIMITS)
        epoch = join_both(pool, first, second)
    with first, second, serve(tmp_path / "two", port):
        with pytest.raises(
            ConfigError, match="has state that differs from the one that group a joined"
        ):
            first.vote(epoch=epoch.number, step=1, ok=True)


def test_interrupted_vote_begins_a_new_process(tmp_path: Path, pool: ThreadPoolExecutor) -> None:
    flag = threading.Event()
    with serve(tmp_path) as server, connect(server, should_stop=flag.is_set) as first:
        with connect(server) as second:
            epoch = join_both(pool, first, second)
            vote = pool.submit(first.vote, epoch=epoch.number, step=1, ok=True)
            _wait_for(lambda: "voted" in str(server.server.describe()))
            flag.set()
            with pytest.raises(CoordinatorInterrupted, match="the vote request was interrupted"):
                vote.result(10)


def test_new_process_begins_although_the_connection_of_the_last_one_was_being_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = CoordinatorClient(f"127.0.0.1:{server.getsockname()[1]}", limits=LIMITS)
        client._group, client._incarnation = "a", 7
        client._start()
        incarnations = []
        for _ in range(2):
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as stream:
                hello = decode_message(stream.readline())
                incarnations.append(hello["incarnation"])
                if hello["incarnation"] == 7:
                    client._begin_incarnation()
                connection.sendall(encode_message("welcome", incarnation=8, coordinator="c"))
                if hello["incarnation"] == 0:
                    _wait_for(lambda: client._incarnation == 8)
        client.close()
    assert incarnations == [7, 0]


def test_clocks_of_groups_and_coordinator_may_differ(
    tmp_path: Path, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shifted = SimpleNamespace(monotonic=lambda: time.monotonic() - 1e6)  # no other clock is read
    monkeypatch.setattr(coordinator_module, "time", shifted)
    with serve(tmp_path) as server, connect(server) as first, connect(server) as second:
        epoch = join_both(pool, first, second)
        assert vote_both(pool, (first, second), epoch, 1) == [Decision(commit=True)] * 2


def test_decision_is_not_sent_if_it_cannot_be_stored(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with serve(tmp_path) as server:
        first = CoordinatorClient(server.server.address, limits=LIMITS)
        second = CoordinatorClient(server.server.address, limits=LIMITS)
        epoch = join_both(pool, first, second)

        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        server.server.folder.append_commit = fail  # type: ignore[method-assign]
        votes = [
            pool.submit(client.vote, epoch=epoch.number, step=1, ok=True)
            for client in (first, second)
        ]
        server.thread.join(10)
        assert "No space left on device" in str(server.error)
        assert "the groups wait. Free space there and start it again" in str(server.error)
        port = server.port
    assert not any(vote.done() for vote in votes)
    with first, second, serve(tmp_path, port):
        assert [vote.result(10) for vote in votes] == [Decision(commit=True)] * 2


INVALID_LINES = [
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
    b'{"kind": 3}\n',
    encode_message("vote", request=1, epoch=1, step=1, ok=True, last=False, has_state=True),
    encode_message("hello", protocol=9, group="a", incarnation=0, coordinator=""),
    encode_message("hello", protocol=1, group="../a", incarnation=0, coordinator=""),
    encode_message("hello", protocol=1, group="a" * 65, incarnation=0, coordinator=""),
    encode_message("hello", protocol=1, group="a", incarnation=10**30, coordinator=""),
    encode_message("hello", protocol=1, group="a", incarnation=77, coordinator=""),
    encode_message("hello", protocol=1, group="a", incarnation=True, coordinator=""),
]
HELLO = encode_message("hello", protocol=1, group="x", incarnation=0, coordinator="")
JOIN = {
    "request": 1,
    "committed_step": 0,
    "addresses": [],
    "state_addresses": [],
    "settings": {},
    "limits": {"min_groups": 1, "max_groups": None, "timeout_seconds": 4.0, "max_lag": 1},
}
INVALID_LINES += [
    HELLO + encode_message("shutdown", request=1),
    HELLO + encode_message("vote", request=1, epoch=1, step=0, ok=True, last=False, has_state=True),
    HELLO + encode_message("vote", request=1, epoch=1, step=1, ok=1, last=False, has_state=True),
    HELLO + encode_message("vote", request=0, epoch=1, step=1, ok=True, last=False, has_state=True),
    *(
        HELLO + encode_message("join", **(JOIN | change))
        for change in (
            {"committed_step": -1},
            {"committed_step": 1.5},
            {"addresses": "a:1"},
            {"addresses": [3]},
            {"addresses": ["a" * 301]},
            {"settings": []},
            {"settings": {"a": 3}},
            {"settings": {"a": "b" * 5000}},
            {"limits": None},
            {"limits": JOIN["limits"] | {"min_groups": 0}},  # type: ignore[operator]
            {"limits": JOIN["limits"] | {"max_groups": 0}},  # type: ignore[operator]
            {"limits": JOIN["limits"] | {"timeout_seconds": -1}},  # type: ignore[operator]
            {"limits": JOIN["limits"] | {"timeout_seconds": "1"}},  # type: ignore[operator]
        )
    ),
]


def test_invalid_messages_are_rejected_and_the_server_continues(
    tmp_path: Path, pool: ThreadPoolExecutor
) -> None:
    with serve(tmp_path) as server:
        for line in INVALID_LINES:
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
                connection.sendall(line)
                data = b""
                while chunk := connection.recv(65_536):
                    data += chunk
            last = decode_message(data.splitlines()[-1])
            assert last["kind"] == "error", line[:200]
            assert "\n" not in last["reason"]
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            connection.sendall(HELLO[:-1])  # closed in the middle of a message
        with connect(server) as first, connect(server) as second:
            epoch = join_both(pool, first, second)
            assert vote_both(pool, (first, second), epoch, 1) == [Decision(commit=True)] * 2


def test_long_messages_are_rejected_without_reading_them(tmp_path: Path) -> None:
    with pytest.raises(CoordinatorMessageError, match=f"more than {MAX_MESSAGE_NBYTES} bytes"):
        decode_message(b" " * (MAX_MESSAGE_NBYTES + 1))
    with serve(tmp_path) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
            with pytest.raises(OSError, match="reset|pipe"):
                for _ in range(64):
                    connection.sendall(b" " * (1 << 20))
        assert server.thread.is_alive()


def test_replies_of_a_coordinator_are_checked() -> None:
    for fields in ({"epoch": 3}, {"decision": {}}, {"rejection": {"reason": "x"}}, {"epoch": {}}):
        with pytest.raises(CoordinatorMessageError, match="not valid|not true or false"):
            decode_reply({"kind": "reply", "request": 1, **fields})


def test_status_page_is_for_this_machine_only(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        url = f"http://{server.server.status_address}"
        assert server.server.status_address.startswith("127.0.0.1:")
        with urllib.request.urlopen(f"{url}/status.json") as page:
            status = json.load(page)
        assert status["committed_step"] is None
        assert format_status(status).splitlines()[1:] == [
            "epoch none closed, committed step none, 0 discarded",
            "no group is ready",
        ]
        with urllib.request.urlopen(url) as page:
            assert b"epoch none closed" in page.read()
        for path, headers, code in (
            ("/other", {}, 404),
            ("/", {"Host": "example.com"}, 403),
            ("/", {"Host": "127.0.0.1.example.com:80"}, 403),
        ):
            request = urllib.request.Request(url + path, headers=headers)
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(request)
            assert error.value.code == code
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(url, data=b"x")


def test_invalid_address_of_the_coordinator_is_rejected() -> None:
    for address in ("", "host", "host:", ":1", "host:0", "host:70000", "host:x"):
        with pytest.raises(ConfigError, match=r"replica_group\.coordinator: .* is not HOST:PORT"):
            CoordinatorClient(address, limits=LIMITS)


COMMAND = (sys.executable, "-m", "megalith", "coordinate")


@contextmanager
def start_command(
    folder: Path, port: int = 0
) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """`megalith coordinate --json` in a process of its own, with the document that it prints."""
    options = ("--port", str(port), "--status-port", "0", "--state", str(folder), "--json")
    with subprocess.Popen(
        (*COMMAND, *options), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        try:
            lines = []
            while not lines or lines[-1] != "}\n":
                lines.append(process.stdout.readline())
                assert lines[-1], process.stderr.read()
            yield process, json.loads("".join(lines))
        finally:
            process.kill()


def test_command_serves_reports_its_status_and_ends_at_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_command(tmp_path) as (process, addresses):
        port = addresses["status_address"].rpartition(":")[2]
        assert main(["coordinate", "--status", "--status-port", port, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["address"] == addresses["address"]
        assert main(["coordinate", "--status", "--status-port", port]) == 0
        assert "epoch none closed" in capsys.readouterr().out
        assert main(["coordinate", "--state", str(tmp_path), "--port", "0"]) == 2
        errors = capsys.readouterr().err
        assert f"--state={tmp_path} is in use by the coordinator in process {process.pid}" in errors
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert errors == "megalith coordinate: stopped; the groups wait until it runs again\n"
    assert main(["coordinate", "--status", "--status-port", port]) == 1
    assert f"no coordinator answers at --status-port={port}" in capsys.readouterr().err


def test_invalid_options_of_the_command_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for options, text in (
        (["--port", "70000"], "--port=70000 is not a port. Use 0 to 65535, e.g. 29700."),
        (["--state", str(file)], f"--state={file} cannot be used"),
        (
            ["--state", str(tmp_path), "--lost-groups", "a"],
            "--lost-groups=a: the newest committed step does",
        ),
        (["--state", str(tmp_path), "--host", "192.0.2.1"], "on 192.0.2.1 cannot be opened"),
    ):
        assert main(["coordinate", *options]) == 2
        assert text in capsys.readouterr().err


GROUP_PROGRAM = """
import json, socket, sys, threading, time
from megalith.launch.coordinator_client import CoordinatorClient
from megalith.plan.quorum import QuorumLimits

name, address, last_step = sys.argv[1], sys.argv[2], int(sys.argv[3])
history = []  # stands for the weights: the epoch in which each step was committed
listener = socket.create_server(("127.0.0.1", 0))

def send_history():
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(json.dumps(history).encode())

def receive_history(source):
    host, _, port = source.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        return json.loads(connection.makefile("rb").read())

threading.Thread(target=send_history, daemon=True).start()
own = f"127.0.0.1:{listener.getsockname()[1]}"
limits = QuorumLimits(min_groups=2, max_groups=3, timeout_seconds=3.0)
with CoordinatorClient(address, limits=limits) as client:
    epoch = None
    while len(history) < last_step:
        if epoch is None:
            epoch = client.join(
                group=name, addresses=[own], committed_step=len(history), settings={}
            )
        source, ok = epoch.recover_from.get(name), True
        if source is not None and len(history) < epoch.step:
            try:
                deadline = time.monotonic() + 2
                received = receive_history(epoch.addresses[source][0])
                while len(received) < epoch.step and time.monotonic() < deadline:
                    received = receive_history(epoch.addresses[source][0])
                history[:] = received
            except OSError:
                pass
            ok = len(history) == epoch.step
        if not epoch.has(name):
            epoch = None
            continue
        step = len(history) + 1 if ok else epoch.step + 1
        time.sleep(0.02)
        decision = client.vote(epoch=epoch.number, step=step, ok=ok)
        if decision.commit:
            history.append(epoch.number)
        print(json.dumps([epoch.number, step, decision.commit]), flush=True)
        if decision.epoch is not None or decision.rejoin:
            epoch = decision.epoch
    print(json.dumps(history), flush=True)
    client.leave()
"""


@pytest.mark.slow
def test_steps_survive_kills_of_groups_and_of_the_coordinator(tmp_path: Path) -> None:
    rng = random.Random(0)
    names, last_step = "abc", 150
    logs = {name: tmp_path / f"{name}.txt" for name in names}
    address = ""

    def start_group(name: str) -> subprocess.Popen[bytes]:
        with open(logs[name], "ab") as log:
            program = (sys.executable, "-c", GROUP_PROGRAM, name, address, str(last_step))
            return subprocess.Popen(program, stdout=log)

    groups: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        coordinator = ExitStack()
        process, addresses = coordinator.enter_context(start_command(tmp_path / "state"))
        address = addresses["address"]
        port = parse_address(address)[1]
        stack.callback(lambda: [group.kill() for group in groups.values()])
        for name in names:
            groups[name] = start_group(name)
        for number in range(8):
            time.sleep(rng.uniform(0.3, 1.0))
            if number % 4 == 3:
                process.kill()
                coordinator.close()
                process, _ = coordinator.enter_context(start_command(tmp_path / "state", port))
                continue
            name = rng.choice(names)
            if groups[name].poll() is None:
                groups[name].kill()
                groups[name].wait()
                time.sleep(rng.uniform(0.0, 0.5))
                groups[name] = start_group(name)
        codes = [group.wait(60) for group in groups.values()]
        coordinator.close()
    assert codes == [0, 0, 0]
    decisions: dict[tuple[int, int], bool] = {}
    histories = []
    for log in logs.values():
        lines = [json.loads(line) for line in log.read_bytes().split(b"\n")[:-1]]
        histories.append(lines.pop())
        for epoch, step, commit in lines:
            assert decisions.setdefault((epoch, step), commit) == commit, (epoch, step)
    assert histories[0] == histories[1] == histories[2]
    assert len(histories[0]) == last_step
    assert len(set(histories[0])) > 3  # epochs changed


def test_mutated_messages_raise_no_other_error() -> None:
    messages = [
        encode_message("join", **JOIN),
        encode_message("vote", request=1, epoch=1, step=1, ok=True, last=False, has_state=True),
        encode_reply(1, Decision(commit=True, reason="a")),
        HELLO,
    ]
    values = ["null", "-1", "1e999", "NaN", '""', "[]", "{}", "true", '"\\ud800"', "[[[1]]]"]
    for seed in range(1500):
        rng = random.Random(seed)
        line = rng.choice(messages).decode()
        start = rng.choice([number for number, sign in enumerate(line) if sign in ":,[{"]) + 1
        end = rng.randrange(start, len(line))
        line = line[:start] + rng.choice([*values, line[end:start:-1]]) + line[end:]
        with suppress(CoordinatorMessageError):
            message = decode_message(line.encode())
            for read in (read_join, read_vote, read_group, decode_reply):
                with suppress(CoordinatorMessageError):
                    read(message)
