"""Client of the engine: sends each request to one of its replicas, and distributes their outputs to
the streams of the event loop.

A replica fails when its process ends. Its requests continue on another one, which gets the prompt
and the tokens that were received: sampling is keyed by seed and position, so it generates the
tokens that the failed replica would have generated.

Replicas that share experts are one group: the data-parallel ranks of one engine, which start and
fail together. DP rank 0 receives the messages of all; each replica sends its own.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megalith.plan.keys import key
from megalith.plan.serving.engine_state import EngineState
from megalith.plan.serving.prefix_cache import compute_salt
from megalith.plan.serving.request_routing import Difference, RequestRouter, compute_block_keys
from megalith.serve.errors import ApiError
from megalith.serve.generation import (
    Generation,
    InFlightRequest,
    PromptRequest,
    SentProgress,
)
from megalith.serve.model_info import ModelInfo
from megalith.serve.protocol import (
    AbortRequest,
    AddRequest,
    CacheReport,
    Codec,
    EngineCall,
    ExpireRequest,
    Heartbeat,
    LoadFailed,
    Message,
    PromptResult,
    ProtocolError,
    Ready,
    Reply,
    RequestRejected,
    StepOutputs,
    TokenUpdate,
)
from megalith.serve.replica_states import STATE_COMMANDS, Answer, ReplicaStates
from megalith.serve.transport import bind_client_socket

if TYPE_CHECKING:
    import zmq.asyncio

_logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 2
"""A request fails if so many replicas failed while they had it: it may be the cause."""

POLL_SECONDS = 2.0
"""Time that the answers to `EngineClient.poll_replicas` wait for each other (heuristic)."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A command that a replica executes."""

    replica: int
    result: "asyncio.Future[Answer]"
    """None: the replica failed."""


class EngineClient:
    """Sends requests to the replicas of the engine over a socket."""

    def __init__(
        self, address: str, *, num_replicas: int = 1, group_size: int = 1, seed: int
    ) -> None:
        """`group_size`: replicas that share experts; `seed`: from which the seeds of requests
        without one are derived."""
        self.num_replicas, self._group_size = num_replicas, group_size
        self.router = RequestRouter()
        self._seed = seed
        self._socket: zmq.asyncio.Socket = bind_client_socket(address)
        self._codec = Codec()
        self._identities: dict[int, bytes] = {}
        """Of the present processes of each replica."""
        self._num_processes = 0
        self._requests: dict[int, InFlightRequest] = {}
        self._calls: dict[int, _Call] = {}
        self._num_requests = self._num_calls = 0
        self._block_calls: dict[int, int] = {}
        """Replicas by the call that requests a complete list of blocks."""
        self._num_unanswered: dict[int, int] = {}
        """Heartbeats since the last message of each replica."""
        self._fingerprints: dict[str, bytes] = {}
        """SHA-256 of the weights of the adapters."""
        self._adapter_paths: dict[str, str | None] = {}
        """Folders of the adapters that were loaded since the start; None: an adapter of the start
        that was unloaded."""
        self._weights_path: str | None = None
        """Checkpoint or folder of the last weight update; None: all processes have the weights of
        their start."""
        self.loading_weights: set[int] = set()
        """Replicas that load the weights of the last update after their start."""
        self._model_lock = asyncio.Lock()
        self._states = ReplicaStates(self)
        self._changed = asyncio.Event()
        """Set, and replaced, when a request ends, or a replica is ready or fails."""
        self.num_sequences = self.num_prompt_tokens = 0
        """Choices and prompt tokens of all unfinished requests."""
        self.info: ModelInfo | None = None
        """Set when the model is loaded."""
        self.ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self.loaded: set[int] = set()
        """Replicas that have loaded the model at least once."""
        self.load_errors: dict[int, str] = {}
        """Why the present process of a replica cannot load the model."""
        self._reader = asyncio.create_task(self._read())
        self.failed: ApiError | None = None
        """Set when the engine has ended."""

    # --- requests

    def check_available(self) -> None:
        """Check that a replica accepts requests.

        Raises:
            ApiError: 503, there is none.
        """
        if self.failed is not None:
            raise self.failed
        if not self.router.replicas:
            raise ApiError(
                503,
                "no replica of the engine is ready; they are being restarted. Try again later.",
                headers={"Retry-After": "1"},
            )

    @asynccontextmanager
    async def generate(
        self, requests: Sequence[PromptRequest], *, uid: str
    ) -> AsyncIterator[Generation]:
        """Start the requests of a generation; leaving the context aborts unfinished ones."""
        self.check_available()
        arrival_time = time.monotonic()
        generation = Generation(
            sum(request.params.n for request in requests), [None] * len(requests)
        )
        numbers = []
        for index, request in enumerate(requests):
            name = uid if len(requests) == 1 else f"{uid}-{index}"
            message = self._make_message(request, name, arrival_time)
            numbers.append(message.request_id)
            self._requests[message.request_id] = InFlightRequest(
                generation,
                uid,
                index,
                message,
                self._compute_block_keys(request),
                [SentProgress() for _ in range(request.params.n)],
            )
            self.num_sequences += request.params.n
            self.num_prompt_tokens += len(request.token_ids)
            self._dispatch(message.request_id)
        try:
            yield generation
        finally:
            generation.close()
            for number in numbers:
                if number in self._requests:
                    self._abort_engine_request(number)
                    self._finish(number)

    def abort(self, uid: str | None) -> int:
        """End the requests with a name, None: all, with finish reason abort; returns how many."""
        numbers = [
            number for number, request in self._requests.items() if uid in (None, request.uid)
        ]
        for number in numbers:
            self._requests[number].is_aborted = True
            if self.router.find_replica(number) is None:
                self._end_aborted(number)
            else:  # the engine answers with the end of each choice
                self._abort_engine_request(number)
        return len(numbers)

    def abort_all(self, error: ApiError) -> None:
        """Abort all requests; their readers get the error."""
        for number, request in list(self._requests.items()):
            self._abort_engine_request(number)
            self._finish(number)
            request.generation.fail(error)

    def _make_message(self, request: PromptRequest, name: str, arrival_time: float) -> AddRequest:
        """Return the message of a new request. Its seed is derived here, so that the request has
        the same tokens on every replica."""
        number = self._num_requests
        self._num_requests += 1
        params = request.params.to_dict()
        params.setdefault("seed", key(self._seed, "request", str(number)))
        return AddRequest(
            number,
            name,
            request.token_ids,
            params,
            arrival_time,
            request.pooling,
            request.adapter,
        )

    def _compute_block_keys(self, request: PromptRequest) -> list[int]:
        """Return the hashes of the blocks of a prompt that replicas may have cached."""
        block_size = None if self.info is None else self.info.block_size
        params, adapter = request.params, request.adapter
        is_cached = params.prompt_logprobs is None and block_size is not None
        if self.num_replicas == 1 or not is_cached or block_size is None:
            return []
        fingerprint = None if adapter is None else self._fingerprints.get(adapter, b"")
        salt = compute_salt(cache_salt=params.cache_salt, adapter_fingerprint=fingerprint)
        return compute_block_keys(request.token_ids, block_size, salt)

    def _dispatch(self, number: int) -> None:
        """Send a request to a replica; if none is ready, it is sent when one is."""
        request = self._requests[number]
        replica = self.router.choose_replica(request.block_keys)
        if replica is None:
            return
        if not request.has_tokens:
            request.adapter_fingerprint = self._fingerprints.get(request.message.adapter or "")
        message = request.make_message()
        request.num_attempts += 1
        self.router.assign(
            number,
            replica,
            num_sequences=request.num_unfinished,
            num_tokens=len(message.prompt_token_ids),
        )
        dp_rank = self._find_dp_rank(replica)
        self._send(replica, replace(message, dp_rank=dp_rank) if dp_rank else message)
        deadline_s = message.params.get("deadline_s")
        if dp_rank and deadline_s is not None:  # rank 0 knows only its own requests
            wait_s = message.arrival_time + deadline_s - time.monotonic()
            request.expiry = asyncio.get_running_loop().call_later(
                wait_s, self._send, replica, ExpireRequest(number)
            )

    def dispatch_waiting(self) -> None:
        """Send the requests that no replica has, if one accepts requests."""
        for number in self._requests:
            if self.router.find_replica(number) is None:
                self._dispatch(number)

    def _abort_engine_request(self, number: int) -> None:
        replica = self.router.find_replica(number)
        if replica is not None:
            self._send(replica, AbortRequest(number))

    def _end_aborted(self, number: int) -> None:
        """End the choices of a request that no replica has."""
        for index, choice in enumerate(self._requests[number].choices):
            if choice.finish_reason is None:
                update = TokenUpdate(number, index, None, "", None, "abort", None, None, False)
                generation = self._add_update(update)
                if generation is not None:
                    generation.deliver()

    def _finish(self, number: int) -> None:
        """Remove a request."""
        request = self._requests.pop(number)
        if request.expiry is not None:
            request.expiry.cancel()
        self.router.finish(number)
        self.num_sequences -= request.num_unfinished
        self.num_prompt_tokens -= len(request.message.prompt_token_ids)
        self._notify()

    # --- commands

    @property
    def state(self) -> EngineState:
        """Return the state that all replicas have, or get."""
        return self._states.target

    async def call(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = 60.0,
    ) -> dict[str, Any]:
        """Call a command of all replicas and return the result of the first.

        Raises:
            ApiError: 503, no replica is ready, or one does not answer; else the command failed.
        """
        return (await self.call_replicas(command, arguments, timeout_s=timeout_s))[0]

    async def call_replicas(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = 60.0,
    ) -> list[dict[str, Any]]:
        """Call a command of all replicas and return their results. Replicas that are restarted
        later get the weights and adapters, and are paused or suspended, as the others.

        Raises:
            ApiError: 409, the state of the engine does not allow the command; 503, no replica is
                ready, or one does not answer; else the command failed.
        """
        self.check_available()
        arguments = arguments or {}
        if command in ("load_adapter", "unload_adapter", "update_weights"):
            async with self._model_lock:
                if command == "update_weights":
                    return await self._update_weights(arguments, timeout_s)
                return await self._change_adapter(command, arguments, timeout_s)
        if command in STATE_COMMANDS:
            return await self._states.change(command, arguments, timeout_s=timeout_s)
        replicas = self._list_dp_rank_0()
        answers = await self._call(replicas, command, arguments, timeout_s=timeout_s)
        return self.check_answers(answers.values())

    async def poll_replicas(self, command: str) -> list[dict[str, Any]]:
        """Call a command that has no effect, and return the results of the replicas that answer
        within `POLL_SECONDS`, or else of the first: a replica that does not respond must not delay
        the others' results.

        Raises:
            ApiError: 503, no replica is ready, or none answers; else the command failed.
        """
        self.check_available()
        numbers = [self._start_call(each, command, {}) for each in sorted(self.router.replicas)]
        results = [self._calls[number].result for number in numbers]
        try:
            done, _ = await asyncio.wait(results, timeout=POLL_SECONDS)
            if not done:
                await asyncio.wait(results, timeout=60.0, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for number in numbers:
                self._calls.pop(number, None)
        answers = [result.result() for result in results if result.done()]
        if not answers:
            raise ApiError(503, "the engine does not answer within 60 s.")
        return self.check_answers(answers)

    async def _call(
        self,
        replicas: Iterable[int],
        command: str,
        arguments: dict[str, Any],
        *,
        timeout_s: float | None,
    ) -> dict[int, Answer]:
        """Call a command of replicas and return their answers. None: the replica failed.

        Raises:
            ApiError: 503, one does not answer.
        """
        numbers = {each: self._start_call(each, command, arguments) for each in sorted(replicas)}
        results = [self._calls[number].result for number in numbers.values()]
        try:
            async with asyncio.timeout(timeout_s):
                return dict(zip(numbers, await asyncio.gather(*results), strict=True))
        except TimeoutError:
            raise ApiError(503, f"the engine does not answer within {timeout_s} s.") from None
        finally:
            for number in numbers.values():
                self._calls.pop(number, None)

    def check_answers(self, answers: Iterable[Answer]) -> list[dict[str, Any]]:
        """Return the results of a command.

        Raises:
            ApiError: 503, all replicas failed; else the command failed.
        """
        results = [answer for answer in answers if answer is not None]
        for result in results:
            if "error" in result:
                raise ApiError(int(result["status"]), str(result["error"]))
        if not results:
            self.check_available()
            raise ApiError(503, "the engine was restarted. Try again.")
        return results

    async def _change_adapter(
        self, command: str, arguments: dict[str, Any], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        """Load or unload an adapter on all replicas. If it fails on one, the others get the
        previous adapter of the name again.

        Raises:
            ApiError: see `call_replicas`.
        """
        name = arguments["lora_name"]

        def undo(replica: int) -> None:
            self._send_adapter(replica, name, self._find_adapter_path(name))

        results = await self._change_model(command, arguments, timeout_s, undo=undo)
        self._record_adapter(name, arguments.get("lora_path"), results[0])
        return results

    async def _update_weights(
        self, arguments: dict[str, Any], timeout_s: float | None
    ) -> list[dict[str, Any]]:
        """Update the weights of all replicas. If it fails on one, the others get the previous ones
        again.

        Raises:
            ApiError: see `call_replicas`.
        """
        first = self._list_dp_rank_0()[:1]  # a run means its newest checkpoint: locate it once
        located = await self._call(first, "locate_weights", arguments, timeout_s=60.0)
        path = self.check_answers(located.values())[0]["path"]
        results = await self._change_model(
            "update_weights", arguments | {"path": path}, timeout_s, undo=self._send_weights
        )
        self._weights_path = path
        for replica in self._list_dp_rank_0():
            self.record_difference(replica, "weights", differs=False)
        return results

    def _send_weights(self, replica: int) -> None:
        """Send the command to load the weights that all replicas should have. The replica gets no
        new requests until it has loaded them."""
        path, process = self._weights_path, self._identities[replica]
        if path is None:
            assert self.info is not None, "the replica has loaded it"
            path = self.info.path

        def check(result: "asyncio.Future[Answer]") -> None:
            answer = None if result.cancelled() else result.result()
            if answer is None or self._identities.get(replica) != process:
                return
            self.loading_weights.discard(replica)
            if "error" in answer:
                _logger.error(
                    "the weights of replica %d differ from those of the other replicas; it gets no "
                    "new requests until it is restarted or a later update succeeds: %s",
                    replica,
                    answer["error"],
                )
            self.record_difference(replica, "weights", differs="error" in answer)
            self._notify()

        self.loading_weights.add(replica)
        self.record_difference(replica, "weights", differs=True)
        arguments = {"path": path, "mode": "recompute"}
        self.send_command(replica, "update_weights", arguments).add_done_callback(check)

    async def _change_model(
        self,
        command: str,
        arguments: dict[str, Any],
        timeout_s: float | None,
        *,
        undo: Callable[[int], None],
    ) -> list[dict[str, Any]]:
        """Call a command of all replicas, also of those that register in between. If it fails on
        one, or the caller is canceled, `undo` is called for the others, and for those that have
        only a part of the new weights.

        Raises:
            ApiError: see `call_replicas`.
        """
        answers: dict[bytes, Answer] = {}
        """By process."""
        try:
            while new := [
                each for each in self._list_dp_rank_0() if self._identities[each] not in answers
            ]:
                processes = {each: self._identities[each] for each in new}
                answers |= dict.fromkeys(processes.values())
                results = await self._call(new, command, arguments, timeout_s=timeout_s)
                answers |= {processes[each]: result for each, result in results.items()}
            return self.check_answers(answers.values())
        except BaseException:
            for replica in self._list_dp_rank_0():
                process = self._identities[replica]
                answer = answers.get(process) or {}
                is_unchanged = "error" in answer and not answer.get("has_mixed_weights")
                if process in answers and not is_unchanged:
                    undo(replica)
            raise

    def send_command(
        self, replica: int, command: str, arguments: dict[str, Any]
    ) -> "asyncio.Future[Answer]":
        """Send a command to a replica; returns its future answer."""
        return self._calls[self._start_call(replica, command, arguments)].result

    def _start_call(self, replica: int, command: str, arguments: dict[str, Any]) -> int:
        """Send a command to a replica; returns the number of the call."""
        number = self._num_calls
        self._num_calls += 1
        self._calls[number] = _Call(replica, asyncio.get_running_loop().create_future())
        dp_rank = self._find_dp_rank(replica)
        self._send(replica, EngineCall(number, command, arguments, dp_rank))
        return number

    def _find_adapter_path(self, name: str) -> str | None:
        """Return the folder of the adapter of a name; None: the name is not loaded."""
        started = {} if self.info is None else self.info.adapters
        return self._adapter_paths.get(name, started.get(name))

    def _record_adapter(self, name: str, path: str | None, result: Mapping[str, Any]) -> None:
        """Record that an adapter was loaded from a folder, or unloaded if `path` is None, for
        replicas that are restarted."""
        if path is not None:
            self._adapter_paths[name] = path
            self._fingerprints[name] = result["fingerprint"]
            return
        self._fingerprints.pop(name, None)
        self._adapter_paths.pop(name, None)
        if self._find_adapter_path(name) is not None:  # every process loads it at its start
            self._adapter_paths[name] = None

    def _send_adapter(self, replica: int, name: str, path: str | None) -> None:
        """Send the command to load an adapter, or to unload it if `path` is None; an error is
        logged."""
        command, arguments = "unload_adapter", {"lora_name": name}
        if path is not None:
            command, arguments = "load_adapter", {"lora_name": name, "lora_path": path}
        number = self._start_call(replica, command, arguments)
        self._calls[number].result.add_done_callback(_log_error)

    async def drain(self, *, timeout_s: float) -> None:
        """Wait until all requests are finished. The caller rejects new ones.

        Raises:
            ApiError: 503, the engine has ended.
            TimeoutError: they are not finished in time.
        """
        self._states.drain()
        async with asyncio.timeout(timeout_s):
            await self.wait_for(lambda: not self._requests)
        if self.failed is not None:
            raise self.failed

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, which is checked when a request ends, or a replica is ready
        or fails."""
        while not condition():
            await self._changed.wait()

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    # --- replicas

    @property
    def groups(self) -> list[range]:
        """The replicas of each group."""
        return [self.find_group(each) for each in range(0, self.num_replicas, self._group_size)]

    def find_group(self, replica: int) -> range:
        """Return the replicas that share experts with one."""
        first = replica - self._find_dp_rank(replica)
        return range(first, first + self._group_size)

    def _find_dp_rank(self, replica: int) -> int:
        """Return the index of a replica in its group."""
        return replica % self._group_size

    def _list_dp_rank_0(self) -> list[int]:
        """Return DP rank 0 of each group that is ready."""
        return [each for each in self.router.replicas if self._find_dp_rank(each) == 0]

    def record_difference(self, replica: int, what: Difference, *, differs: bool) -> bool:
        """Record whether a group of replicas differs from the others; it gets no new requests then.
        Returns whether this has changed."""
        has_changed = False
        for each in self.find_group(replica):
            differences = self.router.replicas[each].differences
            has_changed |= differs != (what in differences)
            if differs:
                differences.add(what)
            else:
                differences.discard(what)
        self.dispatch_waiting()
        return has_changed

    def start_replica(self, replica: int) -> list[str]:
        """Return the identities of the replicas of a group, whose process is started; messages of
        other processes are dropped."""
        group = self.find_group(replica)
        identities = [f"{each}.{self._num_processes}" for each in group]
        self._num_processes += 1
        for each, identity in zip(group, identities, strict=True):
            self._identities[each] = identity.encode()
        self.load_errors.pop(group.start, None)
        return identities

    def handle_replica_failure(self, replica: int) -> None:
        """Remove the replicas of a group whose process has ended; their requests continue on
        others."""
        group = self.find_group(replica)
        self._states.remove(group.start)
        self.loading_weights.discard(group.start)
        for each in group:
            self._identities.pop(each, None)
            self._num_unanswered.pop(each, None)
        for number in [each for each, call in self._calls.items() if call.replica in group]:
            self._block_calls.pop(number, None)
            result = self._calls.pop(number).result
            if not result.done():
                result.set_result(None)
        for number in [lost for each in group for lost in self.router.remove(each)]:
            request = self._requests[number]
            if request.expiry is not None:
                request.expiry.cancel()
            if request.is_aborted:
                self._end_aborted(number)
            elif request.num_attempts == MAX_ATTEMPTS:
                self._finish(number)
                request.generation.fail(
                    ApiError(
                        500,
                        "the engine process of this request ended, and so did the one that "
                        "continued it: the request may be the cause. Do not send it again; report "
                        "it with the log of the server.",
                    )
                )
            else:
                self._dispatch(number)
        self._notify()

    def stop_replica(self, replica: int) -> None:
        """Ask the replicas of a group to end after their messages."""
        self._start_call(self.find_group(replica).start, "shutdown", {})

    def send_heartbeats(self) -> None:
        """Ask every replica that is ready for a message."""
        for replica in self.router.replicas:
            self._num_unanswered[replica] = self._num_unanswered.get(replica, 0) + 1
            self._send(replica, Heartbeat(self._find_dp_rank(replica)))

    def expire_waiting(self) -> None:
        """End the requests that no replica has, and whose deadline has passed; replicas end the
        others."""
        now = time.monotonic()
        for number, request in list(self._requests.items()):
            deadline_s = request.message.params.get("deadline_s")
            if deadline_s is None or self.router.find_replica(number) is not None:
                continue
            if now > request.message.arrival_time + deadline_s:
                self._finish(number)
                text = (
                    f"deadline_s={deadline_s}: the request was not finished in time, because no "
                    "replica of the engine is ready. Send it again later."
                )
                request.generation.fail(ApiError(408, text))

    def find_unresponsive(self, *, max_heartbeats: int) -> list[int]:
        """Return the replicas that sent nothing after so many heartbeats."""
        return [
            replica
            for replica in self.router.replicas
            if self._num_unanswered.get(replica, 0) >= max_heartbeats
        ]

    def fail(self, error: ApiError) -> None:
        """End all requests and calls, because the engine has ended."""
        self.failed = error
        for number, request in list(self._requests.items()):
            self._finish(number)
            request.generation.fail(error)
        for call in self._calls.values():
            if not call.result.done():
                call.result.set_result(None)
        if not self.ready.done():
            self.ready.set_exception(error)
        self._notify()

    async def close(self) -> None:
        """Close the socket."""
        self._reader.cancel()
        self._socket.close()

    # --- messages

    def _send(self, replica: int, message: Message) -> None:
        identity = self._identities[self.find_group(replica).start]
        # the socket has no limit: sent at once
        self._socket.send_multipart([identity, self._codec.encode(message)])

    async def _read(self) -> None:
        while True:
            identity, *parts = await self._socket.recv_multipart()
            replica = next(
                (each for each, name in self._identities.items() if name == identity), None
            )
            if replica is None:  # its process has ended
                continue
            self._num_unanswered[replica] = 0
            try:
                if len(parts) != 1:
                    raise ProtocolError(f"{len(parts)} parts")
                self._handle(replica, self._codec.decode(parts[0]))
            except ProtocolError as error:
                _logger.warning("dropped a message of the engine: %s", error)
            except Exception:  # the reader must continue
                _logger.exception("a message of the engine cannot be handled")

    def _handle(self, replica: int, message: Message) -> None:
        match message:
            case StepOutputs(prompts, updates, cache):
                for item in prompts:
                    self._put_prompt(PromptResult(*item))
                generations = [self._add_update(TokenUpdate(*item)) for item in updates]
                for generation in dict.fromkeys(generations):  # each once
                    if generation is not None:
                        generation.deliver()
                if cache is not None:
                    self._put_cache(replica, CacheReport(*cache))
            case RequestRejected(request_id, status, text):
                request = self._requests.get(request_id)
                if request is not None:
                    self._finish(request_id)
                    request.generation.fail(ApiError(status, text))
            case Reply(call_id, result):
                self._put_reply(replica, call_id, result)
            case Heartbeat():
                pass
            case Ready(info):
                self._register(replica, ModelInfo(**info))
            case LoadFailed(text) if self.ready.done():
                _logger.error("replica %d cannot load the model: %s", replica, text)
                self.load_errors[replica] = text
                self._notify()
            case LoadFailed(text):
                self.ready.set_exception(LoadError(text))
            case _:
                raise ProtocolError(f"unexpected {message!r:.100}")

    def _register(self, replica: int, info: ModelInfo) -> None:
        """Add the group of a replica that has loaded the model, and send it the requests that
        wait."""
        if self.info is None:
            self.info = info
            self._fingerprints |= info.adapter_fingerprints
        self.loaded.add(replica)
        for each in self.find_group(replica):
            self.router.register(each, max_num_seqs=info.max_num_seqs)
        if self._weights_path is not None:
            for name in info.adapters:  # they belong to the weights of the start
                self._send_adapter(replica, name, None)
            self._send_weights(replica)
        for name, path in self._adapter_paths.items():
            if path is not None or self._weights_path is None:
                self._send_adapter(replica, name, path)
        self._states.register(replica)
        if not self.ready.done():
            self.ready.set_result(info)
        self.dispatch_waiting()
        self._notify()

    def _put_reply(self, replica: int, call_id: int, result: dict[str, Any]) -> None:
        if self._block_calls.pop(call_id, None) is not None:
            self.router.resynchronize(replica, result["next_sequence"], result["keys"])
        call = self._calls.pop(call_id, None)
        if call is not None and not call.result.done():
            call.result.set_result(result)

    def _put_cache(self, replica: int, report: CacheReport) -> None:
        self.router.replicas[replica].num_active_blocks = report.num_active_blocks
        if self.router.update_blocks(replica, report.sequence, report.stored, report.removed):
            self._block_calls[self._start_call(replica, "list_blocks", {})] = replica

    def _put_prompt(self, result: PromptResult) -> None:
        request = self._requests.get(result.request_id)
        if request is None:
            return
        self.router.finish_prefill(result.request_id)
        if request.generation.prompts[request.prompt] is None:  # else from a failed replica
            request.generation.prompts[request.prompt] = result

    def _add_update(self, update: TokenUpdate) -> Generation | None:
        """Add an update to its generation, and return it; None: its choice has ended."""
        request = self._requests.get(update.request_id)
        if request is None:  # aborted
            return None
        choice = request.choices[update.choice]
        if choice.finish_reason is not None:  # on a failed replica
            return None
        if update.token is not None:
            choice.token_ids.append(update.token)
        request.generation.add(request.prompt, update)
        if update.finish_reason is not None:
            choice.finish_reason = update.finish_reason
            self.num_sequences -= 1
            if request.num_unfinished == 0:
                self._finish(update.request_id)
        return request.generation


def _log_error(result: "asyncio.Future[Answer]") -> None:
    """Log the error of a command for which nothing waits."""
    if not result.cancelled() and "error" in (result.result() or {}):
        _logger.error("the adapters of a replica differ from the others: %s", result.result())


class LoadError(Exception):
    """The engine process cannot load the model; the text is for the user."""
