"""Who is asking, what they may use, what they used."""

from .adjustment import Adjustment
from .api_key import ApiKey, KeySecret, Scope
from .append_only import AppendOnlyError
from .audit import AuditEvent
from .budget import BudgetAccount, BudgetAlert, BudgetLease
from .change import Change, Configured, ProcessHeartbeat
from .limit import Limit
from .price import Price
from .retention import Retention
from .tenant import Membership, Tenant
from .tier import Tier
from .usage import UsageRecord

__all__ = [
    "Adjustment",
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
    "Retention",
    "Scope",
    "Tenant",
    "Tier",
    "UsageRecord",
]
