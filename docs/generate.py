"""The tables of the pages that are made from the code: `make docs-reference` writes them between their markers.

Fields of a job from `worker/wire.py` (defaults, the limits that refusals name, the words beside each field), metrics from the
registry of a worker. A test holds the pages to what is made here.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Final

from prometheus_client import Metric
from sphinx.pycode import ModuleAnalyzer

from worker.metrics import Metrics
from worker.wire import FIELDS, Job

FOLDER: Final = Path(__file__).parent
BEGIN: Final = "<!-- table: begin (make docs-reference) -->"
END: Final = "<!-- table: end -->"
INFO_LABELS: Final = {
    "build_info": "version",
    "model_info": "model, dtype, block_size, kv_blocks, max_slots",
    "worker_info": "gpu, queue",
}
"""Those of the others are in their series from the start."""


def main() -> None:
    for page in TABLES:
        path = FOLDER / page
        path.write_text(filled(path.read_text(), TABLES[page]()))


def filled(text: str, table: str) -> str:
    """A page with this table between its markers."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n{END}{rest.partition(END)[2]}"


def job_fields() -> str:
    """The fields of a job body, in the order of `Job`."""
    notes = ModuleAnalyzer.for_module("worker.wire").find_attr_docs()
    rows = (
        (f"`{at.name}`", _default(at), FIELDS[at.name].limit, " ".join(notes.get(("Job", at.name), ()))) for at in fields(Job)
    )
    return _table(("field", "default", "limit", "meaning"), rows)


def metrics() -> str:
    """The metrics of a worker, in the order of the registry."""
    rows = (
        (f"`{name(family)}`", family.type, _labels(family), family.documentation) for family in Metrics().registry.collect()
    )
    return _table(("metric", "type", "labels", "meaning"), rows)


def name(family: Metric) -> str:
    """As it is scraped, without the prefix."""
    return family.name.removeprefix("slotmill_") + {"counter": "_total", "info": "_info"}.get(family.type, "")


def _default(at: "Field[object]") -> str:
    value = at.default if at.default_factory is MISSING else at.default_factory()
    return f"`{json.dumps(value)}`"


def _labels(family: Metric) -> str:
    if family.type == "info":
        return INFO_LABELS[name(family)]
    values: dict[str, dict[str, None]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le":
                values.setdefault(label, {})[value] = None
    return "; ".join(f"{label} = {', '.join(values[label])}" for label in values)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [f"| {' | '.join(' '.join(cell.split()) for cell in row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|---" * lines[0].count(" | ") + "|---|", *lines[1:], ""])


TABLES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType({"protocol.md": job_fields, "metrics.md": metrics})

if __name__ == "__main__":
    main()
