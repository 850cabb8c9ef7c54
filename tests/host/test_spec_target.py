"""The target grammar: parse and print are inverse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.errors import UsageError
from plait.spec import Target, parse_target, parse_targets

# A name may look like anything but a count: `2x` in front of a letter is the grammar's own.
names = st.from_regex(r"[A-Za-z][\w.-]{0,10}", fullmatch=True).filter(str.isascii)
backends = st.from_regex(r"[A-Za-z][\w-]{0,6}", fullmatch=True).filter(str.isascii)
hosts = st.from_regex(r"[A-Za-z0-9][\w.-]{0,8}", fullmatch=True).filter(str.isascii)
targets = st.builds(
    Target, name=names, backend=st.none() | backends, count=st.integers(1, 4096), host=st.none() | hosts
)


@given(targets)
def test_parse_is_the_inverse_of_print(target: Target) -> None:
    assert parse_target(str(target)) == target


@given(st.text(max_size=12))
def test_what_parses_prints_back(text: str) -> None:
    try:
        target = parse_target(text)
    except UsageError:
        return
    assert parse_target(str(target)) == target


@given(st.lists(targets, min_size=1, max_size=4))
def test_lists(many: list[Target]) -> None:
    texts = [str(target) for target in many]
    assert parse_targets(",".join(texts)) == parse_targets(texts) == tuple(many)


EXAMPLES = {
    "h100": Target("h100"),
    "2xcuda:h100@hostA": Target("h100", "cuda", 2, "hostA"),
    "xla:tpu-v5e": Target("tpu-v5e", "xla"),
    "rocm:gfx942": Target("gfx942", "rocm"),
    "cuda:sm_90": Target("sm_90", "cuda"),
    "null:h100": Target("h100", "null"),
    "8xmi300x@10.0.0.7": Target("mi300x", None, 8, "10.0.0.7"),
    "xeon-8592p": Target("xeon-8592p"),
}


@pytest.mark.parametrize("text", EXAMPLES)
def test_examples(text: str) -> None:
    assert parse_target(text) == EXAMPLES[text]
    assert str(EXAMPLES[text]) == text


@pytest.mark.parametrize(
    "text", ["", "2x", "100", "a:b:c", "h100@", "@a", "h 100", "0xh100", "5000xh100", "-1xh100", "h100@a@b"]
)
def test_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_target(text)
    assert caught.value.code in ("target-syntax", "target-count")
    assert caught.value.exit_code == 64


@pytest.mark.parametrize("text", ["", ",", " , "])
def test_no_target(text: str) -> None:
    with pytest.raises(UsageError, match="no target given"):
        parse_targets(text)
