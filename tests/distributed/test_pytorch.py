"""What PyTorch's own tests of DDP, FSDP2, DTensor, functional collectives and device meshes check, on two processes.

Each case is a program for either device; what it gives on tarry is what it gives with gloo on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    ones,
    zeros,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import tarry  # noqa: F401 - the device
from tests.distributed.world import run

CASES: dict[str, Callable[[str], Any]] = {}


def case(function: Callable[[str], Any]) -> Callable[[str], Any]:
    CASES[function.__name__] = function
    return function


def drawn(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


def own(*sizes: int) -> Tensor:
    return drawn(*sizes, seed=7 + dist.get_rank())


def mlp(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(device)


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


# ---- DTensor


@case
def dtensor_redistributes_any_to_any(device: str) -> list[Tensor]:
    mesh = init_device_mesh(device, (2,))
    placements = [Replicate(), Shard(0), Shard(1)]
    results = []
    for source in [*placements, Partial()]:
        x = DTensor.from_local(own(4, 6).to(device), mesh, [source], run_check=False)
        results += [x.redistribute(mesh, [target]).to_local() for target in placements]
        results.append(x.full_tensor())
    return results


@case
def dtensor_of_uneven_sizes(device: str) -> list[Tensor]:
    mesh = init_device_mesh(device, (2,))
    x = distribute_tensor(drawn(5, 3).to(device), mesh, [Shard(0)])
    y = distribute_tensor(drawn(3, 1).to(device), mesh, [Shard(1)])
    return [x.to_local(), x.full_tensor(), (x + 1).redistribute(mesh, [Shard(1)]).to_local(), y.full_tensor()]


@case
def dtensor_operators(device: str) -> list[Tensor]:
    mesh = init_device_mesh(device, (2,))
    a = distribute_tensor(drawn(4, 6).to(device), mesh, [Shard(0)])
    b = distribute_tensor(drawn(6, 4, seed=1).to(device), mesh, [Shard(1)])
    c = distribute_tensor(drawn(4, 6, seed=2).to(device), mesh, [Shard(1)])
    results: list[Any] = [a @ b, c @ b, a.softmax(1), c.softmax(1), a.sum(), a.mean(0), c.max(), a.t() @ a, a * c]
    results += [torch.cat([a, a]), a.view(2, 2, 6), a.transpose(0, 1), torch.where(a > 0, a, c), a.norm(), a.argmax(1)]
    results += [F.layer_norm(c, (6,)), F.gelu(a), *a.split(3, 1), a.std(0), torch.stack([a, a]), a[1:3], a.cumsum(1)]
    return [result.full_tensor() for result in results]


@case
def dtensor_gradients(device: str) -> list[Tensor]:
    mesh = init_device_mesh(device, (2,))
    weight = distribute_tensor(drawn(6, 4).to(device), mesh, [Shard(1)]).requires_grad_()
    local = own(2, 6).to(device).requires_grad_()
    x = DTensor.from_local(local, mesh, [Shard(0)])
    (x @ weight).pow(2).sum().backward()
    (DTensor.from_local(local * 2, mesh, [Partial()]).full_tensor().sin()).sum().backward()
    return [weight.grad.full_tensor(), local.grad]


@case
def dtensor_factories_and_in_place(device: str) -> list[Tensor]:
    mesh = init_device_mesh(device, (2,))
    x = zeros(4, 4, device_mesh=mesh, placements=[Shard(0)])
    x.add_(ones(4, 4, device_mesh=mesh, placements=[Shard(0)])).mul_(3)
    y = x.redistribute(mesh, [Shard(1)]).clone().sub_(1)
    sizes = zeros(5, 4, device_mesh=mesh, placements=[Shard(0)]).to_local().shape
    return [x.full_tensor(), y.full_tensor(), torch.tensor(list(sizes))]


@case
def dtensor_embedding_by_rows_and_columns(device: str) -> list[Tensor]:
    mesh = init_device_mesh(device, (2,))
    tokens = torch.randint(9, (3, 4), generator=torch.Generator().manual_seed(0)).to(device)
    results = []
    for plan in (RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())):
        torch.manual_seed(0)
        layer = nn.Embedding(9, 6).to(device)
        parallelize_module(layer, mesh, plan)
        out = layer(tokens)
        out.square().sum().backward()
        results += [out, layer.weight.grad.full_tensor()]
    return results


@case
def dtensor_loss_parallel(device: str) -> list[Tensor]:
    mesh = init_device_mesh(device, (2,))
    logits = distribute_tensor(drawn(4, 8).to(device), mesh, [Shard(1)]).requires_grad_()
    targets = torch.arange(4).to(device)
    with loss_parallel():
        loss = F.cross_entropy(logits, distribute_tensor(targets, mesh, [Replicate()]))
        loss.backward()
    return [loss.full_tensor(), logits.grad.full_tensor()]


@case
def dtensor_module_and_optimizer(device: str) -> list[Tensor]:
    def partition(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)])))

    mesh = init_device_mesh(device, (2,))
    model = distribute_module(mlp(device), mesh, partition)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for k in range(3):
        loss = model(distribute_tensor(drawn(4, 6, seed=k).to(device), mesh, [Replicate()])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return [parameter.full_tensor() for parameter in model.parameters()]


@case
def tensor_parallel_of_parts(device: str) -> list[Tensor]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.up(self.norm(x))))

    torch.manual_seed(0)
    mesh = init_device_mesh(device, (2,))
    model = Model().to(device)
    plan = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, {"up": ColwiseParallel()})
    x = drawn(2, 4, 6).to(device).requires_grad_()
    model(x).square().sum().backward()
    return [x.grad, *(getattr(grad, "full_tensor", lambda grad=grad: grad)() for grad in gradients(model))]


# ---- functional collectives, device meshes


@case
def functional_collectives_have_gradients(device: str) -> list[Tensor]:
    world = dist.group.WORLD
    x = own(4, 3).to(device).requires_grad_()
    gathered = functional.all_gather_tensor_autograd(x, 0, world)
    scattered = functional.reduce_scatter_tensor_autograd(gathered.square(), "sum", 0, world)
    exchanged = functional.all_to_all_single_autograd(scattered.sin(), [2, 2], [2, 2], world)
    exchanged.square().sum().backward()
    return [exchanged.detach(), x.grad]


@case
def functional_collectives_along_dimensions(device: str) -> list[Tensor]:
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("all",))
    x = own(4, 6).to(device)
    results = [
        functional.all_gather_tensor(x, 1, mesh),
        functional.reduce_scatter_tensor(x, "sum", 1, mesh),
        functional.all_reduce(x, "max", (mesh, 0)),
        functional.permute_tensor(x.flatten(), [1, 0], mesh),
        *functional.all_gather_into_tensor_coalesced([x, x[:2]], mesh),
        *functional.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 1], mesh),
        *functional.all_reduce_coalesced([x, x.t()], "sum", mesh),
    ]
    return [result * 1 for result in results]


@case
def meshes_have_parts(device: str) -> list[Any]:
    mesh = init_device_mesh(device, (1, 2), mesh_dim_names=("outer", "inner"))
    x = own(3).to(device)
    dist.all_reduce(x, group=mesh["inner"].get_group())
    y = x.clone()
    dist.all_reduce(y, group=mesh.get_group("outer"))
    flat = mesh._flatten("flat")
    dist.all_reduce(y, group=flat.get_group())
    return [x, y, torch.tensor([mesh.get_local_rank("inner"), flat.size(), *mesh.get_coordinate()])]


# ---- DDP


@case
def ddp_broadcasts_parameters_and_buffers(device: str) -> list[Tensor]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    wrapped = DistributedDataParallel(model)
    for _ in range(2):
        wrapped(own(6, 4).to(device)).sum().backward()
    return [*model.state_dict().values(), *gradients(model)]


@case
def ddp_gradients_in_bucket_views(device: str) -> list[Any]:
    model = mlp(device)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.0001)
    wrapped(own(5, 6).to(device)).square().mean().backward()
    first = [grad.clone() for grad in gradients(model)]
    model.zero_grad(set_to_none=False)
    wrapped(own(5, 6).to(device)).square().mean().backward()
    return [*first, *gradients(model)]


@case
def ddp_leaves_some_parameters_alone(device: str) -> list[Any]:
    model = mlp(device)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    DistributedDataParallel(model)(own(5, 6).to(device)).square().mean().backward()
    return gradients(model)


@case
def ddp_joins_uneven_inputs(device: str) -> list[Any]:
    model = DistributedDataParallel(mlp(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for k in range(2 + dist.get_rank()):
            optimizer.zero_grad()
            model(drawn(4, 6, seed=k).to(device)).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@case
def ddp_hooks_of_pytorch(device: str) -> list[Any]:
    results = []
    for hook in (
        default_hooks.allreduce_hook,
        default_hooks.fp16_compress_hook,
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
    ):
        model = mlp(device)
        wrapped = DistributedDataParallel(model)
        wrapped.register_comm_hook(None, hook)
        wrapped(own(5, 6).to(device)).square().mean().backward()
        results += gradients(model)
    return results


@case
def ddp_runs_a_part_twice(device: str) -> list[Any]:
    """With a static graph."""
    model = mlp(device)
    wrapped = DistributedDataParallel(model, static_graph=True)
    for k in range(3):
        x = own(5, 6).to(device) + k
        (wrapped(x).square().mean() + wrapped(x * 2).mean()).backward()
    return gradients(model)


# ---- FSDP2


def sharded(device: str, **options: Any) -> nn.Module:
    model = mlp(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=init_device_mesh(device, (2,)), **options)
    return fully_shard(model, mesh=init_device_mesh(device, (2,)), **options)


@case
def fsdp_shards_gradients_and_state(device: str) -> list[Any]:
    model = sharded(device)
    model(own(5, 6).to(device)).square().mean().backward()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    shards = [parameter.to_local() for parameter in model.parameters()]
    return [*(grad.full_tensor() for grad in gradients(model)), *state.values(), *shards]


@case
def fsdp_from_the_meta_device(device: str) -> list[Any]:
    """Each rank allocates its shard only, and gets it from the whole state of one rank."""
    whole = mlp("cpu").state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh(device, (2,)))
    model.to_empty(device=device)
    set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return [model(drawn(3, 6).to(device)).detach(), *(each.full_tensor() for each in model.state_dict().values())]


@case
def fsdp_by_hand(device: str) -> list[Any]:
    model = sharded(device, reshard_after_forward=False)
    model.unshard()
    sizes = [size for parameter in model[0].parameters() for size in parameter.shape]
    out = model(own(5, 6).to(device))
    out.square().mean().backward()
    model.reshard()
    kinds = [isinstance(parameter, DTensor) for parameter in model.parameters()]
    return [torch.tensor(sizes), torch.tensor(kinds), *(grad.full_tensor() for grad in gradients(model))]


@case
def fsdp_prefetches_and_casts(device: str) -> list[Any]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = sharded(device, mp_policy=policy)
    model.set_modules_to_forward_prefetch([model[0]])
    model[0].set_modules_to_forward_prefetch([model[2]])
    model[2].set_modules_to_backward_prefetch([model[0]])
    out = model(own(5, 6).to(device))
    out.square().mean().backward()
    return [out.detach(), *(grad.full_tensor() for grad in gradients(model))]


@case
def fsdp_shards_along_another_dimension(device: str) -> list[Any]:
    def place(parameter: nn.Parameter) -> Any:
        return Shard(1) if parameter.ndim == 2 else Shard(0)

    model = sharded(device, shard_placement_fn=place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        model(own(5, 6).to(device)).square().mean().backward()
        optimizer.step()
    return [parameter.full_tensor() for parameter in model.parameters()]


@case
def fsdp_replicates_shards(device: str) -> list[Any]:
    model = mlp(device)
    fully_shard(model, mesh=init_device_mesh(device, (2, 1), mesh_dim_names=("replicate", "shard")))
    model(own(5, 6).to(device)).square().mean().backward()
    return [grad.full_tensor() for grad in gradients(model)]


def answers_of(name: str) -> list[list[Tensor | None]]:
    """On the CPU, and on tarry. Random numbers that are not drawn on the CPU are of no interest."""
    results = []
    for device in ("cpu", "tarry"):
        given = CASES[name](device)
        results.append([each if each is None else each.detach().cpu() for each in given])
    return results


def everything() -> dict[str, Any]:
    dist.init_process_group()
    answers: dict[str, Any] = {}
    for name in CASES:
        answers[name] = answers_of(name)
    dist.destroy_process_group()
    return answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(everything, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("name", CASES)
def test_as_on_the_cpu(answers: list[dict[str, Any]], name: str) -> None:
    for of_rank in answers:
        assert isinstance(of_rank, dict), of_rank
        expected, actual = of_rank[name]
        assert len(expected) == len(actual) > 0
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
