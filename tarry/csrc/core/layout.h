// A Layout says how a tensor lies in its storage. Layouts are interned: equal layouts are the same pointer, for good.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

#include "core/hash.h"

namespace tarry {

struct Layout {
  c10::ScalarType dtype;
  int64_t offset; // in elements of dtype
  c10::DimVector sizes;
  c10::DimVector strides;
  int64_t numel;
  size_t nbytes;     // of a storage that just holds this layout
  Hash128 type_hash; // without the offset: all that shape inference may depend on
  Hash128 hash;      // with the offset
  bool dense;        // non-overlapping, without gaps, offset 0: fit to be a home layout
  bool may_overlap;  // two of its elements may lie in the same place

  bool describes(const c10::TensorImpl* tensor) const {
    return tensor->storage_offset() == offset && tensor->dtype().toScalarType() == dtype &&
        tensor->sizes() == c10::IntArrayRef(sizes) && tensor->strides() == c10::IntArrayRef(strides);
  }
};

const Layout* intern_layout(c10::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset = 0);
const Layout* flat_layout(c10::ScalarType dtype, int64_t numel);
// All of a storage: in elements of `dtype` if they fill it, else in bytes.
const Layout* flat_home(c10::ScalarType dtype, size_t nbytes);

inline const Layout* layout_of(const c10::TensorImpl* tensor) {
  return intern_layout(tensor->dtype().toScalarType(), tensor->sizes(), tensor->strides(), tensor->storage_offset());
}

} // namespace tarry
