import pytest
import torch
from torch import Tensor

from megalith.config.generation import SampleConfig
from megalith.errors import CheckpointError
from megalith.infer.generate import filter_logits, sample_tokens

PLACES = [(0, 3), (1, 3), (0, 4)]


def scores(rows: int = 3, size: int = 11) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(4))


def shares(row: Tensor, sample: SampleConfig, draws: int = 4000) -> Tensor:
    """How often each token is chosen."""
    chosen = sample_tokens(
        row.expand(draws, -1), sample, [(0, position) for position in range(draws)]
    )
    return torch.bincount(torch.tensor(chosen), minlength=len(row)) / draws


def test_greedy_returns_the_most_likely_token_and_the_first_of_equals() -> None:
    rows = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    assert sample_tokens(rows, SampleConfig(temperature=0.0), PLACES[:2]) == [1, 0]
    assert sample_tokens(
        rows.bfloat16(), SampleConfig(temperature=0.0, top_k=2, seed=9), PLACES[:2]
    ) == [
        1,
        0,
    ]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_sampled_with_softmax_probabilities(temperature: float) -> None:
    row = torch.tensor([0.0, 1.0, -1.0, 2.0, -30.0])
    result = shares(row, SampleConfig(temperature=temperature))
    torch.testing.assert_close(result, (row / temperature).softmax(-1), rtol=0, atol=0.03)


def test_sample_is_keyed_by_seed_sequence_and_position() -> None:
    row = torch.zeros(1, 1000)

    def draw(seed: int, sequence: int, position: int) -> int:
        return sample_tokens(row, SampleConfig(seed=seed), [(sequence, position)])[0]

    same = draw(1, 2, 3)
    torch.manual_seed(99)
    assert draw(1, 2, 3) == same
    others = [draw(2, 2, 3), draw(1, 3, 3), draw(1, 2, 4), draw(1, 3, 2)]
    assert len({same, *others}) == 5


def test_samples_do_not_depend_on_other_rows() -> None:
    rows, sample = scores(), SampleConfig(top_k=7, top_p=0.95)
    together = sample_tokens(rows, sample, PLACES)
    apart = [sample_tokens(rows[i : i + 1], sample, [place])[0] for i, place in enumerate(PLACES)]
    assert together == apart == sample_tokens(rows.flip(0), sample, PLACES[::-1])[::-1]


@pytest.mark.parametrize(
    ("k", "kept"),
    [(1, [1]), (2, [1, 3]), (3, [1, 2, 3, 5]), (6, [0, 1, 2, 3, 4, 5]), (99, [0, 1, 2, 3, 4, 5])],
)
def test_top_k_keeps_the_most_likely_tokens_and_ties(k: int, kept: list[int]) -> None:
    row = torch.tensor([[0.0, 9.0, 5.0, 7.0, -2.0, 5.0]])
    result = filter_logits(row, SampleConfig(top_k=k))
    assert result.isfinite()[0].nonzero().flatten().tolist() == kept
    assert torch.equal(result[:, kept], row[:, kept])


@pytest.mark.parametrize(
    ("p", "kept"),
    [
        (0.01, [2]),
        (0.49, [2]),
        (0.55, [2, 0]),
        (0.85, [2, 0, 3]),
        (0.95, [2, 0, 3, 1]),
        (1.0, [2, 0, 3, 1]),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_the_probability(
    p: float, kept: list[int]
) -> None:
    row = torch.tensor([[0.3, 0.05, 0.5, 0.15]]).log()
    result = filter_logits(row, SampleConfig(top_p=p))
    assert result.isfinite()[0].nonzero().flatten().tolist() == sorted(kept)


def test_top_p_is_applied_after_temperature_and_top_k() -> None:
    row = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    assert filter_logits(row, SampleConfig(top_p=0.6)).isfinite().tolist() == [
        [True, True, False, False]
    ]
    assert filter_logits(row, SampleConfig(top_k=2, top_p=0.6)).isfinite().tolist() == [
        [True, False, False, False]
    ]
    result = shares(row[0], SampleConfig(temperature=0.25, top_p=0.8), draws=200)
    assert result[0] == 1.0, "at this temperature the best token alone has 0.88"


def test_only_kept_tokens_are_drawn_in_their_proportion() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    torch.testing.assert_close(
        shares(row, SampleConfig(top_k=2)),
        torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]),
        rtol=0,
        atol=0.03,
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_rejected_with_their_position(
    bad: float, temperature: float
) -> None:
    rows = scores()
    rows[1, 2] = bad
    with pytest.raises(
        CheckpointError, match="sequence 1: the logits at token 3 are not finite.*Use an earlier"
    ):
        sample_tokens(rows, SampleConfig(temperature=temperature), PLACES)
