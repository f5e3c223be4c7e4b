"""Tables made from torchgen's model of PyTorch's operators. Imports nothing of the runtime."""
