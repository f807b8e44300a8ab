"""What calls cost: plans (how one call is priced) and the ledger (what has been spent)."""

from __future__ import annotations

from .catalog import CatalogPlan
from .ledger import Ledger, Totals
from .plans import PerRequest, PerToken, Plan, Subscription, oxlo

__all__ = [
    "CatalogPlan",
    "Ledger",
    "PerRequest",
    "PerToken",
    "Plan",
    "Subscription",
    "Totals",
    "oxlo",
]
