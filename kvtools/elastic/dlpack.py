"""A torch tensor over memory that torch did not allocate, by the DLPack exchange format.

Of torch's ways in, this is the one that asks no driver about the pointer: a reserved address without memory under it is no
"registered" pointer to any driver, and `from_blob` is C++ only. One structure serves CPU, CUDA and HIP. The capsule owns
nothing: the memory must outlive the tensor, which is so because a pool is unmapped after its engine has gone.
"""

import ctypes
from typing import Any

# DLDeviceType
CPU, CUDA, ROCM = 1, 2, 10
_INT = 0


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_DELETER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("dl_tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", _DELETER))

_alive: dict[int, tuple[Any, ...]] = {}
"""What the structures of living tensors point to; an entry goes when its tensor does."""


def _forget(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


_forgotten = _DELETER(_forget)


def tensor_at(address: int, size: int, device_type: int, device: int) -> Any:
    """A flat torch.int8 tensor of `size` bytes at `address`. The memory must outlive it."""
    import torch

    shape = (ctypes.c_int64 * 1)(size)
    strides = (ctypes.c_int64 * 1)(1)
    managed = _Managed(
        _Tensor(address, _Device(device_type, device), 1, _DataType(_INT, 8, 1), shape, strides, 0), None, _forgotten
    )
    _alive[ctypes.addressof(managed)] = (managed, shape, strides)
    wrap = ctypes.pythonapi.PyCapsule_New
    wrap.restype = ctypes.py_object
    wrap.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch.utils.dlpack.from_dlpack(wrap(ctypes.addressof(managed), b"dltensor", None))
