# Generated. Do not edit: change the YAML, then run
#   python -m tarry.codegen --source-yaml device.yaml --output-dir generated --impl-path numpy_kernels.py \
#     --backend-name numpy
"""The backend numpy."""
