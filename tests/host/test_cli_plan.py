"""`plait plan`: tables, JSON, plan.yaml, refusals."""

from __future__ import annotations

import json
import re
import shlex
import stat

import pytest
import yaml
from safetensors.numpy import load_file, save_file

from plait.spec import Plan, from_dict, from_yaml
from tests.checkpoints import save
from tests.host.command_line import LARGE, config_file, plait, subprocess_plait
from tests.host.load_probe import bytes_read

TWO = ("--targets", "h100,mi300")


@pytest.fixture
def model(tmp_path):
    return config_file(tmp_path / "tiny")


def test_tables_show_arguments_then_plan_then_next_command(model):
    result = plait("plan", model, *TWO, "--layers", "2,4")
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    order = [
        text.index(part)
        for part in ("resolved arguments", "plan of tiny: 6 layers in bfloat16", "predicted", "next: plait compile")
    ]
    assert order == sorted(order)
    header = next(line for line in text.splitlines() if line.split()[:2] == ["slice", "device"])
    assert header.split() == ["slice", "device", "layers", "weights", "KV", "prefill", "decode", "cause"]
    rows = [line.split() for line in text.splitlines() if line.split()[1:2] in (["h100.0"], ["mi300x.0"])]
    assert [row[:3] for row in rows if row[0] in "01"] == [["0", "h100.0", "0:2"], ["1", "mi300x.0", "2:6"]]
    assert "cuda:sm_90a on host0" in text and "8 requests of 512 + 256 tokens" in text


def test_narrow_screens_get_the_causes_below_the_table(model):
    text = plait("plan", model, *TWO, env={"COLUMNS": "80"}).stdout
    header = next(line for line in text.splitlines() if line.split()[:2] == ["slice", "device"])
    assert "cause" not in header
    assert "\ncauses" in text and "\nslice 0  " in text
    assert max(map(len, text.partition("\nnext:")[0].splitlines())) <= 80


@pytest.mark.parametrize("columns", ["20", "40", "60", "80"])
def test_no_number_is_cut_however_narrow_the_screen(model, columns):
    wide, narrow = (plait("plan", model, *TWO, "-v", env={"COLUMNS": width}).stdout for width in ("200", columns))
    numbers = re.findall(r"\d[\d.,]* (?:[kMGT]?B|[mun]?s)(?=  )", wide[wide.index("plan of") : wide.index("causes")])
    numbers += re.findall(r"\d[\d.]* [kMGT]?B(?= )", wide[wide.index("\nmemory") : wide.index("\npredicted")])
    assert len(numbers) >= 10
    assert all(f"{number} " in narrow for number in numbers)


def test_the_plan_says_what_it_was_planned_for(tmp_path):
    """A default workload is cut to the model's positions; the arguments show the uncut one."""
    short = config_file(tmp_path / "short", max_position_embeddings=100)
    text = plait("plan", short, *TWO).stdout
    assert "chat: 8 requests of 512 + 256 tokens" in text
    assert "plan of short: 6 layers in bfloat16, for 8 requests of 66 + 34 tokens" in text
    note = "the workload chat is shortened from 512 + 256 to 66 + 34 tokens: short has 100 positions"
    assert note in " ".join(text.split())
    notes = json.loads(plait("plan", short, *TWO, "--json").stdout)["plan"]["notes"]
    assert notes == [note]
    for words in (("--context", "100"), ("--workload", "chat", "--context", "60")):
        assert "shortened" not in plait("plan", short, *TWO, *words).stdout


def test_quantising_where_nothing_lies_is_said(model):
    """And a device that is not there at all is refused."""
    words = ("--targets", "h100,mi300", "--layers", "6,0")
    for asked, notes in (
        ("mi300=int4", ["nothing is quantised to int4 on mi300x.0: the plan places nothing there"]),
        ("h100=fp8,mi300=int8", ["nothing is quantised to int8 on mi300x.0: the plan places nothing there"]),
        ("h100=int4", None),
        ("int4", None),
    ):
        result = plait("plan", model, *words, "--quantize", asked, "--json")
        assert json.loads(result.stdout)["plan"].get("notes") == notes, result.stderr
    assert "nothing is quantised to int4" in plait("plan", model, *words, "--quantize", "mi300=int4").stdout
    absent = plait("plan", model, "--targets", "mi300", "--quantize", "h100=int4")
    assert absent.exit_code == 64 and "no device 'h100' to quantise for" in absent.stderr


def test_no_compile_is_proposed_where_no_backend_is(model):
    result = plait("plan", model, "--targets", "gaudi3,h100")
    assert result.exit_code == 0
    assert "next:" not in result.stdout and "no backend for hpu" in result.stderr
    assert json.loads(plait("plan", model, "--targets", "gaudi3", "--json").stdout)["next"] is None


@pytest.mark.parametrize("content", ["folder", "junk", "deep", "huge", "device"])
def test_a_file_that_is_no_plan(model, tmp_path, content):
    path = tmp_path / "plan.yaml"
    if content == "folder":
        path.mkdir()
    elif content == "huge":
        with path.open("w") as file:
            file.truncate(1 << 33)
    elif content == "device":
        path = "/dev/zero"
    else:
        path.write_bytes(b"\xff\xfe" if content == "junk" else b"[" * 100_000)
    result = plait("plan", model, "--plan", path)
    assert result.exit_code == 2 and "[plan-unreadable]" in result.stderr


def test_more_requests_than_can_be_counted(model, tmp_path):
    result = plait("plan", model, *TWO, "--concurrency", 10**12)
    assert result.exit_code == 64 and "1 to 1,000,000" in result.stderr
    file = tmp_path / "plan.yaml"
    assert plait("plan", model, *TWO, "-o", file).exit_code == 0
    file.write_text(file.read_text().replace("concurrency: 8", "concurrency: 1000000000000"))
    result = plait("plan", model, "--plan", file)
    assert result.exit_code == 64 and "1 to 1,000,000" in result.stderr


def test_no_escape_codes_without_a_terminal(model):
    result = plait("plan", model, *TWO, env={"TERM": "xterm-256color"})
    assert "\x1b" not in result.stdout + result.stderr


def test_progress_names_the_phases_on_stderr(model):
    lines = plait("plan", model, *TWO).stderr.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["read", "lower", "plan"]


def test_json_is_one_document_and_nothing_else_on_stdout(model):
    result = plait("plan", model, *TWO, "--json")
    document = json.loads(result.stdout)
    assert set(document) == {"plan", "output", "next"}
    plan = from_dict(Plan, document["plan"])
    assert sum(end - start for start, end in (item.blocks for item in plan.slices)) == 6
    assert "resolved arguments" in result.stderr


def test_json_equals_what_the_library_says(model):
    import plait as library

    said = from_dict(Plan, json.loads(plait("plan", model, *TWO, "--json").stdout)["plan"])
    assert said == library.plan(model, "h100,mi300")


def test_output_is_a_plan_that_can_be_edited_and_planned_again(model, tmp_path):
    file = tmp_path / "plan.yaml"
    first = plait("plan", model, *TWO, "--layers", "2,4", "-o", file)
    assert first.exit_code == 0, first.stderr
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    data = yaml.safe_load(file.read_text())
    assert [item["blocks"] for item in data["slices"]] == [[0, 2], [2, 6]]
    data["slices"][0]["blocks"], data["slices"][1]["blocks"] = [0, 5], [5, 6]
    file.write_text(yaml.safe_dump(data))
    again = json.loads(plait("plan", model, "--plan", file, "--json").stdout)
    assert [item["blocks"] for item in again["plan"]["slices"]] == [[0, 5], [5, 6]]


def test_the_next_command_is_complete(model, tmp_path):
    words = ("plan", model, *TWO, "--context", "100", "--forbid-cut", "2", "--forbid-cut", "3", "--json")
    spoken = shlex.split(json.loads(plait(*words).stdout)["next"])
    # A config alone cannot be compiled: the model's place is left open.
    assert spoken == ["plait", "compile", "MODEL", "--targets", "h100,mi300", "--context", "100",
                      "--forbid-cut", "2", "--forbid-cut", "3"]  # fmt: skip
    file = tmp_path / "a plan.yaml"
    spoken = shlex.split(json.loads(plait(*words, "-o", file).stdout)["next"])
    assert spoken == ["plait", "compile", "MODEL", "--plan", str(file)]


def test_options_reach_the_planner(model):
    document = json.loads(
        plait("plan", model, *TWO, "--json", "--workload", "single", "--context", "96", "--concurrency", "3",
              "--objective", "latency", "--dtype", "float32", "--forbid-cut", "2").stdout
    )["plan"]  # fmt: skip
    assert document["dtype"] == "float32" and document["objective"] == "latency"
    assert document["forbidden_cuts"] == [2]
    work = document["workload"]
    assert work["prompt_tokens"] + work["output_tokens"] == 96 and work["concurrency"] == 3


def test_pins_in_the_documented_spelling(model):
    result = plait("plan", model, *TWO, "--pin", "embed=mi300x.0", "--pin", "block.3=h100.0", "--json")
    plan = from_dict(Plan, json.loads(result.stdout)["plan"])
    owner = {block: item.devices[0] for item in plan.slices for block in range(*item.blocks)}
    assert owner[0] == "mi300x.0" and owner[3] == "h100.0"


def test_verbose_shows_every_part_of_the_memory(model):
    text = plait("plan", model, *TWO, "-v").stdout
    header = next(line for line in text.splitlines() if "activations" in line)
    assert header.split() == ["device", "weights", "KV", "activations", "logits", "reserve", "free", "of"]


def test_free_memory_of_a_cluster_file_decides_and_an_override_is_exact(tmp_path):
    """Two equal cards with 12 and 30 GB free: both are used, each within what is free."""
    model = config_file(tmp_path / "m", **LARGE | {"num_hidden_layers": 12})
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("devices:\n- {target: h100@a, free_bytes: 12 GB}\n- {target: h100@b, free_bytes: 30 GB}\n")

    def slices(*words):
        result = plait("plan", model, "--cluster", cluster, "--context", "128", "--json", *words)
        assert result.exit_code in (0, 2), result.output
        return json.loads(result.stdout).get("plan", {}).get("slices")

    found = {item["devices"][0]: item for item in slices()}
    assert {name: item["memory"]["capacity_bytes"] for name, item in found.items()} == {
        "h100.0": 12 * 10**9,
        "h100.1": 30 * 10**9,
    }
    for item in found.values():
        parts = {name: size for name, size in item["memory"].items() if name != "capacity_bytes"}
        assert 0 < sum(parts.values()) <= item["memory"]["capacity_bytes"]
    assert [item["blocks"] for item in slices("--layers", "2,10")] == [[0, 2], [2, 12]]
    assert slices("--layers", "10,2") is None, "10 blocks of 1.7 GB are more than 12 GB"


def test_a_405b_config_over_eight_kinds_of_devices(tmp_path):
    """Every order of eight unlike groups, from a config.json alone."""
    shape = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
             "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}  # fmt: skip
    model = config_file(tmp_path, **shape)
    kinds = ("h100", "h200", "b200", "gh200", "mi300x", "mi325x", "mi355x", "v5p")
    plan = from_dict(Plan, json.loads(plait("plan", model, "--targets", ",".join(kinds), "--json").stdout)["plan"])
    used = [item.devices[0] for item in plan.slices]
    assert len(set(used)) == len(used) and len(used) + len(plan.idle) == len(kinds)
    assert [item.blocks[0] for item in plan.slices] == [0, *(item.blocks[1] for item in plan.slices[:-1])]
    assert plan.slices[-1].blocks[1] == 126
    # 405 billion parameters of two bytes
    assert 810e9 < sum(item.memory.weights_bytes for item in plan.slices if item.memory) < 815e9


def test_no_weights_are_read(model, tmp_path):
    """Not even where the file repeats a tied table, which compile compares."""
    folder = save(tmp_path / "m", tie_word_embeddings=True, vocab_size=60_000)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, file, metadata={"format": "pt"})
    words = (folder, "--targets", "cpu", "-o", tmp_path / "out")
    assert file.stat().st_size > 30e6
    assert plait("plan", model, *TWO).exit_code == 0  # so that everything is imported
    before = bytes_read()
    assert plait("plan", *words).exit_code == 0
    assert bytes_read() - before < 5e6
    (tmp_path / "out").unlink()
    before = bytes_read()
    assert plait("compile", *words).exit_code == 0
    assert bytes_read() - before > 30e6, "what is counted is what is read"


def test_what_does_not_fit_is_a_table_and_exit_code_2(tmp_path):
    model = config_file(tmp_path, **LARGE)
    result = plait("plan", model, "--targets", "l4,v5e")
    assert result.exit_code == 2
    assert "[does-not-fit]" in result.stderr and "try: " in result.stderr
    lines = [line.split() for line in result.stderr.splitlines()]
    header = next(i for i, line in enumerate(lines) if line == ["device", "blocks", "needed", "free", "short", "by"])
    devices = {line[0] for line in lines[header + 1 :] if line and line[0] in ("l4.0", "tpu-v5e.0")}
    assert devices == {"l4.0", "tpu-v5e.0"}
    assert result.stdout.startswith("resolved arguments")


def test_what_does_not_fit_as_json_has_bytes_per_device(tmp_path):
    result = plait("plan", config_file(tmp_path, **LARGE), "--targets", "l4", "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert (error["code"], error["exit_code"]) == ("does-not-fit", 2)
    (row,) = error["rows"]
    assert row["device"] == "l4.0"
    assert row["needed"] - row["free"] == row["short_by"] > 0


def test_nothing_is_written_when_the_plan_fails(tmp_path):
    model, file = config_file(tmp_path / "large", **LARGE), tmp_path / "out" / "plan.yaml"
    file.parent.mkdir()
    assert plait("plan", model, "--targets", "l4", "-o", file).exit_code == 2
    assert list(file.parent.iterdir()) == []


def test_an_output_that_cannot_be_written(model, tmp_path):
    result = plait("plan", model, *TWO, "-o", tmp_path / "nowhere" / "plan.yaml")
    assert result.exit_code == 2 and "[output-unwritable]" in result.stderr
    result = plait("plan", model, *TWO, "-o", tmp_path)
    assert result.exit_code == 2 and "[output-unwritable]" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny"]


def test_a_group_of_two_devices_is_refused_with_the_reason(model, tmp_path):
    file = tmp_path / "plan.yaml"
    assert plait("plan", model, "--targets", "2xh100", "--layers", "3,3", "-o", file).exit_code == 0
    data = yaml.safe_load(file.read_text())
    data["slices"] = [data["slices"][0] | {"devices": ["h100.0", "h100.1"], "blocks": [0, 6]}]
    file.write_text(yaml.safe_dump(data))
    result = plait("plan", model, "--plan", file)
    assert result.exit_code == 2
    assert "layer (pipeline) split is the dependable cross-vendor mode" in result.stderr


def test_the_written_plan_holds_no_machine_path(model, tmp_path):
    file = tmp_path / "plan.yaml"
    plait("plan", model, *TWO, "-o", file)
    assert from_yaml(Plan, file.read_text()).blocks == 6
    assert str(tmp_path) not in file.read_text()


def test_in_a_process_of_its_own_stdout_is_json(model):
    done = subprocess_plait("plan", model, *TWO, "--json")
    assert done.returncode == 0
    assert from_dict(Plan, json.loads(done.stdout)["plan"]).blocks == 6
