"""The planner: which split, parallelism, schedule and bounds suit a model, a fleet and a workload.

`balance` is theory without simulation, `search_space` says what there is to try, `search` tries it in the simulator,
`report` puts the result in words.
"""

from tailrace.planner.balance import Theory, theory
from tailrace.planner.report import plan_json, render_plan
from tailrace.planner.search import Candidate, Plan, plan

__all__ = ["Candidate", "Plan", "Theory", "plan", "plan_json", "render_plan", "theory"]
