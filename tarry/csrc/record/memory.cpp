#include "record/memory.h"

#include <algorithm>
#include <unordered_set>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace tarry {
namespace {

std::atomic<int64_t> max_pending_bytes{64 << 20};
constexpr int64_t kCutsBetweenTrims = 4; // two steps are held at once, and the next ones need the same memory
constexpr double kPatience = 2.0;        // by which the budget may be exceeded until a good place comes

int64_t allowed_bytes(const DeviceBytes& bytes) {
  return std::max({max_pending_bytes.load(std::memory_order_relaxed), bytes.peak / 2, int64_t{1}});
}

// How far what is held lies above what eager has held at its worst, as a share of what is allowed; above 1 is too much.
double share_of_budget(const DeviceBytes& bytes) {
  return static_cast<double>(bytes.live + bytes.pinned - bytes.peak) / static_cast<double>(allowed_bytes(bytes));
}

// The counts of this epoch: a cut starts them anew.
DeviceBytes& counts(DeviceState& state) {
  if (C10_UNLIKELY(state.bytes.epoch != state.epoch)) {
    state.bytes.epoch = state.epoch;
    state.bytes.pinned = 0;
    state.bytes.peak = state.bytes.live;
  }
  return state.bytes;
}

} // namespace

void set_max_pending_bytes(int64_t bytes) {
  max_pending_bytes = bytes;
}

void drop_leaf(TarryStorage* storage, Graveyard& graveyard) {
  if (storage->leaf && storage->leaf_epoch == storage->state->epoch) {
    counts(*storage->state).pinned += static_cast<int64_t>(storage->leaf->leaf_layout->nbytes);
  }
  graveyard.nodes.push_back(std::move(storage->leaf));
  storage->leaf_epoch = 0;
}

int64_t pinned_bytes(DeviceState& state) {
  int64_t found = 0;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> stack;
  auto visit = [&](const NodePtr& node) {
    if (node->epoch != state.epoch || !seen.insert(node.get()).second) {
      return;
    }
    if (!node->is_leaf()) {
      stack.push_back(node.get());
      return;
    }
    const bool is_alive = node->source.use_count() != 0;
    if (!is_alive || static_cast<TarryStorage*>(node->source._unsafe_get_target())->leaf != node) {
      found += static_cast<int64_t>(node->leaf_layout->nbytes);
    }
  };
  for (const TarryStorage* storage = state.pending; storage; storage = storage->next) {
    visit(storage->value.node);
  }
  while (!stack.empty()) {
    const Node* node = stack.back();
    stack.pop_back();
    for (const Edge& edge : node->edges) {
      visit(edge.node);
    }
  }
  return found;
}

int64_t promised_bytes(DeviceState& state) {
  std::lock_guard<std::mutex> guard(state.mutex);
  int64_t promised = state.bytes.live - state.bytes.stored;
  for (const TarryStorage* storage = state.pending; storage; storage = storage->next) {
    if (storage->leaf && storage->leaf_epoch == state.epoch) {
      promised -= static_cast<int64_t>(storage->home->nbytes);
    }
  }
  return std::max<int64_t>(promised, 0);
}

bool over_budget(DeviceState& state, bool reads_pending) {
  DeviceBytes& bytes = counts(state);
  bytes.peak = std::max(bytes.peak, bytes.live.load(std::memory_order_relaxed));
  if (C10_LIKELY(bytes.pinned <= max_pending_bytes.load(std::memory_order_relaxed)) ||
      share_of_budget(bytes) <= (reads_pending ? kPatience : 1.0)) {
    return false;
  }
  // What has read a leaf may be dead by now, and the leaf with it. A walk costs more than an operator: cut if it would come
  // again soon.
  bytes.pinned = pinned_bytes(state);
  return share_of_budget(bytes) > 0.5;
}

int64_t allowed_holes(const DeviceState& state) {
  return kCutsBetweenTrims * allowed_bytes(state.bytes);
}

void give_back_holes(int64_t allowed) {
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
  static std::atomic<uint32_t> cuts{0};
  if (++cuts % kCutsBetweenTrims == 0 && static_cast<int64_t>(mallinfo2().fordblks) > allowed) {
    malloc_trim(static_cast<size_t>(allowed));
  }
#endif
}

} // namespace tarry
