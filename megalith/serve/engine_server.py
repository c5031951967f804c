"""The loop of an engine process: runs the engine between the messages of the HTTP process.

An idle engine waits for messages without polling, unless a grammar is being compiled. With several
ranks, rank 0 receives the messages and broadcasts them, so that all ranks make the same steps.
Data-parallel ranks, which share experts, have requests of their own, and each sends its outputs;
a message with requests begins a round of steps that all of them make.
"""

import logging
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megalith.config.generation import (
    SamplingParams,
    StructuredOutputsParams,
    sampling_problems,
)
from megalith.errors import ConfigError, UserError
from megalith.hf.pretrained import locate_source
from megalith.infer.adapters import (
    AdaptersInUseError,
    ReplacedAdapterError,
    UnknownAdapterError,
)
from megalith.infer.engine import InferenceEngine
from megalith.infer.logprobs import TokenLogprobs
from megalith.infer.outputs import RequestOutput, TokenOutput
from megalith.infer.refit import UpdateMode, check_update_mode
from megalith.infer.requests import ChoiceProgress, deadline_error
from megalith.infer.stopping_criteria import FinishReason
from megalith.infer.structured_output import Grammar
from megalith.infer.suspend import EngineMemoryError
from megalith.parallel.group import SINGLE_RANK, Group
from megalith.parallel.p2p import ByteBroadcast
from megalith.plan.serving.engine_state import (
    EngineState,
    InvalidStateError,
    KVCacheMode,
    Suspension,
)
from megalith.serve.metrics import EngineMetrics
from megalith.serve.protocol import (
    RANK_COMMANDS,
    AbortRequest,
    AddRequest,
    CacheReport,
    Codec,
    EngineCall,
    ExpireRequest,
    Heartbeat,
    Message,
    PromptResult,
    ProtocolError,
    Reply,
    RequestRejected,
    StepOutputs,
    TokenUpdate,
    join_frames,
    split_frames,
    to_array,
)
from megalith.serve.transport import receive_frames

if TYPE_CHECKING:
    import zmq

_logger = logging.getLogger(__name__)

MAX_COMPILE_THREADS = 2
"""Grammars that are compiled at a time (heuristic)."""

COMPILE_POLL_S = 0.002
"""Polling interval of an idle engine while a grammar is compiled (heuristic)."""

MAX_WAIT_S = 60.0
"""Time after which an idle rank 0 wakes the other ranks, whose collective has a timeout."""


@dataclass(slots=True)
class _ClientRequest:
    """A request of a client in the engine."""

    request_id: int
    output: RequestOutput
    deadline_s: float | None
    deadline: float | None
    """On the monotonic clock."""

    prompt_sent: bool = False
    """Whether its `PromptResult` was sent."""


@dataclass(frozen=True, slots=True)
class _CompilingRequest:
    """A request that waits for its grammar."""

    message: AddRequest
    structure: StructuredOutputsParams
    future: "Future[Grammar]"
    """Shared by all requests with this structure."""


class EngineServer:
    """Runs an engine for the HTTP process: takes messages between steps, sends the outputs of each
    step in one message."""

    def __init__(
        self,
        engine: InferenceEngine,
        socket: "zmq.Socket[bytes] | None",
        metrics: EngineMetrics,
        ranks: Group = SINGLE_RANK,
        *,
        dp_rank: int = 0,
        reports_cache: bool = False,
    ) -> None:
        """`socket`: None on all ranks but the first of each data-parallel rank; `ranks`: all that
        share experts or the model; `reports_cache`: send which blocks the prefix cache has, for the
        routing of requests."""
        self.engine, self._socket, self._metrics, self._ranks = engine, socket, metrics, ranks
        self._dp_rank, self._is_first = dp_rank, ranks.rank == 0
        self._broadcast = ByteBroadcast(ranks, 0)
        self._codec = Codec()
        self._requests: dict[int, _ClientRequest] = {}
        """By the engine's number."""
        self._numbers: dict[int, int] = {}
        """The engine's number by the client's."""
        self._drains: list[EngineCall] = []
        """Calls of drain to answer when no request is left."""
        self._is_draining = False
        """Whether there was a call of drain: the server is shutting down."""
        self._updates: list[EngineCall] = []
        """Weight updates to make when the requests in flight are finished."""
        self._is_stopped = False
        self._state = EngineState()
        self._prefix_cache = engine.scheduler.cache.prefix_cache if reports_cache else None
        self._num_reports = 0
        if self._prefix_cache is not None:
            self._prefix_cache.start_recording()
        self._executor = ThreadPoolExecutor(MAX_COMPILE_THREADS, "megalith-grammar")
        self._compiling: dict[int, _CompilingRequest] = {}
        """By the client's number; on rank 0."""
        self._commands: Mapping[str, Callable[..., dict[str, Any]]] = {
            "stats": self._stats,
            "metrics": self._render_metrics,
            "list_blocks": self._list_blocks,
            "reset_prefix_cache": self._reset_prefix_cache,
            "load_adapter": self._load_adapter,
            "unload_adapter": self._unload_adapter,
            "locate_weights": self._locate_weights,
            "update_weights": self._update_weights,
            "pause": self._pause,
            "resume": self._resume,
            "suspend": self._suspend,
            "wake_up": self._wake_up,
            "shutdown": self._shutdown,
        }

    def run(self) -> None:
        """Process messages and steps until the shutdown command."""
        while not self._is_stopped:
            self._receive()
            if self._can_step:
                self._step()
            if self._updates and self.engine.is_every_rank_drained():
                self._finish_updates()
            if self._drains and not self.engine.has_unfinished and not self._compiling:
                for call in self._drains:
                    self._reply(call, {})
                self._drains = []
        self._broadcast.close()

    def send(self, message: Message) -> None:
        """Send a message to the HTTP process; the first rank of each data-parallel rank does."""
        if self._socket is not None:
            self._socket.send(self._codec.encode(message))

    def _reply(self, call: EngineCall, result: dict[str, Any]) -> None:
        if call.dp_rank == self._dp_rank:
            self.send(Reply(call.call_id, result))

    @property
    def _can_step(self) -> bool:
        return self.engine.can_step and not self._state.is_paused

    def _receive(self) -> None:
        """Process all messages; wait for one if the engine is idle or paused."""
        messages = self._receive_messages()
        if any(isinstance(message, AddRequest) for message in messages):
            self.engine.start_round()
        for message in filter(self._is_addressed, messages):
            try:
                self._handle(message)
            except ProtocolError as error:
                _logger.warning("dropped a message of the HTTP process: %s", error)
            except Exception:  # a bug must not end the other requests
                _logger.exception("a message of the HTTP process cannot be handled")
            if self._is_stopped:
                return

    def _is_addressed(self, message: Message) -> bool:
        """Whether this data-parallel rank processes a message."""
        match message:
            case AddRequest() | Heartbeat():
                return message.dp_rank == self._dp_rank
            case EngineCall(_, command) if command in RANK_COMMANDS:
                return message.dp_rank == self._dp_rank
        return True

    def _receive_messages(self) -> list[Message]:
        """Return what to do before the next step, on all ranks alike: the messages of the HTTP
        process, requests whose grammar is compiled, and expired requests."""
        messages: list[Message] = []
        if self._is_first:
            assert self._socket is not None, "rank 0 has one"
            for frame in receive_frames(self._socket, wait_s=self._wait_s()):
                try:
                    messages.append(self._codec.decode(frame))
                except ProtocolError as error:
                    _logger.warning("dropped a message of the HTTP process: %s", error)
            messages = [*self._accept(messages), *self._pop_compiled()]
            self._expire_compiling()
            messages += self._find_expired(messages)
        if self._ranks.size == 1:
            return messages
        if not self._is_first:
            frames = split_frames(self._broadcast.receive())
            return [self._codec.decode(frame) for frame in frames]
        self._broadcast.send(join_frames([self._codec.encode(message) for message in messages]))
        return messages

    def _accept(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages without requests that are rejected or whose grammar is compiled
        first, on another thread."""
        accepted: list[Message] = []
        is_draining = self._is_draining
        for message in messages:
            is_new = isinstance(message, AddRequest) and message.progress is None
            if isinstance(message, AddRequest) and is_new and is_draining:
                self.send(RequestRejected(message.request_id, 503, "the server is shutting down"))
            elif not (isinstance(message, AddRequest) and self._compile_first(message)):
                accepted.append(message)
            if isinstance(message, AbortRequest) and message.request_id in self._compiling:
                self._end_compiling(message.request_id, "abort")
            is_draining |= isinstance(message, EngineCall) and message.command == "drain"
        return accepted

    def _compile_first(self, message: AddRequest) -> bool:
        """Start to compile the grammar of a request; False if there is nothing to compile."""
        structure = _read_structure(message.params)
        grammars = self.engine.grammars
        if structure is None or grammars is None or grammars.is_cached(structure):
            return False
        requests = self._compiling.values()
        future = next((each.future for each in requests if each.structure == structure), None)
        if future is None:
            future = self._executor.submit(grammars.compile, structure)
        self._compiling[message.request_id] = _CompilingRequest(message, structure, future)
        return True

    def _end_compiling(
        self, request_id: int, reason: FinishReason, *, error: str | None = None
    ) -> None:
        """End a request whose grammar is compiled; `error`: its deadline passed. Its compilation
        is canceled unless it has started or another request needs it."""
        request = self._compiling.pop(request_id)
        if all(each.future is not request.future for each in self._compiling.values()):
            request.future.cancel()
        is_timeout = error is not None
        updates = [
            TokenUpdate(request_id, choice, None, "", None, reason, None, error, is_timeout)
            for choice in range(request.message.params.get("n", 1))
        ]
        prompt = PromptResult(request_id, 0, None, None)
        self.send(StepOutputs([to_array(prompt)], [to_array(update) for update in updates]))

    def _expire_compiling(self) -> None:
        """End the requests whose deadline passed before their grammar was compiled."""
        now = time.monotonic()
        for request_id, request in list(self._compiling.items()):
            deadline = read_deadline(request.message)
            if deadline is not None and now > deadline:
                error = deadline_error(request.message.params["deadline_s"])
                self._end_compiling(request_id, "error", error=error)

    def _pop_compiled(self) -> list[AddRequest]:
        """Return the requests whose grammars are compiled; reject those that are invalid."""
        compiled: list[AddRequest] = []
        for request in list(self._compiling.values()):
            if not request.future.done():
                continue
            del self._compiling[request.message.request_id]
            error = request.future.exception()
            if error is None:
                compiled.append(request.message)
            else:
                self._reject(request.message, error)
        return compiled

    def _reject(self, message: AddRequest, error: BaseException) -> None:
        """Reject a request because of its error, or of a bug, which must fail this request only."""
        if isinstance(error, UserError):
            self.send(RequestRejected(message.request_id, find_status(error), str(error)))
            return
        _logger.error("request %s cannot be added", message.uid, exc_info=error)
        text = f"internal error: {type(error).__name__}"
        self.send(RequestRejected(message.request_id, 500, text))

    def _wait_s(self) -> float | None:
        """Return how long to wait for a message; None: until there is one."""
        if self._can_step:
            return 0.0
        now = time.monotonic()
        waits = [request.deadline - now for request in self._requests.values() if request.deadline]
        if self._ranks.size > 1:  # they wait for rank 0 in a collective, which has a timeout
            waits.append(MAX_WAIT_S)
        if self._compiling:
            waits.append(COMPILE_POLL_S)
        return max(0.0, min(waits)) if waits else None

    def _find_expired(self, messages: Sequence[Message]) -> list[Message]:
        """Return the requests whose deadline has passed, also among those of `messages`."""
        deadlines = {request.request_id: request.deadline for request in self._requests.values()}
        for message in messages:
            if isinstance(message, AddRequest):
                deadlines[message.request_id] = read_deadline(message)
        now = time.monotonic()
        return [
            ExpireRequest(request_id)
            for request_id, deadline in deadlines.items()
            if deadline is not None and now > deadline
        ]

    def _handle(self, message: Message) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequest(request_id):
                if request_id in self._numbers:
                    self._send_outputs(self.engine.abort(self._numbers[request_id]))
            case ExpireRequest(request_id):
                self._expire(request_id)
            case Heartbeat():
                self.send(message)
            case EngineCall(_, "drain"):
                self._drains.append(message)
                self._is_draining = True
                self._finish_suspension()
                self._state = EngineState()  # the requests in flight finish
            case EngineCall(_, "update_weights", {"mode": "drain"}) if self._can_step:
                self._cancel_updates()
                self.engine.scheduler.holds_new = True
                self._updates.append(message)
            case EngineCall(_, "update_weights"):
                self._cancel_updates()
                self._reply(message, self._execute(message.command, message.arguments))
            case EngineCall(_, command, arguments) if command in self._commands:
                self._reply(message, self._execute(command, arguments))
            case _:
                raise ProtocolError(f"unexpected {message!r:.100}")

    def _expire(self, request_id: int) -> None:
        if request_id not in self._numbers:  # aborted in the same step
            return
        number = self._numbers[request_id]
        deadline_s = self._requests[number].deadline_s
        assert deadline_s is not None, request_id
        outputs = self.engine.abort(number, error=deadline_error(deadline_s))
        self._send_outputs(outputs, is_timeout=True)

    def _add(self, message: AddRequest) -> None:
        if self.engine.is_suspended and self._state.suspension is None:
            text = "the server is shutting down, and its engine could not wake up"
            self.send(RequestRejected(message.request_id, 503, text))
            return
        try:
            params = SamplingParams.from_dict(message.params)
            number = self.engine.add_request(
                message.prompt_token_ids,
                replace(params, deadline_s=None),  # rank 0 decides which requests have expired
                arrival_time=message.arrival_time,
                pooling=message.pooling,
                adapter=message.adapter,
                adapter_fingerprint=message.adapter_fingerprint,
                progress=[ChoiceProgress(*item) for item in message.progress or ()],
            )
        except Exception as error:
            self._reject(message, error)
            return
        if self._socket is not None:  # others have no callbacks
            self._metrics.access_log.name(number, message.uid)
        self._requests[number] = _ClientRequest(
            message.request_id,
            self.engine.output_of(number),
            params.deadline_s,
            read_deadline(message),
        )
        self._numbers[message.request_id] = number

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:  # the requests fail, the server continues
            if self._ranks.size > 1:
                raise  # the ranks would not execute the same collectives
            _logger.exception("a step failed")
            outputs = []
            for number in list(self._requests):
                outputs += [
                    TokenOutput(
                        number, output.choice, None, finish_reason="error", error=describe(error)
                    )
                    for output in self.engine.abort(number)
                ]
        self._send_outputs(outputs)

    def _send_outputs(self, outputs: list[TokenOutput], *, is_timeout: bool = False) -> None:
        if not outputs:
            return
        prompts: list[object] = []
        updates: list[object] = []
        for output in outputs:
            request = self._requests[output.request_id]
            if not request.prompt_sent:
                request.prompt_sent = True
                prompts.append(to_array(_prompt_result(request)))
            updates.append(make_update_array(output, request.request_id, is_timeout=is_timeout))
        for number in {output.request_id for output in outputs}:
            if not self.engine.is_unfinished(number):
                del self._numbers[self._requests.pop(number).request_id]
        self.send(StepOutputs(prompts, updates, self._report_cache()))

    def _report_cache(self) -> list[object] | None:
        """Return the next `CacheReport` as an array; None: none are requested."""
        if self._prefix_cache is None:
            return None
        stored, removed = self._prefix_cache.take_changes()
        num_active_blocks = self.engine.scheduler.cache.allocator.num_used
        self._num_reports += 1
        return to_array(CacheReport(self._num_reports - 1, stored, removed, num_active_blocks))

    def _list_blocks(self) -> dict[str, Any]:
        """Return all keys, and the number of the first report after them."""
        assert self._prefix_cache is not None, "replicas report their cache"
        return {"keys": self._prefix_cache.start_recording(), "next_sequence": self._num_reports}

    def _execute(self, command: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of a command."""
        try:
            return self._commands[command](**arguments)
        except UserError as error:
            reply = {"error": str(error), "status": find_status(error)}
            return reply | {"has_mixed_weights": self.engine.has_mixed_weights}
        except Exception as error:  # the requests in flight continue
            _logger.exception("the command %s failed", command)
            return {"error": f"internal error in {command}: {type(error).__name__}", "status": 500}

    def _stats(self) -> dict[str, Any]:
        stats = self.engine.scheduler.make_stats()
        return {
            "num_requests": len(self._requests),
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_used_blocks": stats.num_used_blocks,
            "num_blocks": stats.num_blocks,
            "state": self._state.name,
        }

    def _render_metrics(self) -> dict[str, Any]:
        stats = self.engine.scheduler.make_stats()
        steps = self.engine.runner.count_graph_steps()
        return {"text": self._metrics.render(stats, self._state, graph_steps=steps)}

    def _pause(self) -> dict[str, Any]:
        if not self._is_draining:  # else the requests in flight finish
            self._state = self._state.pause()
        return {}

    def _resume(self) -> dict[str, Any]:
        self._state = self._state.resume()
        return {}

    def _suspend(self, *, kv_cache: KVCacheMode, offload_weights: bool) -> dict[str, Any]:
        if self._is_draining:
            raise InvalidStateError("suspend: the server is shutting down, and finishes requests.")
        state = self._state.suspend(Suspension(kv_cache, offload_weights))
        try:
            self.engine.suspend(kv_cache=kv_cache, offload_weights=offload_weights)
        finally:
            self._send_outputs(self.engine.take_outputs())  # of steps that were in flight
        self._state = state
        return {}

    def _wake_up(self) -> dict[str, Any]:
        self.engine.wake_up()
        self._state = self._state.wake_up()
        return {}

    def _finish_suspension(self) -> None:
        """Wake up a suspended engine, so that its requests finish; if the memory does not suffice,
        they fail."""
        try:
            self.engine.wake_up()
        except EngineMemoryError as error:
            _logger.error("the engine cannot finish its requests: %s", error)
            for number in list(self._requests):
                self._send_outputs(self.engine.abort(number, error=str(error)))

    def _reset_prefix_cache(self) -> dict[str, Any]:
        self.engine.scheduler.reset_prefix_cache()
        return {}

    def _load_adapter(self, *, lora_name: str, lora_path: str) -> dict[str, Any]:
        self.engine.load_adapter(lora_name, lora_path)
        adapters = self.engine.runner.adapters
        return {} if adapters is None else {"fingerprint": adapters.fingerprints[lora_name]}

    def _unload_adapter(self, *, lora_name: str) -> dict[str, Any]:
        self.engine.unload_adapter(lora_name)
        return {}

    def _update_weights(self, *, path: str, mode: UpdateMode) -> dict[str, Any]:
        is_suspended = self.engine.is_suspended  # the engine rejects the mode itself
        if mode == "drain" and not is_suspended and not self.engine.is_every_rank_drained():
            raise ConfigError(
                f"mode={mode}: the server is paused, so the requests in flight do not finish. Use "
                "mode recompute or keep, or POST /resume first."
            )
        try:
            self.engine.update_weights(path, mode=mode)
        finally:
            self._send_outputs(self.engine.take_outputs())
        return {"weight_version": self.engine.weight_version}

    def _locate_weights(self, *, path: str, mode: UpdateMode) -> dict[str, Any]:
        check_update_mode(mode)
        return {"path": str(locate_source(path).absolute())}

    def _cancel_updates(self) -> None:
        """End the weight updates that wait for requests in flight, because of a later update."""
        for call in self._updates:
            text = "update_weights: a later update replaces this one, which had not started."
            self._reply(call, {"error": text, "status": 409})
        self._updates = []
        self.engine.scheduler.holds_new = False

    def _finish_updates(self) -> None:
        """Make the weight updates that waited for requests in flight, and answer them."""
        for call in self._updates:
            self._reply(call, self._execute(call.command, call.arguments))
        self._updates = []
        self.engine.scheduler.holds_new = False  # also if they failed

    def _shutdown(self) -> dict[str, Any]:
        self._is_stopped = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        return {}


def find_status(error: UserError) -> int:
    """Return the HTTP status of a request or a command that the engine rejected."""
    statuses: dict[type[UserError], int] = {
        UnknownAdapterError: 404,
        InvalidStateError: 409,
        ReplacedAdapterError: 409,
        AdaptersInUseError: 429,
        EngineMemoryError: 503,
    }
    return statuses.get(type(error), 400)


def read_deadline(message: AddRequest) -> float | None:
    """Return the deadline of a request on the monotonic clock; its parameters may be invalid."""
    deadline_s = message.params.get("deadline_s")
    if not isinstance(deadline_s, int | float):
        return None
    return message.arrival_time + deadline_s


def _read_structure(data: dict[str, Any]) -> StructuredOutputsParams | None:
    """Return the structured output of plain sampling parameters; None if they have none, or are
    invalid, which the engine reports."""
    if "structured_outputs" not in data:
        return None
    try:
        params = SamplingParams.from_dict(data)
    except UserError:
        return None
    return None if sampling_problems(params, vocab_size=None) else params.structured_outputs


def describe(error: Exception) -> str:
    """Return the text of an internal error for clients, without details of the server."""
    return f"internal error in a step: {type(error).__name__}. Send the request again."


def _prompt_result(request: _ClientRequest) -> PromptResult:
    output = request.output
    logprobs, embedding = output.prompt_logprobs, output.embedding
    return PromptResult(
        request.request_id,
        output.num_cached_tokens,
        None if logprobs is None else [_logprobs_array(item) for item in logprobs],
        None if embedding is None else struct.pack(f"<{len(embedding)}f", *embedding),
    )


def make_update_array(
    output: TokenOutput, request_id: int, *, is_timeout: bool = False
) -> list[object]:
    """Return the `TokenUpdate` of an output as an array."""
    return [
        request_id,
        output.choice,
        output.token,
        output.text,
        None if output.logprobs is None else _logprobs_array(output.logprobs),
        output.finish_reason,
        output.stop_reason,
        output.error,
        is_timeout and output.finish_reason == "error",
        output.is_request_error,
    ]


def _logprobs_array(logprobs: TokenLogprobs) -> list[object]:
    return [
        logprobs.token,
        logprobs.logprob,
        [[token, value] for token, value in logprobs.top_logprobs.items()],
    ]
