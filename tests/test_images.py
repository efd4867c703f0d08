"""The disk cache of compiled kernels: found again, never trusted when damaged, never needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cases import CACHE_VARIABLE
from isolated import run

import minikernel
from minikernel import images, user_cache
from minikernel.images import Image, loaded

IMAGE = Image(b"\x7fELF\n\0code", "softmax_fused", 4096)
KEY = ("source", "-DOPTION=1", "90")


def never() -> Image:
    raise AssertionError("it was compiled again")


def cached(key, compile):
    return loaded(key, compile, lambda image: image)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    return user_cache.folder("kernels")


def test_what_was_compiled_once_is_found_again(folder):
    assert cached(KEY, lambda: IMAGE) == IMAGE
    assert len(list(folder.iterdir())) == 1
    assert cached(KEY, never) == IMAGE


@pytest.mark.parametrize("other", [("source", "-DOPTION=2", "90"), ("sourc", "e-DOPTION=1", "90"), KEY[:2]])
def test_each_key_has_an_image_of_its_own(folder, other):
    cached(KEY, lambda: IMAGE)
    another = Image(b"another", "softmax_fused")
    assert cached(other, lambda: another) == another
    assert cached(KEY, never) == IMAGE


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:5],
        lambda content: b"",
        lambda content: content.replace(b"code", b"c0de"),
        lambda content: b"[1]\n" + content,
        lambda content: content.replace(b"4096", b"2048"),
    ],
)
def test_a_damaged_file_is_compiled_again_and_put_right(folder, damage):
    cached(KEY, lambda: IMAGE)
    (file,) = folder.iterdir()
    sound = file.read_bytes()
    file.write_bytes(damage(sound))
    assert cached(KEY, lambda: IMAGE) == IMAGE
    assert file.read_bytes() == sound


def test_an_image_that_the_driver_refuses_is_compiled_again(folder):
    cached(KEY, lambda: Image(b"by a newer compiler", "softmax_fused"))

    def load(image: Image) -> bytes:
        if image.code.startswith(b"by a newer"):
            raise RuntimeError("CUDA refused to load softmax_fused")
        return image.code

    assert loaded(KEY, lambda: IMAGE, load) == IMAGE.code
    assert cached(KEY, never) == IMAGE


def test_what_no_driver_takes_is_an_error_and_not_kept(folder):
    def refuse(image: Image) -> Image:
        raise RuntimeError("CUDA refused to load it")

    with pytest.raises(RuntimeError, match="refused"):
        loaded(KEY, lambda: IMAGE, refuse)
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_is_done_without(folder):
    folder.parent.mkdir(parents=True)
    folder.write_text("a file where the folder should be")
    assert cached(KEY, lambda: IMAGE) == IMAGE
    assert cached(KEY, lambda: IMAGE) == IMAGE


def test_a_cache_that_can_only_be_read_is_used(folder, monkeypatch):
    cached(KEY, lambda: IMAGE)

    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(os, "utime", refuse)
    assert cached(KEY, never) == IMAGE


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_has_no_cache():
    assert cached(KEY, lambda: IMAGE) == IMAGE


def test_a_failed_compilation_leaves_nothing(folder):
    def fail() -> Image:
        raise RuntimeError("no C++")

    with pytest.raises(RuntimeError, match=r"no C\+\+"):
        cached(KEY, fail)
    assert not folder.exists()
    assert cached(KEY, lambda: IMAGE) == IMAGE


def test_those_used_longest_ago_go_when_there_are_too_many(folder, monkeypatch):
    monkeypatch.setattr(images, "MOST_FILES", 3)
    for i in range(5):
        cached((str(i),), lambda: IMAGE)
        for file in folder.iterdir():  # time passes
            os.utime(file, (file.stat().st_mtime - 10,) * 2)
        if i >= 1:
            cached(("0",), never)
    assert len(list(folder.iterdir())) == 3
    for i in (0, 3, 4):
        assert cached((str(i),), never) == IMAGE
    with pytest.raises(AssertionError):
        cached(("1",), never)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda-naive", "cuda-smem", "cuda-fused", "triton-fused"])
def test_a_second_process_compiles_nothing(backend, tmp_path):
    """Nor does it import Triton to find out."""
    if not minikernel.list_backends()[backend].available:
        pytest.skip(f"{backend} isn't available here")
    code = f"""
import sys, torch, minikernel
from minikernel import cuda
from minikernel.backends import triton_fused
compiled = []
sound, triton_sound = cuda.compile_image, triton_fused._image
cuda.compile_image = lambda *given: compiled.append(1) or sound(*given)
triton_fused._image = lambda *given: compiled.append(1) or triton_sound(*given)
x = torch.randn(60, 600, device="cuda")
y = minikernel.softmax(x, backend={backend!r})
assert torch.allclose(y, torch.softmax(x, -1))
print(len(compiled), "triton" in sys.modules)
"""
    first, second = (run(code, XDG_CACHE_HOME=str(tmp_path)).split() for _ in range(2))
    assert first[0] == "1"
    assert second == ["0", "False"]
