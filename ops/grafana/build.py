"""Writes the dashboards of source/ as the JSON that Grafana loads: `python ops/grafana/build.py [DIRECTORY]`.

Relies on Grafana's own types (grafana-foundation-sdk) for the shape of the JSON. A test compares what is checked in with what
this writes, so change the source, run it, and commit both.
"""

import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from source import fleet, latency, queue, slots

HERE = Path(__file__).parent


def main(directory: Path) -> None:
    """One file for each dashboard, named as its uid is."""
    for module in (fleet, slots, queue, latency):
        board = module.dashboard()
        text = JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False).encode(board)
        (directory / f"{board.uid}.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "dashboards")
