"""Loads the C kernels of `native.c` as torch operators; without a compiler, their slow twins."""

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
SOURCE = Path(__file__).with_name("native.c")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, built once per source text; None where there is no C compiler."""
    key = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"train_tiny_{key}.so"
    if not target.exists():
        build = target.with_suffix(f".{id(target)}")
        flags = "-O3 -march=native -ffast-math -fopenmp -shared -fPIC".split()
        try:
            subprocess.run(
                ["g++", "-x", "c++", *flags, str(SOURCE), "-o", str(build), "-lm"], check=True
            )
        except (OSError, subprocess.CalledProcessError):
            return None
        build.rename(target)
    return ctypes.CDLL(str(target))


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`function` through torch.compile where there is a C++ compiler to do it, else as it is."""
    return function if library() is None else torch.compile(function, dynamic=False)


def _symbol(name: str) -> Callable[..., object]:
    lib = library()
    assert lib is not None
    symbol: Callable[..., object] = getattr(lib, name)
    return symbol


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@torch.library.custom_op("train_tiny::sinkhorn", mutates_args=())
def sinkhorn(x: Tensor, iters: int, eps: float) -> Tensor:
    """`iters` rounds of column and row normalisation of positive [..., 4, 4]; a column comes last."""
    if library() is None:
        return sinkhorn_reference(x, iters, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    _symbol("sinkhorn_forward")(
        _pointer(x),
        _pointer(out),
        ctypes.c_long(x.numel() // 16),
        ctypes.c_int(2 * iters - 1),
        ctypes.c_float(eps),
    )
    return out


@sinkhorn.register_fake
def _(x: Tensor, iters: int, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("train_tiny::sinkhorn_backward", mutates_args=())
def sinkhorn_backward(x: Tensor, grad: Tensor, iters: int, eps: float) -> Tensor:
    if library() is None:
        return sinkhorn_backward_reference(x, grad, iters, eps)
    x, grad = x.contiguous(), grad.contiguous()
    out = torch.empty_like(x)
    _symbol("sinkhorn_backward")(
        _pointer(x),
        _pointer(grad),
        _pointer(out),
        ctypes.c_long(x.numel() // 16),
        ctypes.c_int(2 * iters - 1),
        ctypes.c_float(eps),
    )
    return out


@sinkhorn_backward.register_fake
def _(x: Tensor, grad: Tensor, iters: int, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _sinkhorn_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.iters, ctx.eps = inputs[1], inputs[2]


def _sinkhorn_grad(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (x,) = ctx.saved_tensors
    return sinkhorn_backward(x, grad, ctx.iters, ctx.eps), None, None


sinkhorn.register_autograd(_sinkhorn_grad, setup_context=_sinkhorn_setup)


def sinkhorn_reference(x: Tensor, iters: int, eps: float) -> Tensor:
    """The slow twin: the same half steps, one tensor operation each."""
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(iters - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


def sinkhorn_backward_reference(x: Tensor, grad: Tensor, iters: int, eps: float) -> Tensor:
    """By hand, because autograd does not record inside a custom operator."""
    steps = []
    for i in range(2 * iters - 1):
        dim = -2 if i % 2 == 0 else -1
        total = x.sum(dim, keepdim=True) + eps
        x = x / total
        steps.append((x, total, dim))
    for y, total, dim in reversed(steps):
        grad = (grad - (grad * y).sum(dim, keepdim=True)) / total
    return grad.contiguous()


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(min(gate, limit)) * clamp(up); no gradient: the expert operator calls the backward."""
    if library() is None:
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _symbol("swiglu_forward")(
        _pointer(gate_up),
        _pointer(out),
        ctypes.c_long(out.shape[0]),
        ctypes.c_long(out.shape[1]),
        ctypes.c_float(limit),
    )
    return out


def swiglu_backward(gate_up: Tensor, grad: Tensor, limit: float) -> Tensor:
    if library() is None:
        gate, up = gate_up.chunk(2, -1)
        low, share = gate.clamp(max=limit), gate.clamp(max=limit).sigmoid()
        slope = share * (1 + low * (1 - share)) * (gate <= limit)
        grad_gate = grad * up.clamp(-limit, limit) * slope
        grad_up = grad * low * share * (up.abs() <= limit)
        return torch.cat([grad_gate, grad_up], -1)
    out, grad = torch.empty_like(gate_up), grad.contiguous()
    _symbol("swiglu_backward")(
        _pointer(gate_up),
        _pointer(grad),
        _pointer(out),
        ctypes.c_long(grad.shape[0]),
        ctypes.c_long(grad.shape[1]),
        ctypes.c_float(limit),
    )
    return out
