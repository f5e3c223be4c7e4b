#include "execute/outline.h"

#include <cstring>

#include "core/arguments.h"

namespace tarry {

namespace {

// Whether an integer argument is an enumeration's: those are part of the tags.
bool is_enumeration(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type() ? argument.real_type() : argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  const auto kind = type->kind();
  return kind == c10::TypeKind::ScalarTypeType || kind == c10::TypeKind::LayoutType || kind == c10::TypeKind::MemoryFormatType;
}

class Writer {
 public:
  Writer(Outline& outline, const Batch& batch) : outline_(outline), batch_(batch) {}

  void tag(uint64_t word) { outline_.tags.push_back(word); }

  void layout(const Layout* layout) {
    if (!layout) {
      return tag(0);
    }
    const size_t rank = layout->sizes.size();
    tag(1 + (static_cast<uint64_t>(layout->dtype) << 32 | rank << 1));
    auto& integers = outline_.integers;
    const size_t end = integers.size();
    integers.resize(end + 2 * rank + 1);
    int64_t* out = integers.data() + end;
    for (size_t i = 0; i < rank; ++i) {
      out[i] = layout->sizes[i];
      out[rank + i] = layout->strides[i];
    }
    out[2 * rank] = layout->offset;
  }

  void node(const Node& node) {
    outline_.operators.push_back(node.op);
    tag(node.op->hash.lo); // by name: an address is another one in each process
    const size_t outputs = node.outputs();
    tag(static_cast<uint64_t>(node.region) << 32 | outputs);
    const auto& declared = node.op->handle.schema().arguments();
    visit_arguments(
        *node.op, node.slots, [&](size_t, Operand operand) { tensor(node, operand); },
        [&](size_t, bool given, c10::ArrayRef<Operand> items) {
          tag(given ? items.size() : UINT64_MAX);
          for (const Operand& item : items) {
            tensor(node, item);
          }
        },
        [&](size_t i, size_t index) { plain(node, node.op->arguments[i].kind, node.constants[index], declared[i]); });
    for (uint32_t i = 0; i < outputs; ++i) {
      layout(node.output_layout(i));
    }
    for (const Mutation& mutation : node.mutations) {
      tag(mutation.edge);
    }
    for (const Signature::Item& item : node.signature->items) {
      tag(static_cast<uint64_t>(item.kind) << 32 | item.index);
      constant(item.constant, false);
    }
  }

 private:
  void plain(const Node& node, ArgKind kind, const c10::IValue& value, const c10::Argument& declared) {
    const bool decides = node.op->has(kShapeFromNumbers);
    if (kind == ArgKind::Number) {
      number(value, decides);
    } else if (kind == ArgKind::NumberList) {
      tag(value.isNone() ? 1 : 2 + value.toListRef().size());
      if (!value.isNone()) {
        for (const c10::IValue& item : value.toListRef()) {
          number(item, decides);
        }
      }
    } else if (kind == ArgKind::Constant) {
      constant(value, !(value.isInt() && is_enumeration(declared)));
    }
  }

  void tensor(const Node& node, Operand operand) {
    if (operand.slot != kEdge) {
      tag(static_cast<uint64_t>(operand.slot));
      if (operand.slot == kWrappedNumber) {
        number(node.constants[operand.index], false);
      }
      return;
    }
    const Edge& edge = node.edges[operand.index];
    tag(static_cast<uint64_t>(batch_.index_of(*edge.node) + edge.output) << 16 | kEdge);
    layout(edge.view);
  }

  // The value of a number is no part of a graph's identity, unless it decides a shape.
  void number(const c10::IValue& value, bool decides) {
    tag(value.isNone() ? 1 : value.isDouble() ? 2 : value.isInt() ? 3 : value.isBool() ? 4 : 5);
    if (decides) {
      constant(value, true);
    }
  }

  void constant(const c10::IValue& value, bool may_vary) {
    if (value.isInt() && may_vary) {
      tag('i');
      outline_.integers.push_back(value.toInt());
    } else if (value.isInt()) {
      tag('e');
      tag(static_cast<uint64_t>(value.toInt()));
    } else if (value.isNone()) {
      tag('n');
    } else if (value.isBool()) {
      tag(value.toBool() ? 't' : 'f');
    } else if (value.isDouble()) {
      uint64_t bits = 0;
      const double number = value.toDouble();
      std::memcpy(&bits, &number, sizeof(bits));
      tag('d');
      tag(bits);
    } else if (value.isString()) {
      std::string_view text = value.toStringView();
      tag('s' + (static_cast<uint64_t>(text.size()) << 8));
      for (const char letter : text) {
        tag(static_cast<unsigned char>(letter));
      }
    } else if (value.isDevice()) {
      tag('v' + (static_cast<uint64_t>(value.toDevice().type()) << 8) + (static_cast<uint64_t>(value.toDevice().index()) << 24));
    } else if (value.isIntList()) {
      const auto items = value.toIntVector();
      tag('l' + (static_cast<uint64_t>(items.size()) << 8));
      outline_.integers.insert(outline_.integers.end(), items.begin(), items.end());
    } else if (value.isList()) {
      tag('m' + (static_cast<uint64_t>(value.toListRef().size()) << 8));
      for (const c10::IValue& item : value.toListRef()) {
        constant(item, may_vary);
      }
    } else {
      outline_.comes_again = false;
    }
  }

  Outline& outline_;
  const Batch& batch_;
};

// Of an outline that is gone, for the next one: most are looked at once, and to allocate thousands of bytes at each step makes
// the C library tidy up its heap. Outlines are made and freed with the GIL held.
struct Buffers {
  std::vector<uint64_t> tags;
  std::vector<int64_t> integers;
};
constexpr size_t kMaxSpare = 1 << 20;

Buffers& spare() {
  static auto* instance = new Buffers();
  return *instance;
}

} // namespace

Outline::Outline(const Batch& batch) {
  std::swap(tags, spare().tags);
  std::swap(integers, spare().integers);
  Writer writer(*this, batch);
  for (const NodePtr& node : batch.order) {
    writer.tag(is_input(*node) ? 1 : 2);
    if (is_input(*node)) {
      comes_again = comes_again && node->is_leaf();
      for (uint32_t i = 0; i < node->outputs(); ++i) {
        writer.layout(node->output_layout(i));
        ranks.push_back(static_cast<uint32_t>(node->output_layout(i)->sizes.size()));
      }
    }
  }
  for (const NodePtr& node : batch.order) {
    if (!is_input(*node)) {
      writer.node(*node);
    }
  }
  for (size_t i = 0; i < batch.roots.size(); ++i) {
    writer.tag(batch.index_of(*batch.roots[i].node) + batch.roots[i].output);
    writer.tag(static_cast<uint64_t>(static_cast<int64_t>(batch.replaces[i])));
  }
  for (const uint64_t word : tags) {
    key = mix(key, word);
  }
}

Outline::~Outline() {
  Buffers& kept = spare();
  if (kept.tags.capacity() < tags.capacity() && tags.capacity() <= kMaxSpare) {
    tags.clear();
    integers.clear();
    kept = {std::move(tags), std::move(integers)};
  }
}

std::optional<std::vector<int64_t>> SizeTemplate::match(const std::vector<int64_t>& integers) const {
  if (integers.size() != indices.size()) {
    return std::nullopt;
  }
  std::vector<int64_t> found;
  for (const uint32_t position : symbols) {
    found.push_back(integers[position]);
    if (found.back() < 2) {
      return std::nullopt;
    }
  }
  const std::vector<int64_t> values = values_of(polynomials, found);
  for (size_t i = 0; i < integers.size(); ++i) {
    if (integers[i] != values[indices[i]]) {
      return std::nullopt;
    }
  }
  return found;
}

} // namespace tarry
