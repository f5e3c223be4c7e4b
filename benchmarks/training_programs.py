"""Training programs as users write them, with the reads that real ones have: losses, norms, accuracies, rewards.

Beside the programs of `reading_programs.py`, which read inside of a step, most of these read at its end.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.reading_programs import ReadingProgram, Trained, mlp


class Trainer(Trained):
    """A training loop as frameworks write it: accumulation, clipping, a schedule, and a log line for each step."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(32, 128, 128, 10), device, torch.optim.AdamW)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 100))
        self.batches = [(torch.randn(32, 32).to(device), torch.randint(0, 10, (32,)).to(device)) for _ in range(8)]
        self.steps = 0

    def step(self) -> float:
        total = 0.0
        for _ in range(2):
            x, y = self.batches[self.steps % 8]
            loss = functional.cross_entropy(self.model(x), y) / 2
            loss.backward()
            total += loss.detach().item()
            self.steps += 1
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return total + norm.item() + float(self.schedule.get_last_lr()[0])


class Adversarial:
    """A generator and a discriminator, each with an optimizer; both losses are read."""

    def __init__(self, device: str) -> None:
        self.generator, self.judge = mlp(16, 64, 64, 32).to(device), mlp(32, 64, 64, 1).to(device)
        self.first = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.second = torch.optim.Adam(self.judge.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.real, self.device = torch.randn(64, 32).to(device), device
        self.noise = torch.randn(64, 16).to(device)

    def step(self) -> float:
        ones, zeros = torch.ones(64, 1, device=self.device), torch.zeros(64, 1, device=self.device)
        fake = self.generator(self.noise)
        self.second.zero_grad()
        judged = functional.binary_cross_entropy_with_logits(self.judge(self.real), ones)
        judged = judged + functional.binary_cross_entropy_with_logits(self.judge(fake.detach()), zeros)
        judged.backward()
        self.second.step()
        self.first.zero_grad()
        fooled = functional.binary_cross_entropy_with_logits(self.judge(fake), ones)
        fooled.backward()
        self.first.step()
        return judged.item() + fooled.item()


class Variational(Trained):
    """A variational autoencoder, whose two losses are read one by one."""

    def __init__(self, device: str) -> None:
        parts = nn.ModuleDict({"encode": mlp(64, 128, 32), "decode": mlp(16, 128, 64)})
        super().__init__(parts, device)
        self.parts = parts
        self.x = torch.rand(64, 64).to(device)
        self.noise = torch.randn(64, 16).to(device)

    def step(self) -> float:
        mean, log_variance = self.parts["encode"](self.x).chunk(2, dim=1)
        z = mean + self.noise * torch.exp(0.5 * log_variance)
        rebuilt = functional.binary_cross_entropy_with_logits(self.parts["decode"](z), self.x, reduction="sum") / 64
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        total = self.update(rebuilt + divergence)
        return total + rebuilt.item() + divergence.item()


class Contrastive(Trained):
    """Two views of a batch through one encoder, their similarities as logits; loss and top-1 accuracy are read."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(32, 128, 64), device)
        self.one, self.two = torch.randn(2, 64, 32).to(device)
        self.labels = torch.arange(64, device=device)

    def step(self) -> float:
        a, b = (functional.normalize(self.model(x), dim=1) for x in (self.one, self.two))
        logits = a @ b.t() / 0.1
        loss = (functional.cross_entropy(logits, self.labels) + functional.cross_entropy(logits.t(), self.labels)) / 2
        given = self.update(loss)
        return given + (logits.argmax(1) == self.labels).float().mean().item()


class Diffusion(Trained):
    """A denoiser on embedded times, with an average of its weights; the loss is read."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(64, 128, 128, 32), device)
        self.average = copy.deepcopy(self.model)
        self.kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0).to(device)
        self.x, self.noise = torch.randn(2, 64, 32).to(device)
        self.rates = torch.exp(-math.log(100.0) * torch.arange(16, device=device) / 16)
        self.times = [torch.randint(0, 100, (64,)).to(device) for _ in range(4)]
        self.steps = 0

    def step(self) -> float:
        times = self.times[self.steps % 4]
        self.steps += 1
        kept = self.kept[times][:, None]
        noisy = kept.sqrt() * self.x + (1 - kept).sqrt() * self.noise
        angles = times[:, None].float() * self.rates[None]
        guess = self.model(torch.cat([noisy, angles.sin(), angles.cos()], dim=1))
        loss = self.update(functional.mse_loss(guess, self.noise))
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.mul_(0.99).add_(now, alpha=0.01)
        return loss


class LanguageModel(Trained):
    """An LSTM over tokens, its state handed on from step to step; loss, perplexity and the gradients' norm are read."""

    def __init__(self, device: str) -> None:
        parts = nn.ModuleDict({"embed": nn.Embedding(64, 32), "rnn": nn.LSTM(32, 64), "out": nn.Linear(64, 64)})
        super().__init__(parts, device, torch.optim.SGD)
        self.parts = parts
        self.tokens = torch.randint(0, 64, (13, 8)).to(device)
        self.state: tuple[Tensor, Tensor] | None = None

    def step(self) -> float:
        state = None if self.state is None else tuple(part.detach() for part in self.state)
        hidden, self.state = self.parts["rnn"](self.parts["embed"](self.tokens[:-1]), state)
        loss = functional.cross_entropy(self.parts["out"](hidden).view(-1, 64), self.tokens[1:].reshape(-1))
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parts.parameters(), 0.25)
        self.optimizer.step()
        return math.exp(loss.item()) + norm.item()


class MetaLearning(Trained):
    """Two inner steps for each of two tasks, differentiated through; each task's loss is read."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(1, 40, 40, 1), device)
        x = torch.linspace(-3, 3, 20)[:, None]
        self.tasks = [(x.to(device), torch.sin(x + k).to(device)) for k in range(2)]

    def step(self) -> float:
        names, given = zip(*self.model.named_parameters(), strict=True)
        total, read = torch.zeros((), device=self.device), 0.0
        for x, y in self.tasks:
            adapted = list(given)
            for _ in range(2):
                guess = torch.func.functional_call(self.model, dict(zip(names, adapted, strict=True)), (x[:10],))
                grads = torch.autograd.grad(functional.mse_loss(guess, y[:10]), adapted, create_graph=True)
                adapted = [p - 0.01 * g for p, g in zip(adapted, grads, strict=True)]
            guess = torch.func.functional_call(self.model, dict(zip(names, adapted, strict=True)), (x[10:],))
            loss = functional.mse_loss(guess, y[10:])
            total = total + loss
            read += loss.item()
        return self.update(total) + read


class MeanTeacher(Trained):
    """A student on labelled and unlabelled data, a teacher that averages it, and a threshold on its confidence."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(32, 64, 64, 10), device, torch.optim.SGD)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.x, self.y = torch.randn(32, 32).to(device), torch.randint(0, 10, (32,)).to(device)
        self.weak, self.strong = torch.randn(2, 64, 32).to(device)

    def step(self) -> float:
        with torch.no_grad():
            confidence, pseudo = functional.softmax(self.teacher(self.weak) * 8, dim=1).max(dim=1)
            sure = confidence > 0.3
        loss = functional.cross_entropy(self.model(self.x), self.y)
        share = sure.float().mean().item()
        if share > 0:
            loss = loss + functional.cross_entropy(self.model(self.strong[sure]), pseudo[sure])
        given = self.update(loss)
        with torch.no_grad():
            for mean, now in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 0.01)
        return given + share


class ActiveLearning(Trained):
    """The least certain points of a pool are looked for, then trained on; their entropies are read."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(16, 64, 64, 4), device)
        self.pool, self.labels = torch.randn(256, 16).to(device), torch.randint(0, 4, (256,)).to(device)

    def step(self) -> float:
        with torch.no_grad():
            shares = functional.softmax(self.model(self.pool), dim=1)
            entropy = -(shares * shares.clamp(min=1e-8).log()).sum(1)
            found = entropy.topk(16)
        chosen = found.indices.tolist()
        x, y = self.pool[chosen], self.labels[chosen]
        return self.update(functional.cross_entropy(self.model(x), y)) + found.values.mean().item()


class Physics(Trained):
    """A network that satisfies a differential equation: derivatives of second order; the parts of its loss are read."""

    def __init__(self, device: str) -> None:
        layers = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        super().__init__(layers, device)
        self.x = torch.linspace(0, 1, 64)[:, None].to(device).requires_grad_()
        self.edges, self.values = torch.tensor([[0.0], [1.0]]).to(device), torch.tensor([[0.0], [1.0]]).to(device)

    def step(self) -> float:
        u = self.model(self.x)
        first = torch.autograd.grad(u.sum(), self.x, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), self.x, create_graph=True)[0]
        inside = (second + u).pow(2).mean()
        border = (self.model(self.edges) - self.values).pow(2).mean()
        total = self.update(inside + border)
        return total + inside.item() + border.item()


class Bandit(Trained):
    """A contextual bandit: one action of each state is chosen by value, its reward learned from."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(8, 32, 4), device, torch.optim.SGD)
        self.contexts = torch.randn(64, 8)
        self.steps = 0

    def step(self) -> float:
        context = self.contexts[self.steps % 64]
        self.steps += 1
        x = context.to(self.device)
        with torch.no_grad():
            action = int(self.model(x).argmax().item())
        reward = float(context[action] > 0)
        return self.update((self.model(x)[action] - reward) ** 2)


class DeepQ(Trained):
    """Q-learning with a replay memory and a target network: a step of acting, and one of learning."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(4, 64, 64, 2), device)
        self.target = copy.deepcopy(self.model)
        self.memory = torch.randn(512, 10)
        self.steps = 0

    def step(self) -> float:
        start = self.steps * 32 % 512
        self.steps += 1
        with torch.no_grad():
            action = int(self.model(self.memory[start : start + 1, :4].to(self.device)).max(1).indices.item())
        rows = self.memory[start : start + 32].to(self.device)
        state, after = rows[:, :4], rows[:, 4:8]
        taken, reward = (rows[:, 8:9] > 0).long(), rows[:, 9]
        now = self.model(state).gather(1, taken).squeeze(1)
        with torch.no_grad():
            then = reward + 0.99 * self.target(after).max(1).values
        loss = self.update(functional.smooth_l1_loss(now, then))
        if self.steps % 20 == 0:
            self.target.load_state_dict(self.model.state_dict())
        return loss + action


class Distillation(Trained):
    """A small network learns from the softened output of a larger one; both losses and the accuracy are read."""

    def __init__(self, device: str) -> None:
        super().__init__(mlp(32, 64, 10), device, torch.optim.SGD)
        self.teacher = mlp(32, 256, 256, 10).to(device).eval()
        self.x, self.y = torch.randn(64, 32).to(device), torch.randint(0, 10, (64,)).to(device)

    def step(self) -> float:
        with torch.no_grad():
            soft = functional.softmax(self.teacher(self.x) / 2, dim=1)
        logits = self.model(self.x)
        hard = functional.cross_entropy(logits, self.y)
        learned = functional.kl_div(functional.log_softmax(logits / 2, dim=1), soft, reduction="batchmean") * 4
        total = self.update(0.5 * hard + 0.5 * learned)
        right = (logits.argmax(1) == self.y).sum().item()
        return total + hard.item() + learned.item() + right / 64


class Recommender(Trained):
    """Embeddings of users and items, their products and biases; the loss is read, and every tenth step a ranking."""

    def __init__(self, device: str) -> None:
        sizes = {"user": (256, 32), "item": (512, 32), "user bias": (256, 1), "item bias": (512, 1)}
        parts = nn.ModuleDict({name: nn.Embedding(*size) for name, size in sizes.items()})
        super().__init__(parts, device)
        self.parts = parts
        self.users = [torch.randint(0, 256, (128,)) for _ in range(8)]
        self.items = [torch.randint(0, 512, (128,)) for _ in range(8)]
        self.ratings = [torch.rand(128) for _ in range(8)]
        self.steps = 0

    def step(self) -> float:
        k = self.steps % 8
        self.steps += 1
        users, items, ratings = (one[k].to(self.device) for one in (self.users, self.items, self.ratings))
        score = (self.parts["user"](users) * self.parts["item"](items)).sum(1)
        score = score + self.parts["user bias"](users).squeeze(1) + self.parts["item bias"](items).squeeze(1)
        loss = self.update(functional.mse_loss(torch.sigmoid(score), ratings))
        if self.steps % 10 == 0:
            with torch.no_grad():
                first = self.parts["user"](users[:1])[0] @ self.parts["item"].get_parameter("weight").t()
            loss += first.topk(5).values.sum().item() * 0.1
        return loss


class ConvNet(Trained):
    """A small convolutional network with batch norm; loss and accuracy are read, and a norm is tested for NaN."""

    def __init__(self, device: str) -> None:
        layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(16, 10),
        )  # fmt: skip
        super().__init__(layers, device, torch.optim.SGD)
        self.x, self.y = torch.randn(32, 1, 16, 16).to(device), torch.randint(0, 10, (32,)).to(device)

    def step(self) -> float:
        logits = self.model(self.x)
        loss = functional.cross_entropy(logits, self.y)
        if torch.isnan(loss):
            raise ValueError("the loss is not a number")
        given = self.update(loss)
        return given + (logits.argmax(1) == self.y).float().mean().item()


TRAINING: dict[str, type[ReadingProgram]] = {
    "trainer": Trainer,
    "adversarial": Adversarial,
    "variational": Variational,
    "contrastive": Contrastive,
    "diffusion": Diffusion,
    "language model": LanguageModel,
    "meta learning": MetaLearning,
    "mean teacher": MeanTeacher,
    "active learning": ActiveLearning,
    "physics": Physics,
    "bandit": Bandit,
    "deep q": DeepQ,
    "distillation": Distillation,
    "recommender": Recommender,
    "convolutional": ConvNet,
}
