// What custom operators (tarry/custom_ops) need of the dispatcher that Python cannot give at no cost.
#pragma once

#include <torch/library.h>

#include <memory>
#include <string>
#include <vector>

namespace tarry {

// Kernels of one operator, registered as long as this lives.
struct Kernels {
  explicit Kernels(const std::string& qualname);
  void add(c10::DispatchKey key, torch::CppFunction&& kernel);

  c10::OperatorHandle op;
  std::vector<std::unique_ptr<torch::Library>> libraries;
};

// The native kernels of an operator that tarry.custom_op declares.
struct CustomOpKernels final : Kernels {
  CustomOpKernels(const std::string& qualname, const std::string& rule);
};

// Has an operator recorded whole that PyTorch would run through a kernel for all devices (CompositeExplicitAutograd), or take apart.
struct RecordedWhole final : Kernels {
  explicit RecordedWhole(const std::string& qualname);
};

void forget_operator(const std::string& qualname);

} // namespace tarry
