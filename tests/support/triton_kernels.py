"""Triton kernels without a GPU: computed by Triton's interpreter, or compiled for an architecture
and assembled.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.warm import WarmProcesses

# Triton reads TRITON_INTERPRET when it is imported: what PyTorch has imported of it is forgotten.
_IMPORTED_ANEW = """
import runpy, sys
for name in [*sys.modules]:
    if name.split(".")[0] == "triton" and "_C" not in name.split("."):
        del sys.modules[name]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def interpreted(warm: WarmProcesses, script: str, folder: Path, *words: str) -> dict[str, Any]:
    """What a script beside this file finds with Triton's interpreter, in a process of its own;
    skips the test where it computes nothing.
    """
    path = Path(__file__).with_name(f"{script}.py")
    command = [sys.executable, "-c", _IMPORTED_ANEW, str(path), *words]
    process = warm.start(command, folder, TRITON_INTERPRET="1")
    out, err = process.communicate()
    assert process.returncode == 0, err
    if not out:
        pytest.skip("the interpreter of this version of Triton stores nothing here")
    return json.loads(out.splitlines()[-1])


def compiled(kernel: Any, types: dict[str, str], constants: dict, arch: int, **options: Any) -> str:
    """The PTX of a kernel whose arguments have these ``types``, or are constants."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    pointers = [name for name in types if types[name].startswith("*")]
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},
    )
    target, options = GPUTarget("cuda", arch, 32), {"enable_fp_fusion": False, **options}
    return triton.compile(source, target=target, options=options).asm["ptx"]


def assembled(ptx: str, folder: Path) -> list[str]:
    """What Triton's assemblers, of which one may be too old, say of a kernel that spills no
    registers.
    """
    import triton

    (folder / "kernel.ptx").write_text(ptx)
    (gpu,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    words = ["--fmad=false", "-v", f"--gpu-name={gpu}", "kernel.ptx", "-o", "kernel.cubin"]
    tools = sorted((Path(triton.__file__).parent / "backends/nvidia/bin").glob("ptxas*"))
    runs = [
        subprocess.run([tool, *words], cwd=folder, capture_output=True, text=True) for tool in tools
    ]
    said = [run.stderr for run in runs if run.returncode == 0]
    assert said and all("0 bytes spill stores, 0 bytes spill loads" in text for text in said), said
    return said
