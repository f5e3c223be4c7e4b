"""What starts several processes: torchrun, accelerate, Lightning, and Hugging Face's Trainer under torchrun.
Each trains as it does with gloo on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.world import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]

ACCELERATE = """
import json, os, sys
import torch
import tarry.integrations.huggingface
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=sys.argv[1] == "cpu")
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(30, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1).gt(0).long())
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    accelerator.save_state("state")
    accelerator.wait_for_everyone()
    accelerator.load_state("state")
losses = accelerator.gather(torch.stack(losses)).tolist()
if accelerator.is_main_process:
    assert accelerator.num_processes == 2
    json.dump([str(accelerator.device), losses], open("answer.json", "w"))
accelerator.end_training()
"""

LIGHTNING = """
import json, sys
import lightning as L
import torch
import tarry

class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 2))
        self.losses = []

    def training_step(self, batch, index):
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.detach())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, index):
        self.log("validation", self.layer(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)

L.seed_everything(0, verbose=False)
data = torch.randn(32, 4)
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
options = {"enable_progress_bar": False, "logger": False, "enable_model_summary": False}
trainer = L.Trainer(accelerator=sys.argv[1], devices=2, max_epochs=2, **options)
model = Model()
trainer.fit(model, loader, torch.utils.data.DataLoader(data, batch_size=4))
if trainer.is_global_zero:
    metrics = [float(value) for value in trainer.callback_metrics.values()]
    answer = [str(trainer.strategy.root_device), torch.stack(model.losses).tolist() + metrics]
    json.dump(answer, open("answer.json", "w"))
"""

TRAINER = """
import json, sys
import torch
import tarry.integrations.huggingface
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
size = dict(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2)
off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
config = GPT2Config(**size, **off, bos_token_id=0, eos_token_id=0)
data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (32, 8))]
arguments = TrainingArguments(
    "state", max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=2, eval_strategy="steps",
    eval_steps=2, save_steps=2, logging_steps=1, report_to="none", disable_tqdm=True, use_cpu=sys.argv[1] == "cpu",
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data[:24], eval_dataset=data[24:])
trainer.train()
if arguments.process_index == 0:
    assert arguments.world_size == 2
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    json.dump([str(arguments.device), losses], open("answer.json", "w"))
"""

RESTARTED = """
import os, sys
import torch
import torch.distributed as dist
import tarry

dist.init_process_group()
x = torch.ones(2, device="tarry")
dist.all_reduce(x)
assert x[0] == 2
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    os._exit(3)
for _ in range(3):
    dist.all_reduce(x)
if dist.get_rank() == 0:
    print("total", x[0].item(), "after", os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.destroy_process_group()
"""


def start(folder: Path, program: str, *command: str) -> str:
    """Run a program by a launcher: what it has printed."""
    (folder / "program.py").write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TARRY_BACKEND": "eager"}
    environment["MASTER_PORT"] = str(free_port())
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def torchrun(*options: str) -> list[str]:
    port = str(free_port())
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port", port, *options]


def accelerate(*options: str) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    return [*launch, "--num_machines=1", "--mixed_precision=no", "--main_process_port", str(free_port()), *options]


@pytest.mark.parametrize(
    ("framework", "program", "on_tarry", "on_cpu"),
    [
        ("accelerate", ACCELERATE, accelerate("program.py", "tarry"), torchrun("program.py", "cpu")),
        ("lightning", LIGHTNING, [sys.executable, "program.py", "tarry"], [sys.executable, "program.py", "cpu"]),
        ("transformers", TRAINER, torchrun("program.py", "tarry"), torchrun("program.py", "cpu")),
    ],
    ids=["accelerate", "lightning", "transformers"],
)
def test_trains_as_on_the_cpu(
    tmp_path: Path, framework: str, program: str, on_tarry: list[str], on_cpu: list[str]
) -> None:
    pytest.importorskip(framework, reason=f"{framework} is not installed (pip install 'tarry[frameworks]')")
    answers: dict[str, Any] = {}
    for device, command in (("cpu", on_cpu), ("tarry", on_tarry)):
        (tmp_path / device).mkdir()
        start(tmp_path / device, program, *command)
        used, answers[device] = json.loads((tmp_path / device / "answer.json").read_text())
        assert used.split(":")[0] == device
    assert answers["tarry"] == pytest.approx(answers["cpu"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("standalone", [True, False])
def test_torchrun_starts_again(tmp_path: Path, standalone: bool) -> None:
    """A rank fails; all are started once more, find each other in the store that has addresses of the first attempt,
    and end well."""
    rendezvous = "--standalone" if standalone else f"--master-port={free_port()}"
    launch = [sys.executable, "-m", "torch.distributed.run", rendezvous, "--nproc-per-node=2", "--max-restarts=1"]
    printed = start(tmp_path, RESTARTED, *launch, "program.py")
    assert "total 16.0 after 1" in printed


def test_a_process_for_each_device(tmp_path: Path) -> None:
    """`--nproc-per-node=tarry`, in an environment where `import torch` loads tarry: here, the launcher imports it."""
    launcher = "import tarry; from torch.distributed.run import main; main()"
    options = ["--nproc-per-node=tarry", "--master-port", str(free_port()), "program.py"]
    program = "import os, torch; print('of', os.environ['WORLD_SIZE'])"
    assert start(tmp_path, program, sys.executable, "-c", launcher, *options).strip() == "of 1"
