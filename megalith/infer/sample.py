"""Sampling of the next token of every row of a batch: logit processors, filters, keyed noise and
log-probs.

Logits are processed in fp32, or in float64 if they are float64. A row is processed with its own
parameters, and its noise is keyed by (seed, choice, absolute position), so its token does not
depend on the rest of the batch. Rows that need neither processors nor filters are sampled in one
pass over their logits; only the other rows are copied.

Each tensor-parallel rank has the logits of a slice of the vocabulary, and they are not gathered.
Processors act on single tokens, so they need no communication. Then the ranks all-gather a few
numbers per row, and each merges those of all ranks in the same way: the largest logits of rows with
filters; the best token of every row; the log-sum-exp and the most likely tokens of rows with
log-probs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from megalith.config.generation import SamplingParams
from megalith.data.tokenizer import Tokenizer
from megalith.infer.logprobs import TokenLogprobs, compute_logprobs
from megalith.infer.vocab_slice import MASKED, VocabSlice, find_finite_rows
from megalith.kernels.sampling import GumbelArgmax, gumbel_argmax
from megalith.plan.keys import key

TOP_P_CANDIDATES = 1024
"""Number of most likely tokens, of all ranks together, that top_p sorts at first, and 16 times as
many while their probability is not above top_p. Heuristic: models rarely need more, and a sort of
the entire vocabulary takes several times as long."""


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
    logits: Tensor, rows: Sequence[SampleRow], vocab: VocabSlice
) -> list[SampledToken]:
    """Sample a token from each row of logits [rows, v_local], the columns of `vocab`; the same on
    all ranks.

    A row whose logits are not finite, or whose tokens are all masked, has an error; the other rows
    do not depend on it.
    """
    assert len(rows) == len(logits), f"{len(rows)} rows, {len(logits)} rows of logits"
    logits = vocab.remove_padding(logits)
    best, processed = _sample_slice(logits, rows, vocab)
    requests = _select_logprob_rows(logits, processed, rows)
    chosen = torch.zeros_like(best.values)
    for indices, group in requests:
        chosen[indices] = vocab.select_logits(group, best.ids[indices])
    winners = merge_best(vocab.gather(torch.stack([*best, chosen], -1)))
    logprobs = _compute_row_logprobs(requests, winners, rows, vocab)
    results: list[SampledToken] = []
    for index, (row, winner) in enumerate(zip(rows, winners, strict=True)):
        if not winner.is_finite:
            result = SampledToken(token=-1, error=_describe_nonfinite(row.position))
        elif winner.token < 0:
            result = SampledToken(token=-1, error=_describe_masked(row), is_request_error=True)
        else:
            result = SampledToken(token=winner.token, logprobs=logprobs.get(index))
        results.append(result)
    return results


def _sample_slice(
    logits: Tensor, rows: Sequence[SampleRow], vocab: VocabSlice
) -> tuple[GumbelArgmax, dict[int, Tensor]]:
    """Return the best local token of every row, and the processed and filtered logits of the rows
    with processors.

    Rows with logits that are not finite have a NaN as best value, or -inf logits are counted.
    """
    plain = [index for index, row in enumerate(rows) if not row.has_processors]
    others = [index for index, row in enumerate(rows) if row.has_processors]
    if not others:
        return _sample(logits, rows, vocab), {}
    group, group_rows = logits[others], [rows[index] for index in others]
    is_invalid = ~find_finite_rows(group)
    if bool(is_invalid.any()):  # masked, and not removed: ranks have the same rows
        group[is_invalid] = MASKED
    process_logits(group, group_rows, first_token=vocab.first_token)
    filter_logits(group, [row.params for row in group_rows], vocab)
    best = _sample(group, group_rows, vocab)
    best = best._replace(
        values=best.values.masked_fill(is_invalid, math.nan),
        num_masked=torch.zeros_like(best.num_masked),  # by processors
    )
    processed = dict(zip(others, group, strict=True))
    if plain:
        plain_best = _sample(logits[plain], [rows[index] for index in plain], vocab)
        order = torch.tensor(plain + others, device=logits.device).argsort()
        pairs = zip(plain_best, best, strict=True)
        best = GumbelArgmax(*(torch.cat(pair)[order] for pair in pairs))
    return best, processed


class _Winner(NamedTuple):
    """The sampled token of a row."""

    token: int
    """Its id; -1 if all tokens are masked."""

    logit: float
    """Its logit in the distribution whose log-probs are requested."""

    is_finite: bool
    """Whether the logits of the row are finite."""

    @property
    def is_valid(self) -> bool:
        """Whether there is a token."""
        return self.is_finite and self.token >= 0


def merge_best(parts: NDArray[np.float64]) -> list[_Winner]:
    """Return the token with the largest value of each row, of equal values that of the lowest rank.

    parts: [tp, rows, 4], the fields of `GumbelArgmax` of every rank, and the logit of its token.
    """
    values, ids, num_masked, logits = np.moveaxis(parts, -1, 0)
    is_finite = ~np.isnan(values).any(0) & (num_masked.sum(0) == 0)
    best = values.argmax(0)
    columns = np.arange(parts.shape[1])
    selected = ids[best, columns].astype(np.int64).tolist(), logits[best, columns].tolist()
    return [_Winner(*fields) for fields in zip(*selected, is_finite.tolist(), strict=True)]


def _select_rows(logits: Tensor, indices: list[int]) -> Tensor:
    """Return rows of logits in ascending order, without a copy if these are all."""
    return logits if len(indices) == len(logits) else logits[indices]


def _sample(logits: Tensor, rows: Sequence[SampleRow], vocab: VocabSlice) -> GumbelArgmax:
    keys = [key(row.seed, "sample", str(row.choice), row.position) for row in rows]
    temperatures = [0.0 if row.params.is_greedy else row.params.temperature for row in rows]
    return gumbel_argmax(logits, keys, temperatures, first_token=vocab.first_token)


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


def process_logits(logits: Tensor, rows: Sequence[SampleRow], *, first_token: int = 0) -> None:
    """Apply the processors of every row to logits [rows, v_local], in place; masked tokens are
    -inf. `first_token`: token id of the first column.

    Order: logit_bias; allowed_token_ids, bad words and grammar mask; repetition penalty; frequency
    and presence penalty; end tokens before min_tokens.
    """
    _add_logit_bias(logits, rows, first_token)
    for row_logits, row in zip(logits, rows, strict=True):
        _mask_disallowed(row_logits, row, first_token)
    banned = _find_entries([_find_banned_tokens(row) for row in rows], logits, first_token)
    logits[banned.indices] = MASKED
    _apply_penalties(logits, rows, first_token)
    ends = _find_entries([list(row.masked_end_ids) for row in rows], logits, first_token)
    logits[ends.indices] = MASKED


class _Entries(NamedTuple):
    """The logits [rows, v_local] of token ids that are listed by row."""

    indices: tuple[Tensor, Tensor]
    """Row and column of the listed ids that have a column."""

    is_local: NDArray[np.bool_]
    """Which of the listed ids have a column."""


def _find_entries(
    ids_of_rows: Sequence[Sequence[int] | NDArray[np.int64]], logits: Tensor, first_token: int
) -> _Entries:
    sizes = [len(ids) for ids in ids_of_rows]
    indices = np.repeat(np.arange(len(sizes)), sizes)
    columns = np.concatenate([np.asarray(ids, np.int64) for ids in ids_of_rows]) - first_token
    is_local = (columns >= 0) & (columns < logits.shape[1])
    row, column = (
        torch.from_numpy(each[is_local]).to(logits.device) for each in (indices, columns)
    )
    return _Entries((row, column), is_local)


def _add_logit_bias(logits: Tensor, rows: Sequence[SampleRow], first_token: int) -> None:
    biases = [row.params.logit_bias for row in rows]
    if any(biases):
        ids = [[token for token, _ in bias] for bias in biases]
        entries = _find_entries(ids, logits, first_token)
        values = np.array([value for bias in biases for _, value in bias])[entries.is_local]
        logits[entries.indices] += torch.from_numpy(values).to(logits.device, logits.dtype)


def _mask_disallowed(logits: Tensor, row: SampleRow, first_token: int) -> None:
    """Mask the tokens of one row [v_local] that the parameters or the grammar do not allow, in
    place."""
    if row.params.allowed_token_ids is not None:
        columns = np.array(row.params.allowed_token_ids, np.int64) - first_token
        columns = columns[(columns >= 0) & (columns < len(logits))]
        disallowed = torch.ones_like(logits, dtype=torch.bool)
        disallowed[torch.from_numpy(columns).to(logits.device)] = False
        logits.masked_fill_(disallowed, MASKED)
    if row.grammar_mask is not None:
        logits.masked_fill_(~row.grammar_mask[first_token : first_token + len(logits)], MASKED)


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


def _apply_penalties(logits: Tensor, rows: Sequence[SampleRow], first_token: int) -> None:
    if not any(row.params.has_penalties for row in rows):
        return
    nothing = TokenCounts(())
    counts_of_rows = [_count_tokens(row) if row.params.has_penalties else nothing for row in rows]
    sizes = [len(row_counts.ids) for row_counts in counts_of_rows]
    ids = [row_counts.ids for row_counts in counts_of_rows]
    entries, is_local = _find_entries(ids, logits, first_token)

    def select_local(values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(values[is_local]).to(logits.device, logits.dtype)

    def spread(values: list[float]) -> Tensor:
        return select_local(np.repeat(np.array(values, np.float64), sizes))

    output_counts = select_local(
        np.concatenate([row_counts.output_counts for row_counts in counts_of_rows])
    )
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


def filter_logits(logits: Tensor, params: Sequence[SamplingParams], vocab: VocabSlice) -> None:
    """Set the logits [rows, v_local] of tokens outside of top_k, then top_p, then min_p to -inf, in
    place; the most likely token always remains.

    The logits are not divided by the temperature, but top_p and min_p concern the probabilities at
    the temperature. top_k keeps ties with the k-th value; of ties at the limit of top_p the lowest
    ids remain. Greedy rows are not filtered.

    Each rank lists its largest logits. They suffice for top_k and min_p; top_p lists more of the
    rows that need more, in the end all of them.
    """
    undecided = [index for index, row in enumerate(params) if _has_filters(row)]
    totals = logits.new_zeros(len(params))
    for index in undecided:
        if _counts_all_probabilities(params[index]):
            totals[index] = (logits[index] / params[index].temperature).logsumexp(0)
    num_candidates = -(-TOP_P_CANDIDATES // vocab.group.size)
    while undecided:
        limits = [_count_candidates(params[index], num_candidates) for index in undecided]
        lists = [
            _list_largest(logits[index], params[index], min(limit, vocab.max_columns))
            for index, limit in zip(undecided, limits, strict=True)
        ]
        gathered = vocab.gather(torch.cat([totals[undecided], *lists]))
        bounds = pairwise(accumulate(map(len, lists), initial=len(undecided)))
        pending = []
        for column, (index, (start, stop)) in enumerate(zip(undecided, bounds, strict=True)):
            threshold = find_threshold(gathered[:, column], gathered[:, start:stop], params[index])
            if threshold is None:
                pending.append(index)
            else:
                _mask_outside(logits[index], threshold, vocab.group.rank)
        undecided, num_candidates = pending, 16 * num_candidates


def _counts_all_probabilities(params: SamplingParams) -> bool:
    """Return whether top_p applies to all tokens, and not only to those that top_k keeps."""
    return params.active_top_p is not None and params.active_top_k is None


def _count_candidates(params: SamplingParams, num_candidates: int) -> int:
    """Return how many of the largest logits of a rank the filters of a row need; 0: only the
    largest."""
    if params.active_top_k is not None:
        return params.active_top_k
    return 0 if params.active_top_p is None else num_candidates


def _list_largest(logits: Tensor, params: SamplingParams, size: int) -> Tensor:
    """List the largest logits of a row [v_local], for `find_threshold`: [size + 2].

    These are the `size` + 1 largest logits in descending order, then -inf, and at last the number
    of logits that are known to equal the one before it.
    """
    num_listed = min(size + 1, len(logits))
    # topk of one takes much longer
    largest = logits.amax(0, keepdim=True) if num_listed == 1 else logits.topk(num_listed).values
    largest = pad(largest, (0, size + 2 - num_listed), value=MASKED)
    if params.active_top_k is not None:
        previous, last = largest[-3:-1].tolist()
        largest[-1] = 0
        if previous == last > MASKED:  # and may equal the k-th one of all ranks
            searched = largest if params.active_top_p is None else logits
            largest[-1] = (searched == last).sum()
    else:
        largest[-1] = params.active_top_p is None
    return largest


class LogitThreshold(NamedTuple):
    """The tokens of a row that remain."""

    lowest: float
    """The lowest logit that remains."""

    num_ties: list[int] | None = None
    """By rank, how many of the logits equal to it remain, those of the lowest ids; unset: all."""


def find_threshold(
    totals: NDArray[np.float64], lists: NDArray[np.float64], params: SamplingParams
) -> LogitThreshold | None:
    """Return the tokens that the filters keep of a row; None if the lists are too short.

    totals: [tp], the log-sum-exp of every rank at the temperature, if
    `_counts_all_probabilities`; lists: [tp, size + 2], see `_list_largest`.
    """
    largest, num_equal = lists[:, :-1], lists[:, -1].astype(np.int64)
    last = largest[:, -1]
    # a rank lists all logits above its last one, and those equal to it if it counts them
    known = [
        np.concatenate([values[values > end], np.full(count, end)])
        for values, end, count in zip(largest, last, num_equal, strict=True)
    ]
    limit = last.max()
    is_limit_known = bool((num_equal[last == limit] > 0).all())
    ordered = -np.sort(-np.concatenate(known), kind="stable")  # linear for sorted parts
    ordered = ordered[ordered >= limit if is_limit_known else ordered > limit]
    if not len(ordered):  # all tokens are masked
        return LogitThreshold(MASKED)
    threshold, k, temperature = LogitThreshold(MASKED), params.active_top_k, params.temperature
    if k is not None and k <= len(ordered):
        threshold = LogitThreshold(float(ordered[k - 1]))
        ordered = ordered[ordered >= threshold.lowest]
    if params.active_top_p is not None:
        total = np.logaddexp.reduce(totals if k is None else ordered / temperature)
        cumulative = np.exp(ordered / temperature - total).cumsum()
        # a token remains if the probability of the tokens before it is at most top_p
        num_kept = 1 + int((cumulative[:-1] <= params.active_top_p).sum())
        if num_kept == len(ordered) and k is None and limit > MASKED:
            return None
        threshold = _cut_ties(known, ordered, num_kept)
    if params.min_p > 0:
        lowest = float(ordered[0]) + temperature * math.log(params.min_p)
        threshold = threshold if threshold.lowest >= lowest else LogitThreshold(lowest)
    return threshold


def _cut_ties(
    known: Sequence[NDArray[np.float64]], ordered: NDArray[np.float64], num_kept: int
) -> LogitThreshold:
    """Return the threshold that keeps the first `num_kept` of logits in descending order.

    known: the logits by rank.
    """
    lowest = float(ordered[num_kept - 1])
    if num_kept == len(ordered) or ordered[num_kept] < lowest:
        return LogitThreshold(lowest)
    remaining = num_kept - int((ordered > lowest).sum())
    num_ties = []
    for values in known:
        num_ties.append(min(int((values == lowest).sum()), remaining))
        remaining -= num_ties[-1]
    return LogitThreshold(lowest, num_ties)


def _mask_outside(logits: Tensor, threshold: LogitThreshold, rank: int) -> None:
    """Mask the tokens of a row [v_local] that do not remain, in place."""
    if threshold.num_ties is not None:
        ties = (logits == threshold.lowest).nonzero().squeeze(1)
        logits[ties[threshold.num_ties[rank] :]] = MASKED
    bounds = torch.tensor([threshold.lowest, MASKED], dtype=logits.dtype)
    # keeps what is above its argument, in a third of the time of a comparison and masked_fill_
    torch.threshold_(logits, float(torch.nextafter(*bounds)), MASKED)


# --- log-probs


class _LogprobRows(NamedTuple):
    """Rows of a batch that request log-probs."""

    indices: list[int]
    logits: Tensor
    """[rows, v_local]: their log-softmax is requested."""


def _select_logprob_rows(
    logits: Tensor, processed: Mapping[int, Tensor], rows: Sequence[SampleRow]
) -> list[_LogprobRows]:
    """Return the rows that request log-probs of the model, and of the processed distribution.

    Processed log-probs of greedy rows are those at temperature 1, since the distribution has a
    single token otherwise.
    """
    result: list[_LogprobRows] = []
    for mode in ("raw", "processed"):
        indices = [
            index
            for index, row in enumerate(rows)
            if row.params.logprobs is not None and row.params.logprobs_mode == mode
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
        result.append(_LogprobRows(indices, group))
    return result


def _compute_row_logprobs(
    requests: Sequence[_LogprobRows],
    winners: Sequence[_Winner],
    rows: Sequence[SampleRow],
    vocab: VocabSlice,
) -> dict[int, TokenLogprobs]:
    """Return the log-probs of the rows that request them and have no error, by row."""
    parts: list[Tensor] = []
    indices: list[int] = []
    for request in requests:
        valid = [number for number, i in enumerate(request.indices) if winners[i].is_valid]
        if valid:
            parts.append(_select_rows(request.logits, valid))
        indices += [request.indices[number] for number in valid]
    if not indices:
        return {}
    logprobs = compute_logprobs(
        parts,
        [winners[index].token for index in indices],
        [winners[index].logit for index in indices],
        [rows[index].params.logprobs or 0 for index in indices],
        vocab,
    )
    return dict(zip(indices, logprobs, strict=True))
