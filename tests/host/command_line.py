"""Running the command line in tests, and the smallest things it can be run on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from plait.cli.main import app

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: 70 layers of 1.6 GB: more than a small device holds.
LARGE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 70, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}  # fmt: skip


def config_file(folder: Path, **changed: Any) -> Path:
    """A model without weights: `folder`/config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(LLAMA | changed))
    return path


def plait(*words: str | Path, env: dict[str, str] | None = None) -> Result:
    """`plait WORDS`, in this process, without a terminal."""
    return CliRunner().invoke(app, [str(word) for word in words], env=env, prog_name="plait")


def subprocess_plait(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """`plait WORDS`, in a process of its own."""
    command = [sys.executable, "-c", "from plait.cli.main import run; run()", *map(str, words)]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": False} | options
    return subprocess.run(command, **options)
