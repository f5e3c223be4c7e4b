"""A CNN with mixed precision and gradient scaling."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

torch.backends.cudnn.benchmark = True
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)
if torch.cuda.is_available():
    torch.cuda.manual_seed_all(1)


class Images(Dataset):
    def __init__(self, n):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(n, 3, 8, 8, generator=generator)
        self.y = torch.randint(0, 4, (n,), generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(8 * 16, 4)

    def forward(self, x):
        x = F.relu(self.bn(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc(self.dropout(torch.flatten(x, 1)))


def main():
    loader = DataLoader(Images(48), batch_size=16, shuffle=True, num_workers=1, pin_memory=device == "cuda")
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
    for epoch in range(3):
        model.train()
        running = torch.zeros((), device=device)
        for images, labels in loader:
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device_type=device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(images), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            running += loss.detach()
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"epoch {epoch}: {running.item() / len(loader):.3f}")
    model.eval()
    x, y = next(iter(loader))
    with torch.inference_mode():
        accuracy = (model(x.to(device)).argmax(1).cpu() == y).float().mean()
    print(f"accuracy {accuracy:.2f}, peak {torch.cuda.max_memory_allocated() // 2**40 if device == 'cuda' else 0} TiB")


if __name__ == "__main__":
    main()
