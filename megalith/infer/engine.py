"""Inference engine: requests that arrive and finish at any time share the steps of one model.

Each step, the scheduler plans which tokens of which sequences are processed, the runner executes
the plan, and the engine samples the next tokens. The tokens of a request do not depend on the other
requests: sampling is keyed by (seed, choice, position), and attention of a row reads only its own
blocks.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest

from megalith.config.generation import SamplingParams, sampling_problems
from megalith.config.serve import EngineConfig, Pooling
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError, ConfigError, DataError, raise_all
from megalith.infer.adapters import AdapterManager
from megalith.infer.cache import scheduler_config
from megalith.infer.outputs import (
    Completion,
    EngineCallback,
    PromptLogprobs,
    RequestOutput,
    StepResults,
    Timings,
    TokenOutput,
)
from megalith.infer.pooling import HiddenStatePooler
from megalith.infer.refit import (
    UpdateMode,
    WeightExchange,
    WeightReading,
    WeightSource,
    WeightUpdater,
    check_update_mode,
)
from megalith.infer.request_checks import (
    check_prompt,
    pooling_problems,
    rope_constraints,
    text_problems,
)
from megalith.infer.requests import (
    ChoiceProgress,
    DraftedRow,
    InFlightStep,
    Request,
    RequestChoice,
    deadline_error,
    make_sample_row,
    replay_tokens,
)
from megalith.infer.runner import ModelRunner
from megalith.infer.sample import (
    SampledToken,
    TokenCounts,
    encode_bad_words,
)
from megalith.infer.speculative import DraftRow, PipelineSpeculator, Speculator
from megalith.infer.step_execution import RowFailure, StepExecutor
from megalith.infer.step_results import compute_results, make_draft_rows
from megalith.infer.stopping_criteria import FinishReason, StoppingCriteria
from megalith.infer.structured_output import (
    GrammarCompiler,
    GrammarError,
)
from megalith.infer.suspend import EngineMemory
from megalith.parallel.group import SINGLE_RANK, Group
from megalith.plan.keys import key
from megalith.plan.serving.engine_state import KVCacheMode, Suspension
from megalith.plan.serving.prefix_cache import compute_salt
from megalith.plan.serving.scheduler import (
    PlannedRow,
    Scheduler,
    SequenceState,
    StepPlan,
)

logger = logging.getLogger(__name__)


class InferenceEngine:
    """Continuous batching of requests over one model.

    `add_request`, then `step` until `has_unfinished` is False. All tensor-parallel ranks make the
    same calls in the same order, and sample the same tokens. Not thread-safe: see `infer/llm.py`.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        *,
        max_model_len: int,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        callbacks: Sequence[EngineCallback] = (),
        speculator: Speculator | None = None,
        dp: Group = SINGLE_RANK,
        updater: WeightUpdater | None = None,
    ) -> None:
        """`max_model_len`: maximum number of tokens of a sequence; `eos_token_ids`: tokens that end
        a text; without a tokenizer outputs have no text; without a speculator there are no draft
        tokens; `updater`: of the weights, by default for a model on one rank."""
        model = runner.model
        if model.training:
            logger.warning("the model is in training mode; it is switched to evaluation mode")
            model.eval()
        self.model_config, self.config, self.max_model_len = model.config, config, max_model_len
        self.runner = runner
        self.scheduler = Scheduler(
            scheduler_config(
                config,
                runner.cache,
                num_host_blocks=runner.num_host_blocks,
                buckets=runner.planned_buckets,
            )
        )
        self._tokenizer, self._eos = tokenizer, eos_token_ids
        self._callbacks, self._speculator = callbacks, speculator
        self.grammars = (
            None if tokenizer is None else GrammarCompiler(tokenizer, model.config.vocab_size)
        )
        """Compiles the grammars of requests. Compile on another thread first: `add_request`
        compiles synchronously."""
        self._is_distributed, self._dp = runner.is_distributed, dp
        self._any_rank_is_busy = False
        self.start_round()
        self._in_flight: deque[InFlightStep] = deque()
        """Executed steps whose sampled tokens are not appended yet, oldest first."""
        self.weight_version = 0
        """Number of weight updates so far."""
        self._updater = WeightUpdater(model) if updater is None else updater
        self._outputs: list[TokenOutput] = []
        """Outputs during a weight update or a suspension, which the next step returns."""
        self._requests: dict[int, Request] = {}
        self._choices: dict[int, RequestChoice] = {}
        """By sequence number, under which the scheduler knows a choice."""
        self._executor = StepExecutor(runner, self.scheduler, self._choices)
        self._num_requests = self._num_sequences = 0
        proposer = None if speculator is None else speculator.proposer
        drafts = [] if proposer is None else [proposer.list_memory]
        allocator = self.scheduler.cache.allocator
        self._memory = EngineMemory(
            [partial(runner.list_memory, allocator), *drafts], self._updater.ranks
        )

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running, or a step of ended ones is in flight; also of
        the ranks that share experts."""
        return bool(self._requests or self._in_flight or self._outputs or self._any_rank_is_busy)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        salt: bytes = b"",
        arrival_time: float | None = None,
        pooling: Pooling | None = None,
        adapter: str | None = None,
        adapter_fingerprint: bytes | None = None,
        progress: Sequence[ChoiceProgress] = (),
    ) -> int:
        """Add a request and return its number.

        `salt`: requests with different salts share no cached prefix; `arrival_time`: when it
        reached the front end, on the monotonic clock; `pooling`: return an embedding of the prompt
        and no tokens, with max_new_tokens=0; `adapter`: name of a loaded LoRA adapter; None: the
        base model; `progress`: of each choice, to continue a request of another engine, whose
        adapter had the weights of `adapter_fingerprint`. With its seed the next tokens are those
        that the other engine would have generated.

        Raises:
            ConfigError: the sampling parameters are invalid, or the engine holds no adapters.
            CheckpointError: the adapter was evicted, and its files were changed or removed; or a
                weight update failed in the middle.
            DataError: the prompt is empty, too long, or has unknown ids; or nothing follows the
                progress, or its adapter now has other weights.
        """
        if self._updater.error is not None:
            raise CheckpointError(self._updater.error)
        problems = sampling_problems(params, vocab_size=self.model_config.vocab_size)
        problems = problems or text_problems(params, self._tokenizer)
        problems += pooling_problems(params, pooling)
        if params.deadline_s is not None and self._is_distributed:
            problems.append(
                f"deadline_s={params.deadline_s}: the clocks of parallel ranks differ, so "
                "they would not end the request in the same step. Leave it unset, and abort the "
                "request on all ranks."
            )
        raise_all(problems)
        check_prompt(prompt_token_ids, self.model_config, self.max_model_len, params)
        grammar = None
        if params.structured_outputs is not None:
            assert self.grammars is not None, "checked by text_problems"
            grammar = self.grammars.compile(params.structured_outputs)
        loaded = None
        if adapter is not None:
            loaded = self._adapter_manager().find(adapter, adapter_fingerprint)
        number = self._num_requests
        arrival_time = time.monotonic() if arrival_time is None else arrival_time
        output = RequestOutput(
            number,
            list(prompt_token_ids),
            [Completion(index) for index in range(params.n)],
            Timings(arrival_time),
            prompt_logprobs=None if params.prompt_logprobs is None else [],
        )
        # data-parallel ranks have seeds of their own
        global_number = number * self._dp.size + self._dp.rank
        seed = params.seed
        if seed is None:
            seed = key(self.config.seed, "request", str(global_number))
        deadline = None if params.deadline_s is None else arrival_time + params.deadline_s
        bad_word_ids = (
            () if self._tokenizer is None else encode_bad_words(params.bad_words, self._tokenizer)
        )
        pooler = None if pooling is None else HiddenStatePooler(pooling)
        request = Request(output, params, seed, deadline, bad_word_ids, pooler, grammar, loaded)
        salt = compute_salt(
            salt,
            cache_salt=params.cache_salt,
            adapter_fingerprint=None if loaded is None else loaded.fingerprint,
        )
        choices = self._make_choices(request, salt, progress)
        for choice in choices:
            if choice.completion.finish_reason is None:
                self.scheduler.add(choice.state, max_total_tokens=self._max_total_tokens(request))
                self._choices[choice.state.seq_id] = choice
        request.choices += choices
        self._num_requests += 1
        if loaded is not None:
            loaded.num_requests += 1
        self._requests[number] = request
        self._notify("on_request", output)
        return number

    def load_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in a folder, or replace the weights of a name, for later requests;
        those in flight finish with the adapter that they have.

        Raises:
            CheckpointError: it cannot be read, or belongs to another model.
            ConfigError: the name is empty, or the engine holds no adapters.
            DataError: every adapter in memory has requests in flight.
        """
        self._adapter_manager().load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter; its requests in flight finish.

        Raises:
            ConfigError: the engine holds no adapters.
            DataError: there is none of this name.
        """
        self._adapter_manager().unload(name)

    def _adapter_manager(self) -> AdapterManager:
        if self.runner.adapters is None:
            raise ConfigError(
                f"max_adapters={self.config.max_adapters}: the engine holds no adapters. Set "
                "max_adapters to the number of adapters in memory, such as 4."
            )
        return self.runner.adapters

    # --- weight updates

    def update_weights(self, source: WeightSource, *, mode: UpdateMode = "drain") -> None:
        """Replace the weights in place and empty the prefix cache. Requests in flight finish with
        the old weights first (`drain`), or continue with the new ones (`recompute`, `keep`); those
        that have not started wait. The next step returns the tokens generated during the update.

        Collective over the ranks that share the model, and over those of a training mesh. The new
        weights are checked first. If they cannot be read any more after that, the old ones are read
        again from their files; if that fails too, all requests fail until the next update. A
        suspended engine gets its weights back on the device; `suspend` releases them again.

        Raises:
            CheckpointError: on every rank: the new weights cannot be used.
            ConfigError: the mode is unknown, or not possible while suspended, or adapters are
                loaded.
            EngineMemoryError: as of `wake_up`.
        """
        check_update_mode(mode)
        if self.is_suspended:
            has_started = not self.is_every_rank_drained()
            self._memory.check_update(mode, has_started=has_started)
        if self.runner.adapters is not None:
            self.runner.adapters.check_update(source)
        self._memory.restore_weights()
        with ExitStack() as marks:
            update = self._updater.prepare(source, marks)
            if mode == "drain":
                self._finish_requests()
            else:
                self._finish_steps()
            self._write_weights(update)
        self.weight_version += 1
        self.scheduler.reset_prefix_cache()
        if mode == "recompute":
            self._recompute_requests()
        if self.runner.adapters is not None and isinstance(update, WeightReading):
            assert update.source is not None, "checked by check_update"
            self.runner.adapters.set_source(update.source)

    def _write_weights(self, update: WeightReading | WeightExchange) -> None:
        """Write checked weights; if the model has a mixture of old and new ones after an error, all
        requests end with it."""
        try:
            self._updater.write(update)
        except BaseException:
            if self._updater.error is not None:
                for request in list(self._requests.values()):
                    self._outputs += self._end_request(request, "error", error=self._updater.error)
            raise

    def take_outputs(self) -> list[TokenOutput]:
        """Return the tokens that the next step would return first: those generated during a weight
        update or a suspension."""
        outputs, self._outputs = self._outputs, []
        return outputs

    @property
    def has_mixed_weights(self) -> bool:
        """Whether a weight update failed in the middle, so that requests fail until the next."""
        return self._updater.error is not None

    @property
    def is_drained(self) -> bool:
        """Whether no request has started and is unfinished."""
        return not self.scheduler.has_started and not self._in_flight

    def is_every_rank_drained(self) -> bool:
        """Return whether `is_drained` holds on all ranks that share experts. Collective."""
        return not self.runner.is_any_rank_busy(not self.is_drained)

    def _finish_requests(self) -> None:
        """Execute steps until the requests that have started are finished, on all ranks that share
        experts."""
        self.scheduler.holds_new = True
        try:
            while not self.is_every_rank_drained():
                self._outputs = self.step()
        finally:
            self.scheduler.holds_new = False

    def _finish_steps(self) -> None:
        """Finish the steps in flight."""
        while self._in_flight:
            self._finish_step(self._in_flight.popleft(), self._outputs)

    def _recompute_requests(self) -> None:
        """Process all tokens of the requests in flight again. Log-probs and hidden states of
        prompts that are not complete start anew."""
        self.scheduler.preempt_all()
        for request in self._requests.values():
            if request.output.prompt_logprobs and not request.output.outputs[0].token_ids:
                request.output.prompt_logprobs.clear()
            if request.pooler is not None:
                request.pooler = HiddenStatePooler(request.pooler.pooling)

    # --- suspension

    def suspend(self, *, kv_cache: KVCacheMode = "offload", offload_weights: bool = False) -> None:
        """Release device memory until `wake_up`. Collective over the ranks that share the model,
        and over those that share experts. Without effect if it is repeated.

        The KV cache stays (`persist`), is copied to host memory (`offload`), or is dropped, and
        requests in flight are prefilled again (`recompute`); `offload_weights`: the weights of the
        model, of a draft model and of adapters are copied to host memory. Requests may be added and
        aborted, and wait.

        Raises:
            ConfigError: there is no such mode.
            EngineMemoryError: the host memory does not suffice, or memory cannot be released. The
                engine is not suspended, and its KV cache is complete.
            InvalidStateError: the engine is suspended with other options.
        """
        suspension = Suspension(kv_cache, offload_weights)
        self._memory.check_suspend(suspension)
        if self._memory.suspension == suspension:
            return
        self._finish_steps()
        self._memory.release(suspension, on_copied=partial(self._drop_state, suspension))

    def _drop_state(self, suspension: Suspension) -> None:
        """Drop what does not outlast a suspension."""
        if suspension.kv_cache == "recompute":
            self._recompute_requests()
            self.scheduler.reset_prefix_cache()
            for number in self._choices:
                self.runner.cache.drop_states(number)
                if self._speculator is not None and self._speculator.proposer is not None:
                    self._speculator.proposer.release(number)
        if suspension.releases_memory:
            self.runner.reset_graphs()

    def wake_up(self) -> None:
        """Restore the device memory and the graphs after `suspend`. Collective as `suspend`.
        Without effect if the engine is not suspended.

        Raises:
            EngineMemoryError: the device memory does not suffice; the engine is still suspended.
        """
        self._memory.restore(capture_graphs=self.runner.capture_graphs)

    @property
    def is_suspended(self) -> bool:
        """Whether the engine has released device memory, and executes no steps."""
        return self._memory.suspension is not None

    @property
    def can_step(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._outputs) or (self.has_unfinished and not self.is_suspended)

    @property
    def next_deadline(self) -> float | None:
        """The first deadline of a request, on the monotonic clock."""
        requests = self._requests.values()
        return min((each.deadline for each in requests if each.deadline is not None), default=None)

    # --- steps

    def step(self) -> list[TokenOutput]:
        """Execute one step; returns the generated tokens. Without anything to schedule it returns
        at once. Pipeline stages start a step, and return the tokens of an earlier one. Ranks that
        share experts execute as many steps as the one with most requests. While suspended it only
        ends requests whose deadline has passed: loop while `can_step`.

        An error fails the requests whose rows caused it, or all of the step if it is not known
        which; the others continue.
        """
        outputs = self.take_outputs()
        outputs += self._expire()
        if self.is_suspended:
            return outputs
        is_started = self._start_step(outputs)
        if self._in_flight and not (is_started and len(self._in_flight) < self.runner.num_stages):
            self._finish_step(self._in_flight.popleft(), outputs)
        return outputs

    def start_round(self) -> None:
        """Step until no rank that shares experts has requests, also if this rank has none. All of
        these ranks call it before requests that begin after `has_unfinished` was False."""
        self._any_rank_is_busy = self.runner.shares_experts

    def _start_step(self, outputs: list[TokenOutput]) -> bool:
        """Plan and execute a step on this stage; returns whether there is anything to execute."""
        drafts = self._propose_drafts()
        started = time.monotonic()
        plan = self._executor.transfer_blocks(
            self.scheduler.schedule(drafts=drafts, max_rows=self._max_rows())
        )
        self._any_rank_is_busy, is_executed = self.runner.reduce_step_flags(
            is_busy=bool(self._requests or self._in_flight), has_rows=bool(plan.rows)
        )
        if not is_executed:
            self.scheduler.complete(plan)
            return False
        for row in plan.rows:
            choice = self._choices[row.seq_id]
            result = choice.request.output
            if result.timings.scheduled is None:
                result.timings.scheduled = started
                result.num_cached_tokens = choice.state.num_cached_tokens
        needs = self._executor.find_prompt_outputs(plan)
        logits, failures = self._executor.execute(plan, needs)
        for failure in failures:
            outputs += self._fail(failure)
        self.scheduler.complete(plan)
        if self._speculator is not None and self.runner.is_last_stage:
            self._speculator.observe(plan, None if logits is None else logits.hidden)
        rows = plan.select_sampling_rows(needs.hidden) if logits is None else logits.rows
        step = self._make_step(plan, started, [row for row in rows if row.seq_id in self._choices])
        try:
            if self.runner.is_last_stage:
                step.results = StepResults()
                if logits is not None:
                    step.results = compute_results(step, logits, self._choices, self.runner.vocab)
                if isinstance(self._speculator, PipelineSpeculator):
                    verified = make_draft_rows(
                        step, step.results, self._choices, self._max_total_tokens
                    )
                    step.results.drafts = self._speculator.propose_next(verified)
                self.runner.send_results(step.results)
        except BaseException as error:
            self._fail_step(step, error, outputs)
        else:
            self._in_flight.append(step)
        return True

    def _finish_step(self, step: InFlightStep, outputs: list[TokenOutput]) -> None:
        """Append the sampled tokens of a step to their sequences, and add them to the outputs."""
        results = self.runner.receive_results() if step.results is None else step.results
        try:
            self._add_results(step, results, outputs)
        except BaseException as error:
            self._fail_step(step, error, outputs)
        seconds = time.monotonic() - step.started
        if self._speculator is not None:
            self._speculator.record_step(step.plan, seconds)
        if self._callbacks and step.plan.rows:
            self._notify("on_step", step.plan, self.scheduler.make_stats(), seconds)

    def _fail_step(
        self, step: InFlightStep, error: BaseException, outputs: list[TokenOutput]
    ) -> None:
        """Fail the requests of a step: sequences without their next token would never be scheduled
        again."""
        if self._is_distributed and isinstance(error, Exception):
            raise error  # the other ranks would continue with these requests
        for row in step.plan.rows:
            outputs += self._fail(RowFailure(row, error))
        if not isinstance(error, Exception):
            raise error

    def _max_rows(self) -> int | None:
        """Return the largest number of rows of a step, so that every stage of a pipeline has one to
        process."""
        if self.runner.num_stages == 1:
            return None
        num_sequences = min(len(self._choices), self.config.max_num_seqs)
        return -(-num_sequences // self.runner.num_stages)

    def abort(self, request_id: int, *, error: str | None = None) -> list[TokenOutput]:
        """End a request now and release its blocks; unknown and finished requests are ignored.
        `error`: it ends with this error."""
        request = self._requests.get(request_id)
        if request is None:
            return []
        return self._end_request(request, "abort" if error is None else "error", error=error)

    def describe(self) -> str:
        """Describe the KV cache, the limits and the attention of this engine in one line."""
        cache, config = self.runner.cache, self.config
        groups = len(cache.plan.layout.groups)
        mib = cache.num_blocks * cache.block_size * cache.plan.bytes_per_token / 2**20
        attention = "gathered keys" if self.model_config.positions == "relative" else "paged"
        num_ranks = cache.plan.block_multiple
        division = f" sharded over {num_ranks} ranks" if num_ranks > 1 else ""
        return (
            f"inference engine: {cache.num_blocks} KV cache blocks of {cache.block_size} tokens"
            f"{division} in {groups} groups, dtype {cache.plan.dtype}, up to {mib:.1f} MiB, "
            f"{self.runner.num_host_blocks} blocks in host memory; "
            f"at most {config.max_num_seqs} sequences of "
            f"{self.max_model_len} tokens, {config.max_num_batched_tokens} tokens per step; "
            f"attention: {attention}; small-batch matmuls: {self.runner.limits}; "
            f"graphs: {self.runner.describe_graphs()}"
        )

    def is_unfinished(self, request_id: int) -> bool:
        """Whether a request is waiting or running."""
        return request_id in self._requests

    def output_of(self, request_id: int) -> RequestOutput:
        """Return the state of an unfinished request."""
        return self._requests[request_id].output

    # --- requests

    def _new_choice(self, request: Request, index: int, salt: bytes) -> RequestChoice:
        params, prompt = request.params, request.output.prompt_token_ids
        total = self._max_total_tokens(request)
        recompute_length, depends_on_step = rope_constraints(self.model_config, total)
        state = SequenceState(
            seq_id=self._num_sequences,
            token_ids=list(prompt),
            num_prompt_tokens=len(prompt),
            priority=params.priority,
            salt=salt,
            adapter=None if request.adapter is None else request.adapter.number,
            reads_prefix_cache=params.prompt_logprobs is None
            and not (request.pooler is not None and request.pooler.needs_all_tokens),
            recompute_length=recompute_length,
            one_token_after_prompt=depends_on_step,
        )
        self._num_sequences += 1
        stopping = StoppingCriteria(
            params,
            eos_ids=self._eos,
            prompt_ids=prompt,
            max_total_tokens=self.max_model_len,
            tokenizer=self._tokenizer,
        )
        counts = TokenCounts(prompt) if params.has_penalties else None
        grammar = None if request.grammar is None else request.grammar.start(stopping.end_ids)
        return RequestChoice(
            request, request.output.outputs[index], state, stopping, counts, grammar
        )

    def _make_choices(
        self, request: Request, salt: bytes, progress: Sequence[ChoiceProgress]
    ) -> list[RequestChoice]:
        """Return the choices of a new request: the first one, from which the others fork after the
        prompt; or all, if some have tokens.

        Raises:
            DataError: there is not one progress per choice, or a choice has ended.
        """
        if not any(progress_of_choice.token_ids for progress_of_choice in progress):
            return [self._new_choice(request, 0, salt)]
        if len(progress) != request.params.n:
            raise DataError(
                f"progress has {len(progress)} choices, but n={request.params.n}. Pass one for "
                "each choice."
            )
        choices = [self._new_choice(request, index, salt) for index in range(len(progress))]
        for choice, (token_ids, finish_reason) in zip(choices, progress, strict=True):
            replay_tokens(choice, token_ids, has_ended=finish_reason is not None)
            choice.completion.finish_reason = finish_reason
        return choices

    def _max_total_tokens(self, request: Request) -> int:
        """Return the largest number of tokens that a choice of a request can have."""
        if request.params.max_new_tokens is None:
            return self.max_model_len
        total = len(request.output.prompt_token_ids) + request.params.max_new_tokens
        return min(total, self.max_model_len)

    def _register(self, choice: RequestChoice) -> None:
        choice.request.choices.append(choice)
        self._choices[choice.state.seq_id] = choice

    def _end_choice(
        self,
        choice: RequestChoice,
        reason: FinishReason,
        *,
        error: str | None = None,
        cause: Exception | None = None,
        is_request_error: bool = False,
    ) -> TokenOutput:
        """End a choice without a token; returns its last output, with the text held back so far."""
        output = TokenOutput(
            choice.request.output.request_id,
            choice.completion.index,
            None,
            choice.stopping.flush(),
            finish_reason=reason,
            error=error,
            cause=cause,
            is_request_error=is_request_error,
        )
        self._record(choice, output)
        return output

    def _end_request(
        self,
        request: Request,
        reason: FinishReason,
        *,
        error: str | None = None,
        cause: Exception | None = None,
    ) -> list[TokenOutput]:
        """End all unfinished choices of a request."""
        outputs = [
            self._end_choice(choice, reason, error=error, cause=cause)
            for choice in list(request.choices)
            if choice.completion.finish_reason is None
        ]
        for completion in request.output.outputs[len(request.choices) :]:
            output = TokenOutput(
                request.output.request_id,
                completion.index,
                None,
                finish_reason=reason,
                error=error,
                cause=cause,
            )
            completion.add(output)
            self._notify("on_token", output)
            outputs.append(output)
        self._finish_request(request)
        return outputs

    def _record(self, choice: RequestChoice, output: TokenOutput) -> None:
        """Add an output to its choice, and end the choice and the request if it is the last."""
        choice.completion.add(output)
        self._notify("on_token", output)
        if output.finish_reason is None:
            return
        number = choice.state.seq_id
        request = choice.request
        request.output.num_preemptions += choice.state.num_preemptions
        self.scheduler.finish(number)
        self.runner.cache.drop_states(number)
        if self._speculator is not None:
            self._speculator.release(number)
        del self._choices[number]
        self._finish_request(request)

    def _finish_request(self, request: Request) -> None:
        if request.output.finished and request.output.request_id in self._requests:
            request.output.timings.finished = time.monotonic()
            del self._requests[request.output.request_id]
            if request.adapter is not None:
                self._adapter_manager().release(request.adapter.number)
            self._notify("on_finish", request.output)

    def _expire(self) -> list[TokenOutput]:
        """End the requests whose deadline has passed."""
        now = time.monotonic()
        outputs: list[TokenOutput] = []
        for number, request in list(self._requests.items()):
            if request.deadline is not None and now > request.deadline:
                assert request.params.deadline_s is not None
                outputs += self.abort(number, error=deadline_error(request.params.deadline_s))
        return outputs

    # --- the forward pass, and errors in it

    def _fail(self, failure: RowFailure) -> list[TokenOutput]:
        choice = self._choices.get(failure.row.seq_id)
        if choice is None:
            return []
        error = failure.error
        logger.error(
            "a step of request %d failed", choice.request.output.request_id, exc_info=error
        )
        text = (
            f"this request failed: {type(error).__name__}: {error}. Send it again; if it fails "
            "again, report it with this text."
        )
        cause = error if isinstance(error, Exception) else None
        return self._end_request(choice.request, "error", error=text, cause=cause)

    def _notify(self, event: str, *arguments: object) -> None:
        """Call a method of every callback. An error in it does not affect requests."""
        for callback in self._callbacks:
            try:
                getattr(callback, event)(*arguments)
            except Exception:
                logger.exception("%s of %s failed", event, type(callback).__name__)

    # --- sampling

    def _propose_drafts(self) -> dict[int, list[int]]:
        """Return draft tokens of the sequences whose next step generates a token."""
        if self._speculator is None:
            return {}
        rows = []
        for choice in self._choices.values():
            if choice.state.accepts_drafts:
                token_ids = choice.state.token_ids
                # a step generates one token more than it accepts drafts
                max_draft_tokens = self._max_total_tokens(choice.request) - len(token_ids) - 1
                make_row = partial(make_sample_row, choice)
                rows.append(DraftRow(choice.state.seq_id, token_ids, max_draft_tokens, make_row))
        if len(rows) >= self.config.max_num_batched_tokens:
            rows = []
        try:
            return self._speculator.propose(rows)
        except Exception:
            if self._is_distributed:
                raise  # the ranks would not execute the same collectives
            logger.exception("draft tokens cannot be proposed; the engine continues without them")
            self._speculator = None
            return {}

    def _make_step(
        self, plan: StepPlan, started: float, rows: Sequence[PlannedRow]
    ) -> InFlightStep:
        """Return the step of a plan; `rows`: those that sample, in the order of their logits. After
        the prompt all choices of a request sample from the same logits."""
        step = InFlightStep(plan, started)
        end = 0
        for row in rows:
            positions = range(end, end + 1 + len(row.draft_ids))
            end = positions.stop
            choice = self._choices[row.seq_id]
            request = choice.request
            if request.params.max_new_tokens == 0:
                step.scored.append(choice)
                continue
            siblings = range(len(request.choices), request.params.n)
            step.drafted += [
                DraftedRow(each, row.draft_ids, positions)
                for each in (
                    choice,
                    *(self._new_choice(request, index, choice.state.salt) for index in siblings),
                )
            ]
        return step

    def _add_results(
        self, step: InFlightStep, results: StepResults, outputs: list[TokenOutput]
    ) -> None:
        """Append the sampled tokens of the requests that have not ended since; add them to the
        outputs."""
        for number, prompt in results.prompts.items():
            if number in self._choices:
                outputs += self._add_prompt_logprobs(self._choices[number].request, prompt)
        for number, embedding in results.embeddings.items():
            if embedding is not None and number in self._choices:
                outputs += self._add_embedding(self._choices[number].request, embedding)
        for choice in step.scored:
            if choice.state.seq_id in self._choices:
                outputs += self._end_request(choice.request, "length")
        if isinstance(self._speculator, PipelineSpeculator):
            self._speculator.receive(
                {
                    number: drafts
                    for number, drafts in results.drafts.items()
                    if number in self._choices
                }
            )
        drafted: list[tuple[DraftedRow, list[SampledToken]]] = []
        for row, sampled in zip(step.drafted, results.sampled, strict=True):
            if row.choice.request.output.request_id in self._requests and self._fork(row.choice):
                drafted.append((row, sampled))
        for row, sampled in drafted:
            outputs += self._verify(row.choice, row.draft_ids, sampled)

    def _verify(
        self, choice: RequestChoice, draft_ids: Sequence[int], sampled: Sequence[SampledToken]
    ) -> list[TokenOutput]:
        """Append the drafts that equal the token sampled at their position, and the first token
        that does not, or the one after all drafts; returns the outputs."""
        outputs: list[TokenOutput] = []
        for result, draft in zip_longest(sampled, draft_ids):
            outputs.append(self._append(choice, result, is_draft=result.token == draft))
            if result.token != draft or outputs[-1].finish_reason is not None:
                break
        if draft_ids:
            pairs = zip(outputs, draft_ids, strict=False)  # drafts after the last output
            num_accepted = sum(output.token == draft for output, draft in pairs)
            self.scheduler.count_drafts(len(draft_ids), num_accepted)
            number = choice.state.seq_id
            if self._speculator is not None and number in self._choices:
                self._speculator.record_drafts(number, len(draft_ids), num_accepted)
        return outputs

    def _fork(self, choice: RequestChoice) -> bool:
        """Add a choice that sampled its first token from the logits of the prompt of another one,
        whose blocks it shares; returns whether the choice exists."""
        if choice.state.seq_id in self._choices:
            return True
        parent = choice.request.choices[0].state
        if parent.seq_id not in self._choices:
            return False
        choice.state.salt = parent.salt
        self.scheduler.fork(parent.seq_id, choice.state)
        self.runner.cache.copy_states(parent.seq_id, choice.state.seq_id)
        self._register(choice)
        return True

    def _append(
        self, choice: RequestChoice, sampled: SampledToken, *, is_draft: bool
    ) -> TokenOutput:
        """Append a sampled token to its sequence; returns the output. `is_draft`: it is an accepted
        draft, which was processed."""
        timings = choice.request.output.timings
        if timings.first_token is None and not choice.completion.token_ids:
            timings.first_token = time.monotonic()  # else generated by another engine
        if sampled.error is not None:
            return self._end_choice(
                choice, "error", error=sampled.error, is_request_error=sampled.is_request_error
            )
        is_complete = False
        if choice.grammar is not None:
            try:
                choice.grammar.accept(sampled.token)
            except GrammarError as error:
                return self._end_choice(choice, "error", error=str(error), is_request_error=True)
            is_complete = choice.grammar.is_finished
        stop = choice.stopping.check(sampled.token, is_complete=is_complete)
        self.scheduler.append_token(choice.state.seq_id, sampled.token, is_cached=is_draft)
        output = TokenOutput(
            choice.request.output.request_id,
            choice.completion.index,
            sampled.token,
            stop.text,
            sampled.logprobs,
            stop.finish,
            stop.stop_reason,
            weight_version=self.weight_version,
        )
        self._record(choice, output)
        if choice.counts is not None:
            choice.counts.update(choice.completion.token_ids)
        return output

    def _add_prompt_logprobs(self, request: Request, prompt: PromptLogprobs) -> list[TokenOutput]:
        """Add log-probs of the prompt, each once; returns the outputs of a request that fails."""
        if prompt.error is not None:
            return self._end_request(request, "error", error=prompt.error)
        recorded = request.output.prompt_logprobs
        assert recorded is not None
        recorded += prompt.values[len(recorded) - prompt.first :]
        return []

    def _add_embedding(self, request: Request, embedding: list[float] | str) -> list[TokenOutput]:
        """Add the embedding, or an error, and end the request; returns its outputs."""
        if isinstance(embedding, str):
            return self._end_request(request, "error", error=embedding)
        request.output.embedding = embedding
        return self._end_request(request, "stop")
