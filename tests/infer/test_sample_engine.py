"""Sampling of a batch: processors and filters against transformers, distributions, keyed noise,
log-probs and errors per row."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.config.generation import SamplingParams
from megalith.data.tokenizer import ByteTokenizer
from megalith.errors import CheckpointError
from megalith.infer import logprobs, sample
from megalith.infer.logprobs import compute_logprobs, prompt_logprobs
from megalith.infer.sample import (
    SampledToken,
    SampleRow,
    TokenCounts,
    encode_bad_words,
    filter_logits,
    process_logits,
    sample_tokens,
)
from tests.cases import loop_over
from tests.infer.engines import whole_vocab

V = 97
PROMPT, OUTPUT = [3, 5, 3, 8, 20], [5, 9, 9, 9, 40]


def random_logits(rows: int, v: int = V, *, seed: int = 4, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, v, generator=generator, dtype=torch.float64) * scale


def build_row(position: int = 10, *, seed: int = 7, choice: int = 0, **values: Any) -> SampleRow:
    names = SampleRow.__dataclass_fields__
    fields = {name: values.pop(name) for name in list(values) if name in names}
    params = SamplingParams(**values)
    return SampleRow(params=params, seed=seed, choice=choice, position=position, **fields)


def draw(logits: Tensor, rows: Sequence[SampleRow], vocab_size: int = V) -> list[int]:
    sampled = sample_tokens(logits, rows, whole_vocab(vocab_size))
    assert [one.error for one in sampled] == [None] * len(rows)
    return [one.token for one in sampled]


def draw_shares(logits: Tensor, count: int, **values: Any) -> Tensor:
    """How often each token is sampled from one row of logits at `count` positions."""
    row = build_row(**values)
    rows = [replace(row, position=position) for position in range(count)]
    tokens = draw(logits.expand(count, -1), rows, len(logits))
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / count


# --- processors and filters equal those of transformers


def process_with_transformers(logits: Tensor, row: SampleRow, eos: Sequence[int]) -> Tensor:
    """Processed and filtered logits [v] of one row by transformers; divided by the temperature."""
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as hf

    params, processors = row.params, LogitsProcessorList()
    prompt_length = len(row.prompt_ids)
    if params.logit_bias:
        bias = {(token,): float(value) for token, value in params.logit_bias}
        processors.append(hf.SequenceBiasLogitsProcessor(bias))
    if row.bad_word_ids:
        words = [list(word) for word in row.bad_word_ids]
        processors.append(hf.NoBadWordsLogitsProcessor(words, eos_token_id=None))
    if params.repetition_penalty != 1:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_tokens:
        processors.append(
            hf.MinNewTokensLengthLogitsProcessor(prompt_length, params.min_tokens, list(eos))
        )
    processors.append(hf.TemperatureLogitsWarper(params.temperature))
    if params.active_top_k:
        processors.append(hf.TopKLogitsWarper(params.active_top_k))
    if params.active_top_p:
        processors.append(hf.TopPLogitsWarper(params.active_top_p))
    if params.min_p:
        processors.append(hf.MinPLogitsWarper(params.min_p))
    ids = torch.tensor([[*row.prompt_ids, *row.output_ids]])
    result: Tensor = processors(ids, logits.unsqueeze(0).clone())
    return result[0]


GRID = list(
    itertools.product((None, 1, 5, 60, 1000), (None, 0.3, 0.9), (0.0, 0.02, 0.5), (0.3, 1.0, 2.5))
)
PROCESSORS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "logit_bias": ((5, 4.0), (9, -3.5), (96, 2.25))},
    {"bad_word_ids": ((7,), (9, 40, 11), (40, 12), (9, 13)), "min_tokens": 6},
]


@loop_over("values", PROCESSORS)
def test_kept_sets_equal_those_of_transformers(values: dict[str, Any]) -> None:
    rows = [
        build_row(
            top_k=k,
            top_p=p,
            min_p=min_p,
            temperature=temperature,
            prompt_ids=PROMPT,
            output_ids=OUTPUT,
            end_ids=frozenset((0, 50)),
            **values,
        )
        for k, p, min_p, temperature in GRID
        if k != 1  # greedy: not filtered
    ]
    logits = random_logits(len(rows))
    expected = torch.stack(
        [process_with_transformers(x, row, (0, 50)) for x, row in zip(logits, rows, strict=True)]
    )
    process_logits(logits, rows)
    filter_logits(logits, [row.params for row in rows], whole_vocab(V))
    temperatures = torch.tensor([row.params.temperature for row in rows]).double()
    kept = logits.isfinite()
    assert torch.equal(kept, expected.isfinite())
    torch.testing.assert_close((logits / temperatures[:, None])[kept], expected[kept])
    assert 1 < kept.sum(-1).float().mean() < V


def test_top_p_needs_more_candidates_than_it_sorts_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = random_logits(40, scale=1.0)
    params = [SamplingParams(top_p=0.02 + 0.024 * row, top_k=70) for row in range(40)]
    expected = logits.clone()
    filter_logits(expected, params, whole_vocab(V))
    for size in (1, 2, 5):
        monkeypatch.setattr(sample, "TOP_P_CANDIDATES", size)
        filtered = logits.clone()
        filter_logits(filtered, params, whole_vocab(V))
        assert torch.equal(filtered, expected)
    assert expected.isfinite().sum(-1).unique().numel() > 20


def test_ties_are_kept_by_top_k_and_cut_by_top_p_from_the_highest_id() -> None:
    row = torch.tensor([0.0, 9.0, 5.0, 7.0, -2.0, 5.0, 5.0])
    for params, kept in (
        (SamplingParams(top_k=3), [1, 2, 3, 5, 6]),
        (SamplingParams(top_k=99), list(range(7))),
        (SamplingParams(top_p=0.5), [0, 1, 2]),
        (SamplingParams(top_p=0.5, top_k=2), [0, 1, 2]),
    ):
        logits = row.clone() if params.top_p is None else torch.full((5,), 1.5)
        filter_logits(logits.unsqueeze(0), [params], whole_vocab(len(logits)))
        assert logits.isfinite().nonzero().flatten().tolist() == kept


def test_frequency_and_presence_penalties_concern_the_output_only() -> None:
    logits = torch.zeros(2, V, dtype=torch.float64)
    params: dict[str, Any] = {"frequency_penalty": 0.5, "presence_penalty": 0.25}
    row = build_row(prompt_ids=PROMPT, output_ids=OUTPUT, **params)
    process_logits(logits, [row, build_row()])
    expected = torch.zeros(V, dtype=torch.float64)
    expected[[5, 40]], expected[9] = -0.75, -1.75
    assert torch.equal(logits[0], expected) and not logits[1].any()


def test_processors_run_in_the_documented_order() -> None:
    # The bias makes a logit positive before the repetition penalty divides it; the frequency
    # penalty follows; a bias does not bring a masked token back.
    logits = torch.full((1, V), -1.0, dtype=torch.float64)
    row = build_row(
        logit_bias=((9, 5.0), (0, 100.0), (30, 100.0)),
        allowed_token_ids=(0, 5, 9),
        repetition_penalty=2.0,
        frequency_penalty=1.0,
        min_tokens=6,
        end_ids=frozenset([0]),
        prompt_ids=PROMPT,
        output_ids=OUTPUT,
    )
    process_logits(logits, [row])
    assert logits[0, [5, 9]].tolist() == [-1.0 * 2 - 1, 4.0 / 2 - 3]
    assert logits[0].isfinite().nonzero().flatten().tolist() == [5, 9]


def test_end_tokens_can_be_sampled_from_min_tokens_on() -> None:
    logits = torch.zeros(1, V)
    logits[0, 50] = 9.0
    fields: dict[str, Any] = {"end_ids": frozenset([50]), "min_tokens": 3, "temperature": 0.0}
    tokens = [draw(logits, [build_row(output_ids=[1] * n, **fields)])[0] for n in range(5)]
    assert tokens == [0, 0, 0, 50, 50]


def test_allowed_tokens_and_grammar_masks_are_combined() -> None:
    mask = torch.zeros(V + 7, dtype=torch.bool)
    mask[[3, 4, 5, V]] = True
    row = build_row(allowed_token_ids=(4, 5, 6), grammar_mask=mask, temperature=5.0)
    rows = [replace(row, position=position) for position in range(200)]
    assert set(draw(random_logits(1, V + 7).expand(200, -1), rows)) == {4, 5}


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    assert encode_bad_words(["ab", "c"], ByteTokenizer()) == (
        (97, 98),
        (32, 97, 98),
        (99,),
        (32, 99),
    )
    row = build_row(bad_word_ids=((5, 6),), prompt_ids=[1, 5], temperature=0.0)
    logits = torch.zeros(1, V)
    logits[0, 6] = 1.0
    assert draw(logits, [row]) == [0]  # the sequence begins in the prompt
    assert draw(logits, [replace(row, output_ids=[4])]) == [6]


# --- distribution and keys


@loop_over(
    "values",
    [
        {},
        {"temperature": 2.0},
        {"top_k": 5, "top_p": 0.8, "temperature": 1.5},
        {"min_p": 0.1, "repetition_penalty": 1.5, "prompt_ids": (1, 2)},
    ],
)
def test_samples_have_the_processed_probabilities(values: dict[str, Any]) -> None:
    """Chi-square of 20,000 samples, 5,000 with filters: at most 3.5 standard deviations above its
    mean."""
    count = 5_000 if len(values) > 1 else 20_000
    logits = random_logits(1, 12, scale=1.0)[0]
    processed = logits.clone().unsqueeze(0)
    row = build_row(**values)
    process_logits(processed, [row])
    filter_logits(processed, [row.params], whole_vocab(12))
    expected = (processed[0] / row.params.temperature).softmax(-1)
    shares = draw_shares(logits.float(), count, **values).double()
    removed = expected == 0
    assert not shares[removed].any()
    statistic = (count * (shares - expected).square() / expected)[~removed].sum()
    freedom = int((~removed).sum()) - 1
    assert statistic < freedom + 3.5 * (2 * freedom) ** 0.5, statistic


def test_low_temperature_and_top_k_of_one_are_greedy() -> None:
    logits = random_logits(6).float()
    greedy = logits.argmax(-1).tolist()
    logits[2, [greedy[2], V - 1]] = logits[2].max()
    for values in (
        {"temperature": 0.0},
        {"temperature": 1e-5},
        {"temperature": 1e-40},
        {"top_k": 1},
        {"temperature": 0.0, "top_k": 40, "top_p": 0.9, "min_p": 0.5},
    ):
        if values.get("temperature") != 1e-5 or greedy[2] == V - 1:
            assert draw(logits, [build_row(p, **values) for p in range(6)]) == greedy
    assert draw(logits[:2], [build_row(p, temperature=1e-5) for p in range(2)]) == greedy[:2]


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 9},
    {"top_p": 0.9, "temperature": 1.4},
    {"repetition_penalty": 1.2, "prompt_ids": (3, 4), "output_ids": (5,)},
    {"min_p": 0.05, "logprobs": 2},
    {"logit_bias": ((8, 3.0),), "logprobs": 0, "logprobs_mode": "processed"},
    {"top_k": 80, "top_p": 0.99, "seed": 5},
]


def test_noise_is_keyed_by_the_request_and_not_by_the_row() -> None:
    """Planted fault 13: noise keyed by row instead of request."""
    rows = [build_row(20, **{"seed": row} | values) for row, values in enumerate(MIXED)]
    logits = random_logits(len(rows), scale=0.5).float()
    batch = sample_tokens(logits, rows, whole_vocab(V))
    for order in ([*range(len(rows))][::-1], [3, 0, 6, 1]):
        part = sample_tokens(logits[order], [rows[index] for index in order], whole_vocab(V))
        assert part == [batch[index] for index in order]
    alone = [
        sample_tokens(logits[index : index + 1], [row], whole_vocab(V))[0]
        for index, row in enumerate(rows)
    ]
    assert alone == batch


def test_noise_is_keyed_by_the_absolute_position_and_not_by_the_step() -> None:
    """Planted fault 14: noise keyed by step instead of position. After a preemption the output is
    part of the prompt that is processed again, and the tokens are the same."""
    logits = random_logits(12, scale=0.3).float()

    def generate(start: int, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
        tokens = list(output)
        for step in range(start, 12):
            row = build_row(
                len(prompt) + len(tokens),
                prompt_ids=prompt,
                output_ids=list(tokens),
                frequency_penalty=0.0,
            )
            tokens += draw(logits[step : step + 1], [row])
        return tokens

    complete = generate(0, PROMPT, [])
    assert generate(5, PROMPT, complete[:5]) == complete
    assert generate(5, [*PROMPT, *complete[:5]], []) == complete[5:]
    assert len(set(complete)) > 6


def test_seeds_choices_and_positions_have_other_tokens() -> None:
    logits = torch.zeros(1, 5000)
    rows = [
        build_row(10, seed=1),
        build_row(10, seed=2),
        build_row(11, seed=1),
        build_row(10, seed=1, choice=1),
        build_row(1, seed=1, choice=10),
    ]
    tokens = draw(logits.expand(5, -1), rows, 5000)
    assert len(set(tokens)) == 5
    assert draw(logits.expand(5, -1), rows, 5000) == tokens


def test_padded_vocabulary_ids_are_never_sampled() -> None:
    """Planted fault 19: a padded vocabulary id is sampled."""
    logits = random_logits(len(MIXED), V + 15).float()
    logits[:, V:] = 1e4
    logits[:, V + 3] = float("nan")
    rows = [build_row(row, **values) for row, values in enumerate(MIXED)]
    sampled = sample_tokens(logits, rows, whole_vocab(V))
    assert sampled == sample_tokens(logits[:, :V].clone(), rows, whole_vocab(V))
    assert all(one.error is None and 0 <= one.token < V for one in sampled)
    entries = prompt_logprobs(logits, [1] * len(rows), 20, whole_vocab(V))
    assert all(max(entry.top_logprobs) < V for entry in entries)


def test_bf16_logits_are_processed_in_fp32() -> None:
    logits = random_logits(len(MIXED)).bfloat16()
    rows = [build_row(row, **values) for row, values in enumerate(MIXED)]
    sampled = sample_tokens(logits, rows, whole_vocab(V))
    assert sampled == sample_tokens(logits.float(), rows, whole_vocab(V))


# --- counts of tokens


def test_counts_are_those_of_the_output_and_each_token_counts_once() -> None:
    counts = TokenCounts(PROMPT)
    generator = torch.Generator().manual_seed(0)
    output: list[int] = []
    for size in (0, 1, 3, 0, 50):
        output += torch.randint(0, 30, (size,), generator=generator).tolist()
        counts.update(output)
        counts.update(output)  # of a preempted request
    by_token = dict(zip(counts.ids.tolist(), counts.output_counts.tolist(), strict=True))
    assert by_token == {token: output.count(token) for token in [*PROMPT, *output]}
    assert len(counts.ids) == len(by_token) and counts.num_output == len(output)


def test_penalties_do_not_count_rejected_drafts() -> None:
    """Planted fault 15: penalties count rejected drafts."""
    counts = TokenCounts(PROMPT)
    counts.update(OUTPUT)
    before = (counts.ids.tolist(), counts.output_counts.tolist(), counts.num_output)
    drafts = [9, 77, 3]
    logits = torch.zeros(4, V, dtype=torch.float64)
    rows = [
        build_row(
            10 + size,
            prompt_ids=PROMPT,
            output_ids=[*OUTPUT, *drafts[:size]],
            counts=counts.with_drafts(drafts[:size]),
            frequency_penalty=1.0,
        )
        for size in range(4)
    ]
    process_logits(logits, rows)
    assert logits[:, 9].tolist() == [-3, -4, -4, -4]
    assert logits[:, 77].tolist() == [0, 0, -1, -1] and logits[:, 3].tolist() == [0, 0, 0, -1]
    assert (counts.ids.tolist(), counts.output_counts.tolist(), counts.num_output) == before
    recounted = torch.zeros(4, V, dtype=torch.float64)
    process_logits(recounted, [replace(row, counts=None) for row in rows])
    assert torch.equal(logits, recounted)
    with pytest.raises(AssertionError, match="5 output tokens are counted of 6"):
        process_logits(logits[:1], [replace(rows[1], counts=counts)])


# --- log-probs


def test_logprobs_are_those_of_the_model_or_of_the_processed_distribution() -> None:
    logits = random_logits(1)
    values: dict[str, Any] = {
        "top_k": 4,
        "temperature": 0.5,
        "logit_bias": ((3, 2.0),),
        "logprobs": 6,
    }
    raw, processed, without = sample_tokens(
        logits.expand(3, -1),
        [
            build_row(**values),
            build_row(**values, logprobs_mode="processed"),
            build_row(**values | {"logprobs": None}),
        ],
        whole_vocab(V),
    )
    assert raw.token == processed.token == without.token and without.logprobs is None
    assert raw.logprobs is not None and processed.logprobs is not None
    expected = logits[0].log_softmax(-1)
    assert raw.logprobs.logprob == pytest.approx(float(expected[raw.token]), abs=1e-12)
    assert raw.logprobs.rank == 1 + int((expected > expected[raw.token]).sum())
    best = expected.topk(6)
    top = list(raw.logprobs.top_logprobs.items())[:6]
    assert [token for token, _ in top] == best.indices.tolist()
    assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=1e-12)
    biased = logits[0].clone()
    biased[3] += 2.0
    kept = biased.topk(4)
    distribution = (kept.values / 0.5).log_softmax(-1)
    finite = {t: x for t, x in processed.logprobs.top_logprobs.items() if x > float("-inf")}
    assert list(finite) == kept.indices.tolist()
    assert list(finite.values()) == pytest.approx(distribution.tolist(), abs=1e-12)
    assert len(processed.logprobs.top_logprobs) == 6  # removed ones are -inf, the lowest ids
    assert processed.logprobs.rank == 1 + list(finite).index(processed.token)


def test_chosen_token_is_included_outside_of_the_most_likely_ones() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 2.0, 1.0, 1.0]])
    vocab = whole_vocab(4)
    first, second, third = compute_logprobs(
        [logits[:1], logits[1:]], [3, 0, 3], [0.0, 0.0, 1.0], [2, 2, 3], vocab
    )
    assert list(first.top_logprobs) == [0, 1, 3] and first.rank == 4
    assert list(second.top_logprobs) == [0, 1] and second.rank == 1  # the lowest ids of equals
    assert list(third.top_logprobs) == [1, 0, 2, 3] and third.rank == 2
    (only,) = compute_logprobs([logits[:1]], [2], [3.0], [0], vocab)
    assert only.top_logprobs == {2: only.logprob}


def test_prompt_logprobs_belong_to_the_next_token_in_any_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Planted fault 17: prompt log-probs of the wrong row with a chunk."""
    prompt = torch.randint(0, V, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    logits = random_logits(29)
    expected = logits.log_softmax(-1)[torch.arange(29), torch.tensor(prompt[1:])]
    for rows, borders in ((64, (0, 29)), (4, (0, 7, 8, 29)), (1, (0, 29))):
        monkeypatch.setattr(logprobs, "LOGPROB_ROWS", rows)
        entries = [
            entry
            for first, last in itertools.pairwise(borders)
            for entry in prompt_logprobs(
                logits[first:last], prompt[first + 1 : last + 1], 3, whole_vocab(V)
            )
        ]
        assert [entry.token for entry in entries] == prompt[1:]
        result = torch.tensor([entry.logprob for entry in entries], dtype=torch.float64)
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-12)
        for row, entry in zip(logits, entries, strict=True):
            assert list(entry.top_logprobs)[:3] == row.topk(3).indices.tolist()
    with pytest.raises(CheckpointError, match="not finite.*Use an earlier checkpoint"):
        prompt_logprobs(logits.fill_(float("nan")), prompt[1:], 0, whole_vocab(V))


def test_greedy_processed_logprobs_are_those_at_temperature_one() -> None:
    logits = random_logits(1)
    row = build_row(temperature=0.0, top_k=3, logprobs=0, logprobs_mode="processed")
    (sampled,) = sample_tokens(logits, [row], whole_vocab(V))
    assert sampled.logprobs is not None
    assert sampled.logprobs.logprob == pytest.approx(float(logits.log_softmax(-1).max()))


# --- errors of single rows


@loop_over("bad", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_an_error_of_their_row_only(bad: float) -> None:
    rows = [build_row(row, **values) for row, values in enumerate(MIXED)]
    logits = random_logits(len(rows)).float()
    expected = sample_tokens(logits, rows, whole_vocab(V))
    for index in range(len(rows)):
        broken = logits.clone()
        broken[index, 30] = bad
        sampled = sample_tokens(broken, rows, whole_vocab(V))
        message = (
            f"the logits at position {index} are not finite, so the weights have probably "
            "diverged. Use an earlier checkpoint."
        )
        assert sampled[index] == SampledToken(token=-1, error=message)
        del sampled[index]
        assert sampled == [one for number, one in enumerate(expected) if number != index]


def test_masked_tokens_are_an_error_that_names_the_masks() -> None:
    nothing = torch.zeros(V, dtype=torch.bool)
    rows = [
        build_row(1, allowed_token_ids=(4,), bad_word_ids=((4,),)),
        build_row(2, grammar_mask=nothing, temperature=0.0),
        build_row(3, allowed_token_ids=(4,), end_ids=frozenset([4]), min_tokens=2, top_p=0.5),
        build_row(4, top_k=3, min_p=0.5, top_p=0.5),
    ]
    logits = random_logits(4).float()
    sampled = sample_tokens(logits, rows, whole_vocab(V))
    assert [one.error for one in sampled] == [
        "no token can be sampled at position 1: allowed_token_ids and bad_words mask all tokens. "
        "Allow at least one token.",
        "no token can be sampled at position 2: the grammar masks all tokens. "
        "Allow at least one token.",
        "no token can be sampled at position 3: allowed_token_ids and min_tokens=2 mask all "
        "tokens. Allow at least one token.",
        None,
    ]
    assert [one.is_request_error for one in sampled] == [True, True, True, False]
    assert sampled[3] == sample_tokens(logits[3:], rows[3:], whole_vocab(V))[0]


def test_extreme_penalties_and_temperatures_stay_finite() -> None:
    rows = [
        build_row(repetition_penalty=1e-38, prompt_ids=range(V), logprobs=3),
        build_row(repetition_penalty=1e6, frequency_penalty=2.0, output_ids=[4] * 50),
        build_row(temperature=1e6, top_p=1e-9, min_p=1.0, logprobs=1, logprobs_mode="processed"),
        build_row(temperature=1e-8, top_p=0.5, top_k=3, logprobs=1, logprobs_mode="processed"),
    ]
    sampled = sample_tokens(random_logits(4).float() * 1e3, rows, whole_vocab(V))
    assert all(one.error is None for one in sampled)
    logprobs = [one.logprobs.logprob for one in sampled if one.logprobs is not None]
    assert len(logprobs) == 3 and all(-1e9 < value <= 0 for value in logprobs)
