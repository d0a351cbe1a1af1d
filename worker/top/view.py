"""What `worker top` shows: the queue and its lanes, its workers, one of them in detail, as lines that fit the terminal.

Relies on `worker_view` for the worker in detail and on `lines` for lines. Looks come in as plain data, so tests render
made-up ones. Leaves the terminal to `top` and `screen`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rich.text import Text

from worker.keys import LANES
from worker.queue_view import condition, span
from worker.top.cells import Seats, cell_bar, counts_of, slots_text, used_share
from worker.top.figures import Figures
from worker.top.lines import DIM, fact, name_of, padded, percent, quantiles, rate, row, rule
from worker.top.watch import Look, WorkerLook
from worker.top.worker_view import STATES, detail, heartbeat, losses

MIN_WIDTH = 40
MIN_DETAIL = 8
LANE_COLUMNS = {"waiting": 9, "held": 8, "released": 10, "suspects": 10, "oldest": 10}


@dataclass(slots=True)
class ViewState:
    """What the viewer has chosen, and which request has which cell."""

    chosen: str = ""
    """Id of the worker in detail; the first one where there is none of this id."""
    is_paused: bool = False
    trouble: str = ""
    """Why nothing new is seen."""
    seats: Seats = field(default_factory=Seats)

    def index(self, look: Look) -> int:
        """The number of the chosen worker."""
        return next((number for number, worker in enumerate(look.workers) if worker.id == self.chosen), 0)


def render(look: Look, state: ViewState, width: int, height: int | None = None, start: str = "") -> list[Text]:
    """The view as lines of `width` cells (40 at least), `height` of them at most; `start` is how a worker is started."""
    width = max(MIN_WIDTH, width)
    lines = [*_head(look, state, width), *_lanes(look, width)]
    if not look.workers:
        empty = row([Text("no worker serves this queue", "bold yellow")], width)
        return [*lines, rule(width), empty, *_how(start, width, height)]
    chosen = state.index(look)
    if len(look.workers) > 1:
        most = len(look.workers) if height is None else max(3, (height - len(lines)) // 4)
        lines += [rule(width), *_list(look.workers, chosen, most, width)]
    for worker in (*look.workers[chosen:], *look.workers[:chosen]):  # the others where there is room left
        room = None if height is None else height - len(lines) - 1
        if worker is look.workers[chosen] or (room is not None and room >= MIN_DETAIL):
            lines += [rule(width), *detail(worker, state.seats, width, None if room is None else max(0, room))]
    return lines


def _how(start: str, width: int, height: int | None) -> list[Text]:
    """The command on one line, to be copied, where lines may be longer than the terminal; else on as many as it takes."""
    words = f"start one: {start}"
    size = len(words) if height is None else width - 2
    return [Text(f" {words[at : at + size]}") for at in range(0, len(words), size)]


def _head(look: Look, state: ViewState, width: int) -> list[Text]:
    answered = [worker.now for worker in look.workers if worker.now]
    silent, number = len(look.workers) - len(answered), len(look.workers)
    is_held = look.queue.is_paused or look.queue.is_closed
    title = [Text(name_of(f"queue {look.queue.queue}", 32), "bold")]
    title += [Text(condition(look.queue), "bold yellow" if is_held else "green"), Text(f"{number} worker{'s' * (number != 1)}")]
    title += [Text(f"{silent} silent", "bold red")] if silent else []
    title += [Text("display paused", "reverse")] if state.is_paused else []
    title += [Text(f"{look.unreadable} unreadable", "red")] if look.unreadable else []
    lines = [row(title, width, right=Text(f"{datetime.fromtimestamp(look.at, UTC):%H:%M:%SZ}", DIM))]
    if state.trouble:
        lines.append(row([Text(name_of(state.trouble, width - 2), "bold red")], width))
    engines = [engine for snapshot in answered for engine in snapshot.engines]
    figures = look.figures
    is_first = not any(worker.before for worker in look.workers)
    over = "since start" if is_first else f"last {span(figures.seconds)}"
    return [*lines, row(_rates(figures, slots_text(engines), over if answered else ""), width), row(_latencies(figures), width)]


def _rates(figures: Figures, slots: str, over: str) -> list[Text]:
    return [
        fact("tokens/s", rate(figures.rate("generated_tokens"))),
        fact("jobs/s", rate(figures.rate("jobs_finished"))),
        fact("slots", slots),
        fact("occupancy", percent(figures.occupancy)),
        *([Text(over, DIM)] if over else []),
        fact("prompt tokens/s", rate(figures.rate("prompt_tokens"))),
        *losses(figures),
    ]


def _latencies(figures: Figures) -> list[Text]:
    """Medians and 95th percentiles."""
    names = {"first_token": "first token", "between_tokens": "next", "queue": "queued"}
    shown = [fact(words, quantiles(figures.quantiles(name))) for name, words in names.items()]
    return [Text("p50 / p95", DIM), *shown]


def _lanes(look: Look, width: int) -> list[Text]:
    queue = look.queue
    due = [] if queue.due_in_s is None else [fact("next in", span(queue.due_in_s))]
    beside = [
        [fact("delayed", f"{queue.delayed:,}"), *due],
        [fact("dead", f"{queue.dead:,}") if not queue.dead else Text(f"dead {queue.dead:,}", "bold red")],
        [fact("done", f"{queue.done:,}")],
        [Text(f"purging {', '.join(queue.purging)}", "yellow")] if queue.purging else [],
    ]
    heads = "".join(f"{name:>{width}}" for name, width in LANE_COLUMNS.items())
    lines = [Text(f"{'lane':6}{heads}", DIM)]
    for name in LANES:
        lane = queue.lanes[name]
        line = Text(f"{name:6}")
        counts = (lane.waiting, lane.pending, lane.released, lane.suspects)
        for count, cell_width in zip(counts, LANE_COLUMNS.values(), strict=False):
            line.append(padded(f"{count:,}", cell_width, is_right=True), "" if count else DIM)
        oldest = span(lane.oldest_age_s) if lane.oldest_age_s else "-"
        lines.append(line.append(padded(oldest, LANE_COLUMNS["oldest"], is_right=True)))
    return [row([line, *more], width) for line, more in zip(lines, beside, strict=True)]


def _list(workers: Sequence[WorkerLook], chosen: int, most: int, width: int) -> list[Text]:
    """A line for each worker around the chosen one; what is left out is counted."""
    most = max(1, most - (len(workers) > most))
    first = max(0, min(chosen - most // 2, len(workers) - most))
    shown = range(first, min(first + most, len(workers)))
    name_width = min(max(12, width - 72), max(len(name_of(workers[number].id, 64)) for number in shown))
    lines = [_list_line(number, workers[number], chosen, name_width, width) for number in shown]
    if len(lines) < len(workers):
        lines.append(row([Text(f"{first + 1} to {first + len(lines)} of {len(workers)} workers", DIM)], width))
    return lines


def _list_line(number: int, worker: WorkerLook, chosen: int, name_width: int, width: int) -> Text:
    style = "bold" if number == chosen else ""
    name = Text(f"{'▸' if style else ' '}{number + 1:>3} ", style).append(
        padded(name_of(worker.id, name_width), name_width), style
    )
    state = worker.now.state if worker.now else "silent"
    parts = [name, Text(padded(name_of(state, 8), 8), STATES.get(state, ""))]
    if not worker.now:
        return row([*parts, *heartbeat(worker)], width, gap=2)
    engines = worker.now.engines
    parts += [
        cell_bar(counts_of(engines), max(8, min(64, width - name_width - 56))),
        Text(padded(slots_text(engines), 9, is_right=True)),
    ]
    tokens_a_s = f"{rate(worker.figures.rate('generated_tokens')):>6}"
    parts += [fact("KV", f"{percent(used_share(engines)):>5}"), fact("tok/s", tokens_a_s)]
    return row([*parts, fact("up", span(worker.now.up_s))], width, gap=2)
