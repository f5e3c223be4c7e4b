"""YAMLs in the manner of real backends', of our own making, and a way to put one into a file."""

from __future__ import annotations

from pathlib import Path

SMALL = """\
# A backend with a little of everything.
backend: Lazy
cpp_namespace: mine
full_codegen:
  - add.Tensor
  - addmm
  - arange.start_out   # an out variant
  - bernoulli
  - bernoulli.p
  - cat
  - clamp
  - embedding_dense_backward
  - fill_.Scalar       # an in-place variant
  - max.dim
  - relu
  - split_copy.Tensor  # returns a list
  - view_copy
ir_gen:
  - selu
  - _adaptive_avg_pool2d
supported:
  - _adaptive_avg_pool2d
  - empty.memory_format
  - index.Tensor
  - unbind_copy.int
symint:
  - view_copy
  - embedding_dense_backward
  - empty.memory_format
  - _adaptive_avg_pool2d
  - split_copy.Tensor
autograd:
  - max_pool3d
non_native:
  - func: scalar(Scalar value, ScalarType type) -> Tensor
    opkind: at::prim::Constant
    properties:
      - ShapeCompute
      - TreatScalarsAsConstants
      - CanBeReusedDeclOnly
  - func: expand(Tensor input, SymInt[] size, SymInt extra, bool is_scalar_expand) -> Tensor
  - func: cast(Tensor input, ScalarType dtype, ScalarType? stype) -> Tensor
    opkind: ltc_cast
    properties:
      - ShapePrecompute
      - Lower
      - CreateFn
"""

PLAIN = """\
backend: PrivateUse1
class_name: MyFunctions
cpp_namespace: at::mine
extra_headers: |
  #include <mine.h>
device_guard: true
use_out_as_primary: true
supported:
- abs
- "add.out"
- mul.out:
    structured: true
    define_meta: true
full_codegen: [tanh, 'sigmoid', "all.dim", native_layer_norm]
ir_gen:
symint:
autograd:
  - max_pool2d
"""

YAMLS = {"small": SMALL}


def write(folder: Path, text: str, name: str = "backend.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path
