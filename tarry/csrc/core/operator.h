// What the recorder knows of an operator: its schema, boiled down once to the questions that the hot path asks.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <memory>
#include <string>
#include <vector>

#include "core/hash.h"

namespace tarry {

enum class ArgKind : uint8_t {
  Tensor,     // Tensor or Tensor?
  TensorList, // Tensor[] or Tensor?[]
  Number,     // Scalar or float, optional or not: a runtime input, not part of the graph's identity
  NumberList, // Scalar[]
  Generator,
  Constant, // everything else is part of the graph's identity
};

struct Argument {
  ArgKind kind;
  bool is_mutable;
  bool is_optional; // of a list: whether its elements are
};

// Bits of the table that tarry/codegen/op_table.py makes.
enum OperatorFlags : uint32_t {
  kRandom = 1u << 0,           // draws a seed from the generator when recorded
  kDynamic = 1u << 1,          // output shape or result depends on data: runs eagerly
  kOverwrites = 1u << 2,       // writes every element of its mutable arguments without reading them
  kShapeFromNumbers = 1u << 3, // Scalars decide the output's shape (arange)
  kMaskIndices = 1u << 4,      // output shape depends on data if an index is a mask
  kHostIndices = 1u << 5,      // takes index tensors that live on the host
  kShapeFromDevice = 1u << 6,  // the meta kernel promises other shapes than the real device's kernel gives
  kVerify = 1u << 7,           // may be tried on the CPU with zeros: if that fails, the call is wrong
  kPointwise = 1u << 8,
  kChecksNumbers = 1u << 9, // refuses some numbers
  kProduct = 1u << 10,      // made of products, whose precision is a global switch
  // When a call that was recorded can fail, once it runs. None of these: on data, as every operator that is not in the table.
  kNeverFails = 1u << 11,
  kFailsOnIntegers = 1u << 12, // a division by zero, a negative power
  kFailsOnIndex = 1u << 13,    // on a CUDA device the kernel checks it, which is no exception
  kFailsOnNumbers = 1u << 14,  // those for a CPU are checked when the call is recorded
  kListed = 1u << 15,          // it is in the table
  kForcedEager = 1u << 16,     // the user wants it run eagerly (tarry.config.force_fallback)
};

struct Signature;
using ShapeRule = std::unique_ptr<Signature> (*)(c10::ArrayRef<c10::IValue> arguments);

struct Operator {
  Operator(c10::OperatorHandle handle, uint32_t flags);

  c10::OperatorHandle handle;
  std::string name; // "aten::add.Tensor", or "aten::mm" for the default overload
  uint32_t flags;
  Hash128 hash;
  std::vector<Argument> arguments;
  bool mutates = false;
  bool has_out = false;     // mutable arguments given by keyword only (out=), which it may resize
  bool takes_lists = false; // PyTorch defines it as one operator after the other, for each place of its lists
  // Of tensors in lists no kernel of autograd counts the versions; those of a device do, so that backward() finds a saved tensor changed.
  bool counts_versions = false;
  bool gives_views = false; // the schema says so of a result
  bool recordable = true;   // its results are known before it runs, but for the tensors' contents
  bool takes_numbers = false;
  int generator_argument = -1;
  int dropout_argument = -1;              // of attention
  ShapeRule shape_rule;                   // of its common calls; may be null (shape_rules.h)
  const c10::KernelFunction* meta_kernel; // in C++, if the dispatcher has one in Python; else null

  bool has(OperatorFlags flag) const { return (flags & flag) != 0; }
  // Whether a call with these arguments needs a seed: attention without dropout is random in name only.
  bool draws(c10::ArrayRef<c10::IValue> given) const {
    const c10::IValue* dropout = dropout_argument < 0 ? nullptr : &given[dropout_argument];
    return has(kRandom) && !(dropout && dropout->isDouble() && dropout->toDouble() == 0.0);
  }
};

// The one Operator of a handle; made on first sight for operators that no table lists (custom operators).
Operator* find_operator(const c10::OperatorHandle& handle);
Operator* find_operator(const char* name, const char* overload);
// As if the operator had been removed and defined anew: something about it has changed.
void forget_operator(const c10::OperatorHandle& handle);
// Notes the flags of an operator of the table and registers the recording kernel for it, unless it has a kernel of its own (or of
// PyTorch's).
// False for an unknown name (of another torch version).
bool register_operator(const std::string& name, uint32_t flags, bool has_kernel);

} // namespace tarry
