"""Tiny random checkpoints of every family on every backend, against transformers, beyond window and page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plait

#: Short name of a device whose slices the backend runs.
BACKENDS = {"cuda": "h100", "rocm": "mi300", "xla": "v5e", "cpu": "cpu"}
