#include "outline.h"

#include <cstring>

namespace tarry {

bool is_enumeration(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type() ? argument.real_type() : argument.type();
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  const auto kind = type->kind();
  return kind == c10::TypeKind::ScalarTypeType || kind == c10::TypeKind::LayoutType || kind == c10::TypeKind::MemoryFormatType;
}

namespace {

class Writer {
 public:
  explicit Writer(Outline& outline) : outline_(outline) {}

  void tag(uint64_t word) {
    outline_.tags.push_back(word);
    outline_.key = mix(outline_.key, word);
  }

  void layout(const Layout* layout) {
    if (!layout) {
      return tag(0);
    }
    tag(1 + (static_cast<uint64_t>(layout->dtype) << 32 | layout->sizes.size() << 1));
    auto& integers = outline_.integers;
    integers.insert(integers.end(), layout->sizes.begin(), layout->sizes.end());
    integers.insert(integers.end(), layout->strides.begin(), layout->strides.end());
    integers.push_back(layout->offset);
  }

  void node(const Node& node) {
    outline_.tags.push_back(reinterpret_cast<uint64_t>(node.op));
    outline_.key = mix(outline_.key, node.op->hash); // by name: an address is another one in each process
    tag(static_cast<uint64_t>(node.region));
    const auto& declared = node.op->handle.schema().arguments();
    for (size_t i = 0; i < node.op->arguments.size(); ++i) {
      argument(node, node.op->arguments[i].kind, declared[i]);
    }
    tag(node.outputs());
    for (uint32_t i = 0; i < node.outputs(); ++i) {
      layout(node.output_layout(i));
    }
    for (const Mutation& mutation : node.mutations) {
      tag(mutation.edge);
    }
    for (const Signature::Item& item : node.signature->items) {
      tag(static_cast<uint64_t>(item.kind) << 32 | item.index);
      constant(item.constant, false);
    }
    edge_ = constant_ = slot_ = 0;
  }

 private:
  void argument(const Node& node, ArgKind kind, const c10::Argument& declared) {
    switch (kind) {
      case ArgKind::Tensor:
        return tensor(node, node.slots[slot_++]);
      case ArgKind::TensorList: {
        const int n = node.slots[slot_++];
        tag(static_cast<uint64_t>(static_cast<int64_t>(n)));
        for (int k = 0; k < n; ++k) {
          tensor(node, node.slots[slot_++]);
        }
        return;
      }
      case ArgKind::Number:
        return number(node.constants[constant_++], node.op->has(kShapeFromNumbers));
      case ArgKind::NumberList: {
        const c10::IValue& value = node.constants[constant_++];
        tag(value.isNone() ? 1 : 2 + value.toListRef().size());
        if (!value.isNone()) {
          for (const c10::IValue& item : value.toListRef()) {
            number(item, node.op->has(kShapeFromNumbers));
          }
        }
        return;
      }
      case ArgKind::Generator:
        ++constant_;
        return;
      case ArgKind::Constant: {
        const c10::IValue& value = node.constants[constant_++];
        return constant(value, !(value.isInt() && is_enumeration(declared)));
      }
    }
  }

  void tensor(const Node& node, int16_t slot) {
    tag(static_cast<uint64_t>(slot));
    if (slot == kWrappedNumber) {
      number(node.constants[constant_++], false);
    } else if (slot == kEdge) {
      const Edge& edge = node.edges[edge_++];
      tag(edge.node->first_slot + edge.output);
      layout(edge.view);
    }
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
  size_t edge_ = 0, constant_ = 0, slot_ = 0;
};

} // namespace

Outline::Outline(const Batch& batch) {
  Writer writer(*this);
  tags.reserve(24 * batch.order.size());
  integers.reserve(12 * batch.order.size());
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
      comes_again = comes_again && !node->error;
      writer.node(*node);
    }
  }
  for (size_t i = 0; i < batch.roots.size(); ++i) {
    writer.tag(batch.roots[i].node->first_slot + batch.roots[i].output);
    writer.tag(static_cast<uint64_t>(static_cast<int64_t>(batch.replaces[i])));
  }
}

std::optional<std::vector<int64_t>> SizeTemplate::match(const std::vector<int64_t>& integers) const {
  if (integers.size() != places.size()) {
    return std::nullopt;
  }
  std::vector<int64_t> found;
  for (const uint32_t place : symbols) {
    found.push_back(integers[place]);
    if (found.back() < 2) {
      return std::nullopt;
    }
  }
  const std::vector<int64_t> values = values_of(polynomials, found);
  for (size_t i = 0; i < integers.size(); ++i) {
    if (integers[i] != values[places[i]]) {
      return std::nullopt;
    }
  }
  return found;
}

} // namespace tarry
