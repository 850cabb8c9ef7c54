"""The cases of tests/host/test_gpu_streams.py on a GPU: the kernels that are bound by memory."""

import pytest

from tests.host.test_gpu_streams import *  # noqa: F403

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("runner")]
