"""Every family in 16 bits on the host: as close to float32 as transformers is in the same dtype.

What must not be rounded on the way is what differs between families: multipliers, the embedding's scale, routers and
their biases. A missed one shows as an error that is several times transformers' own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import plait
from tests.checkpoints import random_ids, reference_logits, save
from tests.families import FAMILIES

COUNT = 40
DTYPES = ("bfloat16", "float16")

#: Of each dtype one with something of its own to round; the rest are slow.
FIRST = {("gemma2", "bfloat16"), ("granite", "bfloat16"), ("deepseek_v3", "bfloat16"), ("stablelm", "float16")}
CASES = [
    pytest.param(family, dtype, marks=[] if (family, dtype) in FIRST else [pytest.mark.slow])
    for family in FAMILIES
    for dtype in DTYPES
]


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_as_close_to_float32_as_transformers(family: str, dtype: str, tmp_path: Path) -> None:
    folder, ids = save(tmp_path / "m", family, dtype=dtype), random_ids(COUNT)
    exact, theirs = reference_logits(folder, ids), reference_logits(folder, ids, dtype)
    with plait.compile(folder, "cpu", run={"in_process": True}) as pipe:
        assert pipe.manifest.dtype == dtype
        ours = pipe.logits(ids)
    found, allowed = np.abs(ours - exact), np.abs(theirs - exact)
    assert np.median(found) <= 1.5 * np.median(allowed), (np.median(found), np.median(allowed))
    # Of the worst rows a few are left out: where two experts are nearly equal, either may choose the other.
    largest, limit = (np.quantile(errors.max(axis=1), 0.9) for errors in (found, allowed))
    assert largest <= 2 * limit, (largest, limit)
    assert np.median(found) > np.median(allowed) / 20, "it computes in more than it says"
