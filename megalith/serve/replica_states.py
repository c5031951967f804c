"""Keeps all replicas of the engine in one state: running, paused or suspended."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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


RESTORE_TIMEOUT_S = 60.0
"""Maximum time for which a failed command waits until the previous state is restored."""


@dataclass(slots=True, eq=False)
class _Group:
    """The present processes of replicas that share experts, or of one replica."""

    state: EngineState = field(default_factory=EngineState)
    """After the commands that they have answered."""

    next_state: EngineState = field(default_factory=EngineState)
    """After the commands that were sent."""

    num_pending: int = 0
    """Tasks that wait for answers."""

    error: str = ""
    """Why the last command failed."""


class ReplicaStates:
    """Sends the commands that change the state of replicas, one after another.

    If a command fails on some replicas, the others get the previous state again. Replicas whose
    state still differs get no new requests until a later command gives them the state of the
    others, or they are restarted. If all differ, the state of the first becomes the target.
    """

    def __init__(self, client: "EngineClient") -> None:
        self._client = client
        self.target = EngineState()
        """The state that all replicas have, or get."""
        self._is_draining = False
        self._groups: dict[int, _Group] = {}
        """By the replica that is DP rank 0 of the group."""
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Answer]] = set()

    def register(self, dp_rank_0: int) -> None:
        """Add a group whose processes are ready, and send the commands that give it the state of
        the others."""
        self._groups[dp_rank_0] = _Group()
        self._send(dp_rank_0)

    def remove(self, dp_rank_0: int) -> None:
        """Remove a group whose process has ended."""
        self._groups.pop(dp_rank_0, None)

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
            if self._is_draining:
                raise ApiError(503, f"{command}: the server is shutting down.")
            before = self.target
            self.target = change_state(before, command, arguments)
            tasks = [self._send(each, (command, arguments)) for each in self._groups]
            try:
                answers = await _wait_for_answers(tasks, timeout_s)
                return self._client.check_answers(answers)
            except BaseException:
                if not self._is_draining:
                    self.target = before
                    restored = [self._send(each) for each in self._groups]
                    if restored and all(task.done() for task in tasks):
                        await asyncio.wait(restored, timeout=RESTORE_TIMEOUT_S)
                raise
            finally:
                self._compare()

    def drain(self) -> None:
        """Ask all replicas to finish the requests in flight, whatever their state; they reject
        later commands that would stop them."""
        self._is_draining = True
        self.target = EngineState()
        for dp_rank_0, group in self._groups.items():
            group.state = group.next_state = self.target
            self._client.send_command(dp_rank_0, "drain", {})

    def _send(self, dp_rank_0: int, command: Command | None = None) -> "asyncio.Task[Answer]":
        """Send the commands that give a group the target state; `command`: the one whose result the
        state is. The task returns the last answer, or an error."""
        group = self._groups[dp_rank_0]
        if command is not None and _change(group.next_state, command) == self.target:
            commands = [command]
        else:
            commands = list_state_commands(group.next_state, self.target)
        group.next_state = self.target
        group.num_pending += 1
        results = [self._client.send_command(dp_rank_0, *each) for each in commands]
        task = asyncio.create_task(self._process_answers(group, commands, results))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _process_answers(
        self,
        group: _Group,
        commands: Sequence[Command],
        results: Sequence["asyncio.Future[Answer]"],
    ) -> Answer:
        """Record the state of a group after each answer; see `_send`."""
        last: Answer = {}
        for command, result in zip(commands, results, strict=True):
            answer = await result
            if answer is None:  # its process ended
                last = None
                break
            if "error" in answer:
                group.error = str(answer["error"])
            else:
                group.state = _change(group.state, command) or group.state
            if "error" not in (last or {}):
                last = answer
        group.num_pending -= 1
        if not group.num_pending:
            group.next_state = group.state
        if not self._lock.locked():
            self._compare()
        return last

    def _compare(self) -> None:
        """Record which groups have another state than the target."""
        if self._is_draining:
            return
        groups = {each: group for each, group in self._groups.items() if not group.num_pending}
        states = [group.state for group in groups.values()]
        if states and len(states) == len(self._groups) and self.target not in states:
            self.target = states[0]
        for dp_rank_0, group in groups.items():
            differs = group.state != self.target
            if self._client.record_difference(dp_rank_0, "state", differs=differs) and differs:
                _logger.error(
                    "replica %d is %s and not %s, as the others are; it gets no new requests until "
                    "it is restarted or a later command succeeds: %s",
                    dp_rank_0,
                    group.state.name,
                    self.target.name,
                    group.error,
                )


async def _wait_for_answers(
    tasks: Sequence["asyncio.Task[Answer]"], timeout_s: float | None
) -> list[Answer]:
    """Return the answers of all replicas; those that come later are processed, too.

    Raises:
        ApiError: 503, a replica does not answer.
    """
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=timeout_s)
        if pending:
            raise ApiError(503, f"the engine does not answer within {timeout_s} s.")
    return [task.result() for task in tasks]


def _change(state: EngineState, command: Command) -> EngineState | None:
    """Return the state after a command; None: the state does not allow it."""
    try:
        return change_state(state, *command)
    except ApiError:
        return None


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
    releases_more = present.suspension is not None and state.suspension == replace(
        present.suspension, offload_weights=True
    )
    if present.suspension not in (None, state.suspension) and not releases_more:
        commands.append(("wake_up", {}))
    if state.suspension not in (None, present.suspension):
        assert state.suspension is not None
        commands.append(("suspend", asdict(state.suspension)))
    elif state.is_paused != present.is_paused:
        commands.append(("pause" if state.is_paused else "resume", {}))
    return commands
