"""The C++ compiler behind torch.compile: whether there is one, and its cache for one test."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler"
)


@pytest.fixture
def own_compiler_cache(tmp_path, monkeypatch) -> Iterator[Path]:
    """Compiled code and the settings of the compiler must not leak into other tests."""
    import torch._inductor.config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    set_here = [
        name
        for name in ("freezing", "deterministic", "dynamic_scale_rblock")
        if hasattr(inductor, name)
    ]
    torch._dynamo.reset()
    with inductor.patch({name: getattr(inductor, name) for name in set_here}):
        yield tmp_path
    torch._dynamo.reset()
