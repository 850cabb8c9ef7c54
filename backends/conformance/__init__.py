"""One list of cases that every backend runs against the NumPy oracle. Out-of-tree backends use it like this:

import pytest
from plait.backends.conformance import cases, run_case
from my_backend import BACKEND

TARGET = "mychip:v1"

@pytest.mark.parametrize("case", cases(BACKEND.capability(TARGET).dtypes), ids=str)
def test_conformance(case, tmp_path):
    run_case(case, BACKEND, TARGET, tmp_path)
"""

from plait.backends.conformance.suite import Case, cases, run_case

__all__ = ["Case", "cases", "run_case"]
