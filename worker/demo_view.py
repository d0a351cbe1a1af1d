"""What the demo shows: answers while they grow, lines when they are done, and a table of where the slots went.

Relies on rich for the terminal and on nothing else: answers and figures come in as plain data, so tests render made-up ones.
Leaves the server, the worker and the streaming to `worker/demo.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

SLOT_STATES = {
    "decode": "decode",
    "prefill": "prefill",
    "finished": "finished (held, its request has ended)",
    "no_memory": "no_memory (a request waits for blocks)",
    "no_budget": "no_budget (a request waits for budget)",
    "no_work": "no_work (nothing waits)",
}
"""Slot states of docs/engine.md in the order shown, with what they mean."""

PANEL_LINES = 5
MIN_PANEL_WIDTH = 36


@dataclass(slots=True, kw_only=True)
class Answer:
    """One prompt and what has come back so far. Times are of the monotonic clock, in seconds."""

    prompt: str
    max_tokens: int
    job_id: str
    sent_s: float = 0.0
    text: str = ""
    num_tokens: int = 0
    first_s: float | None = None
    ended_s: float | None = None
    state: str = ""
    """The job's final state; empty while it runs."""
    error: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token, time in the queue included."""
        return None if self.first_s is None else self.first_s - self.sent_s


@dataclass(frozen=True, slots=True)
class RequestLevel:
    """What batches that wait for their longest request would have used, in steps and slot-steps."""

    steps: int
    slot_steps: int
    held: int
    """Idle in a slot whose request has ended."""
    empty: int
    """Idle in a slot that got no request."""

    @property
    def idle(self) -> int:
        """Slot-steps without a token."""
        return self.held + self.empty


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """A run in numbers; slot-steps, blocks and preemptions are the worker's own counters."""

    num_slots: int
    lengths: tuple[int, ...]
    """Output tokens of each answer, in the order sent."""
    num_prompt_tokens: int
    elapsed_s: float
    slot_steps: Mapping[str, int]
    kv_blocks: int
    peak_kv_blocks: int
    kv_filled_ratio: float | None
    """Positions that held a token over positions allocated, mean while running; None when nothing was seen."""
    num_preemptions: int
    ttfts_s: tuple[float, ...]


def request_level(lengths: Sequence[int], num_slots: int) -> RequestLevel:
    """Request-level batching of the same answers: the earliest `num_slots` together, slots held until the longest ends.

    Prompts are free: a request makes its first token in the step that admits it. For 2 slots and 2, 8, 3, 5 tokens: 13 steps,
    26 slot-steps, 8 of them idle.
    """
    batches = [lengths[start : start + num_slots] for start in range(0, len(lengths), num_slots)]
    steps = sum(max(batch) for batch in batches)
    held = sum(max(batch) * len(batch) - sum(batch) for batch in batches)
    empty = sum(max(batch) * (num_slots - len(batch)) for batch in batches)
    return RequestLevel(steps, steps * num_slots, held, empty)


def printable(text: str) -> str:
    """The text without control characters (a model may write terminal escapes); newlines stay."""
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def shorten(text: str, width: int) -> str:
    """The text on one line of at most `width` characters."""
    line = " ".join(printable(text).split())
    return line if len(line) <= width else line[: max(0, width - 3)] + "..."


def finished_line(answer: Answer, num_done: int, num_total: int) -> str:
    """One line about an ended answer, for pipes and logs."""
    ttft = "" if answer.ttft_s is None else f", first after {answer.ttft_s:.1f} s"
    outcome = shorten(answer.text, 100) if answer.state == "succeeded" else f"{answer.state}: {shorten(answer.error, 100)}"
    head = f"[{num_done:>2}/{num_total}] {answer.job_id} ({answer.num_tokens} tokens{ttft})"
    return f"{head} {shorten(answer.prompt, 60)} -> {outcome}"


def finished_block(answer: Answer, num_done: int, num_total: int, width: int) -> Text:
    """The same on two lines, for a terminal."""
    head = f"[{num_done:>2}/{num_total}] "
    text = Text().append(head, "green" if answer.state == "succeeded" else "red")
    text.append(shorten(answer.prompt, width - len(head)), "bold")
    outcome = answer.text if answer.state == "succeeded" else f"{answer.state}: {answer.error}"
    return text.append("\n" + " " * len(head)).append(shorten(outcome, width - len(head)))


def seat(cells: list[Answer | None], answers: Sequence[Answer]) -> None:
    """Clear the cells of answers that have ended and give free ones to answers that grow; nobody else moves."""
    cells[:] = [None if answer is None or answer.state else answer for answer in cells]
    for answer in answers:
        if answer.num_tokens and not answer.state and not any(answer is seated for seated in cells) and None in cells:
            cells[cells.index(None)] = answer


def live_view(cells: Sequence[Answer | None], progress: Text, console: Console) -> RenderableType:
    """Panels of the answers in their cells, as many as the terminal holds, and the progress line below them."""
    columns = max(1, min(console.width // MIN_PANEL_WIDTH, len(cells)))
    rows = max(1, min(-(-len(cells) // columns), (console.height - 2) // (PANEL_LINES + 2)))
    width = console.width // columns
    grid = Table.grid(expand=True)
    for _ in range(columns):
        grid.add_column(ratio=1)
    for row in range(rows):
        grid.add_row(*(_panel(answer, width, console) for answer in cells[row * columns : (row + 1) * columns]))
    return Group(grid, progress)


def progress_line(answers: Sequence[Answer], elapsed_s: float) -> Text:
    """Answers done, tokens so far, tokens per second."""
    done = sum(bool(answer.state) for answer in answers)
    tokens = sum(answer.num_tokens for answer in answers)
    rate = tokens / elapsed_s if elapsed_s > 0 else 0.0
    return Text(f"{done}/{len(answers)} answers   {tokens} tokens   {rate:.1f} tokens/s   {elapsed_s:.0f} s", "bold", end="")


def _panel(answer: Answer | None, width: int, console: Console) -> Panel:
    if answer is None:  # an empty cell keeps its height: a view that grows and shrinks flickers
        return Panel("", height=PANEL_LINES + 2, border_style="dim")
    body = Text("\n").join(Text(printable(answer.text)).wrap(console, width - 4)[-PANEL_LINES:])
    return Panel(
        body,
        title=Text(shorten(answer.prompt, width - 8)),
        subtitle=f"{answer.num_tokens}/{answer.max_tokens}",
        height=PANEL_LINES + 2,
        border_style="cyan",
    )


def summary(figures: Figures) -> RenderableType:
    """The closing tables: the run, and its slot-steps beside those of request-level batching."""
    return Group(Text(), _run_table(figures), Text(), _slot_table(figures), Text(_conclusion(figures)))


def _run_table(figures: Figures) -> Table:
    tokens = sum(figures.lengths)
    filled = "" if figures.kv_filled_ratio is None else f", {figures.kv_filled_ratio:.1%} of allocated positions filled"
    rows = {
        "prompts": f"{len(figures.lengths)} in {figures.num_slots} slots, {figures.num_prompt_tokens:,} prompt tokens",
        "tokens": f"{tokens:,} in {figures.elapsed_s:.1f} s = {tokens / figures.elapsed_s:.1f} tokens/s",
        "KV blocks": f"peak {figures.peak_kv_blocks:,} of {figures.kv_blocks:,}{filled}",
        "first token": _first_token(figures.ttfts_s),
        "preemptions": f"{figures.num_preemptions:,}",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in rows.items():
        table.add_row(Text(name, "bold"), value)
    return table


def _first_token(ttfts_s: Sequence[float]) -> str:
    if not ttfts_s:
        return "none"
    return f"median {median(ttfts_s):.2f} s, longest {max(ttfts_s):.2f} s, time in the queue included"


def _slot_table(figures: Figures) -> Table:
    compared = request_level(figures.lengths, figures.num_slots)
    started = sum(length > 0 for length in figures.lengths)
    other = {
        "decode": sum(figures.lengths) - started,
        "prefill": started,
        "finished": compared.held,
        "no_work": compared.empty,
    }
    ours, theirs = sum(figures.slot_steps.values()), compared.slot_steps
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("where the slots went")
    for title in ("this run", "", "request-level", ""):
        table.add_column(title, justify="right")
    for state, label in SLOT_STATES.items():
        ran, would = figures.slot_steps.get(state, 0), other.get(state, 0)
        table.add_row(label, f"{ran:,}", _share(ran, ours), f"{would:,}", _share(would, theirs))
    table.add_row("slot-steps", f"{ours:,}", "", f"{theirs:,}", "", style="bold")
    return table


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _conclusion(figures: Figures) -> str:
    compared = request_level(figures.lengths, figures.num_slots)
    total = sum(figures.slot_steps.values())
    idle = total - figures.slot_steps.get("decode", 0) - figures.slot_steps.get("prefill", 0)
    return (
        f"idle: {_share(idle, total)} of the slot-steps; with batches of {figures.num_slots} that wait for their longest, "
        f"prompts free: {_share(compared.idle, compared.slot_steps)}"
    )
