"""The table of what lazy mode replaces in torch, and by what. Checked on torch 2.13.

A name that a version of torch lacks is left out.

`tensor.device` is not in it: a tensor says that it is on "tarry". `torch.device("cuda")` stays what it is, and is
replaced where it is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tarry.lazy import functions as f
from tarry.lazy import host
from tarry.lazy.devices import Devices


class Entry(NamedTuple):
    """Attributes of a module or class, and what makes their replacement from the original."""

    owner: str
    names: tuple[str, ...]
    make: Callable[[Any, Devices], Any]


def entries(devices: Devices) -> Iterator[Entry]:
    """All entries for a pair of devices."""
    yield from _NAMED
    factory = f.default_factory if devices.is_default else f.factory
    yield Entry("torch", tuple(_FACTORIES.split()), factory)
    if devices.source == "cuda":
        yield from _cuda(devices)
    else:
        yield from _HOST


# Makes a tensor on a device that is named by `device=`; and, if the source is "cpu", when none is named.
_FACTORIES = """
    arange bartlett_window blackman_window empty empty_permuted empty_strided eye full hamming_window hann_window
    kaiser_window linspace logspace ones rand randint randn randperm range scalar_tensor tensor as_tensor asarray
    tril_indices triu_indices zeros normal
"""

_LIKE = """
    empty_like full_like ones_like rand_like randint_like randn_like zeros_like sparse_coo_tensor sparse_csr_tensor
    empty_quantized
"""

# Names of devices, whichever is replaced.
_NAMED = (
    Entry("torch", tuple(_LIKE.split()), f.factory),
    Entry("torch.fft", ("fftfreq", "rfftfreq"), f.factory),
    Entry("torch.Tensor", ("new_tensor", "new_empty", "new_full", "new_ones", "new_zeros"), f.factory),
    Entry("torch.Tensor", ("to",), f.moving_method),
    Entry("torch", ("Generator",), f.generator_class),
    # torch.set_default_device, and `with torch.device(...)`
    Entry("torch.utils._device.DeviceContext", ("__init__",), f.device_argument),
    Entry("torch.amp.autocast_mode.autocast", ("__init__",), f.autocast_init),
    Entry("torch.amp.grad_scaler.GradScaler", ("__init__",), f.scaler_init),
    Entry("torch.amp", ("custom_fwd", "custom_bwd"), f.custom_function),
    Entry("torch.amp.autocast_mode", ("custom_fwd", "custom_bwd"), f.custom_function),
    Entry("torch", ("is_autocast_enabled",), f.autocast_state),
    Entry("torch", ("set_autocast_enabled", "get_autocast_dtype", "set_autocast_dtype"), f.device_argument),
    Entry("torch", ("get_device_module",), f.device_argument),
    Entry("torch.nn.functional", ("dropout",), f.host_dropout),
    Entry("torch", ("compile",), f.unchanged),
    Entry("torch.nn.Module", ("compile",), f.module_compile),
)

# The CPU's own, if that is what is replaced.
_HOST = (
    Entry("torch.Tensor", ("numpy",), host.to_numpy),
    Entry("torch.Tensor", ("cpu",), host.stays),
    Entry("torch.Tensor", ("pin_memory",), host.unpinned),
    Entry("torch.Tensor", ("__repr__",), host.without_device),
    Entry("torch.nn.utils.rnn", ("pack_padded_sequence",), host.host_lengths),
    Entry("torch.utils.data.dataloader._BaseDataLoaderIter", ("__next__",), host.next_batch),
    Entry("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", ("__init__",), host.start_workers),
)

# Functions and classes of torch.cuda that torch.tarry has under the same name; some stand in two modules.
_CUDA_MODULES = ("torch.cuda", "torch.cuda.random", "torch.cuda.memory")
_SAME_NAME = """
    is_available device_count current_device set_device device device_of get_device_name get_device_capability
    get_device_properties is_initialized init synchronize Stream Event current_stream default_stream set_stream stream
    manual_seed manual_seed_all seed seed_all initial_seed get_rng_state set_rng_state get_rng_state_all
    set_rng_state_all is_bf16_supported mem_get_info memory_allocated max_memory_allocated memory_reserved
    max_memory_reserved reset_peak_memory_stats reset_accumulated_memory_stats memory_stats memory_summary
    memory_snapshot set_per_process_memory_fraction empty_cache is_current_stream_capturing
"""
_DTYPES = "Float Double Half BFloat16 Byte Char Short Int Long Bool"

_NO_GRAPHS = "tarry compiles the steps of the program; take the capture out, and call the function as it is"
_NO_MEMORY = "memory is the backend's; take this call out"


def _cuda(devices: Devices) -> Iterator[Entry]:
    """What a program for CUDA uses besides tensors."""
    for name in _SAME_NAME.split():
        for owner in _CUDA_MODULES:
            if owner == "torch.cuda" or hasattr(find(owner), name):
                yield Entry(owner, (name,), f.device_function(name))
    for name in _DTYPES.split():
        yield Entry("torch.cuda", (f"{name}Tensor",), f.legacy_class(f"{name}Tensor"))
    yield Entry("torch.Tensor", ("cuda",), f.cuda_method)
    yield Entry("torch.UntypedStorage", ("cuda",), f.cuda_method)
    yield Entry("torch.TypedStorage", ("cuda",), f.cuda_method)
    yield Entry("torch.Tensor", ("is_cuda",), f.cuda_property)
    yield Entry("torch.Tensor", ("type",), f.type_method)
    yield Entry("torch", ("set_default_tensor_type",), f.default_tensor_type)
    yield Entry("torch.nn.DataParallel", ("forward",), f.single_device)
    yield Entry("torch.cuda", ("reset_max_memory_allocated", "ipc_collect"), f.nothing)
    yield Entry("torch.cuda", ("can_device_access_peer",), f.constant(False))
    yield Entry("torch.cuda", ("get_arch_list",), f.constant([]))
    yield Entry("torch.cuda", ("memory_cached", "max_memory_cached", "utilization"), f.constant(0))
    yield Entry("torch.cuda.nvtx", ("range_push", "range_pop", "mark"), f.nothing)
    for name in ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle"):
        yield Entry("torch.cuda", (name,), f.refused(f"torch.cuda.{name}", _NO_GRAPHS))
    for name in ("MemPool", "use_mem_pool", "CUDAPluggableAllocator", "ExternalStream"):
        yield Entry("torch.cuda", (name,), f.refused(f"torch.cuda.{name}", _NO_MEMORY))
    own = "a kernel written in CUDA takes memory of CUDA; declare it with tarry.custom_op (docs/custom-operators.md)"
    for name in ("load", "load_inline", "CUDAExtension"):
        yield Entry("torch.utils.cpp_extension", (name,), f.refused(f"torch.utils.cpp_extension.{name}", own))
    for name in ("all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter"):
        yield Entry("torch.cuda.nccl", (name,), f.refused(f"torch.cuda.nccl.{name}", "run on one device"))
    yield Entry("torch.distributed", ("init_process_group",), f.refused_nccl)


def find(path: str) -> Any:
    """The module or class of that name; None if this torch has none."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        owner = find(module) if module else None
        return getattr(owner, name, None)
