// Batches that differ in sizes only: what they have in common, and the integers in which they differ.
//
// The outline of a batch is everything that identifies its program (see Structure), in two lists: `tags` is all but its integers,
// `integers` are the sizes, strides and offsets of all layouts and the integer arguments of all operators. The raw graph that
// Python is given (bind/bind_batch.cpp) has its integers in the same order: with_integers() (ir/raw.py) puts others in their place.
//
// A SizeTemplate says how the integers of batches with the same tags hang together: each is a polynomial of a few of them, the
// symbols. It was guessed from examples, and is never trusted: a batch is computed by a template's program only if every
// integer of it is what the template says.
#pragma once

#include "execute/batch.h"
#include "core/polynomial.h"

namespace tarry {

struct Outline {
  explicit Outline(const Batch& batch);
  ~Outline();
  Outline(const Outline&) = delete;
  Outline& operator=(const Outline&) = delete;

  // Whether they differ in integers only.
  bool same(const Outline& other) const { return tags == other.tags && operators == other.operators; }

  Hash128 key; // of the tags; the same in every process
  std::vector<uint64_t> tags;
  std::vector<const Operator*> operators; // tags have the hashes of their names
  std::vector<int64_t> integers;          // first those of the inputs: sizes, strides, offset of each
  std::vector<uint32_t> ranks;            // of the inputs
  bool comes_again = true;                // false: it has values that another batch has left, or arguments that no outline can hold
};

struct SizeTemplate {
  std::vector<uint32_t> symbols; // where in the integers each is found
  std::vector<Polynomial> polynomials;
  std::vector<uint32_t> indices; // for each integer that of its polynomial

  // The symbols' values, if the integers are those of the template there. Sizes 0 and 1 behave unlike others (they broadcast),
  // so that no symbol stands for them.
  std::optional<std::vector<int64_t>> match(const std::vector<int64_t>& integers) const;
};

} // namespace tarry
