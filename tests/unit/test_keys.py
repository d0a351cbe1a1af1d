"""What keys are called is part of the protocol: producers and clients in other languages spell them too."""

import pytest

from worker.errors import InvalidOption
from worker.keys import Keys


def test_every_key_carries_the_name_that_the_protocol_gives_it() -> None:
    keys = Keys("q")
    spelled = {
        keys.lane("high"): "jobs:high",
        keys.lane("normal"): "jobs:normal",
        keys.lane("low"): "jobs:low",
        keys.job("a"): "job:a",
        keys.log("a"): "tok:a",
        keys.result("a"): "res:a",
        keys.channel("a"): "ch:a",
        keys.idempotency("a"): "idem:a",
        keys.worker("a"): "worker:a",
        keys.scratch("t", "hash"): "doctor:t:hash",
        keys.control: "ctl",
        keys.look: "look",
        keys.done: "done",
        keys.dead: "dead",
        keys.workers: "workers",
        keys.cursor: "cursor",
        keys.config: "cfg",
        keys.delayed("low"): "delayed:low",
        keys.parked("a"): "parked:a",
    }
    assert spelled == {"slotmill:{q}:" + name: name for name in spelled.values()}


def test_lanes_stand_in_the_order_in_which_they_are_served() -> None:
    assert [lane.rsplit(":", 1)[1] for lane in Keys("q").lanes] == ["high", "normal", "low"]


def test_a_job_id_with_braces_stays_in_the_cluster_slot_of_its_queue() -> None:
    assert Keys("q").job("{other}").startswith("slotmill:{q}:")


@pytest.mark.parametrize("name", ["", "a b", "a{b", "a}b", "a\nb", "x" * 129, "a\udcff"])
def test_a_queue_name_that_would_break_the_hash_tag_is_refused_with_the_limit(name: str) -> None:
    with pytest.raises(InvalidOption, match=r"^queue: .*1 to 128 characters"):
        Keys(name)


def test_a_partition_of_a_queue_has_a_valid_name() -> None:
    assert Keys("chat.0").prefix == "slotmill:{chat.0}:"
