"""Sampling of the next token of every row of a batch: logit processors, filters, keyed noise and
log-probs.

Logits are processed in fp32, or in float64 if they are float64. A row is processed with its own
parameters, and its noise is keyed by (seed, choice, absolute position), so its token does not
depend on the rest of the batch. Rows that need neither processors nor filters are sampled in one
pass over their logits; only the other rows are copied.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.config.generation import SamplingParams
from megalith.data.tokenizer import Tokenizer
from megalith.errors import CheckpointError
from megalith.kernels.sampling import GumbelArgmax, gumbel_argmax
from megalith.plan.keys import key

MASKED = float("-inf")
"""Logit of a token that is never sampled."""

TOP_P_CANDIDATES = 1024
"""Number of most likely tokens that top_p sorts at first, and 16 times as many while their
probability is not above top_p. Heuristic: models rarely need more, and a sort of the entire
vocabulary takes several times as long."""

LOGPROB_ROWS = 8
"""Rows per log-softmax, to bound its memory. Measured for 64 rows of 152,000 logits: half the time
of all rows at once, whose temporary tensors leave the cache."""


class TokenCounts:
    """Counts of the tokens of one choice of a request: its prompt tokens, and how often each token
    occurs in its output.

    The engine keeps one object per choice, also while the request is preempted, and counts the
    tokens that it emits. Rows of draft tokens use a copy (`with_drafts`), so that rejected drafts
    are not counted.
    """

    def __init__(self, prompt_ids: Iterable[int]) -> None:
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = np.fromiter(self._slots, np.int64, len(self._slots))
        self._counts = np.zeros(len(self._slots), np.int64)
        self.num_output = 0
        """Number of output tokens that are counted."""

    @property
    def ids(self) -> NDArray[np.int64]:
        """Ids of the tokens in the prompt or the output, each once: [num_ids]."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> NDArray[np.int64]:
        """Number of occurrences of each of `ids` in the output: [num_ids]."""
        return self._counts[: len(self._slots)]

    def update(self, output_ids: Sequence[int]) -> None:
        """Count the tokens of the output that are not counted yet.

        output_ids: the entire output, so that no call counts a token twice, also after a
        preemption.
        """
        self._add(output_ids[self.num_output :])

    def with_drafts(self, draft_ids: Sequence[int]) -> "TokenCounts":
        """Return a copy that also counts draft tokens; this object does not change."""
        copy = TokenCounts(())
        copy._slots = dict(self._slots)
        copy._ids, copy._counts = self._ids.copy(), self._counts.copy()
        copy.num_output = self.num_output
        copy._add(draft_ids)
        return copy

    def _add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            slot = self._slots.setdefault(token, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros(slot + 8, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(slot + 8, np.int64)])
            self._ids[slot] = token
            self._counts[slot] += 1
        self.num_output += len(tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """One row of a batch: the request whose next token is sampled from a row of logits."""

    params: SamplingParams

    seed: int
    """Seed of the noise: of the parameters, or derived by the engine."""

    choice: int = 0
    """Index of the choice of the request, below `params.n`."""

    position: int
    """Absolute position of the sampled token in prompt and output, counted from 0."""

    prompt_ids: Sequence[int] = ()

    output_ids: Sequence[int] = ()
    """Tokens that were generated before, with the drafts before this position."""

    counts: TokenCounts | None = None
    """Counts of these tokens, for penalties. Unset: counted from the ids, which takes longer."""

    end_ids: frozenset[int] = frozenset()
    """Tokens that end the output (`StoppingCriteria.end_ids`), masked before `params.min_tokens`
    tokens."""

    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that are not generated: see `encode_bad_words`."""

    grammar_mask: Tensor | None = None
    """bool [v]: True for tokens that the grammar allows. Unset: all."""

    @property
    def has_processors(self) -> bool:
        """Whether anything but the temperature changes the logits or removes tokens."""
        params = self.params
        return bool(
            params.logit_bias
            or params.allowed_token_ids is not None
            or self.bad_word_ids
            or self.grammar_mask is not None
            or params.has_penalties
            or self.masked_end_ids
            or _has_filters(params)
        )

    @property
    def masked_end_ids(self) -> frozenset[int]:
        """End tokens that cannot be sampled at this position."""
        return self.end_ids if len(self.output_ids) < self.params.min_tokens else frozenset()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probs at one position."""

    token: int

    logprob: float
    """Log-prob of the token."""

    rank: int
    """1 plus the number of tokens that are more likely."""

    top_logprobs: Mapping[int, float]
    """Log-probs by token id: the most likely tokens in descending order, the lowest id of equals
    first, and then the token itself unless it is one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """Result of one row."""

    token: int
    """The sampled token id; -1 with an error."""

    logprobs: TokenLogprobs | None = None
    """Log-probs, if the parameters request them."""

    error: str | None = None
    """Why no token could be sampled; the request ends with it."""

    is_request_error: bool = False
    """Whether the parameters of the request are the cause of the error, which mask all tokens."""


def sample_tokens(
    logits: Tensor, rows: Sequence[SampleRow], *, vocab_size: int
) -> list[SampledToken]:
    """Sample a token from each row of logits [rows, v].

    vocab_size: number of token ids; the columns after them, which pad the vocabulary, are never
    sampled. A row whose logits are not finite, or whose tokens are all masked, has an error; the
    other rows do not depend on it.
    """
    assert len(rows) == len(logits), f"{len(rows)} rows, {len(logits)} rows of logits"
    logits = _in_fp32(logits)[:, :vocab_size]
    tokens: dict[int, int] = {}
    errors: dict[int, str] = {}
    masked_rows: set[int] = set()
    processed: dict[int, Tensor] = {}  # logits of rows with processors or filters
    plain = [index for index, row in enumerate(rows) if not row.has_processors]
    if plain:
        group = _select_rows(logits, plain)
        best = _sample(group, [rows[index] for index in plain])
        num_masked = best.num_masked.tolist()
        for index, token, masked in zip(plain, best.ids.tolist(), num_masked, strict=True):
            if token < 0 or masked > 0:
                errors[index] = _describe_nonfinite(rows[index].position)
            else:
                tokens[index] = token
    others = [index for index, row in enumerate(rows) if row.has_processors]
    if others:
        finite = _find_finite_rows(_select_rows(logits, others))
        for index, is_finite in zip(others, finite, strict=True):
            if not is_finite:
                errors[index] = _describe_nonfinite(rows[index].position)
        others = [index for index in others if index not in errors]
    if others:
        group, group_rows = logits[others], [rows[index] for index in others]
        process_logits(group, group_rows)
        filter_logits(group, [row.params for row in group_rows])
        for index, token, row_logits in zip(
            others, _sample(group, group_rows).ids.tolist(), group, strict=True
        ):
            if token < 0:
                errors[index] = _describe_masked(rows[index])
                masked_rows.add(index)
            else:
                tokens[index], processed[index] = token, row_logits
    logprobs = _compute_row_logprobs(logits, processed, rows, tokens)
    return [
        SampledToken(
            token=tokens.get(index, -1),
            logprobs=logprobs.get(index),
            error=errors.get(index),
            is_request_error=index in masked_rows,
        )
        for index in range(len(rows))
    ]


def _in_fp32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _select_rows(logits: Tensor, indices: list[int]) -> Tensor:
    """Return rows of logits in ascending order, without a copy if these are all."""
    return logits if len(indices) == len(logits) else logits[indices]


def _find_finite_rows(logits: Tensor) -> list[bool]:
    """Return whether each row has finite logits only; `isfinite` of all would take 20 times as
    long."""
    finite: list[bool] = (logits.amax(-1).isfinite() & logits.amin(-1).isfinite()).tolist()
    return finite


def _sample(logits: Tensor, rows: Sequence[SampleRow]) -> GumbelArgmax:
    keys = [key(row.seed, "sample", str(row.choice), row.position) for row in rows]
    temperatures = [0.0 if row.params.is_greedy else row.params.temperature for row in rows]
    return gumbel_argmax(logits, keys, temperatures)


def _describe_nonfinite(position: int) -> str:
    return (
        f"the logits at position {position} are not finite, so the weights have probably diverged. "
        "Use an earlier checkpoint."
    )


def _describe_masked(row: SampleRow) -> str:
    params = row.params
    names = [
        *(["allowed_token_ids"] if params.allowed_token_ids is not None else []),
        *(["bad_words"] if row.bad_word_ids else []),
        *(["the grammar"] if row.grammar_mask is not None else []),
        *([f"min_tokens={params.min_tokens}"] if row.masked_end_ids else []),
    ]
    return (
        f"no token can be sampled at position {row.position}: {' and '.join(names)} "
        f"{'mask' if len(names) > 1 else 'masks'} all tokens. Allow at least one token."
    )


# --- logit processors


def process_logits(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    """Apply the processors of every row to logits [rows, v], in place; masked tokens are -inf.

    Order: logit_bias; allowed_token_ids, bad words and grammar mask; repetition penalty; frequency
    and presence penalty; end tokens before min_tokens.
    """
    _add_logit_bias(logits, rows)
    for row_logits, row in zip(logits, rows, strict=True):
        _mask_disallowed(row_logits, row)
    banned = [_find_banned_tokens(row) for row in rows]
    logits[_coordinates(banned, logits.device)] = MASKED
    _apply_penalties(logits, rows)
    logits[_coordinates([list(row.masked_end_ids) for row in rows], logits.device)] = MASKED


def _coordinates(
    ids_of_rows: Sequence[Sequence[int] | NDArray[np.int64]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return row and column of the listed token ids of every row, as indices of logits."""
    sizes = [len(ids) for ids in ids_of_rows]
    indices = np.repeat(np.arange(len(sizes)), sizes)
    columns = np.concatenate([np.asarray(ids, np.int64) for ids in ids_of_rows])
    return torch.from_numpy(indices).to(device), torch.from_numpy(columns).to(device)


def _add_logit_bias(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    biases = [row.params.logit_bias for row in rows]
    if any(biases):
        entries = _coordinates([[token for token, _ in bias] for bias in biases], logits.device)
        values = [value for bias in biases for _, value in bias]
        logits[entries] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _mask_disallowed(logits: Tensor, row: SampleRow) -> None:
    """Mask the tokens of one row [v] that the parameters or the grammar do not allow, in place."""
    if row.params.allowed_token_ids is not None:
        disallowed = torch.ones_like(logits, dtype=torch.bool)
        disallowed[torch.tensor(row.params.allowed_token_ids, device=logits.device)] = False
        logits.masked_fill_(disallowed, MASKED)
    if row.grammar_mask is not None:
        logits.masked_fill_(~row.grammar_mask[: len(logits)], MASKED)


def _find_banned_tokens(row: SampleRow) -> list[int]:
    """Return the last tokens of the bad words whose other tokens end the text so far."""
    banned = []
    for *prefix, last in row.bad_word_ids:
        tail = list(row.output_ids[-len(prefix) :]) if prefix else []
        missing = len(prefix) - len(tail)
        if missing > 0:
            tail = [*row.prompt_ids[-missing:], *tail]
        if tail == prefix:
            banned.append(last)
    return banned


def _apply_penalties(logits: Tensor, rows: Sequence[SampleRow]) -> None:
    if not any(row.params.has_penalties for row in rows):
        return
    nothing = TokenCounts(())
    counts_of_rows = [_count_tokens(row) if row.params.has_penalties else nothing for row in rows]
    sizes = [len(row_counts.ids) for row_counts in counts_of_rows]
    entries = _coordinates([row_counts.ids for row_counts in counts_of_rows], logits.device)

    def spread(values: list[float]) -> Tensor:
        repeated = torch.from_numpy(np.repeat(np.array(values, np.float64), sizes))
        return repeated.to(logits.device, logits.dtype)

    output_counts = torch.from_numpy(
        np.concatenate([row_counts.output_counts for row_counts in counts_of_rows])
    ).to(logits.device, logits.dtype)
    repetition = spread([row.params.repetition_penalty for row in rows])
    values = logits[entries]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= spread([row.params.frequency_penalty for row in rows]) * output_counts
    values -= spread([row.params.presence_penalty for row in rows]) * (output_counts > 0)
    logits[entries] = values.clamp_(max=torch.finfo(logits.dtype).max)


def _count_tokens(row: SampleRow) -> TokenCounts:
    if row.counts is None:
        counts = TokenCounts(row.prompt_ids)
        counts.update(row.output_ids)
        return counts
    assert row.counts.num_output == len(row.output_ids), (
        f"{row.counts.num_output} output tokens are counted of {len(row.output_ids)}: call "
        "TokenCounts.update for emitted tokens, with_drafts for drafts"
    )
    return row.counts


def encode_bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of bad words, each also with a space before it, which most
    tokenizers encode as another first token."""
    sequences = [
        tuple(tokenizer.encode_marked(text)) for word in words for text in (word, f" {word}")
    ]
    return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))


# --- filters


def _has_filters(params: SamplingParams) -> bool:
    filters = params.active_top_k or params.active_top_p or params.min_p > 0
    return bool(filters) and not params.is_greedy


def filter_logits(logits: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the logits [rows, v] of tokens outside of top_k, then top_p, then min_p to -inf, in
    place; the most likely token always remains.

    The logits are not divided by the temperature, but top_p and min_p concern the probabilities at
    the temperature. top_k keeps ties with the k-th value; of ties at the border of top_p the lowest
    ids remain. Greedy rows are not filtered.
    """
    for row_logits, row in zip(logits, params, strict=True):
        if _has_filters(row):
            _filter_row(row_logits, row)


def _filter_row(logits: Tensor, params: SamplingParams) -> None:
    """Filter the logits [v] of one row, in place: find the lowest one that remains."""
    lowest, k = MASKED, params.active_top_k
    candidates: Tensor | None = None  # all tokens that top_k keeps, in descending order
    if k is not None and k < len(logits):
        largest = logits.topk(k + 1).values
        lowest, next_one = largest[k - 1 :].tolist()
        if lowest > next_one:
            candidates = largest[:k]
        else:
            logits.masked_fill_(logits < lowest, MASKED)
    if params.active_top_p is not None:
        lowest = _filter_top_p(logits, candidates, params.temperature, params.active_top_p)
    if params.min_p > 0:
        top = float(logits.max())
        lowest = max(lowest, top + params.temperature * math.log(params.min_p))
    logits.masked_fill_(logits < lowest, MASKED)


def _filter_top_p(
    logits: Tensor, candidates: Tensor | None, temperature: float, top_p: float
) -> float:
    """Return the lowest logit that top_p keeps of a row [v]; ties with it that are not kept are
    masked in place.

    candidates: all tokens to select from, in descending order. Unset: all of the row, of which only
    as many are sorted as are needed.
    """
    pool = logits if candidates is None else candidates
    total = (pool / temperature).logsumexp(0)
    size = TOP_P_CANDIDATES
    while True:
        ordered = logits.topk(min(size, len(logits))).values if candidates is None else candidates
        cumulative = (ordered / temperature - total).exp().cumsum(0)
        # a token remains if the probability of the tokens before it is at most top_p
        num_kept = 1 + int((cumulative[:-1] <= top_p).sum())
        if num_kept < len(ordered) or len(ordered) == len(pool):
            break
        size *= 16
    lowest = ordered[num_kept - 1]
    if num_kept < len(ordered) and bool(ordered[num_kept] == lowest):
        ties = (logits == lowest).nonzero().squeeze(1)
        logits[ties[num_kept - int((ordered > lowest).sum()) :]] = MASKED
    return float(lowest)


# --- log-probs


def _compute_row_logprobs(
    logits: Tensor,
    processed: Mapping[int, Tensor],
    rows: Sequence[SampleRow],
    tokens: Mapping[int, int],
) -> dict[int, TokenLogprobs]:
    """Return the log-probs of the rows that request them, by row.

    Processed log-probs of greedy rows are those at temperature 1, since the distribution has a
    single token otherwise.
    """
    result: dict[int, TokenLogprobs] = {}
    for mode in ("raw", "processed"):
        indices = [
            index
            for index in sorted(tokens)
            if rows[index].params.logprobs is not None and rows[index].params.logprobs_mode == mode
        ]
        if not indices:
            continue
        if mode == "raw":
            group = _select_rows(logits, indices)
        else:
            params = [rows[index].params for index in indices]
            scales = [1.0 if row.is_greedy else row.temperature for row in params]
            group = torch.stack(
                [
                    processed.get(index, logits[index]) / scale
                    for index, scale in zip(indices, scales, strict=True)
                ]
            )
        logprobs = compute_logprobs(
            group,
            [tokens[index] for index in indices],
            [rows[index].params.logprobs or 0 for index in indices],
        )
        result |= zip(indices, logprobs, strict=True)
    return result


def prompt_logprobs(
    logits: Tensor, next_tokens: Sequence[int], top_n: int, *, vocab_size: int
) -> list[TokenLogprobs]:
    """Return the log-probs of prompt tokens: row i of logits [k, v] predicts `next_tokens[i]`.

    A prompt of p tokens has p - 1 of them; its chunks may be passed one after the other.

    Raises:
        CheckpointError: a logit is not finite.
    """
    logits = _in_fp32(logits)[:, :vocab_size]
    if not all(_find_finite_rows(logits)):
        raise CheckpointError(
            "the logits of the prompt are not finite, so the weights have probably diverged. "
            "Use an earlier checkpoint."
        )
    return compute_logprobs(logits, next_tokens, [top_n] * len(next_tokens))


def compute_logprobs(
    logits: Tensor, tokens: Sequence[int], top_n: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log-prob of one token per row of logits [rows, v], fp32 or float64, and of the
    row's `top_n` most likely tokens; -inf logits have the log-prob -inf."""
    result: list[TokenLogprobs] = []
    for start in range(0, len(tokens), LOGPROB_ROWS):
        stop = start + LOGPROB_ROWS
        result += _compute_chunk_logprobs(logits[start:stop], tokens[start:stop], top_n[start:stop])
    return result


def _compute_chunk_logprobs(
    logits: Tensor, tokens: Sequence[int], top_n: Sequence[int]
) -> list[TokenLogprobs]:
    totals = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    logprobs = (chosen - totals).squeeze(1).tolist()
    size = min(max(top_n) + 1, logits.shape[1]) if max(top_n) > 0 else 0
    values, ids = logits.topk(size)
    top_values, top_ids, top_logits = (values - totals).tolist(), ids.tolist(), values.tolist()
    result = []
    for row, (token, count) in enumerate(zip(tokens, top_n, strict=True)):
        entries = list(zip(top_ids[row], top_values[row], strict=True))
        if 0 < count < size and top_logits[row][count - 1] == top_logits[row][count]:
            entries = _resolve_ties(logits[row], entries, count)
        entries = sorted(entries[:count], key=lambda entry: (-entry[1], entry[0]))
        top = dict(entries)
        top.setdefault(token, logprobs[row])
        result.append(TokenLogprobs(token, logprobs[row], ranks[row], top))
    return result


def _resolve_ties(
    logits: Tensor, entries: list[tuple[int, float]], count: int
) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens of a row [v] whose last one has ties: the lowest ids of
    them. entries: its most likely tokens with their log-probs, in order."""
    lowest, logprob = logits[entries[count - 1][0]], entries[count - 1][1]
    above = [(token, value) for token, value in entries if bool(logits[token] > lowest)]
    ties = (logits == lowest).nonzero().squeeze(1)[: count - len(above)].tolist()
    return above + [(token, logprob) for token in ties]
