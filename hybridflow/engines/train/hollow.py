"""``Hollow``: a pass through a model that allocates nothing and still meets every collective, with its full size.

Ranks of tensor, sequence and pipeline parallelism exchange activations: a rank that ran out of memory owes its peers
tensors of the sizes of *this* micro-batch, not of a smaller one. Inside ``Hollow`` the model's own code runs on it, but
an operation on floating-point numbers computes only the shape of its result, which is one number seen as a whole tensor
(strides 0). Integers (token ids, positions, segments) are computed as ever, since they decide shapes. At a collective a
tensor of zeros is made for as long as it takes.

    hidden = mlp(hidden)          shapes only        hidden: [1, N, D] over one number
    all_gather(hidden, group)     zeros [1, N, D] made, exchanged, freed

What comes out is void, gradients included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_PAIRED = ("c10d::send", "c10d::recv_")
"""Of two ranks: they count them themselves (pipeline.py)."""
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")


class Hollow(TorchDispatchMode):
    """Inside, operations compute shapes and collectives exchange zeros.

    Args:
        joined: by name of a group, how many of its next collectives are left out, having been joined before.
    """

    def __init__(self, joined: Mapping[str, int]) -> None:
        super().__init__()
        self._left = dict(joined)
        self._sent: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Operations of subclasses (DTensor) come back here as those of the tensors that they hold."""
        kwargs = kwargs or {}
        if FakeTensor in types or torch.device(kwargs.get("device") or "cpu").type == "meta":
            return func(*args, **kwargs)  # DTensor finds out how a result is cut, and remembers it
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace in _COLLECTIVES:
            return self._communicate(func, args, kwargs)
        floats = [tensor for tensor in tensors if tensor.is_floating_point()]
        if tensors and (not floats or floats[0].device.type == "meta"):
            return func(*args, **kwargs)
        schema = func._schema
        written = [argument for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
        if written:
            return _written(schema, written, args, kwargs)
        if all(value.alias_info for value in schema.returns) and not any(map(is_hollow, tensors)):
            return func(*args, **kwargs)  # a view of a weight
        if not any("Tensor" in str(value.type) for value in schema.returns):
            return func(*args, **kwargs)
        device = kwargs.get("device") or (tensors[0].device if tensors else "cpu")
        return _hollow(_on_meta(func, args, kwargs), torch.device(device))

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.name.endswith("wait_tensor"):
            return args[0]
        if "wrap_tensor" in func._schema.name:  # marks what is still to be waited for: no exchange
            return func(*args, **kwargs)
        if func._schema.name not in _PAIRED and self._is_joined(func, args):
            return self._void(func, args, kwargs)
        real = tree_map(lambda leaf: torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
                        if isinstance(leaf, Tensor) and is_hollow(leaf) else leaf, args)  # fmt: skip
        found = func(*real, **kwargs)
        if func.namespace != "c10d":
            return tree_map(lambda leaf: _thin(torch.ops._c10d_functional.wait_tensor(leaf)), found)
        work = found[-1] if isinstance(found, (tuple, list)) else found
        if func._schema.name == "c10d::send":  # who waits for it does so after other exchanges
            self._sent.append(real)
            return work
        dist.distributed_c10d.Work.unbox(work).wait()
        return self._void(func, args, kwargs)

    def _is_joined(self, func: Any, args: Sequence[Any]) -> bool:
        name = group_name(func, args)
        if self._left.get(name, 0) == 0:
            return False
        self._left[name] -= 1
        return True

    def _void(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a collective without it."""
        if func.namespace != "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            return _hollow(_on_meta(func, args, kwargs), tensors[0].device)
        return done(func, args)


def done(func: Any, args: Sequence[Any]) -> Any:
    """What an operation of torch.distributed that writes its first argument returns once it is over."""
    work = dist.distributed_c10d.Work.boxed(FakeWork())
    return (args[0], work) if len(func._schema.returns) == 2 else work


def group_name(func: Any, args: Sequence[Any]) -> str:
    """The group in which an operation communicates."""
    for at, argument in enumerate(func._schema.arguments):
        if "ProcessGroup" in str(argument.type):
            return dist.ProcessGroup.unbox(args[at]).group_name
        if argument.name == "group_name":
            return args[at]
    raise AssertionError(f"{func} names no group")


def is_hollow(tensor: Tensor) -> bool:
    """Whether all elements of ``tensor`` are one number."""
    places = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 1 and all(stride == 0 or size == 1 for size, stride in places)


def _thin(tensor: Tensor) -> Tensor:
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def _hollow(found: Any, device: torch.device) -> Any:
    def hollow(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.zeros((), dtype=leaf.dtype, device=device).expand(leaf.shape)

    return tree_map(hollow, found)


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    def meta(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    given = {name: tree_map(meta, value) for name, value in kwargs.items()}
    if any(argument.name == "device" for argument in func._schema.arguments):
        given["device"] = torch.device("meta")
    given.pop("pin_memory", None)
    return func(*tree_map(meta, args), **given)


def _written(schema: Any, written: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation returns that writes some of its arguments: these, as they are."""
    names = [argument.name for argument in schema.arguments]
    given = [kwargs[held.name] if held.name in kwargs else args[names.index(held.name)] for held in written]
    if not schema.returns:
        return None
    return given[0] if len(schema.returns) == 1 else tuple(given)
