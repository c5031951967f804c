"""Mock documents of the float64 comparison."""

from megalith.verify.ranks import RaggedDocuments


def test_mock_documents_are_uneven_and_equal_on_all_ranks() -> None:
    some, again = (RaggedDocuments(12, 61, 40, masked=(3,)) for _ in range(2))
    samples = [some.sample(k) for k in range(len(some))]
    assert all(
        (one.ids == two.ids).all()
        for one, two in zip(samples, map(again.sample, range(40)), strict=True)
    )
    assert {len(sample.ids) for sample in samples} == set(range(1, 13))
    assert all(
        sample.lengths == some.document_lengths(k) == sample.lengths_without_padding
        for k, sample in enumerate(samples)
    )
    assert (samples[3].labels == -1).all() and 0.3 < sum(
        (s.labels >= 0).mean() for s in samples
    ) / 40 < 0.6
    assert max(sample.labels.max() for sample in samples) < 61
    assert "12 61 40 (3,)" in some.fingerprint
