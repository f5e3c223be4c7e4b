"""`torch._custom_op`, under the same name: see impl.py."""
