"""Checks of requests before they are added to an engine."""

from collections.abc import Sequence

from megalith.config.generation import SamplingParams
from megalith.config.model import ModelConfig
from megalith.config.serve import Pooling
from megalith.data.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.kernels.rope import rope_length


def text_problems(params: SamplingParams, tokenizer: Tokenizer | None) -> list[str]:
    """Return a message for every parameter that needs a tokenizer, if there is none."""
    if tokenizer is not None:
        return []
    problems = [
        f"{name}={list(value)}: the model has no tokenizer. Use stop_token_ids or "
        "allowed_token_ids."
        for name, value in (("stop", params.stop), ("bad_words", params.bad_words))
        if value
    ]
    if params.structured_outputs is not None:
        problems.append(
            "structured_outputs: the model has no tokenizer, so its output has no text. Use "
            "allowed_token_ids."
        )
    return problems


def pooling_problems(params: SamplingParams, pooling: Pooling | None) -> list[str]:
    """Return a message for every parameter that an embedding does not have."""
    if pooling is None:
        return []
    required = {"max_new_tokens": 0, "n": 1, "prompt_logprobs": None}
    return [
        f"{name}={getattr(params, name)} with pooling={pooling}: an embedding has no tokens and no "
        f"log-probs. Set {name} to {value}."
        for name, value in required.items()
        if getattr(params, name) != value
    ]


def check_prompt(
    prompt_token_ids: Sequence[int],
    model: ModelConfig,
    max_model_len: int,
    params: SamplingParams,
) -> None:
    """Check that the model can process a prompt and generate at least one token, or score it.

    Raises:
        DataError: it is empty, too long, or has unknown ids.
    """
    length = len(prompt_token_ids)
    if not length:
        raise DataError(f"the prompt has {length} tokens: pass at least one.")
    longest = max_model_len - (params.max_new_tokens != 0)
    if length > longest:
        raise DataError(
            f"the prompt has {length} tokens, but the context is {max_model_len} tokens including "
            f"new ones. Use a prompt of at most {longest} tokens."
        )
    unknown = [token for token in prompt_token_ids if not 0 <= token < model.vocab_size]
    if unknown:
        raise DataError(
            f"the prompt has token {unknown[0]}, but the ids of the model are below "
            f"{model.vocab_size}. Use the tokenizer that the model was trained with."
        )


def rope_constraints(model: ModelConfig, max_total_tokens: int) -> tuple[int | None, bool]:
    """Return the length at which the cache of a sequence is computed again (LongRoPE), and whether
    the rotary frequencies of its tokens depend on the length at which they are processed (dynamic
    NTK). Neither applies to sequences of the original context length."""
    if model.positions != "rope" or rope_length(model.rope, max_total_tokens) == 0:
        return None, False
    if model.rope.scaling == "longrope":
        return model.rope.original_max_position + 1, False
    return None, True
