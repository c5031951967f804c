"""Endpoints about the server: models, health, readiness, version, metrics and control."""

from collections.abc import Mapping
from typing import Any

from megalith import __version__
from megalith.errors import ConfigError
from megalith.plan.serving.engine_state import Suspension
from megalith.serve.errors import ApiError, invalid
from megalith.serve.metrics import merge_metrics
from megalith.serve.model_info import ServedModel
from megalith.serve.sampling_fields import read_bool
from megalith.serve.state import RequestContext, ServerState


async def list_models(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """GET /v1/models: the served models, the base model first."""
    models = [state.check_ready(), *state.adapters.values()]
    return {"object": "list", "data": [_describe(state, model) for model in models]}


async def get_model(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """GET /v1/models/NAME: one model.

    Raises:
        ApiError: 404, there is no such model.
    """
    return _describe(state, state.find_model(context.path.partition("/models/")[2]))


def _describe(state: ServerState, model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "megalith",
        "root": model.adapter_path or model.info.path,
        "parent": None if model.adapter is None else state.check_ready().name,
        "max_model_len": model.info.max_model_len,
        "weight_version": state.weight_version,
    }


async def get_health(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """GET /health: liveness, whether both processes run.

    Raises:
        ApiError: 503, the engine process has ended.
    """
    if state.client.failed is not None:
        raise state.client.failed
    return {"status": "ok"}


async def get_ready(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """GET /ready: whether requests are accepted now.

    Raises:
        ApiError: 503, the model is loading, or the server is paused, suspended or shutting down, or
            no replica answers.
    """
    state.check_ready()
    states = {stats["state"] for stats in await state.client.poll_replicas("stats")}
    if "suspended" in states:
        raise ApiError(
            503,
            "the server is suspended: requests wait until POST /wake_up, and then POST /resume.",
        )
    if "paused" in states:
        raise ApiError(503, "the server is paused: requests wait until POST /resume.")
    return {"status": "ready"}


async def get_version(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """GET /version: the version of this program."""
    return {"version": __version__}


async def render_metrics(state: ServerState) -> str:
    """Return the metrics of all processes; those of the HTTP process while no engine is ready.
    Replicas that do not respond are left out."""
    texts: list[str] = []
    if state.client.router.replicas and state.client.failed is None:
        texts = [result["text"] for result in await state.client.poll_replicas("metrics")]
    return merge_metrics(texts) + state.metrics.render()


async def reset_prefix_cache(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /reset_prefix_cache: later requests reuse no earlier keys and values.

    Raises:
        ApiError: 404, the control endpoints are off.
    """
    return await _call_admin(state, context, "reset_prefix_cache")


async def pause(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /pause: no step is executed until POST /resume. Requests in flight and new ones wait;
    they can be aborted, and end when their deadlines pass.

    Raises:
        ApiError: 404, the control endpoints are off; 503, the server is shutting down.
    """
    return await _call_admin(state, context, "pause")


async def resume(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /resume: continue after POST /pause.

    Raises:
        ApiError: 404, the control endpoints are off; 409, the server is suspended.
    """
    return await _call_admin(state, context, "resume")


async def suspend(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /suspend: pause, and release device memory until POST /wake_up.

    Raises:
        ApiError: 404, the control endpoints are off; 400, the fields are invalid; 409, the server
            is suspended with other options; 503, it is shutting down, or the host memory does not
            suffice.
    """
    _check_admin(state, context)
    state.check_ready()
    arguments: dict[str, Any] = {
        "kv_cache": _read_text({"kv_cache": "offload"} | context.body, "kv_cache", "offload"),
        "offload_weights": read_bool(context.body, "offload_weights"),
    }
    try:
        Suspension(**arguments).check()
    except ConfigError as error:
        raise invalid(str(error), "kv_cache") from error
    await state.client.call("suspend", arguments, timeout_s=None)
    return {"status": "ok"}


async def wake_up(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /wake_up: restore the device memory after POST /suspend. The server is paused then.

    Raises:
        ApiError: 404, the control endpoints are off; 503, the device memory does not suffice.
    """
    _check_admin(state, context)
    state.check_ready()
    await state.client.call("wake_up", timeout_s=None)
    return {"status": "ok"}


async def restart_replica(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /restart_replica: replace a replica by a process that reads the model again, after its
    requests are finished. One after the other, all replicas get new weights while requests run.

    Raises:
        ApiError: 404, the control endpoints are off; 400, there is no such replica; 409, it is not
            ready; 500, the model cannot be loaded.
    """
    _check_admin(state, context)
    state.check_ready()
    replica, num_replicas = context.body.get("replica"), state.client.num_replicas
    if len(state.client.groups) == 1:
        raise invalid(
            "replica: this server has one engine. Start it with --parallel.dp 2 or "
            "more, and --parallel.dp_replicate unset, or 2 or more.",
            "replica",
        )
    if type(replica) is not int or not 0 <= replica < num_replicas:
        raise invalid(
            f"replica={replica!r:.60}: the replicas are 0 to {num_replicas - 1}. Use one of them.",
            "replica",
        )
    assert state.supervisor is not None, "a server has one"
    await state.supervisor.restart_replica(replica)
    return {"status": "ok"}


async def load_lora_adapter(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /v1/load_lora_adapter: serve the LoRA adapter in a folder of the server under a name.
    Requests in flight of the same name finish with the weights that they have.

    Raises:
        ApiError: 404, the control endpoints are off; 400, the fields are invalid, the folder cannot
            be used, or the server holds no adapters; 429, all adapters have requests in flight.
    """
    _check_admin(state, context)
    model = state.check_ready()
    name = _read_text(context.body, "lora_name", "sql")
    path = _read_text(context.body, "lora_path", "runs/lora_sql")
    if name == model.name:
        raise invalid(
            f"lora_name={name!r} is the name of the base model. Use another name.", "lora_name"
        )
    arguments = {"lora_name": name, "lora_path": path}
    await state.client.call("load_adapter", arguments, timeout_s=None)
    state.add_adapter(name, path)
    return {"status": "ok"}


async def unload_lora_adapter(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /v1/unload_lora_adapter: end serving an adapter; its requests in flight finish.

    Raises:
        ApiError: 404, the control endpoints are off, or there is no such adapter; 400, the fields
            are invalid, or the server holds no adapters.
    """
    _check_admin(state, context)
    state.check_ready()
    name = _read_text(context.body, "lora_name", "sql")
    await state.client.call("unload_adapter", {"lora_name": name})
    state.adapters.pop(name, None)
    return {"status": "ok"}


async def update_weights(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /update_weights: replace the weights by those in a folder of the server, on all
    replicas.

    Raises:
        ApiError: 404, the control endpoints are off; 400, the fields are invalid, or the weights
            cannot be used.
    """
    _check_admin(state, context)
    state.check_ready()
    path = _read_text(context.body, "path", "runs/rl")
    mode = _read_text({"mode": "drain"} | context.body, "mode", "drain")
    arguments = {"path": path, "mode": mode}
    await state.client.call("update_weights", arguments, timeout_s=None)
    state.set_weights(path)
    return {"status": "ok", "weight_version": state.weight_version}


def _read_text(body: Mapping[str, Any], name: str, example: str) -> str:
    """Return a text of a request.

    Raises:
        ApiError: it is missing, empty or no text.
    """
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise invalid(f"{name}={value!r:.60} must be a text, such as {example!r}.", name)
    return value


async def abort(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """POST /abort: end requests in flight; their responses have the finish reason abort.

    Raises:
        ApiError: 404, the control endpoints are off, or no request has the id; 400, the body does
            not say which requests to end.
    """
    _check_admin(state, context)
    request_id, is_all = context.body.get("request_id"), read_bool(context.body, "all")
    if is_all == (request_id is not None) or not isinstance(request_id, str | None):
        raise invalid(
            f"request_id={request_id!r:.60} with all={is_all}: send the X-Request-Id of a request "
            'as {"request_id": "..."}, or {"all": true}.',
            "request_id",
        )
    num_aborted = state.client.abort(request_id)
    if not num_aborted and not is_all:
        raise ApiError(
            404,
            f"request_id={request_id!r:.140}: no request in flight has this X-Request-Id.",
            "request_id",
        )
    return {"status": "ok", "num_aborted": num_aborted}


async def _call_admin(state: ServerState, context: RequestContext, command: str) -> dict[str, Any]:
    _check_admin(state, context)
    state.check_ready()
    await state.client.call(command)
    return {"status": "ok"}


def _check_admin(state: ServerState, context: RequestContext) -> None:
    if not state.config.enable_admin:
        raise ApiError(404, f"{context.path} needs the server option --enable-admin.")
