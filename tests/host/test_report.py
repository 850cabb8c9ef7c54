"""report.html: complete, self-contained, escaped, the same bytes twice."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from plait import api
from plait.partitioner.report import memory_bars, summary_rows
from plait.report import SOURCES, render_report
from plait.report.code import Code
from plait.spec import Cause, IdleDevice, Manifest, ManifestSlice, Plan, digest
from plait.words import bytes_text, rate_text, seconds_text
from tests.host.command_line import LARGE, config_file

VOID = {"meta", "rect", "br", "img", "link"}


class Page(HTMLParser):
    """Visible text, tags with their attributes, and whether every tag is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.open = "", [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data

    def found(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def manifest_of(plan: Plan, emulated: bool = True) -> Manifest:
    """What compile would write for a plan, as far as the report looks at it."""
    devices = {device.id: device for device in plan.cluster.devices}
    slices = []
    for number, item in enumerate(plan.slices):
        device = devices[item.devices[0]]
        runs_on = f"{device.name} (emulated on host)" if emulated else device.name
        target = f"{device.backend}:{device.arch}"
        folder, empty = f"slices/{number}-{device.name}", ((), (), ())
        made = (folder, device.name, device.backend, "m:a", target, "torch", runs_on, item.blocks, *empty, plan.dtype)
        slices.append(ManifestSlice(*made))
    return Manifest("m", "llama", "9.8.7", 128, 4096, plan.dtype, 16, 64, 512, 6144, digest(plan), digest("module"),
                    tuple(slices))  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """70 large layers over three kinds of devices."""
    return api.plan(config_file(tmp_path_factory.mktemp("large"), **LARGE), "2xh100,mi300x,v5e", objective="throughput")


def page(plan: Plan, **options: Any) -> Page:
    made = Page(render_report(plan, manifest_of(plan, **options)))
    assert made.open == []
    return made


def test_it_is_self_contained(plan):
    html = render_report(plan, manifest_of(plan))
    assert html.startswith("<!doctype html>")
    assert not re.search(r"(?:https?:)?//\w|@import|url\(|<script|<link|<img|<iframe| on\w+=", html)
    assert not any("src" in attributes or "href" in attributes for _, attributes in Page(html).tags)


def test_the_same_inputs_give_the_same_bytes(plan):
    assert render_report(plan, manifest_of(plan)) == render_report(replace(plan), manifest_of(plan))


def test_every_row_of_the_plan_is_there(plan):
    made = page(plan)
    cells = made.found("td")
    assert len(cells) == 8 * len(plan.slices)
    assert {cell["data-name"] for cell in cells} == {
        "slice", "device", "layers", "weights", "KV", "prefill", "decode", "runs on",
    }  # fmt: skip
    for item in plan.slices:
        assert item.devices[0] in made.text
        assert bytes_text(item.memory.weights_bytes) in made.text
        for cause in (item.cause.why, item.cause.number, item.cause.runner_up):
            assert cause in made.text


def test_predictions_have_ranges_and_sources(plan):
    made = page(plan)
    for name, value in summary_rows(plan):
        number, _, spread = value.partition(" (")
        assert name in made.text and number in made.text and spread.removesuffix(")") in made.text
    assert f"roofline: {SOURCES['roofline']}" in made.text
    assert "measured: " not in made.text, "only sources that occur are explained"


def test_bars_are_as_long_as_the_numbers_beside_them(plan):
    html = render_report(plan, manifest_of(plan))
    drawn = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    bars = memory_bars(plan)
    assert len(drawn) == len(bars) == len(plan.slices)
    for svg, bar in zip(drawn, bars, strict=True):
        right = 0.0
        for name, size in bar.parts:
            rect = re.search(rf'<rect class="fill-{name}" x="([\d.]+)" width="([\d.]+)"', svg)
            share = 100 * size / bar.capacity_bytes
            if share < 0.1:
                assert rect is None, "too narrow to see"
            else:
                assert rect is not None
                assert float(rect[1]) == pytest.approx(right, abs=0.01)
                assert float(rect[2]) == pytest.approx(share, abs=0.001)
                right += float(rect[2])
            assert f"{name} {bytes_text(size)}" in svg, "read aloud"
            assert f"{name} {bytes_text(size)}</li>" in html, "written below"
        assert right == pytest.approx(100, abs=0.5)


def test_emulated_slices_are_said_plainly(plan):
    made = page(plan)
    assert f"{len(plan.slices)} of {len(plan.slices)} slices run emulated on the host" in made.text
    assert all("mark" in (cell.get("class") or "") for cell in made.found("td") if cell["data-name"] == "runs on")


def test_slices_on_their_own_devices_have_no_notice(plan):
    made = page(plan, emulated=False)
    assert "mulated" not in made.text


def test_one_emulated_slice_is_named(plan):
    manifest = manifest_of(plan, emulated=False)
    first = replace(manifest.slices[0], runs_on=f"{manifest.slices[0].device} (emulated on host)")
    made = Page(render_report(plan, replace(manifest, slices=(first, *manifest.slices[1:]))))
    assert f"1 of {len(plan.slices)} slices" in made.text and f"{plan.slices[0].devices[0]} was not there" in made.text


def test_idle_devices_and_fixed_things(plan):
    idle = (IdleDevice("l4.0", Cause("too small", "1 GB short", "arithmetic", "with it: slower")),)
    made = page(replace(plan, idle=idle, pins={"embed": "h100.0"}, forbidden_cuts=(7,)))
    assert "Idle devices" in made.text and "too small" in made.text and "with it: slower" in made.text
    assert "embed on h100.0" in made.text and "before block 7" in made.text
    assert "Idle devices" not in page(replace(plan, idle=())).text


def test_assumptions_name_each_device_and_link(plan):
    made = page(plan)
    for device in plan.cluster.devices:
        assert f"{device.id} ({device.backend}:{device.arch})" in made.text
        assert rate_text(device.bandwidth_bytes_per_s, "B/s") in made.text
        assert ", ".join(device.sources) in made.text
    link = plan.cluster.default_link
    assert link is not None
    assert f"{rate_text(link.bytes_per_s, 'B/s')}, {seconds_text(link.latency_s)} each" in made.text


def test_text_is_escaped(plan):
    nasty = '<b onclick="x">&'
    html = render_report(replace(plan, model=nasty), manifest_of(plan))
    assert nasty not in html and "&lt;b onclick=&#34;x&#34;&gt;&amp;" in html
    assert nasty in Page(html).text


def test_both_colour_schemes_and_small_screens_are_styled(plan):
    html = render_report(plan, manifest_of(plan))
    assert 'content="width=device-width, initial-scale=1"' in html
    assert "color-scheme: light dark" in html and "prefers-color-scheme: dark" in html and "max-width: 46rem" in html


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_600, "1 MB"),
        (1_234_567, "1.23 MB"),
        (80e9, "80 GB"),
        (2.5e15, "2,500 TB"),
        (-5e9, "-5 GB"),
    ],
)
def test_bytes_text(number, text):
    assert bytes_text(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (1.5e-7, "150 ns"), (9.996e-4, "1 ms"), (0.0123, "12.3 ms"), (61, "61 s")]
)
def test_seconds_text(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(3.35e12, "3.35 TB/s"), (9.9996e11, "1 TB/s"), (2.25e15, "2.25 PB/s"), (12, "12 B/s")]
)
def test_rate_text(rate, text):
    assert rate_text(rate, "B/s") == text


def test_machine_code_of_each_slice_is_shown_and_escaped(plan):
    nasty = "<b onclick=x>&"
    code = Code(
        columns=("kernel", "regs"), rows=((nasty, "39"),), numbers=("regs",), totals=(("code", "1 kB"),),
        failed=((nasty, "spills: 4"),), why=((nasty, "because"),),
    )  # fmt: skip
    codes = [code, *[Code(none="torch, op by op")] * (len(plan.slices) - 1)]
    html = render_report(plan, manifest_of(plan), codes)
    made = Page(html)
    assert made.open == [] and "<b" not in html.replace("<body", "")
    assert made.text.count(nasty) == 3 and "spills: 4" in made.text and "because" in made.text
    assert made.text.count("None: torch, op by op") == len(plan.slices) - 1
    assert "Machine code" not in page(plan).text
