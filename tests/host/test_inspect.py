"""`plait inspect` of a checkpoint: what its blocks are, what would run where, and what would be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.assemble.support import AS_STORED, TARGETS, by_reason, support
from plait.cli.inspect import checkpoint_facts
from plait.cost_models.catalogue import entries
from plait.errors import UsageError
from plait.frontend.families import read_config
from plait.report.decoder import block_ranges, config_facts, config_lines
from plait.spec import Support
from tests.checkpoints import save, save_fp8, save_gguf, save_tokenizer
from tests.families import FAMILIES, config_of
from tests.host.command_line import config_file, plait
from tests.host.test_every_config_key import written


def lines_of(family: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in config_lines(read_config(written(family), family)):
        found.setdefault(name or next(reversed(found)), []).append(value)
    return found


def test_what_blocks_differ_in_is_said_by_ranges() -> None:
    lines = lines_of("gemma3_text")
    assert lines["blocks"] == ["7"]
    alike, local, full = lines["attention"]
    assert alike.startswith("heads 4, kv heads 2, head dim 16, scale 0.2886751, qk norm (")
    assert local == "blocks 0-4, 6: rope (default, theta 10000), window 8"
    assert full == "block 5: rope (linear, theta 1000000, factor 4), full attention"


def test_experts_and_dense_blocks_stand_apart() -> None:
    dense, experts = lines_of("deepseek_v3")["mlp"]
    assert dense == "block 0: intermediate size 96, activation silu, gated"
    assert experts.startswith("blocks 1-2: experts, count 8, per token 3, intermediate size 32")
    assert "shared (intermediate size 32, activation silu, gated)" in experts


def test_ropes_by_context_are_said_as_configs_say_them() -> None:
    """What both tables have alike stands once, and nothing of the other kind stands there at all."""
    (long,) = lines_of("phi3-longrope")["attention"]
    assert long.endswith(
        "rope (longrope, theta 10000, original positions 16, attention factor 1.5, "
        "short factors 1, 1.1, 1.2, 1.3, 1.4, 1.5, long factors 2, 3, 4, 5, 6, 7), rotary dim 12"
    )
    config = config_of("llama", {}).to_dict() | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    config |= {"architectures": ["LlamaForCausalLM"], "rope_theta": 1e4}
    said = dict(config_lines(read_config(config, "llama")))["attention"]
    assert "rope (dynamic, theta 10000, original positions 512, factor 2, rotary dim 16)" in said


def test_blocks_without_a_rope() -> None:
    assert lines_of("smollm3")["attention"][1:] == [
        "blocks 0-2: rope (default, theta 10000), full attention",
        "block 3: no rope, window 8",
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_of_a_config_is_said(family: str) -> None:
    """And no names of tensors."""
    config = read_config(written(family), family)
    facts = config_facts(config)
    assert sorted(number for kind in facts["blocks"] for number in kind["blocks"]) == list(range(config.blocks))
    assert all({"attention", "mlp"} < kind.keys() for kind in facts["blocks"])
    assert json.loads(json.dumps(facts)) == facts
    said = " ".join(f"{name} {value}" for name, value in config_lines(config))
    for layer in config.layers:
        assert f"heads {layer.attention.heads}," in said
        assert f"intermediate size {layer.mlp.intermediate_size}" in said
    assert "proj" not in said and "{" not in said and "None" not in said


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "block 3"), ([0, 1, 2, 5], "blocks 0-2, 5"), ([1, 3], "blocks 1, 3")]
)
def test_ranges_of_blocks(numbers: list[int], text: str) -> None:
    assert block_ranges(numbers) == text


def test_every_default_target_takes_a_llama(tmp_path: Path) -> None:
    result = plait("inspect", config_file(tmp_path))
    assert result.exit_code == 0, result.stderr
    assert "blocks         6" in result.stdout and "every op" in result.stdout
    assert result.stdout.rstrip().endswith(f"next: plait plan {tmp_path / 'config.json'} --targets h100")
    answers = checkpoint_facts(tmp_path / "config.json")["targets"]
    assert len(answers) == len(TARGETS.split(","))
    assert all(answer["refused"] == {} == answer["weights"] for answer in answers)
    assert {answer["target"].partition(":")[0] for answer in answers} == {"cuda", "rocm", "xla", "cpu"}


def test_how_each_format_is_held(tmp_path: Path) -> None:
    source = save(tmp_path / "m", num_hidden_layers=1)
    made = save_fp8(tmp_path / "q", source, "row")
    facts = checkpoint_facts(made, targets="h100,mi250x,v5e")
    (name,) = facts["quantised"]
    assert name == "f8E4M3FN, scale f32 per row" and facts["quantised"][name] == 7
    wide = "dequantised to float32 when loaded"
    assert [answer["weights"] for answer in facts["targets"]] == [
        {name: {AS_STORED: 7}},
        {name: {wide: 7}},
        {name: {wide: 7}},
    ]
    shown = plait("inspect", made, "--targets", "h100,mi250x").stdout
    assert AS_STORED in shown and wide in shown
    blocks = save_gguf(tmp_path / "m.gguf", source, "Q8_0")
    held = checkpoint_facts(blocks, targets="h100")["targets"][0]["weights"]
    # The table of the embedding is read row by row.
    assert held == {"si8, scale f16 group 32": {AS_STORED: 8, wide: 1}}


def test_tensors_are_counted_once_however_many_weights_they_make(tmp_path: Path) -> None:
    """q, k and v of Phi-3 are rows of one tensor."""
    from safetensors import safe_open

    folder = save(tmp_path / "m", "phi3", num_hidden_layers=1)
    with safe_open(folder / "model.safetensors", "np") as file:
        sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118  # it is no dictionary
    facts = checkpoint_facts(folder, targets="cpu")
    assert facts["weight_bytes"] == sum(sizes)
    assert facts["tensors"]["float32"]["tensors"] == len(sizes)


@pytest.mark.parametrize(("context", "word"), [(16, "within 16"), (17, "beyond 16"), (None, "beyond 16")])
def test_the_rope_table_of_a_context(tmp_path: Path, context: int | None, word: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written("phi3-longrope") | {"dtype": "bfloat16"}))
    facts = checkpoint_facts(tmp_path, targets="cpu", context=context)
    assert facts["notes"] == [f"the longrope table is the one for sequences {word} tokens"]
    assert facts["max_positions"] == 512
    assert facts["next"].endswith("--targets cpu" if context is None else f"--targets cpu --context {context}")


def test_a_context_beyond_the_positions(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="4,096 positions"):
        checkpoint_facts(config_file(tmp_path), context=4097)


def test_what_is_refused_is_named_with_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the lowering's: here TPUs refuse a product of these sizes."""
    from plait.backends.kernels.torch_eager import LOWERING

    def supports(op: Any) -> Support:
        return Support(op.name != "plait.attention" or op.block_index == 2, "softcap = 5.0: no kernel knows it")

    monkeypatch.setattr(LOWERING, "supports", supports)
    result = plait("inspect", config_file(tmp_path), "--targets", "cpu,v5e")
    assert result.exit_code == 0
    assert "cpu refuses plait.attention in blocks 0-1, 3-5: softcap = 5.0: no kernel knows it" in result.stdout
    assert result.stdout.rstrip().endswith("--targets tpu-v5e")
    alone = plait("inspect", config_file(tmp_path), "--targets", "cpu")
    assert "next:" not in alone.stdout and "refuses 5" in alone.stdout


def test_a_device_without_a_backend(tmp_path: Path) -> None:
    result = plait("inspect", config_file(tmp_path), "--targets", "m3-ultra")
    assert result.exit_code == 0 and "m3-ultra refuses it: there is no backend for metal" in result.stdout


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"{", "EOF while parsing"), (b"{}", "Model missing"), (b"\xff", "is not UTF-8 text"), (b"", "EOF")],
)
def test_a_tokenizer_that_does_not_work_is_said_to_be_damaged(tmp_path: Path, data: bytes, says: str) -> None:
    folder = config_file(tmp_path).parent
    (folder / "tokenizer.json").write_bytes(data)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    facts = checkpoint_facts(folder, targets="cpu")
    assert facts["tokenizer"] and facts["problems"].keys() == {"tokenizer"}
    assert says in facts["problems"]["tokenizer"]
    result = plait("inspect", folder, "--targets", "cpu")
    row = next(line for line in result.stdout.splitlines() if line.startswith("tokenizer"))
    assert result.exit_code == 0 and "damaged: " in row


def test_a_chat_template_that_is_none_is_said_to_be_damaged(tmp_path: Path) -> None:
    folder = config_file(tmp_path).parent
    save_tokenizer(folder)
    assert checkpoint_facts(folder, targets="cpu")["problems"] == {}
    (folder / "chat_template.jinja").write_text("{% if %}")
    problem = checkpoint_facts(folder, targets="cpu")["problems"]["chat_template"]
    assert problem.startswith("the chat template is not valid: line 1")
    shown = " ".join(plait("inspect", folder, "--targets", "cpu").stdout.split())
    assert f"tokenizer yes chat template damaged: {problem}" in shown


def test_a_host_without_free_memory_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is a chip that is only announced: the others are asked all the same."""
    monkeypatch.setattr("plait.cost_models.host.memory_bytes", lambda: (1 << 34, 300 << 20))
    answers = checkpoint_facts(config_file(tmp_path))["targets"]
    assert [answer["device"] for answer in answers if answer["refused"]] == ["cpu"]
    assert "cpu has no memory left for a slice: 314572800 bytes are free" in answers[-1]["refused"]["all"]
    shown = plait("inspect", config_file(tmp_path))
    assert shown.exit_code == 0 and "cpu refuses it: cpu has no memory left" in shown.stdout
    announced = next(entry.label for entry in entries() if entry.status == "announced")
    asked = plait("inspect", config_file(tmp_path), "--targets", f"h100,{announced}")
    assert asked.exit_code == 0 and f"{announced} refuses it:" in asked.stdout and "nothing" in asked.stdout
    assert plait("inspect", config_file(tmp_path), "--targets", "h100,nonsense").exit_code == 64


def test_a_backend_whose_wheel_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("plait.registry.importlib.util.find_spec", lambda name: None if name == "jax" else found(name))
    answer = checkpoint_facts(config_file(tmp_path), targets="v5e")["targets"][0]
    assert "'jax', which is not installed" in answer["refused"]["all"]


def test_a_dtype_that_a_backend_does_not_compute_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.backends.cpu.DTYPES", ("float32",))
    answer = checkpoint_facts(config_file(tmp_path), targets="cpu")["targets"][0]
    assert answer["refused"] == {"all": "it computes in float32, not in bfloat16"}


def test_reasons_are_gathered() -> None:
    refused = {
        "plait.rope (block 0)": "a",
        "plait.rope (block 1)": "a",
        "plait.logits": "b",
        "plait.rope (block 2)": "c",
    }
    assert by_reason(refused) == {("plait.rope", "a"): [0, 1], ("plait.logits", "b"): [], ("plait.rope", "c"): [2]}


def test_equal_devices_are_asked_once(tmp_path: Path) -> None:
    from plait.cost_models.catalogue import cluster_for
    from plait.frontend.checkpoint import open_checkpoint
    from plait.frontend.lower import lower
    from plait.spec import parse_targets

    module = lower(open_checkpoint(config_file(tmp_path)))
    devices = cluster_for(parse_targets("2xcpu,h100,h200,cpu")).devices
    assert [answer.device for answer in support(module, devices)] == ["cpu", "h100"]


def test_targets_of_an_artifact_are_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    result = plait("inspect", tmp_path, "--targets", "cpu")
    assert result.exit_code == 64 and "--targets and --context" in result.stderr
