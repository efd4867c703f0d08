"""Fresh interpreters, in which what is imported and what is installed can be controlled."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_HIDE = """
import sys
class _Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, _Hidden())
"""
_STRICT = """
import warnings
warnings.filterwarnings("error", category=UserWarning)
warnings.filterwarnings("error", category=RuntimeWarning)
warnings.filterwarnings("default", module="(cupy|torch|triton)")
"""
_CAPTURE = """
import torch, minikernel
{setup}
def call():
    return {call}
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        found = call()
except Exception as error:
    assert "warm" in str(error) or "warm" in str(error.__context__), repr(error)
    torch.cuda.synchronize()
    found = call()
    print("refused")
else:
    with torch.no_grad():
        x.copy_(torch.randn(x.shape))
    graph.replay()
    print("captured")
torch.cuda.synchronize()
{check}
"""
# Would change what is being tested if they were inherited.
_NOT_INHERITED = ("MINIKERNEL_BACKEND", "PYTHONPATH", "TRITON_INTERPRET")


def python(
    *arguments: str,
    path: Iterable[Path] = (ROOT,),
    cwd: Path | None = None,
    timeout: float | None = 300,
    **environment: str,
) -> str:
    """What ``python *arguments`` prints; an AssertionError with its stderr if it fails.

    Args:
        arguments: The interpreter's arguments.
        path: Folders for ``PYTHONPATH``, in order.
        cwd: Where to run it; by default a folder that has nothing to do with the checkout.
        timeout: Seconds that it may take; None for as long as it likes.
        environment: Variables to set beside those of this process.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment,
        cwd=cwd or sys.prefix,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run(code: str, *, absent: Iterable[str] = (), path: Iterable[Path] = (ROOT,), **environment: str) -> str:
    """What a snippet prints where the modules ``absent`` look as if they weren't installed.

    Any warning but a deprecation is an error, unless a framework gave it.
    """
    hide = _HIDE.format(modules=tuple(absent)) if absent else ""
    return python("-c", _STRICT + hide + code, path=path, **environment)


def capture_first_call(*, setup: str, call: str, check: str) -> None:
    """A process's first call, in a CUDA graph that is replayed with new values; or it says to warm up, and isn't.

    Args:
        setup: Statements that make ``x``, on a GPU.
        call: An expression of ``minikernel`` and ``x``.
        check: Statements that assert that ``found``, its value, is right for the ``x`` there is by then.
    """
    output = run(_CAPTURE.format(setup=setup, call=call, check=check))
    assert output.split()[-1] in ("captured", "refused")


def in_the_interpreter(file: str, wanted: str) -> str:
    """What pytest prints of the tests in a file that ``wanted`` selects, run in Triton's interpreter.

    Triton decides that as it defines a kernel, so it takes a process of its own.
    """
    options = ("-q", "-p", "no:cacheprovider", "-k", wanted)
    return python("-m", "pytest", *options, file, cwd=ROOT, timeout=None, TRITON_INTERPRET="1")
