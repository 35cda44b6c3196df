# SPDX-License-Identifier: Apache-2.0
# Copyright the npu-custom-ops authors
"""Stands in for Gluon's language: kernels run on CPU tensors, a program at a time, or as many as
`At` says.

Blind to layouts of registers and missing barriers; sees wrong numbers, addresses outside of a
tensor, two stores to one address, shared memory read before it was written or its copy waited for,
or written before what leaves it was.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import math
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import triton
from custom.cuda_ops.common import gluon_names
from custom.cuda_ops.common.hopper import tma


class Block(torch.Tensor):
    """A value, or shared memory.  uint32 is int64 that stays in its range."""

    __iadd__ = torch.Tensor.__add__  # a value never changes
    __isub__ = torch.Tensor.__sub__
    __iand__ = torch.Tensor.__and__
    __ior__ = torch.Tensor.__or__
    numel = property(lambda self: self.nelement())
    type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if dtype == torch.uint32:
            return self.long() & 0xFFFFFFFF if bitcast else self.double().clamp(0, 2**32 - 1).long()
        if not bitcast:
            return super().to(dtype)
        if self.is_floating_point() or self.itemsize == dtype.itemsize:
            return self.view(dtype)
        return super().to(torch.int32).view(dtype)  # an int64 wraps

    def slice(self, start, length, dim=0):
        return self.narrow(dim, start, length)

    def index(self, i):
        return self[i]

    def load(self, layout=None):
        return self.clone()

    def store(self, value):
        assert value.dtype == self.dtype and value.shape == self.shape
        self.copy_(value)

    def reinterpret(self, dtype, shape, layout):
        return self.view(dtype).view(shape)


def _block(x):
    return torch.as_tensor(getattr(x, "value", x)).as_subclass(Block)


def _unknown(dtype, shape, layout=None):
    value = float("nan") if dtype.is_floating_point else 2**30
    return _block(torch.full([int(n) for n in shape], value, dtype=dtype))


@dataclass(frozen=True)
class Stripes:
    """NVMMASharedLayout of `rank` dimensions: stripes as wide as the swizzle, one behind the other.
    The swizzle itself is left out: all that looks at a memory has the same."""

    swizzle_byte_width: int
    element_bitwidth: int
    rank: int = 2
    transposed: bool = False

    @classmethod
    def get_default_for(cls, shape, dtype):
        bits = 8 * dtype.itemsize if isinstance(dtype, torch.dtype) else dtype.primitive_bitwidth
        return cls(min(128, shape[-1] * bits // 8), bits, len(shape))

    def places(self, shape):
        outer, inner = list(shape[: -self.rank]), list(shape[-self.rank :])
        *rows, wide = inner[::-1] if self.transposed else inner
        stripe = min(wide, self.swizzle_byte_width * 8 // self.element_bitwidth or wide)
        at = torch.arange(math.prod(shape)).view(*outer, wide // stripe, -1, stripe)
        at = at.transpose(-3, -2).reshape(*outer, *rows, wide)
        return at.mT if self.transposed else at


def _in_rows(shape):
    return torch.arange(math.prod(shape)).view(*shape)


class Shared:
    """Shared memory in stripes, and where each number of a block lies in it."""

    def __init__(self, memory, at, layout):
        self.memory, self.at, self.layout = memory, at, layout
        self.dtype, self.shape = memory.dtype, at.shape
        self.nbytes = math.prod(at.shape) * memory.element_size()

    def index(self, i):
        return Shared(self.memory, self.at[int(i)], self.layout)

    def slice(self, start, length, dim=0):
        return Shared(self.memory, self.at.narrow(dim, start, length), self.layout)

    def permute(self, order):
        return Shared(self.memory, self.at.permute(order), self.layout)

    def reinterpret(self, dtype, shape, layout):
        first, size = int(self.at.min()), self.at.numel()
        assert size == int(self.at.max()) + 1 - first
        memory, old = self.memory.view(dtype), self.dtype.itemsize
        wanted = math.prod(shape) * dtype.itemsize
        assert wanted == size * old or (gluon_names.REINTERPRETS_PARTS and wanted < size * old)
        at = layout.places(shape) if isinstance(layout, Stripes) else _in_rows(shape)
        return Shared(memory, at + first * old // dtype.itemsize, layout)

    def load(self, layout=None):
        return self.memory[self.at]

    def store(self, value):
        assert value.dtype == self.dtype and value.shape == self.shape
        self.memory[self.at] = value


def _allocate(dtype, shape, layout):
    if isinstance(layout, Stripes):
        return Shared(_unknown(dtype, [math.prod(shape)]), layout.places(shape), layout)
    return _unknown(dtype, shape)


class Pointer:
    """Addresses: elements of the storage of a tensor."""

    def __init__(self, tensor, at):
        self.tensor, self.at, self.dtype = tensor, at, SimpleNamespace(element_ty=tensor.dtype)

    @classmethod
    def of(cls, x):
        if x is None:
            return None
        if isinstance(x, tuple):
            made = map(cls.of, x)
            return type(x)(*made) if hasattr(x, "_fields") else tuple(made)
        return cls(x, _block(x.storage_offset())) if torch.is_tensor(x) else _block(x)

    def __add__(self, offset):
        return Pointer(self.tensor, self.at + offset)

    def __sub__(self, offset):
        return self + -offset

    def __getitem__(self, key):
        return Pointer(self.tensor, self.at[key])

    def to_two_bytes(self):
        assert self.tensor.element_size() == 4
        return Pointer(self.tensor.view(torch.bfloat16), self.at * 2)

    __radd__ = __add__

    def memory(self, mask):
        """(the storage, addresses, which of them count), the latter of one shape."""
        x = self.tensor
        at, mask = torch.broadcast_tensors(self.at, _block(True if mask is None else mask))
        first, size = x.storage_offset(), x.untyped_storage().nbytes() // x.element_size()
        last = first + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        assert (((at >= first) & (at <= last)) | ~mask).all(), "an address outside of the tensor"
        return x.as_strided((size,), (1,), 0), at, mask


def _load(pointer, mask=None, other=None):
    memory, at, mask = pointer.memory(mask)
    found = _unknown(memory.dtype, at.shape)
    if other is not None:
        found.fill_(other)
    found[mask] = memory[at[mask]]
    return found


def _store(pointer, value, mask=None):
    memory, at, mask = pointer.memory(mask)
    assert len(at[mask].unique()) == mask.sum(), "two stores to one address"
    memory[at[mask]] = _block(value).to(memory.dtype).expand(at.shape)[mask]


class Copies:
    """cp.async: a group arrives when it is waited for, zeros where masked."""

    def __init__(self):
        self.groups = [[]]

    def cp_async(self, tile, pointer, mask=None):
        tile.store(_unknown(tile.dtype, tile.shape))
        self.groups[-1].append((tile, pointer, mask))

    def commit_group(self):
        self.groups.append([])

    def wait_group(self, left):
        while len(self.groups) > left + 1:
            _arrive(self.groups.pop(0))

    def mbarrier_arrive(self, bar, increment_count):
        """Each of 128 threads does, when what it asked for is there."""
        assert not increment_count
        Program.now.get().barriers.late(bar, self.groups.pop(), 128)
        self.commit_group()


def _arrive(group):
    for tile, pointer, mask in group:
        tile.store(_load(pointer, mask, 0))


class Barriers:
    """mbarrier and TMA: what is copied arrives when its barrier is waited for, zeros where a block
    leaves its tensor; and leaves shared memory when that is waited for.  A wait that nothing would
    end is an error; under warp_specialize, whose parts are threads here, one that nothing ends."""

    MBarrierLayout = staticmethod(lambda: None)

    def __init__(self):
        self.of, self.changed, self.threads, self.failed = {}, threading.Condition(), 0, False
        self.stores = defaultdict(list)  # of each thread its own

    def init(self, bar, count):
        self.of[bar.data_ptr()] = SimpleNamespace(
            phase=0, count=count, arrived=0, announced=0, copies=[], late=[]
        )

    def expect(self, bar, size, pred=True):
        if pred:
            with self.changed:
                self.of[bar.data_ptr()].announced += size
            self.arrive(bar)

    def arrive(self, bar, count=1, pred=True):
        with self.changed:
            self.of[bar.data_ptr()].arrived += count if pred else 0
            self.changed.notify_all()

    def late(self, bar, group, count):
        with self.changed:
            state = self.of[bar.data_ptr()]
            state.late += group
            state.arrived += count
            self.changed.notify_all()

    def tma_load(self, block, at, bar, tile, pred=True):
        if pred:
            with self.changed:
                assert list(tile.shape) == list(block.block_shape)
                tile.store(_unknown(tile.dtype, tile.shape))
                self.of[bar.data_ptr()].copies.append((block, [int(i) for i in at], tile))
                self.changed.notify_all()

    def wait(self, bar, phase):
        state = self.of[bar.data_ptr()]

        def over():
            size = sum(tile.nbytes for *_, tile in state.copies)
            here = state.arrived == state.count and size == state.announced
            return self.failed or state.phase != phase or here

        with self.changed:
            assert over() or (self.threads and self.changed.wait_for(over, 60)), "waits forever"
            assert not self.failed
            if state.phase != phase:
                return  # over long ago
            for block, at, tile in state.copies:
                part = _part(block, at)
                whole = torch.zeros(tile.shape, dtype=tile.dtype)
                whole[tuple(slice(n) for n in part.shape)] = part
                tile.store(whole)
            _arrive(state.late)
            state.phase, state.arrived, state.announced = 1 - phase, 0, 0
            state.copies, state.late = [], []

    def forget(self, bars):
        with self.changed:
            for i in range(bars.shape[0]):
                assert not self.of.pop(bars.index(i).data_ptr()).copies, "nobody waited for a copy"

    def tma_store(self, block, at, tile):
        self.stores[threading.get_ident()].append((_part(block, [int(i) for i in at]), tile))

    def store_wait(self, left):
        stores = self.stores[threading.get_ident()]
        while len(stores) > left:
            part, tile = stores.pop(0)
            part.copy_(tile.load()[tuple(slice(n) for n in part.shape)])

    def warp_specialize(self, parts, warps, registers):
        def run(kernel, arguments):
            try:
                kernel(*arguments)
            except BaseException:
                with self.changed:
                    self.failed = True
                    self.changed.notify_all()
                raise

        self.threads, self.failed = len(parts), False
        with ThreadPoolExecutor(self.threads) as pool:
            for done in [pool.submit(_here().run, run, *part) for part in parts]:
                done.result()
        self.threads = 0

    def all_done(self):
        left = [x for x in self.of.values() if x.copies or x.late or x.announced]
        return not left and not any(self.stores.values())


def _part(block, at):
    """What there is of the tensor in the block at `at`; addresses wrap as the hardware's do."""
    inside = zip(at, block.block_shape, block.shape, strict=True)
    sizes = [max(0, min(n, end - i)) for i, n, end in inside]
    first = sum(i * step for i, step in zip(at, block.strides, strict=True)) % 2**64
    steps = [step if n > 1 else 0 for n, step in zip(sizes, block.strides, strict=True)]
    if 0 in sizes:
        return block.base.new_empty(sizes)
    return block.base.as_strided(sizes, steps, block.base.storage_offset() + first)


_here = contextvars.copy_context


class Program:
    """What a program has of its own, wherever its parts run; the `number`-th to begin."""

    now = contextvars.ContextVar("program")

    def __init__(self, number, place):
        self.number, self.place = number, place
        self.copies, self.barriers = Copies(), Barriers()


class Own:
    """Copies or barriers of the program that asks."""

    def __init__(self, kind):
        self.kind = kind

    def __getattr__(self, name):
        if name == "MBarrierLayout":
            return Barriers.MBarrierLayout
        return lambda *x, **named: getattr(getattr(Program.now.get(), self.kind), name)(*x, **named)


@dataclass
class At:
    """How many programs run at a time, and in which order they begin."""

    once: int = 1
    order: object = list


def _atomic_add(pointer, value, mask=None, sem=None, scope=None):
    memory, at, mask = pointer.memory(mask)
    with _ATOMIC:
        before = memory[at].clone()
        added = _block(value).to(memory.dtype).expand(at.shape)[mask]
        memory.index_put_((at[mask],), added, accumulate=True)
    return _block(before)


_ATOMIC = threading.Lock()


def _described(base, shape, strides, block_shape, layout):
    return SimpleNamespace(
        base=base,
        dtype=base.dtype,
        shape=shape,
        strides=strides,
        block_shape=block_shape,
        layout=layout,
    )


def _scan(x, axis, combine, reverse=False):
    parts = [*(x.flip(axis) if reverse else x).unbind(axis)]
    for i in range(1, len(parts)):
        parts[i] = combine(parts[i - 1], parts[i])
    return torch.stack(parts[::-1] if reverse else parts, axis)


def _wgmma(a, b, acc, use_acc=True, is_async=False):
    return a.load().float() @ b.load().float() + (acc if use_acc else 0)


def _finished(num_outstanding, deps):
    return deps[0] if len(deps) == 1 else deps


def _range(*ends):
    """Of a kernel's numbers, numbers of a kernel."""
    found = range(*map(int, ends))
    return (_block(i).int() for i in found) if any(map(torch.is_tensor, ends)) else found


def _moved(assembly, constraints, arguments, dtype, is_pure, pack):
    assert assembly.startswith("mov.b32 $0, $1;")
    return _block(arguments[0])


class _Number(float):
    """Of launchers, which ask for its value, and of kernels, which do not."""

    value = property(float)


class _Whole(int):
    value = property(int)


class Kernel:
    """kernel[grid](arguments) runs every program; kernel(arguments) is a call in one."""

    def __init__(self, kernel, language):
        self.kernel, self.language = kernel, language

    def __call__(self, *arguments, **named):
        return self.kernel.fn(*arguments, **named)

    def __getitem__(self, grid):
        def launch(*arguments, **named):
            named |= dict(zip(self.kernel.arg_names, arguments, strict=False))
            constant = {p.name: p.is_constexpr for p in self.kernel.params}
            values = {
                n: named[n]
                if constant[n] or hasattr(named[n], "block_shape")
                else Pointer.of(named[n])
                for n in constant
            }
            self.language.num_programs = grid.__getitem__

            def run(number, place):
                program = Program(number, [_block(i).int() for i in place])
                Program.now.set(program)
                self(**values)
                assert program.copies.groups == [[]], "copies on their way"
                assert program.barriers.all_done(), "copies on their way"

            places = self.language.at.order(itertools.product(*map(range, grid)))
            with ThreadPoolExecutor(self.language.at.once) as pool:
                begun = [pool.submit(_here().run, run, *each) for each in enumerate(places)]
                for done in begun:
                    done.result()

        return launch


def stand_in(monkeypatch, *modules, at=None):
    """The kernels of these modules, and what of theirs they call, run here."""
    gl = SimpleNamespace(
        copies=Own("copies"),
        barriers=Own("barriers"),
        at=at or At(),
        load=_load,
        store=_store,
        float8e4nv=torch.float8_e4m3fn,
        uint8=torch.uint8,
        int32=torch.int32,
        int64=torch.int64,
        uint32=torch.uint32,
        float32=torch.float32,
        float16=torch.float16,
        bfloat16=torch.bfloat16,
        constexpr=lambda x: x,
        static_range=range,
        num_warps=lambda: 8,
        reshape=torch.reshape,
        permute=torch.permute,
        broadcast=torch.broadcast_tensors,
        min=torch.amin,
        exp=torch.exp,
        join=lambda a, b: torch.stack((a, b), -1),
        split=lambda x: x.unbind(-1),
        log=torch.log,
        sqrt=torch.sqrt,
        rsqrt=torch.rsqrt,
        associative_scan=_scan,
        allocate_shared_memory=_allocate,
        convert_layout=lambda x, layout: x,
        where=lambda condition, a, b: torch.where(_block(condition), _block(a), _block(b)),
        full=lambda shape, value, dtype, layout=None: _unknown(dtype, shape).copy_(_block(value)),
        log2=torch.log2,
        atomic_add=_atomic_add,
        arange=lambda lo, hi, layout=None: _block(torch.arange(lo, hi, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout=None: _unknown(dtype, shape).zero_(),
        minimum=lambda a, b: torch.minimum(_block(a), _block(b)),
        # a GPU's maximum is the number beside a NaN, unless it is told otherwise
        maximum=lambda a, b, propagate_nan=None: (torch.maximum if propagate_nan else torch.fmax)(
            _block(a), _block(b)
        ),
        PropagateNan=SimpleNamespace(ALL=True),
        max=torch.amax,
        sum=lambda x, axis: x.sum(axis, dtype=x.dtype),
        exp2=torch.exp2,
        abs=torch.abs,
        gather=lambda x, at, axis: torch.gather(x, axis, at.long()),
        reduce=lambda x, axis, combine: functools.reduce(combine, x.unbind(axis)),
        inline_asm_elementwise=_moved,
    )
    gl.program_id = lambda axis: Program.now.get().place[axis]
    gl.warp_specialize = gl.barriers.warp_specialize
    gl.NVMMASharedLayout = Stripes
    registers = ("Blocked", "Slice", "DotOperand", "NVMMADistributed", "DistributedLinear")
    for name in (*registers, "SwizzledShared"):
        setattr(gl, f"{name}Layout", lambda *_, **named: None)
    instead = dict(gl=gl, tl=gl, async_copy=gl.copies)
    instead["mma_v2"] = lambda a, b, acc: acc + a.float() @ b.float()
    instead |= dict(mbarrier=gl.barriers, tma=gl.barriers, warpgroup_mma=_wgmma)
    instead |= dict(tma_load=gl.barriers.tma_load, tma_store=gl.barriers.tma_store)
    instead |= dict(cp_async=gl.copies.cp_async, reinterpret=lambda x, *how: x.reinterpret(*how))
    instead["fetch"] = lambda *_: None
    instead["forget"] = gl.barriers.forget
    instead["TensorDescriptor"] = _described
    instead["DTYPES"] = {dtype: dtype for dtype in tma.DTYPES}
    for name in ("_layout", "_layout_of"):  # none that is kept for the compiler
        instead[name] = getattr(tma, name).__wrapped__
    instead["warpgroup_mma_wait"] = _finished
    for name in ("barrier", "gdc_wait", "gdc_launch_dependents", "fence_async_shared"):
        instead[name] = lambda: None
    for module in modules:
        monkeypatch.setattr(module, "range", _range, raising=False)
        for name, x in list(vars(module).items()):
            if isinstance(x, triton.runtime.JITFunction) or name in instead:
                monkeypatch.setattr(module, name, instead.get(name) or Kernel(x, gl))
            elif isinstance(x, triton.language.constexpr):
                known = {float: _Number, int: _Whole}.get(type(x.value), lambda value: value)
                monkeypatch.setattr(module, name, known(x.value))
