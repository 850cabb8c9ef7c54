"""Which part of a model runs on which device, and why.

`solve(problem)` searches, `evaluate(problem, plan)` takes a hand-written plan at its word; `plait.partitioner.report`
turns a plan into rows and text. Backends are never imported: what they can do is handed in as `Capability` values.
"""

from plait.partitioner.manual import evaluate
from plait.partitioner.problem import Problem
from plait.partitioner.solve import solve

__all__ = ["Problem", "evaluate", "solve"]
