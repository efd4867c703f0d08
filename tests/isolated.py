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
# Would change what is being tested if they were inherited.
_NOT_INHERITED = ("MINIKERNEL_BACKEND", "PYTHONPATH", "TRITON_INTERPRET")


def python(*arguments: str, path: Iterable[Path] = (ROOT,), cwd: Path | None = None, **environment: str) -> str:
    """What ``python *arguments`` prints; an AssertionError with its stderr if it fails.

    Args:
        arguments: The interpreter's arguments.
        path: Folders for ``PYTHONPATH``, in order.
        cwd: Where to run it; by default a folder that has nothing to do with the checkout.
        environment: Variables to set beside those of this process.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"PYTHONPATH": os.pathsep.join(map(str, path))} | environment,
        cwd=cwd or sys.prefix,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run(code: str, *, absent: Iterable[str] = (), path: Iterable[Path] = (ROOT,), **environment: str) -> str:
    """What a snippet prints where the modules ``absent`` look as if they weren't installed.

    Any warning but a deprecation is an error, unless a framework gave it.
    """
    hide = _HIDE.format(modules=tuple(absent)) if absent else ""
    return python("-c", _STRICT + hide + code, path=path, **environment)
