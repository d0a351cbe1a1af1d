"""One worker in detail: its slots, its KV cache, where its slot-steps went, the requests inside.

Relies on `cells` for cells and bars, on `lines` for lines. Pure but for the seats that it is given.
"""

import math
from collections.abc import Mapping

from rich.text import Text

from worker.queue_view import span
from worker.snapshot import EngineView, RequestView, Snapshot
from worker.top.cells import (
    CELLS,
    HOLDING,
    MAX_ROWS,
    Seats,
    cell_bar,
    cell_rows,
    counts_of,
    filled_share,
    kv_bar,
    slots_text,
    used_share,
)
from worker.top.figures import BUSY, Figures, tokens_per_s
from worker.top.lines import DIM, MARGIN, fact, name_of, padded, percent, rate, row
from worker.top.watch import WorkerLook

STATES = {"serving": "green", "loading": "yellow", "draining": "yellow", "stalled": "red", "silent": "red"}
WAITING_STYLE = "yellow"
NO_ENGINE = Text("no engine: it loads, or has died and starts again", "yellow")
LABEL = 6
"""Width of the words at the left."""
MIN_JOB, MIN_PROGRESS = 8, 4
SPARED = ("age", "progress", "lane", "tok/s", "slot", "engine")
"""Columns that narrow terminals go without, in this order."""
LEFT = ("job", "lane", "does", "progress")
"""Columns of text; the others are numbers."""


def detail(worker: WorkerLook, seats: Seats, width: int, height: int | None) -> list[Text]:
    """As many lines as there are to show, `height` at most."""
    now = worker.now
    name = Text(name_of(worker.id, max(16, width - 48)), "bold")
    if now is None:
        says = Text("silent: it does not answer", "bold red")
        return [row([name, says], width), row(heartbeat(worker), width)][:height]
    figures = worker.figures
    parts = [name, Text(name_of(now.state, 8), STATES.get(now.state, "")), Text(name_of(now.model, 32))]
    parts += [fact("on", _devices(now)), fact("tokens/s", rate(figures.rate("generated_tokens")))]
    lines = [row([*parts, fact("up", span(now.up_s))], width)]
    if len(now.engines) == 1:
        lines += _only_engine(now, seats, width)
    else:
        most = len(now.engines) if height is None else max(2, height // 2 - 2)
        lines += [_engine_line(number, engine, width) for number, engine in enumerate(now.engines[:most])]
        for number in range(len(now.engines)):
            seats.states(now, number)
        lines.append(_legend(now, width))
    lines.append(row(_idleness(figures), width))
    room = None if height is None else height - len(lines)
    return (lines + _requests(worker, now, seats, width, room))[:height]


def heartbeat(worker: WorkerLook) -> list[Text]:
    """What a silent worker last said to the server."""
    if not worker.beat:
        return [Text("no heartbeat", "red")]
    seen, state, active, slots = (name_of(worker.beat.get(name, "?"), 9) for name in ("seen_s", "state", "active", "slots"))
    return [Text(f"heartbeat {seen} s ago: {state}, {active} of {slots} slots")]


def losses(figures: Figures) -> list[Text]:
    """What was computed in vain, and what the prefix cache spared."""
    return [
        fact("preempted", f"{figures.count('preemptions'):,.0f}"),
        fact("prefix hits", percent(figures.prefix_hits)),
        fact("wasted tokens", f"{figures.count('wasted_tokens'):,.0f}"),
    ]


def _devices(now: Snapshot) -> str:
    devices = [engine.device for engine in now.engines]
    return name_of(f"{len(devices)} x {devices[0]}" if len(devices) > 1 and len(set(devices)) == 1 else now.gpu, 16)


def _label(text: str, rest: Text) -> Text:
    return Text(f"{text:{LABEL}}", DIM).append("  ").append_text(rest)


def _only_engine(now: Snapshot, seats: Seats, width: int) -> list[Text]:
    engine = now.engines[0]
    if not engine.is_up:
        return [row([NO_ENGINE], width)]
    length = width - LABEL - 2 - 2 * MARGIN
    states = seats.states(now, 0)
    rows = (
        [cell_bar(counts_of([engine]), length)] if not states or len(states) > MAX_ROWS * length else cell_rows(states, length)
    )
    cells = [row([_label("" if number else "slots", cells)], width) for number, cells in enumerate(rows)]
    return [*cells, _legend(now, width), _kv_line(engine, width)]


def _legend(now: Snapshot, width: int) -> Text:
    """What the cells mean, with how many there are of each; who has no cell yet, or none any more."""
    counts = counts_of(now.engines)
    parts = [
        Text(mark, style).append(f" {state} {number}", "default")
        for state, (mark, style) in CELLS.items()
        if (number := counts[state])
    ]
    waiting = sum(int(engine.phases.get(phase, 0)) for engine in now.engines for phase in ("waiting", "starting"))
    waiting -= counts["starting"]
    for name, number in (("waiting", waiting), ("claimed", now.claimed), ("ending", now.ending)):
        if number:
            parts.append(Text(f"{name} {number}", WAITING_STYLE if name == "waiting" else ""))
    indented = [Text(" " * LABEL), *parts]
    fits = sum(part.cell_len + 2 for part in indented) - 2 <= width - 2 * MARGIN
    return row(indented if fits else parts, width, gap=2)  # below the cells, where there is room for that


def _kv_line(engine: EngineView, width: int) -> Text:
    capacity = engine.kv.get("capacity_blocks", 0)
    if not capacity:
        return row([_label("KV", Text("-"))], width)
    words = [fact("used", percent(used_share([engine]))), fact("filled", percent(filled_share(engine)))]
    words += [fact("cached", percent(engine.kv.get("cached_blocks", 0) / capacity)), fact("blocks", f"{capacity:,.0f}")]
    length = width - 2 * MARGIN - LABEL - 2 - sum(word.cell_len + 2 for word in words)
    return row([_label("KV", kv_bar(engine, max(8, min(96, length)))), *words], width, gap=2)


def _engine_line(number: int, engine: EngineView, width: int) -> Text:
    name = Text(f"{number:>2} {name_of(engine.device, 8):8}")
    if not engine.is_up:
        return row([name, NO_ENGINE], width, gap=2)
    numbers = [Text(f"{slots_text([engine]):>9}")]
    numbers.append(fact("KV", f"{percent(used_share([engine])):>5}"))
    numbers.append(fact("filled", f"{percent(filled_share(engine)):>5}"))
    length = (width - 2 * MARGIN - name.cell_len - sum(part.cell_len + 2 for part in numbers) - 4) // 2
    bars = [cell_bar(counts_of([engine]), min(engine.slots, max(8, length))), kv_bar(engine, max(8, min(48, length)))]
    return row([name, bars[0], numbers[0], bars[1], *numbers[1:]], width, gap=2)


def _idleness(figures: Figures) -> list[Text]:
    """Why slots stood idle, in shares of all slot-steps, the greatest first, and what was computed in vain."""
    shares = figures.shares()
    parts = [_label("idle", Text(percent(1 - (figures.occupancy or 0) if shares else None), "bold"))]
    reasons = sorted(((share, state) for state, share in shares.items() if state in CELLS and state not in BUSY), reverse=True)
    parts += [Text(f"{state} {percent(share)}", CELLS[state][1]) for share, state in reasons if share > 0]
    return parts + losses(figures)


def _requests(worker: WorkerLook, now: Snapshot, seats: Seats, width: int, room: int | None) -> list[Text]:
    """As many requests as fit, in the order of their cells, those without one last; the others are counted."""
    places = [(each, seats.place(now, each)) for each in now.requests]
    rows = sorted(places, key=lambda item: (item[0].engine, item[1] or math.inf))
    is_whole = not now.left_out and (room is None or len(rows) < room)
    most = len(rows) if room is None or is_whole else min(len(rows), room - 2)
    if most <= 0:
        return []
    tokens = max(len(_tokens(each)) for each, _ in rows[:most])
    columns = _columns(width, max(7, min(17, tokens)), has_engines=len(now.engines) > 1)
    lines = [_table_line(columns, {name: name for name in columns}, dict.fromkeys(columns, DIM))]
    for each, place in rows[:most]:
        lines.append(_request_line(columns, each, place, tokens_per_s(each, worker.before, now)))
    if left := len(rows) - most + now.left_out:
        lines.append(row([Text(f"and {left:,} more", DIM)], width))
    return lines


def _columns(width: int, tokens: int, *, has_engines: bool) -> dict[str, int]:
    """Widths of the columns by their heads; ids and bars share what the others leave."""
    columns = ({"engine": 6} if has_engines else {}) | {"slot": 4, "job": 0, "lane": 6, "does": 10}
    columns |= ({"prompt": 7} if width >= 100 else {}) | {"progress": 0, "tokens": tokens, "tok/s": 6, "age": 9}
    for name in SPARED:
        if sum(columns.values()) + 2 * (len(columns) - 1) + MIN_JOB + MIN_PROGRESS + 2 * MARGIN > width:
            columns.pop(name, None)
    left = width - 2 * MARGIN - sum(columns.values()) - 2 * (len(columns) - 1)
    if "progress" not in columns:
        return columns | {"job": max(MIN_JOB, left)}
    columns["job"] = max(MIN_JOB, min(64, left * 3 // 5 if left < 60 else left // 3))
    columns["progress"] = left - columns["job"]
    return columns


def _request_line(columns: Mapping[str, int], request: RequestView, place: int | None, tokens_a_s: float) -> Text:
    share = min(1.0, request.tokens / request.max_tokens) if request.max_tokens else 0.0
    bar = columns.get("progress", 0)
    done = int(share * bar)
    many = f" x{request.width}" if request.width > 1 else ""
    cells = {
        "engine": str(request.engine),
        "slot": str(place or "-"),
        "job": name_of(request.id, columns["job"]),
        "lane": name_of(request.lane, 6),
        "does": name_of(request.phase, columns["does"] - len(many)) + many,
        "prompt": f"{request.prompt_tokens:,}",
        "progress": "━" * done + "╌" * (bar - done),
        "tokens": _tokens(request),
        "tok/s": rate(tokens_a_s),
        "age": span(request.age_s),
    }
    style = CELLS[request.phase][1] if request.phase in HOLDING else WAITING_STYLE
    return _table_line(columns, cells, {"does": style, "progress": style})


def _tokens(request: RequestView) -> str:
    return f"{request.tokens:,}/{request.max_tokens:,}"


def _table_line(columns: Mapping[str, int], cells: Mapping[str, str], styles: Mapping[str, str]) -> Text:
    line = Text(" " * MARGIN)
    for number, (name, width) in enumerate(columns.items()):
        line.append("  " if number else "").append(padded(cells[name], width, is_right=name not in LEFT), styles.get(name, ""))
    line.rstrip()
    return line
