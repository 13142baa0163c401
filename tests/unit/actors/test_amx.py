"""An engine's process may use the tiles of AMX, which Linux grants only to processes that ask."""

import ctypes
import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

SYS_ARCH_PRCTL, ARCH_GET_XCOMP_PERM, TILE_DATA = 158, 0x1022, 1 << 18


def _registered(answer: Connection) -> None:
    from actors.weight_engine import register

    before = _granted()
    register()
    answer.send((before, _granted()))


def _granted() -> bool:
    features = ctypes.c_uint64()
    assert ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_GET_XCOMP_PERM, ctypes.byref(features)) == 0
    return bool(features.value & TILE_DATA)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this processor has no AMX")
def test_a_process_of_an_engine_asks_for_tiles() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_registered, args=(there,))
    process.start()
    assert here.poll(120)
    assert here.recv() == (False, True)
    process.join(30)
    assert process.exitcode == 0
