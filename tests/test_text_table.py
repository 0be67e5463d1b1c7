import pytest

from jax_qmm.text_table import format_bytes, format_table


@pytest.mark.parametrize("n, text", [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**40, "1024.0 GiB")])
def test_bytes(n, text):
    assert format_bytes(n) == text


def test_columns_are_aligned_and_empty_ones_left_out():
    rows = [("a", "", 1), ("bbb", "", 22)]
    assert format_table(("name", "empty", "n"), rows).splitlines() == ["name  n", "a     1", "bbb   22"]
