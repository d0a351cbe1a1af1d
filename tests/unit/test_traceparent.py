"""Which traceparents count, by W3C Trace Context; what does not is no reason to fail a job."""

import msgpack
import pytest

from worker.errors import InvalidJob
from worker.traceparent import TraceParent, parse, trace_id_for, well_formed
from worker.wire import decode_job

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GOOD = f"00-{TRACE}-{SPAN}-01"


def test_a_well_formed_one_is_read() -> None:
    assert parse(GOOD) == TraceParent(TRACE, SPAN, "01")


@pytest.mark.parametrize("value", [f"01-{TRACE}-{SPAN}-00", f"cc-{TRACE}-{SPAN}-01-what-comes-later"])
def test_one_of_a_later_version_is_read_as_far_as_it_is_known(value: str) -> None:
    parsed = parse(value)
    assert parsed is not None
    assert (parsed.trace_id, parsed.parent_id) == (TRACE, SPAN)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "00-x",
        5,
        {"a": 1},
        GOOD.upper(),
        GOOD + " ",
        GOOD + "\n",
        GOOD + "-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"01-{TRACE}-{SPAN}-01x",
        f"01-{TRACE}-{SPAN}-01-" + "x" * 512,
        f"٠٠-{TRACE}-{SPAN}-01",
    ],
)
def test_one_that_is_not_well_formed_is_as_good_as_none(value: object) -> None:
    assert (parse(value), well_formed(value)) == (None, None)


@pytest.mark.parametrize(("value", "kept"), [(GOOD, GOOD), ("00-x", None), ({"a": 1}, None), (2**60, None)])
def test_a_job_is_never_refused_for_it(value: object, kept: str | None) -> None:
    assert decode_job({b"m": msgpack.packb({"prompt": "w5", "traceparent": value})}, lane="normal").traceparent == kept


def test_a_refusal_tells_the_trace_of_the_job() -> None:
    with pytest.raises(InvalidJob) as refused:
        decode_job({b"m": msgpack.packb({"prompt": "w5", "max_tokens": -3, "traceparent": GOOD})}, lane="normal")
    assert refused.value.traceparent == GOOD


def test_a_made_up_trace_is_well_formed_and_the_job_s_alone() -> None:
    assert parse(f"00-{trace_id_for('a', 1)}-{SPAN}-01")
    assert len({trace_id_for("a", 1), trace_id_for("b", 1), trace_id_for("a", 2), trace_id_for("a", 1)}) == 3
