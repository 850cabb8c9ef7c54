"""Traces: what is read, and what is refused with file, line and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.cost_models.simulator import Ask, read_trace, replayed
from plait.errors import UsageError, UserError

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:01:50.9951383,374,44
2023-11-16 18:01:51.2225670,396,109

2023-11-16 18:02:50.9951383,10,1
"""


def write(folder: Path, text: str | bytes, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def asked(path: Path) -> list[tuple[float, int, int]]:
    return [(round(a.arrival_s, 4), a.prompt_tokens, a.output_tokens) for a in replayed(read_trace(path)).asks]


def test_azures_columns(tmp_path):
    assert asked(write(tmp_path, AZURE)) == [(0.0, 374, 44), (0.2274, 396, 109), (60.0, 10, 1)]
    assert asked(write(tmp_path, b"\xef\xbb\xbf" + AZURE.replace("\n", "\r\n").encode())) == asked(
        write(tmp_path, AZURE, "again.csv")
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "arrived_at,num_prefill_tokens,num_decode_tokens,other\n2.5,7,3,x\n4,8.0,1,y\n"),
        ("a.csv", "output_tokens,prompt_tokens,arrival_s\n3,7,0\n1,8,1.5\n"),
        ("a.jsonl", '{"arrival_s": 1, "prompt_tokens": 7, "output_tokens": 3, "model": "x"}\n\n'
                    '{"arrival_s": "2.5", "prompt_tokens": 8, "output_tokens": 1}\n'),
        ("a.jsonl", '{"TIMESTAMP": "2024-05-10T00:00:00+00:00", "ContextTokens": 7, "GeneratedTokens": 3}\n'
                    '{"TIMESTAMP": "2024-05-10T01:00:01.5+01:00", "ContextTokens": 8, "GeneratedTokens": 1}'),
    ],
)  # fmt: skip
def test_other_columns_and_json_lines(tmp_path, name, text):
    assert asked(write(tmp_path, text, name)) == [(0.0, 7, 3), (1.5, 8, 1)]


def test_prefix_groups_order_limit_and_speed(tmp_path):
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens\n8,9,1,,\n4,9,2,sys,5\n")
    assert read_trace(path) == (Ask(8, 9, 1), Ask(4, 9, 2, 0, "sys", 5))
    assert read_trace(path, limit=1) == (Ask(8, 9, 1),)
    traffic = replayed(read_trace(path), speed=2)
    assert [(a.arrival_s, a.output_tokens) for a in traffic.asks] == [(0.0, 2), (2.0, 1)]
    with pytest.raises(UsageError, match="speed"):
        replayed(read_trace(path), speed=0)


HEAD = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", "trace-empty", ["trace.csv"]),
        (HEAD, "trace-empty", ["trace.csv"]),
        ("arrival_s,prompt_token,output_tokens\n1,2,3\n", "trace-columns",
         ["no column for prompt_tokens", "did you mean"]),
        ("1,2,3\n4,5,6\n", "trace-columns", ["arrival_s, prompt_tokens, output_tokens"]),
        ("arrival_s,TIMESTAMP,prompt_tokens,output_tokens\n1,2,3,4\n", "trace-columns", ["both say the arrival_s"]),
        ("arrival_s,prompt_tokens,prompt_tokens\n1,2,3\n", "trace-columns", ["stands twice"]),
        ("arrival_s,prompt_tokens,output_tokens,prefix_group\n1,2,3,a\n", "trace-columns", ["prefix_tokens"]),
        (HEAD + "1,2\n", "trace-value", [":2 has 2 cells, the header has 3"]),
        (HEAD + "1,2,3\nx,2,3\n", "trace-value", [":3, column arrival_s: 'x'", "seconds, or a date"]),
        (HEAD + "nan,2,3\n", "trace-value", [":2, column arrival_s"]),
        (HEAD + "1,0,3\n", "trace-value", [":2, column prompt_tokens: '0'", "a whole number"]),
        (HEAD + "1,2.5,3\n", "trace-value", ["column prompt_tokens: '2.5'"]),
        (HEAD + "1,2,0\n", "trace-value", ["column output_tokens: '0'"]),
        (HEAD + "1,2,inf\n", "trace-value", ["column output_tokens"]),
        (HEAD + "1,2,1e300\n", "trace-value", ["column output_tokens"]),
        (HEAD + "1,,3\n", "trace-value", ["column prompt_tokens: ''"]),
        ("arrival_s,prompt_tokens,output_tokens,prefix_group,prefix_tokens\n1,4,3,a,5\n", "trace-value",
         ["prefix_tokens", "at most the prompt's 4"]),
        (HEAD + '1,2,"3\n', "trace-unreadable", ["cannot read"]),
        (b"\xff\xfe\x00", "trace-unreadable", ["cannot read"]),
        (b"a\0b,c\n", "trace-unreadable", [":1 is no line"]),
        (b"x" * (1 << 21), "trace-unreadable", [":1 is no line"]),
    ],
)  # fmt: skip
def test_csv_that_is_refused(tmp_path, text, code, words):
    with pytest.raises(UserError) as raised:
        read_trace(write(tmp_path, text))
    assert raised.value.code == code
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]\n", [":1 is no JSON object"]),
        ("{\n", [":1 is not JSON"]),
        ('{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 3}\n{"arrival_s": 1, "prompt_tokens": 2}\n',
         [":2, column output_tokens: 'nothing'"]),
        ('{"arrival_s": true, "prompt_tokens": 2, "output_tokens": 3}', ["column arrival_s: True"]),
        ('{"arrival_s": 1, "prompt_tokens": [2], "output_tokens": 3}', ["column prompt_tokens: [2]"]),
        ('{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": null}', ["column output_tokens: None"]),
        ("[" * 100_000, ["trace.jsonl"]),
    ],
)  # fmt: skip
def test_json_that_is_refused(tmp_path, text, words):
    with pytest.raises(UserError) as raised:
        read_trace(write(tmp_path, text, "trace.jsonl"))
    assert raised.value.code in ("trace-value", "trace-unreadable")
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_files_that_are_not_there(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(UserError, match="cannot read the trace"):
            read_trace(path)
