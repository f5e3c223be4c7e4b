#include "verify.h"

#include "core/arguments.h"
#include "numbers.h"
#include "scan.h"

namespace tarry {
namespace {

using Kind = Difference::Kind;

// The name of the argument that a constant of a node belongs to.
std::string argument_name(const Node& node, size_t which) {
  std::string found = "an argument";
  const auto& schema = node.op->handle.schema().arguments();
  const auto look = [&](size_t i, Operand operand) {
    if (operand.slot == kWrappedNumber && operand.index == which) {
      found = schema[i].name();
    }
  };
  visit_arguments(
      *node.op, node.slots, look,
      [&](size_t i, bool, c10::ArrayRef<Operand> items) {
        for (const Operand& item : items) {
          look(i, item);
        }
      },
      [&](size_t i, uint32_t constant) { look(i, {kWrappedNumber, constant}); });
  return found;
}

class Comparison {
 public:
  Comparison(const Recorded& before, const Recorded& now, bool numbers)
      : before_(before), now_(now), numbers_(numbers), known_(side(before)), found_(side(now)) {}

  std::optional<Difference> run() {
    for (size_t i = 0; i < before_.roots.size(); ++i) {
      const Root& a = before_.snapshot.batch->roots.at(before_.roots[i]);
      const Root& b = now_.snapshot.batch->roots.at(now_.roots.at(i));
      if (a.output != b.output) {
        return Difference{operator_or_wiring(*a.node, *b.node), a.node.get(), b.node.get(), {}, {}, {}};
      }
      waiting_.emplace_back(a.node.get(), b.node.get());
    }
    while (!waiting_.empty()) {
      const auto [a, b] = waiting_.back();
      waiting_.pop_back();
      if (auto difference = visit(*a, *b)) {
        return earliest(*difference);
      }
    }
    return std::nullopt;
  }

 private:
  struct Side {
    ska::flat_hash_map<const Node*, uint32_t> sources;
    ska::flat_hash_map<const Node*, uint64_t> draws;
  };

  static Side side(const Recorded& recorded) {
    Side made;
    const Snapshot& snapshot = recorded.snapshot;
    for (size_t i = 0; i < snapshot.leaves.size(); ++i) {
      made.sources[snapshot.leaves[i].node.get()] = recorded.sources.at(i);
    }
    for (const auto& [node, draw] : recorded.draws) {
      made.draws[snapshot.batch->order.at(node).get()] = draw;
    }
    return made;
  }

  static Kind operator_or_wiring(const Node& a, const Node& b) { return a.op == b.op ? Kind::Wiring : Kind::Operator; }

  // What is different about two nodes by themselves.
  std::optional<Difference> look(const Node& a, const Node& b) {
    const auto differ = [&](Kind kind) { return Difference{kind, &a, &b, {}, {}, {}}; };
    if (a.op != b.op) {
      return differ(Kind::Operator);
    }
    if (a.is_leaf()) {
      if (known_.sources.at(&a) != found_.sources.at(&b)) {
        return differ(Kind::Source);
      }
      return a.leaf_layout == b.leaf_layout ? std::nullopt : std::make_optional(differ(Kind::Layout));
    }
    if (a.slots != b.slots || a.edges.size() != b.edges.size() || a.constants.size() != b.constants.size() || a.region != b.region) {
      return differ(Kind::Wiring);
    }
    const auto drawn = known_.draws.find(&a), draws = found_.draws.find(&b);
    const bool random = drawn != known_.draws.end();
    if (random != (draws != found_.draws.end()) || (random && drawn->second != draws->second)) {
      return differ(Kind::Draw);
    }
    if (!numbers_ && !same_call(a, b.slots, b.constants)) {
      return differ(Kind::Wiring);
    }
    for (size_t i = 0; numbers_ && i + (random ? 1 : 0) < a.constants.size(); ++i) { // a random node's last one is its seed
      if (!same_value(a.constants[i], b.constants[i])) {
        return Difference{Kind::Value, &a, &b, argument_name(a, i), a.constants[i], b.constants[i]};
      }
    }
    if (a.signature != b.signature) {
      return differ(Kind::Layout);
    }
    for (size_t i = 0; i < a.edges.size(); ++i) {
      if (a.edges[i].view != b.edges[i].view || a.edges[i].output != b.edges[i].output) {
        return differ(Kind::Wiring);
      }
    }
    return std::nullopt;
  }

  std::optional<Difference> visit(const Node& a, const Node& b) {
    const auto [pair, is_new] = pairs_.emplace(&a, &b);
    if (!is_new) {
      return pair->second == &b ? std::nullopt : std::make_optional(Difference{Kind::Wiring, &a, &b, {}, {}, {}});
    }
    auto difference = look(a, b);
    if (!difference) {
      for (size_t i = 0; i < a.edges.size(); ++i) {
        waiting_.emplace_back(a.edges[i].node.get(), b.edges[i].node.get());
      }
    }
    return difference;
  }

  // The first difference in the order of the program says more than the first one on the way back from the results.
  Difference earliest(const Difference& found) {
    const auto &a = before_.snapshot.batch->order, &b = now_.snapshot.batch->order;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
      if (auto difference = look(*a[i], *b[i])) {
        return *difference;
      }
    }
    return found;
  }

  const Recorded& before_;
  const Recorded& now_;
  const bool numbers_;
  Side known_, found_;
  ska::flat_hash_map<const Node*, const Node*> pairs_;
  std::vector<std::pair<const Node*, const Node*>> waiting_;
};

} // namespace

std::optional<Difference> compare(const Recorded& before, const Recorded& now, bool numbers) {
  return Comparison(before, now, numbers).run();
}

} // namespace tarry
