"""Sampling on slices of the vocabulary equals sampling of one process, and exchanges a few numbers
per row."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith.config.generation import SamplingParams
from megalith.errors import CheckpointError
from megalith.infer import sample, vocab_slice
from megalith.infer.logprobs import TokenLogprobs, prompt_logprobs
from megalith.infer.sample import SampledToken, SampleRow, filter_logits, sample_tokens
from megalith.infer.vocab_slice import VocabSlice
from megalith.kernels.sampling import GumbelArgmax, gumbel_argmax
from megalith.parallel.group import Group, local_range, single_rank_group
from megalith.plan.shards import split_evenly
from tests.cases import loop_over
from tests.infer.engines import whole_vocab

Result = TypeVar("Result")
V = 97
PADDINGS = [(1, V + 31), (2, V), (3, V + 2), (4, 2 * V)]
"""Numbers of ranks, and sizes of the padded vocabulary; in the last case two slices are padding."""


class SimulatedRanks:
    """Threads that act as tensor-parallel ranks. One computes at a time; in an all-gather it waits
    for the others."""

    def __init__(self, tp: int) -> None:
        self.tp = tp
        self.sizes: list[int] = []
        """Elements that each all-gather returned."""
        self._parts: dict[int, Tensor] = {}
        self._barrier, self._turn = threading.Barrier(tp), threading.Lock()

    def gather(self, x: Tensor, group: Group) -> Tensor:
        """Stands in for `all_gather_no_grad`."""
        if group.size == 1:
            return x
        self._parts[group.rank] = x
        self._turn.release()
        try:
            self._barrier.wait(timeout=30)
            parts = [self._parts[rank] for rank in range(self.tp)]
            self._barrier.wait(timeout=30)
        finally:
            self._turn.acquire()
        assert len({(part.shape, part.dtype) for part in parts}) == 1, "the ranks' parts differ"
        gathered = torch.cat(parts)
        if group.rank == 0:
            self.sizes.append(gathered.numel())
        return gathered

    def run(self, work: Callable[[int], Result]) -> list[Result]:
        """Return the result of each rank."""

        def run_rank(rank: int) -> Result:
            with self._turn:
                try:
                    return work(rank)
                except BaseException:
                    self._barrier.abort()
                    raise

        with ThreadPoolExecutor(self.tp) as pool:
            futures = [pool.submit(run_rank, rank) for rank in range(self.tp)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:  # first that of the rank that failed, not of those that waited for it
            raise errors[0]
        return [future.result() for future in futures]


@contextmanager
def simulate_ranks(tp: int) -> Iterator[SimulatedRanks]:
    ranks = SimulatedRanks(tp)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocab_slice, "all_gather_no_grad", ranks.gather)
        yield ranks


def slice_of_rank(rank: int, tp: int, padded: int, v: int = V) -> tuple[VocabSlice, slice]:
    """The slice of a rank, and its columns of padded logits."""
    sizes = split_evenly(padded, tp)
    group = single_rank_group("tp") if tp == 1 else Group(("tp",), tuple(range(tp)), rank)
    columns = slice(*local_range(sizes, rank))
    return VocabSlice(group, columns.start, v, max(sizes)), columns


def sample_on_ranks(
    ranks: SimulatedRanks, padded: int, logits: Tensor, rows: Sequence[SampleRow]
) -> list[list[SampledToken]]:
    """Sampled tokens of each rank; tokens that pad the vocabulary have large logits."""
    v = logits.shape[1]
    wide = torch.nn.functional.pad(logits, (0, padded - v), value=1e4)

    def work(rank: int) -> list[SampledToken]:
        vocab, columns = slice_of_rank(rank, ranks.tp, padded, v)
        return sample_tokens(wide[:, columns], rows, vocab)

    return ranks.run(work)


def check_logprobs(
    actual: TokenLogprobs | None, expected: TokenLogprobs | None, tolerance: float = 1e-12
) -> None:
    if expected is None or actual is None:
        assert actual is expected
        return
    assert (actual.token, actual.rank) == (expected.token, expected.rank)
    assert actual.logprob == pytest.approx(expected.logprob, abs=tolerance)
    assert list(actual.top_logprobs) == list(expected.top_logprobs)
    values = list(expected.top_logprobs.values())
    assert list(actual.top_logprobs.values()) == pytest.approx(values, abs=tolerance)


def check_ranks(
    tp: int, padded: int, logits: Tensor, rows: Sequence[SampleRow]
) -> list[SampledToken]:
    """Check that every rank samples the tokens of one process; return them."""
    expected = sample_tokens(logits, rows, whole_vocab(logits.shape[1]))
    with simulate_ranks(tp) as ranks:
        results = sample_on_ranks(ranks, padded, logits, rows)
    assert all(result == results[0] for result in results)
    for actual, reference in zip(results[0], expected, strict=True):
        assert replace(actual, logprobs=None) == replace(reference, logprobs=None)
        tolerance = 1e-12 if logits.dtype == torch.float64 else 2e-6
        check_logprobs(actual.logprobs, reference.logprobs, tolerance)
    assert all(each.error is not None or 0 <= each.token < V for each in expected)
    return expected


def draw_row(draw: random.Random, position: int, v: int = V) -> SampleRow:
    """A row with random parameters."""

    def tokens(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw.sample(range(v), draw.randint(low, high)))

    def sometimes(value: Any, default: Any) -> Any:
        return value if draw.random() < 0.25 else default

    params = SamplingParams(
        temperature=draw.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
        top_k=draw.choice([None, None, 1, 2, 7, 60, 96, 97, 500]),
        top_p=draw.choice([None, None, 0.05, 0.6, 0.95, 0.9999]),
        min_p=draw.choice([0.0, 0.0, 0.02, 0.5, 1.0]),
        logit_bias=sometimes(tuple((token, draw.uniform(-9, 9)) for token in tokens(1, 5)), ()),
        allowed_token_ids=sometimes(tokens(1, 30), None),
        repetition_penalty=sometimes(draw.choice([0.7, 1.4]), 1.0),
        frequency_penalty=sometimes(0.8, 0.0),
        presence_penalty=sometimes(-0.5, 0.0),
        min_tokens=sometimes(9, 0),
        logprobs=draw.choice([None, 0, 1, 5, 20]),
        logprobs_mode=draw.choice(["raw", "processed"]),
    )
    mask = torch.rand(v + 5, generator=torch.Generator().manual_seed(position)) < 0.5
    return SampleRow(
        params=params,
        seed=draw.randrange(1000),
        position=position,
        prompt_ids=tokens(1, 20),
        output_ids=tokens(0, 8),
        end_ids=frozenset(sometimes(tokens(1, 40), ())),
        bad_word_ids=tuple((token,) for token in sometimes(tokens(1, 40), ())),
        grammar_mask=sometimes(mask, None),
    )


@loop_over("case", PADDINGS)
def test_ranks_sample_the_tokens_of_one_process(case: tuple[int, int]) -> None:
    tp, padded = case
    num_errors = 0
    for seed in range(25):
        draw = random.Random(seed)
        rows = [draw_row(draw, position) for position in range(16)]
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(16, V, generator=generator, dtype=torch.float64)
        logits = logits.to(draw.choice([torch.float64, torch.float64, torch.float32]))
        logits *= draw.choice([0.1, 1.0, 4.0])
        if seed % 3 == 0:  # many ties, also of different slices
            logits = logits.round()
        if seed % 5 == 0:
            logits[draw.randrange(16), draw.randrange(V)] = draw.choice([float("nan"), 1e400])
            logits[draw.randrange(16), draw.randrange(V)] = -float("inf")
        sampled = check_ranks(tp, padded, logits, rows)
        num_errors += sum(each.error is not None for each in sampled)
    assert 10 < num_errors < 60


@loop_over("values", [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.9}, {"temperature": 0.0}])
def test_equal_logits_of_all_slices_are_kept_as_in_one_process(values: dict[str, Any]) -> None:
    """All logits are equal, or two of different slices are the largest."""
    logits = torch.zeros(40, V)
    logits[20:, [30, 80]] = 9.0
    logits[30:, [31, 81, 82]] = 8.875
    params = SamplingParams(**values, logprobs=3, logprobs_mode="processed")
    rows = [SampleRow(params=params, seed=3, position=position) for position in range(40)]
    for tp, padded in PADDINGS:
        sampled = check_ranks(tp, padded, logits, rows)
        if values == {"top_p": 0.7}:
            assert all(each.token <= int(0.7 * V) for each in sampled[:20])


def test_top_p_lists_more_candidates_where_the_first_are_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sample, "TOP_P_CANDIDATES", 4)
    v, num_rows = 2000, 12
    logits = torch.randn(num_rows, v, generator=torch.Generator().manual_seed(1)).double()
    logits[1:] *= 8.0
    params = SamplingParams(top_p=0.9)
    expected = logits.clone()
    filter_logits(expected, [params] * num_rows, whole_vocab(v))
    with simulate_ranks(2) as ranks:

        def work(rank: int) -> Tensor:
            vocab, columns = slice_of_rank(rank, 2, v, v)
            part = logits[:, columns].clone()
            filter_logits(part, [params] * num_rows, vocab)
            return part

        assert torch.equal(torch.cat(ranks.run(work), 1), expected)
    assert expected.isfinite().sum(-1)[0] > 500
    # in the end all logits, but only of the row that needs them
    assert ranks.sizes[0] == 2 * num_rows * 5
    assert ranks.sizes[-1] == 2 * (v // 2 + 3)


def test_collectives_move_a_few_numbers_per_row() -> None:
    """Numbers of all-gathers, and of values per row, each a few of every rank."""
    v, num_rows, tp = 30_000, 8, 2
    logits = torch.randn(num_rows, v, generator=torch.Generator().manual_seed(1)) * 6
    per_row: dict[str, tuple[dict[str, Any], list[int]]] = {
        "plain": ({}, [4]),
        "greedy": ({"temperature": 0.0}, [4]),
        "log-probs": ({"logprobs": 5}, [4, 2 + 2 * 5]),
        "penalties": ({"repetition_penalty": 1.2, "presence_penalty": 1.0}, [4]),
        "top_k": ({"top_k": 50, "top_p": 0.9}, [50 + 3, 4]),
        "top_p": ({"top_p": 0.9, "logprobs": 0}, [512 + 3, 4, 2]),
        "min_p": ({"min_p": 0.1}, [3, 4]),
    }
    for name, (values, numbers) in per_row.items():
        params = SamplingParams(**values)
        rows = [SampleRow(params=params, seed=i, position=5, prompt_ids=(1,)) for i in range(8)]
        with simulate_ranks(tp) as ranks:
            sample_on_ranks(ranks, v, logits, rows)
        assert ranks.sizes == [tp * num_rows * number for number in numbers], name


@loop_over("case", PADDINGS)
def test_ranks_have_the_prompt_logprobs_of_one_process(case: tuple[int, int]) -> None:
    tp, padded = case
    logits = torch.randn(21, V, generator=torch.Generator().manual_seed(1)).double().mul(4).round()
    tokens = [(17 * row) % V for row in range(21)]
    wide = torch.nn.functional.pad(logits, (0, padded - V), value=1e4)

    def work(rank: int) -> list[TokenLogprobs]:
        vocab, columns = slice_of_rank(rank, tp, padded)
        assert prompt_logprobs(wide[:0, columns], [], 4, vocab) == []
        return prompt_logprobs(wide[:, columns], tokens, 4, vocab)

    expected = prompt_logprobs(logits, tokens, 4, whole_vocab(V))
    with simulate_ranks(tp) as ranks:
        results = ranks.run(work)
        assert all(result == results[0] for result in results)
        for actual, reference in zip(results[0], expected, strict=True):
            check_logprobs(actual, reference)
        wide[3, 40] = float("nan")

        def fail(rank: int) -> str:
            with pytest.raises(CheckpointError, match="logits of the prompt are not finite"):
                work(rank)
            return "failed"

        assert ranks.run(fail) == ["failed"] * tp


# --- planted faults


def key_noise_by_local_ids(patch: pytest.MonkeyPatch) -> None:
    def planted(*args: Any, first_token: int) -> GumbelArgmax:
        best = gumbel_argmax(*args)
        return best._replace(ids=torch.where(best.ids < 0, best.ids, best.ids + first_token))

    patch.setattr(sample, "gumbel_argmax", planted)


def filter_each_slice_alone(patch: pytest.MonkeyPatch) -> None:
    def planted(logits: Tensor, params: Sequence[SamplingParams], vocab: VocabSlice) -> None:
        filter_logits(logits, params, replace(vocab, group=single_rank_group("tp")))

    patch.setattr(sample, "filter_logits", planted)


def sample_padding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VocabSlice, "remove_padding", lambda self, logits: logits)


def find_errors_of_one_slice(patch: pytest.MonkeyPatch) -> None:
    merge = sample.merge_best
    patch.setattr(sample, "merge_best", lambda parts: merge(np.nan_to_num(parts, nan=-np.inf)))


@loop_over(
    "case",
    [
        (key_noise_by_local_ids, {}),
        (filter_each_slice_alone, {"top_k": 2}),
        (filter_each_slice_alone, {"top_p": 0.3}),
        (sample_padding, {"temperature": 0.0}),
        (find_errors_of_one_slice, {}),
    ],
)
def test_planted_faults_are_noticed(
    case: tuple[Callable[[pytest.MonkeyPatch], None], dict[str, Any]],
) -> None:
    plant, values = case
    logits = torch.randn(30, V, generator=torch.Generator().manual_seed(4)).double()
    logits[7, 80] = float("nan")
    params = SamplingParams(**values)
    rows = [SampleRow(params=params, seed=3, position=position) for position in range(30)]
    check_ranks(2, V + 31, logits, rows)
    whole = sample_tokens(logits, rows, whole_vocab(V))
    with simulate_ranks(2) as ranks, pytest.MonkeyPatch.context() as patch:
        plant(patch)
        results = sample_on_ranks(ranks, V + 31, logits, rows)
    assert results[0] == results[1] != whole
