// Direct calls: operators that run at once on the real device, as in eager PyTorch, instead of being recorded.
//
// Recording pays off where a program computes the step. Where none does - it is still being made, or the steps are too small for one -
// the reference path runs each operator later, which takes longer than running it now. What a program calls between two reads or cuts
// is a *stretch*. When the reference path has computed enough stretches in a row, calls become direct, and stay so as long as
//   - every stretch is, by its operators, one that the reference path has computed: another one may deserve a program;
//   - no job in the background is done, whose program takes over (withdraw_references());
//   - not too many stretches have passed: other numbers, or other sizes, may deserve a program, too.
//
// A call is direct only if nothing is pending on its device and the contents of all its tensors are there. Any other call is recorded,
// and so is what follows it until the next cut. So calls may become direct, and cease to be, at any time.
#pragma once

#include <ATen/core/stack.h>

#include <c10/util/FunctionRef.h>

#include "core/graph.h"

namespace tarry {

// So many stretches in a row make calls direct (0: never), and so many later they are recorded again for a while.
void set_direct_calls(uint32_t after, uint32_t until);

void hold_direct_calls(bool on);  // everything is recorded meanwhile
void force_direct_calls(bool on); // for tests: on the current device, all that can be

bool may_call_directly(); // whether there are direct calls now, on some device
// False, and nothing is done, if the call has to be recorded.
bool call_directly(const Operator& op, torch::jit::Stack* stack);

// Several operators at once, on all these tensors: `update` gets the real tensors of each list. False, and nothing is done, if the calls
// of these operators have to be recorded.
struct DirectList {
  const std::vector<at::Tensor>* tensors;
  bool is_mutable;
};
bool update_directly(
    c10::ArrayRef<const Operator*> ops, c10::ArrayRef<DirectList> lists,
    c10::function_ref<void(std::vector<std::vector<at::Tensor>>&)> update);

// As wrap_real() (core/graph.h), for a caller that computes plainly for the device already.
at::Tensor wrap_plainly(DeviceState& state, at::Tensor real);

// A batch was computed, which the operators of this stretch had recorded. Under no lock.
void note_computed(DeviceState& state, uint64_t stretch, bool by_reference);
// A stretch ends, for this reason: if it has direct calls, decides whether those that follow are direct. Under no lock.
void judge_stretch(DeviceState& state, const char* reason);

// Whether a direct call of any thread is writing to the storage. Under the device's lock. Nothing but other direct calls may use it
// until that is done.
inline bool is_being_written(const TarryStorage& storage) {
  return C10_UNLIKELY(storage.direct_writers != 0);
}

} // namespace tarry
