"""Programs that are not made of plait's ops: a decoder from token ids to logits as one opaque op, for XLA alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xdsl.dialects.builtin import ModuleOp

from plait.frontend.files import some
from plait.frontend.pt2 import refuse
from plait.frontend.torch_mlir import mlir_text
from plait.words import counted

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

FAMILY = "opaque"

LENGTHS = (256, 1024, 4096, 16384)
"""Tokens of the programs of a module with a dynamic length, up to its own bound, which is one more."""

UNBOUNDED_TOKENS = 1024
"""The longest sequence of a module that states no bound."""

MAX_CONSTANT_BYTES = 1 << 20
"""What is no argument of the programs stands in their text; larger tensors do not belong there."""


@dataclass(frozen=True)
class ProgramConfig:
    """What is known of an exported program; it answers to the names that `DecoderConfig` has.

    Attributes:
        lengths: tokens of the programs that are made of it, ascending; `max_positions` is the last.
        bounded: the module says itself how long a sequence may be.
        arguments: the weights that the programs take, in order. Other tensors stand in their text.
        reason: why it is not raised to plait's ops.
    """

    family: str
    file: str
    vocab_size: int
    max_positions: int
    lengths: tuple[int, ...]
    bounded: bool
    arguments: tuple[str, ...]
    dtype: str
    reason: str
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def build(self, dtype: str) -> ModuleOp:
        from plait.frontend.exported import build_program

        return build_program(self, dtype)

    def unused(self) -> dict[str, str]:
        return {}  # what is no argument of the program stands in its text

    @property
    def note(self) -> str:
        """What a user should know of the plan."""
        lengths = ", ".join(f"{length:,}" for length in self.lengths)
        bound = (
            "" if self.bounded else f"; the module states no longest sequence, {self.lengths[-1]:,} tokens were taken"
        )
        return (
            "the module is one opaque op, StableHLO by torch-mlir, which only XLA runs; without a KV cache every step "
            f"computes a sequence anew from its first token, padded to {lengths} tokens{bound}; it is not made "
            f"of plait's ops: {self.reason}"
        )


def check_program(exported: ExportedProgram, others: Mapping[str, Any]) -> tuple[tuple[int, ...], bool, int]:
    """Check that it is a decoder with one input, token ids [1 or batch, tokens], and one result, logits [1 or batch,
    tokens, vocabulary], causal and without memory.

    Args:
        others: tensors that are no arguments, by name.

    Returns:
        the lengths of the programs to make of it, whether it bounds them itself, and its vocabulary.
    """
    _check_signature(exported)
    least, most = _token_range(exported)
    vocabulary = _vocabulary(exported)
    for name, tensor in others.items():
        _check_constant(name, tensor)
    longest = max(least, UNBOUNDED_TOKENS) if most is None else most
    lengths = (*(length for length in LENGTHS if least <= length < longest), longest)
    _check_causal(exported, least, lengths[0], vocabulary)
    return lengths, most is not None, vocabulary


def _check_signature(exported: ExportedProgram) -> None:
    # As exported, a program may write in place; without decompositions torch only turns that into results.
    signature = exported.run_decompositions({}).graph_signature
    changed = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if changed:
        refuse(
            "memory",
            f"the program writes to {some(changed)}",
            "an opaque op has no memory: a step gets all tokens of a sequence",
            "export the module without a cache (use_cache=False)",
        )
    if len(signature.user_inputs) != 1 or len(signature.user_outputs) != 1:
        refuse(
            "signature",
            f"the program has {counted(len(signature.user_inputs), 'input')} and "
            + counted(len(signature.user_outputs), "result"),
            "an opaque op takes token ids and gives logits, and nothing else",
            "export a wrapper whose forward(tokens) returns the logits alone",
        )
    tokens, logits = _value(exported, 0, inputs=True), _value(exported, 0, inputs=False)
    if tokens is None or len(tokens.shape) != 2 or tokens.dtype not in _integers():
        refuse("signature", f"the input is {_shown(tokens)}, not token ids [batch, tokens]")
    if logits is None or len(logits.shape) != 3 or not logits.dtype.is_floating_point:
        refuse("signature", f"the result is {_shown(logits)}, not logits [batch, tokens, vocabulary]")
    if isinstance(tokens.shape[0], int) and tokens.shape[0] != 1:
        refuse(
            "signature",
            f"the program takes {tokens.shape[0]} sequences at once",
            "an opaque op runs one sequence at a time",
            "export with tokens of shape [1, tokens]",
        )


def _integers() -> tuple[Any, ...]:
    import torch

    return torch.int64, torch.int32


def _shown(value: Any) -> str:
    return "no tensor" if value is None else f"{value.dtype} {list(value.shape)}"


def _value(exported: ExportedProgram, index: int, *, inputs: bool) -> Any:
    """The fake tensor behind a user's input or result; None where it is no tensor."""
    signature = exported.graph_signature
    name = (signature.user_inputs if inputs else signature.user_outputs)[index]
    for node in exported.graph.nodes:
        if node.name == name:
            value = node.meta.get("val")
            return value if hasattr(value, "dtype") else None
    return None


def _token_range(exported: ExportedProgram) -> tuple[int, int | None]:
    """The smallest and the largest number of tokens; None where there is no largest."""
    tokens = _value(exported, 0, inputs=True).shape[1]
    if isinstance(tokens, int):
        return tokens, tokens
    limits = exported.range_constraints.get(tokens.node.expr)
    if limits is None:
        refuse(
            "length",
            f"the number of tokens is {tokens}, an expression",
            "programs are made for lengths of our choice",
            'export with a plain torch.export.Dim("tokens", max=N), or a static length',
        )
    # No bound is torch's own infinity, or a number that stands for one.
    bounded = limits.upper.is_Integer and limits.upper < 1 << 30
    return max(1, int(limits.lower)), int(limits.upper) if bounded else None


def _vocabulary(exported: ExportedProgram) -> int:
    vocabulary = _value(exported, 0, inputs=False).shape[2]
    if not isinstance(vocabulary, int):
        refuse("signature", f"the vocabulary is {vocabulary}, not a fixed number")
    return int(vocabulary)


def _check_constant(name: str, tensor: Any) -> None:
    nbytes = tensor.numel() * tensor.element_size() if hasattr(tensor, "element_size") else 0
    if nbytes > MAX_CONSTANT_BYTES:
        refuse(
            "constant",
            f"{name!r} is {tensor.dtype} {list(tensor.shape)}, and would have to stand in the program's text",
            "contiguous parameters and buffers of float32, float16 and bfloat16 are read from the file",
            "make it a contiguous parameter or buffer of such a dtype",
        )


def _caller(exported: ExportedProgram) -> tuple[Any, Callable[..., Any]]:
    """torch's module of the program, and how to call something like it with token ids: by position or by name."""
    import torch
    from torch.utils import _pytree as pytree

    module = exported.module()
    args, kwargs = exported.example_inputs or ((None,), {})
    names = () if args else tuple(kwargs)

    def call(function: Callable[..., Any], tokens: torch.Tensor) -> torch.Tensor:
        typed = tokens.to(_value(exported, 0, inputs=True).dtype)
        made = function(**{names[0]: typed}) if names else function(typed)
        (logits,) = (leaf for leaf in pytree.tree_leaves(made) if leaf is not None)
        assert isinstance(logits, torch.Tensor)
        return logits

    return module, call


def _check_causal(exported: ExportedProgram, least: int, length: int, vocabulary: int) -> None:
    """Run it: what stands behind a token must not change the token's logits, since sequences are padded there.

    A sample, not a proof: random tokens, cut in the middle.
    """
    import torch

    module, call = _caller(exported)
    length = max(least, min(length, 64))
    cut = max(1, length // 2)
    whole = torch.randint(0, vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    other = whole.clone()
    other[:, cut:] = (other[:, cut:] + 1) % vocabulary
    samples = [whole, other, *([whole[:, :cut]] if least <= cut < length else [])]
    try:
        with torch.no_grad():
            want, *found = (call(module, sample)[:, :cut].float() for sample in samples)
    except Exception as err:
        refuse(
            "run",
            "the program does not run on random tokens",
            f"{type(err).__name__}: {err}"[:300],
            f"it says that its vocabulary has {vocabulary} tokens: does its table of embeddings?",
        )
    limit = (1e-4 if _value(exported, 0, inputs=False).dtype == torch.float32 else 3e-2) * float(want.abs().max())
    worst = max(float((got - want).abs().max()) for got in found)
    if not worst <= limit:  # NaN too
        refuse(
            "causal",
            f"the logits of a token depend on what stands behind it, by {worst:.3g}",
            f"{length} random tokens, the last {length - cut} of them changed or left out; "
            "sequences are padded at their end, and would get other logits",
            "export the module in eval mode, with its causal mask",
        )


def written(exported: ExportedProgram, aliases: Mapping[str, tuple[str, ...]], length: int) -> tuple[str, int]:
    """The program at one length as StableHLO, and the flops of its matrix products.

    Args:
        aliases: the names under which torch knows each argument (a tied table has two).
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    module, call = _caller(exported)

    class Stateless(torch.nn.Module):
        """weights and int32 token ids in, float32 logits [tokens, vocabulary] out."""

        def forward(self, weights: list[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
            named = {name: weight for names, weight in zip(aliases.values(), weights, strict=True) for name in names}

            def function(*args: Any, **kwargs: Any) -> Any:
                return torch.func.functional_call(module, named, args, kwargs, tie_weights=False)

            scores: torch.Tensor = call(function, tokens)[0].float()
            return scores

    tokens = torch.zeros(1, length, dtype=torch.int32)
    weights = [exported.state_dict[name].detach() for name in aliases]
    # Counted on shapes alone: nothing is computed.
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False) as counter, torch.no_grad():
        call(module, torch.zeros(1, length, dtype=torch.int32))
    text = mlir_text(Stateless(), [weights, tokens], "stablehlo")
    return text, int(counter.get_total_flops())
