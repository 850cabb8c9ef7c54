"""`plait simulate`: tables, JSON, options that contradict each other, damaged files."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from plait.cost_models.simulator import Result
from plait.spec import Plan, from_dict, from_yaml
from tests import checkpoints
from tests.host.command_line import config_file, plait
from tests.host.test_imports import FRAMEWORKS, imported_by

FEW = ("--prompt", "40", "--output", "10", "--requests", "30")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return config_file(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def plan(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    result = plait("plan", model, "--targets", "h100,mi300", "--layers", "2,4", "--context", "600", "-o", path)
    assert result.exit_code == 0, result.stderr
    return path


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    saved = checkpoints.save(tmp_path_factory.mktemp("saved") / "tiny", num_hidden_layers=2)
    folder = tmp_path_factory.mktemp("artifact") / "tiny.plait"
    words = ("--targets", "h100,mi300", "--layers", "1,1", "--context", "200", "--no-device-code", "-o", folder)
    assert plait("compile", saved, *words).exit_code == 0
    return folder


def document(*words: Any) -> dict[str, Any]:
    result = plait("simulate", *words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_the_table_fits_80_columns_and_ends_in_a_command(plan, model):
    result = plait("simulate", plan, "--model", model, *FEW, "--max-ttft", "0.5", env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr
    table, _, command = result.stdout.partition("\nnext: ")
    assert max(map(len, table.splitlines())) <= 80
    order = ("simulated", "first token", "token after", "whole request", "busy", "decode tokens", "together",
             "output tokens/s", "within the limits", "KV pages", "energy", "price")  # fmt: skip
    assert [table.index(part) for part in order] == sorted(table.index(part) for part in order)
    assert "nothing was run" in result.stderr
    words = shlex.split(command)
    assert words[:4] == ["plait", "simulate", str(plan), "--model"] and "--rate" in words
    again = plait(*words[1:])
    assert again.exit_code == 0, again.stderr


def test_json_holds_the_whole_result(plan, model):
    found = document(plan, "--model", model, *FEW, "--rate", "50", "--spread", "0.5", "--seed", "3")
    result = from_dict(Result, {name: found[name] for name in to_names(Result)})
    assert result.summary.requests == len(result.requests) == 30
    assert [stage.name for stage in result.stages] == ["h100.0", "mi300x.0"]
    assert found["costs"]["usd_per_million_output_tokens"]["low"] > 0
    assert "--rate" in found["next"] and "--spread 0.5" in found["next"] and "--seed 3" in found["next"]
    assert found == document(plan, "--model", model, *FEW, "--rate", "50", "--spread", "0.5", "--seed", "3")


def test_ranges_are_those_of_the_cost_model(plan, model):
    """One request at a time and no queue: a token's range is that of a decode step, but for what links take."""
    found = document(plan, "--model", model, *FEW, "--concurrency", "1")["ranges"]
    planned = from_yaml(Plan, plan.read_text()).slices[0].decode_s
    assert planned is not None
    assert set(found) == {"ttft_s", "tpot_s", "output_tokens_per_s"}
    assert all(range_["low"] < range_["value"] < range_["high"] for range_ in found.values())
    token = found["tpot_s"]
    assert token["high"] / token["value"] == pytest.approx(planned.high / planned.value, rel=0.2)


def to_names(kind: Any) -> list[str]:
    return list(kind.__dataclass_fields__)


def test_an_artifact_says_itself_what_it_is_of(artifact):
    found = document(artifact, *FEW)
    assert found["asked"] == "30 requests of 40 + 10 tokens, 8 at once"
    assert found["pipelines"][0]["kv_pages"] == 8 * 13  # 200 tokens are 13 pages, of 8 requests
    assert plait("simulate", artifact, "--model", artifact).exit_code == 64


def test_more_pipelines_serve_more(plan, model):
    one, two = (document(plan, "--model", model, *FEW, "--replicas", n, "--requests", 100) for n in (1, 2))
    assert len(two["pipelines"]) == 2 and two["asked"].endswith("16 at once")
    assert two["summary"]["output_tokens_per_s"] > 1.5 * one["summary"]["output_tokens_per_s"]


def test_a_steady_beat_a_closed_loop_and_hits(plan, model):
    words = (plan, "--model", model, *FEW)
    beat = document(*words, "--rate", "10", "--burstiness", "0")
    arrivals = [request["arrival_s"] for request in beat["requests"]]
    assert arrivals == pytest.approx([i / 10 for i in range(30)]) and "--burstiness 0" in beat["next"]
    alone = document(*words, "--concurrency", "1")
    assert alone["summary"]["mean_in_system"] == pytest.approx(1)
    cached = document(*words, "--concurrency", "1", "--prefix-hit", "0.5")
    assert cached["summary"]["cached_tokens"] == 30 * 20


def test_a_trace(plan, model, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:01:50.5,40,7\n2023-11-16 18:01:51.5,8,3\n")
    found = document(plan, "--model", model, "--trace", trace, "--speed", "2")
    assert [(r["arrival_s"], r["prompt_tokens"], r["output_tokens"]) for r in found["requests"]] == [
        (0.0, 40, 7), (0.5, 8, 3),
    ]  # fmt: skip
    assert found["next"].endswith("--concurrency 8")
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,40,7\n2,forty,3\n")
    result = plait("simulate", plan, "--model", model, "--trace", trace)
    assert result.exit_code == 2 and "trace.csv:3, column ContextTokens: 'forty'" in result.stderr


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("--trace", "t.csv", "--rate", "3"), 64, "--trace and --rate"),
        (("--speed", "3"), 64, "--speed without --trace"),
        (("--rate", "3", "--concurrency", "3"), 64, "--rate and --concurrency"),
        (("--burstiness", "3"), 64, "--burstiness without --rate"),
        (("--rate", "0"), 64, "rate_per_s"),
        (("--rate", "nan"), 64, "rate_per_s"),
        (("--concurrency", "0"), 64, "concurrency"),
        (("--prompt", "0"), 64, "length distribution"),
        (("--spread", "-1"), 64, "length distribution"),
        (("--requests", "0"), 64, "cannot simulate 0 requests"),
        (("--requests", "100000000"), 64, "cannot simulate 100000000"),
        (("--prefix-hit", "1"), 64, "prefix hits"),
        (("--replicas", "0"), 64, "cannot simulate 0 pipelines"),
        (("--max-ttft", "0"), 64, "--max-ttft 0"),
        (("--trace", "t.csv"), 2, "cannot read the trace t.csv"),
        (("--prompt", "5000"), 2, "longer than the model's 4096 positions"),
        (("--prompt", "4000", "--output", "90", "--grow", "--concurrency", "1"), 0, ""),
    ],
)
def test_what_cannot_be_simulated(plan, model, words, code, text):
    result = plait("simulate", plan, "--model", model, *words, *(() if "--requests" in words else ("--requests", "20")))
    if "--trace" in words and code == 2:
        assert "Traceback" not in result.stderr
    assert (result.exit_code, text in result.stderr) == (code, True), result.stderr


def test_requests_that_no_pipeline_holds(tmp_path, model):
    path = tmp_path / "plan.yaml"
    words = ("--targets", "h100", "--context", "64", "--concurrency", "1", "-o", path)
    assert plait("plan", model, *words).exit_code == 0
    result = plait("simulate", path, "--model", model, "--prompt", "60", "--output", "60")
    assert result.exit_code == 2 and "request 0 needs more KV pages" in result.stderr


def test_a_plan_needs_its_model_and_must_be_one(plan, model, tmp_path):
    result = plait("simulate", plan)
    assert result.exit_code == 64 and f"try: plait simulate {plan} --model MODEL" in result.stderr
    assert plait("simulate", tmp_path / "none.yaml", "--model", model).exit_code == 2
    assert plait("simulate", tmp_path).exit_code == 2  # a folder that is no artifact
    other = config_file(tmp_path / "other", num_hidden_layers=3)
    result = plait("simulate", plan, "--model", other)
    assert result.exit_code == 2 and "6 blocks" in result.stderr


def test_it_imports_no_framework(plan, model):
    assert not imported_by("simulate", str(plan), "--model", str(model), *FEW) & FRAMEWORKS
