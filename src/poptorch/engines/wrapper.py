"""What we change of the C++ that Inductor writes around its kernels, and of how that is built.

Inductor lets a backend bring its own class that writes this code. Ours hands each kernel to the compiler as soon as it
is written, calls ops that have no C function through the dispatcher's stable C interface, where Inductor would include
the dispatcher itself (four seconds of headers), and lets modules be built in the background.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from poptorch.engines.building import Build, Tools, current_build
from poptorch.engines.code import Deferred
from poptorch.engines.headers import IN, OUT, Header
from poptorch.engines.private import (
    CppBuilder,
    CppTorchDeviceOptions,
    CppWrapperCodeCache,
    CppWrapperCpu,
    IndentedBuffer,
    MutationOutput,
    device_codegens,
    init_backend_registration,
    invalid_vec_isa,
    pick_vec_isa,
)
from poptorch.engines.private_tools import cache_folder
from poptorch.engines.surroundings import surroundings
from poptorch.engines.vectors import SEARCH

CONFIG: dict[str, Any] = {
    "cpp_wrapper_build_separate": True,
    "aot_inductor.compile_wrapper_opt_level": "Og",  # as fast a step as with more, in half the time; O0 is slower
    "cpp_cache_precompile_headers": False,  # we have our own
    "fx_graph_cache": False,  # the same; and what it keeps could not be loaded without us
}
_THEIR_IMPORT = "from torch._inductor.codecache import CppWrapperCodeCache"
_OUR_IMPORT = f"from {__name__} import BackgroundCodeCache as CppWrapperCodeCache"
_KERNEL_INCLUDES = ("torch/csrc/inductor/cpp_prefix.h",)
_CALL_INCLUDES = ("torch/csrc/inductor/cpp_wrapper/cpu.h", "sstream", "cstdlib", "cerrno")
_STABLE = "torch::stable::detail::from"


class Wrapper(CppWrapperCpu):
    """Writes the code around kernels."""

    @staticmethod
    def create(*_: Any, **__: Any) -> Wrapper:
        return Wrapper()

    def __init__(self) -> None:
        super().__init__()
        SEARCH.wait()  # kernels are written next

    def generate(self, is_inference: bool) -> Any:
        code, kernels = super().generate(is_inference)
        assert _THEIR_IMPORT in code.value, "Inductor loads what it has generated in another way"
        return dataclasses.replace(code, value=code.value.replace(_THEIR_IMPORT, _OUR_IMPORT, 1)), kernels

    def next_kernel_suffix(self) -> str:
        """What makes names of kernels differ, also from those of other parts of the program."""
        return f"{len(current_build().entries)}_{super().next_kernel_suffix()}"

    def define_kernel(
        self,
        kernel_name: str,
        kernel_body: str,
        metadata: str | None = None,
        gpu: bool = True,
        cpp_definition: str | None = None,
    ) -> None:
        super().define_kernel(kernel_name, kernel_body, metadata, gpu, cpp_definition)
        if cpp_definition is not None and not gpu:
            current_build().add_kernel(kernel_body)

    def generate_fallback_kernel_with_runtime_lookup_boxed(
        self,
        op_overload: torch._ops.OpOverload,
        raw_args: Sequence[Any],
        output_args: Sequence[str | None],
        raw_outputs: Sequence[Any],
    ) -> None:
        arguments = list(zip(raw_args, (a.real_type for a in op_overload._schema.arguments), strict=False))
        can_call = all(_has_stable_form(raw, kind) for raw, kind in arguments) and _returns_tensors(op_overload)
        if not can_call or any(isinstance(output, MutationOutput) for output in raw_outputs):
            super().generate_fallback_kernel_with_runtime_lookup_boxed(op_overload, raw_args, output_args, raw_outputs)
            return
        lines = IndentedBuffer()
        lines.writelines([f"RAIIAtenTensorHandle {name};" for name in output_args if name is not None])
        lines.writeline("{")
        with lines.indent():
            self._write_stable_call(lines, op_overload, arguments, output_args)
        lines.writeline("}")
        self.writelines(lines.getvalue().splitlines())

    def _write_stable_call(
        self, lines: Any, op: torch._ops.OpOverload, arguments: Sequence[tuple[Any, Any]], outputs: Sequence[str | None]
    ) -> None:
        values = [self._stable(lines, f"argument_{i}", raw, kind) for i, (raw, kind) in enumerate(arguments)]
        size = max(len(values), len(op._schema.returns))
        lines.writeline(f"std::array<StableIValue, {size}> stack{{{', '.join(values)}}};")
        name, overload = op._schema.name, op._schema.overload_name
        call = f'aoti_torch_call_dispatcher("{name}", "{overload}", stack.data())'
        lines.writeline(f"AOTI_TORCH_ERROR_CODE_CHECK({call});")
        for position in range(len(op._schema.returns)):
            output = outputs[position] if position < len(outputs) else None
            target = output if output is not None else f"RAIIAtenTensorHandle unused_{position}"
            lines.writeline(f"{target} = torch::stable::detail::to<AtenTensorHandle>(stack[{position}]);")

    def _stable(self, lines: Any, name: str, raw: Any, kind: Any) -> str:
        """An argument as the dispatcher's C interface takes it."""
        if isinstance(kind, torch.OptionalType):
            if raw is None:
                return f"{_STABLE}(std::nullopt)"
            lines.writeline(f"std::optional {name}_given{{{self._stable(lines, name, raw, kind.getElementType())}}};")
            return f"{_STABLE}({name}_given)"
        if isinstance(kind, torch.TensorType):
            reference = self.create_tmp_raii_handle_var_if_needed(raw.codegen_reference(), lines)
            lines.writeline(f"AtenTensorHandle {name};")  # the dispatcher takes this one over
            lines.writeline(f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle({reference}, &{name}));")
            return f"{_STABLE}({name})"
        if isinstance(kind, torch.ListType):
            python, native = _SCALARS[type(kind.getElementType())]
            items = ", ".join(self._scalar(item, python, native) for item in raw)
            return f"{_STABLE}(std::vector<{native}>{{{items}}})"
        return f"{_STABLE}({self._scalar(raw, *_SCALARS[type(kind)])})"

    def _scalar(self, raw: Any, python: type, native: str) -> str:
        return f"static_cast<{native}>({self.val_to_arg_str_for_prim_type(raw, python)})"


_SCALARS: dict[type, tuple[type, str]] = {
    torch.BoolType: (bool, "bool"),
    torch.IntType: (int, "int64_t"),
    torch.FloatType: (float, "double"),
    torch.StringType: (str, "std::string"),
    torch.SymIntType: (int, "int64_t"),  # if it is known: see below
}


def _has_stable_form(raw: Any, kind: Any) -> bool:
    if isinstance(kind, torch.OptionalType):
        return raw is None or _has_stable_form(raw, kind.getElementType())
    if isinstance(kind, torch.TensorType):
        return hasattr(raw, "codegen_reference")
    if isinstance(kind, torch.ListType):
        return type(kind.getElementType()) in _SCALARS and all(isinstance(item, (int, float, str)) for item in raw)
    return type(kind) in _SCALARS and isinstance(raw, (int, float, str))  # symbols are not


def _returns_tensors(op: torch._ops.OpOverload) -> bool:
    return all(isinstance(returned.real_type, torch.TensorType) for returned in op._schema.returns)


class BackgroundCodeCache(CppWrapperCodeCache):
    """What generated Python calls to load a module. Ours goes on while that is being built."""

    @classmethod
    def load_pybinding(cls, *args: Any, **options: Any) -> Deferred:
        cls.load_pybinding_async(*args, **options)
        build = current_build()
        return Deferred(build.library, build.entries[-1])

    @classmethod
    def load_async(cls, main_code: str, *_: Any, optimized_code: str | None = None, **__: Any) -> Any:
        build = current_build()
        kernels = (optimized_code or "").count(f"#include <{_KERNEL_INCLUDES[0]}>")
        assert kernels == build.kernels, f"{kernels} kernels are called, but {build.kernels} were handed over"
        build.add_calls(main_code)
        return build.content


@contextmanager
def our_wrapper() -> Iterator[None]:
    """Let Inductor write code for the processor by our class."""
    init_backend_registration()
    theirs = device_codegens["cpu"]
    device_codegens["cpu"] = dataclasses.replace(theirs, cpp_wrapper_codegen=Wrapper)
    try:
        yield
    finally:
        device_codegens["cpu"] = theirs


def new_build() -> Build:
    """A library to be built with the tools that Inductor would use."""
    folder = Path(cache_folder(), "poptorch")
    folder.mkdir(mode=0o700, exist_ok=True)
    return Build(_tools, folder)


def _tools() -> Tools:
    facts = surroundings()
    known = " ".join([torch.__path__[0], facts["torch"], facts["python"], facts["processor"], facts["compiler"]])
    kernels = _command(vec_isa=pick_vec_isa(), compile_only=True)
    calls = _command(vec_isa=invalid_vec_isa, compile_only=True, min_optimize=True)
    link = _command(vec_isa=invalid_vec_isa)
    return Tools(
        Header("kernels", _KERNEL_INCLUDES, kernels, known), Header("calls", _CALL_INCLUDES, calls, known), link
    )


def _command(**options: Any) -> tuple[str, ...]:
    """What Inductor would call the compiler with, but without warnings, which nobody reads."""
    option = CppTorchDeviceOptions(device_type="cpu", include_pytorch=True, shared=True, **options)
    line = CppBuilder(name="OUT", sources=IN, BuildOption=option).get_command_line()
    words = [word for word in shlex.split(line) if word not in ("-Wall", "-pedantic")]
    return (*(OUT if word in ("OUT.o", "OUT.so") else word for word in words), "-w")
