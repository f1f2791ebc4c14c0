"""Muon for matrices and AdamW for the rest; schedules."""

from .hybrid import Hybrid as Hybrid
from .hybrid import OptimConfig as OptimConfig
from .hybrid import assign_groups as assign_groups
from .hybrid import effective_rates as effective_rates
from .muon import orthogonalize as orthogonalize
from .schedule import Schedule as Schedule
