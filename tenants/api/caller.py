"""Who calls the management API: a key, or somebody who is signed in."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from django.contrib.auth.models import User

from tenants.audit import Act
from tenants.auth import Principal
from tenants.models import Membership, Scope
from tenants.scoping import Reach

OPERATES = "operators see every tenant"
INSTALLATION = "the role is held for the whole installation"


@dataclass(frozen=True, slots=True)
class Admits:
    """Who may do something: keys with one of these scopes, and members with one of these roles in their tenant."""

    scopes: frozenset[str]
    roles: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Caller:
    """`actor` is the name in the audit log. The scope `admin`, which operators have too, reaches every tenant.

    A key acts for its one tenant, a person for those that `roles` (tenant id -> role) names, and for every tenant in
    what `staff_roles`, which are held for the installation, are admitted to.
    """

    actor: str
    source_ip: str | None
    scopes: frozenset[str] = frozenset()
    key_tenant: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    staff_roles: frozenset[str] = frozenset()
    user: User | None = None

    @property
    def operates(self) -> bool:
        return Scope.ADMIN in self.scopes

    def is_admitted(self, admits: Admits) -> bool:
        held = self.staff_roles.union(self.roles.values())
        return bool(self.scopes & admits.scopes) or not admits.roles.isdisjoint(held)

    def reach(self, admits: Admits) -> Reach:
        """The tenants for which `admits` holds."""
        if self.operates:
            return Reach(everything=OPERATES)
        if self.staff_roles & admits.roles:
            return Reach(everything=INSTALLATION)
        if self.key_tenant is not None:
            return Reach(frozenset({self.key_tenant} if self.scopes & admits.scopes else ()))
        return Reach(self.tenants_as(admits.roles))

    def tenants_as(self, roles: Collection[str]) -> frozenset[str]:
        """Ids of the tenants in which the person has one of these roles."""
        return frozenset(tenant for tenant, role in self.roles.items() if role in roles)

    def sees_all_of(self, tenant_id: str) -> bool:
        """Whether everything of the tenant is the caller's to see: developers see what concerns their own keys."""
        return self.operates or self.key_tenant == tenant_id or self.roles.get(tenant_id) == Membership.Role.OWNER

    def act(self, reason: str = "") -> Act:
        return Act(self.actor, reason, self.source_ip)


def key_caller(principal: Principal, source_ip: str | None) -> Caller:
    return Caller(
        actor=f"key {principal.tenant_slug}/{principal.key_name}",
        source_ip=source_ip,
        scopes=principal.scopes,
        key_tenant=principal.tenant_id,
    )


def user_caller(user: User, source_ip: str | None, *, operates: bool) -> Caller:
    held = list(Membership.objects.filter(user=user).values_list("tenant_id", "role"))
    return Caller(
        actor=f"user {user.get_username()}",
        source_ip=source_ip,
        scopes=frozenset({Scope.ADMIN.value}) if operates else frozenset(),
        roles={str(tenant_id): role for tenant_id, role in held if tenant_id is not None},
        staff_roles=frozenset(role for tenant_id, role in held if tenant_id is None),
        user=user,
    )
