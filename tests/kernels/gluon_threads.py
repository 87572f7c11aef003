"""Gluon kernels without a GPU: programs and their partitions as threads, memory as torch tensors.

For what a compiler cannot show: that barriers are passed in the right turn, that a stage is not overwritten while it
is read, that every program meets every other. Copies of the tensor memory accelerator are done later, by a thread of
their own and in a random order; asynchronous products when they are waited for; asynchronous copies at once or when
they are waited for, by chance. Layouts do nothing, and a program's warps are one thread: orders of sums and bits are
not those of the device.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton.language as tl

from unisono.kernels.gemm.nvfp4 import E2M1

LIMIT = 20.0
"""Seconds after which a wait has failed."""

_here = threading.local()


class Stuck(RuntimeError):
    """A barrier that nobody passes."""


class Pointer:
    """Addresses in a tensor's memory."""

    def __init__(self, tensor: torch.Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at
        self.dtype = types.SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, by: Any) -> Pointer:
        return Pointer(self.tensor, self.at + by)


def either(which: Any, a: Any, b: Any) -> Any:
    """``where``, of addresses in two tensors too."""
    if isinstance(a, Pointer):
        at = torch.where(which, a.at, b.at + len(a.tensor))
        return Pointer(torch.cat((a.tensor, b.tensor)), at)
    return torch.where(which if isinstance(which, torch.Tensor) else torch.tensor(which), a, b)


def load(pointer: Pointer, mask: Any = None, other: float = 0.0, **_: Any) -> torch.Tensor:
    if mask is None:
        return pointer.tensor[pointer.at]
    mask, at = torch.as_tensor(mask), torch.as_tensor(pointer.at)
    memory = pointer.tensor if len(pointer.tensor) else pointer.tensor.new_zeros(1)
    value = memory[torch.where(mask, at, 0)]
    return torch.where(mask, value, torch.full_like(value, other))


class Shared:
    """A tensor in a program's shared memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.dtype = tensor, tensor.dtype

    def index(self, at: Any) -> Any:
        return self.tensor[int(at)] if self.tensor.dtype is object else Shared(self.tensor[int(at)])

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.tensor[start : start + length])

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.tensor.permute(order))

    def load(self, layout: Any) -> torch.Tensor:
        return self.tensor.clone()

    def store(self, value: torch.Tensor) -> None:
        self.tensor.copy_(value)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        return Shared(self.tensor.view(dtype).view(shape))


class Barrier:
    """An mbarrier: arrivals and bytes of the present phase; waits for a parity."""

    def __init__(self) -> None:
        self.changed, self.count, self.pending, self.bytes, self.phase = threading.Condition(), 0, 0, 0, 0

    def step(self, arrivals: int = 0, bytes: int = 0) -> None:
        with self.changed:
            self.pending -= arrivals
            self.bytes += bytes
            if self.pending < 0:
                raise Stuck("more arrivals than a phase has")
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            if not self.changed.wait_for(lambda: self.phase & 1 != int(parity), LIMIT):
                raise Stuck(f"nobody completes phase {self.phase}")


class Barriers:
    """What is allocated for mbarriers."""

    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.each[int(at)]


class Descriptor:
    """A tensor descriptor: boxes of a tensor [rows, columns]."""

    def __init__(self, tensor: torch.Tensor, box: list[int]) -> None:
        self.tensor, self.block_shape, self.dtype, self.layout = tensor, box, tensor.dtype, None


class Copies:
    """The tensor memory accelerator: copies that are done some time later."""

    def __init__(self, seed: int, errors: list[BaseException]) -> None:
        self.errors = errors
        self.random, self.waiting, self.changed, self.open = random.Random(seed), [], threading.Condition(), True
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def start(self, desc: Descriptor, at: list[Any], barrier: Barrier, place: Shared) -> None:
        row, column = (int(each) for each in at)

        def copy() -> None:
            rows, columns = desc.block_shape
            box = desc.tensor[row : row + rows, column : column + columns]
            assert place.tensor.shape == (rows, columns), (place.tensor.shape, desc.block_shape)
            place.tensor.zero_()
            place.tensor[: box.shape[0], : box.shape[1]] = box
            barrier.step(bytes=-rows * columns * desc.tensor.element_size())

        self.later(copy)

    def later(self, copy: Callable[[], None]) -> None:
        """Do this some time, after what was asked for before or ahead of it."""
        with self.changed:
            self.waiting.append(copy)
            self.changed.notify()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or not self.open)
                if not self.waiting:
                    return
                copy = self.waiting.pop(self.random.randrange(len(self.waiting)))
            try:
                copy()
            except (Stuck, AssertionError) as error:
                self.errors.append(error)

    def close(self) -> None:
        with self.changed:
            self.open = False
            self.changed.notify()


class GroupedCopies:
    """Copies in groups that a program waits for: each is done at once or when it has to be, by chance."""

    def __init__(self, seed: int, copies: Copies) -> None:
        self.random, self.copies = random.Random(seed), copies

    def async_copy_global_to_shared(self, place: Shared, pointer: Pointer, mask: Any = None) -> None:
        def copy() -> None:
            place.tensor.copy_(load(pointer, mask))

        if self.random.random() < 0.5:
            copy()
        else:
            _here.__dict__.setdefault("open", []).append(copy)

    def mbarrier_arrive(self, barrier: Barrier, increment_count: bool) -> None:
        """All threads of a warp group arrive once their copies are done, which is some time later."""
        open_copies = _here.__dict__.pop("open", [])

        def finish() -> None:
            for copy in open_copies:
                copy()
            barrier.step(arrivals=128)

        self.copies.later(finish)

    def commit_group(self) -> None:
        _here.__dict__.setdefault("groups", []).append(_here.__dict__.pop("open", []))

    def wait_group(self, outstanding: int) -> None:
        while len(_here.groups) > outstanding:
            for copy in _here.groups.pop(0):
                copy()


def multiplied(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """acc + a b, one product after the other, as the tests' interpreter adds them up."""
    for k in range(a.shape[-1]):
        acc = acc + a[..., k, None].float() * b[..., k, None, :].float()
    return acc


def four_scales(word: torch.Tensor, multiplier: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """``packed_decoding.e4m3_products``, as numbers instead of their bits."""
    scales = word.contiguous().view(torch.float8_e4m3fn).view(*word.shape, 4).float() * multiplier[..., None]
    return list(scales.to(dtype).float().unbind(-1))


def two_weights(byte: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """``packed_decoding.e2m1_products``; in bf16 the scale has a factor."""
    byte, factor = byte & 255, 2.0**-126 if dtype is torch.bfloat16 else 1.0
    return [(torch.tensor(E2M1)[code] * factor * scale).to(dtype) for code in (byte & 15, byte >> 4)]


class Product:
    """A sum with asynchronous products: they are done, in order, when they are waited for."""

    def __init__(self, acc: torch.Tensor) -> None:
        self.acc, self.waiting = acc, 0

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.acc, self.waiting = self.acc + a.float() @ b.float(), self.waiting - 1


class Machine:
    """Runs the programs of one launch, whose functions are in these modules. programs: their number, or a grid."""

    def __init__(self, modules: Sequence[types.ModuleType], programs: int | Sequence[int], seed: int = 0) -> None:
        self.grid = [programs] if isinstance(programs, int) else list(programs)
        self.modules, self.programs, self.lock = modules, math.prod(self.grid), threading.Lock()
        self.errors: list[BaseException] = []
        self.copies = Copies(seed, self.errors)
        self.grouped = GroupedCopies(seed, self.copies)

    def run(self, kernel: Any, **arguments: Any) -> None:
        """Launch the kernel; raises what a program raised."""
        given = {
            name: Pointer(value) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
        }
        given = {n: Pointer(v.tensor.view(-1)) if isinstance(v, Pointer) else v for n, v in given.items()}
        with self._patched():
            threads = [self._thread(kernel.fn, given, number) for number in range(self.programs)]
            for thread in threads:
                thread.join()
        self.copies.close()
        if self.errors:
            raise self.errors[0]

    def _thread(self, function: Callable, arguments: Any, program: int) -> threading.Thread:
        def body() -> None:
            _here.program = program
            try:
                function(**arguments) if isinstance(arguments, dict) else function(*arguments)
            except BaseException as error:
                self.errors.append(error)

        thread = threading.Thread(target=body, daemon=True)
        thread.start()
        return thread

    def _specialize(self, parts: list[tuple[Any, tuple]], *_: Any) -> None:
        threads = [self._thread(function, arguments, _here.program) for function, arguments in parts]
        for thread in threads:
            thread.join()

    def _atomic_add(self, pointer: Pointer, by: int, **_: Any) -> int:
        if self.errors:
            raise Stuck("another program failed")
        with self.lock:
            old = int(pointer.tensor[int(pointer.at)])
            pointer.tensor[int(pointer.at)] += by
        if by == 0:
            threading.Event().wait(0.0005)  # a poll
        return old

    @contextlib.contextmanager
    def _patched(self) -> Iterator[None]:
        """The modules with these classes in place of Gluon's, and with functions in place of kernels."""
        fakes, before = self._gluon(), [dict(vars(module)) for module in self.modules]
        for module, names in zip(self.modules, before, strict=True):
            given = {n: v.value for n, v in names.items() if isinstance(v, tl.constexpr)}
            given |= {n: v.fn for n, v in names.items() if hasattr(v, "fn") and hasattr(v, "arg_names")} | fakes
            vars(module).update({name: fake for name, fake in given.items() if name in names})
        try:
            yield
        finally:
            for module, names in zip(self.modules, before, strict=True):
                vars(module).update(names)

    def _gluon(self) -> dict[str, Any]:
        def expect(barrier: Barrier, bytes: int) -> None:
            barrier.step(bytes=int(bytes))
            barrier.step(arrivals=1)

        def init(barrier: Barrier, count: int) -> None:
            barrier.count = barrier.pending = count

        def multiply(a: Shared, b: Shared, acc: Product | torch.Tensor, **_: Any) -> Product:
            product = acc if isinstance(acc, Product) else Product(acc)
            product.waiting += 1
            left = a.tensor if isinstance(a, Shared) else a
            _here.__dict__.setdefault("products", []).append((product, left, b.tensor))
            return product

        def finish(outstanding: int, products: list[Product]) -> Any:
            started = _here.__dict__.setdefault("products", [])
            while len(started) > outstanding:
                product, a, b = started.pop(0)
                product.add(a, b)
            plain = lambda each: not isinstance(each, Product) or each.waiting  # noqa: E731
            done = tuple(each if plain(each) else each.acc for each in products)
            return done if len(done) > 1 else done[0]

        return {
            "gl": self._language(),
            "mbarrier": types.SimpleNamespace(
                init=init, expect=expect, arrive=lambda barrier, pred=True: barrier.step(arrivals=1) if pred else None,
                wait=lambda barrier, parity, pred=True: barrier.wait(parity) if pred else None,
                MBarrierLayout=lambda: "barrier",
            ),
            "async_copy": self.grouped, "mma_v2": multiplied,
            "tma": types.SimpleNamespace(async_copy_global_to_shared=self.copies.start),
            "warpgroup_mma": multiply, "warpgroup_mma_init": Product, "warpgroup_mma_wait": finish,
            "fence_async_shared": lambda: None, "block_barrier": lambda: None,
            "HALF": 32, "WIDTH": 128, "bits_as": lambda value, dtype: value.view(dtype),
            "masked": lambda bits, mask, base: ((bits & mask) | base).view(torch.float32),
            "product": torch.mul,
            "e4m3_products": four_scales,
            "e2m1_products": two_weights,
            "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None,
            "scale_for": lambda largest: largest.clamp(min=1e-10) / 448.0,
            "scales_of": lambda value: value.abs().amax(1).clamp(min=1e-10) / 448.0,
            "scaled_by": lambda value, scale: (value / scale[:, None]).clamp(-448.0, 448.0),
        }  # fmt: skip

    def _language(self) -> types.SimpleNamespace:
        def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
            if layout == "barrier":
                return Barriers(shape[0]) if len(shape) == 2 else Barriers(1).index(0)
            return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else 85, dtype=dtype))

        def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
            value, at = torch.as_tensor(value), torch.as_tensor(pointer.at)
            mask = torch.as_tensor(mask).expand(value.shape)
            pointer.tensor[at.expand(value.shape)[mask]] = value[mask].to(pointer.tensor.dtype)

        nothing = lambda *_, **__: None  # noqa: E731
        return types.SimpleNamespace(
            constexpr=Any, float8e4nv=torch.float8_e4m3fn, int32=torch.int32, int64=torch.int64, float32=torch.float32,
            bfloat16=torch.bfloat16, int16=torch.int16,
            NVMMADistributedLayout=nothing, BlockedLayout=nothing, SliceLayout=nothing, DotOperandLayout=nothing,
            SwizzledSharedLayout=nothing, NVMMASharedLayout=nothing, DistributedLinearLayout=nothing,
            int8=torch.int8, uint8=torch.uint8, reshape=torch.reshape, permute=torch.permute, full_like=torch.full_like,
            join=lambda a, b: torch.stack((a, b), -1),
            program_id=lambda axis: Number(_here.program // math.prod(self.grid[:axis]) % self.grid[axis]),
            num_programs=lambda _: Number(self.programs), broadcast=torch.broadcast_tensors,
            static_range=range, num_warps=lambda: 4,
            to_tensor=lambda value: Number(value) if type(value) is int else value,
            minimum=lambda a, b: a.clamp(max=b) if isinstance(a, torch.Tensor) else min(a, b),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            exp2=torch.exp2, expand_dims=torch.unsqueeze,
            arange=lambda start, stop, layout=None: torch.arange(start, stop),
            convert_layout=lambda value, layout: value, split=lambda value: (value[..., 0], value[..., 1]),
            allocate_shared_memory=allocate, load=load, store=store, atomic_add=self._atomic_add,
            inline_asm_elementwise=nothing, warp_specialize=self._specialize,
            rsqrt=torch.rsqrt, exp=torch.exp, sum=lambda value, axis: value.sum(axis), abs=torch.abs,
            max=lambda value, axis: value.amax(axis), min=lambda value, axis: value.amin(axis),
            fma=lambda a, b, c: a * b + c,
            maximum=lambda a, b: a.clamp(min=b) if isinstance(a, torch.Tensor) else Number(max(a, b)),
            where=either, zeros_like=torch.zeros_like,
            static_assert=lambda *_: None,
        )  # fmt: skip


class Number(int):
    """A scalar of the language."""

    def to(self, _: Any) -> Number:
        return self


def _closed(name: str) -> Callable[..., Any]:
    """An operation of integers whose result has their kind."""
    plain = getattr(int, name)

    def operation(self: Number, other: Any) -> Any:
        result = plain(self, other)
        return result if result is NotImplemented else Number(result)

    return operation


for _name in ("add", "sub", "mul", "floordiv", "mod", "and"):
    for _side in ("", "r"):
        setattr(Number, f"__{_side}{_name}__", _closed(f"__{_side}{_name}__"))
