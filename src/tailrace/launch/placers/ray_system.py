"""How the head of a Ray cluster is best started for a run; what it says is for people to type."""

from __future__ import annotations

# a dead raylet is noticed after two seconds, a dead machine after eight, instead of fifteen and more
TIGHT = (
    '{"health_check_initial_delay_ms":0,"health_check_period_ms":500,'
    '"health_check_timeout_ms":2000,"health_check_failure_threshold":3}'
)
