"""Lines and figures of `worker top`: what fits a width, and how a number is written in few characters.

Relies on rich for text with styles. A line is made of parts; parts that do not fit are left out whole, the last first, so that
no number is cut in its middle. Widths are of terminal cells: some letters take two.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from worker.command import plain
from worker.queue_view import span
from worker.snapshot import shorten

MARGIN: Final = 1
DIM: Final = "bright_black"


def row(parts: Iterable[Text], width: int, gap: int = 3, right: Text | None = None) -> Text:
    """The first parts that fit, on one line behind a margin; `right` at its end."""
    line = Text(" " * MARGIN)
    room = width - MARGIN - (right.cell_len + gap if right else 0)
    for index, part in enumerate(parts):
        between = gap if index else 0
        if line.cell_len + between + part.cell_len > room:
            break
        line.append(" " * between).append_text(part)
    if right:
        line.append(" " * (width - MARGIN - line.cell_len - right.cell_len)).append_text(right)
    line.rstrip()
    return line


def rule(width: int) -> Text:
    """A line across."""
    return Text("─" * width, DIM)


def fact(name: str, value: str) -> Text:
    """A figure and what it is of."""
    return Text(f"{name} ", DIM).append(value, "bold")


def name_of(text: str, width: int) -> str:
    """What others wrote, in `width` cells at most: cut in the middle, nothing in it that steers a terminal."""
    short = shorten(plain(text), max(0, width))
    return short if cell_len(short) <= max(0, width) else set_cell_size(short, width).rstrip()


def padded(text: str, width: int, *, is_right: bool = False) -> str:
    """`text` with blanks up to `width` cells; a star for what does not fit, rather than a part of it."""
    if cell_len(text) > width:
        text = "*"
    blanks = " " * (width - cell_len(text))
    return blanks + text if is_right else text + blanks


def rate(value: float) -> str:
    """A number of something a second in six characters at most."""
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}" if value < 99_999.5 else f"{value / 1000:.0f}k"


def percent(share: float | None) -> str:
    """0 to 100; nothing and all are said of nothing and all alone."""
    if share is None:
        return "-"
    if 0 < share < 0.01:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """Seconds with two digits or more that count."""
    if seconds < 0.00995:
        return f"{1000 * seconds:.1f} ms"
    if seconds < 0.9995:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 9.95 else span(round(seconds))


def quantiles(values: Sequence[float] | None) -> str:
    """Durations side by side."""
    return "-" if values is None else " / ".join(map(duration, values))


def portions(counts: Mapping[str, float], width: int) -> dict[str, int]:
    """Whole characters for each count, `width` in all; who has anything has one, as long as there are enough."""
    some = {name: count for name, count in counts.items() if count > 0}
    if len(some) > width:
        some = dict(sorted(some.items(), key=lambda pair: -pair[1])[:width])
    exact = {name: count * width / sum(some.values()) for name, count in some.items()}
    lengths = {name: max(1, int(length)) for name, length in exact.items()}
    while lengths and sum(lengths.values()) > width:
        lengths[max((name for name in lengths if lengths[name] > 1), key=lambda name: lengths[name] - exact[name])] -= 1
    while lengths and sum(lengths.values()) < width:
        lengths[max(lengths, key=lambda name: exact[name] - lengths[name])] += 1
    return lengths
