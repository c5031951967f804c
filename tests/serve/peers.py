"""The HTTP process's end of the socket of an engine."""

import threading
import time
from pathlib import Path
from typing import Any

import zmq

from megalith.config.generation import SamplingParams
from megalith.infer.llm import LLM
from megalith.serve import transport
from megalith.serve.engine_server import EngineServer
from megalith.serve.metrics import AccessLog, EngineMetrics
from megalith.serve.protocol import (
    AddRequest,
    Codec,
    EngineCall,
    Message,
    PromptResult,
    Reply,
    StepOutputs,
    TokenUpdate,
)


class Peer:
    """The other end of an engine's socket."""

    def __init__(self, folder: Path, llm: LLM, *, reports_cache: bool = False) -> None:
        address = transport.socket_address(folder)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.bind(address)
        self.codec = Codec()
        engine_socket = transport.connect_engine_socket(address, "0")
        metrics = EngineMetrics("tiny", AccessLog(log_prompts=False))
        self.server = EngineServer(llm.engine, engine_socket, metrics, reports_cache=reports_cache)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def send(self, message: Message) -> None:
        self.socket.send(self.codec.encode(message))

    def receive(self) -> Message:
        return self.codec.decode(self.socket.recv())

    def call(self, call_id: int, command: str) -> dict[str, Any]:
        """The result of a command."""
        self.send(EngineCall(call_id, command))
        message = self.receive()
        assert isinstance(message, Reply) and message.call_id == call_id
        return message.result

    def read_request(self) -> tuple[PromptResult, list[TokenUpdate]]:
        """All outputs of the next request."""
        prompt, updates = None, list[TokenUpdate]()
        while not updates or updates[-1].finish_reason is None:
            message = self.receive()
            assert isinstance(message, StepOutputs)
            prompt = PromptResult(*message.prompts[0]) if message.prompts else prompt
            updates += [TokenUpdate(*item) for item in message.updates]
        assert prompt is not None
        return prompt, updates

    def close(self) -> None:
        """End the loop."""
        self.send(EngineCall(99, "shutdown"))
        self.thread.join(10)
        self.socket.close()
        self.context.term()


def request(number: int, **params: Any) -> AddRequest:
    """A request of a few tokens."""
    plain = SamplingParams(max_new_tokens=3, seed=1, ignore_eos=True).to_dict()
    return AddRequest(number, f"uid-{number}", [1, 2, 3], plain | params, time.monotonic(), None)
