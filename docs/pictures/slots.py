"""The timelines of docs/how-it-works.md: one hand example through the real scheduler under two policies, drawn as SVG.

    python -m docs.pictures.slots

Rows are slots, columns steps, letters requests; an idle cell is hatched and has its reason. Letters and hatches say the same
as the colours. The scheduler counts slots and does not number them: a request is drawn in the first row that is free.
"""

from dataclasses import fields
from pathlib import Path
from typing import Final, NamedTuple

from engine.block_pool import BlockPool
from engine.config import SchedulerConfig
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import SlotCounts

OUTPUTS: Final = {"A": 2, "B": 8, "C": 3, "D": 5}
"""Tokens that each request asks for; all are there at the start."""
NUM_SLOTS: Final = 2
POLICIES: Final = ("request_level", "continuous")
COLOURS: Final = {"A": "#56b4e9", "B": "#e69f00", "C": "#009e73", "D": "#cc79a7"}
"""Of Okabe and Ito's palette, which the colour-blind can tell apart."""
CELL: Final = 44
BUSY: Final = ("decode", "prefill")


class Timeline(NamedTuple):
    """What one policy did with the example."""

    cells: list[list[str]]
    """For each step, what each slot did: a request's letter, or the state of an idle slot."""
    returned: dict[str, int]
    """The step at whose end each request returns."""

    @property
    def idle(self) -> dict[str, int]:
        """Idle cells by reason."""
        flat = [cell for step in self.cells for cell in step if cell not in OUTPUTS]
        return {reason: flat.count(reason) for reason in dict.fromkeys(flat)}


def run(policy: str) -> Timeline:
    """The example to its end."""
    config = SchedulerConfig(
        max_slots=NUM_SLOTS,
        max_num_batched_tokens=64,
        block_size=16,
        num_blocks=16,
        max_model_len=64,
        prefix_caching=False,
        scheduling=policy,
    )
    scheduler = Scheduler(config, BlockPool(config.num_blocks, config.block_size))
    for place, (name, length) in enumerate(OUTPUTS.items()):
        request = Request(request_id=name, prompt_token_ids=(1,), params=SamplingParams(max_tokens=length))
        scheduler.add(Sequence(request, (0, place, 0), frozenset()))
    rows = [""] * NUM_SLOTS
    timeline = Timeline([], {})
    while scheduler.num_running + scheduler.num_waiting:
        output = scheduler.schedule()
        names = [item.sequence.request.request_id for item in output.scheduled]
        rows = _placed(rows, names)
        timeline.cells.append(_told(rows, output.slots))
        for end in scheduler.update(output, [1] * len(names)):
            timeline.returned[end.sequence.request.request_id] = len(timeline.cells)
    return timeline


def _placed(rows: list[str], names: list[str]) -> list[str]:
    """Who goes on stays in its row, who is new takes the first that is free."""
    new = iter([name for name in names if name not in rows])
    return [row if row in names else next(new, "") for row in rows]


def _told(rows: list[str], slots: SlotCounts) -> list[str]:
    reasons = iter([at.name for at in fields(slots) if at.name not in BUSY for _ in range(getattr(slots, at.name))])
    return [row or next(reasons) for row in rows]


def svg(timelines: dict[str, Timeline]) -> str:
    """Both timelines, one below the other, on a scale of steps that they share."""
    num_steps = max(len(timeline.cells) for timeline in timelines.values())
    height = (NUM_SLOTS + 2) * CELL
    size = f'width="{(num_steps + 2) * CELL}" height="{height * len(timelines)}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12" text-anchor="middle">',
        '<defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" fill="white"/><path d="M0 0V6" stroke="#999"/></pattern></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (policy, timeline) in enumerate(timelines.items()):
        parts += _drawn(policy, timeline, number * height)
    return "\n".join([*parts, "</svg>", ""])


def _drawn(policy: str, timeline: Timeline, top: int) -> list[str]:
    num_idle = sum(timeline.idle.values())
    title = f"{policy}: {len(timeline.cells)} steps, {num_idle} of {NUM_SLOTS * len(timeline.cells)} slot-steps idle"
    parts = [f'<text x="{CELL}" y="{top + 24}" text-anchor="start" font-weight="bold">{title}</text>']
    middle = [top + (slot + 1) * CELL + CELL // 2 - 5 for slot in range(NUM_SLOTS)]
    parts += [_text(0, y, f"slot {slot}") for slot, y in enumerate(middle, start=1)]
    for step, cells in enumerate(timeline.cells, start=1):
        parts.append(_text(step, top + (NUM_SLOTS + 1) * CELL + 3, str(step)))
        for y, cell in zip(middle, cells, strict=True):
            place = f'x="{step * CELL + 12}" y="{y - 25}" width="{CELL - 2}" height="{CELL - 2}"'
            parts.append(f'<rect {place} fill="{COLOURS.get(cell, "url(#idle)")}" stroke="black"/>')
            if cell not in COLOURS:  # a plain ground for the reason
                parts.append(f'<rect x="{step * CELL + 13}" y="{y - 10}" width="{CELL - 4}" height="14" fill="white"/>')
            parts.append(_text(step, y, cell.replace("_", " ")))
    return parts


def _text(step: int, y: int, text: str) -> str:
    size = ' font-size="9"' if step and len(text) > 2 else ""
    x = step * CELL + 12 + CELL // 2 - 1
    return f'<text x="{x}" y="{y}"{size}>{text}</text>'


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(svg({policy: run(policy) for policy in POLICIES}))
