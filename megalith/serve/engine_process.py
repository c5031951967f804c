"""The engine process of a server: loads the model, and runs the engine between messages.

`python -m megalith.serve.engine_process` reads its settings as one line of JSON from standard
input, and ends when standard input is closed, so that it never outlives the HTTP process. An idle
engine waits for messages without polling.
"""

import json
import logging
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from megalith.config.generation import SamplingParams
from megalith.config.serve import EngineConfig
from megalith.config.server import ServeRun
from megalith.config.tree import from_dict, to_dict
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError, UserError
from megalith.hf.convert import find_turn_end
from megalith.hf.folder import read_json
from megalith.hf.pretrained import Pretrained
from megalith.infer.chat import select_template
from megalith.infer.engine import InferenceEngine
from megalith.infer.load import TextGenerator, build_engine, load_text_generator, open_source
from megalith.infer.outputs import RequestOutput, TokenOutput
from megalith.infer.sample import TokenLogprobs
from megalith.launch.worker import Worker, set_threads
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.serve.metrics import AccessLog, EngineMetrics
from megalith.serve.model_info import ModelInfo
from megalith.serve.protocol import (
    AbortRequest,
    AddRequest,
    Codec,
    EngineCall,
    LoadFailed,
    Message,
    PromptResult,
    ProtocolError,
    Ready,
    Reply,
    RequestRejected,
    StepOutputs,
    TokenUpdate,
    to_array,
)
from megalith.serve.transport import connect_engine_socket, receive_frame

if TYPE_CHECKING:
    import zmq

_logger = logging.getLogger(__name__)

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are sampling parameters of the same name and meaning."""


WARM_UP_TOKENS = 32
"""Context of the engine that generates before the first request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine process."""

    address: str
    source: str
    engine: dict[str, Any]
    """EngineConfig as plain data."""

    served_model_name: str
    """Label of the metrics."""

    base: str | None = None
    dtype: str | None = None
    kernels: Any = "auto"
    """KernelSetting as plain data."""

    template: str | None = None
    log_requests: bool = False


@dataclass(slots=True)
class _ClientRequest:
    """A request of a client in the engine."""

    request_id: int
    output: RequestOutput
    deadline: float | None
    prompt_sent: bool = False
    """Whether its `PromptResult` was sent."""


class EngineServer:
    """Runs an engine for the HTTP process: takes messages between steps, sends the outputs of each
    step in one message."""

    def __init__(
        self, engine: InferenceEngine, socket: "zmq.Socket[bytes]", metrics: EngineMetrics
    ) -> None:
        self.engine, self._socket, self._metrics = engine, socket, metrics
        self._codec = Codec()
        self._requests: dict[int, _ClientRequest] = {}
        """By the engine's number."""
        self._numbers: dict[int, int] = {}
        """The engine's number by the client's."""
        self._drains: list[int] = []
        """Calls of drain to answer when no request is left."""
        self._is_stopped = self._is_paused = False
        self._commands: Mapping[str, Callable[[], dict[str, Any]]] = {
            "stats": self._stats,
            "metrics": self._render_metrics,
            "reset_prefix_cache": self._reset_prefix_cache,
            "pause": self._pause,
            "resume": self._resume,
            "shutdown": self._shutdown,
        }

    def run(self) -> None:
        """Process messages and steps until the shutdown command."""
        while not self._is_stopped:
            self._receive()
            if self._can_step:
                self._step()
            if self._drains and not self.engine.has_unfinished:
                for call_id in self._drains:
                    self.send(Reply(call_id, {}))
                self._drains = []

    def send(self, message: Message) -> None:
        """Send a message to the HTTP process."""
        self._socket.send(self._codec.encode(message))

    @property
    def _can_step(self) -> bool:
        return self.engine.has_unfinished and not self._is_paused

    def _receive(self) -> None:
        """Process all messages; wait for one if the engine is idle or paused."""
        frame = receive_frame(self._socket, wait=not self._can_step)
        while frame is not None:
            try:
                self._handle(self._codec.decode(frame))
            except ProtocolError as error:
                _logger.warning("dropped a message of the HTTP process: %s", error)
            except Exception:  # a bug must not end the other requests
                _logger.exception("a message of the HTTP process cannot be handled")
            if self._is_stopped:
                return
            frame = receive_frame(self._socket, wait=False)

    def _handle(self, message: Message) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequest(request_id):
                if request_id in self._numbers:
                    self._send_outputs(self.engine.abort(self._numbers[request_id]))
            case EngineCall(call_id, "drain"):
                self._drains.append(call_id)
                self._is_paused = False  # the requests in flight finish
            case EngineCall(call_id, command) if command in self._commands:
                self.send(Reply(call_id, self._execute(command)))
            case _:
                raise ProtocolError(f"unexpected {message!r:.100}")

    def _add(self, message: AddRequest) -> None:
        if self._drains:
            self.send(RequestRejected(message.request_id, 503, "the server is shutting down"))
            return
        try:
            params = SamplingParams.from_dict(message.params)
            number = self.engine.add_request(
                message.prompt_token_ids,
                params,
                arrival_time=message.arrival_time,
                pooling=message.pooling,
            )
        except UserError as error:
            self.send(RequestRejected(message.request_id, 400, str(error)))
            return
        except Exception as error:  # a bug must fail this request only
            _logger.exception("request %s cannot be added", message.uid)
            self.send(
                RequestRejected(message.request_id, 500, f"internal error: {type(error).__name__}")
            )
            return
        deadline = None if params.deadline_s is None else message.arrival_time + params.deadline_s
        self._metrics.access_log.name(number, message.uid)
        self._requests[number] = _ClientRequest(
            message.request_id, self.engine.output_of(number), deadline
        )
        self._numbers[message.request_id] = number

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:  # the requests fail, the server continues
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

    def _send_outputs(self, outputs: list[TokenOutput]) -> None:
        if not outputs:
            return
        prompts: list[object] = []
        updates: list[object] = []
        for output in outputs:
            request = self._requests[output.request_id]
            if not request.prompt_sent:
                request.prompt_sent = True
                prompts.append(to_array(_prompt_result(request)))
            updates.append(to_array(_token_update(output, request)))
        for number in {output.request_id for output in outputs}:
            if not self.engine.is_unfinished(number):
                del self._numbers[self._requests.pop(number).request_id]
        self.send(StepOutputs(prompts, updates))

    def _execute(self, command: str) -> dict[str, Any]:
        """Return the result of a command."""
        try:
            return self._commands[command]()
        except Exception as error:  # the requests in flight continue
            _logger.exception("the command %s failed", command)
            return {"error": f"internal error in {command}: {type(error).__name__}"}

    def _stats(self) -> dict[str, Any]:
        stats = self.engine.scheduler.make_stats()
        return {
            "num_requests": len(self._requests),
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "num_used_blocks": stats.num_used_blocks,
            "num_blocks": stats.num_blocks,
            "is_paused": self._is_paused,
        }

    def _render_metrics(self) -> dict[str, Any]:
        stats = self.engine.scheduler.make_stats()
        return {"text": self._metrics.render(stats, is_paused=self._is_paused)}

    def _pause(self) -> dict[str, Any]:
        self._is_paused = True
        return {}

    def _resume(self) -> dict[str, Any]:
        self._is_paused = False
        return {}

    def _reset_prefix_cache(self) -> dict[str, Any]:
        self.engine.scheduler.reset_prefix_cache()
        return {}

    def _shutdown(self) -> dict[str, Any]:
        self._is_stopped = True
        return {}


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


def _token_update(output: TokenOutput, request: _ClientRequest) -> TokenUpdate:
    is_timeout = (
        output.finish_reason == "error"
        and request.deadline is not None
        and time.monotonic() > request.deadline
    )
    return TokenUpdate(
        request.request_id,
        output.choice,
        output.token,
        output.text,
        None if output.logprobs is None else _logprobs_array(output.logprobs),
        output.finish_reason,
        output.stop_reason,
        output.error,
        is_timeout,
    )


def _logprobs_array(logprobs: TokenLogprobs) -> list[object]:
    return [
        logprobs.token,
        logprobs.logprob,
        [[token, value] for token, value in logprobs.top_logprobs.items()],
    ]


# --- loading


def load_engine(
    settings: EngineSettings, metrics: EngineMetrics
) -> tuple[InferenceEngine, ModelInfo]:
    """Load the model, and build its engine.

    Raises:
        UserError: the model cannot be served.
    """
    run = from_dict(ServeRun, {"engine": settings.engine, "kernels": settings.kernels})
    source = open_source(settings.source, 1, base=settings.base)
    worker = Worker.from_environment(os.environ)
    set_threads(worker, None)
    name = settings.dtype or ("float32" if worker.device.type == "cpu" else "bfloat16")
    generator = load_text_generator(
        source,
        build_single_rank_mesh(),
        worker.device,
        getattr(torch, name),
        kernels=run.kernels,
        quantization=run.engine.quantization,
    )
    for warning in source.warnings():
        _logger.warning("%s: %s", source.path, warning)
    warm_up(generator, run.engine)
    engine = build_engine(generator, run.engine, callbacks=[metrics, metrics.access_log])
    return engine, describe_model(source, generator.tokenizer, engine, settings.template)


def warm_up(generator: TextGenerator, config: EngineConfig) -> None:
    """Generate a few tokens with an engine of its own, so that kernels are compiled and selected
    before the first request."""
    length = min(WARM_UP_TOKENS, generator.model.config.max_seq_len)
    cache = replace(config.cache, num_blocks=2 * WARM_UP_TOKENS)
    engine = build_engine(generator, replace(config, cache=cache, max_model_len=length))
    params = SamplingParams(n=2, max_new_tokens=2, seed=0, logprobs=1, ignore_eos=True)
    engine.add_request([0] * max(1, length // 2), params)
    while engine.has_unfinished:
        engine.step()


def describe_model(
    source: Pretrained, tokenizer: Tokenizer, engine: InferenceEngine, template_name: str | None
) -> ModelInfo:
    """Return what the HTTP process needs to know about the model.

    Raises:
        UserError: the template that the settings name cannot be used.
    """
    template, template_error = None, ""
    turn_end: tuple[frozenset[int], str] = (frozenset(), "")
    try:
        chosen = select_template(source, tokenizer, template_name)
        turn_end = find_turn_end(chosen, tokenizer)
        template = {
            "name": chosen.name,
            "source": chosen.source,
            "specials": dict(chosen.specials),
        }
    except DataError as error:
        if template_name is not None:
            raise
        template_error = str(error)
    return ModelInfo(
        path=str(source.path),
        tokenizer=to_dict(source.tokenizer),
        template=template,
        template_error=template_error,
        turn_end_ids=sorted(turn_end[0]),
        turn_end_text=turn_end[1],
        max_model_len=engine.max_model_len,
        vocab_size=engine.model_config.vocab_size,
        hidden_size=engine.model_config.hidden_size,
        max_num_seqs=engine.config.max_num_seqs,
        generation_defaults=read_generation_defaults(source),
    )


def read_generation_defaults(source: Pretrained) -> dict[str, Any]:
    """Return the sampling parameters of the model's generation_config.json."""
    file = source.generation_file()
    if file is None:
        return {}
    values = read_json(file)
    return {name: values[name] for name in DEFAULTS if values.get(name) is not None}


def main() -> int:
    """Run an engine process."""
    # The HTTP process drains at these signals, which a terminal sends to both processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    settings = EngineSettings(**json.loads(sys.stdin.readline()))
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    socket = connect_engine_socket(settings.address)
    metrics = EngineMetrics(
        settings.served_model_name, AccessLog(log_prompts=settings.log_requests)
    )
    try:
        engine, info = load_engine(settings, metrics)
    except UserError as error:
        socket.send(Codec().encode(LoadFailed(str(error))))
        socket.close()
        return 2
    server = EngineServer(engine, socket, metrics)
    server.send(Ready(asdict(info)))
    server.run()
    socket.close()
    return 0


def _exit_with_parent() -> None:
    """End this process when standard input is closed."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
