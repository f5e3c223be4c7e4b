// torch.autocast("tarry"): the same operators run in lower precision, in float32 or in their widest input type as on CUDA.
// Without these kernels autocast would silently do nothing. The lists are PyTorch's own, so they follow its version.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace tarry {
namespace {

// PyTorch's lists name its types without their namespace.
using namespace at;

Tensor refuse_binary_cross_entropy(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(
      false,
      "binary_cross_entropy (and torch.nn.BCELoss) is unsafe to autocast: the sigmoid before it can round to 0 or 1 in "
      "lower precision. Use binary_cross_entropy_with_logits (torch.nn.BCEWithLogitsLoss) on the sigmoid's input, "
      "or compute the loss in float32 under torch.autocast('tarry', enabled=False)");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define TARRY_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define TARRY_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TARRY_FP32_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define TARRY_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(TARRY_LOWER_PRECISION)
  AT_FORALL_FP32(TARRY_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(TARRY_FP32_RESULT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(TARRY_PROMOTE)
#if __has_include(<ATen/ops/linalg_matrix_sqrth.h>) // torch 2.15 has it in CUDA's kernels, and in none of the lists
  KERNEL_PRIVATEUSEONE(linalg_matrix_sqrth, fp32)
#endif
  m.impl("binary_cross_entropy", TORCH_FN(refuse_binary_cross_entropy));
}

} // namespace
} // namespace tarry
