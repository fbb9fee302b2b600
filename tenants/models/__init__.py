"""Who is asking, what they may use, what they used."""

from .api_key import ApiKey, KeySecret, Scope
from .append_only import AppendOnlyError
from .audit import AuditEvent
from .budget import BudgetAccount, BudgetAlert, BudgetLease
from .change import Change, Configured, ProcessHeartbeat
from .limit import Limit
from .price import Price
from .tenant import Membership, Tenant
from .tier import Tier
from .usage import UsageRecord

__all__ = [
    "ApiKey",
    "AppendOnlyError",
    "AuditEvent",
    "BudgetAccount",
    "BudgetAlert",
    "BudgetLease",
    "Change",
    "Configured",
    "KeySecret",
    "Limit",
    "Membership",
    "Price",
    "ProcessHeartbeat",
    "Scope",
    "Tenant",
    "Tier",
    "UsageRecord",
]
