"""An event simulator of serving: requests through pipelines of slices.

`simulate(setup, traffic)` runs requests (`traffic`, `trace`) through pipelines (`setup`) whose stages say themselves
how long a step takes (`batch.StageTimes`; `op_times` asks the cost model). `planned` makes a setup of a plan, `costs`
makes joules and dollars of a result. docs/simulator.md says what is modelled and how it is checked.
"""

from plait.cost_models.simulator.batch import Batch, ConstantTimes, PointTimes, StageTimes
from plait.cost_models.simulator.engine import simulate
from plait.cost_models.simulator.result import Result, Slo, Spread, Summary
from plait.cost_models.simulator.setup import Hop, PipelineSpec, Pool, Setup, Stage, Wire
from plait.cost_models.simulator.trace import read_trace
from plait.cost_models.simulator.traffic import Arrivals, Ask, Lengths, Traffic, draw, replayed

__all__ = [
    "Arrivals", "Ask", "Batch", "ConstantTimes", "Hop", "Lengths", "PipelineSpec", "PointTimes", "Pool", "Result",
    "Setup", "Slo", "Spread", "Stage", "StageTimes", "Summary", "Traffic", "Wire", "draw", "read_trace", "replayed",
    "simulate",
]  # fmt: skip
