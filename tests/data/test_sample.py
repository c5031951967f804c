"""A sample knows which of its ids are padding."""

import numpy as np

from megalith.data.sample import Sample


def test_valid_ends_where_padding_begins() -> None:
    assert Sample(np.zeros(5, np.int64), 3).valid.tolist() == [True, True, True, False, False]
    assert Sample(np.zeros(2, np.int64), 2).valid.all()
