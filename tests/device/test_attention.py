"""The cases of tests/host/test_gpu_attention.py on a GPU: attention."""

import pytest

from tests.host.test_gpu_attention import *  # noqa: F403

pytestmark = [pytest.mark.device, pytest.mark.usefixtures("runner")]
