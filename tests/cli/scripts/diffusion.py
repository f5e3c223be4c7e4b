"""A small denoising diffusion model of points in the plane."""

import copy
import math

import torch
from torch import nn


class Config:
    steps = 20
    batch = 32
    hidden = 32
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def embedding(t, dim):
    half = dim // 2
    freqs = torch.exp(-math.log(10000) * torch.arange(half, device=t.device) / half)
    args = t[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class Denoiser(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, hidden), nn.SiLU())
        self.inp = nn.Linear(2, hidden)
        self.mid = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, hidden), nn.GELU(), nn.Dropout(0.1))
        self.out = nn.Linear(hidden, 2)

    def forward(self, x, t):
        h = self.inp(x) + self.time(embedding(t, 16))
        return self.out(h + self.mid(h))


torch.manual_seed(0)
cfg = Config()
betas = torch.linspace(1e-4, 0.02, cfg.steps, device=cfg.device)
alphas_bar = torch.cumprod(1 - betas, 0)
model = Denoiser(cfg.hidden).to(cfg.device)
ema = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

for step in range(8):
    angle = torch.rand(cfg.batch, device=cfg.device) * 2 * math.pi
    x0 = torch.stack([angle.cos(), angle.sin()], 1)
    t = torch.randint(0, cfg.steps, (cfg.batch,), device=cfg.device)
    noise = torch.randn_like(x0)
    a = alphas_bar[t][:, None]
    xt = a.sqrt() * x0 + (1 - a).sqrt() * noise
    loss = nn.functional.mse_loss(model(xt, t), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for p, q in zip(ema.parameters(), model.parameters()):
            p.lerp_(q, 0.1)
    if step % 2 == 1:
        print(f"{step + 1:3d} {loss.item():.5f}")


@torch.no_grad()
def sample(n):
    x = torch.randn(n, 2, device=cfg.device)
    for i in reversed(range(cfg.steps)):
        t = torch.full((n,), i, device=cfg.device)
        eps = ema(x, t)
        x = (x - betas[i] / (1 - alphas_bar[i]).sqrt() * eps) / (1 - betas[i]).sqrt()
        if i > 0:
            x = x + betas[i].sqrt() * torch.randn_like(x)
    return x


print([round(v, 3) for v in sample(2).flatten().tolist()])
