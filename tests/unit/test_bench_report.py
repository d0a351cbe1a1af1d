"""The figures in README.md and bench/README.md are those of the records, and no others."""

from pathlib import Path
from typing import Any

import pytest

from bench.record import RESULTS
from bench.report import BEGIN, END, NOTHING, PAGES, TUNING, filled, knobs, read, tables


def record(kind: str, name: str = "a.json", date: str = "2026-01-01", **figures: Any) -> dict[str, Any]:
    machine = {
        "processor": "a processor, 2 cores, avx2",
        "memory": "8 GiB",
        "torch": "2.13.0",
        "date": date,
        "commit": "c0ffee",
        "command": "python -m bench.x",
    }
    return {"kind": kind, "file": name, "machine": machine, **figures}


def closed(median: float, name: str = "a.json", date: str = "2026-01-01") -> dict[str, Any]:
    work = {"name": "sharegpt", "requests": 64}
    return record("closed", name, date, workload=work, options={}, ratio={"median": median, "min": 0.9, "max": 1.0})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name if page == PAGES[0] else "bench"))
def test_the_tables_of_the_pages_are_those_of_the_records(page: Path) -> None:
    text = page.read_text()
    assert filled(text, tables(read(RESULTS), is_short=page == PAGES[0])) == text, "run `make bench-report`"


def test_the_table_of_knobs_is_that_of_the_record() -> None:
    text = TUNING.read_text()
    assert filled(text, knobs(read(RESULTS))) == text, "run `make bench-report`"


def test_a_knob_has_a_row_for_each_value() -> None:
    figures = {"median": 2.0, "min": 1.0, "max": 3.0}
    row = {"field": "max_slots", "value": 4, "requests": 8, "no_memory": 0.25, "preemptions": 1}
    made = record("tuning", model="m", rows=[row | {"output_tokens_per_s": figures, "step_p99_ms": figures}])
    assert "| `--max-slots 4` | 8 | 2.0 (1.0 to 3.0) | 2.0 ms (1.0 to 3.0) | 25.0 % | 1 |" in knobs([made])


def test_without_records_a_table_says_so() -> None:
    assert tables([], is_short=True).strip() == NOTHING


def test_a_row_has_the_median_and_the_spread() -> None:
    assert "| sharegpt, 64 requests: through the queue / engine alone | 0.970 (0.900 to 1.000) | a.json |" in tables(
        [closed(0.97)], is_short=False
    )


def test_the_long_table_says_where_each_record_was_made() -> None:
    origin = (
        "| a.json | a processor, 2 cores, avx2, 8 GiB, torch 2.13.0 | not measured | c0ffee, 2026-01-01 | `python -m bench.x` |"
    )
    assert origin in tables([closed(0.97)], is_short=False)


def test_the_long_table_says_how_busy_the_machine_was_at_most() -> None:
    busy = closed(0.97) | {"cores": {"service": [{"own": 1.9, "others": 0.1}, {"own": 1.0, "others": 0.9}]}}
    assert "| 0.90 | c0ffee" in tables([busy], is_short=False)


def test_requests_that_were_cut_are_said_to_be() -> None:
    made = closed(0.97)
    made["workload"]["cap"] = 12
    assert "sharegpt, 64 requests cut to 12 tokens: through" in tables([made], is_short=False)


def test_the_long_table_shows_the_plots_that_there_are_records_for() -> None:
    speed = {"median": 20.0, "min": 19.0, "max": 21.0}
    batches = record("batches", dtype="float32", options={}, output_tokens_per_s={"1": speed})
    assert "(results/throughput.svg)" in tables([batches], is_short=False)
    assert "(results/" not in tables([closed(0.97)], is_short=False)


def test_of_two_answers_to_one_question_the_later_is_shown() -> None:
    text = tables([closed(0.97, "b.json", "2026-01-01"), closed(0.98, "a.json", "2026-02-01")], is_short=False)
    assert "0.980" in text
    assert "0.970" not in text


def test_the_readme_leaves_single_kernels_out() -> None:
    made = {"peak_gflop_per_s": 100.0, "products": [], "attention": []}
    made["attention"] = [{"case": "decode", "side": "cpu", "seconds": {"median": 0.001}, "gb_per_s": 9.0, "gflop_per_s": 1.0}]
    records = [record("kernels", dtypes={"float32": made}), closed(0.97)]
    assert "9.0 GB/s" in tables(records, is_short=False)
    assert "GB/s" not in tables(records, is_short=True)


def test_records_of_other_kinds_have_no_rows() -> None:
    assert tables([record("trial")], is_short=False).strip() == NOTHING


def test_the_ratio_to_each_peer_has_a_row_after_all_speeds() -> None:
    figures = {"median": 200.0, "min": 190.0, "max": 210.0}
    sides = {name: {"settings": {"max_len": 512, "dtype": "float32"}, "output_tokens_per_s": figures} for name in "ab"}
    text = tables(
        [
            record(
                "peers",
                workload={"name": "alpaca", "requests": 256},
                sides=sides,
                ratios={"b": {"median": 1.25, "min": 1.2, "max": 1.3}},
            )
        ],
        is_short=True,
    )
    rows = [line for line in text.splitlines() if line.startswith("| alpaca")]
    assert rows[0] == "| alpaca, 256 requests: a (dtype float32), tokens/s | 200.0 (190.0 to 210.0) |"
    assert rows[-1] == "| alpaca, 256 requests: slotmill / b | 1.25 (1.20 to 1.30) |"


def test_only_what_is_between_the_markers_changes() -> None:
    page = f"before\n{BEGIN}\n\nold\n{END}\nafter"
    assert filled(page, "new") == f"before\n{BEGIN}\n\nnew\n{END}\nafter"


@pytest.mark.parametrize("page", ["none", BEGIN, END + BEGIN, BEGIN + END + BEGIN + END], ids=["none", "open", "turned", "two"])
def test_a_page_without_one_pair_of_markers_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="one pair of markers"):
        filled(page, "new")
