"""Training with arguments, checkpoints and resume."""

import argparse
import os
import sys
import time

import torch
import torch.nn as nn


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--no-cuda", action="store_true")
    parser.add_argument("--output", required=True)
    parser.add_argument("--resume", default="")
    return parser.parse_args()


def save(path, model, optimizer, scheduler, epoch, use_cuda):
    state = {
        "epoch": epoch,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if use_cuda else None,
    }
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    args = parse_args()
    use_cuda = not args.no_cuda and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")
    torch.manual_seed(3)
    x, y = torch.randn(64, 10), torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    if use_cuda:
        model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    start = 0
    if args.resume:
        checkpoint = torch.load(args.resume, map_location=device, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        torch.set_rng_state(checkpoint["rng"].cpu())
        if use_cuda and checkpoint["cuda_rng"] is not None:
            torch.cuda.set_rng_state_all([state.cpu() for state in checkpoint["cuda_rng"]])
        start = checkpoint["epoch"] + 1
    begin = time.time()
    for epoch in range(start, args.epochs):
        total = 0.0
        for i in torch.randperm(4).tolist():
            xb, yb = x[i * 16 : (i + 1) * 16].to(device), y[i * 16 : (i + 1) * 16].to(device)
            loss = nn.functional.mse_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        print(f"epoch {epoch} loss {total / 4:.5f} lr {scheduler.get_last_lr()[0]:.4f}")
        save(args.output, model, optimizer, scheduler, epoch, use_cuda)
    print(f"took {time.time() - begin:.1f} s", file=sys.stderr)
    return 0 if start < args.epochs else 3


if __name__ == "__main__":
    sys.exit(main())
