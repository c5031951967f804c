"""State of the HTTP process: the model, the engine, and the admission of requests."""

import time
from dataclasses import dataclass, field, replace
from typing import Any

from megalith.config.server import ServeConfig
from megalith.serve.client import EngineClient
from megalith.serve.errors import ApiError
from megalith.serve.generation import ChunkWriter
from megalith.serve.metrics import HttpMetrics
from megalith.serve.model_info import ModelInfo, ServedModel, build_served_model
from megalith.serve.supervisor import EngineSupervisor
from megalith.serve.token_text import TokenTexts

RETRY_AFTER_SECONDS = 1
"""Advice to clients when the queue is full (heuristic)."""


@dataclass(slots=True)
class ServerState:
    """What the endpoints share."""

    config: ServeConfig
    client: EngineClient
    metrics: HttpMetrics
    supervisor: EngineSupervisor | None = None
    """Of a server with control endpoints."""

    model: ServedModel | None = None
    """None: the engine processes still load it."""

    adapters: dict[str, ServedModel] = field(default_factory=dict)
    """The model with each LoRA adapter, by name."""

    texts: TokenTexts | None = None
    is_draining: bool = False
    weight_version: int = 0
    """Number of weight updates so far."""

    def set_model(self, info: ModelInfo) -> None:
        """Set the loaded model."""
        self.model = build_served_model(self.config.served_model_name, info)
        self.texts = TokenTexts(self.model.tokenizer)
        for name, path in info.adapters.items():
            self.add_adapter(name, path)

    def set_weights(self, path: str) -> None:
        """Record an update of the weights from a folder."""
        assert self.model is not None, "its weights were updated"
        self.weight_version += 1
        self.model = replace(self.model, info=replace(self.model.info, path=path))

    def add_adapter(self, name: str, path: str) -> None:
        """Serve a loaded LoRA adapter under its name."""
        assert self.model is not None, "it is the base"
        self.adapters[name] = replace(
            self.model, name=name, adapter_path=path, created=int(time.time())
        )

    def check_ready(self) -> ServedModel:
        """Return the model.

        Raises:
            ApiError: 503, it is loading, no replica is ready, or the server is shutting down.
        """
        if self.client.failed is not None:
            raise self.client.failed
        if self.is_draining:
            raise ApiError(503, "the server is shutting down. Use another one, or try later.")
        if self.model is None:
            raise ApiError(
                503,
                "the model is loading. Try again when GET /ready has status 200.",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
        self.client.check_available()
        return self.model

    def find_model(self, name: Any) -> ServedModel:  # JSON
        """Return the model that a request names: the base model, or an adapter of it.

        Raises:
            ApiError: 404, there is no such model; 503, it is not ready.
        """
        model = self.check_ready()
        if name is None:
            raise ApiError(400, f"model is missing. Use {model.name!r}.", "model")
        if name == model.name:
            return model
        if not isinstance(name, str) or name not in self.adapters:
            names = ", ".join(map(repr, [model.name, *self.adapters]))
            raise ApiError(
                404,
                f"model={name!r:.100}: this server has no such model. Use {names}.",
                "model",
                "model_not_found",
            )
        return self.adapters[name]

    def token_texts(self) -> TokenTexts:
        """Return the texts of the model's tokens."""
        assert self.texts is not None, "set with the model"
        return self.texts

    def check_capacity(self, num_sequences: int, num_prompt_tokens: int) -> None:
        """Check that the queue has room for more sequences.

        Raises:
            ApiError: 429, the queue is full; 400, the request never fits.
        """
        model = self.check_ready()
        config, client = self.config, self.client
        if num_sequences > config.max_queue:
            raise ApiError(
                400,
                f"the request has {num_sequences} sequences (prompts times n), but the queue "
                f"(--max-queue) has {config.max_queue}. Send several smaller requests.",
                "n",
            )
        limit = model.info.max_num_seqs * client.num_replicas + config.max_queue
        if client.num_sequences + num_sequences > limit:
            self._reject("queue_full", f"the queue is full ({client.num_sequences} sequences)")
        total = client.num_prompt_tokens + num_prompt_tokens
        if client.num_sequences and total > config.max_queue_tokens:
            self._reject(
                "queue_tokens", f"the queue is full ({client.num_prompt_tokens} prompt tokens)"
            )

    def _reject(self, reason: str, message: str) -> None:
        self.metrics.count_rejected(reason)
        raise ApiError(
            429,
            f"{message}. Try again later.",
            code=reason,
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
        )


@dataclass(frozen=True, slots=True)
class RequestContext:
    """An HTTP request, as endpoints see it."""

    request_id: str
    """Value of X-Request-Id: the client's, or a new one."""

    path: str
    body: dict[str, Any] = field(default_factory=dict)  # JSON
    writer: ChunkWriter | None = None
    """Sends parts of a streamed response; None: the HTTP server has none."""
