"""`harness apply`: the file says what should be."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError

from scheduler import config
from scheduler.apply import apply
from scheduler.management.commands import apply as command
from scheduler.models import Deployment, PolicyVersion
from tenants import keys
from tenants.apply import Result
from tenants.changes import beat, current_version
from tenants.documents import DocumentError
from tenants.ledger import record_usage
from tenants.models import ApiKey, AuditEvent, KeySecret, Limit, Price, Tenant, Tier

from .test_ledger import ROW

pytestmark = pytest.mark.django_db

EXAMPLE = """
version: 1
tiers:
  - {name: vip,  rank: 1, weight: 60, floor: 0.30, slo: {ttft: 0.5, e2e: 0.5, tpot: 0.10, objective: 0.999}, max_tokens: 4096}
  - {name: paid, rank: 2, weight: 30, floor: 0.15, slo: {ttft: 2.0, e2e: 2.0, tpot: 0.15, objective: 0.99}}
  - {name: free, rank: 3, weight: 10, floor: 0.05, max_tokens: 512, on_infeasible: reject, preemptible: true, headroom: 0.30,
     reserved_slots: 0, queue: {max_length: 10000, max_wait: 120}, limits: {rpm: 20}}
tenants:
  - slug: acme
    name: Acme Corp
    tier: vip
    timezone: Asia/Shanghai
    limits:
      rpm: 600
      tpm: 100000
      concurrency: 32
      budgets:
        - {amount: "100.00", currency: USD, period: month, hard: true, alerts: [0.8, 0.95]}
        - {tokens: 5000000, period: day, hard: true}
    keys:
      - {name: prod, scopes: [inference], models: ["*"], allowed_ips: [], expires_at: null, limits: {rpm: 60, models: {demo: {tpm: 20000}}}}
      - {name: ops,  scopes: [admin]}
prices:
  - {model: demo, input_per_mtok: "0.20", cached_input_per_mtok: "0.05", output_per_mtok: "0.60", currency: USD, from: "2026-01-01T00:00:00Z"}
deployments:
  - {model: demo, engine: vllm, options: {path: models/demo, dtype: float32, max_seqs: 32, kv_space_gib: 2}}
  - {model: sim,  engine: simulated, options: {step: {base: 0.008}, max_seqs: 16}}
policy: {name: priority, max_batch: 32, max_wait_ms: 50, step_tokens: 512}
degradation_rules: default
"""  # noqa: E501


def run(text: str) -> Result:
    return apply(text, actor="test")


def refused(text: str) -> tuple[str, str]:
    with pytest.raises(DocumentError) as error:
        run(text)
    return error.value.path, error.value.message


def budget(text: str) -> str:
    return f"tenants: [{{slug: acme, limits: {{budgets: [{text}]}}}}]"


def key_of(text: str) -> str:
    return f"tenants: [{{slug: acme, keys: [{text}]}}]"


@pytest.fixture
def example() -> Result:
    return run(EXAMPLE)


def test_everything_of_the_example_arrives(example: Result) -> None:
    free, acme = Tier.objects.get(name="free"), Tenant.objects.get(slug="acme")
    assert (free.max_tokens, free.on_infeasible, free.preemptible, free.queue_max_wait) == (512, "reject", True, 120.0)
    assert [(limit.kind, limit.value) for limit in free.limits.all()] == [("rpm", 20)]
    assert (acme.tier.name, acme.timezone, acme.state) == ("vip", "Asia/Shanghai", "active")
    money, tokens = acme.limits.filter(kind="budget").order_by("period").reverse()
    assert (money.amount, money.currency, money.period, money.hard, money.alerts) == (
        Decimal("100.00"), "USD", "month", True, [0.8, 0.95],
    )  # fmt: skip
    assert (tokens.value, tokens.currency, tokens.period) == (5_000_000, "", "day")
    prod = acme.keys.get(name="prod")
    assert {(limit.model, limit.kind, limit.value) for limit in prod.limits.all()} == {
        ("", "rpm", 60), ("demo", "tpm", 20000),
    }  # fmt: skip
    price = Price.objects.get()
    assert (price.output_per_mtok, price.effective_from) == (Decimal("0.60"), datetime(2026, 1, 1, tzinfo=UTC))
    assert Deployment.objects.get(model="sim").options == {"step": {"base": 0.008}, "max_seqs": 16}
    assert config.current().policy == {"name": "priority", "max_batch": 32, "max_wait_ms": 50.0, "step_tokens": 512}


def test_the_first_run_is_one_change_and_one_policy_version(example: Result) -> None:
    assert current_version() == 1 and PolicyVersion.objects.count() == 1


def test_the_secrets_are_handed_out_once_and_prove_the_keys(example: Result) -> None:
    assert [(key["tenant"], key["name"]) for key in example.keys] == [("acme", "prod"), ("acme", "ops")]
    for issued in example.keys:
        stored = KeySecret.objects.get(lookup=keys.lookup_of(issued["key"]))
        assert stored.digest == keys.digest(issued["key"], stored.pepper_version)


def test_a_second_run_changes_nothing_and_shows_no_secret(example: Result) -> None:
    audited = AuditEvent.objects.count()
    again = run(EXAMPLE)
    assert not again.did_anything and again.keys == [] and again.unchanged > 10
    assert current_version() == 1 and AuditEvent.objects.count() == audited


def test_no_secret_is_in_the_audit_log_or_a_representation(example: Result) -> None:
    audit = json.dumps(list(AuditEvent.objects.values("target", "before", "after")))
    for issued in example.keys:
        digest = KeySecret.objects.get(lookup=keys.lookup_of(issued["key"])).digest
        assert issued["key"] not in audit and digest not in audit
        assert issued["key"] not in repr(example)


def test_what_is_not_named_is_left_alone(example: Result) -> None:
    result = run("tiers: [{name: vip, weight: 70}]\ntenants: [{slug: acme, limits: {rpm: 500}}]")
    assert result.changed == ["tier vip (weight)", "limit tenant acme rpm (value)"]
    vip = Tier.objects.get(name="vip")
    assert (vip.weight, vip.slo_ttft) == (70.0, 0.5)
    assert Limit.objects.filter(tenant__slug="acme").count() == 5 and Tier.objects.count() == 3


def test_null_removes_a_limit_and_absent_a_budget(example: Result) -> None:
    result = run("""tenants: [{slug: acme, limits: {tpm: null, budgets: [{period: day, tokens: 1, state: absent}]}}]""")
    assert result.removed == ["limit tenant acme tpm", "limit tenant acme budget per day in tokens"]


def test_fr_018_what_is_read_back_is_what_was_sent_and_unset_is_not_zero(example: Result) -> None:
    """FR-018."""
    run(
        """tenants: [{slug: acme, keys: [
          {name: unset},
          {name: zero, limits: {budgets: [{period: total, amount: "0"}, {period: day, tokens: 0}]}},
          {name: little, limits: {budgets: [{period: month, amount: "0.0005"}]}}]}]"""
    )
    kept = {
        name: [(one.period, one.value, one.amount) for one in Limit.objects.filter(key__name=name).order_by("id")]
        for name in ("unset", "zero", "little")
    }
    assert kept == {
        "unset": [],
        "zero": [("total", None, Decimal(0)), ("day", 0, None)],
        "little": [("month", None, Decimal("0.0005"))],
    }


def test_a_budget_may_be_of_one_model(example: Result) -> None:
    text = """tenants: [{slug: acme, limits: {models: {demo: {budgets: [{period: day, tokens: 7}]}}}}]"""
    run(text)
    assert Limit.objects.get(model="demo", kind="budget").value == 7
    assert not run(text).did_anything


def test_a_budget_changes_in_place(example: Result) -> None:
    run("""tenants: [{slug: acme, limits: {budgets: [{period: month, amount: "250.50", hard: false}]}}]""")
    budget = Limit.objects.get(kind="budget", period="month")
    assert (budget.amount, budget.hard) == (Decimal("250.50"), False)


def test_an_absent_key_is_revoked_and_present_again_is_another_key(example: Result) -> None:
    assert run("tenants: [{slug: acme, keys: [{name: ops, state: absent}]}]").removed == ["key acme/ops"]
    assert not run("tenants: [{slug: acme, keys: [{name: ops, state: absent}]}]").did_anything
    again = run("tenants: [{slug: acme, keys: [{name: ops, scopes: [admin]}]}]")
    assert len(again.keys) == 1 and again.keys[0]["key"] != example.keys[1]["key"]
    assert ApiKey.objects.filter(name="ops").count() == 2


def test_a_tier_is_removed_when_nobody_is_in_it(example: Result) -> None:
    assert refused("tiers: [{name: vip, state: absent}]") == ("tiers[0]", "Tier vip still has tenants: acme.")
    moved = run("tiers: [{name: vip, state: absent}]\ntenants: [{slug: acme, tier: paid}]")
    assert moved.removed == ["tier vip"]
    assert list(config.current().tiers) == ["paid", "free"]


def test_a_tenant_is_suspended_and_removed(example: Result) -> None:
    run("tenants: [{slug: acme, state: suspended}]")
    assert Tenant.objects.get(slug="acme").state == "suspended"
    assert run("tenants: [{slug: acme, state: absent}]").removed == ["tenant acme"]
    assert not ApiKey.objects.exists() and not Limit.objects.filter(tier=None).exists()


def test_a_removed_deployment_drains_and_can_come_back(example: Result) -> None:
    assert run("deployments: [{model: sim, state: absent}]").removed == ["deployment sim"]
    assert Deployment.objects.get(model="sim").removed_at is not None
    assert not run("deployments: [{model: sim, state: absent}]").did_anything
    assert run("deployments: [{model: sim}]").changed == ["deployment sim (removed_at)"]


def test_a_price_is_never_edited(example: Result) -> None:
    path, message = refused("""prices: [{model: demo, input_per_mtok: "0.30", cached_input_per_mtok: "0.05",
        output_per_mtok: "0.60", from: "2026-01-01T08:00:00+08:00"}]""")
    assert path == "prices[0].input_per_mtok" and "price demo from 2026-01-01" in message
    run("""prices: [{model: demo, input_per_mtok: "0.30", from: "2026-02-01T00:00:00Z"}]""")
    assert Price.objects.count() == 2


def test_a_price_in_use_cannot_be_removed(example: Result) -> None:
    record_usage([replace(ROW, price_id=Price.objects.get().pk)])
    path, message = refused("""prices: [{model: demo, from: "2026-01-01T00:00:00Z", state: absent}]""")
    assert path == "prices[0]" and "usage records still refer to it" in message


def test_a_policy_can_be_given_by_name(example: Result) -> None:
    assert run("policy: continuous").changed == ["policy (name)"]
    assert config.current().policy["max_batch"] == 32


def test_a_mistake_anywhere_leaves_nothing_behind() -> None:
    path, _ = refused(EXAMPLE.replace("name: priority", "name: nope"))
    assert path == "policy.name"
    assert not Tier.objects.exists() and not AuditEvent.objects.exists() and current_version() == 0


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("tenant: []", "tenant"),
        ("version: 2", "version"),
        ("tenants: [{slug: a, limits: {rpmm: 1}}]", "tenants[0].limits.rpmm"),
        ("tenants: [{}]", "tenants[0].slug"),
        ("tiers: [{name: a, limits: {models: {x: {rpm: 1}, demo: {rpmm: 1}}}}]", "tiers[0].limits.models.demo.rpmm"),
        ("tenants: [{slug: a, limits: {rpm: 0}}]", "tenants[0].limits.rpm"),
        ("tenants: [{slug: a, limits: {rpm: 1.5}}]", "tenants[0].limits.rpm"),
        ("tenants: [{slug: a}]", "tenants[0].tier"),
        ("tenants: [{slug: a, tier: gold}]", "tenants[0].tier"),
        ("tenants: [{slug: A b, tier: free}]", "tenants[0].slug"),
        ("tenants: [{slug: acme}, {slug: acme}]", "tenants[1]"),
        ("tenants: [{slug: acme, timezone: Asia}]", "tenants[0].timezone"),
        ("tenants: [{slug: acme, timezone: ../../etc/passwd}]", "tenants[0].timezone"),
        (key_of("{name: a, scopes: [root]}"), "tenants[0].keys[0].scopes"),
        (key_of("{name: a, scopes: []}"), "tenants[0].keys[0].scopes"),
        (key_of("{name: a, models: []}"), "tenants[0].keys[0].models"),
        (key_of("{name: a, allowed_ips: [10.0.0.1/8]}"), "tenants[0].keys[0].allowed_ips"),
        (key_of("{name: a}, {name: a}"), "tenants[0].keys[1]"),
        (key_of("{name: a, expires_at: 2030-01-01T00:00:00}"), "tenants[0].keys[0].expires_at"),
        (budget('{period: day}'), "tenants[0].limits.budgets[0]"),
        (budget('{period: day, amount: 1.5}'), "tenants[0].limits.budgets[0].amount"),
        (budget('{period: day, amount: "922337204"}'), "tenants[0].limits.budgets[0].amount"),
        (budget('{period: day, bugdet: 5}'), "tenants[0].limits.budgets[0].bugdet"),
        (budget('{period: day, tokens: 1}, {period: day, tokens: 2}'), "tenants[0].limits.budgets[1]"),
        ('''tenants: [{slug: acme, limits: {models: {demo: {budgets: [{period: era}]}}}}]''',
         "tenants[0].limits.models.demo.budgets[0].period"),
        (budget('{period: year, tokens: 1}'), "tenants[0].limits.budgets[0].period"),
        (budget('{period: day, amount: "1", currency: usd}'), "tenants[0].limits.budgets[0].currency"),
        ("tiers: [{name: vip, weight: .nan}]", "tiers[0].weight"),
        ("tiers: [{name: free}, {name: vip, floor: 0.9}]", "tiers[1].floor"),
        ("tiers: [{name: vip, slo: {tft: 1}}]", "tiers[0].slo.tft"),
        ("tiers: [{name: vip}, {name: vip}]", "tiers[1]"),
        ("tiers: [{name: vip, contract: none}]", "tiers[0].contract"),
        ("prices: [{model: demo, input_per_mtok: 0.2}]", "prices[0].input_per_mtok"),
        ("""prices: [{model: demo, input_per_mtok: "0.123456789"}]""", "prices[0].input_per_mtok"),
        ("prices: [{model: demo, from: 2026-01-01T00:00:00}]", "prices[0].from"),
        ("prices: [{model: demo, tier: vip, tenant: acme}]", "prices[0]"),
        ("prices: [{model: demo, tenant: nobody}]", "prices[0].tenant"),
        ("deployments: [{model: x, engine: magic}]", "deployments[0].engine"),
        ("""deployments: [{model: "x y", engine: simulated}]""", "deployments[0].model"),
        ("""tenants: [{slug: acme, name: "a\\0b"}]""", "tenants[0].name"),
        ("""tenants: [{slug: acme, limits: {models: {"\\uD800": {rpm: 1}}}}]""", "tenants[0].limits.models"),
        (key_of("{name: a, expires_at: 9999-12-31T23:59:59-01:00}"), "tenants[0].keys[0].expires_at"),
        ("prices: [{model: demo, from: 0001-01-01T00:00:00+01:00}]", "prices[0].from"),
        ("degradation_rules: none", "degradation_rules"),
        ("policy: {max_batch: 0}", "policy.max_batch"),
        ("version: 1\nversion: 1", ""),
        ("[]", ""),
        ("", ""),
        ("tiers: [", ""),
        ("tiers: " + "[" * 5000, ""),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_its_path(example: Result, text: str, path: str) -> None:
    assert refused(text)[0] == path


# --- the command ----------------------------------------------------------------------------------------------------


def call(path: Path, *options: str) -> tuple[str, str]:
    out, err = StringIO(), StringIO()
    call_command("apply", str(path), *options, stdout=out, stderr=err)
    return out.getvalue(), err.getvalue()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "apply.yaml"
    path.write_text(EXAMPLE)
    return path


def test_the_command_prints_json_for_scripts(file: Path) -> None:
    first: dict[str, Any] = json.loads(call(file, "--json")[0])
    assert [set(key) for key in first["created"]["keys"]] == [{"tenant", "name", "key"}] * 2
    again = json.loads(call(file, "--json")[0])
    assert again == {"created": {"keys": []}, "changed": [], "removed": [], "unchanged": again["unchanged"]}


def test_the_command_says_for_people_what_it_did(file: Path) -> None:
    out, err = call(file)
    assert "created tenant acme" in out and "acme/prod  sk-" in out and err == ""
    assert call(file)[0].splitlines()[-1].startswith("unchanged ")


def test_the_command_names_the_file_and_the_place(file: Path, tmp_path: Path) -> None:
    file.write_text("tenants: [{slug: a, limits: {rpmm: 1}}]")
    with pytest.raises(CommandError, match=r"apply\.yaml: tenants\[0\]\.limits\.rpmm: There is no such field\."):
        call(file)
    with pytest.raises(CommandError, match="cannot be read"):
        call(tmp_path / "missing.yaml")


def test_the_command_says_in_one_line_that_the_database_is_not_prepared(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(*_: object, **__: object) -> None:
        raise OperationalError("no such table: tenants_change\nand more")

    monkeypatch.setattr(command, "apply", apply)
    with pytest.raises(CommandError) as caught:
        call(file)
    assert "no such table: tenants_change. `harness up` or `harness migrate` prepares" in str(caught.value)


def test_the_command_says_who_has_not_followed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "WAIT_SECONDS", 0.0)
    beat("web-1", "web", 0)
    _, err = call(file)
    assert "not yet acknowledged" in err and "web-1" in err
