"""Generation of tokens and texts with a KV cache: sampling, decoding and the order of output."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from megalith.config.fields import range_problems
from megalith.config.generation import SampleConfig
from megalith.config.model import ModelConfig
from megalith.data.tokenizer import StreamDecoder, Tokenizer, appends_eod
from megalith.errors import CheckpointError, DataError, raise_all
from megalith.infer.cache import EVERYTHING, AttentionView, KVCache, PrefixState
from megalith.infer.load import TextGenerator
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_queries
from megalith.kernels.rope import rope_length
from megalith.models.decoder import Decoder
from megalith.plan.keys import key

# --- sampling of the next token from logits, with keyed random numbers


def sample_tokens(
    logits: Tensor, sample: SampleConfig, positions: Sequence[tuple[int, int]]
) -> list[int]:
    """Sample one token for each row of logits [b, v]; positions[i] is the (sequence, position) of
    row i's token.

    Random numbers are keyed by (seed, sequence, position) and computed on the host, so a sample
    does not depend on other rows, and is the same on every rank. Temperature 0 selects the largest
    logit, the first of equal ones.

    Raises:
        CheckpointError: a logit is not finite.
    """
    if not bool(torch.isfinite(logits).all()):
        invalid = next(
            position
            for position, row in zip(positions, logits, strict=True)
            if not bool(torch.isfinite(row).all())
        )
        raise CheckpointError(
            f"sequence {invalid[0]}: the logits at token {invalid[1]} are not finite, so the "
            "weights "
            "have probably diverged. Use an earlier checkpoint."
        )
    if sample.temperature == 0:
        best: list[int] = logits.argmax(-1).tolist()
        return best
    filtered = filter_logits(logits.to("cpu", torch.float64) / sample.temperature, sample)
    noise = torch.stack(
        [_exponential(sample.seed, *position, size=logits.shape[1]) for position in positions]
    )
    # Gumbel-max trick: argmax of exp(logit) / Exp(1)
    sampled: list[int] = (filtered - noise.log()).argmax(-1).tolist()
    return sampled


def filter_logits(logits: Tensor, sample: SampleConfig) -> Tensor:
    """Return logits [b, v] with -inf for tokens outside of top_k, and then top_p. The most likely
    token always remains."""
    if sample.top_k is not None and sample.top_k < logits.shape[-1]:
        lowest = logits.topk(sample.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, float("-inf"))
    if sample.top_p is not None and sample.top_p < 1:
        ordered, order = logits.sort(descending=True, stable=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        removed = before > sample.top_p
        removed[:, 0] = False
        logits = logits.masked_fill(removed.scatter(-1, order, removed), float("-inf"))
    return logits


def _exponential(seed: int, sequence: int, position: int, *, size: int) -> Tensor:
    generator = torch.Generator().manual_seed(key(seed, "sample", str(sequence), position))
    return torch.empty(size, dtype=torch.float64).exponential_(generator=generator)


Finish = Literal["stop", "length", "context"]
"""Why a sequence ended: its end token, max_new_tokens, or the context length of the model."""

STEP_TOKENS = 4096
"""Tokens per forward pass; longer prompts are processed in chunks to bound activation memory
(heuristic)."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A new token of one sequence."""

    sequence: int
    """Index of its prompt."""

    token: int
    finish: Finish | None
    """Set for the last token."""


@dataclass(slots=True)
class _Sequence:
    """A prompt and the tokens generated after it."""

    number: int
    ids: list[int]
    prompt_length: int
    num_cached: int = field(default=0)
    """Tokens whose keys and values are in the cache."""


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    sample: SampleConfig,
    *,
    stops: frozenset[int] = frozenset(),
    step_tokens: int = STEP_TOKENS,
    before: PrefixState | None = None,
) -> Iterator[GeneratedToken]:
    """Generate continuations of all prompts; yields tokens as they are sampled, one per unfinished
    sequence and step.

    `stops`: tokens that end a sequence. All ranks of the tensor-parallel group call this with the
    same arguments, and sample the same tokens. A sequence does not depend on the other ones.
    `before`: KV cache of the only prompt, reused between calls.

    Raises:
        ConfigError: the sampling settings are invalid.
        DataError: a prompt is empty, too long for the model, or has unknown ids.
        CheckpointError: the logits are not finite.
    """
    raise_all(range_problems(sample))
    check_prompts(prompts, model.config)
    assert before is None or len(prompts) == 1, "a prefix state serves one prompt"
    active = [_Sequence(number, list(ids), len(ids)) for number, ids in enumerate(prompts)]
    if before is not None and _depends_on_length(model.config, len(prompts[0])):
        before.clear(sequence=0)
        before = None
    elif before is not None:
        active[0].num_cached = before.resume(prompts[0], sequence=0)
    prefix_state = before or build_prefix_state(model.config)
    if any(_depends_on_length(model.config, len(ids)) for ids in prompts):
        # RoPE frequencies depend on the length, so all prompts are read in one step.
        step_tokens = max(step_tokens, sum(map(len, prompts)))
    while active:
        num_new_tokens = divide_token_budget(
            [len(s.ids) - s.num_cached for s in active], step_tokens
        )
        new_tokens_of = [
            (s, count) for s, count in zip(active, num_new_tokens, strict=True) if count
        ]
        complete = [s for s, count in new_tokens_of if s.num_cached + count == len(s.ids)]
        prefix_state.forget()
        logits = _forward_step(model, new_tokens_of, prefix_state.cache)
        if before is not None and not _needs_recompute(model.config, len(active[0].ids)):
            prefix_state.record_ids(active[0].ids[: active[0].num_cached])
        tokens = (
            sample_tokens(logits, sample, [(s.number, len(s.ids)) for s in complete])
            if complete
            else []
        )
        for sequence, token in zip(complete, tokens, strict=True):
            sequence.ids.append(token)
            if _needs_recompute(model.config, len(sequence.ids)) and not _needs_recompute(
                model.config, len(sequence.ids) - 1
            ):
                prefix_state.cache.drop(sequence.number)
                sequence.num_cached = 0
            finish = _finish(sequence, sample, model.config, stops)
            if finish is not None:
                active.remove(sequence)
                if before is None:
                    prefix_state.cache.drop(sequence.number)
            yield GeneratedToken(sequence.number, token, finish)


def build_prefix_state(model: ModelConfig) -> PrefixState:
    """Return an empty KV cache for a text."""
    return PrefixState(model.num_layers, attention_views(model))


def _depends_on_length(model: ModelConfig, length: int) -> bool:
    """Return whether the rotary frequencies of a text depend on its length, so that its keys cannot
    be reused."""
    return model.positions == "rope" and rope_length(model.rope, length) > 0


def _needs_recompute(model: ModelConfig, length: int) -> bool:
    """Return whether a text of this length has other rotary frequencies than its prefixes."""
    return model.rope.scaling == "longrope" and _depends_on_length(model, length)


def attention_views(model: ModelConfig) -> list[AttentionView]:
    """Return the attention range of every attention in order: of each layer, and of its cross-layer
    attention."""
    layer_view = AttentionView(model.attention.window, model.attention.chunked)
    return [
        view
        for layer in range(model.num_layers)
        for view in (
            layer_view if model.has_window(layer) else EVERYTHING,
            *([EVERYTHING] if model.uses_cross_layer_source(layer) else []),
        )
    ]


def check_prompts(prompts: Sequence[Sequence[int]], model: ModelConfig) -> None:
    """Check that the model can process the prompts and generate at least one token.

    Raises:
        DataError: the first prompt that is invalid.
    """
    for number, ids in enumerate(prompts):
        if not ids:
            raise DataError(f"prompt {number + 1} has {len(ids)} tokens: pass at least one.")
        if len(ids) >= model.max_seq_len:
            raise DataError(
                f"prompt {number + 1} has {len(ids)} tokens, but the context of the model is "
                f"{model.max_seq_len} tokens including new ones. Use a prompt of at most "
                f"{model.max_seq_len - 1} tokens."
            )
        unknown = [token for token in ids if not 0 <= token < model.vocab_size]
        if unknown:
            raise DataError(
                f"prompt {number + 1} has token {unknown[0]}, but the ids of the model are below "
                f"{model.vocab_size}. "
                f"Use the tokenizer that the model was trained with."
            )


def divide_token_budget(requested: Sequence[int], budget: int) -> list[int]:
    """Divide a token budget: each sequence gets what it requests until the budget is used up.

    >>> divide_token_budget([3, 5, 1], 6)
    [3, 3, 0]
    """
    counts = []
    for count in requested:
        counts.append(min(count, budget))
        budget -= counts[-1]
    return counts


@torch.no_grad()
def _forward_step(
    model: Decoder, new_tokens_of: Sequence[tuple[_Sequence, int]], cache: KVCache
) -> Tensor:
    """Process the next tokens of each sequence; returns logits [b, v] after the last token of
    complete ones."""
    device = next(model.parameters()).device
    ids: list[int] = []
    last_positions: list[int] = []
    for sequence, count in new_tokens_of:
        ids += sequence.ids[sequence.num_cached : sequence.num_cached + count]
        sequence.num_cached += count
        if sequence.num_cached == len(sequence.ids):
            last_positions.append(len(ids) - 1)
    seq_params = seq_params_from_queries(
        [(count, sequence.num_cached) for sequence, count in new_tokens_of],
        reach=[len(sequence.ids) for sequence, _ in new_tokens_of],
        device=device,
    )
    caches = cache.layers([sequence.number for sequence, _ in new_tokens_of])
    return model.logits(
        torch.tensor(ids, device=device),
        LayerInputs(seq_params),
        caches,
        torch.tensor(last_positions, device=device).long(),
    )


def _finish(
    sequence: _Sequence, sample: SampleConfig, model: ModelConfig, stops: frozenset[int]
) -> Finish | None:
    if sequence.ids[-1] in stops:
        return "stop"
    if len(sequence.ids) - sequence.prompt_length == sample.max_new_tokens:
        return "length"
    return "context" if len(sequence.ids) == model.max_seq_len else None


# --- text in and out of generation: encode prompts, and decode generated tokens in the order of the
# prompts


def encode_prompt(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a prompt, without an end token. An empty text begins a document.

    Raises:
        DataError: the text is not valid Unicode, or it is empty and the tokenizer has no token to
            begin with.
    """
    try:
        text.encode()
    except (
        UnicodeEncodeError
    ) as error:  # the shell passes bytes that are not UTF-8 as lone surrogates
        raise DataError(
            f"character {error.start + 1} is {text[error.start]!r}: must be UTF-8 text."
        ) from error
    ids = tokenizer.encode(text)
    if ids and appends_eod(tokenizer):
        ids = ids[:-1]
    if not ids:
        # In training documents are concatenated, so a document begins after an end token.
        ids = [tokenizer.eod if tokenizer.bos is None else tokenizer.bos]
    return ids


class Transcript:
    """Text of one sequence during generation."""

    def __init__(self, prompt: str, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> None:
        self.prompt, self.prompt_ids = prompt, list(prompt_ids)
        self.ids: list[int] = []
        self.text = ""
        self.finish: Finish | None = None
        self._decoder = StreamDecoder(tokenizer)
        # Many tokenizers drop the space before the first word they decode; decoding the prompt
        # first keeps it.
        self.echo = "".join(self._decoder.push(token) for token in prompt_ids)

    def add(self, generated: GeneratedToken) -> None:
        """Append a generated token."""
        self.ids.append(generated.token)
        self.finish = generated.finish
        # The end token is not part of the text.
        new = "" if generated.finish == "stop" else self._decoder.push(generated.token)
        if generated.finish is not None:
            new += self._decoder.finish()
        self.text += new


class OrderedPrinter:
    """Prints texts of several sequences in order while they are generated: the first unfinished one
    streams."""

    def __init__(self, transcripts: Sequence[Transcript]) -> None:
        self._transcripts = transcripts
        self._current = -1
        self._shown = 0  # characters of the current one

    def unread_text(self) -> str:
        """Return the text that can be printed now: prompts and continuations; several sequences
        have header lines."""
        parts = [self._next()] if self._current < 0 else []
        while self._current < len(self._transcripts):
            transcript = self._transcripts[self._current]
            parts.append((transcript.echo + transcript.text)[self._shown :])
            self._shown += len(parts[-1])
            if transcript.finish is None:
                break
            parts.append("\n" + self._next())
        return "".join(parts)

    def _next(self) -> str:
        self._current, self._shown = self._current + 1, 0
        count = len(self._transcripts)
        return f"--- {self._current + 1} of {count} ---\n" if self._current < count > 1 else ""


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the ids of every prompt.

    Raises:
        DataError: a prompt cannot be encoded; it is named.
    """
    encoded = []
    for number, text in enumerate(texts, 1):
        try:
            encoded.append(encode_prompt(text, tokenizer))
        except DataError as error:
            raise DataError(
                f"prompt {number} ({text!r:.40}): {error} Use another prompt."
            ) from error
    return encoded


def generate_text(
    generator: TextGenerator,
    prompts: Sequence[str],
    sample: SampleConfig,
    *,
    ignore_eod: bool,
    show: Callable[[str], None],
) -> list[Transcript]:
    """Generate continuations of all prompts; `show` gets the texts as they grow, in the order of
    the prompts.

    Called by every tensor-parallel rank with the same arguments.

    Raises:
        ConfigError: the sampling settings are invalid.
        DataError: a prompt cannot be encoded or processed.
        CheckpointError: the logits are not finite.
    """
    encoded = encode_prompts(prompts, generator.tokenizer)
    transcripts = [
        Transcript(text, ids, generator.tokenizer)
        for text, ids in zip(prompts, encoded, strict=True)
    ]
    printer = OrderedPrinter(transcripts)
    stops: frozenset[int] = frozenset() if ignore_eod else generator.stops
    for token in generate(generator.model, encoded, sample, stops=stops):
        transcripts[token.sequence].add(token)
        show(printer.unread_text())
    return transcripts
