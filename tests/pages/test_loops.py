"""`benchmarks/loops.py`: what docs/forty_lines.md says of loops is what comes out."""

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
    assert [row[4] for row in ROWS] == [loop.costs for loop in loops.LOOPS]
    assert len({row[2] for row in ROWS}) >= 11


EVERY = list(zip(loops.LOOPS, ROWS, strict=True))


@pytest.mark.parametrize(("loop", "row"), sweep(EVERY, but=EVERY[::5]), ids=NAMES)
def test_verify_step_says_what_the_page_says(loop, row):
    assert loops.said(loop) == row[2]


def test_the_size_of_an_error():
    """Of what is right, of what is not divided, and of a mean of means."""
    of = {
        loop.name: loops.error(loop) for loop in loops.LOOPS if "value_and_grad" in loop.name or "not div" in loop.name
    }
    written = {row[0]: row[3] for row in ROWS}
    assert len(of) == 2
    for name, error in of.items():
        assert error == written[name] or float(error) < 1e-6 > float(written[name])
    assert of["the same scan, not divided"] == "1500%"
