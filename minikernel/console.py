"""Tables and progress for people: with rich where it is installed, in plain text otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")
_STYLES = {"yes": "green", "no": "red"}


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print at least one row under column names; a narrow terminal may break lines, but cuts no word."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:  # the library depends on numpy alone
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        for row in (columns, ["-" * width for width in widths], *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return

    table = Table(box=box.SIMPLE_HEAD)
    for column, cells in zip(columns, zip(*rows, strict=True), strict=True):
        table.add_column(column, min_width=max(len(word) for text in (column, *cells) for word in text.split()))
    for name, *rest in rows:
        table.add_row(Text(name, "bold"), *(Text(cell, _STYLES.get(cell, "")) for cell in rest))
    Console().print(table, crop=False)


def track(items: Iterable[_Item], doing: str, total: int) -> Iterator[_Item]:
    """The items, showing how many of ``total`` have been taken."""
    try:
        from rich.progress import track
    except ImportError:
        step = max(1, total // 10)
        for i, item in enumerate(items):
            if i % step == 0:
                print(f"{doing}: {i} of {total}", flush=True)
            yield item
        return
    yield from track(items, doing, total)
