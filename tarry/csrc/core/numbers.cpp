#include "core/numbers.h"

#include <ATen/ScalarOps.h>

#include <algorithm>
#include <cmath>

#include "core/arguments.h"

namespace tarry {

at::Tensor wrapped_number(const at::Scalar& value) {
  at::Tensor number = at::detail::scalar_tensor_static(value, value.type(), at::kCPU);
  number.unsafeGetTensorImpl()->set_wrapped_number(true);
  return number;
}

bool same_double(double a, double b) {
  return a == b ? std::signbit(a) == std::signbit(b) : std::isnan(a) && std::isnan(b);
}

bool same_value(const c10::IValue& a, const c10::IValue& b) {
  if (a.isInt() && b.isInt()) {
    return a.toInt() == b.toInt();
  }
  if (a.isDouble() && b.isDouble()) {
    return same_double(a.toDouble(), b.toDouble());
  }
  if (a.isComplexDouble() && b.isComplexDouble()) {
    const auto x = a.toComplexDouble(), y = b.toComplexDouble();
    return same_double(x.real(), y.real()) && same_double(x.imag(), y.imag());
  }
  if (a.isList() && b.isList()) {
    const auto x = a.toListRef(), y = b.toListRef();
    return x.size() == y.size() && std::equal(x.begin(), x.end(), y.begin(), same_value);
  }
  if (a.isGenerator() && b.isGenerator()) {
    return a.toGenerator() == b.toGenerator();
  }
  return a.tagKind() == b.tagKind() && (a.isNone() || a == b);
}

namespace {

constexpr int64_t kWhole = -1;

// Calls visit(constant, item) for each number of a node, in the order of the raw graph: where it is among the constants, and in
// that one if it is a list; kWhole if it is not.
template <typename Visit>
void visit_numbers(const Node& node, const Visit& visit) {
  const auto tensor = [&](Operand operand) {
    if (operand.slot == kWrappedNumber) {
      visit(operand.index, kWhole);
    }
  };
  visit_arguments(
      *node.op, node.slots, [&](size_t, Operand operand) { tensor(operand); },
      [&](size_t, bool, c10::ArrayRef<Operand> items) { std::for_each(items.begin(), items.end(), tensor); },
      [&](size_t i, size_t constant) {
        const ArgKind kind = node.op->arguments[i].kind;
        if (kind == ArgKind::Generator) {
          visit(node.constants.size() - 1, kWhole);
        } else if (kind == ArgKind::Number && !node.constants[constant].isNone()) {
          visit(constant, kWhole);
        } else if (kind == ArgKind::NumberList && !node.constants[constant].isNone()) {
          for (size_t item = 0; item < node.constants[constant].toListRef().size(); ++item) {
            visit(constant, static_cast<int64_t>(item));
          }
        }
      });
  if (node.op->has(kRandom) && node.op->generator_argument < 0) {
    visit(node.constants.size() - 1, kWhole);
  }
}

} // namespace

void append_numbers(const Node& node, std::vector<c10::IValue>& found) {
  visit_numbers(node, [&](size_t constant, int64_t item) {
    const c10::IValue& value = node.constants[constant];
    found.push_back(item == kWhole ? value : value.toListRef()[item]);
  });
}

int64_t seed_among_numbers(const Node& node) {
  int64_t k = 0, found = -1;
  visit_numbers(node, [&](size_t constant, int64_t) {
    found = node.op->has(kRandom) && constant == node.constants.size() - 1 ? k : found;
    ++k;
  });
  return found;
}

size_t count_numbers(const Node& node) {
  size_t count = 0;
  visit_numbers(node, [&count](size_t, int64_t) { ++count; });
  return count;
}

void set_number(Node& node, size_t which, double number) {
  size_t k = 0;
  visit_numbers(node, [&](size_t constant, int64_t item) {
    if (k++ != which) {
      return;
    }
    c10::IValue& value = node.constants[constant];
    if (item == kWhole) {
      value = number;
    } else {
      auto list = value.toList().copy(); // which may be shared with another node
      list.set(static_cast<size_t>(item), number);
      value = std::move(list);
    }
  });
}

} // namespace tarry
