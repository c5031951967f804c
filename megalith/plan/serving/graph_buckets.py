"""Buckets of model steps: the batch dimensions for which a graph of the step is captured, and which
of them a batch is padded to.

A graph (CUDA graph) replays the kernels of a step with the shapes that it was captured with. So a
step is padded to the smallest bucket that covers its batch, and runs eagerly without one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal, NamedTuple

from megalith.plan.buckets import round_up

Distribution = Literal["exponential", "linear"]
"""Distance between the token counts of buckets: each half of the next larger one, or equal."""

Prefills = Literal["none", "mixed", "all"]
"""Steps with prefills that have buckets. none: only decode steps have; mixed: those of up to the
maximum number of tokens of a graph; all: every step that the scheduler may plan."""

EagerReason = Literal["empty", "oversize", "prefill", "no_bucket"]
"""Why a batch has no bucket: it has no tokens, or more than every bucket; it has prefills and the
buckets have none; or no bucket has as many rows of its kinds."""

MIN_AUTO_ENTRIES = 4
"""Smallest number of entries of an exponential ladder without a given number."""


class BatchDimensions(NamedTuple):
    """Tokens and rows of a batch, or of a bucket; ordered by tokens, prefills, decodes."""

    num_tokens: int
    """All tokens, drafts included."""

    num_prefills: int
    """Rows that process a part of a prompt."""

    num_decodes: int
    """Rows that process one known token and its drafts."""

    @property
    def num_rows(self) -> int:
        """Rows of both kinds."""
        return self.num_prefills + self.num_decodes

    @property
    def is_decode_only(self) -> bool:
        """Whether there are no prefills."""
        return self.num_prefills == 0

    def __str__(self) -> str:
        return f"{self.num_tokens}x{self.num_prefills}x{self.num_decodes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits of the batches of an engine."""

    max_rows: int
    """Largest number of sequences in a step."""

    max_tokens: int
    """Largest number of tokens in a step."""

    max_model_len: int
    """Largest number of tokens of a sequence."""

    num_drafts: int = 0
    """Largest number of draft tokens of a decode row."""

    num_shards: int = 1
    """Number of which tokens are a multiple: ranks that divide them (sequence parallelism)."""

    @property
    def max_decode_tokens(self) -> int:
        """Largest number of tokens of a decode step."""
        return min(self.max_rows * (self.num_drafts + 1), self.max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPolicy:
    """Which buckets are planned."""

    num_buckets: int | None = None
    """Token counts of each kind of buckets; None: as many as the distribution needs."""

    max_tokens: int | None = None
    """Largest number of tokens of a mixed bucket; None: that of a decode step."""

    distribution: Distribution = "exponential"
    prefills: Prefills = "none"

    linear_prefills: int = 16
    """Prefills of a mixed bucket with a linear distribution (heuristic, as in Megatron Core)."""


def is_valid_bucket(bucket: BatchDimensions, limits: BatchLimits) -> bool:
    """Return whether a step can have these dimensions: at least one token for each row, and at most
    as many as its prompts and drafts can have.

    >>> limits = BatchLimits(max_rows=4, max_tokens=64, max_model_len=8, num_drafts=1)
    >>> dimensions = [(4, 0, 2), (3, 0, 2), (5, 0, 2), (12, 1, 2), (13, 1, 2), (5, 5, 0)]
    >>> [is_valid_bucket(BatchDimensions(*each), limits) for each in dimensions]
    [True, True, False, True, False, False]
    """
    most = bucket.num_prefills * limits.max_model_len
    most += bucket.num_decodes * (limits.num_drafts + 1)
    fits = bucket.num_rows <= min(bucket.num_tokens, limits.max_rows)
    return fits and 0 < bucket.num_tokens <= most


# --- planning


def plan_token_ladder(
    max_tokens: int,
    *,
    num_entries: int | None = None,
    multiple: int = 1,
    distribution: Distribution = "exponential",
) -> list[int]:
    """Return token counts up to `max_tokens`, largest first, all multiples of `multiple`.

    exponential: each is half of the one before, rounded down to an even number; the smallest one
    and the largest ones are kept if there are more than `num_entries`. linear: equal distances; or
    without a number 1, 2, 4, every 8th up to 248, and every 16th from there on.

    >>> plan_token_ladder(128, num_entries=8)
    [128, 64, 32, 16, 8, 4, 2, 1]
    >>> plan_token_ladder(100, num_entries=4)
    [100, 50, 24, 1]
    """
    if distribution == "linear":
        counts = _plan_linear(max_tokens, num_entries)
    else:
        counts = [max_tokens // 2**power // 2 * 2 for power in range(1, max_tokens.bit_length())]
        counts += [max_tokens, multiple]
    rounded = {min(round_up(count, multiple), max_tokens) for count in counts if count > 0}
    ladder = sorted((count for count in rounded if count % multiple == 0), reverse=True)
    if distribution == "linear":
        return ladder
    limit = num_entries or max(MIN_AUTO_ENTRIES, max_tokens.bit_length() + 1)
    while len(ladder) > limit:
        del ladder[-2 if limit > 1 else -1]
    return ladder


def _plan_linear(max_tokens: int, num_entries: int | None) -> list[int]:
    if num_entries is not None:
        stride = -(-max_tokens // num_entries)
        return [*range(stride, max_tokens, stride), max_tokens]
    fixed = [1, 2, 4, *range(8, 256, 8), *range(256, max_tokens, 16)]
    return [*(count for count in fixed if count < max_tokens), max_tokens]


def plan_decode_buckets(limits: BatchLimits, policy: BucketPolicy) -> set[BatchDimensions]:
    """Return the buckets of decode steps, for each token count as many rows as it can have.

    Rows without tokens cost nothing, so a bucket covers few rows with many drafts as well as many
    rows with few. Without a given number, one and two rows with all drafts have buckets.

    >>> limits = BatchLimits(max_rows=4, max_tokens=64, max_model_len=32, num_drafts=2)
    >>> [str(each) for each in sorted(plan_decode_buckets(limits, BucketPolicy()))]
    ['1x0x1', '2x0x2', '3x0x3', '6x0x4', '12x0x4']
    """
    largest = limits.max_decode_tokens // limits.num_shards * limits.num_shards
    if largest == 0:
        return set()
    ladder = plan_token_ladder(
        largest,
        num_entries=policy.num_buckets,
        multiple=limits.num_shards,
        distribution=policy.distribution,
    )
    if policy.num_buckets is None:
        unit = lcm(limits.num_drafts + 1, limits.num_shards)
        ladder += [tokens for tokens in (unit, 2 * unit) if tokens <= largest]
    buckets = {BatchDimensions(tokens, 0, min(tokens, limits.max_rows)) for tokens in ladder}
    return {bucket for bucket in buckets if is_valid_bucket(bucket, limits)}


def plan_mixed_buckets(limits: BatchLimits, policy: BucketPolicy) -> set[BatchDimensions]:
    """Return the buckets of steps with prefills: every token count with 1, 2, 4, ... prefills (one
    fixed number if linear), and as many decodes as fit.

    >>> limits = BatchLimits(max_rows=2, max_tokens=8, max_model_len=32)
    >>> policy = BucketPolicy(prefills="all", num_buckets=2)
    >>> [str(each) for each in sorted(plan_mixed_buckets(limits, policy))]
    ['8x1x1', '8x2x0']
    """
    if policy.prefills == "none":
        return set()
    largest = limits.max_tokens
    if policy.prefills == "mixed":
        largest = min(max(policy.max_tokens or 0, limits.max_decode_tokens), largest)
    largest = largest // limits.num_shards * limits.num_shards
    if largest == 0:
        return set()
    ladder = plan_token_ladder(
        largest,
        num_entries=policy.num_buckets,
        multiple=limits.num_shards,
        distribution=policy.distribution,
    )
    candidates = (
        BatchDimensions(num_tokens, num_prefills, min(num_tokens, limits.max_rows) - num_prefills)
        for num_tokens in ladder
        for num_prefills in _plan_prefill_counts(limits, policy)
        if num_tokens >= max(2, num_prefills)
    )
    return {bucket for bucket in candidates if is_valid_bucket(bucket, limits)}


def _plan_prefill_counts(limits: BatchLimits, policy: BucketPolicy) -> list[int]:
    if policy.distribution == "linear":
        return [min(policy.linear_prefills, limits.max_rows)]
    powers = [2**power for power in range(limits.max_rows.bit_length())]
    return sorted({*powers, limits.max_rows})


def plan_graph_buckets(limits: BatchLimits, policy: BucketPolicy) -> tuple[BatchDimensions, ...]:
    """Return all buckets in the order in which they are captured: those with prefills first, and
    most tokens first, so that smaller graphs reuse the memory of larger ones."""
    buckets = plan_decode_buckets(limits, policy) | plan_mixed_buckets(limits, policy)

    def order(bucket: BatchDimensions) -> tuple[int, BatchDimensions]:
        return (bucket.num_tokens if bucket.num_prefills else 0), bucket

    return tuple(sorted(buckets, key=order, reverse=True))


# --- matching


def covers(bucket: BatchDimensions, batch: BatchDimensions) -> bool:
    """Return whether a batch can be padded to a bucket. A decode step needs a bucket of decodes,
    others one with prefills. Decode rows may occupy prefill slots."""
    if bucket.num_tokens < batch.num_tokens or bucket.is_decode_only != batch.is_decode_only:
        return False
    if bucket.num_prefills < batch.num_prefills:
        return False
    return bucket.num_rows >= batch.num_rows


def match_bucket(
    buckets: Sequence[BatchDimensions],
    batch: BatchDimensions,
    *,
    shares_experts: bool = False,
) -> BatchDimensions | EagerReason:
    """Return the smallest bucket that covers a batch, or why it runs eagerly.

    `shares_experts`: the batch is the maximum over ranks with other requests that exchange tokens;
    a prefill on any of them makes all run eagerly.

    >>> buckets = [BatchDimensions(8, 0, 8), BatchDimensions(4, 0, 4), BatchDimensions(64, 2, 6)]
    >>> batches = [(3, 0, 3), (8, 0, 9), (20, 1, 4), (70, 1, 4)]
    >>> [str(match_bucket(buckets, BatchDimensions(*each))) for each in batches]
    ['4x0x4', 'no_bucket', '64x2x6', 'oversize']
    """
    if batch.num_tokens == 0:
        return "empty"
    has_prefill_buckets = any(not bucket.is_decode_only for bucket in buckets)
    if not batch.is_decode_only and (shares_experts or not has_prefill_buckets):
        return "prefill"
    covering = [bucket for bucket in buckets if covers(bucket, batch)]
    if covering:
        return min(covering)
    largest = max((bucket.num_tokens for bucket in buckets), default=0)
    return "oversize" if batch.num_tokens > largest else "no_bucket"


def snap_chunk(
    buckets: Sequence[BatchDimensions], batch: BatchDimensions, *, smallest: int, largest: int
) -> int:
    """Return how many tokens of a prompt to add to a batch as one more prefill, from `smallest` to
    `largest`, so that a bucket has no padding; `largest` if that is not possible.

    >>> buckets = [BatchDimensions(16, 2, 4), BatchDimensions(32, 2, 4)]
    >>> batch = BatchDimensions(3, 0, 3)
    >>> [snap_chunk(buckets, batch, smallest=1, largest=each) for each in (40, 20, 13, 5)]
    [29, 13, 13, 5]
    """
    sizes = [
        bucket.num_tokens - batch.num_tokens
        for bucket in buckets
        if covers(bucket, add_prefill(batch, max(bucket.num_tokens - batch.num_tokens, 0)))
    ]
    fitting = [size for size in sizes if max(smallest, 1) <= size <= largest]
    return max(fitting, default=largest)


def add_prefill(batch: BatchDimensions, num_tokens: int) -> BatchDimensions:
    """Return a batch with one more prefill of `num_tokens` tokens."""
    return BatchDimensions(batch.num_tokens + num_tokens, batch.num_prefills + 1, batch.num_decodes)
