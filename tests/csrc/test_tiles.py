"""The 32 × 32 product of csrc/tiles.h: what this processor does, and AMX's program carried out in C."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest
import torch
from torch import Tensor

from xsalab.model import native

pytestmark = [
    pytest.mark.skipif(bool(native.reason()), reason=native.reason() or "kernels are there"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
]

PROGRAM = """
#include "tiles.h"
using namespace xsalab;
extern "C" void products(const bf16* a, long lda, const bf16* b, long ldb, long rows, long k, int columns, float* c,
                         long ldc, int add) {
  Tiles tiles;
  Scratch<bf16> panel(TILE * k);
  if (columns)
    pack_columns(b, ldb, rows, k, panel);
  else
    pack_rows(b, ldb, rows, k, panel);
  product(a, lda, panel, k, c, ldc, add);
}
"""


@pytest.fixture(scope="module", params=["this processor", "AMX in C"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """``products`` from tiles.h alone."""
    folder = tmp_path_factory.mktemp("tiles")
    (folder / "tiles.cpp").write_text(PROGRAM, encoding="utf-8")
    emulate = ["-DXSALAB_EMULATE_AMX"] if request.param == "AMX in C" else []
    flags = [flag for flag in native.FLAGS if flag != "-fopenmp"]
    built = folder / "tiles.so"
    command = ["g++", *flags, *emulate, "-shared", "-fPIC", "-I", str(native.SOURCES)]
    subprocess.run([*command, str(folder / "tiles.cpp"), "-o", str(built)], check=True)
    return ctypes.CDLL(str(built))


def pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


@pytest.mark.parametrize(("k", "rows"), [(32, 32), (96, 32), (64, 11), (160, 1)])
def test_product_with_rows_as_columns(library: ctypes.CDLL, k: int, rows: int) -> None:
    """C = A Bᵀ and C += A Bᵀ with strides; rows of B that are not there give columns of zeros."""
    draw = torch.Generator().manual_seed(k)
    a, b = (torch.randn((32, k + 32), generator=draw).bfloat16() for _ in range(2))
    c = torch.full((32, 48), 7.0)
    for add in (0, 1):
        library.products(
            pointer(a), ctypes.c_long(k + 32), pointer(b), ctypes.c_long(k + 32), ctypes.c_long(rows), ctypes.c_long(k),
            0, pointer(c), ctypes.c_long(48), add,
        )  # fmt: skip
    want = torch.zeros(32, 32, dtype=torch.float64)
    want[:, :rows] = 2 * a[:, :k].double() @ b[:rows, :k].double().T
    assert torch.allclose(c[:, :32].double(), want, atol=1e-4, rtol=1e-5)
    assert (c[:, 32:] == 7).all(), "nothing beside the tile is written"


@pytest.mark.parametrize(("k", "rows"), [(32, 32), (64, 64), (64, 41), (96, 66)])
def test_product_with_columns(library: ctypes.CDLL, k: int, rows: int) -> None:
    """C = A B for B of ``rows`` ≤ k rows; the rest of the panel is zeros, even and odd."""
    draw = torch.Generator().manual_seed(rows)
    a, b = torch.randn((32, k), generator=draw).bfloat16(), torch.randn((rows, 40), generator=draw).bfloat16()
    c = torch.empty(32, 32)
    library.products(
        pointer(a), ctypes.c_long(k), pointer(b), ctypes.c_long(40), ctypes.c_long(rows), ctypes.c_long(k), 1,
        pointer(c), ctypes.c_long(32), 0,
    )  # fmt: skip
    assert torch.allclose(c.double(), a[:, :rows].double() @ b[:, :32].double(), atol=1e-4, rtol=1e-5)
