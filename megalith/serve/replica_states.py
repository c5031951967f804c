"""Keeps all replicas of the engine in one state: running, paused or suspended."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megalith.plan.serving.engine_state import EngineState, InvalidStateError, Suspension
from megalith.serve.errors import ApiError

if TYPE_CHECKING:
    from megalith.serve.client import EngineClient

_logger = logging.getLogger(__name__)

STATE_COMMANDS = ("pause", "resume", "suspend", "wake_up")
"""Commands that change the state."""

Command = tuple[str, dict[str, Any]]
"""Name, and arguments."""

Answer = dict[str, Any] | None
"""Result of a command; None: the process of the replicas ended."""


@dataclass(slots=True, eq=False)
class _Group:
    """The present processes of replicas that share experts, or of one replica."""

    state: EngineState = field(default_factory=EngineState)
    """The state that they have when their commands are executed."""

    error: str = ""
    """Why the last command failed."""


class ReplicaStates:
    """Sends the commands that change the state of replicas, one after another.

    If a command fails on some replicas, the others get the previous state again. Replicas whose
    state still differs get no new requests until a later command gives them the state of the
    others, or they are restarted.
    """

    def __init__(self, client: "EngineClient") -> None:
        self._client = client
        self.target = EngineState()
        """The state that all replicas have, or get."""
        self._groups: dict[int, _Group] = {}
        """By DP rank 0 of the group."""
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Answer]] = set()

    def register(self, first: int) -> None:
        """Add a group whose processes have started, and send the commands that give it the state
        of the others; `first`: its DP rank 0."""
        self._groups[first] = _Group()
        self._send(first)

    def remove(self, first: int) -> None:
        """Remove a group whose process has ended."""
        self._groups.pop(first, None)

    async def change(
        self, command: str, arguments: dict[str, Any], *, timeout_s: float | None
    ) -> list[dict[str, Any]]:
        """Execute a command on all replicas and return its results. If it fails on one, or the
        caller is canceled, the others get the previous state again.

        Raises:
            ApiError: 409, the present state does not allow the command; 503, a replica does not
                answer, or none is ready; else the command failed.
        """
        async with self._lock:
            before = self.target
            self.target = change_state(before, command, arguments)
            try:
                answers = await self._send_to_all((command, arguments), timeout_s=timeout_s)
                return self._client.check_answers(answers)
            except BaseException:
                self.target = before
                await self._restore_others(timeout_s)
                raise
            finally:
                self._compare()

    async def drain(self) -> None:
        """Ask all replicas to finish the requests in flight, whatever their state."""
        async with self._lock:
            self.target = EngineState()
            for first, group in self._groups.items():
                group.state = self.target
                self._client.send_command(first, "drain", {})

    async def _restore_others(self, timeout_s: float | None) -> None:
        try:
            await self._send_to_all(timeout_s=timeout_s)
        except ApiError as error:  # answers that come later are processed
            _logger.error("the state before a failed command is not restored yet: %s", error)

    async def _send_to_all(
        self, command: Command | None = None, *, timeout_s: float | None
    ) -> list[Answer]:
        """Give all replicas the target state and return their last answers; `command`: to send to
        those that have it.

        Raises:
            ApiError: 503, a replica does not answer.
        """
        tasks = [self._send(first, command) for first in self._groups]
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=timeout_s)
            if pending:
                raise ApiError(503, f"the engine does not answer within {timeout_s} s.")
        return [task.result() for task in tasks]

    def _send(self, first: int, command: Command | None = None) -> "asyncio.Task[Answer]":
        """Send the commands that give a group the target state, or `command` if it has it. The
        task returns the last answer."""
        group = self._groups[first]
        commands = list_state_commands(group.state, self.target)
        if not commands and command is not None:
            commands = [command]
        results = [self._client.send_command(first, *each) for each in commands]
        before, group.state = group.state, self.target
        task = asyncio.create_task(self._process_answers(group, before, commands, results))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _process_answers(
        self,
        group: _Group,
        before: EngineState,
        commands: Sequence[Command],
        results: Sequence["asyncio.Future[Answer]"],
    ) -> Answer:
        """Record the state of a group after its answers, and return the last one, or an error."""
        state, answer = before, None
        for (command, arguments), result in zip(commands, results, strict=True):
            answer = await result
            if answer is None or "error" in answer:
                group.error = "its process ended" if answer is None else str(answer["error"])
                break
            state = change_state(state, command, arguments)
        group.state = state
        if not self._lock.locked():
            self._compare()
        return answer

    def _compare(self) -> None:
        """Record which groups have another state than the target. A single group has no others: its
        state becomes the target."""
        if len(self._client.groups) == 1:
            for group in self._groups.values():
                self.target = group.state
            return
        for first, group in self._groups.items():
            differs = group.state != self.target
            if self._client.record_difference(first, "state", differs=differs) and differs:
                _logger.error(
                    "replica %d is %s and not %s, as the others are; it gets no new requests until "
                    "it is restarted or a later command succeeds: %s",
                    first,
                    group.state.name,
                    self.target.name,
                    group.error,
                )


def change_state(state: EngineState, command: str, arguments: Mapping[str, Any]) -> EngineState:
    """Return the state of the replicas after a command of `STATE_COMMANDS`.

    Raises:
        ApiError: 409, it is not valid in the present state.
    """
    try:
        match command:
            case "pause":
                return state.pause()
            case "resume":
                return state.resume()
            case "suspend":
                return state.suspend(Suspension(**arguments))
    except InvalidStateError as error:
        raise ApiError(409, str(error)) from error
    return state.wake_up()


def list_state_commands(present: EngineState, state: EngineState) -> list[Command]:
    """Return the commands that bring a replica from its present state to another."""
    commands: list[Command] = []
    if present.suspension not in (None, state.suspension):
        commands.append(("wake_up", {}))
    if state.suspension not in (None, present.suspension):
        assert state.suspension is not None
        commands.append(("suspend", asdict(state.suspension)))
    elif state.is_paused != present.is_paused:
        commands.append(("pause" if state.is_paused else "resume", {}))
    return commands
