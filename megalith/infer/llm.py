"""`LLM` and `AsyncLLM`: generation with a model by name, without sockets or other processes."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeAlias, TypeVar

import torch

from megalith.config.generation import SamplingParams, sampling_problems
from megalith.config.kernels import KernelSetting
from megalith.config.serve import EngineConfig, Pooling
from megalith.data.chat_template import Message, find_template
from megalith.data.tokenizer import encode_prompt
from megalith.errors import CheckpointError, ConfigError, DataError, UserError, raise_all
from megalith.hf.convert import find_turn_end
from megalith.infer.build import build_engine
from megalith.infer.chat import select_template
from megalith.infer.engine import InferenceEngine
from megalith.infer.layout import open_source
from megalith.infer.load import TextGenerator, load_text_generator
from megalith.infer.outputs import EngineCallback, RequestOutput, TokenOutput
from megalith.infer.refit import UpdateMode, WeightSource
from megalith.infer.stopping_criteria import add_turn_end
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.serving.engine_state import InvalidStateError, KVCacheMode

logger = logging.getLogger(__name__)

T = TypeVar("T")

Prompt: TypeAlias = str | Sequence[int]
"""A text, or token ids, which are used unchanged."""

DEFAULT_PARAMS = SamplingParams()
DEFAULT_CONFIG = EngineConfig()


def load_generator(
    source: str | Path,
    *,
    dtype: torch.dtype | None = None,
    kernels: KernelSetting = "auto",
    base: str | None = None,
    config: EngineConfig = DEFAULT_CONFIG,
) -> TextGenerator:
    """Load a run, a checkpoint or a Hugging Face folder for generation in this process.

    `dtype`: default bf16 on a GPU, fp32 on a CPU; `base`: base model of adapters; `config`: see
    `load_text_generator`.

    Raises:
        CheckpointError, ConfigError, DataError: the source cannot be read or cannot generate text.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device("cpu") if accelerator is None else accelerator
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    opened = open_source(str(source), 1, base=base)
    return load_text_generator(
        opened,
        build_single_rank_mesh(),
        device,
        dtype,
        kernels=kernels,
        config=config,
    )


class LLM:
    """Generates text from lists of prompts.

    Example: `LLM("runs/sft_tiny").generate(["2 + 2 ="])[0].outputs[0].text`
    """

    def __init__(
        self,
        model: str | Path | TextGenerator,
        *,
        config: EngineConfig = DEFAULT_CONFIG,
        dtype: torch.dtype | None = None,
        kernels: KernelSetting = "auto",
        callbacks: Sequence[EngineCallback] = (),
    ) -> None:
        """`model`: a run, a checkpoint, a Hugging Face folder, or a loaded model; `dtype` and
        `kernels`: of a model that is loaded here."""
        if not isinstance(model, TextGenerator):
            model = load_generator(model, dtype=dtype, kernels=kernels, config=config)
        self.generator = model
        self.engine = build_engine(model, config, callbacks=callbacks)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] = DEFAULT_PARAMS,
        *,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate from one prompt or several; returns a result for each, in order.

        `params` and `adapter`, the name of a loaded adapter, None for the base model: for all
        prompts, or one for each.

        Raises:
            ConfigError: sampling parameters are invalid, or they or the adapters are not as many as
                the prompts.
            DataError: a prompt or an adapter is invalid; its index is named.
        """
        pairs = pair_prompts(prompts, params)
        return self._run(pairs, pair_adapters(adapter, len(pairs)), None)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling = "last"
    ) -> list[list[float]]:
        """Return the embedding of one prompt or several, in order: the hidden state after the final
        norm of the last token, or the mean over all tokens, scaled to length 1.

        Raises:
            CheckpointError: a hidden state is zero, NaN or infinite, or its computation failed.
            DataError: a prompt is invalid; its index is named.
        """
        pairs = pair_prompts(prompts, SamplingParams(max_new_tokens=0))
        outputs = self._run(pairs, [None] * len(pairs), pooling)
        embeddings = []
        for index, output in enumerate(outputs):
            if output.embedding is None:
                raise CheckpointError(f"prompts[{index}]: {output.outputs[0].error}")
            embeddings.append(output.embedding)
        return embeddings

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load the LoRA adapter in a folder under a name, or replace the weights of a name.

        Raises:
            CheckpointError: it cannot be read, or belongs to another model.
            ConfigError: the name is empty, or engine.max_adapters is 0.
        """
        self.engine.load_adapter(name, str(path))

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter.

        Raises:
            ConfigError: engine.max_adapters is 0.
            DataError: there is none of this name.
        """
        self.engine.unload_adapter(name)

    def update_weights(self, source: WeightSource, *, mode: UpdateMode = "drain") -> None:
        """Replace the weights by those of a checkpoint, a Hugging Face folder, full tensors by
        parameter name, or a training mesh; see `InferenceEngine.update_weights`.

        Raises:
            CheckpointError: the new weights cannot be used.
            ConfigError: the mode is unknown, or adapters are loaded.
        """
        self.engine.update_weights(source, mode=mode)

    def suspend(self, *, kv_cache: KVCacheMode = "offload", offload_weights: bool = False) -> None:
        """Release device memory until `wake_up`; see `InferenceEngine.suspend`."""
        self.engine.suspend(kv_cache=kv_cache, offload_weights=offload_weights)

    def wake_up(self) -> None:
        """Restore the device memory after `suspend`; see `InferenceEngine.wake_up`."""
        self.engine.wake_up()

    def _run(
        self,
        requests: Sequence[tuple[Prompt, SamplingParams]],
        adapters: Sequence[str | None],
        pooling: Pooling | None,
    ) -> list[RequestOutput]:
        """Process requests to their end.

        Raises:
            InvalidStateError: the engine is suspended.
        """
        if self.engine.is_suspended:
            raise InvalidStateError(
                "the engine is suspended, so it generates nothing. Call wake_up first."
            )
        outputs: list[RequestOutput] = []
        self.engine.start_round()
        try:
            for index, ((prompt, params), adapter) in enumerate(
                zip(requests, adapters, strict=True)
            ):
                try:
                    output = self._add_request(prompt, params, pooling, adapter)
                except UserError as error:
                    raise type(error)(f"prompts[{index}]: {error}") from error
                outputs.append(output)
                ids = output.prompt_token_ids
                _warn_if_clamped(self.engine, ids, params, f"prompts[{index}]")
            while self.engine.has_unfinished:
                self.engine.step()
        except BaseException:
            for output in outputs:
                self.engine.abort(output.request_id)
            raise
        return outputs

    def _add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        pooling: Pooling | None,
        adapter: str | None,
    ) -> RequestOutput:
        """Add a request; its result grows with every step."""
        ids = encode_prompt(prompt, self.generator.tokenizer) if isinstance(prompt, str) else prompt
        number = self.engine.add_request(ids, params, pooling=pooling, adapter=adapter)
        output = self.engine.output_of(number)
        output.prompt = prompt if isinstance(prompt, str) else None
        return output

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        template_name: str | None = None,
    ) -> RequestOutput:
        """Generate the next message of a conversation.

        `template_name`: a built-in chat template or a Jinja file; unset: that of the run that tuned
        the model, else the tokenizer's.

        Raises:
            ConfigError: the sampling parameters are invalid.
            DataError: there is no template, or it rejects the messages.
        """
        tokenizer, source = self.generator.tokenizer, self.generator.source
        if source is None:
            template = find_template(template_name, tokenizer, None, setting="template_name")
        else:
            template = select_template(source, tokenizer, template_name)
        ids = tokenizer.encode_marked(template.render(list(messages), prompt=True))
        return self.generate([ids], add_turn_end(params, *find_turn_end(template, tokenizer)))[0]


def pair_prompts(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> list[tuple[Prompt, SamplingParams]]:
    """Return (prompt, parameters) of every request.

    Raises:
        ConfigError: there are not as many parameters as prompts, or one is no `SamplingParams`.
        DataError: a prompt is neither text nor a list of ids; its index is named.
    """
    if not _is_list(prompts) and not isinstance(prompts, str):
        raise DataError(
            f"prompts={prompts!r:.60} is a {type(prompts).__name__}: must be text, a list of token "
            'ids, or a list of prompts, such as ["text"].'
        )
    several: list[Prompt]
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int)):
        several = [prompts]  # type: ignore[list-item]  # narrowed by the elements
    else:
        several = list(prompts)  # type: ignore[arg-type]
    for index, prompt in enumerate(several):
        if not isinstance(prompt, str) and not (
            _is_list(prompt) and all(type(token) is int for token in prompt)
        ):
            raise DataError(
                f"prompts[{index}]={prompt!r:.60} is a {type(prompt).__name__}: must be text or a "
                "list of token ids, such as [17, 4]."
            )
    if isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in several]
    if not _is_list(params):
        _check_is_params(params, "params")
    if len(params) != len(several):
        raise ConfigError(
            f"params has {len(params)} entries for {len(several)} prompts. Pass one SamplingParams "
            "for all prompts, or one for each."
        )
    for index, own_params in enumerate(params):
        _check_is_params(own_params, f"params[{index}]")
    return list(zip(several, params, strict=True))


def pair_adapters(
    adapter: str | Sequence[str | None] | None, num_prompts: int
) -> Sequence[str | None]:
    """Return the adapter of every prompt.

    Raises:
        ConfigError: there are not as many as prompts.
    """
    if adapter is None or isinstance(adapter, str):
        return [adapter] * num_prompts
    if len(adapter) != num_prompts:
        raise ConfigError(
            f"adapter has {len(adapter)} entries for {num_prompts} prompts. Pass one name for all "
            "prompts, or one for each."
        )
    return adapter


def _is_list(value: object) -> bool:
    """Return whether a value is a sequence, but no text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _check_is_params(value: object, name: str) -> None:
    """Check the type of sampling parameters.

    Raises:
        ConfigError: it is another one.
    """
    if not isinstance(value, SamplingParams):
        raise ConfigError(
            f"{name}={value!r:.60} is a {type(value).__name__}: must be SamplingParams. Use for "
            "example SamplingParams(max_new_tokens=64)."
        )


def _warn_if_clamped(
    engine: InferenceEngine, prompt_ids: Sequence[int], params: SamplingParams, name: str
) -> None:
    """Warn if the context length does not suffice for `max_new_tokens`."""
    limit = engine.max_model_len - len(prompt_ids)
    if params.max_new_tokens is not None and params.max_new_tokens > limit:
        logger.warning(
            "%s: max_new_tokens=%d is reduced to %d, because the context is %d tokens including "
            "the prompt of %d. Use a shorter prompt or fewer new tokens.",
            name,
            params.max_new_tokens,
            limit,
            engine.max_model_len,
            len(prompt_ids),
        )


class _Command(Protocol):
    """Runs on the engine's thread, between two steps."""

    def __call__(self) -> None: ...


@dataclass(slots=True)
class _Stream:
    """Outputs of a request on their way to the event loop."""

    loop: asyncio.AbstractEventLoop
    outputs: "asyncio.Queue[TokenOutput | BaseException]"
    num_unfinished: int

    def put(self, item: TokenOutput | BaseException) -> bool:
        """Pass an output to the event loop; called by the engine's thread. False: the loop is
        closed."""
        return _call_soon(self.loop, partial(self.outputs.put_nowait, item))


class AsyncLLM:
    """Generates text for the tasks of an event loop; steps run on a thread of their own.

    An idle engine waits for requests without polling. A cancelled task aborts its request.
    """

    def __init__(
        self,
        model: str | Path | TextGenerator,
        *,
        config: EngineConfig = DEFAULT_CONFIG,
        dtype: torch.dtype | None = None,
        kernels: KernelSetting = "auto",
        callbacks: Sequence[EngineCallback] = (),
    ) -> None:
        """Arguments as of `LLM`."""
        self._llm = LLM(model, config=config, dtype=dtype, kernels=kernels, callbacks=callbacks)
        self.engine = self._llm.engine
        """Called by the engine's thread only, until `close`."""
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._streams: dict[int, _Stream] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="megalith-engine", daemon=True)
        self._thread.start()

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        adapter: str | None = None,
    ) -> AsyncIterator[TokenOutput]:
        """Yield the outputs of a request as they are generated; aborts it if the consumer stops.

        `adapter`: name of a loaded adapter; None: the base model.

        Raises:
            ConfigError, DataError: the request is invalid, or the engine is closed.
        """
        stream, request = await self._submit(prompt, params, adapter)
        async with aclosing(self._iterate(stream, request)) as outputs:
            async for output in outputs:
                yield output

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams = DEFAULT_PARAMS,
        *,
        adapter: str | None = None,
    ) -> RequestOutput:
        """Return the result of a request when all its choices are finished; `adapter`: as of
        `stream`."""
        stream, request = await self._submit(prompt, params, adapter)
        async for _ in self._iterate(stream, request):
            pass
        return request

    async def _iterate(
        self, stream: _Stream, request: RequestOutput
    ) -> AsyncGenerator[TokenOutput, None]:
        """Yield the outputs of a stream; abort its request if the consumer stops."""
        try:
            while stream.num_unfinished:
                item = await stream.outputs.get()
                if isinstance(item, BaseException):
                    raise item
                stream.num_unfinished -= item.finish_reason is not None
                yield item
        finally:
            if stream.num_unfinished:
                self.abort(request.request_id)

    async def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter between two steps, which wait for it; see `LLM.load_adapter`."""
        await self._call(partial(self.engine.load_adapter, name, str(path)))

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; its requests in flight finish. See `LLM.unload_adapter`."""
        await self._call(partial(self.engine.unload_adapter, name))

    async def update_weights(self, source: WeightSource, *, mode: UpdateMode = "drain") -> None:
        """Replace the weights between two steps; `drain`: streams continue after the update. See
        `LLM.update_weights`."""
        await self._call(partial(self.engine.update_weights, source, mode=mode))

    async def suspend(
        self, *, kv_cache: KVCacheMode = "offload", offload_weights: bool = False
    ) -> None:
        """Release device memory until `wake_up`, between two steps. Streams and new requests wait.
        See `InferenceEngine.suspend`."""
        suspend = partial(self.engine.suspend, kv_cache=kv_cache, offload_weights=offload_weights)
        await self._call(suspend)

    async def wake_up(self) -> None:
        """Restore the device memory after `suspend`; streams continue. See
        `InferenceEngine.wake_up`."""
        await self._call(self.engine.wake_up)

    async def _call(self, call: Callable[[], None]) -> None:
        """Run a call on the engine's thread, between two steps, and raise its error."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            try:
                call()
            except Exception as error:  # raised in the task that called
                _call_soon(loop, partial(_set_exception, done, error))
            else:
                _call_soon(loop, partial(_set_result, done, None))

        self._put(run)
        await done

    def abort(self, request_id: int) -> None:
        """End a request before the next step; unknown and finished requests are ignored."""
        self._commands.put(partial(self._abort_now, request_id))

    def close(self) -> None:
        """Abort all requests and end the thread."""
        with self._lock:
            is_first, self._closed = not self._closed, True
            if is_first:
                self._commands.put(None)
        self._thread.join()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _submit(
        self, prompt: Prompt, params: SamplingParams, adapter: str | None
    ) -> tuple[_Stream, RequestOutput]:
        """Add a request on the engine's thread; returns its stream and its result."""
        arrival_time = time.monotonic()
        ((prompt, params),) = pair_prompts([prompt], params)
        generator = self._llm.generator
        ids: Sequence[int]
        if isinstance(prompt, str):  # a long text would delay the other tasks
            ids = await asyncio.to_thread(encode_prompt, prompt, generator.tokenizer)
        else:
            ids = prompt
        structure, grammars = params.structured_outputs, self.engine.grammars
        if structure is not None and grammars is not None:
            raise_all(sampling_problems(params, vocab_size=None))
            await asyncio.to_thread(grammars.compile, structure)  # a step would wait for it
        loop = asyncio.get_running_loop()
        added: asyncio.Future[RequestOutput] = loop.create_future()
        stream = _Stream(loop, asyncio.Queue(), params.n)

        def add() -> None:
            try:
                number = self.engine.add_request(
                    ids, params, arrival_time=arrival_time, adapter=adapter
                )
            except Exception as error:  # raised in the task that sent the request
                _call_soon(loop, partial(_set_exception, added, error))
                return
            _warn_if_clamped(self.engine, ids, params, f"request {number}")
            output = self.engine.output_of(number)
            output.prompt = prompt if isinstance(prompt, str) else None
            self._streams[number] = stream
            if not _call_soon(loop, partial(_set_result, added, output)):
                self._abort_now(number)

        self._put(add)
        try:
            # A cancelled task must not cancel the future, from which the request is known.
            return stream, await asyncio.shield(added)
        except asyncio.CancelledError:
            added.add_done_callback(self._abort_unclaimed)
            raise

    def _put(self, command: _Command) -> None:
        """Pass a command to the engine's thread.

        Raises:
            ConfigError: the engine is closed.
        """
        with self._lock:
            if self._closed:
                raise ConfigError("the engine is closed: create a new AsyncLLM.")
            self._commands.put(command)

    def _abort_unclaimed(self, added: "asyncio.Future[RequestOutput]") -> None:
        if not added.cancelled() and added.exception() is None:
            self.abort(added.result().request_id)

    def _run(self) -> None:
        """Execute commands and steps until `close`."""
        while True:
            if not self.engine.can_step and not self._execute(self._wait()):
                return
            while not self._commands.empty():
                if not self._execute(self._commands.get()):
                    return
            try:
                self._deliver(self.engine.step())
            except Exception as error:
                logger.exception("the engine failed; all requests end")
                for request_id, stream in list(self._streams.items()):
                    stream.put(error)
                    self.engine.abort(request_id)
                self._streams.clear()

    def _wait(self) -> _Command | None:
        """Return the next command; one without effect if a deadline of a suspended engine passes
        before it."""
        deadline = self.engine.next_deadline
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return self._commands.get(timeout=timeout)
        except queue.Empty:
            return _do_nothing

    def _execute(self, command: _Command | None) -> bool:
        """Execute a command; False ends the thread."""
        if command is not None:
            command()
            return True
        for request_id in list(self._streams):
            self._abort_now(request_id)
        return False

    def _abort_now(self, request_id: int) -> None:
        """Abort a request on the engine's thread."""
        self._deliver(self.engine.abort(request_id))

    def _deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Pass outputs to the streams of their requests."""
        closed: set[int] = set()
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and not stream.put(output):
                closed.add(output.request_id)
        for request_id in {output.request_id for output in outputs}:
            if request_id in closed or not self.engine.is_unfinished(request_id):
                self._streams.pop(request_id, None)
        for request_id in closed:  # their outputs have no reader
            self.engine.abort(request_id)


def _do_nothing() -> None:
    """Command that lets the engine end requests whose deadline has passed."""


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> bool:
    """Run a call on an event loop; False if the loop is closed."""
    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        return False
    return True


def _set_result(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
