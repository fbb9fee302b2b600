from __future__ import annotations

from scheduler.core.service import Service
from tests.core.cast import request

STEP = (0.01, 0.0, 0.0, 0.0, 0.0)


def test_turns_of_tenants_that_always_wait_do_not_pile_up() -> None:
    """A tenant's request that ends makes a new entry; what the old one said of the tenant is forgotten with it."""
    service = Service({"gold": (0.0, 1.0)})
    for tenant in ("a", "b", "c"):
        service.arrived("gold", tenant)
    turns = []
    for number in range(3000):
        tenant = service.tiers["gold"].next_tenant()
        assert tenant is not None
        turns.append(tenant)
        service.arrived("gold", tenant)
        service.left_queue("gold", tenant)
        service.dispatched(request(str(number), "gold", tenant=tenant, prompt_tokens=1), cost=0.02)
        service.step(0.01, 1, STEP)
        service.ended(str(number))
    assert len(service.tiers["gold"].turns) < 10
    assert {turns.count(tenant) for tenant in ("a", "b", "c")} == {1000}
