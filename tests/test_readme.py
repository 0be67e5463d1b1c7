"""The README's Python, run block by block as a reader would paste it."""

import re
from pathlib import Path

BLOCKS = re.findall(r"```python\n(.*?)```", Path(__file__).parents[1].joinpath("README.md").read_text(), re.DOTALL)


def test_the_blocks_run_one_after_the_other(capsys):
    names = {"__name__": "readme"}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    error, *_ = capsys.readouterr().out.split()
    assert 0.005 < float(error) < 0.015  # "about 0.01"
    assert names["y"].shape == (4, 64, 512) and names["gradient"].shape == (256, 512)
