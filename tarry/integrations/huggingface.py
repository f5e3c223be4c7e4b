"""`import tarry.integrations.huggingface`: Trainer and accelerate train on tarry unless the program asks for the CPU.

Both choose a device from a closed list, and the CPU, without a word, if none of the list is there. With this module
imported, before or after theirs, the choice is `tarry:0`: with bf16 and fp16, and with tarry's random state in
checkpoints.

Private names (seen in accelerate 1.15 and transformers 5.22): `PartialState._prepare_backend`, the functions that
`accelerate.accelerator` saves and loads its state by, `accelerate.utils.modeling.get_max_memory`,
`transformers.modeling_utils.check_and_set_device_map`, `TrainingArguments._setup_devices`, `Trainer._save_rng_state`,
`Trainer._load_rng_state`, `Trainer._tr_loss`, `Trainer._globalstep_last_logged`. A version that lacks one of them gets
a warning when it is imported; without the last two, the Trainer reads the loss of each step, as on other devices.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from tarry.errors import TarryError
from tarry.integrations.after_import import after_import

_TRUE = ("1", "true", "True", "TRUE", "yes", "y", "t", "on")  # as accelerate reads its variables
_NO_FSDP = (
    "accelerate's FSDP chooses its device from a closed list. On tarry, call torch.distributed.fsdp.fully_shard, and "
    "start the program by `torchrun`; or train with DDP: `accelerate launch --multi_gpu`"
)


def _device() -> torch.device:
    return torch.device("tarry", torch.get_device_module("tarry").current_device())


def _take_device() -> torch.device:
    """The device of this one of several processes, which share devices if there are fewer."""
    module = torch.get_device_module("tarry")
    module.set_device(int(os.environ.get("LOCAL_RANK", "0")) % module.device_count())
    return _device()


def _has(owner: Any, *names: str) -> bool:
    """Whether a part of a framework is as it is expected. If not, one warning: most programs do not use that part."""
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        module = getattr(owner, "__module__", owner.__name__)
        warnings.warn(
            f"tarry.integrations.huggingface does not fit this version of {module}, which has no {', '.join(missing)}: "
            "it may choose another device than tarry. Versions that fit: accelerate 1.15, transformers 5.17 to 5.22",
            stacklevel=2,
        )
    return not missing


# accelerate


def _open_state(module: Any) -> None:
    """`accelerate.state`: which device a process has."""
    state = module.PartialState
    if not _has(state, "default_device", "_prepare_backend"):
        return
    prepare_backend = state._prepare_backend

    @functools.wraps(prepare_backend)
    def prepare(
        self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None, *args: Any
    ) -> Any:
        if not cpu and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if os.environ.get("ACCELERATE_USE_FSDP") in _TRUE:
                raise TarryError(_NO_FSDP)
            self.device = _take_device()
            # What accelerate does with several processes on CPUs fits: DDP without the number of a device.
            return backend or "gloo", module.DistributedType.MULTI_CPU
        # The variable is for programs that do not ask for the CPU; accelerate prefers it to Accelerator(cpu=True).
        if self.device is not None and self.device.type == "tarry":
            self.device = None
        if not cpu:
            return None, module.DistributedType.NO
        return prepare_backend(self, cpu, sagemaker_dp, backend, *args)

    state._prepare_backend = prepare
    state.default_device = property(lambda self: _device())


def _open_accelerator(module: Any) -> None:
    """`accelerate.accelerator`: fp16, which has a list of devices of its own, and checkpoints."""
    accelerator = module.Accelerator
    if not _has(module, "save_accelerator_state", "load_accelerator_state"):
        return
    init, save, load = accelerator.__init__, module.save_accelerator_state, module.load_accelerator_state
    signature = inspect.signature(init)
    shared = module.AcceleratorState._shared_state  # of all accelerators of the process

    @functools.wraps(init)
    def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        before = shared.get("_mixed_precision")
        asked = given.arguments.get("mixed_precision") or before or os.environ.get("ACCELERATE_MIXED_PRECISION")
        on_cpu = given.arguments.get("cpu") or os.environ.get("ACCELERATE_USE_CPU") in _TRUE
        if str(asked) != "fp16" or before not in (None, "fp16") or on_cpu:
            init(*given.args, **given.kwargs)
            return
        given.arguments["mixed_precision"] = "no"
        if before is not None:
            shared["_mixed_precision"] = "no"
        init(*given.args, **given.kwargs)
        self.state._mixed_precision = "fp16"
        self.native_amp = True
        options = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
        self.scaler = torch.amp.GradScaler("tarry", **options)

    @functools.wraps(save)
    def save_state(output_dir: str, *args: Any, **kwargs: Any) -> Any:
        saved = save(output_dir, *args, **kwargs)
        if module.PartialState().device.type == "tarry":
            save_rng_state(output_dir)
        return saved

    @functools.wraps(load)
    def load_state(input_dir: str, *args: Any, **kwargs: Any) -> Any:
        loaded = load(input_dir, *args, **kwargs)
        load_rng_state(input_dir)
        return loaded

    accelerator.__init__ = initialize
    module.save_accelerator_state, module.load_accelerator_state = save_state, load_state


def _open_memory(module: Any) -> None:
    """`accelerate.utils.modeling`: the devices that `device_map="auto"` places the parts of a model on."""
    if not _has(module, "get_max_memory", "convert_file_size_to_int"):
        return
    get, in_bytes = module.get_max_memory, module.convert_file_size_to_int

    @functools.wraps(get)
    def get_max_memory(max_memory: dict[int | str, int | str] | None = None) -> dict[str, int]:
        tarry = torch.get_device_module("tarry")
        if max_memory is None:
            found = {f"tarry:{k}": tarry.mem_get_info(k)[0] for k in range(tarry.device_count())}
            return {**found, "cpu": get()["cpu"]}
        on_host = {name: size for name, size in max_memory.items() if name in ("cpu", "disk")}
        others = {name: in_bytes(size) for name, size in max_memory.items() if name not in on_host}
        found = {f"tarry:{name}" if isinstance(name, int) else str(name): size for name, size in others.items()}
        unknown = [name for name in found if name not in {f"tarry:{k}" for k in range(tarry.device_count())}]
        if unknown:
            raise ValueError(f"max_memory names the device {unknown[0]!r}; here are 'tarry:0' and on, 'cpu' and 'disk'")
        return {**found, **get(on_host)}

    module.get_max_memory = get_max_memory


# transformers


def _open_models(module: Any) -> None:
    """`transformers.modeling_utils`: `from_pretrained(..., device_map="auto")`, which has another list of devices."""
    if not _has(module, "check_and_set_device_map"):
        return
    check = module.check_and_set_device_map

    @functools.wraps(check)
    def check_and_set(device_map: Any) -> Any:
        automatic = device_map in ("auto", "balanced", "balanced_low_0", "sequential")
        return check(_device() if automatic else device_map)

    module.check_and_set_device_map = check_and_set


def _open_arguments(module: Any) -> None:
    """`transformers.training_args`: the device that a Trainer asks for, and whether it may use bf16."""
    arguments = module.TrainingArguments
    if not (_has(arguments, "_setup_devices") and _has(module, "is_torch_bf16_gpu_available")):
        return
    original = arguments._setup_devices.func

    def set_up(self: Any) -> torch.device:
        device = original(self)
        if self.use_cpu or self.distributed_state is None or self.distributed_state.device.type != "tarry":
            return device
        self._n_gpu = 1
        return self.distributed_state.device

    setup = functools.cached_property(set_up)
    setup.__set_name__(arguments, "_setup_devices")
    arguments._setup_devices = setup
    module.is_torch_bf16_gpu_available = lambda: True


def _open_trainer(module: Any) -> None:
    """`transformers.trainer`: checkpoints, and a filter of losses that does not wait for them."""
    trainer = module.Trainer
    if not _has(trainer, "_save_rng_state", "_load_rng_state", "train", "training_step"):
        return
    save, load, train, training_step = (
        trainer._save_rng_state,
        trainer._load_rng_state,
        trainer.train,
        trainer.training_step,
    )

    @functools.wraps(save)
    def save_rng(self: Any, output_dir: str) -> None:
        save(self, output_dir)
        if self.args.device.type == "tarry":
            save_rng_state(output_dir)

    @functools.wraps(load)
    def load_rng(self: Any, checkpoint: str | None) -> None:
        load(self, checkpoint)
        if checkpoint is not None:
            load_rng_state(checkpoint)

    # Versions that keep the sum of losses elsewhere filter it themselves.
    can_filter = "_tr_loss" in getattr(getattr(trainer, "_run_epoch", None), "__code__", train.__code__).co_names

    @functools.wraps(train)
    def train_without_reads(self: Any, *args: Any, **kwargs: Any) -> Any:
        """With its flag set, the Trainer reads each loss to see whether it is finite, which cuts every step in two."""
        asked = self.args.logging_nan_inf_filter
        self._filters_on_device = asked and can_filter and self.args.device.type == "tarry"
        self.args.logging_nan_inf_filter = asked and not self._filters_on_device
        try:
            return train(self, *args, **kwargs)
        finally:
            self.args.logging_nan_inf_filter = asked

    @functools.wraps(training_step)
    def filtered_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = training_step(self, *args, **kwargs)
        return _filtered(self, loss) if getattr(self, "_filters_on_device", False) else loss

    trainer._save_rng_state, trainer._load_rng_state = save_rng, load_rng
    trainer.train, trainer.training_step = train_without_reads, filtered_step


def _filtered(trainer: Any, loss: torch.Tensor) -> torch.Tensor:
    """The loss, or what the Trainer adds to the sum that it logs if the loss is not finite: the mean of that sum."""
    steps = 1 + trainer.state.global_step - trainer._globalstep_last_logged
    return torch.where(torch.isfinite(loss), loss, trainer._tr_loss / steps)


# Random states in checkpoints, in files of their own: those of the frameworks have the devices that they know.


def _rng_file(folder: str) -> Path:
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = f"_{torch.distributed.get_rank()}" if several and torch.distributed.get_world_size() > 1 else ""
    return Path(folder) / f"rng_state_tarry{rank}.pth"


def save_rng_state(folder: str) -> None:
    """Write the state of this process's generators to a checkpoint."""
    torch.save(torch.get_device_module("tarry").get_rng_state_all(), _rng_file(folder))


def load_rng_state(folder: str) -> None:
    """Restore what `save_rng_state` has written. A checkpoint of another device has none."""
    file = _rng_file(folder)
    if file.is_file():
        torch.get_device_module("tarry").set_rng_state_all(torch.load(file, weights_only=True))


for _name, _open in {
    "accelerate.state": _open_state,
    "accelerate.accelerator": _open_accelerator,
    "accelerate.utils.modeling": _open_memory,
    "transformers.modeling_utils": _open_models,
    "transformers.training_args": _open_arguments,
    "transformers.trainer": _open_trainer,
}.items():
    after_import(_name, _open)
