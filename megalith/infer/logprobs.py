"""Log-probs of prompt tokens and of sampled tokens."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.errors import CheckpointError
from megalith.infer.vocab_slice import MASKED, VocabSlice, find_finite_rows

LOGPROB_ROWS = 8
"""Rows per log-softmax, to bound its memory. Measured for 64 rows of 152,000 logits: half the time
of all rows at once, whose temporary tensors leave the cache."""


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


def prompt_logprobs(
    logits: Tensor, next_tokens: Sequence[int], top_n: int, vocab: VocabSlice
) -> list[TokenLogprobs]:
    """Return the log-probs of prompt tokens: row i of logits [k, v_local], the columns of `vocab`,
    predicts `next_tokens[i]`.

    A prompt of p tokens has p - 1 of them; its chunks may be passed one after the other.

    Raises:
        CheckpointError: a logit is not finite; on all ranks.
    """
    if not next_tokens:
        return []
    logits = vocab.remove_padding(logits)
    selected = vocab.select_logits(logits, torch.tensor(next_tokens, device=logits.device))
    parts = vocab.gather(torch.stack([selected, find_finite_rows(logits).double()], -1))
    if not parts[..., 1].all():
        raise CheckpointError(
            "the logits of the prompt are not finite, so the weights have probably diverged. "
            "Use an earlier checkpoint."
        )
    token_logits = parts[..., 0].max(0).tolist()
    return compute_logprobs([logits], next_tokens, token_logits, [top_n] * len(next_tokens), vocab)


def compute_logprobs(
    parts: Sequence[Tensor],
    tokens: Sequence[int],
    token_logits: Sequence[float],
    top_n: Sequence[int],
    vocab: VocabSlice,
) -> list[TokenLogprobs]:
    """Return the log-prob of one token per row of logits, and of the row's `top_n` most likely
    tokens; -inf logits have the log-prob -inf.

    parts: the rows, one part after the other, each [rows, v_local] in fp32 or float64;
    token_logits: logit of each token, which may be that of another rank.
    """
    terms: list[Tensor] = []
    start = 0
    for logits in parts:
        for chunk in logits.split(LOGPROB_ROWS):
            stop = start + len(chunk)
            chosen = torch.tensor(token_logits[start:stop], dtype=chunk.dtype, device=chunk.device)
            terms.append(
                _compute_logprob_terms(chunk, chosen, top_n[start:stop], max(top_n), vocab)
            )
            start = stop
    return merge_logprobs(vocab.gather(torch.cat(terms)), tokens, token_logits, top_n)


def _compute_logprob_terms(
    logits: Tensor, chosen: Tensor, top_n: Sequence[int], max_n: int, vocab: VocabSlice
) -> Tensor:
    """Return what this rank adds to the log-probs of rows of logits [rows, v_local]: float64
    [rows, 2 + 2 max_n].

    These are the log-sum-exp; the number of logits larger than `chosen` [rows]; the logits of the
    row's `top_n` most likely tokens, of equal ones the lowest ids, then -inf; their ids, then -1.
    """
    terms = np.full((len(logits), 2 + 2 * max_n), -1.0)
    terms[:, 2 : 2 + max_n] = MASKED
    sums = torch.stack([logits.logsumexp(-1).double(), (logits > chosen.unsqueeze(1)).sum(-1)], -1)
    terms[:, :2] = sums.cpu().numpy()
    size = min(max(top_n) + 1, logits.shape[1]) if max(top_n) > 0 else 0
    values, columns = logits.topk(size)
    top_values, top_columns = values.tolist(), columns.tolist()
    for row, count in enumerate(top_n):
        entries = list(zip(top_columns[row], top_values[row], strict=True))
        if 0 < count < size and entries[count - 1][1] == entries[count][1]:
            entries = _resolve_ties(logits[row], entries, count)
        for entry_rank, (column, value) in enumerate(_sort_entries(entries[:count])):
            terms[row, 2 + entry_rank] = value
            terms[row, 2 + max_n + entry_rank] = vocab.first_token + column
    return torch.from_numpy(terms).to(logits.device)


def merge_logprobs(
    parts: NDArray[np.float64],
    tokens: Sequence[int],
    token_logits: Sequence[float],
    top_n: Sequence[int],
) -> list[TokenLogprobs]:
    """Return the log-probs of rows from the terms of all ranks, [tp, rows, 2 + 2 max_n]
    (`_compute_logprob_terms`)."""
    totals = np.logaddexp.reduce(parts[:, :, 0]).tolist()
    ranks = (1 + parts[:, :, 1].sum(0)).astype(np.int64).tolist()
    values, ids = np.split(parts[:, :, 2:], 2, axis=-1)
    result = []
    for row, (token, count) in enumerate(zip(tokens, top_n, strict=True)):
        is_listed = ids[:, row] >= 0
        row_ids = ids[:, row][is_listed].astype(np.int64).tolist()
        entries = zip(row_ids, values[:, row][is_listed].tolist(), strict=True)
        total, logprob = totals[row], token_logits[row] - totals[row]
        top = {id_: value - total for id_, value in _sort_entries(entries)[:count]}
        top.setdefault(token, logprob)
        result.append(TokenLogprobs(token, logprob, ranks[row], top))
    return result


def _sort_entries(entries: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return tokens with their logits, the most likely first, the lowest id of equals first."""
    return sorted(entries, key=lambda entry: (-entry[1], entry[0]))


def _resolve_ties(
    logits: Tensor, entries: list[tuple[int, float]], count: int
) -> list[tuple[int, float]]:
    """Return the `count` most likely tokens of a row [v_local] whose last one has ties: the lowest
    ids of them. entries: its most likely tokens with their logits, in order."""
    lowest = entries[count - 1][1]
    above = [(token, value) for token, value in entries if value > lowest]
    ties = (logits == lowest).nonzero().squeeze(1)[: count - len(above)].tolist()
    return above + [(token, lowest) for token in ties]
