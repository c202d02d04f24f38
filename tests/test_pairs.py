"""Which combinations of options the suite takes."""

import itertools

import pytest

from tests.pairs import every_pair

pytestmark = pytest.mark.quick


def test_each_two_values_stand_together():
    options = ["abcd", [1, 2, 3, 4, 5, 6], [False, True], "xy"]
    taken = every_pair(*options)
    for (i, of_i), (j, of_j) in itertools.combinations(enumerate(options), 2):
        assert {(chosen[i], chosen[j]) for chosen in taken} == set(itertools.product(of_i, of_j))
    assert len(taken) == 24  # no fewer can be: 4 * 6
