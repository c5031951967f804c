"""Endpoints about the server: models, health, readiness, version, metrics and control."""

from typing import Any

from megalith import __version__
from megalith.serve.errors import ApiError
from megalith.serve.model_info import ServedModel
from megalith.serve.state import RequestContext, ServerState


async def list_models(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """GET /v1/models: the served models."""
    return {"object": "list", "data": [_describe(state.check_ready())]}


async def get_model(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """GET /v1/models/NAME: one model.

    Raises:
        ApiError: 404, there is no such model.
    """
    return _describe(state.find_model(context.path.partition("/models/")[2]))


def _describe(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "megalith",
        "root": model.info.path,
        "parent": None,
        "max_model_len": model.info.max_model_len,
    }


async def get_health(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """GET /health: whether the processes live.

    Raises:
        ApiError: 503, the engine process has ended.
    """
    if state.client.failed is not None:
        raise state.client.failed
    return {"status": "ok"}


async def get_ready(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """GET /ready: whether requests are accepted now.

    Raises:
        ApiError: 503, the model is loading, or the server is shutting down.
    """
    state.check_ready()
    await state.client.call("stats")
    return {"status": "ready"}


async def get_version(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """GET /version: the version of this program."""
    return {"version": __version__}


async def render_metrics(state: ServerState) -> str:
    """Return the metrics of both processes; while the model loads, those of the HTTP process."""
    engine = ""
    if state.model is not None and state.client.failed is None:
        engine = (await state.client.call("metrics"))["text"]
    return engine + state.metrics.render()


async def reset_prefix_cache(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /reset_prefix_cache: later requests reuse no earlier keys and values.

    Raises:
        ApiError: 404, the control endpoints are off.
    """
    if not state.config.enable_admin:
        raise ApiError(404, "/reset_prefix_cache needs the server option --enable-admin.")
    await state.client.call("reset_prefix_cache")
    return {"status": "ok"}
