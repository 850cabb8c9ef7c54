"""The cases of tests/host/test_gpu_gemm.py on a GPU: the matrix products."""

import pytest

from tests.host.test_gpu_gemm import *  # noqa: F403

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("runner")]

del test_a_step_over_two_scales_is_refused  # noqa: F821  # it is about compiling
