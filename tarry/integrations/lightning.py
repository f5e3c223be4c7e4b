"""`Trainer(accelerator="tarry")` and `Fabric(accelerator="tarry")`, in `lightning` and in `pytorch_lightning`.

Registering an accelerator is Lightning's public way, but two choices are made by a list of names: the strategy of an
accelerator that is not in it puts the model on the CPU, and its mixed precision is CUDA's. Private names, of the
"connectors" that turn a Trainer's arguments into objects: `_choose_strategy`, `_init_strategy`,
`_check_and_init_precision`, `_choose_auto_accelerator`, `_choose_gpu_accelerator_backend`; of their strategies for
several processes: `_determine_ddp_device_ids` (seen in Lightning 2.6).
"""

from __future__ import annotations

from typing import Any

import torch

from tarry.errors import TarryError
from tarry.integrations.after_import import after_import

_CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
_PRIVATE = (
    "_choose_strategy",
    "_init_strategy",
    "_check_and_init_precision",
    "_choose_auto_accelerator",
    "_choose_gpu_accelerator_backend",
)

_is_preferred = False


def install() -> None:
    """Make the accelerator known wherever Lightning is, or will be, imported."""
    for name in _CONNECTORS:
        after_import(name, _open)


def prefer() -> None:
    """Have `accelerator="auto"`, the default, and `"gpu"` mean tarry."""
    global _is_preferred
    _is_preferred = True


def _open(module: Any) -> None:
    """Register the accelerator with the package that a connector's module belongs to."""
    connector = getattr(module, _CONNECTORS[module.__name__], None)
    registry = getattr(module, "AcceleratorRegistry", None) or getattr(module, "ACCELERATOR_REGISTRY", None)
    if registry is None or connector is None or not all(hasattr(connector, name) for name in _PRIVATE):
        return  # another version: Lightning says that it does not know the name
    accelerator = _accelerator_class(module.Accelerator)
    registry.register("tarry", accelerator, description=accelerator.__doc__, override=True)
    _patch(connector, accelerator, module)


def _accelerator_class(base: Any) -> Any:
    """The accelerator as a class of the package at hand: each has a base class of its own."""

    class TarryAccelerator(base):
        """The lazy device of tarry."""

        def setup_device(self, device: torch.device) -> None:
            if device.type != "tarry":
                raise TarryError(f'accelerator="tarry" was given the device {str(device)!r}; leave `strategy` out')
            torch.get_device_module("tarry").set_device(device)

        def teardown(self) -> None:
            torch.get_device_module("tarry").empty_cache()

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            return dict(torch.get_device_module("tarry").memory_stats(device))

        @staticmethod
        def parse_devices(devices: int | str | list[int]) -> list[int]:
            return _parsed(devices)

        @staticmethod
        def get_parallel_devices(devices: list[int]) -> list[torch.device]:
            return [torch.device("tarry", index) for index in devices]

        @staticmethod
        def auto_device_count() -> int:
            return 1  # `devices` says how many processes there are

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def name() -> str:
            return "tarry"

    return TarryAccelerator


def _parsed(devices: int | str | list[int]) -> list[int]:
    """The devices that `Trainer(devices=...)` means, by their numbers: for a count, or a list of numbers, also as text.
    There is a process for each. If a count is higher than that of the devices, processes share them, as they share a
    CPU."""
    count = torch.get_device_module("tarry").device_count()
    if isinstance(devices, str):
        devices = [int(part) for part in devices.split(",") if part.strip()] if "," in devices else int(devices)
    if isinstance(devices, int):
        devices = [index % count for index in range(count if devices == -1 else devices)]
    if not devices or not all(0 <= index < count for index in devices):
        raise TarryError(f"devices={devices!r}: there are {count} tarry devices, numbered from 0")
    return list(devices)


def _patch(connector: Any, accelerator: type, module: Any) -> None:
    choose_strategy, init_strategy, init_precision, choose_auto, choose_gpu = (
        getattr(connector, name) for name in _PRIVATE
    )

    def strategy(self: Any) -> Any:
        if not isinstance(self.accelerator, accelerator):
            return choose_strategy(self)
        if len(self._parallel_devices) > 1 or self._num_nodes_flag > 1:
            return "ddp"
        return module.SingleDeviceStrategy(device=self._parallel_devices[0])

    def initialize_strategy(self: Any) -> None:
        init_strategy(self)
        if isinstance(self.accelerator, accelerator):
            # What DDP gets is on its device. Where it has a number of a device, Lightning takes it for CUDA's.
            for name in ("determine_ddp_device_ids", "_determine_ddp_device_ids"):
                if hasattr(self.strategy, name):
                    setattr(self.strategy, name, lambda: None)

    def precision(self: Any) -> Any:
        flag = getattr(self, "_precision_flag", None) or getattr(self, "_precision_input", None)
        given = getattr(self, "_precision_plugin_flag", None) or getattr(self, "_precision_instance", None)
        if given or flag not in ("16-mixed", "bf16-mixed") or not isinstance(self.accelerator, accelerator):
            return init_precision(self)
        return module.MixedPrecision(flag, "tarry")

    connector._choose_strategy = strategy
    connector._init_strategy = initialize_strategy
    connector._check_and_init_precision = precision
    connector._choose_auto_accelerator = staticmethod(lambda: "tarry" if _is_preferred else choose_auto())
    connector._choose_gpu_accelerator_backend = staticmethod(lambda: "tarry" if _is_preferred else choose_gpu())
