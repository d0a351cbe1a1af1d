"""Following a job, driven by hand."""

import time
from unittest.mock import MagicMock

import pytest

from worker.errors import WaitTimeout
from worker.follower import Follower, Hear
from worker.frames import TokenFrame, encode_frame
from worker.keys import Keys


def test_a_job_that_was_heard_of_runs_whatever_was_seen_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    steps = Follower(MagicMock(), Keys("q"), "a", find=str, deadline=1, check_s=1).follow()
    next(steps)
    assert isinstance(steps.send([(b"queued", None), [], None]), Hear)
    steps.send(("message", encode_frame(TokenFrame(1, 0, 0, (1,), "a", 0))))
    now = 2.0
    with pytest.raises(WaitTimeout, match="it goes on") as told:
        next(steps)
    assert told.value.state == "running"
