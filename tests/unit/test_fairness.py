"""Who comes first: shares of tenants, and a bound on how often one that waits is overtaken."""

import heapq
from collections import Counter

import pytest

from engine.fairness import _MAX_FLOWS, FairShare
from engine.request import Request


def make_request(name: int = 0, tenant: int = 0, priority: int = 0, weight: float = 1.0) -> Request:
    return Request(request_id=str(name), prompt_token_ids=(5,), tenant=tenant, priority=priority, weight=weight)


class Desk:
    """Requests that wait and are admitted one by one."""

    def __init__(self, aging: int = 64) -> None:
        self._share = FairShare(aging)
        self._waiting: list[tuple[float, int, Request]] = []
        self._num_arrived = 0

    def send(self, count: int, width: int = 1, **who: float) -> None:
        for _ in range(count):
            self._num_arrived += 1
            request = make_request(self._num_arrived, **who)  # type: ignore[arg-type]
            heapq.heappush(self._waiting, (self._share.stamp(request, width), self._num_arrived, request))

    def admit(self, count: int) -> list[Request]:
        admitted = []
        for _ in range(min(count, len(self._waiting))):
            stamp, _, request = heapq.heappop(self._waiting)
            self._share.admitted(stamp, request.priority)
            admitted.append(request)
        return admitted


def test_of_one_tenant_the_earlier_goes_first() -> None:
    desk = Desk()
    desk.send(5)

    assert [request.request_id for request in desk.admit(5)] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.5])
def test_tenants_that_wait_are_admitted_in_proportion_to_their_weights_whatever_each_has_sent(weight: float) -> None:
    desk = Desk()
    desk.send(1000, tenant=0)
    desk.admit(20)
    desk.send(30, tenant=1, weight=weight)

    counts = Counter[int]()
    while counts[1] < 30:
        counts[desk.admit(1)[0].tenant] += 1
        assert abs(counts[1] / weight - counts[0]) <= 1 + 1 / weight + 1e-9


def test_a_newcomer_is_admitted_next_behind_a_flood() -> None:
    desk = Desk()
    desk.send(10_000, tenant=0)
    desk.admit(5)

    desk.send(1, tenant=1)

    assert 1 in [request.tenant for request in desk.admit(2)]


def test_who_was_away_does_not_come_back_with_saved_up_turns() -> None:
    desk = Desk()
    desk.send(1, tenant=1)
    desk.send(100, tenant=0)
    desk.admit(60)

    desk.send(20, tenant=1)

    assert abs(Counter(request.tenant for request in desk.admit(10))[1] - 5) <= 1


def test_a_request_of_several_choices_counts_as_so_many() -> None:
    desk = Desk()
    desk.send(20, tenant=0, width=4)
    desk.send(80, tenant=1)

    assert abs(Counter(request.tenant for request in desk.admit(25))[1] - 20) <= 1


@pytest.mark.parametrize("priority", [1, 2])
def test_one_that_waits_is_overtaken_by_at_most_aging_requests_for_each_priority_above_it(priority: int) -> None:
    desk = Desk(aging=4)
    desk.send(10)
    desk.admit(10)
    desk.send(1, tenant=1, priority=priority)
    desk.send(1000, tenant=0, priority=0)

    order = [request.tenant for request in desk.admit(30)]

    assert 4 * priority - 1 <= order.index(1) <= 4 * priority


def test_a_late_request_of_a_lower_priority_lets_those_of_a_higher_one_pass() -> None:
    desk = Desk(aging=64)
    desk.send(1, priority=1)
    desk.send(3, priority=0)

    assert [request.priority for request in desk.admit(4)] == [0, 0, 0, 1]


def test_tenants_beyond_what_is_remembered_do_not_let_a_flood_pass() -> None:
    desk = Desk()
    desk.send(100, tenant=0)
    for tenant in range(1, 3 * _MAX_FLOWS):
        desk.send(1, tenant=tenant)
        desk.admit(1)

    assert len(desk._share._next) <= _MAX_FLOWS
    desk.send(10, tenant=0)
    desk.send(3, tenant=9999)
    assert 9999 in [request.tenant for request in desk.admit(3)]
