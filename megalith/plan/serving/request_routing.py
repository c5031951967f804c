"""Request routing: which replica of the engine processes a request.

Replicas report the hashes of the KV cache blocks that they store and evict, with sequence numbers,
so the router knows exactly which prefix each of them has. A request goes to the replica with the
best sum of its cached share of the prompt and its share of free sequences; of replicas without free
sequences to the one with the lowest load.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megalith.plan.serving.prefix_cache import (
    BlockHash,
    compute_root_digest,
    extend_block_hashes,
)

ALPHA = 0.5
"""Weight of the cached share of a prompt; the rest is that of the free sequences. Megatron Core's
default."""

MAX_RELATIVE_LOAD = 1.5
MAX_EXTRA_SEQUENCES = 64
"""A replica that exceeds the lowest load and number of sequences by both gets no request because of
its cache: a prefix that all requests have must not send all of them to one replica. The thresholds
of SGLang's router."""

MAX_ROUTED_TOKENS = 16_384
"""First tokens of a prompt that are hashed (heuristic: 2 ms in the HTTP process)."""


Difference = Literal["state", "weights"]


@dataclass(slots=True)
class ReplicaState:
    """What the router knows about a replica that accepts requests."""

    max_num_seqs: int
    block_keys: set[int] = field(default_factory=set)
    """Hashes of the blocks that it stores."""

    next_sequence: int | None = 0
    """Number of its next report; None: one was lost, and a complete list is requested."""

    num_active_blocks: int = 0
    """Blocks that its sequences use, by its last report."""

    num_sequences: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens of its requests without a first result."""

    last_chosen: int = 0
    """Number of the choice that it last won, from 1."""

    is_draining: bool = False
    """Whether it gets no new requests, because it ends when those that it has are finished."""

    differences: set[Difference] = field(default_factory=set)
    """What differs from other replicas. It gets no new requests then, unless the weights of all
    replicas differ."""

    @property
    def load(self) -> int:
        """Tokens that wait for prefill, and active blocks."""
        return self.num_waiting_tokens + self.num_active_blocks

    @property
    def free_share(self) -> float:
        """Share of its sequences that are free."""
        return max(self.max_num_seqs - self.num_sequences, 0) / self.max_num_seqs

    def cached_share(self, block_keys: Sequence[int]) -> float:
        """Return the share of a prompt's blocks that it stores without a gap from the start."""
        for depth, key in enumerate(block_keys):
            if key not in self.block_keys:
                return depth / len(block_keys)
        return 1.0 if block_keys else 0.0


@dataclass(slots=True)
class _Assignment:
    """A request of a replica."""

    replica: int
    num_sequences: int
    num_waiting_tokens: int


class RequestRouter:
    """State of the replicas that are ready, and the requests that each of them has."""

    def __init__(self, *, alpha: float = ALPHA) -> None:
        """`alpha`: weight of the cached share in the score."""
        self.replicas: dict[int, ReplicaState] = {}
        self._alpha = alpha
        self._assignments: dict[int, _Assignment] = {}
        """By request."""
        self._num_choices = 0

    def register(self, replica: int, *, max_num_seqs: int) -> None:
        """Add a replica that is ready, with an empty cache; it may have been removed before."""
        self.remove(replica)
        self.replicas[replica] = ReplicaState(max_num_seqs)

    def remove(self, replica: int) -> list[int]:
        """Remove a replica, if it is ready; returns its requests, which are not assigned any
        more."""
        self.replicas.pop(replica, None)
        lost = [each for each, item in self._assignments.items() if item.replica == replica]
        for request in lost:
            del self._assignments[request]
        return lost

    def drain(self, replica: int, *, is_draining: bool = True) -> None:
        """Give no new requests to a replica, or give it requests again."""
        self.replicas[replica].is_draining = is_draining

    def update_blocks(
        self, replica: int, sequence: int, stored: Iterable[int], removed: Iterable[int]
    ) -> bool:
        """Apply a report of stored and evicted blocks; returns whether a complete list of blocks
        must be requested, because a report was lost."""
        state = self.replicas[replica]
        if state.next_sequence is None:  # requested already
            return False
        if sequence != state.next_sequence:
            state.next_sequence = None
            state.block_keys = set()
            return True
        state.next_sequence += 1
        state.block_keys.difference_update(removed)
        state.block_keys.update(stored)
        return False

    def resynchronize(self, replica: int, next_sequence: int, block_keys: Iterable[int]) -> None:
        """Apply a complete list of blocks; `next_sequence`: number of the report after it."""
        state = self.replicas[replica]
        state.block_keys, state.next_sequence = set(block_keys), next_sequence

    def compute_scores(self, block_keys: Sequence[int]) -> dict[int, float]:
        """Return the score of each replica that accepts requests, for a prompt with these block
        hashes: alpha times the cached share, plus 1 - alpha times the free share."""
        accepting = {
            index: state
            for index, state in self.replicas.items()
            if not (state.is_draining or "state" in state.differences)
        }
        equal = {index: state for index, state in accepting.items() if not state.differences}
        accepting = equal or accepting
        if not accepting:
            return {}
        load = min(state.load for state in accepting.values())
        num_sequences = min(state.num_sequences for state in accepting.values())
        scores = {}
        for index, state in accepting.items():
            is_hot = (
                state.load > MAX_RELATIVE_LOAD * load
                and state.num_sequences > num_sequences + MAX_EXTRA_SEQUENCES
            )
            cached_share = 0.0 if is_hot else state.cached_share(block_keys)
            scores[index] = self._alpha * cached_share + (1 - self._alpha) * state.free_share
        return scores

    def choose_replica(self, block_keys: Sequence[int]) -> int | None:
        """Return the replica with the highest score; of equal scores the one with the lowest load
        if they have no free sequences, then the least recently chosen one, then the first; None: no
        replica accepts requests."""
        scores = self.compute_scores(block_keys)
        if not scores:
            return None

        def rank(index: int) -> tuple[float, int, int, int]:
            state = self.replicas[index]
            load = 0 if state.free_share else state.load
            return (scores[index], -load, -state.last_chosen, -index)

        chosen = max(scores, key=rank)
        self._num_choices += 1
        self.replicas[chosen].last_chosen = self._num_choices
        return chosen

    def assign(self, request: int, replica: int, *, num_sequences: int, num_tokens: int) -> None:
        """Count a request that is sent to a replica; `num_tokens`: those of its prompt."""
        self._assignments[request] = _Assignment(replica, num_sequences, num_tokens)
        self.replicas[replica].num_sequences += num_sequences
        self.replicas[replica].num_waiting_tokens += num_tokens

    def find_replica(self, request: int) -> int | None:
        """Return the replica that has a request; None: no replica has it."""
        assignment = self._assignments.get(request)
        return None if assignment is None else assignment.replica

    def finish_prefill(self, request: int) -> None:
        """Count a request as prefilled: its replica sent its first result."""
        assignment = self._assignments.get(request)
        if assignment is not None:
            replica = self.replicas[assignment.replica]
            replica.num_waiting_tokens -= assignment.num_waiting_tokens
            assignment.num_waiting_tokens = 0

    def finish(self, request: int) -> None:
        """Remove a request that has ended; others are ignored."""
        self.finish_prefill(request)
        assignment = self._assignments.pop(request, None)
        if assignment is not None:
            self.replicas[assignment.replica].num_sequences -= assignment.num_sequences


def compute_block_keys(token_ids: Sequence[int], block_size: int, salt: bytes) -> list[int]:
    """Return the hashes of the full blocks of a prompt that a replica may have cached: at least the
    last token is always computed."""
    block_hashes: list[BlockHash] = []
    num_tokens = min(len(token_ids) - 1, MAX_ROUTED_TOKENS)
    root = compute_root_digest(salt)
    extend_block_hashes(block_hashes, token_ids[:num_tokens], block_size, root)
    return [block.key for block in block_hashes]
