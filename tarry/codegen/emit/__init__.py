"""From the model to files. Only the modules here know a target's syntax; they know nothing of YAML or torchgen."""
