"""plait compiles one transformer for several kinds of accelerators at once.

    import plait
    pipe = plait.compile("model.safetensors", targets=["h100", "mi300"])
    pipe.generate("Hello", max_tokens=32)

Nothing heavy is imported until it is used: `plait.plan` needs neither torch nor JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

#: Public name -> module that holds it, imported on first use.
_PUBLIC = {
    "compile": "plait.api",
    "compile_artifact": "plait.api",
    "open": "plait.api",
    "plan": "plait.api",
    "Pipeline": "plait.text",
    "SamplingParams": "plait.runtime.sampler",
    "PlaitError": "plait.errors",
    "Cluster": "plait.spec",
    "Device": "plait.spec",
    "Plan": "plait.spec",
    "Target": "plait.spec",
    "Workload": "plait.spec",
}

__all__ = [
    "Cluster",
    "Device",
    "Pipeline",
    "PlaitError",
    "Plan",
    "SamplingParams",
    "Target",
    "Workload",
    "__version__",
    "compile",
    "compile_artifact",
    "open",
    "plan",
]

if TYPE_CHECKING:
    from plait.api import compile, compile_artifact, open, plan
    from plait.errors import PlaitError
    from plait.runtime.sampler import SamplingParams
    from plait.spec import Cluster, Device, Plan, Target, Workload
    from plait.text import Pipeline


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'plait' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
