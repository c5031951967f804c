"""PUT /api: the text generation API of Megatron-LM's server."""

from collections.abc import Mapping
from typing import Any

from megalith.config.generation import SamplingParams, sampling_problems
from megalith.serve.choices import ChoiceDelta, collect_choices
from megalith.serve.completions import encode_text
from megalith.serve.errors import ApiError, invalid, invalid_field
from megalith.serve.generation import Generation, PromptRequest
from megalith.serve.model_info import ServedModel
from megalith.serve.protocol import Logprobs
from megalith.serve.sampling_fields import fit_context, read_bool, read_int
from megalith.serve.sse import finite_logprob
from megalith.serve.state import RequestContext, ServerState

MAX_PROMPTS = 128
REPLACED = {
    "max_len": "Use tokens_to_generate.",
    "sentences": "Use prompts.",
    "beam_width": "Beam search is not supported. Remove it.",
}
"""Fields of older versions, with what to use."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "top_p_decay": (0, 0.0),
    "top_p_bound": (0, 0.0),
    "prevent_newline_after_colon": (False,),
    "length_penalty": (1, 1.0),
}
"""Fields with the values that change nothing; others are rejected."""

STOPS = {"stop_on_double_eol": "\n\n", "stop_on_eol": "\n"}
"""Text that ends the output, by field."""

FIELD_NAMES = {"max_new_tokens": "tokens_to_generate", "seed": "random_seed"}
"""Names in this API of sampling parameters."""


async def generate_legacy(state: ServerState, context: RequestContext) -> dict[str, Any]:
    """Return the continuations of prompts: text with the prompt, tokens, segments, log-probs.

    Raises:
        ApiError: the request is invalid or cannot be processed.
    """
    body, model = context.body, state.check_ready()
    prompts = _read_prompts(body)
    params = _read_params(body, model, state)
    requests = [await _encode(text, body, params, model) for text in prompts]
    state.check_capacity(len(requests), sum(len(request.token_ids) for request in requests))
    async with state.client.generate(requests, uid=context.request_id) as generation:
        choices = await collect_choices(generation)
    results = [
        LegacyResult(text, request, choices[index, 0], generation, index)
        for index, (text, request) in enumerate(zip(prompts, requests, strict=True))
    ]
    texts = state.token_texts()
    return {
        "text": [result.prompt + result.delta.text for result in results],
        "tokens": [result.token_ids for result in results],
        "segments": [[texts.text(token) for token in result.token_ids] for result in results],
        "logprobs": [result.logprobs() for result in results] if params.logprobs == 0 else None,
    }


def _read_prompts(body: Mapping[str, Any]) -> list[str]:
    for name, advice in REPLACED.items():
        if name in body:
            raise invalid(f"{name} is no longer used. {advice}", name)
    for name, values in UNSUPPORTED.items():
        if name in body and body[name] not in values:
            raise invalid(f"{name}={body[name]!r:.60} is not supported. Remove it.", name)
    prompts = body.get("prompts")
    if (
        not isinstance(prompts, list)
        or not 1 <= len(prompts) <= MAX_PROMPTS
        or not all(isinstance(text, str) for text in prompts)
    ):
        raise invalid(
            f"prompts={prompts!r:.60} must be a list of 1 to {MAX_PROMPTS} strings, such as "
            '["Hello"].',
            "prompts",
        )
    return prompts


def _read_params(body: Mapping[str, Any], model: ServedModel, state: ServerState) -> SamplingParams:
    """Return the sampling parameters of a request."""
    stop = [text for name, text in STOPS.items() if read_bool(body, name)]
    stop_token = read_int(
        body, "stop_token", at_least=0, at_most=model.info.vocab_size - 1, default=None
    )
    with_logprobs = read_bool(body, "logprobs")
    temperature = body.get("temperature", 1.0)
    if temperature == 0:
        text = "temperature=0 must be above 0. Use top_k=1 for greedy decoding."
        raise invalid(text, "temperature")
    params = SamplingParams(
        max_new_tokens=body.get("tokens_to_generate", 64),
        temperature=temperature,
        top_k=read_int(body, "top_k", at_least=0, at_most=1000, default=0),
        top_p=body.get("top_p", 0.0),
        seed=read_int(body, "random_seed", at_least=0, at_most=2**63 - 1, default=None),
        stop=tuple(stop),
        include_stop_str_in_output=True,
        stop_token_ids=() if stop_token is None else (stop_token,),
        logprobs=0 if with_logprobs else None,
        prompt_logprobs=0 if with_logprobs else None,
        deadline_s=state.config.request_timeout_s,
    )
    problems = sampling_problems(params, vocab_size=model.info.vocab_size)
    if problems:
        raise invalid_field(problems[0], FIELD_NAMES)
    if temperature > 100:
        raise invalid(f"temperature={temperature} must be at most 100. Use 1.0.", "temperature")
    if params.max_new_tokens == 0 and not with_logprobs:
        raise invalid(
            "tokens_to_generate=0 needs logprobs=true. Set it, or generate at least one token.",
            "tokens_to_generate",
        )
    return params


async def _encode(
    text: str, body: Mapping[str, Any], params: SamplingParams, model: ServedModel
) -> PromptRequest:
    ids = await encode_text(text, model, "prompts")
    if read_bool(body, "add_BOS"):
        bos = model.tokenizer.bos
        if bos is None:
            raise invalid("add_BOS=true: the tokenizer has no such token. Remove it.", "add_BOS")
        ids = ids if ids[:1] == [bos] else [bos, *ids]
    named = {"max_tokens": params.max_new_tokens}
    try:
        fitting = fit_context(params, len(ids), model, named, prompt_field="prompts")
        return PromptRequest(ids, fitting)
    except ApiError as error:
        message = error.message.replace("max_tokens", "tokens_to_generate")
        param = "tokens_to_generate" if error.param == "max_tokens" else error.param
        advice = message.replace(", or truncate_to_fit=true", "")
        raise ApiError(400, advice, param, error.code) from None


class LegacyResult:
    """Result of one prompt."""

    def __init__(
        self,
        prompt: str,
        request: PromptRequest,
        delta: ChoiceDelta,
        generation: Generation,
        index: int,
    ) -> None:
        self.prompt, self.delta = prompt, delta
        self.token_ids = request.token_ids + delta.token_ids
        self._prompt_result = generation.prompts[index]

    def logprobs(self) -> list[float]:
        """Return the log-prob of each token after the first."""
        result = self._prompt_result
        of_prompt = [] if result is None else result.prompt_logprobs or []
        entries = [*(Logprobs(*item) for item in of_prompt), *self.delta.logprobs]
        return [finite_logprob(entry.logprob) for entry in entries]
