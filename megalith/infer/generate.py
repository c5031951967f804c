"""Writing on from prompts: several sequences at once, packed tokens first, each token read once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megalith.config.model import ModelConfig
from megalith.config.sample import SampleConfig, sample_problems
from megalith.errors import DataError, raise_all
from megalith.infer.cache import EVERYTHING, AttentionView, KVCache, PrefixState
from megalith.infer.sample import choose
from megalith.kernels.rope import rope_length
from megalith.kernels.tokens import tokens_of_queries
from megalith.models.decoder import Decoder

Finish = Literal["stop", "length", "context"]
"""Why a text ended: its end token, max_new_tokens, or the longest context the model reads."""

STEP_TOKENS = 4096
"""PackedSeqParams read in one forward; longer prompts are read in parts, so that activations
stay small (guess)."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One new token of one sequence."""

    sequence: int
    """Number of its prompt."""

    token: int
    finish: Finish | None
    """Set on the last token."""


@dataclass(slots=True)
class _Sequence:
    """A prompt and what was written after it."""

    number: int
    ids: list[int]
    prompt_length: int
    num_read: int = field(default=0)
    """PackedSeqParams whose keys and values are in the cache."""


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sample: SampleConfig,
    *,
    stops: frozenset[int] = frozenset(),
    step_tokens: int = STEP_TOKENS,
    before: PrefixState | None = None,
) -> Iterator[GeneratedToken]:
    """Write on from every prompt; tokens come out as they are chosen, one of each unfinished
    sequence per round.

    `stops`: tokens that end a text. All ranks of the model's tensor-parallel group call this with
    the same arguments, and each chooses the same tokens by itself. A sequence's tokens do not
    depend on how the others are cut or end. `before`: what was read of the only prompt in earlier
    calls, and is of it in this one.

    Raises:
        ConfigError: the sampling settings break a rule.
        DataError: a prompt is empty, too long for the model, or has ids that it does not know.
        CheckpointError: the model's scores are not finite.
    """
    raise_all(sample_problems(sample))
    check_prompts(prompts, model.config)
    assert before is None or len(prompts) == 1, "one text is kept"
    active = [_Sequence(number, list(ids), len(ids)) for number, ids in enumerate(prompts)]
    if before is not None and _turns_by_length(model.config, len(prompts[0])):
        before.clear(sequence=0)
        before = None
    elif before is not None:
        active[0].num_read = before.resume(prompts[0], sequence=0)
    kept = before or remember(model.config)
    if any(
        _turns_by_length(model.config, len(ids)) for ids in prompts
    ):  # a part of such a text turns otherwise
        step_tokens = max(step_tokens, sum(map(len, prompts)))
    while active:
        counts = divide_room([len(s.ids) - s.num_read for s in active], step_tokens)
        reading = [(s, count) for s, count in zip(active, counts, strict=True) if count]
        complete = [s for s, count in reading if s.num_read + count == len(s.ids)]
        kept.forget()
        scores = _read(model, reading, kept.cache)
        if before is not None and not _turns_anew(model.config, len(active[0].ids)):
            kept.note(active[0].ids[: active[0].num_read])
        tokens = (
            choose(scores, sample, [(s.number, len(s.ids)) for s in complete]) if complete else []
        )
        for sequence, token in zip(complete, tokens, strict=True):
            sequence.ids.append(token)
            if _turns_anew(model.config, len(sequence.ids)) and not _turns_anew(
                model.config, len(sequence.ids) - 1
            ):
                kept.cache.drop(sequence.number)
                sequence.num_read = 0
            finish = _finish(sequence, sample, model.config, stops)
            if finish is not None:
                active.remove(sequence)
                if before is None:
                    kept.cache.drop(sequence.number)
            yield GeneratedToken(sequence.number, token, finish)


def remember(model: ModelConfig) -> PrefixState:
    """Room for what a model reads."""
    return PrefixState(model.num_layers, sights_of_layers(model))


def _turns_by_length(model: ModelConfig, length: int) -> bool:
    """Whether keys of so long a text turn by angles that follow from its length: in another text
    they would others."""
    return model.positions == "rope" and rope_length(model.rope, length) > 0


def _turns_anew(model: ModelConfig, length: int) -> bool:
    """Whether so long a text turns by other angles, from its first token on, than while it was
    shorter."""
    return model.rope.scaling == "longrope" and _turns_by_length(model, length)


def sights_of_layers(model: ModelConfig) -> list[AttentionView]:
    """How many tokens each layer sees, and behind that how many of the memory, where it looks at
    one."""
    own = AttentionView(model.attention.window, model.attention.chunked)
    return [
        sight
        for layer in range(model.num_layers)
        for sight in (
            own if model.has_window(layer) else EVERYTHING,
            *([EVERYTHING] if model.uses_cross_layer_source(layer) else []),
        )
    ]


def check_prompts(prompts: Sequence[Sequence[int]], model: ModelConfig) -> None:
    """Refuse prompts that the model cannot read, or that leave no room for a token.

    Raises:
        DataError: the first prompt that does not work.
    """
    for number, ids in enumerate(prompts):
        if not ids:
            raise DataError(
                f"prompt {number + 1} has {len(ids)} tokens: pass at least one to begin with."
            )
        if len(ids) >= model.max_seq_len:
            raise DataError(
                f"prompt {number + 1} has {len(ids)} tokens, and the model reads at most "
                f"{model.max_seq_len} together "
                f"with what it writes. Use a prompt of at most {model.max_seq_len - 1} tokens."
            )
        unknown = [token for token in ids if not 0 <= token < model.vocab_size]
        if unknown:
            raise DataError(
                f"prompt {number + 1} has token {unknown[0]}, and the model knows ids below "
                f"{model.vocab_size}. "
                f"Use the tokenizer that the model was trained with."
            )


def divide_room(wanted: Sequence[int], room: int) -> list[int]:
    """How many tokens each sequence may read now: what it wants, until the room is used up.

    >>> divide_room([3, 5, 1], 6)
    [3, 3, 0]
    """
    counts = []
    for count in wanted:
        counts.append(min(count, room))
        room -= counts[-1]
    return counts


@torch.no_grad()
def _read(model: Decoder, reading: Sequence[tuple[_Sequence, int]], cache: KVCache) -> Tensor:
    """Read the next `count` tokens of each sequence; scores [b, v] after the last token of those
    read to their end."""
    device = next(model.parameters()).device
    ids: list[int] = []
    wanted: list[int] = []
    for sequence, count in reading:
        ids += sequence.ids[sequence.num_read : sequence.num_read + count]
        sequence.num_read += count
        if sequence.num_read == len(sequence.ids):
            wanted.append(len(ids) - 1)
    tokens = tokens_of_queries(
        [(count, sequence.num_read) for sequence, count in reading],
        reach=[len(sequence.ids) for sequence, _ in reading],
        device=device,
    )
    caches = cache.layers([sequence.number for sequence, _ in reading])
    return model.logits(
        torch.tensor(ids, device=device), tokens, caches, torch.tensor(wanted, device=device).long()
    )


def _finish(
    sequence: _Sequence, sample: SampleConfig, model: ModelConfig, stops: frozenset[int]
) -> Finish | None:
    if sequence.ids[-1] in stops:
        return "stop"
    if len(sequence.ids) - sequence.prompt_length == sample.max_new_tokens:
        return "length"
    return "context" if len(sequence.ids) == model.max_seq_len else None
