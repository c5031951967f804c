"""Speculative decoding: proposers of draft tokens, and the number of drafts of each sequence.

A decode row processes its last token and k drafts. The engine samples a token at each of these
positions with the parameters and the noise of the request, and accepts drafts as long as each
equals the token sampled before it. So drafts change how many tokens a step generates, never which
ones. Source: Leviathan et al. 2023, arXiv:2211.17192; the keyed noise replaces their rejection
sampling, and preserves every token instead of the distribution only.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from megalith.config.serve import EngineConfig
from megalith.errors import ConfigError
from megalith.infer.cache import CachePlan
from megalith.infer.outputs import DraftTokens
from megalith.infer.sample import SampleRow
from megalith.infer.suspend import DeviceMemory
from megalith.plan.serving.scheduler import PlannedRow, StepPlan

NUM_DRAFT_TOKENS = 4
"""Drafts per row if the settings name no number (heuristic)."""

NGRAM_SIZES = (5, 4, 3, 2)
"""Lengths of the suffixes that are looked up, the longest first."""

PROBE_INTERVAL = 16
"""Steps after which a sequence without drafts tries one again, because its text may have become
predictable (heuristic)."""

ACCEPTANCE_DECAY = 0.75
"""Weight of the previous observations of a sequence after each step with drafts (heuristic)."""

TIME_DECAY = 0.95
"""Weight of the previous step times after each step (heuristic)."""

MIN_SPEEDUP = 1.03
"""Predicted speedup below which a sequence gets no drafts, because the estimates are not exact
(heuristic)."""

TOKEN_COST = 0.05
"""Time of another token in a decode step relative to that of a step without any, as long as it is
not measured (heuristic: a step of few tokens mostly reads weights)."""


class DraftRow(NamedTuple):
    """A sequence for which drafts are proposed."""

    seq_id: int
    token_ids: Sequence[int]
    """Prompt and generated tokens."""

    num_drafts: int
    """Largest number of drafts, at least 1."""

    make_sample_row: Callable[[Sequence[int]], SampleRow]
    """Returns the parameters and the noise of the token after the drafts so far, so that a draft
    model samples as the engine will."""


class VerifiedRow(NamedTuple):
    """A sequence after the drafts of a step were verified, before its next step."""

    row: DraftRow
    num_verified: int
    """Number of drafts in the step."""

    num_accepted: int


class DraftProposer(Protocol):
    """Proposes the next tokens of sequences. Proposals affect the speed only."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return up to `num_drafts` draft tokens for each row. Collective over the ranks that share
        the proposer's layers: those without rows call it too."""

    def observe(self, rows: Sequence[PlannedRow], hidden: Tensor) -> None:
        """Use the hidden states [t, h] of the last layer, of all tokens of a step."""

    def release(self, seq_id: int) -> None:
        """Forget a sequence that ended or was preempted; it may be unknown."""

    def list_memory(self) -> DeviceMemory:
        """Return the tensors in device memory."""


class NGramProposer:
    """Proposes the tokens that followed the last tokens of a sequence when they occurred before.

    The longest suffix of 5 to 2 tokens counts, and its most recent occurrence. A continuation that
    reaches the end of the text goes on with the drafts themselves, so that repetitions with a
    short period are continued too. Source: Saxena 2023, prompt lookup decoding.
    """

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        """Tokens of each sequence as characters, so that `str.rfind` searches them."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return the continuation of the most recent occurrence."""
        return [self._propose_row(row) for row in rows]

    def observe(self, rows: Sequence[PlannedRow], hidden: Tensor) -> None:
        """Hidden states are not used."""

    def release(self, seq_id: int) -> None:
        """Forget the tokens of a sequence."""
        self._texts.pop(seq_id, None)

    def list_memory(self) -> DeviceMemory:
        """Return no tensors."""
        return DeviceMemory()

    def _propose_row(self, row: DraftRow) -> list[int]:
        text = self._texts.get(row.seq_id, "")
        text += "".join(map(chr, row.token_ids[len(text) :]))
        self._texts[row.seq_id] = text
        end = find_continuation(text)
        drafts: list[int] = []
        for index in range(end, end + row.num_drafts if end else end):
            is_known = index < len(text)
            drafts.append(ord(text[index]) if is_known else drafts[index - len(text)])
        return drafts


def find_continuation(text: str) -> int:
    """Return the end of the most recent earlier occurrence of the longest suffix of 5 to 2
    characters; 0 if there is none.

    >>> find_continuation("abcdeXbcdeYbcde"), find_continuation("aaaa"), find_continuation("abc")
    (10, 3, 0)
    """
    if text.rfind(text[-NGRAM_SIZES[-1] :], 0, len(text) - 1) < 0:
        return 0  # the common case of other texts: no longer suffix occurs either
    for size in NGRAM_SIZES:
        start = text.rfind(text[-size:], 0, len(text) - 1) if size < len(text) else -1
        if start >= 0:
            return start + size
    return 0


@dataclass(slots=True)
class _AcceptanceStats:
    """Recent drafts of a sequence."""

    num_accepted: float = 1.0  # one accepted and one rejected draft at first (heuristic)
    num_verified: float = 2.0
    """Accepted drafts, and those rejected directly after them; later ones are not verified."""

    num_steps_without: int = 0

    @property
    def rate(self) -> float:
        return self.num_accepted / self.num_verified


class DraftLengthController:
    """Chooses the number of drafts of each sequence: the one with the most expected tokens per
    time, from the recent acceptance rate of the sequence and the measured times of decode steps.

    With acceptance rate a, k drafts are expected to generate 1 + a + ... + a^k tokens. The time of
    a step is fitted by a constant plus a time per token. `measures_time`: False for tensor-parallel
    ranks, whose clocks differ, but whose plans must not.
    """

    def __init__(self, max_draft_tokens: int, *, measures_time: bool) -> None:
        self._max_draft_tokens, self._measures_time = max_draft_tokens, measures_time
        self._acceptance: dict[int, _AcceptanceStats] = {}
        self._token_cost = TOKEN_COST
        self._draft_cost = 0.0
        self._moments = [0.0] * 5  # weighted sums: 1, tokens, seconds, tokens^2, tokens * seconds

    def choose(self, seq_id: int, num_rows: int) -> int:
        """Return the number of drafts of a sequence in a step of `num_rows` rows."""
        acceptance = self._acceptance.setdefault(seq_id, _AcceptanceStats())
        # cost of another token per row relative to the step without drafts
        cost = self._token_cost * num_rows / (1 + self._token_cost * num_rows) + self._draft_cost
        best, best_speed = 0, MIN_SPEEDUP
        expected, last = 1.0, 1.0
        for count in range(1, self._max_draft_tokens + 1):
            last *= acceptance.rate
            expected += last
            if expected / (1 + count * cost) > best_speed:
                best, best_speed = count, expected / (1 + count * cost)
        if best:
            acceptance.num_steps_without = 0
            return best
        acceptance.num_steps_without += 1
        return int(acceptance.num_steps_without % PROBE_INTERVAL == 0)

    def record_drafts(self, seq_id: int, num_drafts: int, num_accepted: int) -> None:
        """Update the acceptance rate of a sequence after a step with drafts."""
        acceptance = self._acceptance.setdefault(seq_id, _AcceptanceStats())
        num_verified = min(num_accepted + 1, num_drafts)
        acceptance.num_accepted = ACCEPTANCE_DECAY * acceptance.num_accepted + num_accepted
        acceptance.num_verified = ACCEPTANCE_DECAY * acceptance.num_verified + num_verified

    def record_step(self, num_tokens: int, seconds: float) -> None:
        """Update the time per token after a step of decode rows only."""
        if not self._measures_time:
            return
        terms = (1.0, num_tokens, seconds, num_tokens**2, num_tokens * seconds)
        self._moments = [
            TIME_DECAY * moment + term for moment, term in zip(self._moments, terms, strict=True)
        ]
        weight, tokens, total, squares, products = self._moments
        variance = squares / weight - (tokens / weight) ** 2
        if variance < 0.25:  # all steps have about the same number of tokens
            return
        slope = (products / weight - tokens * total / weight**2) / variance
        constant = (total - slope * tokens) / weight
        self._token_cost = min(max(slope, 0.0) / constant, 1.0) if constant > 0 else 1.0

    def record_proposal(self, num_drafts: int, num_rows: int, seconds: float) -> None:
        """Update the time of a proposal, of `num_drafts` drafts for each row on average."""
        weight, _, total, *_ = self._moments
        if self._measures_time and total > 0:
            cost = seconds / (num_drafts / num_rows) / (total / weight)
            self._draft_cost += (1 - TIME_DECAY) * (cost - self._draft_cost)

    def release(self, seq_id: int) -> None:
        """Forget a sequence that ended."""
        self._acceptance.pop(seq_id, None)


class Speculator:
    """Proposer of an engine, with the number of drafts of each sequence."""

    def __init__(self, proposer: DraftProposer | None, lengths: DraftLengthController) -> None:
        """`proposer`: None on pipeline stages that receive the drafts of the last one."""
        self.proposer, self.lengths = proposer, lengths

    def propose(self, rows: Sequence[DraftRow]) -> dict[int, list[int]]:
        """Return the drafts of the sequences that get some. The proposer may have collectives, so
        it is also called without sequences."""
        assert self.proposer is not None, "another stage proposes"
        wanted = [
            row._replace(num_drafts=count)
            for row in rows
            for count in [min(row.num_drafts, self.lengths.choose(row.seq_id, len(rows)))]
            if count > 0
        ]
        started = time.monotonic()
        proposals = self.proposer.propose(wanted)
        drafts = {
            row.seq_id: proposal
            for row, proposal in zip(wanted, proposals, strict=True)
            if proposal
        }
        num_drafts = sum(map(len, drafts.values()))
        if num_drafts:
            seconds = time.monotonic() - started
            self.lengths.record_proposal(num_drafts, len(rows), seconds)
        return drafts

    def observe(self, plan: StepPlan, hidden: Tensor | None) -> None:
        """Forget the sequences that a step preempted, and use its hidden states; None: they are not
        complete."""
        assert self.proposer is not None, "another stage observes"
        for seq_id in plan.preempted:
            self.proposer.release(seq_id)
        if hidden is not None:
            self.proposer.observe(plan.rows, hidden)
            return
        for row in plan.rows:
            self.proposer.release(row.seq_id)

    def record_drafts(self, seq_id: int, num_drafts: int, num_accepted: int) -> None:
        """Use the number of accepted drafts of a sequence in a step."""
        self.lengths.record_drafts(seq_id, num_drafts, num_accepted)

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """Use the time of a step."""
        if all(row.samples and row.count == 1 + len(row.draft_ids) for row in plan.rows):
            self.lengths.record_step(plan.num_tokens, seconds)

    def release(self, seq_id: int) -> None:
        """Forget a sequence that ended."""
        if self.proposer is not None:
            self.proposer.release(seq_id)
        self.lengths.release(seq_id)


class PipelineSpeculator(Speculator):
    """Speculator of a pipeline stage, if a model proposes.

    A sequence is in one step at a time. When the last stage has sampled its tokens, it proposes the
    drafts of the next step, and sends them with the tokens, so that all stages plan the same steps.
    """

    def __init__(self, proposer: DraftProposer | None, lengths: DraftLengthController) -> None:
        """See `Speculator`."""
        super().__init__(proposer, lengths)
        self._received: dict[int, DraftTokens] = {}

    def propose(self, rows: Sequence[DraftRow]) -> dict[int, list[int]]:
        """Return the drafts that the last stage has proposed for the present ends of sequences."""
        return {
            row.seq_id: received.token_ids[: row.num_drafts]
            for row in rows
            for received in [self._received.get(row.seq_id)]
            if received is not None
            and received.position == len(row.token_ids)
            and row.num_drafts > 0
        }

    def record_drafts(self, seq_id: int, num_drafts: int, num_accepted: int) -> None:
        """Do nothing: `propose_next` has used the number, before the next proposal."""

    def propose_next(self, verified: Sequence[VerifiedRow]) -> dict[int, DraftTokens]:
        """Return the drafts of sequences after the tokens that the last stage has sampled."""
        for each in verified:
            if each.num_verified:
                number = each.row.seq_id
                self.lengths.record_drafts(number, each.num_verified, each.num_accepted)
        rows = [each.row for each in verified]
        drafts = super().propose(rows)
        return {
            row.seq_id: DraftTokens(len(row.token_ids), drafts[row.seq_id])
            for row in rows
            if row.seq_id in drafts
        }

    def receive(self, drafts: Mapping[int, DraftTokens]) -> None:
        """Keep the drafts of later steps."""
        self._received |= drafts

    def release(self, seq_id: int) -> None:
        """Forget a sequence that ended."""
        super().release(seq_id)
        self._received.pop(seq_id, None)


def check_speculation(config: EngineConfig, plan: CachePlan) -> None:
    """Check that a model supports speculative decoding.

    Raises:
        ConfigError: it has recurrent states.
    """
    method = config.speculation.method
    if method != "none" and plan.has_states:
        raise ConfigError(
            f"speculation.method={method}: the model has layers of plug-ins, whose recurrent "
            "states cannot be restored after rejected drafts. Set speculation.method to none."
        )
