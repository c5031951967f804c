"""Self-test of `batch_invariant`: a request has the same log-probs, bit by bit, alone and in a
batch."""

import random
from dataclasses import replace

from megalith.config.generation import SamplingParams
from megalith.errors import ConfigError
from megalith.infer.engine import InferenceEngine
from megalith.infer.outputs import RequestOutput

NUM_REQUESTS = 9
LONGEST_PROMPT = 70
"""Tokens of the longest prompt: more than a tile of the matmul kernel, and several blocks."""


def check_batch_invariance(engine: InferenceEngine) -> None:
    """Run some requests alone and together in an engine that serves no other requests.

    Raises:
        ConfigError: their log-probs differ on this machine.
    """
    draw = random.Random(0)
    vocab = engine.model_config.vocab_size
    longest = max(1, min(LONGEST_PROMPT, engine.max_model_len - 4))
    lengths = [1, longest, *(draw.randint(1, longest) for _ in range(NUM_REQUESTS - 2))]
    params = SamplingParams(
        max_new_tokens=3, seed=1, logprobs=0, prompt_logprobs=0, ignore_eos=True
    )
    requests = [
        ([draw.randrange(vocab) for _ in range(length)], replace(params, seed=number))
        for number, length in enumerate(lengths)
    ]
    alone = [run_requests(engine, [request])[0] for request in requests]
    together = run_requests(engine, requests)
    engine.scheduler.reset_prefix_cache()
    for one, other in zip(alone, together, strict=True):
        if logprob_values(one) != logprob_values(other):
            raise ConfigError(
                "batch_invariant=true: on this machine the log-probs of this model depend on the "
                "other requests of a batch. It is supported on CPUs with OpenMP and on GPUs with "
                "Triton, in fp32 and bf16, without MLA and relative positions. Set batch_invariant "
                "to false."
            )


def run_requests(
    engine: InferenceEngine, requests: list[tuple[list[int], SamplingParams]]
) -> list[RequestOutput]:
    """Run requests that arrive together to their end."""
    outputs = [engine.output_of(engine.add_request(*request)) for request in requests]
    while engine.has_unfinished:
        engine.step()
    return outputs


def logprob_values(output: RequestOutput) -> list[float]:
    """Return the log-probs of the prompt and of the first choice."""
    logprobs = [*(output.prompt_logprobs or ()), *output.outputs[0].logprobs]
    return [one.logprob for one in logprobs]
