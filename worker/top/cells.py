"""The slots of an engine as cells, and its KV cache as a bar.

Relies on `EngineView` alone: phases of requests for the slots that are held, the last step for why the others are not. Each
state has a character of its own beside its colour. Leaves lines to `worker_view`.
"""

from collections.abc import Iterable, Mapping, Sequence

from rich.text import Text

from worker.snapshot import EngineView, RequestView, Snapshot
from worker.top.lines import DIM, portions

CELLS: Mapping[str, tuple[str, str]] = {
    "decode": ("█", "green"),
    "prefill": ("▓", "cyan"),
    "starting": ("▒", "cyan"),
    "alone": ("A", "magenta"),
    "beam": ("B", "blue"),
    "held": ("h", "yellow"),
    "finished": ("x", "yellow"),
    "no_memory": ("M", "red"),
    "no_budget": ("b", "yellow"),
    "no_work": ("·", DIM),
}
"""Character and colour of a slot by state."""
HOLDING = ("decode", "prefill", "alone", "beam", "held")
"""Phases of requests that hold slots. Of those `starting` some do: as many as the engine says beyond these."""
EMPTY = ("finished", "no_memory", "no_budget")
"""Why a slot is empty although somebody is inside."""
KV_MARKS: Mapping[str, tuple[str, str]] = {
    "filled": ("█", "green"),
    "used": ("▓", "yellow"),
    "cached": ("▒", "blue"),
    "free": ("·", DIM),
}
MAX_ROWS = 4
MAX_SEATS = 4096
"""Engines of more slots, or more requests than they tell of, are shown in shares alone."""

Key = tuple[str, str]


def key_of(request: RequestView) -> Key:
    """What tells a request from others of its engine: two lanes may have jobs of one id."""
    return (request.id, request.lane)


class Seats:
    """Which cell shows which request: one keeps its cell for as long as it lives. The numbers are the view's own, from 1 on."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, int], list[Key | None]] = {}

    def states(self, now: Snapshot, engine: int) -> list[str] | None:
        """What each cell of an engine shows now; None where there are too many."""
        view = now.engines[engine]
        if view.slots > MAX_SEATS or now.left_out:
            return None
        cells = self._cells.setdefault((now.id, engine), [])
        cells[:] = (cells + [None] * view.slots)[: view.slots]
        held = [each for each in now.requests if each.engine == engine and each.phase in HOLDING]
        seat(cells, {key_of(each): each.width for each in held})
        phases = {key_of(each): each.phase for each in held}
        num_starting = _num_starting(view)
        rest = {"starting": num_starting} | _empty_counts(view, cells.count(None) - num_starting)
        empty = (state for state, number in rest.items() for _ in range(number))
        return [next(empty) if key is None else phases[key] for key in cells]

    def place(self, now: Snapshot, request: RequestView) -> int | None:
        """The first cell of a request; None while it has none."""
        cells = self._cells.get((now.id, request.engine), [])
        key = key_of(request)
        return cells.index(key) + 1 if key in cells else None


def seat(cells: list[Key | None], widths: Mapping[Key, int]) -> None:
    """Free the cells of requests that have left, give free ones to those that came; nobody else moves."""
    left = dict(widths)
    for number, key in enumerate(cells):
        if key is not None and left.get(key, 0) > 0:
            left[key] -= 1
        else:
            cells[number] = None
    free = [number for number, key in enumerate(cells) if key is None]
    wanted = [key for key, width in left.items() for _ in range(min(width, len(free)))]
    for number, key in zip(free, wanted, strict=False):
        cells[number] = key


def counts_of(engines: Iterable[EngineView]) -> dict[str, int]:
    """The slots of engines by state."""
    counts = dict.fromkeys(CELLS, 0)
    for engine in engines:
        left = engine.slots
        for state in HOLDING:
            number = min(left, int(engine.phases.get(state, 0)))
            counts[state], left = counts[state] + number, left - number
        starting = min(left, _num_starting(engine))
        counts["starting"] += starting
        for state, number in _empty_counts(engine, left - starting).items():
            counts[state] += number
    return counts


def num_taken(engine: EngineView) -> int:
    """Slots that requests hold."""
    return min(engine.slots, _num_holding(engine) + _num_starting(engine))


def slots_text(engines: Sequence[EngineView]) -> str:
    """Slots that are held, of all."""
    return f"{sum(map(num_taken, engines))}/{sum(engine.slots for engine in engines)}"


def cell_rows(states: Sequence[str], width: int) -> list[Text]:
    """A cell for each slot, as broad as there is room for."""
    size = next((size for size in (3, 2, 1) if len(states) * (size + 1) <= width + 1), 0)
    pitch = max(1, size + (size > 0))
    per_row = max(1, (width + 1) // pitch if size else width)
    rows = []
    for start in range(0, len(states), per_row):
        line = Text()
        for state in states[start : start + per_row]:
            mark, style = CELLS[state]
            line.append(mark * max(1, size), style).append(" " * (size > 0))
        rows.append(line)
    return rows


def cell_bar(counts: Mapping[str, int], width: int) -> Text:
    """The states in shares of `width` characters, in the order of `CELLS`."""
    return _bar(portions(counts, width), CELLS, width)


def kv_bar(engine: EngineView, width: int) -> Text:
    """The blocks: used ones, of them what is filled, cached and free ones."""
    capacity, used, cached = (engine.kv.get(f"{name}_blocks", 0) for name in ("capacity", "used", "cached"))
    filled = used * (filled_share(engine) or 0)
    parts = {"filled": filled, "used": used - filled, "cached": cached, "free": max(0, capacity - used - cached)}
    return _bar(portions(parts, width), KV_MARKS, width)


def filled_share(engine: EngineView) -> float | None:
    """Positions that hold a token, of those in used blocks; None while no block is used."""
    allocated = engine.kv.get("allocated_tokens", 0)
    return min(1.0, engine.kv.get("filled_tokens", 0) / allocated) if allocated else None


def used_share(engines: Iterable[EngineView]) -> float | None:
    """Used blocks, of all; None where there is none."""
    kvs = [engine.kv for engine in engines]
    capacity = sum(kv.get("capacity_blocks", 0) for kv in kvs)
    return min(1.0, sum(kv.get("used_blocks", 0) for kv in kvs) / capacity) if capacity else None


def _num_holding(engine: EngineView) -> int:
    return min(engine.slots, int(sum(engine.phases.get(phase, 0) for phase in HOLDING)))


def _num_starting(engine: EngineView) -> int:
    """Slots held by some of those that are in prefill or wait; it is not known by which."""
    extra = min(engine.taken, engine.slots) - _num_holding(engine)
    return max(0, min(extra, int(engine.phases.get("starting", 0))))


def _empty_counts(engine: EngineView, left: int) -> dict[str, int]:
    """Why so many slots are empty; while nobody is inside for want of work, whatever the last step says."""
    counts = {}
    for state in EMPTY if any(engine.phases.values()) else ():
        counts[state] = min(left, int(engine.step.get(state, 0)))
        left -= counts[state]
    return counts | {"no_work": left}


def _bar(lengths: Mapping[str, int], marks: Mapping[str, tuple[str, str]], width: int) -> Text:
    bar = Text()
    for name, (mark, style) in marks.items():
        bar.append(mark * lengths.get(name, 0), style)
    return bar.append(" " * (width - len(bar)))
