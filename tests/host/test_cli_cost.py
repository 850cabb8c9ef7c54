"""`plait cost`: the table, JSON, the next command, refusals."""

from __future__ import annotations

import json
import shlex

import pytest

from tests import checkpoints
from tests.host.command_line import config_file, plait
from tests.host.test_imports import FRAMEWORKS, imported_by

ONE = ("--targets", "h100", "--price", "h100=3.6")


@pytest.fixture
def model(tmp_path):
    return config_file(tmp_path / "tiny")


def test_json_agrees_with_arithmetic(model):
    found = json.loads(plait("cost", model, *ONE, "--utilisation", "0.5", "--api-price", "1,3", "--json").stdout)
    assert set(found) == {"model", "workload", "devices", "throughput", "costs", "api", "break_even", "next"}
    planned = json.loads(plait("plan", model, "--targets", "h100", "--json").stdout)["plan"]
    output = planned["prediction"]["output_tokens_per_s"]["value"]
    (cost,) = found["costs"]
    # chat: 512 + 256 tokens
    assert cost["usd_per_million_tokens"]["value"] == pytest.approx(3.6 / 3600 / (output * 3 * 0.5) * 1e6)
    assert cost["joules_per_token"]["value"] == pytest.approx((0.5 * 0.75 + 0.5 * 0.15) * 700 / (output * 3 * 0.5))
    assert found["break_even"]["api_usd_per_million_tokens"] == pytest.approx((2 * 1 + 1 * 3) / 3)
    assert found["break_even"]["tokens_per_day"]["value"] == pytest.approx(3.6 * 24 / (5 / 3) * 1e6)
    assert found["break_even"]["verdict"] == "cheaper"


def test_the_table_fits_80_columns_and_states_the_utilisation(model):
    words = ("--targets", "2xh100,mi300,v5e", "--layers", "1,2,2,1", "--api-price", "0.6")
    result = plait("cost", model, *words, env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.stderr
    text = result.stdout
    assert max(map(len, text.partition("\nnext:")[0].splitlines())) <= 80
    rows = text.partition(" used ")[2].partition("break-even")[0].splitlines()
    assert [row.split()[0] for row in rows if "%" in row] == ["10%", "30%", "70%"]
    assert "at full load" in text and "cheaper here" in text
    assert "nobody states the power of tpu-v5e" in result.stderr and "--power tpu-v5e=" in result.stderr
    given = plait("cost", model, *words, "--power", "v5e=200")
    assert "unknown" not in given.stdout and "nobody states" not in given.stderr


def test_never(model):
    text = plait("cost", model, *ONE, "--api-price", "1e-9", env={"COLUMNS": "80"}).stdout
    assert "never: " in text and "no: full devices at the lowest price still cost more" in text


def test_the_next_commands_work(model):
    result = plait("cost", model, *ONE, "--utilisation", "0.2")
    command = result.stdout.partition("\nnext: ")[2].strip()
    assert command == f"plait cost {model} --targets h100 --price h100=3.6 --utilisation 0.2 --api-price 0.6"
    again = plait(*shlex.split(command)[1:])
    assert again.exit_code == 0 and "break-even" in again.stdout
    # a config alone cannot be compiled
    assert again.stdout.partition("\nnext: ")[2].strip() == f"plait plan {model} --targets h100 --output plan.yaml"


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        (("--targets", "gaudi3"), "price-unknown", 2),
        (("--targets", "h100", "--price", "mi300=3"), "price-device", 2),
        (("--targets", "h100", "--price", "h100"), "price", 64),
        (("--targets", "h100", "--price", "h100=-1"), "price", 64),
        (("--targets", "h100", "--price", "h100=4:2"), "price", 64),
        (("--targets", "h100", "--price", "h100=1,h100=2"), "price", 64),
        (("--targets", "h100", "--price", "h100=nan"), "price", 64),
        (("--targets", "h100", "--power", "h100=0"), "price", 64),
        (("--targets", "h100", "--utilisation", "30%"), "utilisation", 64),
        (("--targets", "h100", "--utilisation", "0"), "utilisation", 64),
        (("--targets", "h100", "--utilisation", "0.3,1.1"), "utilisation", 64),
        (("--targets", "h100", "--api-price", "free"), "price", 64),
        (("--targets", "h100", "--api-price", "1,2,3"), "price", 64),
        (("--targets", "h100", "--api-price", "0"), "price", 64),
        ((), "devices", 64),
    ],
)
def test_refusals(model, words, code, exit_code):
    result = plait("cost", model, *words)
    assert result.exit_code == exit_code and f"[{code}]" in result.stderr
    assert result.stdout == "" and "try:" in result.stderr
    document = json.loads(plait("cost", model, *words, "--json").stdout)
    assert document["error"]["code"] == code


def test_an_artifact_brings_its_plan(tmp_path):
    saved, folder = checkpoints.save(tmp_path / "tiny", num_hidden_layers=2), tmp_path / "tiny.plait"
    words = ("--targets", "h100,mi300", "--context", "200", "--layers", "1,1")
    assert plait("compile", saved, *words, "--no-device-code", "-o", folder).exit_code == 0
    found = json.loads(plait("cost", folder, "--api-price", "1", "--json").stdout)
    anew = json.loads(plait("cost", saved, *words, "--api-price", "1", "--json").stdout)
    assert found["next"] == f"plait simulate {folder}"
    assert anew["next"] == f"plait compile {saved} {' '.join(words)}"
    assert {**found, "next": ""} == {**anew, "next": ""}
    refused = plait("cost", folder, "--targets", "h100")
    assert refused.exit_code == 64 and "[cost-artifact]" in refused.stderr


@pytest.mark.parametrize("words", [("cost", *ONE), ("explain", "--target", "h100", "--op", "linear")])
def test_no_framework_is_imported(model, words):
    loaded = imported_by(words[0], str(model), *words[1:])
    assert "xdsl" in loaded and not loaded & FRAMEWORKS


def test_catalogue_entries_show_their_price():
    text = " ".join(plait("devices", "h100").stdout.split())
    assert "1.99 to 11.06 $ an hour, 2026" in text and "source P_MERC" in text
