"""Plain-text tables and lines, as reports, `explain` and `bench` print them."""

from collections.abc import Iterable, Sequence


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows of text under `header` in aligned columns; a column with no text in any row is left out.

    >>> print(format_table(("path", "why", "bytes"), [("attn.query", "", "16 B"), ("out", "", "1.0 KiB")]))
    path        bytes
    attn.query  16 B
    out         1.0 KiB
    """
    texts = [tuple(str(cell) for cell in row) for row in rows]
    columns = [(name, *cells) for name, *cells in zip(header, *texts) if any(cells)]
    widths = [max(map(len, column)) for column in columns]
    padded = ([cell.ljust(width) for cell in column] for column, width in zip(columns, widths))
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded))


def format_bytes(n: int) -> str:
    """`n` bytes in the largest unit that leaves at least one whole unit.

    >>> format_bytes(1536), format_bytes(90_000_000)
    ('1.5 KiB', '85.8 MiB')
    """
    if n < 1024:
        return f"{n} B"
    size, units = n / 1024, ["KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.1f} {units[0]}"


def first_line(error: Exception) -> str:
    """What it says in a line, or what it is.

    >>> first_line(RuntimeError("no memory\\nfor 3 GiB")), first_line(RuntimeError())
    ('no memory', 'RuntimeError')
    """
    return next(iter(str(error).splitlines()), type(error).__name__)
