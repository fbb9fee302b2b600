"""The scheduling configuration as one versioned document, and who owns the pools."""

from __future__ import annotations

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from scheduler.config import ConfigConflict, ConfigDocument, ConfigError, at_version, current, diff, update
from scheduler.core.types import Contract, OnInfeasible, PolicyConfig, TierSpec
from scheduler.models import PolicyVersion
from scheduler.ownership import LEASE_SECONDS, OwnedElsewhereError, release, renew, take
from tenants.changes import current_version, one_change
from tenants.models import AuditEvent, Tier
from tenants.tiers import FIELDS

pytestmark = pytest.mark.django_db


@pytest.fixture
def document() -> ConfigDocument:
    with one_change(actor="seed"):
        Tier.objects.create(name="vip", rank=1, weight=60, floor=0.3)
        Tier.objects.create(name="free", rank=3, weight=10, floor=0.05, on_infeasible="reject")
    return current()


def test_without_anything_the_defaults_are_in_force_as_version_0() -> None:
    assert current() == ConfigDocument(
        0, {"name": "batching_aware", "max_batch": None, "max_wait_ms": 0.0, "step_tokens": None}, {}
    )


def test_a_tiers_defaults_are_the_cores(document: ConfigDocument) -> None:
    tier = Tier(name="plain", rank=2)
    tier.save()
    assert current().tier_specs()["plain"] == TierSpec(name="plain", rank=2)
    assert len(FIELDS) == len(fields(TierSpec)) - 1  # all but the name
    assert Tier.Contract.values == list(Contract) and Tier.OnInfeasible.values == list(OnInfeasible)


def test_the_document_shows_policy_and_tiers(document: ConfigDocument) -> None:
    shown = document.as_json()
    assert shown["version"] == 1 and list(shown["policy"]) == ["name", "max_batch", "max_wait_ms", "step_tokens"]
    assert shown["tiers"]["free"] == {
        "rank": 3,
        "weight": 10.0,
        "floor": 0.05,
        "slo": {"ttft": 5.0, "e2e": 5.0, "tpot": 0.25, "objective": 0.99},
        "availability": 0.99,
        "contract": "ttft_tpot",
        "on_infeasible": "reject",
        "headroom": 0.2,
        "reserved_slots": 0.0,
        "preemptible": False,
        "queue": {"max_length": 10000, "max_wait": 60.0},
        "min_slo_threshold": None,
        "max_tokens": 4096,
    }


def test_the_least_threshold_can_be_given_and_taken_back(document: ConfigDocument) -> None:
    update({"tiers": {"vip": {"min_slo_threshold": 0.2}}}, reason="", actor="ada")
    assert current().tier_specs()["vip"].min_slo_threshold == 0.2
    update({"tiers": {"vip": {"min_slo_threshold": None}}}, reason="", actor="ada")
    assert current().tier_specs()["vip"].min_slo_threshold is None
    with pytest.raises(ConfigError, match="weight"):
        update({"tiers": {"vip": {"weight": None}}}, reason="", actor="ada")


def test_a_partial_document_changes_what_it_names_and_nothing_else(document: ConfigDocument) -> None:
    after = update(
        {"policy": {"max_batch": 8}, "tiers": {"vip": {"weight": 50, "slo": {"ttft": 0.4}}}}, reason="peak", actor="ada"
    )
    assert after.version == 2 and after == current()
    assert diff(document, after) == {
        "policy.max_batch": [None, 8],
        "tiers.vip.weight": [60.0, 50.0],
        "tiers.vip.slo.ttft": [5.0, 0.4],
    }
    assert after.policy_config() == PolicyConfig(version=2, max_batch=8)
    newest = PolicyVersion.objects.get(version=2)
    assert (newest.actor, newest.reason) == ("ada", "peak")
    event = AuditEvent.objects.get()
    assert (event.actor, event.action, event.after) == ("ada", "config.update", {
        "policy.max_batch": 8, "tiers.vip.weight": 50.0, "tiers.vip.slo.ttft": 0.4,
    })  # fmt: skip


def test_one_update_is_one_change_and_one_version(document: ConfigDocument) -> None:
    before = current_version()
    update({"policy": "priority", "tiers": {"vip": {"weight": 1}, "free": {"weight": 2}}})
    assert current_version() == before + 1 and PolicyVersion.objects.count() == 2


def test_a_change_of_the_policy_alone_is_told_to_every_process(document: ConfigDocument) -> None:
    before = current_version()
    assert update({"policy": "priority"}).policy["name"] == "priority"
    assert current_version() == before + 1


def test_a_document_sent_back_unchanged_makes_no_version(document: ConfigDocument) -> None:
    before = current_version()
    assert update(document.as_json(), if_version=document.version) == document
    assert current_version() == before and not AuditEvent.objects.exists()


def test_a_tier_changed_elsewhere_is_a_version_too(document: ConfigDocument) -> None:
    Tier.objects.filter(name="vip").update(weight=1)
    assert current().version == 2 and current().tiers["vip"]["weight"] == 1.0
    Tier.objects.get(name="free").delete()
    assert current().version == 3 and list(current().tiers) == ["vip"]


def test_a_change_meant_for_another_version_is_refused_with_what_happened_since(document: ConfigDocument) -> None:
    update({"tiers": {"vip": {"weight": 1}}})
    with pytest.raises(ConfigConflict) as conflict:
        update({"tiers": {"vip": {"weight": 2}}}, if_version=1)
    assert (conflict.value.current_version, conflict.value.diff) == (2, {"tiers.vip.weight": [60.0, 1.0]})
    assert current().tiers["vip"]["weight"] == 1.0 and at_version(1) == document


@pytest.mark.parametrize(
    ("partial", "path"),
    [
        ({"polcy": {}}, "polcy"),
        ({"policy": {"nam": "priority"}}, "policy.nam"),
        ({"policy": {"name": "nope"}}, "policy.name"),
        ({"policy": {"max_batch": 0}}, "policy.max_batch"),
        ({"policy": {"max_batch": True}}, "policy.max_batch"),
        ({"policy": {"max_wait_ms": float("nan")}}, "policy.max_wait_ms"),
        ({"policy": {"max_wait_ms": -1}}, "policy.max_wait_ms"),
        ({"policy": {"step_tokens": 1.5}}, "policy.step_tokens"),
        ({"policy": 5}, "policy"),
        ({"tiers": []}, "tiers"),
        ({"tiers": {"gold": {}}}, "tiers.gold"),
        ({"tiers": {"vip": 5}}, "tiers.vip"),
        ({"tiers": {"vip": {"wieght": 1}}}, "tiers.vip.wieght"),
        ({"tiers": {"vip": {"slo": {"tft": 1}}}}, "tiers.vip.slo.tft"),
        ({"tiers": {"vip": {"slo": 1}}}, "tiers.vip.slo"),
        ({"tiers": {"vip": {"weight": "60"}}}, "tiers.vip.weight"),
        ({"tiers": {"vip": {"weight": True}}}, "tiers.vip.weight"),
        ({"tiers": {"vip": {"weight": None}}}, "tiers.vip.weight"),
        ({"tiers": {"vip": {"weight": -1}}}, "tiers.vip.weight"),
        ({"tiers": {"vip": {"weight": float("inf")}}}, "tiers.vip.weight"),
        ({"tiers": {"vip": {"weight": float("nan")}}}, "tiers.vip.weight"),
        ({"tiers": {"vip": {"weight": 0}, "free": {"weight": 0}}}, "tiers.vip.weight"),
        ({"tiers": {"vip": {"floor": 0.96}}}, "tiers.vip.floor"),
        ({"tiers": {"vip": {"floor": 1.1}}}, "tiers.vip.floor"),
        ({"tiers": {"vip": {"slo": {"ttft": 0}}}}, "tiers.vip.slo.ttft"),
        ({"tiers": {"vip": {"slo": {"objective": 1}}}}, "tiers.vip.slo.objective"),
        ({"tiers": {"vip": {"slo": {"objective": 0}}}}, "tiers.vip.slo.objective"),
        ({"tiers": {"vip": {"headroom": 1}}}, "tiers.vip.headroom"),
        ({"tiers": {"vip": {"reserved_slots": 0.6}, "free": {"reserved_slots": 0.4}}}, "tiers.vip.reserved_slots"),
        ({"tiers": {"vip": {"max_tokens": 0}}}, "tiers.vip.max_tokens"),
        ({"tiers": {"vip": {"max_tokens": 1.5}}}, "tiers.vip.max_tokens"),
        ({"tiers": {"vip": {"rank": 10**400}}}, "tiers.vip.rank"),
        ({"tiers": {"vip": {"contract": "best_effort"}}}, "tiers.vip.contract"),
        ({"tiers": {"vip": {"preemptible": 1}}}, "tiers.vip.preemptible"),
        ({"tiers": {"vip": {"queue": {"max_length": 0}}}}, "tiers.vip.queue.max_length"),
    ],
)
def test_nonsense_is_refused_by_path_and_changes_nothing(
    document: ConfigDocument, partial: dict[str, Any], path: str
) -> None:
    before = current_version()
    with pytest.raises(ConfigError) as error:
        update({"policy": {"max_batch": 3}, **partial})
    assert error.value.path == path
    assert current() == document and current_version() == before


def test_ranks_may_tie_and_floors_may_fill_the_engine(document: ConfigDocument) -> None:
    update({"tiers": {"vip": {"rank": 3, "floor": 0.7}, "free": {"floor": 0.3}}})
    assert current().version == 2


# --- ownership ------------------------------------------------------------------------------------------------------

NOON = datetime(2026, 7, 1, 12, tzinfo=UTC)
LATER = NOON + timedelta(seconds=LEASE_SECONDS)


def test_each_owner_has_a_higher_epoch() -> None:
    assert take("main", "unix:/a", now=NOON) == 1
    assert take("main", "unix:/b", now=LATER) == 2


def test_a_process_that_restarts_at_its_address_takes_over_at_once() -> None:
    assert [take("main", "unix:/a", now=NOON) for _ in range(3)] == [1, 2, 3]


def test_a_lease_held_elsewhere_is_respected_until_it_is_over() -> None:
    epoch = take("main", "unix:/a", now=NOON)
    with pytest.raises(OwnedElsewhereError, match="unix:/a"):
        take("main", "unix:/b", now=LATER - timedelta(seconds=1))
    assert renew("main", epoch, now=LATER - timedelta(seconds=1))
    with pytest.raises(OwnedElsewhereError):
        take("main", "unix:/b", now=LATER)


def test_a_superseded_owner_cannot_renew_and_its_release_does_nothing() -> None:
    old = take("main", "unix:/a", now=NOON)
    new = take("main", "unix:/a", now=NOON)
    assert not renew("main", old, now=NOON)
    release("main", old, now=NOON)
    with pytest.raises(OwnedElsewhereError):
        take("main", "unix:/b", now=NOON)
    release("main", new, now=NOON)
    assert take("main", "unix:/b", now=NOON) == new + 1
