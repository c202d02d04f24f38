"""`benchmarks/loops.py`: what docs/compared.md says of loops is what comes out."""

import re

import pytest

from benchmarks import loops
from tests.tiers import sweep

PAGE = loops.PAGE.read_text()
TABLE = PAGE.split(loops.BEGIN)[1].split(loops.END)[0]
NAMES = [loop.name[:40] for loop in loops.LOOPS]
ROWS = [[cell.strip() for cell in line.split(" | ")] for line in re.findall(r"^\| (.*) \|$", TABLE, re.MULTILINE)[2:]]


def test_the_page_has_a_row_for_each_loop():
    assert [row[0] for row in ROWS] == [loop.name for loop in loops.LOOPS]
    assert [row[1] for row in ROWS] == [loop.seen for loop in loops.LOOPS]
    assert len({row[2] for row in ROWS}) >= 11


EVERY = list(zip(loops.LOOPS, ROWS, strict=True))
(RIGHT,) = (loop.name for loop in loops.LOOPS if "value_and_grad" in loop.name)


@pytest.mark.sweep
@pytest.mark.parametrize(("loop", "row"), sweep(EVERY, but=EVERY[::8]), ids=NAMES)
def test_verify_step_says_what_the_page_says(loop, row):
    assert loops.said(loop) == row[2]


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["the same scan, not divided", *sweep([RIGHT])])
def test_the_size_of_an_error(name):
    """Of what is not divided, and of what is right."""
    ((loop, row),) = (each for each in EVERY if each[0].name == name)
    error, written = loops.error(loop), row[3]
    assert error == written or float(error) < 1e-6 > float(written)
    assert (error == "1500%") == (name != RIGHT)
