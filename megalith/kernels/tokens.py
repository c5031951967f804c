"""`Tokens`: which document each token belongs to and where; the only thing that knows about documents."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """What travels beside activations [t, h]: t tokens, row after row, cut into documents.

    Attention stays inside a document. The Python values are known on the host, so that nothing waits for a device.
    """

    cu_q: Tensor
    """int32 [documents + 1]: where each document's queries start; begins with 0, ends with t."""

    cu_kv: Tensor
    """int32 [documents + 1]: the same for keys, which are more than the queries when a cache holds earlier ones."""

    max_q: int
    """Longest document, in queries."""

    max_kv: int
    """Longest document, in keys."""

    uniform: int | None
    """Length of every document when all have the same and queries and keys are the same tokens; else None."""

    positions: Tensor
    """int64 [t]: place of each token within its document."""

    document: Tensor
    """int32 [t]: number of the document a token belongs to."""

    valid: Tensor
    """bool [t]: False for padding."""

    lengths: tuple[tuple[int, int], ...]
    """(queries, keys) of each document, on the host."""

    rotary: tuple[Tensor, Tensor] | None = None
    """Cosine and sine [t, d/2] of each token's rotation, filled in once per forward by the model."""

    @property
    def num_tokens(self) -> int:
        """t."""
        return int(self.positions.shape[0])


def tokens_of_rows(rows: int, length: int, *, device: torch.device | str = "cpu") -> Tokens:
    """`rows` rows of `length` tokens, each row one document."""
    return tokens_of_lengths([length] * rows, device=device)


def tokens_of_lengths(lengths: list[int], *, device: torch.device | str = "cpu") -> Tokens:
    """Documents of the given lengths, one after the other, each read from its first token."""
    return tokens_of_queries([(length, length) for length in lengths], device=device)


def tokens_of_queries(lengths: list[tuple[int, int]], *, device: torch.device | str = "cpu") -> Tokens:
    """Documents of which only the last `queries` of `keys` tokens are read now: (queries, keys) for each."""
    queries = np.array([q for q, _ in lengths], dtype=np.int32)
    keys = np.array([k for _, k in lengths], dtype=np.int32)
    cu_q = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    cu_kv = np.concatenate([[0], np.cumsum(keys)]).astype(np.int32)
    document = np.repeat(np.arange(len(lengths), dtype=np.int32), queries)
    first = (keys - queries)[document]
    positions = np.arange(int(cu_q[-1]), dtype=np.int64) - cu_q[document] + first
    same = len(set(lengths)) == 1 and lengths[0][0] == lengths[0][1]
    return Tokens(
        cu_q=torch.from_numpy(cu_q).to(device),
        cu_kv=torch.from_numpy(cu_kv).to(device),
        max_q=int(queries.max()),
        max_kv=int(keys.max()),
        uniform=lengths[0][0] if same else None,
        positions=torch.from_numpy(positions).to(device),
        document=torch.from_numpy(document).to(device),
        valid=torch.ones(len(document), dtype=torch.bool, device=device),
        lengths=tuple(lengths),
    )
