"""Tables on two memory tiers above a source: keys in, rows out."""

from cache.budget import Budget
from cache.device import Device, open_device
from cache.feature_cache import (
    FeatureCache,
    FeatureCacheStats,
    Lookup,
    LookupResult,
    SlabStats,
    TableStats,
)
from cache.table import Table
from cache.warm_up import warm_up

__all__ = [
    "Budget",
    "Device",
    "FeatureCache",
    "FeatureCacheStats",
    "Lookup",
    "LookupResult",
    "SlabStats",
    "Table",
    "TableStats",
    "open_device",
    "warm_up",
]
