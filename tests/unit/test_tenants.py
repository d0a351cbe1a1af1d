"""Names of tenants to the numbers, weights and salts that the engine is given."""

from worker.tenants import MAX_TENANTS, Tenants


def test_a_tenant_keeps_its_number_and_shares_it_with_nobody() -> None:
    tenants = Tenants({})
    numbers = {name: tenants.number(name) for name in ("a", "b", "c")}
    assert len({0, *numbers.values()}) == 4
    assert {name: tenants.number(name) for name in ("c", "a", "b")} == numbers


def test_nobody_in_particular_is_tenant_0() -> None:
    assert [Tenants({}).number(name) for name in (None, "")] == [0, 0]


def test_the_table_is_bounded_and_forgets_who_was_not_seen_longest() -> None:
    tenants = Tenants({})
    first, second = tenants.number("first"), tenants.number("second")
    for i in range(MAX_TENANTS - 2):
        tenants.number(str(i))
    tenants.number("first")
    assert tenants.number("newcomer") == second
    assert tenants.number("first") == first


def test_who_is_not_named_weighs_1() -> None:
    tenants = Tenants({"acme": 2.5})
    assert [tenants.weight(name) for name in ("acme", "other", None)] == [2.5, 1.0, 1.0]


def test_tenants_share_cached_prefixes_unless_they_are_kept_apart() -> None:
    assert Tenants({}).cache_salt("acmé") == b""
    assert [Tenants({}, are_isolated=True).cache_salt(name) for name in ("acmé", None)] == ["acmé".encode(), b""]
