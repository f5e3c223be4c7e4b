"""REINFORCE on a corridor, with an environment in NumPy. Names no device."""

import random

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions import Categorical


class Corridor:
    def __init__(self, length=6, seed=0):
        self.length = length
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.position = int(self.rng.integers(1, 3))
        self.time = 0
        return self.observe()

    def observe(self):
        state = np.zeros(self.length, dtype=np.float32)
        state[self.position] = 1.0
        return state

    def step(self, action):
        self.position = int(np.clip(self.position + (1 if action == 1 else -1), 0, self.length - 1))
        self.time += 1
        done = self.position in (0, self.length - 1) or self.time >= 12
        return self.observe(), float(self.position == self.length - 1), done


class Policy(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.affine1 = nn.Linear(n, 16)
        self.dropout = nn.Dropout(p=0.1)
        self.affine2 = nn.Linear(16, 2)

    def forward(self, x):
        x = torch.relu(self.dropout(self.affine1(x)))
        return torch.softmax(self.affine2(x), dim=-1)


random.seed(0)
np.random.seed(0)
torch.manual_seed(0)
env = Corridor()
policy = Policy(env.length)
optimizer = optim.Adam(policy.parameters(), lr=3e-2)
eps = np.finfo(np.float32).eps.item()
history = []

for episode in range(6):
    state, done = env.reset(), False
    log_probs, rewards = [], []
    while not done:
        probs = policy(torch.from_numpy(state).float().unsqueeze(0))
        m = Categorical(probs)
        action = m.sample()
        log_probs.append(m.log_prob(action))
        state, reward, done = env.step(action.item())
        rewards.append(reward)
    R, returns = 0, []
    for r in rewards[::-1]:
        R = r + 0.95 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std(unbiased=False) + eps)
    loss = torch.cat([-lp * G for lp, G in zip(log_probs, returns)]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(sum(rewards))
    print(f"episode {episode} length {len(rewards)} return {sum(rewards):.1f} loss {loss.item():.4f}")

with torch.no_grad():
    table = policy.eval()(torch.eye(env.length)).numpy()
print(np.round(table, 3).tolist(), np.mean(history))
