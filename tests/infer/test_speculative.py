"""Draft tokens change how many tokens a step generates, never which ones."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalith.config.generation import SamplingParams
from megalith.config.model import AttentionConfig, MLAConfig, MTPConfig, RelativeConfig
from megalith.config.parallel import ParallelConfig
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import ConfigError
from megalith.infer.draft_model import DraftModelProposer
from megalith.infer.engine import InferenceEngine
from megalith.infer.mtp_drafts import MTPProposer
from megalith.infer.outputs import RequestOutput, TokenOutput
from megalith.infer.sample import SampleRow
from megalith.infer.speculative import (
    PROBE_INTERVAL,
    DraftLengthController,
    DraftRow,
    NGramProposer,
    find_continuation,
)
from megalith.infer.suspend import DeviceMemory
from megalith.kernels.layer_inputs import LayerInputs
from megalith.kernels.packed import seq_params_from_rows
from megalith.models.decoder import Decoder
from megalith.parallel.mesh import build_single_rank_mesh
from megalith.plan.serving.scheduler import PlannedRow
from megalith.plan.stages import mtp_hidden_name
from megalith.train.trainer import build_trainer
from megalith.verify.ranks import layout_case
from tests.infer.engines import (
    GREEDY,
    SAMPLED,
    ReferenceProposer,
    build,
    check_logprobs,
    count_accepted,
    run,
)
from tests.test_plugins import RECURRENT

REPEATED = [3, 1, 4, 1, 5] * 4


def propose(proposer: NGramProposer, tokens: Sequence[int], num_drafts: int = 4) -> list[int]:
    """Drafts of one sequence."""
    row = SampleRow(params=GREEDY, seed=0, position=len(tokens))
    return proposer.propose([DraftRow(0, tokens, num_drafts, lambda drafts: row)])[0]


def find_naively(tokens: Sequence[int], num_drafts: int) -> list[int]:
    """The definition: compare every earlier position with every suffix."""
    for size in (5, 4, 3, 2):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                drafts = list(tokens)
                for _ in range(num_drafts):
                    drafts.append(drafts[end])
                    end += 1
                return drafts[len(tokens) :]
    return []


def test_ngram_drafts_follow_the_most_recent_longest_suffix() -> None:
    assert propose(NGramProposer(), [1, 2, 3, 9, 2, 3, 7, 1, 2, 3]) == [9, 2, 3, 7]
    assert propose(NGramProposer(), [2, 3, 9, 2, 3, 7, 8, 5, 2, 3]) == [7, 8, 5, 2]
    assert propose(NGramProposer(), [5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert propose(NGramProposer(), [1, 2, 3, 4]) == propose(NGramProposer(), [1]) == []
    assert propose(NGramProposer(), [150_000, 55_555, 9, 150_000, 55_555], 1) == [9]


def test_ngram_drafts_equal_the_definition_for_random_texts() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        proposer, tokens = NGramProposer(), [draw.randrange(3)]
        while len(tokens) < 40:
            num_drafts = draw.randint(1, 6)
            assert propose(proposer, tokens, num_drafts) == find_naively(tokens, num_drafts), seed
            tokens += [draw.randrange(3) for _ in range(draw.randint(1, 4))]


def test_ngram_proposer_forgets_a_sequence() -> None:
    proposer = NGramProposer()
    assert propose(proposer, REPEATED)
    proposer.release(0)
    assert propose(proposer, [1, 1, 2, 1, 1], 1) == [2]
    proposer.release(7)  # unknown
    assert find_continuation("") == 0


def test_draft_length_follows_the_acceptance_rate() -> None:
    lengths = DraftLengthController(6, measures_time=False)
    assert 1 <= lengths.choose(0, 1) < 6
    for _ in range(6):
        lengths.record_drafts(0, 4, 4)
        lengths.record_drafts(1, 4, 0)
    assert lengths.choose(0, 1) == 6
    assert [lengths.choose(1, 1) for _ in range(PROBE_INTERVAL)] == [0] * (PROBE_INTERVAL - 1) + [1]
    assert lengths.choose(2, 1) == DraftLengthController(6, measures_time=False).choose(2, 1)
    lengths.release(1)
    assert lengths.choose(1, 1) > 0
    for _ in range(3):
        lengths.record_drafts(1, 1, 1)
    assert lengths.choose(1, 1) == 6


def test_draft_length_follows_the_cost_of_a_token() -> None:
    by_rows = [DraftLengthController(6, measures_time=False).choose(0, n) for n in (1, 8, 512)]
    assert by_rows[0] > by_rows[1] > by_rows[2] == 0
    for seconds_per_token, expected in ((0.0, 6), (0.1, 0)):
        lengths = DraftLengthController(6, measures_time=True)
        for step in range(40):
            num_tokens = 1 + step % 4
            lengths.record_step(num_tokens, 0.01 + seconds_per_token * num_tokens)
        assert lengths.choose(0, 1) == expected


def test_draft_length_follows_the_cost_of_proposals() -> None:
    lengths = DraftLengthController(6, measures_time=True)
    lengths.record_step(1, 0.01)
    assert lengths.choose(0, 1) > 0
    for _ in range(100):
        lengths.record_proposal(3, 1, 0.03)
    assert lengths.choose(0, 1) == 0


def test_draft_length_of_ranks_does_not_depend_on_time() -> None:
    lengths = DraftLengthController(6, measures_time=False)
    expected = lengths.choose(0, 1)
    for num_tokens in range(40):
        lengths.record_step(num_tokens, 1.0 * num_tokens)
        lengths.record_proposal(1, 1, 9.0)
    assert lengths.choose(0, 1) == expected


def tokens_of(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


def count_steps(engine: InferenceEngine, request: tuple[list[int], SamplingParams]) -> int:
    engine.add_request(*request)
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
    return steps


def test_ngram_drafts_of_repeated_text_are_accepted(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    request = (REPEATED, replace(GREEDY, max_new_tokens=60, logprobs=0))
    (reference,) = run(build(model), [request])
    engine = build(model, speculation="ngram")
    (output,) = run(engine, [request])
    assert tokens_of([output]) == tokens_of([reference])
    check_logprobs(model, output)
    num_drafts, num_accepted = count_accepted(engine)
    assert 20 < num_accepted <= num_drafts
    assert count_steps(build(model, speculation="ngram"), request) == 60 - num_accepted
    stats = engine.scheduler.make_stats()
    accepted = stats.num_accepted_tokens_per_pos
    assert sorted(accepted, reverse=True) == list(accepted)
    assert all(map(int.__le__, accepted, stats.num_draft_tokens_per_pos))
    assert stats.num_drafts == stats.num_draft_tokens_per_pos[0]
    assert engine._speculator is not None
    assert not engine._speculator.lengths._acceptance, "statistics of finished sequences are kept"


def test_a_step_returns_accepted_tokens_in_order_with_their_log_probs(
    tiny: SimpleNamespace,
) -> None:
    model = tiny.model(tiny.config(vocab_size=257), dtype=torch.float64)
    requests = [([80 + n, 65, 66], replace(SAMPLED, seed=n, n=2)) for n in range(3)]
    references = run(build(model, tokenizer=ByteTokenizer()), requests)
    engine = build(model, tokenizer=ByteTokenizer(), proposer=ReferenceProposer(references))
    numbers = [engine.add_request(*request) for request in requests]
    outputs: list[TokenOutput] = []
    longest = 0
    while engine.has_unfinished:
        step = engine.step()
        longest = max(longest, len(step))
        outputs += step
    assert longest > 6
    for number, reference in zip(numbers, references, strict=True):
        for expected in reference.outputs:
            own = [o for o in outputs if (o.request_id, o.choice) == (number, expected.index)]
            assert [output.token for output in own] == expected.token_ids
            assert "".join(output.text for output in own) == expected.text
            reasons = [output.finish_reason for output in own]
            assert reasons == [None] * (len(own) - 1) + ["length"]
            for output, logprobs in zip(own, expected.logprobs, strict=True):
                assert output.logprobs is not None
                assert output.logprobs.logprob == pytest.approx(logprobs.logprob, abs=1e-9)


def test_stops_and_lengths_end_a_text_within_accepted_drafts(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(vocab_size=257), dtype=torch.float64)
    free = run(build(model, tokenizer=ByteTokenizer()), [([72, 105], SAMPLED)])[0].outputs[0]
    text = ByteTokenizer().decode(free.token_ids)
    cases: list[dict[str, Any]] = [
        {"stop": (text[3:5],)},
        {"stop": (text[3:5],), "include_stop_str_in_output": True, "min_tokens": 9},
        {"stop_token_ids": (free.token_ids[4],)},
        {"stop_token_ids": (free.token_ids[4],), "min_tokens": 8},
        {"max_new_tokens": 1},
        {"max_new_tokens": 6},
        {"max_new_tokens": None},
        {"bad_words": (text[6],)},
    ]
    num_accepted = 0
    for changes in cases:
        request = ([72, 105], replace(SAMPLED, **changes))
        expected = run(build(model, tokenizer=ByteTokenizer()), [request])
        proposer = ReferenceProposer(expected)
        engine = build(model, tokenizer=ByteTokenizer(), proposer=proposer, block_size=3)
        outputs = run(engine, [request])
        for one, other in zip(outputs[0].outputs, expected[0].outputs, strict=True):
            assert (one.token_ids, one.text) == (other.token_ids, other.text), changes
            assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
            assert len(one.logprobs) == len(one.token_ids)
        assert engine.scheduler.make_stats().num_used_blocks == 0
        num_accepted += count_accepted(engine)[1]
    assert num_accepted > 20


class WrongProposer:
    """Proposes tokens that are never sampled, as many as it may."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.num_rows: list[int] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return tokens that `bad_words` exclude."""
        self.num_rows.append(len(rows))
        self.lengths += [row.num_drafts for row in rows]
        return [[36] * row.num_drafts for row in rows]

    def observe(self, rows: Sequence[PlannedRow], hidden: torch.Tensor) -> None:
        """Hidden states are not used."""

    def release(self, seq_id: int) -> None:
        """Nothing is stored."""

    def list_memory(self) -> DeviceMemory:
        """Return no tensors."""
        return DeviceMemory()


def test_drafts_are_trimmed_to_the_tokens_that_may_still_follow(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(max_seq_len=12, positions="learned"), dtype=torch.float64)
    params = replace(SAMPLED, max_new_tokens=None, logit_bias=((36, -100.0),))
    (reference,) = run(build(model), [([1, 2, 3, 4, 5, 6], params)])
    proposer = WrongProposer()
    engine = build(model, proposer=proposer)
    assert engine._speculator is not None
    engine._speculator.lengths = DraftLengthController(20, measures_time=False)
    engine._speculator.lengths.choose = lambda seq_id, num_rows: 20  # type: ignore[method-assign]
    (output,) = run(engine, [([1, 2, 3, 4, 5, 6], params)])
    assert tokens_of([output]) == tokens_of([reference])
    assert output.outputs[0].finish_reason == "context"
    assert proposer.lengths == [4, 3, 2, 1]  # after the first of 6 tokens, never for the last
    assert count_accepted(engine) == (10, 0)


def test_a_batch_that_fills_the_budget_has_no_drafts(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    requests = [([n, 1, 2], SAMPLED) for n in range(4)]
    proposer = WrongProposer()
    full = {"max_num_batched_tokens": 4, "max_num_seqs": 4, "proposer": proposer}
    engine = build(model, min_prefill_chunk_tokens=1, **full)
    reference = run(build(model), requests)
    assert tokens_of(run(engine, requests)) == tokens_of(reference)
    assert 0 < max(proposer.num_rows) < 4  # none while all four decode


def test_a_failed_step_is_repeated_without_drafts(tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    requests = [([n, 1, 2], replace(SAMPLED, seed=n)) for n in range(3)]
    reference = run(build(model), requests)
    plain, calls = model.forward, list[int]()

    def fails(ids: torch.Tensor, *rest: Any, **options: Any) -> Any:
        calls.append(len(ids))
        if len(ids) > 6 and len(calls) > 1:
            raise RuntimeError("out of memory")
        return plain(ids, *rest, **options)

    model.forward = fails
    engine = build(model, proposer=ReferenceProposer(reference))
    outputs = run(engine, requests)
    del model.forward
    assert max(calls[1:]) > 6, "no step had drafts"
    assert tokens_of(outputs) == tokens_of(reference)
    for output in outputs:
        check_logprobs(model, output)
    assert engine.scheduler.make_stats().num_used_blocks == 0


class FailingProposer(WrongProposer):
    """Fails at its third call."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Raise an error."""
        if len(self.num_rows) == 2:
            raise RuntimeError("out of memory")
        return super().propose(rows)


def test_an_error_of_the_proposer_ends_drafts_but_no_request(
    tiny: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    requests = [([n, 1, 2], SAMPLED) for n in range(3)]
    outputs = run(build(model, proposer=FailingProposer()), requests)
    assert tokens_of(outputs) == tokens_of(run(build(model), requests))
    assert "draft tokens cannot be proposed; the engine continues without" in caplog.text


KINDS: dict[str, dict[str, Any]] = {
    "the same model": {},
    "a smaller vocabulary": {"vocab_size": 31},
    "a larger vocabulary": {"vocab_size": 41},
    "a window": {"attention": AttentionConfig(window=5)},
    "a shorter context": {"max_seq_len": 24},
}


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_a_model_change_no_token(kind: str, tiny: SimpleNamespace) -> None:
    model = tiny.model(tiny.config(), dtype=torch.float64)
    draft_model = tiny.model(tiny.config(**KINDS[kind]), dtype=torch.float64)
    draw = random.Random(len(kind))
    requests = [
        (
            [draw.randrange(37) for _ in range(draw.randint(1, 20))],
            replace(
                SAMPLED,
                seed=number,
                n=draw.choice([1, 2]),
                temperature=draw.choice([0.0, 0.5, 1.0]),
                repetition_penalty=draw.choice([1.0, 1.2]),
                logit_bias=((36, 1.0),),
                max_new_tokens=25,
            ),
        )
        for number in range(6)
    ]
    reference = run(build(model), requests)
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "min_prefill_chunk_tokens": 1}
    for block_size, num_blocks in ((1, 110), (3, 24), (16, None)):
        engine = build(
            model,
            draft_model=draft_model,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=60,
            **settings,
        )
        outputs = run(engine, requests, {2: 3, 4: 9})
        assert tokens_of(outputs) == tokens_of(reference)
        for output in outputs:
            check_logprobs(model, output)
        num_drafts, num_accepted = count_accepted(engine)
        assert 0 < num_accepted <= num_drafts
        if kind == "the same model":
            assert num_accepted == num_drafts, "the same noise gives the same token"
        assert engine._speculator is not None
        proposer = engine._speculator.proposer
        assert isinstance(proposer, DraftModelProposer)
        assert not proposer._cache.states
        assert proposer._cache._manager.allocator.num_used == 0


MTP_KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"attention": AttentionConfig(window=5)},
    "MLA": {
        "mla": MLAConfig(kv_rank=6, nope_dim=4, rope_dim=2, value_dim=3),
        "num_kv_heads": 6,
    },
    "relative": {"positions": "relative", "relative": RelativeConfig(buckets=8)},
}


@torch.no_grad()
def mtp_drafts(model: Decoder, token_ids: Sequence[int], num_layers: int) -> list[int]:
    """Greedy drafts of the MTP layers, from one forward pass of the training code."""
    drafts: list[int] = []
    count = len(token_ids) - 1  # positions whose next token is known
    for depth in range(num_layers):
        text = torch.tensor([*token_ids, *drafts])
        ids = [(text[1 + d : 1 + d + count], torch.empty(0)) for d in range(depth + 1)]
        ids += [(text[:count], torch.empty(0))] * (num_layers - depth - 1)  # not used
        inputs = LayerInputs(seq_params_from_rows(1, count))
        outputs = model(text[:count], inputs, mtp_inputs=ids)
        hidden = outputs[mtp_hidden_name(depth + 1)][-1:]
        drafts.append(int(model.head.logits(hidden)[:, :37].argmax()))
    return drafts


@pytest.mark.parametrize("kind", MTP_KINDS)
def test_mtp_drafts_are_those_of_one_forward_pass(kind: str, tiny: SimpleNamespace) -> None:
    config = tiny.config(mtp=MTPConfig(num_layers=3), **MTP_KINDS[kind])
    model = tiny.model(config, dtype=torch.float64)
    requests = [
        (list(range(length, 0, -1)), replace(GREEDY, logprobs=0, max_new_tokens=20))
        for length in (1, 4, 13, 30)
    ]
    reference = run(build(model), requests)
    for settings in (
        {},
        {"max_num_batched_tokens": 7, "min_prefill_chunk_tokens": 1, "max_num_seqs": 3},
        {"num_blocks": 26, "max_model_len": 56, "prefix_caching": False, "max_num_seqs": 4},
    ):
        engine = build(model, speculation="mtp", block_size=3, **settings)
        proposer = RecordingProposer(engine, reference)
        outputs = run(engine, requests, {2: 3})
        assert tokens_of(outputs) == tokens_of(reference)
        for output in outputs:
            check_logprobs(model, output)
        assert len(proposer.drafts) > 20
        for token_ids, drafts in proposer.drafts[::4]:
            assert drafts == mtp_drafts(model, token_ids, 3)[: len(drafts)], settings
        again = run(engine, requests)  # with cached prefixes, which have no hidden states
        assert tokens_of(again) == tokens_of(reference)
        assert count_accepted(engine)[1] > 10
        mtp = proposer.plain
        assert isinstance(mtp, MTPProposer)
        assert not mtp._hidden_states and mtp._cache._manager.allocator.num_used == 0


class RecordingProposer:
    """Records the drafts of an engine's proposer, and often returns the tokens that follow instead,
    so that drafts are accepted too."""

    def __init__(self, engine: InferenceEngine, reference: Sequence[RequestOutput]) -> None:
        assert engine._speculator is not None
        self.reference = ReferenceProposer(reference)
        self.num_calls = 0
        self.plain = engine._speculator.proposer
        self.drafts: list[tuple[list[int], list[int]]] = []
        engine._speculator.proposer = self
        engine._speculator.lengths.choose = lambda seq_id, num_rows: 3  # type: ignore[method-assign]

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Propose and record."""
        result = self.plain.propose(rows)
        self.drafts += [
            (list(row.token_ids), drafts) for row, drafts in zip(rows, result, strict=True)
        ]
        self.num_calls += 1
        return result if self.num_calls % 2 else self.reference.propose(rows)

    def observe(self, rows: Sequence[PlannedRow], hidden: torch.Tensor) -> None:
        """Pass the hidden states on."""
        self.plain.observe(rows, hidden)

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        self.plain.release(seq_id)

    def list_memory(self) -> DeviceMemory:
        """Return the tensors of the plain proposer."""
        return self.plain.list_memory()


def test_models_with_recurrent_states_are_rejected() -> None:
    run_config = layout_case(RECURRENT, ParallelConfig(), 1).run
    model = build_trainer(run_config, build_single_rank_mesh(), torch.device("cpu")).model
    with pytest.raises(ConfigError, match=r"speculation.method=ngram: the model has .* to none"):
        build(model, speculation="ngram")
