#include "core/operator.h"

#include <ATen/core/jit_type.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

#include "record/record.h"
#include "record/shape_rules.h"

namespace tarry {
namespace {

ArgKind kind_of(const c10::TypePtr& declared) {
  c10::TypePtr type = declared;
  if (auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  switch (type->kind()) {
    case c10::TypeKind::TensorType:
      return ArgKind::Tensor;
    case c10::TypeKind::NumberType:
    case c10::TypeKind::FloatType:
      return ArgKind::Number;
    case c10::TypeKind::GeneratorType:
      return ArgKind::Generator;
    case c10::TypeKind::ListType: {
      c10::TypePtr element = type->castRaw<c10::ListType>()->getElementType();
      if (auto optional = element->cast<c10::OptionalType>()) {
        element = optional->getElementType();
      }
      if (element->kind() == c10::TypeKind::TensorType) {
        return ArgKind::TensorList;
      }
      return element->kind() == c10::TypeKind::NumberType ? ArgKind::NumberList : ArgKind::Constant;
    }
    default:
      return ArgKind::Constant;
  }
}

bool is_optional(const c10::TypePtr& type) {
  if (const auto* list = type->castRaw<c10::ListType>()) {
    return list->getElementType()->kind() == c10::TypeKind::OptionalType;
  }
  return type->kind() == c10::TypeKind::OptionalType;
}

bool is_tensor_type(const c10::TypePtr& type) {
  const ArgKind kind = kind_of(type);
  return kind == ArgKind::Tensor || kind == ArgKind::TensorList;
}

struct Registry {
  std::mutex mutex;
  std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Operator>> operators;
  // Operators that were removed: nodes, programs and signatures may still point to them.
  std::vector<std::unique_ptr<Operator>> retired;
  std::unordered_map<std::string, uint64_t> redefinitions; // by name; part of the hash of what is defined anew
  std::unordered_set<std::string> forced_eager;            // names that the user wants run eagerly
  std::vector<std::unique_ptr<torch::Library>> libraries;
};

Registry& registry() {
  static auto* instance = new Registry();
  return *instance;
}

// A custom operator may be removed and defined anew, with another schema at the same address.
struct RemovalListener final : c10::OpRegistrationListener {
  void onOperatorRegistered(const c10::OperatorHandle& /*handle*/) override {}
  void onOperatorDeregistered(const c10::OperatorHandle& handle) override { forget_operator(handle); }
};

Operator* intern(const c10::OperatorHandle& handle, uint32_t flags) {
  static const auto listening = c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<RemovalListener>());
  auto& shared = registry();
  std::lock_guard<std::mutex> guard(shared.mutex);
  auto& slot = shared.operators[&handle.schema()];
  if (!slot) {
    slot = std::make_unique<Operator>(handle, flags);
    if (auto it = shared.redefinitions.find(slot->name); it != shared.redefinitions.end()) {
      slot->hash = mix(slot->hash, it->second);
    }
    slot->flags |= shared.forced_eager.count(slot->name) ? kForcedEager : 0;
  }
  return slot.get();
}

// The recording kernel of one operator.
struct RecordingKernel final : c10::OperatorKernel {
  explicit RecordingKernel(Operator* op) : op(op) {}
  void operator()(const c10::OperatorHandle& /*handle*/, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
    if (!op->counts_versions) {
      return record(*op, stack);
    }
    const size_t count = op->arguments.size();
    c10::SmallVector<c10::IValue, 1> written;
    for (size_t i = 0; i < count; ++i) {
      if (op->arguments[i].is_mutable) {
        written.push_back((*stack)[stack->size() - count + i]);
      }
    }
    record(*op, stack);
    for (const c10::IValue& list : written) {
      for (const c10::IValue& item : list.toListRef()) {
        if (!item.toTensor().is_inference()) {
          item.toTensor().unsafeGetTensorImpl()->bump_version();
        }
      }
    }
  }
  Operator* op;
};

} // namespace

Operator::Operator(c10::OperatorHandle h, uint32_t flags) : handle(h), flags(flags) {
  const c10::FunctionSchema& schema = handle.schema();
  name = schema.name();
  if (!schema.overload_name().empty()) {
    name += "." + schema.overload_name();
  }
  hash = mix(Hash128(), name);
  shape_rule = find_shape_rule(name);
  meta_kernel = find_meta_kernel(name);
  for (const c10::Argument& argument : schema.arguments()) {
    const bool is_mutable = argument.alias_info() && argument.alias_info()->isWrite();
    const ArgKind kind = kind_of(argument.real_type() ? argument.real_type() : argument.type());
    if (kind == ArgKind::Generator) {
      generator_argument = static_cast<int>(arguments.size());
    }
    if (kind == ArgKind::Number && argument.name() == "dropout_p") {
      dropout_argument = static_cast<int>(arguments.size());
    }
    mutates = mutates || is_mutable;
    has_out = has_out || (is_mutable && argument.kwarg_only());
    takes_numbers = takes_numbers || kind == ArgKind::Number || kind == ArgKind::NumberList;
    arguments.push_back({kind, is_mutable, is_optional(argument.type())});
  }
  takes_lists = name.rfind("aten::_foreach_", 0) == 0;
  counts_versions = mutates && takes_lists;
  gives_views = std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
  // Integers beside tensors are sizes, which shape inference knows. An operator that neither gives nor changes a tensor
  // acts by a side effect or reads data.
  bool has_tensor = false, only_known = true;
  for (const c10::Argument& result : schema.returns()) {
    const bool is_tensor = is_tensor_type(result.type());
    const auto kind = result.type()->kind();
    has_tensor = has_tensor || is_tensor;
    only_known = only_known && (is_tensor || kind == c10::TypeKind::IntType || kind == c10::TypeKind::SymIntType);
  }
  recordable = only_known && (has_tensor || mutates);
  // The table knows which operators of PyTorch's draw random numbers; a custom one says so by its tag.
  const bool is_custom = name.rfind("aten::", 0) != 0;
  has_out = has_out && !is_custom; // what a custom operator writes to has the right shape, or it raises
  if (generator_argument >= 0 || (is_custom && handle.hasTag(at::Tag::nondeterministic_seeded))) {
    this->flags |= kRandom;
  }
}

void forget_operator(const c10::OperatorHandle& handle) {
  auto& shared = registry();
  std::lock_guard<std::mutex> guard(shared.mutex);
  auto it = shared.operators.find(&handle.schema());
  if (it != shared.operators.end()) {
    ++shared.redefinitions[it->second->name];
    shared.retired.push_back(std::move(it->second));
    shared.operators.erase(it);
  }
}

Operator* find_operator(const c10::OperatorHandle& handle) {
  return intern(handle, 0);
}

Operator* find_operator(const char* name, const char* overload) {
  return intern(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload), 0);
}

bool register_operator(const std::string& name, uint32_t flags, bool has_kernel) {
  const size_t dot = name.find('.');
  const c10::OperatorName key(name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1));
  auto handle = c10::Dispatcher::singleton().findSchema(key);
  if (!handle) {
    return false;
  }
  Operator* op = intern(*handle, 0);
  op->flags |= flags | kListed;
  if (has_kernel) {
    return true;
  }
  const size_t colons = name.find("::");
  auto library = std::make_unique<torch::Library>(
      torch::Library::IMPL, name.substr(0, colons), c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  library->impl(name.substr(colons + 2).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<RecordingKernel>(op)));
  auto& shared = registry();
  std::lock_guard<std::mutex> guard(shared.mutex);
  shared.libraries.push_back(std::move(library));
  return true;
}

void set_forced_eager(const std::vector<std::string>& names) {
  auto& shared = registry();
  std::lock_guard<std::mutex> guard(shared.mutex);
  shared.forced_eager = {names.begin(), names.end()};
  for (auto& [schema, op] : shared.operators) {
    const bool forced = shared.forced_eager.count(op->name) != 0;
    op->flags = forced ? op->flags | kForcedEager : op->flags & ~static_cast<uint32_t>(kForcedEager);
  }
}

} // namespace tarry
