// Whether a recorded call is what a replay of an earlier one would have been: the verification behind tarry.compile.
//
// Two recordings are the same if every storage that outlives the call gets the same value of the same sources. What was recorded
// for nothing but storages that are dead by the end of the call does not count: when Python's garbage collector frees a cycle
// is no difference between calls.
#pragma once

#include "replay.h"

namespace tarry {

struct Recorded {
  const Snapshot& snapshot;
  std::vector<uint32_t> sources; // per leaf; the same number on both sides means the same source
  std::vector<uint32_t> roots; // which of the batch's roots count; both sides list them in the same order
  std::vector<std::pair<uint32_t, uint64_t>> draws; // a random node, and how many seeds the call had drawn before its own
};

struct Difference {
  enum class Kind : uint8_t { Operator, Layout, Source, Wiring, Value, Draw };
  Kind kind;
  const Node* before; // either may be a leaf
  const Node* now;
  std::string argument; // Value: which of the operator's arguments,
  c10::IValue was, is; // ... and its values
};

// Unless `numbers`, those that operators were given may be others.
std::optional<Difference> compare(const Recorded& before, const Recorded& now, bool numbers);

} // namespace tarry
