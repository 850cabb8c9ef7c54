"""Frozen dataclasses to plain data and back: YAML, JSON, digest.

The reader is strict: an unknown field, a missing one or a value of the wrong type is refused by its path
(`plan.slices[1].blocks`), because a misspelt field that is ignored changes a plan in silence.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Hashable
from typing import Any, TypeVar

import yaml

from plait.errors import UserError, did_you_mean

T = TypeVar("T")


def to_dict(value: Any) -> Any:
    """Plain data (dict, list, str, int, float, bool, None) of a spec value. Fields at a default None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if item is None and field.default is None:
                continue
            out[field.name] = to_dict(item)
        return out
    if isinstance(value, dict):
        return {key: to_dict(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_dict(item) for item in value]
    return value


def from_dict(cls: type[T], data: Any, path: str = "") -> T:
    """The inverse of `to_dict`, strict.

    Raises:
        UserError: `spec-field`, naming the path of the field and what was expected.
    """
    return typing.cast(T, _read(cls, data, path or cls.__name__.lower()))


def to_json(value: Any, indent: int | None = 2) -> str:
    return json.dumps(to_dict(value), indent=indent, allow_nan=False)


def from_json(cls: type[T], text: str) -> T:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as err:
        raise UserError("spec-json", f"not valid JSON for a {cls.__name__}", why=str(err)) from err
    return from_dict(cls, data)


class _Loader(yaml.SafeLoader):
    """Safe, reads `3e-05` as the number it is (YAML 1.1 wants `3.0e-05`), and refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[tuple[str, str]] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                what = f"the key {key.value!r} stands twice"
                raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Short lists (`blocks: [0, 15]`) in flow style, the rest in block style: easy to read and to edit."""


def _represent_list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    scalars = all(not isinstance(item, dict | list) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=scalars)


_Dumper.add_representer(list, _represent_list)

for _side in (_Loader, _Dumper):  # the dumper too, or a host called 2e5 would be written without quotes
    _side.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]?\d+\Z"), list("-+0123456789"))


def to_yaml(value: Any) -> str:
    return yaml.dump(to_dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def from_yaml(cls: type[T], text: str, path: str = "") -> T:
    """Read YAML, strictly: see the module. `path` is what errors call the file.

    Raises:
        UserError: `spec-yaml`, `spec-field`.
    """
    try:
        data = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as err:
        raise UserError("spec-yaml", f"{path or f'a {cls.__name__}'} is not valid YAML", why=str(err)) from err
    return from_dict(cls, data, path)


def digest(value: Any) -> str:
    """sha256 over the canonical JSON (sorted keys, no spaces) of a spec value or of plain data."""
    text = json.dumps(to_dict(value), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _hints(cls: Hashable) -> dict[str, Any]:
    return typing.get_type_hints(typing.cast(type[Any], cls))


def _refuse(path: str, expected: str, got: Any) -> UserError:
    return UserError("spec-field", f"{path}: expected {expected}, got {got!r}")


def _read(kind: Any, data: Any, path: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        options = [arg for arg in args if arg is not type(None)]
        for option in options[:-1]:
            try:
                return _read(option, data, path)
            except UserError:
                continue
        return _read(options[-1], data, path)
    if origin is typing.Literal:
        if data not in args:
            raise _refuse(path, "one of " + ", ".join(map(repr, args)), data)
        return data
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise _refuse(path, "a list", data)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_read(args[0], item, f"{path}[{i}]") for i, item in enumerate(data))
        if len(args) != len(data):
            raise _refuse(path, f"a list of {len(args)} items", data)
        return tuple(_read(arg, item, f"{path}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True)))
    if origin is dict:
        if not isinstance(data, dict):
            raise _refuse(path, "a mapping", data)
        return {_read(args[0], key, path): _read(args[1], item, f"{path}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _read_record(typing.cast(type[Any], kind), data, path)
    return _read_scalar(kind, data, path)


def _read_scalar(kind: Any, data: Any, path: str) -> Any:
    if kind is float and isinstance(data, int | float) and not isinstance(data, bool):
        if not math.isfinite(data):
            raise _refuse(path, "a finite number", data)
        return float(data)
    if kind is int and (not isinstance(data, int) or isinstance(data, bool)):
        raise _refuse(path, "a whole number", data)
    if not isinstance(data, kind):
        raise _refuse(path, f"a {kind.__name__}", data)
    return data


def _read_record(cls: type[Any], data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise _refuse(path, f"a mapping of {cls.__name__} fields", data)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            raise UserError("spec-field", f"{path}: unknown field {key!r}", hint=did_you_mean(str(key), fields))
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _read(_hints(typing.cast(Hashable, cls))[name], data[name], f"{path}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError("spec-field", f"{path}: field {name!r} is missing")
    return cls(**values)
