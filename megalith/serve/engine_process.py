"""The engine process of a server: loads the model, and runs its engine for the HTTP process.

`python -m megalith.serve.engine_process` reads its settings as one line of JSON from standard
input, and ends when standard input is closed, so that it never outlives the HTTP process. With
several ranks it starts one process for each.
"""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from megalith.config.generation import SamplingParams
from megalith.config.serve import EngineConfig
from megalith.config.server import ServeRun
from megalith.config.tree import from_dict, to_dict
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError, RankError, UserError
from megalith.hf.convert import find_turn_end
from megalith.hf.folder import read_json
from megalith.hf.pretrained import Pretrained
from megalith.infer.build import build_engine
from megalith.infer.chat import select_template
from megalith.infer.engine import InferenceEngine
from megalith.infer.layout import build_generation_mesh, open_source
from megalith.infer.load import TextGenerator, load_text_generator
from megalith.infer.outputs import EngineCallback
from megalith.kernels.cpu_threads import keep_freed_memory
from megalith.launch.launcher import in_worker, run_workers, worker_main
from megalith.launch.worker import Worker, connect, disconnect, set_threads
from megalith.parallel.mesh import Mesh
from megalith.serve.engine_server import EngineServer
from megalith.serve.metrics import AccessLog, EngineMetrics
from megalith.serve.model_info import ModelInfo, freeze_objects
from megalith.serve.protocol import Codec, LoadFailed, Ready
from megalith.serve.transport import connect_engine_socket

_logger = logging.getLogger(__name__)

DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of generation_config.json that are sampling parameters of the same name and meaning."""

SETTINGS_VARIABLE = "MEGALITH_ENGINE_SETTINGS"
"""Environment variable of ranks with their `EngineSettings`."""

TIMEOUT_S = 600.0
"""Maximum time of a collective, after which the ranks fail."""

WARM_UP_TOKENS = 32
"""Context of the engine that generates before the first request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Settings of an engine process."""

    address: str
    source: str
    engine: dict[str, Any]
    """EngineConfig as plain data."""

    parallel: dict[str, Any]
    """InferenceParallelConfig as plain data."""

    served_model_name: str
    """Label of the metrics."""

    base: str | None = None
    dtype: str | None = None
    kernels: Any = "auto"
    """KernelSetting as plain data."""

    template: str | None = None
    log_requests: bool = False
    nproc: int = 1
    """Number of ranks."""

    num_replicas: int = 1
    """Replicas on this machine, which share the memory of CPUs."""

    identities: tuple[str, ...] = ("0",)
    """Name of each data-parallel rank at the socket of the HTTP process."""

    replica: int | None = None
    """Index of the first data-parallel rank among the replicas of the engine; None: there is one
    engine."""

    def read_run(self, device: torch.device) -> ServeRun:
        """Return the settings of the engine of this process; replicas share the memory of CPUs."""
        parts = {"engine": self.engine, "parallel": self.parallel, "kernels": self.kernels}
        run = from_dict(ServeRun, parts)
        if device.type != "cpu":
            return run
        cache = run.engine.cache
        share = cache.memory_fraction / self.num_replicas
        return replace(run, engine=replace(run.engine, cache=replace(cache, memory_fraction=share)))


def load_engine(
    settings: EngineSettings,
    run: ServeRun,
    source: Pretrained,
    mesh: Mesh,
    worker: Worker,
    callbacks: Sequence[EngineCallback],
) -> tuple[InferenceEngine, ModelInfo]:
    """Load this rank's shard of the model, and build its engine. Collective over all ranks.

    Raises:
        UserError: the model cannot be served.
    """
    name = settings.dtype or ("float32" if worker.device.type == "cpu" else "bfloat16")
    generator = load_text_generator(
        source,
        mesh,
        worker.device,
        getattr(torch, name),
        kernels=run.kernels,
        config=run.engine,
        parallel=run.parallel,
    )
    if worker.rank == 0:
        for warning in source.warnings():
            _logger.warning("%s: %s", source.path, warning)
    warm_up(generator, run.engine)
    engine = build_engine(generator, run.engine, callbacks=callbacks)
    if engine.grammars is not None:  # all ranks need it in the step of the first grammar
        engine.grammars.prepare()
    return engine, describe_model(source, generator.tokenizer, engine, settings.template)


def warm_up(generator: TextGenerator, config: EngineConfig) -> None:
    """Generate a few tokens with an engine of its own, so that kernels are compiled and selected
    before the first request."""
    length = min(WARM_UP_TOKENS, generator.model.config.max_seq_len)
    cache = replace(config.cache, num_blocks=2 * WARM_UP_TOKENS)
    config = replace(config, cache=cache, max_model_len=length, max_adapters=0, adapters=())
    engine = build_engine(generator, config)
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
    turn_end: tuple[frozenset[int], tuple[str, ...]] = (frozenset(), ())
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
    adapters = engine.runner.adapters
    return ModelInfo(
        path=str(source.path),
        tokenizer=to_dict(source.tokenizer),
        template=template,
        template_error=template_error,
        turn_end_ids=sorted(turn_end[0]),
        turn_end_texts=list(turn_end[1]),
        max_model_len=engine.max_model_len,
        max_prompt_characters=count_prompt_characters(tokenizer, engine.max_model_len),
        vocab_size=engine.model_config.vocab_size,
        hidden_size=engine.model_config.hidden_size,
        max_num_seqs=engine.config.max_num_seqs,
        generation_defaults=read_generation_defaults(source),
        adapters={} if adapters is None else adapters.paths,
        adapter_fingerprints={} if adapters is None else adapters.fingerprints,
        block_size=engine.runner.cache.block_size if engine.config.cache.prefix_caching else None,
    )


def count_prompt_characters(tokenizer: Tokenizer, max_model_len: int) -> int | None:
    """Return the number of characters that the context can hold, if each token is the longest one;
    None: the bytes of the tokens are not known."""
    try:
        texts = tokenizer.token_bytes()
    except DataError:
        return None
    sizes = [len(text) for text in (*texts, *tokenizer.specials) if text is not None]
    return max_model_len * max(sizes, default=1)


def read_generation_defaults(source: Pretrained) -> dict[str, Any]:
    """Return the sampling parameters of the model's generation_config.json."""
    file = source.generation_file()
    if file is None:
        return {}
    values = read_json(file)
    return {name: values[name] for name in DEFAULTS if values.get(name) is not None}


def main() -> int:
    """Run an engine process, or start one for each rank."""
    _ignore_signals()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    if in_worker(os.environ):
        settings = EngineSettings(**json.loads(os.environ[SETTINGS_VARIABLE]))
        return worker_main(lambda: run_rank(settings), os.environ)
    line = sys.stdin.readline()
    settings = EngineSettings(**json.loads(line))
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    try:
        if settings.nproc == 1:
            return run_rank(settings)
        return run_workers(
            [],
            settings.nproc,
            command=(sys.executable, "-m", "megalith.serve.engine_process"),
            environment=os.environ | {SETTINGS_VARIABLE: line},
        )
    except UserError as error:
        socket = connect_engine_socket(settings.address, settings.identities[0])
        socket.send(Codec().encode(LoadFailed(str(error))))
        socket.close()
        return 2
    except RankError as error:
        _logger.error("%s", error)
        return 1


def run_rank(settings: EngineSettings) -> int:
    """Load this rank's shard of the model and serve until the shutdown command.

    Raises:
        UserError: the model cannot be served.
    """
    _ignore_signals()
    worker = Worker.from_environment(os.environ)
    run = settings.read_run(worker.device)
    ranks = connect(worker, timeout_seconds=TIMEOUT_S)
    source = open_source(settings.source, worker.world, base=settings.base, parallel=run.parallel)
    set_threads(worker, None)
    if worker.device.type == "cpu":
        keep_freed_memory()
    mesh = build_generation_mesh(source.model, run.parallel, rank=worker.rank, world=worker.world)
    dp_rank, replica = mesh.dp.rank, settings.replica
    metrics = EngineMetrics(
        settings.served_model_name,
        AccessLog(log_prompts=settings.log_requests),
        replica=None if replica is None else replica + dp_rank,
    )
    has_socket = mesh.tp.rank == mesh.pp.rank == 0
    callbacks: list[EngineCallback] = [metrics, metrics.access_log] if has_socket else []
    engine, info = load_engine(settings, run, source, mesh, worker, callbacks)
    identity = settings.identities[dp_rank]
    socket = connect_engine_socket(settings.address, identity) if has_socket else None
    server = EngineServer(
        engine, socket, metrics, ranks, dp_rank=dp_rank, reports_cache=replica is not None
    )
    if worker.rank == 0:
        server.send(Ready(asdict(info)))
    freeze_objects()
    server.run()
    engine.runner.close()
    if socket is not None:
        socket.close()
    disconnect(worker)
    return 0


def _ignore_signals() -> None:
    """Ignore the signals at which the HTTP process drains: a terminal or a service manager sends
    them to all processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _exit_with_parent() -> None:
    """End this process when standard input is closed."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
