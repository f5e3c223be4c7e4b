# %% [markdown]
# # Sequences, cell by cell (exported from a notebook)

# %%
import matplotlib_free as plt  # a helper beside the script
import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(7)

# %%
x = torch.arange(6).reshape(2, 3)
print(x)
print(x.float().mean(), x.T @ x)

# %%
lengths = torch.randint(3, 9, (40,))
X = torch.zeros(40, 8, 5)
for i, n in enumerate(lengths):
    X[i, :n] = torch.randn(int(n), 5)
y = (X.sum(dim=(1, 2)) > 0).long()
loader = DataLoader(TensorDataset(X, lengths, y), batch_size=10, shuffle=True, num_workers=1)
print(y.numpy()[:10], np.bincount(y))


# %%
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.rnn(packed)
        return self.head(h[-1])


model = Model()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

# %%
losses = []
for epoch in range(2):
    for xb, lb, yb in loader:
        optimizer.zero_grad()
        loss = criterion(model(xb, lb), yb)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: {np.mean(losses[-4:]):.4f}")
plt.plot(losses)

# %%
with torch.no_grad():
    out = model(X, lengths).softmax(-1)
print(out[:2])
print("accuracy", (out.argmax(1) == y).float().mean().item())
out.shape
